//! Rows to columns, for tensors that are stored with their rows across the file.
//!
//! Measured on Zen 5, one thread, 128 rows of 2048 words, GB/s: element by element in tiles of 32 by 32 1.9;
//! registers of 16 bytes, a few whole rows of the target at a time, 22 (the same steps on arrays, left to the
//! compiler, 14). Square tiles are no good: lines of the target that are a power of two apart fall on the same
//! cache lines, 4 GB/s.

#![expect(unsafe_code, reason = "vector instructions")]

/// Bytes of a register.
const WIDTH: usize = 16;

/// Bytes of a cache line, the next of which is asked for while one is worked on.
const AHEAD: usize = 64;

/// Copies element `row` of line `column` of the source to element `column` of line `row` of the target. Elements have
/// `N` bytes; each side says how many elements are from line to line.
pub fn transpose<const N: usize>(
    [rows, columns]: [usize; 2],
    (from, from_stride): (&[u8], usize),
    (to, to_stride): (&mut [u8], usize),
) {
    let at = |row: usize, column: usize| {
        ((column * from_stride + row) * N, (row * to_stride + column) * N)
    };
    let lanes = (WIDTH / N).max(1);
    let tiled = [rows, columns].map(|size| if lanes > 1 { size - size % lanes } else { 0 });
    for row in (0..tiled[0]).step_by(lanes) {
        for column in (0..tiled[1]).step_by(lanes) {
            let (source, target) = at(row, column);
            let strides = [from_stride, to_stride].map(|stride| stride * N);
            if (row * N).is_multiple_of(AHEAD) {
                // No processor foresees that many lines at once: 6 % of the time of a whole comparison.
                (0..lanes).for_each(|line| prefetch(&from[source + line * strides[0]..]));
            }
            tile::<N>(&from[source..], &mut to[target..], strides);
        }
    }
    let mut copy = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
        for row in rows {
            for column in columns.clone() {
                let (source, target) = at(row, column);
                to[target..target + N].copy_from_slice(&from[source..source + N]);
            }
        }
    };
    copy(0..tiled[0], tiled[1]..columns);
    copy(tiled[0]..rows, 0..columns);
}

/// A square of elements that fills as many registers as it has rows.
#[inline(always)]
fn tile<const N: usize>(from: &[u8], to: &mut [u8], strides: [usize; 2]) {
    match N {
        1 => square::<N, 16>(from, to, strides),
        2 => square::<N, 8>(from, to, strides),
        4 => square::<N, 4>(from, to, strides),
        _ => square::<N, 2>(from, to, strides),
    }
}

#[inline(always)]
fn square<const N: usize, const SIZE: usize>(
    from: &[u8],
    to: &mut [u8],
    [from_stride, to_stride]: [usize; 2],
) {
    let mut lines = std::array::from_fn::<_, SIZE, _>(|line| {
        let mut bytes = [0; WIDTH];
        bytes.copy_from_slice(&from[line * from_stride..][..WIDTH]);
        load(bytes)
    });
    // Each step moves one bit of a line's number to the number of an element in it.
    for _ in 0..SIZE.ilog2() {
        let before = lines;
        for line in 0..SIZE / 2 {
            let [low, high] = interleaved::<N>(before[line], before[line + SIZE / 2]);
            (lines[2 * line], lines[2 * line + 1]) = (low, high);
        }
    }
    for (line, lanes) in lines.into_iter().enumerate() {
        to[line * to_stride..][..WIDTH].copy_from_slice(&stored(lanes));
    }
}

#[cfg(target_arch = "x86_64")]
use sse2::{interleaved, load, prefetch, stored};

/// Instructions that every x86-64 has.
#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_storeu_si128, _mm_unpackhi_epi8,
        _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi8,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
    };

    use super::{AHEAD, WIDTH};

    #[inline(always)]
    pub(super) fn load(bytes: [u8; WIDTH]) -> __m128i {
        // SAFETY: as many bytes as are read; SSE2 is part of x86-64.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    pub(super) fn stored(lanes: __m128i) -> [u8; WIDTH] {
        let mut bytes = [0; WIDTH];
        // SAFETY: as many bytes as are written; SSE2 is part of x86-64.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), lanes) };
        bytes
    }

    /// Asks for the bytes [`AHEAD`].
    #[inline(always)]
    pub(super) fn prefetch(bytes: &[u8]) {
        let ahead = bytes.as_ptr().wrapping_add(AHEAD);
        // SAFETY: a hint, which may be about any address; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
    }

    /// The elements of two registers in turn.
    #[inline(always)]
    pub(super) fn interleaved<const N: usize>(x: __m128i, y: __m128i) -> [__m128i; 2] {
        // SAFETY: instructions of SSE2, which is part of x86-64, on registers.
        unsafe {
            match N {
                1 => [_mm_unpacklo_epi8(x, y), _mm_unpackhi_epi8(x, y)],
                2 => [_mm_unpacklo_epi16(x, y), _mm_unpackhi_epi16(x, y)],
                4 => [_mm_unpacklo_epi32(x, y), _mm_unpackhi_epi32(x, y)],
                _ => [_mm_unpacklo_epi64(x, y), _mm_unpackhi_epi64(x, y)],
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
use plain::{interleaved, load, prefetch, stored};

#[cfg(any(test, not(target_arch = "x86_64")))]
mod plain {
    use super::WIDTH;

    #[inline(always)]
    pub(super) fn load(bytes: [u8; WIDTH]) -> [u8; WIDTH] {
        bytes
    }

    #[inline(always)]
    pub(super) fn stored(lanes: [u8; WIDTH]) -> [u8; WIDTH] {
        lanes
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn prefetch(_: &[u8]) {}

    /// The elements of two registers in turn.
    #[inline(always)]
    pub(super) fn interleaved<const N: usize>(x: [u8; WIDTH], y: [u8; WIDTH]) -> [[u8; WIDTH]; 2] {
        let byte = |at: usize| {
            let from = at / N / 2 * N + at % N;
            if (at / N).is_multiple_of(2) { x[from] } else { y[from] }
        };
        [std::array::from_fn(byte), std::array::from_fn(|at| byte(at + WIDTH))]
    }
}

#[cfg(test)]
mod tests {
    use super::{plain, transpose};

    fn check<const N: usize>() {
        for (rows, columns) in (0..40).flat_map(|rows| (0..40).map(move |columns| (rows, columns)))
        {
            let (from_stride, to_stride) = (rows + columns % 3, columns + rows % 3);
            let byte = |at: usize| (at * 7 + at / 256).to_le_bytes()[0];
            let from: Vec<u8> = (0..from_stride * columns * N).map(byte).collect();
            let mut to = vec![0xaa; to_stride * rows * N];
            let mut expected = to.clone();
            for row in 0..rows {
                for column in 0..columns {
                    let source = &from[(column * from_stride + row) * N..][..N];
                    expected[(row * to_stride + column) * N..][..N].copy_from_slice(source);
                }
            }
            transpose::<N>([rows, columns], (&from, from_stride), (&mut to, to_stride));
            assert!(to == expected, "{rows} x {columns} of {N} bytes");
        }
    }

    #[test]
    fn elements_of_every_size_are_where_they_belong() {
        check::<1>();
        check::<2>();
        check::<4>();
        check::<8>();
        check::<16>();
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn plain_rust_interleaves_as_the_machine_does() {
        use super::{interleaved, load, stored};
        fn check<const N: usize>(x: [u8; 16], y: [u8; 16]) {
            assert_eq!(
                interleaved::<N>(load(x), load(y)).map(stored),
                plain::interleaved::<N>(plain::load(x), plain::load(y)).map(plain::stored)
            );
        }
        let [x, y] =
            [0, 16].map(|first| std::array::from_fn(|at| u8::try_from(first + at).unwrap_or(0)));
        check::<1>(x, y);
        check::<2>(x, y);
        check::<4>(x, y);
        check::<8>(x, y);
    }
}
