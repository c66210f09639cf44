//! The parameters of a model and the part of each that a rank holds.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::extent;
use crate::layout::numbering::split_expert;
use crate::layout::rules::{Fused, Rules, Sharding};
use crate::layout::{ArgName, LayoutError, Merged, RunArgs};
use crate::names::Name;
use crate::names::megatron::is_trained;
use crate::tensor::TensorError;

use super::BucketsError;
use super::order::{ExpertModules, ModelPart, ParamOrder, Position};

/// The axes of the ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axes {
    pub tp: u64,
    pub pp: u64,
    /// Model chunks of a stage.
    pub vp: u64,
    pub ep: u64,
    pub etp: u64,
}

impl Axes {
    fn new(args: &RunArgs) -> Self {
        let size = |arg| args.size(arg).unwrap_or(1).max(1);
        let tp = size(ArgName::TENSOR_MODEL_PARALLEL_SIZE);
        let etp = args.size(ArgName::EXPERT_TENSOR_PARALLEL_SIZE).filter(|&etp| etp > 0);
        Self {
            tp,
            pp: size(ArgName::PIPELINE_MODEL_PARALLEL_SIZE),
            vp: size(ArgName::VIRTUAL_PIPELINE_MODEL_PARALLEL_SIZE),
            ep: size(ArgName::EXPERT_MODEL_PARALLEL_SIZE),
            etp: etp.unwrap_or(tp),
        }
    }
}

/// A parameter of the whole model.
#[derive(Debug)]
pub(super) struct Param<'a> {
    pub name: &'a Name,
    pub part: ModelPart,
    /// The name within its part.
    rest: &'a str,
    /// The expert of its layer that it belongs to.
    pub expert: Option<u64>,
    pub dtype: &'static str,
    /// The shape of the part that one rank holds.
    pub shape: Vec<u64>,
    pub numel: u64,
}

/// A stretch of a buffer: one stored parameter, which may be those of several experts.
#[derive(Debug, Clone)]
pub(super) struct Slot<'m, 'a> {
    pub params: Vec<&'m Param<'a>>,
    pub numel: u64,
    /// Each of the parameters lies there with its rows for columns.
    pub is_transposed: bool,
    /// It is the copy of the word embeddings that the last stage has as its output layer.
    pub is_tied_copy: bool,
}

/// A model by its parameters.
#[derive(Debug)]
pub(super) struct Model<'a> {
    pub axes: Axes,
    pub layers: u64,
    params: Vec<Param<'a>>,
    /// Experts of a layer on one rank.
    local_experts: u64,
    /// The last stage keeps a copy of the word embeddings as its output layer.
    has_tied_copy: bool,
    predicts_further: bool,
}

/// The parameters that one buffer's optimizer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// All of them.
    All,
    /// All but those of routed experts.
    Dense,
    /// Those of the experts of this rank.
    Experts(u64),
}

/// The parts of the model that a chunk holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkParts {
    pub first_layer: u64,
    pub end_layer: u64,
    pub is_first: bool,
    pub is_last: bool,
}

impl<'a> Model<'a> {
    pub(super) fn of(
        weights: &'a BTreeMap<Name, Merged>,
        args: &RunArgs,
        rules: &Rules,
    ) -> Result<Self, BucketsError> {
        let axes = Axes::new(args);
        let mut params = Vec::new();
        let mut layers = BTreeSet::new();
        let mut experts = 0;
        for (name, weight) in weights.iter().filter(|(name, _)| is_trained(name.as_str())) {
            let unknown = || BucketsError::UnknownOrder { name: name.clone() };
            let (part, rest) = ModelPart::of(name.as_str()).ok_or_else(unknown)?;
            let order = &ParamOrder::all(false, false)[0];
            order.position(part, rest).ok_or_else(unknown)?;
            let expert = split_expert(name.as_str()).map(|(_, expert, _)| expert);
            experts = experts.max(expert.map_or(0, |expert| expert + 1));
            if let ModelPart::Layer(index) = part {
                layers.insert(index);
            }
            let shape = local_shape(name.as_str(), weight, &axes, rules)
                .map_err(|reason| BucketsError::Weight { name: name.clone(), reason })?;
            let numel = extent::numel(&shape).unwrap_or(0);
            let dtype = weight.tensor.dtype().name();
            params.push(Param { name, part, rest, expert, dtype, shape, numel });
        }
        let local_experts = experts / axes.ep;
        if local_experts * axes.ep != experts {
            let reason = LayoutError::ExpertsNotDivisible { experts, shares: axes.ep };
            let name = Name::new("mlp.experts");
            return Err(BucketsError::Weight { name, reason });
        }
        let predicts_further = params.iter().any(|param| matches!(param.part, ModelPart::Mtp(_)));
        let has_output = params.iter().any(|param| param.part == ModelPart::Output);
        let has_tied_copy = axes.pp > 1 && !has_output && args.are_weights_tied();
        let layers = layers.last().map_or(0, |last| last + 1);
        Ok(Self { axes, layers, params, local_experts, has_tied_copy, predicts_further })
    }

    /// Tells whether every parameter has its place in this order.
    pub(super) fn is_known_in(&self, order: &ParamOrder) -> bool {
        self.params.iter().all(|param| order.position(param.part, param.rest).is_some())
    }

    /// Number of elements and parameters in each layer of the decoder on a rank.
    pub(super) fn layer_sizes(&self, kind: Kind) -> Vec<[u64; 2]> {
        let mut sizes: Vec<[u64; 2]> = (0..self.layers).map(|_| [0, 0]).collect();
        for param in self.params.iter().filter(|param| self.is_of(param, kind)) {
            let ModelPart::Layer(index) = param.part else { continue };
            let size = usize::try_from(index).ok().and_then(|index| sizes.get_mut(index));
            if let Some([numel, params]) = size {
                (*numel, *params) = (numel.saturating_add(param.numel), *params + 1);
            }
        }
        sizes
    }

    pub(super) fn has_experts(&self) -> bool {
        self.local_experts > 0
    }

    pub(super) fn has_latent_attention(&self) -> bool {
        self.params.iter().any(|param| param.rest.starts_with("self_attention.linear_kv_up_proj."))
    }

    /// The parameters of a chunk in the order of its buffers, which is the reverse of the model's.
    pub(super) fn slots(
        &self,
        order: &ParamOrder,
        chunk: ChunkParts,
        kind: Kind,
    ) -> Vec<Slot<'_, 'a>> {
        let mut found: Vec<((ModelPart, Option<Position>), &Param<'a>)> = Vec::new();
        for param in self.params.iter().filter(|param| self.is_of(param, kind)) {
            let place = |part| (part, order.position(param.part, param.rest));
            if self.holds(chunk, param.part) {
                found.push((place(param.part), param));
            }
            let is_word_embedding =
                param.part == ModelPart::Embedding && param.rest == "word_embeddings.weight";
            if is_word_embedding && self.has_tied_copy && chunk.is_last {
                found.push((place(ModelPart::Output), param));
            }
        }
        found.sort_by_key(|(place, _)| *place);
        let mut slots: Vec<Slot<'_, 'a>> = Vec::with_capacity(found.len());
        for ((part, position), param) in found {
            let is_flat = order.experts == ExpertModules::Flat && param.expert.is_some();
            let linear = |position: Option<Position>| {
                position.map(|[before, module, linear, ..]| [before, module, linear])
            };
            let is_next = |last: &Slot<'_, 'a>| {
                let [.., other] = last.params[..] else { return false };
                let other_place = order.position(other.part, other.rest);
                other.part == part
                    && other.expert.is_some()
                    && linear(other_place) == linear(position)
            };
            match slots.last_mut() {
                Some(last) if is_flat && is_next(last) => {
                    last.params.push(param);
                    last.numel = last.numel.saturating_add(param.numel);
                }
                _ => slots.push(Slot {
                    params: vec![param],
                    numel: param.numel,
                    is_transposed: is_flat,
                    is_tied_copy: part == ModelPart::Output && param.part == ModelPart::Embedding,
                }),
            }
        }
        slots.reverse();
        slots
    }

    fn is_of(&self, param: &Param<'a>, kind: Kind) -> bool {
        match (kind, param.expert) {
            (Kind::All, _) | (Kind::Dense, None) => true,
            (Kind::Experts(rank), Some(expert)) => expert / self.local_experts.max(1) == rank,
            (Kind::Dense, Some(_)) | (Kind::Experts(_), None) => false,
        }
    }

    fn holds(&self, chunk: ChunkParts, part: ModelPart) -> bool {
        match part {
            ModelPart::Embedding => chunk.is_first || (chunk.is_last && self.predicts_further),
            ModelPart::Layer(index) => (chunk.first_layer..chunk.end_layer).contains(&index),
            ModelPart::FinalNorm | ModelPart::Mtp(_) | ModelPart::Output => chunk.is_last,
        }
    }
}

/// The shape of the part of a weight that each rank holds.
fn local_shape(
    name: &str,
    weight: &Merged,
    axes: &Axes,
    rules: &Rules,
) -> Result<Vec<u64>, LayoutError> {
    let mut shape = weight.tensor.shape().to_vec();
    let ranks = if split_expert(name).is_some() { axes.etp } else { axes.tp };
    if ranks == 1 {
        return Ok(shape);
    }
    let dim = match rules.find(name).ok_or(LayoutError::NoRule)? {
        Sharding::Replicated | Sharding::Averaged | Sharding::RowBias => return Ok(shape),
        // Split or not, as the pieces of the weight itself show.
        Sharding::Latent(_) if weight.tensor.pieces().len() < 2 => return Ok(shape),
        Sharding::Split(dim) | Sharding::Sections { dim, .. } => *dim,
        Sharding::DeltaNet(Fused::OutProj) => 1,
        Sharding::Vocab
        | Sharding::Halves
        | Sharding::Gated
        | Sharding::QueryKeyValue
        | Sharding::Heads
        | Sharding::Mamba(_)
        | Sharding::DeltaNet(_)
        | Sharding::Latent(_) => 0,
    };
    match shape.get_mut(dim) {
        Some(size) if size.is_multiple_of(ranks) => *size /= ranks,
        _ => return Err(TensorError::NotDivisible { dim, inner: ranks, shape }.into()),
    }
    Ok(shape)
}
