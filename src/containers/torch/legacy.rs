//! The stream that `torch.save` wrote before torch 1.6 and still writes when told not to use zip.
//!
//! ```text
//! pickle  magic number              pickle  protocol 1001        pickle  sys_info
//! pickle  the object                pickle  list of storage keys
//! for each key: element count (i64 little-endian), elements
//! ```
//! (`_legacy_save` and `_legacy_load` in `torch/serialization.py`, torch 2.15.) Elements are always
//! little-endian: `THPStorage_writeFileRaw` in `torch/csrc/serialization.cpp` swaps them on machines that are not,
//! and the loader never looks at `little_endian` in sys_info.

use std::collections::HashMap;
use std::io;

use thiserror::Error;

use super::globals;
use super::pickle::{self, Pickle, PickleError, PickleErrorKind};
use super::rebuild::{RebuildError, StorageId, Storages, key_text};
use super::value::{Value, ValueId, Values};
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::{FileSet, Region};
use crate::tensor::ByteOrder;

/// A stream cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LegacyError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Io(#[from] io::Error),
    /// One of the five pickles cannot be read; offsets count from the start of the file.
    #[error("the {part} pickle of the stream")]
    Pickle {
        /// The pickle.
        part: &'static str,
        /// The cause.
        #[source]
        source: PickleError,
    },
    /// The pickles fill more of the file than is allowed.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// Another version of the stream.
    #[error("stream protocol {0} is not known (1001 is)")]
    Protocol(String),
    /// The list of storage keys is no list of names.
    #[error("the list of storage keys is not a list of names")]
    Keys,
    /// A storage is listed twice.
    #[error("storage {} is listed twice", key.escape_debug())]
    Duplicate {
        /// The storage.
        key: String,
    },
    /// A storage that no tensor names, so that the size of its elements is unknown.
    #[error(
        "storage {} belongs to no tensor, so where the next one starts is unknown",
        key.escape_debug()
    )]
    Unreferenced {
        /// The storage.
        key: String,
    },
    /// The reference to a storage cannot be read.
    #[error(transparent)]
    Storage(#[from] RebuildError),
    /// The file ends inside a storage.
    #[error(
        "storage {} at byte {at} has {numel} elements, and only {left} bytes are left: \
         the file is cut off; copy or save it again",
        key.escape_debug()
    )]
    CutOff {
        /// The storage.
        key: String,
        /// Offset of its element count.
        at: u64,
        /// Elements announced; negative numbers are damage.
        numel: i64,
        /// Bytes up to the end of the file.
        left: u64,
    },
}

/// `MAGIC_NUMBER` 0x1950a86a20f9469cfc6c, little-endian.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
const PROTOCOL: i64 = 1001;

/// True where a file that starts so is such a stream.
pub(super) fn is_stream(head: &[u8]) -> bool {
    pickle::read(head)
        .is_ok_and(|magic| magic.values.get(magic.root) == Value::BigInt(MAGIC.as_slice()))
}

/// Reads the pickles and finds the storages, without reading these.
pub(super) fn open(
    files: &FileSet,
    region: Region,
) -> Result<(Values, ValueId, Storages), LegacyError> {
    let mut stream = Stream { files, region, head: Vec::new(), at: 0 };
    stream.next_pickle("magic number")?;
    let protocol = stream.next_pickle("protocol")?;
    match protocol.values.get(protocol.root) {
        Value::Int(PROTOCOL) => {}
        Value::Int(other) => return Err(LegacyError::Protocol(other.to_string())),
        other => return Err(LegacyError::Protocol(other.type_name().to_owned())),
    }
    stream.next_pickle("sys_info")?;
    let object = stream.next_pickle("object")?;
    let keys = stream.next_pickle("storage keys")?;
    let pickles = stream.head.get(..stream.at).unwrap_or_default();
    files.note_globals(region, globals::foreign(pickles));
    let sizes = element_sizes(&object.values)?;
    let by_key = stream.storages(&keys, &sizes)?;
    let empty = Region { len: 0, ..region };
    let storages = Storages { by_key, byte_order: ByteOrder::Little, empty };
    Ok((object.values, object.root, storages))
}

/// Bytes of an element of each storage, as the first reference to it says; torch goes by that one too.
fn element_sizes(values: &Values) -> Result<HashMap<String, u64>, LegacyError> {
    let mut sizes = HashMap::new();
    for id in values.ids() {
        if let Value::Persistent(id) = values.get(id)
            && let Some(storage) = StorageId::read(values, id)?
        {
            let size = storage.element_size();
            sizes.entry(storage.key).or_insert(size);
        }
    }
    Ok(sizes)
}

/// The file from its start to where it had to be read so far.
struct Stream<'a> {
    files: &'a FileSet,
    region: Region,
    head: Vec<u8>,
    at: usize,
}

/// First read; each further one makes the window four times as long, so that a pickle which
/// does not end in it is read again at little cost.
const FIRST_WINDOW: u64 = 64 << 10;

impl Stream<'_> {
    fn next_pickle(&mut self, part: &'static str) -> Result<Pickle, LegacyError> {
        loop {
            match pickle::read(self.head.get(self.at..).unwrap_or_default()) {
                Ok(pickle) => {
                    self.at += pickle.consumed;
                    return Ok(pickle);
                }
                Err(error) if error.kind == PickleErrorKind::UnexpectedEnd && self.grow()? => {}
                Err(error) => {
                    let at = error.at + self.at as u64;
                    return Err(LegacyError::Pickle { part, source: PickleError { at, ..error } });
                }
            }
        }
    }

    /// Reads on; false at the end of the file.
    fn grow(&mut self) -> Result<bool, LegacyError> {
        let have = self.head.len() as u64;
        if have == self.region.len {
            return Ok(false);
        }
        let want = have.saturating_mul(4).max(FIRST_WINDOW);
        let want = want.min(self.region.len).min(LIMITS.pickle_bytes);
        let over = OverLimit::new("bytes of pickles in the stream", LIMITS.pickle_bytes);
        if want <= have {
            return Err(over.into());
        }
        let start = self.head.len();
        self.head.resize(usize::try_from(want).map_err(|_| over)?, 0);
        let offset = self.region.offset + have;
        self.files.read_exact_at(self.region.file, &mut self.head[start..], offset)?;
        Ok(true)
    }

    fn storages(
        &self,
        keys: &Pickle,
        sizes: &HashMap<String, u64>,
    ) -> Result<HashMap<String, Region>, LegacyError> {
        let ids = keys.values.elements(keys.root).ok_or(LegacyError::Keys)?;
        let mut by_key = HashMap::with_capacity(ids.len());
        let mut at = self.at as u64;
        for &id in ids {
            let key = key_text(&keys.values, id).ok_or(LegacyError::Keys)?;
            let Some(&size) = sizes.get(&key) else {
                return Err(LegacyError::Unreferenced { key });
            };
            let (region, end) = self.storage(&key, at, size)?;
            at = end;
            if by_key.insert(key.clone(), region).is_some() {
                return Err(LegacyError::Duplicate { key });
            }
        }
        Ok(by_key)
    }

    /// The storage whose element count is at `at`, and where the next one starts.
    fn storage(&self, key: &str, at: u64, size: u64) -> Result<(Region, u64), LegacyError> {
        let cut_off = |numel| LegacyError::CutOff {
            key: key.to_owned(),
            at,
            numel,
            left: self.region.len.saturating_sub(at),
        };
        let mut count = [0; 8];
        let header = self.region.part(at, count.len() as u64).ok_or_else(|| cut_off(0))?;
        self.files.read_exact_at(header.file, &mut count, header.offset)?;
        let numel = i64::from_le_bytes(count);
        let start = at + header.len;
        let len = u64::try_from(numel).ok().and_then(|numel| numel.checked_mul(size));
        let region = len.and_then(|len| self.region.part(start, len));
        let region = region.ok_or_else(|| cut_off(numel))?;
        Ok((region, start + region.len))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::super::testing::{TestFile, tensors};
    use super::super::{TorchError, TorchFile};
    use super::*;

    const HEADER: &[u8] = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";

    /// `_rebuild_tensor_v2` of four floats in storage `7`.
    const OBJECT: &[u8] =
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\n\
        V7\nVcpu\nK\x04NtQK\x00(K\x04t(K\x01t\x89}tR.";

    const FLOATS: &[u8] = b"\x04\0\0\0\0\0\0\x000123456789abcdef";

    fn open(parts: &[&[u8]]) -> Result<TorchFile, LegacyError> {
        TestFile::new(&parts.concat()).open().map_err(|error| match error {
            TorchError::Legacy(error) => error,
            other => unreachable!("{other}"),
        })
    }

    #[test]
    fn storages_are_found_by_their_place() {
        let file = open(&[HEADER, OBJECT, b"(V7\nl.", FLOATS]).unwrap();
        let (_, tensor) = tensors(&file).pop().unwrap();
        let start = HEADER.len() + OBJECT.len() + 6 + 8;
        assert_eq!(tensor.unwrap().storage().offset, start as u64);
    }

    #[test]
    fn pickles_longer_than_the_first_window_are_read() {
        let long = [b"(".as_slice(), &b"K\x00".repeat(200_000), b"1"].concat();
        let object = [&OBJECT[..2], &long, &OBJECT[2..]].concat();
        let file = open(&[HEADER, &object, b"(V7\nl.", FLOATS]).unwrap();
        assert_eq!(tensors(&file).len(), 1);
    }

    #[test]
    fn offsets_in_errors_count_from_the_start_of_the_file() {
        let error = open(&[HEADER, b"N0\xff"]).unwrap_err();
        let LegacyError::Pickle { part: "object", source } = error else { unreachable!() };
        assert_eq!(source.at, HEADER.len() as u64 + 2);
    }

    #[test]
    fn rejects_streams_that_are_not_whole() {
        let keys = b"(V7\nl.";
        let is_cut = |error| matches!(error, LegacyError::CutOff { key, .. } if key == "7");
        assert!(is_cut(open(&[HEADER, OBJECT, keys]).unwrap_err()));
        assert!(is_cut(open(&[HEADER, OBJECT, keys, &FLOATS[..23]]).unwrap_err()));
        assert!(is_cut(open(&[HEADER, OBJECT, keys, &[0xff; 100]]).unwrap_err()));
        let huge = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
        assert!(is_cut(open(&[HEADER, OBJECT, keys, &huge]).unwrap_err()));
    }

    #[test]
    fn rejects_key_lists_that_do_not_belong_to_the_object() {
        let open = |keys: &[u8]| open(&[HEADER, OBJECT, keys, FLOATS, FLOATS]).unwrap_err();
        assert!(matches!(open(b"N."), LegacyError::Keys));
        assert!(matches!(open(b"(Nl."), LegacyError::Keys));
        assert!(matches!(open(b"(V8\nl."), LegacyError::Unreferenced { key } if key == "8"));
        assert!(matches!(open(b"(V7\nV7\nl."), LegacyError::Duplicate { key } if key == "7"));
    }

    #[test]
    fn rejects_other_versions() {
        let other = HEADER.iter().map(|&byte| if byte == 0xe9 { 0xea } else { byte });
        let error = open(&[&other.collect::<Vec<_>>()]).unwrap_err();
        assert!(matches!(error, LegacyError::Protocol(_)));
    }
}
