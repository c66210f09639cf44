//! Cases with known answers, and tensors of many blocks.

use ndarray::Array1;

use super::super::sum::Sum;
use super::*;

fn side(dtype: Dtype, bytes: &[u8]) -> DenseBlock<'_> {
    DenseBlock { dtype, bytes }
}

fn float32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn float64(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn compare_float64(a: &[f64], b: &[f64]) -> Stats {
    compare(Dtype::Float64, &float64(a), &float64(b))
}

fn compare_int64(a: &[i64], b: &[i64]) -> Stats {
    let bytes = |x: &[i64]| -> Vec<u8> { x.iter().flat_map(|x| x.to_le_bytes()).collect() };
    compare(Dtype::Int64, &bytes(a), &bytes(b))
}

/// The statistics of the blocks of a tensor.
fn blocks(dtype: Dtype, a: &[u8], b: &[u8]) -> Vec<Stats> {
    let len = BLOCK * size(dtype);
    let pairs = a.chunks(len).zip(b.chunks(len)).zip((0u64..).step_by(BLOCK));
    pairs.map(|((a, b), first)| compare_block(side(dtype, a), side(dtype, b), first)).collect()
}

fn fold(blocks: &[Stats]) -> Stats {
    blocks.iter().fold(Stats::default(), |mut stats, block| {
        stats.merge(block);
        stats
    })
}

fn compare(dtype: Dtype, a: &[u8], b: &[u8]) -> Stats {
    fold(&blocks(dtype, a, b))
}

#[track_caller]
fn assert_close(value: Option<f64>, expected: f64, tolerance: f64) {
    let value = value.unwrap();
    assert!((value - expected).abs() <= tolerance * expected.abs(), "{value:e}, not {expected:e}");
}

#[test]
fn a_tensor_of_many_blocks_agrees_with_integers() {
    let mut random = Bits(11);
    // Integers of 20 bits are exact in f32 whatever power of two they are multiplied by.
    let a: Vec<i32> =
        (0..5 * BLOCK + 777).map(|_| (random.next() >> 44) as i32 - (1 << 19)).collect();
    let b: Vec<i32> = a.iter().map(|a| a + (random.next() % 5) as i32 - 2).collect();
    let bytes =
        |x: &[i32]| float32(&x.iter().map(|&x| x as f32 * 2f32.powi(-90)).collect::<Vec<_>>());
    let stats = compare(Dtype::Float32, &bytes(&a), &bytes(&b));

    let sum = |term: fn(i128, i128) -> i128| -> i128 {
        a.iter().zip(&b).map(|(&a, &b)| term(a.into(), b.into())).sum()
    };
    let (aa, bb, ab) = (sum(|a, _| a * a), sum(|_, b| b * b), sum(|a, b| a * b));
    let dd = sum(|a, b| (a - b) * (a - b));
    let scale = 2f64.powi(-90);
    assert_close(stats.l2(), (dd as f64).sqrt() * scale, 1e-13);
    assert_close(stats.norm_a(), (aa as f64).sqrt() * scale, 1e-13);
    assert_close(stats.norm_b(), (bb as f64).sqrt() * scale, 1e-13);
    let area = (aa as f64).sqrt() * (bb as f64).sqrt();
    let exact = (aa * bb - ab * ab) as f64 / area / (area + ab as f64);
    assert!(exact < 1e-10 && stats.one_minus_cos_error().unwrap() < 1e-12);
    assert_close(stats.one_minus_cos(), exact, 1e-12);
    let absolute = sum(|a, b| (a - b).abs()) as f64 / a.len() as f64;
    assert_close(stats.mean_abs(), absolute * scale, 1e-13);
    let differing = a.iter().zip(&b).filter(|(a, b)| a != b).count();
    assert_eq!((stats.count(), stats.differing()), (a.len() as u64, differing as u64));
    let largest = a.iter().zip(&b).position(|(a, b)| (a - b).abs() == 2).unwrap();
    assert_eq!(stats.max_abs_index(), Some(largest as u64));
    assert_eq!(stats.max_abs(), Some(2.0 * scale));
}

#[test]
fn grouping_of_blocks_changes_at_most_the_last_bit() {
    let count = 9 * BLOCK - 5;
    let (a, b) =
        (elements(Dtype::BFloat16, count, 1, true), elements(Dtype::BFloat16, count, 2, true));
    let blocks = blocks(Dtype::BFloat16, &a, &b);
    let expected = fold(&blocks);
    for group in 2..=9 {
        let grouped = fold(&blocks.chunks(group).map(fold).collect::<Vec<_>>());
        assert_close(grouped.l2(), expected.l2().unwrap(), f64::EPSILON);
        assert_close(grouped.norm_a(), expected.norm_a().unwrap(), f64::EPSILON);
        assert_close(grouped.cos(), expected.cos().unwrap(), f64::EPSILON);
        let rest = |stats: &Stats| bits(&Stats { sums: Default::default(), ..*stats });
        assert_eq!(rest(&grouped), rest(&expected));
    }
    let mut with_empty = Stats::default();
    with_empty.merge(&expected);
    with_empty.merge(&Stats::default());
    assert_eq!(bits(&with_empty), bits(&expected));
}

#[test]
fn small_blocks_after_a_large_one_are_not_lost() {
    let mut sum = Sum::new(2f64.powi(54), 0);
    for _ in 0..300_000 {
        sum.merge(&Sum::new(1.0, 0));
    }
    assert_eq!(sum.value().to_f64(), 2f64.powi(54) + 300_000.0);
    sum.merge(&Sum::new(-(2f64.powi(54)), 0));
    assert_eq!(sum.value().to_f64(), 300_000.0);
    sum.merge(&Sum::new(-300_000.0, 0));
    assert!(sum.is_zero());
}

#[test]
fn agrees_with_ndarray() {
    let mut random = Bits(3);
    let a: Vec<f32> = (0..BLOCK + 100).map(|_| random.unit() as f32).collect();
    let b: Vec<f32> = (0..BLOCK + 100).map(|_| (random.unit() + 0.25) as f32).collect();
    let stats = compare(Dtype::Float32, &float32(&a), &float32(&b));
    let [a, b] = [a, b].map(|x| Array1::from_vec(x).mapv(f64::from));
    let diff = &a - &b;
    assert_close(stats.l2(), diff.dot(&diff).sqrt(), 1e-12);
    assert_close(stats.cos(), a.dot(&b) / (a.dot(&a) * b.dot(&b)).sqrt(), 1e-11);
    assert_close(stats.rel_l2(), (diff.dot(&diff) / b.dot(&b)).sqrt(), 1e-12);
    assert_close(stats.mean_abs(), diff.mapv(f64::abs).mean().unwrap(), 1e-12);
}

#[test]
fn the_cosine_of_tensors_far_apart_in_length_is_known() {
    for i in 1..100 {
        let (a, b) = (f64::from(i).sqrt(), 1e7 * f64::from(i).cbrt());
        let stats = compare_float64(&[a], &[b]);
        assert!(stats.one_minus_cos_error().unwrap() > 1e-12);
        assert_close(stats.cos(), 1.0, 1e-13);
    }
}

#[test]
fn a_common_offset_costs_no_digits() {
    let a: Vec<f32> = (0..200_000u32).map(|i| 8e6 + (i % 7) as f32).collect();
    let b: Vec<f32> = a.iter().map(|x| x + 0.5).collect();
    let stats = compare(Dtype::Float32, &float32(&a), &float32(&b));
    assert_close(stats.l2(), 0.5 * 200_000f64.sqrt(), 1e-14);
}

#[test]
fn magnitudes_far_apart_in_float32() {
    let a: Vec<f32> = (0..3000).map(|i| if i % 2 == 0 { 1e25 } else { -1e-25 }).collect();
    let zeros = vec![0.0; 3000];
    let stats = compare(Dtype::Float32, &float32(&a), &float32(&zeros));
    assert_close(stats.l2(), f64::from(1e25f32) * 1500f64.sqrt(), 1e-14);
    let b: Vec<f32> = a.iter().map(|&x| if x > 0.0 { x } else { 0.0 }).collect();
    let stats = compare(Dtype::Float32, &float32(&a), &float32(&b));
    assert_close(stats.l2(), f64::from(1e-25f32) * 1500f64.sqrt(), 1e-14);
    assert_eq!(stats.max_abs_index(), Some(1));
    let denormal = vec![f32::from_bits(1); 3000];
    let stats = compare(Dtype::Float32, &float32(&denormal), &float32(&zeros));
    assert_close(stats.l2(), 2f64.powi(-149) * 3000f64.sqrt(), 1e-14);
}

#[test]
fn float64_squares_beyond_the_range_are_scaled() {
    for unit in [1e200, 1e-200, 1e308 / 100.0, 1e154, 1e-154, 2f64.powi(-400), 2f64.powi(400)] {
        let stats = compare_float64(&[3.0 * unit, 0.0, unit], &[0.0, 4.0 * unit, unit]);
        assert_close(stats.l2(), 5.0 * unit, 1e-15);
        assert_close(stats.norm_b(), unit * 17f64.sqrt(), 1e-15);
        assert_close(stats.cos(), 1.0 / 170f64.sqrt(), 1e-15);
        assert_close(stats.mean_abs(), 7.0 / 3.0 * unit, 1e-15);
        assert_eq!((stats.max_abs(), stats.max_abs_index()), (Some(4.0 * unit), Some(1)));
    }
    let least = f64::from_bits(1);
    let stats = compare_float64(&[3.0 * least, 0.0], &[0.0, 4.0 * least]);
    assert_eq!(stats.l2(), Some(5.0 * least));
}

#[test]
fn blocks_of_different_scale_add_up() {
    let tiny = compare_float64(&[3e-200], &[0.0]);
    let one = compare_float64(&[3.0], &[0.0]);
    let huge = compare_float64(&[3e200, 0.0], &[0.0, 4e200]);
    assert_close(fold(&[tiny, tiny, tiny, tiny]).l2(), 6e-200, 1e-15);
    assert_close(fold(&[tiny, one, one, one, one, tiny]).l2(), 6.0, 1e-15);
    for order in [[tiny, one, huge], [huge, one, tiny], [one, huge, tiny]] {
        assert_close(fold(&order).l2(), 5e200, 1e-15);
        assert_eq!(fold(&order).max_abs(), Some(4e200));
        assert!(fold(&order).cos().unwrap().abs() < 1e-300);
    }
}

#[test]
fn a_tiny_difference_next_to_huge_equal_values_is_found() {
    let least = f64::from_bits(1);
    let stats = compare_float64(&[1.7e308, least, 1.0], &[1.7e308, 0.0, 1.0]);
    assert_eq!((stats.l2(), stats.cos(), stats.differing()), (Some(least), Some(1.0), 1));
    assert_eq!((stats.max_abs(), stats.first_differing()), (Some(least), Some(1)));
}

#[test]
fn what_leaves_the_range_of_f64_is_not_a_number_that_lies() {
    let stats = compare_float64(&[1.0, 1.7e308], &[0.0, -1.7e308]);
    assert_eq!((stats.l2(), stats.max_abs()), (None, None));
    assert_eq!((stats.max_abs_index(), stats.cos()), (Some(1), Some(-1.0)));
    assert_eq!((stats.rel_l2(), stats.mean_abs()), (Some(2.0), Some(1.7e308)));
    assert_close(stats.norm_a(), 1.7e308, 1e-15);
    let stats = compare_float64(&[1.7e308; 2], &[1.7e308; 2]);
    assert_eq!((stats.l2(), stats.norm_a(), stats.cos()), (Some(0.0), None, Some(1.0)));
}

#[test]
fn sixty_four_bit_integers_are_compared_exactly() {
    let stats = compare_int64(&[1 << 53, 5], &[(1 << 53) + 1, 5]);
    assert_eq!((stats.l2(), stats.differing(), stats.max_abs()), (Some(1.0), 1, Some(1.0)));
    let stats = compare_int64(&[i64::MIN], &[i64::MAX]);
    assert_eq!(stats.l2(), Some(2f64.powi(64)));

    let a = (u64::MAX - 1).to_le_bytes();
    let stats = compare(Dtype::UInt64, &u64::MAX.to_le_bytes(), &a);
    assert_eq!((stats.l2(), stats.differing()), (Some(1.0), 1));
    let minus_one = (-1i64).to_le_bytes();
    let mixed = compare_block(side(Dtype::UInt64, &[255; 8]), side(Dtype::Int64, &minus_one), 0);
    assert_eq!((mixed.l2(), mixed.is_identical()), (Some(2f64.powi(64)), false));

    let next = ((1i64 << 53) + 1).to_le_bytes();
    let rounded = 2f64.powi(53).to_le_bytes();
    let mixed = compare_block(side(Dtype::Int64, &next), side(Dtype::Float64, &rounded), 0);
    assert_eq!((mixed.l2(), mixed.differing()), (Some(1.0), 1));
}

#[test]
fn equal_values_need_not_be_identical() {
    let stats = compare(Dtype::Float32, &float32(&[0.0, 1.0]), &float32(&[-0.0, 1.0]));
    assert_eq!((stats.differing(), stats.l2(), stats.cos()), (0, Some(0.0), Some(1.0)));
    assert!(!stats.is_identical());
    let stats = compare(Dtype::Bool, &[0, 1, 255], &[0, 2, 1]);
    assert_eq!((stats.differing(), stats.is_identical()), (0, false));
    assert_eq!(stats.norm_a(), Some(2f64.sqrt()));
    let half = compare_block(
        side(Dtype::BFloat16, &[0x80, 0x3f]),
        side(Dtype::Float32, &1f32.to_le_bytes()),
        0,
    );
    assert_eq!((half.differing(), half.l2(), half.is_identical()), (0, Some(0.0), false));
}

#[test]
fn zeros_and_nothing() {
    let nothing = Stats::default();
    assert_eq!(
        (nothing.l2(), nothing.cos(), nothing.mean_abs()),
        (Some(0.0), Some(1.0), Some(0.0))
    );
    let zeros = compare_float64(&[0.0; 3], &[0.0; 3]);
    assert_eq!((zeros.l2(), zeros.cos(), zeros.rel_l2()), (Some(0.0), Some(1.0), Some(0.0)));
    let one_zero = compare_float64(&[1.0, 2.0], &[0.0; 2]);
    assert_eq!((one_zero.cos(), one_zero.one_minus_cos(), one_zero.rel_l2()), (None, None, None));
    assert_eq!(one_zero.l2(), Some(5f64.sqrt()));
}

#[test]
fn one_non_finite_element_anywhere_is_counted() {
    let count = 2 * CHUNK + 3;
    for dtype in [Dtype::Float16, Dtype::Float32, Dtype::Float64] {
        for (bad, nan, inf) in [(f32::NAN, 1, 0), (f32::INFINITY, 0, 1), (f32::NEG_INFINITY, 0, 1)]
        {
            for at in [0, 1, 16, CHUNK - 1, CHUNK, count - 1] {
                let encode = |x: f32| match dtype {
                    Dtype::Float16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                    Dtype::Float32 => x.to_le_bytes().to_vec(),
                    _ => f64::from(x).to_le_bytes().to_vec(),
                };
                let good: Vec<u8> = (0..count).flat_map(|i| encode((i % 9) as f32)).collect();
                let mut broken = good.clone();
                broken[at * size(dtype)..(at + 1) * size(dtype)].copy_from_slice(&encode(bad));
                let stats = compare(dtype, &good, &broken);
                assert_eq!((stats.nan(), stats.inf()), ([0, nan], [0, inf]), "{dtype} {at}");
                assert_eq!((stats.differing(), stats.first_differing()), (1, Some(at as u64)));
                assert_eq!((stats.l2(), stats.cos(), stats.one_minus_cos()), (None, None, None));
                assert_eq!((stats.norm_b(), stats.mean_abs(), stats.rel_l2()), (None, None, None));
                assert_eq!((stats.max_abs(), stats.max_abs_index()), (Some(0.0), None));
                assert_eq!(stats.norm_a(), compare(dtype, &good, &good).norm_a());
                let both = compare(dtype, &broken, &broken);
                assert_eq!((both.nan(), both.inf()), ([nan; 2], [inf; 2]));
                assert_eq!((both.differing(), both.is_identical()), (nan, true));
            }
        }
    }
}

#[test]
fn ties_for_the_largest_difference_go_to_the_lowest_index() {
    for places in [[5, 6], [15, 16], [CHUNK - 1, CHUNK], [3, BLOCK], [BLOCK - 1, 2 * BLOCK]] {
        let a = vec![1.0f32; 2 * BLOCK + 1];
        let mut b = a.clone();
        b[places[0]] = 3.0;
        b[places[1]] = -1.0;
        b[0] = 1.5;
        let stats = compare(Dtype::Float32, &float32(&a), &float32(&b));
        assert_eq!(stats.max_abs_index(), Some(places[0] as u64));
        assert_eq!((stats.first_differing(), stats.differing()), (Some(0), 3));
    }
}

#[test]
fn complex_elements_are_pairs_with_a_modulus() {
    let stats =
        compare(Dtype::Complex64, &float32(&[1.0, 0.0, 3.0, 4.0]), &float32(&[0.0, 1.0, 0.0, 0.0]));
    assert_eq!((stats.count(), stats.differing()), (2, 2));
    assert_eq!((stats.max_abs(), stats.max_abs_index()), (Some(5.0), Some(1)));
    assert_eq!((stats.cos(), stats.mean_abs()), (Some(0.0), Some((5.0 + 2f64.sqrt()) / 2.0)));
    assert_close(stats.l2(), 27f64.sqrt(), 1e-15);

    let (real, complex) = (float32(&[2.0, 7.0]), float64(&[2.0, 0.0, 7.0, f64::NAN]));
    let stats = compare_block(side(Dtype::Float32, &real), side(Dtype::Complex128, &complex), 0);
    assert_eq!((stats.differing(), stats.nan(), stats.count()), (1, [0, 1], 2));
    let huge = float64(&[3e300, 4e300]);
    let stats = compare(Dtype::Complex128, &huge, &float64(&[0.0; 2]));
    assert_close(stats.max_abs(), 5e300, 1e-15);
    assert_close(stats.l2(), 5e300, 1e-15);
}

#[test]
fn the_error_of_one_minus_cos_is_known_where_it_is_large() {
    let mut random = Bits(9);
    let a: Vec<f32> = (0..5000).map(|_| random.unit() as f32).collect();
    let close_to = |b: Vec<f32>| {
        compare(Dtype::Float32, &float32(&a), &float32(&b)).one_minus_cos_error().unwrap()
    };
    assert!(close_to(a.iter().map(|x| x * (1.0 + 2f32.powi(-10))).collect()) > 1e-12);
    assert!(close_to(a.iter().map(|x| x + 1e-4).collect()) < 1e-12);
    assert!(close_to(a.iter().map(|x| -x).collect()) < 1e-12);
    assert_eq!(close_to(a.clone()), 0.0);
    let doubled: Vec<f32> = a.iter().map(|x| 2.0 * x).collect();
    let stats = compare(Dtype::Float32, &float32(&a), &float32(&doubled));
    assert!(stats.one_minus_cos().unwrap() < 1e-14);
    assert_eq!(stats.one_minus_cos_error(), Some(f64::INFINITY));
}

#[test]
fn sums_are_what_the_definition_says() {
    let mut random = Bits(5);
    let a: Vec<f64> = (0..BLOCK).map(|_| random.unit()).collect();
    let b: Vec<f64> = (0..BLOCK).map(|_| random.unit()).collect();
    let mut totals = [0.0; 16];
    for (a, b) in a.chunks(1024).zip(b.chunks(1024)) {
        let mut lanes = [0.0; 16];
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            lanes[index % 16] = (a - b).mul_add(a - b, lanes[index % 16]);
        }
        for lane in 0..16 {
            totals[lane] += lanes[lane];
        }
    }
    let mut tree = totals.to_vec();
    while tree.len() > 1 {
        tree = tree.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    assert_eq!(compare_float64(&a, &b).l2(), Some(tree[0].sqrt()));
}

/// So that another machine, compiler or instruction set that gives other bits does not go unseen.
#[test]
fn the_bits_of_results_are_pinned() {
    let mut found = Vec::new();
    for dtype in [Dtype::BFloat16, Dtype::Float64, Dtype::Complex64] {
        let mut random = Bits(21);
        let mut encode = |shift: f64| -> Vec<u8> {
            let mut next = || random.unit() + shift;
            let reals = (BLOCK + 333) * if dtype == Dtype::Complex64 { 2 } else { 1 };
            (0..reals)
                .flat_map(|_| match dtype {
                    Dtype::BFloat16 => half::bf16::from_f64(next()).to_le_bytes().to_vec(),
                    Dtype::Float64 => next().to_le_bytes().to_vec(),
                    _ => (next() as f32).to_le_bytes().to_vec(),
                })
                .collect()
        };
        let stats = compare(dtype, &encode(0.0), &encode(0.125));
        found.extend([
            stats.l2(),
            stats.norm_a(),
            stats.norm_b(),
            stats.one_minus_cos(),
            stats.mean_abs(),
        ]);
    }
    let found: Vec<u64> = found.into_iter().map(|x| x.unwrap().to_bits()).collect();
    let expected = [
        0x4072_b02f_9f67_19a4,
        0x406a_2694_00b3_0c38,
        0x406a_c095_5a6d_67cc,
        0x3fef_f11a_db9d_2129,
        0x3fe5_8d77_eab6_d814,
        0x4072_b034_f025_4d44,
        0x406a_2694_866a_8ade,
        0x406a_c097_a5aa_c4e6,
        0x3fef_f129_9b68_7f19,
        0x3fe5_8d7f_e74a_fd0b,
        0x407a_740a_f3c5_44b2,
        0x4072_7b71_f9a2_61c2,
        0x4072_ed3a_8794_ed7a,
        0x3fef_ff99_0bce_6eb6,
        0x3ff0_db39_3cf8_2150,
    ];
    assert_eq!(found, expected, "{found:#x?}");
}
