//! Pieces -> a dense block: large positioned reads, then copies into row-major order.

use std::io;

use crate::extent::{boxes_of_range, row_major};
use crate::io::{FileId, FileSet};
use crate::tensor::{ByteOrder, Piece};

/// Most bytes of one read. Above a mebibyte nothing is won; below a quarter of one it costs.
const READ: usize = 1 << 20;

/// A read may fetch bytes between the wanted ones while at least this share of it is wanted.
const DENSITY: usize = 4;

/// Fills `out` with the elements `start..` of a tensor in row-major order, little-endian.
///
/// `out` is a whole number of elements of `element` bytes. What no piece covers is left as it is, so a partial copy
/// can be laid over a complete one. `scratch` keeps its allocation from call to call.
///
/// # Errors
/// A file cannot be read; the file is named beside the error.
pub(super) fn gather(
    files: &FileSet,
    shape: &[u64],
    pieces: &[Piece],
    element: Element,
    start: u64,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<(), (FileId, io::Error)> {
    let end = start + (out.len() / element.size) as u64;
    let strides = row_major(shape).unwrap_or_default();
    let mut result = Ok(());
    boxes_of_range(shape, start, end, &mut |extent, _| {
        for piece in pieces {
            if result.is_err() {
                return;
            }
            let Some(part) = piece.clip(&extent, element.size as u64) else { continue };
            let first: u64 = part.extent.offsets.iter().zip(&strides).map(|(o, s)| o * s).sum();
            let mut reader = Reader { files, piece: &part, element, out, scratch };
            let dims = Dim::of(&part, &strides);
            let at = index((first - start) * element.size as u64);
            result = reader.read(&dims, part.offset, at).map_err(|error| (part.file, error));
        }
    });
    result
}

/// What the copies need to know of an element.
#[derive(Debug, Clone, Copy)]
pub(super) struct Element {
    /// Bytes of one.
    pub size: usize,
    /// Bytes that change places in a big-endian file.
    pub swap_unit: usize,
}

/// A dimension of a box: how often, how far apart in the file, how far apart in the block (in elements).
#[derive(Debug, Clone, Copy)]
struct Dim {
    size: usize,
    from: usize,
    to: usize,
}

impl Dim {
    /// The dimensions in the order of the file, the one with the largest stride first.
    fn of(piece: &Piece, strides: &[u64]) -> Vec<Self> {
        let sizes = piece.extent.sizes.iter();
        let mut dims: Vec<Self> = sizes
            .zip(&piece.strides)
            .zip(strides)
            .filter(|((size, _), _)| **size > 1)
            .map(|((&size, &from), &to)| Self {
                size: index(size),
                from: index(from),
                to: index(to),
            })
            .collect();
        dims.sort_by(|one, other| other.from.cmp(&one.from).then(other.to.cmp(&one.to)));
        dims
    }
}

/// Elements from the first to the last of a box, those between included.
fn span(dims: &[Dim]) -> usize {
    1 + dims.iter().map(|dim| (dim.size - 1) * dim.from).sum::<usize>()
}

fn count(dims: &[Dim]) -> usize {
    dims.iter().map(|dim| dim.size).product()
}

struct Reader<'a> {
    files: &'a FileSet,
    piece: &'a Piece,
    element: Element,
    out: &'a mut [u8],
    scratch: &'a mut Vec<u8>,
}

impl Reader<'_> {
    /// Reads a box that starts at byte `offset` of the file to byte `at` of the block.
    fn read(&mut self, dims: &[Dim], offset: u64, at: usize) -> io::Result<()> {
        let size = self.element.size;
        let is_one_read = |dims: &[Dim]| {
            let bytes = span(dims) * size;
            bytes <= READ && bytes <= DENSITY * count(dims) * size
        };
        if is_one_read(dims) {
            return self.read_span(dims, offset, at);
        }
        // Too large or too sparse for one read: as many steps of the outermost dimension at a time as are.
        let Some((outer, inner)) = dims.split_first() else {
            return self.read_span(dims, offset, at);
        };
        let inner_span = span(inner);
        let fitting = (READ / size).saturating_sub(inner_span) / outer.from.max(1) + 1;
        let mut group = fitting.min(outer.size);
        let mut dims = dims.to_vec();
        dims[0].size = group;
        if !is_one_read(&dims) {
            group = 1;
        }
        let mut step = 0;
        while step < outer.size {
            let steps = group.min(outer.size - step);
            let offset = offset + (step * outer.from * size) as u64;
            let at = at + step * outer.to * size;
            if steps == 1 {
                self.read(inner, offset, at)?;
            } else {
                dims[0].size = steps;
                self.read_span(&dims, offset, at)?;
            }
            step += steps;
        }
        Ok(())
    }

    fn read_span(&mut self, dims: &[Dim], offset: u64, at: usize) -> io::Result<()> {
        let size = self.element.size;
        let len = span(dims) * size;
        let is_dense = span(dims) == count(dims) && dims.iter().all(|dim| dim.from == dim.to);
        if is_dense {
            let target = &mut self.out[at..at + len];
            self.files.read_exact_at(self.piece.file, target, offset)?;
            to_little_endian(target, self.piece.byte_order, self.element);
            return Ok(());
        }
        self.scratch.resize(self.scratch.len().max(len), 0);
        let source = &mut self.scratch[..len];
        self.files.read_exact_at(self.piece.file, source, offset)?;
        to_little_endian(source, self.piece.byte_order, self.element);
        scatter(dims, source, &mut self.out[at..], size);
        Ok(())
    }
}

/// Copies a box from the layout of the file to that of the block.
fn scatter(dims: &[Dim], from: &[u8], to: &mut [u8], size: usize) {
    match dims {
        [] => to[..size].copy_from_slice(&from[..size]),
        [dim] if dim.from == 1 && dim.to == 1 => {
            to[..dim.size * size].copy_from_slice(&from[..dim.size * size]);
        }
        [dim] => match size {
            1 => scatter_line::<1>(*dim, from, to),
            2 => scatter_line::<2>(*dim, from, to),
            4 => scatter_line::<4>(*dim, from, to),
            8 => scatter_line::<8>(*dim, from, to),
            _ => scatter_line::<16>(*dim, from, to),
        },
        [dim, inner @ ..] => {
            for step in 0..dim.size {
                let from = &from[step * dim.from * size..];
                let to = &mut to[step * dim.to * size..];
                scatter(inner, from, to, size);
            }
        }
    }
}

fn scatter_line<const N: usize>(dim: Dim, from: &[u8], to: &mut [u8]) {
    for step in 0..dim.size {
        let (source, target) = (step * dim.from * N, step * dim.to * N);
        to[target..target + N].copy_from_slice(&from[source..source + N]);
    }
}

fn to_little_endian(bytes: &mut [u8], order: ByteOrder, element: Element) {
    if order == ByteOrder::Big && element.swap_unit > 1 {
        bytes.chunks_exact_mut(element.swap_unit).for_each(<[u8]>::reverse);
    }
}

/// An offset inside a block. Blocks are a few mebibytes, so it fits where the block itself fits.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
