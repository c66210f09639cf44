//! Tensors -> statistics: one streaming pass over fixed logical blocks, of two sides ([`compare`]) or of one
//! (`self_check`).
//!
//! A unit of work is some consecutive blocks of one tensor. Each side is looked at in the page cache where that pays and
//! it lies there as it is compared (`side_files.rs`), or else gathered into dense buffers that each thread keeps; every
//! further copy is laid over the first one and compared with it bit by bit, and the kernel sees block after block. Where
//! copies differ and their [`Merge`](crate::tensor::Merge) makes a value of them all, the block that the kernel sees is
//! that value, held in `f64`. The blocks' statistics are folded in block order, so the result has the same bits for any number of threads and
//! any layout of either side. Memory: threads x a few blocks, or threads x `BAND_BYTES` where a side is stored with its
//! rows across the file; besides, pages of the files that are looked at, which the system may take back.
//!
//! Each file uses only those before it: `sums` and `side_files`, `strided`, `gather` (one copy), `copies` (all of a tensor),
//! `side_reader` (one side), `pass` (units, threads, folding), then the tasks, `masters` before `self_check`, `suggest`, and
//! `fingerprints` before `relations`, which both ask why tensors differ.

mod copies;
mod fingerprints;
mod gather;
mod masters;
pub mod metrics;
mod pass;
mod relations;
mod self_check;
mod side_files;
mod side_reader;
mod strided;
mod suggest;
mod sums;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use rayon::prelude::*;

use crate::base::dtype::Dtype;
use crate::base::side::Side;
use crate::kernel::{
    Beyond, Closeness, DenseBlock, ExactSums, Spread, Stats, compare_block, count_beyond, is_noise,
};
use crate::names::Name;
use crate::pairing::Pair;
use crate::storage::FileSet;
use crate::tensor::LogicalTensor;

use pass::{Extra, PassTotals, TensorPass, bytes, unit_bytes};
use side_files::SideFiles;
use side_reader::{SideReader, unflattened};

pub use fingerprints::{TensorFingerprints, fingerprints, matrix};
pub use masters::Rounding;
pub use relations::{Answer, ENOUGH_VALUES, Outliers, Places, Question, relate};
pub use self_check::{TensorCheck, bytes_to_self_check, self_check};
pub use side_files::ReadError;
pub use side_reader::ReplicaDifference;
pub use suggest::{Suggestion, Suggestions, Unpaired, suggest};
pub use sums::{ContentSums, WrongSum};

/// The comparison of one pair.
#[derive(Debug)]
pub struct TensorComparison {
    /// The canonical name.
    pub name: Name,
    /// Element type of each side.
    pub dtypes: [Dtype; 2],
    /// Shape of each side.
    pub shapes: [Vec<u64>; 2],
    /// The outcome.
    pub outcome: Outcome,
    /// The first element that is not as close as was asked for, or else the one with the largest difference, or the first one
    /// that differs.
    pub example: Option<Example>,
    /// `1 - cos` from exact sums, where the statistics do not tell it well enough and it was asked for.
    pub one_minus_cos: Option<f64>,
    /// The elements that are not as close as was asked for.
    pub beyond: Option<Beyond>,
    /// The sizes of the differences, where they were asked for.
    pub spread: Option<Spread>,
    /// All elements are floats, finite, and no farther apart than rounding makes them.
    pub is_noise: bool,
    /// Copies that are not bit by bit the first one, parts of a sum included.
    pub replicas: Vec<ReplicaDifference>,
    /// Vocabulary rows beyond those compared, on each side.
    pub rows_left_out: [u64; 2],
    /// The side on which it shares another tensor's values.
    pub tied_side: Option<Side>,
}

impl TensorComparison {
    /// Returns whether both sides were compared and are finite.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        matches!(&self.outcome, Outcome::Compared(stats) if stats.is_finite())
    }
}

/// The outcome of comparing one pair.
#[derive(Debug)]
pub enum Outcome {
    /// Both sides were read.
    Compared(Box<Stats>),
    /// There is nothing to subtract.
    ShapeDiffers,
    /// One side cannot be read.
    Unreadable(ReadError),
}

/// One element of both sides.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Its index.
    pub index: Vec<u64>,
    /// Its values as text, in full.
    pub values: [String; 2],
}

/// The statistics that are wanted of a pair, beside those that are always taken.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// Elements are counted that are not as close as this.
    pub closeness: Option<Closeness>,
    /// The sizes of the differences.
    pub spread: bool,
    /// `1 - cos` to [`ANGLE_ERROR`]: where the first pass does not know it so well, a second one takes exact sums.
    pub one_minus_cos: bool,
}

/// What is taken of a pair as [`Wanted`].
#[derive(Debug, Default)]
struct Found {
    beyond: Beyond,
    spread: Spread,
    /// Some difference is more than noise.
    is_loud: bool,
}

impl Extra for Found {
    fn merge(&mut self, other: Self) {
        self.beyond.merge(&other.beyond);
        self.spread.merge(&other.spread);
        self.is_loud |= other.is_loud;
    }
}

impl Wanted {
    /// The statistics of a block; what is wanted besides is added to `found` while the block is in a cache.
    fn of_block(self, [a, b]: [DenseBlock<'_>; 2], first: u64, found: &mut Found) -> Stats {
        let stats = compare_block(a, b, first);
        if let Some(closeness) = &self.closeness {
            found.beyond.merge(&count_beyond([a, b], closeness, &stats, first));
        }
        if self.spread {
            found.spread.merge(&Spread::of_block(a, b, &stats));
        }
        // One block that is more than noise settles it for the tensor.
        found.is_loud = found.is_loud || !is_noise(a, b, &stats);
        stats
    }
}

/// Compares all pairs, and takes of each what is `wanted`; `done` counts the bytes as they are compared.
#[must_use]
pub fn compare(
    pairs: &[Pair],
    wanted: impl Fn(&Pair) -> Wanted,
    files: [&FileSet; 2],
    done: &AtomicU64,
) -> Vec<TensorComparison> {
    let wanted: Vec<Wanted> = pairs.iter().map(wanted).collect();
    let unit_bytes = unit_bytes(bytes_to_compare(pairs) / 2);
    let side_files = |side| SideFiles { side, files: files[side], sums: None };
    let reader = |side, tensor| SideReader::merging(side_files(side), tensor);
    let passes = pairs.iter().map(|Pair { sides: [a, b], .. }| {
        TensorPass::new([reader(Side::A, a), reader(Side::B, b)], unit_bytes)
    });
    let passes: Vec<TensorPass<'_, 2>> = passes.collect();
    let of_block = |index: usize, blocks: [DenseBlock<'_>; 2], first, found: &mut Found| {
        wanted[index].of_block(blocks, first, found)
    };
    let totals = pass::run_all(&passes.iter().collect::<Vec<_>>(), of_block, done);
    let finish = |(((pair, pass), totals), wanted)| comparison(pair, pass, totals, wanted);
    pairs.iter().zip(&passes).zip(totals).zip(wanted).map(finish).collect()
}

/// The relative error of `1 - cos` above which a tensor is read a second time.
pub const ANGLE_ERROR: f64 = 1e-12;

/// Number of bytes that [`compare`] will count.
#[must_use]
pub fn bytes_to_compare(pairs: &[Pair]) -> u64 {
    let comparable = pairs.iter().filter(|pair| pair.is_comparable());
    comparable.flat_map(|pair| pair.sides.iter().map(bytes)).fold(0, u64::saturating_add)
}

impl Pair {
    /// The dtype of each side.
    #[must_use]
    pub fn dtypes(&self) -> [Dtype; 2] {
        self.sides.each_ref().map(LogicalTensor::dtype)
    }

    fn is_comparable(&self) -> bool {
        self.sides[0].shape() == self.sides[1].shape()
    }
}

fn comparison(
    pair: &Pair,
    pass: &TensorPass<'_, 2>,
    totals: PassTotals<2, Found>,
    wanted: Wanted,
) -> TensorComparison {
    let PassTotals { stats, differing, mut error, extra: found } = totals;
    let mut one_minus_cos = None;
    let is_known = stats.one_minus_cos_error().is_none_or(|error| error <= ANGLE_ERROR);
    if wanted.one_minus_cos && !is_known && error.is_none() {
        match exact_sums(pass) {
            Ok(sums) => one_minus_cos = sums.one_minus_cos(),
            Err(cause) => error = Some(cause),
        }
    }
    let is_noise = !found.is_loud;
    let mut replicas = Vec::new();
    for (side, differing) in pass.sides.iter().zip(&differing) {
        match side.differences(differing) {
            Ok(differences) => replicas.extend(differences),
            Err(cause) => error = Some(cause),
        }
    }
    let mut example = None;
    if error.is_none() && pair.is_comparable() {
        let at = found.beyond.first.or(stats.max_abs_index()).or(stats.first_differing());
        match at.map(|at| self::example(pass, at)).transpose() {
            Ok(shown) => example = shown,
            Err(cause) => error = Some(cause),
        }
    }
    let outcome = match error {
        Some(error) => Outcome::Unreadable(error),
        None if !pair.is_comparable() => Outcome::ShapeDiffers,
        None => Outcome::Compared(Box::new(stats)),
    };
    TensorComparison {
        name: pair.name.clone(),
        dtypes: pair.dtypes(),
        shapes: pair.sides.each_ref().map(|side| side.shape().to_vec()),
        outcome,
        example,
        one_minus_cos,
        beyond: wanted.closeness.map(|_| found.beyond),
        spread: wanted.spread.then_some(found.spread),
        is_noise,
        replicas,
        rows_left_out: pair.rows_left_out,
        tied_side: pair.tied_side,
    }
}

/// Reads the pair once more for its exact sums, which do not depend on the order of units.
fn exact_sums(pass: &TensorPass<'_, 2>) -> Result<ExactSums, ReadError> {
    let units: Vec<Range<u64>> = pass.units().collect();
    let of_unit = |unit: &Range<u64>| {
        let mut sums = ExactSums::default();
        pass.each_block(unit, &mut Default::default(), |[a, b], _| sums.add_block(a, b))?;
        Ok(sums)
    };
    // Of two errors the one on the left, which is the same in every run.
    units.par_iter().map(of_unit).reduce(
        || Ok(ExactSums::default()),
        |sums, more| {
            let (mut sums, more) = (sums?, more?);
            sums.merge(&more);
            Ok(sums)
        },
    )
}

/// Reads one element of both sides.
fn example(pass: &TensorPass<'_, 2>, at: u64) -> Result<Example, ReadError> {
    let [a, b] = &pass.sides;
    let index = unflattened(at, a.tensor().shape());
    Ok(Example { index, values: [a.value_text(at)?, b.value_text(at)?] })
}
