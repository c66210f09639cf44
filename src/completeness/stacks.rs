//! Lists of layers in names, the names in each layer, and the experts of each.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::names::index::index;
use crate::names::place::{split_at_number, split_expert, split_layer};

/// Lists that are judged.
const MOST: usize = 256;

/// The list that a stage of a vision model is.
const BLOCKS: &str = "blocks";

/// Modules of a layer that predicts further tokens.
const PREDICTION: [&str; 3] = ["eh_proj", "enorm", "hnorm"];

/// Linears of an MLP (transformers, Megatron-Core).
const DENSE: [&str; 6] =
    ["gate_proj", "up_proj", "down_proj", "gate_up_proj", "linear_fc1", "linear_fc2"];

/// Words for what mixes tokens in a layer.
const MIXERS: [&str; 5] = ["attention", "attn", "mixer", "mamba", "ssm"];

/// A list of layers.
#[derive(Debug)]
pub(super) struct Stack<'n> {
    /// All that stands before a layer's number: `decoder.layers.`
    pub path: &'n str,
    pub layers: BTreeMap<u64, Layer<'n>>,
    /// Names in all its layers.
    pub size: usize,
}

/// What is in one layer.
#[derive(Debug, Default)]
pub(super) struct Layer<'n> {
    /// Names behind its number; an expert's number is `*`.
    pub names: BTreeSet<Cow<'n, str>>,
    /// Its experts by list (`mlp.experts.`) and number, with the names behind that.
    pub experts: BTreeMap<&'n str, BTreeMap<u64, BTreeSet<&'n str>>>,
}

/// The lists of layers among these names, in order.
pub(super) fn of<'n>(names: impl Iterator<Item = &'n str>) -> Vec<Stack<'n>> {
    let mut stacks: BTreeMap<&str, BTreeMap<u64, Layer<'n>>> = BTreeMap::new();
    for name in names {
        let Some((path, number, rest)) = split_layer(name) else { continue };
        let layer = stacks.entry(path).or_default().entry(number).or_default();
        match split_expert(rest) {
            Some((list, expert, part)) => {
                layer.names.insert(format!("{list}*.{part}").into());
                layer.experts.entry(list).or_default().entry(expert).or_default().insert(part);
            }
            None => {
                layer.names.insert(rest.into());
            }
        }
    }
    let stack = |(path, layers): (&'n str, BTreeMap<u64, Layer<'n>>)| {
        let size = layers.values().map(|layer| layer.names.len()).sum();
        Stack { path, layers, size }
    };
    // So many are no model's; what is behind the limit is not judged.
    stacks.into_iter().take(MOST).map(stack).collect()
}

/// The list that a name's layer is in.
pub(super) fn path(name: &str) -> Option<&str> {
    split_layer(name).map(|(path, ..)| path)
}

impl Layer<'_> {
    /// Says whether it predicts further tokens, beside those of the model (transformers `modeling_glm4_moe.py`, DeepSeek V3).
    pub(super) fn predicts(&self) -> bool {
        self.names.iter().any(|name| PREDICTION.contains(&module(name)))
    }

    /// Says whether it has an MLP that is no expert and none beside experts.
    pub(super) fn is_dense(&self) -> bool {
        let mut parts = self.names.iter().filter_map(|name| name.strip_prefix("mlp."));
        parts.any(|part| DENSE.contains(&module(part)))
    }
}

impl Stack<'_> {
    /// The name of the list: `decoder.layers`.
    pub(super) fn list(&self) -> &str {
        self.path.trim_end_matches('.')
    }

    /// Says whether its members look like layers of a model, and not like stages of a convolution or a list of linears.
    pub(super) fn is_of_layers(&self) -> bool {
        let names = || self.layers.values().flat_map(|layer| &layer.names);
        // A stage is a list itself, of numbers or of blocks (transformers `modeling_swin.py`).
        let is_stage = |name: &Cow<'_, str>| {
            index(module(name)).is_some() || split_at_number(name, |list| list == BLOCKS).is_some()
        };
        let is_mixer = |name: &Cow<'_, str>| MIXERS.iter().any(|word| name.contains(word));
        names().any(is_mixer) && !names().any(is_stage)
    }

    /// One more than the highest number.
    pub(super) fn end(&self) -> u64 {
        self.layers.last_key_value().map_or(0, |(last, _)| last.saturating_add(1))
    }
}

/// The module of a name within its layer: its first component.
pub(super) fn module(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_no_layers() {
        let is_of_layers = |name: &'static str| of([name].into_iter())[0].is_of_layers();
        assert!(is_of_layers("encoder.layers.0.attention.query.weight"));
        assert!(is_of_layers("blocks.0.attn.qkv.weight"));
        assert!(is_of_layers("block.0.layer.0.SelfAttention.attn.q.weight"));
        assert!(!is_of_layers("encoder.layers.0.blocks.1.attention.query.weight"));
        assert!(!is_of_layers("encoder.layers.0.1.attention.query.weight"));
    }

    #[test]
    fn a_layer_knows_its_names_and_experts() {
        let names = [
            "h.0.ln.weight",
            "h.0.mlp.experts.0.w",
            "h.0.mlp.experts.0.w.b",
            "h.1.ln.weight",
            "wte.weight",
        ];
        let stacks = of(names.into_iter());
        assert_eq!(stacks.len(), 1);
        assert_eq!((stacks[0].path, stacks[0].end()), ("h.", 2));
        let first = &stacks[0].layers[&0];
        assert_eq!(first.names.len(), 3);
        assert_eq!(first.experts["mlp.experts."][&0].len(), 2);
    }
}
