//! Blocks of plain finite real numbers with squares inside the range of `f64`, which is nearly
//! every block of a checkpoint. A block that turns out to hold a NaN or an infinity is given back
//! for the [general](super::general) path, which gives the same bits for all others.

use super::Side;
use super::decode::{decode_chunk, reals_per_element};
use super::lanes::{CHUNK, Chunk, Totals, larger};
use super::stats::Stats;
use crate::dtype::Dtype;

/// Whether elements are real and exact in `f64`, with squares inside its range.
pub(super) fn is_narrow(dtype: Dtype) -> bool {
    has_bounded_squares(dtype) && !matches!(dtype, Dtype::Complex64 | Dtype::Int64 | Dtype::UInt64)
}

/// Whether all finite values have squares inside the range of `f64`.
pub(super) fn has_bounded_squares(dtype: Dtype) -> bool {
    !matches!(dtype, Dtype::Float64 | Dtype::Complex128)
}

/// Compares two blocks of [narrow](is_narrow) dtypes; `None` if a value is not finite.
pub(super) fn compare(a: Side<'_>, b: Side<'_>, first: u64) -> Option<Stats> {
    let mut stats = Stats { count: a.count(), ..Stats::default() };
    let mut totals = Totals::default();
    let mut values = [[0.0; CHUNK]; 2];
    let mut start = first;
    for (a_bytes, b_bytes) in a.chunks(CHUNK).zip(b.chunks(CHUNK)) {
        decode_chunk(a.dtype, a_bytes, &mut values[0]);
        decode_chunk(b.dtype, b_bytes, &mut values[1]);
        totals.add_reals(&values);
        let (differing, largest) = survey(&values);
        if differing > 0 {
            stats.note_differing(start, differing, || diffs(&values).position(|diff| diff != 0.0));
            stats.note_max_abs(start, largest, || {
                diffs(&values).position(|diff| diff.abs() == largest)
            });
        }
        start += CHUNK as u64;
    }
    stats.sums = totals.sums([0; 4]);
    stats.sums.are_finite().then_some(stats)
}

/// What the other paths give for two bitwise equal blocks, from one of them; `None` if a value is
/// not finite. The dtype [has bounded squares](has_bounded_squares).
pub(super) fn compare_equal(a: Side<'_>) -> Option<Stats> {
    let mut totals = Totals::default();
    let mut x = [0.0; CHUNK];
    for bytes in a.chunks(CHUNK / reals_per_element(a.dtype)) {
        decode_chunk(a.dtype, bytes, &mut x);
        totals.products.add_products(&x, &x);
    }
    totals.squares = [totals.products; 2];
    let sums = totals.sums([0; 4]);
    sums.are_finite().then_some(Stats { count: a.count(), sums, ..Stats::default() })
}

/// The number of differences that are not zero, and the largest magnitude.
#[inline(always)]
fn survey([a, b]: &[Chunk; 2]) -> (u64, f64) {
    // Neither depends on the order, so this is as many lanes as the registers of any machine hold.
    const WIDTH: usize = 4;
    let mut differing = [0; WIDTH];
    let mut largest = [0.0; WIDTH];
    for (a, b) in a.as_chunks::<WIDTH>().0.iter().zip(b.as_chunks::<WIDTH>().0) {
        for lane in 0..WIDTH {
            let diff = a[lane] - b[lane];
            differing[lane] += u64::from(diff != 0.0);
            largest[lane] = larger(largest[lane], diff.abs());
        }
    }
    (differing.iter().sum(), largest.into_iter().fold(0.0, larger))
}

fn diffs([a, b]: &[Chunk; 2]) -> impl Iterator<Item = f64> {
    a.iter().zip(b).map(|(a, b)| a - b)
}
