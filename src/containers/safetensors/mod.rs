//! The header of a safetensors file: which tensors there are and where their bytes lie.
//!
//! ```text
//! u64 N, little-endian | N bytes of JSON | data: the tensors one behind another, to the end of the file
//! ```
//! What is accepted and what is not is as in the reference reader (safetensors 0.8, `src/tensor.rs`): the tensors must tile
//! the data exactly, offsets need not be aligned, white space may surround the JSON. Two things are taken more
//! lightly, so that one odd tensor does not hide the others: a dtype that cannot be compared is that tensor's error, and a
//! name that occurs twice is told to the caller ([`Safetensors::repeated`]; the last one counts).

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use thiserror::Error;

use crate::base::dtype::Dtype;
use crate::base::extent::numel;
use crate::base::limits::{ENTRY, LIMITS, OVER_METADATA, OverLimit};
use crate::storage::{FileSet, Region, is_lfs_pointer};
use crate::tensor::{ByteOrder, StoredError, StoredTensor};

/// The header of one file.
#[derive(Debug, Default)]
pub struct Safetensors {
    /// All tensors by name; one that cannot be read is there with the reason.
    pub tensors: BTreeMap<String, Result<StoredTensor, SafetensorsTensorError>>,
    /// The entries of `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// Names that the header has more than once; the last one counts.
    pub repeated: Vec<String>,
}

/// One tensor of a readable file cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SafetensorsTensorError {
    /// An element type that cannot be compared.
    #[error("dtype {} is not supported", name.escape_debug())]
    Dtype {
        /// Its name.
        name: String,
    },
    /// Its numbers are beyond those of any tensor.
    #[error(transparent)]
    Stored(#[from] StoredError),
}

/// A file cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Io(#[from] io::Error),
    /// Too short for the length of the header.
    #[error("{len} bytes are no safetensors file: its save was interrupted; save it again")]
    Short {
        /// Bytes that are there.
        len: u64,
    },
    /// The pointer that git-lfs leaves in the place of a file.
    #[error("this is a git-lfs pointer, not the file itself; run git lfs pull")]
    LfsPointer,
    /// A header that reaches beyond the file.
    #[error(
        "the header announces {header} bytes of {len}: no safetensors file, or cut off; copy or save it again"
    )]
    HeaderBeyondFile {
        /// Length of the header as announced.
        header: u64,
        /// Bytes of the file.
        len: u64,
    },
    /// A header longer than the reference reader takes.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// The header is no JSON, or not that of safetensors.
    #[error("the safetensors header cannot be read: {what}")]
    Header {
        /// The cause.
        what: String,
    },
    /// A tensor whose byte range is not that of its shape and dtype.
    #[error("{}: {what}", name.escape_debug())]
    Range {
        /// The tensor.
        name: String,
        /// The fault.
        what: String,
    },
    /// Bytes that belong to no tensor or to two.
    #[error("{}: starts at byte {start} of the data, where byte {expected} is next", name.escape_debug())]
    NotTiled {
        /// The tensor.
        name: String,
        /// Its start.
        start: u64,
        /// End of the one before it.
        expected: u64,
    },
    /// The tensors end before the file does, or after it.
    #[error(
        "the tensors end at byte {end} of the data and the file at byte {len}; copy or save it again"
    )]
    NotCovered {
        /// End of the last tensor.
        end: u64,
        /// Bytes of data.
        len: u64,
    },
}

/// Bits of an element and the dtype by the names of safetensors 0.8; none where it cannot be compared.
#[rustfmt::skip]
static DTYPES: [(&str, u64, Option<Dtype>); 22] = [
    ("BOOL",        8,  Some(Dtype::Bool)),
    ("U8",          8,  Some(Dtype::UInt8)),
    ("I8",          8,  Some(Dtype::Int8)),
    ("I16",         16, Some(Dtype::Int16)),
    ("U16",         16, Some(Dtype::UInt16)),
    ("I32",         32, Some(Dtype::Int32)),
    ("U32",         32, Some(Dtype::UInt32)),
    ("I64",         64, Some(Dtype::Int64)),
    ("U64",         64, Some(Dtype::UInt64)),
    ("F16",         16, Some(Dtype::Float16)),
    ("BF16",        16, Some(Dtype::BFloat16)),
    ("F32",         32, Some(Dtype::Float32)),
    ("F64",         64, Some(Dtype::Float64)),
    ("C64",         64, Some(Dtype::Complex64)),
    ("F8_E4M3",     8,  Some(Dtype::Float8E4M3Fn)),
    ("F8_E5M2",     8,  Some(Dtype::Float8E5M2)),
    ("F8_E4M3FNUZ", 8,  Some(Dtype::Float8E4M3Fnuz)),
    ("F8_E5M2FNUZ", 8,  Some(Dtype::Float8E5M2Fnuz)),
    ("F8_E8M0",     8,  Some(Dtype::Float8E8M0Fnu)),
    ("F6_E2M3",     6,  None),
    ("F6_E3M2",     6,  None),
    ("F4",          4,  None),
];

/// Bytes before the header: its length.
const PREFIX: u64 = 8;

impl Safetensors {
    /// True where bytes may begin a safetensors file of `len` bytes: a length that fits and the start of JSON.
    #[must_use]
    pub fn may_start_with(head: &[u8], len: u64) -> bool {
        let Some((prefix, rest)) = head.split_first_chunk() else { return false };
        let header = u64::from_le_bytes(*prefix);
        let first = rest.iter().find(|byte| !byte.is_ascii_whitespace());
        header <= len.saturating_sub(PREFIX) && first == Some(&b'{')
    }

    /// Reads the header of the file that fills `region`.
    ///
    /// # Errors
    /// [`SafetensorsError`] where the region is no safetensors file, or is damaged.
    pub fn open(files: &FileSet, region: Region) -> Result<Self, SafetensorsError> {
        let header = read_header(files, region)?;
        let data_start = PREFIX + header.len() as u64;
        let data_len = region.len - data_start;
        let SafetensorsHeader { entries, metadata, repeated } = serde_json::from_slice(&header)
            .map_err(|error| SafetensorsError::Header { what: error.to_string() })?;
        check_tiling(&entries, data_len)?;
        let mut tensors = BTreeMap::new();
        for (name, info) in entries {
            let (start, end) = info.data_offsets;
            let storage = region.part(data_start + start, end - start);
            let storage = storage.ok_or(SafetensorsError::NotCovered { end, len: data_len })?;
            tensors.insert(name, info.stored(storage));
        }
        Ok(Self { tensors, metadata, repeated })
    }
}

fn read_header(files: &FileSet, region: Region) -> Result<Vec<u8>, SafetensorsError> {
    const HEAD: u64 = 64;
    let mut head = vec![0; usize::try_from(region.len.min(HEAD)).map_err(io::Error::other)?];
    files.read_exact_at(region.file, &mut head, region.offset)?;
    let Some(prefix) = head.first_chunk() else {
        return Err(SafetensorsError::Short { len: region.len });
    };
    if is_lfs_pointer(&head) {
        return Err(SafetensorsError::LfsPointer);
    }
    let header = u64::from_le_bytes(*prefix);
    if header > region.len - PREFIX {
        return Err(SafetensorsError::HeaderBeyondFile { header, len: region.len });
    }
    if header > LIMITS.safetensors_header {
        let limit = LIMITS.safetensors_header;
        return Err(OverLimit::found("bytes of a safetensors header", limit, header).into());
    }
    let mut bytes = vec![0; usize::try_from(header).map_err(io::Error::other)?];
    files.read_exact_at(region.file, &mut bytes, region.offset + PREFIX)?;
    Ok(bytes)
}

/// Proves that the tensors, in the order of their offsets, fill the data from its first byte to its last.
fn check_tiling(
    entries: &BTreeMap<String, TensorInfo>,
    data_len: u64,
) -> Result<(), SafetensorsError> {
    let mut order: Vec<_> = entries.iter().collect();
    order.sort_by_key(|(_, info)| info.data_offsets);
    let mut expected = 0;
    for (name, info) in order {
        info.check_size(name)?;
        let (start, end) = info.data_offsets;
        if start != expected {
            return Err(SafetensorsError::NotTiled { name: name.clone(), start, expected });
        }
        expected = end;
    }
    if expected != data_len {
        return Err(SafetensorsError::NotCovered { end: expected, len: data_len });
    }
    Ok(())
}

/// One tensor as the header describes it.
#[derive(Debug, Deserialize)]
struct TensorInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl TensorInfo {
    /// Proves that the byte range is as long as shape and dtype say; of a dtype that is not known, that it is a range.
    fn check_size(&self, name: &str) -> Result<(), SafetensorsError> {
        let wrong = |what: String| SafetensorsError::Range { name: name.to_owned(), what };
        let (start, end) = self.data_offsets;
        let Some(len) = end.checked_sub(start) else {
            return Err(wrong(format!("its data ends at byte {end}, before its start {start}")));
        };
        let Some((_, bits, _)) = DTYPES.iter().find(|row| row.0 == self.dtype) else {
            return Ok(());
        };
        let count = numel(&self.shape).map(u128::from);
        let needed = count.and_then(|count| count.checked_mul(u128::from(*bits)));
        if needed == Some(u128::from(len) * 8) {
            return Ok(());
        }
        let Self { dtype, shape, .. } = self;
        Err(wrong(format!("its {len} bytes are not those of {dtype} in shape {shape:?}")))
    }

    fn stored(self, storage: Region) -> Result<StoredTensor, SafetensorsTensorError> {
        let known = DTYPES.iter().find(|row| row.0 == self.dtype).and_then(|row| row.2);
        let dtype = known.ok_or(SafetensorsTensorError::Dtype { name: self.dtype })?;
        Ok(StoredTensor::contiguous(dtype, self.shape, storage, ByteOrder::Little)?)
    }
}

/// The header as JSON, read without building a tree of it.
struct SafetensorsHeader {
    entries: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
    repeated: Vec<String>,
}

impl<'de> Deserialize<'de> for SafetensorsHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = SafetensorsHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object that describes tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SafetensorsHeader, A::Error> {
        let mut header = SafetensorsHeader {
            entries: BTreeMap::new(),
            metadata: BTreeMap::new(),
            repeated: Vec::new(),
        };
        let mut left = LIMITS.metadata;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                header.metadata = map.next_value()?;
                continue;
            }
            if name.len() > LIMITS.name {
                let (limit, found) = (LIMITS.name as u64, name.len() as u64);
                return Err(A::Error::custom(OverLimit::found("bytes of a name", limit, found)));
            }
            left = left
                .checked_sub(name.len() + ENTRY)
                .ok_or_else(|| A::Error::custom(OVER_METADATA))?;
            if header.entries.insert(name.clone(), map.next_value()?).is_some() {
                header.repeated.push(name);
            }
        }
        Ok(header)
    }
}
