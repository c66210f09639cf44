//! AVX2 with FMA and F16C.

use std::arch::x86_64::{
    __m256d, __m256i, _CMP_NEQ_UQ, _mm_castsi128_ps, _mm_cvtepu16_epi32, _mm_cvtph_ps,
    _mm_loadl_epi64, _mm_loadu_ps, _mm_slli_epi32, _mm256_add_pd, _mm256_andnot_pd,
    _mm256_castpd_si256, _mm256_cmp_pd, _mm256_cvtps_pd, _mm256_fmadd_pd, _mm256_loadu_pd,
    _mm256_max_pd, _mm256_set1_pd, _mm256_setzero_pd, _mm256_setzero_si256, _mm256_storeu_pd,
    _mm256_storeu_si256, _mm256_sub_epi64, _mm256_sub_pd,
};

use super::body::bytes_of;
use super::{BFLOAT16, CHUNK, FLOAT16, FLOAT32, FLOAT64, Form, Found, width};
use crate::kernel::LANES;
use crate::kernel::lanes::{Chunk, Lanes, Totals, larger};

const AT_ONCE: usize = 8;
const PARTS: usize = 2;
type Vector = __m256d;

/// Four counts, subtracted from 0.
#[derive(Clone, Copy)]
struct Counts(__m256i);

loops!("avx2,fma,f16c");

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
fn no_counts() -> Counts {
    Counts(_mm256_setzero_si256())
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

#[inline]
#[target_feature(enable = "avx2")]
fn max(x: Vector, y: Vector) -> Vector {
    _mm256_max_pd(x, y)
}

#[inline]
#[target_feature(enable = "avx2")]
fn count(Counts(mut counts): Counts, vectors: [Vector; PARTS]) -> Counts {
    for x in vectors {
        let ones = _mm256_cmp_pd::<_CMP_NEQ_UQ>(x, zero());
        counts = _mm256_sub_epi64(counts, _mm256_castpd_si256(ones));
    }
    Counts(counts)
}

#[inline]
#[target_feature(enable = "avx2")]
fn counted(Counts(counts): Counts) -> u64 {
    let mut out = [0u64; 4];
    // SAFETY: `out` is 4 numbers of 8 bytes.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), counts) };
    out.into_iter().sum()
}
