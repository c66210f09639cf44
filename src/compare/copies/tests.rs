//! Values made of several copies, held against values made by hand.

#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

use std::io::Write;
use std::sync::atomic::AtomicU64;

use tempfile::NamedTempFile;

use crate::base::dtype::Dtype;
use crate::compare::{Outcome, TensorComparison, Wanted, compare};
use crate::kernel::BLOCK;
use crate::names::Name;
use crate::pairing::Pair;
use crate::storage::{FileId, FileSet, Region};
use crate::tensor::testing::Random;
use crate::tensor::{ByteOrder, LogicalTensor, Merge, StoredTensor};

/// Vectors one behind the other in one file.
#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    file: Option<NamedTempFile>,
    files: FileSet,
}

impl Disk {
    fn put(&mut self, values: &[f64], dtype: Dtype) -> (u64, u64, Dtype) {
        let start = self.bytes.len() as u64;
        for value in values {
            match dtype {
                Dtype::Float32 => self.bytes.extend((*value as f32).to_le_bytes()),
                _ => self.bytes.extend(value.to_le_bytes()),
            }
        }
        (start, values.len() as u64, dtype)
    }

    fn written(&mut self) -> FileId {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(&self.bytes).unwrap();
        let id = self.files.add(file.path()).unwrap();
        self.file = Some(file);
        id
    }
}

fn tensor(file: FileId, (offset, len, dtype): (u64, u64, Dtype), name: &str) -> LogicalTensor {
    let storage = Region { file, offset, len: len * dtype.size() };
    let stored = StoredTensor::contiguous(dtype, vec![len], storage, ByteOrder::Little).unwrap();
    LogicalTensor::from_stored(&stored, name)
}

fn on(threads: usize, sides: [LogicalTensor; 2], files: &FileSet) -> TensorComparison {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let pair = Pair { name: Name::new("norm"), sides, rows_left_out: [0, 0], tied_side: None };
    let wanted = |_: &Pair| Wanted { one_minus_cos: true, ..Wanted::default() };
    pool.install(|| compare(&[pair], wanted, [files; 2], &AtomicU64::new(0))).remove(0)
}

fn stats(found: &TensorComparison) -> &crate::kernel::Stats {
    let Outcome::Compared(stats) = &found.outcome else { unreachable!("{found:?}") };
    stats
}

const LEN: usize = 5 * BLOCK + 77;

/// Three copies, the second of them in two halves of which only one is there; they differ here and there.
fn copies() -> [Vec<f64>; 3] {
    let mut random = Random(5);
    let first: Vec<f64> =
        (0..LEN).map(|_| f64::from((random.below(1 << 20) as f32 - 3e5) / 7e4)).collect();
    let mut changed = |every: u64| -> Vec<f64> {
        let change = |value: &f64| match random.below(every) {
            0 => *value * 2.0,
            _ => *value,
        };
        first.iter().map(change).collect()
    };
    let others = [changed(9), changed(100_000)];
    let [second, third] = others;
    [first, second, third]
}

const HALF: usize = LEN / 2;

fn whole(disk: &mut Disk, copies: &[Vec<f64>; 3], more: &[f64]) -> [LogicalTensor; 2] {
    let [first, second, third] = copies.each_ref().map(|copy| disk.put(copy, Dtype::Float32));
    let expected = disk.put(more, Dtype::Float64);
    let file = disk.written();
    let first = tensor(file, first, "first");
    let cut = HALF as u64;
    let (offset, _, dtype) = second;
    let mut head = first.slice(0, 0, cut).unwrap();
    head.add_copy(tensor(file, (offset, cut, dtype), "second")).unwrap();
    let tail = first.slice(0, cut, LEN as u64 - cut).unwrap();
    let mut whole = LogicalTensor::concat(0, [head, tail]).unwrap();
    whole.add_copy(tensor(file, third, "third")).unwrap();
    [whole, tensor(file, expected, "expected")]
}

fn by_hand(copies: &[Vec<f64>; 3], value: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let of = |index: usize| match index < HALF {
        true => value(&[copies[0][index], copies[1][index], copies[2][index]]),
        false => value(&[copies[0][index], copies[2][index]]),
    };
    // Once put together a value is of the stored dtype.
    (0..LEN).map(|index| f64::from(of(index) as f32)).collect()
}

#[test]
fn the_value_of_several_copies_is_that_made_by_hand_for_any_number_of_threads() {
    let copies = copies();
    let mean = |values: &[f64]| match values.iter().all(|value| *value == values[0]) {
        true => values[0],
        false => values.iter().sum::<f64>() / values.len() as f64,
    };
    let sum = |values: &[f64]| values.iter().sum();
    let first = |values: &[f64]| values[0];
    let cases: [(Merge, Vec<f64>); 4] = [
        (Merge::First, by_hand(&copies, first)),
        (Merge::Mean, by_hand(&copies, mean)),
        (Merge::Sum, by_hand(&copies, sum)),
        (Merge::SumIfDifferent, by_hand(&copies, sum)),
    ];
    for (merge, expected) in cases {
        let mut disk = Disk::default();
        let [mut whole, expected] = whole(&mut disk, &copies, &expected);
        whole.set_merge(merge);
        for threads in 1..=3 {
            let found = on(threads, [whole.clone(), expected.clone()], &disk.files);
            assert_eq!(
                (stats(&found).l2(), stats(&found).cos()),
                (Some(0.0), Some(1.0)),
                "{merge:?}"
            );
            assert_eq!(found.dtypes, [Dtype::Float32, Dtype::Float64]);
            assert_eq!(found.replicas.len(), 2, "{merge:?}");
        }
    }
}

#[test]
fn a_difference_between_copies_is_measured_over_all_that_the_copy_holds() {
    let copies = copies();
    let mut disk = Disk::default();
    let [whole, _] = whole(&mut disk, &copies, &[0.0]);
    let found = on(2, [whole.clone(), whole], &disk.files);
    assert!(stats(&found).is_identical());
    for (replica, copy, end) in
        [(&found.replicas[0], &copies[1], HALF), (&found.replicas[1], &copies[2], LEN)]
    {
        let (first, copy) = (&copies[0][..end], &copy[..end]);
        let square = |sum: f64, (a, b): (&f64, &f64)| sum + (a - b) * (a - b);
        let l2 = first.iter().zip(copy).fold(0.0, square).sqrt();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let cos = dot(first, copy) / (dot(first, first) * dot(copy, copy)).sqrt();
        let differing = first.iter().zip(copy).filter(|(a, b)| a != b).count();
        assert!((replica.stats.l2().unwrap() / l2 - 1.0).abs() < 1e-12);
        assert!((replica.stats.cos().unwrap() - cos).abs() < 1e-12);
        assert_eq!(replica.stats.differing(), differing as u64);
    }
}

#[test]
fn copies_that_agree_make_exactly_the_first_ones_value() {
    // Their sum over three is not a third of it in f64.
    let value = 0.1_f64;
    assert!((value + value + value) / 3.0 != value);
    let mut disk = Disk::default();
    let stored = [0; 3].map(|_| disk.put(&[value, 7.0], Dtype::Float64));
    let other = disk.put(&[value, 9.0], Dtype::Float64);
    let expected = disk.put(&[value, 7.5], Dtype::Float64);
    let file = disk.written();
    let [mut first, second, third] = stored.map(|at| tensor(file, at, "copy"));
    let alone = first.clone();
    for (copy, name) in [(second, "second"), (third, "third")] {
        let at = (copy.pieces()[0].offset, 2, Dtype::Float64);
        first.add_copy(tensor(file, at, name)).unwrap();
    }
    for merge in [Merge::Mean, Merge::SumIfDifferent] {
        first.set_merge(merge);
        let found = on(1, [first.clone(), alone.clone()], &disk.files);
        assert!(stats(&found).is_identical() && found.replicas.is_empty(), "{merge:?}");
    }
    first.add_copy(tensor(file, other, "other")).unwrap();
    first.set_merge(Merge::Mean);
    let found = on(1, [first, tensor(file, expected, "expected")], &disk.files);
    assert_eq!(stats(&found).l2(), Some(0.0));
    assert_eq!(found.replicas.len(), 1);
    assert_eq!(found.example, None);
}

#[test]
fn an_example_shows_the_value_that_is_compared() {
    let mut disk = Disk::default();
    let at = [[1.5], [2.5], [4.5]].map(|values| disk.put(&values, Dtype::Float32));
    let file = disk.written();
    let [mut partial, copy, other] = at.map(|at| tensor(file, at, "bias"));
    partial.add_copy(tensor(file, (copy.pieces()[0].offset, 1, Dtype::Float32), "copy")).unwrap();
    partial.set_merge(Merge::Sum);
    let found = on(1, [partial, other], &disk.files);
    assert_eq!(found.example.unwrap().values, ["4.0", "4.5"]);
    assert!(found.replicas.iter().all(|part| !part.is_divergence()));
}
