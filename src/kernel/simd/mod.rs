//! The loops of the kernel in the instructions of the machine, chosen at run time.
//!
//! An [`Isa`] can only be had if the machine is able: it is the proof that its loops may be run.
//! Their results are defined in `lanes.rs`; each algorithm is written once, in `body.rs`, over
//! the few vector operations that a file an instruction set provides.
//!
//! Loops read `bfloat16`, `float16`, `float32` and `float64` in any combination straight from
//! bytes. Elements of other dtypes are decoded to `float64` chunk by chunk first.

#![expect(
    unsafe_code,
    reason = "one of the two rooms for it: vector loads, and calls after detection"
)]

/// Hands the features of AVX-512 to a macro: those that its functions enable are those that the machine is asked for.
#[cfg(target_arch = "x86_64")]
macro_rules! with_avx512 {
    ($then:ident) => {
        $then! { "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vnni" "avx2" "fma" "f16c" "popcnt" }
    };
}

/// The same for AVX2.
#[cfg(target_arch = "x86_64")]
macro_rules! with_avx2 {
    ($then:ident) => {
        $then! { "avx2" "fma" "f16c" "popcnt" }
    };
}

/// The same for NEON.
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
macro_rules! with_neon {
    ($then:ident) => {
        $then! { "neon" }
    };
}

#[macro_use]
mod body;
#[macro_use]
mod integer;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod scalar;

use super::closeness::Closeness;
use super::exact::Buckets;
use super::lanes::{CHUNK, Chunk, Lanes, Totals, larger};
use super::spread::Counts;
use crate::base::dtype::Dtype;

/// An instruction set that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon,
    Scalar,
}

/// All of this architecture, the fastest first.
const SETS: &[Set] = &[
    #[cfg(target_arch = "x86_64")]
    Set::Avx512,
    #[cfg(target_arch = "x86_64")]
    Set::Avx2,
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Set::Neon,
    Set::Scalar,
];

impl Set {
    fn is_available(self) -> bool {
        // The standard library caches what it finds.
        #[cfg(target_arch = "x86_64")]
        macro_rules! are_detected {
            ($($feature:tt)+) => { return $(is_x86_feature_detected!($feature))&&+ };
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        macro_rules! are_detected {
            ($($feature:tt)+) => { return $(std::arch::is_aarch64_feature_detected!($feature))&&+ };
        }
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => with_avx512!(are_detected),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => with_avx2!(are_detected),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Self::Neon => with_neon!(are_detected),
            Self::Scalar => true,
        }
    }
}

impl Isa {
    /// All that this machine has, the fastest first; plain Rust is always the last.
    pub fn available() -> impl Iterator<Item = Self> {
        SETS.iter().copied().filter(|set| set.is_available()).map(Self)
    }

    /// The fastest that this machine has.
    #[must_use]
    pub fn best() -> Self {
        Self::available().next().unwrap_or(Self::SCALAR)
    }

    pub(super) const SCALAR: Self = Self(Set::Scalar);

    /// A short name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Set::Neon => "neon",
            Set::Scalar => "scalar",
        }
    }
}

/// Divisor of the numbers of elements that the loops are given.
pub(super) const ROW: usize = 32;

/// Dtypes that the loops read; `u8` because that is what a constant parameter can be.
pub(super) type Form = u8;
/// See [`Form`].
pub(super) const BFLOAT16: Form = 0;
/// See [`Form`].
pub(super) const FLOAT16: Form = 1;
/// See [`Form`].
pub(super) const FLOAT32: Form = 2;
/// See [`Form`].
pub(super) const FLOAT64: Form = 3;

/// The form of the real numbers of a dtype, if the loops read it.
pub(super) fn form(dtype: Dtype) -> Option<Form> {
    match dtype {
        Dtype::BFloat16 => Some(BFLOAT16),
        Dtype::Float16 => Some(FLOAT16),
        Dtype::Float32 | Dtype::Complex64 => Some(FLOAT32),
        Dtype::Float64 | Dtype::Complex128 => Some(FLOAT64),
        _ => None,
    }
}

/// The dtype of a form.
const fn form_dtype(form: Form) -> Dtype {
    match form {
        BFLOAT16 => Dtype::BFloat16,
        FLOAT16 => Dtype::Float16,
        FLOAT32 => Dtype::Float32,
        _ => Dtype::Float64,
    }
}

/// Bytes of a number.
const fn width(form: Form) -> usize {
    match form {
        BFLOAT16 | FLOAT16 => 2,
        FLOAT32 => 4,
        _ => 8,
    }
}

/// Findings in a row of chunks beside the sums. With NaN among the numbers it means nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Found {
    /// Numbers with `a - b` other than 0.
    pub(super) differing: u64,
    /// The first chunk with one.
    pub(super) first_differing: Option<usize>,
    /// The largest `|a - b|`.
    pub(super) largest: f64,
    /// The first chunk with it, if it is not 0.
    pub(super) largest_at: Option<usize>,
    /// The largest `|a|`, `|b|` and `|a + b|`, but only where one of them is a `float64`.
    pub(super) magnitudes: [f64; 3],
}

impl Found {
    /// Adds what is found in chunks that begin with number `chunk`.
    pub(super) fn merge(&mut self, chunk: usize, later: &Self) {
        self.differing += later.differing;
        let in_whole = |index: usize| chunk + index;
        self.first_differing = self.first_differing.or(later.first_differing.map(in_whole));
        if later.largest > self.largest {
            self.largest = later.largest;
            self.largest_at = later.largest_at.map(in_whole);
        }
        for (magnitude, later) in self.magnitudes.iter_mut().zip(later.magnitudes) {
            *magnitude = larger(*magnitude, later);
        }
    }

    /// Adds what is found in a chunk.
    #[inline(always)]
    fn note(&mut self, chunk: usize, differing: u64, largest: f64) {
        if differing > 0 {
            self.differing += differing;
            self.first_differing = self.first_differing.or(Some(chunk));
        }
        if largest > self.largest {
            self.largest = largest;
            self.largest_at = Some(chunk);
        }
    }
}

/// Calls a function of the module of an instruction set.
macro_rules! dispatch {
    ($isa:expr, $function:ident $(::<$($form:ident),*>)? ($($argument:expr),*)) => {
        match $isa.0 {
            // SAFETY: an `Isa` of this kind is made only after `is_available` found its features.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { avx512::$function $(::<$($form),*>)? ($($argument),*) },
            // SAFETY: an `Isa` of this kind is made only after `is_available` found its features.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { avx2::$function $(::<$($form),*>)? ($($argument),*) },
            // SAFETY: an `Isa` of this kind is made only after `is_available` found its features.
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Set::Neon => unsafe { neon::$function $(::<$($form),*>)? ($($argument),*) },
            Set::Scalar => scalar::$function $(::<$($form),*>)? ($($argument),*),
        }
    };
}

/// Runs an expression with two forms as constants.
macro_rules! forms {
    ($a:expr, $b:expr, |$A:ident, $B:ident| $body:expr) => {
        match $a {
            BFLOAT16 => forms!(@ BFLOAT16, $b, |$A, $B| $body),
            FLOAT16 => forms!(@ FLOAT16, $b, |$A, $B| $body),
            FLOAT32 => forms!(@ FLOAT32, $b, |$A, $B| $body),
            _ => forms!(@ FLOAT64, $b, |$A, $B| $body),
        }
    };
    (@ $a:ident, $b:expr, |$A:ident, $B:ident| $body:expr) => {{
        const $A: Form = $a;
        match $b {
            BFLOAT16 => { const $B: Form = BFLOAT16; $body }
            FLOAT16 => { const $B: Form = FLOAT16; $body }
            FLOAT32 => { const $B: Form = FLOAT32; $body }
            _ => { const $B: Form = FLOAT64; $body }
        }
    }};
}

impl Isa {
    /// Adds numbers to all sums, chunk by chunk. There are as many on both sides, a
    /// multiple of [`ROW`].
    pub(super) fn pairs(
        self,
        (a_form, a): (Form, &[u8]),
        (b_form, b): (Form, &[u8]),
        totals: &mut Totals,
    ) -> Found {
        forms!(a_form, b_form, |A, B| dispatch!(self, pairs::<A, B>(a, b, totals)))
    }

    /// Number of numbers on the second side that are not those on the first one, rounded; there are as many on both.
    pub(in crate::kernel) fn cast_misses(
        self,
        (from, wide): (Form, &[u8]),
        (to, narrow): (Form, &[u8]),
    ) -> u64 {
        forms!(from, to, |FROM, TO| dispatch!(self, cast_misses::<FROM, TO>(wide, narrow)))
    }

    /// Number of real elements that are not close, and the position of the first; there are as many on both sides.
    pub(in crate::kernel) fn beyond(
        self,
        (a_form, a): (Form, &[u8]),
        (b_form, b): (Form, &[u8]),
        closeness: &Closeness,
    ) -> (u64, Option<usize>) {
        forms!(a_form, b_form, |A, B| dispatch!(self, beyond::<A, B>(a, b, closeness)))
    }

    /// Counts the sizes of the differences of finite real elements that `spread::has_loop` says; there are as many on both
    /// sides.
    pub(in crate::kernel) fn spread(
        self,
        (a_form, a): (Form, &[u8]),
        (b_form, b): (Form, &[u8]),
        counts: &mut Counts,
    ) {
        forms!(a_form, b_form, |A, B| dispatch!(self, spread::<A, B>(a, b, counts)));
    }

    /// Adds the squares of numbers, chunk by chunk. There are a
    /// multiple of [`ROW`]. Returns their largest magnitude, but only of `float64`.
    pub(super) fn squares(self, (form, bytes): (Form, &[u8]), lanes: &mut Lanes) -> f64 {
        match form {
            BFLOAT16 => dispatch!(self, squares::<BFLOAT16>(bytes, lanes)),
            FLOAT16 => dispatch!(self, squares::<FLOAT16>(bytes, lanes)),
            FLOAT32 => dispatch!(self, squares::<FLOAT32>(bytes, lanes)),
            _ => dispatch!(self, squares::<FLOAT64>(bytes, lanes)),
        }
    }

    /// Adds a chunk of decoded numbers to all sums.
    pub(super) fn decoded_pairs(self, [a, b]: &[Chunk; 2], totals: &mut Totals) -> Found {
        dispatch!(self, decoded_pairs(a, b, totals))
    }

    /// Adds pairs of `bfloat16`, which are as many on both sides, a multiple of [`ROW`]; `None` if
    /// one is not finite.
    pub(super) fn exact_pairs(self, a: &[u8], b: &[u8], buckets: &mut Buckets) -> Option<Found> {
        dispatch!(self, exact_pairs(a, b, buckets))
    }

    /// Adds `bfloat16` elements paired with themselves, a multiple of [`ROW`]. Returns whether all
    /// are finite.
    pub(super) fn exact_squares(self, a: &[u8], buckets: &mut Buckets) -> bool {
        dispatch!(self, exact_squares(a, buckets))
    }

    /// Adds the products of a chunk.
    pub(super) fn products(self, x: &Chunk, y: &Chunk, lanes: &mut Lanes) {
        dispatch!(self, products(x, y, lanes));
    }
}
