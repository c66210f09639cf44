//! The proof that boxes tile a tensor: none missing, none twice.
//!
//! Shards are cut straight through, so there is nearly always a dimension in which the boxes fall into groups that do not
//! touch; within each group another one does the same. That takes n log n steps for each level. Boxes that cannot be cut
//! apart (a pinwheel) are compared pair by pair.

use super::TensorError;
use crate::base::extent::Extent;
use crate::base::limits::LIMITS;

/// Fewer boxes are compared pair by pair at once.
const FEW: usize = 8;

/// Proves that these boxes, which lie inside the tensor, cover its elements once each. What it takes beyond some steps a box
/// comes from `left`, which all tensors of a checkpoint share.
pub(super) fn prove(boxes: &mut [&Extent], numel: u64, left: &mut u64) -> Result<(), TensorError> {
    let own = LIMITS.tiling_steps.saturating_mul(boxes.len() as u64);
    let mut steps = left.saturating_add(own);
    let found = overlap(boxes, LIMITS.tiling_levels, &mut steps);
    *left = steps.min(*left);
    if let Some(shared) = found? {
        return Err(TensorError::Overlap { at: shared.offsets });
    }
    // They are disjoint, so that the sum fits.
    let covered: u64 = boxes.iter().map(|extent| extent.numel()).sum();
    if covered != numel {
        return Err(TensorError::Gap { covered, numel });
    }
    Ok(())
}

/// A part that two of the boxes share.
fn overlap(
    boxes: &mut [&Extent],
    levels: usize,
    steps: &mut u64,
) -> Result<Option<Extent>, TensorError> {
    let rank = boxes.first().map_or(0, |extent| extent.offsets.len());
    if boxes.len() > FEW && levels > 0 {
        for dim in 0..rank {
            pay(steps, boxes.len() as u64)?;
            boxes.sort_by_key(|extent| extent.offsets[dim]);
            let first = len_of_group(boxes, dim);
            if first == boxes.len() {
                continue;
            }
            let (mut group, mut rest) = boxes.split_at_mut(first);
            while !group.is_empty() {
                if let Some(shared) = overlap(group, levels - 1, steps)? {
                    return Ok(Some(shared));
                }
                (group, rest) = rest.split_at_mut(len_of_group(rest, dim));
            }
            return Ok(None);
        }
    }
    overlap_of_pairs(boxes, steps)
}

fn pay(left: &mut u64, steps: u64) -> Result<(), TensorError> {
    *left = left.checked_sub(steps).ok_or(TensorError::Irregular)?;
    Ok(())
}

/// Number of boxes, sorted along a dimension, before the first place where none goes on.
fn len_of_group(boxes: &[&Extent], dim: usize) -> usize {
    let mut end = 0;
    let starts_anew = |extent: &&Extent| {
        let (start, size) = (extent.offsets[dim], extent.sizes[dim]);
        let is_new = start >= end && end > 0;
        end = end.max(start + size);
        is_new
    };
    boxes.iter().position(starts_anew).unwrap_or(boxes.len())
}

fn overlap_of_pairs(boxes: &mut [&Extent], steps: &mut u64) -> Result<Option<Extent>, TensorError> {
    // A few boxes are few pairs, however many tensors have no more.
    let price = u64::from(boxes.len() > FEW);
    boxes.sort_by(|one, other| one.offsets.cmp(&other.offsets));
    for (index, extent) in boxes.iter().enumerate() {
        let end = extent.offsets.first().map(|first| first + extent.sizes[0]);
        for other in &boxes[index + 1..] {
            if end.is_some_and(|end| other.offsets[0] >= end) {
                break;
            }
            pay(steps, price)?;
            if let Some(shared) = extent.intersect(other) {
                return Ok(Some(shared));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prove_all(boxes: &[Extent], numel: u64) -> Result<(), TensorError> {
        prove(&mut boxes.iter().collect::<Vec<_>>(), numel, &mut LIMITS.tiling_pairs.clone())
    }

    /// `rows` x `columns` boxes of 2 x 3.
    fn grid(rows: u64, columns: u64) -> Vec<Extent> {
        let each = |at: u64| Extent {
            offsets: vec![at / columns * 2, at % columns * 3],
            sizes: vec![2, 3],
        };
        (0..rows * columns).map(each).collect()
    }

    #[test]
    fn a_grid_of_many_boxes_takes_few_steps() {
        let boxes = grid(400, 300);
        let mut steps = 3 * 400 * 300;
        assert_eq!(
            overlap(&mut boxes.iter().collect::<Vec<_>>(), LIMITS.tiling_levels, &mut steps),
            Ok(None)
        );
        assert_eq!(prove_all(&boxes, 400 * 300 * 6), Ok(()));
    }

    #[test]
    fn a_box_too_many_or_too_few_is_found_in_any_place() {
        let boxes = grid(7, 9);
        for at in 0..boxes.len() {
            let mut fewer = boxes.clone();
            let gone = fewer.remove(at);
            assert_eq!(prove_all(&fewer, 378), Err(TensorError::Gap { covered: 372, numel: 378 }));
            fewer.push(gone.clone());
            fewer.push(gone.clone());
            assert_eq!(prove_all(&fewer, 378), Err(TensorError::Overlap { at: gone.offsets }));
        }
    }

    #[test]
    fn a_pinwheel_is_proven_pair_by_pair() {
        let extent = |offsets: [u64; 2], sizes: [u64; 2]| Extent {
            offsets: offsets.into(),
            sizes: sizes.into(),
        };
        let mut boxes = vec![
            extent([0, 0], [1, 2]),
            extent([0, 2], [2, 1]),
            extent([2, 1], [1, 2]),
            extent([1, 0], [2, 1]),
            extent([1, 1], [1, 1]),
        ];
        assert_eq!(prove_all(&boxes, 9), Ok(()));
        boxes[4].sizes[1] = 2;
        assert_eq!(prove_all(&boxes, 9), Err(TensorError::Overlap { at: vec![1, 2] }));
    }

    /// Rings around one element, of four boxes each, every one of which bars the cut along another.
    fn spiral(rings: u64) -> Vec<Extent> {
        let ring = |at: u64| {
            let (len, end) = (2 * (rings - at), 2 * rings - at);
            let row = |offsets: [u64; 2]| Extent { offsets: offsets.into(), sizes: vec![1, len] };
            let column =
                |offsets: [u64; 2]| Extent { offsets: offsets.into(), sizes: vec![len, 1] };
            [row([at, at]), column([at, end]), row([end, at + 1]), column([at + 1, at])]
        };
        let center = Extent { offsets: vec![rings; 2], sizes: vec![1; 2] };
        (0..rings).flat_map(ring).chain([center]).collect()
    }

    #[test]
    fn tensors_draw_on_the_same_steps() {
        let (boxes, numel) = (spiral(300), 601 * 601);
        let prove_within =
            |left: &mut u64| prove(&mut boxes.iter().collect::<Vec<_>>(), numel, left);
        let mut left = LIMITS.tiling_pairs;
        assert_eq!(prove_within(&mut left), Ok(()));
        let taken = LIMITS.tiling_pairs - left;
        assert!(taken > 0);
        let mut left = 2 * taken - 1;
        assert_eq!(prove_within(&mut left), Ok(()));
        assert_eq!(prove_within(&mut left), Err(TensorError::Irregular));
    }

    #[test]
    fn boxes_that_no_cut_takes_apart_end_in_bounded_time() {
        // Each box begins before the one before it ends in both dimensions, and none touches another.
        let stairs =
            |at: u64| Extent { offsets: vec![at, (1 << 20) - 2 * at], sizes: vec![1 << 20, 1] };
        let boxes: Vec<Extent> = (0..100_000).map(stairs).collect();
        let proven = prove_all(&boxes, 1 << 60);
        assert!(matches!(proven, Err(TensorError::Gap { .. } | TensorError::Irregular)));
    }

    proptest! {
        #[test]
        fn finds_what_a_count_of_every_element_finds(
            cuts in prop::collection::vec((0_u64..6, 0_u64..6, 1_u64..4, 1_u64..4), 1..30),
        ) {
            let boxes: Vec<Extent> = cuts
                .iter()
                .map(|&(row, column, rows, columns)| Extent { offsets: vec![row, column], sizes: vec![rows, columns] })
                .collect();
            let mut count = [[0; 10]; 10];
            for &(row, column, rows, columns) in &cuts {
                for at in 0..rows * columns {
                    let (row, column) = (row + at / columns, column + at % columns);
                    count[usize::try_from(row).unwrap_or(0)][usize::try_from(column).unwrap_or(0)] += 1;
                }
            }
            let is_twice = count.iter().flatten().any(|count| *count > 1);
            let found = overlap(&mut boxes.iter().collect::<Vec<_>>(), LIMITS.tiling_levels, &mut LIMITS.tiling_pairs.clone());
            prop_assert_eq!(found.is_ok_and(|found| found.is_some()), is_twice);
        }
    }
}
