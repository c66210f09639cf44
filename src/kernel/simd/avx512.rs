//! AVX-512 (F, BW, DQ, VL, VNNI).

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512d, __m512i, _CMP_NEQ_UQ, _mm_loadu_si128, _mm256_castsi256_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_slli_epi32,
    _mm512_abs_epi32, _mm512_abs_pd, _mm512_add_epi16, _mm512_add_epi32, _mm512_add_epi64,
    _mm512_add_pd, _mm512_and_si512, _mm512_castsi512_ps, _mm512_castsi512_si256,
    _mm512_cmp_pd_mask, _mm512_cmp_ps_mask, _mm512_cmpgt_epu16_mask, _mm512_cmpneq_epi16_mask,
    _mm512_cvtepi32_epi64, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_pd,
    _mm512_extracti64x4_epi64, _mm512_fmadd_pd, _mm512_loadu_pd, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_madd_epi16, _mm512_mask_test_epi16_mask, _mm512_maskz_mov_epi16,
    _mm512_max_epi32, _mm512_max_epu16, _mm512_max_pd, _mm512_movepi16_mask, _mm512_or_si512,
    _mm512_reduce_add_epi64, _mm512_reduce_max_epi32, _mm512_set1_epi16, _mm512_set1_epi32,
    _mm512_setzero_pd, _mm512_setzero_si512, _mm512_slli_epi16, _mm512_slli_epi32,
    _mm512_srli_epi16, _mm512_srlv_epi16, _mm512_storeu_pd, _mm512_sub_epi16, _mm512_sub_pd,
    _mm512_ternarylogic_epi32, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16, _mm512_xor_si512,
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

const AT_ONCE: usize = 16;
const PARTS: usize = 2;
type Vector = __m512d;

with_avx512!(loops);

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn load<const FORM: Form>(bytes: &[u8]) -> [Vector; PARTS] {
    let (low, high) = bytes.split_at(8 * width(FORM));
    [eight::<FORM>(low), eight::<FORM>(high)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn eight<const FORM: Form>(bytes: &[u8]) -> Vector {
    assert!(bytes.len() == 8 * width(FORM));
    let at = bytes.as_ptr();
    match FORM {
        BFLOAT16 => {
            // SAFETY: 8 numbers of 2 bytes, asserted above.
            let bits = unsafe { _mm_loadu_si128(at.cast()) };
            let bits = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits));
            _mm512_cvtps_pd(_mm256_castsi256_ps(bits))
        }
        FLOAT16 => {
            // SAFETY: 8 numbers of 2 bytes, asserted above.
            let bits = unsafe { _mm_loadu_si128(at.cast()) };
            _mm512_cvtps_pd(_mm256_cvtph_ps(bits))
        }
        FLOAT32 => {
            // SAFETY: 8 numbers of 4 bytes, asserted above.
            _mm512_cvtps_pd(unsafe { _mm256_loadu_ps(at.cast()) })
        }
        _ => {
            // SAFETY: 8 numbers of 8 bytes, asserted above.
            unsafe { _mm512_loadu_pd(at.cast()) }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(vectors: [Vector; PARTS]) -> [f64; AT_ONCE] {
    let mut out = [0.0; AT_ONCE];
    for (out, vector) in out.as_chunks_mut::<8>().0.iter_mut().zip(vectors) {
        // SAFETY: `out` is 8 numbers of 8 bytes.
        unsafe { _mm512_storeu_pd(out.as_mut_ptr(), vector) };
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f")]
fn zero() -> Vector {
    _mm512_setzero_pd()
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add(x: Vector, y: Vector) -> Vector {
    _mm512_add_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn sub(x: Vector, y: Vector) -> Vector {
    _mm512_sub_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn fma(x: Vector, y: Vector, z: Vector) -> Vector {
    _mm512_fmadd_pd(x, y, z)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn abs(x: Vector) -> Vector {
    _mm512_abs_pd(x)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn distance(_: Vector, _: Vector, diff: Vector) -> Vector {
    abs(diff)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn max(x: Vector, y: Vector) -> Vector {
    _mm512_max_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
fn count<const A: Form, const B: Form>(a: &[u8], b: &[u8], diffs: [Vector; PARTS]) -> u64 {
    if A == FLOAT64 || B == FLOAT64 {
        let low = _mm512_cmp_pd_mask::<_CMP_NEQ_UQ>(diffs[0], zero());
        let high = _mm512_cmp_pd_mask::<_CMP_NEQ_UQ>(diffs[1], zero());
        return u64::from((u16::from(low) | u16::from(high) << 8).count_ones());
    }
    let differ = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(floats::<A>(a), floats::<B>(b));
    u64::from(differ.count_ones())
}

/// Sixteen numbers of a form that `f32` holds.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn floats<const FORM: Form>(bytes: &[u8]) -> __m512 {
    assert!(bytes.len() == 16 * width(FORM) && width(FORM) <= 4);
    let at = bytes.as_ptr();
    match FORM {
        BFLOAT16 => {
            // SAFETY: 16 numbers of 2 bytes, asserted above.
            let bits = unsafe { _mm256_loadu_si256(at.cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
        FLOAT16 => {
            // SAFETY: 16 numbers of 2 bytes, asserted above.
            _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
        }
        _ => {
            // SAFETY: 16 numbers of 4 bytes, asserted above.
            unsafe { _mm512_loadu_ps(at.cast()) }
        }
    }
}

const WORDS: usize = 32;
const STRETCH: usize = 64 * 2 * WORDS;
type Words = __m512i;
type Ints = __m512i;

with_avx512!(integer_loops);

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn words(bytes: &[u8]) -> Words {
    assert!(bytes.len() == 2 * WORDS);
    // SAFETY: 32 words of 2 bytes, asserted above.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn every(word: u16) -> Words {
    _mm512_set1_epi16(word.cast_signed())
}

#[inline]
#[target_feature(enable = "avx512f")]
fn ints() -> Ints {
    _mm512_setzero_si512()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shifts(x: Words, base: Words) -> Words {
    _mm512_srli_epi16::<8>(_mm512_sub_epi16(_mm512_add_epi16(x, x), base))
}

/// 0 for a shift of 16 or more.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shifted_left(x: Words, shifts: Words) -> Words {
    let out;
    // As an intrinsic it is followed by a comparison and a selection that are not needed.
    // SAFETY: an instruction of AVX-512 BW on registers.
    unsafe {
        asm!(
            "vpsllvw {out}, {x}, {shifts}",
            out = lateout(zmm_reg) out,
            x = in(zmm_reg) x,
            shifts = in(zmm_reg) shifts,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn limbs(x: Words, shifts: Words) -> [Words; 2] {
    // 0x80 | (x & 0x7f)
    let bits = _mm512_ternarylogic_epi32::<0xf8>(every(0x80), x, every(0x7f));
    let low = _mm512_and_si512(shifted_left(bits, shifts), every(0x7ff));
    let right = _mm512_sub_epi16(every(SPAN), shifts);
    [low, _mm512_srlv_epi16(_mm512_slli_epi16::<3>(bits), right)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn is_above(x: Words, y: Words) -> bool {
    _mm512_cmpgt_epu16_mask(_mm512_max_epu16(x, y), every(SPAN)) != 0
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn outside(x: Words, shifts: Words) -> u32 {
    let is_above = _mm512_cmpgt_epu16_mask(shifts, every(SPAN));
    _mm512_mask_test_epi16_mask(is_above, x, every(0x7fff))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn without(x: Words, bits: u32) -> Words {
    _mm512_maskz_mov_epi16(!bits, x)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,popcnt")]
fn differing(x: Words, y: Words) -> u64 {
    u64::from(_mm512_cmpneq_epi16_mask(x, y).count_ones())
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,popcnt")]
fn differing_values(x: Words, y: Words) -> u64 {
    let differ = _mm512_cmpneq_epi16_mask(x, y);
    let some = _mm512_mask_test_epi16_mask(differ, _mm512_or_si512(x, y), every(0x7fff));
    u64::from(some.count_ones())
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn differences(x: Words, y: Words, a: [Words; 2], b: [Words; 2]) -> [Words; 2] {
    // Where the signs differ the magnitudes are added.
    let opposite = _mm512_movepi16_mask(_mm512_xor_si512(x, y));
    [0, 1].map(|limb| {
        let mut out = _mm512_sub_epi16(a[limb], b[limb]);
        // As an intrinsic it becomes a negation, a selection and an addition.
        // SAFETY: an instruction of AVX-512 BW on registers.
        unsafe {
            asm!(
                "vpaddw {out}{{{opposite}}}, {a}, {b}",
                out = inout(zmm_reg) out,
                opposite = in(kreg) opposite,
                a = in(zmm_reg) a[limb],
                b = in(zmm_reg) b[limb],
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        out
    })
}

#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot(mut sum: Ints, x: Words, y: Words) -> Ints {
    // As an intrinsic it becomes a multiplication and an addition, for the sake of a latency that
    // does not matter here.
    // SAFETY: an instruction of AVX-512 VNNI on registers.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {x}, {y}",
            sum = inout(zmm_reg) sum,
            x = in(zmm_reg) x,
            y = in(zmm_reg) y,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn magnitudes([low, high]: [Words; 2]) -> [Ints; 2] {
    // 1 * low + 2^11 * high
    let weights = _mm512_set1_epi32(1 << 27 | 1);
    let whole = |pairs| _mm512_abs_epi32(_mm512_madd_epi16(pairs, weights));
    [whole(_mm512_unpacklo_epi16(low, high)), whole(_mm512_unpackhi_epi16(low, high))]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_ints(x: Ints, y: Ints) -> Ints {
    _mm512_add_epi32(x, y)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn max_ints(x: Ints, y: Ints) -> Ints {
    _mm512_max_epi32(x, y)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn total(x: Ints) -> i64 {
    let low = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(x));
    let high = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64::<1>(x));
    _mm512_reduce_add_epi64(_mm512_add_epi64(low, high))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn largest(x: Ints) -> u32 {
    _mm512_reduce_max_epi32(x).cast_unsigned()
}
