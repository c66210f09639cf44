//! Optimizer states: masters and moments of every weight whose kin have them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::base::dtype::Dtype;
use crate::catalog::{Problem, Section};
use crate::names::{Name, is_vocabulary};

use super::Present;
use super::announced::Announced;
use super::kin::lacks;
use super::numbers;
use super::stacks::{self, Stack};

/// States that an optimizer keeps for every weight of one kind, in the shape of the weight (torch, Apex, DeepSpeed).
const STATES: [&str; 7] = [
    "fp32_param",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "exp_inf",
];

/// Master weights, which weights of full precision need not have.
const MASTER: &str = "fp32_param";

/// The two moments of Adam.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

const NONE: &str = "no optimizer state, which others of its kind have";

/// The states of each weight.
type StatesOf<'c> = BTreeMap<&'c str, BTreeSet<&'c str>>;

/// States that are missing, and weights of which only states are there, but where a list of them has told of those.
pub(super) fn missing(
    present: &Present<'_>,
    announced: &Announced<'_>,
    is_listed: bool,
) -> Vec<Problem> {
    let states = states_of(present);
    if states.is_empty() {
        return Vec::new();
    }
    let mut problems = Vec::new();
    if !is_listed {
        problems.extend(without_weight(present, &states));
    }
    problems.extend(without_moment(announced, &states));
    problems.extend(uneven(present, &states));
    if present.catalog.count(Section::Model) > 0 {
        let with_states = stacks::of(states.keys().copied());
        for stack in &present.stacks {
            if let Some(own) = with_states.iter().find(|own| own.path == stack.path) {
                problems.extend(stateless(stack, own, &states));
            }
        }
        problems.extend(stateless_frame(present, announced, &states));
    }
    problems
}

fn states_of<'c>(present: &Present<'c>) -> StatesOf<'c> {
    let catalog = present.catalog;
    let mut states = StatesOf::new();
    for name in catalog.tensors.keys().filter(|name| !catalog.positions.contains(*name)) {
        let named = name.as_str().strip_prefix("optimizer.").and_then(|rest| rest.split_once('.'));
        if let Some((state, weight)) = named.filter(|(state, _)| STATES.contains(state)) {
            states.entry(weight).or_default().insert(state);
        }
    }
    states
}

/// Weights of which only states are there.
fn without_weight(present: &Present<'_>, states: &StatesOf<'_>) -> Option<Problem> {
    if present.catalog.count(Section::Model) == 0 {
        return None;
    }
    let (known, unknown): (Vec<&str>, Vec<&str>) =
        states.keys().partition(|name| present.has(name));
    // Otherwise the optimizer has other names for them.
    let first = unknown.first().filter(|_| known.len() >= unknown.len())?;
    let more = match unknown.len() {
        1 => String::new(),
        count => format!(", as that of {} more", count - 1),
    };
    Some(Problem::of_tensor(*first, format!("missing: its optimizer state is there{more}")))
}

/// A moment of Adam that no weight has.
fn without_moment(announced: &Announced<'_>, states: &StatesOf<'_>) -> Option<Problem> {
    let has = |state: &str| states.values().any(|own| own.contains(state));
    let others =
        || states.values().flatten().any(|state| *state != MASTER && !MOMENTS.contains(state));
    let [lost, kept] = match MOMENTS.map(has) {
        [true, false] => ["exp_avg_sq", "exp_avg"],
        [false, true] => ["exp_avg", "exp_avg_sq"],
        _ => return None,
    };
    let words = announced.adam()?;
    (!others()).then(|| {
        Problem::of_tensor(
            format!("optimizer.{lost}"),
            format!("missing for all {} weights that have {kept}: {words}", states.len()),
        )
    })
}

/// Weights that lack a state which others have beside the same states.
fn uneven(present: &Present<'_>, states: &StatesOf<'_>) -> Vec<Problem> {
    let mut forms: BTreeMap<&BTreeSet<&str>, Vec<&str>> = BTreeMap::new();
    for (weight, own) in states {
        forms.entry(own).or_default().push(weight);
    }
    let mut problems = Vec::new();
    for (own, weights) in &forms {
        let larger =
            forms.iter().filter(|(other, _)| other.len() > own.len() && other.is_superset(own));
        let Some((full, kin)) = larger.max_by_key(|(other, kin)| (kin.len(), other.len())) else {
            continue;
        };
        for state in full.difference(own) {
            let lost: Vec<&str> =
                weights.iter().copied().filter(|weight| needs(present, state, weight)).collect();
            let Some(first) = lost.first() else { continue };
            let more = match lost.len() {
                1 => String::new(),
                count => format!(", as for {} more", count - 1),
            };
            problems.push(Problem::of_tensor(
                format!("optimizer.{state}.{first}"),
                format!("missing: {} other weights have it beside {}{more}", kin.len(), join(own)),
            ));
        }
    }
    problems
}

/// Weights of a list of layers without any state, where their kin have some. What is frozen on purpose is so in all layers, or
/// in the first ones together with the embeddings.
fn stateless(stack: &Stack<'_>, own: &Stack<'_>, states: &StatesOf<'_>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let of_layers = |layers: &BTreeSet<u64>, what: &str| match layers.first() {
        Some(layer) if layers.len() == 1 => {
            Problem::of_tensor(format!("{}{layer}{what}", stack.path), NONE)
        }
        _ => {
            let layers = numbers::text_of(layers);
            Problem::of_tensor(
                stack.list(),
                format!("layers {layers}{}: {NONE}", what.replace('.', " ")),
            )
        }
    };
    let numbers: BTreeSet<u64> = stack.layers.keys().copied().collect();
    let bare: BTreeSet<u64> =
        numbers.iter().copied().filter(|number| !own.layers.contains_key(number)).collect();
    let is_first = bare.last() < own.layers.keys().next();
    let has_embedding = states.keys().any(|name| is_vocabulary(name));
    if !bare.is_empty() && (!is_first || has_embedding) {
        problems.push(of_layers(&bare, ""));
    }
    let mut groups: BTreeMap<&BTreeSet<Cow<'_, str>>, Vec<_>> = BTreeMap::new();
    for (number, layer) in &own.layers {
        if let Some(whole) = stack.layers.get(number) {
            groups.entry(&whole.names).or_default().push((*number, &layer.names));
        }
    }
    for lack in groups.values().flat_map(|group| lacks(group, true)) {
        let first = lack.names.first().copied().unwrap_or_default();
        problems.push(of_layers(&lack.members, &format!(".{first}")));
    }
    for (number, layer) in &own.layers {
        let whole = stack.layers.get(number).map(|whole| &whole.experts);
        for (list, experts) in whole.into_iter().flatten() {
            let have = layer.experts.get(list);
            let lost =
                experts.keys().filter(|expert| have.is_some_and(|have| !have.contains_key(expert)));
            let lost: BTreeSet<u64> = lost.copied().collect();
            if !lost.is_empty() {
                let name = format!("{}{number}.{}", stack.path, list.trim_end_matches(['.', '_']));
                let experts = numbers::text_of(&lost);
                problems.push(Problem::of_tensor(name, format!("experts {experts}: {NONE}")));
            }
        }
    }
    problems
}

/// What stands around the layers of a run that freezes nothing.
fn stateless_frame(
    present: &Present<'_>,
    announced: &Announced<'_>,
    states: &StatesOf<'_>,
) -> Vec<Problem> {
    const FRAME: [&str; 4] = ["embedding.", "output_layer.", "decoder.final", "encoder.final"];
    let is_frame = |name: &&&str| FRAME.iter().any(|front| name.starts_with(front));
    let is_bare = |name: &&&str| {
        !states.contains_key(**name) && !present.catalog.tied.contains_key(&Name::new(**name))
    };
    let is_any = states.keys().any(|name| FRAME.iter().any(|front| name.starts_with(front)));
    let bare = present.weights.iter().filter(is_frame).filter(is_bare);
    let bare = bare.filter(|_| announced.is_certain && is_any);
    bare.map(|name| Problem::of_tensor(*name, NONE)).collect()
}

/// A weight of full precision is its own master.
fn needs(present: &Present<'_>, state: &str, weight: &str) -> bool {
    let entry = || present.catalog.tensors.get(&Name::new(weight));
    state != MASTER || entry().is_some_and(|entry| entry.tensor.dtype() != Dtype::Float32)
}

fn join(states: &BTreeSet<&str>) -> String {
    states.iter().copied().collect::<Vec<_>>().join(" and ")
}
