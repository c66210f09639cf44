//! The shards of a model -> whole tensors under global canonical names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::base::limits::{LIMITS, OverLimit};
use crate::names::Name;
use crate::names::megatron::{Canonical, Dialect};
use crate::tensor::{LogicalTensor, StoredTensor};

use super::merge::{Merger, RankPart, RankParts, RowBiases};
use super::numbering::{ExpertNumbers, LayerName, excessive_index, split_expert};
use super::replicas::{Lacking, lacking};
use super::rules::Rules;
use super::unfuse::{RankChunk, RankShards, RankTensor};
use super::{
    ArgName, HeadOrder, LayerNumbers, LayoutError, Merged, ModelChunk, ParallelLayout, RankCoord,
    RunArgs,
};

/// One rank's local tensor, its place in the whole still unknown.
#[derive(Debug, Clone)]
pub struct Shard {
    /// The name in the file.
    pub name: Arc<str>,
    /// The rank that stores it.
    pub rank: RankCoord,
    /// The stored tensor.
    pub tensor: StoredTensor,
    /// It only stands in for what is not there, where layers are numbered and shapes are asked for, and is no part of
    /// any result.
    pub is_shape_only: bool,
}

/// The tensors of a model put together.
#[derive(Debug, Default)]
pub struct Assembly {
    /// Whole tensors by canonical name.
    pub tensors: BTreeMap<Name, Merged>,
    /// The copy of the word embeddings that the last stage stores as its output layer though the weights are tied.
    pub tied_output: Option<LogicalTensor>,
    /// Tensors that could not be put together, by the name closest to the user's.
    pub problems: Vec<(String, LayoutError)>,
    /// Files that lack what others of their place hold, among the tensors that could be put together all the same.
    pub lacking: Vec<Lacking>,
    /// Stored entries that are no weights.
    pub buffers: usize,
    /// Names of which all shards are shape-only.
    pub shape_only_names: BTreeSet<Name>,
}

/// A model of which the shards are put together: what must be known of it beside them.
#[derive(Debug, Clone, Copy)]
pub struct ShardedModel<'a> {
    /// The ranks that it is spread over.
    pub layout: &'a ParallelLayout,
    /// The run's arguments.
    pub args: &'a RunArgs,
    /// The order of rows in its attention.
    pub order: HeadOrder,
    /// The sharding of its parameters.
    pub rules: &'a Rules,
}

/// The canonical name of the output layer, which may share the word embeddings.
const OUTPUT_LAYER: &str = "output_layer.weight";

/// The shards of one model chunk of one rank.
#[derive(Default)]
struct ChunkShards {
    parameters: RankShards,
    /// Copies of what other stages hold, by the name of the parameter that they stand for.
    tied_copies: RankShards,
}

impl ShardedModel<'_> {
    /// Puts the shards together.
    #[must_use]
    pub fn assemble(&self, shards: Vec<Shard>) -> Assembly {
        let mut assembly = Assembly::default();
        let chunks = self.by_rank(shards, &mut assembly);
        let mut tensors = Vec::new();
        let mut tied_copies = RankParts::new();
        for (rank, chunk) in &chunks {
            let parameters = RankChunk { shards: &chunk.parameters, rank: *rank, model: self };
            tensors.extend(parameters.unfuse(&mut assembly.problems));
            for (name, shard) in &chunk.tied_copies {
                tied_copies.entry(Name::new(name.as_str())).or_default().push(shard.part());
            }
        }
        let parts = self.numbered(tensors, chunks.keys(), &mut assembly);
        let tied_copies = self.merge(&tied_copies, &mut assembly);
        assembly.tied_output = tied_copies.into_values().next().map(|merged| merged.tensor);
        assembly.tensors = self.merge(&parts, &mut assembly);
        assembly
    }

    /// Puts shards together that come with the name of the whole, layers numbered.
    #[must_use]
    pub fn assemble_named(&self, shards: Vec<(Name, Shard)>) -> Assembly {
        let mut assembly = Assembly::default();
        let mut parts = RankParts::new();
        for (name, shard) in shards {
            parts.entry(name).or_default().push(shard.part());
        }
        assembly.tensors = self.merge(&parts, &mut assembly);
        assembly
    }

    fn merge(&self, parts: &RankParts, assembly: &mut Assembly) -> BTreeMap<Name, Merged> {
        let ParallelLayout { tp, etp, .. } = *self.layout;
        let (rules, args) = (self.rules, self.args);
        let merger = Merger { parts, rules, args, tp, etp, row_biases: RowBiases::Copies };
        let mut tensors = BTreeMap::new();
        for (name, parts) in parts {
            if parts.iter().all(|part| part.is_shape_only) {
                assembly.shape_only_names.insert(name.clone());
                continue;
            }
            match merger.merge(name, parts) {
                Ok(merged) => {
                    tensors.insert(name.clone(), merged);
                }
                Err(error) => assembly.problems.push((name.to_string(), error)),
            }
        }
        assembly.lacking.extend(lacking(parts, self.layout, |name| tensors.contains_key(name)));
        tensors
    }

    /// Sorts the shards by rank and canonical name.
    fn by_rank(
        &self,
        shards: Vec<Shard>,
        assembly: &mut Assembly,
    ) -> BTreeMap<RankCoord, ChunkShards> {
        let dialect = Dialect::detect(shards.iter().map(|shard| &*shard.name));
        let is_tied = self.layout.pp > 1 && self.args.are_weights_tied();
        let mut chunks: BTreeMap<RankCoord, ChunkShards> = BTreeMap::new();
        for shard in shards {
            let chunk = chunks.entry(shard.rank).or_default();
            let (name, by_name) = match dialect.canonical(&shard.name) {
                Canonical::Buffer => {
                    assembly.buffers += 1;
                    continue;
                }
                Canonical::TiedCopy(name) => (name, &mut chunk.tied_copies),
                Canonical::Parameter(name) if is_tied && name == OUTPUT_LAYER => {
                    (name, &mut chunk.tied_copies)
                }
                Canonical::Parameter(name) => (name, &mut chunk.parameters),
            };
            let mut problem = |error| assembly.problems.push((shard.name.to_string(), error));
            if let Some(over) = excessive_index(&name) {
                problem(over.into());
                continue;
            }
            // A module registered under two names, as T5's output layer is, stores the very same bytes.
            if let Some(other) = by_name.get(&name).filter(|other| other.tensor != shard.tensor) {
                problem(LayoutError::Duplicate { other: other.name.to_string() });
            }
            by_name.insert(name, shard);
        }
        chunks
    }

    /// Gives every tensor its global name. A list of layers or experts that cannot be numbered is left out and reported.
    fn numbered<'r>(
        &self,
        tensors: Vec<RankTensor>,
        ranks: impl Iterator<Item = &'r RankCoord>,
        assembly: &mut Assembly,
    ) -> RankParts {
        let virtual_stages = ranks.map(|rank| rank.vp + 1).max().unwrap_or(1);
        let chunk = |vp| (0..self.layout.pp).map(move |pp| ModelChunk { vp, pp });
        let chunks: BTreeSet<ModelChunk> = (0..virtual_stages).flat_map(chunk).collect();
        let layers = self.number_layers(&tensors, &chunks, assembly);
        let experts = self.count_experts(&tensors, assembly);
        let mut parts = RankParts::new();
        for RankTensor { mut name, part } in tensors {
            let chunk = part.rank.chunk();
            if let Some((before, index, rest)) = split_expert(&name) {
                let count = experts.get(&chunk).and_then(|lists| lists.get(before));
                let Some(count) = count else { continue };
                let slot = self.layout.expert_slot(part.rank);
                let numbers = ExpertNumbers { local: *count, slot };
                name = format!("{before}{}{rest}", numbers.global(index));
            }
            if let Some(layer) = LayerName::parse(&name) {
                let Some(numbers) = layers.get(layer.stack) else { continue };
                name = layer.with_index(numbers.global(chunk, layer.index));
            }
            parts.entry(Name::new(name)).or_default().push(part);
        }
        parts
    }

    fn number_layers(
        &self,
        tensors: &[RankTensor],
        chunks: &BTreeSet<ModelChunk>,
        assembly: &mut Assembly,
    ) -> BTreeMap<String, LayerNumbers> {
        let mut counts: BTreeMap<&str, BTreeMap<ModelChunk, u64>> = BTreeMap::new();
        for tensor in tensors {
            let Some(layer) = LayerName::parse(&tensor.name) else { continue };
            if counts.len() >= LIMITS.stacks && !counts.contains_key(layer.stack) {
                let list = format!("{}layers", layer.stack);
                let over = OverLimit::new("lists of layers", LIMITS.stacks as u64);
                assembly.problems.push((list, over.into()));
                break;
            }
            let stack = counts
                .entry(layer.stack)
                .or_insert_with(|| chunks.iter().map(|chunk| (*chunk, 0)).collect());
            let count = stack.entry(tensor.part.rank.chunk()).or_default();
            *count = (*count).max(layer.index.saturating_add(1));
        }
        let mut numbers = BTreeMap::new();
        for (stack, counts) in counts {
            match LayerNumbers::new(stack, &counts, self.args) {
                Ok(found) => {
                    numbers.insert(stack.to_owned(), found);
                }
                Err(error) => assembly.problems.push((format!("{stack}layers"), error.into())),
            }
        }
        numbers
    }

    /// Counts the experts that a rank holds of each list. A list on whose length the ranks and `args` disagree is reported
    /// and left out.
    fn count_experts(&self, tensors: &[RankTensor], assembly: &mut Assembly) -> ExpertCounts {
        let mut by_rank: HashMap<(RankCoord, &str), u64> = HashMap::new();
        for tensor in tensors {
            if let Some((list, index, _)) = split_expert(&tensor.name) {
                let count = by_rank.entry((tensor.part.rank, list)).or_default();
                *count = (*count).max(index.saturating_add(1));
            }
        }
        let mut extremes: HashMap<(ModelChunk, &str), [u64; 2]> = HashMap::new();
        for ((rank, list), found) in by_rank {
            let [least, most] = extremes.entry((rank.chunk(), list)).or_insert([found, found]);
            (*least, *most) = (found.min(*least), found.max(*most));
        }
        // The highest index tells, but where an expert was lost it tells too little.
        let shares = self.layout.declared_expert_shares;
        let declared =
            self.args.size(ArgName::NUM_EXPERTS).filter(|experts| experts.is_multiple_of(shares));
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
}

/// Experts of each list on each rank of a chunk, by the list's name with the rank's own layer index.
type ExpertCounts = HashMap<ModelChunk, HashMap<String, u64>>;

impl Shard {
    /// All of it as a view.
    pub(super) fn view(&self) -> LogicalTensor {
        LogicalTensor::from_stored(&self.tensor, Arc::clone(&self.name))
    }

    fn part(&self) -> RankPart {
        RankPart { is_shape_only: self.is_shape_only, ..RankPart::new(self.rank, self.view()) }
    }
}
