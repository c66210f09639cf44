//! NEON, which every 64-bit ARM machine has.

use std::arch::aarch64::{
    float32x4_t, float64x2_t, uint16x4_t, uint64x2_t, vabsq_f64, vaddq_f64, vaddq_u64, vandq_u32,
    vbslq_u32, vceqzq_f64, vcgeq_u32, vcvt_f64_f32, vcvt_high_f64_f32, vdupq_n_f32, vdupq_n_f64,
    vdupq_n_u32, vdupq_n_u64, vfmaq_f64, vget_low_f32, vgetq_lane_u64, vld1_u16, vld1q_f32,
    vld1q_f64, vmaxq_f64, vmovl_u16, vmulq_f32, vorrq_u32, vreinterpretq_f32_u32,
    vreinterpretq_u32_f32, vshll_n_u16, vshlq_n_u32, vst1q_f64, vsubq_f64, vsubq_u64,
};

use super::body::bytes_of;
use super::{BFLOAT16, CHUNK, FLOAT16, FLOAT32, FLOAT64, Form, Found, width};
use crate::kernel::LANES;
use crate::kernel::lanes::{Chunk, Lanes, Totals, larger};

const AT_ONCE: usize = 8;
const PARTS: usize = 4;
type Vector = float64x2_t;

/// Vectors seen, and how often an element of them was 0, subtracted from 0.
#[derive(Clone, Copy)]
struct Counts {
    vectors: u64,
    zeros: uint64x2_t,
}

loops!("neon");

#[inline]
#[target_feature(enable = "neon")]
fn load<const FORM: Form>(bytes: &[u8]) -> [Vector; PARTS] {
    let (low, high) = bytes.split_at(4 * width(FORM));
    let [[x, y], [z, w]] = [four::<FORM>(low), four::<FORM>(high)];
    [x, y, z, w]
}

#[inline]
#[target_feature(enable = "neon")]
fn four<const FORM: Form>(bytes: &[u8]) -> [Vector; 2] {
    assert!(bytes.len() == 4 * width(FORM));
    let at = bytes.as_ptr();
    let halves = |x| [vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x)];
    match FORM {
        BFLOAT16 => {
            // SAFETY: 4 numbers of 2 bytes, asserted above.
            let bits = unsafe { vld1_u16(at.cast()) };
            halves(vreinterpretq_f32_u32(vshll_n_u16::<16>(bits)))
        }
        FLOAT16 => {
            // SAFETY: 4 numbers of 2 bytes, asserted above.
            let bits = unsafe { vld1_u16(at.cast()) };
            halves(float16(bits))
        }
        FLOAT32 => {
            // SAFETY: 4 numbers of 4 bytes, asserted above.
            halves(unsafe { vld1q_f32(at.cast()) })
        }
        _ => {
            // SAFETY: 4 numbers of 8 bytes, asserted above.
            unsafe { [vld1q_f64(at.cast()), vld1q_f64(at.add(16).cast())] }
        }
    }
}

/// The exponent is multiplied into its place, which takes denormals along; the largest one is put
/// there. The instruction for this still waits for the type `f16` to be stable.
#[inline]
#[target_feature(enable = "neon")]
fn float16(bits: uint16x4_t) -> float32x4_t {
    let bits = vmovl_u16(bits);
    let magnitude = vandq_u32(bits, vdupq_n_u32(0x7fff));
    let moved = vshlq_n_u32::<13>(magnitude);
    let rebias = vdupq_n_f32(f32::from_bits((127 + 127 - 15) << 23));
    let finite = vreinterpretq_u32_f32(vmulq_f32(vreinterpretq_f32_u32(moved), rebias));
    let special = vorrq_u32(moved, vdupq_n_u32(0x7f80_0000));
    let is_special = vcgeq_u32(magnitude, vdupq_n_u32(0x7c00));
    let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
    vreinterpretq_f32_u32(vorrq_u32(vbslq_u32(is_special, special, finite), sign))
}

#[inline]
#[target_feature(enable = "neon")]
fn store(vectors: [Vector; PARTS]) -> [f64; AT_ONCE] {
    let mut out = [0.0; AT_ONCE];
    for (out, vector) in out.as_chunks_mut::<2>().0.iter_mut().zip(vectors) {
        // SAFETY: `out` is 2 numbers of 8 bytes.
        unsafe { vst1q_f64(out.as_mut_ptr(), vector) };
    }
    out
}

#[inline]
#[target_feature(enable = "neon")]
fn no_counts() -> Counts {
    Counts { vectors: 0, zeros: vdupq_n_u64(0) }
}

#[inline]
#[target_feature(enable = "neon")]
fn zero() -> Vector {
    vdupq_n_f64(0.0)
}

#[inline]
#[target_feature(enable = "neon")]
fn add(x: Vector, y: Vector) -> Vector {
    vaddq_f64(x, y)
}

#[inline]
#[target_feature(enable = "neon")]
fn sub(x: Vector, y: Vector) -> Vector {
    vsubq_f64(x, y)
}

#[inline]
#[target_feature(enable = "neon")]
fn fma(x: Vector, y: Vector, z: Vector) -> Vector {
    vfmaq_f64(z, x, y)
}

#[inline]
#[target_feature(enable = "neon")]
fn abs(x: Vector) -> Vector {
    vabsq_f64(x)
}

#[inline]
#[target_feature(enable = "neon")]
fn max(x: Vector, y: Vector) -> Vector {
    vmaxq_f64(x, y)
}

#[inline]
#[target_feature(enable = "neon")]
fn count(counts: Counts, vectors: [Vector; PARTS]) -> Counts {
    let [x, y, z, w] = vectors;
    let left = vaddq_u64(vceqzq_f64(x), vceqzq_f64(y));
    let ones = vaddq_u64(left, vaddq_u64(vceqzq_f64(z), vceqzq_f64(w)));
    Counts { vectors: counts.vectors + PARTS as u64, zeros: vsubq_u64(counts.zeros, ones) }
}

#[inline]
#[target_feature(enable = "neon")]
fn counted(counts: Counts) -> u64 {
    let zeros = vgetq_lane_u64::<0>(counts.zeros) + vgetq_lane_u64::<1>(counts.zeros);
    2 * counts.vectors - zeros
}
