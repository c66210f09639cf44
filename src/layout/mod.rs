//! Ranks -> logical tensors.
//!
//! Shards come in under stored names with the rank that holds them; out come whole tensors under global
//! canonical names. On the way: names ([`crate::names`]), fused tensors taken apart (`unfuse`), global
//! indices (`numbering`), parts put together (`merge`, by the table in [`rules`]). Checkpoints that
//! hold whole tensors already need only names and axes put right (`global`).

mod args;
mod global;
mod grid;
mod merge;
mod numbering;
pub mod rules;
mod sections;
mod unfuse;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use thiserror::Error;

use crate::base::limits::LIMITS;
use crate::names::Name;
use crate::names::megatron::{Canonical, Dialect};
use crate::tensor::{LogicalTensor, StoredTensor, TensorError};

pub use args::{RunArgs, parse_run_arg};
pub use global::{Global, from_global};
pub use grid::{FolderNaming, ParallelLayout, RankCoord, RankName};
pub use merge::{Merged, Merger, RankPart, RankParts, RowBiases};
pub use numbering::{Chunk, LayerNumbers, NumberingError};

use numbering::{ExpertNumbers, LayerName, excessive_index, split_expert};
use rules::Rules;
use unfuse::{Local, Named, RankTensors, unfuse};

/// One rank's local tensor, its place in the whole still unknown.
#[derive(Debug, Clone)]
pub struct Shard {
    /// The name in the file.
    pub name: Arc<str>,
    /// The rank that stores it.
    pub rank: RankCoord,
    /// What it stores.
    pub tensor: StoredTensor,
}

/// The tensors of a model put together.
#[derive(Debug, Default)]
pub struct Assembly {
    /// Whole tensors by canonical name.
    pub tensors: BTreeMap<Name, Merged>,
    /// What the last stage stores under the output layer's name though the weights are tied.
    pub tied_copies: BTreeMap<Name, LogicalTensor>,
    /// Tensors that could not be put together, by the name closest to the user's.
    pub problems: Vec<(String, LayoutError)>,
    /// Stored entries that are no weights.
    pub buffers: usize,
    /// Names that only shape_only stand for.
    pub shape_only_names: BTreeSet<Name>,
}

/// Why shards do not make a tensor.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum LayoutError {
    /// The table has no line for the name.
    #[error(
        "no sharding rule for this name and more than one shard of it; \
         supply one with --rule NAME=replicated|column|row|gated|vocab"
    )]
    NoRule,
    /// A needed argument is neither in `args` nor shown by any shape.
    #[error("the checkpoint does not say {arg}; supply it with --set {arg}=VALUE")]
    ArgMissing {
        /// The attribute of `args`.
        arg: &'static str,
    },
    /// One rank's part of the tensor is not there.
    #[error("missing on {axis} rank {slot}")]
    RankMissing {
        /// The axis.
        axis: &'static str,
        /// The rank along it.
        slot: u64,
    },
    /// No rank holds anything of it.
    #[error("no rank holds it")]
    NoShard,
    /// A tensor that tells the sizes of this one's sections is not there.
    #[error("cannot tell its sections: {sibling} is missing beside it")]
    SiblingMissing {
        /// Canonical name of the tensor that is missing.
        sibling: String,
    },
    /// The shards of one tensor differ in shape or dtype.
    #[error("shards do not fit together: {}", parts.join(", "))]
    PartsDisagree {
        /// Rank, shape and dtype of each.
        parts: Vec<String>,
    },
    /// Tensors that hold all layers of one list have different numbers of them.
    #[error("has {layers} layers where {other} has {others}")]
    LayersDisagree {
        /// Layers of this tensor.
        layers: u64,
        /// A tensor with another number of them.
        other: String,
        /// How many that one has.
        others: u64,
    },
    /// A flattened tensor that does not have the form of such a one.
    #[error("shape {shape:?} is no grid of flattened parts of {wanted:?}")]
    NoGrid {
        /// The stored shape.
        shape: Vec<u64>,
        /// The shape that it stands for.
        wanted: Vec<u64>,
    },
    /// Some sections of a parameter are there without the others.
    #[error("stored in sections {}, where {} make it up", found.join(", "), wanted.join(", "))]
    SectionsIncomplete {
        /// Sections found.
        found: Vec<String>,
        /// All the sections that there should be.
        wanted: Vec<String>,
    },
    /// One half of a pair is there without the other.
    #[error("its other half {other} is missing")]
    HalfMissing {
        /// Canonical name of the other half.
        other: String,
    },
    /// The rows of the first linear fit neither a gated nor a plain MLP.
    #[error("{rows} rows are neither once nor twice the {columns} columns of linear_fc2")]
    NeitherGatedNorNot {
        /// Rows over all shards.
        rows: u64,
        /// Columns of the second linear over all shards.
        columns: u64,
    },
    /// The rows are not what the sections add up to.
    #[error("{rows} rows, where the model's dimensions give {wanted}")]
    UnexpectedRows {
        /// Rows found.
        rows: u64,
        /// Rows expected.
        wanted: u64,
    },
    /// The experts cannot be shared out evenly.
    #[error("{experts} experts cannot be shared by {shares} ranks")]
    ExpertsNotDivisible {
        /// Experts of a layer.
        experts: u64,
        /// Ranks that share them.
        shares: u64,
    },
    /// More experts than the limit.
    #[error("{experts} experts on one rank are more than any model has")]
    TooManyExperts {
        /// Experts of a layer on one rank.
        experts: u64,
    },
    /// A layer or expert index that no model has.
    #[error("its {what} index is larger than that of any model")]
    IndexTooLarge {
        /// What is counted.
        what: &'static str,
    },
    /// More lists of layers than the limit.
    #[error("more than {} lists of layers, more than any model has", LIMITS.stacks)]
    TooManyStacks,
    /// Tensors come to more than the limit.
    #[error("with it the tensors fall into more parts than those of any model")]
    TooManyParts,
    /// A rank holds another number of experts than it should.
    #[error("a rank holds {found} experts where there should be {expected}")]
    UnevenExperts {
        /// Experts of the rank.
        found: u64,
        /// Experts that another rank holds, or that `args` gives it.
        expected: u64,
    },
    /// A fused tensor has the wrong number of dimensions.
    #[error("shape {shape:?} is no matrix")]
    NotAMatrix {
        /// The stored shape.
        shape: Vec<u64>,
    },
    /// A fused tensor's memory cannot be read under its real shape.
    #[error("a tensor of shape {shape:?} with these strides cannot be seen as {wanted:?}")]
    NotContiguous {
        /// The stored shape.
        shape: Vec<u64>,
        /// The shape that it really has.
        wanted: Vec<u64>,
    },
    /// Two stored names become one on the same rank.
    #[error("also stored as {other} on the same rank")]
    Duplicate {
        /// The other stored name.
        other: String,
    },
    /// Rank folders with different numbers of parts.
    #[error("rank folders have names of different forms (mp_rank_TT, mp_rank_TT_PPP, ...)")]
    MixedNames,
    /// Experts whose parts were written over one another.
    #[error(
        "expert_tensor_parallel_size={etp} with tensor_model_parallel_size={tp}: ranks that share a \
         folder wrote over each other, so the experts cannot be recovered from this checkpoint"
    )]
    ExpertsLost {
        /// Tensor parallel size.
        tp: u64,
        /// Tensor parallel size of the experts.
        etp: u64,
    },
    /// A layout that cannot be put together from its files.
    #[error("{arg} is set: {reason}, so this layout cannot be put together")]
    Refused {
        /// The attribute of `args`.
        arg: &'static str,
        /// Why not.
        reason: &'static str,
    },
    /// The layers cannot be numbered.
    #[error(transparent)]
    Numbering(#[from] NumberingError),
    /// The parts do not fit together.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// In which order megatron.legacy wrote the rows of `query_key_value` and `key_value`
/// (Megatron-LM v2.0, `megatron/checkpointing.py`, `fix_query_key_value_ordering`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadOrder {
    /// `[sections, heads, size]`: `checkpoint_version` 0, or none.
    SectionsFirst,
    /// `[heads, size, sections]`: version 1.
    SectionsLast,
    /// `[heads, sections, size]`: version 2 and later, and all of Megatron-Core.
    HeadsFirst,
}

impl HeadOrder {
    /// The order of a `checkpoint_version`.
    #[must_use]
    pub fn of_version(version: Option<f64>) -> Self {
        match version {
            Some(version) if version >= 2.0 => Self::HeadsFirst,
            Some(version) if version >= 1.0 => Self::SectionsLast,
            _ => Self::SectionsFirst,
        }
    }
}

/// Puts the shards of a model together.
#[must_use]
pub fn assemble(
    shards: Vec<Shard>,
    layout: &ParallelLayout,
    args: &RunArgs,
    order: HeadOrder,
    rules: &Rules,
) -> Assembly {
    assemble_beside(shards, Vec::new(), layout, args, order, rules)
}

/// Puts shards together that are only some of a model's: shape_only stand in for the others where layers are numbered
/// and shapes are asked for, and are no part of any result.
#[must_use]
pub fn assemble_beside(
    shards: Vec<Shard>,
    shape_only: Vec<Shard>,
    layout: &ParallelLayout,
    args: &RunArgs,
    order: HeadOrder,
    rules: &Rules,
) -> Assembly {
    let mut assembly = Assembly::default();
    let all = shards.iter().chain(&shape_only);
    let dialect = Dialect::detect(all.map(|shard| &*shard.name));
    let shards = shards.into_iter().map(|shard| (shard, false));
    let shape_only = shape_only.into_iter().map(|shard| (shard, true));
    let ranks = by_rank(shards.chain(shape_only), &dialect, layout, args, &mut assembly);
    let mut locals = Vec::new();
    for (rank, tensors) in &ranks {
        locals.extend(unfuse(tensors, *rank, layout, args, order, |named, error| {
            assembly.problems.push((named.stored_name.to_string(), error));
        }));
    }
    let groups = numbered(locals, ranks.keys(), layout, args, &mut assembly);
    merge(&groups, layout, args, rules, &mut assembly);
    assembly
}

/// Puts shards together that come with the name of the whole, layers numbered.
#[must_use]
pub fn assemble_named(
    shards: Vec<(Name, Shard)>,
    layout: &ParallelLayout,
    args: &RunArgs,
    rules: &Rules,
) -> Assembly {
    let mut assembly = Assembly::default();
    let mut groups = RankParts::new();
    for (name, Shard { name: stored_name, rank, tensor }) in shards {
        let tensor = LogicalTensor::from_stored(&tensor, stored_name);
        groups.entry(name).or_default().push(RankPart::new(rank, tensor));
    }
    merge(&groups, layout, args, rules, &mut assembly);
    assembly
}

fn merge(
    groups: &RankParts,
    layout: &ParallelLayout,
    args: &RunArgs,
    rules: &Rules,
    assembly: &mut Assembly,
) {
    let ParallelLayout { tp, etp, .. } = *layout;
    let merger = Merger { parts: groups, rules, args, tp, etp, row_biases: RowBiases::Copies };
    for (name, parts) in groups {
        if parts.iter().all(|part| part.is_shape_only) {
            assembly.shape_only_names.insert(untied_name(name));
            continue;
        }
        match merger.merge(name, parts) {
            Ok(merged) if is_tied_copy(name) => {
                assembly.tied_copies.insert(untied_name(name), merged.tensor);
            }
            Ok(merged) => {
                assembly.tensors.insert(name.clone(), merged);
            }
            Err(error) => assembly.problems.push((name.to_string(), error)),
        }
    }
}

/// Whether a canonical name is that of a routed expert's parameter.
fn is_expert(name: &str) -> bool {
    name.contains(".experts.local_experts.")
}

/// Tied copies are merged beside the parameters, under a name that no parameter has.
const TIED_PREFIX: &str = "(tied).";

fn is_tied_copy(name: &Name) -> bool {
    name.as_str().starts_with(TIED_PREFIX)
}

fn untied_name(name: &Name) -> Name {
    Name::new(name.as_str().trim_start_matches(TIED_PREFIX))
}

/// Sorts the shards by rank and canonical name.
fn by_rank(
    shards: impl Iterator<Item = (Shard, bool)>,
    dialect: &Dialect,
    layout: &ParallelLayout,
    args: &RunArgs,
    assembly: &mut Assembly,
) -> BTreeMap<RankCoord, RankTensors> {
    let tied = layout.pp > 1 && args.are_weights_tied();
    let mut ranks: BTreeMap<RankCoord, RankTensors> = BTreeMap::new();
    for (Shard { name: stored_name, rank, tensor: stored }, is_shape_only) in shards {
        let tensors = ranks.entry(rank).or_default();
        let name = match dialect.canonical(&stored_name) {
            Canonical::Buffer => {
                assembly.buffers += 1;
                continue;
            }
            Canonical::TiedCopy(name) => format!("{TIED_PREFIX}{name}"),
            Canonical::Parameter(name) if tied && name == "output_layer.weight" => {
                format!("{TIED_PREFIX}{name}")
            }
            Canonical::Parameter(name) => name,
        };
        if let Some(what) = excessive_index(&name) {
            let error = LayoutError::IndexTooLarge { what };
            assembly.problems.push((stored_name.to_string(), error));
            continue;
        }
        let named =
            Named { stored_name: Arc::clone(&stored_name), stored: stored.clone(), is_shape_only };
        match tensors.insert(name, named) {
            // A module registered under two names, as T5's output layer is: the very same bytes.
            Some(other) if other.stored == stored => {}
            Some(other) => {
                let other = other.stored_name.to_string();
                assembly.problems.push((stored_name.to_string(), LayoutError::Duplicate { other }));
            }
            None => {}
        }
    }
    ranks
}

/// Gives every tensor its global name. A list of layers or experts that cannot be numbered is left out and reported.
fn numbered<'r>(
    locals: Vec<Local>,
    ranks: impl Iterator<Item = &'r RankCoord>,
    layout: &ParallelLayout,
    args: &RunArgs,
    assembly: &mut Assembly,
) -> RankParts {
    let virtual_stages = ranks.map(|rank| rank.vp + 1).max().unwrap_or(1);
    let chunk = |vp| (0..layout.pp).map(move |pp| Chunk { vp, pp });
    let chunks: BTreeSet<Chunk> = (0..virtual_stages).flat_map(chunk).collect();
    let layers = number_layers(&locals, &chunks, args, assembly);
    let experts = count_experts(&locals, layout, args, assembly);
    let mut groups = RankParts::new();
    for mut local in locals {
        let chunk = local.part.rank.chunk();
        if let Some((before, index, rest)) = split_expert(&local.name) {
            let count = experts.get(&chunk).and_then(|lists| lists.get(before));
            let Some(count) = count else { continue };
            let numbers =
                ExpertNumbers { local: *count, slot: layout.expert_slot(local.part.rank) };
            local.name = format!("{before}{}{rest}", numbers.global(index));
        }
        if let Some(layer) = LayerName::parse(&local.name) {
            let Some(numbers) = layers.get(layer.stack) else { continue };
            local.name = layer.with_index(numbers.global(chunk, layer.index));
        }
        groups.entry(Name::new(local.name.as_str())).or_default().push(local.part);
    }
    groups
}

fn number_layers(
    locals: &[Local],
    chunks: &BTreeSet<Chunk>,
    args: &RunArgs,
    assembly: &mut Assembly,
) -> BTreeMap<String, LayerNumbers> {
    let mut counts: BTreeMap<&str, BTreeMap<Chunk, u64>> = BTreeMap::new();
    for local in locals {
        let Some(layer) = LayerName::parse(&local.name) else { continue };
        if counts.len() >= LIMITS.stacks && !counts.contains_key(layer.stack) {
            assembly.problems.push((format!("{}layers", layer.stack), LayoutError::TooManyStacks));
            break;
        }
        let stack = counts
            .entry(layer.stack)
            .or_insert_with(|| chunks.iter().map(|chunk| (*chunk, 0)).collect());
        let count = stack.entry(local.part.rank.chunk()).or_default();
        *count = (*count).max(layer.index.saturating_add(1));
    }
    let mut numbers = BTreeMap::new();
    for (stack, counts) in counts {
        match LayerNumbers::new(stack, &counts, args) {
            Ok(found) => {
                numbers.insert(stack.to_owned(), found);
            }
            Err(error) => assembly.problems.push((format!("{stack}layers"), error.into())),
        }
    }
    numbers
}

/// Experts of each list on each rank of a chunk, by the list's name with the rank's own layer index.
type ExpertCounts = HashMap<Chunk, HashMap<String, u64>>;

/// Counts the experts that a rank holds of each list. A list on whose length the ranks and `args` disagree is reported
/// and left out.
fn count_experts(
    locals: &[Local],
    layout: &ParallelLayout,
    args: &RunArgs,
    assembly: &mut Assembly,
) -> ExpertCounts {
    let mut by_rank: HashMap<(RankCoord, &str), u64> = HashMap::new();
    for local in locals {
        if let Some((list, index, _)) = split_expert(&local.name) {
            let count = by_rank.entry((local.part.rank, list)).or_default();
            *count = (*count).max(index.saturating_add(1));
        }
    }
    let mut extremes: HashMap<(Chunk, &str), [u64; 2]> = HashMap::new();
    for ((rank, list), found) in by_rank {
        let [least, most] = extremes.entry((rank.chunk(), list)).or_insert([found, found]);
        (*least, *most) = (found.min(*least), found.max(*most));
    }
    // The highest index tells, but where an expert was lost it tells too little.
    let shares = layout.declared_expert_shares;
    let declared = args.size("num_experts").filter(|experts| experts.is_multiple_of(shares));
    let declared = declared.map(|experts| experts / shares);
    let mut counts = ExpertCounts::new();
    let mut uneven = BTreeMap::new();
    for ((chunk, list), [least, most]) in extremes {
        let expected = declared.unwrap_or(most);
        let fits = if declared.is_some() { most <= expected } else { least == most };
        if fits {
            counts.entry(chunk).or_default().insert(list.to_owned(), expected);
        } else {
            let found = if most > expected { most } else { least };
            uneven.insert((chunk, list), LayoutError::UnevenExperts { found, expected });
        }
    }
    for ((_, list), error) in uneven {
        assembly.problems.push((list.to_owned(), error));
    }
    counts
}
