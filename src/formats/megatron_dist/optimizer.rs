//! The optimizer of a distributed checkpoint: the keys of its tensors, and the buckets that know no names of parameters.
//!
//! Megatron-Core stores the state of a distributed optimizer by a sharding type (`distrib_optim_sharding_type`;
//! `core/optimizer/distrib_optimizer.py`, `sharded_state_dict`, core_v0.4 to v0.19):
//!
//! | sharding type | core | stored |
//! |---|---|---|
//! | `fully_reshardable` | 0.15 on | `optimizer.state.<state>.<parameter>`, sharded as the weight is |
//! | `fully_sharded_model_space` | 0.6 to 0.15 | the same, flattened |
//! | `dp_reshardable` | 0.15 on, the default | `optimizer.distributed.<bucket>.<state>`, the flat bucket without the padding at its end |
//! | `fully_sharded_bucket_space` | 0.6 to 0.14 | the same with this padding, since 0.8 as a grid of the ranks' shares |
//! | `dp_zero_gather_scatter` | 0.6 to 0.15 | `optimizer.distributed.dp_group_idx_<i>.param_state`, an object |
//!
//! A `<bucket>` is `dp_group_idx_<i>.gbuf_idx_<j>.dtype_(<of parameters>, <of gradients>).bucket_idx_<k>`. Every parameter,
//! every gap between two and every rank's share ends a piece. The gaps are memory that nobody wrote (`torch.empty`). Beside
//! the buckets lie the objects `dp_group_idx_<i>.per_bucket_numel` and `per_bucket_numel_unpadded`, with the sizes
//! that the tensors themselves have; `gbuf_local_start` and `gbuf_local_end` do not reach the file.
//! [`crate::layout::BucketedStates`] finds the parameters.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::catalog::{CatalogBuilder, Problem};
use crate::layout::rules::Rules;
use crate::layout::{
    Assembly, BucketedStates, BufferForm, Merged, PackingVersion, RunArgs, StateBuffer,
};
use crate::names::Name;
use crate::names::index::{is_number, number};
use crate::names::megatron::optimizer_state_name;
use crate::tensor::{LogicalTensor, TensorError};

/// A key taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Key<'k> {
    /// The key of a parameter.
    Weight(&'k str),
    /// The key of a parameter's state.
    State { state: &'k str, name: &'k str },
    /// The key of a bucket's state. Each of several optimizers counts its buckets from 0.
    Bucket { optimizer: &'k str, bucket: &'k str, state: &'k str },
    /// Another key of the optimizer.
    Optimizer(&'k str),
}

/// Takes a key apart: `[chained_<i>.]optimizer.state.<state>.<parameter>`,
/// `[chained_<i>.]optimizer.distributed.<bucket>.<state>`, else a parameter.
pub(super) fn parse(key: &str) -> Key<'_> {
    let chained = key.strip_prefix("chained_").and_then(|rest| rest.split_once('.'));
    let optimizer = match chained {
        Some((number, rest)) if is_number(number) => &key[..key.len() - rest.len()],
        _ => "",
    };
    let Some(rest) = key[optimizer.len()..].strip_prefix("optimizer.") else {
        return Key::Weight(key);
    };
    if let Some((state, name)) = rest.strip_prefix("state.").and_then(|rest| rest.split_once('.')) {
        return Key::State { state, name };
    }
    match rest.rsplit_once('.') {
        Some((bucket, state)) if bucket.starts_with("distributed.") => {
            Key::Bucket { optimizer, bucket, state }
        }
        _ => Key::Optimizer(rest),
    }
}

/// The states that an optimizer stored by bucket, without the names of parameters.
#[derive(Default)]
pub(super) struct OptimizerBuckets {
    buckets: Vec<Bucket>,
    /// Further tensors of the optimizer, by their own names.
    tensors: Vec<(Name, LogicalTensor)>,
    /// The keys of objects, each with the states of a data-parallel group.
    objects: Vec<String>,
    /// Every parameter and gap in a bucket is a piece of its own.
    pub has_pieces: bool,
}

/// A bucket of one kind of state.
struct Bucket {
    key: BucketKey,
    state: Arc<str>,
    tensor: LogicalTensor,
}

/// The place of a bucket: `[chained_<optimizer>.]distributed.dp_group_idx_<group>.gbuf_idx_<buffer>.dtype_<dtype>.bucket_idx_<bucket>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct BucketKey {
    optimizer: u64,
    group: u64,
    buffer: u64,
    dtype: String,
    bucket: u64,
}

impl BucketKey {
    fn parse(optimizer: &str, bucket: &str) -> Option<Self> {
        let optimizer = match optimizer.strip_prefix("chained_") {
            Some(text) => number(text.strip_suffix('.')?)?,
            None => 0,
        };
        let rest = bucket.strip_prefix("distributed.dp_group_idx_")?;
        let (group, rest) = rest.split_once(".gbuf_idx_")?;
        let (buffer, rest) = rest.split_once(".dtype_")?;
        let (dtype, bucket) = rest.rsplit_once(".bucket_idx_")?;
        let (group, buffer, bucket) = (number(group)?, number(buffer)?, number(bucket)?);
        let dtype = dtype.trim_start_matches('(').split(',').next().unwrap_or(dtype);
        Some(Self { optimizer, group, buffer, dtype: dtype.to_owned(), bucket })
    }

    fn is_of_one_buffer(&self, other: &Self) -> bool {
        Self { bucket: 0, ..self.clone() } == Self { bucket: 0, ..other.clone() }
    }

    fn label(&self) -> String {
        let Self { optimizer, group, buffer, .. } = self;
        let optimizer =
            if *optimizer > 0 { format!("optimizer {optimizer}, ") } else { String::new() };
        format!("{optimizer}dp_group_idx_{group}, gbuf_idx_{buffer}")
    }
}

/// A model that states are to be placed for.
pub(super) struct PlacedFor<'a> {
    /// The whole weights.
    pub weights: &'a BTreeMap<Name, Merged>,
    pub run_args: &'a RunArgs,
    pub rules: &'a Rules,
    /// The sharding type that the checkpoint names.
    pub sharding: Option<&'a str>,
}

/// The states of all parameters, by kind.
pub(super) type PlacedStates = BTreeMap<Arc<str>, Assembly>;

impl OptimizerBuckets {
    /// Adds a tensor of the optimizer.
    pub(super) fn add_tensor(&mut self, name: &str, tensor: LogicalTensor) {
        self.tensors.push((Name::new(format!("optimizer.{name}")), tensor));
    }

    /// Adds a bucket of one kind of state. `is_grid` says that it is a grid of the shares of ranks
    /// (`nd_reformulated_orig_global_shape`, core 0.8 to 0.14).
    pub(super) fn add_bucket(
        &mut self,
        [optimizer, bucket, state]: [&str; 3],
        tensor: LogicalTensor,
        is_grid: bool,
    ) -> Result<(), TensorError> {
        let tensor = match tensor.shape().len() {
            2 if is_grid => tensor.merge_axes(0)?,
            _ => tensor,
        };
        let state = optimizer_state_name(state);
        match BucketKey::parse(optimizer, bucket).filter(|_| tensor.shape().len() == 1) {
            Some(key) => self.buckets.push(Bucket { key, state: state.into(), tensor }),
            None => self.add_tensor(&format!("{state}.{optimizer}{bucket}"), tensor),
        }
        Ok(())
    }

    /// Adds those of these objects that hold states.
    pub(super) fn add_objects(&mut self, keys: &[String]) {
        let has_states =
            |key: &&String| key.contains("optimizer.distributed.") && key.contains(".param_state/");
        self.objects.extend(keys.iter().filter(has_states).cloned());
    }

    /// The states of all parameters, each in its place in the buckets; `None` where there are no buckets.
    pub(super) fn place(&mut self, model: &PlacedFor<'_>) -> Option<Result<PlacedStates, String>> {
        if self.buckets.is_empty() {
            return None;
        }
        let placed = self.buffers(model.sharding).and_then(|buffers| {
            let PlacedFor { weights, run_args: args, rules, .. } = *model;
            let states = BucketedStates { buffers, weights, args, rules };
            states.place().map_err(|error| error.to_string())
        });
        Some(placed)
    }

    /// The buckets by buffer.
    fn buffers(&mut self, sharding: Option<&str>) -> Result<Vec<StateBuffer>, String> {
        use PackingVersion::{Core0_6, Core0_7, Core0_8};
        let (form, versions): (_, &[PackingVersion]) = match sharding {
            Some("fully_sharded_bucket_space") => {
                (BufferForm::Buckets, &[Core0_6, Core0_7, Core0_8])
            }
            _ => (BufferForm::UnpaddedBuckets, &[Core0_8]),
        };
        let mut buckets = std::mem::take(&mut self.buckets);
        buckets.sort_by(|one, other| (&one.key, &one.state).cmp(&(&other.key, &other.state)));
        let mut buffers = Vec::new();
        for of_buffer in buckets.chunk_by(|one, other| one.key.is_of_one_buffer(&other.key)) {
            let BucketKey { optimizer, group, buffer: number, ref dtype, .. } = of_buffer[0].key;
            let (label, dtype) = (of_buffer[0].key.label(), dtype.clone());
            let mut states: BTreeMap<Arc<str>, Vec<LogicalTensor>> = BTreeMap::new();
            for Bucket { key, state, tensor } in of_buffer {
                let tensors = states.entry(Arc::clone(state)).or_default();
                if tensors.len() as u64 != key.bucket {
                    return Err(format!("{label}: {state} of bucket {} is missing", tensors.len()));
                }
                tensors.push(tensor.clone());
            }
            let has_pieces = self.has_pieces;
            buffers.push(StateBuffer {
                optimizer,
                group,
                number,
                label,
                dtype,
                form,
                versions,
                has_pieces,
                states,
            });
        }
        Ok(buffers)
    }

    /// Adds what is left to a catalog.
    pub(super) fn add_to(self, catalog: &mut CatalogBuilder<'_>, sharding: Option<&str>) {
        for (name, tensor) in self.tensors {
            catalog.add(name, tensor);
        }
        let kind = sharding.map(|kind| format!(" ({kind})")).unwrap_or_default();
        for key in self.objects {
            let message = format!(
                "holds the optimizer's states of a group of ranks{kind} without the names of parameters, so they \
                 cannot be compared"
            );
            catalog.problem(Problem::of_tensor(key, message));
        }
    }
}

/// Adds states to a catalog under the names of their parameters.
pub(super) fn add_placed(
    catalog: &mut CatalogBuilder<'_>,
    states: PlacedStates,
    run_args: &RunArgs,
) {
    for (state, assembly) in states {
        let named =
            |(name, merged): (Name, _)| (Name::new(format!("optimizer.{state}.{name}")), merged);
        catalog.add_merged(assembly.tensors.into_iter().map(named));
        catalog.tie_output_layer(&format!("optimizer.{state}."), assembly.tied_output, run_args);
        for (name, error) in assembly.problems {
            catalog.problem(Problem::of_tensor(format!("optimizer.{state}.{name}"), error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_optimizer_are_told_from_weights() {
        let state = |state, name| Key::State { state, name };
        for (key, expected) in [
            ("decoder.final_layernorm.weight", Key::Weight("decoder.final_layernorm.weight")),
            (
                "optimizer.state.exp_avg.output_layer.weight",
                state("exp_avg", "output_layer.weight"),
            ),
            (
                "chained_1.optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight",
                state("fp32_param", "decoder.layers.mlp.linear_fc1.weight"),
            ),
            (
                "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_1.exp_avg",
                Key::Bucket {
                    optimizer: "chained_1.",
                    state: "exp_avg",
                    bucket: "distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_1",
                },
            ),
            ("optimizer.other", Key::Optimizer("other")),
        ] {
            assert_eq!(parse(key), expected, "{key}");
        }
    }
}
