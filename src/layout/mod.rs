//! Ranks -> logical tensors.
//!
//! Shards come in under stored names with the rank that holds them; out come whole tensors under global
//! canonical names (`assemble`). On the way: names ([`crate::names`]), fused tensors taken apart (`unfuse`), global
//! indices (`numbering`), parts put together (`merge`, by the table in [`rules`] and the sizes in `sections`).
//! Checkpoints that hold whole tensors already need only names and axes put right (`global`).

mod arg_name;
mod args;
mod assemble;
mod buckets;
mod error;
mod global;
mod grad_buffer;
mod grid;
mod merge;
mod numbering;
mod rank_order;
mod replicas;
pub mod rules;
mod sections;
mod stage_layout;
mod unfuse;

pub use arg_name::ArgName;
pub use args::{RunArgs, parse_run_arg};
pub use assemble::{Assembly, Shard, ShardedModel};
pub use buckets::{BucketedStates, BucketsError, StateBuffer};
pub use error::LayoutError;
pub use global::{Global, from_global};
pub use grad_buffer::{
    BufferError, BufferForm, BufferParam, BufferProof, GradBuffer, PackingVersion, ParamStart,
};
pub use grid::{FolderNaming, ParallelLayout, RankCoord, RankName};
pub use merge::{Merged, Merger, RankPart, RankParts, RowBiases};
pub use numbering::{LayerNumbers, ModelChunk, NumberingError};
pub use rank_order::RankOrder;
pub use replicas::Lacking;
pub use unfuse::HeadOrder;

/// Tells whether a canonical name is that of a routed expert's parameter.
fn is_expert(name: &str) -> bool {
    name.contains(".experts.local_experts.")
}
