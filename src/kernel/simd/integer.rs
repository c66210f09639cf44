//! The loops over two blocks of `bfloat16` in integers, once for all instruction sets.
//!
//! Nearly all values of a stretch are within 15 binades of the largest: each is an integer of
//! [`SPAN`] + 8 = 22 bits times the unit of a **window**, kept as two limbs of 11 bits in 16-bit
//! lanes. Sums of products of limbs are exact in 32-bit lanes for a **stretch** of 64 vectors
//! (where a lane adds up two products at a time, 128 where one), and go
//! to the buckets of `exact.rs` after it. Of nine such sums, three each of `|a|^2`, `|b|^2` and `|a - b|^2`, all
//! others follow. What is outside of the window, NaN and infinities included, is noticed by its
//! shift, set aside and added element by element.
//!
//! A module that calls [`integer_loops`] has these in scope, all but the types functions with its
//! target features:
//!
//! | name | what it is |
//! |---|---|
//! | `Words`, `WORDS` | 16-bit lanes, and how many |
//! | `Ints` | half as many 32-bit lanes |
//! | `words(bytes)`, `every(word)` | loaded, or all the same |
//! | `ints()` | zeros |
//! | `shifts(x, base)` | `((2 * x) - base) >> 8`, unsigned: exponents less the one of the window |
//! | `limbs(x, shifts)` | low and high limb of the magnitudes; 0 where the shift is above [`SPAN`] |
//! | `is_above(shifts, shifts)` | whether any is above [`SPAN`] |
//! | `outside(x, shifts)` | a bit for each that is, of words other than plus and minus 0 |
//! | `without(x, bits)` | 0 in the place of words with a bit |
//! | `differing(x, y)` | how many words differ |
//! | `differing_values(x, y)` | the same, but 0 equals minus 0 |
//! | `differences(x, y, limbs, limbs)` | limbs of `a - b` or `b - a`, each of 12 bits and a sign |
//! | `dot(sum, x, y)` | adds products of neighbours |
//! | `magnitudes(limbs)` | absolute values, as an array of `Ints` |
//! | `add_ints`, `max_ints`, `total(ints)`, `largest(ints)` | |
//! | `STRETCH` | bytes of a stretch, no less than a chunk |

use super::{CHUNK, Found};
use crate::kernel::exact::{Buckets, UNIT, is_finite};
use crate::kernel::lanes::larger;
use crate::kernel::sum::power_of_two;

// Measured on Zen 4 (AVX-512, one thread, in cache, medians of interleaved rounds, GB/s of both
// sides), for pairs of bfloat16:
// - products and differences in f64, as for other dtypes: 9.3;
// - the same with f64 made by integer shifts and one multiplication by 2^896 instead of the
//   conversion from f32: 9.1, and infinities would need a check of their own;
// - these integers, left to the compiler: 4.7. It turned the dot product into two instructions,
//   put selections after shifts and masked additions, and spilled; a call for what is set aside
//   saved all registers. Hence `asm!` in `avx512.rs`, and a list that is worked off afterwards;
// - these integers as they are: 14.3 to 15.4.
// Sums of products in f32 (exact one by one) fail: they round as soon as exponents are apart, and
// splitting off the error takes more operations than the conversion to f64.

/// The largest shift of a significand in a window.
pub(super) const SPAN: u16 = 14;

/// Elements set aside in a stretch from where on another window is chosen for the next.
const MANY: usize = 8;

/// The exponent that a window begins with, to hold the largest finite numbers of a chunk.
pub(super) fn window(a: &[u8], b: &[u8]) -> u16 {
    let largest = |bytes: &[u8]| {
        let words = bytes.as_chunks().0.iter().map(|word| u16::from_le_bytes(*word) & 0x7fff);
        words.fold(0, |largest, word| if word > largest { word } else { largest })
    };
    // From 1 on, as denormals are no multiples of a significand with a leading bit.
    (largest(a).max(largest(b)).min(0x7f7f) >> 7).saturating_sub(SPAN).max(1)
}

/// Elements that are not left to the vectors.
pub(super) struct Aside<'a> {
    buckets: &'a mut Buckets,
    pub(super) is_finite: bool,
    /// Place in the stretch, and which of so many elements; the first `count` hold something.
    vectors: [(usize, u32); VECTORS],
    count: usize,
}

/// The most vectors of a stretch.
const VECTORS: usize = 128;

/// The sums of a stretch: of products of limbs, low with low, low with high, high with high, for
/// a, b and `a - b`; of magnitudes of differences; and the largest of them.
pub(super) struct Integers {
    pub(super) products: [[i64; 3]; 3],
    pub(super) magnitudes: i64,
    pub(super) largest: u32,
}

impl<'a> Aside<'a> {
    pub(super) fn new(buckets: &'a mut Buckets) -> Self {
        Self { buckets, is_finite: true, vectors: [(0, 0); VECTORS], count: 0 }
    }

    /// Remembers the elements with a bit from element `at` on.
    #[inline(always)]
    pub(super) fn put(&mut self, at: usize, bits: u32) {
        if let Some(place) = self.vectors.get_mut(self.count) {
            *place = (at, bits);
            self.count += 1;
        }
    }

    /// Adds the elements that are remembered, and forgets them. Returns their number and the
    /// largest difference.
    fn take(&mut self, a: &[u8], b: &[u8]) -> (usize, f64) {
        let (mut count, mut largest) = (0, 0.0);
        let (a, b) = (a.as_chunks().0, b.as_chunks().0);
        for (at, mut bits) in self.vectors[..self.count].iter().copied() {
            while bits != 0 {
                let index = at + bits.trailing_zeros() as usize;
                let [a, b] = [a[index], b[index]].map(u16::from_le_bytes);
                if is_finite(a) && is_finite(b) {
                    largest = larger(largest, self.buckets.add(a, b));
                } else {
                    self.is_finite = false;
                }
                bits &= bits - 1;
                count += 1;
            }
        }
        self.count = 0;
        (count, largest)
    }

    /// Closes the stretch that begins at byte `at`. Returns whether another window is to be
    /// chosen for the next.
    pub(super) fn close(
        &mut self,
        base: u16,
        (at, a, b): (usize, &[u8], &[u8]),
        (differing, integers): (u64, &Integers),
        found: &mut Found,
    ) -> bool {
        let place = usize::from(base);
        let [aa, bb, dd] =
            integers.products.map(|[low, cross, high]| low + (cross << 12) + (high << 22));
        self.buckets.squares[0][place] += aa;
        self.buckets.squares[1][place] += bb;
        self.buckets.products[2 * place] += (aa + bb - dd) / 2;
        self.buckets.magnitudes[place] += integers.magnitudes;
        let largest = f64::from(integers.largest) * power_of_two(i32::from(base) - UNIT);
        let (count, largest_aside) = self.take(a, b);
        found.note(at / (2 * CHUNK), differing, larger(largest, largest_aside));
        count > MANY
    }
}

/// See the module.
macro_rules! integer_loops {
    ($($feature:tt)+) => {
        /// See [`Isa::exact_pairs`](super::Isa::exact_pairs).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn exact_pairs(a: &[u8], b: &[u8], buckets: &mut Buckets) -> Option<Found> {
            let mut found = Found::default();
            let mut aside = Aside::new(buckets);
            let mut known_window = None;
            for (index, (a, b)) in a.chunks(STRETCH).zip(b.chunks(STRETCH)).enumerate() {
                let base = known_window.unwrap_or_else(|| window(a, b));
                let base_words = every(base << 8);
                let mut differing_words = 0;
                let mut products = [[ints(); 3]; 3];
                let mut sum = ints();
                let mut maximum = ints();
                let vectors = a.chunks_exact(2 * WORDS).zip(b.chunks_exact(2 * WORDS));
                for (vector, (a, b)) in vectors.enumerate() {
                    let (mut a, mut b) = (words(a), words(b));
                    let (mut a_shifts, mut b_shifts) =
                        (shifts(a, base_words), shifts(b, base_words));
                    if is_above(a_shifts, b_shifts) {
                        differing_words += differing_values(a, b);
                        let outside = outside(a, a_shifts) | outside(b, b_shifts);
                        if outside != 0 {
                            aside.put(vector * WORDS, outside);
                            (a, b) = (without(a, outside), without(b, outside));
                            (a_shifts, b_shifts) = (shifts(a, base_words), shifts(b, base_words));
                        }
                    } else {
                        differing_words += differing(a, b);
                    }
                    let (a_limbs, b_limbs) = (limbs(a, a_shifts), limbs(b, b_shifts));
                    let diffs = differences(a, b, a_limbs, b_limbs);
                    let all = [a_limbs, b_limbs, diffs];
                    for side in 0..3 {
                        let [low, high] = all[side];
                        products[side][0] = dot(products[side][0], low, low);
                        products[side][1] = dot(products[side][1], low, high);
                        products[side][2] = dot(products[side][2], high, high);
                    }
                    for magnitudes in magnitudes(diffs) {
                        sum = add_ints(sum, magnitudes);
                        maximum = max_ints(maximum, magnitudes);
                    }
                }
                let integers = Integers {
                    products: products.map(|sums| sums.map(|sum| total(sum))),
                    magnitudes: total(sum),
                    largest: largest(maximum),
                };
                let stretch = (index * STRETCH, a, b);
                let is_many = aside.close(base, stretch, (differing_words, &integers), &mut found);
                known_window = (!is_many).then_some(base);
            }
            aside.is_finite.then_some(found)
        }

        /// See [`Isa::exact_squares`](super::Isa::exact_squares).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn exact_squares(a: &[u8], buckets: &mut Buckets) -> bool {
            let mut aside = Aside::new(buckets);
            let mut known_window = None;
            for a in a.chunks(STRETCH) {
                let base = known_window.unwrap_or_else(|| window(a, a));
                let base_words = every(base << 8);
                let mut products = [ints(); 3];
                for (vector, a) in a.chunks_exact(2 * WORDS).enumerate() {
                    let mut a = words(a);
                    let mut a_shifts = shifts(a, base_words);
                    if is_above(a_shifts, a_shifts) {
                        let outside = outside(a, a_shifts);
                        if outside != 0 {
                            aside.put(vector * WORDS, outside);
                            a = without(a, outside);
                            a_shifts = shifts(a, base_words);
                        }
                    }
                    let [low, high] = limbs(a, a_shifts);
                    products[0] = dot(products[0], low, low);
                    products[1] = dot(products[1], low, high);
                    products[2] = dot(products[2], high, high);
                }
                let products = products.map(|sum| total(sum));
                let products = [products, products, [0; 3]];
                let integers = Integers { products, magnitudes: 0, largest: 0 };
                let mut found = Found::default();
                let is_many = aside.close(base, (0, a, a), (0, &integers), &mut found);
                known_window = (!is_many).then_some(base);
            }
            aside.is_finite
        }
    };
}
