//! Pieces -> a dense block: large positioned reads, then copies into row-major order.

use std::io;

use crate::extent::{boxes_of_range, row_major};
use crate::io::{FileId, FileSet};
use crate::tensor::{ByteOrder, Piece};

/// Most bytes of one read. Above a mebibyte nothing is won; below a quarter of one it costs.
const READ: usize = 1 << 20;

/// A read may fetch bytes between the wanted ones while at least half of it is wanted.
const DENSITY: usize = 2;

/// Most bytes that wait between being read and being put in order.
const SCRATCH: usize = 32 << 20;

/// Bytes between two reads in the scratch: lines whose length is a power of two would fall on the same cache lines.
const PADDING: usize = 128;

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
            let mut reader = Reader { files, piece: &part, element, scratch };
            let dims = Dim::of(&part, &strides);
            let at = index((first - start) * element.size as u64);
            let read = reader.read(&dims, part.offset, &mut out[at..]);
            result = read.map_err(|error| (part.file, error));
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
    scratch: &'a mut Vec<u8>,
}

impl Reader<'_> {
    /// Reads a box that starts at byte `offset` of the file to where it belongs in `out`.
    fn read(&mut self, dims: &[Dim], offset: u64, out: &mut [u8]) -> io::Result<()> {
        let size = self.element.size;
        let is_dense = span(dims) == count(dims) && dims.iter().all(|dim| dim.from == dim.to);
        if is_dense {
            let target = &mut out[..span(dims) * size];
            self.files.read_exact_at(self.piece.file, target, offset)?;
            to_little_endian(target, self.piece.byte_order, self.element);
            return Ok(());
        }
        // The innermost dimensions that one read can cover; the others say how many reads there are.
        let is_one_read = |inner: &[Dim]| {
            let bytes = span(inner) * size;
            bytes <= READ && bytes <= DENSITY * count(inner) * size
        };
        let cut = (0..dims.len()).find(|&cut| is_one_read(&dims[cut..])).unwrap_or(dims.len());
        let (outer, inner) = dims.split_at(cut);
        if let Some((split, rest)) = dims.split_first().filter(|_| cut == dims.len()) {
            // A single line that is longer than a read.
            return self.read_in_parts(*split, rest, offset, out);
        }
        let len = span(inner);
        // Reads lie one behind the other, with a gap that keeps lines of a power of two apart in the cache.
        let stride = len + PADDING / size;
        let reads = count(outer);
        let bytes = reads * stride * size;
        if bytes > SCRATCH && reads > 1 {
            return self.read_in_parts(dims[0], &dims[1..], offset, out);
        }
        self.scratch.resize(self.scratch.len().max(bytes), 0);
        for read in 0..reads {
            let mut rest = read;
            let mut skipped = 0;
            for dim in outer.iter().rev() {
                skipped += (rest % dim.size) * dim.from;
                rest /= dim.size;
            }
            let at = read * stride * size;
            let target = &mut self.scratch[at..at + len * size];
            self.files.read_exact_at(self.piece.file, target, offset + (skipped * size) as u64)?;
            to_little_endian(target, self.piece.byte_order, self.element);
        }
        let mut packed = dims.to_vec();
        let mut from = stride;
        for dim in packed[..cut].iter_mut().rev() {
            dim.from = from;
            from *= dim.size;
        }
        scatter(&packed, &self.scratch[..bytes], out, size);
        Ok(())
    }

    /// Reads a box in several parts along its outermost dimension.
    fn read_in_parts(
        &mut self,
        split: Dim,
        rest: &[Dim],
        offset: u64,
        out: &mut [u8],
    ) -> io::Result<()> {
        let size = self.element.size;
        let step = (split.size / 2).max(1);
        let mut dims = vec![split];
        dims.extend_from_slice(rest);
        for start in (0..split.size).step_by(step) {
            dims[0].size = step.min(split.size - start);
            let offset = offset + (start * split.from * size) as u64;
            let parts = if dims[0].size == 1 { &dims[1..] } else { &dims[..] };
            self.read(parts, offset, &mut out[start * split.to * size..])?;
        }
        Ok(())
    }
}

/// Copies a box from the layout of the scratch to that of the block.
fn scatter(dims: &[Dim], from: &[u8], to: &mut [u8], size: usize) {
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
            each_offset(&without(&[across, along]), &mut |source, target| {
                transpose::<N>(across_dim, along_dim, &from[source * N..], &mut to[target * N..]);
            });
        }
        _ => each_offset(dims, &mut |source, target| {
            let (source, target) = (source * N, target * N);
            to[target..target + N].copy_from_slice(&from[source..source + N]);
        }),
    }
}

/// Copies a matrix that is contiguous along one dimension in the scratch and across it in the block, in square
/// tiles that stay in the first cache.
fn transpose<const N: usize>(across: Dim, along: Dim, from: &[u8], to: &mut [u8]) {
    const TILE: usize = 32;
    for column in (0..across.size).step_by(TILE) {
        let columns = TILE.min(across.size - column);
        for row in (0..along.size).step_by(TILE) {
            for row in row..along.size.min(row + TILE) {
                let line = (row * along.to + column) * N;
                let line = &mut to[line..line + columns * N];
                let (line, _) = line.as_chunks_mut::<N>();
                let mut source = (column * across.from + row) * N;
                for element in line {
                    element.copy_from_slice(&from[source..source + N]);
                    source += across.from * N;
                }
            }
        }
    }
}

/// Calls `each` with the place in the scratch and in the block of every index of these dimensions, in elements.
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

fn to_little_endian(bytes: &mut [u8], order: ByteOrder, element: Element) {
    if order == ByteOrder::Big && element.swap_unit > 1 {
        bytes.chunks_exact_mut(element.swap_unit).for_each(<[u8]>::reverse);
    }
}

/// An offset inside a block. Blocks are a few mebibytes, so it fits where the block itself fits.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
