//! Pairs -> statistics: one streaming pass over fixed logical blocks.
//!
//! A unit of work is some consecutive blocks of one pair. Both sides are looked at in the page cache where that pays and
//! they lie there as they are compared (`maps.rs`), or else gathered into dense buffers that each thread keeps; every
//! further copy is laid over the first one and compared with it bit by bit, and the kernel sees block after block. Where
//! copies differ and their [`Merge`] makes a value of them all, the block that the kernel sees is that value, held in
//! `f64`. The blocks' statistics are folded in block order, so the result has the same bits for any number of threads and
//! any layout of either side. Memory: threads x a few blocks, or threads x `BAND_BYTES` where a side is stored with its
//! rows across the file; besides, pages of the files that are looked at, which the system may take back.

mod copies;
mod findings;
mod gather;
mod job;
mod maps;
pub mod metrics;
mod survey;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;

use rayon::prelude::*;

use crate::base::dtype::Dtype;
use crate::base::side::Side;
use crate::kernel::Stats;
use crate::names::Name;
use crate::pairing::Pair;
use crate::storage::FileSet;
use crate::tensor::{LogicalTensor, Merge};

use job::{Job, Unit, UnitResult, unit_bytes};

pub use survey::{bytes_to_survey, survey};

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
    pub tied_side: Option<Side>,
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
    /// The side that it is on.
    pub side: Side,
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
    /// The side that it is on.
    pub side: Side,
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

/// Compares all pairs; `done` counts the bytes as they are compared.
///
/// With `exact_one_minus_cos`, the few tensors whose `1 - cos` is not known to [`ANGLE_ERROR`] from the first pass
/// are read once more, for exact sums.
#[must_use]
pub fn compare(
    pairs: &[Pair],
    files: [&FileSet; 2],
    exact_one_minus_cos: bool,
    done: &AtomicU64,
) -> Vec<TensorComparison> {
    let unit_bytes = unit_bytes(pairs);
    let jobs: Vec<Job<'_>> = pairs.iter().map(|pair| Job::new(pair, files, unit_bytes)).collect();
    run_all(&jobs, files, exact_one_minus_cos, done)
}

fn run_all(
    jobs: &[Job<'_>],
    files: [&FileSet; 2],
    exact_one_minus_cos: bool,
    done: &AtomicU64,
) -> Vec<TensorComparison> {
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
        if exact_one_minus_cos && !is_known && folded.error.is_none() {
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
    replicas: BTreeSet<(Side, usize)>,
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
