//! A user's new names for the tensors of a side.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::side::Side;
use crate::catalog::{Catalog, Problem, Tied};
use crate::names::renames::Renames;
use crate::names::{Name, is_vocabulary};

/// The number of tensors that each rule renamed on each side.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RenameCounts(Vec<[usize; 2]>);

impl RenameCounts {
    /// None yet, for each of these rules.
    pub(super) fn of(renames: &Renames) -> Self {
        Self(vec![[0; 2]; renames.rules().len()])
    }

    /// The tensors that a rule renamed on each side.
    #[must_use]
    pub fn by(&self, rule: usize) -> [usize; 2] {
        self.0.get(rule).copied().unwrap_or_default()
    }
}

/// Gives the tensors of a side their new names, by the rules that have renamed nothing `before`. A name that is new is not
/// renamed again. Tensors that come to the same name are a problem, and left out.
pub(super) fn rename(
    side: Side,
    catalog: &mut Catalog,
    renames: &Renames,
    before: &RenameCounts,
    counts: &mut RenameCounts,
) {
    let is_unused = |rule| before.by(rule) == [0; 2];
    if !(0..before.0.len()).any(is_unused) {
        return;
    }
    let names: Vec<Name> = catalog.tensors.keys().chain(catalog.tied.keys()).cloned().collect();
    let mut new_names: BTreeMap<Name, Name> = BTreeMap::new();
    for name in names.iter().filter(|name| !catalog.renamed.contains_key(*name)) {
        let found = renames.rename(side, name.as_str(), is_unused);
        if let Some((rule, new)) = found {
            counts.0[rule][side] += 1;
            new_names.insert(name.clone(), Name::new(new));
        }
    }
    if new_names.is_empty() {
        return;
    }
    let new_name = |name: &Name| new_names.get(name).unwrap_or(name).clone();
    let mut by_new: BTreeMap<Name, Vec<&Name>> = BTreeMap::new();
    for name in &names {
        by_new.entry(new_name(name)).or_default().push(name);
    }
    let mut lost = BTreeSet::new();
    for (new, old) in by_new.iter().filter(|(_, old)| old.len() > 1) {
        let all: Vec<String> = old.iter().map(ToString::to_string).collect();
        let message = format!("--map gives this name to {}", listed(&all));
        catalog.problems.push(Problem::of_tensor(new.as_str(), message).with_lost(all));
        lost.extend(old.iter().map(|name| (*name).clone()));
    }
    for (name, mut entry) in std::mem::take(&mut catalog.tensors) {
        if !lost.contains(&name) {
            let new = new_name(&name);
            entry.is_vocab |= new != name && is_vocabulary(new.as_str());
            catalog.tensors.insert(new, entry);
        }
    }
    for (name, Tied { to, copy }) in std::mem::take(&mut catalog.tied) {
        if !lost.contains(&name) {
            catalog.tied.insert(new_name(&name), Tied { to: new_name(&to), copy });
        }
    }
    let positions = std::mem::take(&mut catalog.positions).into_iter();
    catalog.positions =
        positions.filter(|name| !lost.contains(name)).map(|name| new_name(&name)).collect();
    let kept = new_names.into_iter().filter(|(old, _)| !lost.contains(old));
    catalog.renamed.extend(kept.map(|(old, new)| (new, old)));
}

/// `x and y`, or `x, y and 3 more`.
fn listed(names: &[String]) -> String {
    match names {
        [one, other] => format!("{one} and {other}"),
        [one, other, rest @ ..] => format!("{one}, {other} and {} more", rest.len()),
        _ => names.concat(),
    }
}
