//! The statistics by exact arithmetic: fixed-point integers wide enough for any sum of products.

use super::super::{DenseBlock, size};
use crate::base::dtype::{Dtype, DtypeKind};

/// `limbs * 2^(32 * index - offset)`; limbs are signed until [`Exact::normalised`].
#[derive(Clone)]
pub(super) struct Exact {
    limbs: Vec<i128>,
    offset: i32,
}

/// Twice the exponent of the smallest denormal, and more.
const OFFSET: i32 = 2176;

impl Exact {
    pub(super) fn zero() -> Self {
        Self { limbs: vec![0; 145], offset: OFFSET }
    }

    fn add_product(&mut self, x: Number, y: Number) {
        let magnitude = u128::from(x.significand) * u128::from(y.significand);
        let shift = usize::try_from(x.exp + y.exp + OFFSET).unwrap();
        let sign = if x.is_negative == y.is_negative { 1 } else { -1 };
        for piece in 0..4 {
            let bits = (magnitude >> (32 * piece)) as u32;
            let place = u64::from(bits) << (shift % 32);
            self.limbs[shift / 32 + piece] += sign * i128::from(place as u32);
            self.limbs[shift / 32 + piece + 1] += sign * i128::from(place >> 32);
        }
    }

    /// `self + factor * other`
    pub(super) fn plus(&self, factor: i128, other: &Self) -> Self {
        assert_eq!(self.offset, other.offset);
        let limbs = self.limbs.iter().zip(&other.limbs).map(|(x, y)| x + factor * y).collect();
        Self { limbs, offset: self.offset }
    }

    /// The sign, and 32-bit limbs of the magnitude.
    fn normalised(&self) -> (f64, Vec<u32>) {
        let carried = |sign: i128| {
            let mut carry = 0;
            let limbs: Vec<u32> = self
                .limbs
                .iter()
                .map(|limb| {
                    let sum = sign * limb + carry;
                    carry = sum >> 32;
                    sum as u32
                })
                .collect();
            (carry, limbs)
        };
        let (carry, limbs) = carried(1);
        if carry == 0 { (1.0, limbs) } else { (-1.0, carried(-1).1) }
    }

    pub(super) fn times(&self, other: &Self) -> Self {
        let ((x_sign, x), (y_sign, y)) = (self.normalised(), other.normalised());
        let mut limbs = vec![0i128; x.len() + y.len()];
        for (i, x) in x.iter().enumerate().filter(|(_, x)| **x != 0) {
            for (j, y) in y.iter().enumerate() {
                limbs[i + j] += (x_sign * y_sign) as i128 * i128::from(*x) * i128::from(*y);
            }
        }
        Self { limbs, offset: self.offset + other.offset }
    }

    /// `(m, e)` with `m * 2^e` within 2^-52 of the value, e even and `|m|` between 2^-2 and 2^98.
    pub(super) fn rounded(&self) -> (f64, i32) {
        let (sign, limbs) = self.normalised();
        let Some(top) = limbs.iter().rposition(|&limb| limb != 0) else { return (0.0, 0) };
        let low = top.saturating_sub(2);
        let leading = limbs[low..=top].iter().rev();
        let value = leading.fold(0.0, |value, &limb| value * 4294967296.0 + f64::from(limb));
        (sign * value, 32 * i32::try_from(low).unwrap() - self.offset)
    }

    pub(super) fn is_zero(&self) -> bool {
        self.normalised().1.iter().all(|&limb| limb == 0)
    }

    pub(super) fn sqrt(&self) -> (f64, i32) {
        let (value, exp) = self.rounded();
        (value.sqrt(), exp / 2)
    }
}

/// `m * 2^e` in two steps, so that neither overflows on its own.
pub(super) fn number((value, exp): (f64, i32)) -> f64 {
    // Zero stays zero, whatever its exponent would overflow to.
    if value == 0.0 {
        return 0.0;
    }
    let half = exp / 2;
    value * 2f64.powi(half) * 2f64.powi(exp - half)
}

/// A finite real number.
#[derive(Clone, Copy, PartialEq)]
struct Number {
    is_negative: bool,
    significand: u64,
    exp: i32,
}

impl Number {
    fn from_f64(value: f64) -> Self {
        let bits = value.to_bits();
        let (biased, fraction) = ((bits >> 52 & 0x7ff) as i32, bits & ((1 << 52) - 1));
        let significand = if biased == 0 { fraction } else { fraction | 1 << 52 };
        Self { is_negative: value < 0.0, significand, exp: biased.max(1) - 1075 }
    }
}

/// A real number of an element; `Err` is NaN or an infinity.
fn real(dtype: Dtype, bytes: &[u8]) -> Result<Number, f64> {
    let integer = |value: i128| Number {
        is_negative: value < 0,
        significand: u64::try_from(value.unsigned_abs()).unwrap(),
        exp: 0,
    };
    let word = |len: usize| {
        u64::from_le_bytes(std::array::from_fn(|i| if i < len { bytes[i] } else { 0 }))
    };
    let value = match dtype {
        Dtype::Int64 => return Ok(integer(word(8).cast_signed().into())),
        Dtype::UInt64 => return Ok(integer(word(8).into())),
        Dtype::Int32 => return Ok(integer((word(4) as i32).into())),
        Dtype::UInt32 => return Ok(integer((word(4) as u32).into())),
        Dtype::Int16 => return Ok(integer((word(2) as i16).into())),
        Dtype::UInt16 => return Ok(integer((word(2) as u16).into())),
        Dtype::Int8 => return Ok(integer((bytes[0] as i8).into())),
        Dtype::UInt8 => return Ok(integer(bytes[0].into())),
        Dtype::Bool => return Ok(integer((bytes[0] != 0).into())),
        Dtype::Float64 | Dtype::Complex128 => f64::from_bits(word(8)),
        Dtype::Float32 | Dtype::Complex64 => f32::from_bits(word(4) as u32).into(),
        Dtype::Float16 => half::f16::from_bits(word(2) as u16).to_f64(),
        Dtype::BFloat16 => half::bf16::from_bits(word(2) as u16).to_f64(),
        Dtype::Float8E4M3Fn => float8(bytes[0], 3, 7, |code| code & 0x7f == 0x7f, |_| false),
        Dtype::Float8E5M2 => {
            float8(bytes[0], 2, 15, |code| code & 0x7f > 0x7c, |code| code & 0x7f == 0x7c)
        }
        Dtype::Float8E4M3Fnuz => float8(bytes[0], 3, 8, |code| code == 0x80, |_| false),
        Dtype::Float8E5M2Fnuz => float8(bytes[0], 2, 16, |code| code == 0x80, |_| false),
        Dtype::Float8E8M0Fnu if bytes[0] == 0xff => f64::NAN,
        Dtype::Float8E8M0Fnu => 2f64.powi(i32::from(bytes[0]) - 127),
    };
    if value.is_finite() { Ok(Number::from_f64(value)) } else { Err(value) }
}

pub(super) fn float8(
    code: u8,
    mantissa_bits: u32,
    bias: i32,
    is_nan: fn(u8) -> bool,
    is_inf: fn(u8) -> bool,
) -> f64 {
    let scale = 2f64.powi(i32::try_from(mantissa_bits).unwrap());
    let mantissa = f64::from(code % (1 << mantissa_bits)) / scale;
    let exponent = i32::from((code & 0x7f) >> mantissa_bits);
    let magnitude = match exponent {
        _ if is_nan(code) => f64::NAN,
        _ if is_inf(code) => f64::INFINITY,
        0 => mantissa * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// The counts and exact sums of two sides.
pub(super) struct Oracle {
    pub(super) differing: Vec<usize>,
    pub(super) nan: [u64; 2],
    pub(super) inf: [u64; 2],
    pub(super) aa: Exact,
    pub(super) bb: Exact,
    pub(super) ab: Exact,
    /// Exact `|a - b|^2` of each finite pair.
    pub(super) squares: Vec<(usize, Exact)>,
}

impl Oracle {
    pub(super) fn new(a: DenseBlock<'_>, b: DenseBlock<'_>) -> Self {
        let mut oracle = Self {
            differing: Vec::new(),
            nan: [0; 2],
            inf: [0; 2],
            aa: Exact::zero(),
            bb: Exact::zero(),
            ab: Exact::zero(),
            squares: Vec::new(),
        };
        let (a_elements, b_elements) =
            (a.bytes.chunks(size(a.dtype)), b.bytes.chunks(size(b.dtype)));
        for (index, (a_bytes, b_bytes)) in a_elements.zip(b_elements).enumerate() {
            oracle.add(index, [element(a.dtype, a_bytes), element(b.dtype, b_bytes)]);
        }
        oracle
    }

    fn add(&mut self, index: usize, sides: [[Result<Number, f64>; 2]; 2]) {
        for (side, parts) in sides.iter().enumerate() {
            let is = |test: fn(f64) -> bool| parts.iter().any(|part| part.is_err_and(test));
            self.nan[side] += u64::from(is(f64::is_nan));
            self.inf[side] += u64::from(is(f64::is_infinite) && !is(f64::is_nan));
        }
        let [a, b] = sides;
        let finite = |parts: [Result<Number, f64>; 2]| Some([parts[0].ok()?, parts[1].ok()?]);
        for part in finite(a).into_iter().flatten() {
            self.aa.add_product(part, part);
        }
        for part in finite(b).into_iter().flatten() {
            self.bb.add_product(part, part);
        }
        let is_different = if let (Some(a), Some(b)) = (finite(a), finite(b)) {
            let mut square = Exact::zero();
            for (a, b) in a.into_iter().zip(b) {
                self.ab.add_product(a, b);
                let minus_b = Number { is_negative: !b.is_negative, ..b };
                for (x, y) in [(a, a), (b, b), (a, minus_b), (a, minus_b)] {
                    square.add_product(x, y);
                }
            }
            let is_different = !square.is_zero();
            self.squares.push((index, square));
            is_different
        } else {
            a.iter().zip(&b).any(|parts| match parts {
                (Err(a), Err(b)) => a != b,
                (Ok(a), Ok(b)) => number_of(*a) != number_of(*b),
                _ => true,
            })
        };
        if is_different {
            self.differing.push(index);
        }
    }

    pub(super) fn dd(&self) -> Exact {
        self.squares.iter().fold(Exact::zero(), |sum, (_, square)| sum.plus(1, square))
    }

    /// `1 - cos = (aa bb - ab^2) / (|a| |b| (|a| |b| + ab))`, for `ab > 0`.
    pub(super) fn one_minus_cos(&self) -> f64 {
        let numerator = self.aa.times(&self.bb).plus(-1, &self.ab.times(&self.ab)).rounded();
        let (a, b, ab) = (self.aa.sqrt(), self.bb.sqrt(), self.ab.rounded());
        let area = (a.0 * b.0, a.1 + b.1);
        let cos = number((ab.0 / area.0, ab.1 - area.1));
        if cos < 0.0 {
            return 1.0 - cos;
        }
        number((numerator.0 / area.0 / area.0, numerator.1 - 2 * area.1)) / (1.0 + cos)
    }
}

fn element(dtype: Dtype, bytes: &[u8]) -> [Result<Number, f64>; 2] {
    if dtype.kind() == DtypeKind::Complex {
        let (re, im) = bytes.split_at(bytes.len() / 2);
        [real(dtype, re), real(dtype, im)]
    } else {
        [real(dtype, bytes), Ok(Number { is_negative: false, significand: 0, exp: 0 })]
    }
}

/// Comparable; only for real numbers that an `f64` holds.
fn number_of(number: Number) -> f64 {
    let magnitude = number.significand as f64
        * 2f64.powi(number.exp / 2)
        * 2f64.powi(number.exp - number.exp / 2);
    if number.is_negative { -magnitude } else { magnitude }
}
