//! Blocks of any two dtypes with any values, at no particular speed: 64-bit integers, whose
//! differences are taken exactly; `float64` and `complex128`, whose squares need not fit an
//! `f64`; complex elements; NaN and infinities, which are counted and left out of the sums.
//!
//! Two passes over the block: [`scan`] counts and finds the magnitudes, from which the scale of
//! each sum follows; [`accumulate`] takes the sums.

use std::ops::Range;

use super::decode::{decode_chunk, reals_per_element};
use super::exact::{self, is_exact};
use super::lanes::{CHUNK, Chunk, Totals, largest_magnitude};
use super::simd::Isa;
use super::stats::Stats;
use super::sum::{power_of_two, times_power_of_two};
use super::{DenseBlock, size};
use crate::base::dtype::Dtype;

/// Compares two blocks.
pub(super) fn compare(isa: Isa, a: DenseBlock<'_>, b: DenseBlock<'_>, first: u64) -> Stats {
    let mut pair = Pair::new(a, b);
    let mut stats = Stats { count: a.count(), ..Stats::default() };
    let scales = scan(&mut pair, first, &mut stats);
    accumulate(isa, &mut pair, first, scales, &mut stats);
    if is_exact(a.dtype, b.dtype) {
        stats.sums = exact::sums(a.bytes, b.bytes);
    }
    stats
}

/// A power of two that brings the values of a block to where their squares can be added.
#[derive(Clone, Copy)]
struct Scale {
    /// Values are multiplied by `2^-exp`.
    exp: i32,
    /// A difference or sum of two values is beyond the range of `f64`, so that the halves of
    /// the values are taken; this loses nothing next to such magnitudes.
    is_halved: bool,
}

/// Distance by which values are moved. From the smallest denormal, 2^-1074, this leads to squares that are
/// normal numbers, and from the largest finite value to squares far from overflow.
const MOVE: i32 = 600;

/// Blocks whose largest magnitude is between the two powers of two stay as they are: values that
/// matter next to it have squares well inside the range.
const STAY: i32 = 400;

impl Scale {
    fn for_largest(magnitude: f64) -> Self {
        let exp = if magnitude < power_of_two(-STAY) {
            -MOVE
        } else if magnitude > power_of_two(STAY) {
            MOVE
        } else {
            0
        };
        Self { exp, is_halved: magnitude.is_infinite() }
    }

    fn factor(self) -> f64 {
        power_of_two(-self.exp)
    }

    /// The exponent by which a scaled value is to be raised to give the value.
    fn total_exp(self) -> i32 {
        self.exp + i32::from(self.is_halved)
    }
}

/// Returns whether values with this largest magnitude stay as they are.
pub(super) fn is_in_range(largest: f64) -> bool {
    largest == 0.0 || (!largest.is_infinite() && Scale::for_largest(largest).exp == 0)
}

/// Scales of a, b, `a - b`, `a + b`.
type Scales = [Scale; 4];

/// Counts what is counted, and chooses the scales.
fn scan(pair: &mut Pair<'_>, first: u64, stats: &mut Stats) -> Scales {
    let mut largest = [0.0f64; 4];
    for index in 0..pair.chunks() {
        let start = first + (index * pair.elements_per_chunk()) as u64;
        let elements = pair.load(index, [false; 2]);
        let differing = (0..elements).filter(|&element| pair.differs(element)).count() as u64;
        if differing > 0 {
            let first = || (0..elements).find(|&element| pair.differs(element));
            stats.note_differing(start, differing, first);
        }
        if !pair.is_finite {
            for element in 0..elements {
                let is_nan = [0, 1].map(|side| pair.any(side, element, f64::is_nan));
                let is_infinite = [0, 1].map(|side| pair.any(side, element, f64::is_infinite));
                for side in 0..2 {
                    stats.nan[side] += u64::from(is_nan[side]);
                    stats.inf[side] += u64::from(is_infinite[side] && !is_nan[side]);
                }
                stats.both_nan += u64::from(is_nan == [true; 2]);
                let is_same = is_infinite == [true; 2] && !pair.differs(element);
                stats.both_inf += u64::from(is_same && is_nan == [false; 2]);
            }
            pair.leave_out_non_finite(elements);
        }
        for (largest, values) in largest.iter_mut().zip(pair.arrays()) {
            *largest = largest_magnitude(values).max(*largest);
        }
    }
    largest.map(Scale::for_largest)
}

/// Takes the sums and the largest magnitude of a difference.
fn accumulate(isa: Isa, pair: &mut Pair<'_>, first: u64, scales: Scales, stats: &mut Stats) {
    let mut totals = Totals::default();
    let halved = [scales[2].is_halved, scales[3].is_halved];
    let mut magnitudes = [0.0; CHUNK];
    for index in 0..pair.chunks() {
        let start = first + (index * pair.elements_per_chunk()) as u64;
        let elements = pair.load(index, halved);
        if !pair.is_finite {
            pair.leave_out_non_finite(elements);
        }
        for (values, scale) in pair.arrays().into_iter().zip(scales) {
            let factor = scale.factor();
            values.iter_mut().for_each(|value| *value *= factor);
        }
        totals.add_pairs(isa, &pair.values, &pair.diff, &pair.sum);
        pair.magnitudes(&mut magnitudes);
        totals.magnitudes.add_magnitudes(&magnitudes);
        let largest = largest_magnitude(&magnitudes);
        stats.note_max_abs(start, largest, || magnitudes.iter().position(|&x| x == largest));
    }
    stats.max_abs = times_power_of_two(stats.max_abs, scales[2].total_exp());
    stats.sums = totals.sums(scales.map(Scale::total_exp));
}

/// Two blocks of the same number of elements, read chunk by chunk as real numbers, or as pairs of
/// them if either side is complex.
pub(super) struct Pair<'a> {
    sides: [DenseBlock<'a>; 2],
    /// Elements of a side.
    count: usize,
    reals_per_element: usize,
    /// The first element of the chunk.
    start: usize,
    /// The numbers of the chunk, filled up with zeros.
    pub(super) values: [Chunk; 2],
    /// Returns whether no decoded number is NaN or infinite.
    is_finite: bool,
    /// `a - b`
    pub(super) diff: Chunk,
    /// `a + b`
    sum: Chunk,
}

impl<'a> Pair<'a> {
    pub(super) fn new(a: DenseBlock<'a>, b: DenseBlock<'a>) -> Self {
        Self {
            sides: [a, b],
            count: [a, b]
                .map(|side| side.bytes.len() / size(side.dtype))
                .into_iter()
                .fold(usize::MAX, usize::min),
            reals_per_element: reals_per_element(a.dtype).max(reals_per_element(b.dtype)),
            start: 0,
            values: [[0.0; CHUNK]; 2],
            is_finite: true,
            diff: [0.0; CHUNK],
            sum: [0.0; CHUNK],
        }
    }

    pub(super) fn elements_per_chunk(&self) -> usize {
        CHUNK / self.reals_per_element
    }

    pub(super) fn chunks(&self) -> usize {
        self.count.div_ceil(self.elements_per_chunk())
    }

    fn arrays(&mut self) -> [&mut Chunk; 4] {
        let [a, b] = &mut self.values;
        [a, b, &mut self.diff, &mut self.sum]
    }

    /// Decodes a chunk of both sides and returns its number of elements. `halved` says whether
    /// differences and sums are to be those of the halves of the values.
    pub(super) fn load(&mut self, index: usize, halved: [bool; 2]) -> usize {
        let start = index * self.elements_per_chunk();
        let elements = self.elements_per_chunk().min(self.count - start);
        for (side, values) in self.sides.iter().zip(&mut self.values) {
            let size = size(side.dtype);
            let bytes = &side.bytes[start * size..(start + elements) * size];
            decode_chunk(side.dtype, bytes, values);
            if self.reals_per_element > reals_per_element(side.dtype) {
                add_imaginary_zeros(values);
            }
        }
        self.start = start;
        let values = self.values.as_flattened();
        self.is_finite = values.iter().fold(true, |all, value| all & value.is_finite());
        let is_wide = |side: &DenseBlock<'_>| matches!(side.dtype, Dtype::Int64 | Dtype::UInt64);
        if self.sides.iter().any(is_wide) {
            self.combine_exactly(elements * self.reals_per_element);
        } else {
            self.combine(halved);
        }
        elements
    }

    fn combine(&mut self, halved: [bool; 2]) {
        let [a, b] = &self.values;
        let [half_diff, half_sum] = halved.map(|halved| if halved { 0.5 } else { 1.0 });
        for i in 0..CHUNK {
            self.diff[i] = a[i] * half_diff - b[i] * half_diff;
            self.sum[i] = a[i] * half_sum + b[i] * half_sum;
        }
    }

    /// For a 64-bit integer on either side: differences and sums are those of the integers,
    /// not of what they round to, and overflow is impossible.
    fn combine_exactly(&mut self, reals: usize) {
        for i in 0..reals {
            (self.diff[i], self.sum[i]) = match (self.split(0, i), self.split(1, i)) {
                (Some(a), Some(b)) => (
                    (a.whole - b.whole) as f64 + (a.fraction - b.fraction),
                    (a.whole + b.whole) as f64 + (a.fraction + b.fraction),
                ),
                _ => {
                    let [a, b] = [self.values[0][i], self.values[1][i]];
                    (a - b, a + b)
                }
            };
        }
        self.diff[reals..].fill(0.0);
        self.sum[reals..].fill(0.0);
    }

    /// The exact value of a number, unless it is too large for an integer next to it to matter.
    fn split(&self, side: usize, index: usize) -> Option<Split> {
        let element = self.start + index / self.reals_per_element;
        let word = || self.sides[side].bytes.as_chunks::<8>().0[element];
        let is_real_part = index.is_multiple_of(self.reals_per_element);
        let whole = match self.sides[side].dtype {
            Dtype::Int64 if is_real_part => i128::from(i64::from_le_bytes(word())),
            Dtype::UInt64 if is_real_part => i128::from(u64::from_le_bytes(word())),
            _ => return Split::new(self.values[side][index]),
        };
        Some(Split { whole, fraction: 0.0 })
    }

    /// Places of the numbers of an element in a chunk.
    pub(super) fn reals(&self, element: usize) -> Range<usize> {
        let start = element * self.reals_per_element;
        start..start + self.reals_per_element
    }

    /// Returns whether any number of an element of one side is so.
    pub(super) fn any(&self, side: usize, element: usize, is_so: fn(f64) -> bool) -> bool {
        self.values[side][self.reals(element)].iter().any(|&value| is_so(value))
    }

    fn differs(&self, element: usize) -> bool {
        self.reals(element).any(|i| {
            let [a, b] = [self.values[0][i], self.values[1][i]];
            // The difference knows better than the rounded values, but infinities have none.
            if self.is_finite || (a.is_finite() && b.is_finite()) {
                self.diff[i] != 0.0
            } else {
                a != b
            }
        })
    }

    /// Puts zeros where elements are not finite: in the values of that side, and in the
    /// differences and sums if either side is not.
    fn leave_out_non_finite(&mut self, elements: usize) {
        for element in 0..elements {
            for side in 0..2 {
                if self.any(side, element, |value| !value.is_finite()) {
                    let reals = self.reals(element);
                    self.values[side][reals.clone()].fill(0.0);
                    self.diff[reals.clone()].fill(0.0);
                    self.sum[reals].fill(0.0);
                }
            }
        }
    }

    /// The magnitude of the difference of each element; the moduli of complex ones take up the
    /// first half of the chunk.
    fn magnitudes(&self, out: &mut Chunk) {
        if self.reals_per_element == 1 {
            *out = self.diff.map(f64::abs);
            return;
        }
        for (out, [re, im]) in out.iter_mut().zip(self.diff.as_chunks::<2>().0) {
            *out = (re * re + im * im).sqrt();
        }
    }
}

/// A number as an integer and a fraction of the same sign.
struct Split {
    whole: i128,
    fraction: f64,
}

impl Split {
    fn new(value: f64) -> Option<Self> {
        // Within 2^64 of such a number there is no other f64, and the sum of two integers below
        // it fits an i128.
        const TOO_LARGE: f64 = power_of_two(120);
        if value.is_nan() || value.abs() >= TOO_LARGE {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, reason = "below 2^120, without a fraction")]
        let whole = value.trunc() as i128;
        Some(Self { whole, fraction: value - value.trunc() })
    }
}

/// Spreads real numbers into complex ones.
fn add_imaginary_zeros(values: &mut Chunk) {
    for i in (0..CHUNK / 2).rev() {
        (values[2 * i], values[2 * i + 1]) = (values[i], 0.0);
    }
}
