//! What a checkpoint says of itself: the `.metadata` of the coordinator, or the `__<rank>.metadata` of every rank.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use super::machine::{self, MetadataValue};
use super::record::{
    Described, MetadataRecord, Record, StorageInfo, StoredAt, TensorStorageMetadata,
};
use super::{DcpError, EntryError};
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::{self, FileId, FileSet};

/// The file that the coordinator writes last.
pub const METADATA: &str = ".metadata";

/// Everything that the metadata of one folder says, with no look at the data files.
#[derive(Debug)]
pub struct Metadata {
    /// All tensors by name.
    pub tensors: BTreeMap<Arc<str>, TensorMeta>,
    /// All other objects by name, and where their bytes are; several places are copies by several ranks.
    pub objects: BTreeMap<Arc<str>, Vec<FileSlice>>,
    /// Megatron's `mcore_data`: the global shape that a flattened tensor had before (`nd_reformulated_orig_global_shape`).
    pub original_shapes: BTreeMap<Arc<str>, Arc<[u64]>>,
    /// Dotted names of the dicts at the two outer levels of the state dict, such as `model` and `optimizer.state`: with
    /// them a dot in a name tells levels apart, all other dots are the module's own. None where the metadata does not tell.
    pub parents: Option<BTreeSet<Arc<str>>>,
    /// Names that were to be saved, as `planner_data` says, and that are neither among the tensors nor among the objects.
    pub unsaved: Vec<Arc<str>>,
    /// The version of the metadata, which torch writes since 2.10.
    pub version: Option<Arc<str>>,
    /// Its errors, entry by entry.
    pub errors: Vec<EntryError>,
    /// The metadata file, or the first of them.
    pub file: FileId,
    /// Number of ranks that wrote metadata of their own; 0 where the coordinator did.
    pub ranks: usize,
}

/// A tensor as the metadata describes it.
#[derive(Debug, Clone)]
pub struct TensorMeta {
    /// The name that torch has for its dtype.
    pub dtype: Arc<str>,
    /// Global shape.
    pub shape: Arc<[u64]>,
    /// Its chunks, sorted by offsets; doubled ones are copies by several ranks.
    pub chunks: Vec<ChunkMeta>,
}

/// A box of a tensor and where its bytes are.
#[derive(Debug, Clone)]
pub struct ChunkMeta {
    /// First index in each dimension.
    pub offsets: Arc<[u64]>,
    /// Number of indices in each dimension.
    pub sizes: Arc<[u64]>,
    /// The slice of a file that it was written to; none where the metadata does not say.
    pub place: Option<FileSlice>,
    /// A further copy of the chunk before it, by another rank.
    pub is_copy: bool,
}

/// A slice of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSlice {
    /// The file, relative to the folder.
    pub path: Arc<str>,
    /// Its first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// Transforms of the bytes when they were written, e.g. `stream.zstd/1`; to be undone in this order.
    pub transforms: Option<Arc<[Arc<str>]>>,
}

impl From<StorageInfo> for FileSlice {
    fn from(StorageInfo { path, offset, len, transforms }: StorageInfo) -> Self {
        Self { path, offset, len, transforms }
    }
}

/// The rank of a `__<rank>.metadata`, as torch writes it without collectives (2.9 and later).
#[must_use]
pub fn rank_of_metadata(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("__")?.strip_suffix(".metadata")?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

/// The metadata files of a folder with these entries: the coordinator's, or else those of all ranks in their order.
fn metadata_files(folder: &Path, names: &[String]) -> Vec<PathBuf> {
    if names.iter().any(|name| name == METADATA) {
        return vec![folder.join(METADATA)];
    }
    let of_rank = |name: &String| Some((rank_of_metadata(name)?, folder.join(name)));
    let mut found: Vec<(u64, PathBuf)> = names.iter().filter_map(of_rank).collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

impl Metadata {
    /// Reads the metadata of a folder; its files are added to `files`.
    ///
    /// # Errors
    /// [`DcpError`] where there is none, or it is damaged.
    pub fn read(folder: &Path, files: &mut FileSet) -> Result<Self, DcpError> {
        let io_error = |path: &Path, source| DcpError::Io { path: path.to_path_buf(), source };
        let names = storage::list(folder).map_err(|source| io_error(folder, source))?;
        let names: Vec<String> = names.into_keys().collect();
        let paths = metadata_files(folder, &names);
        let mut tops = Vec::with_capacity(paths.len());
        for path in &paths {
            let file = files.add(path).map_err(|source| io_error(path, source))?;
            tops.push((file, read_one(path, file, files)?));
        }
        let Some(&(file, _)) = tops.first() else {
            return Err(DcpError::NoMetadata { path: folder.to_path_buf() });
        };
        let is_coordinators = paths.iter().all(|path| path.ends_with(METADATA));
        let mut builder = MetadataBuilder::new(file);
        for (file, top) in tops {
            builder.add(file, top);
        }
        if is_coordinators {
            return Ok(builder.finish(0));
        }
        for rank in missing_ranks(&names) {
            let message = format!("missing __{rank}.metadata: what rank {rank} wrote is not known");
            builder.errors.push(EntryError { file: None, name: None, message });
        }
        Ok(builder.finish(paths.len()))
    }
}

/// Ranks that must have written metadata and have none: one in each gap, and those that wrote data.
fn missing_ranks(names: &[String]) -> BTreeSet<u64> {
    let ranks: BTreeSet<u64> = names.iter().filter_map(|name| rank_of_metadata(name)).collect();
    let mut missing = BTreeSet::new();
    let mut expected = 0;
    for &rank in &ranks {
        if rank > expected {
            missing.insert(expected);
        }
        expected = rank.saturating_add(1);
    }
    let wrote = names.iter().filter_map(|name| rank_of_data(name));
    missing.extend(wrote.filter(|rank| !ranks.contains(rank)));
    missing
}

/// The rank that wrote a `__<rank>_<number>.distcp`.
fn rank_of_data(name: &str) -> Option<u64> {
    let (rank, _) = name.strip_prefix("__")?.strip_suffix(".distcp")?.split_once('_')?;
    rank.parse().ok()
}

fn read_one(path: &Path, file: FileId, files: &FileSet) -> Result<MetadataRecord, DcpError> {
    let region = files.whole(file);
    if region.len > LIMITS.metadata_bytes {
        let over = OverLimit::found("bytes of metadata", LIMITS.metadata_bytes, region.len);
        return Err(DcpError::TooLong { path: path.to_path_buf(), over });
    }
    let damaged = |source| DcpError::Metadata { path: path.to_path_buf(), source };
    let (root, machine) = machine::run(files, region).map_err(damaged)?;
    drop(machine);
    let record = match root {
        MetadataValue::Object(object) => {
            Rc::into_inner(object).and_then(|object| object.record.into_inner())
        }
        _ => None,
    };
    match record {
        Some(Record::Metadata(top)) => Ok(*top),
        _ => Err(DcpError::NotMetadata { path: path.to_path_buf() }),
    }
}

/// Puts together what was described with where it was stored.
struct MetadataBuilder {
    file: FileId,
    tensors: BTreeMap<Arc<str>, TensorBuilder>,
    objects: BTreeMap<Arc<str>, Vec<FileSlice>>,
    original_shapes: BTreeMap<Arc<str>, Arc<[u64]>>,
    parents: Option<BTreeSet<Arc<str>>>,
    planned: Vec<Arc<str>>,
    version: Option<Arc<str>>,
    errors: Vec<EntryError>,
}

struct TensorBuilder {
    dtype: Arc<str>,
    shape: Arc<[u64]>,
    chunks: Vec<ChunkMeta>,
}

impl MetadataBuilder {
    fn new(file: FileId) -> Self {
        Self {
            file,
            tensors: BTreeMap::new(),
            objects: BTreeMap::new(),
            original_shapes: BTreeMap::new(),
            parents: None,
            planned: Vec::new(),
            version: None,
            errors: Vec::new(),
        }
    }

    /// Adds what one metadata file says.
    fn add(&mut self, file: FileId, top: MetadataRecord) {
        let MetadataRecord {
            described,
            mut stored,
            original_shapes,
            parents,
            planned,
            version,
            malformed,
        } = top;
        self.planned.extend(planned);
        if let Some(parents) = parents {
            self.parents.get_or_insert_default().extend(parents);
        }
        self.version = self.version.take().or(version);
        self.original_shapes.extend(original_shapes);
        if malformed > 0 {
            let message =
                format!("{malformed} entries of the metadata are not as torch writes them");
            self.errors.push(EntryError { file: Some(file), name: None, message });
        }
        stored.sort_by(|one, other| (&one.0, &one.1).cmp(&(&other.0, &other.1)));
        let names: HashSet<_> = described.iter().map(|(name, _)| Arc::clone(name)).collect();
        for places in stored.chunk_by(|one, other| one.0 == other.0) {
            if !names.contains(&places[0].0) {
                self.error(file, &places[0].0, "is stored, and the metadata does not describe it");
            }
        }
        for (name, described) in described {
            let places = places_of(&stored, &name);
            match described {
                Described::Tensor(tensor) => self.add_tensor(file, &name, &tensor, places),
                Described::Bytes => self.add_object(file, name, places),
                Described::Malformed => {
                    self.error(file, &name, "its metadata is not as torch writes it");
                }
            }
        }
    }

    fn error(&mut self, file: FileId, name: &Arc<str>, message: &str) {
        let (name, message) = (Some(Arc::clone(name)), message.to_owned());
        self.errors.push(EntryError { file: Some(file), name, message });
    }

    fn add_tensor(
        &mut self,
        file: FileId,
        name: &Arc<str>,
        tensor: &TensorStorageMetadata,
        places: &[StoredAt],
    ) {
        if tensor.malformed_chunks > 0 {
            let message =
                format!("{} of its chunks are not as torch writes them", tensor.malformed_chunks);
            self.error(file, name, &message);
        }
        let joined = match self.tensors.entry(Arc::clone(name)) {
            Entry::Vacant(entry) => entry.insert(TensorBuilder {
                dtype: Arc::clone(&tensor.dtype),
                shape: Arc::clone(&tensor.shape),
                chunks: Vec::with_capacity(tensor.chunks.len()),
            }),
            Entry::Occupied(entry) => entry.into_mut(),
        };
        if joined.dtype != tensor.dtype || joined.shape != tensor.shape {
            let message = format!(
                "one rank says {} {:?} and another one {} {:?}",
                joined.dtype, joined.shape, tensor.dtype, tensor.shape
            );
            return self.error(file, name, &message);
        }
        let before = joined.chunks.len();
        for chunk in &tensor.chunks {
            let at = places.binary_search_by(|place| place.1.as_ref().cmp(&Some(&chunk.offsets)));
            let place = at.ok().map(|at| places[at].2.clone().into());
            let (offsets, sizes) = (Arc::clone(&chunk.offsets), Arc::clone(&chunk.sizes));
            joined.chunks.push(ChunkMeta { offsets, sizes, place, is_copy: false });
        }
        // A chunk that is stored and not described belongs to another save.
        let described =
            joined.chunks[before..].iter().filter(|chunk| chunk.place.is_some()).count();
        let doubled = places.windows(2).any(|two| two[0].1 == two[1].1);
        if doubled || described < places.len() {
            let message = format!(
                "the metadata describes {} chunks of it and says of {} where they are",
                tensor.chunks.len(),
                places.len()
            );
            self.error(file, name, &message);
        }
    }

    fn add_object(&mut self, file: FileId, name: Arc<str>, places: &[StoredAt]) {
        match places {
            [(_, None, place)] => {
                self.objects.entry(name).or_default().push(place.clone().into());
            }
            [] => self.error(file, &name, "the metadata does not say where it is"),
            _ => self.error(file, &name, "the metadata says more than once where it is"),
        }
    }

    fn finish(self, ranks: usize) -> Metadata {
        let Self { file, tensors, objects, original_shapes, parents, planned, version, errors } =
            self;
        let mut unsaved = planned;
        unsaved.retain(|name| !tensors.contains_key(name) && !objects.contains_key(name));
        unsaved.sort();
        unsaved.dedup();
        let finished =
            tensors.into_iter().map(|(name, TensorBuilder { dtype, shape, mut chunks })| {
                // Stable: of the copies by several ranks, that of the first rank comes first.
                chunks.sort_by(|one, other| one.offsets.cmp(&other.offsets));
                for at in 1..chunks.len() {
                    // The same box twice in one file is no copy but a doubled chunk, as is one of another size.
                    let is_same = chunks[at - 1].offsets == chunks[at].offsets
                        && chunks[at - 1].sizes == chunks[at].sizes
                        && !chunks[at].sizes.contains(&0);
                    chunks[at].is_copy = ranks > 0 && is_same;
                }
                (name, TensorMeta { dtype, shape, chunks })
            });
        let tensors = finished.collect();
        Metadata {
            tensors,
            objects,
            original_shapes,
            parents,
            unsaved,
            version,
            errors,
            file,
            ranks,
        }
    }
}

/// The entries of one name among all, sorted by name and offsets.
fn places_of<'a>(all: &'a [StoredAt], name: &Arc<str>) -> &'a [StoredAt] {
    let start = all.partition_point(|place| place.0 < *name);
    let len = all[start..].partition_point(|place| place.0 == *name);
    &all[start..start + len]
}
