//! Ways in which the elements of one tensor may follow from those of another, one by one and exactly.

use super::decode::{float_format, power_of_two, rounded};
use crate::base::dtype::Dtype;

/// A way in which an element of one side follows from that of the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Relation {
    /// It is the other one rounded to this dtype, and stored in a wider one.
    Rounded(Dtype),
    /// It is the other one and this number, added and rounded to the dtype that it is stored in.
    Plus(f64),
    /// It is the other one times this number, but for roundings: two units of this dtype at most.
    Times(f64, Dtype),
    /// It is infinite where the other one is beyond the range of `float16`, and finite elsewhere.
    Overflow,
}

/// The largest number of `float16`.
const LARGEST_HALF: f64 = 65504.0;

/// The least magnitude that is rounded to infinity in `float16`.
const INFINITE_HALF: f64 = 65520.0;

impl Relation {
    /// Returns whether `value`, stored in `dtype`, follows from `other` so. Not of infinities and NaN, but for an overflow.
    #[must_use]
    pub fn holds(self, value: f64, dtype: Dtype, other: f64) -> bool {
        match self {
            Self::Rounded(narrow) => {
                let nearest = rounded(narrow, other);
                let format = float_format(narrow);
                // Numbers beyond the range: infinity, or the largest one (torch from 2.10, and conversions of CUDA that saturate).
                let is_saturated = || {
                    let largest = format.map_or(f64::INFINITY, |format| format.largest);
                    nearest.is_infinite() && value == largest.copysign(other)
                };
                value.is_finite() && (value == nearest || is_saturated())
            }
            Self::Plus(number) => value.is_finite() && value == rounded(dtype, other + number),
            Self::Times(factor, precision) => {
                let Some(format) = float_format(precision) else { return false };
                let expected = factor * other;
                if precision == dtype && value == expected && value.is_finite() {
                    return true;
                }
                let larger = expected.abs().max(value.abs());
                let unit = power_of_two(format.unit_exponent(larger));
                let is_one = || precision == dtype || rounded(precision, value) == value;
                (value - expected).abs() <= 2.0 * unit && is_one()
            }
            Self::Overflow if value.is_infinite() => {
                other.is_finite() && other.abs() > LARGEST_HALF && value.signum() == other.signum()
            }
            Self::Overflow => value.is_finite() && other.is_finite() && other.abs() < INFINITE_HALF,
        }
    }
}

/// Returns whether some numbers of `wide` are none of `narrow`, while it has numbers of its own range: a dtype that a model in
/// `wide` may have been rounded to.
#[must_use]
pub fn is_narrower(narrow: Dtype, wide: Dtype) -> bool {
    match (float_format(narrow), float_format(wide)) {
        (Some(narrow), Some(wide)) => narrow.mantissa_bits < wide.mantissa_bits,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relations_are_exact() {
        use Dtype::{BFloat16, Float8E4M3Fn, Float16, Float32};
        let holds = |relation: Relation, value, other| relation.holds(value, Float32, other);
        assert!(holds(Relation::Rounded(BFloat16), 1.0, 1.001));
        assert!(!holds(Relation::Rounded(BFloat16), 1.0, 1.01));
        assert!(
            holds(Relation::Rounded(Float16), f64::INFINITY, 1e6)
                != holds(Relation::Overflow, f64::INFINITY, 1e6)
        );
        assert!(holds(Relation::Rounded(Float8E4M3Fn), 448.0, 1e6));
        assert!(holds(Relation::Rounded(Float8E4M3Fn), 0.0625, 0.0634));
        assert!(Relation::Plus(1.0).holds(1.0234375, BFloat16, 0.0234));
        assert!(!Relation::Plus(1.0).holds(1.03125, BFloat16, 0.0234));
        assert!(Relation::Plus(-1.0).holds(0.25, Float32, 1.25));
        assert!(Relation::Times(2.0, Float32).holds(0.2f32.into(), Float32, 0.1f32.into()));
        assert!(!Relation::Times(2.0, Float32).holds(0.2001, Float32, 0.1));
        assert!(Relation::Overflow.holds(3.0, Float16, 3.0));
        assert!(!Relation::Overflow.holds(f64::INFINITY, Float16, 3.0));
        assert!(!Relation::Overflow.holds(65504.0, Float16, 1e5));
    }

    #[test]
    fn a_narrower_dtype_has_fewer_digits() {
        assert!(is_narrower(Dtype::BFloat16, Dtype::Float32));
        assert!(is_narrower(Dtype::BFloat16, Dtype::Float16));
        assert!(!is_narrower(Dtype::BFloat16, Dtype::BFloat16));
        assert!(!is_narrower(Dtype::Float16, Dtype::BFloat16));
    }
}
