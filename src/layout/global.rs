//! Global tensors of Megatron-Core's distributed checkpoints -> logical tensors under canonical names.
//!
//! Such a checkpoint knows no ranks: it holds whole tensors, but of a shape of its own. All layers of a list may lie in
//! one tensor, all experts of a layer in another axis of it, one parameter in several sections, and the parts of an
//! optimizer state flattened. Here each becomes what [`super::assemble`] makes of the shards of the same parameter.
//! Sources: Megatron-LM core_v0.4 to core_v0.19 (`core/transformer/transformer_block.py`, `mlp.py`, `moe/experts.py`,
//! `core/ssm`: each `sharded_state_dict`; `core/dist_checkpointing/strategies/torch.py`; `fsdp_dtensor_checkpoint.py`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock};

use crate::base::limits::{ENTRY, LIMITS, OVER_GLOBAL_METADATA};
use crate::names::Name;
use crate::names::index::is_number;
use crate::names::megatron::{Canonical, Dialect, is_buffer};
use crate::names::pattern::SuffixTable;
use crate::tensor::{LogicalTensor, TensorError};

use super::numbering::{LayerName, LayerNumbers, excessive_index};
use super::rules::{Rules, Sharding};
use super::unfuse::deinterleaved;
use super::{ArgName, Assembly, LayoutError, Merged, ModelChunk, RunArgs, is_expert};

/// A whole tensor of a distributed checkpoint.
#[derive(Debug, Clone)]
pub struct Global {
    /// The name in the checkpoint.
    pub stored_name: Arc<str>,
    /// The state of the optimizer that it is (`exp_avg`, `fp32_param`, ...); none for a weight.
    pub state: Option<Arc<str>>,
    /// The parameter, by the name that the model has for it.
    pub name: String,
    /// All of it.
    pub tensor: LogicalTensor,
    /// The parameter's shape, where the tensor is a grid of flattened parts of it.
    pub flattened: Option<Vec<u64>>,
}

/// Labels of the sections that are stored under names of their own, in the order in which they make the parameter up;
/// one list for each kind of module. `V#` stands for `V0`, `V1`, ...
type SectionLabels = &'static [&'static [&'static str]];

#[rustfmt::skip]
static SECTIONS: &[(&str, SectionLabels)] = &[
    // gate and up, with `singleton_local_shards` and in fsdp_dtensor
    ("linear_fc1.{weight,bias,weight#,bias#}",      &[&["w", "v"]]),
    // Mamba-2, gated delta product
    ("mixer.in_proj.{weight,bias}",                 &[&["z", "x", "B", "C", "dt"], &["z", "V#", "K#", "Q", "b#", "a"]]),
    ("mixer.{conv1d.weight,conv1d.bias,conv1d_weight,conv1d_bias}", &[&["x", "B", "C"], &["V#", "K#", "Q"]]),
    // gated delta net and its second version
    ("self_attention.in_proj.{weight,bias}",        &[&["query", "key", "value", "z", "beta", "alpha"], &["query", "key", "value", "z", "f", "b", "w"]]),
    ("self_attention.{conv1d.weight,conv1d.bias,conv1d_weight,conv1d_bias}", &[&["query", "key", "value"]]),
];

static TABLE: LazyLock<SuffixTable<SectionLabels>> =
    LazyLock::new(|| SuffixTable::new(SECTIONS.iter().copied()));

/// Gives the tensors of a distributed checkpoint their canonical names and shapes; those of the optimizer become
/// `optimizer.<state>.<name>`.
#[must_use]
pub fn from_global(tensors: Vec<Global>, args: &RunArgs, rules: &Rules) -> Assembly {
    let mut assembly = Assembly::default();
    let mut parts = GlobalParts::new();
    let mut unbinder = Unbinder::new(args);
    for global in tensors {
        if is_buffer(&global.name) {
            assembly.buffers += 1;
            continue;
        }
        let stored_name = Arc::clone(&global.stored_name);
        if let Err(error) = unbinder.take(global, &mut parts) {
            assembly.problems.push((stored_name.to_string(), error));
        }
    }
    let parts = joined(parts, &mut assembly);
    let dialect = Dialect::detect(parts.keys().map(|(_, name)| name.as_str()));
    let numbers = LayerNumbers::of_whole(args);
    let finisher = Finisher { dialect: &dialect, numbers: &numbers, args, rules };
    for ((state, name), part) in parts {
        let stored_name = Arc::clone(&part.stored_name);
        if let Err(error) = finisher.add(state.as_deref(), &name, part, &mut assembly) {
            assembly.problems.push((stored_name.to_string(), error));
        }
    }
    assembly
}

/// A parameter of one layer and one expert, or a section of it.
struct GlobalPart {
    stored_name: Arc<str>,
    tensor: LogicalTensor,
    was_flattened: bool,
}

/// By state of the optimizer, weights first, and by the model's name with all indices in it.
type GlobalParts = BTreeMap<(Option<Arc<str>>, String), GlobalPart>;

/// Bytes that a part counts for, besides its name and its pieces: about what all of it takes on its way.
const PART: usize = 4 * ENTRY;

/// Takes tensors apart along the axes that hold all layers of a list, or all experts of a layer.
struct Unbinder {
    numbers: LayerNumbers,
    /// Number of layers of a list, by what stands before their number, and the tensor that said so.
    layers: HashMap<String, (u64, Arc<str>)>,
    /// Bytes that names, entries and pieces may still come to.
    left: usize,
}

impl Unbinder {
    fn new(args: &RunArgs) -> Self {
        let numbers = LayerNumbers::of_whole(args);
        Self { numbers, layers: HashMap::new(), left: LIMITS.global_metadata }
    }

    fn take(&mut self, global: Global, parts: &mut GlobalParts) -> Result<(), LayoutError> {
        let was_flattened = global.flattened.is_some();
        let mut todo = vec![global];
        let mut done = Vec::new();
        while let Some(global) = todo.pop() {
            if let Some(at) = missing_index(&global.name) {
                self.unbind(global, at, &mut todo)?;
                continue;
            }
            let Global { stored_name, state, name, tensor, flattened } = global;
            if tensor.pieces().is_empty() && tensor.numel() > 0 && self.is_placeholder(&name) {
                continue;
            }
            let tensor = match flattened {
                Some(shape) => unflattened(&tensor, &shape)?,
                None => tensor,
            };
            let bytes = name.len() + PART + ENTRY * tensor.pieces().len();
            self.left = self.left.checked_sub(bytes).ok_or(OVER_GLOBAL_METADATA)?;
            let name = name.replace(".experts.experts.", ".experts.local_experts.");
            done.push(((state, name), GlobalPart { stored_name, tensor, was_flattened }));
        }
        for (key, part) in done {
            if let Some(other) = parts.get(&key) {
                return Err(LayoutError::Duplicate { other: other.stored_name.to_string() });
            }
            parts.insert(key, part);
        }
        Ok(())
    }

    /// Puts a number at byte `at` of the name for every index of the first axis.
    fn unbind(
        &mut self,
        global: Global,
        at: usize,
        todo: &mut Vec<Global>,
    ) -> Result<(), LayoutError> {
        let Global { stored_name, state, name, tensor, flattened } = global;
        // An axis cut so that each fragment holds one index is the same axis before and after; another one is not.
        let (tensor, flattened) = match flattened {
            Some(shape) if tensor.shape().first() != shape.first() => {
                (unflattened(&tensor, &shape)?, None)
            }
            other => (tensor, other),
        };
        let count = tensor.shape().first().copied().unwrap_or(0);
        let (before, after) = name.split_at(at);
        if before.ends_with("layers.") {
            let first = (count, Arc::clone(&stored_name));
            let (others, other) = self.layers.entry(before.to_owned()).or_insert(first);
            if *others != count {
                let other = other.to_string();
                return Err(LayoutError::LayersDisagree { layers: count, other, others: *others });
            }
        }
        let entry = name.len() + PART;
        if usize::try_from(count).ok().is_none_or(|count| self.left / entry < count) {
            return Err(OVER_GLOBAL_METADATA.into());
        }
        for (index, tensor) in tensor.unbind(0)?.into_iter().enumerate() {
            todo.push(Global {
                stored_name: Arc::clone(&stored_name),
                state: state.clone(),
                name: format!("{before}{index}.{after}"),
                tensor,
                flattened: flattened.as_ref().map(|shape| shape[1..].to_vec()),
            });
        }
        Ok(())
    }

    fn is_placeholder(&self, name: &str) -> bool {
        let layer = LayerName::parse(name).filter(|layer| layer.stack == "decoder.");
        layer.is_some_and(|layer| self.numbers.is_placeholder(layer.index))
    }
}

/// The place where a name has no number though its tensor has an axis for it: behind `layers.` and `experts.experts.`.
fn missing_index(name: &str) -> Option<usize> {
    let mut before = ["", ""];
    let mut at = 0;
    for component in name.split('.') {
        let is_list = before[1] == "layers" || before == ["experts", "experts"];
        if is_list && !is_number(component) {
            return Some(at);
        }
        before = [before[1], component];
        at += component.len() + 1;
    }
    None
}

/// A tensor of this shape from a grid of flattened parts of it: of shape `[X/x, Y/y, x*y]` for `[X, Y]` in parts of `[x, y]`
/// (`nd_reformulated_orig_global_shape`, core 0.8 to 0.15).
fn unflattened(tensor: &LogicalTensor, shape: &[u64]) -> Result<LogicalTensor, LayoutError> {
    let no_grid = || LayoutError::NoGrid { shape: tensor.shape().to_vec(), wanted: shape.to_vec() };
    let Some((flat, grid)) = tensor.shape().split_last() else { return Err(no_grid()) };
    let part = |(&whole, &parts): (&u64, &u64)| {
        whole.checked_div(parts).filter(|part| part * parts == whole)
    };
    let part: Option<Vec<u64>> = shape.iter().zip(grid).map(part).collect();
    let part = part.filter(|part| {
        let fits =
            grid.len() == shape.len() && shape.len() <= LIMITS.flattened_rank && !shape.is_empty();
        fits && crate::base::extent::numel(part) == Some(*flat)
    });
    let Some(part) = part else { return Err(no_grid()) };
    if tensor.numel() == 0 {
        return Err(no_grid());
    }
    let axes = shape.len();
    let mut restored = tensor.clone();
    for axis in 1..axes {
        restored = restored.split_axis(axes + axis - 1, part[axis..].iter().product())?;
    }
    for axis in 0..axes {
        // What is left of the grid stands between an axis of the grid and that of the part.
        for place in (axis + 1..axes).rev() {
            restored = restored.transpose(place, place + 1)?;
        }
        restored = restored.merge_axes(axis)?;
    }
    Ok(restored)
}

/// Puts sections together that are stored under names of their own.
fn joined(parts: GlobalParts, assembly: &mut Assembly) -> GlobalParts {
    let mut whole = GlobalParts::new();
    let mut split: BTreeMap<_, (SectionLabels, BTreeMap<String, GlobalPart>)> = BTreeMap::new();
    for ((state, name), part) in parts {
        match section_of(&name) {
            Some((base, label, sections)) => {
                let (_, labels) = split
                    .entry((state, base.to_owned()))
                    .or_insert_with(|| (sections, BTreeMap::new()));
                labels.insert(label.to_owned(), part);
            }
            None => {
                whole.insert((state, name), part);
            }
        }
    }
    for (key, (sections, labels)) in split {
        let stored_name = labels.values().next().map(|part| part.stored_name.to_string());
        let joined = match whole.get(&key) {
            Some(other) => Err(LayoutError::Duplicate { other: other.stored_name.to_string() }),
            None => in_order(sections, labels).and_then(join_sections),
        };
        match joined {
            Ok(part) => {
                whole.insert(key, part);
            }
            Err(error) => assembly.problems.push((stored_name.unwrap_or(key.1), error)),
        }
    }
    whole
}

/// The name of the parameter that a name is a section of, and which.
fn section_of(name: &str) -> Option<(&str, &str, SectionLabels)> {
    let splits = [name.rsplit_once('.'), name.rsplit_once('_')];
    splits.into_iter().flatten().find_map(|(base, label)| {
        let sections = *TABLE.find(base)?.value;
        let known = sections.iter().copied().flatten().any(|section| is_section(section, label));
        known.then_some((base, label, sections))
    })
}

fn is_section(section: &str, label: &str) -> bool {
    match section.strip_suffix('#') {
        None => section == label,
        Some(stem) => label.strip_prefix(stem).is_some_and(is_number),
    }
}

/// The parts in the order of the one list of sections that they are all of.
fn in_order(
    sections: SectionLabels,
    mut labels: BTreeMap<String, GlobalPart>,
) -> Result<Vec<GlobalPart>, LayoutError> {
    let lists = sections.iter().map(|list| {
        let labels_of = |section: &&str| match section.strip_suffix('#') {
            None => vec![(*section).to_owned()],
            Some(stem) => {
                let count = labels.keys().filter(|label| is_section(section, label)).count();
                (0..count.max(1)).map(|number| format!("{stem}{number}")).collect()
            }
        };
        list.iter().flat_map(labels_of).collect::<Vec<String>>()
    });
    let missing =
        |list: &Vec<String>| list.iter().filter(|label| !labels.contains_key(*label)).count();
    let best = lists.min_by_key(missing).unwrap_or_default();
    if missing(&best) > 0 || best.len() != labels.len() {
        let found = labels.into_keys().collect();
        return Err(LayoutError::SectionsIncomplete { found, wanted: best });
    }
    Ok(best.iter().filter_map(|label| labels.remove(label)).collect())
}

fn join_sections(parts: Vec<GlobalPart>) -> Result<GlobalPart, LayoutError> {
    let first = parts.first().ok_or(LayoutError::NoShard)?;
    let (stored_name, was_flattened) = (Arc::clone(&first.stored_name), first.was_flattened);
    let tensor = LogicalTensor::concat(0, parts.into_iter().map(|part| part.tensor))?;
    Ok(GlobalPart { stored_name, tensor, was_flattened })
}

/// Gives each parameter its place among the others.
struct Finisher<'a> {
    dialect: &'a Dialect,
    numbers: &'a LayerNumbers,
    args: &'a RunArgs,
    rules: &'a Rules,
}

impl Finisher<'_> {
    fn add(
        &self,
        state: Option<&str>,
        name: &str,
        part: GlobalPart,
        assembly: &mut Assembly,
    ) -> Result<(), LayoutError> {
        let name = match self.dialect.canonical(name) {
            Canonical::Buffer => {
                assembly.buffers += 1;
                return Ok(());
            }
            Canonical::TiedCopy(name) => name,
            Canonical::Parameter(name) => self.numbered(name),
        };
        if let Some(over) = excessive_index(&name) {
            return Err(over.into());
        }
        let mut tensor = part.tensor;
        if part.was_flattened && is_expert(&name) {
            tensor = as_the_weight(tensor, assembly.tensors.get(&Name::new(name.as_str())))?;
        }
        tensor = deinterleaved(&name, tensor, self.args, self.shares(&name))?;
        let is_vocab = self.rules.find(&name) == Some(&Sharding::Vocab);
        let name = Name::new(match state {
            Some(state) => format!("optimizer.{state}.{name}"),
            None => name,
        });
        match assembly.tensors.get_mut(&name) {
            // A module registered under two names, as T5's output layer is: both must hold the same.
            Some(merged) => merged.tensor.add_copy(tensor)?,
            None => {
                assembly.tensors.insert(name, Merged { tensor, is_vocab, has_no_rule: false });
            }
        }
        Ok(())
    }

    /// The name with placeholder layers not counted.
    fn numbered(&self, name: String) -> String {
        match LayerName::parse(&name).filter(|layer| layer.stack == "decoder.") {
            Some(layer) => {
                layer.with_index(self.numbers.global(ModelChunk { vp: 0, pp: 0 }, layer.index))
            }
            None => name,
        }
    }

    /// Ranks that shared the first linear of an MLP.
    fn shares(&self, name: &str) -> u64 {
        let dense = self.args.size(ArgName::TENSOR_MODEL_PARALLEL_SIZE);
        let routed =
            self.args.size(ArgName::EXPERT_TENSOR_PARALLEL_SIZE).filter(|_| is_expert(name));
        routed.or(dense).unwrap_or(1)
    }
}

/// The grouped experts of core 0.7 to 0.15 flatten the states of their weights untransposed (`experts.py`, `sh_ten_build_fn`).
fn as_the_weight(
    tensor: LogicalTensor,
    weight: Option<&Merged>,
) -> Result<LogicalTensor, TensorError> {
    let Some(weight) = weight.map(|weight| weight.tensor.shape()) else { return Ok(tensor) };
    let is_transposed =
        weight.len() == 2 && tensor.shape() != weight && tensor.shape().iter().rev().eq(weight);
    if is_transposed { tensor.transpose(0, 1) } else { Ok(tensor) }
}
