//! The kernel against exact arithmetic, and its paths against one another.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "tests of arithmetic on bits"
)]

mod metrics;
mod oracle;

use proptest::prelude::*;

use self::oracle::{Oracle, float8, number};
use super::decode::decode_chunk;
use super::lanes::CHUNK;
use super::simd::Isa;
use super::{
    BLOCK, DenseBlock, Stats, compare_block, compare_block_with, general, plain, rounded, size,
};
use crate::base::dtype::Dtype;

const ALL: [Dtype; 20] = [
    Dtype::Float64,
    Dtype::Float32,
    Dtype::Float16,
    Dtype::BFloat16,
    Dtype::Float8E4M3Fn,
    Dtype::Float8E4M3Fnuz,
    Dtype::Float8E5M2,
    Dtype::Float8E5M2Fnuz,
    Dtype::Float8E8M0Fnu,
    Dtype::Int64,
    Dtype::Int32,
    Dtype::Int16,
    Dtype::Int8,
    Dtype::UInt64,
    Dtype::UInt32,
    Dtype::UInt16,
    Dtype::UInt8,
    Dtype::Bool,
    Dtype::Complex128,
    Dtype::Complex64,
];

/// Random bits of a fixed sequence.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    /// A real number in `[-1, 1)`.
    fn unit(&mut self) -> f64 {
        (self.next() as i64) as f64 / 2f64.powi(63)
    }
}

/// Every bit of the statistics.
fn bits(stats: &Stats) -> String {
    format!("{stats:?}")
}

/// Elements of random bits, of which the finite ones cover the whole range of the dtype.
fn elements(dtype: Dtype, count: usize, seed: u64, is_finite: bool) -> Vec<u8> {
    let mut bytes = Bits(seed).bytes(count * size(dtype));
    if is_finite {
        let mut values = [0.0; CHUNK];
        for element in bytes.chunks_mut(size(dtype)) {
            decode_chunk(dtype, element, &mut values);
            if !values.iter().all(|value| value.is_finite()) {
                element.fill(0x21);
            }
        }
    }
    bytes
}

/// Compares a pair with the oracle in everything that it knows.
fn check(a: DenseBlock<'_>, b: DenseBlock<'_>) {
    let oracle = Oracle::new(a, b);
    let stats = compare_block(a, b, 1000);
    let case = format!("{} {} of {}: {stats:?}", a.dtype, b.dtype, stats.count);
    assert_eq!(stats.differing, oracle.differing.len() as u64, "{case}");
    assert_eq!(stats.first_differing, oracle.differing.first().map(|&x| x as u64 + 1000), "{case}");
    assert_eq!((stats.nan, stats.inf), (oracle.nan, oracle.inf), "{case}");
    assert_eq!(stats.is_identical, a.dtype == b.dtype && a.bytes == b.bytes, "{case}");

    let close = |x: f64, y: f64, tolerance: f64| {
        assert!((x - y).abs() <= tolerance * y.abs() + 5e-324, "{x:e} against {y:e}, {case}");
    };
    let is_finite = oracle.nan == [0; 2] && oracle.inf == [0; 2];
    for (side, exact, norm) in [(0, &oracle.aa, stats.norm_a()), (1, &oracle.bb, stats.norm_b())] {
        let exact = number(exact.sqrt());
        let is_known = oracle.nan[side] + oracle.inf[side] == 0 && exact.is_finite();
        assert_eq!(norm.is_some(), is_known, "{case}");
        norm.into_iter().for_each(|norm| close(norm, exact, 1e-13));
    }

    let largest =
        oracle.squares.iter().map(|(_, square)| number(square.sqrt())).fold(0.0, f64::max);
    close(stats.max_abs, largest, 4e-16);
    if let (Some(index), true) = (stats.max_abs_index, largest.is_finite()) {
        let (_, square) = oracle.squares.iter().find(|(i, _)| *i as u64 + 1000 == index).unwrap();
        close(number(square.sqrt()), largest, 4e-16);
    }
    assert_eq!(stats.max_abs_index.is_some(), largest > 0.0, "{case}");

    let distance = number(oracle.dd().sqrt());
    assert_eq!(stats.l2().is_some(), is_finite && distance.is_finite(), "{case}");
    stats.l2().into_iter().for_each(|l2| close(l2, distance, 1e-13));
    if is_finite {
        let total: f64 =
            oracle.squares.iter().map(|(_, x)| number(x.sqrt()) / stats.count as f64).sum();
        stats.mean_abs().into_iter().for_each(|mean| close(mean, total, 1e-13));
        assert!(stats.mean_abs().is_some() || total.is_infinite() || total > 1e308);
    }
    let is_angle = match (oracle.aa.is_zero(), oracle.bb.is_zero()) {
        (false, false) | (true, true) => is_finite,
        _ => false,
    };
    assert_eq!(stats.cos().is_some(), is_angle, "{case}");
    assert_eq!(stats.one_minus_cos().is_some(), is_angle, "{case}");
    if distance == 0.0 && is_finite {
        assert_eq!((stats.cos(), stats.one_minus_cos()), (Some(1.0), Some(0.0)), "{case}");
    } else if is_angle {
        let error = stats.one_minus_cos_error().unwrap();
        let exact = oracle.one_minus_cos();
        if error.is_finite() {
            close(stats.one_minus_cos().unwrap(), exact, error + 1e-15);
        }
        assert!((stats.cos().unwrap() - (1.0 - exact)).abs() < 1e-13, "{case}");
    }
}

#[test]
fn every_pair_of_dtypes_agrees_with_exact_arithmetic() {
    for a in ALL {
        for b in ALL {
            for (seed, count, is_finite) in
                [(1, 37, false), (2, 37, true), (3, 1, true), (4, 0, true)]
            {
                let a_bytes = elements(a, count, seed, is_finite);
                let b_bytes = elements(b, count, seed + 10, is_finite);
                check(
                    DenseBlock { dtype: a, bytes: &a_bytes },
                    DenseBlock { dtype: b, bytes: &b_bytes },
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_isa_gives_the_bits_of_the_definition(
        dtypes in [0..ALL.len(), 0..ALL.len()],
        count in 0usize..1200,
        seed in any::<u64>(),
        is_finite in any::<bool>(),
    ) {
        let dtypes = dtypes.map(|index| ALL[index]);
        let a_bytes = elements(dtypes[0], count, seed, is_finite);
        let b_bytes = elements(dtypes[1], count, !seed, is_finite);
        let a = DenseBlock { dtype: dtypes[0], bytes: &a_bytes };
        let b = DenseBlock { dtype: dtypes[1], bytes: &b_bytes };
        let expected = bits(&compare_block_with(Isa::SCALAR, a, b, 0));
        for isa in Isa::available() {
            prop_assert_eq!(bits(&compare_block_with(isa, a, b, 0)), expected.clone());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nearly_equal_elements_agree_with_exact_arithmetic(
        dtype in 0..ALL.len(),
        count in 0usize..80,
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..6),
        seed in any::<u64>(),
        is_finite in any::<bool>(),
    ) {
        let dtype = ALL[dtype];
        let a = elements(dtype, count, seed, is_finite);
        let mut b = a.clone();
        for (index, bit) in flips {
            if !b.is_empty() {
                let index = index.index(b.len());
                b[index] ^= 1 << bit;
            }
        }
        check(DenseBlock { dtype, bytes: &a }, DenseBlock { dtype, bytes: &b });
    }
}

#[test]
fn all_paths_give_the_same_bits() {
    for a in ALL {
        for b in ALL {
            for count in [0, 1, 15, 16, 17, 511, 512, 1023, 1024, 1025, 2500] {
                let (a_bytes, b_bytes) = (elements(a, count, 5, true), elements(b, count, 6, true));
                let (a, b) = (
                    DenseBlock { dtype: a, bytes: &a_bytes },
                    DenseBlock { dtype: b, bytes: &b_bytes },
                );
                let expected = Stats {
                    is_identical: count == 0 && a.dtype == b.dtype,
                    not_rounded: compare_block_with(Isa::SCALAR, a, b, 7).not_rounded(),
                    ..general::compare(Isa::SCALAR, a, b, 7)
                };
                let equal = bits(&general::compare(Isa::SCALAR, a, a, 7));
                for isa in Isa::available() {
                    let case = format!("{} {} of {count}, {}", a.dtype, b.dtype, isa.name());
                    let found = compare_block_with(isa, a, b, 7);
                    assert_eq!(bits(&found), bits(&expected), "{case}");
                    assert_eq!(bits(&compare_block_with(isa, a, a, 7)), equal, "{case}");
                    if let (true, Some(found)) =
                        (plain::is_plain(a.dtype), plain::compare(isa, a, a, 7))
                    {
                        assert_eq!(bits(&found), equal, "{case}");
                    }
                }
            }
        }
    }
}

/// Words as they are in checkpoints and as they are not.
fn bfloat16_words(kind: usize, count: usize, seed: u64) -> Vec<u8> {
    let mut random = Bits(seed);
    let mut word = || {
        let bits = random.next();
        let fraction = bits as u16 & 0x807f;
        let exponent = |least: u64, span: u64| ((least + (bits >> 20) % span) << 7) as u16;
        match kind {
            // One window is enough; or needs outliers on both ends; or cannot be found.
            0 => fraction | exponent(110, 15),
            1 if (bits >> 40).is_multiple_of(64) => fraction | exponent(1, 254),
            1 => fraction | exponent(112, 10),
            2 => fraction | exponent(1, 254),
            // Denormals and zeros; the largest numbers; mostly zeros of both signs.
            3 => fraction | exponent(0, 2),
            4 => fraction | exponent(250, 5),
            5 if (bits >> 40).is_multiple_of(4) => fraction | exponent(120, 20),
            5 => bits as u16 & 0x8000,
            // The extremes of the limbs.
            6 => 0x7f | (113 + 11 * (bits >> 20 & 1) as u16) << 7 | (bits as u16 & 0x8000),
            _ => bits as u16,
        }
    };
    (0..count).flat_map(|_| word().to_le_bytes()).collect()
}

#[test]
fn bfloat16_sums_are_the_same_bits_on_every_isa() {
    for kind in 0..8 {
        for other in 0..8 {
            for count in (0..67).chain([1023, 1024, 1025, 2047, 2048, 2049, 7000]) {
                let bytes =
                    [(kind, 1), (other, 2)].map(|(kind, seed)| bfloat16_words(kind, count, seed));
                let [a, b] =
                    [0, 1].map(|i| DenseBlock { dtype: Dtype::BFloat16, bytes: &bytes[i] });
                let expected = bits(&compare_block_with(Isa::SCALAR, a, b, 3));
                for isa in Isa::available() {
                    let found = bits(&compare_block_with(isa, a, b, 3));
                    assert_eq!(found, expected, "{kind} {other} of {count}, {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_block_of_the_largest_limbs_does_not_overflow() {
    let mut a = [0xff, 0x3f].repeat(BLOCK);
    // Eleven binades more, once a chunk: all others are as large as a low limb can be.
    a.chunks_mut(2 * CHUNK).for_each(|chunk| chunk[..2].copy_from_slice(&[0x7f, 0x45]));
    for b in [[0xff, 0x3f], [0xff, 0xbf], [0x7f, 0x3f]] {
        let b = b.repeat(BLOCK);
        let [a, b] = [&a, &b].map(|bytes| DenseBlock { dtype: Dtype::BFloat16, bytes });
        let expected = bits(&compare_block_with(Isa::SCALAR, a, b, 0));
        for isa in Isa::available() {
            assert_eq!(bits(&compare_block_with(isa, a, b, 0)), expected, "{}", isa.name());
        }
    }
}

#[test]
fn non_finite_elements_are_not_taken_by_a_quick_path() {
    for dtype in ALL {
        let bytes = elements(dtype, 3000, 8, false);
        let side = DenseBlock { dtype, bytes: &bytes };
        let expected = bits(&general::compare(Isa::SCALAR, side, side, 0));
        for isa in Isa::available() {
            let stats = compare_block_with(isa, side, side, 0);
            assert_eq!(bits(&stats), expected, "{dtype}, {}", isa.name());
            assert!(stats.is_identical);
            assert_eq!(stats.differing, stats.nan[0], "{dtype}: NaN differs from itself");
        }
    }
}

#[test]
fn float16_and_bfloat16_decode_every_pattern() {
    for start in (0..=u16::MAX).step_by(CHUNK) {
        let patterns: Vec<u16> = (0..CHUNK as u16).map(|i| start + i).collect();
        let bytes: Vec<u8> = patterns.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut values = [0.0; CHUNK];
        decode_chunk(Dtype::Float16, &bytes, &mut values);
        for (value, &pattern) in values.iter().zip(&patterns) {
            assert_eq!(same(*value), same(half::f16::from_bits(pattern).to_f64()), "{pattern:#x}");
        }
        decode_chunk(Dtype::BFloat16, &bytes, &mut values);
        for (value, &pattern) in values.iter().zip(&patterns) {
            assert_eq!(same(*value), same(half::bf16::from_bits(pattern).to_f64()), "{pattern:#x}");
        }
    }
}

/// The bits of a number; all NaNs are the same.
fn same(value: f64) -> u64 {
    if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() }
}

#[test]
fn float8_decodes_every_pattern() {
    type Is = fn(u8) -> bool;
    let formats: [(Dtype, u32, i32, Is, Is); 4] = [
        (Dtype::Float8E4M3Fn, 3, 7, |code| code & 0x7f == 0x7f, |_| false),
        (Dtype::Float8E5M2, 2, 15, |code| code & 0x7f > 0x7c, |code| code & 0x7f == 0x7c),
        (Dtype::Float8E4M3Fnuz, 3, 8, |code| code == 0x80, |_| false),
        (Dtype::Float8E5M2Fnuz, 2, 16, |code| code == 0x80, |_| false),
    ];
    let codes: Vec<u8> = (0..=255).collect();
    for (dtype, mantissa_bits, bias, is_nan, is_inf) in formats {
        let mut values = [0.0; CHUNK];
        decode_chunk(dtype, &codes, &mut values);
        for &code in &codes {
            let expected = float8(code, mantissa_bits, bias, is_nan, is_inf);
            assert_eq!(same(values[usize::from(code)]), same(expected), "{dtype} {code:#x}");
        }
        let largest = values.iter().copied().filter(|x| x.is_finite()).fold(0.0, f64::max);
        let documented = match dtype {
            Dtype::Float8E4M3Fn => 448.0,
            Dtype::Float8E4M3Fnuz => 240.0,
            _ => 57344.0,
        };
        assert_eq!(largest, documented, "{dtype}");
    }
}

#[test]
fn a_float8_that_is_a_scale_is_a_power_of_two() {
    let mut values = [0.0; CHUNK];
    decode_chunk(Dtype::Float8E8M0Fnu, &[0, 1, 127, 130, 254, 255], &mut values);
    assert_eq!(values[..5], [2f64.powi(-127), 2f64.powi(-126), 1.0, 8.0, 2f64.powi(127)]);
    assert!(values[5].is_nan());
    assert_eq!(rounded(Dtype::Float8E8M0Fnu, 5.9), 4.0);
    assert_eq!(rounded(Dtype::Float8E8M0Fnu, 6.1), 8.0);
}

#[test]
fn rounding_is_to_the_nearest_number_of_the_dtype() {
    for bits in (0..=u16::MAX).step_by(7) {
        let value = half::f16::from_bits(bits).to_f64();
        assert!(rounded(Dtype::Float16, value) == value || value.is_nan(), "{value}");
        let value = half::bf16::from_bits(bits).to_f64();
        assert!(rounded(Dtype::BFloat16, value) == value || value.is_nan(), "{value}");
        for scale in [1.2345e-7, -3.21, 1e-42] {
            let value = f32::from(bits) * scale;
            let nearest =
                [half::f16::from_f32(value).to_f64(), half::bf16::from_f32(value).to_f64()];
            let found =
                [Dtype::Float16, Dtype::BFloat16].map(|dtype| rounded(dtype, f64::from(value)));
            assert_eq!(found, nearest, "{value}");
        }
    }
    assert_eq!(rounded(Dtype::Float8E4M3Fn, 17.0), 16.0);
    assert_eq!(rounded(Dtype::Float8E5M2, -1.4), -1.5);
    assert_eq!(rounded(Dtype::Float16, 1e6), f64::INFINITY);
    assert_eq!(rounded(Dtype::Int32, 2.5), 2.5);
}
