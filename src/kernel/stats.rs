//! The statistics of two tensors, and the metrics that follow from them.

use super::sum::{Scaled, Sum};

/// The statistics of comparing elements `a` and `b`: of a block, or of all blocks up to one.
///
/// A complex element counts as one element; its norm, products and differences are those of the
/// pair of real numbers that it is.
///
/// ```
/// use ckptcmp::base::dtype::Dtype;
/// use ckptcmp::kernel::{DenseBlock, Stats, compare_block};
///
/// let a: Vec<u8> = [3.0f32, 4.0, 1.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// let b: Vec<u8> = [3.0f32, 4.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// let side = |bytes| DenseBlock { dtype: Dtype::Float32, bytes };
///
/// let mut stats = Stats::default();
/// stats.merge(&compare_block(side(&a[..8]), side(&b[..8]), 0));
/// assert_eq!((stats.l2(), stats.cos()), (Some(0.0), Some(1.0)));
/// stats.merge(&compare_block(side(&a[8..]), side(&b[8..]), 2));
/// assert_eq!((stats.l2(), stats.max_abs_index()), (Some(2.0), Some(2)));
/// assert_eq!((stats.count(), stats.differing(), stats.is_identical()), (3, 1, false));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stats {
    pub(super) count: u64,
    pub(super) differing: u64,
    pub(super) first_differing: Option<u64>,
    pub(super) is_identical: bool,
    pub(super) nan: [u64; 2],
    pub(super) inf: [u64; 2],
    pub(super) both_nan: u64,
    pub(super) both_inf: u64,
    pub(super) not_rounded: [u64; 2],
    pub(super) max_abs: f64,
    pub(super) max_abs_index: Option<u64>,
    pub(super) sums: Sums,
}

/// The sums of a block or a tensor. An element that is not finite counts as zero.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Sums {
    /// `a * a`, `b * b`
    pub(super) squares: [Sum; 2],
    /// `a * b`
    pub(super) products: Sum,
    /// `(a - b) * (a - b)`
    pub(super) diff_squares: Sum,
    /// `(a - b) * (a + b)`, the difference of the squares without its cancellation
    pub(super) square_diffs: Sum,
    /// `|a - b|`
    pub(super) magnitudes: Sum,
}

impl Sums {
    /// Returns whether the squares, and with them all sums, came out finite.
    pub(super) fn are_finite(&self) -> bool {
        self.squares.iter().all(Sum::is_finite)
    }

    fn merge(&mut self, later: &Self) {
        self.squares[0].merge(&later.squares[0]);
        self.squares[1].merge(&later.squares[1]);
        self.products.merge(&later.products);
        self.diff_squares.merge(&later.diff_squares);
        self.square_diffs.merge(&later.square_diffs);
        self.magnitudes.merge(&later.magnitudes);
    }
}

/// Bound of the relative error of a sum of squares: 63 additions in a chunk, at most 256 chunks
/// of a block, a tree of 4, three roundings in a term, two in the compensated sum of blocks, and
/// some for the last steps of a metric; each at most 2^-53.
const SUM_ERROR: f64 = 340.0 / (1u64 << 53) as f64;

impl Default for Stats {
    /// Those of no elements.
    fn default() -> Self {
        Self {
            count: 0,
            differing: 0,
            first_differing: None,
            is_identical: true,
            nan: [0; 2],
            inf: [0; 2],
            both_nan: 0,
            both_inf: 0,
            not_rounded: [0; 2],
            max_abs: 0.0,
            max_abs_index: None,
            sums: Sums::default(),
        }
    }
}

impl Stats {
    /// Adds the statistics of elements that come later in the tensor.
    ///
    /// Blocks are to be added one by one in index order: then the result is the same bits every
    /// time. Adding up groups of blocks first and the groups afterwards may change the last bit
    /// of a sum, no more.
    pub fn merge(&mut self, later: &Self) {
        self.count += later.count;
        self.differing += later.differing;
        self.first_differing = self.first_differing.or(later.first_differing);
        self.is_identical &= later.is_identical;
        for side in 0..2 {
            self.nan[side] += later.nan[side];
            self.inf[side] += later.inf[side];
            self.not_rounded[side] += later.not_rounded[side];
        }
        self.both_nan += later.both_nan;
        self.both_inf += later.both_inf;
        // Only a larger one replaces an earlier one: ties go to the lowest index.
        if later.max_abs > self.max_abs {
            self.max_abs = later.max_abs;
            self.max_abs_index = later.max_abs_index;
        }
        self.sums.merge(&later.sums);
    }

    /// Counts differing elements of a part that begins at flat index `start`; `position` finds
    /// the first of them in that part.
    pub(super) fn note_differing(
        &mut self,
        start: u64,
        differing: u64,
        position: impl FnOnce() -> Option<usize>,
    ) {
        self.differing += differing;
        if self.first_differing.is_none() {
            self.first_differing = position().map(|position| start + position as u64);
        }
    }

    /// Takes note of the largest magnitude of a part that begins at flat index `start`;
    /// `position` finds the first element with it.
    pub(super) fn note_max_abs(
        &mut self,
        start: u64,
        largest: f64,
        position: impl FnOnce() -> Option<usize>,
    ) {
        if largest > self.max_abs {
            self.max_abs = largest;
            self.max_abs_index = position().map(|position| start + position as u64);
        }
    }

    /// Number of elements compared.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Number of elements whose values differ. NaN differs from everything, itself included;
    /// `-0.0` equals `0.0`; values of different dtypes are equal if they are the same number.
    #[must_use]
    pub fn differing(&self) -> u64 {
        self.differing
    }

    /// Flat index of the first element whose values differ.
    #[must_use]
    pub fn first_differing(&self) -> Option<u64> {
        self.first_differing
    }

    /// Returns whether both sides are the same dtype and the same bytes.
    #[must_use]
    pub fn is_identical(&self) -> bool {
        self.is_identical
    }

    /// Number of elements of a and of b that are NaN, in either part if they are complex.
    #[must_use]
    pub fn nan(&self) -> [u64; 2] {
        self.nan
    }

    /// Number of elements of a and of b that are infinite (and, if complex, NaN in neither part).
    #[must_use]
    pub fn inf(&self) -> [u64; 2] {
        self.inf
    }

    /// Number of elements of a that are not those of b, rounded to a's dtype as torch does; and of b the same the other way.
    /// 0 on either means that this side is an exact cast of the other. Only floats of different dtypes are casts: otherwise
    /// these are the elements that differ.
    #[must_use]
    pub fn not_rounded(&self) -> [u64; 2] {
        self.not_rounded
    }

    /// These statistics as those of the elements that are finite, if all others are NaN on both sides, or the same infinity on
    /// both; otherwise as they are.
    #[must_use]
    pub fn with_equal_nan(&self) -> Self {
        if self.nan != [self.both_nan; 2] || self.inf != [self.both_inf; 2] {
            return *self;
        }
        let differing = self.differing - self.both_nan;
        let first_differing = self.first_differing.filter(|_| differing > 0);
        Self {
            nan: [0; 2],
            inf: [0; 2],
            both_nan: 0,
            both_inf: 0,
            differing,
            first_differing,
            ..*self
        }
    }

    /// Returns whether no element of either side is NaN or infinite.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.is_side_finite(0) && self.is_side_finite(1)
    }

    fn is_side_finite(&self, side: usize) -> bool {
        self.nan[side] == 0 && self.inf[side] == 0
    }

    /// The largest `|a - b|` (the modulus for complex elements) of pairs that are both finite;
    /// 0 if there are none; `None` if it is beyond the range of `f64`.
    #[must_use]
    pub fn max_abs(&self) -> Option<f64> {
        self.max_abs.is_finite().then_some(self.max_abs)
    }

    /// Flat index of the first element with that largest `|a - b|`; `None` if no finite pair
    /// differs.
    #[must_use]
    pub fn max_abs_index(&self) -> Option<u64> {
        self.max_abs_index
    }

    /// The mean of `|a - b|`, 0 for no elements; `None` if an element is not finite or the mean
    /// beyond the range of `f64`.
    #[must_use]
    pub fn mean_abs(&self) -> Option<f64> {
        if self.count == 0 {
            return Some(0.0);
        }
        let mean = self.sums.magnitudes.value().over(Scaled::new(self.count as f64, 0));
        self.is_finite().then(|| mean.to_f64()).filter(|mean| mean.is_finite())
    }

    /// The Euclidean norm of a; `None` if an element of a is not finite or the norm beyond the
    /// range of `f64`.
    #[must_use]
    pub fn norm_a(&self) -> Option<f64> {
        self.norm(0)
    }

    /// The Euclidean norm of b; `None` as for [`Stats::norm_a`].
    #[must_use]
    pub fn norm_b(&self) -> Option<f64> {
        self.norm(1)
    }

    fn norm(&self, side: usize) -> Option<f64> {
        let norm = self.sums.squares[side].value().sqrt().to_f64();
        (self.is_side_finite(side) && norm.is_finite()).then_some(norm)
    }

    /// The Euclidean distance `|a - b|`, with a relative error below 1e-13 (for results in the
    /// normal range of `f64`); exactly 0 if and only if no values differ.
    ///
    /// `None` if an element of either side is not finite, or the distance beyond the range of
    /// `f64`.
    #[must_use]
    pub fn l2(&self) -> Option<f64> {
        let distance = self.sums.diff_squares.value().sqrt().to_f64();
        (self.is_finite() && distance.is_finite()).then_some(distance)
    }

    /// The distance relative to the reference, `|a - b| / |b|`; 0 for equal values, `None` if
    /// [`Stats::l2`] or [`Stats::norm_b`] would need a value that is not finite, or `|b|` is 0 and
    /// the distance is not.
    #[must_use]
    pub fn rel_l2(&self) -> Option<f64> {
        if !self.is_finite() {
            return None;
        }
        if self.sums.diff_squares.is_zero() {
            return Some(0.0);
        }
        if self.sums.squares[1].is_zero() {
            return None;
        }
        let [distance, norm] =
            [self.sums.diff_squares, self.sums.squares[1]].map(|sum| sum.value().sqrt());
        Some(distance.over(norm).to_f64()).filter(|ratio| ratio.is_finite())
    }

    /// The cosine of the angle between a and b, `<a, b> / (|a| |b|)`, in `[-1, 1]`; exactly 1 for
    /// equal values, two zero tensors included.
    ///
    /// `None` if an element of either side is not finite, or exactly one norm is 0.
    #[must_use]
    pub fn cos(&self) -> Option<f64> {
        Some(match self.angle()? {
            // Near 1 the difference formula knows the last digits better.
            Angle { one_minus_cos, .. } if one_minus_cos < 0.5 => 1.0 - one_minus_cos,
            Angle { cos, .. } => cos,
        })
    }

    /// `1 - cos`, in `[0, 2]` and with all its digits where it is tiny; exactly 0 for equal
    /// values, `None` as for [`Stats::cos`].
    ///
    /// It is the better of `1 - <a, b> / (|a| |b|)` and
    /// `(|a - b|^2 - d^2) / (2 |a| |b|)`, `d = |a| - |b| = sum((a - b) (a + b)) / (|a| + |b|)`.
    /// The first is good only where `1 - cos` is not small. The second loses digits where a and b
    /// differ in little but length: a is b times a constant, or one is far longer than the other.
    /// [`Stats::one_minus_cos_error`] tells what to expect; beyond 1e-12, more than `f64` is
    /// needed.
    #[must_use]
    pub fn one_minus_cos(&self) -> Option<f64> {
        self.angle().map(|angle| angle.one_minus_cos)
    }

    /// A bound of the relative error of [`Stats::one_minus_cos`], 0 for equal values, possibly
    /// infinite; `None` where that is `None`.
    #[must_use]
    pub fn one_minus_cos_error(&self) -> Option<f64> {
        self.angle().map(|angle| angle.error)
    }

    fn angle(&self) -> Option<Angle> {
        let Sums { squares: [a, b], products, diff_squares, square_diffs, .. } = &self.sums;
        if !self.is_finite() {
            return None;
        }
        if diff_squares.is_zero() {
            return Some(Angle { cos: 1.0, one_minus_cos: 0.0, error: 0.0 });
        }
        if a.is_zero() || b.is_zero() {
            return None;
        }
        let [a, b] = [a.value().sqrt(), b.value().sqrt()];
        let area = a.times(b);
        let cos = products.value().over(area).to_f64().clamp(-1.0, 1.0);
        let direct = 1.0 - cos;
        let direct_error = relative(2.0 * SUM_ERROR, direct);

        let distance_squared = diff_squares.value();
        let delta = square_diffs.value().over(a.plus(b));
        let excess = distance_squared.minus(delta.times(delta));
        let from_difference = excess.over(area.plus(area)).to_f64().clamp(0.0, 2.0);
        // By Cauchy-Schwarz delta is off by at most SUM_ERROR (|a - b| + |delta|), to first order.
        let ratio = delta.over(distance_squared.sqrt()).to_f64().abs();
        let excess_error = SUM_ERROR * (1.0 + 2.0 * ratio * (1.0 + ratio));
        let error = relative(excess_error, excess.over(distance_squared).to_f64()) + SUM_ERROR;

        let is_difference_better = if error.is_finite() || direct_error.is_finite() {
            error <= direct_error
        } else {
            // Neither tells a digit of so small an angle; the one that is off by less still tells the cosine.
            let scale = distance_squared.over(area.plus(area)).to_f64();
            excess_error * scale + SUM_ERROR * from_difference <= 2.0 * SUM_ERROR
        };
        Some(if is_difference_better {
            Angle { cos, one_minus_cos: from_difference, error }
        } else {
            Angle { cos, one_minus_cos: direct, error: direct_error }
        })
    }
}

/// The angle between two tensors.
struct Angle {
    cos: f64,
    one_minus_cos: f64,
    /// Bound of the relative error of `one_minus_cos`.
    error: f64,
}

/// The largest relative error of something computed as `value` with an absolute error of `error`.
fn relative(error: f64, value: f64) -> f64 {
    if value > error { error / (value - error) } else { f64::INFINITY }
}
