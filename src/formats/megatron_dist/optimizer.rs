//! The optimizer of a distributed checkpoint: the keys of its tensors, and buckets without the names of parameters.
//!
//! Megatron-Core stores the state of a distributed optimizer by a sharding type (`distrib_optim_sharding_type`;
//! `core/optimizer/distrib_optimizer.py`, `sharded_state_dict`, core_v0.4 to v0.19):
//!
//! | sharding type | stored |
//! |---|---|
//! | `fully_reshardable`, `fully_sharded_model_space` | `optimizer.state.<state>.<parameter>`, sharded as the weight is |
//! | `dp_reshardable`, `fully_sharded_bucket_space` | `optimizer.distributed.<bucket>.<state>`, the flat bucket |
//! | `dp_zero_gather_scatter` | `optimizer.distributed.dp_group_idx_<i>.param_state`, an object |

use crate::catalog::{CatalogBuilder, Problem};
use crate::names::Name;
use crate::names::index::is_number;
use crate::tensor::LogicalTensor;

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

/// The state that an optimizer stored without the names of parameters.
#[derive(Default)]
pub(super) struct OptimizerBuckets {
    tensors: Vec<(Name, LogicalTensor)>,
    /// The keys of objects, each with the states of a data-parallel group.
    objects: Vec<String>,
}

impl OptimizerBuckets {
    /// Adds a tensor of the optimizer.
    pub(super) fn add_tensor(&mut self, name: &str, tensor: LogicalTensor) {
        self.tensors.push((Name::new(format!("optimizer.{name}")), tensor));
    }

    /// Adds those of these objects that hold states.
    pub(super) fn add_objects(&mut self, keys: &[String]) {
        let has_states =
            |key: &&String| key.contains("optimizer.distributed.") && key.contains(".param_state/");
        self.objects.extend(keys.iter().filter(has_states).cloned());
    }

    /// Adds the tensors to a catalog under their own names: a bucket can be compared with one of the same layout only.
    pub(super) fn add_to(self, catalog: &mut CatalogBuilder<'_>, sharding: Option<&str>) {
        let kind = sharding.map(|kind| format!(" ({kind})")).unwrap_or_default();
        if !self.tensors.is_empty() {
            catalog.note(format!(
                "the optimizer's states are stored by bucket{kind}, without the names of parameters: a bucket is \
                 compared with the same bucket only, and what lies between its parameters is not initialised"
            ));
        }
        for (name, tensor) in self.tensors {
            catalog.add(name, tensor);
        }
        for key in self.objects {
            let message = format!(
                "holds the optimizer's states of a group of ranks{kind} without the names of parameters, so they \
                 cannot be compared"
            );
            catalog.problem(Problem::of_tensor(key, message));
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
