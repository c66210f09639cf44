//! The reasons for which shards do not make a tensor.

use thiserror::Error;

use crate::base::limits::OverLimit;
use crate::tensor::TensorError;

use super::{ArgName, NumberingError};

/// The reason for which shards do not make a tensor.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum LayoutError {
    /// The table has no line for the name.
    #[error(
        "no sharding rule for this name and more than one shard of it; \
         supply one with --rule NAME=replicated|column|row|gated|vocab"
    )]
    NoRule,
    /// A needed argument is neither in `args` nor shown by any shape.
    #[error("the checkpoint does not say {arg}; supply it with --set {arg}=VALUE")]
    ArgMissing {
        /// The attribute of `args`.
        arg: ArgName,
    },
    /// One rank's part of the tensor is not there.
    #[error("missing on {axis} rank {slot}")]
    RankMissing {
        /// The axis.
        axis: &'static str,
        /// The rank along it.
        slot: u64,
    },
    /// No rank holds anything of it.
    #[error("no rank holds it")]
    NoShard,
    /// A tensor that tells the sizes of this one's sections is not there.
    #[error("cannot tell its sections: {sibling} is missing beside it")]
    SiblingMissing {
        /// Canonical name of the tensor that is missing.
        sibling: String,
    },
    /// The shards of one tensor differ in shape or dtype.
    #[error("shards do not fit together: {}", parts.join(", "))]
    PartsDisagree {
        /// Rank, shape and dtype of each.
        parts: Vec<String>,
    },
    /// Tensors that hold all layers of one list have different numbers of them.
    #[error("has {layers} layers where {other} has {others}")]
    LayersDisagree {
        /// Layers of this tensor.
        layers: u64,
        /// A tensor with another number of them.
        other: String,
        /// Layers of that one.
        others: u64,
    },
    /// A flattened tensor that does not have the form of such a one.
    #[error("shape {shape:?} is no grid of flattened parts of {wanted:?}")]
    NoGrid {
        /// The stored shape.
        shape: Vec<u64>,
        /// The shape that it stands for.
        wanted: Vec<u64>,
    },
    /// Some sections of a parameter are there without the others.
    #[error("stored in sections {}, where {} make it up", found.join(", "), wanted.join(", "))]
    SectionsIncomplete {
        /// Sections found.
        found: Vec<String>,
        /// All the sections that there should be.
        wanted: Vec<String>,
    },
    /// One half of a pair is there without the other.
    #[error("its other half {other} is missing")]
    HalfMissing {
        /// Canonical name of the other half.
        other: String,
    },
    /// The rows of the first linear fit neither a gated nor a plain MLP.
    #[error("{rows} rows are neither once nor twice the {columns} columns of linear_fc2")]
    NeitherGatedNorNot {
        /// Rows over all shards.
        rows: u64,
        /// Columns of the second linear over all shards.
        columns: u64,
    },
    /// The rows are not what the sections add up to.
    #[error("{rows} rows, where the model's dimensions give {wanted}")]
    UnexpectedRows {
        /// Rows found.
        rows: u64,
        /// Rows expected.
        wanted: u64,
    },
    /// The experts cannot be shared out evenly.
    #[error("{experts} experts cannot be shared by {shares} ranks")]
    ExpertsNotDivisible {
        /// Experts of a layer.
        experts: u64,
        /// Ranks that share them.
        shares: u64,
    },
    /// More experts, layers, lists of layers or parts than the limit.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// A rank holds another number of experts than it should.
    #[error("a rank holds {found} experts where there should be {expected}")]
    UnevenExperts {
        /// Experts of the rank.
        found: u64,
        /// Experts that another rank holds, or that `args` gives it.
        expected: u64,
    },
    /// A fused tensor has the wrong number of dimensions.
    #[error("shape {shape:?} is no matrix")]
    NotAMatrix {
        /// The stored shape.
        shape: Vec<u64>,
    },
    /// A fused tensor's memory cannot be read under its real shape.
    #[error("a tensor of shape {shape:?} with these strides cannot be seen as {wanted:?}")]
    NotContiguous {
        /// The stored shape.
        shape: Vec<u64>,
        /// The shape that it really has.
        wanted: Vec<u64>,
    },
    /// Two stored names become one on the same rank.
    #[error("also stored as {other} on the same rank")]
    Duplicate {
        /// The other stored name.
        other: String,
    },
    /// Rank folders with different numbers of parts.
    #[error("rank folders have names of different forms (mp_rank_TT, mp_rank_TT_PPP, ...)")]
    MixedNames,
    /// Experts whose parts were written over one another.
    #[error(
        "expert_tensor_parallel_size={etp} with tensor_model_parallel_size={tp}: ranks that share a \
         folder wrote over each other, so the experts cannot be recovered from this checkpoint"
    )]
    ExpertsLost {
        /// Tensor parallel size.
        tp: u64,
        /// Tensor parallel size of the experts.
        etp: u64,
    },
    /// A layout that cannot be put together from its files.
    #[error("{arg} is set: {reason}, so this layout cannot be put together")]
    Refused {
        /// The attribute of `args`.
        arg: ArgName,
        /// The reason.
        reason: &'static str,
    },
    /// The layers cannot be numbered.
    #[error(transparent)]
    Numbering(#[from] NumberingError),
    /// The parts do not fit together.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
