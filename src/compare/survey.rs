//! One side alone: its copies against each other, and what of it is not finite.

use std::sync::atomic::AtomicU64;

use crate::pairing::Pair;
use crate::storage::FileSet;

use super::job::{Job, UnitResult, unit_bytes};
use super::{TensorComparison, bytes, run_all};

/// Holds the first side of every pair against itself, read once: its further copies against the first one, and its
/// elements for what is not finite. `done` counts the bytes, those of [`bytes_to_survey`].
#[must_use]
pub fn survey(pairs: &[Pair], files: &FileSet, done: &AtomicU64) -> Vec<TensorComparison> {
    let unit_bytes = unit_bytes(pairs);
    let jobs: Vec<Job<'_>> = pairs.iter().map(|pair| Job::survey(pair, unit_bytes)).collect();
    run_all(&jobs, [files, files], false, done)
}

/// Bytes that [`survey`] will count.
#[must_use]
pub fn bytes_to_survey(pairs: &[Pair]) -> u64 {
    pairs.iter().map(|pair| bytes(&pair.sides[0])).fold(0, u64::saturating_add)
}

impl Job<'_> {
    /// Reads again until an element is not finite.
    pub(super) fn first_not_finite(&self, files: [&FileSet; 2]) -> Option<u64> {
        let mut found = None;
        for unit in self.units(0) {
            self.each_block(unit, files, &mut UnitResult::default(), |side, _, first| {
                found = found.or_else(|| Some(first + side.first_not_finite()?));
            })
            .ok()?;
            if found.is_some() {
                break;
            }
        }
        found
    }
}
