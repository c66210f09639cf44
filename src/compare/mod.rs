//! Pairs -> statistics: one streaming pass over fixed logical blocks.
//!
//! A unit of work is a few consecutive blocks of one pair. Both sides are gathered into dense buffers that
//! each thread keeps, every further copy is laid over the first one and compared with it bit by bit, and the
//! kernel sees block after block. Where copies differ and their [`Merge`] makes a value of them all, the block that the
//! kernel sees is that value in `f64`. The blocks' statistics are folded in block order, so the result has the
//! same bits for any number of threads and any layout of either side. Memory: threads x a few blocks.

mod copies;
mod gather;
pub mod metrics;
mod survey;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::dtype::Dtype;
use crate::extent::Extent;
use crate::io::{FileId, FileSet};
use crate::kernel::{BLOCK, ExactSums, Side, Stats, compare_block, widened};
use crate::names::Name;
use crate::pairing::Pair;
use crate::tensor::{LogicalTensor, Merge, Piece};

use copies::{Copies, Failure, Work};
use gather::{Element, gather};

pub use survey::{bytes_to_survey, survey};

/// Bytes of one side of a unit of work, or a block where that is more: both sides stay in a core's second cache.
const UNIT_BYTES: u64 = 512 << 10;

/// Blocks of a unit where rows of a side lie across the file: the more rows, the longer the runs that are read.
const TRANSPOSED_UNIT_BLOCKS: u64 = 32;

/// Units whose results are held at a time.
const WAVE: usize = 2048;

/// What is known of one pair.
#[derive(Debug)]
pub struct TensorComparison {
    /// The canonical name.
    pub name: Name,
    /// Element type of each side.
    pub dtypes: [Dtype; 2],
    /// Shape of each side.
    pub shapes: [Vec<u64>; 2],
    /// What came of it.
    pub outcome: Outcome,
    /// The element with the largest difference, or else the first one that differs; in a survey the first one that is
    /// not finite.
    pub example: Option<Example>,
    /// `1 - cos` from exact sums, where the statistics do not tell it well enough and it was asked for.
    pub one_minus_cos: Option<f64>,
    /// Copies that are not bit by bit the first one, parts of a sum included.
    pub replicas: Vec<ReplicaDifference>,
    /// Vocabulary rows beyond those compared, on each side.
    pub rows_left_out: [u64; 2],
    /// The side on which it shares another tensor's values.
    pub tied_side: Option<usize>,
}

/// What came of comparing one pair.
#[derive(Debug)]
pub enum Outcome {
    /// Both sides were read.
    Compared(Stats),
    /// There is nothing to subtract.
    ShapeDiffers,
    /// One side cannot be read.
    Unreadable(ReadError),
}

/// A file that cannot be read.
#[derive(Debug)]
pub struct ReadError {
    /// 0 for `a`, 1 for `b`.
    pub side: usize,
    /// The file.
    pub file: PathBuf,
    /// What the system said.
    pub message: String,
}

/// One element of both sides.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Its index.
    pub index: Vec<u64>,
    /// Its values as text, in full.
    pub values: [String; 2],
}

/// A copy that differs from the first one.
#[derive(Debug)]
pub struct ReplicaDifference {
    /// 0 for `a`, 1 for `b`.
    pub side: usize,
    /// Folder or file of the first copy.
    pub first: String,
    /// Folder or file of this copy.
    pub copy: String,
    /// The name under which this copy is stored.
    pub stored_name: String,
    /// How the copies make the value that is compared.
    pub merge: Merge,
    /// The statistics of all that this copy holds, the first copy against this one.
    pub stats: Stats,
}

impl ReplicaDifference {
    /// Whether the copies should be the same; parts of a sum need not.
    #[must_use]
    pub fn is_divergence(&self) -> bool {
        self.merge.is_of_replicas()
    }
}

/// A pair as it is compared: what each side reads from.
struct Job<'a> {
    pair: &'a Pair,
    /// The second side is the first one: it is not read again.
    is_survey: bool,
    elements: [Element; 2],
    /// How the copies of each side make its value, now that it is known.
    merges: [Merge; 2],
    /// Blocks of each of its units.
    unit_blocks: u64,
    /// Each side is read in multiples of so many elements: whole rows where they lie across the file.
    grain: [u64; 2],
}

#[derive(Clone, Copy)]
struct Unit {
    job: usize,
    first_block: u64,
}

#[derive(Default)]
struct UnitResult {
    blocks: Vec<Stats>,
    /// Copies that differ from the first one: side and number of the replica.
    replicas: BTreeSet<(usize, usize)>,
    error: Option<ReadError>,
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
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Compares all pairs; `done` counts the bytes as they are compared.
///
/// With `tells_small_angles`, the few tensors whose `1 - cos` is not known to [`ANGLE_ERROR`] from the first pass
/// are read once more, for exact sums.
#[must_use]
pub fn compare(
    pairs: &[Pair],
    files: [&FileSet; 2],
    tells_small_angles: bool,
    done: &AtomicU64,
) -> Vec<TensorComparison> {
    let jobs: Vec<Job<'_>> = pairs.iter().map(|pair| Job::new(pair, files)).collect();
    run_all(&jobs, files, tells_small_angles, done)
}

fn run_all(
    jobs: &[Job<'_>],
    files: [&FileSet; 2],
    tells_small_angles: bool,
    done: &AtomicU64,
) -> Vec<TensorComparison> {
    let mut results: Vec<Folded> = jobs.iter().map(|_| Folded::default()).collect();
    let mut units = jobs.iter().enumerate().flat_map(|(index, job)| job.units(index));
    loop {
        let wave: Vec<Unit> = units.by_ref().take(WAVE).collect();
        if wave.is_empty() {
            break;
        }
        let run = |unit: &Unit| jobs[unit.job].run(*unit, files, done);
        let found: Vec<UnitResult> = wave.par_iter().with_max_len(1).map(run).collect();
        for (unit, found) in wave.iter().zip(found) {
            results[unit.job].fold(found);
        }
    }
    let finish = |(index, (job, mut folded)): (usize, (&Job<'_>, Folded))| {
        let is_known = folded.stats.one_minus_cos_error().is_none_or(|error| error <= ANGLE_ERROR);
        if tells_small_angles && !is_known && folded.error.is_none() {
            match job.exact_sums(index, files) {
                Ok(sums) => folded.one_minus_cos = sums.one_minus_cos(),
                Err(error) => folded.error = Some(error),
            }
        }
        let replicas = job.replica_differences(&mut folded, files);
        job.comparison(folded, replicas, files)
    };
    jobs.iter().zip(results).enumerate().map(finish).collect()
}

/// The relative error of `1 - cos` above which a tensor is read a second time.
pub const ANGLE_ERROR: f64 = 1e-12;

/// Bytes that [`compare`] will count.
#[must_use]
pub fn bytes_to_compare(pairs: &[Pair]) -> u64 {
    let comparable = pairs.iter().filter(|pair| pair.is_comparable());
    comparable.flat_map(|pair| pair.sides.iter().map(bytes)).fold(0, u64::saturating_add)
}

fn bytes(tensor: &LogicalTensor) -> u64 {
    tensor.numel().saturating_mul(tensor.dtype().size())
}

impl Pair {
    fn is_comparable(&self) -> bool {
        self.sides[0].shape() == self.sides[1].shape()
    }
}

#[derive(Default)]
struct Folded {
    stats: Stats,
    replicas: BTreeSet<(usize, usize)>,
    /// From exact sums, where those of `stats` do not tell it.
    one_minus_cos: Option<f64>,
    error: Option<ReadError>,
}

impl Folded {
    /// Units come in block order.
    fn fold(&mut self, unit: UnitResult) {
        unit.blocks.iter().for_each(|block| self.stats.merge(block));
        self.replicas.extend(unit.replicas);
        if self.error.is_none() {
            self.error = unit.error;
        }
    }
}

impl<'a> Job<'a> {
    fn new(pair: &'a Pair, files: [&FileSet; 2]) -> Self {
        let is_transposed = pair.sides.each_ref().map(is_transposed);
        let row = pair.sides[0].shape().last().copied().unwrap_or(1).max(1);
        Self {
            pair,
            is_survey: false,
            elements: pair.sides.each_ref().map(|side| Element::of(side.dtype())),
            merges: [0, 1].map(|side| settled(&pair.sides[side], files[side])),
            unit_blocks: if is_transposed.contains(&true) {
                TRANSPOSED_UNIT_BLOCKS
            } else {
                let sizes = pair.sides.each_ref().map(|side| side.dtype().size());
                (UNIT_BYTES / (BLOCK as u64 * sizes[0].max(sizes[1]))).max(1)
            },
            grain: is_transposed.map(|is| if is && row <= BLOCK as u64 { row } else { 1 }),
        }
    }

    fn units(&self, job: usize) -> impl Iterator<Item = Unit> + use<> {
        let numel = if self.pair.is_comparable() { self.pair.sides[0].numel() } else { 0 };
        let blocks = numel.div_ceil(BLOCK as u64);
        let step = usize::try_from(self.unit_blocks).unwrap_or(1);
        (0..blocks).step_by(step).map(move |first_block| Unit { job, first_block })
    }

    fn run(&self, unit: Unit, files: [&FileSet; 2], done: &AtomicU64) -> UnitResult {
        let mut result = UnitResult::default();
        let mut blocks = Vec::new();
        let read = self.each_block(unit, files, &mut result, |a, b, first| {
            blocks.push(compare_block(a, b, first));
        });
        match read {
            Ok(()) => {
                let (_, count) = self.range(unit);
                let sizes = self.pair.sides.each_ref().map(|side| side.dtype().size());
                let size = if self.is_survey { sizes[0] } else { sizes[0] + sizes[1] };
                done.fetch_add(count * size, Ordering::Relaxed);
                result.blocks = blocks;
            }
            Err(error) => result.error = Some(error),
        }
        result
    }

    /// Reads both sides of a unit and hands them on, block by block, with the index of the first element.
    fn each_block(
        &self,
        unit: Unit,
        files: [&FileSet; 2],
        result: &mut UnitResult,
        mut each: impl FnMut(Side<'_>, Side<'_>, u64),
    ) -> Result<(), ReadError> {
        BUFFERS.with_borrow_mut(|buffers| {
            let (start, count) = self.range(unit);
            let mut windows = [0..0, 0..0];
            let read = if self.is_survey { 1 } else { 2 };
            for (side, window) in windows.iter_mut().enumerate().take(read) {
                *window = self.read_side(side, start, count, files, buffers, result)?;
            }
            let Buffers { sides, is_merged, merged, work, .. } = buffers;
            let [window_a, window_b] = windows;
            let a = &sides[0][window_a];
            let b = if self.is_survey { a } else { &sides[1][window_b] };
            let blocks =
                block_bytes(a, self.elements[0].size).zip(block_bytes(b, self.elements[1].size));
            // A survey looks at what is stored, not at what copies make together.
            let is_merged = |side: usize, block: usize| !self.is_survey && is_merged[side][block];
            for (block, (bytes, first)) in blocks.zip((start..).step_by(BLOCK)).enumerate() {
                let bytes: [&[u8]; 2] = bytes.into();
                for side in 0..2 {
                    if is_merged(side, block) {
                        let elements = bytes[side].len() / self.elements[side].size;
                        Copies { tensor: &self.pair.sides[side], files: files[side] }
                            .merged(self.merges[side], first, elements, &mut merged[side], work)
                            .map_err(|failure| read_error(side, files[side], &failure))?;
                    }
                }
                let [a, b] = [0, 1].map(|side| match is_merged(side, block) {
                    true => self.merged_side(side, &merged[side]),
                    false => self.side(side, bytes[side]),
                });
                each(a, b, first);
            }
            Ok(())
        })
    }

    fn side<'b>(&self, side: usize, bytes: &'b [u8]) -> Side<'b> {
        Side { dtype: self.pair.sides[side].dtype(), bytes }
    }

    /// A block that was made of all copies.
    fn merged_side<'b>(&self, side: usize, bytes: &'b [u8]) -> Side<'b> {
        Side { dtype: widened(self.pair.sides[side].dtype()).0, bytes }
    }

    /// Reads the pair once more for its exact sums, which do not depend on the order of units.
    fn exact_sums(&self, index: usize, files: [&FileSet; 2]) -> Result<ExactSums, ReadError> {
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

    /// First element and number of elements of a unit.
    fn range(&self, unit: Unit) -> (u64, u64) {
        let start = unit.first_block * BLOCK as u64;
        (start, (self.pair.sides[0].numel() - start).min(self.unit_blocks * BLOCK as u64))
    }

    /// Fills one side's buffer, holds every further copy against it, and says where in it the elements are.
    fn read_side(
        &self,
        side: usize,
        start: u64,
        count: u64,
        files: [&FileSet; 2],
        buffers: &mut Buffers,
        result: &mut UnitResult,
    ) -> Result<Range<usize>, ReadError> {
        let tensor = &self.pair.sides[side];
        let element = self.elements[side];
        let first_read = start - start % self.grain[side];
        let end_read = (start + count).next_multiple_of(self.grain[side]).min(tensor.numel());
        let bytes = |elements: u64| {
            usize::try_from(elements).unwrap_or(usize::MAX).saturating_mul(element.size)
        };
        let window = bytes(start - first_read)..bytes(start - first_read + count);
        let Buffers { sides, copy, scratch, is_merged, .. } = buffers;
        let is_merged = &mut is_merged[side];
        is_merged.clear();
        let is_sum = self.merges[side] == Merge::Sum && !tensor.replicas().is_empty();
        is_merged.resize(self.unit_block_count(count), is_sum);
        let first = &mut sides[side];
        first.resize(bytes(end_read - first_read), 0);
        let mut fill = |pieces: &[Piece], out: &mut [u8]| {
            gather(files[side], tensor.shape(), pieces, element, first_read, out, scratch)
                .map_err(|failure| read_error(side, files[side], &failure))
        };
        fill(tensor.pieces(), first)?;
        for (number, replica) in tensor.replicas().iter().enumerate() {
            copy.clear();
            copy.extend_from_slice(first);
            fill(&replica.pieces, copy)?;
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

    fn unit_block_count(&self, elements: u64) -> usize {
        usize::try_from(elements.div_ceil(BLOCK as u64)).unwrap_or(usize::MAX)
    }

    /// By how much the copies that were found to differ do so. One that cannot be read again makes the pair unreadable.
    fn replica_differences(
        &self,
        folded: &mut Folded,
        files: [&FileSet; 2],
    ) -> Vec<ReplicaDifference> {
        let mut differences = Vec::new();
        for (side, number) in std::mem::take(&mut folded.replicas) {
            let tensor = &self.pair.sides[side];
            match (Copies { tensor, files: files[side] }).difference(number) {
                Ok(stats) => {
                    let replica = &tensor.replicas()[number];
                    let first = first_copy(tensor, stats.first_differing());
                    differences.push(ReplicaDifference {
                        side,
                        first: shard_label(first, files[side]),
                        copy: shard_label(replica.source.file, files[side]),
                        stored_name: replica.source.name.to_string(),
                        merge: tensor.merge(),
                        stats,
                    });
                }
                Err(failure) => folded.error = Some(read_error(side, files[side], &failure)),
            }
        }
        differences
    }

    fn comparison(
        &self,
        folded: Folded,
        replicas: Vec<ReplicaDifference>,
        files: [&FileSet; 2],
    ) -> TensorComparison {
        let pair = self.pair;
        let shapes = pair.sides.each_ref().map(|side| side.shape().to_vec());
        let stats = &folded.stats;
        let outcome = match folded.error {
            Some(error) => Outcome::Unreadable(error),
            None if !pair.is_comparable() => Outcome::ShapeDiffers,
            None => Outcome::Compared(*stats),
        };
        let example = match outcome {
            Outcome::Compared(_) => {
                let at = match self.is_survey {
                    true if stats.is_finite() => None,
                    true => self.first_not_finite(files),
                    false => stats.max_abs_index().or(stats.first_differing()),
                };
                at.and_then(|at| self.example(at, files))
            }
            _ => None,
        };
        TensorComparison {
            name: pair.name.clone(),
            dtypes: pair.sides.each_ref().map(LogicalTensor::dtype),
            shapes,
            example,
            one_minus_cos: folded.one_minus_cos,
            replicas,
            outcome,
            rows_left_out: pair.rows_left_out,
            tied_side: pair.tied_side,
        }
    }

    /// Reads one element of both sides; `None` where the files are gone by now.
    fn example(&self, at: u64, files: [&FileSet; 2]) -> Option<Example> {
        let shape = self.pair.sides[0].shape();
        let index = unflattened(at, shape);
        let read = |side: usize| {
            let tensor = &self.pair.sides[side];
            let copies = Copies { tensor, files: files[side] };
            let (mut bytes, mut work) = (Vec::new(), Work::default());
            let is_merged = copies.merged(self.merges[side], at, 1, &mut bytes, &mut work).ok()?;
            Some(match is_merged {
                true => self.merged_side(side, &bytes).element_text(),
                false => self.side(side, work.first()).element_text(),
            })
        };
        Some(Example { index, values: [read(0)?, read(1)?] })
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

fn read_error(side: usize, files: &FileSet, (file, error): &Failure) -> ReadError {
    ReadError { side, file: files.path(*file).to_path_buf(), message: error.to_string() }
}

/// Whether some piece has its rows across the file, so that a row is many short reads and a band of rows fewer long ones.
fn is_transposed(tensor: &LogicalTensor) -> bool {
    tensor.pieces().iter().any(|piece| {
        let dims = piece.extent.sizes.iter().zip(&piece.strides).filter(|(size, _)| **size > 1);
        let mut strides = dims.map(|(_, stride)| *stride);
        let last = strides.next_back();
        last.is_some_and(|last| strides.any(|stride| stride < last))
    })
}

impl Element {
    fn of(dtype: Dtype) -> Self {
        let bytes = |size: u64| usize::try_from(size).unwrap_or(1);
        Self { size: bytes(dtype.size()), swap_unit: bytes(dtype.swap_unit()) }
    }
}

fn block_bytes(side: &[u8], element: usize) -> std::slice::Chunks<'_, u8> {
    side.chunks(BLOCK * element)
}

/// The index of the element that comes `at`-th in row-major order.
fn unflattened(at: u64, shape: &[u64]) -> Vec<u64> {
    let mut rest = at;
    let position = |&size: &u64| {
        let position = rest % size.max(1);
        rest /= size.max(1);
        position
    };
    let mut index: Vec<u64> = shape.iter().rev().map(position).collect();
    index.reverse();
    index
}

/// The file in which the first copy of an element lies.
fn first_copy(tensor: &LogicalTensor, at: Option<u64>) -> FileId {
    let element = at.map(|at| Extent {
        offsets: unflattened(at, tensor.shape()),
        sizes: vec![1; tensor.shape().len()],
    });
    let holds = |piece: &&Piece| {
        element.as_ref().is_some_and(|element| piece.extent.intersect(element).is_some())
    };
    tensor.pieces().iter().find(holds).map_or(tensor.source().file, |piece| piece.file)
}

/// What a user calls a shard: the rank's folder, or the file where it is in none.
fn shard_label(file: FileId, files: &FileSet) -> String {
    let path = files.path(file);
    let folder = path.parent().and_then(|folder| folder.file_name());
    let is_rank = |name: &str| ["mp_rank_", "rank_"].iter().any(|start| name.starts_with(start));
    let folder = folder.filter(|name| is_rank(&name.to_string_lossy()));
    folder.or(path.file_name()).unwrap_or_default().to_string_lossy().into_owned()
}
