//! Exact sums, for the few tensors whose angle `f64` sums cannot tell to twelve digits: those that differ in
//! little but length, or are far apart in length.
//!
//! Every product of two elements is added to a fixed-point number that is wide enough for all of them
//! (a Kulisch accumulator), so nothing is rounded until the end and the order of additions does not matter.
//! Some ten times slower than the sums of [`super::Stats`].

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "digits are masked to 32 bits before they are cut, exponents to 11"
)]

use super::DenseBlock;
use super::decode::{decode_chunk, reals_per_element};
use super::lanes::CHUNK;

/// Bits below the point: enough for the square of the smallest denormal.
const POINT: i32 = 2176;

/// 32-bit digits of an accumulator: up to 2^64 times the square of the largest number, and room for its carries.
const DIGITS: usize = 138;

/// Additions after which the digits, which have 30 bits to spare, are carried.
const CARRY_AFTER: u32 = 1 << 28;

/// Exact sums of `a * a`, `b * b` and `a * b` over finite elements.
#[derive(Debug, Clone, Default)]
pub struct ExactSums {
    squares: [Accumulator; 2],
    products: Accumulator,
}

impl ExactSums {
    /// Adds the elements of a block; both sides hold the same number of them, all finite.
    ///
    /// 64-bit integers are rounded to `f64` first.
    pub fn add_block(&mut self, a: DenseBlock<'_>, b: DenseBlock<'_>) {
        let reals = [a, b].map(|side| reals_per_element(side.dtype));
        let width = reals[0].max(reals[1]);
        let elements = CHUNK / width;
        let mut values = [[0.0; CHUNK]; 2];
        for (a_bytes, b_bytes) in a.chunks(elements).zip(b.chunks(elements)) {
            decode_chunk(a.dtype, a_bytes, &mut values[0]);
            decode_chunk(b.dtype, b_bytes, &mut values[1]);
            // A real number beside complex ones has no imaginary part.
            let value = |side: usize, index: usize| match (reals[side] == width, index % width) {
                (true, _) => values[side][index],
                (false, 0) => values[side][index / width],
                (false, _) => 0.0,
            };
            for index in 0..CHUNK {
                let (a, b) = (value(0, index), value(1, index));
                self.squares[0].add_product(a, a);
                self.squares[1].add_product(b, b);
                self.products.add_product(a, b);
            }
        }
    }

    /// Adds the sums of other elements.
    pub fn merge(&mut self, other: &Self) {
        for (square, other) in self.squares.iter_mut().zip(&other.squares) {
            square.merge(other);
        }
        self.products.merge(&other.products);
    }

    /// `1 - <a, b> / (|a| |b|)` to within a few units in the last place of `f64`; `None` where a norm is 0.
    ///
    /// It is `(|a|^2 |b|^2 - <a, b>^2) / (|a| |b| (|a| |b| + <a, b>))`, whose numerator is exact.
    #[must_use]
    pub fn one_minus_cos(&self) -> Option<f64> {
        let [aa, bb] = self.squares.each_ref().map(Accumulator::to_exact);
        let ab = self.products.to_exact();
        let area_squared = aa.times(&bb);
        let area = area_squared.to_float().sqrt();
        let product = ab.to_float();
        if area.0 == 0.0 {
            return None;
        }
        let cos = product.over(area);
        if cos <= 0.0 {
            return Some(1.0 - cos.max(-1.0));
        }
        let excess = area_squared.minus(&ab.times(&ab)).to_float();
        // area * (area + product), with the scale of the area squared taken out of both.
        Some((excess.over(area.squared()) / (1.0 + cos)).max(0.0))
    }
}

/// A fixed-point number: digit `i` stands for `2^(32 * i - POINT)` and may be too large or negative until it is carried.
#[derive(Debug, Clone)]
struct Accumulator {
    digits: [i64; DIGITS],
    additions: u32,
}

impl Default for Accumulator {
    fn default() -> Self {
        Self { digits: [0; DIGITS], additions: 0 }
    }
}

impl Accumulator {
    fn add_product(&mut self, x: f64, y: f64) {
        let (x, y) = (Parts::of(x), Parts::of(y));
        let magnitude = u128::from(x.significand) * u128::from(y.significand);
        if magnitude == 0 {
            return;
        }
        let place = x.exponent + y.exponent + POINT;
        let (digit, shift) = (place.unsigned_abs() as usize / 32, place.unsigned_abs() % 32);
        // 106 bits shifted by less than 32 are at most five digits.
        let low = magnitude << shift;
        let high = if shift == 0 { 0 } else { magnitude >> (128 - shift) };
        let is_negative = x.is_negative != y.is_negative;
        for (index, digit) in self.digits[digit..digit + 5].iter_mut().enumerate() {
            let part = if index < 4 { low >> (32 * index) } else { high };
            let part = (part & u128::from(u32::MAX)) as i64;
            *digit += if is_negative { -part } else { part };
        }
        self.additions += 1;
        if self.additions >= CARRY_AFTER {
            self.carry();
        }
    }

    fn merge(&mut self, other: &Self) {
        self.carry();
        let mut other = other.clone();
        other.carry();
        self.digits.iter_mut().zip(&other.digits).for_each(|(digit, other)| *digit += other);
        self.additions = 1;
    }

    /// Brings all digits but the last between 0 and 2^32.
    fn carry(&mut self) {
        let mut carry = 0;
        let Some((last, digits)) = self.digits.split_last_mut() else { return };
        for digit in digits {
            let sum = *digit + carry;
            carry = sum >> 32;
            *digit = sum & i64::from(u32::MAX);
        }
        *last += carry;
        self.additions = 0;
    }

    fn to_exact(&self) -> Exact {
        let mut carried = self.clone();
        carried.carry();
        let is_negative = carried.digits[DIGITS - 1] < 0;
        if is_negative {
            carried.digits.iter_mut().for_each(|digit| *digit = -*digit);
            carried.carry();
        }
        let digits = carried.digits.iter().map(|&digit| (digit & i64::from(u32::MAX)) as u32);
        Exact { digits: digits.collect(), point: POINT, is_negative }
    }
}

/// A finite number as `significand * 2^exponent`.
struct Parts {
    significand: u64,
    exponent: i32,
    is_negative: bool,
}

impl Parts {
    fn of(x: f64) -> Self {
        let bits = x.to_bits();
        let biased = ((bits >> 52) & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let significand = if biased == 0 { fraction } else { fraction | 1 << 52 };
        Self { significand, exponent: biased.max(1) - 1075, is_negative: x.is_sign_negative() }
    }
}

/// A signed number of any length: digit `i` of its magnitude stands for `2^(32 * i - point)`.
struct Exact {
    digits: Vec<u32>,
    point: i32,
    is_negative: bool,
}

impl Exact {
    fn times(&self, other: &Self) -> Self {
        let mut digits = vec![0_u32; self.digits.len() + other.digits.len()];
        for (i, &x) in self.digits.iter().enumerate().filter(|(_, x)| **x != 0) {
            let mut carry = 0;
            for (j, &y) in other.digits.iter().enumerate() {
                let sum = u64::from(x) * u64::from(y) + u64::from(digits[i + j]) + carry;
                digits[i + j] = (sum & u64::from(u32::MAX)) as u32;
                carry = sum >> 32;
            }
            digits[i + other.digits.len()] = carry as u32;
        }
        let is_negative = self.is_negative != other.is_negative;
        Self { digits, point: self.point + other.point, is_negative }
    }

    /// The difference of two numbers that are not negative, the first one the larger, with the same point.
    fn minus(&self, other: &Self) -> Self {
        let mut borrow = 0;
        let digits = self.digits.iter().zip(&other.digits).map(|(&x, &y)| {
            let difference = i64::from(x) - i64::from(y) - borrow;
            borrow = i64::from(difference < 0);
            (difference & i64::from(u32::MAX)) as u32
        });
        Self { digits: digits.collect(), point: self.point, is_negative: false }
    }

    /// The number to within two units in the last place.
    fn to_float(&self) -> Float {
        let Some(top) = self.digits.iter().rposition(|&digit| digit != 0) else {
            return Float(0.0, 0);
        };
        let low = top.saturating_sub(3);
        let leading = self.digits[low..=top].iter().rev();
        let value = leading.fold(0_u128, |value, &digit| value << 32 | u128::from(digit)) as f64;
        let exponent = i32::try_from(low).unwrap_or(0) * 32 - self.point;
        Float(if self.is_negative { -value } else { value }, exponent)
    }
}

/// `value * 2^exponent`, the exponent even.
#[derive(Clone, Copy)]
struct Float(f64, i32);

impl Float {
    fn sqrt(self) -> Self {
        Self(self.0.sqrt(), self.1 / 2)
    }

    fn squared(self) -> Self {
        Self(self.0 * self.0, self.1 * 2)
    }

    fn over(self, other: Self) -> f64 {
        let exponent = self.1 - other.1;
        // In two steps, so that neither factor overflows; what is too small for both is zero.
        let half = exponent / 2;
        self.0 / other.0 * power(half) * power(exponent - half)
    }
}

fn power(exponent: i32) -> f64 {
    2.0_f64.powi(exponent)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;

    fn angle(a: &[f64], b: &[f64]) -> f64 {
        let bytes = |side: &[f64]| side.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        let (a, b) = (bytes(a), bytes(b));
        let side = |bytes| DenseBlock { dtype: Dtype::Float64, bytes };
        let (mut sums, mut rest) = (ExactSums::default(), ExactSums::default());
        let half = a.len() / 16 * 8;
        rest.add_block(side(&a[half..]), side(&b[half..]));
        sums.add_block(side(&a[..half]), side(&b[..half]));
        sums.merge(&rest);
        sums.one_minus_cos().unwrap()
    }

    fn close(found: f64, wanted: f64) {
        assert!((found - wanted).abs() <= 4e-15 * wanted.abs(), "{found:e} is not {wanted:e}");
    }

    #[test]
    fn an_angle_of_any_size_is_told_to_the_last_digits() {
        for tangent in [1.0, 1e-3, 1e-8, 1e-12, 1e-100] {
            // 1 - cos = 1 - 1 / sqrt(1 + t^2) = t^2 / (h (h + 1)), h = sqrt(1 + t^2)
            let h = f64::hypot(1.0, tangent);
            close(angle(&[1.0, 0.0], &[1.0, tangent]), tangent * tangent / (h * (h + 1.0)));
            close(angle(&[3.0, 0.0], &[3e-9, 3e-9 * tangent]), tangent * tangent / (h * (h + 1.0)));
        }
    }

    #[test]
    fn a_multiple_has_no_angle_and_an_opposite_has_two() {
        let a: Vec<f64> = (0..5000).map(|i| f64::from(i) * 0.1 - 100.0).collect();
        let twice: Vec<f64> = a.iter().map(|x| 2.0 * x).collect();
        let opposite: Vec<f64> = a.iter().map(|x| -4.0 * x).collect();
        close(angle(&a, &twice), 0.0);
        close(angle(&a, &opposite), 2.0);
    }

    #[test]
    fn the_largest_and_the_smallest_numbers_fit() {
        close(angle(&[f64::MAX, f64::MAX], &[f64::MAX, 0.0]), 1.0 - 0.5_f64.sqrt());
        let tiny = f64::from_bits(1);
        close(angle(&[tiny, tiny], &[tiny, 0.0]), 1.0 - 0.5_f64.sqrt());
        close(angle(&[tiny, f64::MAX], &[tiny, f64::MAX]), 0.0);
    }

    #[test]
    fn huge_terms_that_cancel_leave_the_small_ones() {
        let a = [1e150, 1.0, -1e150, 1e-3];
        let b = [1e150, 1.0, 1e150, 2e-3];
        close(angle(&a, &b), 1.0);
        // Without the huge ones the angle is that of what is left.
        let (c, d) = ([1.0, 1e-3], [1.0, 2e-3]);
        let far = angle(&[c[0], c[1], 0.0], &[d[0], d[1], 0.0]);
        close(angle(&c, &d), far);
    }
}
