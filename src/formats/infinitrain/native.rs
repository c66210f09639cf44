//! InfiniTrain's own binary files: state dicts (`CKPT`) and LoRA weights (`AROL`), byte by byte.
//!
//! Facts from InfiniTrain 0.6.0 (`infini_train/src/checkpoint/checkpoint.cc`, `SaveStateDict`;
//! `src/nn/lora/lora_utils.cc`, `SaveLoRAWeights`): a header of magic, version and count, then the tensors one behind
//! the other in the order of a hash map, without alignment, checksum or trailer. LoRA tensors have neither dtype nor
//! length: they are float32.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::base::dtype::Dtype;
use crate::base::extent::numel;
use crate::base::limits::{LIMITS, OverLimit};
use crate::catalog::Problem;
use crate::formats::walk::Bounds;
use crate::storage::{FileId, FileSet, Region};
use crate::tensor::{ByteOrder, StoredTensor};

/// The content of one file.
#[derive(Debug)]
pub(super) struct NativeFile {
    pub tensors: Vec<(Arc<str>, StoredTensor)>,
    pub problems: Vec<Problem>,
}

/// The two kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    StateDict,
    Lora,
}

/// The only version there has been, of both kinds.
const VERSION: u32 = 1;

/// By the number that the file gives (`infini_train/include/datatype.h`).
const DTYPES: [Dtype; 13] = [
    Dtype::Bool,
    Dtype::UInt8,
    Dtype::Int8,
    Dtype::UInt16,
    Dtype::Int16,
    Dtype::UInt32,
    Dtype::Int32,
    Dtype::UInt64,
    Dtype::Int64,
    Dtype::BFloat16,
    Dtype::Float16,
    Dtype::Float32,
    Dtype::Float64,
];

/// The reason for which reading cannot go on: nobody knows where the next tensor begins.
#[derive(Debug, Error)]
pub(super) enum NativeError {
    #[error("cut off at byte {len}: {what} ends at byte {end}")]
    Cut { what: &'static str, end: u64, len: u64 },
    #[error(
        "a name of {0} bytes at byte {1}, more than the limit of {limit}: the file is damaged there or before",
        limit = LIMITS.name
    )]
    Name(u32, u64),
    #[error(
        "{0} dimensions at byte {1}, more than the limit of {limit}: the file is damaged there or before",
        limit = LIMITS.rank
    )]
    Rank(u32, u64),
    #[error("shape {0:?} at byte {1} is that of no tensor: the file is damaged there or before")]
    Shape(Vec<i64>, u64),
    #[error("version {0} of the format; only version {VERSION} is known")]
    Version(u32),
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Reads the headers of all tensors. What can be told apart stays; what is wrong is among the problems.
///
/// # Errors
/// There is no first tensor: the file's own header is cut off or of another version.
pub(super) fn read(files: &FileSet, file: FileId, kind: Kind) -> Result<NativeFile, NativeError> {
    let mut cursor = Cursor { files, file: files.whole(file), at: 4 };
    let version = cursor.u32("its header")?;
    if version != VERSION {
        return Err(NativeError::Version(version));
    }
    let count = cursor.u32("its header")?;
    let mut bounds = Bounds::new(files.path(file));
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for index in 0..count {
        let start = cursor.at;
        let mut name = String::new();
        let entry = cursor.entry(kind, &mut name, &mut bounds);
        let entry = match entry {
            Ok(entry) => entry,
            Err(stop) => {
                let place = format!("tensor {} of {count}, from byte {start} on", index + 1);
                bounds.problem(&name, format!("{stop} ({place}); what follows is lost"));
                break;
            }
        };
        let name: Arc<str> = name.into();
        match entry.stored() {
            _ if !names.insert(Arc::clone(&name)) => {
                bounds.problem(&name, format!("a second tensor of this name at byte {start}"));
            }
            Ok(stored) => tensors.push((name, stored)),
            Err(what) => bounds.problem(&name, format!("{what} (from byte {start} on)")),
        }
        let rest = cursor.file.len - cursor.at;
        if index + 1 == count && rest > 0 {
            let from = cursor.at;
            bounds.problem("", format!("{rest} bytes behind its last tensor, from byte {from} on"));
        }
    }
    if count == 0 && cursor.at < cursor.file.len {
        let rest = cursor.file.len - cursor.at;
        bounds.problem("", format!("says that it holds no tensor, but {rest} bytes follow"));
    }
    Ok(NativeFile { tensors, problems: bounds.into_problems() })
}

/// A place in a file.
struct Cursor<'a> {
    files: &'a FileSet,
    file: Region,
    at: u64,
}

impl Cursor<'_> {
    /// Moves over `count` bytes, which must be there, and says where they begin.
    fn skip(&mut self, what: &'static str, count: u64) -> Result<u64, NativeError> {
        let (start, len) = (self.at, self.file.len);
        let end = start.saturating_add(count);
        if end > len {
            return Err(NativeError::Cut { what, end, len });
        }
        self.at = end;
        Ok(start)
    }

    fn bytes<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], NativeError> {
        let start = self.skip(what, N as u64)?;
        let mut bytes = [0; N];
        self.files.read_exact_at(self.file.file, &mut bytes, start)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, NativeError> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    /// Reads everything of one tensor but its data, and moves behind those.
    fn entry(
        &mut self,
        kind: Kind,
        name: &mut String,
        bounds: &mut Bounds,
    ) -> Result<TensorHeader, NativeError> {
        let start = self.at;
        let length = self.u32("the length of a name")?;
        if u64::from(length) > LIMITS.name as u64 {
            return Err(NativeError::Name(length, start));
        }
        let text = self.skip("a name", u64::from(length))?;
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        self.files.read_exact_at(self.file.file, &mut bytes, text)?;
        name.push_str(&String::from_utf8_lossy(&bytes));
        bounds.enter(name, 0)?;
        let dtype = match kind {
            Kind::StateDict => self.bytes::<1>("a dtype")?[0],
            Kind::Lora => FLOAT32,
        };
        let start = self.at;
        let rank = self.u32("a number of dimensions")?;
        if u64::from(rank) > LIMITS.rank as u64 {
            return Err(NativeError::Rank(rank, start));
        }
        let mut dims = Vec::new();
        for _ in 0..rank {
            dims.push(i64::from_le_bytes(self.bytes("a shape")?));
        }
        let shape: Option<Vec<u64>> = dims.iter().map(|&dim| u64::try_from(dim).ok()).collect();
        let length = match kind {
            Kind::StateDict => u64::from_le_bytes(self.bytes("a length")?),
            Kind::Lora => {
                let length = shape.as_deref().and_then(|shape| numel(shape)?.checked_mul(4));
                length.ok_or(NativeError::Shape(dims.clone(), start))?
            }
        };
        let offset = self.skip("its data", length)?;
        let data = Region { file: self.file.file, offset, len: length };
        Ok(TensorHeader { dtype, dims, shape, data })
    }
}

/// The code of float32.
const FLOAT32: u8 = 11;

/// One tensor's entry in a file.
struct TensorHeader {
    dtype: u8,
    dims: Vec<i64>,
    /// `None` where a dimension is negative.
    shape: Option<Vec<u64>>,
    data: Region,
}

impl TensorHeader {
    fn stored(self) -> Result<StoredTensor, String> {
        let Self { dtype, dims, shape, data } = self;
        let known = DTYPES.get(usize::from(dtype));
        let dtype = *known.ok_or_else(|| format!("dtype {dtype} is none that InfiniTrain has"))?;
        let shape = shape.ok_or_else(|| format!("shape {dims:?} is that of no tensor"))?;
        let wanted = numel(&shape).and_then(|numel| numel.checked_mul(dtype.size()));
        if wanted != Some(data.len) {
            let wanted = wanted.map_or_else(|| "no such number".to_owned(), |len| len.to_string());
            let found = data.len;
            return Err(format!("{found} bytes, where shape {dims:?} of {dtype} makes {wanted}"));
        }
        StoredTensor::contiguous(dtype, shape, data, ByteOrder::Little)
            .map_err(|error| error.to_string())
    }
}
