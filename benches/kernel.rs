//! How fast the kernel is in cache, on one thread, for each dtype and instruction set.
//!
//! `cargo bench --bench kernel [-- <rounds> [<part of a name>]]`. A machine is never quiet: all cases are run in
//! turn, round after round, and the medians shown; compare figures of one run only.
//! GB are 10^9 bytes of both sides together.

#![expect(clippy::print_stdout, reason = "it is what a benchmark is for")]

use std::hint::black_box;
use std::time::Instant;

use ckptcmp::base::dtype::Dtype;
use ckptcmp::kernel::{BLOCK, DenseBlock, Isa, compare_block_with};

/// What a case compares.
#[derive(Clone, Copy, PartialEq)]
enum Blocks {
    /// Weights and nearly the same weights.
    Different,
    /// The same bytes twice.
    Identical,
}

struct Case {
    name: String,
    /// Bytes of both sides.
    bytes: usize,
    run: Box<dyn Fn()>,
    seconds: Vec<f64>,
}

/// Bytes of a side, few enough for the nearest caches.
const CACHED: usize = 1 << 17;

/// As many runs of a case as take some milliseconds.
const BYTES_PER_ROUND: usize = 40_000_000;

fn main() {
    // Cargo adds a `--bench` of its own.
    let mut arguments = std::env::args().skip(1).filter(|text| !text.starts_with('-'));
    let rounds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(15);
    let only = arguments.next();
    let mut cases = vec![copy()];
    for dtypes in [
        [Dtype::BFloat16; 2],
        [Dtype::Float16; 2],
        [Dtype::Float32; 2],
        [Dtype::Float64; 2],
        [Dtype::BFloat16, Dtype::Float32],
        [Dtype::Float8E4M3Fn; 2],
        [Dtype::Int64; 2],
    ] {
        for isa in Isa::available() {
            let name = format!("{} {} {}", dtypes[0], dtypes[1], isa.name());
            if only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
                continue;
            }
            cases.push(compare(dtypes, Blocks::Different, isa));
            if dtypes[0] == dtypes[1] {
                cases.push(compare(dtypes, Blocks::Identical, isa));
            }
        }
    }
    for _ in 0..rounds {
        for case in &mut cases {
            let runs = (BYTES_PER_ROUND / case.bytes).max(1);
            let start = Instant::now();
            for _ in 0..runs {
                (case.run)();
            }
            let seconds = start.elapsed().as_secs_f64();
            case.seconds.push(seconds / (runs * case.bytes) as f64);
        }
    }
    let copy = cases[0].speed();
    println!("{:<40} {:>7} {:>12}", "case", "GB/s", "of memcpy");
    for case in &mut cases {
        let speed = case.speed();
        println!("{:<40} {speed:>7.2} {:>12.2}", case.name, speed / copy);
    }
}

impl Case {
    /// The median, in GB/s.
    fn speed(&mut self) -> f64 {
        self.seconds.sort_by(f64::total_cmp);
        1e-9 / self.seconds[self.seconds.len() / 2]
    }
}

/// A copy, counted as reads and writes are: the same number of bytes on both sides.
fn copy() -> Case {
    let source = vec![1u8; CACHED];
    let target = std::cell::RefCell::new(vec![0u8; CACHED]);
    Case {
        name: "memcpy".to_owned(),
        bytes: 2 * CACHED,
        run: Box::new(move || {
            black_box(&mut target.borrow_mut()).copy_from_slice(black_box(&source));
        }),
        seconds: Vec::new(),
    }
}

fn compare([a, b]: [Dtype; 2], blocks: Blocks, isa: Isa) -> Case {
    let noise = if blocks == Blocks::Different { 1e-3 } else { 0.0 };
    let count = BLOCK.min(CACHED / size(a).max(size(b)));
    let sides = [(a, weights(a, count, 0.0)), (b, weights(b, count, noise))];
    let what = if blocks == Blocks::Different { "different" } else { "identical" };
    Case {
        name: format!("{a} {b} {what} {}", isa.name()),
        bytes: sides.iter().map(|(_, bytes)| bytes.len()).sum(),
        run: Box::new(move || {
            let [a, b] = [0, 1]
                .map(|side| DenseBlock { dtype: sides[side].0, bytes: black_box(&sides[side].1) });
            black_box(compare_block_with(isa, a, b, 0));
        }),
        seconds: Vec::new(),
    }
}

/// About normally distributed weights, each changed by a part of itself.
fn weights(dtype: Dtype, count: usize, noise: f64) -> Vec<u8> {
    let mut state = 1u64;
    let mut unit = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    let mut next = || {
        let weight = 0.02 * (0..12).map(|_| unit()).sum::<f64>();
        weight * (1.0 + 3.0 * noise * unit())
    };
    let mut bytes = Vec::new();
    for _ in 0..count {
        let weight = next();
        match dtype {
            Dtype::BFloat16 => bytes.extend(half::bf16::from_f64(weight).to_le_bytes()),
            Dtype::Float16 => bytes.extend(half::f16::from_f64(weight).to_le_bytes()),
            Dtype::Float32 => bytes.extend(as_float32(weight).to_le_bytes()),
            Dtype::Float64 => bytes.extend(weight.to_le_bytes()),
            // Any bits that are a number will do.
            _ => {
                let word = (weight * 1e9).to_bits().to_le_bytes();
                bytes.extend(word.iter().map(|byte| byte & 0x7e).take(size(dtype)));
            }
        }
    }
    bytes
}

#[expect(clippy::cast_possible_truncation, reason = "rounding is what is wanted")]
fn as_float32(value: f64) -> f32 {
    value as f32
}

#[expect(clippy::cast_possible_truncation, reason = "at most 16")]
fn size(dtype: Dtype) -> usize {
    dtype.size() as usize
}
