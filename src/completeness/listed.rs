//! Listed: tensors that a file of the checkpoint names, and that no file holds.

use std::collections::BTreeSet;

use crate::base::plain::PlainValue;
use crate::catalog::{Listing, Problem, StateKind};
use crate::names::Name;

use super::Present;

/// Names that are nowhere, but for those below what is said to be missing already: one problem for each that lists some.
pub(super) fn missing(present: &Present<'_>, problems: &[Problem]) -> Vec<Problem> {
    let mut told: BTreeSet<&str> =
        problems.iter().filter_map(|problem| problem.tensor.as_deref()).collect();
    let mut found = Vec::new();
    let of_groups = of_groups(present);
    for listing in present.catalog.listings.iter().chain([&of_groups]) {
        let is_lost = |name: &&str| !present.has(name);
        let lost: Vec<&str> =
            listing.names.iter().map(|name| name.as_str()).filter(is_lost).collect();
        // Otherwise it has other names for them.
        if !listing.is_certain && 2 * lost.len() > listing.names.len() {
            continue;
        }
        let is_new = |name: &&str| !ends(name).any(|end| told.contains(&name[..end]));
        let lost: Vec<&str> = lost.into_iter().filter(is_new).collect();
        let Some(first) = lost.first() else { continue };
        let more = match lost.len() {
            1 => String::new(),
            count => format!(", as is {} more", count - 1),
        };
        found.push(Problem::of_tensor(*first, format!("missing: {}{more}", listing.words)));
        told.extend(lost);
    }
    found
}

/// The parameters that groups of an optimizer have by their names (torch `distributed/checkpoint/state_dict.py`).
fn of_groups(present: &Present<'_>) -> Listing {
    let groups = present.catalog.state.of_kind(StateKind::OptimizerGroups);
    let params = groups.filter(|(key, _)| key.ends_with(".params"));
    let names = params.filter_map(|(_, entry)| match &entry.value {
        PlainValue::List(names) => Some(names.iter().filter_map(PlainValue::as_text)),
        _ => None,
    });
    let names = if present.weights.is_empty() {
        BTreeSet::new()
    } else {
        names.flatten().map(Name::new).collect()
    };
    Listing { words: "the optimizer knows it".to_owned(), names, is_certain: false }
}

/// The ends of a name and of the modules that it stands in.
fn ends(name: &str) -> impl Iterator<Item = usize> {
    name.match_indices('.').map(|(at, _)| at).chain([name.len()])
}
