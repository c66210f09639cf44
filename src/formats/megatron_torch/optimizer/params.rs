//! The parameters of a rank's model, and the states that an optimizer keeps of them.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::sync::Arc;

use thiserror::Error;

use crate::base::dtype::Dtype;
use crate::base::extent;
use crate::base::limits::OverLimit;
use crate::containers::torch::RebuildError;
use crate::names::megatron::{is_embedding_or_output, is_expert_parameter, is_trained};
use crate::tensor::StoredTensor;

/// Tensors of one rank by model chunk, as the file lists them.
pub(in crate::formats) type ModelChunks = BTreeMap<u64, Vec<(Arc<str>, StoredTensor)>>;

/// A parameter that is trained.
#[derive(Debug, Clone)]
pub(in crate::formats) struct ModelParam {
    /// Its model chunk.
    pub chunk: u64,
    /// The name in the file.
    pub name: Arc<str>,
    /// The weight.
    pub weight: StoredTensor,
}

impl ModelParam {
    /// Returns whether it belongs to a routed expert.
    pub(super) fn is_expert(&self) -> bool {
        is_expert_parameter(&self.name)
    }

    /// Returns whether it is an embedding or an output layer (`is_embedding_or_output_parameter`).
    pub(super) fn is_embedding_or_output(&self) -> bool {
        is_embedding_or_output(&self.name)
    }

    /// Returns whether the optimizer keeps a main parameter for it, a copy in 32 bits.
    pub(super) fn has_main_param(&self) -> bool {
        matches!(self.weight.dtype(), Dtype::Float16 | Dtype::BFloat16)
    }

    /// Number of elements.
    pub(super) fn numel(&self) -> u64 {
        extent::numel(self.weight.shape()).unwrap_or(0)
    }
}

/// The parameters of a rank in the order of `named_parameters`: that of the state dict, for both follow the modules.
pub(super) fn params_in_order(chunks: &ModelChunks) -> Vec<ModelParam> {
    let mut params: Vec<ModelParam> = Vec::new();
    for (&chunk, tensors) in chunks {
        let start = params.len();
        let mut first_at: HashMap<(u64, u64), usize> = HashMap::new();
        for (name, weight) in tensors.iter().filter(|(name, _)| is_trained(name)) {
            // A module under two names, as T5's output layer is, has its parameters once.
            let place = (weight.storage().offset, weight.storage_offset());
            let first = *first_at.entry(place).or_insert(params.len());
            let is_again = |first: &ModelParam| {
                let is_part = name.ends_with(&*first.name) || first.name.ends_with(&**name);
                is_part && first.weight == *weight
            };
            if !params.get(first).is_some_and(is_again) {
                params.push(ModelParam { chunk, name: Arc::clone(name), weight: weight.clone() });
            }
        }
        // megatron.legacy makes the copy of the embeddings before the heads, and stores it behind them.
        let position = |prefixes: &[&str]| {
            let has_prefix =
                |param: &ModelParam| prefixes.iter().any(|prefix| param.name.starts_with(prefix));
            params.iter().skip(start).position(has_prefix).map(|at| at + start)
        };
        let copy = position(&["word_embeddings_for_head."]);
        if let (Some(head), Some(copy)) = (position(&["lm_head.", "binary_head."]), copy)
            && head < copy
        {
            params[head..=copy].rotate_right(1);
        }
    }
    params
}

/// A tensor that an optimizer keeps of one parameter, in the parameter's shape.
#[derive(Debug, Clone)]
pub(in crate::formats) struct ParamState {
    /// The parameter's model chunk.
    pub chunk: u64,
    /// The parameter's stored name.
    pub name: Arc<str>,
    /// The tensor.
    pub tensor: StoredTensor,
}

impl ParamState {
    /// A state of this parameter.
    pub(super) fn of(param: &ModelParam, tensor: StoredTensor) -> Self {
        Self { chunk: param.chunk, name: Arc::clone(&param.name), tensor }
    }
}

/// The states of all parameters by kind: `exp_avg`, `exp_avg_sq`, `fp32_param`, ...
pub(in crate::formats) type ParamStates = BTreeMap<String, Vec<ParamState>>;

/// Optimizer state that does not fit the parameters of the model.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("optimizer state cannot be matched to parameters: {reason}")]
pub(super) struct UnmatchedState {
    reason: String,
    /// The error of a tensor that cannot be read.
    #[source]
    cause: Option<RebuildError>,
}

impl UnmatchedState {
    /// State that does not fit for this reason.
    pub(super) fn new(reason: impl Display) -> Self {
        Self { reason: reason.to_string(), cause: None }
    }

    /// State in this part of the file that cannot be read.
    pub(super) fn unreadable(part: impl Display, cause: RebuildError) -> Self {
        Self { reason: part.to_string(), cause: Some(cause) }
    }

    /// The same with the part of the file that it is about.
    pub(super) fn within(self, part: impl Display) -> Self {
        Self { reason: format!("{part}: {}", self.reason), ..self }
    }

    /// The reason alone.
    #[cfg(test)]
    pub(super) fn reason(&self) -> &str {
        &self.reason
    }
}

impl From<OverLimit> for UnmatchedState {
    fn from(error: OverLimit) -> Self {
        Self::new(error)
    }
}
