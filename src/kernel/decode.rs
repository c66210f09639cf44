//! Little-endian element bytes to `f64`.
//!
//! Exact for every dtype except `int64` and `uint64`, which round to nearest beyond 2^53.
//! Plain loops over fixed-size elements, so that the compiler can vectorise each of them.

use super::lanes::Chunk;
use super::size;
use crate::base::dtype::{Dtype, DtypeKind};

/// Real numbers in one element: 2 for a complex dtype (real, imaginary), otherwise 1.
pub(super) fn reals_per_element(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Complex128 | Dtype::Complex64 => 2,
        _ => 1,
    }
}

/// Decodes at most a chunk of real numbers, and fills it up with zeros.
pub(super) fn decode_chunk(dtype: Dtype, bytes: &[u8], chunk: &mut Chunk) {
    let reals = bytes.len() / size(dtype) * reals_per_element(dtype);
    decode(dtype, bytes, &mut chunk[..reals]);
    chunk[reals..].fill(0.0);
}

/// Decodes as many real numbers as `out` has room for; `bytes` holds exactly those.
pub(super) fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f64]) {
    match dtype {
        Dtype::Float64 | Dtype::Complex128 => each(bytes, out, f64::from_le_bytes),
        Dtype::Float32 | Dtype::Complex64 => each(bytes, out, |x| f64::from(f32::from_le_bytes(x))),
        Dtype::Float16 => each(bytes, out, |x| f64::from(float16(u16::from_le_bytes(x)))),
        Dtype::BFloat16 => each(bytes, out, |x| f64::from(bfloat16(u16::from_le_bytes(x)))),
        Dtype::Float8E4M3Fn => each(bytes, out, |[x]| E4M3FN[usize::from(x)]),
        Dtype::Float8E4M3Fnuz => each(bytes, out, |[x]| E4M3FNUZ[usize::from(x)]),
        Dtype::Float8E5M2 => each(bytes, out, |[x]| E5M2[usize::from(x)]),
        Dtype::Float8E5M2Fnuz => each(bytes, out, |[x]| E5M2FNUZ[usize::from(x)]),
        Dtype::Float8E8M0Fnu => each(bytes, out, |[x]| scale(x)),
        Dtype::Int64 => each(bytes, out, |x| i64::from_le_bytes(x) as f64),
        Dtype::Int32 => each(bytes, out, |x| f64::from(i32::from_le_bytes(x))),
        Dtype::Int16 => each(bytes, out, |x| f64::from(i16::from_le_bytes(x))),
        Dtype::Int8 => each(bytes, out, |x| f64::from(i8::from_le_bytes(x))),
        Dtype::UInt64 => each(bytes, out, |x| u64::from_le_bytes(x) as f64),
        Dtype::UInt32 => each(bytes, out, |x| f64::from(u32::from_le_bytes(x))),
        Dtype::UInt16 => each(bytes, out, |x| f64::from(u16::from_le_bytes(x))),
        Dtype::UInt8 => each(bytes, out, |[x]| f64::from(x)),
        Dtype::Bool => each(bytes, out, |[x]| f64::from(u8::from(x != 0))),
    }
}

/// A binary floating point format.
#[derive(Debug, Clone, Copy)]
pub(super) struct FloatFormat {
    /// Bits of the significand that are stored.
    pub(super) mantissa_bits: i32,
    /// The exponent of the smallest normal numbers, which denormals share.
    pub(super) lowest_exponent: i32,
    /// The largest number.
    pub(super) largest: f64,
}

impl FloatFormat {
    /// The exponent of the smallest positive number.
    pub(super) fn smallest_exponent(self) -> i32 {
        self.lowest_exponent - self.mantissa_bits
    }

    /// The exponent of the distance from a number other than zero to the next.
    pub(super) fn unit_exponent(self, value: f64) -> i32 {
        let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        exponent.max(self.lowest_exponent) - self.mantissa_bits
    }
}

/// The format of the numbers of a dtype; none of integers.
pub(super) fn float_format(dtype: Dtype) -> Option<FloatFormat> {
    let (mantissa_bits, lowest_exponent, largest) = match dtype {
        Dtype::Float64 | Dtype::Complex128 => (52, -1022, f64::MAX),
        Dtype::Float32 | Dtype::Complex64 => (23, -126, f64::from(f32::MAX)),
        Dtype::Float16 => (10, -14, 65504.0),
        Dtype::BFloat16 => (7, -126, f64::from(bfloat16(0x7f7f))),
        Dtype::Float8E4M3Fn => (3, -6, 448.0),
        Dtype::Float8E4M3Fnuz => (3, -7, 240.0),
        Dtype::Float8E5M2 => (2, -14, 57344.0),
        Dtype::Float8E5M2Fnuz => (2, -15, 57344.0),
        Dtype::Float8E8M0Fnu => (0, -127, scale(0xfe)),
        _ => return None,
    };
    Some(FloatFormat { mantissa_bits, lowest_exponent, largest })
}

/// The number of this dtype that is nearest to `value`, of two the even one, as `f64`; of an integer dtype the value itself.
pub(super) fn rounded(dtype: Dtype, value: f64) -> f64 {
    let Some(format) = float_format(dtype) else { return value };
    if value == 0.0 || !value.is_finite() || format.mantissa_bits == 52 {
        return value;
    }
    let unit = power_of_two(format.unit_exponent(value));
    let nearest = (value / unit).round_ties_even() * unit;
    if nearest.abs() > format.largest { f64::INFINITY.copysign(value) } else { nearest }
}

/// Two to this power, which is one of the units of a format.
#[inline(always)]
pub(super) fn power_of_two(exponent: i32) -> f64 {
    match u64::try_from(exponent + 1023) {
        Ok(biased @ 1..2047) => f64::from_bits(biased << 52),
        _ => 2f64.powi(exponent),
    }
}

/// The value of a code of a dtype of one byte.
pub(super) fn value_of_byte(dtype: Dtype, code: u8) -> f64 {
    let mut value = [0.0];
    decode(dtype, &[code], &mut value);
    value[0]
}

/// The first element as text that reads back to the same value: integers whole, complex ones as `re+imi`.
pub(super) fn element_text(dtype: Dtype, bytes: &[u8]) -> String {
    if let (Dtype::Int64 | Dtype::UInt64, Some(word)) = (dtype, bytes.first_chunk()) {
        return match dtype {
            Dtype::Int64 => i64::from_le_bytes(*word).to_string(),
            _ => u64::from_le_bytes(*word).to_string(),
        };
    }
    let mut parts = [0.0; 2];
    decode(dtype, bytes, &mut parts[..reals_per_element(dtype)]);
    match dtype {
        Dtype::Bool => (parts[0] != 0.0).to_string(),
        Dtype::Complex128 | Dtype::Complex64 => format!("{:?}{:+?}i", parts[0], parts[1]),
        Dtype::Float32 => {
            format!("{:?}", f32::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default()))
        }
        _ if dtype.kind() == DtypeKind::Float => format!("{:?}", parts[0]),
        _ => format!("{}", parts[0]),
    }
}

#[inline(always)]
fn each<const SIZE: usize>(bytes: &[u8], out: &mut [f64], element: impl Fn([u8; SIZE]) -> f64) {
    let (elements, rest) = bytes.as_chunks::<SIZE>();
    debug_assert!(rest.is_empty() && elements.len() == out.len());
    for (value, bytes) in out.iter_mut().zip(elements) {
        *value = element(*bytes);
    }
}

/// The upper half of an `f32`.
fn bfloat16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// IEEE binary16, without a branch: normal numbers by moving the exponent to its place in an
/// `f32`, denormals as what they add to a one half whose last bit is their unit.
#[inline(always)]
pub(super) fn float16(bits: u16) -> f32 {
    /// The addend that takes an exponent of bias 15 to bias 127; applied twice it takes 31 to 255.
    const REBIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(bits);
    let magnitude = bits & 0x7fff;
    let infinite = if magnitude >= 0x7c00 { REBIAS } else { 0 };
    let normal = (magnitude << 13) + REBIAS + infinite;
    let denormal = (f32::from_bits(0.5f32.to_bits() | magnitude) - 0.5).to_bits();
    let magnitude = if magnitude < 0x0400 { denormal } else { normal };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// An exponent with a bias of 127 and nothing else: the scale of a block of smaller numbers (OCP Microscaling Formats 1.0).
fn scale(exponent: u8) -> f64 {
    match exponent {
        0xff => f64::NAN,
        _ => f64::from_bits((1023 - 127 + u64::from(exponent)) << 52),
    }
}

/// The treatment of the codes of a `float8` format that are no ordinary numbers.
#[derive(Clone, Copy)]
enum Specials {
    /// Largest exponent: infinity, and NaN where the mantissa is not zero.
    Ieee,
    /// No infinity; NaN is every exponent and mantissa bit set.
    Finite,
    /// No infinity and no negative zero; NaN is the code of negative zero. The bias is one more.
    FiniteUnsignedZero,
}

/// OCP 8-bit floating point E4M3.
static E4M3FN: [f64; 256] = float8(3, Specials::Finite);
/// E4M3 with a bias of 8.
static E4M3FNUZ: [f64; 256] = float8(3, Specials::FiniteUnsignedZero);
/// OCP 8-bit floating point E5M2.
static E5M2: [f64; 256] = float8(2, Specials::Ieee);
/// E5M2 with a bias of 16.
static E5M2FNUZ: [f64; 256] = float8(2, Specials::FiniteUnsignedZero);

/// The values of all codes of a `float8` format: a sign, `7 - mantissa_bits` bits of exponent,
/// the mantissa.
const fn float8(mantissa_bits: u32, specials: Specials) -> [f64; 256] {
    let exponent_bits = 7 - mantissa_bits;
    let largest_exponent = (1u64 << exponent_bits) - 1;
    let unsigned_zero = matches!(specials, Specials::FiniteUnsignedZero);
    let bias = (1u64 << (exponent_bits - 1)) - 1 + unsigned_zero as u64;
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let mantissa = code as u64 & ((1 << mantissa_bits) - 1);
        let exponent = (code as u64 & 0x7f) >> mantissa_bits;
        let magnitude = match specials {
            Specials::Ieee if exponent == largest_exponent && mantissa == 0 => f64::INFINITY,
            Specials::Ieee if exponent == largest_exponent => f64::NAN,
            Specials::Finite if code & 0x7f == 0x7f => f64::NAN,
            Specials::FiniteUnsignedZero if code == 0x80 => f64::NAN,
            _ => {
                // The implicit bit is not there in the lowest binade, which shares its exponent
                // with the next.
                let (significand, binade) = if exponent == 0 {
                    (mantissa, 1)
                } else {
                    (mantissa | 1 << mantissa_bits, exponent)
                };
                let unit = f64::from_bits((1023 + binade - bias - mantissa_bits as u64) << 52);
                significand as f64 * unit
            }
        };
        table[code] = if code & 0x80 == 0 { magnitude } else { -magnitude };
        code += 1;
    }
    table
}
