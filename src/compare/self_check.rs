//! One side alone: its copies against each other, and its elements that are not finite.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

use crate::base::dtype::Dtype;
use crate::base::side::Side;
use crate::kernel::{Stats, compare_block};
use crate::names::Name;
use crate::storage::FileSet;
use crate::tensor::LogicalTensor;

use super::masters::{self, Rounding};
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
    /// The outcome of holding it against its master, where it is a weight that has one.
    pub rounding: Option<Rounding>,
}

impl TensorCheck {
    /// Tells that it is a weight and not its master, rounded.
    #[must_use]
    pub fn is_misrounded(&self) -> bool {
        self.rounding.is_some_and(|rounding| rounding.misses > 0)
    }
}

/// Holds tensors against themselves, read once: the further copies against the first one, the elements of that for those
/// that are not finite, and those of a weight against its master; `sums` takes the sums of all that is read for it. `done`
/// counts the bytes, those of [`bytes_to_self_check`].
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
    let masters::Pairs { read: mut found, mut unread } =
        masters::checked(tensors, files, unit_bytes, done);
    let alone: Vec<usize> = (0..tensors.len()).filter(|at| !found.contains_key(at)).collect();
    let totals = pass::run_all(
        &alone.iter().map(|at| &passes[*at]).collect::<Vec<_>>(),
        |_, [block], first, (): &mut ()| compare_block(block, block, first),
        done,
    );
    for (at, mut totals) in alone.into_iter().zip(totals) {
        totals.error = totals.error.or(unread.remove(&at));
        found.insert(at, (totals, None));
    }
    let finish = |(((name, _), pass), (totals, rounding)): ((&(&Name, _), _), _)| TensorCheck {
        rounding,
        ..checked(name, pass, totals)
    };
    tensors.iter().zip(&passes).zip(found.into_values()).map(finish).collect()
}

/// Number of bytes that [`self_check`] will count.
#[must_use]
pub fn bytes_to_self_check(tensors: &[(&Name, &LogicalTensor)]) -> u64 {
    tensors.iter().map(|(_, tensor)| bytes(tensor)).fold(0, u64::saturating_add)
}

fn checked(name: &Name, pass: &TensorPass<'_, 1>, totals: PassTotals<1>) -> TensorCheck {
    let PassTotals { stats, differing: [differing], error, extra: () } = totals;
    let [side] = &pass.sides;
    let (replicas, mut error) = match side.differences(&differing) {
        Ok(replicas) => (replicas, error),
        Err(error) => (Vec::new(), Some(error)),
    };
    let tensor = side.tensor();
    let mut not_finite = None;
    if error.is_none() && !stats.is_finite() {
        match first_not_finite(pass) {
            Ok(found) => not_finite = found,
            Err(cause) => error = Some(cause),
        }
    }
    TensorCheck {
        name: name.clone(),
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
        first_not_finite: not_finite,
        stats: error.map_or(Ok(stats), Err),
        replicas,
        rounding: None,
    }
}

/// Reads again until an element is not finite: its index and its value as text.
fn first_not_finite(pass: &TensorPass<'_, 1>) -> Result<Option<(Vec<u64>, String)>, ReadError> {
    let [side] = &pass.sides;
    for unit in pass.units() {
        let mut found = None;
        pass.each_block(&unit, &mut [BTreeSet::new()], |[block], first| {
            found = found.or_else(|| Some(first + block.first_not_finite()?));
        })?;
        if let Some(at) = found {
            return Ok(Some((unflattened(at, side.tensor().shape()), side.value_text(at)?)));
        }
    }
    Ok(None)
}
