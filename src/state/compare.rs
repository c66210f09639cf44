//! Two kept states -> what differs, and the tensors in them that are still to be compared.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::side::Side;
use crate::tensor::LogicalTensor;

use super::groups::{self, Groups};
use super::{KeptState, Said, StateValue};

/// A difference between two states.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    /// The key path.
    pub path: String,
    /// The parts of the checkpoint, or the parameters of the group, where it is not all of them.
    pub place: Option<String>,
    /// The value of each side as text; `None` where there is none.
    pub values: [Option<String>; 2],
    /// The way in which they differ.
    pub kind: DifferenceKind,
}

/// The way in which two states differ under a key path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum DifferenceKind {
    /// Other values.
    Value,
    /// Only this side has the key.
    OnlyIn(Side),
    /// Tensors with other elements.
    Elements {
        /// Number of elements that differ.
        differing: u64,
        /// Number of elements.
        of: u64,
    },
    /// They are said part by part, and the two sides have other parts: they cannot be compared.
    PartsDiffer,
}

impl DifferenceKind {
    pub(super) fn of(values: &[Option<String>; 2]) -> Self {
        match values {
            [Some(_), None] => Self::OnlyIn(Side::A),
            [None, Some(_)] => Self::OnlyIn(Side::B),
            _ => Self::Value,
        }
    }
}

/// Two tensors under one key path.
#[derive(Debug, Clone)]
pub struct TensorPair {
    /// The key path.
    pub path: String,
    /// The part of the checkpoint, where there are several.
    pub place: Option<String>,
    /// The tensor of each side.
    pub sides: [Arc<LogicalTensor>; 2],
}

/// What was found between two states.
#[derive(Debug, Default)]
pub struct Found {
    /// Number of key paths that were looked at; of parameter groups, of options.
    pub compared: usize,
    /// The differences, but for tensors.
    pub differences: Vec<Difference>,
    /// The tensors that are to be compared.
    pub tensors: Vec<TensorPair>,
}

/// Compares two states, but for the elements of tensors.
#[must_use]
pub fn compare(sides: [&KeptState; 2]) -> Found {
    let mut found = Found::default();
    let groups = sides.map(Groups::of);
    found.compared += groups::compare(&groups, &mut found.differences);
    let mut others = BTreeMap::new();
    let is_group = |path: &str, said: &[Said]| {
        groups::place_of(path).is_some()
            && !said.iter().any(|said| matches!(said.value, StateValue::Tensor(_)))
    };
    let paths: BTreeSet<&str> =
        sides.iter().flat_map(|side| side.iter()).map(|(path, _)| path).collect();
    for path in paths {
        let [a, b] = sides.map(|side| side.entries.get(path).map_or(&[][..], Vec::as_slice));
        if is_group(path, a) && is_group(path, b) {
            continue;
        }
        found.compared += 1;
        let [a, b] = [Values { state: sides[0], said: a }, Values { state: sides[1], said: b }];
        found.compare(path, [a, b], &mut others);
    }
    for (path, counts) in others {
        let values = counts.map(|count: usize| {
            Some(if count == 1 { "1 part".to_owned() } else { format!("{count} parts") })
        });
        let kind = DifferenceKind::PartsDiffer;
        found.differences.push(Difference { path, place: None, values, kind });
    }
    found
}

/// What one side says under a key path.
#[derive(Clone, Copy)]
struct Values<'a> {
    state: &'a KeptState,
    said: &'a [Said],
}

impl<'a> Values<'a> {
    fn parts(self) -> BTreeMap<&'a str, Vec<&'a StateValue>> {
        let mut parts: BTreeMap<&str, Vec<&StateValue>> = BTreeMap::new();
        for said in self.said {
            for part in &said.by {
                parts.entry(self.state.part_name(*part)).or_default().push(&said.value);
            }
        }
        parts
    }

    fn text(self) -> Option<String> {
        joined_texts(self.said.iter().map(|said| &said.value))
    }
}

/// Values that are shown of those that parts have of their own.
const SHOWN: usize = 4;

/// The texts of different values; `None` where there are none.
pub(super) fn joined_texts<'a>(values: impl Iterator<Item = &'a StateValue>) -> Option<String> {
    let texts: BTreeSet<String> = values.map(StateValue::text).collect();
    let count = texts.len();
    let mut shown: Vec<String> = texts.into_iter().take(SHOWN).collect();
    if count > SHOWN {
        shown.push(format!("{} more", count - SHOWN));
    }
    (!shown.is_empty()).then(|| shown.join(" | "))
}

impl Found {
    fn compare(
        &mut self,
        path: &str,
        sides: [Values<'_>; 2],
        others: &mut BTreeMap<String, [usize; 2]>,
    ) {
        let texts = || sides.map(Values::text);
        let [a, b] = sides;
        if a.said.is_empty() || b.said.is_empty() {
            let values = texts();
            let kind = DifferenceKind::of(&values);
            return self.differences.push(Difference {
                path: path.to_owned(),
                place: None,
                values,
                kind,
            });
        }
        // Nearly always: all parts of both sides say the same.
        let is_settled =
            |said: &[Said]| said.len() == 1 && !matches!(said[0].value, StateValue::Tensor(_));
        let random = random_states(path);
        if is_settled(a.said) && is_settled(b.said) && random.is_none() {
            if !a.said[0].value.is_same(&b.said[0].value) {
                let kind = DifferenceKind::Value;
                self.differences.push(Difference {
                    path: path.to_owned(),
                    place: None,
                    values: texts(),
                    kind,
                });
            }
            return;
        }
        let parts = sides.map(Values::parts);
        let [of_a, of_b] = &parts;
        let is_one_each = of_a.len() == 1 && of_b.len() == 1;
        if is_one_each || of_a.keys().eq(of_b.keys()) {
            let mut differing: BTreeMap<[Option<String>; 2], Vec<&str>> = BTreeMap::new();
            for ((part, a), b) in of_a.iter().zip(of_b.values()) {
                let place = (of_a.len() > 1).then_some(*part);
                self.compare_values(path, place, [a, b], |values| {
                    differing.entry(values).or_default().push(part);
                });
            }
            for (values, parts) in differing {
                let place = match parts[..] {
                    _ if parts.len() == of_a.len() => None,
                    [one] => Some(one.to_owned()),
                    [first, ..] => Some(format!("{} parts, the first is {first}", parts.len())),
                    [] => None,
                };
                let kind = DifferenceKind::of(&values);
                self.differences.push(Difference { path: path.to_owned(), place, values, kind });
            }
            return;
        }
        if let Some(path) = random {
            let counts = others.entry(path.to_owned()).or_default();
            *counts = [of_a.len().max(counts[0]), of_b.len().max(counts[1])];
            return;
        }
        let tensors = |side: Values<'_>| {
            side.said.iter().any(|said| matches!(said.value, StateValue::Tensor(_)))
        };
        match [a.said, b.said] {
            [[one], [other]] => {
                let mut differing = Vec::new();
                self.compare_values(path, None, [&[&one.value], &[&other.value]], |values| {
                    differing.push(values);
                });
                for values in differing {
                    let kind = DifferenceKind::of(&values);
                    self.differences.push(Difference {
                        path: path.to_owned(),
                        place: None,
                        values,
                        kind,
                    });
                }
            }
            _ if tensors(a) || tensors(b) => {
                let counts = others.entry(path.to_owned()).or_default();
                *counts = [of_a.len().max(counts[0]), of_b.len().max(counts[1])];
            }
            _ => {
                let is_in = |value: &StateValue, side: &[Said]| {
                    side.iter().any(|said| said.value.is_same(value))
                };
                let are_in = |side: &[Said], other: &[Said]| {
                    side.iter().all(|said| is_in(&said.value, other))
                };
                if !(are_in(a.said, b.said) && are_in(b.said, a.said)) {
                    let kind = DifferenceKind::Value;
                    self.differences.push(Difference {
                        path: path.to_owned(),
                        place: None,
                        values: texts(),
                        kind,
                    });
                }
            }
        }
    }

    /// Compares what one part says on both sides; tensors are kept for later.
    fn compare_values(
        &mut self,
        path: &str,
        place: Option<&str>,
        [a, b]: [&[&StateValue]; 2],
        mut differ: impl FnMut([Option<String>; 2]),
    ) {
        let most = a.len().max(b.len());
        for at in 0..most {
            match [a.get(at), b.get(at)] {
                [Some(StateValue::Tensor(a)), Some(StateValue::Tensor(b))] => {
                    let sides = [Arc::clone(a), Arc::clone(b)];
                    self.tensors.push(TensorPair {
                        path: path.to_owned(),
                        place: place.map(str::to_owned),
                        sides,
                    });
                }
                [Some(a), Some(b)] if a.is_same(b) => {}
                values => differ(values.map(|value| value.map(|value| value.text()))),
            }
        }
    }
}

/// The key path of the random states that this one is in.
fn random_states(path: &str) -> Option<&str> {
    let mut end = 0;
    for (at, component) in path.split('.').enumerate() {
        end += component.len() + usize::from(at > 0);
        // What the arguments say of random numbers is the same for all ranks.
        if at == 0 && component == "args" {
            return None;
        }
        let is_random = component == "rng"
            || component.starts_with("rng_")
            || component.ends_with("_rng_state")
            || component.starts_with("random_states");
        if is_random {
            return path.get(..end);
        }
    }
    None
}
