//! The shards of torch's `HuggingFaceStorageWriter` (torch 2.8 to 2.15, `torch/distributed/checkpoint/hf_storage.py`): a
//! safetensors file of chunks for every rank, `shard-00001-model-00001-of-00002.safetensors`, and no metadata. The
//! global shape is as far as the chunks reach.
//!
//! If the writer also put them together, whole tensors lie above the shards: that is a Hugging Face folder as any other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use crate::base::extent::Extent;
use crate::catalog::{Catalog, CatalogBuilder, Origin, Problem, Section};
use crate::containers::dcp::ShardFile;
use crate::containers::safetensors::Safetensors;
use crate::formats::files::add;
use crate::names::Name;
use crate::names::index::number;
use crate::names::megatron::is_buffer;
use crate::storage::{FileId, FileSet};
use crate::tensor::{LogicalTensor, Source, StoredTensor, TensorError};

use super::FORMAT;
use crate::formats::error::OpenError;
use crate::formats::format::OpenOptions;
use crate::formats::probe::Probe;
use crate::formats::roots::Root;

/// The number of the writing rank, from 1 on, in the name of a shard: `shard-RRRRR-model-MMMMM-of-NNNNN.safetensors`.
fn rank_of_shard(name: &str) -> Option<u64> {
    let rest = name.strip_prefix("shard-")?.strip_suffix(".safetensors")?;
    let (rank, rest) = rest.split_once("-model-")?;
    let (file, files) = rest.split_once("-of-")?;
    number(file).and(number(files)).and(number(rank))
}

/// The files of chunks in a folder, and whether there are other safetensors files.
fn shard_files(folder: &Probe) -> (BTreeMap<&str, u64>, bool) {
    let (mut shards, mut has_others) = (BTreeMap::new(), false);
    for name in folder.names() {
        if let Some(rank) = rank_of_shard(name) {
            shards.insert(name, rank);
        } else {
            has_others |= name.ends_with(".safetensors");
        }
    }
    (shards, has_others)
}

/// Tells whether a folder holds shards of this writer and nothing else.
pub(super) fn is_distributed(folder: &Probe) -> bool {
    let (shards, has_others) = shard_files(folder);
    !shards.is_empty() && !has_others
}

pub(super) fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let folder = &root.path;
    let (shards, _) = shard_files(&root.probe);
    let mut files = FileSet::default();
    let mut ids = Vec::with_capacity(shards.len());
    for name in shards.keys() {
        ids.push(add(&mut files, &folder.join(name))?);
    }
    let opened: Vec<_> =
        ids.par_iter().map(|&id| ShardFile::open(&files, files.whole(id))).collect();
    let origin = Origin {
        format: FORMAT.name,
        iteration: root.iteration,
        shards: ids.len(),
        ..Origin::default()
    };
    let mut catalog = CatalogBuilder::new(origin, files);
    let mut parts = ShardChunks::default();
    for (&id, opened) in ids.iter().zip(opened) {
        match opened {
            Ok(file) => parts.add(id, &file, &mut catalog),
            Err(error) => {
                let problem = Problem::of_file(catalog.files().path(id), error);
                catalog.problem(problem);
            }
        }
    }
    check_ranks(folder, &shards, &mut catalog);
    if options.wants(Section::Model) {
        parts.insert_into(&mut catalog);
    }
    Ok(catalog.finish())
}

/// Every rank below the last one has written something, or a file is missing. A missing last one is seen only by a
/// tensor that is smaller than it should be.
fn check_ranks(folder: &Path, shards: &BTreeMap<&str, u64>, catalog: &mut CatalogBuilder<'_>) {
    let ranks: BTreeSet<u64> = shards.values().copied().collect();
    let last = ranks.last().copied().unwrap_or(0);
    let mut expected = 1..=last;
    // No longer than there are files: the first gap ends it.
    if let Some(missing) = ranks
        .iter()
        .zip(&mut expected)
        .find_map(|(found, number)| (*found != number).then_some(number))
    {
        let path = folder.join(format!("shard-{missing:05}-model-*.safetensors"));
        let message =
            format!("missing shard: there are shards of ranks up to {last}, counted from 1");
        catalog.problem(Problem::of_file(path, message));
    }
}

/// The chunks of all files by tensor.
#[derive(Default)]
struct ShardChunks {
    chunks: BTreeMap<Arc<str>, Vec<(Vec<u64>, StoredTensor)>>,
}

impl ShardChunks {
    fn add(&mut self, id: FileId, file: &ShardFile, catalog: &mut CatalogBuilder<'_>) {
        let path: PathBuf = catalog.files().path(id).to_path_buf();
        let mut problem = |name: &str, message: String| {
            catalog.problem(Problem::of_tensor(name, message).in_file(&path));
        };
        let Safetensors { tensors, repeated, .. } = &file.safetensors;
        for name in repeated {
            problem(name, "is twice in the header".to_owned());
        }
        let mut buffers = 0;
        for (name, stored) in tensors {
            if is_buffer(name) {
                buffers += 1;
                continue;
            }
            let chunk = match stored {
                Err(error) => Err(error.to_string()),
                Ok(_) => file.chunk(name).map(|(offsets, stored)| (offsets.to_vec(), stored)),
            };
            match chunk {
                Ok((offsets, stored)) => {
                    self.chunks
                        .entry(name.as_str().into())
                        .or_default()
                        .push((offsets, stored.clone()));
                }
                Err(message) => problem(name, message),
            }
        }
        catalog.origin.left_out += buffers;
    }

    fn insert_into(self, catalog: &mut CatalogBuilder<'_>) {
        for (name, chunks) in self.chunks {
            match put_together(&name, chunks) {
                Ok(tensor) => catalog.add(Name::new(name), tensor),
                Err(error) => catalog.problem(Problem::of_tensor(&*name, error)),
            }
        }
    }
}

/// The tensor that reaches as far as its chunks do.
fn put_together(
    name: &Arc<str>,
    chunks: Vec<(Vec<u64>, StoredTensor)>,
) -> Result<LogicalTensor, TensorError> {
    let Some((_, first)) = chunks.first() else {
        return Err(TensorError::Gap { covered: 0, numel: 0 });
    };
    let (dtype, file) = (first.dtype(), first.storage().file);
    let mut shape = vec![0_u64; first.shape().len()];
    for (offsets, stored) in &chunks {
        for ((size, offset), own) in shape.iter_mut().zip(offsets).zip(stored.shape()) {
            *size = (*size).max(offset.saturating_add(*own));
        }
    }
    let boxes = chunks
        .into_iter()
        .map(|(offsets, stored)| (Extent { offsets, sizes: stored.shape().to_vec() }, stored));
    let source = Source { file, name: Arc::clone(name) };
    LogicalTensor::from_boxes(dtype, shape, source, boxes)
}
