//! The order of additions inside a block, which together with the order of blocks is what makes
//! a result the same bits everywhere.
//!
//! A block (other than of two `bfloat16` sides, see `exact.rs`) is a sequence of real numbers (two for each element if either side is complex), cut
//! into chunks of [`CHUNK`]; the last is filled up with zeros, which change no sum. Within a
//! chunk, number `i` goes to lane `i % LANES`: 16 running sums that start at `+0`, take their
//! terms in index order and are then added to the 16 totals of the block. At the end of the block
//! the totals are added as a binary tree of neighbours. **A product and the addition that follows
//! are always fused**, rounded once: differences have up to 53 bits, so that it shows, and it
//! halves the work where the machine has the instruction (any x86-64 since 2013, any 64-bit ARM).
//! Any implementation that keeps to this may be used in place of these loops; `simd` does.
//!
//! The two levels also bound the error: a term passes through at most 63 + 256 + 4 additions.

use super::LANES;
use super::simd::Isa;
use super::stats::Sums;
use super::sum::Sum;

/// Real numbers that are summed before the lanes are added to the totals.
pub(super) const CHUNK: usize = 1024;

/// As many lanes of six sums as fit the registers of baseline x86-64; changes speed, not results.
const LANES_AT_ONCE: usize = 4;

/// One chunk of real numbers.
pub(super) type Chunk = [f64; CHUNK];

/// `x * y + sum`, rounded once. `FITS` says that both have 24 bits or fewer: then the product has no more than an `f64`,
/// and a machine without the instruction need not call for it.
#[inline(always)]
fn fused<const FITS: bool>(x: f64, y: f64, sum: f64) -> f64 {
    if FITS { x * y + sum } else { x.mul_add(y, sum) }
}

/// The totals of a block, one for each lane.
#[derive(Clone, Copy, Default)]
pub(super) struct Lanes([f64; LANES]);

impl Lanes {
    /// Adds `x[i] * y[i]`.
    #[inline(always)]
    pub(super) fn add_products<const FITS: bool>(&mut self, x: &Chunk, y: &Chunk) {
        let mut lanes = [0.0; LANES];
        for (x, y) in x.as_chunks::<LANES>().0.iter().zip(y.as_chunks::<LANES>().0) {
            for lane in 0..LANES {
                lanes[lane] = fused::<FITS>(x[lane], y[lane], lanes[lane]);
            }
        }
        self.add(0, lanes);
    }

    /// Adds `|x[i]|`.
    #[inline(always)]
    pub(super) fn add_magnitudes(&mut self, x: &Chunk) {
        let mut lanes = [0.0; LANES];
        for x in x.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                lanes[lane] += x[lane].abs();
            }
        }
        self.add(0, lanes);
    }

    /// Adds the sums of a chunk in the lanes from `first` on.
    #[inline(always)]
    pub(super) fn add<const COUNT: usize>(&mut self, first: usize, sums: [f64; COUNT]) {
        for (total, sum) in self.0[first..first + COUNT].iter_mut().zip(sums) {
            *total += sum;
        }
    }

    /// The sum of the block.
    pub(super) fn fold(&self) -> f64 {
        let mut lanes = self.0;
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for lane in 0..width {
                lanes[lane] = lanes[2 * lane] + lanes[2 * lane + 1];
            }
        }
        lanes[0]
    }
}

/// The totals of all sums of a block.
#[derive(Clone, Copy, Default)]
pub(super) struct Totals {
    /// `a * a`, `b * b`
    pub(super) squares: [Lanes; 2],
    /// `a * b`
    pub(super) products: Lanes,
    /// `(a - b) * (a - b)`
    pub(super) diff_squares: Lanes,
    /// `(a - b) * (a + b)`
    pub(super) square_diffs: Lanes,
    /// `|a - b|` of the elements, the modulus for complex ones
    pub(super) magnitudes: Lanes,
}

impl Totals {
    /// Adds a chunk to all sums of products.
    pub(super) fn add_pairs(&mut self, isa: Isa, [a, b]: &[Chunk; 2], diff: &Chunk, sum: &Chunk) {
        isa.products(a, a, &mut self.squares[0]);
        isa.products(b, b, &mut self.squares[1]);
        isa.products(a, b, &mut self.products);
        isa.products(diff, diff, &mut self.diff_squares);
        isa.products(diff, sum, &mut self.square_diffs);
    }

    /// Adds a chunk to all sums: [`Totals::add_pairs`] and [`Lanes::add_magnitudes`] of the
    /// differences in one pass over the numbers of some lanes after the other.
    #[inline(always)]
    pub(super) fn add_reals<const FITS: bool>(&mut self, [a, b]: &[Chunk; 2]) {
        for first in (0..LANES).step_by(LANES_AT_ONCE) {
            let mut sums = [[0.0; LANES_AT_ONCE]; 6];
            for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
                for lane in 0..LANES_AT_ONCE {
                    let (a, b) = (a[first + lane], b[first + lane]);
                    let (diff, sum) = (a - b, a + b);
                    sums[0][lane] = fused::<FITS>(a, a, sums[0][lane]);
                    sums[1][lane] = fused::<FITS>(b, b, sums[1][lane]);
                    sums[2][lane] = fused::<FITS>(a, b, sums[2][lane]);
                    sums[3][lane] = diff.mul_add(diff, sums[3][lane]);
                    sums[4][lane] = diff.mul_add(sum, sums[4][lane]);
                    sums[5][lane] += diff.abs();
                }
            }
            self.add(first, sums);
        }
    }

    /// Adds the sums of a chunk in the lanes from `first` on, in the order of the fields.
    #[inline(always)]
    pub(super) fn add<const COUNT: usize>(&mut self, first: usize, sums: [[f64; COUNT]; 6]) {
        for (totals, sums) in self.in_order().into_iter().zip(sums) {
            totals.add(first, sums);
        }
    }

    fn in_order(&mut self) -> [&mut Lanes; 6] {
        let Self { squares: [a, b], products, diff_squares, square_diffs, magnitudes } = self;
        [a, b, products, diff_squares, square_diffs, magnitudes]
    }

    /// The sums of the block, where the powers of two say by what `a`, `b`, `a - b` and `a + b`
    /// have been divided.
    pub(super) fn sums(&self, [a, b, diff, sum]: [i32; 4]) -> Sums {
        Sums {
            squares: [
                Sum::new(self.squares[0].fold(), 2 * a),
                Sum::new(self.squares[1].fold(), 2 * b),
            ],
            products: Sum::new(self.products.fold(), a + b),
            diff_squares: Sum::new(self.diff_squares.fold(), 2 * diff),
            square_diffs: Sum::new(self.square_diffs.fold(), diff + sum),
            magnitudes: Sum::new(self.magnitudes.fold(), diff),
        }
    }
}

/// The largest magnitude, where no number is NaN.
#[inline(always)]
pub(super) fn largest_magnitude(values: &Chunk) -> f64 {
    let mut largest = [0.0; LANES];
    for values in values.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            largest[lane] = larger(largest[lane], values[lane].abs());
        }
    }
    largest.into_iter().fold(0.0, larger)
}

/// One instruction, as opposed to `f64::max` with its care for NaN.
#[inline(always)]
pub(super) fn larger(x: f64, y: f64) -> f64 {
    if y > x { y } else { x }
}
