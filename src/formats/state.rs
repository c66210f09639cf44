//! What a checkpoint says of its run, as plain values: `args`, schedulers, random states, parameter groups.

use std::collections::BTreeMap;

use crate::layout::Fact;
use crate::limits::LIMITS;
use crate::torch::{TorchFile, Value, ValueId, Values};

use super::walk::Bounds;

/// Reads the attributes of a namespace, or a plain dict where a converter wrote one.
pub(super) fn facts_of(
    torch: &TorchFile,
    args: ValueId,
    bounds: &mut Bounds,
) -> Option<BTreeMap<String, Fact>> {
    let values = torch.values();
    let mut reader = Reader { values, left: LIMITS.facts, skips: &[] };
    let facts = match values.mapping(args) {
        Some(items) => reader.facts(items, 0),
        None => reader.facts(values.attributes(args)?, 0),
    };
    if facts.is_none() {
        bounds.problem("", "its args are longer than those of any run");
    }
    facts
}

/// Reads the entries of a dict that are state of the run.
pub(super) fn state_at(
    torch: &TorchFile,
    dict: ValueId,
    is_state: impl Fn(&str) -> bool,
) -> BTreeMap<String, Fact> {
    /// Entries at the top of a file: far more than any has.
    const ENTRIES: usize = 256;
    let values = torch.values();
    let entries = values.mapping(dict).into_iter().flatten();
    let named = entries.filter_map(|(key, value)| Some((values.as_str(key)?, value)));
    named
        .filter(|(key, _)| is_state(key) && key.len() <= LIMITS.name)
        .take(ENTRIES)
        .map(|(key, value)| (key.to_owned(), state_of(torch, value)))
        .collect()
}

/// Reads one value of the run's state; what is longer than any such value is left out as opaque.
pub(super) fn state_of(torch: &TorchFile, id: ValueId) -> Fact {
    state_without(torch, id, &[])
}

/// Reads one value of the run's state, all that stands under one of these keys left out, however deep.
pub(super) fn state_without(
    torch: &TorchFile,
    id: ValueId,
    skips: &'static [&'static str],
) -> Fact {
    /// Of each value at the top: some hundred parameter groups, not what a hostile file makes of a few.
    const BYTES: usize = 1 << 20;
    let too_long = || Fact::Opaque("longer than any such state".to_owned());
    Reader { values: torch.values(), left: BYTES, skips }.fact(id, 0).unwrap_or_else(too_long)
}

struct Reader<'a> {
    values: &'a Values,
    left: usize,
    skips: &'static [&'static str],
}

impl Reader<'_> {
    /// `None` where they are too long.
    fn facts(
        &mut self,
        items: impl Iterator<Item = (ValueId, ValueId)>,
        depth: usize,
    ) -> Option<BTreeMap<String, Fact>> {
        let mut facts = BTreeMap::new();
        for (key, value) in items {
            let name = match self.values.get(key) {
                Value::Str(name) => name.to_owned(),
                Value::Int(number) => number.to_string(),
                _ => continue,
            };
            self.spend(name.len())?;
            if self.skips.contains(&name.as_str()) {
                continue;
            }
            facts.insert(name, self.fact(value, depth)?);
        }
        Some(facts)
    }

    fn fact(&mut self, id: ValueId, depth: usize) -> Option<Fact> {
        /// Lists of `args` are short and flat: stages, layers; optimizers nest groups in lists in dicts.
        const DEEPEST: usize = 8;
        self.spend(size_of::<Fact>())?;
        Some(match self.values.get(id) {
            Value::None => Fact::None,
            Value::Bool(value) => Fact::Bool(value),
            Value::Int(value) => Fact::Int(value),
            Value::Float(value) => Fact::Float(value),
            Value::Str(text) => {
                self.spend(text.len())?;
                Fact::Text(text.to_owned())
            }
            _ if depth >= DEEPEST => self.opaque(id),
            _ => {
                if let Some(members) = self.values.sequence(id) {
                    let members = members.map(|id| self.fact(id, depth + 1));
                    Fact::List(members.collect::<Option<_>>()?)
                } else if let Some(items) = self.values.mapping(id) {
                    Fact::Map(self.facts(items, depth + 1)?)
                } else {
                    self.opaque(id)
                }
            }
        })
    }

    fn opaque(&self, id: ValueId) -> Fact {
        Fact::Opaque(self.values.class_name(id).unwrap_or_default())
    }

    fn spend(&mut self, bytes: usize) -> Option<()> {
        self.left = self.left.checked_sub(bytes)?;
        Some(())
    }
}
