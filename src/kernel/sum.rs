//! Numbers with more precision or more range than an `f64`: the running sums of a tensor, and
//! the few operations that turn them into metrics.

/// A sum of block sums: `(hi + lo) * 2^exp`, with `hi` the rounded value and `lo` what rounding
/// left, so that adding up hundreds of thousands of blocks loses nothing that matters.
///
/// The exponent is 0 except for `float64` and `complex128` values so large or small that their
/// squares would leave the range of `f64`. A zero is always `0, 0, exp 0`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Sum {
    hi: f64,
    lo: f64,
    exp: i32,
}

impl Sum {
    /// `value * 2^exp`.
    pub(super) fn new(value: f64, exp: i32) -> Self {
        if value == 0.0 { Self::default() } else { Self { hi: value, lo: 0.0, exp } }
    }

    /// Returns whether the sum is exactly zero.
    pub(super) fn is_zero(&self) -> bool {
        self.hi == 0.0
    }

    /// Returns whether no term was NaN or infinite.
    pub(super) fn is_finite(&self) -> bool {
        self.hi.is_finite()
    }

    /// Adds a sum over what comes later in index order.
    pub(super) fn merge(&mut self, later: &Self) {
        if later.is_zero() {
            return;
        }
        if self.is_zero() {
            *self = *later;
            return;
        }
        let exp = self.exp.max(later.exp);
        let (x, y) = (self.aligned_to(exp), later.aligned_to(exp));
        let (high, rest) = two_sum(x.hi, y.hi);
        let (hi, lo) = two_sum(high, rest + (x.lo + y.lo));
        *self = if hi == 0.0 { Self::default() } else { Self { hi, lo, exp } };
    }

    /// The same value with a larger exponent. What falls below the range of `f64` is below 2^-200
    /// of the terms that made the larger exponent necessary.
    fn aligned_to(&self, exp: i32) -> Self {
        if exp == self.exp {
            return *self;
        }
        let shift = self.exp - exp;
        Self { hi: times_power_of_two(self.hi, shift), lo: times_power_of_two(self.lo, shift), exp }
    }

    /// The rounded value, out of reach of overflow.
    pub(super) fn value(&self) -> Scaled {
        Scaled::new(self.hi, self.exp)
    }
}

/// `x + y` as the rounded sum and its exact error (Knuth's TwoSum).
fn two_sum(x: f64, y: f64) -> (f64, f64) {
    let sum = x + y;
    let y_part = sum - x;
    let error = (x - (sum - y_part)) + (y - y_part);
    (sum, error)
}

/// A floating point number with the 53 bits of `f64` and room to square it: `significand * 2^exp`,
/// `1 <= |significand| < 2` or both zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scaled {
    significand: f64,
    exp: i32,
}

/// Powers of two whose distance cannot change a 53-bit sum.
const FAR: i32 = 128;

impl Scaled {
    /// `value * 2^exp`; the value is finite.
    pub(super) fn new(value: f64, exp: i32) -> Self {
        if value == 0.0 {
            return Self { significand: 0.0, exp: 0 };
        }
        // Denormals get a leading bit first.
        let (value, exp) = if value.abs() < f64::MIN_POSITIVE {
            (value * power_of_two(64), exp - 64)
        } else {
            (value, exp)
        };
        let own = exponent(value);
        Self { significand: times_power_of_two(value, -own), exp: exp + own }
    }

    pub(super) fn sqrt(self) -> Self {
        let odd = self.exp.rem_euclid(2);
        Self::new((self.significand * power_of_two(odd)).sqrt(), (self.exp - odd) / 2)
    }

    pub(super) fn times(self, other: Self) -> Self {
        Self::new(self.significand * other.significand, self.exp + other.exp)
    }

    /// The quotient; the divisor is not zero.
    pub(super) fn over(self, divisor: Self) -> Self {
        Self::new(self.significand / divisor.significand, self.exp - divisor.exp)
    }

    pub(super) fn plus(self, other: Self) -> Self {
        let (large, small) =
            if self.significand == 0.0 || (other.significand != 0.0 && other.exp > self.exp) {
                (other, self)
            } else {
                (self, other)
            };
        let distance = (large.exp - small.exp).min(FAR);
        if small.significand == 0.0 {
            return large;
        }
        Self::new(large.significand + times_power_of_two(small.significand, -distance), large.exp)
    }

    pub(super) fn minus(self, other: Self) -> Self {
        self.plus(Self { significand: -other.significand, exp: other.exp })
    }

    /// The nearest `f64`; infinite beyond its range.
    pub(super) fn to_f64(self) -> f64 {
        times_power_of_two(self.significand, self.exp)
    }
}

/// `e` of a normal number `m * 2^e`, `1 <= |m| < 2`.
fn exponent(value: f64) -> i32 {
    let biased = (value.to_bits() >> 52) & 0x7ff;
    i32::try_from(biased).unwrap_or(0) - 1023
}

/// `2^exp` for `-1022 <= exp <= 1023`.
pub(super) const fn power_of_two(exp: i32) -> f64 {
    debug_assert!(-1022 <= exp && exp <= 1023);
    #[expect(clippy::cast_sign_loss, reason = "positive for every exponent in the range stated")]
    let biased = (exp + 1023) as u64;
    f64::from_bits(biased << 52)
}

/// `value * 2^exp` for any exponent, rounded once where `|value|` is in `[1, 2)`.
pub(super) fn times_power_of_two(mut value: f64, exp: i32) -> f64 {
    const STEP: i32 = 1000;
    let mut left = exp;
    while left.abs() > STEP && value != 0.0 && value.is_finite() {
        let step = STEP * left.signum();
        value *= power_of_two(step);
        left -= step;
    }
    value * power_of_two(left.clamp(-STEP, STEP))
}
