//! Is every difference as small as rounding makes it?

use super::decode::{self, FloatFormat};
use super::general::Pair;
use super::simd::{BFLOAT16, FLOAT16, FLOAT32, form};
use super::spread::Scale;
use super::{DenseBlock, stats::Stats};

/// Most steps from one number of the coarser dtype to the next that a difference may have to be noise.
pub const NOISE_STEPS: u64 = 2;

/// Returns whether all elements of a block are floats, finite, and at most [`NOISE_STEPS`] apart, as
/// [`Spread::max_ulp`](super::Spread::max_ulp) counts them; `stats` are the block's statistics.
///
/// Where the sums prove that some are farther apart no element is looked at again, and elsewhere no more than up to the first of
/// them.
#[must_use]
pub fn is_noise(a: DenseBlock<'_>, b: DenseBlock<'_>, stats: &Stats) -> bool {
    let formats = [a, b].map(|side| decode::float_format(side.dtype));
    let [Some(a_format), Some(b_format)] = formats else { return false };
    if stats.differing == 0 {
        return true;
    }
    let coarser =
        if a_format.mantissa_bits <= b_format.mantissa_bits { a_format } else { b_format };
    if !stats.is_finite() || is_too_far(stats, coarser) {
        return false;
    }
    match form(a.dtype) {
        Some(form) if a.dtype == b.dtype => match form {
            BFLOAT16 | FLOAT16 => is_near::<2>(a, b, is_far16),
            FLOAT32 => is_near::<4>(a, b, is_far32),
            _ => is_near::<8>(a, b, is_far64),
        },
        // One side is the other, rounded: no step at all.
        _ if a.dtype != b.dtype && stats.not_rounded.contains(&0) => true,
        _ => is_near_decoded(a, b),
    }
}

/// Returns whether the norms alone tell that some difference is larger: no element is farther from its partner than two of
/// its units and what rounding adds, so that neither are all of them together.
fn is_too_far(stats: &Stats, format: FloatFormat) -> bool {
    let (Some(distance), Some(a), Some(b)) = (stats.l2(), stats.norm_a(), stats.norm_b()) else {
        return false;
    };
    let unit = 2f64.powi(-format.mantissa_bits);
    let smallest = 2f64.powi(format.smallest_exponent());
    distance > 4.0 * (unit * (a + b) + smallest * (stats.count as f64).sqrt())
}

/// Elements between two looks at whether to go on, few enough for narrow counters.
const RUN: usize = 128;

#[inline(always)]
fn is_near<const WIDTH: usize>(
    a: DenseBlock<'_>,
    b: DenseBlock<'_>,
    is_far: impl Fn([u8; WIDTH], [u8; WIDTH]) -> bool,
) -> bool {
    let [a, b] = [a, b].map(|side| side.bytes.as_chunks::<WIDTH>().0);
    a.chunks(RUN).zip(b.chunks(RUN)).all(|(a, b)| {
        let pairs = a.iter().zip(b);
        pairs.fold(0u16, |far, (&a, &b)| far + u16::from(is_far(a, b))) == 0
    })
}

/// Defines a function that tells whether two finite numbers of a width are more than [`NOISE_STEPS`] apart. The number of one
/// among all of its format, counted from zero, is its magnitude with its sign; that of the largest finite one is so far from the
/// end of the integers that a difference which wraps around is never a small one.
macro_rules! is_far {
    ($name:ident, $signed:ty, $width:literal) => {
        #[inline(always)]
        fn $name(a: [u8; $width], b: [u8; $width]) -> bool {
            #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "2")]
            const STEPS: $signed = NOISE_STEPS as $signed;
            let [a, b] = [a, b].map(|bytes| {
                let bits = <$signed>::from_le_bytes(bytes);
                // All ones below zero: the negative of the magnitude by its complement.
                let sign = bits >> (<$signed>::BITS - 1);
                ((bits & <$signed>::MAX) ^ sign).wrapping_sub(sign)
            });
            a.wrapping_sub(b).wrapping_add(STEPS).cast_unsigned() > (2 * STEPS).cast_unsigned()
        }
    };
}

is_far!(is_far16, i16, 2);
is_far!(is_far32, i32, 4);
is_far!(is_far64, i64, 8);

fn is_near_decoded(a: DenseBlock<'_>, b: DenseBlock<'_>) -> bool {
    let scale = Scale::coarser(a.dtype, b.dtype);
    let mut pair = Pair::new(a, b);
    (0..pair.chunks()).all(|index| {
        let elements = pair.load(index, [false; 2]);
        (0..elements).flat_map(|element| pair.reals(element)).all(|at| {
            scale.steps(pair.values[0][at], pair.values[1][at], pair.diff[at]) <= NOISE_STEPS
        })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::dtype::Dtype;
    use crate::kernel::{Spread, compare_block};

    const DTYPES: [Dtype; 8] = [
        Dtype::BFloat16,
        Dtype::Float16,
        Dtype::Float32,
        Dtype::Float64,
        Dtype::Complex64,
        Dtype::Float8E4M3Fn,
        Dtype::Float8E5M2,
        Dtype::Int16,
    ];

    proptest! {
        /// The codes of a and b are a few steps apart, so that both answers come up.
        #[test]
        fn noise_is_what_the_largest_step_says(
            codes in prop::collection::vec(any::<u64>(), 1..40),
            steps in prop::collection::vec(0u64..4, 40),
            a_dtype in 0..DTYPES.len(),
            b_dtype in 0..DTYPES.len(),
            is_one_dtype in any::<bool>(),
        ) {
            let a_dtype = DTYPES[a_dtype];
            let b_dtype = if is_one_dtype { a_dtype } else { DTYPES[b_dtype] };
            let bytes = |dtype: Dtype, code: u64| {
                let size = usize::try_from(dtype.size()).unwrap_or(0);
                let code = u128::from(code) | u128::from(code) << 64;
                code.to_le_bytes()[..size].to_vec()
            };
            let mut sides = [Vec::new(), Vec::new()];
            for (code, step) in codes.iter().zip(&steps) {
                sides[0].extend(bytes(a_dtype, *code));
                sides[1].extend(bytes(b_dtype, code.wrapping_add(*step)));
            }
            let block = |side: usize, dtype| DenseBlock { dtype, bytes: &sides[side] };
            let [a, b] = [block(0, a_dtype), block(1, b_dtype)];
            let stats = compare_block(a, b, 0);
            let is_float = [a_dtype, b_dtype].iter().all(|dtype| *dtype != Dtype::Int16);
            let is_small = Spread::of_block(a, b, &stats).max_ulp() <= NOISE_STEPS;
            let expected = is_float && (stats.differing() == 0 || stats.is_finite() && is_small);
            prop_assert_eq!(is_noise(a, b, &stats), expected, "{:?} {:?}", a_dtype, b_dtype);
        }
    }

    #[test]
    fn two_steps_are_noise_and_three_are_not() {
        let near = |a: &[f32], b: &[f32]| {
            let [a, b] = [a, b]
                .map(|side| side.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
            let block = |bytes| DenseBlock { dtype: Dtype::Float32, bytes };
            let (a, b) = (block(&a[..]), block(&b[..]));
            is_noise(a, b, &compare_block(a, b, 0))
        };
        let steps = |count: u32| f32::from_bits(1.5f32.to_bits() + count);
        assert!(near(&[1.5, -2.0], &[steps(2), -2.0]));
        assert!(!near(&[1.5, -2.0], &[steps(3), -2.0]));
        assert!(near(&[0.0, f32::from_bits(1)], &[-0.0, -f32::from_bits(1)]));
        assert!(!near(&[1.0, 0.0], &[1.0, 1e-30]));
    }
}
