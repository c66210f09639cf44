//! NEON, which every 64-bit ARM machine has.

use std::arch::aarch64::{
    float32x4_t, float64x2_t, int32x4_t, uint16x4_t, uint16x8_t, vabsq_f64, vabsq_s32, vaddlvq_s32,
    vaddq_f64, vaddq_s32, vaddq_u16, vaddq_u64, vaddvq_u16, vaddvq_u64, vandq_u16, vandq_u32,
    vbslq_u32, vceqq_u16, vceqzq_f64, vceqzq_u16, vcgeq_u32, vcgtq_u16, vcleq_u16, vcvt_f64_f32,
    vcvt_high_f64_f32, vdupq_n_f32, vdupq_n_f64, vdupq_n_s32, vdupq_n_u16, vdupq_n_u32, veorq_u16,
    vfmaq_f64, vget_low_f32, vget_low_s16, vld1_u16, vld1q_f32, vld1q_f64, vld1q_u16, vmaxq_f64,
    vmaxq_s32, vmaxq_u16, vmaxvq_s32, vmaxvq_u16, vmlal_high_n_s16, vmlal_high_s16, vmlal_n_s16,
    vmlal_s16, vmovl_high_s16, vmovl_s16, vmovl_u16, vmulq_f32, vorrq_u16, vorrq_u32,
    vreinterpretq_f32_u32, vreinterpretq_s16_u16, vreinterpretq_u16_s16, vreinterpretq_u32_f32,
    vshll_n_u16, vshlq_n_u16, vshlq_n_u32, vshlq_u16, vshrq_n_s16, vshrq_n_u16, vst1q_f64,
    vsubq_f64, vsubq_u16, vtstq_u16,
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
const PARTS: usize = 4;
type Vector = float64x2_t;

with_neon!(loops);

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
fn distance(_: Vector, _: Vector, diff: Vector) -> Vector {
    abs(diff)
}

#[inline]
#[target_feature(enable = "neon")]
fn max(x: Vector, y: Vector) -> Vector {
    vmaxq_f64(x, y)
}

#[inline]
#[target_feature(enable = "neon")]
fn count<const A: Form, const B: Form>(_: &[u8], _: &[u8], diffs: [Vector; PARTS]) -> u64 {
    let [x, y, z, w] = diffs;
    let left = vaddq_u64(vceqzq_f64(x), vceqzq_f64(y));
    // Each 0 counts as -1.
    let zeros = vaddq_u64(left, vaddq_u64(vceqzq_f64(z), vceqzq_f64(w)));
    vaddvq_u64(zeros).wrapping_add(AT_ONCE as u64)
}

const WORDS: usize = 8;
const STRETCH: usize = 128 * 2 * WORDS;
type Words = uint16x8_t;
type Ints = [int32x4_t; 2];

with_neon!(integer_loops);

#[inline]
#[target_feature(enable = "neon")]
fn words(bytes: &[u8]) -> Words {
    assert!(bytes.len() == 2 * WORDS);
    // SAFETY: 8 words of 2 bytes, asserted above.
    unsafe { vld1q_u16(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn every(word: u16) -> Words {
    vdupq_n_u16(word)
}

#[inline]
#[target_feature(enable = "neon")]
fn ints() -> Ints {
    [vdupq_n_s32(0); 2]
}

#[inline]
#[target_feature(enable = "neon")]
fn shifts(x: Words, base: Words) -> Words {
    vshrq_n_u16::<8>(vsubq_u16(vaddq_u16(x, x), base))
}

#[inline]
#[target_feature(enable = "neon")]
fn limbs(x: Words, shifts: Words) -> [Words; 2] {
    let bits = vorrq_u16(vandq_u16(x, every(0x7f)), every(0x80));
    let bits = vandq_u16(bits, vcleq_u16(shifts, every(SPAN)));
    let left = vreinterpretq_s16_u16(shifts);
    let right = vreinterpretq_s16_u16(vsubq_u16(shifts, every(SPAN)));
    [vandq_u16(vshlq_u16(bits, left), every(0x7ff)), vshlq_u16(vshlq_n_u16::<3>(bits), right)]
}

#[inline]
#[target_feature(enable = "neon")]
fn is_above(x: Words, y: Words) -> bool {
    vmaxvq_u16(vmaxq_u16(x, y)) > SPAN
}

/// A bit for each word.
#[inline]
#[target_feature(enable = "neon")]
fn powers() -> Words {
    const POWERS: [u16; WORDS] = [1, 2, 4, 8, 16, 32, 64, 128];
    // SAFETY: 8 words of 2 bytes.
    unsafe { vld1q_u16(POWERS.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn outside(x: Words, shifts: Words) -> u32 {
    let is_outside = vandq_u16(vcgtq_u16(shifts, every(SPAN)), vtstq_u16(x, every(0x7fff)));
    u32::from(vaddvq_u16(vandq_u16(is_outside, powers())))
}

#[inline]
#[target_feature(enable = "neon")]
fn without(x: Words, bits: u32) -> Words {
    #[expect(clippy::cast_possible_truncation, reason = "one for each of 8 words")]
    let bits = vandq_u16(every(bits as u16), powers());
    vandq_u16(x, vceqzq_u16(bits))
}

/// The number of words of ones.
#[inline]
#[target_feature(enable = "neon")]
fn words_set(x: Words) -> u64 {
    u64::from(vaddvq_u16(vshrq_n_u16::<15>(x)))
}

#[inline]
#[target_feature(enable = "neon")]
fn differing(x: Words, y: Words) -> u64 {
    WORDS as u64 - words_set(vceqq_u16(x, y))
}

#[inline]
#[target_feature(enable = "neon")]
fn differing_values(x: Words, y: Words) -> u64 {
    let are_zero = vceqzq_u16(vandq_u16(vorrq_u16(x, y), every(0x7fff)));
    WORDS as u64 - words_set(vorrq_u16(vceqq_u16(x, y), are_zero))
}

#[inline]
#[target_feature(enable = "neon")]
fn differences(x: Words, y: Words, a: [Words; 2], b: [Words; 2]) -> [Words; 2] {
    // Where the signs differ the magnitudes are added.
    let sign = vreinterpretq_s16_u16(veorq_u16(x, y));
    let ones = vreinterpretq_u16_s16(vshrq_n_s16::<15>(sign));
    [
        vsubq_u16(a[0], vsubq_u16(veorq_u16(b[0], ones), ones)),
        vsubq_u16(a[1], vsubq_u16(veorq_u16(b[1], ones), ones)),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
fn dot([low, high]: Ints, x: Words, y: Words) -> Ints {
    let (x, y) = (vreinterpretq_s16_u16(x), vreinterpretq_s16_u16(y));
    [vmlal_s16(low, vget_low_s16(x), vget_low_s16(y)), vmlal_high_s16(high, x, y)]
}

#[inline]
#[target_feature(enable = "neon")]
fn magnitudes([low, high]: [Words; 2]) -> [Ints; 1] {
    // low + 2^11 * high
    let (low, high) = (vreinterpretq_s16_u16(low), vreinterpretq_s16_u16(high));
    let first = vmlal_n_s16(vmovl_s16(vget_low_s16(low)), vget_low_s16(high), 1 << 11);
    let second = vmlal_high_n_s16(vmovl_high_s16(low), high, 1 << 11);
    [[vabsq_s32(first), vabsq_s32(second)]]
}

#[inline]
#[target_feature(enable = "neon")]
fn add_ints(x: Ints, y: Ints) -> Ints {
    [vaddq_s32(x[0], y[0]), vaddq_s32(x[1], y[1])]
}

#[inline]
#[target_feature(enable = "neon")]
fn max_ints(x: Ints, y: Ints) -> Ints {
    [vmaxq_s32(x[0], y[0]), vmaxq_s32(x[1], y[1])]
}

#[inline]
#[target_feature(enable = "neon")]
fn total([low, high]: Ints) -> i64 {
    vaddlvq_s32(low) + vaddlvq_s32(high)
}

#[inline]
#[target_feature(enable = "neon")]
fn largest([low, high]: Ints) -> u32 {
    vmaxvq_s32(vmaxq_s32(low, high)).cast_unsigned()
}
