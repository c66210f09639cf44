//! The parts of all ranks -> one tensor: the boxes of the first copy, all others as copies to check.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use thiserror::Error;

use crate::base::extent::Extent;
use crate::containers::torch::DTensor;
use crate::tensor::{LogicalTensor, Source, StoredTensor, TensorError};

use super::ranks::Held;

/// The parts of the ranks do not make a tensor.
#[derive(Debug, Error)]
pub(super) enum MergeError {
    /// Some ranks do not hold it.
    #[error("is in the files of {found} ranks of {ranks}")]
    Absent {
        /// Ranks that hold it.
        found: usize,
        /// Ranks there are.
        ranks: usize,
    },
    /// Two ranks describe it in different ways.
    #[error("ranks {first} and {second} disagree on its shape, its mesh or its placements")]
    Disagree {
        /// A rank.
        first: u64,
        /// Another one.
        second: u64,
    },
    /// The mesh is not that of all ranks.
    #[error("lies on a mesh of {mesh} ranks, where there are {ranks}")]
    Mesh {
        /// Ranks of the mesh.
        mesh: u64,
        /// Ranks there are.
        ranks: usize,
    },
    /// Two ranks claim one place.
    #[error("ranks {first} and {second} both say to be at {at:?} of the mesh")]
    Place {
        /// A rank.
        first: u64,
        /// Another one.
        second: u64,
        /// The coordinates.
        at: Vec<u64>,
    },
    /// The parts do not fit together.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// Puts together what the ranks hold of one tensor.
///
/// # Errors
/// [`MergeError`]; that the boxes tile the shape is left to the catalog.
pub(super) fn merge(
    name: &str,
    parts: Vec<(u64, Held)>,
    ranks: usize,
) -> Result<LogicalTensor, MergeError> {
    if parts.len() != ranks {
        return Err(MergeError::Absent { found: parts.len(), ranks });
    }
    let mut shards = Vec::new();
    let mut copies = Vec::new();
    for (rank, held) in parts {
        match held {
            Held::Plain(stored) => copies.push((rank, stored)),
            Held::Shard(shard) => shards.push((rank, shard)),
        }
    }
    match (shards.first(), copies.first()) {
        (Some(&(first, _)), Some(&(second, _))) => Err(MergeError::Disagree { first, second }),
        (Some(_), None) => of_shards(name, &shards, ranks),
        _ => of_copies(name, copies),
    }
}

fn of_copies(name: &str, copies: Vec<(u64, StoredTensor)>) -> Result<LogicalTensor, MergeError> {
    let mut copies =
        copies.into_iter().map(|(_, stored)| LogicalTensor::from_stored(&stored, name));
    let Some(mut tensor) = copies.next() else {
        return Err(MergeError::Absent { found: 0, ranks: 0 });
    };
    for copy in copies {
        tensor.add_copy(copy)?;
    }
    Ok(tensor)
}

fn of_shards(
    name: &str,
    shards: &[(u64, DTensor)],
    ranks: usize,
) -> Result<LogicalTensor, MergeError> {
    let Some((first, whole)) = shards.first() else {
        return Err(MergeError::Absent { found: 0, ranks });
    };
    let mesh = whole.mesh.iter().product();
    if mesh != ranks as u64 {
        return Err(MergeError::Mesh { mesh, ranks });
    }
    let mut places: HashMap<&[u64], u64> = HashMap::new();
    let mut replicas: BTreeMap<Vec<u64>, Vec<(Extent, StoredTensor)>> = BTreeMap::new();
    for (rank, shard) in shards {
        let is_alike = shard.shape == whole.shape
            && shard.mesh == whole.mesh
            && shard.placements == whole.placements;
        if !is_alike {
            return Err(MergeError::Disagree { first: *first, second: *rank });
        }
        if let Some(first) = places.insert(&shard.coordinates, *rank) {
            let at = shard.coordinates.clone();
            return Err(MergeError::Place { first, second: *rank, at });
        }
        let extent = shard.extent();
        // An empty part is of any shape.
        if !extent.is_empty() || shard.local.shape().iter().all(|&size| size > 0) {
            replicas.entry(shard.replica()).or_default().push((extent, shard.local.clone()));
        }
    }
    let name: Arc<str> = name.into();
    let source = Source { file: whole.local.storage().file, name };
    let dtype = whole.local.dtype();
    let boxed =
        |boxes| LogicalTensor::from_boxes(dtype, whole.shape.clone(), source.clone(), boxes);
    let mut replicas = replicas.into_values();
    let mut tensor = boxed(replicas.next().unwrap_or_default())?;
    for copy in replicas {
        tensor.add_copy(boxed(copy)?)?;
    }
    Ok(tensor)
}
