//! AVX-512 (F, BW, DQ, VL).

use std::arch::x86_64::{
    __m512d, _CMP_NEQ_UQ, _mm_loadu_si128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_loadu_ps, _mm256_slli_epi32, _mm512_abs_pd, _mm512_add_pd,
    _mm512_cmp_pd_mask, _mm512_cvtps_pd, _mm512_fmadd_pd, _mm512_loadu_pd, _mm512_max_pd,
    _mm512_setzero_pd, _mm512_storeu_pd, _mm512_sub_pd,
};

use super::body::bytes_of;
use super::{BFLOAT16, CHUNK, FLOAT16, FLOAT32, FLOAT64, Form, Found, width};
use crate::kernel::LANES;
use crate::kernel::lanes::{Chunk, Lanes, Totals, larger};

const AT_ONCE: usize = 16;
const PARTS: usize = 2;
type Vector = __m512d;
type Counts = u64;

loops!("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt");

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
fn no_counts() -> Counts {
    0
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
fn max(x: Vector, y: Vector) -> Vector {
    _mm512_max_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx512f,popcnt")]
fn count(counts: Counts, vectors: [Vector; PARTS]) -> Counts {
    let low = _mm512_cmp_pd_mask::<_CMP_NEQ_UQ>(vectors[0], zero());
    let high = _mm512_cmp_pd_mask::<_CMP_NEQ_UQ>(vectors[1], zero());
    counts + u64::from((u16::from(low) | u16::from(high) << 8).count_ones())
}

#[inline]
#[target_feature(enable = "avx512f")]
fn counted(counts: Counts) -> u64 {
    counts
}
