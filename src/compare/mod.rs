//! Pairs -> statistics: one streaming pass over fixed logical blocks.
//!
//! A unit of work is a few consecutive blocks of one pair. Both sides are gathered into dense buffers that
//! each thread keeps, every further copy is laid over the first one and compared with it bit by bit, and the
//! kernel sees block after block. The blocks' statistics are folded in block order, so the result has the
//! same bits for any number of threads and any layout of either side. Memory: threads x a few blocks, or
//! threads x [`BAND_BYTES`] where a side is stored with its rows across the file.

mod gather;
pub mod metrics;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::dtype::Dtype;
use crate::extent::Extent;
use crate::io::{FileId, FileSet};
use crate::kernel::{BLOCK, ExactSums, Side, Stats, compare_block};
use crate::names::Name;
use crate::pairing::Pair;
use crate::tensor::{LogicalTensor, Piece};

use gather::{Band, Element, LINE, gather};

/// Bytes of one side that are compared at a time, or a block where that is more: both sides stay in a core's second
/// cache. Half as many are no faster.
const PART_BYTES: u64 = 512 << 10;

/// Most bytes of the bands of a thread, all copies of both sides together.
const BAND_BYTES: u64 = 32 << 20;

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
    /// The element with the largest difference, or else the first one that differs.
    pub example: Option<Example>,
    /// `1 - cos` from exact sums, where the statistics do not tell it well enough and it was asked for.
    pub one_minus_cos: Option<f64>,
    /// Copies that are not bit by bit the first one.
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
    /// The statistics of the blocks in which they differ, first copy against this one.
    pub stats: Stats,
}

/// A pair as it is compared: what each side reads from.
struct Job<'a> {
    pair: &'a Pair,
    elements: [Element; 2],
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
struct Unit {
    job: usize,
    first_block: u64,
}

#[derive(Default)]
struct UnitResult {
    blocks: Vec<Stats>,
    /// By side and number of the replica.
    replicas: Vec<(usize, usize, Stats)>,
    error: Option<ReadError>,
}

/// Buffers that a thread keeps from unit to unit.
#[derive(Default)]
struct Buffers {
    sides: [Vec<u8>; 2],
    copy: Vec<u8>,
    scratch: Vec<u8>,
    /// Of the first copy and all others of each side.
    bands: [Vec<Band>; 2],
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
    let jobs: Vec<Job<'_>> = pairs.iter().map(Job::new).collect();
    let mut results: Vec<Folded> = jobs.iter().map(|_| Folded::default()).collect();
    let mut units = jobs.iter().enumerate().flat_map(|(index, job)| job.units(index));
    loop {
        let wave: Vec<Unit> = units.by_ref().take(WAVE).collect();
        if wave.is_empty() {
            break;
        }
        // Threads that take the next unit in turn, for the sake of read-ahead, instead of a part of the wave each: no
        // faster, neither from the page cache nor from a disk.
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
        job.comparison(folded, files)
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
    replicas: Vec<(usize, usize, Stats)>,
    /// From exact sums, where those of `stats` do not tell it.
    one_minus_cos: Option<f64>,
    error: Option<ReadError>,
}

impl Folded {
    /// Units come in block order.
    fn fold(&mut self, unit: UnitResult) {
        unit.blocks.iter().for_each(|block| self.stats.merge(block));
        for (side, number, stats) in unit.replicas {
            let known = self.replicas.iter_mut().find(|known| (known.0, known.1) == (side, number));
            match known {
                Some((_, _, sum)) => sum.merge(&stats),
                None => self.replicas.push((side, number, stats)),
            }
        }
        if self.error.is_none() {
            self.error = unit.error;
        }
    }
}

impl<'a> Job<'a> {
    fn new(pair: &'a Pair) -> Self {
        let has_bands = pair.sides.each_ref().map(is_transposed);
        let row = pair.sides[0].shape().last().copied().unwrap_or(1).max(1);
        let sizes = pair.sides.each_ref().map(|side| side.dtype().size());
        let element = sizes[0].max(sizes[1]);
        let part_blocks = (PART_BYTES / (BLOCK as u64 * element)).max(1);
        let copies =
            |side: usize| if has_bands[side] { 1 + pair.sides[side].replicas().len() } else { 0 };
        let bands = (copies(0) + copies(1)) as u64;
        let band_blocks = |bands: u64| {
            let most = BAND_BYTES / bands / element;
            row.saturating_mul(LINE / element).min(most) / BLOCK as u64
        };
        Self {
            pair,
            elements: pair.sides.each_ref().map(|side| Element::of(side.dtype())),
            unit_blocks: if bands == 0 { part_blocks } else { band_blocks(bands).max(part_blocks) },
            part_blocks,
            has_bands,
            row,
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
        let compare = |result: &mut UnitResult, [a, b]: [&[u8]; 2], start: u64| {
            let blocks = block_bytes(a, self.elements[0].size)
                .zip(block_bytes(b, self.elements[1].size))
                .zip((start..).step_by(BLOCK));
            for ((a, b), first) in blocks {
                result.blocks.push(compare_block(self.side(0, a), self.side(1, b), first));
            }
            done.fetch_add((a.len() + b.len()) as u64, Ordering::Relaxed);
        };
        result.error = self.each_part(unit, files, &mut result, compare).err();
        result
    }

    /// Reads both sides of a unit part by part, and calls with the bytes and the first element of each.
    fn each_part(
        &self,
        unit: Unit,
        files: [&FileSet; 2],
        result: &mut UnitResult,
        mut each: impl FnMut(&mut UnitResult, [&[u8]; 2], u64),
    ) -> Result<(), ReadError> {
        BUFFERS.with_borrow_mut(|buffers| {
            let range = self.range(unit);
            if self.has_bands.contains(&true) {
                for (side, bands) in buffers.bands.iter_mut().enumerate() {
                    self.fill_bands(side, &range, files, bands)?;
                }
            }
            let step = self.part_blocks * BLOCK as u64;
            let mut start = range.start;
            while start < range.end {
                let part = start..(start + step).min(range.end);
                let mut windows = [0..0, 0..0];
                for (side, window) in windows.iter_mut().enumerate() {
                    *window = self.read_side(side, &part, files, buffers, result)?;
                }
                let [a, b] = windows;
                each(result, [&buffers.sides[0][a], &buffers.sides[1][b]], start);
                start = part.end;
            }
            Ok(())
        })
    }

    fn side<'b>(&self, side: usize, bytes: &'b [u8]) -> Side<'b> {
        Side { dtype: self.pair.sides[side].dtype(), bytes }
    }

    /// Reads the pair once more for its exact sums, which do not depend on the order of units.
    fn exact_sums(&self, index: usize, files: [&FileSet; 2]) -> Result<ExactSums, ReadError> {
        let units: Vec<Unit> = self.units(index).collect();
        let run = |unit: &Unit| {
            let mut sums = ExactSums::default();
            let add = |_: &mut UnitResult, [a, b]: [&[u8]; 2], _| {
                sums.add_block(self.side(0, a), self.side(1, b));
            };
            self.each_part(*unit, files, &mut UnitResult::default(), add)?;
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
        side: usize,
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
                .map_err(|error| read_error(side, files, error))?;
        }
        Ok(())
    }

    /// Fills one side's buffer, holds every further copy against it, and says where in it the elements are.
    fn read_side(
        &self,
        side: usize,
        range: &Range<u64>,
        files: [&FileSet; 2],
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
        let Buffers { sides, copy, scratch, bands } = buffers;
        let first = &mut sides[side];
        first.resize(bytes(read.end - read.start), 0);
        let mut fill = |number: usize, pieces: &[Piece], out: &mut [u8]| {
            if self.has_bands[side] {
                bands[side][number].gather(tensor.shape(), element, read.start, out);
                return Ok(());
            }
            gather(files[side], tensor.shape(), pieces, element, read.start, out, scratch)
                .map_err(|error| read_error(side, files, error))
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
            let blocks = block_bytes(first, element.size).zip(block_bytes(copy, element.size));
            for ((first, copy), at) in blocks.zip((range.start..).step_by(BLOCK)) {
                if first != copy {
                    let stats = compare_block(self.side(side, first), self.side(side, copy), at);
                    result.replicas.push((side, number, stats));
                }
            }
        }
        Ok(window)
    }

    fn comparison(&self, folded: Folded, files: [&FileSet; 2]) -> TensorComparison {
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
                let at = stats.max_abs_index().or(stats.first_differing());
                at.and_then(|at| self.example(at, files))
            }
            _ => None,
        };
        let replicas = folded.replicas.into_iter().map(|(side, number, stats)| {
            let replica = &pair.sides[side].replicas()[number];
            let first = first_copy(&pair.sides[side], stats.first_differing());
            ReplicaDifference {
                side,
                first: shard_label(first, files[side]),
                copy: shard_label(replica.source.file, files[side]),
                stored_name: replica.source.name.to_string(),
                stats,
            }
        });
        TensorComparison {
            name: pair.name.clone(),
            dtypes: pair.sides.each_ref().map(LogicalTensor::dtype),
            shapes,
            example,
            one_minus_cos: folded.one_minus_cos,
            replicas: replicas.collect(),
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
            let element = self.elements[side];
            let mut bytes = vec![0; element.size];
            let mut scratch = Vec::new();
            let pieces = tensor.pieces();
            gather(files[side], shape, pieces, element, at, &mut bytes, &mut scratch).ok()?;
            Some(self.side(side, &bytes).element_text())
        };
        Some(Example { index, values: [read(0)?, read(1)?] })
    }
}

fn read_error(side: usize, files: [&FileSet; 2], (file, error): (FileId, io::Error)) -> ReadError {
    ReadError { side, file: files[side].path(file).to_path_buf(), message: error.to_string() }
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
    let folder = folder.filter(|name| name.to_string_lossy().starts_with("mp_rank_"));
    folder.or(path.file_name()).unwrap_or_default().to_string_lossy().into_owned()
}
