//! A pair as it is read: units of work, buffers, blocks handed on one by one.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::base::dtype::Dtype;
use crate::base::side::Side;
use crate::kernel::{BLOCK, DenseBlock, ExactSums, Stats, compare_block, widened};
use crate::pairing::Pair;
use crate::storage::FileSet;
use crate::tensor::{LogicalTensor, Merge, Piece};

use super::copies::{Copies, Failure, Work};
use super::gather::{Band, Element, LINE, Source, gather, run_of};
use super::maps::{MAPPED, Maps};
use super::{ReadError, bytes_to_compare};

/// Bytes of one side that are compared at a time, or a block where that is more: both sides stay in a core's second
/// cache. Half as many are no faster.
const PART_BYTES: u64 = 512 << 10;

/// Units for each thread at least, where there is enough for that: one of them is little to wait for at the end.
const UNITS_PER_THREAD: u64 = 8;

/// How many bytes of one side make a unit where there are so many in all.
pub(super) fn unit_bytes(pairs: &[Pair]) -> u64 {
    let threads = rayon::current_num_threads() as u64;
    let bytes = bytes_to_compare(pairs) / 2 / (threads * UNITS_PER_THREAD);
    bytes.clamp(PART_BYTES, MAPPED)
}

/// Most bytes of the bands of a thread, all copies of both sides together.
const BAND_BYTES: u64 = 32 << 20;

/// A pair as it is compared: what each side reads from.
pub(super) struct Job<'a> {
    pub pair: &'a Pair,
    /// The second side is the first one: it is not read again.
    is_survey: bool,
    pub elements: [Element; 2],
    /// How the copies of each side make its value, now that it is known.
    pub merges: [Merge; 2],
    /// Blocks of each of its units.
    unit_blocks: u64,
    /// Blocks that are compared at a time; a unit has more where it is read in bands.
    part_blocks: u64,
    /// Which sides are read in bands: those with rows across the file.
    has_bands: [bool; 2],
    /// Elements of a row, of which whole ones are put in order from a band.
    row: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub job: usize,
    first_block: u64,
}

#[derive(Default)]
pub(super) struct UnitResult {
    pub blocks: Vec<Stats>,
    /// Copies that differ from the first one: side and number of the replica.
    pub replicas: BTreeSet<(Side, usize)>,
    pub error: Option<ReadError>,
}

/// Buffers that a thread keeps from unit to unit.
#[derive(Default)]
struct Buffers {
    sides: [Vec<u8>; 2],
    copy: Vec<u8>,
    scratch: Vec<u8>,
    /// Whether a block of each side is to be made of all copies.
    is_merged: [Vec<bool>; 2],
    /// Such a block of each side.
    merged: [Vec<u8>; 2],
    work: Work,
    /// Of the first copy and all others of each side.
    bands: [Vec<Band>; 2],
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

impl<'a> Job<'a> {
    /// Both sides of a pair.
    pub(super) fn new(pair: &'a Pair, files: [&FileSet; 2], unit_bytes: u64) -> Self {
        let merges = Side::BOTH.map(|side| settled(&pair.sides[side], files[side]));
        Self::with(pair, merges, unit_bytes)
    }

    /// The first side alone, as it is stored: what its copies make together is not asked for.
    pub(super) fn survey(pair: &'a Pair, unit_bytes: u64) -> Self {
        Self { is_survey: true, ..Self::with(pair, [Merge::First; 2], unit_bytes) }
    }

    fn with(pair: &'a Pair, merges: [Merge; 2], unit_bytes: u64) -> Self {
        let has_bands = pair.sides.each_ref().map(is_transposed);
        let row = pair.sides[0].shape().last().copied().unwrap_or(1).max(1);
        let sizes = pair.sides.each_ref().map(|side| side.dtype().size());
        let element = sizes[0].max(sizes[1]);
        let part_blocks = (PART_BYTES / (BLOCK as u64 * element)).max(1);
        let copies =
            |side: Side| if has_bands[side] { 1 + pair.sides[side].replicas().len() } else { 0 };
        let bands = (copies(Side::A) + copies(Side::B)) as u64;
        let band_blocks = |bands: u64| {
            let most = BAND_BYTES / bands / element;
            row.saturating_mul(LINE / element).min(most) / BLOCK as u64
        };
        Self {
            pair,
            is_survey: false,
            elements: pair.sides.each_ref().map(|side| Element::of(side.dtype())),
            merges,
            unit_blocks: match bands {
                0 => (unit_bytes / (BLOCK as u64 * element)).max(1),
                bands => band_blocks(bands).max(part_blocks),
            },
            part_blocks,
            has_bands,
            row,
        }
    }

    pub(super) fn units(&self, job: usize) -> impl Iterator<Item = Unit> + use<> {
        let numel = if self.pair.is_comparable() { self.pair.sides[0].numel() } else { 0 };
        let blocks = numel.div_ceil(BLOCK as u64);
        let step = usize::try_from(self.unit_blocks).unwrap_or(1);
        (0..blocks).step_by(step).map(move |first_block| Unit { job, first_block })
    }

    pub(super) fn run(&self, unit: Unit, files: [&FileSet; 2], done: &AtomicU64) -> UnitResult {
        let mut result = UnitResult::default();
        let mut blocks = Vec::new();
        let sizes = self.pair.sides.each_ref().map(|side| side.dtype().size());
        let size = if self.is_survey { sizes[0] } else { sizes[0] + sizes[1] };
        let read = self.each_block(unit, files, &mut result, |a, b, first| {
            blocks.push(compare_block(a, b, first));
            done.fetch_add(self.block_elements(first) * size, Ordering::Relaxed);
        });
        result.blocks = blocks;
        result.error = read.err();
        result
    }

    /// Reads both sides of a unit part by part and hands them on, block by block, with the index of the first element.
    pub(super) fn each_block(
        &self,
        unit: Unit,
        files: [&FileSet; 2],
        result: &mut UnitResult,
        mut each: impl FnMut(DenseBlock<'_>, DenseBlock<'_>, u64),
    ) -> Result<(), ReadError> {
        BUFFERS.with_borrow_mut(|buffers| {
            let range = self.range(unit);
            if self.has_bands.contains(&true) {
                for side in self.sides() {
                    self.fill_bands(*side, &range, files, &mut buffers.bands[*side])?;
                }
            }
            let step = self.part_blocks * BLOCK as u64;
            let maps = Side::BOTH.map(|side| self.maps(side, &range, files));
            let mut start = range.start;
            while start < range.end {
                let part = start..(start + step).min(range.end);
                let mapped = Side::BOTH.map(|side| self.mapped(side, &part, &maps[side]));
                let mut windows = [0..0, 0..0];
                for &side in self.sides() {
                    buffers.is_merged[side].clear();
                    if mapped[side].is_none() {
                        let source = Source { files: files[side], maps: &maps[side] };
                        windows[side] = self.read_side(side, &part, &source, buffers, result)?;
                    }
                }
                self.each_block_of_part(start, mapped, windows, files, buffers, &mut each)?;
                start = part.end;
            }
            for (side, maps) in Side::BOTH.into_iter().zip(&maps) {
                maps.check(files[side])
                    .map_err(|failure| read_error(side, files[side], &failure))?;
            }
            Ok(())
        })
    }

    /// What of a unit can be looked at instead of being read.
    fn maps(&self, side: Side, unit: &Range<u64>, files: [&FileSet; 2]) -> Maps {
        if self.has_bands[side] || !self.sides().contains(&side) {
            return Maps::default();
        }
        let tensor = &self.pair.sides[side];
        Maps::of(files[side], tensor.shape(), tensor.pieces(), self.elements[side], unit)
    }

    /// The elements of a part where they lie in a file as they are compared.
    fn mapped<'m>(&self, side: Side, part: &Range<u64>, maps: &'m Maps) -> Option<&'m [u8]> {
        let tensor = &self.pair.sides[side];
        if !tensor.replicas().is_empty() {
            return None;
        }
        maps.bytes(run_of(tensor.shape(), tensor.pieces(), self.elements[side], part)?)
    }

    /// Hands on what was read, or what several copies make together.
    fn each_block_of_part(
        &self,
        start: u64,
        [mapped_a, mapped_b]: [Option<&[u8]>; 2],
        [window_a, window_b]: [Range<usize>; 2],
        files: [&FileSet; 2],
        buffers: &mut Buffers,
        each: &mut impl FnMut(DenseBlock<'_>, DenseBlock<'_>, u64),
    ) -> Result<(), ReadError> {
        let Buffers { sides, is_merged, merged, work, .. } = buffers;
        let a = mapped_a.unwrap_or(&sides[0][window_a]);
        let b = if self.is_survey { a } else { mapped_b.unwrap_or(&sides[1][window_b]) };
        let blocks =
            block_bytes(a, self.elements[0].size).zip(block_bytes(b, self.elements[1].size));
        // In a survey the second side's is still that of an earlier unit.
        let is_merged = |side: Side, block: usize| {
            !self.is_survey && is_merged[side].get(block).is_some_and(|is_merged| *is_merged)
        };
        for (block, (bytes, first)) in blocks.zip((start..).step_by(BLOCK)).enumerate() {
            let bytes: [&[u8]; 2] = bytes.into();
            for side in Side::BOTH {
                if is_merged(side, block) {
                    let elements = bytes[side].len() / self.elements[side].size;
                    Copies { tensor: &self.pair.sides[side], files: files[side] }
                        .merged(self.merges[side], first, elements, &mut merged[side], work)
                        .map_err(|failure| read_error(side, files[side], &failure))?;
                }
            }
            let [a, b] = Side::BOTH.map(|side| match is_merged(side, block) {
                true => self.merged_side(side, &merged[side]),
                false => self.side(side, bytes[side]),
            });
            each(a, b, first);
        }
        Ok(())
    }

    /// Whether the first side is held against itself.
    pub(super) fn is_survey(&self) -> bool {
        self.is_survey
    }

    /// Sides that are read.
    fn sides(&self) -> &'static [Side] {
        if self.is_survey { &[Side::A] } else { &Side::BOTH }
    }

    /// Elements of the block that begins with this one.
    fn block_elements(&self, first: u64) -> u64 {
        (self.pair.sides[0].numel() - first).min(BLOCK as u64)
    }

    pub(super) fn side<'b>(&self, side: Side, bytes: &'b [u8]) -> DenseBlock<'b> {
        DenseBlock { dtype: self.pair.sides[side].dtype(), bytes }
    }

    /// A block that was made of all copies.
    pub(super) fn merged_side<'b>(&self, side: Side, bytes: &'b [u8]) -> DenseBlock<'b> {
        DenseBlock { dtype: widened(self.pair.sides[side].dtype()).0, bytes }
    }

    /// Reads the pair once more for its exact sums, which do not depend on the order of units.
    pub(super) fn exact_sums(
        &self,
        index: usize,
        files: [&FileSet; 2],
    ) -> Result<ExactSums, ReadError> {
        let units: Vec<Unit> = self.units(index).collect();
        let run = |unit: &Unit| {
            let mut sums = ExactSums::default();
            self.each_block(*unit, files, &mut UnitResult::default(), |a, b, _| {
                sums.add_block(a, b);
            })?;
            Ok(sums)
        };
        units.par_iter().map(run).try_reduce(ExactSums::default, |mut sums, more| {
            sums.merge(&more);
            Ok(sums)
        })
    }

    /// The elements of a unit.
    fn range(&self, unit: Unit) -> Range<u64> {
        let start = unit.first_block * BLOCK as u64;
        let end = start.saturating_add(self.unit_blocks * BLOCK as u64);
        start..end.min(self.pair.sides[0].numel())
    }

    /// A range extended to whole rows, where it is not much longer then.
    fn whole_rows(&self, range: &Range<u64>) -> Range<u64> {
        if self.row > BLOCK as u64 {
            return range.clone();
        }
        let end = range.end.next_multiple_of(self.row).min(self.pair.sides[0].numel());
        range.start - range.start % self.row..end
    }

    fn fill_bands(
        &self,
        side: Side,
        range: &Range<u64>,
        files: [&FileSet; 2],
        bands: &mut Vec<Band>,
    ) -> Result<(), ReadError> {
        let tensor = &self.pair.sides[side];
        let copies = copies(tensor).filter(|_| self.has_bands[side]);
        // What an earlier unit had more of is given back, so that a thread does not keep a full set for each side.
        bands.resize_with(copies.clone().count(), Band::default);
        for (band, pieces) in bands.iter_mut().zip(copies) {
            let range = self.whole_rows(range);
            band.fill(files[side], tensor.shape(), pieces, self.elements[side], range)
                .map_err(|failure| read_error(side, files[side], &failure))?;
        }
        Ok(())
    }

    /// Fills one side's buffer, holds every further copy against it, and says where in it the elements are.
    fn read_side(
        &self,
        side: Side,
        range: &Range<u64>,
        source: &Source<'_>,
        buffers: &mut Buffers,
        result: &mut UnitResult,
    ) -> Result<Range<usize>, ReadError> {
        let tensor = &self.pair.sides[side];
        let element = self.elements[side];
        let read = if self.has_bands[side] { self.whole_rows(range) } else { range.clone() };
        let bytes = |elements: u64| {
            usize::try_from(elements).unwrap_or(usize::MAX).saturating_mul(element.size)
        };
        let window = bytes(range.start - read.start)..bytes(range.end - read.start);
        let Buffers { sides, copy, scratch, bands, is_merged, .. } = buffers;
        let is_merged = &mut is_merged[side];
        let is_sum = self.merges[side] == Merge::Sum && !tensor.replicas().is_empty();
        let blocks = (range.end - range.start).div_ceil(BLOCK as u64);
        is_merged.resize(usize::try_from(blocks).unwrap_or(usize::MAX), is_sum);
        let first = &mut sides[side];
        first.resize(bytes(read.end - read.start), 0);
        let mut fill = |number: usize, pieces: &[Piece], out: &mut [u8]| {
            if self.has_bands[side] {
                bands[side][number].gather(tensor.shape(), element, read.start, out);
                return Ok(());
            }
            gather(source, tensor.shape(), pieces, element, read.start, out, scratch)
                .map_err(|failure| read_error(side, source.files, &failure))
        };
        fill(0, tensor.pieces(), first)?;
        for (number, replica) in tensor.replicas().iter().enumerate() {
            copy.clear();
            copy.extend_from_slice(first);
            fill(number + 1, &replica.pieces, copy)?;
            let (first, copy) = (&first[window.clone()], &copy[window.clone()]);
            if copy == first {
                continue;
            }
            result.replicas.insert((side, number));
            if self.merges[side] == Merge::Mean {
                let blocks = block_bytes(first, element.size).zip(block_bytes(copy, element.size));
                for ((first, copy), is_merged) in blocks.zip(is_merged.iter_mut()) {
                    *is_merged |= first != copy;
                }
            }
        }
        Ok(window)
    }
}

/// How the copies of a tensor make its value, once they have been looked at where nobody says. Where they cannot be read,
/// the comparison will find that too.
fn settled(tensor: &LogicalTensor, files: &FileSet) -> Merge {
    match tensor.merge() {
        Merge::SumIfDifferent => match (Copies { tensor, files }).differ() {
            Ok(false) => Merge::First,
            Ok(true) | Err(_) => Merge::Sum,
        },
        merge => merge,
    }
}

pub(super) fn read_error(side: Side, files: &FileSet, (file, error): &Failure) -> ReadError {
    ReadError { side, file: files.path(*file).to_path_buf(), message: error.to_string() }
}

/// The pieces of the first copy and of all others.
fn copies(tensor: &LogicalTensor) -> impl Iterator<Item = &[Piece]> + Clone {
    let replicas = tensor.replicas().iter().map(|replica| &replica.pieces[..]);
    std::iter::once(tensor.pieces()).chain(replicas)
}

/// Whether some piece has its rows across the file.
fn is_transposed(tensor: &LogicalTensor) -> bool {
    copies(tensor).flatten().any(|piece| {
        let dims = piece.extent.sizes.iter().zip(&piece.strides).filter(|(size, _)| **size > 1);
        let mut strides = dims.map(|(_, stride)| *stride);
        let last = strides.next_back();
        last.is_some_and(|last| strides.any(|stride| stride < last))
    })
}

impl Element {
    pub(super) fn of(dtype: Dtype) -> Self {
        let bytes = |size: u64| usize::try_from(size).unwrap_or(1);
        Self { size: bytes(dtype.size()), swap_unit: bytes(dtype.swap_unit()) }
    }
}

fn block_bytes(side: &[u8], element: usize) -> std::slice::Chunks<'_, u8> {
    side.chunks(BLOCK * element)
}
