//! View algebra on pieces: every operation moves boxes and strides, never bytes.

use crate::base::extent::Extent;
use crate::storage::{FileId, Region};

use super::{ByteOrder, StoredTensor};

/// A box of a logical tensor and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The elements of the tensor that it holds.
    pub extent: Extent,
    /// The file that holds them.
    pub file: FileId,
    /// Byte offset of the box's first element in the file.
    pub offset: u64,
    /// Strides in elements, one for each dimension of the tensor.
    pub strides: Vec<u64>,
    /// Byte order of the elements.
    pub byte_order: ByteOrder,
}

impl Piece {
    /// A box that holds all of a stored tensor.
    pub(super) fn of(extent: Extent, stored: &StoredTensor) -> Self {
        let storage = stored.storage();
        Self {
            extent,
            file: storage.file,
            offset: storage.offset + stored.storage_offset() * stored.dtype().size(),
            strides: stored.strides().to_vec(),
            byte_order: stored.byte_order(),
        }
    }

    /// The part of this piece inside `extent` (in the tensor's coordinates), if any.
    ///
    /// `element` is the size of an element in bytes.
    #[must_use]
    pub fn clip(&self, extent: &Extent, element: u64) -> Option<Self> {
        let shared = self.extent.intersect(extent)?;
        let skipped: u64 = shared
            .offsets
            .iter()
            .zip(&self.extent.offsets)
            .zip(&self.strides)
            .map(|((new, old), stride)| (new - old) * stride)
            .sum();
        Some(Self { offset: self.offset + skipped * element, extent: shared, ..self.clone() })
    }

    /// Its bytes, from those of the first element to those of the last; `element` is the size of one in bytes.
    pub(super) fn region(&self, element: u64) -> Region {
        let dims = self.extent.sizes.iter().zip(&self.strides);
        let last: u64 = dims.map(|(size, stride)| size.saturating_sub(1) * stride).sum();
        let len = if self.extent.numel() == 0 { 0 } else { (last + 1) * element };
        Region { file: self.file, offset: self.offset, len }
    }

    /// Cuts dimension `dim` to `start..start + len` and counts it from `start` on.
    pub(super) fn slice(&self, dim: usize, start: u64, len: u64, element: u64) -> Option<Self> {
        let mut window = self.extent.clone();
        window.offsets[dim] = start;
        window.sizes[dim] = len;
        let mut piece = self.clip(&window, element)?;
        piece.extent.offsets[dim] -= start;
        Some(piece)
    }

    /// Exchanges two dimensions.
    pub(super) fn transpose(&mut self, first: usize, second: usize) {
        self.extent.offsets.swap(first, second);
        self.extent.sizes.swap(first, second);
        self.strides.swap(first, second);
    }

    /// Splits dimension `dim` in two, the inner one of size `inner`: a first partial row, the full rows, the rest.
    pub(super) fn split_axis(&self, dim: usize, inner: u64, element: u64, out: &mut Vec<Self>) {
        let start = self.extent.offsets[dim];
        let end = start + self.extent.sizes[dim];
        let mut at = start;
        while at < end {
            let column = at % inner;
            let (rows, columns) = if column == 0 && end - at >= inner {
                ((end - at) / inner, inner)
            } else {
                (1, (inner - column).min(end - at))
            };
            let stride = self.strides[dim];
            let mut piece = self.clone();
            piece.offset += (at - start) * stride * element;
            piece.extent.offsets.splice(dim..=dim, [at / inner, column]);
            piece.extent.sizes.splice(dim..=dim, [rows, columns]);
            piece.strides.splice(dim..=dim, [stride.saturating_mul(inner), stride]);
            out.push(piece);
            at += rows * columns;
        }
    }

    /// True where dimensions `dim` and `dim + 1` (of size `inner`) are one in memory.
    fn joins(&self, dim: usize, inner: u64) -> bool {
        let is_one_step = self.strides[dim + 1].checked_mul(inner) == Some(self.strides[dim]);
        self.extent.sizes[dim + 1] == inner && (self.extent.sizes[dim] == 1 || is_one_step)
    }

    /// Number of pieces it falls into when dimensions `dim` and `dim + 1` (of size `inner`) become one.
    pub(super) fn rows_when_merged(&self, dim: usize, inner: u64) -> u64 {
        if inner == 1 || self.joins(dim, inner) { 1 } else { self.extent.sizes[dim] }
    }

    /// Joins dimensions `dim` and `dim + 1` (of size `inner`): one piece where the memory allows it, else one a row.
    pub(super) fn merge_axes(&self, dim: usize, inner: u64, element: u64, out: &mut Vec<Self>) {
        let (rows, columns) = (self.extent.sizes[dim], self.extent.sizes[dim + 1]);
        let (row, column) = (self.extent.offsets[dim], self.extent.offsets[dim + 1]);
        let (outer_stride, stride) = (self.strides[dim], self.strides[dim + 1]);
        let joins = self.joins(dim, inner);
        let joined = |first_row: u64, size: u64| {
            let mut piece = self.clone();
            piece.offset += (first_row - row) * outer_stride * element;
            piece.extent.offsets.splice(dim..=dim + 1, [first_row * inner + column]);
            piece.extent.sizes.splice(dim..=dim + 1, [size]);
            // A single column has a stride of its own only by name: the rows' stride is the one that counts.
            piece.strides.splice(dim..=dim + 1, [stride]);
            piece
        };
        if joins {
            out.push(joined(row, rows * columns));
        } else if inner == 1 {
            let mut piece = joined(row, rows);
            piece.strides[dim] = outer_stride;
            out.push(piece);
        } else {
            out.extend((row..row + rows).map(|first_row| joined(first_row, columns)));
        }
    }

    /// The part at each index of dimension `dim`, without that dimension.
    pub(super) fn unbind(&self, dim: usize, element: u64, mut each: impl FnMut(usize, Self)) {
        let first = self.extent.offsets[dim];
        let mut part = self.clone();
        part.squeeze(dim);
        for row in 0..self.extent.sizes[dim] {
            let Ok(at) = usize::try_from(first + row) else { return };
            let offset = self.offset + row * self.strides[dim] * element;
            each(at, Self { offset, ..part.clone() });
        }
    }

    /// Drops dimension `dim`, of which the piece holds one index.
    pub(super) fn squeeze(&mut self, dim: usize) {
        self.extent.offsets.remove(dim);
        self.extent.sizes.remove(dim);
        self.strides.remove(dim);
    }
}
