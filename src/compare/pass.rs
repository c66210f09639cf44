//! Passes over tensors: units of work, shared out to threads, and their statistics, folded in block order.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::kernel::{BLOCK, DenseBlock, Stats};
use crate::tensor::LogicalTensor;

use super::copies::Scratch;
use super::gather::LINE;
use super::side_files::{MAPPED, ReadError};
use super::side_reader::{SideBuffers, SideReader, UnitReader};

/// Bytes of one side that are compared at a time, or a block where that is more: both sides stay in a core's second
/// cache. Half as many are no faster.
const PART_BYTES: u64 = 512 << 10;

/// Units for each thread at least, where there is enough for that: one of them is little to wait for at the end.
const UNITS_PER_THREAD: u64 = 8;

/// Most bytes of the bands of a thread, all copies of all sides together.
const BAND_BYTES: u64 = 32 << 20;

/// Units whose results are held at a time.
const WAVE: usize = 2048;

/// Number of bytes of one side that make a unit, where there are so many in all.
pub(super) fn unit_bytes(bytes_of_a_side: u64) -> u64 {
    let threads = rayon::current_num_threads() as u64;
    (bytes_of_a_side / (threads * UNITS_PER_THREAD)).clamp(PART_BYTES, MAPPED)
}

/// Number of bytes of all elements.
pub(super) fn bytes(tensor: &LogicalTensor) -> u64 {
    tensor.numel().saturating_mul(tensor.dtype().size())
}

/// A pass over the blocks of one tensor, on `N` sides at a time.
pub(super) struct TensorPass<'a, const N: usize> {
    pub sides: [SideReader<'a>; N],
    /// Bytes of an element on all sides together.
    element: u64,
    /// Elements of each side, or 0 where the sides are not of one shape.
    numel: u64,
    /// Elements of a unit, a number of parts.
    unit: u64,
    /// Elements that are read at a time, a number of blocks; a unit has more where it is read in bands.
    part: u64,
}

/// Results beside the statistics, which may be put together in any order.
pub(super) trait Extra: Default + Send {
    /// Adds those of other elements of the tensor.
    fn merge(&mut self, other: Self);
}

impl Extra for () {
    fn merge(&mut self, (): Self) {}
}

/// The results of a pass, or of a part of it.
pub(super) struct PassTotals<const N: usize, E = ()> {
    pub stats: Stats,
    /// Other results.
    pub extra: E,
    /// Numbers of the replicas of each side that differ from its first copy.
    pub differing: [BTreeSet<usize>; N],
    /// The first file that could not be read.
    pub error: Option<ReadError>,
}

/// The results of a unit of work.
struct UnitTotals<const N: usize, E> {
    blocks: Vec<Stats>,
    extra: E,
    differing: [BTreeSet<usize>; N],
    error: Option<ReadError>,
}

/// Buffers that a thread keeps from unit to unit.
#[derive(Default)]
struct ThreadBuffers {
    sides: Vec<SideBuffers>,
    scratch: Scratch,
}

thread_local! {
    static BUFFERS: Cell<ThreadBuffers> = Cell::default();
}

impl<'a, const N: usize> TensorPass<'a, N> {
    pub(super) fn new(sides: [SideReader<'a>; N], unit_bytes: u64) -> Self {
        let tensors = sides.each_ref().map(SideReader::tensor);
        let is_one_shape = tensors.iter().all(|tensor| tensor.shape() == tensors[0].shape());
        let sizes = tensors.map(|tensor| tensor.dtype().size());
        let element = sizes.into_iter().max().unwrap_or(1);
        let block = BLOCK as u64 * element;
        let part_blocks = (PART_BYTES / block).max(1);
        let unit_blocks = match sides.iter().map(SideReader::bands).sum::<usize>() {
            0 => (unit_bytes / block).max(1),
            bands => {
                let most = BAND_BYTES / bands as u64 / element;
                let lines = sides[0].row().saturating_mul(LINE / element);
                (lines.min(most) / BLOCK as u64).max(part_blocks)
            }
        };
        Self {
            element: sizes.iter().sum(),
            numel: if is_one_shape { tensors[0].numel() } else { 0 },
            unit: unit_blocks * BLOCK as u64,
            part: part_blocks * BLOCK as u64,
            sides,
        }
    }

    /// The elements of each unit of work.
    pub(super) fn units(&self) -> impl Iterator<Item = Range<u64>> + use<N> {
        ranges(0..self.numel, self.unit)
    }

    /// Reads all sides of a unit part by part and hands them on, block by block, with the index of the first element.
    pub(super) fn each_block(
        &self,
        unit: &Range<u64>,
        differing: &mut [BTreeSet<usize>; N],
        mut each: impl FnMut([DenseBlock<'_>; N], u64),
    ) -> Result<(), ReadError> {
        let ThreadBuffers { mut sides, mut scratch } = BUFFERS.take();
        let open = |side| UnitReader::new(side, unit, sides.pop().unwrap_or_default());
        let mut readers = self.sides.each_ref().map(open);
        let read = self.read_unit(unit, &mut readers, &mut scratch, &mut each);
        for (reader, differing) in readers.iter_mut().zip(differing) {
            differing.append(&mut reader.differing);
        }
        // The last one first, so that each side finds its own again.
        sides.extend(readers.into_iter().rev().map(UnitReader::into_buffers));
        BUFFERS.set(ThreadBuffers { sides, scratch });
        read
    }

    fn read_unit(
        &self,
        unit: &Range<u64>,
        readers: &mut [UnitReader<'_>; N],
        scratch: &mut Scratch,
        each: &mut impl FnMut([DenseBlock<'_>; N], u64),
    ) -> Result<(), ReadError> {
        if self.sides.iter().any(|side| side.bands() > 0) {
            readers.iter_mut().try_for_each(|reader| reader.fill_bands(unit))?;
        }
        for part in ranges(unit.clone(), self.part) {
            readers.iter_mut().try_for_each(|reader| reader.read(&part, scratch))?;
            for (number, block) in ranges(part, BLOCK as u64).enumerate() {
                readers.iter_mut().try_for_each(|reader| reader.merge(number, scratch))?;
                each(readers.each_ref().map(|reader| reader.block(number)), block.start);
            }
        }
        readers.iter().try_for_each(UnitReader::check)
    }

    fn run<E: Extra>(
        &self,
        unit: &Range<u64>,
        stats: impl Fn([DenseBlock<'_>; N], u64, &mut E) -> Stats,
        done: &AtomicU64,
    ) -> UnitTotals<N, E> {
        let mut blocks = Vec::new();
        let mut extra = E::default();
        let mut differing = [const { BTreeSet::new() }; N];
        let read = self.each_block(unit, &mut differing, |sides, first| {
            blocks.push(stats(sides, first, &mut extra));
            let elements = (self.numel - first).min(BLOCK as u64);
            done.fetch_add(elements * self.element, Ordering::Relaxed);
        });
        UnitTotals { blocks, extra, differing, error: read.err() }
    }
}

/// Cuts a range into steps; the last one may be shorter.
fn ranges(range: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    let starts = range.step_by(usize::try_from(step).unwrap_or(usize::MAX));
    starts.map(move |start| start..start.saturating_add(step).min(end))
}

/// Takes the statistics of all blocks of all tensors, and what else is wanted; `stats` is told the number of the pass, and the
/// flat index of the block's first element. `done` counts the bytes.
pub(super) fn run_all<const N: usize, E: Extra>(
    passes: &[&TensorPass<'_, N>],
    stats: impl Fn(usize, [DenseBlock<'_>; N], u64, &mut E) -> Stats + Sync,
    done: &AtomicU64,
) -> Vec<PassTotals<N, E>> {
    let mut totals: Vec<PassTotals<N, E>> = passes.iter().map(|_| PassTotals::default()).collect();
    let units =
        |(index, pass): (usize, &&TensorPass<'_, N>)| pass.units().map(move |unit| (index, unit));
    let mut units = passes.iter().enumerate().flat_map(units);
    loop {
        let wave: Vec<(usize, Range<u64>)> = units.by_ref().take(WAVE).collect();
        if wave.is_empty() {
            return totals;
        }
        // Threads that take the next unit in turn, for the sake of read-ahead, instead of a part of the wave each: no
        // faster, neither from the page cache nor from a disk.
        let run = |(index, unit): &(usize, _)| {
            let stats = |blocks: [DenseBlock<'_>; N], first, extra: &mut E| {
                stats(*index, blocks, first, extra)
            };
            passes[*index].run(unit, stats, done)
        };
        let results: Vec<UnitTotals<N, E>> = wave.par_iter().with_max_len(1).map(run).collect();
        for ((index, _), result) in wave.iter().zip(results) {
            totals[*index].fold(result);
        }
    }
}

impl<const N: usize, E: Extra> Default for PassTotals<N, E> {
    fn default() -> Self {
        Self {
            stats: Stats::default(),
            extra: E::default(),
            differing: [const { BTreeSet::new() }; N],
            error: None,
        }
    }
}

impl<const N: usize, E: Extra> PassTotals<N, E> {
    /// Adds the results of a unit. They come in block order.
    fn fold(&mut self, unit: UnitTotals<N, E>) {
        self.extra.merge(unit.extra);
        unit.blocks.iter().for_each(|block| self.stats.merge(block));
        for (all, differing) in self.differing.iter_mut().zip(unit.differing) {
            all.extend(differing);
        }
        self.error = self.error.take().or(unit.error);
    }
}
