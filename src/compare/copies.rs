//! The copies of one tensor: the value that they make together, and by how much they differ.
//!
//! Values are put together in `f64` and in the order of the copies, element by element, so that they have the same bits
//! for any number of threads, and rounded once to the stored dtype, as a merged checkpoint would hold them. Copies that
//! agree make exactly the first one's value.

use std::ops::Range;

use rayon::prelude::*;

use crate::base::extent::{Extent, boxes_of_range, row_major};
use crate::base::in_order::InOrder;
use crate::kernel::{BLOCK, DenseBlock, Stats, compare_block, rounded, widened};
use crate::tensor::{LogicalTensor, Merge, Piece};

use super::gather::CopyReader;
use super::side_files::{Maps, ReadError, SideFiles};
use super::strided::Element;

/// Numbers that are decoded at a time.
const STEP: usize = 512;

/// A tensor with the files that hold its copies.
#[derive(Clone, Copy)]
pub(super) struct Copies<'a> {
    pub files: SideFiles<'a>,
    pub tensor: &'a LogicalTensor,
}

/// Buffers for what is needed only until the next read, of either side.
#[derive(Default)]
pub(super) struct Scratch {
    /// The first copy of a block.
    first: Vec<u8>,
    /// Another copy, laid over the first one.
    pub copy: Vec<u8>,
    /// Lines of a file before they are put in order.
    pub lines: Vec<u8>,
    covered: Vec<bool>,
    tallies: Vec<Tally>,
}

/// The copies of one element so far.
#[derive(Clone, Copy)]
struct Tally {
    copies: u32,
    differs: bool,
}

impl<'a> Copies<'a> {
    /// The first copy, which is complete.
    pub(super) fn first(&self) -> CopyReader<'a> {
        self.reader(self.tensor.pieces())
    }

    /// The further copies.
    pub(super) fn replicas(&self) -> impl ExactSizeIterator<Item = CopyReader<'a>> + use<'a> {
        let copies = *self;
        self.tensor.replicas().iter().map(move |replica| copies.reader(&replica.pieces))
    }

    pub(super) fn element(&self) -> Element {
        Element::of(self.tensor.dtype())
    }

    /// Elements of the tensor's own dtype.
    pub(super) fn block<'b>(&self, bytes: &'b [u8]) -> DenseBlock<'b> {
        DenseBlock { dtype: self.tensor.dtype(), bytes }
    }

    /// Elements that were made of all copies.
    pub(super) fn merged_block<'b>(&self, bytes: &'b [u8]) -> DenseBlock<'b> {
        DenseBlock { dtype: widened(self.tensor.dtype()).0, bytes }
    }

    /// Writes the values of a range, at most a block, to `out`, for [`Copies::merged_block`]. Returns `false` where the
    /// first copy says it all.
    pub(super) fn merge(
        &self,
        merge: Merge,
        range: Range<u64>,
        out: &mut Vec<u8>,
        scratch: &mut Scratch,
    ) -> Result<bool, ReadError> {
        let (_, numbers) = widened(self.tensor.dtype());
        self.read_first(&range, scratch)?;
        if merge == Merge::First || self.tensor.replicas().is_empty() {
            return Ok(false);
        }
        let count = len(&range);
        out.resize(count * numbers * size_of::<f64>(), 0);
        let (sums, _) = out.as_chunks_mut::<{ size_of::<f64>() }>();
        self.each_number(&scratch.first, |index, value| sums[index] = value.to_le_bytes());
        scratch.tallies.clear();
        scratch.tallies.resize(count, Tally { copies: 1, differs: false });
        for replica in self.replicas() {
            self.read_replica(&replica, &range, scratch)?;
            let (first, copy) = (self.block(&scratch.first), self.block(&scratch.copy));
            each_pair(first, copy, |index, first, value| {
                if !scratch.covered[index / numbers] {
                    return;
                }
                let tally = &mut scratch.tallies[index / numbers];
                tally.differs |= value != first;
                if index % numbers == 0 {
                    tally.copies += 1;
                }
                sums[index] = (f64::from_le_bytes(sums[index]) + value).to_le_bytes();
            });
        }
        let dtype = self.tensor.dtype();
        if merge == Merge::Mean {
            self.each_number(&scratch.first, |index, first| {
                let Tally { copies, differs } = scratch.tallies[index / numbers];
                let mean = rounded(dtype, f64::from_le_bytes(sums[index]) / f64::from(copies));
                sums[index] = (if differs { mean } else { first }).to_le_bytes();
            });
            return Ok(scratch.tallies.iter().any(|tally| tally.differs));
        }
        for sum in sums {
            *sum = rounded(dtype, f64::from_le_bytes(*sum)).to_le_bytes();
        }
        Ok(true)
    }

    /// The value of one element as text.
    pub(super) fn value_text(&self, merge: Merge, at: u64) -> Result<String, ReadError> {
        let (mut merged, mut scratch) = (Vec::new(), Scratch::default());
        let is_merged = self.merge(merge, at..at + 1, &mut merged, &mut scratch)?;
        let value = if is_merged { self.merged_block(&merged) } else { self.block(&scratch.first) };
        Ok(value.element_text())
    }

    /// Returns whether any copy is not bit by bit the first one.
    pub(super) fn differ(&self) -> Result<bool, ReadError> {
        for replica in self.replicas() {
            if !self.difference(&replica)?.is_identical() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The statistics of all that a copy holds, the first copy against this one.
    pub(super) fn difference(&self, replica: &CopyReader<'_>) -> Result<Stats, ReadError> {
        let numel = self.tensor.numel();
        let of_block = |scratch: &mut Scratch, start: &u64| {
            let range = *start..(start + BLOCK as u64).min(numel);
            self.read_first(&range, scratch)?;
            self.read_replica(replica, &range, scratch)?;
            let size = self.element().size;
            for (index, covered) in scratch.covered.iter().enumerate() {
                if !covered {
                    // Elements that this copy does not hold are no part of either norm.
                    let bytes: Range<usize> = index * size..(index + 1) * size;
                    scratch.first[bytes.clone()].fill(0);
                    scratch.copy[bytes].fill(0);
                }
            }
            Ok(compare_block(self.block(&scratch.first), self.block(&scratch.copy), *start))
        };
        let starts: Vec<u64> = (0..numel).step_by(BLOCK).collect();
        let blocks = starts.par_iter().map_init(Scratch::default, of_block);
        let blocks: Vec<Stats> = blocks.in_order()?;
        let mut stats = Stats::default();
        blocks.iter().for_each(|block| stats.merge(block));
        Ok(stats)
    }

    fn reader(&self, pieces: &'a [Piece]) -> CopyReader<'a> {
        let shape = self.tensor.shape();
        CopyReader { files: self.files, shape, pieces, element: self.element() }
    }

    fn read_first(&self, range: &Range<u64>, scratch: &mut Scratch) -> Result<(), ReadError> {
        let Scratch { first, lines, .. } = scratch;
        first.resize(len(range) * self.element().size, 0);
        self.first().read(&Maps::default(), range.start, first, lines)
    }

    /// Lays a copy over the first one, which must have been read, and marks what it holds.
    fn read_replica(
        &self,
        replica: &CopyReader<'_>,
        range: &Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<(), ReadError> {
        let Scratch { first, copy, lines, covered, .. } = scratch;
        copy.clone_from(first);
        covered.clear();
        covered.resize(len(range), false);
        mark(replica, range.start, covered);
        replica.read(&Maps::default(), range.start, copy, lines)
    }

    fn each_number(&self, bytes: &[u8], mut each: impl FnMut(usize, f64)) {
        each_pair(self.block(bytes), self.block(bytes), |index, value, _| each(index, value));
    }
}

/// Number of elements of a range of at most a block.
fn len(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(BLOCK)
}

/// Decodes two blocks of one dtype and calls `each` for every number of them.
fn each_pair(first: DenseBlock<'_>, second: DenseBlock<'_>, mut each: impl FnMut(usize, f64, f64)) {
    let (_, numbers) = widened(first.dtype);
    let step = STEP / numbers * Element::of(first.dtype).size;
    let mut values = [[0.0; STEP]; 2];
    let mut index = 0;
    for (bytes, other) in first.bytes.chunks(step).zip(second.bytes.chunks(step)) {
        let count = bytes.len() / Element::of(first.dtype).size * numbers;
        DenseBlock { bytes, ..first }.widen(&mut values[0][..count]);
        DenseBlock { bytes: other, ..second }.widen(&mut values[1][..count]);
        for (value, other) in values[0][..count].iter().zip(&values[1][..count]) {
            each(index, *value, *other);
            index += 1;
        }
    }
}

/// Marks those of the elements `start..` of a tensor that a copy holds.
fn mark(replica: &CopyReader<'_>, start: u64, covered: &mut [bool]) {
    let strides = row_major(replica.shape).unwrap_or_default();
    boxes_of_range(replica.shape, start, start + covered.len() as u64, &mut |window, _| {
        for part in replica.pieces.iter().filter_map(|piece| piece.extent.intersect(&window)) {
            each_run(&part, &strides, &mut |at, len| {
                let at = usize::try_from(at - start).unwrap_or(usize::MAX);
                let len = usize::try_from(len).unwrap_or(0);
                covered[at..at + len].fill(true);
            });
        }
    });
}

/// Calls `each` with the flat index and the length of every row of a box.
fn each_run(part: &Extent, strides: &[u64], each: &mut impl FnMut(u64, u64)) {
    fn walk(dims: &[((&u64, &u64), &u64)], at: u64, row: u64, each: &mut impl FnMut(u64, u64)) {
        match dims.split_first() {
            None => each(at, row),
            Some((((offset, size), stride), inner)) => {
                (**offset..**offset + **size)
                    .for_each(|index| walk(inner, at + index * **stride, row, each));
            }
        }
    }
    let dims: Vec<_> = part.offsets.iter().zip(&part.sizes).zip(strides).collect();
    match dims.split_last() {
        None => each(0, 1),
        Some((((first, row), _), outer)) => walk(outer, **first, **row, each),
    }
}

#[cfg(test)]
mod tests;
