//! The loops, once for all instruction sets.
//!
//! A module that calls [`loops`] has these in scope, all but the constants functions with its
//! target features:
//!
//! | name | what it is |
//! |---|---|
//! | `Vector` | some `f64`s |
//! | `AT_ONCE` | lanes whose running sums of all kinds fit the registers |
//! | `PARTS` | vectors for so many lanes |
//! | `load::<FORM>(bytes)` | so many numbers as `[Vector; PARTS]` |
//! | `store(vectors)` | and back, as `[f64; AT_ONCE]` |
//! | `zero()`, `add`, `sub`, `fma(x, y, z) = x * y + z`, `abs`, `max`, `distance(x, y, x - y) = abs(x - y)` | of vectors; `max` is only ever asked about numbers that are not negative |
//! | `count::<A, B>(a_bytes, b_bytes, diffs)` | how many of so many numbers differ, found in either way |

use crate::kernel::lanes::Chunk;

// Measured on Zen 4 (AVX-512, one thread, in cache, medians of interleaved rounds, GB/s of both
// sides; memcpy 102), for pairs of float32:
// - these loops: 23.8, at two 512-bit operations in a cycle;
// - vectors of 256 bits in 32 registers instead: the same; float16 and float64 lose 13 and 28 %;
// - additions as multiply-adds by 1, to free the units that convert and find maxima: 3 % more,
//   not worth a constant that must be hidden from the compiler.
// On Zen 5 (AVX-512 of full width): 48, at 1.4 multiply-adds with three registers in a cycle, which is what
// it does on nothing else. Sums of chunks added up in vectors, with the largest number looked for
// only where a vector holds a larger one: 3 % more there, a third less for float64 with AVX2.
// Blocks that begin on a cache line: the same.
// AVX2 has half the registers: one sum that is spilled costs a third, hence `distance`.

/// See the module.
macro_rules! loops {
    ($($feature:tt)+) => {
        /// See [`Isa::pairs`](super::Isa::pairs).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn pairs<const A: Form, const B: Form>(
            a: &[u8],
            b: &[u8],
            totals: &mut Totals,
        ) -> Found {
            let [a_width, b_width] = [width(A), width(B)];
            let is_wide = A == FLOAT64 || B == FLOAT64;
            let mut found = Found::default();
            let mut magnitudes = [zero(); 3];
            let chunks = a.chunks(CHUNK * a_width).zip(b.chunks(CHUNK * b_width));
            for (index, (a, b)) in chunks.enumerate() {
                let mut differing = 0;
                let mut largest = zero();
                for first in (0..LANES).step_by(AT_ONCE) {
                    let mut sums = [[zero(); PARTS]; 6];
                    let a = a.chunks_exact(LANES * a_width);
                    let b = b.chunks_exact(LANES * b_width);
                    for (a, b) in a.zip(b) {
                        let a_bytes = &a[first * a_width..][..AT_ONCE * a_width];
                        let b_bytes = &b[first * b_width..][..AT_ONCE * b_width];
                        let (a, b) = (load::<A>(a_bytes), load::<B>(b_bytes));
                        let mut diffs = [zero(); PARTS];
                        for part in 0..PARTS {
                            let (a, b) = (a[part], b[part]);
                            let (diff, sum) = (sub(a, b), add(a, b));
                            let magnitude = distance(a, b, diff);
                            sums[0][part] = fma(a, a, sums[0][part]);
                            sums[1][part] = fma(b, b, sums[1][part]);
                            sums[2][part] = fma(a, b, sums[2][part]);
                            sums[3][part] = fma(diff, diff, sums[3][part]);
                            sums[4][part] = fma(diff, sum, sums[4][part]);
                            sums[5][part] = add(sums[5][part], magnitude);
                            largest = max(largest, magnitude);
                            diffs[part] = diff;
                            if is_wide {
                                magnitudes[0] = max(magnitudes[0], abs(a));
                                magnitudes[1] = max(magnitudes[1], abs(b));
                                magnitudes[2] = max(magnitudes[2], abs(sum));
                            }
                        }
                        differing += count::<A, B>(a_bytes, b_bytes, diffs);
                    }
                    totals.add(first, sums.map(|sums| store(sums)));
                }
                found.note(index, differing, largest_of(largest));
            }
            found.magnitudes = magnitudes.map(|largest| largest_of(largest));
            found
        }

        /// See [`Isa::squares`](super::Isa::squares).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn squares<const A: Form>(a: &[u8], lanes: &mut Lanes) -> f64 {
            let mut largest = zero();
            for a in a.chunks(CHUNK * width(A)) {
                let mut sums = [[zero(); PARTS]; LANES / AT_ONCE];
                for a in a.chunks_exact(LANES * width(A)) {
                    for (sums, a) in sums.iter_mut().zip(a.chunks_exact(AT_ONCE * width(A))) {
                        let a = load::<A>(a);
                        for part in 0..PARTS {
                            sums[part] = fma(a[part], a[part], sums[part]);
                            if A == FLOAT64 {
                                largest = max(largest, abs(a[part]));
                            }
                        }
                    }
                }
                for (index, sums) in sums.into_iter().enumerate() {
                    lanes.add(index * AT_ONCE, store(sums));
                }
            }
            largest_of(largest)
        }

        /// See [`Isa::cast_misses`](super::Isa::cast_misses).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn cast_misses<const FROM: Form, const TO: Form>(
            wide: &[u8],
            narrow: &[u8],
        ) -> u64 {
            casts::loop_over::<FROM, TO>(wide, narrow)
        }

        /// See [`Isa::beyond`](super::Isa::beyond).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn beyond<const A: Form, const B: Form>(
            a: &[u8],
            b: &[u8],
            closeness: &Closeness,
        ) -> (u64, Option<usize>) {
            closeness::loop_over::<A, B>(a, b, closeness)
        }

        /// See [`Isa::spread`](super::Isa::spread).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn spread<const A: Form, const B: Form>(a: &[u8], b: &[u8], counts: &mut Counts) {
            spread::loop_over::<A, B>(a, b, counts);
        }

        /// See [`Isa::decoded_pairs`](super::Isa::decoded_pairs).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn decoded_pairs(a: &Chunk, b: &Chunk, totals: &mut Totals) -> Found {
            pairs::<FLOAT64, FLOAT64>(bytes_of(a), bytes_of(b), totals)
        }

        /// See [`Isa::products`](super::Isa::products).
        #[target_feature($(enable = $feature),+)]
        pub(super) fn products(x: &Chunk, y: &Chunk, lanes: &mut Lanes) {
            lanes.add_products::<false>(x, y);
        }

        #[inline]
        #[target_feature($(enable = $feature),+)]
        fn largest_of(vector: Vector) -> f64 {
            let mut vectors = [zero(); PARTS];
            vectors[0] = vector;
            store(vectors).into_iter().fold(0.0, larger)
        }
    };
}

/// The numbers as the loops read them; the instruction sets are all of little-endian machines.
pub(super) fn bytes_of(chunk: &Chunk) -> &[u8] {
    // SAFETY: these are the bytes of the chunk, which are initialised and have no alignment.
    unsafe { std::slice::from_raw_parts(chunk.as_ptr().cast(), size_of::<Chunk>()) }
}
