//! Plain Rust: the definition of `lanes.rs` as it stands. On a machine without a fused
//! multiply-add this is slow, because each one is a call, of products that do not fit an `f64`.

use super::{CHUNK, FLOAT64, Form, Found, form_dtype, width};
use crate::kernel::casts;
use crate::kernel::closeness::{self, Closeness};
use crate::kernel::decode::decode_chunk;
use crate::kernel::exact::{Buckets, is_finite};
use crate::kernel::lanes::{Chunk, Lanes, Totals, larger, largest_magnitude};
use crate::kernel::spread::{self, Counts};

/// See [`Isa::pairs`](super::Isa::pairs).
pub(super) fn pairs<const A: Form, const B: Form>(
    a: &[u8],
    b: &[u8],
    totals: &mut Totals,
) -> Found {
    let mut found = Found::default();
    let mut values = [[0.0; CHUNK]; 2];
    let chunks = a.chunks(CHUNK * width(A)).zip(b.chunks(CHUNK * width(B)));
    for (index, (a, b)) in chunks.enumerate() {
        decode_chunk(form_dtype(A), a, &mut values[0]);
        decode_chunk(form_dtype(B), b, &mut values[1]);
        if A == FLOAT64 || B == FLOAT64 {
            totals.add_reals::<false>(&values);
        } else {
            totals.add_reals::<true>(&values);
        }
        let (differing, largest) = scan(&values);
        found.note(index, differing, largest);
        if A == FLOAT64 || B == FLOAT64 {
            let [a, b] = &values;
            let sums = std::array::from_fn(|i| a[i] + b[i]);
            for (magnitude, values) in found.magnitudes.iter_mut().zip([a, b, &sums]) {
                *magnitude = larger(*magnitude, largest_magnitude(values));
            }
        }
    }
    found
}

/// See [`Isa::cast_misses`](super::Isa::cast_misses).
pub(super) fn cast_misses<const FROM: Form, const TO: Form>(wide: &[u8], narrow: &[u8]) -> u64 {
    casts::loop_over::<FROM, TO>(wide, narrow)
}

/// See [`Isa::beyond`](super::Isa::beyond).
pub(super) fn beyond<const A: Form, const B: Form>(
    a: &[u8],
    b: &[u8],
    closeness: &Closeness,
) -> (u64, Option<usize>) {
    closeness::loop_over::<A, B>(a, b, closeness)
}

/// See [`Isa::spread`](super::Isa::spread).
pub(super) fn spread<const A: Form, const B: Form>(a: &[u8], b: &[u8], counts: &mut Counts) {
    spread::loop_over::<A, B>(a, b, counts);
}

/// See [`Isa::decoded_pairs`](super::Isa::decoded_pairs).
pub(super) fn decoded_pairs(a: &Chunk, b: &Chunk, totals: &mut Totals) -> Found {
    let values = [*a, *b];
    totals.add_reals::<false>(&values);
    let (differing, largest) = scan(&values);
    let mut found = Found::default();
    found.note(0, differing, largest);
    found
}

/// See [`Isa::squares`](super::Isa::squares).
pub(super) fn squares<const A: Form>(a: &[u8], lanes: &mut Lanes) -> f64 {
    let mut largest = 0.0;
    let mut values = [0.0; CHUNK];
    for a in a.chunks(CHUNK * width(A)) {
        decode_chunk(form_dtype(A), a, &mut values);
        if A == FLOAT64 {
            lanes.add_products::<false>(&values, &values);
            largest = larger(largest, largest_magnitude(&values));
        } else {
            lanes.add_products::<true>(&values, &values);
        }
    }
    largest
}

/// See [`Isa::products`](super::Isa::products).
pub(super) fn products(x: &Chunk, y: &Chunk, lanes: &mut Lanes) {
    lanes.add_products::<false>(x, y);
}

/// The number of differences that are not zero, and the largest magnitude.
#[inline(always)]
fn scan([a, b]: &[Chunk; 2]) -> (u64, f64) {
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

/// See [`Isa::exact_pairs`](super::Isa::exact_pairs).
pub(super) fn exact_pairs(a: &[u8], b: &[u8], buckets: &mut Buckets) -> Option<Found> {
    let mut found = Found::default();
    for (index, (a, b)) in a.chunks(2 * CHUNK).zip(b.chunks(2 * CHUNK)).enumerate() {
        let (mut differing, mut largest) = (0, 0.0);
        for (a, b) in a.as_chunks().0.iter().zip(b.as_chunks().0) {
            let [a, b] = [*a, *b].map(u16::from_le_bytes);
            if !is_finite(a) || !is_finite(b) {
                return None;
            }
            let magnitude = buckets.add(a, b);
            differing += u64::from(magnitude != 0.0);
            largest = larger(largest, magnitude);
        }
        found.note(index, differing, largest);
    }
    Some(found)
}

/// See [`Isa::exact_squares`](super::Isa::exact_squares).
pub(super) fn exact_squares(a: &[u8], buckets: &mut Buckets) -> bool {
    exact_pairs(a, a, buckets).is_some()
}
