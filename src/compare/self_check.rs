//! One side alone: its copies against each other, and its elements that are not finite.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

use crate::base::dtype::Dtype;
use crate::base::side::Side;
use crate::kernel::{Stats, compare_block};
use crate::names::Name;
use crate::storage::FileSet;
use crate::tensor::LogicalTensor;

use super::pass::{self, PassTotals, TensorPass, bytes, unit_bytes};
use super::side_files::{ReadError, SideFiles};
use super::side_reader::{ReplicaDifference, SideReader, unflattened};
use super::sums::ContentSums;

/// The self-check of one tensor.
#[derive(Debug)]
pub struct TensorCheck {
    /// The canonical name.
    pub name: Name,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// The statistics of its elements as both sides, or the file that cannot be read.
    pub stats: Result<Stats, ReadError>,
    /// The index of the first element that is not finite, and its value as text.
    pub first_not_finite: Option<(Vec<u64>, String)>,
    /// Copies that are not bit by bit the first one, parts of a sum included.
    pub replicas: Vec<ReplicaDifference>,
}

/// Holds tensors against themselves, read once: the further copies against the first one, and the elements of that for
/// those that are not finite; `sums` takes the sums of all that is read for it. `done` counts the bytes, those of
/// [`bytes_to_self_check`].
#[must_use]
pub fn self_check(
    tensors: &[(&Name, &LogicalTensor)],
    files: &FileSet,
    sums: Option<&ContentSums>,
    done: &AtomicU64,
) -> Vec<TensorCheck> {
    let files = SideFiles { side: Side::A, files, sums };
    let unit_bytes = unit_bytes(bytes_to_self_check(tensors));
    let pass = |tensor| TensorPass::new([SideReader::unmerged(files, tensor)], unit_bytes);
    let passes: Vec<TensorPass<'_, 1>> = tensors.iter().map(|(_, tensor)| pass(tensor)).collect();
    let totals = pass::run_all(&passes, |[block], first| compare_block(block, block, first), done);
    let finish = |(((name, _), pass), totals): ((&(&Name, _), _), _)| checked(name, pass, totals);
    tensors.iter().zip(&passes).zip(totals).map(finish).collect()
}

/// Number of bytes that [`self_check`] will count.
#[must_use]
pub fn bytes_to_self_check(tensors: &[(&Name, &LogicalTensor)]) -> u64 {
    tensors.iter().map(|(_, tensor)| bytes(tensor)).fold(0, u64::saturating_add)
}

fn checked(name: &Name, pass: &TensorPass<'_, 1>, totals: PassTotals<1>) -> TensorCheck {
    let PassTotals { stats, differing: [differing], error } = totals;
    let [side] = &pass.sides;
    let (replicas, error) = match side.differences(&differing) {
        Ok(replicas) => (replicas, error),
        Err(error) => (Vec::new(), Some(error)),
    };
    let tensor = side.tensor();
    let first_not_finite = || {
        let at = first_not_finite(pass)?;
        Some((unflattened(at, tensor.shape()), side.value_text(at)?))
    };
    TensorCheck {
        name: name.clone(),
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
        first_not_finite: match error {
            None if !stats.is_finite() => first_not_finite(),
            _ => None,
        },
        stats: error.map_or(Ok(stats), Err),
        replicas,
    }
}

/// Reads again until an element is not finite.
fn first_not_finite(pass: &TensorPass<'_, 1>) -> Option<u64> {
    let mut found = None;
    for unit in pass.units() {
        pass.each_block(&unit, &mut [BTreeSet::new()], |[block], first| {
            found = found.or_else(|| Some(first + block.first_not_finite()?));
        })
        .ok()?;
        if found.is_some() {
            break;
        }
    }
    found
}
