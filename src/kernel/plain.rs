//! Blocks of plain finite real numbers with squares inside the range of `f64`, which is nearly
//! every block of a checkpoint. A block that turns out to hold anything else is given back for
//! the [general](super::general) path, which gives the same bits for all others.

use super::decode::{decode_chunk, reals_per_element};
use super::exact::{Buckets, is_exact};
use super::general::is_in_range;
use super::lanes::{CHUNK, Chunk, Lanes, Totals};
use super::simd::{FLOAT64, Found, Isa, ROW, form};
use super::stats::{Stats, Sums};
use super::{DenseBlock, size};
use crate::base::dtype::Dtype;

/// Returns whether elements are real.
pub(super) fn is_plain(dtype: Dtype) -> bool {
    reals_per_element(dtype) == 1
}

/// Compares two blocks of [plain](is_plain) dtypes; `None` if a value is not finite or not exact
/// in `f64`, or a sum is out of range.
pub(super) fn compare(isa: Isa, a: DenseBlock<'_>, b: DenseBlock<'_>, first: u64) -> Option<Stats> {
    if !a.fits() || !b.fits() {
        return None;
    }
    let (found, sums) = if is_exact(a.dtype, b.dtype) {
        let mut buckets = Buckets::new();
        let found = in_rows(a, b, |a, b| isa.exact_pairs(a, b, &mut buckets))?;
        (found, buckets.sums())
    } else {
        let mut totals = Totals::default();
        let found = if let (Some(a_form), Some(b_form)) = (form(a.dtype), form(b.dtype)) {
            in_rows(a, b, |a, b| Some(isa.pairs((a_form, a), (b_form, b), &mut totals)))?
        } else {
            compare_decoded(isa, a, b, &mut totals)
        };
        (found, totals.sums([0; 4]))
    };
    if !sums.are_finite() {
        return None;
    }
    if a.dtype == Dtype::Float64 || b.dtype == Dtype::Float64 {
        let is_in_range = found.magnitudes.into_iter().chain([found.largest]).all(is_in_range);
        if !is_in_range {
            return None;
        }
    }
    let mut stats = Stats { count: a.count(), sums, ..Stats::default() };
    if let Some(chunk) = found.first_differing {
        stats.note_differing(first, found.differing, || position(a, b, chunk, |diff| diff != 0.0));
    }
    if let Some(chunk) = found.largest_at {
        let largest = found.largest;
        stats.note_max_abs(first, largest, || position(a, b, chunk, |diff| diff.abs() == largest));
    }
    Some(stats)
}

/// The index of the first difference that is as asked for, in a chunk or in the next: loops may
/// take both at once.
fn position(
    a: DenseBlock<'_>,
    b: DenseBlock<'_>,
    chunk: usize,
    is_it: impl Fn(f64) -> bool,
) -> Option<usize> {
    const STEP: usize = 16;
    let mut values = [[0.0; CHUNK]; 2];
    (chunk..chunk + 2).find_map(|chunk| {
        for (side, values) in [a, b].into_iter().zip(&mut values) {
            side.decode(chunk, values);
        }
        let is_it = |index: usize| is_it(values[0][index] - values[1][index]);
        // Without an early end inside of a step the loop over it is vectors.
        let is_in = |start: &usize| (*start..*start + STEP).fold(false, |any, i| any | is_it(i));
        let start = (0..CHUNK).step_by(STEP).find(is_in)?;
        let index = (start..start + STEP).find(|&index| is_it(index))?;
        Some(chunk * CHUNK + index)
    })
}

/// Calls for all whole chunks, and for what is left, filled up with zeros to whole rows.
fn in_rows<'a>(
    a: DenseBlock<'a>,
    b: DenseBlock<'a>,
    mut loops: impl FnMut(&[u8], &[u8]) -> Option<Found>,
) -> Option<Found> {
    let ((a_whole, a_rest), (b_whole, b_rest)) = (a.split_whole(), b.split_whole());
    let mut found = loops(a_whole, b_whole)?;
    if !a_rest.is_empty() {
        let mut rooms = [[0; CHUNK * 8]; 2];
        let [a_room, b_room] = &mut rooms;
        let a_rest = padded(a_rest, size(a.dtype), a_room);
        let b_rest = padded(b_rest, size(b.dtype), b_room);
        found.merge(a_whole.len() / (CHUNK * size(a.dtype)), &loops(a_rest, b_rest)?);
    }
    Some(found)
}

/// Compares by decoding a chunk of both sides at a time.
fn compare_decoded(isa: Isa, a: DenseBlock<'_>, b: DenseBlock<'_>, totals: &mut Totals) -> Found {
    let mut values = [[0.0; CHUNK]; 2];
    let mut found = Found::default();
    for (chunk, _) in a.chunks(CHUNK).enumerate() {
        a.decode(chunk, &mut values[0]);
        b.decode(chunk, &mut values[1]);
        found.merge(chunk, &isa.decoded_pairs(&values, totals));
    }
    found
}

/// The result of comparing two blocks for equal bytes.
#[expect(clippy::large_enum_variant, reason = "one for a block, on the stack")]
pub(super) enum Equality {
    Different,
    /// The statistics that the other paths give for such blocks; `None` if a value is not finite, or a sum is out of range.
    Equal(Option<Stats>),
}

/// Bytes of a side that are compared at a time: when they are squared, they are in the nearest caches.
const PART: usize = 64 << 10;

/// Looks for equal bytes, and squares one side as long as they are.
pub(super) fn compare_equal(isa: Isa, a: DenseBlock<'_>, b: DenseBlock<'_>) -> Equality {
    let mut squares = Squares::of(a.dtype);
    let mut is_plain = true;
    for (part, other) in a.bytes.chunks(PART).zip(b.bytes.chunks(PART)) {
        if part != other {
            return Equality::Different;
        }
        is_plain = is_plain && squares.add(isa, DenseBlock { bytes: part, ..a });
    }
    let sums = if is_plain { squares.sums() } else { None };
    Equality::Equal(sums.map(|sums| Stats { count: a.count(), sums, ..Stats::default() }))
}

/// The sums of a block paired with itself.
#[expect(clippy::large_enum_variant, reason = "one for a block, on the stack")]
enum Squares {
    Exact(Buckets),
    InOrder(Lanes),
}

impl Squares {
    fn of(dtype: Dtype) -> Self {
        match is_exact(dtype, dtype) {
            true => Self::Exact(Buckets::new()),
            false => Self::InOrder(Lanes::default()),
        }
    }

    /// Adds a part that begins with a chunk. Returns whether its elements are finite, as far as that shows already, and in
    /// range.
    fn add(&mut self, isa: Isa, part: DenseBlock<'_>) -> bool {
        if form(part.dtype).is_none() {
            return self.add_decoded(isa, part);
        }
        let (whole, rest) = part.split_whole();
        let mut is_plain = self.add_rows(isa, part.dtype, whole);
        if !rest.is_empty() {
            let mut room = [0; CHUNK * 8];
            let width = size(part.dtype) / reals_per_element(part.dtype);
            is_plain &= self.add_rows(isa, part.dtype, padded(rest, width, &mut room));
        }
        is_plain
    }

    fn add_rows(&mut self, isa: Isa, dtype: Dtype, bytes: &[u8]) -> bool {
        match (self, form(dtype)) {
            (Self::Exact(buckets), _) => isa.exact_squares(bytes, buckets),
            (Self::InOrder(lanes), Some(form)) => {
                let largest = isa.squares((form, bytes), lanes);
                form != FLOAT64 || is_in_range(largest)
            }
            (Self::InOrder(_), None) => false,
        }
    }

    fn add_decoded(&mut self, isa: Isa, part: DenseBlock<'_>) -> bool {
        let Self::InOrder(lanes) = self else { return false };
        let mut x = [0.0; CHUNK];
        for (chunk, _) in part.chunks(CHUNK).enumerate() {
            part.decode(chunk, &mut x);
            isa.products(&x, &x, lanes);
        }
        true
    }

    /// The sums of the block, unless one is out of range.
    fn sums(self) -> Option<Sums> {
        match self {
            Self::Exact(buckets) => Some(buckets.sums()),
            Self::InOrder(lanes) => {
                let totals = Totals { squares: [lanes; 2], products: lanes, ..Totals::default() };
                Some(totals.sums([0; 4])).filter(Sums::are_finite)
            }
        }
    }
}

/// Less than a chunk of numbers of `width` bytes, filled up with zeros to a multiple of [`ROW`].
fn padded<'a>(bytes: &[u8], width: usize, room: &'a mut [u8; CHUNK * 8]) -> &'a [u8] {
    room[..bytes.len()].copy_from_slice(bytes);
    &room[..bytes.len().next_multiple_of(ROW * width)]
}

impl<'a> DenseBlock<'a> {
    /// Returns whether all elements, and differences and sums of two, are exact in `f64`.
    fn fits(self) -> bool {
        let words = self.bytes.as_chunks().0.iter();
        let bits = match self.dtype {
            Dtype::Int64 => words.fold(0, |bits, x| bits | i64::from_le_bytes(*x).unsigned_abs()),
            Dtype::UInt64 => words.fold(0, |bits, x| bits | u64::from_le_bytes(*x)),
            _ => 0,
        };
        bits < 1 << 52
    }

    /// The bytes of all whole chunks, and the rest.
    fn split_whole(self) -> (&'a [u8], &'a [u8]) {
        let chunk = CHUNK / reals_per_element(self.dtype) * size(self.dtype);
        self.bytes.split_at(self.bytes.len() / chunk * chunk)
    }

    /// Decodes a chunk of real elements.
    fn decode(self, chunk: usize, values: &mut Chunk) {
        if let Some(bytes) = self.chunks(CHUNK).nth(chunk) {
            decode_chunk(self.dtype, bytes, values);
        }
    }
}
