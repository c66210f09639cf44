//! Fingerprints of the rows and the columns of a matrix: numbers that are equal where the values are, in whatever order the
//! blocks come and whatever dtype the values have.
//!
//! The fingerprint of a row is the sum of its values times a weight for each place, modulo 2^64 (multilinear hashing): that of
//! a column of the transposed matrix is the same. Zeros of either sign are one value.

use super::{DenseBlock, decode, size};

/// Weights of so many places; a row or a column may be no longer.
pub struct PlaceWeights(Vec<u64>);

impl PlaceWeights {
    /// Those of the first `count` places.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self((0..count as u64).map(|place| scrambled(place) | 1).collect())
    }
}

/// The fingerprints of some consecutive rows of a matrix, and what these rows add to those of all columns.
#[derive(Debug, Clone)]
pub struct Fingerprints {
    /// The number of the first row.
    pub first_row: u64,
    /// One for each row from there on.
    pub rows: Vec<u64>,
    /// One for each column; empty where they are not wanted.
    pub columns: Vec<u64>,
}

impl Fingerprints {
    /// Adds a block of elements of the matrix, whose rows have `width` elements; `first` is the flat index of the first one. The
    /// weights are those of rows and columns.
    pub fn add_block(
        &mut self,
        block: DenseBlock<'_>,
        first: u64,
        width: usize,
        weights: &PlaceWeights,
    ) {
        const STEP: usize = 512;
        let numbers = decode::reals_per_element(block.dtype);
        let mut values = [0.0; STEP];
        let mut at = first;
        let end = first + (block.bytes.len() / size(block.dtype)) as u64;
        let mut bytes = block.bytes;
        while at < end {
            let (row, column) = (at / width as u64, at % width as u64);
            let Ok(column) = usize::try_from(column) else { return };
            let left = usize::try_from(end - at).unwrap_or(usize::MAX);
            let count = left.min(width - column).min(STEP / numbers);
            let (part, rest) = bytes.split_at(count * size(block.dtype));
            let values = &mut values[..count * numbers];
            decode::decode(block.dtype, part, values);
            self.add(row, column, values.chunks_exact(numbers), weights);
            (bytes, at) = (rest, at + count as u64);
        }
    }

    fn add<'v>(
        &mut self,
        row: u64,
        column: usize,
        values: impl ExactSizeIterator<Item = &'v [f64]>,
        PlaceWeights(weights): &PlaceWeights,
    ) {
        let Ok(index) = usize::try_from(row.wrapping_sub(self.first_row)) else { return };
        let of_row = usize::try_from(row).ok().and_then(|row| weights.get(row));
        let count = values.len();
        let codes = values.map(|numbers| match numbers {
            [number] => code(*number),
            _ => numbers.iter().fold(0, |whole, number| scrambled(whole ^ code(*number))),
        });
        let mut sum = 0u64;
        let of_columns = &weights[column..column + count];
        match (self.columns.is_empty(), of_row) {
            (false, Some(&of_row)) => {
                let columns = &mut self.columns[column..column + count];
                for ((code, weight), column) in codes.zip(of_columns).zip(columns) {
                    sum = sum.wrapping_add(code.wrapping_mul(*weight));
                    *column = column.wrapping_add(code.wrapping_mul(of_row));
                }
            }
            _ => {
                for (code, weight) in codes.zip(of_columns) {
                    sum = sum.wrapping_add(code.wrapping_mul(*weight));
                }
            }
        }
        if let Some(fingerprint) = self.rows.get_mut(index) {
            *fingerprint = fingerprint.wrapping_add(sum);
        }
    }

    /// Adds those of other elements.
    pub fn merge(&mut self, other: &Self) {
        let skipped = usize::try_from(other.first_row.wrapping_sub(self.first_row));
        let rows =
            skipped.ok().and_then(|skipped| self.rows.get_mut(skipped..)).unwrap_or_default();
        let add = |(sum, other): (&mut u64, &u64)| *sum = sum.wrapping_add(*other);
        rows.iter_mut().zip(&other.rows).for_each(add);
        self.columns.iter_mut().zip(&other.columns).for_each(add);
    }
}

/// A number for a value: another one for another value. What an `f32` holds has that one's bits, the halves exchanged, so that
/// short numbers have their ones at the lower end.
#[inline(always)]
fn code(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "whether it changes the value is looked at"
    )]
    let single = value as f32;
    if f64::from(single).to_bits() == value.to_bits() {
        // The sum is +0 for -0.
        u64::from((single + 0.0).to_bits().rotate_left(16))
    } else {
        scrambled(value.to_bits()) | 1 << 63
    }
}

/// The output function of SplitMix64 (Steele, Lea, Flood, 2014).
#[must_use]
pub fn scrambled(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;

    fn fingerprints(values: &[f32], width: usize, cuts: &[usize]) -> Fingerprints {
        let rows = values.len() / width;
        let weights = PlaceWeights::new(rows.max(width));
        let empty = || Fingerprints { first_row: 0, rows: vec![0; rows], columns: vec![0; width] };
        let mut whole = empty();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut start = 0;
        for &end in cuts.iter().chain([&values.len()]) {
            let mut part = empty();
            let bytes = &bytes[start * 4..end * 4];
            let block = DenseBlock { dtype: Dtype::Float32, bytes };
            part.add_block(block, start as u64, width, &weights);
            whole.merge(&part);
            start = end;
        }
        whole
    }

    #[test]
    fn rows_of_a_matrix_are_columns_of_the_transposed_one_however_it_is_cut() {
        let values: Vec<f32> = (0..6 * 5).map(|number| (number as f32 - 7.0) * 0.37).collect();
        let turned: Vec<f32> = (0..30).map(|at| values[at % 6 * 5 + at / 6]).collect();
        let one = fingerprints(&values, 5, &[]);
        let cut = fingerprints(&values, 5, &[3, 13, 14]);
        assert_eq!((&one.rows, &one.columns), (&cut.rows, &cut.columns));
        let other = fingerprints(&turned, 6, &[11]);
        assert_eq!((&one.rows, &one.columns), (&other.columns, &other.rows));
        let distinct: std::collections::BTreeSet<u64> =
            one.rows.iter().chain(&one.columns).copied().collect();
        assert_eq!(distinct.len(), 11);
    }

    #[test]
    fn a_value_has_the_same_code_in_every_dtype() {
        assert_eq!(code(-0.0), code(0.0));
        assert_ne!(code(0.1), code(f64::from(0.1f32)));
        assert_ne!(code(0.1), code(0.1 + f64::EPSILON));
        assert_eq!(code(1.5) >> 32, 0);
    }
}
