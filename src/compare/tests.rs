//! Gathering against `ndarray`, and statistics that must not depend on how either side is cut.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::Write;
use std::sync::atomic::AtomicU64;

use ndarray::{ArrayD, Axis, IxDyn, Slice};
use tempfile::NamedTempFile;

use super::gather::{Band, CopyReader};
use super::side_files::{Maps, SideFiles};
use super::strided::Element;
use super::{Outcome, TensorComparison, Wanted, compare};
use crate::base::dtype::Dtype;
use crate::base::side::Side;
use crate::kernel::BLOCK;
use crate::names::Name;
use crate::pairing::Pair;
use crate::storage::{FileSet, Region};
use crate::tensor::testing::{ElementModel, ElementPlace, Maker, Random};
use crate::tensor::{ByteOrder, LogicalTensor, Piece, StorageView, StoredTensor};

const DTYPES: [Dtype; 6] = [
    Dtype::Int8,
    Dtype::BFloat16,
    Dtype::Float32,
    Dtype::Complex64,
    Dtype::Float64,
    Dtype::Complex128,
];

struct Disk {
    files: FileSet,
    region: Region,
    bytes: Vec<u8>,
    file: NamedTempFile,
}

fn disk(bytes: Vec<u8>) -> Disk {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    let mut files = FileSet::default();
    let id = files.add(file.path()).unwrap();
    Disk { region: files.whole(id), files, bytes, file }
}

impl Disk {
    fn copy<'a>(&'a self, shape: &'a [u64], pieces: &'a [Piece], dtype: Dtype) -> CopyReader<'a> {
        let files = SideFiles { side: Side::B, files: &self.files, sums: None };
        CopyReader { files, shape, pieces, element: Element::of(dtype) }
    }

    /// The little-endian bytes of these elements.
    fn elements(&self, places: impl Iterator<Item = ElementPlace>, dtype: Dtype) -> Vec<u8> {
        let Element { size, swap_unit } = Element::of(dtype);
        let mut bytes = Vec::new();
        for ElementPlace { offset, order } in places {
            let start = usize::try_from(offset).unwrap();
            let mut element = self.bytes[start..start + size].to_vec();
            if order == ByteOrder::Big {
                element.chunks_mut(swap_unit).for_each(<[u8]>::reverse);
            }
            bytes.extend(element);
        }
        bytes
    }

    /// Gathers a flat range, from the files, from maps and from a band around it, and holds it against the array.
    fn check(&self, model: &ElementModel, start: usize, len: usize, context: &str) {
        let dtype = model.tensor.dtype();
        let read = |pieces: &[Piece], out: &mut [u8]| {
            let copy = self.copy(model.tensor.shape(), pieces, dtype);
            let mut lines = vec![0xee; 3];
            let (mut from_maps, mut from_band) = (out.to_vec(), out.to_vec());
            let wanted = start as u64..(start + len) as u64;
            for (maps, out) in [(Maps::default(), &mut *out), (copy.maps(&wanted), &mut from_maps)]
            {
                copy.read(&maps, wanted.start, out, &mut lines).unwrap();
                maps.check(copy.files).unwrap();
            }
            assert!(out == from_maps, "{context}: {wanted:?}, from maps");
            let range = start.saturating_sub(37)..(start + len + 41).min(model.places.len());
            let mut band = Band::default();
            band.fill(&copy, range.start as u64..range.end as u64).unwrap();
            band.read(&copy, start as u64, &mut from_band);
            assert!(out == from_band, "{context}: {start}..{}, from a band", start + len);
        };
        let expected = |places: &ArrayD<ElementPlace>| {
            self.elements(places.iter().copied().skip(start).take(len), dtype)
        };
        let first = expected(&model.places);
        let mut out = vec![0xcc; first.len()];
        read(model.tensor.pieces(), &mut out);
        assert!(out == first, "{context}: {start}..{}", start + len);
        for (name, places) in model.expected_copies() {
            let mut copy = first.clone();
            let mut replicas = model.tensor.replicas().iter();
            let replica = replicas.find(|replica| *replica.source.name == *name).unwrap();
            read(&replica.pieces, &mut copy);
            assert!(copy == expected(&places), "{context}: copy {name}, {start}..{}", start + len);
        }
    }
}

fn range(random: &mut Random, len: usize) -> (usize, usize) {
    let start = random.index(len + 1);
    (start, random.index(len - start + 1))
}

#[test]
fn any_range_of_any_view_is_what_ndarray_holds() {
    let disk = disk(Random(7).bytes(1 << 21));
    for seed in 0..2000 {
        let mut random = Random(seed);
        let dtype = *random.pick(&DTYPES);
        let mut maker = Maker::new(&mut random, disk.region, dtype);
        let shape = maker.shape(7);
        let mut model = maker.stored(&shape);
        for _ in 0..maker.random.below(7) {
            if model.places.len() < 3000 {
                model = maker.changed(model);
            }
        }
        let count = model.places.len();
        let context = format!("seed {seed}, {dtype} {:?}", model.tensor.shape());
        disk.check(&model, 0, count, &context);
        for _ in 0..4 {
            let (start, len) = range(&mut random, count);
            disk.check(&model, start, len, &context);
        }
    }
}

#[test]
fn large_tensors_are_read_across_every_limit() {
    let disk = disk(Random(8).bytes(48 << 20));
    // Shape and strides: sizes around a block and around the largest read, dense, transposed, sparse, expanded.
    let block = BLOCK as u64;
    let cases: &[(&[u64], &[u64])] = &[
        (&[block + 1], &[1]),
        (&[3 * block + 5], &[1]),
        (&[1 << 20 | 1], &[1]),
        (&[515, 1021], &[1021, 1]),
        (&[515, 1021], &[1, 515]),
        (&[600, 700], &[1, 601]),
        (&[300, 1000], &[1003, 1]),
        (&[40_000, 3], &[20, 1]),
        (&[3, 40_000], &[1, 20]),
        (&[2, 300_000], &[1_100_000, 1]),
        (&[2, 70_000, 2], &[1_300_000, 9, 1]),
        (&[70_000, 4], &[0, 1]),
        (&[4, 70_000], &[1, 0]),
        (&[300_000], &[0]),
        (&[7, 9, 33, 65], &[1, 7, 63, 2079]),
        (&[5, 1, 200, 200], &[40_001, u64::MAX, 1, 200]),
    ];
    for (number, (shape, strides)) in cases.iter().enumerate() {
        for turn in [number % 6, (number + 3) % 6] {
            let dtype = DTYPES[turn];
            let mut random = Random((number * 100 + turn) as u64);
            let mut maker = Maker::new(&mut random, disk.region, dtype);
            let model = maker.strided(shape, strides);
            let count = model.places.len();
            let context = format!("{dtype} {shape:?} {strides:?}");
            disk.check(&model, 0, count, &context);
            let (start, len) = range(&mut random, count);
            disk.check(&model, start, len, &context);
        }
    }
}

/// Writes an array in random parts, as random ranks might have saved it.
struct Writer<'r> {
    random: &'r mut Random,
    region: Region,
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl Writer<'_> {
    fn written(&mut self, values: &ArrayD<f32>, depth: usize) -> LogicalTensor {
        let rank = values.ndim();
        if rank > 0 && depth > 0 && !self.random.one_in(4) {
            let dim = self.random.index(rank);
            let size = values.shape()[dim];
            if self.random.one_in(4) && rank > 1 {
                let other = (dim + 1) % rank;
                let mut swapped = values.clone();
                swapped.swap_axes(dim, other);
                return self.written(&swapped, depth - 1).transpose(dim, other).unwrap();
            }
            let at = self.random.index(size + 1);
            let part = |range: Slice| values.slice_axis(Axis(dim), range).to_owned();
            let parts = [part(Slice::from(..at)), part(Slice::from(at..))];
            let parts = parts.map(|part| self.written(&part, depth - 1));
            return LogicalTensor::concat(dim, parts).unwrap();
        }
        self.stored(values)
    }

    /// One part in a random order of dimensions and a random byte order, with a gap in front.
    fn stored(&mut self, values: &ArrayD<f32>) -> LogicalTensor {
        let order = *self.random.pick(&[ByteOrder::Little, ByteOrder::Big]);
        let axes = self.random.permutation(values.ndim());
        let memory = values.view().permuted_axes(IxDyn(&axes));
        let gap = self.random.index(40);
        self.bytes.resize(self.bytes.len() + gap, 0x5a);
        let start = self.bytes.len() as u64;
        for value in &memory {
            self.push(*value, order);
        }
        let mut strides = vec![0; axes.len()];
        let mut next = 1;
        for &axis in axes.iter().rev() {
            strides[axis] = next;
            next *= values.shape()[axis].max(1) as u64;
        }
        let shape = values.shape().iter().map(|&size| size as u64).collect();
        let len = self.bytes.len() as u64 - start;
        let storage = Region { offset: start, len, ..self.region };
        let stored = StoredTensor::new(
            self.dtype,
            shape,
            StorageView { storage, storage_offset: 0, strides },
            order,
        )
        .unwrap();
        LogicalTensor::from_stored(&stored, "part")
    }

    fn push(&mut self, value: f32, order: ByteOrder) {
        let bytes: Vec<u8> = match (self.dtype, order) {
            (Dtype::BFloat16, ByteOrder::Little) => {
                half::bf16::from_f32(value).to_le_bytes().into()
            }
            (Dtype::BFloat16, ByteOrder::Big) => half::bf16::from_f32(value).to_be_bytes().into(),
            (Dtype::Float64, ByteOrder::Little) => f64::from(value).to_le_bytes().into(),
            (Dtype::Float64, ByteOrder::Big) => f64::from(value).to_be_bytes().into(),
            (_, ByteOrder::Little) => value.to_le_bytes().into(),
            (_, ByteOrder::Big) => value.to_be_bytes().into(),
        };
        self.bytes.extend(bytes);
    }
}

/// Two arrays that differ here and there, with now and then a zero, a NaN or an infinity.
fn values(random: &mut Random, shape: &[usize]) -> [ArrayD<f32>; 2] {
    let first = ArrayD::from_shape_fn(IxDyn(shape), |_| match random.below(5000) {
        0 => 0.0,
        1 => -0.0,
        2 if shape.len() == 1 => f32::NAN,
        3 if shape.len() == 1 => f32::INFINITY,
        bits => half::bf16::from_f32((bits as f32 - 2500.0) / 77.0).to_f32(),
    });
    let second = first.mapv(|value| if random.one_in(3) { value * 1.5 } else { value });
    [first, second.mapv(|value| half::bf16::from_f32(value).to_f32())]
}

fn outcome(found: &TensorComparison) -> String {
    let Outcome::Compared(stats) = &found.outcome else { return format!("{:?}", found.outcome) };
    let numbers = [stats.l2(), stats.cos(), stats.one_minus_cos(), stats.rel_l2(), stats.max_abs()];
    let bits = numbers.map(|number| number.map(f64::to_bits));
    format!("{bits:x?} {stats:?} {:?}", found.example)
}

#[test]
fn statistics_have_the_same_bits_for_any_cut_and_any_number_of_threads() {
    let shapes: &[&[usize]] = &[
        &[],
        &[1],
        &[0, 4],
        &[37],
        &[5, 6, 7],
        &[BLOCK + 3],
        &[700, 1000],
        &[3, 450, 811],
        &[1_200_000],
    ];
    for (number, shape) in shapes.iter().enumerate() {
        for turn in 0..3 {
            let mut random = Random((number * 10 + turn) as u64);
            let sides = values(&mut random, shape);
            let dtypes = [
                *random.pick(&[Dtype::BFloat16, Dtype::Float32, Dtype::Float64]),
                *random.pick(&[Dtype::BFloat16, Dtype::Float32, Dtype::Float64]),
            ];
            let whole = compared(&mut random, &sides, dtypes, 0, 1);
            for threads in 1..=3 {
                let cut = compared(&mut random, &sides, dtypes, 6, threads);
                assert_eq!(cut, whole, "{shape:?}, turn {turn}, {threads} threads");
            }
        }
    }
}

fn compared(
    random: &mut Random,
    sides: &[ArrayD<f32>; 2],
    dtypes: [Dtype; 2],
    depth: usize,
    threads: usize,
) -> String {
    let region = disk(Vec::new()).region;
    let (mut disks, mut tensors) = (Vec::new(), Vec::new());
    for side in 0..2 {
        let dtype = dtypes[side];
        let mut writer = Writer { random, region, dtype, bytes: Vec::new() };
        let tensor = if depth == 0 {
            writer.stored(&sides[side])
        } else {
            writer.written(&sides[side], depth)
        };
        assert_eq!(tensor.check_tiling(), Ok(()));
        disks.push(disk(writer.bytes));
        tensors.push(tensor);
    }
    let pair = Pair {
        name: Name::new("tensor"),
        sides: tensors.try_into().unwrap(),
        rows_left_out: [0, 0],
        tied_side: None,
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let files = [&disks[0].files, &disks[1].files];
    let found = pool.install(|| compare(&[pair], |_| Wanted::default(), files, &AtomicU64::new(0)));
    outcome(&found[0])
}

#[test]
fn a_file_that_shrinks_before_it_is_read_is_an_outcome() {
    let disk = disk(vec![0; 4096]);
    let stored =
        StoredTensor::contiguous(Dtype::Float32, vec![1024], disk.region, ByteOrder::Little)
            .unwrap();
    let side = LogicalTensor::from_stored(&stored, "weight");
    let pair = Pair {
        name: Name::new("weight"),
        sides: [side.clone(), side],
        rows_left_out: [0, 0],
        tied_side: None,
    };
    disk.file.as_file().set_len(4095).unwrap();
    let found = compare(&[pair], |_| Wanted::default(), [&disk.files; 2], &AtomicU64::new(0));
    let Outcome::Unreadable(error) = &found[0].outcome else { unreachable!("{:?}", found[0]) };
    assert_eq!((error.side, error.file.as_path()), (Side::A, disk.file.path()));
    assert!(disk.files.changed().is_some());
}

#[test]
fn a_file_that_shrinks_while_it_is_looked_at_is_an_error() {
    let disk = disk(Random(9).bytes(4 << 20));
    let dtype = Dtype::Float32;
    let stored =
        StoredTensor::contiguous(dtype, vec![1 << 20], disk.region, ByteOrder::Little).unwrap();
    let tensor = LogicalTensor::from_stored(&stored, "weight");
    let range = 0..tensor.numel();
    let copy = disk.copy(tensor.shape(), tensor.pieces(), dtype);
    let maps = || copy.maps(&range);
    // A system that is slow at times maps it sooner or later; one that never does cannot lose it.
    let mut tries = std::iter::repeat_with(maps).take(1000);
    let Some(maps) = tries.find(|maps| maps.bytes(disk.region).is_some()) else { return };
    assert!(maps.bytes(disk.region).unwrap() == disk.bytes);
    assert!(maps.check(copy.files).is_ok());
    disk.file.as_file().set_len(1 << 20).unwrap();
    assert!(maps.bytes(disk.region).unwrap().ends_with(&[0; 1 << 20]));
    let error = maps.check(copy.files).unwrap_err();
    assert_eq!((error.side, error.file.as_path()), (Side::B, disk.file.path()));
    assert_eq!(error.message, "failed to fill whole buffer");
}
