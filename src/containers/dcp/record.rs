//! The classes of `torch/distributed/checkpoint/metadata.py` and `filesystem.py` (torch 2.0 to 2.15), as far as they
//! say which tensors there are and where their bytes lie.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::machine::{MetadataMachine, MetadataValue};

/// A class that matters, by its last name: 2.3 moved some of them to other modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Metadata,
    TensorStorageMetadata,
    /// Has no fields and so no BUILD.
    BytesStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageInfo,
    Size,
}

impl Class {
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            // The second by Megatron-Core 0.15, which hangs fields of its own on it.
            "Metadata" | "MCoreMetadata" => Self::Metadata,
            "TensorStorageMetadata" => Self::TensorStorageMetadata,
            "BytesStorageMetadata" => Self::BytesStorageMetadata,
            "TensorProperties" => Self::TensorProperties,
            "ChunkStorageMetadata" => Self::ChunkStorageMetadata,
            "MetadataIndex" => Self::MetadataIndex,
            "_StorageInfo" => Self::StorageInfo,
            "Size" => Self::Size,
            _ => return None,
        })
    }
}

/// The content of an object, once it is built.
#[derive(Debug)]
pub(super) enum Record {
    Metadata(Box<MetadataRecord>),
    Tensor(Arc<TensorStorageMetadata>),
    Properties {
        dtype: Arc<str>,
    },
    Chunk(ChunkStorageMetadata),
    Index {
        name: Arc<str>,
        offsets: Option<Arc<[u64]>>,
    },
    Stored(StorageInfo),
    /// The state is not that of the class.
    Malformed,
}

/// `Metadata`.
#[derive(Debug)]
pub(super) struct MetadataRecord {
    /// `state_dict_metadata`: tensors, and [`None`] for a bytes object.
    pub(super) described: Vec<(Arc<str>, Described)>,
    /// `storage_data`.
    pub(super) stored: Vec<StoredAt>,
    /// Megatron's `mcore_data`: the shape before a flattened tensor was made of it.
    pub(super) original_shapes: Vec<(Arc<str>, Arc<[u64]>)>,
    /// From `planner_data`.
    pub(super) parents: Option<BTreeSet<Arc<str>>>,
    /// Keys of `planner_data`: all that was to be saved.
    pub(super) planned: Vec<Arc<str>>,
    /// Since torch 2.10.
    pub(super) version: Option<Arc<str>>,
    /// Entries of the two dicts that are not what they should be.
    pub(super) malformed: usize,
}

#[derive(Debug)]
pub(super) enum Described {
    Tensor(Arc<TensorStorageMetadata>),
    Bytes,
    /// By name only.
    Malformed,
}

/// `TensorStorageMetadata`.
#[derive(Debug)]
pub(super) struct TensorStorageMetadata {
    pub(super) dtype: Arc<str>,
    pub(super) shape: Arc<[u64]>,
    pub(super) chunks: Vec<ChunkStorageMetadata>,
    pub(super) malformed_chunks: usize,
}

/// `ChunkStorageMetadata`.
#[derive(Debug, Clone)]
pub(super) struct ChunkStorageMetadata {
    pub(super) offsets: Arc<[u64]>,
    pub(super) sizes: Arc<[u64]>,
}

/// `_StorageInfo`.
#[derive(Debug, Clone)]
pub(super) struct StorageInfo {
    /// Relative to the folder.
    pub(super) path: Arc<str>,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// `transform_descriptors`, to undo in this order; none where there are none.
    pub(super) transforms: Option<Arc<[Arc<str>]>>,
}

/// An entry of `storage_data`: name, offsets of the chunk, place.
pub(super) type StoredAt = (Arc<str>, Option<Arc<[u64]>>, StorageInfo);

impl Record {
    /// Reads the state that BUILD gives an object.
    pub(super) fn of(class: Class, machine: &mut MetadataMachine, state: MetadataValue) -> Self {
        let record = match class {
            Class::TensorProperties => properties(&state),
            Class::Metadata => top(machine, state),
            Class::TensorStorageMetadata => tensor(machine, state),
            Class::ChunkStorageMetadata => chunk(machine, state),
            Class::MetadataIndex => index(machine, state),
            Class::StorageInfo => stored(machine, state),
            Class::BytesStorageMetadata | Class::Size => {
                machine.release(state);
                None
            }
        };
        record.unwrap_or(Self::Malformed)
    }
}

/// The values of these fields of a state; what else is in it is given back.
fn fields<const N: usize>(
    machine: &mut MetadataMachine,
    state: MetadataValue,
    names: [&str; N],
) -> [MetadataValue; N] {
    let mut found = [const { MetadataValue::None }; N];
    for (key, value) in machine.take_items(state) {
        let at = key.text().and_then(|key| names.iter().position(|name| *name == &**key));
        let unused = match at {
            Some(at) => std::mem::replace(&mut found[at], value),
            None => value,
        };
        machine.release(unused);
    }
    found
}

/// A tuple: `(dtype, layout, requires_grad, memory_format, pin_memory)`, since 2.15 also `strides`.
fn properties(state: &MetadataValue) -> Option<Record> {
    let MetadataValue::Tuple(state) = state else { return None };
    match &**state {
        [MetadataValue::Torch(dtype), _, _, _, _, ..] => {
            Some(Record::Properties { dtype: Arc::clone(dtype) })
        }
        _ => None,
    }
}

fn tensor(machine: &mut MetadataMachine, state: MetadataValue) -> Option<Record> {
    let [properties, size, chunks] = fields(machine, state, ["properties", "size", "chunks"]);
    let mut listed = Vec::new();
    let mut malformed_chunks = 0;
    for chunk in machine.take_members(chunks) {
        match chunk.record() {
            Some(Record::Chunk(chunk)) => listed.push(chunk.clone()),
            _ => malformed_chunks += 1,
        }
        machine.release(chunk);
    }
    let Some(Record::Properties { dtype }) = properties.record() else { return None };
    let (dtype, shape) = (Arc::clone(dtype), Arc::clone(size.numbers()?));
    listed.shrink_to_fit();
    Some(Record::Tensor(Arc::new(TensorStorageMetadata {
        dtype,
        shape,
        chunks: listed,
        malformed_chunks,
    })))
}

fn chunk(machine: &mut MetadataMachine, state: MetadataValue) -> Option<Record> {
    let [offsets, sizes] = fields(machine, state, ["offsets", "sizes"]);
    let (offsets, sizes) = (offsets.numbers()?, sizes.numbers()?);
    Some(Record::Chunk(ChunkStorageMetadata {
        offsets: Arc::clone(offsets),
        sizes: Arc::clone(sizes),
    }))
}

/// Two of them are equal where name and offset are; `index` is a hint. Bytes objects have no offset.
fn index(machine: &mut MetadataMachine, state: MetadataValue) -> Option<Record> {
    let [name, offset] = fields(machine, state, ["fqn", "offset"]);
    let offsets = match offset {
        MetadataValue::None => None,
        other => Some(Arc::clone(other.numbers()?)),
    };
    Some(Record::Index { name: Arc::clone(name.text()?), offsets })
}

fn stored(machine: &mut MetadataMachine, state: MetadataValue) -> Option<Record> {
    let names = ["relative_path", "offset", "length", "transform_descriptors"];
    let [path, offset, len, transforms] = fields(machine, state, names);
    let transforms = match transforms {
        MetadataValue::None => None,
        MetadataValue::List(_) => {
            let members = machine.take_members(transforms);
            let names = members.iter().map(|name| name.text().cloned());
            let names: Arc<[Arc<str>]> = names.collect::<Option<_>>()?;
            (!names.is_empty()).then_some(names)
        }
        _ => return None,
    };
    Some(Record::Stored(StorageInfo {
        path: Arc::clone(path.text()?),
        offset: offset.count()?,
        len: len.count()?,
        transforms,
    }))
}

fn top(machine: &mut MetadataMachine, state: MetadataValue) -> Option<Record> {
    let names = ["state_dict_metadata", "storage_data", "mcore_data", "version"];
    let [described, stored, mcore, version] = fields(machine, state, names);
    if !matches!(
        (&described, &stored),
        (MetadataValue::Dict(_), MetadataValue::Dict(_) | MetadataValue::None)
    ) {
        return None;
    }
    let mut malformed = 0;
    let mut top = MetadataRecord {
        described: Vec::new(),
        stored: Vec::new(),
        original_shapes: Vec::new(),
        parents: machine.take_parents(),
        planned: machine.take_planned(),
        version: version.text().cloned(),
        malformed: 0,
    };
    for (key, value) in machine.take_items(described) {
        let described = match (value.record(), value.class()) {
            (Some(Record::Tensor(tensor)), _) => Described::Tensor(Arc::clone(tensor)),
            (_, Some(Class::BytesStorageMetadata)) => Described::Bytes,
            _ => Described::Malformed,
        };
        match key.text() {
            Some(name) => top.described.push((Arc::clone(name), described)),
            None => malformed += 1,
        }
        machine.release(value);
    }
    let items = machine.take_items(stored);
    top.stored.reserve_exact(items.len());
    for (key, value) in items {
        match (key.record(), value.record()) {
            (Some(Record::Index { name, offsets }), Some(Record::Stored(stored))) => {
                top.stored.push((Arc::clone(name), offsets.clone(), stored.clone()));
            }
            _ => malformed += 1,
        }
        machine.release(value);
    }
    for (key, value) in machine.take_items(mcore) {
        let [shape] = fields(machine, value, ["nd_reformulated_orig_global_shape"]);
        if let (Some(name), Some(shape)) = (key.text(), shape.numbers()) {
            top.original_shapes.push((Arc::clone(name), Arc::clone(shape)));
        }
    }
    top.malformed = malformed;
    Some(Record::Metadata(Box::new(top)))
}
