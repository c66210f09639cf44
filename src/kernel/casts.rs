//! Casts proven: is each element of one side the other side's, rounded to its dtype?
//!
//! Rounding is that of torch (`c10/util/{BFloat16,Half,Float8_*}.h`, 2.x): to nearest, ties to even, from `f32`, so that
//! a `float64` goes through `f32` first; too large becomes infinity, or NaN where a dtype has no infinity; NaN stays NaN.
//! Zeros of either sign are one value.

use std::sync::LazyLock;

use super::DenseBlock;
use super::decode::{self, decode_chunk, float16};
use super::lanes::CHUNK;
use super::simd::{BFLOAT16, FLOAT16, FLOAT32, Form, Isa, form};
use crate::base::dtype::{Dtype, DtypeKind};

/// The number of elements of a that are not those of b rounded to a's dtype, and the reverse. Two blocks of floats of
/// different dtypes; `differing` is the number of elements whose values differ, pairs of NaN aside.
pub(super) fn not_rounded(
    isa: Isa,
    a: DenseBlock<'_>,
    b: DenseBlock<'_>,
    differing: u64,
) -> [u64; 2] {
    let misses = |wide: DenseBlock<'_>, narrow: DenseBlock<'_>| {
        // All its numbers are numbers of the other dtype, so that rounding changes none.
        if holds(narrow.dtype, wide.dtype) { differing } else { misses(isa, wide, narrow) }
    };
    [misses(b, a), misses(a, b)]
}

/// Returns whether one can be the other, rounded: both are floats with a sign, and not the same.
pub(super) fn are_casts(a: Dtype, b: Dtype) -> bool {
    let is_one = |dtype: Dtype| dtype.kind() == DtypeKind::Float && dtype != Dtype::Float8E8M0Fnu;
    a != b && is_one(a) && is_one(b)
}

/// Returns whether every number of `inner` is one of `outer`, infinity and NaN included.
fn holds(outer: Dtype, inner: Dtype) -> bool {
    let has_no_infinity =
        [Dtype::Float8E4M3Fn, Dtype::Float8E4M3Fnuz, Dtype::Float8E5M2Fnuz].contains(&outer);
    let [Some(outer_format), Some(inner_format)] = [outer, inner].map(decode::float_format) else {
        return false;
    };
    !has_no_infinity
        && outer_format.mantissa_bits >= inner_format.mantissa_bits
        && outer_format.largest >= inner_format.largest
        && outer_format.smallest_exponent() <= inner_format.smallest_exponent()
}

/// Number of elements of `narrow` that are not those of `wide`, rounded.
pub(super) fn misses(isa: Isa, wide: DenseBlock<'_>, narrow: DenseBlock<'_>) -> u64 {
    match (form(wide.dtype), form(narrow.dtype)) {
        (Some(from), Some(to)) => isa.cast_misses((from, wide.bytes), (to, narrow.bytes)),
        _ => misses_decoded(wide, narrow),
    }
}

/// The loop over numbers that the instruction sets read, in any of them.
#[inline(always)]
pub(super) fn loop_over<const FROM: Form, const TO: Form>(wide: &[u8], narrow: &[u8]) -> u64 {
    match FROM {
        BFLOAT16 => {
            from::<2, TO>(wide, narrow, |x| f32::from_bits(u32::from(u16::from_le_bytes(x)) << 16))
        }
        FLOAT16 => from::<2, TO>(wide, narrow, |x| float16(u16::from_le_bytes(x))),
        FLOAT32 => from::<4, TO>(wide, narrow, f32::from_le_bytes),
        #[expect(clippy::cast_possible_truncation, reason = "rounding is what is wanted")]
        _ => from::<8, TO>(wide, narrow, |x| f64::from_le_bytes(x) as f32),
    }
}

#[inline(always)]
fn from<const WIDTH: usize, const TO: Form>(
    wide: &[u8],
    narrow: &[u8],
    value: impl Fn([u8; WIDTH]) -> f32,
) -> u64 {
    let wide = wide.as_chunks::<WIDTH>().0;
    match TO {
        BFLOAT16 => count(wide, narrow.as_chunks::<2>().0, |wide, narrow| {
            is_same_half(to_bfloat16(value(wide)), u16::from_le_bytes(narrow), 0x7f80)
        }),
        FLOAT16 => count(wide, narrow.as_chunks::<2>().0, |wide, narrow| {
            is_same_half(to_float16(value(wide)), u16::from_le_bytes(narrow), 0x7c00)
        }),
        FLOAT32 => count(wide, narrow.as_chunks::<4>().0, |wide, narrow| {
            let (x, y) = (value(wide), f32::from_le_bytes(narrow));
            (x == y) | (x.is_nan() & y.is_nan())
        }),
        _ => count(wide, narrow.as_chunks::<8>().0, |wide, narrow| {
            let (x, y) = (f64::from(value(wide)), f64::from_le_bytes(narrow));
            (x == y) | (x.is_nan() & y.is_nan())
        }),
    }
}

/// Number of pairs that do not match.
#[inline(always)]
fn count<const W: usize, const N: usize>(
    wide: &[[u8; W]],
    narrow: &[[u8; N]],
    matches: impl Fn([u8; W], [u8; N]) -> bool,
) -> u64 {
    // Short runs, so that the counters of vectors are as narrow as their elements.
    const RUN: usize = 128;
    let runs = wide.chunks(RUN).zip(narrow.chunks(RUN));
    let in_run = |(wide, narrow): (&[[u8; W]], &[[u8; N]])| {
        let pairs = wide.iter().zip(narrow);
        pairs.fold(0u16, |misses, (&wide, &narrow)| misses + u16::from(!matches(wide, narrow)))
    };
    runs.map(|run| u64::from(in_run(run))).sum()
}

/// The same number in 16 bits whose exponent has these bits: the same code, zeros of either sign, or NaN both.
#[inline(always)]
fn is_same_half(x: u16, y: u16, exponent: u16) -> bool {
    let [x_magnitude, y_magnitude] = [x & 0x7fff, y & 0x7fff];
    (x == y)
        | (x_magnitude | y_magnitude == 0)
        | ((x_magnitude > exponent) & (y_magnitude > exponent))
}

/// Rounds to `bfloat16`.
#[inline(always)]
pub(super) fn to_bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    // Half of the unit, or a bit less where the last bit is 0 already; NaN must not be carried into infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let code = if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fc0 } else { rounded };
    upper(code << 16)
}

/// Rounds to `float16`.
#[inline(always)]
pub(super) fn to_float16(value: f32) -> u16 {
    /// The change of the exponent's bias, from 127 to 15.
    const REBIAS: u32 = (127 - 15) << 23;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let normal = magnitude.wrapping_sub(REBIAS).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // The unit in the last place of one half is that of the denormals: adding it rounds to one.
    let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if magnitude < 0x3880_0000 { denormal } else { normal };
    let code = if magnitude >= 0x477f_f000 { 0x7c00 } else { finite };
    let code = if magnitude > 0x7f80_0000 { 0x7e00 } else { code };
    upper((code | (bits >> 16) & 0x8000) << 16)
}

/// The upper half.
#[inline(always)]
fn upper(bits: u32) -> u16 {
    (bits >> 16) as u16
}

/// Numbers that the loops do not read on one of the sides, or both: those of one byte.
fn misses_decoded(wide: DenseBlock<'_>, narrow: DenseBlock<'_>) -> u64 {
    let mut values = [0.0; CHUNK];
    let intervals = intervals(narrow.dtype);
    let mut misses = 0;
    for (wide_bytes, codes) in wide.chunks(CHUNK).zip(narrow.chunks(CHUNK)) {
        decode_chunk(wide.dtype, wide_bytes, &mut values);
        let in_chunk = |(value, code): (&f64, &u8)| {
            #[expect(clippy::cast_possible_truncation, reason = "rounding is what is wanted")]
            let value = *value as f32;
            u64::from(!intervals[usize::from(*code)].has(value))
        };
        misses += values.iter().zip(codes).map(in_chunk).sum::<u64>();
    }
    misses
}

/// The numbers that are rounded to one code of a byte: those between the ends, and NaN.
#[derive(Debug, Clone, Copy)]
struct Interval {
    /// The lowest and the highest, both included.
    ends: [f32; 2],
    /// NaN, and all magnitudes above this one.
    is_nan: Option<f32>,
}

/// No number at all.
const NOTHING: Interval = Interval { ends: [f32::INFINITY, f32::NEG_INFINITY], is_nan: None };

impl Interval {
    fn has(&self, value: f32) -> bool {
        let [low, high] = self.ends;
        let is_nan = || self.is_nan.is_some_and(|above| value.is_nan() || value.abs() > above);
        (low <= value && value <= high) || is_nan()
    }
}

/// The intervals of all codes of a dtype of one byte.
fn intervals(dtype: Dtype) -> &'static [Interval; 256] {
    static NONE: [Interval; 256] = [NOTHING; 256];
    macro_rules! table {
        ($dtype:expr) => {{
            static TABLE: LazyLock<[Interval; 256]> = LazyLock::new(|| intervals_of($dtype));
            &TABLE
        }};
    }
    match dtype {
        Dtype::Float8E4M3Fn => table!(Dtype::Float8E4M3Fn),
        Dtype::Float8E4M3Fnuz => table!(Dtype::Float8E4M3Fnuz),
        Dtype::Float8E5M2 => table!(Dtype::Float8E5M2),
        Dtype::Float8E5M2Fnuz => table!(Dtype::Float8E5M2Fnuz),
        _ => &NONE,
    }
}

/// The codes of positive numbers are in order of their values, and every second one is even: half-way between two, the even
/// one is taken. Beyond the largest number comes infinity or NaN (torch to 2.9), or that number itself (torch from 2.10 for
/// `float8_e4m3fn`; the conversions of CUDA that saturate, as Transformer Engine's do).
fn intervals_of(dtype: Dtype) -> [Interval; 256] {
    let values: [f64; 256] =
        std::array::from_fn(|code| decode::value_of_byte(dtype, u8::try_from(code).unwrap_or(0)));
    let is_finite = |code: &usize| values[*code].is_finite();
    let Some(last) = (0..128).rev().find(is_finite) else { return [NOTHING; 256] };
    // The number that would come next.
    let beyond = values[last] + (values[last] - values[last - 1]);
    let single = |value: f64| {
        #[expect(clippy::cast_possible_truncation, reason = "few bits")]
        let single = value as f32;
        single
    };
    let middle = |code: usize| {
        let next = if code == last { beyond } else { values[code + 1] };
        single(f64::midpoint(values[code], next))
    };
    // The highest number that is rounded to this code at most, and the lowest that is rounded to it at least.
    let highest =
        |code: usize| if code.is_multiple_of(2) { middle(code) } else { middle(code).next_down() };
    let lowest = |code: usize| if code == 0 { 0.0 } else { highest(code - 1).next_up() };
    std::array::from_fn(|code| {
        let magnitude = code & 0x7f;
        let value = values[code];
        let [low, high] = if magnitude < last && value.is_finite() {
            [lowest(magnitude), highest(magnitude)]
        } else if magnitude == last {
            [lowest(last), f32::INFINITY]
        } else if value.is_infinite() {
            [highest(last).next_up(), f32::INFINITY]
        } else {
            let has_infinity = values[..128].iter().any(|value| value.is_infinite());
            let above = if has_infinity { f32::INFINITY } else { highest(last) };
            return Interval { is_nan: Some(above), ..NOTHING };
        };
        let low = if magnitude == 0 { -high } else { low };
        let is_negative = code >= 0x80 && magnitude != 0;
        Interval { ends: if is_negative { [-high, -low] } else { [low, high] }, is_nan: None }
    })
}
