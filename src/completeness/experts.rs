//! Experts: all of them in each layer that has any, each with the same names.

use std::collections::{BTreeMap, BTreeSet};

use crate::catalog::Problem;

use super::Present;
use super::announced::Announced;
use super::kin::lacks;
use super::numbers;
use super::stacks::Stack;

/// A list of experts and the numbers that none of it has.
type Gaps<'n> = (&'n str, Vec<(u64, u64)>);

/// Experts, and names of experts, that are missing.
pub(super) fn missing(present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let of_stack = |stack| {
        let mut problems = absent(stack, announced);
        problems.extend(irregular(stack));
        problems
    };
    present.stacks.iter().flat_map(of_stack).collect()
}

/// Numbers that no expert has. Layers that lack the same ones are told together.
fn absent(stack: &Stack<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let said = announced.experts(stack.path);
    let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
    for (list, experts) in stack.layers.values().flat_map(|layer| &layer.experts) {
        let end = ends.entry(list).or_default();
        let last = experts.last_key_value().map_or(0, |(last, _)| last.saturating_add(1));
        *end = last.max(*end);
    }
    let mut alike: BTreeMap<Gaps<'_>, BTreeSet<u64>> = BTreeMap::new();
    for (number, layer) in &stack.layers {
        for (list, experts) in &layer.experts {
            let most = ends.get(list).copied().unwrap_or(0);
            let end = said.as_ref().map_or(most, |said| said.value.max(most));
            let gaps = numbers::gaps(experts.keys(), end);
            if !gaps.is_empty() {
                alike.entry((list, gaps)).or_default().insert(*number);
            }
        }
    }
    let problem = |((list, gaps), layers): (Gaps<'_>, BTreeSet<u64>)| {
        let most = ends.get(list).copied().unwrap_or(0);
        let source = match &said {
            Some(said) if said.value >= most => said.text.clone(),
            _ => format!("they go up to {}", most.saturating_sub(1)),
        };
        let (text, all) = (numbers::text(&gaps), list.trim_end_matches(['.', '_']));
        let (layers_text, first) =
            (numbers::text_of(&layers), layers.first().copied().unwrap_or(0));
        match (layers.len(), &gaps[..]) {
            (1, [(one, last)]) if one == last => Problem::of_tensor(
                format!("{}{first}.{list}{one}", stack.path),
                format!("expert {one} is missing: {source}"),
            ),
            (1, _) => Problem::of_tensor(
                format!("{}{first}.{all}", stack.path),
                format!("experts {text} are missing: {source}"),
            ),
            _ => Problem::of_tensor(
                stack.list(),
                format!("experts {text} of {all} are missing in layers {layers_text}: {source}"),
            ),
        }
    };
    alike.into_iter().map(problem).collect()
}

/// Experts that lack names which the others of their layer have.
fn irregular(stack: &Stack<'_>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, layer) in &stack.layers {
        for (list, experts) in &layer.experts {
            let members: Vec<(u64, &BTreeSet<&str>)> =
                experts.iter().map(|(expert, names)| (*expert, names)).collect();
            for lack in lacks(&members, true) {
                let names: Vec<&str> = lack.names.iter().copied().collect();
                let experts = numbers::text_of(&lack.members);
                problems.push(match lack.members.first() {
                    Some(expert) if lack.members.len() == 1 && names.len() == 1 => {
                        let name = format!("{}{number}.{list}{expert}.{}", stack.path, names[0]);
                        Problem::of_tensor(
                            name,
                            format!("missing: {} other experts have it", lack.kin),
                        )
                    }
                    _ => Problem::of_tensor(
                        format!("{}{number}.{}", stack.path, list.trim_end_matches(['.', '_'])),
                        format!(
                            "experts {experts} lack {}, which {} others have",
                            names.join(", "),
                            lack.kin
                        ),
                    ),
                });
            }
        }
    }
    problems
}
