//! The sizes of differences, on request: the largest in units in the last place, and how many there are of each power of two.

use std::collections::BTreeMap;

use super::decode::{self, FloatFormat};
use super::general::Pair;
use super::simd::{BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Form, Isa, form};
use super::{DenseBlock, casts, stats::Stats};
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
        if stats.differing == 0 {
            return Self::default();
        }
        Counts::of_block(Isa::best(), a, b, stats).into()
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

/// The sizes of the differences of a block while they are counted.
pub(super) struct Counts {
    /// By exponent, that of the smallest number first; in tables that are used in turn, so that no number waits for the last.
    powers: [[u32; POWERS]; TABLES],
    max_ulp: u64,
}

const TABLES: usize = 4;

/// The exponent of the smallest positive `f64`.
const LOWEST: i32 = -1074;

/// Exponents from that one to that of infinity.
const POWERS: usize = 1074 + 1024 + 1;

/// The place of the exponent that an `f64` writes as 0, if its numbers were normal.
const NORMAL: usize = 1074 - 1023;

impl From<Counts> for Spread {
    fn from(Counts { powers, max_ulp }: Counts) -> Self {
        let count = |at: usize| powers.iter().map(|table| u64::from(table[at])).sum();
        let powers = (0..POWERS).zip(LOWEST..).map(|(at, power)| (power, count(at)));
        Self { max_ulp, powers: powers.filter(|(_, count)| *count > 0).collect() }
    }
}

impl Counts {
    fn of_block(isa: Isa, a: DenseBlock<'_>, b: DenseBlock<'_>, stats: &Stats) -> Self {
        let mut counts = Self { powers: [[0; POWERS]; TABLES], max_ulp: 0 };
        let is_real = [a, b].iter().all(|side| decode::reals_per_element(side.dtype) == 1);
        match (form(a.dtype), form(b.dtype)) {
            (Some(a_form), Some(b_form))
                if is_real && stats.is_finite() && has_loop(a_form, b_form) =>
            {
                isa.spread((a_form, a.bytes), (b_form, b.bytes), &mut counts);
            }
            _ => counts.add_block(a, b),
        }
        counts
    }

    fn add_block(&mut self, a: DenseBlock<'_>, b: DenseBlock<'_>) {
        let scale = Scale::coarser(a.dtype, b.dtype);
        let mut pair = Pair::new(a, b);
        for index in 0..pair.chunks() {
            let elements = pair.load(index, [false; 2]);
            for element in 0..elements {
                self.add(&pair, element, scale);
            }
        }
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
            self.powers[element % TABLES][place(exponent(magnitude))] += 1;
            let steps =
                reals.map(|at| scale.steps(pair.values[0][at], pair.values[1][at], pair.diff[at]));
            self.max_ulp = steps.fold(self.max_ulp, u64::max);
        }
    }
}

/// The place of an exponent in a table.
fn place(exponent: i32) -> usize {
    usize::try_from(exponent - LOWEST).unwrap_or(0)
}

/// Returns whether [`loop_over`] is for numbers of these forms: `f32` holds them, and rounded to the coarser one none is out of its
/// range.
fn has_loop(a: Form, b: Form) -> bool {
    !matches!((a, b), (FLOAT64, _) | (_, FLOAT64) | (FLOAT16, FLOAT32) | (FLOAT32, FLOAT16))
}

// Measured as in `closeness.rs`: with this loop a command takes 1.5 to 1.8 times the processor time that it takes without; by
// `add_block` 20 to 27 times.
/// The loop over numbers that the instruction sets read, in any of them.
#[inline(always)]
pub(super) fn loop_over<const A: Form, const B: Form>(a: &[u8], b: &[u8], counts: &mut Counts) {
    match A {
        BFLOAT16 => over_b::<2, A, B>(a, b, counts, bfloat16),
        FLOAT16 => over_b::<2, A, B>(a, b, counts, float16),
        FLOAT32 => over_b::<4, A, B>(a, b, counts, f32::from_le_bytes),
        _ => {}
    }
}

#[inline(always)]
fn over_b<const WIDTH: usize, const A: Form, const B: Form>(
    a: &[u8],
    b: &[u8],
    counts: &mut Counts,
    value: impl Fn([u8; WIDTH]) -> f32,
) {
    let a = a.as_chunks::<WIDTH>().0;
    match B {
        BFLOAT16 => over_runs::<A, B, _, 2>(a, b, counts, value, bfloat16),
        FLOAT16 => over_runs::<A, B, _, 2>(a, b, counts, value, float16),
        FLOAT32 => over_runs::<A, B, _, 4>(a, b, counts, value, f32::from_le_bytes),
        _ => {}
    }
}

#[inline(always)]
fn bfloat16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

#[inline(always)]
fn float16(bytes: [u8; 2]) -> f32 {
    decode::float16(u16::from_le_bytes(bytes))
}

#[inline(always)]
fn over_runs<const A: Form, const B: Form, const N: usize, const M: usize>(
    a: &[[u8; N]],
    b: &[u8],
    counts: &mut Counts,
    a_value: impl Fn([u8; N]) -> f32,
    b_value: impl Fn([u8; M]) -> f32,
) {
    const RUN: usize = 128;
    let b = b.as_chunks::<M>().0;
    let mut max_ulp = 0;
    for (a, b) in a.chunks(RUN).zip(b.chunks(RUN)) {
        let mut exponents = [0u16; RUN];
        for ((&a, &b), exponent) in a.iter().zip(b).zip(&mut exponents) {
            let [a, b] = [a_value(a), b_value(b)];
            let diff = f64::from(a) - f64::from(b);
            *exponent = (diff.abs().to_bits() >> 52) as u16;
            let [a, b] = [a, b].map(rank::<A, B>);
            max_ulp = a.abs_diff(b).max(max_ulp);
        }
        for group in exponents[..a.len()].chunks(TABLES) {
            for (exponent, table) in group.iter().zip(&mut counts.powers) {
                // Zero, the one difference without a normal exponent, comes to a place that is emptied below.
                table[usize::from(*exponent) + NORMAL] += 1;
            }
        }
    }
    counts.powers.iter_mut().for_each(|table| table[NORMAL] = 0);
    counts.max_ulp = counts.max_ulp.max(u64::from(max_ulp));
}

/// The number of a finite value among all of the coarser form, rounded to it, counted from zero.
#[inline(always)]
fn rank<const A: Form, const B: Form>(value: f32) -> i32 {
    let (magnitude, is_negative) = if A == BFLOAT16 || B == BFLOAT16 {
        let code = casts::to_bfloat16(value);
        (u32::from(code & 0x7fff), code >> 15 != 0)
    } else if A == FLOAT16 || B == FLOAT16 {
        let code = casts::to_float16(value);
        (u32::from(code & 0x7fff), code >> 15 != 0)
    } else {
        (value.to_bits() & 0x7fff_ffff, value.to_bits() >> 31 != 0)
    };
    let magnitude = magnitude.cast_signed();
    if is_negative { -magnitude } else { magnitude }
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
pub(super) enum Scale {
    Integer,
    Float(FloatFormat),
}

impl Scale {
    pub(super) fn coarser(a: Dtype, b: Dtype) -> Self {
        let formats = [a, b].into_iter().filter_map(decode::float_format);
        formats.min_by_key(|format| format.mantissa_bits).map_or(Self::Integer, Self::Float)
    }

    pub(super) fn steps(self, a: f64, b: f64, diff: f64) -> u64 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::compare_block;

    #[test]
    fn the_loops_count_what_the_definition_does() {
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        // All finite numbers of two bytes, and floats of all exponents; some are the same or neighbours.
        let halves = |random: &mut dyn FnMut() -> u32, infinite: u16| -> Vec<u8> {
            let codes = (0..3000).map(|_| (random() >> 16) as u16);
            let finite =
                codes.map(|code| if code & infinite == infinite { code & 0x83ff } else { code });
            finite.flat_map(u16::to_le_bytes).collect()
        };
        let floats: Vec<u32> = (0..3000).map(|_| random() & 0xff7f_ffff).collect();
        let near = floats
            .iter()
            .map(|bits| bits ^ [0, 1, 0x8000, 0xffff, 0x8000_0000][random() as usize % 5]);
        let near: Vec<u8> =
            near.map(|bits| bits & 0xff7f_ffff).flat_map(u32::to_le_bytes).collect();
        let floats: Vec<u8> = floats.into_iter().flat_map(u32::to_le_bytes).collect();
        let blocks = [
            (Dtype::BFloat16, halves(&mut random, 0x7f80)),
            (Dtype::BFloat16, halves(&mut random, 0x7f80)),
            (Dtype::Float16, halves(&mut random, 0x7c00)),
            (Dtype::Float16, halves(&mut random, 0x7c00)),
            (Dtype::Float32, floats),
            (Dtype::Float32, near),
        ];
        let mut compared = 0;
        for [a, b] in blocks.iter().flat_map(|a| blocks.iter().map(move |b| [a, b])) {
            let [a, b] = [a, b].map(|(dtype, bytes)| DenseBlock { dtype: *dtype, bytes });
            let stats = compare_block(a, b, 0);
            assert!(stats.is_finite());
            let mut wanted = Counts { powers: [[0; POWERS]; TABLES], max_ulp: 0 };
            wanted.add_block(a, b);
            let wanted = Spread::from(wanted);
            for isa in Isa::available() {
                let found = Spread::from(Counts::of_block(isa, a, b, &stats));
                assert_eq!(found, wanted, "{} {:?} {:?}", isa.name(), a.dtype, b.dtype);
                compared += 1;
            }
        }
        assert!(compared >= 36);
    }
}
