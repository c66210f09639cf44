//! Tensors at another place: layers, experts and modules that were moved or swapped. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::names::place::Place;

/// Tensors that are at another place, and words for that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Move {
    /// The kind, by the word that documents have.
    pub kind: &'static str,
    /// Words for it.
    pub text: String,
    /// Numbers of the moves.
    pub of: Vec<usize>,
}

/// The step from one layer to another, or from one expert of a layer to another one of it, that a move is.
pub(super) fn step<'n>(in_a: &'n str, in_b: &'n str) -> Option<(&'n str, [Option<u64>; 4])> {
    let (a, b) = (Place::of(in_a), Place::of(in_b));
    let is_one_part = a.state == b.state
        && a.list == b.list
        && a.module == b.module
        && a.parameter == b.parameter
        && (a.layer == b.layer) != (a.expert == b.expert);
    // All experts of a layer go with it.
    let experts = if a.layer == b.layer { [a.expert, b.expert] } else { [None; 2] };
    is_one_part.then_some((a.list, [a.layer, b.layer, experts[0], experts[1]]))
}

/// The place of a tensor, without its layer and its expert.
type Part<'n> = (&'n str, String, &'n str);

/// A number that is another one on the other side.
type Step = (u64, u64);

/// Puts moves together; each is the name in a and the name in b of the same values.
pub(super) fn put_together(moves: &[(&str, &str)]) -> Vec<Move> {
    let mut layers: BTreeMap<&str, BTreeMap<Step, Vec<usize>>> = BTreeMap::new();
    let mut experts: BTreeMap<(&str, &str), BTreeMap<Option<u64>, Steps>> = BTreeMap::new();
    let mut modules: BTreeMap<[Part<'_>; 2], Vec<usize>> = BTreeMap::new();
    let mut others = Vec::new();
    for (number, (in_a, in_b)) in moves.iter().enumerate() {
        let (a, b) = (Place::of(in_a), Place::of(in_b));
        let parts = [&a, &b].map(|place| (place.state, place.module.to_string(), place.parameter));
        let is_one_part = parts[0] == parts[1] && a.list == b.list;
        match (is_one_part, a.layer == b.layer, a.expert == b.expert) {
            (true, false, true) => {
                if let (Some(from), Some(to)) = (a.layer, b.layer) {
                    layers.entry(a.list).or_default().entry((from, to)).or_default().push(number);
                    continue;
                }
            }
            (true, true, false) => {
                if let (Some(from), Some(to)) = (a.expert, b.expert) {
                    let of_list = experts.entry((a.state, a.list)).or_default();
                    let steps = of_list.entry(a.layer).or_default();
                    steps.entry((from, to)).or_default().push(number);
                    continue;
                }
            }
            (false, true, true) if a.list == b.list && a.layer.is_some() => {
                modules.entry(parts).or_default().push(number);
                continue;
            }
            _ => {}
        }
        others.push(Move {
            kind: "moved",
            text: format!("{in_a} of a is {in_b} of b"),
            of: vec![number],
        });
    }
    let has_lists = layers.len() > 1;
    let mut found: Vec<Move> = Vec::new();
    for (list, steps) in layers {
        let of = if has_lists { format!("{list}: ") } else { String::new() };
        let texts = texts(steps, ["layer", "layers"]);
        found.extend(texts.into_iter().map(|(text, numbers)| Move {
            kind: "layers moved",
            text: format!("{of}{text}"),
            of: numbers,
        }));
    }
    let mut of_experts: BTreeMap<String, Vec<Vec<usize>>> = BTreeMap::new();
    for (_, of_layers) in experts {
        for (_, steps) in of_layers {
            for (text, numbers) in texts(steps, ["expert", "experts"]) {
                of_experts.entry(text).or_default().push(numbers);
            }
        }
    }
    found.extend(of_experts.into_iter().map(|(text, of_layers)| {
        let layers = of_layers.len();
        let text = if layers > 1 { format!("in {layers} layers, {text}") } else { text };
        Move { kind: "experts moved", text, of: of_layers.concat() }
    }));
    found.extend(swaps(modules));
    found.extend(others);
    for one in &mut found {
        one.of.sort_unstable();
    }
    found.sort_by(|one, other| one.of.first().cmp(&other.of.first()));
    found
}

type Steps = BTreeMap<Step, Vec<usize>>;

/// Words for what numbers of a are in b: all by as many further on, pairs that are swapped, or one by one.
fn texts(mut steps: Steps, [one, many]: [&str; 2]) -> Vec<(String, Vec<usize>)> {
    let mut found = Vec::new();
    let numbers: BTreeSet<u64> = steps.keys().map(|(from, _)| *from).collect();
    let targets: BTreeSet<u64> = steps.keys().map(|(_, to)| *to).collect();
    if numbers.len() == steps.len() && targets.len() == steps.len() && steps.len() > 2 {
        let count = numbers.last().map_or(0, |last| last + 1);
        let by = steps
            .keys()
            .next()
            .map_or(0, |(from, to)| (to + count).wrapping_sub(*from) % count.max(1));
        let is_rotated = numbers == targets
            && numbers.len() as u64 == count
            && steps.keys().all(|(from, to)| (from + by) % count == *to);
        if is_rotated && by != 0 {
            let text = format!("{many} are rotated by {by}: {one} 0 of a is {one} {by} of b");
            return vec![(text, steps.into_values().flatten().collect())];
        }
    }
    // Runs that are as many further on.
    let mut runs: Vec<(Vec<Step>, i128)> = Vec::new();
    let is_swapped = |(from, to): &Step| steps.contains_key(&(*to, *from));
    for step in steps.keys().filter(|step| !is_swapped(step)) {
        let by = i128::from(step.1) - i128::from(step.0);
        match runs.last_mut() {
            Some((run, of_run))
                if *of_run == by && run.last().is_some_and(|last| last.0 + 1 == step.0) =>
            {
                run.push(*step);
            }
            _ => runs.push((vec![*step], by)),
        }
    }
    let swapped: Vec<Step> =
        steps.keys().filter(|step| is_swapped(step) && step.0 < step.1).copied().collect();
    let mut take = |keys: &[Step]| -> Vec<usize> {
        keys.iter().filter_map(|key| steps.remove(key)).flatten().collect()
    };
    for (from, to) in swapped {
        found
            .push((format!("{many} {from} and {to} are swapped"), take(&[(from, to), (to, from)])));
    }
    for (run, _) in runs {
        let numbers = take(&run);
        let ((first, to), (last, last_to)) = (run[0], run[run.len() - 1]);
        let text = match run.len() {
            1 => format!("{one} {first} of a is {one} {to} of b"),
            _ => format!("{many} {first}-{last} of a are {many} {to}-{last_to} of b"),
        };
        found.push((text, numbers));
    }
    found
}

/// Modules of one layer that are swapped, or one of them in the place of another one.
fn swaps(mut modules: BTreeMap<[Part<'_>; 2], Vec<usize>>) -> Vec<Move> {
    let mut found = Vec::new();
    while let Some(([a, b], numbers)) = modules.pop_first() {
        let [in_a, in_b] = [&a, &b].map(words);
        let back = modules.remove(&[b, a]);
        let is_swap = back.as_ref().is_some_and(|back| back.len() == numbers.len());
        let text = match is_swap {
            true => format!("{in_a} and {in_b} are swapped"),
            false => format!("{in_a} of a is {in_b} of b"),
        };
        let kind = if is_swap { "swapped" } else { "moved" };
        match back {
            Some(back) if !is_swap => {
                found.push(Move { kind, text: format!("{in_b} of a is {in_a} of b"), of: back });
                found.push(Move { kind, text, of: numbers });
            }
            back => {
                let of = numbers.into_iter().chain(back.into_iter().flatten()).collect();
                found.push(Move { kind, text, of });
            }
        }
    }
    found
}

fn words((state, module, parameter): &Part<'_>) -> String {
    let state = if state.is_empty() { String::new() } else { format!("{state} ") };
    match module.is_empty() {
        true => format!("{state}{parameter}"),
        false => format!("{state}{module}.{parameter}"),
    }
}
