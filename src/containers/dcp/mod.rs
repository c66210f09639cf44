//! What `torch.distributed.checkpoint` (DCP) writes: metadata that cuts tensors into boxes, and files with a slice for
//! each box. Knows nothing of Megatron, of names or of ranks beyond the one that wrote a file.
//!
//! ```text
//! folder ─► Metadata::read   .metadata or __<rank>.metadata, read in pieces   names, shapes, boxes, places
//!              └─► Checkpoint::open   the header of every slice               LogicalTensor for each name
//!                     └─► Checkpoint::object   on demand                      TorchFile of a bytes object
//! ```
//!
//! To build a format on it:
//!
//! - [`Metadata::read`] looks at no data file; its keys tell whose checkpoint it is;
//! - [`Checkpoint::open`] gives a [`LogicalTensor`] of the global shape for every name that is wanted, or the
//!   [`DcpTensorError`] that says which of its chunks cannot be read. Names that are not wanted cost nothing and are still in
//!   [`Checkpoint::metadata`]. That the boxes tile the shape is left to `Catalog::insert` ([`LogicalTensor::check_tiling`]);
//! - [`Checkpoint::object`] opens one of [`Metadata::objects`] as the [`TorchFile`] that it is;
//! - [`Metadata::errors`] are entries that nobody can read, for the catalog's problems.
//!
//! A slice is a whole `torch.save` archive (the default), or lies in a safetensors file (serialization since torch 2.8: then
//! the offsets of the metadata are of no use, and the file is asked by name), or is compressed
//! (`transform_descriptors`). What is compressed with zstd is decompressed once, on opening, to an unnamed file in the folder
//! for temporary files (`TMPDIR`), which must have room for the tensors that are wanted: memory stays bounded.

mod machine;
mod metadata;
mod plans;
mod record;
mod shard_file;
mod slice;
mod unpack;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use thiserror::Error;

pub use metadata::{ChunkMeta, FileSlice, METADATA, Metadata, TensorMeta, rank_of_metadata};
pub use shard_file::ShardFile;
pub use slice::SliceError;

use crate::base::dtype::Dtype;
use crate::base::extent::{Extent, numel};
use crate::base::limits::{LIMITS, OverLimit};
use crate::containers::torch::TorchFile;
use crate::containers::torch::pickle::stream::StreamError;
use crate::storage::{FileId, FileSet, Region};
use crate::tensor::{LogicalTensor, Source, StoredTensor, TensorError};

use slice::{DataFile, ExpectedChunk};
use unpack::{Packed, Spool};

/// A checkpoint whose wanted tensors were looked up in its data files.
#[derive(Debug)]
pub struct Checkpoint {
    /// The metadata of all tensors and objects.
    pub metadata: Metadata,
    /// The tensors that were wanted: boxes of bytes, not yet proven to tile the shape, or why not; none that a lost file
    /// takes with it.
    pub tensors: BTreeMap<Arc<str>, Result<LogicalTensor, DcpTensorError>>,
    /// The data files that are not there or cannot be read.
    pub lost_files: Vec<LostFile>,
    /// Data files that were looked at.
    pub data_files: usize,
    /// Data files with bytes behind the last of their packed slices, and how many; other slices show it themselves.
    pub behind: Vec<(FileId, u64)>,
    slices: Slices,
}

/// A folder cannot be read as a checkpoint.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DcpError {
    /// A file or folder cannot be read.
    #[error("{}: cannot be read", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No metadata at all.
    #[error("{}: neither .metadata nor __<rank>.metadata: the save was interrupted; save it again", path.display())]
    NoMetadata {
        /// The folder.
        path: PathBuf,
    },
    /// More bytes than the limit.
    #[error("{}: {over}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        over: OverLimit,
    },
    /// A damaged pickle.
    #[error("{}: cannot be read; copy or save the checkpoint again", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: StreamError,
    },
    /// A pickle of something else.
    #[error("{}: not the metadata of torch.distributed.checkpoint", path.display())]
    NotMetadata {
        /// The file.
        path: PathBuf,
    },
}

/// An entry of the metadata that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryError {
    /// The file that is to blame, where one is.
    pub file: Option<FileId>,
    /// The tensor or object, where it is one.
    pub name: Option<Arc<str>>,
    /// The message.
    pub message: String,
}

/// A data file that is not there or cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostFile {
    /// The file.
    pub path: PathBuf,
    /// The system's error.
    pub what: String,
    /// Names of the tensors that have chunks in it.
    pub tensors: Vec<Arc<str>>,
}

/// A tensor cannot be put together from its chunks.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DcpTensorError {
    /// An element type that cannot be compared.
    #[error("dtype {} is not supported", name.escape_debug())]
    Dtype {
        /// Its name.
        name: String,
    },
    /// The bytes of its only chunk cannot be found.
    #[error(transparent)]
    Whole(SliceError),
    /// The bytes of some of its chunks cannot be found.
    #[error("its chunk at {offsets:?}{}", others_text(*lost))]
    Chunks {
        /// Number of chunks that are lost.
        lost: usize,
        /// Start of the first one in the tensor.
        offsets: Vec<u64>,
        /// The reason for the first one.
        source: SliceError,
    },
    /// Chunks that do not fit together.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

fn others_text(lost: usize) -> String {
    if lost > 1 { format!(" (and {} more of its chunks)", lost - 1) } else { String::new() }
}

impl DcpTensorError {
    /// Tells whether it is a [`LostFile`]'s fault.
    fn is_of_lost_file(&self) -> bool {
        match self {
            Self::Whole(source) | Self::Chunks { source, .. } => source.is_of_lost_file(),
            Self::Dtype { .. } | Self::Tensor(_) => false,
        }
    }
}

impl Checkpoint {
    /// Finds the bytes of all tensors that are wanted. Data files are added to `files`; no element is read, but
    /// what is compressed is decompressed.
    ///
    /// # Errors
    /// [`DcpError`] where the metadata cannot be read. What is wrong with single tensors is said in their place.
    pub fn open(
        folder: &Path,
        files: &mut FileSet,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Self, DcpError> {
        Ok(Self::of(Metadata::read(folder, files)?, folder, files, wanted, Wanted::All))
    }

    /// As [`Checkpoint::open`], where the metadata was read before.
    pub fn of(
        metadata: Metadata,
        folder: &Path,
        files: &mut FileSet,
        wanted: impl Fn(&str) -> bool,
        values: Wanted,
    ) -> Self {
        let tensors: Vec<(&Arc<str>, &TensorMeta)> =
            metadata.tensors.iter().filter(|(name, _)| wanted(name)).collect();
        let mut slices = Slices::of(folder, values);
        // All files first: what one of them allows for does not depend on the order of names.
        let chunks = tensors.iter().flat_map(|(_, tensor)| &tensor.chunks);
        let objects = metadata.objects.iter().filter(|(name, _)| wanted(name));
        let objects = objects.filter_map(|(_, places)| places.first());
        chunks
            .filter_map(|chunk| chunk.place.as_ref())
            .chain(objects)
            .for_each(|place| slices.add_file(place, files));
        for (_, tensor) in &tensors {
            let element = Dtype::from_name(&tensor.dtype).map_or(0, Dtype::size);
            for chunk in &tensor.chunks {
                if let Some(place) = &chunk.place {
                    let bytes = numel(&chunk.sizes).and_then(|count| count.checked_mul(element));
                    slices.prepare_tensor(place, files, bytes.unwrap_or(0));
                }
            }
        }
        for (name, places) in &metadata.objects {
            if let Some(place) = places.first().filter(|_| wanted(name)) {
                slices.prepare_object(place, files);
            }
        }
        let files = &*files;
        let lost_files = slices.lost(&tensors);
        let put_together = tensors.par_iter().filter_map(|(name, tensor)| {
            let found = tensor.put_together(name, &slices, files, metadata.file);
            let is_told = found.as_ref().is_err_and(DcpTensorError::is_of_lost_file);
            (!is_told).then(|| ((*name).clone(), found))
        });
        let tensors = put_together.collect::<Vec<_>>().into_iter().collect();
        let data_files = slices.files.len();
        let behind = slices.behind(&metadata, files);
        Self { metadata, tensors, lost_files, data_files, behind, slices }
    }

    /// The file that `torch.save` made of an object that is no tensor. Where several ranks wrote one, that of the first.
    ///
    /// # Errors
    /// [`SliceError`] where there is no such object, or it cannot be read.
    pub fn object(&self, name: &str, files: &FileSet) -> Result<TorchFile, SliceError> {
        let place = self.metadata.objects.get(name).and_then(|places| places.first());
        self.slices.object(place.ok_or(SliceError::NoPlace)?, files)
    }

    /// The data file that holds an object.
    #[must_use]
    pub fn path_of_object(&self, name: &str) -> Option<PathBuf> {
        let place = self.metadata.objects.get(name)?.first()?;
        Some(self.slices.folder.join(&*place.path))
    }

    /// Tells whether an object lies in one of the [`Checkpoint::lost_files`].
    #[must_use]
    pub fn is_lost_with_file(&self, name: &str) -> bool {
        let path = self.path_of_object(name);
        self.lost_files.iter().any(|file| Some(&file.path) == path.as_ref())
    }
}

impl TensorMeta {
    fn put_together(
        &self,
        name: &Arc<str>,
        slices: &Slices,
        files: &FileSet,
        metadata: FileId,
    ) -> Result<LogicalTensor, DcpTensorError> {
        let dtype = Dtype::from_name(&self.dtype)
            .ok_or_else(|| DcpTensorError::Dtype { name: self.dtype.to_string() })?;
        let mut boxes = Vec::with_capacity(self.chunks.len());
        let mut copies: Vec<(Extent, StoredTensor)> = Vec::new();
        let mut lost = Vec::new();
        for chunk in self.chunks.iter().filter(|chunk| !chunk.sizes.contains(&0)) {
            match slices.tensor(&ExpectedChunk { name, chunk, dtype }, files) {
                Ok(stored) => {
                    let (offsets, sizes) = (chunk.offsets.to_vec(), chunk.sizes.to_vec());
                    let found = if chunk.is_copy { &mut copies } else { &mut boxes };
                    found.push((Extent { offsets, sizes }, stored));
                }
                Err(error) => lost.push((chunk.offsets.to_vec(), error)),
            }
        }
        let count = lost.len();
        if let Some((offsets, source)) = lost.into_iter().next() {
            return Err(match self.chunks.len() {
                1 => DcpTensorError::Whole(source),
                _ => DcpTensorError::Chunks { lost: count, offsets, source },
            });
        }
        let source = Source { file: metadata, name: Arc::clone(name) };
        let mut tensor = LogicalTensor::from_boxes(dtype, self.shape.to_vec(), source, boxes)?;
        // One at a time: copies by several ranks may overlap.
        for copy in copies {
            let source = Source { file: copy.1.storage().file, name: Arc::clone(name) };
            tensor.add_copy(LogicalTensor::from_boxes(
                dtype,
                self.shape.to_vec(),
                source,
                [copy],
            )?)?;
        }
        Ok(tensor)
    }
}

/// The data files of a checkpoint, and what was unpacked of them.
#[derive(Debug)]
struct Slices {
    folder: PathBuf,
    files: HashMap<Arc<str>, DataFile>,
    /// By file and offset.
    unpacked: HashMap<(Arc<str>, u64), Result<Unpacked, SliceError>>,
    spool: Spool,
    /// Values that are asked for.
    values: Wanted,
}

/// The values of tensors that are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// All of them.
    All,
    /// None: what is compressed stays so, but for what is so small that it may be no weight.
    None,
}

/// The place of a slice that was compressed.
#[derive(Debug, Clone, Copy)]
enum Unpacked {
    /// The archive that it was.
    Archive(Region),
    /// The elements of a tensor that nobody asks for.
    Absent(Region),
}

impl Slices {
    fn of(folder: &Path, values: Wanted) -> Self {
        Self {
            folder: folder.to_path_buf(),
            files: HashMap::new(),
            unpacked: HashMap::new(),
            spool: Spool::of(folder),
            values,
        }
    }

    /// Adds the file of a slice.
    fn add_file(&mut self, place: &FileSlice, files: &mut FileSet) {
        if !self.files.contains_key(&place.path) {
            let file = DataFile::add(&self.folder, &place.path, files);
            self.spool.allow(file.len(files));
            self.files.insert(Arc::clone(&place.path), file);
        }
    }

    /// Unpacks the slice of a chunk whose elements have so many bytes, where it is compressed and someone asks for them.
    fn prepare_tensor(&mut self, place: &FileSlice, files: &mut FileSet, bytes: u64) {
        let is_wanted = self.values == Wanted::All || bytes <= LIMITS.unpacked_always;
        self.prepare(place, files, |spool, files, packed| {
            let limit = bytes.saturating_add(LIMITS.archive_overhead);
            match is_wanted {
                true => spool.unpack(files, packed, limit).map(Unpacked::Archive),
                false => spool.absent(files, bytes).map(Unpacked::Absent),
            }
        });
    }

    /// Unpacks the slice of an object, where it is compressed.
    fn prepare_object(&mut self, place: &FileSlice, files: &mut FileSet) {
        self.prepare(place, files, |spool, files, packed| {
            spool.unpack(files, packed, LIMITS.pickle_bytes).map(Unpacked::Archive)
        });
    }

    fn prepare(
        &mut self,
        place: &FileSlice,
        files: &mut FileSet,
        unpack: impl FnOnce(&mut Spool, &mut FileSet, Packed<'_>) -> Result<Unpacked, SliceError>,
    ) {
        let Self { files: data_files, unpacked, spool, .. } = self;
        if let (Some(transforms), Some(file)) = (&place.transforms, data_files.get(&place.path)) {
            let key = (Arc::clone(&place.path), place.offset);
            unpacked.entry(key).or_insert_with(|| {
                let packed = Packed::new(file.region(place, files)?, transforms)?;
                unpack(spool, files, packed)
            });
        }
    }

    /// Bytes behind the last slice of files whose slices are packed.
    fn behind(&self, metadata: &Metadata, files: &FileSet) -> Vec<(FileId, u64)> {
        let chunks = metadata.tensors.values().flat_map(|tensor| &tensor.chunks);
        let places = chunks.filter_map(|chunk| chunk.place.as_ref());
        let mut ends: BTreeMap<FileId, u64> = BTreeMap::new();
        for place in places.chain(metadata.objects.values().flatten()) {
            if place.transforms.is_some()
                && let Some(Ok(region)) =
                    self.files.get(&place.path).map(|file| file.region(place, files))
            {
                let end = ends.entry(region.file).or_default();
                *end = region.offset.saturating_add(region.len).max(*end);
            }
        }
        let behind =
            ends.into_iter().map(|(file, end)| (file, files.whole(file).len.saturating_sub(end)));
        behind.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// The files that are not there or cannot be read, with the tensors that have chunks in them.
    fn lost(&self, tensors: &[(&Arc<str>, &TensorMeta)]) -> Vec<LostFile> {
        let mut lost: BTreeMap<&Arc<str>, LostFile> = BTreeMap::new();
        for (name, tensor) in tensors {
            let places = tensor.chunks.iter().filter(|chunk| !chunk.sizes.contains(&0));
            for place in places.filter_map(|chunk| chunk.place.as_ref()) {
                let Some(what) = self.files.get(&place.path).and_then(DataFile::lost) else {
                    continue;
                };
                let file = lost.entry(&place.path).or_insert_with(|| LostFile {
                    path: self.folder.join(&*place.path),
                    what: what.to_owned(),
                    tensors: Vec::new(),
                });
                if file.tensors.last() != Some(*name) {
                    file.tensors.push(Arc::clone(name));
                }
            }
        }
        lost.into_values().collect()
    }

    fn file(&self, place: &FileSlice) -> Result<&DataFile, SliceError> {
        self.files.get(&place.path).ok_or(SliceError::NotWanted)
    }

    /// The bytes of a slice that was unpacked.
    fn unpacked(&self, place: &FileSlice) -> Result<Unpacked, SliceError> {
        let key = (Arc::clone(&place.path), place.offset);
        self.unpacked.get(&key).cloned().unwrap_or(Err(SliceError::NotWanted))
    }

    fn tensor(
        &self,
        expected: &ExpectedChunk<'_>,
        files: &FileSet,
    ) -> Result<StoredTensor, SliceError> {
        let place = expected.chunk.place.as_ref().ok_or(SliceError::NoPlace)?;
        let found = if place.transforms.is_some() {
            self.unpacked(place).and_then(|unpacked| match unpacked {
                Unpacked::Archive(region) => slice::in_archive(files, region, expected),
                Unpacked::Absent(region) => expected.anywhere(region),
            })
        } else {
            self.file(place).and_then(|file| file.tensor(expected, place, files))
        };
        found.map_err(|error| error.in_file(place))
    }

    fn object(&self, place: &FileSlice, files: &FileSet) -> Result<TorchFile, SliceError> {
        let region = if place.transforms.is_some() {
            self.unpacked(place).and_then(|unpacked| match unpacked {
                Unpacked::Archive(region) => Ok(region),
                Unpacked::Absent(_) => Err(SliceError::NotWanted),
            })
        } else {
            self.file(place).and_then(|file| file.region(place, files))
        };
        let opened = region.and_then(|region| {
            TorchFile::open(files, region).map_err(|error| SliceError::Torch(Arc::new(error)))
        });
        opened.map_err(|error| error.in_file(place))
    }
}
