//! The copies of one tensor: the value that they make together, and by how much they differ.
//!
//! Values are put together in `f64` and in the order of the copies, element by element, so that they have the same bits
//! for any number of threads, and rounded once to the stored dtype, as a merged checkpoint would hold them. Copies that
//! agree make exactly the first one's value.

use std::io;
use std::ops::Range;

use rayon::prelude::*;

use crate::base::extent::{Extent, boxes_of_range, row_major};
use crate::kernel::{BLOCK, DenseBlock, Stats, compare_block, rounded, widened};
use crate::storage::{FileId, FileSet};
use crate::tensor::{LogicalTensor, Merge, Piece};

use super::gather::{Element, Source, gather};
use super::maps::Maps;

/// Numbers that are decoded at a time.
const STEP: usize = 512;

/// A tensor with the files that hold its copies.
#[derive(Clone, Copy)]
pub(super) struct Copies<'a> {
    pub tensor: &'a LogicalTensor,
    pub files: &'a FileSet,
}

/// Buffers for putting one block together.
#[derive(Default)]
pub(super) struct Work {
    first: Vec<u8>,
    copy: Vec<u8>,
    covered: Vec<bool>,
    tallies: Vec<Tally>,
    scratch: Vec<u8>,
}

impl Work {
    /// The first copy of what was read last.
    pub(super) fn first(&self) -> &[u8] {
        &self.first
    }
}

/// What is known of one element so far.
#[derive(Clone, Copy)]
struct Tally {
    copies: u32,
    differs: bool,
}

/// The file that cannot be read, and what the system said.
pub(super) type Failure = (FileId, io::Error);

impl Copies<'_> {
    /// Writes the values of elements `start..start + count`, at most a block of them, to `out`: dense and of the dtype
    /// that [`widened`] tells. Where the first copy says it all, `false`: its bytes are in `work`.
    pub(super) fn merged(
        &self,
        merge: Merge,
        start: u64,
        count: usize,
        out: &mut Vec<u8>,
        work: &mut Work,
    ) -> Result<bool, Failure> {
        let (_, numbers) = widened(self.tensor.dtype());
        self.read_first(start, count, work)?;
        if merge == Merge::First || self.tensor.replicas().is_empty() {
            return Ok(false);
        }
        out.resize(count * numbers * size_of::<f64>(), 0);
        let (sums, _) = out.as_chunks_mut::<{ size_of::<f64>() }>();
        self.each_number(&work.first, |index, value| sums[index] = value.to_le_bytes());
        work.tallies.clear();
        work.tallies.resize(count, Tally { copies: 1, differs: false });
        for number in 0..self.tensor.replicas().len() {
            self.read_copy(number, start, count, work)?;
            let (first, copy) = (self.side(&work.first), self.side(&work.copy));
            each_pair(first, copy, |index, first, value| {
                if !work.covered[index / numbers] {
                    return;
                }
                let tally = &mut work.tallies[index / numbers];
                tally.differs |= value != first;
                if index % numbers == 0 {
                    tally.copies += 1;
                }
                sums[index] = (f64::from_le_bytes(sums[index]) + value).to_le_bytes();
            });
        }
        let dtype = self.tensor.dtype();
        if merge == Merge::Mean {
            self.each_number(&work.first, |index, first| {
                let Tally { copies, differs } = work.tallies[index / numbers];
                let mean = rounded(dtype, f64::from_le_bytes(sums[index]) / f64::from(copies));
                sums[index] = (if differs { mean } else { first }).to_le_bytes();
            });
            return Ok(work.tallies.iter().any(|tally| tally.differs));
        }
        for sum in sums {
            *sum = rounded(dtype, f64::from_le_bytes(*sum)).to_le_bytes();
        }
        Ok(true)
    }

    /// Whether any copy is not bit by bit the first one.
    pub(super) fn differ(&self) -> Result<bool, Failure> {
        for number in 0..self.tensor.replicas().len() {
            if !self.difference(number)?.is_identical() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The statistics of all that a copy holds, the first copy against this one.
    pub(super) fn difference(&self, number: usize) -> Result<Stats, Failure> {
        let blocks: Vec<u64> = (0..self.tensor.numel()).step_by(BLOCK).collect();
        let of_block = |work: &mut Work, start: &u64| {
            let count = usize::try_from(self.tensor.numel() - start).unwrap_or(BLOCK).min(BLOCK);
            self.read_first(*start, count, work)?;
            self.read_copy(number, *start, count, work)?;
            let size = Element::of(self.tensor.dtype()).size;
            for (index, covered) in work.covered.iter().enumerate() {
                if !covered {
                    // Elements that this copy does not hold are no part of either norm.
                    let bytes: Range<usize> = index * size..(index + 1) * size;
                    work.first[bytes.clone()].fill(0);
                    work.copy[bytes].fill(0);
                }
            }
            Ok(compare_block(self.side(&work.first), self.side(&work.copy), *start))
        };
        let blocks: Vec<Stats> =
            blocks.par_iter().map_init(Work::default, of_block).collect::<Result<_, Failure>>()?;
        let mut stats = Stats::default();
        blocks.iter().for_each(|block| stats.merge(block));
        Ok(stats)
    }

    fn side<'b>(&self, bytes: &'b [u8]) -> DenseBlock<'b> {
        DenseBlock { dtype: self.tensor.dtype(), bytes }
    }

    fn read_first(&self, start: u64, count: usize, work: &mut Work) -> Result<(), Failure> {
        work.first.resize(count * Element::of(self.tensor.dtype()).size, 0);
        self.gather(self.tensor.pieces(), start, &mut work.first, &mut work.scratch)
    }

    /// Lays a copy over the first one, which must have been read, and marks what it holds.
    fn read_copy(
        &self,
        number: usize,
        start: u64,
        count: usize,
        work: &mut Work,
    ) -> Result<(), Failure> {
        let pieces = &self.tensor.replicas()[number].pieces;
        work.copy.clone_from(&work.first);
        work.covered.clear();
        work.covered.resize(count, false);
        mark(self.tensor.shape(), pieces, start, &mut work.covered);
        self.gather(pieces, start, &mut work.copy, &mut work.scratch)
    }

    fn gather(
        &self,
        pieces: &[Piece],
        start: u64,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let element = Element::of(self.tensor.dtype());
        let source = Source { files: self.files, maps: &Maps::default() };
        gather(&source, self.tensor.shape(), pieces, element, start, out, scratch)
    }

    fn each_number(&self, bytes: &[u8], mut each: impl FnMut(usize, f64)) {
        each_pair(self.side(bytes), self.side(bytes), |index, value, _| each(index, value));
    }
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

/// Marks those of the elements `start..` of a tensor that the pieces hold.
fn mark(shape: &[u64], pieces: &[Piece], start: u64, covered: &mut [bool]) {
    let strides = row_major(shape).unwrap_or_default();
    boxes_of_range(shape, start, start + covered.len() as u64, &mut |window, _| {
        for part in pieces.iter().filter_map(|piece| piece.extent.intersect(&window)) {
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
