//! Boxes of elements copied from the strides of a file to those of a dense block: pure, no reads.

use crate::base::dtype::Dtype;
use crate::kernel::transpose;
use crate::tensor::{ByteOrder, Piece};

/// The bytes of an element.
#[derive(Debug, Clone, Copy)]
pub(super) struct Element {
    /// Bytes of one.
    pub size: usize,
    /// Bytes that change places in a big-endian file.
    pub swap_unit: usize,
}

impl Element {
    pub(super) fn of(dtype: Dtype) -> Self {
        let bytes = |size: u64| usize::try_from(size).unwrap_or(1);
        Self { size: bytes(dtype.size()), swap_unit: bytes(dtype.swap_unit()) }
    }

    /// Returns whether its bytes are in another order than in a block.
    pub(super) fn is_swapped(self, order: ByteOrder) -> bool {
        order == ByteOrder::Big && self.swap_unit > 1
    }
}

/// A dimension of a box: its size, and the strides in the file and in the block, in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dim {
    pub size: usize,
    pub from: usize,
    pub to: usize,
    /// Its number in the tensor.
    pub axis: usize,
}

impl Dim {
    /// The dimensions in the order of the file, the one with the largest stride first.
    pub(super) fn of(piece: &Piece, strides: &[u64]) -> Vec<Self> {
        let sizes = piece.extent.sizes.iter();
        let mut dims: Vec<Self> = sizes
            .zip(&piece.strides)
            .zip(strides)
            .enumerate()
            .filter(|(_, ((size, _), _))| **size > 1)
            .map(|(axis, ((&size, &from), &to))| Self {
                size: index(size),
                from: index(from),
                to: index(to),
                axis,
            })
            .collect();
        dims.sort_by(|one, other| other.from.cmp(&one.from).then(other.to.cmp(&one.to)));
        dims
    }
}

/// Number of elements from the first to the last of a box, those between included.
pub(super) fn span(dims: &[Dim]) -> usize {
    1 + dims.iter().map(|dim| (dim.size - 1) * dim.from).sum::<usize>()
}

pub(super) fn count(dims: &[Dim]) -> usize {
    dims.iter().map(|dim| dim.size).product()
}

/// Returns whether elements that follow each other in the file do so in the block.
pub(super) fn is_dense(dims: &[Dim]) -> bool {
    span(dims) == count(dims) && dims.iter().all(|dim| dim.from == dim.to)
}

/// Copies a box from the strides of the file to those of the block.
pub(super) fn scatter(dims: &[Dim], from: &[u8], to: &mut [u8], size: usize) {
    match size {
        1 => scatter_elements::<1>(dims, from, to),
        2 => scatter_elements::<2>(dims, from, to),
        4 => scatter_elements::<4>(dims, from, to),
        8 => scatter_elements::<8>(dims, from, to),
        _ => scatter_elements::<16>(dims, from, to),
    }
}

fn scatter_elements<const N: usize>(dims: &[Dim], from: &[u8], to: &mut [u8]) {
    let runs = dims.iter().position(|dim| dim.from == 1 && dim.to == 1);
    let across = dims.iter().position(|dim| dim.to == 1);
    let along = dims.iter().position(|dim| dim.from == 1);
    let without = |taken: &[usize]| -> Vec<Dim> {
        let kept = |&(index, _): &(usize, &Dim)| !taken.contains(&index);
        dims.iter().enumerate().filter(kept).map(|(_, dim)| *dim).collect()
    };
    match (runs, across, along) {
        (Some(run), _, _) => {
            let len = dims[run].size * N;
            each_offset(&without(&[run]), &mut |source, target| {
                let (source, target) = (source * N, target * N);
                to[target..target + len].copy_from_slice(&from[source..source + len]);
            });
        }
        (None, Some(across), Some(along)) => {
            let (across_dim, along_dim) = (dims[across], dims[along]);
            let sizes = [along_dim.size, across_dim.size];
            each_offset(&without(&[across, along]), &mut |source, target| {
                let from = (&from[source * N..], across_dim.from);
                transpose::<N>(sizes, from, (&mut to[target * N..], along_dim.to));
            });
        }
        _ => each_offset(dims, &mut |source, target| {
            let (source, target) = (source * N, target * N);
            to[target..target + N].copy_from_slice(&from[source..source + N]);
        }),
    }
}

/// Calls `each` with the offset in the source and in the block of every index of these dimensions, in elements.
fn each_offset(dims: &[Dim], each: &mut impl FnMut(usize, usize)) {
    fn walk(dims: &[Dim], from: usize, to: usize, each: &mut impl FnMut(usize, usize)) {
        match dims.split_first() {
            None => each(from, to),
            Some((dim, inner)) => {
                for step in 0..dim.size {
                    walk(inner, from + step * dim.from, to + step * dim.to, each);
                }
            }
        }
    }
    walk(dims, 0, 0, each);
}

pub(super) fn to_little_endian(bytes: &mut [u8], order: ByteOrder, element: Element) {
    if element.is_swapped(order) {
        bytes.chunks_exact_mut(element.swap_unit).for_each(<[u8]>::reverse);
    }
}

/// An offset inside a block. Blocks are a few mebibytes, so it fits where the block itself fits.
pub(super) fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
