//! Pairs of `bfloat16` blocks, whose sums are **exact**: each is the real number that it should
//! be, rounded once to `f64`. So the order of additions does not matter at all here, the other
//! sums need not keep to `lanes.rs`, and the loops are free to add integers instead of `f64`s.
//!
//! A `bfloat16` is 8 bits times a power of two. Products and magnitudes are collected as integers
//! in one bucket for each power, which are put together at the end of the block, where
//! `|a - b|^2 = |a|^2 + |b|^2 - 2 <a, b>` and `sum((a - b) (a + b)) = |a|^2 - |b|^2` follow
//! without loss. The machine's loops (`simd/integer.rs`) add to the same buckets.

use super::stats::Sums;
use super::sum::{Sum, power_of_two};
use crate::base::dtype::Dtype;

/// Returns whether a pair of these has exact sums.
pub(super) fn is_exact(a: Dtype, b: Dtype) -> bool {
    a == Dtype::BFloat16 && b == Dtype::BFloat16
}

/// `2^(place - UNIT)` is what a significand of 1 is worth at a place.
pub(super) const UNIT: i32 = 134;

/// Exponents of products, a sum of two places.
const PRODUCTS: usize = 512;

/// Places of values.
const PLACES: usize = 256;

/// Sums of integers by power of two. A block has at most 2^17 terms, each below 2^45 where a
/// place is the least of a window, so that nothing overflows.
pub(super) struct Buckets {
    /// `a * a`, `b * b`, at half their power
    pub(super) squares: [[i64; PLACES]; 2],
    /// `a * b`
    pub(super) products: [i64; PRODUCTS],
    /// `|a - b|`
    pub(super) magnitudes: [i64; PLACES],
}

/// The significand of a finite number, with its sign, and its place.
fn split(word: u16) -> (i64, usize) {
    let (exponent, fraction) = (usize::from(word >> 7 & 0xff), i64::from(word & 0x7f));
    let magnitude = if exponent == 0 { fraction } else { fraction | 0x80 };
    (if word & 0x8000 == 0 { magnitude } else { -magnitude }, exponent.max(1))
}

/// The value of a word.
fn value(word: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(word) << 16))
}

/// Returns whether a word is neither NaN nor infinite.
pub(super) fn is_finite(word: u16) -> bool {
    word & 0x7f80 != 0x7f80
}

impl Buckets {
    pub(super) fn new() -> Self {
        Self { squares: [[0; PLACES]; 2], products: [0; PRODUCTS], magnitudes: [0; PLACES] }
    }

    /// Adds a pair of finite elements and returns the magnitude of their difference.
    #[inline]
    pub(super) fn add(&mut self, a: u16, b: u16) -> f64 {
        let ((a_bits, a_place), (b_bits, b_place)) = (split(a), split(b));
        self.squares[0][a_place] += a_bits * a_bits;
        self.squares[1][b_place] += b_bits * b_bits;
        self.products[a_place + b_place] += a_bits * b_bits;
        let diff = value(a) - value(b);
        let sign = if diff < 0.0 { -1 } else { 1 };
        self.magnitudes[a_place] += sign * a_bits;
        self.magnitudes[b_place] -= sign * b_bits;
        diff.abs()
    }

    /// The sums of the block.
    pub(super) fn sums(&self) -> Sums {
        let [aa, bb] = [0, 1].map(|side| Wide::new(&self.squares[side], 2));
        let ab = Wide::new(&self.products, 1);
        let diff_squares = aa.plus(1, &bb).plus(-2, &ab);
        let square_diffs = aa.plus(-1, &bb);
        let product = |sum: &Wide| Sum::new(sum.rounded(2 * UNIT), 0);
        Sums {
            squares: [product(&aa), product(&bb)],
            products: product(&ab),
            diff_squares: product(&diff_squares),
            square_diffs: product(&square_diffs),
            magnitudes: Sum::new(Wide::new(&self.magnitudes, 1).rounded(UNIT), 0),
        }
    }
}

/// The sums of two blocks in plain Rust, as they are defined. An element that is not finite counts
/// as zero, and as if it were no pair in everything that takes two.
pub(super) fn sums(a: &[u8], b: &[u8]) -> Sums {
    let mut squares = Buckets::new();
    let mut pairs = Buckets::new();
    for (a, b) in a.as_chunks().0.iter().zip(b.as_chunks().0) {
        let [a, b] = [*a, *b].map(u16::from_le_bytes);
        let [a, b] = match (is_finite(a), is_finite(b)) {
            (true, true) => {
                pairs.add(a, b);
                [a, b]
            }
            (true, false) => [a, 0],
            (false, true) => [0, b],
            (false, false) => [0, 0],
        };
        squares.add(a, b);
    }
    Sums { squares: squares.sums().squares, ..pairs.sums() }
}

/// Limbs of 32 bits, as many as a sum of products needs.
const LIMBS: usize = PRODUCTS / 32 + 3;

/// An integer; its limbs are signed and may be too large until they are put in order.
#[derive(Clone, Copy)]
struct Wide([i64; LIMBS]);

impl Wide {
    /// The sum of `bucket[i] * 2^(i * step)`.
    fn new(buckets: &[i64], step: usize) -> Self {
        let mut limbs = [0; LIMBS];
        for (index, &bucket) in buckets.iter().enumerate() {
            if bucket != 0 {
                let (limb, shift) = (index * step / 32, index * step % 32);
                let bits = i128::from(bucket) << shift;
                limbs[limb] += low(bits);
                limbs[limb + 1] += low(bits >> 32);
                limbs[limb + 2] += low(bits >> 64) - ((low(bits >> 64) >> 31) << 32);
            }
        }
        Self(limbs)
    }

    fn plus(&self, factor: i64, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] + factor * other.0[i]))
    }

    /// The nearest `f64`, divided by `2^unit`.
    fn rounded(&self, unit: i32) -> f64 {
        let (is_negative, limbs) = match self.carried(1) {
            (0, limbs) => (false, limbs),
            _ => (true, self.carried(-1).1),
        };
        let Some(top) = limbs.iter().rposition(|&limb| limb != 0) else { return 0.0 };
        // The leading 64 bits, of which the last stands for all that follow; an f64 has 53.
        let limb = |index: usize| top.checked_sub(index).map_or(0, |index| limbs[index]);
        let bits = (u128::from(limb(0)) << 64) | (u128::from(limb(1)) << 32) | u128::from(limb(2));
        let shift = 32 - limb(0).leading_zeros();
        let is_rest = limbs[..top.saturating_sub(2)].iter().any(|&limb| limb != 0)
            || bits & ((1 << shift) - 1) != 0;
        #[expect(clippy::cast_possible_truncation, reason = "96 bits less the shift are 64 left")]
        let leading = (bits >> shift) as u64 | u64::from(is_rest);
        #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small")]
        let exp = 32 * (top as i32 - 2) + shift as i32 - unit;
        let magnitude = leading as f64 * power_of_two(exp);
        if is_negative { -magnitude } else { magnitude }
    }

    /// The limbs of `sign * self` in order, and what is carried out of the last: not 0 if that is
    /// negative.
    fn carried(&self, sign: i64) -> (i64, [u32; LIMBS]) {
        let mut carry = 0;
        let limbs = self.0.map(|limb| {
            let sum = sign * limb + carry;
            carry = sum >> 32;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the rest")]
            let limb = sum as u32;
            limb
        });
        (carry, limbs)
    }
}

/// The last 32 bits.
fn low(bits: i128) -> i64 {
    (bits & 0xffff_ffff) as i64
}
