//! The kernel: the statistics of two dense blocks of elements, the same bits on every machine.
//!
//! A tensor is compared in blocks of [`BLOCK`] elements of its logical row-major order;
//! [`compare_block`] gives the [`Stats`] of one, [`Stats::merge`] folds them in block order. The
//! order of all additions is fixed (see `lanes.rs`) or does not matter, so that neither the number of threads nor
//! the layout of the files nor the instruction set shows in a result.
//!
//! The sums of `bfloat16` pairs are exact (see `exact.rs`). Other values are decoded to `f64`, which is exact for every dtype but 64-bit integers. The sums
//! of a tensor of any size are within 2^-44 of the exact ones, relative to the sum of
//! magnitudes of their terms.

mod angle;
mod casts;
mod closeness;
mod decode;
mod exact;
mod fingerprint;
mod general;
mod lanes;
mod noise;
mod plain;
mod relation;
mod simd;
mod spread;
mod stats;
mod sum;
#[cfg(test)]
mod tests;
mod transpose;

pub use angle::ExactSums;
pub use closeness::{Beyond, Closeness, count_beyond};
pub use fingerprint::{Fingerprints, PlaceWeights, scrambled};
pub use noise::{NOISE_STEPS, is_noise};
pub use relation::{Relation, is_narrower};
pub use simd::Isa;
pub use spread::Spread;
pub use stats::Stats;
pub use transpose::transpose;

use crate::base::dtype::Dtype;
use plain::Equality;

/// Elements of a block: consecutive ones of a tensor, from a multiple of this on. The last block
/// of a tensor may be shorter.
pub const BLOCK: usize = 1 << 17;

/// Running sums kept side by side within a block: number `i` is added to lane `i % LANES`.
pub const LANES: usize = 16;

/// One side's elements of a block.
#[derive(Debug, Clone, Copy)]
pub struct DenseBlock<'a> {
    /// Their type.
    pub dtype: Dtype,
    /// Their bytes, dense and little-endian.
    pub bytes: &'a [u8],
}

impl<'a> DenseBlock<'a> {
    /// The first element as text that reads back to the same value. There must be one.
    #[must_use]
    pub fn element_text(self) -> String {
        decode::element_text(self.dtype, self.bytes)
    }

    /// The elements as `f64`, two numbers for a complex one; `out` has room for exactly those.
    pub fn widen(self, out: &mut [f64]) {
        decode::decode(self.dtype, self.bytes, out);
    }

    /// Position of the first element that is NaN or infinite.
    #[must_use]
    pub fn first_not_finite(self) -> Option<u64> {
        const STEP: usize = 512;
        let numbers = decode::reals_per_element(self.dtype);
        let mut values = [0.0; STEP];
        for (part, first) in self.chunks(STEP / numbers).zip((0..).step_by(STEP / numbers)) {
            let values = &mut values[..part.len() / size(self.dtype) * numbers];
            decode::decode(self.dtype, part, values);
            if let Some(position) = values.iter().position(|value| !value.is_finite()) {
                return Some(first + (position / numbers) as u64);
            }
        }
        None
    }

    /// Number of elements.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a block is never asked whether it is empty")]
    pub fn len(self) -> usize {
        self.bytes.len() / size(self.dtype)
    }

    /// Its elements, so many at a time.
    pub fn parts(self, elements: usize) -> impl Iterator<Item = Self> {
        self.chunks(elements).map(move |bytes| Self { bytes, ..self })
    }

    fn count(self) -> u64 {
        (self.bytes.len() / size(self.dtype)) as u64
    }

    fn is_whole(self) -> bool {
        self.bytes.len().is_multiple_of(size(self.dtype))
    }

    /// The bytes of `elements` elements at a time.
    fn chunks(self, elements: usize) -> std::slice::Chunks<'a, u8> {
        self.bytes.chunks(elements * size(self.dtype))
    }
}

/// The dtype of the same elements with every number an `f64`, and how many numbers an element is.
#[must_use]
pub fn widened(dtype: Dtype) -> (Dtype, usize) {
    match decode::reals_per_element(dtype) {
        1 => (Dtype::Float64, 1),
        numbers => (Dtype::Complex128, numbers),
    }
}

/// The number of this dtype that is nearest to `value`, of two the even one; for an integer dtype the value itself.
#[must_use]
pub fn rounded(dtype: Dtype, value: f64) -> f64 {
    decode::rounded(dtype, value)
}

/// Number of elements of `narrow` that are not those of `wide` rounded to its dtype, as [`Stats::not_rounded`] has it of
/// the two: all that can be rounded are floats. The blocks are as those of [`compare_block`].
#[must_use]
pub fn not_rounded(narrow: DenseBlock<'_>, wide: DenseBlock<'_>) -> u64 {
    if casts::are_casts(narrow.dtype, wide.dtype) {
        casts::misses(Isa::best(), wide, narrow)
    } else {
        compare_block(narrow, wide, 0).not_rounded()[0]
    }
}

#[expect(clippy::cast_possible_truncation, reason = "at most 16")]
fn size(dtype: Dtype) -> usize {
    dtype.size() as usize
}

/// Compares the same elements of two tensors, at most [`BLOCK`] of them; `first` is the flat
/// index of the first one in the tensor.
///
/// Both sides hold the same number of whole elements: that is for the caller to see to.
///
/// ```
/// use ckptcmp::base::dtype::Dtype;
/// use ckptcmp::kernel::{DenseBlock, compare_block};
/// let a = DenseBlock { dtype: Dtype::UInt8, bytes: &[3, 0, 9] };
/// let b = DenseBlock { dtype: Dtype::Int16, bytes: &[3, 0, 4, 0, 9, 0] };
/// let stats = compare_block(a, b, 0);
/// assert_eq!((stats.l2(), stats.max_abs_index()), (Some(4.0), Some(1)));
/// ```
#[must_use]
pub fn compare_block(a: DenseBlock<'_>, b: DenseBlock<'_>, first: u64) -> Stats {
    compare_block_with(Isa::best(), a, b, first)
}

/// [`compare_block`] by the instructions named, for tests and benchmarks: the result is the same.
#[must_use]
pub fn compare_block_with(isa: Isa, a: DenseBlock<'_>, b: DenseBlock<'_>, first: u64) -> Stats {
    debug_assert_eq!(a.count(), b.count(), "elements on both sides");
    debug_assert!(a.is_whole() && b.is_whole(), "whole elements");
    debug_assert!(a.count() <= BLOCK as u64);
    let equality = match a.dtype == b.dtype {
        true => plain::compare_equal(isa, a, b),
        false => Equality::Different,
    };
    let (is_identical, quick) = match equality {
        Equality::Equal(stats) => (true, stats),
        Equality::Different if plain::is_plain(a.dtype) && plain::is_plain(b.dtype) => {
            (false, plain::compare(isa, a, b, first))
        }
        Equality::Different => (false, None),
    };
    let stats = quick.unwrap_or_else(|| general::compare(isa, a, b, first));
    let differing = stats.differing - stats.both_nan;
    let not_rounded = match differing {
        0 => [0; 2],
        _ if casts::are_casts(a.dtype, b.dtype) => casts::not_rounded(isa, a, b, differing),
        _ => [differing; 2],
    };
    Stats { is_identical, not_rounded, ..stats }
}
