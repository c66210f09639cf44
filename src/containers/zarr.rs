//! Arrays of zarr version 2 as Megatron-Core's `zarr` backend wrote them: a folder an array, a file a chunk, nothing compressed.
//!
//! Sources: the zarr v2 specification; Megatron-LM core_v0.4 to core_v0.15
//! (`core/dist_checkpointing/strategies/zarr.py`), which adds the dtype `bfloat16` to it.

use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use crate::base::dtype::Dtype;
use crate::base::extent::{Extent, numel, row_major};
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::FileSet;
use crate::tensor::{
    ByteOrder, LogicalTensor, Source, StorageView, StoredError, StoredTensor, TensorError,
};

/// The file that describes an array.
pub const HEADER: &str = ".zarray";

/// An array cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ZarrError {
    /// A file cannot be read.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The header is no JSON of this form.
    #[error("{HEADER} is not that of a zarr array of version 2: {0}")]
    Header(String),
    /// The header asks for something that Megatron never wrote.
    #[error("its {what} is {found}, which cannot be read; Megatron writes {expected}")]
    Unsupported {
        /// The entry of the header.
        what: &'static str,
        /// Its value.
        found: String,
        /// The value that it should have.
        expected: &'static str,
    },
    /// More chunks than the limit.
    #[error("shape {shape:?} in chunks of {chunks:?}: {over}")]
    TooManyChunks {
        /// The array's shape.
        shape: Vec<u64>,
        /// The shape of a chunk.
        chunks: Vec<u64>,
        /// The chunks that it makes.
        over: OverLimit,
    },
    /// A chunk has another size than all chunks have.
    #[error("{}: {len} bytes, where a chunk has {expected}", path.display())]
    ChunkSize {
        /// The chunk's file.
        path: PathBuf,
        /// Its length.
        len: u64,
        /// The length that it should have.
        expected: u64,
    },
    /// A size is larger than that of any tensor.
    #[error(transparent)]
    Stored(#[from] StoredError),
    /// The chunks do not make the array.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// An array, and what of it is not there.
#[derive(Debug)]
pub struct ZarrArray {
    /// The tensor that its chunks make up.
    pub tensor: LogicalTensor,
    /// Number of chunks that are there.
    pub chunks: usize,
    /// The files of chunks that were never written.
    pub missing: Vec<PathBuf>,
}

/// The entries of a header that matter; what the elements of unwritten chunks are taken for does not.
#[derive(Deserialize)]
struct ZarrHeader {
    zarr_format: u64,
    shape: Vec<u64>,
    chunks: Vec<u64>,
    dtype: Value,
    order: String,
    compressor: Option<Value>,
    filters: Option<Value>,
    dimension_separator: Option<String>,
}

/// Reads an array's header and finds its chunks; reads none of its elements. At most so many missing chunks are listed, and none
/// is looked for after the last of them.
///
/// # Errors
/// [`ZarrError`] where it cannot be read. A chunk that is not there is no error but listed.
pub fn open(
    files: &mut FileSet,
    folder: &Path,
    name: &str,
    most_missing: NonZeroUsize,
) -> Result<ZarrArray, ZarrError> {
    let header_path = folder.join(HEADER);
    let header_error = |source| ZarrError::Io { path: header_path.clone(), source };
    let header_file = files.add(&header_path).map_err(header_error)?;
    let header = header(&read(files, header_file).map_err(header_error)?)?;
    let (dtype, byte_order) = dtype_of(&header.dtype)?;
    let grid = grid(&header)?;
    let chunk_bytes = numel(&header.chunks).and_then(|count| count.checked_mul(dtype.size()));
    let (Some(chunk_bytes), Some(strides)) = (chunk_bytes, row_major(&header.chunks)) else {
        return Err(StoredError::TooLarge { shape: header.chunks }.into());
    };
    let mut missing = Vec::new();
    let mut boxes = Vec::new();
    let count = numel(&grid).unwrap_or(0);
    for place in (0..count).map(|number| place_of(number, &grid)) {
        let path = folder.join(file_name(&place));
        let file = match files.add(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                missing.push(path);
                if missing.len() >= most_missing.get() {
                    break;
                }
                continue;
            }
            Err(source) => return Err(ZarrError::Io { path, source }),
        };
        let region = files.whole(file);
        if region.len != chunk_bytes {
            return Err(ZarrError::ChunkSize { path, len: region.len, expected: chunk_bytes });
        }
        let extent = extent_of(&place, &header);
        let sizes = extent.sizes.clone();
        let view = StorageView { storage: region, storage_offset: 0, strides: strides.clone() };
        let stored = StoredTensor::new(dtype, sizes, view, byte_order)?;
        boxes.push((extent, stored));
    }
    let chunks = boxes.len();
    let source = Source { file: header_file, name: name.into() };
    let tensor = LogicalTensor::from_boxes(dtype, header.shape, source, boxes)?;
    Ok(ZarrArray { tensor, chunks, missing })
}

fn read(files: &FileSet, file: crate::storage::FileId) -> io::Result<Vec<u8>> {
    let len = files.whole(file).len;
    let over = OverLimit::found("bytes of a .zarray", LIMITS.zarr_header, len);
    let len = usize::try_from(len).ok().filter(|_| len <= LIMITS.zarr_header);
    let mut bytes = vec![0; len.ok_or_else(|| io::Error::other(over))?];
    files.read_exact_at(file, &mut bytes, 0)?;
    Ok(bytes)
}

fn header(bytes: &[u8]) -> Result<ZarrHeader, ZarrError> {
    let header: ZarrHeader =
        serde_json::from_slice(bytes).map_err(|error| ZarrError::Header(error.to_string()))?;
    let text = |value: &Option<Value>| value.as_ref().map(ToString::to_string);
    let separator = header.dimension_separator.clone().filter(|separator| separator != ".");
    let order = (header.order != "C").then(|| header.order.clone());
    let version = (header.zarr_format != 2).then(|| header.zarr_format.to_string());
    let odd = [
        ("zarr_format", version, "2"),
        ("compressor", text(&header.compressor), "null"),
        ("filters", text(&header.filters), "null"),
        ("order", order, "C"),
        ("dimension_separator", separator, "."),
    ];
    for (what, found, expected) in odd {
        if let Some(found) = found {
            return Err(ZarrError::Unsupported { what, found, expected });
        }
    }
    let (shape, chunks) = (&header.shape, &header.chunks);
    if shape.len() > LIMITS.rank {
        return Err(StoredError::rank(shape.len()).into());
    }
    if shape.iter().any(|&size| size > LIMITS.dim) || numel(shape).is_none() {
        return Err(StoredError::TooLarge { shape: header.shape }.into());
    }
    if shape.len() != chunks.len() || chunks.contains(&0) {
        let message = format!("shape {shape:?} in chunks of {chunks:?}");
        return Err(ZarrError::Header(message));
    }
    Ok(header)
}

/// Reads numpy's names of dtypes (`<f4`, `|u1`, ...) and the one that Megatron adds.
fn dtype_of(value: &Value) -> Result<(Dtype, ByteOrder), ZarrError> {
    let unsupported = || ZarrError::Unsupported {
        what: "dtype",
        found: value.to_string(),
        expected: "bfloat16 and numpy's floats and integers",
    };
    let text = value.as_str().ok_or_else(unsupported)?;
    if text == "bfloat16" {
        return Ok((Dtype::BFloat16, ByteOrder::Little));
    }
    let order = match text.as_bytes().first() {
        Some(b'<' | b'|' | b'=') => ByteOrder::Little,
        Some(b'>') => ByteOrder::Big,
        _ => return Err(unsupported()),
    };
    let name = match text.get(1..) {
        Some("f8") => "float64",
        Some("f4") => "float32",
        Some("f2") => "float16",
        Some("i8") => "int64",
        Some("i4") => "int32",
        Some("i2") => "int16",
        Some("i1") => "int8",
        Some("u8") => "uint64",
        Some("u4") => "uint32",
        Some("u2") => "uint16",
        Some("u1") => "uint8",
        Some("b1") => "bool",
        Some("c16") => "complex128",
        Some("c8") => "complex64",
        _ => return Err(unsupported()),
    };
    Ok((Dtype::from_name(name).ok_or_else(unsupported)?, order))
}

/// Number of chunks along each dimension.
fn grid(header: &ZarrHeader) -> Result<Vec<u64>, ZarrError> {
    let counts = header.shape.iter().zip(&header.chunks).map(|(size, chunk)| size.div_ceil(*chunk));
    let grid: Vec<u64> = counts.collect();
    match numel(&grid) {
        Some(count) if count <= LIMITS.pieces as u64 => Ok(grid),
        count => Err(ZarrError::TooManyChunks {
            shape: header.shape.clone(),
            chunks: header.chunks.clone(),
            over: OverLimit { what: "chunks", limit: LIMITS.pieces as u64, found: count },
        }),
    }
}

/// The place of this number in a grid, in row-major order.
fn place_of(mut number: u64, grid: &[u64]) -> Vec<u64> {
    let mut place = vec![0; grid.len()];
    for (index, count) in place.iter_mut().zip(grid).rev() {
        *index = number % count;
        number /= count;
    }
    place
}

/// The box of the array that a chunk holds. Chunks at the edge are as long as the others, padded beyond the array.
fn extent_of(place: &[u64], header: &ZarrHeader) -> Extent {
    let sizes = header.shape.iter().zip(&header.chunks);
    let boxed = place.iter().zip(sizes).map(|(index, (size, chunk))| {
        let offset = index * chunk;
        (offset, *chunk.min(&(size - offset)))
    });
    let (offsets, sizes) = boxed.unzip();
    Extent { offsets, sizes }
}

/// `2.0.1`; of an array without dimensions `0`.
fn file_name(place: &[u64]) -> String {
    match place {
        [] => "0".to_owned(),
        _ => place.iter().map(ToString::to_string).collect::<Vec<_>>().join("."),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_array_of_any_other_size_has_no_chunks() {
        let folder = tempfile::tempdir().unwrap();
        let header = r#"{"zarr_format": 2, "shape": [1099511627776, 0], "chunks": [1, 1], "dtype": "<f4", "order": "C",
            "compressor": null, "filters": null, "fill_value": null}"#;
        std::fs::write(folder.path().join(HEADER), header).unwrap();
        let array =
            open(&mut FileSet::default(), folder.path(), "empty", NonZeroUsize::MIN).unwrap();
        assert_eq!((array.tensor.shape(), array.chunks), (&[1 << 40, 0][..], 0));
        assert!(array.missing.is_empty());
    }
}
