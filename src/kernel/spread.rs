//! The sizes of differences, on request: the largest in units in the last place, and how many there are of each power of two.

use std::collections::BTreeMap;

use super::decode::{self, FloatFormat};
use super::general::Pair;
use super::{DenseBlock, stats::Stats};
use crate::base::dtype::Dtype;

/// The sizes of the differences of elements that are both finite. Counts and maxima only, so that they may be merged in any
/// order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Spread {
    /// The largest difference in steps; see [`Spread::max_ulp`].
    max_ulp: u64,
    /// Number of differences by the exponent of the power of two at or below their magnitude.
    powers: BTreeMap<i32, u64>,
}

impl Spread {
    /// The sizes of the differences of a block; `stats` are its statistics.
    #[must_use]
    pub fn of_block(a: DenseBlock<'_>, b: DenseBlock<'_>, stats: &Stats) -> Self {
        let mut spread = Self::default();
        if stats.differing == 0 {
            return spread;
        }
        let scale = Scale::coarser(a.dtype, b.dtype);
        let mut pair = Pair::new(a, b);
        for index in 0..pair.chunks() {
            let elements = pair.load(index, [false; 2]);
            for element in 0..elements {
                spread.add(&pair, element, scale);
            }
        }
        spread
    }

    fn add(&mut self, pair: &Pair<'_>, element: usize, scale: Scale) {
        let is_finite = |side: usize| !pair.any(side, element, |value| !value.is_finite());
        if !is_finite(0) || !is_finite(1) {
            return;
        }
        let reals = pair.reals(element);
        let squares = reals.clone().map(|at| pair.diff[at] * pair.diff[at]);
        let magnitude = match reals.len() {
            1 => pair.diff[reals.start].abs(),
            _ => squares.sum::<f64>().sqrt(),
        };
        if magnitude > 0.0 {
            *self.powers.entry(exponent(magnitude)).or_default() += 1;
            let steps =
                reals.map(|at| scale.steps(pair.values[0][at], pair.values[1][at], pair.diff[at]));
            self.max_ulp = steps.fold(self.max_ulp, u64::max);
        }
    }

    /// Adds those of other elements.
    pub fn merge(&mut self, other: &Self) {
        self.max_ulp = self.max_ulp.max(other.max_ulp);
        for (power, count) in &other.powers {
            *self.powers.entry(*power).or_default() += count;
        }
    }

    /// The largest number of steps from a number of the coarser dtype to the next that lie between a and b, both rounded to
    /// it (of two floats the one with fewer bits of significand; a float next to an integer): the distance in units in the
    /// last place, as `numpy.testing.assert_array_max_ulp` counts them. Integers: `|a - b|`. Complex: the larger of the parts.
    #[must_use]
    pub fn max_ulp(&self) -> u64 {
        self.max_ulp
    }

    /// Number of differences `2^e <= |a - b| < 2^(e + 1)` by `e`, ascending; differences of 0 are none.
    #[must_use]
    pub fn powers(&self) -> &BTreeMap<i32, u64> {
        &self.powers
    }
}

/// The exponent of the power of two at or below a positive magnitude; that of infinity is 1024.
fn exponent(magnitude: f64) -> i32 {
    let bits = magnitude.to_bits();
    let leading = |bits: u64| i32::try_from(bits.leading_zeros()).unwrap_or(0);
    match bits >> 52 {
        0 => -1011 - leading(bits),
        biased => i32::try_from(biased).unwrap_or(0) - 1023,
    }
}

/// The numbers that steps are counted in.
#[derive(Debug, Clone, Copy)]
enum Scale {
    Integer,
    Float(FloatFormat),
}

impl Scale {
    fn coarser(a: Dtype, b: Dtype) -> Self {
        let formats = [a, b].into_iter().filter_map(decode::float_format);
        formats.min_by_key(|format| format.mantissa_bits).map_or(Self::Integer, Self::Float)
    }

    fn steps(self, a: f64, b: f64, diff: f64) -> u64 {
        match self {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "saturates"
            )]
            Self::Integer => diff.abs() as u64,
            Self::Float(format) => format.rank(a).abs_diff(format.rank(b)),
        }
    }
}

impl FloatFormat {
    /// The number of the nearest value among all of the format, counted from zero.
    fn rank(self, value: f64) -> i64 {
        if value == 0.0 {
            return 0;
        }
        let unit = self.unit_exponent(value);
        let binades = i64::from(unit - self.smallest_exponent());
        // Exact: the unit is no less than that of an f64, and the scale of its inverse is split in two to stay in range.
        let [half, rest] = [-unit / 2, -unit - -unit / 2].map(super::sum::power_of_two);
        #[expect(clippy::cast_possible_truncation, reason = "a significand")]
        let significand = (value.abs() * half * rest).round_ties_even() as i64;
        let rank = (binades << self.mantissa_bits) + significand;
        if value < 0.0 { -rank } else { rank }
    }
}
