//! Tensors of `torch.distributed.tensor`: the part that one rank holds, and its place in the whole.
//!
//! Facts from torch 2.4 to 2.15: `torch/_tensor.py` (`_rebuild_from_type_v2`), `torch/distributed/tensor/_dtensor_spec.py`,
//! `placement_types.py` (`_local_shard_size_and_offset`) and `torch/distributed/device_mesh.py`. Older versions of a mesh keep its
//! ranks as a tensor `mesh` with `_flatten_mesh_list`; 2.15 has a `_layout` and a `_rank`.

use thiserror::Error;

use super::TorchFile;
use super::rebuild::RebuildError;
use super::value::{Value, ValueId, Values};
use crate::base::extent::Extent;
use crate::base::limits::LIMITS;
use crate::tensor::StoredTensor;

/// A DTensor: the local tensor, and where it belongs.
#[derive(Debug, Clone)]
pub struct DTensor {
    /// The part that the file holds.
    pub local: StoredTensor,
    /// The shape of the whole.
    pub shape: Vec<u64>,
    /// The ranks along each dimension of the mesh.
    pub mesh: Vec<u64>,
    /// The place of the file's rank in the mesh.
    pub coordinates: Vec<u64>,
    /// The file's rank, where the mesh says it.
    pub rank: Option<u64>,
    /// For each dimension of the mesh, the dimension of the tensor that is cut along it; `None` where its ranks hold the same.
    pub placements: Vec<Option<usize>>,
}

/// A DTensor cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DTensorError {
    /// The local tensor or that of its mesh cannot be read.
    #[error("a tensor inside a DTensor")]
    Inner(#[from] RebuildError),
    /// A part of it is missing or of a form that is not known.
    #[error("a DTensor whose {what} is missing or of a form that is not known")]
    Form {
        /// The part.
        what: &'static str,
    },
    /// A way to lay the tensor out over ranks that is not read.
    #[error("a DTensor with placement {}, which is not read", name.escape_debug())]
    Placement {
        /// The class of the placement, or the word for it.
        name: String,
    },
}

const fn form(what: &'static str) -> DTensorError {
    DTensorError::Form { what }
}

impl DTensor {
    /// The box of the whole that the rank holds: dimension by dimension of the mesh, cut in parts of equal size rounded up,
    /// of which the last ones may be shorter or empty.
    #[must_use]
    pub fn extent(&self) -> Extent {
        let mut extent = Extent::whole(&self.shape);
        for ((&dim, &ranks), &rank) in self.placements.iter().zip(&self.mesh).zip(&self.coordinates)
        {
            let Some(dim) = dim else { continue };
            let size = extent.sizes[dim];
            let start = size.div_ceil(ranks).saturating_mul(rank).min(size);
            extent.offsets[dim] += start;
            extent.sizes[dim] = size.div_ceil(ranks).min(size - start);
        }
        extent
    }

    /// The coordinates that tell apart ranks with the same part, 0 where a dimension of the mesh cuts the tensor.
    #[must_use]
    pub fn replica(&self) -> Vec<u64> {
        let both = self.placements.iter().zip(&self.coordinates);
        both.map(|(placement, &at)| if placement.is_some() { 0 } else { at }).collect()
    }
}

/// The DTensor that a value stands for; `None` where it is something else.
pub(super) fn read(torch: &TorchFile, id: ValueId) -> Result<Option<DTensor>, DTensorError> {
    let values = torch.values();
    let Value::Call(call) = values.get(id) else { return Ok(None) };
    let is_made_by = matches!(values.global(call.callable), Some((_, "_rebuild_from_type_v2")));
    let &[_, class, args, state, ..] = values.args(&call) else { return Ok(None) };
    if !is_made_by || !is_distributed(values, class, "DTensor") {
        return Ok(None);
    }
    // The class, dtype, shape, strides, ... of the whole.
    let shape = values.elements(args).and_then(|args| counts(values, *args.get(2)?));
    let shape = shape.filter(|shape| shape.iter().all(|&size| size <= LIMITS.dim));
    let shape = shape.ok_or(form("shape"))?;
    let local = part(values, state, "_local_tensor").ok_or(form("local tensor"))?;
    let local = torch.tensor(local)?.ok_or(form("local tensor"))?;
    let spec = part(values, state, "_spec").ok_or(form("spec"))?;
    let placements = placements(values, spec, shape.len())?;
    let mesh = values.attribute(spec, "mesh").ok_or(form("mesh"))?;
    let sizes = mesh_sizes(torch, mesh)?;
    let coordinates = values.attribute(mesh, "_coordinate_on_dim");
    let coordinates = coordinates.and_then(|at| counts(values, at));
    let coordinates = coordinates.ok_or(form("place in its mesh"))?;
    let is_inside = coordinates.iter().zip(&sizes).all(|(at, size)| at < size);
    if coordinates.len() != sizes.len() || placements.len() != sizes.len() || !is_inside {
        return Err(form("place in its mesh"));
    }
    let rank = rank(values, mesh, &sizes, &coordinates);
    Ok(Some(DTensor { local, shape, mesh: sizes, coordinates, rank, placements }))
}

/// An entry of the state, which is a dict or a pair of dict and slots.
fn part(values: &Values, state: ValueId, name: &str) -> Option<ValueId> {
    let dicts = values.elements(state).unwrap_or(std::slice::from_ref(&state));
    dicts.iter().find_map(|&dict| values.dict_get(dict, name))
}

fn placements(
    values: &Values,
    spec: ValueId,
    rank: usize,
) -> Result<Vec<Option<usize>>, DTensorError> {
    let all = values.attribute(spec, "placements").and_then(|all| values.sequence(all));
    let all = all.ok_or(form("placements"))?.take(LIMITS.rank + 1);
    let read: Vec<Option<usize>> =
        all.map(|one| placement(values, one, rank)).collect::<Result<_, _>>()?;
    for name in ["shard_order", "_shard_order"] {
        if let Some(order) = values.attribute(spec, name)
            && !is_usual_order(values, order)
        {
            return Err(DTensorError::Placement {
                name: "in another order than the mesh's".into(),
            });
        }
    }
    Ok(read)
}

fn placement(values: &Values, id: ValueId, rank: usize) -> Result<Option<usize>, DTensorError> {
    let Value::Call(call) = values.get(id) else { return Err(form("placement")) };
    if is_distributed(values, call.callable, "Replicate") {
        return Ok(None);
    }
    if !is_distributed(values, call.callable, "Shard") {
        let name = values.class_name(id).unwrap_or_default();
        return Err(DTensorError::Placement { name });
    }
    let dim = values.attribute(id, "dim").and_then(|dim| values.as_u64(dim));
    let dim = dim.and_then(|dim| usize::try_from(dim).ok()).filter(|&dim| dim < rank);
    dim.map(Some).ok_or(form("dimension of a placement"))
}

/// Tells whether each dimension of the tensor is cut along those of the mesh in their order, as where nothing says it.
fn is_usual_order(values: &Values, order: ValueId) -> bool {
    if values.is_none(order) {
        return true;
    }
    let rises = |entry: ValueId| {
        let members = match values.get(entry) {
            Value::Call(call) => values.args(&call),
            _ => values.elements(entry).unwrap_or_default(),
        };
        let &[_, along] = members else { return false };
        counts(values, along).is_some_and(|along| along.is_sorted())
    };
    let mut entries = values.sequence(order).into_iter().flatten().take(LIMITS.rank + 1);
    values.sequence(order).is_some() && entries.all(rises)
}

/// The number of ranks along each dimension of a mesh, none of them 0.
fn mesh_sizes(torch: &TorchFile, mesh: ValueId) -> Result<Vec<u64>, DTensorError> {
    let values = torch.values();
    let sizes = match values.attribute(mesh, "mesh") {
        Some(ranks) => torch.tensor(ranks)?.map(|ranks| ranks.shape().to_vec()),
        None => layout_sizes(values, mesh),
    };
    let is_allowed = |sizes: &Vec<u64>| {
        let all = sizes.iter().try_fold(1_u64, |all, &size| all.checked_mul(size));
        sizes.len() <= LIMITS.rank && all.is_some_and(|all| (1..=LIMITS.ranks).contains(&all))
    };
    sizes.filter(is_allowed).ok_or(form("mesh"))
}

/// The sizes of the axes of a mesh's `_layout`, each of which may be made up of several.
fn layout_sizes(values: &Values, mesh: ValueId) -> Option<Vec<u64>> {
    let axes = values.attribute(values.attribute(mesh, "_layout")?, "axes")?;
    let size = |axis| {
        let shape = counts(values, values.attribute(axis, "shape")?)?;
        shape.iter().try_fold(1_u64, |all, &size| all.checked_mul(size))
    };
    values.sequence(axes)?.take(LIMITS.rank + 1).map(size).collect()
}

/// The rank that holds the file, as the mesh says it.
fn rank(values: &Values, mesh: ValueId, sizes: &[u64], coordinates: &[u64]) -> Option<u64> {
    if let Some(rank) = values.attribute(mesh, "_rank") {
        return values.as_u64(rank);
    }
    let at = sizes.iter().zip(coordinates).try_fold(0_u64, |at, (size, coordinate)| {
        at.checked_mul(*size)?.checked_add(*coordinate)
    })?;
    let ranks = values.elements(values.attribute(mesh, "_flatten_mesh_list")?)?;
    values.as_u64(*ranks.get(usize::try_from(at).ok()?)?)
}

/// Tells whether a value is this class of torch's package for DTensors, wherever a version keeps it.
fn is_distributed(values: &Values, id: ValueId, class: &str) -> bool {
    matches!(values.global(id), Some((module, name)) if name == class
        && (module.starts_with("torch.distributed.tensor") || module.starts_with("torch.distributed._tensor")))
}

/// A tuple of counts, no longer than any shape.
fn counts(values: &Values, id: ValueId) -> Option<Vec<u64>> {
    let counts: Option<Vec<u64>> =
        values.sequence(id)?.take(LIMITS.rank + 1).map(|count| values.as_u64(count)).collect();
    counts.filter(|counts| counts.len() <= LIMITS.rank)
}
