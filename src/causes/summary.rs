//! Causes of single tensors -> lines: the same cause of the same module in all layers is one.

use std::collections::BTreeMap;

use crate::base::side::Side;
use crate::compare::matrix;
use crate::names::Name;
use crate::names::place::Place;

use super::moved::{Move, put_together};
use super::orders::Order;
use super::role::Role;
use super::search::{Direction, TensorCause};
use super::{Cause, Compared, factors};

/// What a tensor is, without its layer and its expert.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Subject<'n> {
    state: &'n str,
    list: &'n str,
    module: String,
    parameter: &'n str,
}

impl<'n> Subject<'n> {
    fn of(name: &'n str) -> Self {
        let Place { state, list, module, parameter, .. } = Place::of(name);
        Self { state, list, module: module.into_owned(), parameter }
    }

    fn words(&self, has_lists: bool) -> String {
        let state =
            if self.state.is_empty() { String::new() } else { format!("optimizer.{}", self.state) };
        let list = if has_lists { self.list } else { "" };
        let parts = [&*state, list, &*self.module, self.parameter];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        parts.join(".")
    }
}

/// Puts the causes of all tensors together.
pub(super) fn summary(compared: Compared<'_>, causes: &BTreeMap<usize, TensorCause>) -> Vec<Cause> {
    let name = |place: usize| compared.pairs[place].name.as_str();
    let mut counts: BTreeMap<Subject<'_>, usize> = BTreeMap::new();
    for pair in compared.pairs {
        *counts.entry(Subject::of(pair.name.as_str())).or_default() += 1;
    }
    let lists = counts.keys().map(|subject| subject.list).filter(|list| !list.is_empty());
    let has_lists = lists.collect::<std::collections::BTreeSet<_>>().len() > 1;
    let mut groups: BTreeMap<(&'static str, String, Subject<'_>), Vec<usize>> = BTreeMap::new();
    let mut examples: BTreeMap<usize, String> = BTreeMap::new();
    let mut moves = Vec::new();
    for (&place, cause) in causes {
        if let TensorCause::Moved(to) = cause {
            moves.push((place, *to));
            continue;
        }
        let Words { kind, text, example } = words(compared, place, cause);
        examples.extend(example.map(|example| (place, example)));
        groups.entry((kind, text, Subject::of(name(place)))).or_default().push(place);
    }
    let mut found: Vec<(usize, Cause)> = Vec::new();
    for ((kind, mut text, subject), places) in groups {
        let Some(first) = places.first() else { continue };
        if let Some(example) = examples.get(first) {
            let of_first = if places.len() > 1 { "; the first: " } else { ": " };
            text.push_str(of_first);
            text.push_str(example);
        }
        let cause = Cause {
            kind,
            subject: subject.words(has_lists),
            text,
            tensors: places.iter().map(|place| compared.pairs[*place].name.clone()).collect(),
            of: counts.get(&subject).copied(),
        };
        found.push((*first, cause));
    }
    let named: Vec<(&str, &str)> = moves.iter().map(|(a, b)| (name(*a), name(*b))).collect();
    for Move { kind, text, of } in put_together(&named) {
        let places: Vec<usize> = of.iter().map(|number| moves[*number].0).collect();
        let tensors: Vec<Name> =
            places.iter().map(|place| compared.pairs[*place].name.clone()).collect();
        let first = places.first().copied().unwrap_or_default();
        found.push((first, Cause { kind, subject: String::new(), text, tensors, of: None }));
    }
    found.sort_by(|(one, cause), (other, of_other)| {
        one.cmp(other).then_with(|| cause.text.cmp(&of_other.text))
    });
    found.into_iter().map(|(_, cause)| cause).collect()
}

/// A cause in words.
struct Words {
    kind: &'static str,
    text: String,
    /// What is not the same in every layer.
    example: Option<String>,
}

fn words(compared: Compared<'_>, place: usize, cause: &TensorCause) -> Words {
    let other = |side: Side| if side == Side::A { Side::B } else { Side::A };
    let plain = |kind, text: String| Words { kind, text, example: None };
    match cause {
        TensorCause::Moved(_) => plain("moved", String::new()),
        TensorCause::Order(order, direction) => {
            let rows = if *direction == Direction::Rows { "rows" } else { "columns" };
            match order {
                Order::Other { .. } => Words {
                    kind: "order",
                    text: format!("the same {rows} in another order"),
                    example: Some(order.to_string()),
                },
                Order::Rotated { .. } => plain("order", format!("{rows} are {order}")),
                Order::Halves { are_gated: false }
                | Order::Alternating { are_gated: false, .. } => {
                    plain("order", format!("{rows}: {order}"))
                }
                _ => plain("order", order.to_string()),
            }
        }
        TensorCause::Transposed => plain("transposed", "transposed".to_owned()),
        TensorCause::Zero(side) => plain("zeros", format!("all zeros in {side}")),
        TensorCause::Rounded(side, dtype) => {
            plain("rounded", format!("{side} is {} rounded to {dtype}", other(*side)))
        }
        TensorCause::Plus(number) => {
            let sign = if *number > 0.0 { "+" } else { "-" };
            plain("offset", format!("a is b {sign} 1 (zero-centred gamma on one side)"))
        }
        TensorCause::Times(factor) => {
            let pair = &compared.pairs[place];
            let own = Place::of(pair.name.as_str());
            let [_, width] = matrix(pair.sides[Side::B].shape());
            let role = Role::of(&own.module, own.parameter);
            let meaning = factors::meaning(*factor, role, width, compared.facts);
            let meaning = meaning.map(|meaning| format!(" ({meaning})")).unwrap_or_default();
            plain("factor", format!("a is {} times b{meaning}", factor))
        }
        TensorCause::Overflow(side) => plain(
            "overflow",
            format!("Inf in {side} where {} is beyond the range of float16", other(*side)),
        ),
        TensorCause::Uninitialised(side) => plain(
            "uninitialised",
            format!("{side} holds memory that nobody wrote: magnitudes without any order"),
        ),
        TensorCause::Extent(text) => plain("extent", text.clone()),
    }
}
