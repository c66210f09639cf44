//! ZeRO: flat partitions of the optimizer -> tensors. Nothing is moved: a parameter is pieces of the partitions.
//!
//! Facts from DeepSpeed 0.19 (`utils/zero_to_fp32.py`, `checkpoint/ds_to_universal.py`, `utils/groups.py`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use thiserror::Error;

use crate::base::extent::numel;
use crate::catalog::Problem;
use crate::names::index::split_index;
use crate::names::printable;
use crate::tensor::{LogicalTensor, StoredTensor, TensorError};

use super::states::{ModelStates, Shapes, ZeroStates, file_name};

/// A tensor of the optimizer.
pub(super) struct OptimizerState {
    /// `fp32_param`, `exp_avg`, ...
    pub state: String,
    /// The parameter that it belongs to.
    pub param: Arc<str>,
    pub tensor: LogicalTensor,
}

/// The masters and moments of one model parallel rank.
#[derive(Default)]
pub(super) struct OptimizerStates {
    pub found: Vec<OptimizerState>,
    pub problems: Vec<Problem>,
    /// `param_slice_mappings` says another order than `param_shapes`, which holds.
    pub is_reordered: bool,
}

/// Puts together what the ranks hold, which come in the order of their numbers: the parameters of every group.
pub(super) fn moments(shapes: &[Shapes], ranks: &[&ZeroStates]) -> OptimizerStates {
    let mut moments = OptimizerStates::default();
    let states: BTreeSet<&String> = ranks.iter().flat_map(|rank| rank.flats.keys()).collect();
    for state in states {
        let zero = Zero { shapes, ranks, state, moments: &mut moments };
        match ranks.iter().any(|rank| rank.is_stage3) {
            true => zero.stage3(),
            false => zero.stage1_and_2(),
        }
    }
    moments
}

/// Pieces of the frozen parameters of ZeRO-3, which every rank's model file has a part of.
pub(super) fn frozen(ranks: &[&ModelStates]) -> OptimizerStates {
    let mut moments = OptimizerStates::default();
    let shapes = ranks.first().map_or(&[][..], |rank| &rank.frozen_shapes);
    for (param, shape) in shapes {
        let fragments = ranks.iter().map(|rank| {
            let fragment = rank.frozen_fragments.get(param).ok_or_else(|| missing(&rank.path))?;
            flat(fragment, param)
        });
        let tensor = fragments
            .collect::<Result<Vec<_>, PartitionError>>()
            .and_then(|parts| Ok(LogicalTensor::concat(0, parts)?))
            .and_then(|whole| shaped(&whole, 0, shape));
        moments.add("frozen", param, tensor);
    }
    moments
}

/// The reason for which a parameter cannot be put together.
#[derive(Debug, Error)]
#[error("{0}")]
pub(super) struct PartitionError(String);

impl From<TensorError> for PartitionError {
    fn from(error: TensorError) -> Self {
        Self(error.to_string())
    }
}

fn missing(path: &std::path::Path) -> PartitionError {
    PartitionError(format!("{} holds no part of it", printable(&file_name(path))))
}

impl OptimizerStates {
    fn add(
        &mut self,
        state: &str,
        param: &Arc<str>,
        tensor: Result<LogicalTensor, PartitionError>,
    ) {
        match tensor {
            Ok(tensor) => {
                self.found.push(OptimizerState {
                    state: state.to_owned(),
                    param: Arc::clone(param),
                    tensor,
                });
            }
            Err(PartitionError(message)) => {
                let name = format!("optimizer.{state}.{param}");
                self.problems.push(Problem::of_tensor(name, message));
            }
        }
    }
}

/// The parameters of every group by what the partitions' writer says, where there are no `param_shapes`: those of a pipeline
/// with bf16 and without ZeRO (DeepSpeed 0.19.8, `runtime/bf16_optimizer.py`). A shape that `weight` does not know is that of
/// a vector.
pub(super) fn shapes_by_slices(
    ranks: &[&ZeroStates],
    weight: impl Fn(&str, u64) -> Option<Vec<u64>>,
) -> Option<Vec<Shapes>> {
    let by_rank: Vec<_> = ranks.iter().map(|rank| rank.slices.as_ref()).collect::<Option<_>>()?;
    let groups = by_rank.iter().map(|groups| groups.len()).max().unwrap_or(0);
    let of_group = |group: usize| {
        let mut counts: Vec<(&str, u64)> = Vec::new();
        for slices in by_rank.iter().filter_map(|groups| groups.get(group)) {
            for (param, count) in in_order(slices) {
                match counts.last_mut().filter(|(last, _)| *last == param) {
                    Some((_, held)) => *held = held.saturating_add(count),
                    None => counts.push((param, count)),
                }
            }
        }
        let shape = |(param, count): (&str, u64)| {
            (param.into(), weight(param, count).unwrap_or_else(|| vec![count]))
        };
        counts.into_iter().map(shape).collect()
    };
    Some((0..groups).map(of_group).collect())
}

/// The parts of parameters in a partition and their elements, from front to back; without those of none.
fn in_order(slices: &BTreeMap<String, (u64, u64)>) -> Vec<(&str, u64)> {
    let mut parts: Vec<_> = slices.iter().filter(|(_, (_, count))| *count > 0).collect();
    parts.sort_by_key(|(_, (start, _))| *start);
    parts.into_iter().map(|(param, (_, count))| (param.as_str(), *count)).collect()
}

/// Says whether the partitions hold the parameters in this order by what their writer says. With `round_robin_gradients` ZeRO-2
/// says where they would be without it (DeepSpeed 0.14 to 0.19, `stage_1_and_2.py`: `_link_all_hp_params`), while
/// `param_shapes` has the order in which they are.
fn is_in_order_of(shapes: &Shapes, slices: &[&BTreeMap<String, (u64, u64)>]) -> bool {
    let mut said: Vec<&str> =
        slices.iter().flat_map(|slices| in_order(slices)).map(|(param, _)| param).collect();
    said.dedup();
    let shapes = shapes.iter().filter(|(_, shape)| !shape.contains(&0));
    shapes.map(|(param, _)| &**param).eq(said)
}

/// For each rank, another one whose part of the parameters its writer says that it holds: where each part is a run of
/// `param_shapes`, and the parts make up all of it in another order of the ranks. With `round_robin_gradients` they are no runs.
pub(super) fn owners(shapes: &[Shapes], ranks: &[&ZeroStates]) -> Vec<Option<usize>> {
    let mut owners = vec![None; ranks.len()];
    for (group, shapes) in shapes.iter().enumerate() {
        let slices = ranks.iter().map(|rank| rank.slices.as_ref()?.get(group));
        let Some(slices) = slices.collect::<Option<Vec<_>>>() else { continue };
        let place: BTreeMap<&str, usize> =
            shapes.iter().enumerate().map(|(at, (param, _))| (&**param, at)).collect();
        let first = |slices: &BTreeMap<String, (u64, u64)>| match in_order(slices).first() {
            Some((param, _)) => place.get(param).copied(),
            // Padding, which is behind all of them.
            None => Some(usize::MAX),
        };
        let Some(firsts) = slices.iter().map(|slices| first(slices)).collect::<Option<Vec<_>>>()
        else {
            continue;
        };
        let mut order: Vec<usize> = (0..ranks.len()).collect();
        order.sort_by_key(|&rank| firsts[rank]);
        let sorted: Vec<_> = order.iter().map(|&rank| slices[rank]).collect();
        if !is_in_order_of(shapes, &sorted) {
            continue;
        }
        for (owner, rank) in order.into_iter().enumerate().filter(|(owner, rank)| owner != rank) {
            owners[rank].get_or_insert(owner);
        }
    }
    owners
}

/// A partition as a vector.
fn flat(stored: &StoredTensor, name: &str) -> Result<LogicalTensor, PartitionError> {
    let count = numel(stored.shape()).unwrap_or(0);
    let vector = stored.view(&[count]);
    let vector = vector.ok_or_else(|| PartitionError("its partition is no vector".to_owned()))?;
    Ok(LogicalTensor::from_stored(&vector, name))
}

/// The elements of a vector from `start` on, in this shape.
fn shaped(
    vector: &LogicalTensor,
    start: u64,
    shape: &[u64],
) -> Result<LogicalTensor, PartitionError> {
    let count = numel(shape).filter(|count| *count > 0);
    let count =
        count.ok_or_else(|| PartitionError(format!("shape {shape:?} is that of no parameter")))?;
    let mut tensor = vector.slice(0, start, count).map_err(|_| {
        let held = vector.numel();
        PartitionError(format!(
            "shape {shape:?} needs elements {start} to {}, the partitions hold {held}",
            start.saturating_add(count)
        ))
    })?;
    if shape.is_empty() {
        return Ok(tensor.select(0, 0)?);
    }
    let mut inner = count;
    for (dim, size) in shape[..shape.len() - 1].iter().enumerate() {
        inner /= size;
        tensor = tensor.split_axis(dim, inner)?;
    }
    Ok(tensor)
}

/// A stored vector in its real shape.
pub(super) fn shaped_vector(
    stored: &StoredTensor,
    name: &str,
    shape: &[u64],
) -> Result<LogicalTensor, PartitionError> {
    shaped(&flat(stored, name)?, 0, shape)
}

/// One state of one model parallel rank.
struct Zero<'a> {
    shapes: &'a [Shapes],
    ranks: &'a [&'a ZeroStates],
    state: &'a str,
    moments: &'a mut OptimizerStates,
}

/// The data parallel ranks that share a group, and the experts that are theirs.
struct Sharers {
    ranks: Vec<usize>,
    expert_rank: u64,
}

impl Zero<'_> {
    /// A rank's partition of a group; `None` where it has none yet.
    fn partition(&self, rank: usize, group: usize) -> Option<&StoredTensor> {
        self.ranks[rank].flats.get(self.state)?.get(group)?.as_ref()
    }

    /// Consecutive parameters of a group are cut into as many equal partitions as ranks share it.
    fn stage1_and_2(mut self) {
        let groups = self.shapes.iter().enumerate();
        for (group, shapes) in groups.filter(|(_, shapes)| !shapes.is_empty()) {
            for sharers in self.sharers(group) {
                let held = sharers.ranks.iter().map(|rank| self.partition(*rank, group));
                let held: Vec<_> = held.collect();
                if self.state != "fp32_param" && held.iter().all(Option::is_none) {
                    // Before its first step an optimizer has no moments.
                    continue;
                }
                let flats = held.iter().zip(&sharers.ranks).map(|(held, rank)| {
                    flat((*held).ok_or_else(|| missing(&self.ranks[*rank].path))?, self.state)
                });
                let found = match flats.collect::<Result<Vec<_>, PartitionError>>() {
                    Ok(flats) => self.cut(group, shapes, &sharers, &flats),
                    Err(trouble) => vec![(shapes[0].0.clone(), Err(trouble))],
                };
                for (param, tensor) in found {
                    let param = global_expert(&param, shapes, sharers.expert_rank);
                    self.moments.add(self.state, &param, tensor);
                }
            }
        }
    }

    /// The partitions of a group are shared by all ranks, or by those that hold the same experts.
    fn sharers(&self, group: usize) -> Vec<Sharers> {
        let all = self.ranks.len();
        let partitions = &self.ranks[0].partitions;
        let count = partitions.get(group).or(partitions.first()).copied().unwrap_or(0);
        let count = usize::try_from(count).unwrap_or(0);
        let expert_ranks = if count > 0 && all.is_multiple_of(count) { all / count } else { 1 };
        let of = |first: usize| Sharers {
            ranks: (first..all).step_by(expert_ranks).collect(),
            expert_rank: first as u64,
        };
        (0..expert_ranks).map(of).collect()
    }

    fn cut(
        &mut self,
        group: usize,
        shapes: &Shapes,
        sharers: &Sharers,
        flats: &[LogicalTensor],
    ) -> Vec<(Arc<str>, Result<LogicalTensor, PartitionError>)> {
        let ranks = self.ranks;
        let slices = sharers.ranks.iter().map(|rank| ranks[*rank].slices.as_ref()?.get(group));
        let slices = slices.collect::<Option<Vec<_>>>();
        let (slices, contradicting): (Option<Vec<_>>, _) = match slices {
            Some(slices) if is_in_order_of(shapes, &slices) => (Some(slices), false),
            slices => (None, slices.is_some()),
        };
        self.moments.is_reordered |= contradicting;
        if let Some(slices) = slices {
            // The writer says where each part is.
            let tensor = |param: &Arc<str>, shape: &[u64]| {
                let parts = slices.iter().zip(flats).filter_map(|(slices, flat)| {
                    let (start, count) = slices.get(&**param)?;
                    (*count > 0).then(|| flat.slice(0, *start, *count))
                });
                let whole = LogicalTensor::concat(0, parts.collect::<Result<Vec<_>, _>>()?)?;
                if numel(shape) != Some(whole.numel()) {
                    let held = whole.numel();
                    return Err(PartitionError(format!(
                        "the partitions hold {held} elements of shape {shape:?}"
                    )));
                }
                shaped(&whole, 0, shape)
            };
            return shapes
                .iter()
                .map(|(param, shape)| (param.clone(), tensor(param, shape)))
                .collect();
        }
        let whole = match LogicalTensor::concat(0, flats.to_vec()) {
            Ok(whole) => whole,
            Err(error) => return vec![(shapes[0].0.clone(), Err(error.into()))],
        };
        let paddings =
            self.ranks[sharers.ranks[0]].paddings.as_ref().and_then(|all| all.get(group));
        let mut start = 0_u64;
        let mut found = Vec::new();
        for (index, (param, shape)) in shapes.iter().enumerate() {
            found.push((param.clone(), shaped(&whole, start, shape)));
            let padding = paddings.and_then(|paddings| paddings.get(index)).copied().unwrap_or(0);
            start = start.saturating_add(numel(shape).unwrap_or(0)).saturating_add(padding);
        }
        self.check_rest(whole.numel(), start, flats.len(), &mut found);
        found
    }

    /// Checks that the rest behind the last parameter is padding to a multiple of twice the number of ranks.
    fn check_rest(
        &self,
        held: u64,
        used: u64,
        ranks: usize,
        found: &mut Vec<(Arc<str>, Result<LogicalTensor, PartitionError>)>,
    ) {
        let alignment = 2 * ranks as u64;
        let most = used.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
        if let Some((param, _)) = found.last()
            && held > most.saturating_add(alignment)
        {
            let text = format!("the partitions hold {held} elements, param_shapes only {used}");
            found.push((param.clone(), Err(PartitionError(text))));
        }
    }

    /// Every parameter is cut into as many pieces as there are ranks, the last ones padded; a rank's pieces follow
    /// each other through all its groups.
    fn stage3(self) {
        let groups = self.ranks.iter().map(|rank| rank.flats.get("fp32_param").map_or(0, Vec::len));
        let groups = groups.max().unwrap_or(0);
        let mut ranks = 0..self.ranks.len();
        let has_any = |rank| (0..groups).any(|group| self.partition(rank, group).is_some());
        if self.state != "fp32_param" && !ranks.any(has_any) {
            // Before its first step an optimizer has no moments.
            return;
        }
        let of_rank = |rank: usize| {
            let flats = (0..groups).map(|group| {
                let held = self.partition(rank, group);
                flat(held.ok_or_else(|| missing(&self.ranks[rank].path))?, self.state)
            });
            Ok(LogicalTensor::concat(0, flats.collect::<Result<Vec<_>, PartitionError>>()?)?)
        };
        let flats = (0..self.ranks.len()).map(of_rank).collect::<Result<Vec<_>, PartitionError>>();
        let Some((first, _)) = self.shapes.iter().flatten().next() else { return };
        let flats = match flats {
            Ok(flats) => flats,
            Err(trouble) => return self.moments.add(self.state, first, Err(trouble)),
        };
        let ranks = flats.len() as u64;
        let mut start = 0_u64;
        let mut found = Vec::new();
        for (param, shape) in self.shapes.iter().flatten() {
            let piece = numel(shape).unwrap_or(0).div_ceil(ranks);
            let parts = flats.iter().map(|flat| flat.slice(0, start, piece));
            let tensor = parts
                .collect::<Result<Vec<_>, _>>()
                .and_then(|parts| LogicalTensor::concat(0, parts))
                .map_err(PartitionError::from)
                .and_then(|whole| shaped(&whole, 0, shape));
            found.push((param.clone(), tensor));
            start = start.saturating_add(piece);
        }
        let held = flats.iter().map(LogicalTensor::numel).max().unwrap_or(0);
        self.check_rest(held, start, flats.len(), &mut found);
        for (param, tensor) in found {
            self.moments.add(self.state, &param, tensor);
        }
    }
}

/// `...deepspeed_experts.<number>.` with the number among all experts instead of that among the rank's.
fn global_expert(param: &Arc<str>, shapes: &Shapes, expert_rank: u64) -> Arc<str> {
    const EXPERTS: &str = "deepspeed_experts.";
    fn split(name: &str) -> Option<(&str, u64, &str)> {
        let at = name.find(EXPERTS)? + EXPERTS.len();
        let (number, rest) = split_index(&name[at..])?;
        Some((&name[..at], number, rest))
    }
    let Some((front, number, rest)) = split(param).filter(|_| expert_rank > 0) else {
        return Arc::clone(param);
    };
    let numbers =
        shapes.iter().filter_map(|(name, _)| split(name)).filter(|found| found.0 == front);
    let local = numbers.map(|(_, number, _)| number.saturating_add(1)).max().unwrap_or(1);
    let global = expert_rank.saturating_mul(local).saturating_add(number);
    format!("{front}{global}.{rest}").into()
}
