//! Two catalogs of different dialects -> two that speak the same names: where one side is of a Megatron family, the other one
//! gets canonical names and shapes, by the tables of [`crate::names::families`].
//!
//! All of it is metadata: query, key and value are dealt out by group, gate and up put one behind the other, experts taken
//! apart, as views. Where both sides are of other dialects, their names stay.

mod heads;
mod join;

use std::collections::BTreeMap;

use crate::catalog::{Catalog, Entry, Problem, Section, Tied};
use crate::layout::Fact;
use crate::names::families::{FAMILIES, Family, Join, Place, Reader};
use crate::names::{Name, Naming, is_vocabulary};
use crate::tensor::LogicalTensor;

use heads::HeadCounts;

/// Facts from the command line that a side may need.
pub type Given<'a> = &'a [(String, Fact)];

/// Gives the side that speaks another dialect canonical names where the other side's are; `given` are the facts that the
/// command line supplies for each.
pub fn agree(a: &mut Catalog, b: &mut Catalog, given: [Given<'_>; 2]) {
    let is_canonical = [&*a, &*b].map(|side| side.origin.naming == Naming::Canonical);
    match is_canonical {
        [true, false] => translate(b, a, [given[1], given[0]]),
        [false, true] => translate(a, b, given),
        [true, true] | [false, false] => {}
    }
}

/// The facts about a model, the nearest first: supplied, its own, those of the other side.
struct Sources<'a> {
    given: [Given<'a>; 2],
    own: [Option<&'a BTreeMap<String, Fact>>; 3],
    other: Option<&'a BTreeMap<String, Fact>>,
}

impl<'a> Sources<'a> {
    fn of(side: &'a Catalog, other: &'a Catalog, given: [Given<'a>; 2]) -> Self {
        let map = |fact: Option<&'a Fact>| match fact {
            Some(Fact::Map(map)) => Some(map),
            _ => None,
        };
        let config = map(side.state.get("config"));
        let args = map(side.state.get("args"));
        let text = map(config.and_then(|config| config.get("text_config")));
        Self {
            given,
            own: [config.or(args), text, Some(&side.state)],
            other: map(other.state.get("args")),
        }
    }

    fn given(&self, name: &str) -> Option<&'a Fact> {
        let named = |facts: Given<'a>| facts.iter().rev().find(|(known, _)| known == name);
        self.given.into_iter().find_map(named).map(|(_, fact)| fact)
    }

    fn own(&self, names: &[&str]) -> Option<&'a Fact> {
        let maps = self.own.into_iter().flatten();
        let mut found = maps.flat_map(|map| names.iter().filter_map(|name| map.get(*name)));
        found.find(|fact| **fact != Fact::None)
    }

    fn others(&self, name: &str) -> Option<&'a Fact> {
        self.other?.get(name).filter(|fact| **fact != Fact::None)
    }
}

/// Gives one side canonical names and shapes; what no row knows is a problem and left out.
fn translate(side: &mut Catalog, other: &Catalog, given: [Given<'_>; 2]) {
    let tensors = std::mem::take(&mut side.tensors);
    let sources = Sources::of(side, other, given);
    let weights = || tensors.keys().map(Name::as_str).filter(|name| is_weight(name));
    let family = match family_of(side.origin.naming, &sources, weights) {
        Ok(family) => family,
        Err(message) => {
            side.problems.push(Problem {
                file: Some(side.origin.path.clone()),
                tensor: None,
                message,
            });
            side.tensors = tensors;
            return;
        }
    };
    let counts = HeadCounts::of(&sources);
    let mut translation = Translation {
        reader: family.reader(weights()),
        counts,
        wholes: BTreeMap::new(),
        problems: Vec::new(),
        kept: BTreeMap::new(),
    };
    let less_one = sources.others("apply_layernorm_1p") == Some(&Fact::Bool(true));
    if less_one && !family.are_norms_less_one {
        side.notes.push(
            "the other side keeps the weights of its norms less one (apply_layernorm_1p), this one does not".into(),
        );
    }
    for (name, entry) in tensors {
        translation.take(name, entry);
    }
    side.notes
        .push(format!("its names, those of the {} family, were made Megatron's", family.name));
    translation.finish(side);
}

fn is_weight(name: &str) -> bool {
    Section::of(name) == Section::Model
}

fn text_of(fact: Option<&Fact>) -> Option<&str> {
    match fact? {
        Fact::Text(text) => Some(text),
        _ => None,
    }
}

/// The family that the model says it is of; where nothing says, the one whose table knows all names.
fn family_of<'n, N: Iterator<Item = &'n str>>(
    naming: Naming,
    sources: &Sources<'_>,
    weights: impl Fn() -> N,
) -> Result<&'static Family, String> {
    let families = || FAMILIES.iter().filter(|family| family.naming == naming);
    let remedy = || {
        let types: Vec<&str> = families().flat_map(|family| family.model_types).copied().collect();
        let types = types.join(", ");
        format!(
            "where its names are like those of one of these, say so with --set model_type=...: {types}"
        )
    };
    let said = sources.given("model_type").or_else(|| sources.own(&["model_type"]));
    if let Some(said) = text_of(said) {
        let found = families().find(|family| family.model_types.contains(&said));
        return found.ok_or_else(|| {
            format!("no table makes Megatron's names of those of model_type {said:?}; {}", remedy())
        });
    }
    let unknown = |family: &'static Family| {
        let reader = family.reader(weights());
        weights().find(|name| reader.read(name).is_none())
    };
    let found = families().find(|family| weights().next().is_some() && unknown(family).is_none());
    found.ok_or_else(|| {
        format!("nothing says what model it is (config.json: model_type), and no table knows all its names; {}", remedy())
    })
}

/// A canonical tensor on its way: its parts in their places.
struct Whole {
    join: Join,
    /// Names of all parts in the dialect.
    names: Vec<String>,
    parts: Vec<Option<LogicalTensor>>,
}

struct Translation {
    reader: Reader,
    counts: HeadCounts,
    /// By what stands before the name of an optimizer's state, and by canonical name.
    wholes: BTreeMap<(String, String), Whole>,
    problems: Vec<Problem>,
    /// What has no name of a weight: the steps of an optimizer.
    kept: BTreeMap<Name, Entry>,
}

impl Translation {
    fn take(&mut self, name: Name, entry: Entry) {
        let (state, weight) = split_state(name.as_str());
        // A state that is one number for the whole parameter, such as its step, has no parts to be dealt out.
        if !state.is_empty() && entry.tensor.shape().is_empty() {
            self.kept.insert(name, entry);
            return;
        }
        let Some(Place { canonical, join, part, parts: names }) = self.reader.read(weight) else {
            let message = "no row of the table of its family makes a Megatron name of it, so it was not compared; leave it out with --exclude";
            self.problems.push(Problem::of_tensor(name.as_str(), &message));
            return;
        };
        let key = (state.to_owned(), canonical);
        // A further copy has the name of what it is a copy of.
        let key =
            if join == Join::Replica { (key.0, format!("{}{COPY}{weight}", key.1)) } else { key };
        let whole = self.wholes.entry(key).or_insert_with(|| Whole {
            join,
            parts: vec![None; names.len()],
            names,
        });
        let is_other = whole.join != join || whole.names.get(part).is_none_or(|own| own != weight);
        match whole.parts.get_mut(part).filter(|place| !is_other && place.is_none()) {
            Some(place) => *place = Some(entry.tensor),
            None => {
                let message = format!("is the same Megatron tensor as {}", whole.names.join(", "));
                self.problems.push(Problem::of_tensor(name.as_str(), &message));
            }
        }
    }

    fn finish(mut self, side: &mut Catalog) {
        side.problems.append(&mut self.problems);
        side.tensors = self.kept;
        let mut copies = Vec::new();
        for ((state, canonical), whole) in self.wholes {
            let canonical = match canonical.split_once(COPY) {
                Some((of, _)) => {
                    copies.push((Name::new(format!("{state}{of}")), whole));
                    continue;
                }
                None => canonical,
            };
            match join::joined(&whole, &self.counts) {
                Ok(tensors) => {
                    for (number, tensor) in tensors.into_iter().enumerate() {
                        let name = canonical.replace('*', &number.to_string());
                        let is_vocab = is_vocabulary(&name);
                        side.insert(
                            Name::new(format!("{state}{name}")),
                            Entry { tensor, is_vocab },
                        );
                    }
                }
                Err((part, message)) => {
                    let name =
                        format!("{state}{}", whole.names.get(part).cloned().unwrap_or_default());
                    let message = format!("{message}; so {canonical} was not compared");
                    side.problems.push(Problem::of_tensor(name, &message));
                }
            }
        }
        for (of, whole) in copies {
            let own = whole.names.into_iter().next().unwrap_or_default();
            let Some(tensor) = whole.parts.into_iter().flatten().next() else { continue };
            match side.tensors.get_mut(&of) {
                Some(entry) => {
                    if let Err(error) = entry.tensor.add_copy(tensor) {
                        side.problems.push(Problem::of_tensor(own, &error));
                    }
                }
                None => side.insert(of, Entry { tensor, is_vocab: true }),
            }
        }
        let renamed = |name: &Name| {
            let (state, weight) = split_state(name.as_str());
            let place = self.reader.read(weight).filter(|place| place.join == Join::Same)?;
            Some(Name::new(format!("{state}{}", place.canonical)))
        };
        let tied = std::mem::take(&mut side.tied).into_iter();
        let tied = tied.filter_map(|(name, Tied { to, copy })| {
            Some((renamed(&name)?, Tied { to: renamed(&to)?, copy }))
        });
        side.tied = tied.collect();
    }
}

/// Stands between a name and that of another copy of its tensor; in no name.
const COPY: char = '\n';

/// `optimizer.<state>.`, where it is in front, and the name of the weight.
fn split_state(name: &str) -> (&str, &str) {
    let weight = name.strip_prefix("optimizer.").and_then(|rest| rest.split_once('.'));
    match weight {
        Some((_, weight)) => name.split_at(name.len() - weight.len()),
        None => ("", name),
    }
}
