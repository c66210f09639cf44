//! Pieces -> dense elements: large positioned reads, or maps instead, then copies into row-major order.

use std::ops::Range;

use crate::base::extent::{boxes_of_range, row_major};
use crate::storage::{FileId, LEAST_MAPPED, Region};
use crate::tensor::Piece;

use super::side_files::{MAPPED, Maps, ReadError, SideFiles};
use super::strided::{Dim, Element, count, index, is_dense, scatter, span, to_little_endian};

/// Most bytes of one read. Above a mebibyte nothing is won; below a quarter of one it costs.
const READ: usize = 1 << 20;

/// A read may fetch bytes between the wanted ones while at least half of it is wanted.
const DENSITY: usize = 2;

/// Most bytes that wait between being read and being put in order.
const SCRATCH: usize = 32 << 20;

/// Bytes between two reads in the scratch: lines whose length is a power of two would fall on the same cache lines.
const PADDING: usize = 128;

/// Bytes of a read from which on it is padded.
const PADDED: usize = 8 * PADDING;

/// One copy of a tensor, or of parts of it.
#[derive(Clone, Copy)]
pub(super) struct CopyReader<'a> {
    pub files: SideFiles<'a>,
    /// Shape of the tensor.
    pub shape: &'a [u64],
    pub pieces: &'a [Piece],
    pub element: Element,
}

impl CopyReader<'_> {
    /// Fills `out` with the elements from `start` on in row-major order, little-endian; what `maps` has is not read.
    ///
    /// `out` is a whole number of elements. What no piece covers is left as it is, so that a partial copy can be laid
    /// over a complete one. `lines` keeps its allocation from call to call.
    pub(super) fn read(
        &self,
        maps: &Maps,
        start: u64,
        out: &mut [u8],
        lines: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        let mut result = Ok(());
        self.each_part(start..start + self.elements(out), |part, strides| {
            if result.is_err() {
                return;
            }
            let dims = Dim::of(&part, strides);
            let at = self.offset_in_block(&part, strides, start);
            let len = (span(&dims) * self.element.size) as u64;
            let region = Region { file: part.file, offset: part.offset, len };
            match maps.bytes(region) {
                Some(bytes) => {
                    self.files.add_to_sums(region, bytes);
                    scatter(&dims, bytes, &mut out[at..], self.element.size);
                }
                None => {
                    result = self.piece(&part).read(&dims, part.offset, &mut out[at..], lines);
                }
            }
        });
        result
    }

    /// The bytes of the elements of a range, if they lie in a file one behind the other as they do in the tensor.
    pub(super) fn run_of(&self, range: &Range<u64>) -> Option<Region> {
        let strides = row_major(self.shape)?;
        self.pieces.iter().find_map(|piece| {
            let first = flat_index(&piece.extent.offsets, &strides);
            let end = first + piece.extent.numel();
            let is_run = first <= range.start
                && range.end <= end
                && is_dense(&Dim::of(piece, &strides))
                && !self.element.is_swapped(piece.byte_order);
            let size = self.element.size as u64;
            let offset = piece.offset + (range.start - first.min(range.start)) * size;
            let len = (range.end - range.start) * size;
            is_run.then_some(Region { file: piece.file, offset, len })
        })
    }

    /// Maps what a range takes of the pieces, where that is long and mostly wanted.
    pub(super) fn maps(&self, range: &Range<u64>) -> Maps {
        let size = self.element.size as u64;
        let is_long = |piece: &&Piece| piece.extent.numel() * size >= LEAST_MAPPED;
        let spans = self.pieces.iter().filter(is_long).filter_map(|piece| {
            let (mut first, mut end, mut wanted) = (u64::MAX, 0, 0);
            boxes_of_range(self.shape, range.start, range.end, &mut |extent, _| {
                if let Some(part) = piece.clip(&extent, size) {
                    let dims = part.extent.sizes.iter().zip(&part.strides);
                    let last: u64 = dims.map(|(size, stride)| (size - 1) * stride).sum();
                    first = first.min(part.offset);
                    end = end.max(part.offset + (last + 1) * size);
                    wanted += part.extent.numel() * size;
                }
            });
            let len = end.checked_sub(first)?;
            let is_worth_while =
                len <= DENSITY as u64 * wanted && !self.element.is_swapped(piece.byte_order);
            is_worth_while.then_some(Region { file: piece.file, offset: first, len })
        });
        Maps::of(self.files, spans)
    }

    /// Calls `each` with every part of a piece inside a range, and the strides of the tensor.
    fn each_part(&self, range: Range<u64>, mut each: impl FnMut(Piece, &[u64])) {
        let strides = row_major(self.shape).unwrap_or_default();
        boxes_of_range(self.shape, range.start, range.end, &mut |extent, _| {
            for piece in self.pieces {
                if let Some(part) = piece.clip(&extent, self.element.size as u64) {
                    each(part, &strides);
                }
            }
        });
    }

    fn piece<'p>(&'p self, piece: &'p Piece) -> PieceReader<'p> {
        PieceReader { files: self.files, piece, element: self.element }
    }

    /// Number of elements that fit.
    fn elements(&self, out: &[u8]) -> u64 {
        (out.len() / self.element.size) as u64
    }

    /// Byte offset of a part in a block that begins with the element `start`.
    fn offset_in_block(&self, part: &Piece, strides: &[u64], start: u64) -> usize {
        index((flat_index(&part.extent.offsets, strides) - start) * self.element.size as u64)
    }
}

fn flat_index(offsets: &[u64], strides: &[u64]) -> u64 {
    offsets.iter().zip(strides).map(|(offset, stride)| offset * stride).sum()
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
    pub(super) fn fill(
        &mut self,
        copy: &CopyReader<'_>,
        range: Range<u64>,
    ) -> Result<(), ReadError> {
        self.pieces.clear();
        let size = copy.element.size;
        let mut used = 0;
        let mut result = Ok(());
        copy.each_part(range, |mut part, strides| {
            if result.is_err() {
                return;
            }
            let dims = Dim::of(&part, strides);
            // Short lines beside one another are one read, however many; long ones are read one by one, as the gaps
            // between them are worth more.
            let line = span(&dims[dims.len().saturating_sub(1)..]) * size;
            let most = if line < PADDED { usize::MAX } else { line.max(index(LINE)) };
            let reads = Reads::new(&dims, size, most);
            let end = used + reads.bytes();
            self.bytes.resize(self.bytes.len().max(end), 0);
            result = copy.piece(&part).fetch(&reads, part.offset, &mut self.bytes[used..end]);
            for dim in reads.packed() {
                part.strides[dim.axis] = dim.from as u64;
            }
            part.offset = used as u64;
            self.pieces.push(part);
            used = end;
        });
        result
    }

    /// Fills `out` as [`CopyReader::read`] does; the elements are within the range that was read.
    pub(super) fn read(&self, copy: &CopyReader<'_>, start: u64, out: &mut [u8]) {
        let copy = CopyReader { pieces: &self.pieces, ..*copy };
        copy.each_part(start..start + copy.elements(out), |part, strides| {
            let to = copy.offset_in_block(&part, strides, start);
            let from = &self.bytes[index(part.offset)..];
            scatter(&Dim::of(&part, strides), from, &mut out[to..], copy.element.size);
        });
    }
}

/// A box of a copy, which lies in one file.
struct PieceReader<'a> {
    files: SideFiles<'a>,
    piece: &'a Piece,
    element: Element,
}

impl PieceReader<'_> {
    /// Reads a box that starts at byte `offset` of the file to where it belongs in `out`.
    fn read(
        &self,
        dims: &[Dim],
        offset: u64,
        out: &mut [u8],
        lines: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        let size = self.element.size;
        if is_dense(dims) {
            return self.read_run(offset, &mut out[..span(dims) * size]);
        }
        let reads = Reads::new(dims, size, READ);
        if reads.cut == dims.len() || (reads.bytes() > SCRATCH && reads.count() > 1) {
            // A single line that is longer than a read, or more lines than there is room for.
            return self.read_in_parts(dims, offset, out, lines);
        }
        lines.resize(lines.len().max(reads.bytes()), 0);
        self.fetch(&reads, offset, lines)?;
        scatter(&reads.packed(), &lines[..reads.bytes()], out, size);
        Ok(())
    }

    /// Reads a box in several parts along its outermost dimension.
    fn read_in_parts(
        &self,
        dims: &[Dim],
        offset: u64,
        out: &mut [u8],
        lines: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        let size = self.element.size;
        let split = dims[0];
        let step = (split.size / 2).max(1);
        let mut dims = dims.to_vec();
        for start in (0..split.size).step_by(step) {
            dims[0].size = step.min(split.size - start);
            let offset = offset + (start * split.from * size) as u64;
            let parts = if dims[0].size == 1 { &dims[1..] } else { &dims[..] };
            self.read(parts, offset, &mut out[start * split.to * size..], lines)?;
        }
        Ok(())
    }

    /// Carries reads out, one behind the other in `target`.
    fn fetch(&self, reads: &Reads<'_>, offset: u64, target: &mut [u8]) -> Result<(), ReadError> {
        let size = self.element.size;
        let mut map = MovingMap::new(self, reads, offset);
        for read in 0..reads.count() {
            let offset = offset + (reads.start(read) * size) as u64;
            let line = &mut target[read * reads.stride * size..][..reads.len * size];
            match map.bytes(offset, line.len())? {
                Some(bytes) => line.copy_from_slice(bytes),
                None => self.read_run(offset, line)?,
            }
        }
        map.check()
    }

    fn read_run(&self, offset: u64, target: &mut [u8]) -> Result<(), ReadError> {
        self.files.read_exact_at(self.piece.file, target, offset)?;
        to_little_endian(target, self.piece.byte_order, self.element);
        Ok(())
    }
}

/// A part of a file in memory that follows short reads as they go on.
struct MovingMap<'a> {
    files: SideFiles<'a>,
    file: FileId,
    /// End of the reads in the file, or 0 where they are not short or need more than a copy.
    end: u64,
    /// End of the map in the file, whether it could be had or not.
    seen: u64,
    maps: Maps,
}

impl<'a> MovingMap<'a> {
    /// Bytes of a read from which on the call costs little beside the copy.
    const LONG: usize = 64 << 10;

    fn new(reader: &PieceReader<'a>, reads: &Reads<'_>, offset: u64) -> Self {
        let PieceReader { files, piece, element } = *reader;
        let is_worth_while = reads.count() > 1
            && reads.len * reads.size < Self::LONG
            && !element.is_swapped(piece.byte_order);
        let span = (span(reads.dims) * reads.size) as u64;
        let end = if is_worth_while { offset + span } else { 0 };
        Self { files, file: piece.file, end, seen: 0, maps: Maps::default() }
    }

    /// The bytes of a read, unless it is better carried out.
    fn bytes(&mut self, offset: u64, len: usize) -> Result<Option<&[u8]>, ReadError> {
        let wanted = Region { file: self.file, offset, len: len as u64 };
        if self.seen < offset + wanted.len && offset < self.end {
            self.check()?;
            let ahead = Region { len: MAPPED.min(self.end - offset), ..wanted };
            self.seen = offset + ahead.len;
            self.maps = Maps::of(self.files, [ahead]);
        }
        Ok(self.maps.bytes(wanted))
    }

    /// Checks that the file still had what was copied.
    fn check(&self) -> Result<(), ReadError> {
        self.maps.check(self.files)
    }
}

/// The reads of a box: all of its inner dimensions at once, for every index of the outer ones.
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

    /// Number of reads.
    fn count(&self) -> usize {
        count(&self.dims[..self.cut])
    }

    /// The start of one of them in the box, in elements.
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
