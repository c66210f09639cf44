//! Fingerprints of a tensor as a matrix: of each row, of each column, of the whole. The same numbers for the same values, in
//! whatever layout and dtype they are stored.

use std::ops::Range;

use rayon::prelude::*;

use crate::base::side::Side;
use crate::kernel::{self, PlaceWeights, scrambled};
use crate::storage::FileSet;
use crate::tensor::LogicalTensor;

use super::pass::{TensorPass, bytes, unit_bytes};
use super::side_files::{ReadError, SideFiles};
use super::side_reader::SideReader;

/// The fingerprints of one tensor.
#[derive(Debug, Clone)]
pub struct TensorFingerprints {
    /// One for each row: each index of all dimensions but the last one, of which these are as many as its elements if it is the
    /// only one.
    pub rows: Vec<u64>,
    /// One for each index of the last dimension; empty where there is no other one.
    pub columns: Vec<u64>,
}

impl TensorFingerprints {
    /// A number for the tensor as a whole; another one for another shape or another order.
    #[must_use]
    pub fn whole(&self) -> u128 {
        let start = [self.rows.len() as u64, self.columns.len() as u64];
        let words = || start.iter().chain(&self.rows);
        let half = |seed| words().fold(seed, |whole, word| scrambled(whole ^ word));
        u128::from(half(0)) << 64 | u128::from(half(1))
    }
}

/// Rows and columns of a tensor as a matrix: the last dimension are the columns, but a tensor of one dimension has a row for
/// each element.
#[must_use]
pub fn matrix(shape: &[u64]) -> [u64; 2] {
    match shape {
        [] => [1, 1],
        [rows] => [*rows, 1],
        [outer @ .., columns] => [outer.iter().product(), *columns],
    }
}

/// Takes the fingerprints of a tensor.
///
/// # Errors
/// A file that cannot be read.
pub fn fingerprints(
    side: Side,
    tensor: &LogicalTensor,
    files: &FileSet,
) -> Result<TensorFingerprints, ReadError> {
    let side_files = SideFiles { side, files, sums: None };
    let sides = [SideReader::merging(side_files, tensor)];
    let pass = TensorPass::new(sides, unit_bytes(bytes(tensor)));
    let [rows, width] = matrix(tensor.shape());
    let count = |size: u64| usize::try_from(size).unwrap_or(usize::MAX);
    let weights = PlaceWeights::new(count(rows.max(width)));
    let of = |range: Range<u64>| kernel::Fingerprints {
        first_row: range.start,
        rows: vec![0; count(range.end - range.start)],
        columns: if tensor.shape().len() > 1 { vec![0; count(width)] } else { Vec::new() },
    };
    let empty = || of(0..rows);
    let units: Vec<Range<u64>> = pass.units().collect();
    let of_unit = |unit: &Range<u64>| {
        let mut found = of(unit.start / width..unit.end.div_ceil(width));
        pass.each_block(unit, &mut Default::default(), |[block], first| {
            found.add_block(block, first, count(width), &weights);
        })?;
        Ok(found)
    };
    // The sums do not depend on the order of units; of two errors it is the one on the left.
    let merge = |whole: Result<kernel::Fingerprints, ReadError>, part| {
        let (mut whole, part) = (whole?, part?);
        whole.merge(&part);
        Ok(whole)
    };
    let found = units.par_iter().map(of_unit).fold(|| Ok(empty()), merge);
    let whole = found.reduce(|| Ok(empty()), merge)?;
    Ok(TensorFingerprints { rows: whole.rows, columns: whole.columns })
}
