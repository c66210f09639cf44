//! One flipped element in any shard of any fixture is found and named: which tensor, which index, which rank.

#![cfg(unix)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::{Copied, compare_with, in_process, layout, models};
use ckptcmp::base::dtype::Dtype;
use ckptcmp::base::extent::Extent;
use ckptcmp::catalog::Catalog;
use ckptcmp::compare::{Outcome, ReplicaDifference, TensorComparison};
use ckptcmp::containers::torch::{TorchFile, ValueId};
use ckptcmp::formats::{self, OpenOptions};
use ckptcmp::judge::bounds::Bounds;
use ckptcmp::judge::verdict::{self, Verdict};
use ckptcmp::names::Name;
use ckptcmp::pairing::{Pairing, Selection, pair};
use ckptcmp::storage::FileSet;
use ckptcmp::tensor::{ByteOrder, LogicalTensor, Piece, StoredTensor};

/// Every checkpoint with another one of its model, each in turn.
fn pairs() -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    for layouts in models().into_values() {
        for (number, path) in layouts.iter().enumerate() {
            let other = &layouts[(number + 1 + number % (layouts.len() - 1)) % layouts.len()];
            pairs.push((path.clone(), other.clone()));
        }
    }
    pairs
}

fn open(path: &Path) -> Catalog {
    let catalog = formats::open(path, &OpenOptions::default()).unwrap();
    assert_eq!(catalog.problems, [], "{}", path.display());
    catalog
}

/// The copy of an element that is to be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copy {
    /// The one that is compared with the other side.
    First,
    /// The replica of this number.
    Further(usize),
}

/// One element of one copy: its index in the logical tensor, and where its bytes are.
#[derive(Debug, Clone)]
struct Target {
    name: Name,
    copy: Copy,
    index: Vec<u64>,
    file: PathBuf,
    offset: u64,
    order: ByteOrder,
}

/// For every tensor: elements of every copy in every file.
fn targets(catalog: &Catalog) -> BTreeMap<Name, Vec<Target>> {
    let mut all = BTreeMap::new();
    for (name, entry) in &catalog.tensors {
        let tensor = &entry.tensor;
        let mut found = Vec::new();
        let further = tensor.replicas().iter().map(|replica| replica.pieces.as_slice());
        for (number, pieces) in [tensor.pieces()].into_iter().chain(further).enumerate() {
            let copy = if number == 0 { Copy::First } else { Copy::Further(number - 1) };
            let mut by_file: BTreeMap<_, Vec<&Piece>> = BTreeMap::new();
            for piece in pieces {
                by_file.entry(piece.file).or_default().push(piece);
            }
            // One piece of each file, which one depends on the name.
            for (file, pieces) in by_file {
                let piece = pieces[name.as_str().len() % pieces.len()];
                let path = catalog.files.path(file);
                found.extend(in_piece(name, copy, path, piece, tensor.dtype().size()));
            }
        }
        all.insert(name.clone(), found);
    }
    all
}

/// The first, a middle and the last element of a piece, each once.
fn in_piece(name: &Name, copy: Copy, file: &Path, piece: &Piece, element: u64) -> Vec<Target> {
    let numel = piece.extent.numel();
    let places: BTreeSet<u64> = [0, numel / 2, numel - 1].into();
    let target = |flat| {
        let (mut rest, mut index, mut steps) = (flat, piece.extent.offsets.clone(), 0);
        for dim in (0..index.len()).rev() {
            let at = rest % piece.extent.sizes[dim];
            rest /= piece.extent.sizes[dim];
            index[dim] += at;
            steps += if at > 0 { at * piece.strides[dim] } else { 0 };
        }
        let (file, offset) = (file.to_path_buf(), piece.offset + steps * element);
        Target { name: name.clone(), copy, index, file, offset, order: piece.byte_order }
    };
    places.into_iter().map(target).collect()
}

/// Changes the highest bit of the mantissa, which leaves a finite number finite. Returns the values before and after.
fn flip(target: &Target, dtype: Dtype) -> [f64; 2] {
    let file = File::options().read(true).write(true).open(&target.file).unwrap();
    let mut bytes = vec![0; usize::try_from(dtype.size()).unwrap()];
    file.read_exact_at(&mut bytes, target.offset).unwrap();
    let before = value(&bytes, target.order, dtype);
    let (byte_from_top, bit) = match dtype {
        Dtype::Float64 => (1, 0x08),
        Dtype::Float32 | Dtype::BFloat16 => (1, 0x40),
        _ => (0, 0x02),
    };
    let at = match target.order {
        ByteOrder::Little => bytes.len() - 1 - byte_from_top,
        ByteOrder::Big => byte_from_top,
    };
    bytes[at] ^= bit;
    file.write_all_at(&bytes, target.offset).unwrap();
    [before, value(&bytes, target.order, dtype)]
}

fn value(bytes: &[u8], order: ByteOrder, dtype: Dtype) -> f64 {
    let mut little = bytes.to_vec();
    if order == ByteOrder::Big {
        little.reverse();
    }
    match dtype {
        Dtype::Float32 => f32::from_le_bytes(little.try_into().unwrap()).into(),
        Dtype::Float64 => f64::from_le_bytes(little.try_into().unwrap()),
        Dtype::Float16 => half::f16::from_le_bytes(little.try_into().unwrap()).into(),
        Dtype::BFloat16 => half::bf16::from_le_bytes(little.try_into().unwrap()).into(),
        other => panic!("no fixture has weights of {other}"),
    }
}

fn flat(index: &[u64], shape: &[u64]) -> u64 {
    index.iter().zip(shape).fold(0, |flat, (at, size)| flat * size + at)
}

/// The rank's folder.
fn folder(path: &Path) -> String {
    path.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned()
}

fn holds(piece: &Piece, index: &[u64]) -> bool {
    let Extent { offsets, sizes } = &piece.extent;
    index
        .iter()
        .zip(offsets)
        .zip(sizes)
        .all(|((at, start), size)| (*start..start + size).contains(at))
}

/// Holds what was found of one tensor against what was done to it.
fn check(
    found: &TensorComparison,
    done: Option<&(Target, [f64; 2])>,
    original: &LogicalTensor,
    files: &FileSet,
) {
    let Outcome::Compared(stats) = &found.outcome else { panic!("{}: {found:?}", found.name) };
    let shape = &found.shapes[0];
    // Rows of padding that the other side does not have are left out.
    let done =
        done.filter(|(target, _)| target.index.iter().zip(shape).all(|(at, size)| at < size));
    let Some((target, [before, after])) = done else {
        assert_eq!((stats.differing(), stats.l2()), (0, Some(0.0)), "{}: {found:?}", found.name);
        assert!(found.replicas.is_empty() && found.example.is_none(), "{}", found.name);
        return;
    };
    let expected = (1, Some((after - before).abs()), Some(flat(&target.index, shape)));
    match target.copy {
        Copy::First => {
            let seen = (stats.differing(), stats.max_abs(), stats.max_abs_index());
            assert_eq!(seen, expected, "{target:?}");
            assert_eq!(found.example.as_ref().unwrap().index, target.index, "{target:?}");
            // Every further copy of the element now disagrees with it.
            let further = original
                .replicas()
                .iter()
                .filter(|replica| replica.pieces.iter().any(|piece| holds(piece, &target.index)));
            assert_eq!(found.replicas.len(), further.count(), "{target:?}");
        }
        Copy::Further(number) => {
            assert_eq!(stats.differing(), 0, "{target:?}");
            let [difference] = found.replicas.as_slice() else { panic!("{target:?}: {found:?}") };
            let replica = &original.replicas()[number];
            assert_eq!(difference.stored_name, &*replica.source.name, "{target:?}");
            assert_eq!(difference.copy, folder(&target.file), "{target:?}");
            let first = original.pieces().iter().find(|piece| holds(piece, &target.index)).unwrap();
            assert_eq!(difference.first, folder(files.path(first.file)), "{target:?}");
            let stats = &difference.stats;
            let seen = (stats.differing(), stats.max_abs(), stats.max_abs_index());
            assert_eq!(seen, expected, "{target:?}");
        }
    }
    let judgement = verdict::of_tensor(found, &Bounds::default());
    let has_diverged = found.replicas.iter().any(ReplicaDifference::is_divergence);
    assert_eq!(verdict::of_all([&judgement], 0, 0, has_diverged), Verdict::Different);
}

/// A copy of a checkpoint to be changed, beside one that is not.
struct Sides {
    copied: Copied,
    changed: Catalog,
    other: Catalog,
    pairing: Pairing,
}

impl Sides {
    fn new(path: &str, other: &str) -> Self {
        let copied = Copied::of(&layout(path));
        let (changed, other) = (open(&copied.path()), open(&layout(other)));
        let pairing = pair(&changed, &other, &Selection::default());
        assert!(pairing.only_in.iter().all(Vec::is_empty), "{path}");
        Self { copied, changed, other, pairing }
    }

    fn tensor(&self, name: &Name) -> &LogicalTensor {
        &self.changed.tensors[name].tensor
    }

    fn flip(&self, target: &Target) -> [f64; 2] {
        flip(target, self.tensor(&target.name).dtype())
    }

    fn compared(&self) -> Vec<TensorComparison> {
        in_process::compare(&self.pairing, &self.changed, &self.other)
    }

    /// Changes these elements of different tensors, compares, and changes them back.
    fn check(&self, targets: &[&Target]) {
        let done: BTreeMap<Name, (Target, [f64; 2])> = targets
            .iter()
            .map(|target| (target.name.clone(), ((*target).clone(), self.flip(target))))
            .collect();
        for found in self.compared() {
            // Where the other side has a tensor of its own for a tied one, that one stands on both lines.
            if self.changed.tensors.contains_key(&found.name) {
                check(&found, done.get(&found.name), self.tensor(&found.name), &self.changed.files);
            }
        }
        for target in targets {
            self.flip(target);
        }
    }
}

/// `layers.3.weight` and `layers.12.weight` are of one kind.
fn kind(name: &Name) -> String {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.as_str().split('.').map(|part| if is_number(part) { "#" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

#[test]
fn a_flipped_element_of_any_tensor_in_any_shard_is_found_at_its_index() {
    let mut flips = 0;
    for (path, other) in pairs() {
        let sides = Sides::new(&path, &other);
        sides.check(&[]);
        let targets = targets(&sides.changed);
        let rounds = targets.values().map(Vec::len).max().unwrap();
        for round in 0..rounds {
            // One element of every tensor at a time: each must show in its own tensor, and nowhere else.
            let chosen: Vec<&Target> =
                targets.values().filter_map(|targets| targets.get(round)).collect();
            flips += chosen.len();
            sides.check(&chosen);
        }
    }
    assert!(flips > 10_000, "{flips}");
}

#[test]
fn a_single_flipped_element_is_the_only_thing_found() {
    for (path, other) in pairs() {
        let sides = Sides::new(&path, &other);
        let mut kinds = BTreeSet::new();
        for (name, targets) in &targets(&sides.changed) {
            if kinds.insert(kind(name)) {
                sides.check(&[&targets[path.len() * kinds.len() % targets.len()]]);
            }
        }
    }
}

#[test]
fn every_shard_file_holds_an_element_that_is_looked_at() {
    for (path, other) in pairs() {
        let sides = Sides::new(&path, &other);
        let all = targets(&sides.changed);
        let touched: BTreeSet<&Path> = all.values().flatten().map(|target| &*target.file).collect();
        assert_eq!(touched.len(), sides.changed.origin.shards, "{path}");
    }
}

/// All tensors below the `model` dicts of a file, by dotted name.
fn stored(torch: &TorchFile, id: ValueId, name: &str, found: &mut Vec<(String, StoredTensor)>) {
    if let Some(tensor) = torch.tensor(id).unwrap() {
        return found.push((name.to_owned(), tensor));
    }
    for (key, member) in torch.values().mapping(id).into_iter().flatten() {
        let key = torch.values().as_str(key).unwrap_or_default();
        stored(torch, member, &format!("{name}.{key}"), found);
    }
}

/// Marks the bytes of a box of strided elements.
fn mark(bytes: &mut [bool], start: u64, sizes: &[u64], strides: &[u64], element: u64) {
    match (sizes.split_first(), strides.split_first()) {
        (Some((&size, sizes)), Some((&stride, strides))) => {
            for step in 0..size {
                let steps = if step > 0 { step * stride } else { 0 };
                mark(bytes, start + steps * element, sizes, strides, element);
            }
        }
        _ => {
            bytes[usize::try_from(start).unwrap()..][..usize::try_from(element).unwrap()]
                .fill(true);
        }
    }
}

#[test]
fn every_stored_element_belongs_to_a_tensor_or_one_of_its_copies() {
    let mut lost = BTreeSet::new();
    for path in models().into_values().flatten() {
        let catalog = open(&layout(&path));
        let mut known: BTreeMap<PathBuf, Vec<bool>> = BTreeMap::new();
        for entry in catalog.tensors.values() {
            let tensor = &entry.tensor;
            let further = tensor.replicas().iter().flat_map(|replica| &replica.pieces);
            for piece in tensor.pieces().iter().chain(further) {
                let len = usize::try_from(catalog.files.whole(piece.file).len).unwrap();
                let path = catalog.files.path(piece.file).to_path_buf();
                let bytes = known.entry(path).or_insert_with(|| vec![false; len]);
                let element = tensor.dtype().size();
                mark(bytes, piece.offset, &piece.extent.sizes, &piece.strides, element);
            }
        }
        for (file, known) in known {
            let mut files = FileSet::default();
            let id = files.add(&file).unwrap();
            let torch = TorchFile::open(&files, files.whole(id)).unwrap();
            let mut tensors = Vec::new();
            for key in ["model", "model0", "model1"] {
                if let Some(model) = torch.values().dict_get(torch.root(), key) {
                    stored(&torch, model, "", &mut tensors);
                }
            }
            assert!(!tensors.is_empty(), "{}", file.display());
            for (name, tensor) in tensors {
                let mut bytes = vec![false; known.len()];
                let element = tensor.dtype().size();
                let start = tensor.storage().offset + tensor.storage_offset() * element;
                mark(&mut bytes, start, tensor.shape(), tensor.strides(), element);
                if bytes.iter().zip(&known).any(|(stored, known)| *stored && !known) {
                    lost.insert(format!("{path} {name}"));
                }
            }
        }
    }
    // Its note says that training does not use this copy, so that it says nothing.
    let unused = "mtp-tied/tp2pp2 .output_layer.weight".to_owned();
    assert_eq!(lost, [unused].into());
}

#[test]
fn the_command_names_tensor_index_and_values() {
    for layouts in models().into_values() {
        let (path, other) = (layouts.last().unwrap(), &layouts[0]);
        let sides = Sides::new(path, other);
        let all = targets(&sides.changed);
        let mut firsts = all.values().flatten().filter(|target| {
            target.copy == Copy::First && !target.name.as_str().contains("embedding")
        });
        let target = firsts.nth(path.len() % all.len()).unwrap();
        let [before, after] = sides.flip(target);
        let run = compare_with(&sides.copied.path(), &layout(other), &["--metrics", "all"]);
        assert_eq!(run.code, 1, "{path}");
        assert!(run.stderr.contains(target.name.as_str()), "{path}: {run:?}");
        for (name, metrics) in run.json().as_object().unwrap() {
            if *name == target.name.as_str() {
                assert_eq!(metrics["differing"], 1, "{path}");
                assert_eq!(metrics["max_abs_index"], serde_json::json!(target.index), "{path}");
                assert_eq!(metrics["max_abs"], (after - before).abs(), "{path}");
                assert_eq!(metrics["l2"], (after - before).abs(), "{path}");
            } else {
                assert_eq!((&metrics["l2"], &metrics["differing"]), (&0.0.into(), &0.into()));
            }
        }
    }
}

#[test]
fn the_command_names_the_rank_of_a_replica_that_differs() {
    let mut checked = 0;
    for layouts in models().into_values() {
        for path in &layouts {
            let sides = Sides::new(path, &layouts[0]);
            let all = targets(&sides.changed);
            let mut further = all.values().flatten().filter(|target| {
                target.copy != Copy::First && !target.name.as_str().contains("embedding")
            });
            let Some(target) = further.nth(path.len() % 5) else { continue };
            sides.flip(target);
            let run =
                compare_with(&sides.copied.path(), &layout(&layouts[0]), &["--metrics", "all"]);
            assert_eq!(run.code, 1, "{path}");
            let expected = format!("a: {}: {} differs", target.name, folder(&target.file));
            assert!(run.stderr.contains(&expected), "{path}: {expected} in {run:?}");
            assert!(run.json().as_object().unwrap().values().all(|metrics| metrics["l2"] == 0.0));
            checked += 1;
            break;
        }
    }
    assert!(checked >= 10, "{checked}");
}
