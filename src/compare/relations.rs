//! Which exact relations hold between all elements of a pair, and which rows and columns differ: a pass that ends as soon as
//! nothing is left to find out.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::base::in_order::InOrder;
use crate::base::side::Side;
use crate::kernel::{BLOCK, DenseBlock, Relation};
use crate::pairing::Pair;
use crate::storage::FileSet;

use super::fingerprints::matrix;
use super::pass::{TensorPass, bytes, unit_bytes};
use super::side_files::{ReadError, SideFiles};
use super::side_reader::SideReader;

/// Blocks that are looked at before all of a pair is read.
const PROBES: u64 = 3;

/// Units that are read before it is asked whether to go on.
const AT_A_TIME: usize = 32;

/// Numbers that are taken from a block at a time.
const STEP: usize = 512;

/// Different values that are enough.
pub const ENOUGH_VALUES: usize = 8;

/// The questions about a pair of one shape.
pub struct Question<'q> {
    /// The relations, each with the side that follows from the other one; at most 64.
    pub relations: &'q [(Side, Relation)],
    /// Tells whether it is worth while to go on, by the rows and the columns that differ so far.
    pub may_be_extent: &'q (dyn Fn(&Places, &Places) -> bool + Sync),
    /// Values far out are counted: the pass goes on for their sake.
    pub counts_outliers: bool,
}

/// The findings about a pair.
#[derive(Debug, Default)]
pub struct Answer {
    /// The relations that hold for every element, by their places in the question.
    pub holding: Vec<usize>,
    /// Different values of each side among the elements that differ, up to [`ENOUGH_VALUES`].
    pub distinct: [usize; 2],
    /// The rows with a difference, and the columns; none where it is no extent.
    pub extent: Option<[Places; 2]>,
    /// Values far out, of each side.
    pub outliers: [Outliers; 2],
}

/// A set of indices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    words: Vec<u64>,
    len: u64,
}

impl Places {
    fn new(len: u64) -> Self {
        let words = usize::try_from(len.div_ceil(64)).unwrap_or(usize::MAX);
        Self { words: vec![0; words], len }
    }

    /// Number of indices that might be in it.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Number of indices in it.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// All that are in it, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        let bits = |(at, &word): (usize, &u64)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at as u64 * 64 + bit)
        };
        self.words.iter().enumerate().flat_map(bits)
    }

    /// From the first to the last.
    #[must_use]
    pub fn span(&self) -> Range<u64> {
        let first = self.words.iter().position(|word| *word != 0);
        let last = self.words.iter().rposition(|word| *word != 0);
        match (first, last) {
            (Some(first), Some(last)) => {
                let start = first as u64 * 64 + u64::from(self.words[first].trailing_zeros());
                start..last as u64 * 64 + 64 - u64::from(self.words[last].leading_zeros())
            }
            _ => 0..0,
        }
    }

    fn insert(&mut self, index: u64) {
        if let Some(word) = usize::try_from(index / 64).ok().and_then(|at| self.words.get_mut(at)) {
            *word |= 1 << (index % 64);
        }
    }

    fn merge(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }

    /// The set of these indices out of so many.
    #[must_use]
    pub fn of(len: u64, indices: impl IntoIterator<Item = u64>) -> Self {
        let mut places = Self::new(len);
        indices.into_iter().for_each(|index| places.insert(index));
        places
    }
}

/// Values as memory has them that nobody wrote, and those that a model has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outliers {
    /// Finite ones above 2^64.
    pub huge: u64,
    /// The powers of two that they lie at, from 2^64 on.
    pub exponents: u64,
    /// Those below 2^16, zeros included.
    pub ordinary: u64,
}

impl Outliers {
    fn add(&mut self, value: f64) {
        let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        if exponent < 16 {
            self.ordinary += 1;
        } else if (64..1024).contains(&exponent) {
            self.huge += 1;
            self.exponents |= 1 << (exponent - 64).min(63);
        }
    }

    fn merge(&mut self, other: Self) {
        self.huge += other.huge;
        self.exponents |= other.exponents;
        self.ordinary += other.ordinary;
    }
}

/// What was seen of a pair.
struct Seen {
    distinct: [BTreeSet<u64>; 2],
    rows: Places,
    columns: Places,
    outliers: [Outliers; 2],
}

impl Seen {
    fn new([rows, columns]: [u64; 2]) -> Self {
        Self {
            distinct: Default::default(),
            rows: Places::new(rows),
            columns: Places::new(columns),
            outliers: Default::default(),
        }
    }

    fn merge(&mut self, other: &Self) {
        self.rows.merge(&other.rows);
        self.columns.merge(&other.columns);
        for side in 0..2 {
            self.outliers[side].merge(other.outliers[side]);
            for value in &other.distinct[side] {
                note(&mut self.distinct[side], *value);
            }
        }
    }
}

fn note(distinct: &mut BTreeSet<u64>, value: u64) {
    if distinct.len() < ENOUGH_VALUES {
        distinct.insert(value);
    }
}

/// Answers a question about a pair of one shape and of real numbers.
///
/// # Errors
/// A file that cannot be read.
pub fn relate(
    pair: &Pair,
    files: [&FileSet; 2],
    question: &Question<'_>,
) -> Result<Answer, ReadError> {
    let [a, b] = &pair.sides;
    let side_files = |side| SideFiles { side, files: files[side], sums: None };
    let sides = [(Side::A, a), (Side::B, b)]
        .map(|(side, tensor)| SideReader::merging(side_files(side), tensor));
    let pass = TensorPass::new(sides, unit_bytes(bytes(b)));
    let mut scan = Scan {
        pass: &pass,
        question,
        shape: matrix(b.shape()),
        // One bit for each relation that may still hold.
        holding: AtomicU64::new(mask(question.relations.len())),
        wants_places: true,
        wants_values: true,
    };
    let mut values = [BTreeSet::new(), BTreeSet::new()];
    let numel = b.numel();
    let blocks = numel.div_ceil(BLOCK as u64);
    if blocks > 2 * PROBES {
        let probe = |number: u64| {
            let block = number * (blocks - 1) / (PROBES - 1);
            let start = block * BLOCK as u64;
            start..(start + BLOCK as u64).min(numel)
        };
        let seen = scan.over(&(0..PROBES).map(probe).collect::<Vec<_>>())?;
        if !scan.goes_on(&seen) {
            return Ok(Answer::default());
        }
        scan.wants_places = (question.may_be_extent)(&seen.rows, &seen.columns);
        scan.wants_values = seen.distinct.iter().any(|values| values.len() < ENOUGH_VALUES);
        values = seen.distinct;
    }
    let seen = scan.over(&pass.units().collect::<Vec<_>>())?;
    let holding = scan.holding.load(Ordering::Relaxed);
    let is_extent = scan.wants_places && (question.may_be_extent)(&seen.rows, &seen.columns);
    if scan.wants_values {
        values = seen.distinct;
    }
    Ok(Answer {
        holding: (0..question.relations.len()).filter(|at| holding >> at & 1 == 1).collect(),
        distinct: values.each_ref().map(BTreeSet::len),
        outliers: seen.outliers,
        extent: is_extent.then_some([seen.rows, seen.columns]),
    })
}

fn mask(count: usize) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// A look at parts of a pair.
struct Scan<'s, 'a> {
    pass: &'s TensorPass<'a, 2>,
    question: &'s Question<'s>,
    /// Rows and columns.
    shape: [u64; 2],
    holding: AtomicU64,
    /// The rows and columns that differ may still be an extent.
    wants_places: bool,
    /// Not so many different values were seen as are enough.
    wants_values: bool,
}

impl Scan<'_, '_> {
    fn goes_on(&self, seen: &Seen) -> bool {
        self.holding.load(Ordering::Relaxed) != 0
            || self.question.counts_outliers
            || self.wants_places && (self.question.may_be_extent)(&seen.rows, &seen.columns)
    }

    /// Reads these ranges, as long as there is something to find out: what is false once stays so. How far it comes depends on
    /// no thread.
    fn over(&self, ranges: &[Range<u64>]) -> Result<Seen, ReadError> {
        let mut all = Seen::new(self.shape);
        let look = |range: &Range<u64>| {
            let mut seen = Seen::new(self.shape);
            let each = |blocks: [DenseBlock<'_>; 2], first| self.look(blocks, first, &mut seen);
            self.pass.each_block(range, &mut Default::default(), each)?;
            Ok(seen)
        };
        for wave in ranges.chunks(AT_A_TIME) {
            if !self.goes_on(&all) {
                break;
            }
            let seen: Vec<Seen> = wave.par_iter().map(look).in_order()?;
            seen.iter().for_each(|seen| all.merge(seen));
        }
        Ok(all)
    }

    fn look(&self, blocks: [DenseBlock<'_>; 2], first: u64, seen: &mut Seen) {
        let mut holding = self.holding.load(Ordering::Relaxed);
        let dtypes = blocks.map(|block| block.dtype);
        let mut values = [[0.0; STEP]; 2];
        let sizes = dtypes.map(|dtype| usize::try_from(dtype.size()).unwrap_or(1));
        let [of_a, of_b] = blocks.map(|block| block.bytes);
        let steps = of_a.chunks(STEP * sizes[0]).zip(of_b.chunks(STEP * sizes[1]));
        for ((a, b), start) in steps.zip((first..).step_by(STEP)) {
            let count = a.len() / sizes[0];
            for (values, (dtype, bytes)) in values.iter_mut().zip(dtypes.into_iter().zip([a, b])) {
                DenseBlock { dtype, bytes }.widen(&mut values[..count]);
            }
            let [a, b] = &values;
            if self.question.counts_outliers {
                for (outliers, values) in seen.outliers.iter_mut().zip(&values) {
                    values[..count].iter().for_each(|value| outliers.add(*value));
                }
            }
            if self.wants_places || self.wants_values {
                self.note([&a[..count], &b[..count]], start, seen);
            }
            for (number, (side, relation)) in self.question.relations.iter().enumerate() {
                let holds = |(&a, &b): (&f64, &f64)| match side {
                    Side::A => relation.holds(a, dtypes[0], b),
                    Side::B => relation.holds(b, dtypes[1], a),
                };
                if holding >> number & 1 == 1 && !a.iter().zip(b).take(count).all(holds) {
                    holding &= !(1 << number);
                }
            }
        }
        self.holding.fetch_and(holding, Ordering::Relaxed);
    }

    /// Notes the rows, the columns and the values of elements that differ.
    fn note(&self, [a, b]: [&[f64]; 2], start: u64, seen: &mut Seen) {
        let [_, width] = self.shape;
        let (mut row, mut next) = (start / width, start % width);
        for (&a, &b) in a.iter().zip(b) {
            let (in_row, column) = (row, next);
            next += 1;
            if next == width {
                (row, next) = (row + 1, 0);
            }
            if a == b {
                continue;
            }
            if self.wants_places {
                seen.rows.insert(in_row);
                seen.columns.insert(column);
            }
            note(&mut seen.distinct[0], a.to_bits());
            note(&mut seen.distinct[1], b.to_bits());
        }
    }
}
