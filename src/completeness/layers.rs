//! Lists of layers: all of them there, and those of one kind with the same names.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::catalog::Problem;
use crate::names::Naming;
use crate::names::index::is_number;

use super::Present;
use super::announced::{Announced, Role, Said, Tower};
use super::kin::{Lack, lacks};
use super::stacks::{Layer, Stack, module};
use super::{frame, numbers, partners};

/// Lists that Megatron's names have, announced or not.
const DECODER: &str = "decoder.layers.";
const ENCODER: &str = "encoder.layers.";
const PREDICTION: &str = "mtp.layers.";

/// The layer within a layer that predicts further tokens: one more of the decoder's last kind.
const INNER: &str = "transformer_layer.";

/// A decoder that has one layer less than it says: the first prediction counts (transformers, `modeling_mask2former.py`).
const MASK_FORMER: &str = "transformer_module";

/// Names that a problem lists at most.
const LISTED: usize = 10_000;

/// A layer's number and the names in it.
type Named<'s> = (u64, &'s BTreeSet<Cow<'s, str>>);

/// Layers by what is announced of their kind, and by whether they predict further tokens.
type ByKind<'s> = BTreeMap<(Vec<u64>, bool), Vec<(u64, &'s Layer<'s>)>>;

/// Layers, and names in layers, that are missing.
pub(super) fn missing(present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for stack in &present.stacks {
        let said = if is_main(stack, present) { announced.layers(stack.path) } else { None };
        let said = said.map(|said| with_predictions(stack, said, announced));
        problems.extend(gaps(stack, said.as_ref(), present, announced));
        problems.extend(irregular(stack, present, announced));
    }
    if present.naming == Naming::Canonical {
        problems.extend(whole_lists(present, announced));
        problems.extend(inner_layers(present, announced));
    }
    problems
}

/// Says whether a list is the one that a number of layers is said of: the largest of those that it could be said of.
fn is_main(stack: &Stack<'_>, present: &Present<'_>) -> bool {
    let is_alike = |other: &&Stack<'_>| {
        let [own, others] = [stack.path, other.path].map(Role::of);
        let is_same_role = own == others || own == Role::Only || others == Role::Only;
        is_same_role && Tower::of(stack.path) == Tower::of(other.path) && stack.path != other.path
    };
    let is_stage = stack.path.split('.').any(|part| is_number(part) || part == MASK_FORMER);
    !is_stage && present.stacks.iter().filter(is_alike).all(|other| other.size < stack.size)
}

/// The same number with the layers that predict further tokens, where they follow the others: some releases leave all of them out
/// (DeepSeek V3, GLM 4 MoE).
fn with_predictions(stack: &Stack<'_>, said: Said, announced: &Announced<'_>) -> Said {
    let predicts = |(number, layer): (&u64, &Layer<'_>)| *number >= said.value && layer.predicts();
    match announced.predictions(stack.path).filter(|_| stack.layers.iter().any(predicts)) {
        Some(further) => {
            let value = said.value.saturating_add(further.value);
            Said { value, text: format!("{} and {}", said.text, further.text) }
        }
        None => said,
    }
}

/// Numbers that no layer has, up to the announced end or the last one there is.
fn gaps(
    stack: &Stack<'_>,
    said: Option<&Said>,
    present: &Present<'_>,
    announced: &Announced<'_>,
) -> Option<Problem> {
    if present.naming != Naming::Canonical && !stack.is_of_layers() {
        return None;
    }
    let end = stack.end();
    let wanted = said.map_or(end, |said| said.value.max(end));
    let mut known = announced.empty_layers(stack.path);
    known.extend(stack.layers.keys());
    let gaps = numbers::gaps(&known, wanted);
    if gaps.is_empty() {
        return None;
    }
    let text = numbers::text(&gaps);
    let name = match gaps[..] {
        [(first, last)] if first == last => format!("{}{first}", stack.path),
        _ => stack.list().to_owned(),
    };
    let lost = match numbers::count(&gaps) {
        1 => format!("layer {text} is missing"),
        _ => format!("layers {text} are missing"),
    };
    let message = match said {
        Some(said) if said.value >= end => {
            let found = known.len();
            format!(
                "{lost}: {}; if the model has {found} layers, say so with --set num_layers={found}",
                said.text
            )
        }
        _ => format!("{lost}: the others go up to {}", end - 1),
    };
    Some(Problem::of_tensor(name, message))
}

/// Layers by kind: as it is announced, and where that does not tell them apart, those that predict further tokens and those
/// without experts among others that have some.
fn kin<'s>(stack: &'s Stack<'_>, announced: &Announced<'_>) -> Vec<Vec<Named<'s>>> {
    let kinds = announced.kinds(stack);
    let mut groups = ByKind::new();
    for (number, layer) in &stack.layers {
        groups.entry((kinds.of(*number), layer.predicts())).or_default().push((*number, layer));
    }
    let split = |group: Vec<(u64, &'s Layer<'_>)>| {
        let has_experts = group.iter().any(|(_, layer)| !layer.experts.is_empty());
        let (dense, others): (Vec<_>, Vec<_>) =
            group.into_iter().partition(|(_, layer)| has_experts && layer.is_dense());
        [dense, others].map(|group| group.into_iter().map(|(n, layer)| (n, &layer.names)).collect())
    };
    groups.into_values().flat_map(split).collect()
}

/// Layers that lack what their kin have, or what goes with something that they have.
fn irregular(stack: &Stack<'_>, present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let is_known = frame::is_known(stack, present);
    let is_canonical = present.naming == Naming::Canonical;
    let is_certain = announced.is_certain || is_known;
    if !is_certain && !is_canonical && !stack.is_of_layers() {
        return Vec::new();
    }
    let mut lacks: Vec<Lack<'_>> =
        kin(stack, announced).iter().flat_map(|group| lacks(group, is_certain)).collect();
    // What nobody knows need not be in every layer, and what cannot be read where it is neither.
    let is_read = |name: &str| {
        let has = stack.layers.iter().filter(|(_, layer)| layer.names.contains(name));
        has.into_iter().any(|(number, _)| {
            !present.told.contains(format!("{}{number}.{name}", stack.path).as_str())
        })
    };
    let counts = |name: &&str| present.is_known(name) && is_read(name);
    lacks.iter_mut().for_each(|lack| lack.names.retain(counts));
    lacks.retain(|lack| !lack.names.is_empty());
    let mut alone: BTreeMap<(String, String), BTreeSet<u64>> = BTreeMap::new();
    let has_partners = is_canonical || is_known || frame::is_mixed(stack, present);
    for (number, layer) in stack.layers.iter().filter(|_| has_partners) {
        let own = || lacks.iter().filter(|lack| lack.members.contains(number));
        for (name, beside) in partners::lacks(&layer.names, present.naming) {
            let is_told = own().any(|lack| lack.names.iter().any(|told| told.starts_with(&name)));
            if !is_told && !name.starts_with(INNER) {
                alone.entry((name, beside)).or_default().insert(*number);
            }
        }
    }
    if is_canonical && [DECODER, ENCODER].contains(&stack.path) {
        for (number, name, beside) in partners::lost_norms(stack) {
            let own = || lacks.iter().filter(|lack| lack.members.contains(&number));
            if !own().any(|lack| lack.names.contains(&*name)) {
                alone.entry((name, beside)).or_default().insert(number);
            }
        }
    }
    let mut problems: Vec<Problem> = lacks.iter().map(|lack| of_lack(stack, lack)).collect();
    if is_known && !is_canonical {
        problems.extend(predicting(stack, announced));
        problems.sort();
        problems.dedup_by(|one, other| one.tensor == other.tensor);
    }
    problems.extend(alone.into_iter().map(|((name, beside), layers)| {
        problem(stack, &layers, &[&name], &format!("though {beside} is there"))
    }));
    problems
}

fn of_lack(stack: &Stack<'_>, lack: &Lack<'_>) -> Problem {
    let kin = match lack.kin {
        1 => "which another one of the kind has".to_owned(),
        kin => format!("which {kin} others of the kind have"),
    };
    let names: Vec<&str> = lack.names.iter().copied().collect();
    problem(stack, &lack.members, &names, &kin)
}

/// Names that some layers lack, and why they should not.
fn problem(stack: &Stack<'_>, layers: &BTreeSet<u64>, names: &[&str], why: &str) -> Problem {
    let first = names.first().copied().unwrap_or_default();
    let lost = match names.len() {
        1 => first.to_owned(),
        count => format!("{first} and {} more", count - 1),
    };
    let found = match (layers.first().filter(|_| layers.len() == 1), names) {
        (Some(layer), [name]) => {
            Problem::of_tensor(format!("{}{layer}.{name}", stack.path), format!("missing, {why}"))
        }
        (Some(layer), _) => {
            Problem::of_tensor(format!("{}{layer}", stack.path), format!("lacks {lost}, {why}"))
        }
        (None, _) => {
            let layers = numbers::text_of(layers);
            Problem::of_tensor(stack.list(), format!("layers {layers} lack {lost}, {why}"))
        }
    };
    let of_layer = |layer| names.iter().map(move |name| format!("{}{layer}.{name}", stack.path));
    let is_listed = layers.len().saturating_mul(names.len()) <= LISTED;
    found.with_lost(if is_listed { layers.iter().flat_map(of_layer).collect() } else { Vec::new() })
}

/// Layers within layers that predict further tokens, held against the decoder's of its last kind (Megatron-Core
/// `core/models/gpt/gpt_layer_specs.py`, `get_gpt_mtp_block_spec`).
fn inner_layers(present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let list = |path| present.stacks.iter().find(|stack| stack.path == path);
    let (Some(decoder), Some(prediction)) = (list(DECODER), list(PREDICTION)) else {
        return Vec::new();
    };
    let kin = last_kin(decoder, announced);
    let mut problems = Vec::new();
    for (number, layer) in &prediction.layers {
        let inner = layer.names.iter().filter_map(|name| name.strip_prefix(INNER));
        let inner: BTreeSet<Cow<'_, str>> = inner.map(Cow::from).collect();
        problems.extend(of_inner(prediction, *number, (&inner, INNER), &kin));
    }
    problems
}

/// The layers of the last one's kind that predict no further tokens.
fn last_kin<'s>(stack: &'s Stack<'_>, announced: &Announced<'_>) -> Vec<Named<'s>> {
    let kinds = announced.kinds(stack);
    let own = || stack.layers.iter().filter(|(_, layer)| !layer.predicts());
    let last = own().next_back().map(|(number, _)| kinds.of(*number));
    let kin = own().filter(|(number, _)| Some(kinds.of(**number)) == last);
    kin.map(|(number, layer)| (*number, &layer.names)).collect()
}

/// Lacks of the layer within a layer of this number, whose names all begin alike, among its kin.
fn of_inner(
    stack: &Stack<'_>,
    number: u64,
    (inner, front): (&BTreeSet<Cow<'_, str>>, &str),
    kin: &[Named<'_>],
) -> Vec<Problem> {
    // Its number is one that no other layer has.
    let all: Vec<Named<'_>> =
        kin.iter().copied().chain([(u64::MAX, inner)]).filter(|_| !inner.is_empty()).collect();
    let own = lacks(&all, true).into_iter().filter(|lack| lack.members.contains(&u64::MAX));
    let of_lack = |lack: Lack<'_>| {
        let names: Vec<String> = lack.names.iter().map(|name| format!("{front}{name}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let why = "which the last layers before it have";
        problem(stack, &BTreeSet::from([number]), &names, why)
    };
    own.map(of_lack).collect()
}

/// Layers behind the others that predict further tokens, held against the last of those (transformers `modeling_glm4_moe.py`,
/// DeepSeek V3): all that they have of the same modules.
fn predicting(stack: &Stack<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let kin = last_kin(stack, announced);
    let modules: BTreeSet<&str> =
        kin.iter().flat_map(|(_, names)| names.iter()).map(|name| module(name)).collect();
    let last = kin.iter().map(|(number, _)| *number).max();
    let behind = stack
        .layers
        .iter()
        .filter(|(number, layer)| layer.predicts() && last.is_some_and(|last| **number > last));
    let of_layer = |(number, layer): (&u64, &Layer<'_>)| {
        let inner = layer.names.iter().filter(|name| modules.contains(module(name)));
        let inner: BTreeSet<Cow<'_, str>> = inner.map(|name| Cow::from(&**name)).collect();
        of_inner(stack, *number, (&inner, ""), &kin)
    };
    behind.flat_map(of_layer).collect()
}

/// Lists of Megatron's that are announced and of which there is nothing.
fn whole_lists(present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let has = |path: &str| present.stacks.iter().any(|stack| stack.path == path);
    let crosses = present.stacks.iter().filter(|stack| stack.path == DECODER).any(|stack| {
        stack
            .layers
            .values()
            .any(|layer| layer.names.iter().any(|name| name.starts_with("cross_attention.")))
    });
    // Every model has one of the two; only a decoder that looks at an encoder has both.
    let is_wanted = |path: &str| match path {
        DECODER => present.stacks.is_empty() || announced.has_decoder(),
        ENCODER => crosses,
        _ => true,
    };
    let absent =
        [DECODER, ENCODER, PREDICTION].into_iter().filter(|path| !has(path) && is_wanted(path));
    let said = absent.filter_map(|path| Some((path, announced.layers(path)?)));
    let missing = said.filter(|(_, said)| said.value > 0);
    missing
        .map(|(path, said)| {
            Problem::of_tensor(
                path.trim_end_matches('.'),
                format!("missing altogether: {}", said.text),
            )
        })
        .collect()
}
