//! From what a pair came to when it was read to what is told of it.

use crate::base::extent::Extent;
use crate::base::side::Side;
use crate::storage::{FileId, FileSet};
use crate::tensor::{LogicalTensor, Piece};

use super::copies::{Copies, Work};
use super::job::{Job, read_error};
use super::{Example, Folded, Outcome, ReplicaDifference, TensorComparison};

impl Job<'_> {
    /// By how much the copies that were found to differ do so. One that cannot be read again makes the pair unreadable.
    pub(super) fn replica_differences(
        &self,
        folded: &mut Folded,
        files: [&FileSet; 2],
    ) -> Vec<ReplicaDifference> {
        let mut differences = Vec::new();
        for (side, number) in std::mem::take(&mut folded.replicas) {
            let tensor = &self.pair.sides[side];
            match (Copies { tensor, files: files[side] }).difference(number) {
                Ok(stats) => {
                    let replica = &tensor.replicas()[number];
                    let first = first_copy(tensor, stats.first_differing());
                    differences.push(ReplicaDifference {
                        side,
                        first: files[side].shard_label(first),
                        copy: files[side].shard_label(replica.source.file),
                        stored_name: replica.source.name.to_string(),
                        merge: tensor.merge(),
                        stats,
                    });
                }
                Err(failure) => folded.error = Some(read_error(side, files[side], &failure)),
            }
        }
        differences
    }

    pub(super) fn comparison(
        &self,
        folded: Folded,
        replicas: Vec<ReplicaDifference>,
        files: [&FileSet; 2],
    ) -> TensorComparison {
        let pair = self.pair;
        let shapes = pair.sides.each_ref().map(|side| side.shape().to_vec());
        let stats = &folded.stats;
        let outcome = match folded.error {
            Some(error) => Outcome::Unreadable(error),
            None if !pair.is_comparable() => Outcome::ShapeDiffers,
            None => Outcome::Compared(*stats),
        };
        let example = match outcome {
            Outcome::Compared(_) => {
                let at = match self.is_survey() {
                    true if stats.is_finite() => None,
                    true => self.first_not_finite(files),
                    false => stats.max_abs_index().or(stats.first_differing()),
                };
                at.and_then(|at| self.example(at, files))
            }
            _ => None,
        };
        TensorComparison {
            name: pair.name.clone(),
            dtypes: pair.sides.each_ref().map(LogicalTensor::dtype),
            shapes,
            example,
            one_minus_cos: folded.one_minus_cos,
            replicas,
            outcome,
            rows_left_out: pair.rows_left_out,
            tied_side: pair.tied_side,
        }
    }

    /// Reads one element of both sides; `None` where the files are gone by now.
    pub(super) fn example(&self, at: u64, files: [&FileSet; 2]) -> Option<Example> {
        let shape = self.pair.sides[0].shape();
        let index = unflattened(at, shape);
        let read = |side: Side| {
            let tensor = &self.pair.sides[side];
            let copies = Copies { tensor, files: files[side] };
            let (mut bytes, mut work) = (Vec::new(), Work::default());
            let is_merged = copies.merged(self.merges[side], at, 1, &mut bytes, &mut work).ok()?;
            Some(match is_merged {
                true => self.merged_side(side, &bytes).element_text(),
                false => self.side(side, work.first()).element_text(),
            })
        };
        Some(Example { index, values: [read(Side::A)?, read(Side::B)?] })
    }
}

/// The index of the element that comes `at`-th in row-major order.
fn unflattened(at: u64, shape: &[u64]) -> Vec<u64> {
    let mut rest = at;
    let position = |&size: &u64| {
        let position = rest % size.max(1);
        rest /= size.max(1);
        position
    };
    let mut index: Vec<u64> = shape.iter().rev().map(position).collect();
    index.reverse();
    index
}

/// The file in which the first copy of an element lies.
fn first_copy(tensor: &LogicalTensor, at: Option<u64>) -> FileId {
    let element = at.map(|at| Extent {
        offsets: unflattened(at, tensor.shape()),
        sizes: vec![1; tensor.shape().len()],
    });
    let holds = |piece: &&Piece| {
        element.as_ref().is_some_and(|element| piece.extent.intersect(element).is_some())
    };
    tensor.pieces().iter().find(holds).map_or(tensor.source().file, |piece| piece.file)
}
