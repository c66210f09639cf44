//! Buffers of all ranks' distributed optimizers, without the names of parameters -> states by name.
//!
//! ```text
//! whole weights ─► model: their order, and the part that each rank holds
//!                     │ stages: the layers of each model chunk, by the sizes of its buffers
//! stored buffers ──► plan: super::grad_buffer places each parameter, proven by sizes and pieces
//!                     │ states: ranges of the buffers, in the shapes of the weights
//!                     └─► super::merge, as for the shards of any rank
//! ```
//!
//! Nothing is guessed: a plan has to give every tensor of every buffer its stored size and the very pieces in which it is
//! stored, and be the only one that does. What lies between parameters belongs to none of them and is never looked at.
//!
//! Facts from Megatron-LM core_v0.6 to core_v0.19 (`core/optimizer/__init__.py`, `distrib_optimizer.py`,
//! `core/distributed/distributed_data_parallel.py`): each pipeline stage's tensor-parallel ranks have an optimizer each,
//! numbered `tensor rank + tensor size * stage`, whose buffers are numbered model chunk by model chunk and, within one, by dtype in
//! the order of the first parameters. Where experts are shared out (`expert_model_parallel_size` over 1), a second optimizer has
//! them, numbered `expert tensor rank + expert tensor size * (expert rank + expert size * stage)`.

mod model;
mod order;
mod plan;
mod states;

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use crate::base::limits::OverLimit;
use crate::names::Name;
use crate::tensor::{LogicalTensor, TensorError};

use super::rules::Rules;
use super::{Assembly, BufferError, BufferForm, LayoutError, Merged, PackingVersion, RunArgs};

use self::model::Model;
use self::order::ParamOrder;
use self::plan::Planner;

/// A param-and-grad buffer of one rank, as the checkpoint stores the states of its parameters.
#[derive(Debug)]
pub struct StateBuffer {
    /// Its optimizer among those of a rank: 0, or 1 for that of experts.
    pub optimizer: u64,
    /// The number of the ranks that share it (`dp_group_idx`).
    pub group: u64,
    /// Its number among the buffers of the optimizer (`gbuf_idx`).
    pub number: u64,
    /// Its name in the checkpoint, for messages.
    pub label: String,
    /// The dtype of its parameters, as the checkpoint spells it.
    pub dtype: String,
    /// The tensors that store it.
    pub form: BufferForm,
    /// The versions that store it in this form.
    pub versions: &'static [PackingVersion],
    /// Its tensors are stored in pieces as [`super::BufferProof::Pieces`] says.
    pub has_pieces: bool,
    /// Flat tensors by kind of state; each kind has the same number of them, of the same sizes.
    pub states: BTreeMap<Arc<str>, Vec<LogicalTensor>>,
}

/// The states of a distributed optimizer, and the model that they are of.
#[derive(Debug)]
pub struct BucketedStates<'a> {
    /// The buffers of all ranks.
    pub buffers: Vec<StateBuffer>,
    /// The whole weights by canonical name.
    pub weights: &'a BTreeMap<Name, Merged>,
    /// The arguments of the run.
    pub args: &'a RunArgs,
    /// The sharding of the parameters.
    pub rules: &'a Rules,
}

/// The reason for which the parameters cannot be placed in the buffers.
#[derive(Debug, Error)]
pub enum BucketsError {
    /// The order of a model with this parameter is not known.
    #[error("where the model has {name} among its parameters is not known")]
    UnknownOrder {
        /// Canonical name of the parameter.
        name: Name,
    },
    /// Several orders fit.
    #[error(
        "its parameters fit into the buffers in more than one order; \
         say which with --set transformer_impl=local|transformer_engine and --set moe_grouped_gemm=true|false"
    )]
    Ambiguous,
    /// A rank's part of a weight cannot be told.
    #[error("{name}: {reason}")]
    Weight {
        /// Canonical name of the weight.
        name: Name,
        /// The reason.
        reason: LayoutError,
    },
    /// The buffers are those of another number of ranks than the arguments say.
    #[error(
        "there are buffers of {found} groups of ranks{kind}, where the parallel sizes make {wanted}; \
         if args does not say how many ranks there were, say --set {arg}=N"
    )]
    Groups {
        /// Groups found.
        found: u64,
        /// Groups by the arguments.
        wanted: u64,
        /// Words for the kind of optimizer.
        kind: &'static str,
        /// The size that is most likely not known.
        arg: &'static str,
    },
    /// More optimizers than one for dense parameters and one for experts.
    #[error("each rank has {found} optimizers, where one or two (for experts) are known")]
    Optimizers {
        /// Their number.
        found: u64,
    },
    /// A buffer does not hold the parameters of any layers.
    #[error("{label}: {reason}")]
    Buffer {
        /// The buffer.
        label: String,
        /// The reason.
        reason: BufferError,
    },
    /// The buffers of a model chunk fit no number of layers.
    #[error("{label}: no number of layers fits into it")]
    Layers {
        /// The buffer.
        label: String,
    },
    /// A rank lacks a buffer that parameters of the model would be in.
    #[error("no buffer is there for {name}")]
    NoBuffer {
        /// Canonical name of the first parameter.
        name: Name,
    },
    /// A rank has a buffer that the model has no parameters for.
    #[error("{label}: the model has no {dtype} parameters for it")]
    NoParams {
        /// The buffer.
        label: String,
        /// The dtype of its parameters.
        dtype: String,
    },
    /// The states of one buffer differ.
    #[error("{label}: its states are not of one size")]
    StatesDiffer {
        /// The buffer.
        label: String,
    },
    /// More ranks or model chunks than the limit.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// A part of a state cannot be cut out.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl BucketedStates<'_> {
    /// The states of all parameters, by kind and canonical name.
    ///
    /// # Errors
    /// The parameters cannot be placed, or in several ways.
    pub fn place(&self) -> Result<BTreeMap<Arc<str>, Assembly>, BucketsError> {
        let model = Model::of(self.weights, self.args, self.rules)?;
        let planner = Planner::new(self, &model)?;
        let mut plans = Vec::new();
        let mut failure = None;
        let orders = ParamOrder::all(model.has_experts(), model.has_latent_attention());
        for order in orders.into_iter().filter(|order| model.is_known_in(order)) {
            match planner.plan(&order) {
                Ok(plan) if plans.iter().any(|(_, other)| *other == plan) => {}
                Ok(plan) => plans.push((order, plan)),
                Err(error) if failure.is_none() || order.agrees_with(self.args) => {
                    failure = Some(error);
                }
                Err(_) => {}
            }
        }
        if plans.len() > 1 {
            plans.retain(|(order, _)| order.agrees_with(self.args));
        }
        match (plans.pop(), plans.is_empty(), failure) {
            (Some((_, plan)), true, _) => states::assemble(self, &model.axes, plan),
            (None, _, Some(error)) => Err(error),
            _ => Err(BucketsError::Ambiguous),
        }
    }
}
