//! The place of every rank's parameters in its buffers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::base::limits::{LIMITS, OverLimit};
use crate::layout::{
    ArgName, BufferForm, BufferParam, BufferProof, GradBuffer, ParamStart, RankCoord,
};
use crate::names::Name;

use super::model::{ChunkParts, Kind, Model, Slot};
use super::order::ParamOrder;
use super::{BucketedStates, BucketsError, StateBuffer};

/// The optimizer of one rank.
#[derive(Debug)]
struct RankOptimizer {
    /// The rank, its virtual stage left open.
    rank: RankCoord,
    kind: Kind,
    /// Its buffers in order, by their index among all.
    buffers: Vec<usize>,
}

/// What a buffer is stored in.
#[derive(Debug)]
struct StoredSizes {
    numels: Vec<u64>,
    /// The first element of each piece of each tensor, where pieces tell anything.
    pieces: Option<Vec<Vec<u64>>>,
}

/// A parameter of one rank in a stored tensor.
#[derive(Debug, PartialEq)]
pub(super) struct Placed<'m> {
    pub rank: RankCoord,
    /// The index of its buffer.
    pub buffer: usize,
    /// The index of the tensor among those of the buffer.
    pub tensor: usize,
    pub range: Range<u64>,
    pub name: &'m Name,
    /// The shape of the rank's part.
    pub shape: &'m [u64],
    pub is_transposed: bool,
    pub is_tied_copy: bool,
}

/// Finder of the one plan that all buffers fit.
pub(super) struct Planner<'a, 'm> {
    states: &'a BucketedStates<'a>,
    model: &'m Model<'a>,
    ranks: Vec<RankOptimizer>,
    sizes: Vec<StoredSizes>,
    /// Elements and parameters in each layer of the decoder, in the first optimizer of a rank.
    layers: Vec<[u64; 2]>,
    dtypes: usize,
}

impl<'a, 'm> Planner<'a, 'm> {
    pub(super) fn new(
        states: &'a BucketedStates<'a>,
        model: &'m Model<'a>,
    ) -> Result<Self, BucketsError> {
        if model.axes.vp > LIMITS.chunks {
            let over = OverLimit::found("model chunks of a stage", LIMITS.chunks, model.axes.vp);
            return Err(over.into());
        }
        let ranks = rank_optimizers(states, model)?;
        let sizes = states.buffers.iter().map(stored_sizes).collect::<Result<_, _>>()?;
        let layers = model.layer_sizes(ranks.first().map_or(Kind::All, |rank| rank.kind));
        let dtypes: BTreeSet<&str> = states.buffers.iter().map(|buffer| &*buffer.dtype).collect();
        Ok(Self { states, model, ranks, sizes, layers, dtypes: dtypes.len() })
    }

    /// Places the parameters of all ranks, with those of a model chunk in this order.
    ///
    /// # Errors
    /// A buffer fits no number of layers, or is left over.
    pub(super) fn plan(&self, order: &ParamOrder) -> Result<Vec<Placed<'m>>, BucketsError> {
        let axes = self.model.axes;
        let mut used = vec![0; self.ranks.len()];
        let mut placed = Vec::new();
        let mut first_layer = 0;
        for vp in 0..axes.vp {
            for pp in 0..axes.pp {
                let parts = ChunkParts {
                    first_layer,
                    end_layer: first_layer,
                    is_first: (vp, pp) == (0, 0),
                    is_last: (vp + 1, pp + 1) == (axes.vp, axes.pp),
                };
                let stage = Stage { planner: self, order, pp, vp };
                let found = stage.place(parts, &used)?;
                first_layer = found.end_layer;
                used = found.used;
                placed.extend(found.placed);
            }
        }
        for (rank, used) in self.ranks.iter().zip(used) {
            if let Some(&buffer) = rank.buffers.get(used) {
                let StateBuffer { label, dtype, .. } = &self.states.buffers[buffer];
                return Err(BucketsError::NoParams { label: label.clone(), dtype: dtype.clone() });
            }
        }
        Ok(placed)
    }
}

/// The ranks of one model chunk.
struct Stage<'p, 'a, 'm> {
    planner: &'p Planner<'a, 'm>,
    order: &'p ParamOrder,
    pp: u64,
    vp: u64,
}

/// A model chunk in its place.
struct PlacedChunk<'m> {
    end_layer: u64,
    placed: Vec<Placed<'m>>,
    /// Buffers of each rank that are in use by now.
    used: Vec<usize>,
}

impl<'m> Stage<'_, '_, 'm> {
    /// Places a chunk with as many layers as its buffers hold.
    fn place(&self, parts: ChunkParts, used: &[usize]) -> Result<PlacedChunk<'m>, BucketsError> {
        let (first, layers) = (parts.first_layer, self.planner.model.layers);
        // Without layers a chunk may have no parameters at all, and then fits whatever there is.
        let ends: Vec<u64> = match parts.is_last {
            true => vec![layers],
            false => (first + 1..=layers).chain([first]).collect(),
        };
        let mut failure = None;
        for end_layer in ends {
            let parts = ChunkParts { end_layer, ..parts };
            if !parts.is_last && !self.may_hold(parts, used) {
                continue;
            }
            match self.try_layers(parts, used) {
                Ok(found) => return Ok(found),
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| BucketsError::Layers { label: self.label(used) }))
    }

    /// The first of its buffers, for messages.
    fn label(&self, used: &[usize]) -> String {
        let mut ranks =
            self.planner.ranks.iter().zip(used).filter(|(rank, _)| rank.rank.pp == self.pp);
        let buffer = ranks.find_map(|(rank, used)| rank.buffers.get(*used));
        buffer.map_or_else(
            || format!("stage {}", self.pp),
            |&buffer| self.planner.states.buffers[buffer].label.clone(),
        )
    }

    /// Tells from the number of elements whether the first rank's buffer may hold these layers; so only one or two
    /// numbers of layers are ever tried.
    fn may_hold(&self, parts: ChunkParts, used: &[usize]) -> bool {
        let planner = self.planner;
        let rank = planner.ranks.iter().zip(used).find(|(rank, _)| rank.rank.pp == self.pp);
        let buffer = rank.and_then(|(rank, used)| rank.buffers.get(*used));
        let (1, Some(&buffer)) = (planner.dtypes, buffer) else { return true };
        let range = |layer: u64| usize::try_from(layer).unwrap_or(usize::MAX);
        let layers = planner.layers.get(range(parts.first_layer)..range(parts.end_layer));
        let [numel, params] =
            layers.unwrap_or_default().iter().fold([0_u64, 0_u64], |sum, layer| {
                [sum[0].saturating_add(layer[0]), sum[1].saturating_add(layer[1])]
            });
        let stored: u64 =
            planner.sizes[buffer].numels.iter().fold(0, |sum, size| sum.saturating_add(*size));
        let is_unpadded = planner.states.buffers[buffer].form != BufferForm::Buckets;
        // A gap before each parameter; embeddings are in the first chunk besides its layers.
        let most = numel.saturating_add((params + 8) * 64);
        numel <= stored && (parts.is_first || !is_unpadded || stored <= most)
    }

    fn try_layers(
        &self,
        parts: ChunkParts,
        used: &[usize],
    ) -> Result<PlacedChunk<'m>, BucketsError> {
        let planner = self.planner;
        let mut found =
            PlacedChunk { end_layer: parts.end_layer, placed: Vec::new(), used: used.to_vec() };
        let mut slots: Option<(Kind, Vec<Slot<'m, '_>>)> = None;
        for (rank, used) in planner.ranks.iter().zip(&mut found.used) {
            if rank.rank.pp != self.pp {
                continue;
            }
            let slots = match &mut slots {
                Some((kind, slots)) if *kind == rank.kind => slots,
                other => {
                    let slots = planner.model.slots(self.order, parts, rank.kind);
                    &mut other.insert((rank.kind, slots)).1
                }
            };
            for (dtype, slots) in by_dtype(slots) {
                let next = rank.buffers.get(*used);
                let Some(&buffer) = next else {
                    let first = slots.last().and_then(|slot| slot.params.first());
                    let name = first.map_or_else(|| Name::new(""), |param| param.name.clone());
                    return Err(BucketsError::NoBuffer { name });
                };
                *used += 1;
                self.fill(rank, buffer, dtype, &slots, &mut found.placed)?;
            }
        }
        Ok(found)
    }

    /// Places the parameters of one buffer.
    fn fill(
        &self,
        rank: &RankOptimizer,
        buffer: usize,
        dtype: &str,
        slots: &[&Slot<'m, '_>],
        placed: &mut Vec<Placed<'m>>,
    ) -> Result<(), BucketsError> {
        let StateBuffer { label, dtype: stored, form, versions, .. } =
            &self.planner.states.buffers[buffer];
        if !stored.contains(dtype) {
            let (label, dtype) = (label.clone(), stored.clone());
            return Err(BucketsError::NoParams { label, dtype });
        }
        let args = self.planner.states.args;
        let param = |slot: &&Slot<'_, '_>| {
            let name = slot.params.first().map_or("", |param| param.name.as_str());
            let name = if slot.is_tied_copy { "output_layer.weight" } else { name };
            BufferParam::new(name, slot.numel, args)
        };
        let params: Vec<BufferParam> = slots.iter().map(param).collect();
        let rank_numel = slots.iter().fold(0, |sum: u64, slot| sum.saturating_add(slot.numel));
        let is_expert_parallel = matches!(rank.kind, Kind::Experts(_));
        let grad_buffer = GradBuffer { params, is_expert_parallel, rank_numel, args };
        let sizes = &self.planner.sizes[buffer];
        let proof = sizes.pieces.as_deref().map_or(BufferProof::Sizes, BufferProof::Pieces);
        let starts = grad_buffer
            .param_starts(versions, *form, &sizes.numels, proof)
            .map_err(|reason| BucketsError::Buffer { label: label.clone(), reason })?;
        let rank = RankCoord { vp: self.vp, ..rank.rank };
        for (slot, ParamStart { tensor, offset }) in slots.iter().zip(starts) {
            let mut start = offset;
            for param in &slot.params {
                let range = start..start + param.numel;
                start = range.end;
                placed.push(Placed {
                    rank,
                    buffer,
                    tensor,
                    range,
                    name: param.name,
                    shape: &param.shape,
                    is_transposed: slot.is_transposed,
                    is_tied_copy: slot.is_tied_copy,
                });
            }
        }
        Ok(())
    }
}

/// The parameters by dtype, dtypes in the order of the model.
fn by_dtype<'s, 'm, 'a>(slots: &'s [Slot<'m, 'a>]) -> Vec<(&'static str, Vec<&'s Slot<'m, 'a>>)> {
    let mut dtypes: Vec<(&'static str, Vec<&'s Slot<'m, 'a>>)> = Vec::new();
    let dtype = |slot: &Slot<'_, '_>| slot.params.first().map_or("", |param| param.dtype);
    for slot in slots.iter().rev() {
        match dtypes.iter_mut().find(|(known, _)| *known == dtype(slot)) {
            Some((_, slots)) => slots.push(slot),
            None => dtypes.push((dtype(slot), vec![slot])),
        }
    }
    for (_, slots) in &mut dtypes {
        slots.reverse();
    }
    dtypes
}

fn stored_sizes(buffer: &StateBuffer) -> Result<StoredSizes, BucketsError> {
    let mut kinds = buffer.states.values();
    let numels =
        |tensors: &Vec<_>| tensors.iter().map(crate::tensor::LogicalTensor::numel).collect();
    let first = kinds.next();
    let sizes: Vec<u64> = first.map(numels).unwrap_or_default();
    if kinds.any(|tensors| numels(tensors) != sizes) {
        return Err(BucketsError::StatesDiffer { label: buffer.label.clone() });
    }
    let starts = |tensor: &crate::tensor::LogicalTensor| {
        let starts =
            tensor.pieces().iter().filter_map(|piece| piece.extent.offsets.first().copied());
        let mut starts: Vec<u64> = starts.collect();
        starts.sort_unstable();
        starts
    };
    let pieces = first.map(|tensors| tensors.iter().map(starts).collect());
    Ok(StoredSizes { numels: sizes, pieces: pieces.filter(|_| buffer.has_pieces) })
}

/// The optimizers of all ranks, dense ones first, with the buffers of each.
fn rank_optimizers(
    states: &BucketedStates<'_>,
    model: &Model<'_>,
) -> Result<Vec<RankOptimizer>, BucketsError> {
    let mut stored: BTreeMap<u64, BTreeMap<u64, Vec<usize>>> = BTreeMap::new();
    for (index, buffer) in states.buffers.iter().enumerate() {
        stored.entry(buffer.optimizer).or_default().entry(buffer.group).or_default().push(index);
    }
    for buffers in stored.values_mut().flat_map(BTreeMap::values_mut) {
        buffers.sort_by_key(|&index| states.buffers[index].number);
    }
    let axes = model.axes;
    let found = stored.len() as u64;
    let mut stored = stored.into_values();
    let (Some(dense), experts, None) = (stored.next(), stored.next(), stored.next()) else {
        return Err(BucketsError::Optimizers { found });
    };
    let kind = if experts.is_some() { Kind::Dense } else { Kind::All };
    let dense_rank = |group: u64| {
        (RankCoord { tp: group % axes.tp, pp: group / axes.tp, ..RankCoord::default() }, kind)
    };
    let arg = ArgName::TENSOR_MODEL_PARALLEL_SIZE;
    let wanted = axes.tp.checked_mul(axes.pp);
    let mut ranks = by_group(dense, wanted, dense_rank, ["", arg.as_str()])?;
    let Some(experts) = experts else { return Ok(ranks) };
    let expert_rank = |group: u64| {
        let (tp, rest) = (group % axes.etp, group / axes.etp);
        let (ep, pp) = (rest % axes.ep, rest / axes.ep);
        (RankCoord { tp, pp, ep, vp: 0 }, Kind::Experts(ep))
    };
    let wanted = axes.etp.checked_mul(axes.ep).and_then(|ranks| ranks.checked_mul(axes.pp));
    let arg = ArgName::EXPERT_MODEL_PARALLEL_SIZE;
    ranks.extend(by_group(experts, wanted, expert_rank, [" with experts", arg.as_str()])?);
    Ok(ranks)
}

fn by_group(
    mut stored: BTreeMap<u64, Vec<usize>>,
    wanted: Option<u64>,
    rank: impl Fn(u64) -> (RankCoord, Kind),
    [kind, arg]: [&'static str; 2],
) -> Result<Vec<RankOptimizer>, BucketsError> {
    let wanted = wanted.unwrap_or(u64::MAX);
    let found = stored.last_key_value().map_or(0, |(last, _)| last.saturating_add(1));
    // A stage without any expert has no buffers for them.
    let is_complete = if kind.is_empty() { found == wanted } else { found <= wanted };
    if wanted > LIMITS.ranks || !is_complete {
        return Err(BucketsError::Groups { found, wanted, kind, arg });
    }
    let of_group = |group: u64| {
        let (rank, kind) = rank(group);
        RankOptimizer { rank, kind, buffers: stored.remove(&group).unwrap_or_default() }
    };
    Ok((0..wanted).map(of_group).collect())
}
