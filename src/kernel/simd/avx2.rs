//! AVX2 with FMA and F16C.

use std::arch::x86_64::{
    __m256, __m256d, __m256i, _CMP_NEQ_UQ, _mm_castsi128_ps, _mm_cvtepu16_epi32, _mm_cvtph_ps,
    _mm_loadl_epi64, _mm_loadu_ps, _mm_loadu_si128, _mm_slli_epi32, _mm256_abs_epi32,
    _mm256_add_epi16, _mm256_add_epi32, _mm256_add_pd, _mm256_and_si256, _mm256_andnot_pd,
    _mm256_andnot_si256, _mm256_castsi256_ps, _mm256_cmp_pd, _mm256_cmp_ps, _mm256_cmpeq_epi16,
    _mm256_cmpgt_epi16, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_pd, _mm256_fmadd_pd,
    _mm256_loadu_pd, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_max_epi32,
    _mm256_max_epu16, _mm256_max_pd, _mm256_min_epu16, _mm256_movemask_epi8, _mm256_movemask_pd,
    _mm256_movemask_ps, _mm256_mulhi_epu16, _mm256_mullo_epi16, _mm256_or_si256,
    _mm256_packs_epi16, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_pd, _mm256_setr_epi16,
    _mm256_setr_epi64x, _mm256_setzero_pd, _mm256_setzero_si256, _mm256_shuffle_epi8,
    _mm256_sign_epi16, _mm256_slli_epi16, _mm256_slli_epi32, _mm256_srli_epi16, _mm256_storeu_pd,
    _mm256_storeu_si256, _mm256_sub_epi16, _mm256_sub_pd, _mm256_subs_epu16, _mm256_testz_si256,
    _mm256_unpackhi_epi16, _mm256_unpacklo_epi16, _mm256_xor_si256,
};

use super::body::bytes_of;
use super::integer::{Aside, Integers, SPAN, window};
use super::{BFLOAT16, CHUNK, FLOAT16, FLOAT32, FLOAT64, Form, Found, width};
use crate::kernel::LANES;
use crate::kernel::casts;
use crate::kernel::closeness::{self, Closeness};
use crate::kernel::exact::Buckets;
use crate::kernel::lanes::{Chunk, Lanes, Totals, larger};
use crate::kernel::spread::{self, Counts};

const AT_ONCE: usize = 8;
const PARTS: usize = 2;
type Vector = __m256d;

with_avx2!(loops);

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load<const FORM: Form>(bytes: &[u8]) -> [Vector; PARTS] {
    let (low, high) = bytes.split_at(4 * width(FORM));
    [four::<FORM>(low), four::<FORM>(high)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn four<const FORM: Form>(bytes: &[u8]) -> Vector {
    assert!(bytes.len() == 4 * width(FORM));
    let at = bytes.as_ptr();
    match FORM {
        BFLOAT16 => {
            // SAFETY: 4 numbers of 2 bytes, asserted above.
            let bits = unsafe { _mm_loadl_epi64(at.cast()) };
            let bits = _mm_slli_epi32::<16>(_mm_cvtepu16_epi32(bits));
            _mm256_cvtps_pd(_mm_castsi128_ps(bits))
        }
        FLOAT16 => {
            // SAFETY: 4 numbers of 2 bytes, asserted above.
            let bits = unsafe { _mm_loadl_epi64(at.cast()) };
            _mm256_cvtps_pd(_mm_cvtph_ps(bits))
        }
        FLOAT32 => {
            // SAFETY: 4 numbers of 4 bytes, asserted above.
            _mm256_cvtps_pd(unsafe { _mm_loadu_ps(at.cast()) })
        }
        _ => {
            // SAFETY: 4 numbers of 8 bytes, asserted above.
            unsafe { _mm256_loadu_pd(at.cast()) }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(vectors: [Vector; PARTS]) -> [f64; AT_ONCE] {
    let mut out = [0.0; AT_ONCE];
    for (out, vector) in out.as_chunks_mut::<4>().0.iter_mut().zip(vectors) {
        // SAFETY: `out` is 4 numbers of 8 bytes.
        unsafe { _mm256_storeu_pd(out.as_mut_ptr(), vector) };
    }
    out
}

#[inline]
#[target_feature(enable = "avx2")]
fn zero() -> Vector {
    _mm256_setzero_pd()
}

#[inline]
#[target_feature(enable = "avx2")]
fn add(x: Vector, y: Vector) -> Vector {
    _mm256_add_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx2")]
fn sub(x: Vector, y: Vector) -> Vector {
    _mm256_sub_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn fma(x: Vector, y: Vector, z: Vector) -> Vector {
    _mm256_fmadd_pd(x, y, z)
}

#[inline]
#[target_feature(enable = "avx2")]
fn abs(x: Vector) -> Vector {
    _mm256_andnot_pd(_mm256_set1_pd(-0.0), x)
}

/// Without the constant of `abs`, for which no register is left in the loop over pairs.
#[inline]
#[target_feature(enable = "avx2")]
fn distance(x: Vector, y: Vector, diff: Vector) -> Vector {
    max(diff, sub(y, x))
}

#[inline]
#[target_feature(enable = "avx2")]
fn max(x: Vector, y: Vector) -> Vector {
    _mm256_max_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,popcnt")]
fn count<const A: Form, const B: Form>(a: &[u8], b: &[u8], diffs: [Vector; PARTS]) -> u64 {
    if A == FLOAT64 || B == FLOAT64 {
        let low = _mm256_movemask_pd(_mm256_cmp_pd::<_CMP_NEQ_UQ>(diffs[0], zero()));
        let high = _mm256_movemask_pd(_mm256_cmp_pd::<_CMP_NEQ_UQ>(diffs[1], zero()));
        return u64::from(low.count_ones() + high.count_ones());
    }
    let differ = _mm256_cmp_ps::<_CMP_NEQ_UQ>(floats::<A>(a), floats::<B>(b));
    u64::from(_mm256_movemask_ps(differ).count_ones())
}

/// Eight numbers of a form that `f32` holds.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn floats<const FORM: Form>(bytes: &[u8]) -> __m256 {
    assert!(bytes.len() == 8 * width(FORM) && width(FORM) <= 4);
    let at = bytes.as_ptr();
    match FORM {
        BFLOAT16 => {
            // SAFETY: 8 numbers of 2 bytes, asserted above.
            let bits = unsafe { _mm_loadu_si128(at.cast()) };
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
        }
        FLOAT16 => {
            // SAFETY: 8 numbers of 2 bytes, asserted above.
            _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
        }
        _ => {
            // SAFETY: 8 numbers of 4 bytes, asserted above.
            unsafe { _mm256_loadu_ps(at.cast()) }
        }
    }
}

const WORDS: usize = 16;
const STRETCH: usize = 64 * 2 * WORDS;
type Words = __m256i;
type Ints = __m256i;

/// The bytes of `2^0` to `2^7`.
const LOW: i64 = 0x8040_2010_0804_0201_u64.cast_signed();
/// And for `2^8` to `2^14` the upper ones.
const HIGH: i64 = 0x0040_2010_0804_0201;

with_avx2!(integer_loops);

#[inline]
#[target_feature(enable = "avx2")]
fn words(bytes: &[u8]) -> Words {
    assert!(bytes.len() == 2 * WORDS);
    // SAFETY: 16 words of 2 bytes, asserted above.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn every(word: u16) -> Words {
    _mm256_set1_epi16(word.cast_signed())
}

#[inline]
#[target_feature(enable = "avx2")]
fn ints() -> Ints {
    _mm256_setzero_si256()
}

#[inline]
#[target_feature(enable = "avx2")]
fn shifts(x: Words, base: Words) -> Words {
    _mm256_srli_epi16::<8>(_mm256_sub_epi16(_mm256_add_epi16(x, x), base))
}

/// `2^shift`, 0 where the shift is above 14: there is no instruction that shifts words by
/// different amounts, but they can be multiplied.
#[inline]
#[target_feature(enable = "avx2")]
fn power(shifts: Words) -> Words {
    // Of the bytes of a word, those with the upper bit set become 0.
    let low = _mm256_setr_epi64x(LOW, 0, LOW, 0);
    let high = _mm256_setr_epi64x(0, HIGH, 0, HIGH);
    let shifts = _mm256_min_epu16(shifts, every(15));
    let for_low = _mm256_or_si256(shifts, every(0x8000));
    let for_high = _mm256_or_si256(_mm256_slli_epi16::<8>(shifts), every(0x0080));
    _mm256_or_si256(_mm256_shuffle_epi8(low, for_low), _mm256_shuffle_epi8(high, for_high))
}

#[inline]
#[target_feature(enable = "avx2")]
fn limbs(x: Words, shifts: Words) -> [Words; 2] {
    let power = power(shifts);
    let bits = _mm256_or_si256(_mm256_and_si256(x, every(0x7f)), every(0x80));
    let low = _mm256_and_si256(_mm256_mullo_epi16(bits, power), every(0x7ff));
    [low, _mm256_mulhi_epu16(_mm256_slli_epi16::<5>(bits), power)]
}

#[inline]
#[target_feature(enable = "avx2")]
fn is_above(x: Words, y: Words) -> bool {
    let above = _mm256_subs_epu16(_mm256_max_epu16(x, y), every(SPAN));
    _mm256_testz_si256(above, above) == 0
}

#[inline]
#[target_feature(enable = "avx2")]
fn outside(x: Words, shifts: Words) -> u32 {
    let is_above = _mm256_cmpgt_epi16(shifts, every(SPAN));
    let is_zero = _mm256_cmpeq_epi16(_mm256_and_si256(x, every(0x7fff)), every(0));
    let is_outside = _mm256_andnot_si256(is_zero, is_above);
    let bits = _mm256_movemask_epi8(_mm256_packs_epi16(is_outside, every(0))).cast_unsigned();
    (bits & 0xff) | (bits >> 8 & 0xff00)
}

#[inline]
#[target_feature(enable = "avx2")]
fn without(x: Words, bits: u32) -> Words {
    let powers = _mm256_setr_epi16(
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768,
    );
    let bits = _mm256_and_si256(_mm256_set1_epi32((bits | bits << 16).cast_signed()), powers);
    _mm256_and_si256(x, _mm256_cmpeq_epi16(bits, every(0)))
}

/// The number of words of ones.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn words_set(x: Words) -> u64 {
    u64::from(_mm256_movemask_epi8(x).count_ones() / 2)
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn differing(x: Words, y: Words) -> u64 {
    WORDS as u64 - words_set(_mm256_cmpeq_epi16(x, y))
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn differing_values(x: Words, y: Words) -> u64 {
    let some = _mm256_and_si256(_mm256_or_si256(x, y), every(0x7fff));
    let are_zero = _mm256_cmpeq_epi16(some, every(0));
    WORDS as u64 - words_set(_mm256_or_si256(_mm256_cmpeq_epi16(x, y), are_zero))
}

#[inline]
#[target_feature(enable = "avx2")]
fn differences(x: Words, y: Words, a: [Words; 2], b: [Words; 2]) -> [Words; 2] {
    // Where the signs differ the magnitudes are added.
    let sign = _mm256_or_si256(_mm256_xor_si256(x, y), every(1));
    [
        _mm256_sub_epi16(a[0], _mm256_sign_epi16(b[0], sign)),
        _mm256_sub_epi16(a[1], _mm256_sign_epi16(b[1], sign)),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn dot(sum: Ints, x: Words, y: Words) -> Ints {
    _mm256_add_epi32(sum, _mm256_madd_epi16(x, y))
}

#[inline]
#[target_feature(enable = "avx2")]
fn magnitudes([low, high]: [Words; 2]) -> [Ints; 2] {
    // 1 * low + 2^11 * high
    let weights = _mm256_set1_epi32(1 << 27 | 1);
    [
        _mm256_abs_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(low, high), weights)),
        _mm256_abs_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(low, high), weights)),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn add_ints(x: Ints, y: Ints) -> Ints {
    _mm256_add_epi32(x, y)
}

#[inline]
#[target_feature(enable = "avx2")]
fn max_ints(x: Ints, y: Ints) -> Ints {
    _mm256_max_epi32(x, y)
}

#[inline]
#[target_feature(enable = "avx2")]
fn each(x: Ints) -> [i32; 8] {
    let mut out = [0; 8];
    // SAFETY: `out` is 8 numbers of 4 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), x) };
    out
}

#[inline]
#[target_feature(enable = "avx2")]
fn total(x: Ints) -> i64 {
    each(x).into_iter().map(i64::from).sum()
}

#[inline]
#[target_feature(enable = "avx2")]
fn largest(x: Ints) -> u32 {
    each(x).into_iter().fold(0, i32::max).cast_unsigned()
}
