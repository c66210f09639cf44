//! One slice of a data file: what it holds, checked against what the metadata says of it.

use std::collections::HashMap;
use std::io;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

use super::metadata::{ChunkMeta, FileSlice};
use super::shard_file::ShardFile;
use crate::base::dtype::Dtype;
use crate::containers::safetensors::{Safetensors, SafetensorsError};
use crate::containers::torch::{RebuildError, TorchError, TorchFile};
use crate::storage::{self, FileId, FileSet, Region};
use crate::tensor::{ByteOrder, StoredTensor};

/// The bytes of a chunk or an object cannot be found.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum SliceError {
    /// In which file, and where.
    #[error("{}: byte {offset}", path.escape_debug())]
    InFile {
        /// The file, relative to the folder.
        path: Arc<str>,
        /// First byte of the slice.
        offset: u64,
        /// The cause.
        source: Box<Self>,
    },
    /// The metadata has no place for it.
    #[error("the metadata does not say where it is: the save is incomplete; save it again")]
    NoPlace,
    /// It was not among those that were wanted.
    #[error("it was not looked for")]
    NotWanted,
    /// A path that leads out of the folder.
    #[error("no name of a file in this folder")]
    Outside,
    /// The file is not there or cannot be read.
    #[error("{what}")]
    File {
        /// The system's error.
        what: String,
    },
    /// The slice does not lie inside the file.
    #[error("{len} bytes are not in a file of {file} bytes: it is cut off; copy or save it again")]
    Range {
        /// Bytes of the slice.
        len: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// No archive of torch, or a damaged one.
    #[error(transparent)]
    Torch(Arc<TorchError>),
    /// A tensor that cannot be read.
    #[error(transparent)]
    Tensor(#[from] RebuildError),
    /// An archive with something else than a tensor.
    #[error("holds no tensor")]
    NoTensor,
    /// A damaged safetensors file.
    #[error(transparent)]
    Safetensors(Arc<SafetensorsError>),
    /// A safetensors file without the chunk.
    #[error("{what}")]
    NotInSafetensors {
        /// The thing it holds instead.
        what: String,
    },
    /// Not the dtype that the metadata says.
    #[error("the metadata says {expected} and the file holds {found}")]
    Dtype {
        /// According to the metadata.
        expected: Dtype,
        /// In the file.
        found: Dtype,
    },
    /// Not the shape that the metadata says.
    #[error("the metadata says shape {expected:?} and the file holds {found:?}")]
    Shape {
        /// According to the metadata.
        expected: Vec<u64>,
        /// In the file.
        found: Vec<u64>,
    },
    /// A transform that is not known.
    #[error("unsupported transform {}", name.escape_debug())]
    Transform {
        /// Its name.
        name: String,
    },
    /// The compressed bytes are damaged, or there is no room for them.
    #[error("cannot be decompressed: {what}")]
    Unpack {
        /// The reason.
        what: String,
    },
}

impl SliceError {
    fn file(error: &io::Error) -> Self {
        Self::File { what: error.to_string().to_lowercase() }
    }

    pub(super) fn in_file(self, place: &FileSlice) -> Self {
        let source = Box::new(self);
        Self::InFile { path: Arc::clone(&place.path), offset: place.offset, source }
    }

    /// Tells whether the whole file is lost, and not this slice alone.
    #[must_use]
    pub fn is_of_lost_file(&self) -> bool {
        match self {
            Self::InFile { source, .. } => source.is_of_lost_file(),
            Self::File { .. } => true,
            _ => false,
        }
    }
}

/// A data file, opened when the metadata first names it.
#[derive(Debug)]
pub(super) struct DataFile {
    file: Result<FileId, SliceError>,
    /// Safetensors headers in it, by where they start.
    headers: Mutex<HashMap<u64, SharedShardFile>>,
}

/// The end of the names of safetensors files.
const SAFETENSORS: &str = ".safetensors";

type SharedShardFile = Result<Arc<ShardFile>, SliceError>;

impl DataFile {
    /// The file of this relative path. Nothing outside of the folder is opened.
    pub(super) fn add(folder: &Path, path: &str, files: &mut FileSet) -> Self {
        let relative = Path::new(path);
        let is_inside = relative.components().all(|part| matches!(part, Component::Normal(_)));
        let file = if is_inside && !path.is_empty() {
            let added = files.add(&folder.join(relative));
            added.map_err(|error| SliceError::file(&error))
        } else {
            Err(SliceError::Outside)
        };
        Self { file, headers: Mutex::default() }
    }

    /// The system's error, where the file is not there or cannot be read.
    pub(super) fn lost(&self) -> Option<&str> {
        match &self.file {
            Err(SliceError::File { what }) => Some(what),
            _ => None,
        }
    }

    /// Bytes of the file; none where it cannot be opened.
    pub(super) fn len(&self, files: &FileSet) -> u64 {
        self.file.as_ref().map_or(0, |&file| files.whole(file).len)
    }

    /// The bytes of a slice.
    pub(super) fn region(&self, place: &FileSlice, files: &FileSet) -> Result<Region, SliceError> {
        let whole = files.whole(self.file.clone()?);
        let range = SliceError::Range { len: place.len, file: whole.len };
        whole.part(place.offset, place.len).ok_or(range)
    }

    /// The header of the safetensors file that starts where a slice should be, read once.
    fn header(&self, start: u64, files: &FileSet) -> SharedShardFile {
        let whole = files.whole(self.file.clone()?);
        let mut headers = self.headers.lock().unwrap_or_else(PoisonError::into_inner);
        let header = headers.entry(start).or_insert_with(|| {
            let rest = whole.part(start, whole.len.saturating_sub(start));
            let rest = rest.ok_or(SliceError::Range { len: 0, file: whole.len })?;
            let header = ShardFile::open(files, rest);
            header.map(Arc::new).map_err(|error| SliceError::Safetensors(Arc::new(error)))
        });
        header.clone()
    }

    /// The tensor of a slice that nothing was done to.
    pub(super) fn tensor(
        &self,
        expected: &ExpectedChunk<'_>,
        place: &FileSlice,
        files: &FileSet,
    ) -> Result<StoredTensor, SliceError> {
        let region = self.region(place, files)?;
        if place.path.ends_with(SAFETENSORS) || self.has_header(place.offset) {
            return match self.header(place.offset, files) {
                Ok(file) => in_safetensors(&file, expected),
                // An archive under that name.
                Err(error) => in_archive(files, region, expected).map_err(|_| error),
            };
        }
        let found = in_archive(files, region, expected);
        // An archive that the system does not let be read may be one all the same.
        let is_none = match &found {
            Err(SliceError::Torch(error)) => !storage::is_of_system(&**error),
            _ => false,
        };
        if !is_none || !is_safetensors(files, region)? {
            return found;
        }
        in_safetensors(&*self.header(place.offset, files)?, expected)
    }

    /// Tells whether another slice has shown that a safetensors file starts here.
    fn has_header(&self, start: u64) -> bool {
        self.headers.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&start)
    }
}

/// The tensor of a chunk in a safetensors file. The offset and length that the metadata says are not the tensor's, which is
/// known by its name alone.
fn in_safetensors(
    file: &ShardFile,
    expected: &ExpectedChunk<'_>,
) -> Result<StoredTensor, SliceError> {
    let (offsets, stored) =
        file.chunk(expected.name).map_err(|what| SliceError::NotInSafetensors { what })?;
    if *offsets != *expected.chunk.offsets {
        let what = format!("holds the chunk at {offsets:?} instead");
        return Err(SliceError::NotInSafetensors { what });
    }
    expected.checked(stored.clone())
}

/// True where a safetensors file starts with the region; it may be longer.
fn is_safetensors(files: &FileSet, region: Region) -> Result<bool, SliceError> {
    const HEAD: u64 = 64;
    let rest = files.whole(region.file).len - region.offset;
    let mut head = vec![0; usize::try_from(rest.min(HEAD)).unwrap_or_default()];
    files
        .read_exact_at(region.file, &mut head, region.offset)
        .map_err(|error| SliceError::Safetensors(Arc::new(error.into())))?;
    Ok(Safetensors::may_start_with(&head, rest))
}

/// The tensor that an archive of `torch.save` holds.
pub(super) fn in_archive(
    files: &FileSet,
    region: Region,
    expected: &ExpectedChunk<'_>,
) -> Result<StoredTensor, SliceError> {
    let torch = TorchFile::open(files, region).map_err(|error| SliceError::Torch(error.into()))?;
    let tensor = torch.tensor(torch.root())?;
    expected.checked(tensor.ok_or(SliceError::NoTensor)?)
}

/// A chunk as the metadata describes it.
pub(super) struct ExpectedChunk<'a> {
    /// The tensor that it is a chunk of.
    pub(super) name: &'a str,
    pub(super) chunk: &'a ChunkMeta,
    pub(super) dtype: Dtype,
}

impl ExpectedChunk<'_> {
    /// The tensor that the metadata describes, in these bytes.
    pub(super) fn anywhere(&self, region: Region) -> Result<StoredTensor, SliceError> {
        let sizes = self.chunk.sizes.to_vec();
        let stored = StoredTensor::contiguous(self.dtype, sizes, region, ByteOrder::Little);
        stored.map_err(|error| SliceError::Unpack { what: error.to_string() })
    }

    /// The tensor, if it is what the metadata says.
    fn checked(&self, stored: StoredTensor) -> Result<StoredTensor, SliceError> {
        if stored.dtype() != self.dtype {
            return Err(SliceError::Dtype { expected: self.dtype, found: stored.dtype() });
        }
        if stored.shape() != &*self.chunk.sizes {
            let (expected, found) = (self.chunk.sizes.to_vec(), stored.shape().to_vec());
            return Err(SliceError::Shape { expected, found });
        }
        Ok(stored)
    }
}
