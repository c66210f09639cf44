//! What `torch.save` writes: a pickle that describes objects, and storages that it refers to.
//!
//! ```text
//! file region ─► archive (zip) or legacy (stream) ─► pickle ─► values ─► access   what Python would see
//!                          └─ storages ──────────────────────────┴─────► rebuild  StoredTensor
//! ```
//! Nothing from a file is ever executed, and no element is read. This module knows nothing of checkpoints or ranks.

mod access;
mod archive;
mod dtensor;
mod end_record;
pub mod globals;
mod legacy;
mod peek;
pub mod pickle;
mod rebuild;
mod sums;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod value;

use std::collections::HashMap;
use std::io;

use thiserror::Error;

pub use archive::{Archive, ArchiveError, ZipEntry};
pub use dtensor::{DTensor, DTensorError};
pub use legacy::LegacyError;
pub use rebuild::RebuildError;
pub use value::{Call, Value, ValueId, Values};

use self::globals::Globals;
use self::peek::Peek;
use self::pickle::PickleError;
use self::pickle::stream::StreamError;
use self::rebuild::Storages;
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::{FileSet, Region, is_lfs_pointer};
use crate::tensor::{ByteOrder, StoredTensor};

/// The form in which a file keeps its pickle and its storages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Container {
    /// A zip archive: torch 1.6 and later.
    Zip,
    /// A stream of pickles and storages: before torch 1.6.
    Legacy,
}

/// One file that `torch.save` wrote, with everything but the elements of its tensors.
#[derive(Debug)]
pub struct TorchFile {
    values: Values,
    root: ValueId,
    storages: Storages,
    container: Container,
    saved_as: Option<Box<str>>,
}

/// A file cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TorchError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Io(#[from] io::Error),
    /// No byte.
    #[error("the file is empty: its save was interrupted; save it again")]
    Empty,
    /// Zeros where the format should be.
    #[error(
        "the first {len} bytes are all zero: the file was not written to its end; copy or save it again"
    )]
    Zeros {
        /// Bytes looked at.
        len: usize,
    },
    /// The pointer that git-lfs leaves in the place of a file.
    #[error("this is a git-lfs pointer, not the file itself; run git lfs pull")]
    LfsPointer,
    /// The container of torch's first releases.
    #[error(
        "the tar format of torch's first releases is not read; load it with torch.load and save it again"
    )]
    Tar,
    /// A pickle, but not one that `torch.save` wrote.
    #[error("a plain pickle, not written by torch.save; load it and save it again with torch.save")]
    PlainPickle,
    /// Something else.
    #[error("neither a zip archive nor a stream of torch.save (it starts with {head:02x?})")]
    NotTorch {
        /// The first bytes.
        head: Vec<u8>,
    },
    /// The zip archive cannot be used.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The stream cannot be used.
    #[error(transparent)]
    Legacy(#[from] LegacyError),
    /// A zip archive without a pickle.
    #[error("a zip archive without data.pkl: not written by torch.save")]
    NoPickle,
    /// More than one pickle to choose from.
    #[error("the zip archive holds both {first:?} and {second:?}")]
    TwoPickles {
        /// One of them.
        first: String,
        /// Another.
        second: String,
    },
    /// A pickle that is over the limit.
    #[error("zip entry {name:?}: {over}")]
    PickleTooLong {
        /// The zip entry.
        name: String,
        /// Its bytes.
        over: OverLimit,
    },
    /// The pickle cannot be read.
    #[error("zip entry {name:?}")]
    Pickle {
        /// The zip entry.
        name: String,
        /// The cause.
        #[source]
        source: PickleError,
    },
    /// A byte order that is neither of the two.
    #[error("zip entry {name:?} says neither little nor big")]
    ByteOrder {
        /// The zip entry.
        name: String,
    },
}

impl TorchFile {
    /// Reads the directory and the pickle of the file that fills `region`.
    ///
    /// # Errors
    /// [`TorchError`] where the region is not what `torch.save` writes, or is damaged.
    pub fn open(files: &FileSet, region: Region) -> Result<Self, TorchError> {
        let peek = Peek::new(files, region)?;
        match container_of(peek.head()).ok_or_else(|| refusal(peek.head()))? {
            Container::Zip => Self::open_zip(&peek),
            Container::Legacy => {
                let (values, root, storages) = legacy::open(files, region)?;
                Ok(Self { values, root, storages, container: Container::Legacy, saved_as: None })
            }
        }
    }

    fn open_zip(peek: &Peek<'_>) -> Result<Self, TorchError> {
        let archive = Archive::read(peek)?;
        let data_pkl = find_pickle(&archive)?;
        let folder = data_pkl.name.strip_suffix(DATA_PKL).unwrap_or_default();
        let storage_folder = format!("{folder}data/");
        sums::verify_small(peek, &archive, data_pkl, &storage_folder)?;
        let byte_order = byte_order(peek, &archive, folder)?;
        let bytes = pickle_bytes(peek, data_pkl)?;
        let pickle = pickle::read(&bytes)
            .map_err(|source| TorchError::Pickle { name: data_pkl.name.clone(), source })?;
        let foreign = globals::foreign(&bytes);
        drop(bytes);
        note_globals(peek, &archive, (data_pkl, foreign), &storage_folder)?;
        let saved_as = folder.strip_suffix('/').map(Into::into);
        let storages = archive.into_entries().into_iter();
        let storages = storages.filter(|entry| entry.name.starts_with(&storage_folder));
        let by_key: HashMap<String, Region> = storages
            .map(|ZipEntry { mut name, region, .. }| {
                name.drain(..storage_folder.len());
                (name, region)
            })
            .collect();
        let empty = Region { len: 0, ..peek.region };
        Ok(Self {
            values: pickle.values,
            root: pickle.root,
            storages: Storages { by_key, byte_order, empty },
            container: Container::Zip,
            saved_as,
        })
    }

    /// Everything that the pickle describes.
    #[must_use]
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// The object that was saved.
    #[must_use]
    pub fn root(&self) -> ValueId {
        self.root
    }

    /// The tensor that a value stands for; `None` where it is something else.
    ///
    /// # Errors
    /// [`RebuildError`] where the value is a tensor, but damaged or of a kind that is not read.
    pub fn tensor(&self, id: ValueId) -> Result<Option<StoredTensor>, RebuildError> {
        rebuild::tensor(&self.values, &self.storages, id)
    }

    /// The part of a DTensor that a value stands for; `None` where it is something else.
    ///
    /// # Errors
    /// [`DTensorError`] where the value is a DTensor, but damaged or laid out in a way that is not read.
    pub fn dtensor(&self, id: ValueId) -> Result<Option<DTensor>, DTensorError> {
        dtensor::read(self, id)
    }

    /// The form of the file: a zip archive or a stream.
    #[must_use]
    pub fn container(&self) -> Container {
        self.container
    }

    /// The name that the file had when it was written, without its ending: torch calls the folder of its records so
    /// (`caffe2/serialize/inline_container.cc`: `PyTorchStreamWriter`, torch 1.6 to 2.9). `archive` where it wrote to a buffer
    /// or knew no name; `None` where other software put the records into no folder, and in a stream.
    #[must_use]
    pub fn saved_as(&self) -> Option<&str> {
        self.saved_as.as_deref()
    }

    /// Byte order of all storages of the file.
    #[must_use]
    pub fn byte_order(&self) -> ByteOrder {
        self.storages.byte_order
    }
}

/// Whether `torch.save` may have written a file that starts so.
#[must_use]
pub fn may_start_with(head: &[u8]) -> bool {
    container_of(head).is_some()
}

/// Number of bytes behind the end of the zip archive or the pickle that begins `region`; `None` where there is neither,
/// or nothing behind it. Readers do not mind them, but no writer leaves them.
///
/// # Errors
/// The file cannot be read.
pub fn bytes_behind(files: &FileSet, region: Region) -> io::Result<Option<u64>> {
    const HEAD: usize = 64;
    let len = usize::try_from(region.len.min(HEAD as u64)).map_err(io::Error::other)?;
    let mut head = vec![0; len];
    files.read_exact_at(region.file, &mut head, region.offset)?;
    let end = match head[..] {
        [b'P', b'K', 3, 4, ..] => archive::end(files, region)?,
        [0x80, 2..=5, ..] if !legacy::is_stream(&head) => {
            match pickle::stream::end(files, region) {
                Ok(end) => Some(end),
                Err(StreamError::Io(error)) => return Err(error),
                Err(_) => None,
            }
        }
        _ => None,
    };
    Ok(end.and_then(|end| region.len.checked_sub(end)).filter(|&bytes| bytes > 0))
}

fn container_of(head: &[u8]) -> Option<Container> {
    if head.starts_with(b"PK\x03\x04") {
        Some(Container::Zip)
    } else {
        legacy::is_stream(head).then_some(Container::Legacy)
    }
}

/// The reason why a file that starts so is none of torch's.
fn refusal(head: &[u8]) -> TorchError {
    const TAR_AT: usize = 257;
    if head.is_empty() {
        TorchError::Empty
    } else if head.iter().all(|&byte| byte == 0) {
        TorchError::Zeros { len: head.len() }
    } else if is_lfs_pointer(head) {
        TorchError::LfsPointer
    } else if head.get(TAR_AT..).is_some_and(|rest| rest.starts_with(b"ustar")) {
        TorchError::Tar
    } else if matches!(head, [0x80, 2..=5, ..]) {
        TorchError::PlainPickle
    } else {
        TorchError::NotTorch { head: head.iter().copied().take(8).collect() }
    }
}

const DATA_PKL: &str = "data.pkl";

/// The entry named `data.pkl`, in whatever folder: torch names that after the file, others leave it out.
fn find_pickle(archive: &Archive) -> Result<&ZipEntry, TorchError> {
    let is_pickle = |entry: &&ZipEntry| entry.name.rsplit('/').next() == Some(DATA_PKL);
    let mut found = archive.entries().iter().filter(is_pickle);
    let first = found.next().ok_or(TorchError::NoPickle)?;
    match found.next() {
        None => Ok(first),
        Some(second) => {
            Err(TorchError::TwoPickles { first: first.name.clone(), second: second.name.clone() })
        }
    }
}

/// Notes the foreign globals of the pickle and of all other entries that are pickles too.
fn note_globals(
    peek: &Peek<'_>,
    archive: &Archive,
    (pickle, mut found): (&ZipEntry, Globals),
    storage_folder: &str,
) -> Result<(), TorchError> {
    for entry in archive.entries() {
        let mut head = [0; 2];
        let is_other = entry.name != pickle.name && !entry.name.starts_with(storage_folder);
        if !is_other || entry.region.len < head.len() as u64 {
            continue;
        }
        peek.read_part(&mut head, entry.region)?;
        if !entry.name.ends_with(".pkl") && !globals::is_pickle(&head) {
            continue;
        }
        for (name, count) in globals::foreign(&pickle_bytes(peek, entry)?) {
            *found.entry(name).or_default() += count;
        }
    }
    peek.files().note_globals(peek.region, found);
    Ok(())
}

/// All bytes of an entry that is a pickle.
fn pickle_bytes(peek: &Peek<'_>, entry: &ZipEntry) -> Result<Vec<u8>, TorchError> {
    let len = entry.region.len;
    let fitting = usize::try_from(len).ok().filter(|_| len <= LIMITS.pickle_bytes);
    let Some(fitting) = fitting else {
        let over = OverLimit::found("bytes of a pickle", LIMITS.pickle_bytes, len);
        return Err(TorchError::PickleTooLong { name: entry.name.clone(), over });
    };
    let mut bytes = vec![0; fitting];
    peek.read_part(&mut bytes, entry.region)?;
    sums::verify(entry, &bytes)?;
    Ok(bytes)
}

/// The record is there since torch 2.1; without it, torch takes storages for little-endian.
fn byte_order(peek: &Peek<'_>, archive: &Archive, folder: &str) -> Result<ByteOrder, TorchError> {
    let Some(entry) = archive.get(&format!("{folder}byteorder")) else {
        return Ok(ByteOrder::Little);
    };
    let unknown = || TorchError::ByteOrder { name: entry.name.clone() };
    let mut word = [0; 6];
    let len = usize::try_from(entry.region.len).map_err(|_| unknown())?;
    let word = word.get_mut(..len).ok_or_else(unknown)?;
    peek.read_part(word, entry.region)?;
    match &*word {
        b"little" => Ok(ByteOrder::Little),
        b"big" => Ok(ByteOrder::Big),
        _ => Err(unknown()),
    }
}
