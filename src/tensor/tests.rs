//! The view algebra against `ndarray`, and proofs of tiling against injected damage.

#![expect(clippy::unwrap_used, reason = "tests")]

use ndarray::ArrayD;

use super::testing::{ElementModel, ElementPlace, Maker, Random, lay, pretended};
use super::{ByteOrder, LogicalTensor, Piece, StorageView, StoredError, StoredTensor, TensorError};
use crate::base::dtype::Dtype;
use crate::base::extent::Extent;

const CASES: u64 = 3000;

fn laid(model: &ElementModel, pieces: &[Piece]) -> ArrayD<Option<ElementPlace>> {
    let mut places = ArrayD::from_elem(model.places.raw_dim(), None);
    lay(&mut places, pieces, model.tensor.dtype().size());
    places
}

fn check(model: &ElementModel, seed: u64) {
    let shape: Vec<u64> = model.places.shape().iter().map(|&size| size as u64).collect();
    assert_eq!(model.tensor.shape(), shape, "seed {seed}");
    assert_eq!(model.tensor.check_tiling(), Ok(()), "seed {seed}");
    let places = laid(model, model.tensor.pieces());
    assert_eq!(places, model.places.mapv(Some), "seed {seed}");
    let expected = model.expected_copies();
    for (name, places) in &expected {
        let replica = model.tensor.replicas().iter().find(|replica| *replica.source.name == **name);
        let replica = replica.unwrap();
        assert_eq!(model.overlaid(&laid(model, &replica.pieces)), *places, "seed {seed}: {name}");
    }
    for replica in model.tensor.replicas() {
        let is_expected = expected.iter().any(|(name, _)| *name == &*replica.source.name);
        let is_same = model.overlaid(&laid(model, &replica.pieces)) == model.places;
        assert!(is_expected || is_same, "seed {seed}: {}", replica.source.name);
    }
}

#[test]
fn any_chain_of_views_is_what_ndarray_makes_of_it() {
    let file = pretended(1 << 24);
    for seed in 0..CASES {
        let mut random = Random(seed);
        let dtype = *random.pick(&[Dtype::UInt8, Dtype::BFloat16, Dtype::Complex128]);
        let mut maker = Maker::new(&mut random, file, dtype);
        let shape = maker.shape(7);
        let mut model = maker.stored(&shape);
        for _ in 0..maker.random.below(8) {
            model = maker.changed(model);
            check(&model, seed);
            if model.places.len() > 5000 {
                break;
            }
        }
    }
}

/// A tensor cut in random boxes.
fn cut(random: &mut Random) -> LogicalTensor {
    let file = pretended(1 << 20);
    let rank = 1 + random.index(3);
    let shape: Vec<u64> = (0..rank).map(|_| 1 + random.below(6)).collect();
    let mut whole = StoredTensor::contiguous(Dtype::Float32, shape, file, ByteOrder::Little)
        .map(|stored| LogicalTensor::from_stored(&stored, "whole"))
        .unwrap();
    let boxes = whole.pieces().to_vec();
    let mut todo = boxes;
    let mut pieces = Vec::new();
    while let Some(piece) = todo.pop() {
        let dim = random.index(rank);
        let size = piece.extent.sizes[dim];
        if size < 2 || random.one_in(3) {
            pieces.push(piece);
            continue;
        }
        let at = 1 + random.below(size - 1);
        let mut first = piece.extent.clone();
        first.sizes[dim] = at;
        let mut second = piece.extent.clone();
        second.offsets[dim] += at;
        second.sizes[dim] -= at;
        todo.extend([first, second].iter().filter_map(|extent| piece.clip(extent, 4)));
    }
    let order = random.permutation(pieces.len());
    whole.set_pieces(order.into_iter().map(|index| pieces[index].clone()).collect());
    whole
}

#[test]
fn every_cut_into_boxes_tiles() {
    for seed in 0..CASES {
        assert_eq!(cut(&mut Random(seed)).check_tiling(), Ok(()), "seed {seed}");
    }
}

#[test]
fn every_gap_is_found() {
    for seed in 0..CASES {
        let mut random = Random(seed);
        let mut tensor = cut(&mut random);
        let mut pieces = tensor.pieces().to_vec();
        let at = random.index(pieces.len());
        let dim = random.index(tensor.shape().len());
        let numel = tensor.numel();
        let lost = if pieces[at].extent.sizes[dim] > 1 && random.one_in(2) {
            let extent = &mut pieces[at].extent;
            let before = extent.numel();
            extent.sizes[dim] -= 1;
            before - extent.numel()
        } else {
            pieces.remove(at).extent.numel()
        };
        tensor.set_pieces(pieces);
        let gap = TensorError::Gap { covered: numel - lost, numel };
        assert_eq!(tensor.check_tiling(), Err(gap), "seed {seed}");
    }
}

#[test]
fn every_overlap_is_found_even_where_the_count_is_right() {
    for seed in 0..CASES {
        let mut random = Random(seed);
        let mut tensor = cut(&mut random);
        let mut pieces = tensor.pieces().to_vec();
        let at = random.index(pieces.len());
        if pieces.len() > 1 && random.one_in(2) {
            // One piece takes the place of a part of another: where it fits, there is a gap of the same size.
            let other = (at + 1 + random.index(pieces.len() - 1)) % pieces.len();
            let shared = pieces[at].extent.sizes.iter().zip(&pieces[other].extent.sizes);
            let sizes: Vec<u64> = shared.map(|(one, other)| *one.min(other)).collect();
            pieces[at].extent = Extent { offsets: pieces[other].extent.offsets.clone(), sizes };
        } else {
            let mut twice = pieces[at].clone();
            let dim = random.index(tensor.shape().len());
            twice.extent.sizes[dim] = 1 + random.below(twice.extent.sizes[dim]);
            let place = random.index(pieces.len() + 1);
            pieces.insert(place, twice);
        }
        tensor.set_pieces(pieces);
        let found = tensor.check_tiling();
        assert!(matches!(found, Err(TensorError::Overlap { .. })), "seed {seed}: {found:?}");
    }
}

#[test]
fn copies_that_would_fall_into_too_many_pieces_are_refused() {
    let file = pretended(1 << 24);
    let of = |strides: Vec<u64>| {
        let shape = vec![1 << 18, 2];
        let stored = StoredTensor::new(
            Dtype::UInt8,
            shape,
            StorageView { storage: file, storage_offset: 0, strides },
            ByteOrder::Little,
        )
        .unwrap();
        LogicalTensor::from_stored(&stored, "weight")
    };
    let mut whole = of(vec![2, 1]);
    assert_eq!(whole.merge_axes(0).unwrap().pieces().len(), 1);
    whole.add_copy(of(vec![3, 1])).unwrap();
    assert!(matches!(whole.merge_axes(0), Err(TensorError::OverLimit(_))));
}

#[test]
fn bytes_that_stand_for_terabytes_are_refused() {
    let file = pretended(64);
    let of = |size| {
        StoredTensor::new(
            Dtype::Float32,
            vec![size],
            StorageView { storage: file, storage_offset: 0, strides: vec![0] },
            ByteOrder::Little,
        )
    };
    assert!(of(1 << 32).is_ok());
    assert!(matches!(of((1 << 32) + 1), Err(StoredError::Expanded { len: 64, .. })));
}
