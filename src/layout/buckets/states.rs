//! Parameters in their places -> the states of the whole model.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::layout::merge::{Merger, RankPart, RankParts, RowBiases};
use crate::layout::unfuse::deinterleaved;
use crate::layout::{Assembly, LayoutError};
use crate::tensor::{LogicalTensor, TensorError};

use super::model::Axes;
use super::plan::Placed;
use super::{BucketedStates, BucketsError};

/// The parameters of one tensor of one buffer, by the buffer and the tensor.
type ByTensor<'p, 'm> = BTreeMap<(usize, usize), Vec<&'p Placed<'m>>>;

/// Cuts the states of all parameters out of the buffers, and puts those of all ranks together.
pub(super) fn assemble(
    states: &BucketedStates<'_>,
    axes: &Axes,
    mut plan: Vec<Placed<'_>>,
) -> Result<BTreeMap<Arc<str>, Assembly>, BucketsError> {
    plan.sort_by_key(|placed| placed.range.start);
    let mut by_tensor = ByTensor::new();
    for placed in &plan {
        by_tensor.entry((placed.buffer, placed.tensor)).or_default().push(placed);
    }
    let mut parts: BTreeMap<Arc<str>, Parts> = BTreeMap::new();
    for ((buffer, tensor), params) in by_tensor {
        for (state, tensors) in &states.buffers[buffer].states {
            let Some(flat) = tensors.get(tensor) else { continue };
            parts.entry(Arc::clone(state)).or_default().cut(flat, &params, states)?;
        }
    }
    let assemble = |(state, parts): (Arc<str>, Parts)| (state, parts.assemble(states, axes));
    Ok(parts.into_iter().map(assemble).collect())
}

/// The parts that all ranks have of one kind of state.
#[derive(Default)]
struct Parts {
    parts: RankParts,
    tied_copies: RankParts,
}

impl Parts {
    fn cut(
        &mut self,
        flat: &LogicalTensor,
        params: &[&Placed<'_>],
        states: &BucketedStates<'_>,
    ) -> Result<(), BucketsError> {
        let ranges: Vec<Range<u64>> = params.iter().map(|placed| placed.range.clone()).collect();
        for (tensor, placed) in flat.ranges(&ranges)?.into_iter().zip(params) {
            let with_name = |reason| BucketsError::Weight { name: placed.name.clone(), reason };
            let tensor = shaped(tensor, placed)?;
            let tensor =
                deinterleaved(placed.name.as_str(), tensor, states.args, 1).map_err(with_name)?;
            let parts = if placed.is_tied_copy { &mut self.tied_copies } else { &mut self.parts };
            parts.entry(placed.name.clone()).or_default().push(RankPart::new(placed.rank, tensor));
        }
        Ok(())
    }

    fn assemble(self, states: &BucketedStates<'_>, axes: &Axes) -> Assembly {
        let mut assembly = Assembly::default();
        for (is_tied_copy, parts) in [(false, &self.parts), (true, &self.tied_copies)] {
            let merger = Merger {
                parts,
                rules: states.rules,
                args: states.args,
                tp: axes.tp,
                etp: axes.etp.min(axes.tp),
                row_biases: RowBiases::Copies,
            };
            for (name, parts) in parts {
                let merged = merger.merge(name, parts).and_then(|merged| {
                    let wanted = states.weights.get(name).map(|weight| weight.tensor.shape());
                    let shape = merged.tensor.shape();
                    match wanted {
                        Some(wanted) if wanted != shape => {
                            let (first, second) = (wanted.to_vec(), shape.to_vec());
                            Err(LayoutError::from(TensorError::ShapesDisagree { first, second }))
                        }
                        _ => Ok(merged),
                    }
                });
                match merged {
                    Ok(merged) if is_tied_copy => assembly.tied_output = Some(merged.tensor),
                    Ok(merged) => {
                        assembly.tensors.insert(name.clone(), merged);
                    }
                    Err(error) => assembly.problems.push((name.to_string(), error)),
                }
            }
        }
        assembly
    }
}

/// A flat stretch in the shape of its parameter.
fn shaped(flat: LogicalTensor, placed: &Placed<'_>) -> Result<LogicalTensor, TensorError> {
    let mut lying = placed.shape.to_vec();
    if placed.is_transposed {
        lying.reverse();
    }
    let mut tensor = flat;
    for axis in 1..lying.len() {
        tensor = tensor.split_axis(axis - 1, lying[axis..].iter().product())?;
    }
    if placed.is_transposed && lying.len() == 2 { tensor.transpose(0, 1) } else { Ok(tensor) }
}
