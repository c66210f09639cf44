//! The fp32 masters of a checkpoint in the place of its weights.

use std::collections::BTreeSet;

use crate::catalog::{Catalog, Problem, Section};
use crate::names::{Name, is_vocabulary};

/// The names of masters are this and the name of their weight.
const MASTER: &str = "optimizer.fp32_param.";

/// Puts the masters of each side that has any in the place of its weights; a weight without one, as it is frozen, stays. The rest of
/// the optimizer is left out.
pub fn take_masters(a: &mut Catalog, b: &mut Catalog) {
    let has_any = [&mut *a, &mut *b].map(take_of);
    if has_any == [false; 2] {
        let message = "no fp32 masters here, nor on the other side, for --masters to compare";
        a.problems.push(Problem::of_file(&a.origin.path, message));
    }
}

/// Returns whether there are any.
fn take_of(side: &mut Catalog) -> bool {
    let is_of_model = |name: &Name| Section::of(name.as_str()) == Section::Model;
    let mut nameless = 0;
    let mut mastered = BTreeSet::new();
    let mut others = 0;
    let weights: BTreeSet<Name> =
        side.tensors.keys().filter(|name| is_of_model(name)).cloned().collect();
    for (name, mut entry) in std::mem::take(&mut side.tensors) {
        let Some(weight) = name.as_str().strip_prefix(MASTER).map(Name::new) else {
            match Section::of(name.as_str()) {
                Section::Model => drop(side.tensors.entry(name).or_insert(entry)),
                Section::Optimizer | Section::State => others += 1,
            }
            continue;
        };
        if !weights.is_empty() && !weights.contains(&weight) {
            nameless += 1;
            continue;
        }
        entry.is_vocab |= is_vocabulary(weight.as_str());
        mastered.insert(weight.clone());
        side.tensors.insert(weight, entry);
    }
    side.tied.retain(|name, _| is_of_model(name));
    // A weight that is stored twice has its master once.
    for tied in side.tied.values_mut().filter(|tied| mastered.contains(&tied.to)) {
        tied.copy = None;
    }
    side.positions.retain(is_of_model);
    side.origin.sections.retain(|section| *section != Section::Optimizer);
    if others > 0 {
        side.origin.unread.insert(Section::Optimizer, Some(others));
    }
    let masters = mastered.len();
    if masters > 0 {
        let kept = side.tensors.len() - masters;
        let rest = match kept {
            0 => String::new(),
            _ => format!("; weights without one: {kept}"),
        };
        side.notes.push(format!("fp32 masters in the place of weights: {masters}{rest}"));
    }
    if nameless > 0 {
        side.notes.push(format!(
            "fp32 masters that go by no name of a weight, and were left out: {nameless}"
        ));
    }
    masters > 0
}
