//! What a checkpoint says of its run: the attributes of `args` as plain facts.

use std::collections::BTreeMap;

use crate::layout::Fact;
use crate::limits::LIMITS;
use crate::torch::{TorchFile, Value, ValueId, Values};

use super::walk::Bounds;

/// Reads a namespace, or a plain dict where a converter wrote one.
pub(super) fn facts_of(
    torch: &TorchFile,
    args: ValueId,
    bounds: &mut Bounds,
) -> Option<BTreeMap<String, Fact>> {
    let values = torch.values();
    let mut reader = Reader { values, left: LIMITS.facts };
    let facts = match values.mapping(args) {
        Some(items) => reader.facts(items),
        None => reader.facts(values.attributes(args)?),
    };
    if facts.is_none() {
        bounds.problem("", "its args are longer than those of any run");
    }
    facts
}

struct Reader<'a> {
    values: &'a Values,
    left: usize,
}

impl Reader<'_> {
    /// `None` where they are too long.
    fn facts(
        &mut self,
        items: impl Iterator<Item = (ValueId, ValueId)>,
    ) -> Option<BTreeMap<String, Fact>> {
        let mut facts = BTreeMap::new();
        for (key, value) in items {
            if let Some(name) = self.values.as_str(key) {
                self.spend(name.len())?;
                facts.insert(name.to_owned(), self.fact(value, 0)?);
            }
        }
        Some(facts)
    }

    fn fact(&mut self, id: ValueId, depth: usize) -> Option<Fact> {
        /// Lists of `args` are short and flat: stages, layers.
        const DEEPEST: usize = 3;
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
            _ => match self.values.sequence(id) {
                Some(members) if depth < DEEPEST => {
                    let members = members.map(|id| self.fact(id, depth + 1));
                    Fact::List(members.collect::<Option<_>>()?)
                }
                _ => Fact::Opaque(self.values.class_name(id).unwrap_or_default()),
            },
        })
    }

    fn spend(&mut self, bytes: usize) -> Option<()> {
        self.left = self.left.checked_sub(bytes)?;
        Some(())
    }
}
