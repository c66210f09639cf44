//! A tensor as it was written: a strided view of a storage.

use thiserror::Error;

use crate::base::dtype::Dtype;
use crate::base::extent;
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::Region;

/// The order of the bytes of an element in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ByteOrder {
    /// Least significant byte first: every machine that trains models.
    #[default]
    Little,
    /// Most significant byte first.
    Big,
}

/// A tensor as it was written: dtype, shape and strides over a storage. Counts are elements, not bytes.
///
/// Made only by [`StoredTensor::new`], so that every element is known to lie inside the storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    dtype: Dtype,
    shape: Vec<u64>,
    strides: Vec<u64>,
    storage: Region,
    storage_offset: u64,
    byte_order: ByteOrder,
}

/// The place of a tensor's elements in a storage, in torch's words. Counts are elements, not bytes.
#[derive(Debug, Clone)]
pub struct StorageView {
    /// The bytes of the whole storage.
    pub storage: Region,
    /// Index of the first element in the storage.
    pub storage_offset: u64,
    /// Elements from one index to the next, for each dimension.
    pub strides: Vec<u64>,
}

/// A stored tensor contradicts itself or its storage.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredError {
    /// More dimensions than the limit.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// Shape and strides do not belong together.
    #[error("{sizes} sizes but {strides} strides")]
    Strides {
        /// Number of sizes.
        sizes: usize,
        /// Number of strides.
        strides: usize,
    },
    /// A size or the element count is over its limit.
    #[error("{}", too_large(shape))]
    TooLarge {
        /// The shape as stored.
        shape: Vec<u64>,
    },
    /// The same bytes stand for more elements than the limit.
    #[error(
        "shape {shape:?} makes more elements of a storage of {len} bytes than the limit of {}",
        LIMITS.expanded
    )]
    Expanded {
        /// The shape as stored.
        shape: Vec<u64>,
        /// Bytes of the storage.
        len: u64,
    },
    /// The storage ends before the last element.
    #[error("shape {shape:?} needs {needed} bytes of a storage of {len} bytes")]
    OutOfStorage {
        /// The shape as stored.
        shape: Vec<u64>,
        /// Bytes up to the end of the last element.
        needed: u128,
        /// Bytes of the storage.
        len: u64,
    },
}

/// The message for a shape that is over the limits.
pub(super) fn too_large(shape: &[u64]) -> String {
    format!(
        "shape {shape:?} is over the limits: {} dimensions, {} in one dimension, {} elements",
        LIMITS.rank,
        LIMITS.dim,
        i64::MAX
    )
}

impl StoredError {
    /// More dimensions than the limit.
    #[must_use]
    pub fn rank(rank: usize) -> Self {
        OverLimit::found("dimensions", LIMITS.rank as u64, rank as u64).into()
    }
}

impl StoredTensor {
    /// The tensor of this shape that a view of a storage is.
    ///
    /// # Errors
    /// [`StoredError`] where the view reaches beyond its storage or its numbers do not fit.
    pub fn new(
        dtype: Dtype,
        shape: Vec<u64>,
        view: StorageView,
        byte_order: ByteOrder,
    ) -> Result<Self, StoredError> {
        let StorageView { storage, storage_offset, strides } = view;
        if shape.len() > LIMITS.rank {
            return Err(StoredError::rank(shape.len()));
        }
        if shape.len() != strides.len() {
            return Err(StoredError::Strides { sizes: shape.len(), strides: strides.len() });
        }
        let fits = shape.iter().all(|&size| size <= LIMITS.dim);
        let Some(numel) = extent::numel(&shape).filter(|_| fits) else {
            return Err(StoredError::TooLarge { shape });
        };
        if numel > 0 {
            // At most 64 products of two 64-bit numbers, so 128 bits are enough for all but the sum of the largest.
            let last = shape
                .iter()
                .zip(&strides)
                .try_fold(u128::from(storage_offset), |sum, (&size, &stride)| {
                    sum.checked_add(u128::from(size - 1) * u128::from(stride))
                });
            let needed = last
                .and_then(|last| last.checked_add(1)?.checked_mul(u128::from(dtype.size())))
                .unwrap_or(u128::MAX);
            if needed > u128::from(storage.len) {
                return Err(StoredError::OutOfStorage { shape, needed, len: storage.len });
            }
            if numel > LIMITS.expanded.max(storage.len / dtype.size()) {
                return Err(StoredError::Expanded { shape, len: storage.len });
            }
        }
        Ok(Self { dtype, shape, strides, storage, storage_offset, byte_order })
    }

    /// A row-major tensor that starts its storage.
    ///
    /// # Errors
    /// As [`StoredTensor::new`].
    pub fn contiguous(
        dtype: Dtype,
        shape: Vec<u64>,
        storage: Region,
        byte_order: ByteOrder,
    ) -> Result<Self, StoredError> {
        let Some(strides) = extent::row_major(&shape) else {
            return Err(StoredError::TooLarge { shape });
        };
        Self::new(dtype, shape, StorageView { storage, storage_offset: 0, strides }, byte_order)
    }

    /// The same memory under another shape, where this tensor is row-major and has as many elements.
    #[must_use]
    pub fn view(&self, shape: &[u64]) -> Option<Self> {
        let count = extent::numel(&self.shape)?;
        if extent::numel(shape)? != count || !self.is_contiguous() {
            return None;
        }
        let strides = extent::row_major(shape)?;
        Some(Self { shape: shape.to_vec(), strides, ..self.clone() })
    }

    /// True where the elements lie one behind another in row-major order.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1_u64;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size == 0 {
                return true;
            }
            if size > 1 && stride != expected {
                return false;
            }
            expected = expected.saturating_mul(size);
        }
        true
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Sizes, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Strides in elements.
    #[must_use]
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// The bytes of the whole storage.
    #[must_use]
    pub fn storage(&self) -> Region {
        self.storage
    }

    /// Index of the first element in the storage.
    #[must_use]
    pub fn storage_offset(&self) -> u64 {
        self.storage_offset
    }

    /// Byte order of the storage.
    #[must_use]
    pub fn byte_order(&self) -> ByteOrder {
        self.byte_order
    }
}
