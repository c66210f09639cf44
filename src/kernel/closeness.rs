//! Elements that are near enough to each other.

use super::general::Pair;
use super::simd::{BFLOAT16, FLOAT16, FLOAT32, Form, Isa, form};
use super::{DenseBlock, decode, stats::Stats};

/// A bound on the distance of each element from the reference, `|a - b| <= atol + rtol * |b|`, as `torch.isclose` and
/// `numpy.isclose` have it; taken in `f64` whatever the dtypes are.
///
/// Infinities are near to the same infinity only, NaN to nothing, or to NaN if that is asked for. The modulus is the
/// magnitude of a complex element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Closeness {
    /// Relative to the magnitude of b.
    pub rtol: f64,
    /// In units of the tensor.
    pub atol: f64,
    /// NaN is near to NaN.
    pub equal_nan: bool,
}

/// The elements that are not [close](Closeness).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Beyond {
    /// Their number.
    pub count: u64,
    /// Flat index of the first.
    pub first: Option<u64>,
}

impl Beyond {
    /// Adds those of elements that may be anywhere else in the tensor.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.first = match (self.first, other.first) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
    }
}

impl Closeness {
    #[inline(always)]
    fn has(self, a: f64, b: f64) -> bool {
        let distance = (a - b).abs();
        (a == b)
            | (distance.is_finite() & (distance <= self.atol + self.rtol * b.abs()))
            | (self.equal_nan & a.is_nan() & b.is_nan())
    }
}

/// Counts the elements of a block that are not close; `stats` are its statistics, and `first` the flat index of its first
/// element.
#[must_use]
pub fn count_beyond(
    [a, b]: [DenseBlock<'_>; 2],
    closeness: &Closeness,
    stats: &Stats,
    first: u64,
) -> Beyond {
    // Where the largest distance is near enough for any element there is no more to ask.
    let is_settled = stats.differing == 0 || stats.max_abs <= closeness.atol;
    if stats.is_finite() && is_settled {
        return Beyond::default();
    }
    let is_real = [a, b].iter().all(|side| decode::reals_per_element(side.dtype) == 1);
    let mut pair = Pair::new(a, b);
    let (count, position) = match (form(a.dtype), form(b.dtype)) {
        (Some(a_form), Some(b_form)) if is_real => {
            match Isa::best().beyond((a_form, a.bytes), (b_form, b.bytes), closeness) {
                0 => (0, None),
                count => (count, pair.first_beyond(closeness)),
            }
        }
        _ => pair.count_beyond(closeness),
    };
    Beyond { count, first: position.map(|position| first + position as u64) }
}

/// The loop over numbers that the instruction sets read, in any of them.
#[inline(always)]
pub(super) fn loop_over<const A: Form, const B: Form>(
    a: &[u8],
    b: &[u8],
    closeness: &Closeness,
) -> u64 {
    match A {
        BFLOAT16 => over_b::<2, B>(a, b, closeness, bfloat16),
        FLOAT16 => over_b::<2, B>(a, b, closeness, float16),
        FLOAT32 => over_b::<4, B>(a, b, closeness, |x| f64::from(f32::from_le_bytes(x))),
        _ => over_b::<8, B>(a, b, closeness, f64::from_le_bytes),
    }
}

#[inline(always)]
fn over_b<const WIDTH: usize, const B: Form>(
    a: &[u8],
    b: &[u8],
    closeness: &Closeness,
    value: impl Fn([u8; WIDTH]) -> f64,
) -> u64 {
    let a = a.as_chunks::<WIDTH>().0;
    match B {
        BFLOAT16 => count(a, b.as_chunks::<2>().0, |a, b| closeness.has(value(a), bfloat16(b))),
        FLOAT16 => count(a, b.as_chunks::<2>().0, |a, b| closeness.has(value(a), float16(b))),
        FLOAT32 => count(a, b.as_chunks::<4>().0, |a, b| {
            closeness.has(value(a), f64::from(f32::from_le_bytes(b)))
        }),
        _ => count(a, b.as_chunks::<8>().0, |a, b| closeness.has(value(a), f64::from_le_bytes(b))),
    }
}

#[inline(always)]
fn bfloat16(bytes: [u8; 2]) -> f64 {
    f64::from(f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
}

#[inline(always)]
fn float16(bytes: [u8; 2]) -> f64 {
    f64::from(decode::float16(u16::from_le_bytes(bytes)))
}

/// Number of pairs that are not close.
#[inline(always)]
fn count<const N: usize, const M: usize>(
    a: &[[u8; N]],
    b: &[[u8; M]],
    is_close: impl Fn([u8; N], [u8; M]) -> bool,
) -> u64 {
    a.iter().zip(b).fold(0, |count, (&a, &b)| count + u64::from(!is_close(a, b)))
}

impl Pair<'_> {
    /// Number of elements that are not close, and the first of them.
    fn count_beyond(&mut self, closeness: &Closeness) -> (u64, Option<usize>) {
        let mut count = 0;
        let mut first = None;
        for index in 0..self.chunks() {
            let elements = self.load(index, [false; 2]);
            for element in 0..elements {
                if !self.is_close(element, closeness) {
                    count += 1;
                    first = first.or(Some(index * self.elements_per_chunk() + element));
                }
            }
        }
        (count, first)
    }

    fn first_beyond(&mut self, closeness: &Closeness) -> Option<usize> {
        (0..self.chunks()).find_map(|index| {
            let elements = self.load(index, [false; 2]);
            let found = (0..elements).find(|&element| !self.is_close(element, closeness))?;
            Some(index * self.elements_per_chunk() + found)
        })
    }

    fn is_close(&self, element: usize, closeness: &Closeness) -> bool {
        let reals = self.reals(element);
        let [a, b] = &self.values;
        if reals.len() == 1 {
            let at = reals.start;
            // The difference knows better than the rounded values of 64-bit integers, but infinities have none.
            let distance = self.diff[at].abs();
            if distance.is_finite() {
                return distance <= closeness.atol + closeness.rtol * b[at].abs();
            }
            return closeness.has(a[at], b[at]);
        }
        let is_nan = |side: &[f64]| reals.clone().any(|at| side[at].is_nan());
        if is_nan(a) || is_nan(b) {
            return closeness.equal_nan && is_nan(a) && is_nan(b);
        }
        if reals.clone().all(|at| a[at] == b[at]) {
            return true;
        }
        let modulus =
            |parts: &[f64]| reals.clone().map(|at| parts[at] * parts[at]).sum::<f64>().sqrt();
        let distance = modulus(&self.diff);
        distance.is_finite() && distance <= closeness.atol + closeness.rtol * modulus(b)
    }
}
