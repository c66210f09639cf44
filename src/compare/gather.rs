//! Pieces -> a dense block: large positioned reads, or maps instead, then copies into row-major order.

use std::io;
use std::ops::Range;

use crate::base::extent::{boxes_of_range, row_major};
use crate::kernel::transpose;
use crate::storage::{FileId, FileSet, Region};
use crate::tensor::{ByteOrder, Piece};

use super::maps::{MAPPED, Maps};

/// Most bytes of one read. Above a mebibyte nothing is won; below a quarter of one it costs.
const READ: usize = 1 << 20;

/// A read may fetch bytes between the wanted ones while at least half of it is wanted.
pub(super) const DENSITY: usize = 2;

/// Most bytes that wait between being read and being put in order.
const SCRATCH: usize = 32 << 20;

/// Bytes between two reads in the scratch: lines whose length is a power of two would fall on the same cache lines.
const PADDING: usize = 128;

/// Bytes of a read from which on it is padded.
const PADDED: usize = 8 * PADDING;

/// Fills `out` with the elements `start..` of a tensor in row-major order, little-endian.
///
/// `out` is a whole number of elements of `element` bytes. What no piece covers is left as it is, so a partial copy
/// can be laid over a complete one. `scratch` keeps its allocation from call to call.
///
/// # Errors
/// A file cannot be read; the file is named beside the error.
pub(super) fn gather(
    source: &Source<'_>,
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
            let dims = Dim::of(&part, &strides);
            let at = index((first - start) * element.size as u64);
            let len = (span(&dims) * element.size) as u64;
            let region = Region { file: part.file, offset: part.offset, len };
            if let Some(bytes) = source.maps.bytes(region) {
                scatter(&dims, bytes, &mut out[at..], element.size);
                continue;
            }
            let reader = Reader { files: source.files, piece: &part, element };
            let read = reader.read(&dims, part.offset, &mut out[at..], scratch);
            result = read.map_err(|error| (part.file, error));
        }
    });
    result
}

/// Where the elements of a range lie in a file one behind the other as they do in the tensor, if they do.
pub(super) fn run_of(
    shape: &[u64],
    pieces: &[Piece],
    element: Element,
    range: &Range<u64>,
) -> Option<Region> {
    let strides = row_major(shape)?;
    pieces.iter().find_map(|piece| {
        let extent = &piece.extent;
        let first: u64 = extent.offsets.iter().zip(&strides).map(|(o, s)| o * s).sum();
        let end = first + extent.sizes.iter().product::<u64>();
        let is_run = first <= range.start
            && range.end <= end
            && is_dense(&Dim::of(piece, &strides))
            && !element.is_swapped(piece.byte_order);
        let size = element.size as u64;
        let offset = piece.offset + (range.start - first.min(range.start)) * size;
        is_run.then_some(Region { file: piece.file, offset, len: (range.end - range.start) * size })
    })
}

/// A range of a tensor as it lies in the files, for tensors with rows across the file: there a block is many short reads,
/// a band of many rows fewer long ones. Blocks are put in order from it one by one, while they are wanted, so that each
/// of them stays in the nearest caches.
#[derive(Debug, Default)]
pub(super) struct Band {
    bytes: Vec<u8>,
    /// Pieces of the tensor, which lie in `bytes` as otherwise in a file.
    pieces: Vec<Piece>,
}

/// Bytes of a line of a band above which nothing more is won. Reads alone, 2048 lines on one thread, GB/s: 3.5 for 2 KiB,
/// 5.0 for 4, 7.2 for 8, 9.3 for 16, 12 for 32 and for contiguous reads; but a band of 16 KiB lines no longer fits the
/// caches, and a comparison takes as long as with 8.
pub(super) const LINE: u64 = 8 << 10;

impl Band {
    /// Reads the elements of a range.
    ///
    /// # Errors
    /// As for [`gather`].
    pub(super) fn fill(
        &mut self,
        files: &FileSet,
        shape: &[u64],
        pieces: &[Piece],
        element: Element,
        range: Range<u64>,
    ) -> Result<(), (FileId, io::Error)> {
        self.pieces.clear();
        let mut used = 0;
        let strides = row_major(shape).unwrap_or_default();
        let mut result = Ok(());
        boxes_of_range(shape, range.start, range.end, &mut |extent, _| {
            for piece in pieces {
                if result.is_err() {
                    return;
                }
                let Some(mut part) = piece.clip(&extent, element.size as u64) else { continue };
                let dims = Dim::of(&part, &strides);
                // Short lines beside one another are one read, however many; long ones are read one by one, as the
                // gaps between them are worth more.
                let line = span(&dims[dims.len().saturating_sub(1)..]) * element.size;
                let most = if line < PADDED { usize::MAX } else { line.max(index(LINE)) };
                let reads = Reads::new(&dims, element.size, most);
                let end = used + reads.bytes();
                self.bytes.resize(self.bytes.len().max(end), 0);
                let reader = Reader { files, piece: &part, element };
                let fetched = reader.fetch(&reads, part.offset, &mut self.bytes[used..end]);
                result = fetched.map_err(|error| (part.file, error));
                for dim in reads.packed() {
                    part.strides[dim.axis] = dim.from as u64;
                }
                part.offset = used as u64;
                self.pieces.push(part);
                used = end;
            }
        });
        result
    }

    /// Fills `out` as [`gather`] does; the elements are within the range that was read.
    pub(super) fn gather(&self, shape: &[u64], element: Element, start: u64, out: &mut [u8]) {
        let end = start + (out.len() / element.size) as u64;
        let strides = row_major(shape).unwrap_or_default();
        boxes_of_range(shape, start, end, &mut |extent, _| {
            for piece in &self.pieces {
                let Some(part) = piece.clip(&extent, element.size as u64) else { continue };
                let first: u64 = part.extent.offsets.iter().zip(&strides).map(|(o, s)| o * s).sum();
                let to = index((first - start) * element.size as u64);
                let from = &self.bytes[index(part.offset)..];
                scatter(&Dim::of(&part, &strides), from, &mut out[to..], element.size);
            }
        });
    }
}

/// Where the bytes of a tensor come from.
pub(super) struct Source<'a> {
    pub files: &'a FileSet,
    /// What need not be read.
    pub maps: &'a Maps,
}

/// What the copies need to know of an element.
#[derive(Debug, Clone, Copy)]
pub(super) struct Element {
    /// Bytes of one.
    pub size: usize,
    /// Bytes that change places in a big-endian file.
    pub swap_unit: usize,
}

impl Element {
    /// Whether its bytes are in another order than in a block.
    pub(super) fn is_swapped(self, order: ByteOrder) -> bool {
        order == ByteOrder::Big && self.swap_unit > 1
    }
}

/// A dimension of a box: how often, how far apart in the file, how far apart in the block (in elements).
#[derive(Debug, Clone, Copy)]
struct Dim {
    size: usize,
    from: usize,
    to: usize,
    /// Its number in the tensor.
    axis: usize,
}

impl Dim {
    /// The dimensions in the order of the file, the one with the largest stride first.
    fn of(piece: &Piece, strides: &[u64]) -> Vec<Self> {
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

/// Elements from the first to the last of a box, those between included.
fn span(dims: &[Dim]) -> usize {
    1 + dims.iter().map(|dim| (dim.size - 1) * dim.from).sum::<usize>()
}

fn count(dims: &[Dim]) -> usize {
    dims.iter().map(|dim| dim.size).product()
}

/// Whether elements that follow each other in the file do so in the block.
fn is_dense(dims: &[Dim]) -> bool {
    span(dims) == count(dims) && dims.iter().all(|dim| dim.from == dim.to)
}

struct Reader<'a> {
    files: &'a FileSet,
    piece: &'a Piece,
    element: Element,
}

impl Reader<'_> {
    /// Reads a box that starts at byte `offset` of the file to where it belongs in `out`.
    fn read(
        &self,
        dims: &[Dim],
        offset: u64,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
    ) -> io::Result<()> {
        let size = self.element.size;
        if is_dense(dims) {
            return self.read_run(offset, &mut out[..span(dims) * size]);
        }
        let reads = Reads::new(dims, size, READ);
        if reads.cut == dims.len() || (reads.bytes() > SCRATCH && reads.count() > 1) {
            // A single line that is longer than a read, or more lines than there is room for.
            return self.read_in_parts(dims[0], &dims[1..], offset, out, scratch);
        }
        scratch.resize(scratch.len().max(reads.bytes()), 0);
        self.fetch(&reads, offset, scratch)?;
        scatter(&reads.packed(), &scratch[..reads.bytes()], out, size);
        Ok(())
    }

    /// Reads a box in several parts along its outermost dimension.
    fn read_in_parts(
        &self,
        split: Dim,
        rest: &[Dim],
        offset: u64,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
    ) -> io::Result<()> {
        let size = self.element.size;
        let step = (split.size / 2).max(1);
        let mut dims = vec![split];
        dims.extend_from_slice(rest);
        for start in (0..split.size).step_by(step) {
            dims[0].size = step.min(split.size - start);
            let offset = offset + (start * split.from * size) as u64;
            let parts = if dims[0].size == 1 { &dims[1..] } else { &dims[..] };
            self.read(parts, offset, &mut out[start * split.to * size..], scratch)?;
        }
        Ok(())
    }

    /// Carries reads out, one behind the other in `target`.
    fn fetch(&self, reads: &Reads<'_>, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let size = self.element.size;
        let mut window = Window::new(self, reads, offset);
        for read in 0..reads.count() {
            let offset = offset + (reads.start(read) * size) as u64;
            let line = &mut target[read * reads.stride * size..][..reads.len * size];
            match window.bytes(offset, line.len())? {
                Some(bytes) => line.copy_from_slice(bytes),
                None => self.read_run(offset, line)?,
            }
        }
        window.close()
    }

    fn read_run(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.files.read_exact_at(self.piece.file, target, offset)?;
        to_little_endian(target, self.piece.byte_order, self.element);
        Ok(())
    }
}

/// A part of a file in memory that follows short reads as they go on.
struct Window<'a> {
    files: &'a FileSet,
    file: FileId,
    /// Where the reads end, or 0 where they are not short or need more than a copy.
    end: u64,
    /// Where it ends, whether it could be had or not.
    seen: u64,
    maps: Maps,
}

impl<'a> Window<'a> {
    /// Bytes of a read from which on the call costs little beside the copy.
    const LONG: usize = 64 << 10;

    fn new(reader: &Reader<'a>, reads: &Reads<'_>, offset: u64) -> Self {
        let Reader { files, piece, element } = *reader;
        let is_worth_while = reads.count() > 1
            && reads.len * reads.size < Self::LONG
            && !element.is_swapped(piece.byte_order);
        let span = (span(reads.dims) * reads.size) as u64;
        let end = if is_worth_while { offset + span } else { 0 };
        Self { files, file: piece.file, end, seen: 0, maps: Maps::default() }
    }

    /// The bytes of a read, unless it is better carried out.
    fn bytes(&mut self, offset: u64, len: usize) -> io::Result<Option<&[u8]>> {
        let wanted = Region { file: self.file, offset, len: len as u64 };
        if self.seen < offset + wanted.len && offset < self.end {
            self.close()?;
            let ahead = Region { len: MAPPED.min(self.end - offset), ..wanted };
            self.seen = offset + ahead.len;
            self.maps = Maps::one(self.files, ahead);
        }
        Ok(self.maps.bytes(wanted))
    }

    /// Whether the file still had what was copied.
    fn close(&self) -> io::Result<()> {
        self.maps.check(self.files).map_err(|(_, error)| error)
    }
}

/// How a box is read: all of its inner dimensions at once, for every index of the outer ones.
struct Reads<'a> {
    dims: &'a [Dim],
    /// Number of outer dimensions.
    cut: usize,
    /// Elements of one read.
    len: usize,
    /// Elements from one read to the next in memory.
    stride: usize,
    /// Bytes of an element.
    size: usize,
}

impl<'a> Reads<'a> {
    fn new(dims: &'a [Dim], size: usize, most: usize) -> Self {
        let is_one_read = |inner: &[Dim]| {
            let bytes = span(inner) * size;
            bytes <= most && bytes <= DENSITY * count(inner) * size
        };
        let cut = (0..dims.len()).find(|&cut| is_one_read(&dims[cut..])).unwrap_or(dims.len());
        let len = span(&dims[cut..]);
        // A gap keeps lines of a power of two apart in the cache.
        let padding = if len * size >= PADDED { PADDING / size } else { 0 };
        Self { dims, cut, len, stride: len + padding, size }
    }

    /// How many.
    fn count(&self) -> usize {
        count(&self.dims[..self.cut])
    }

    /// Where one of them starts in the box, in elements.
    fn start(&self, mut read: usize) -> usize {
        let mut start = 0;
        for dim in self.dims[..self.cut].iter().rev() {
            start += (read % dim.size) * dim.from;
            read /= dim.size;
        }
        start
    }

    /// Bytes of them all, with the gaps.
    fn bytes(&self) -> usize {
        self.count().saturating_mul(self.stride).saturating_mul(self.size)
    }

    /// The dimensions of the box as they lie in memory then.
    fn packed(&self) -> Vec<Dim> {
        let mut packed = self.dims.to_vec();
        let mut from = self.stride;
        for dim in packed[..self.cut].iter_mut().rev() {
            dim.from = from;
            from *= dim.size;
        }
        packed
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
    if element.is_swapped(order) {
        bytes.chunks_exact_mut(element.swap_unit).for_each(<[u8]>::reverse);
    }
}

/// An offset inside a block. Blocks are a few mebibytes, so it fits where the block itself fits.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
