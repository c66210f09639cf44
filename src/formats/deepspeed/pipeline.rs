//! Names of what lies in pipeline layers: `LL.<key>`, or as GPT-NeoX and Megatron-DeepSpeed models have them.
//!
//! Layer numbers are global whatever the number of stages, and numbers of functions without parameters are left out,
//! so what a layer is shows in its keys (gpt-neox `megatron/model/gpt2_model.py`, Megatron-DeepSpeed `gpt_model.py`).

use std::collections::{BTreeMap, BTreeSet};

use crate::base::limits::LIMITS;
use crate::names::Name;
use crate::names::index::split_index;

/// The layers that there are, and what they are.
#[derive(Debug, Default)]
pub(super) struct LayerNames {
    roles: BTreeMap<u64, Role>,
    /// This is a model of the GPT-NeoX family.
    pub is_neox: bool,
    /// Transformer layers, by the number of their file.
    pub transformer: BTreeSet<u64>,
    /// The layers with the word embeddings: the second one is the output layer, tied to them.
    pub embeddings: BTreeSet<u64>,
    /// The layer with an output layer of its own.
    pub output: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Top,
    Transformer(u64),
    FinalNorm,
    Other,
}

/// Keys of attention, by which a transformer layer is known.
const ATTENTION: [&str; 2] = ["attention.", "self_attention."];

/// Other keys that a transformer layer may begin with.
const IN_LAYERS: [&str; 6] =
    ["input_layernorm.", "post_attention_layernorm.", "mlp.", "mixer.", "att.", "ffn."];

const OUTPUTS: [&str; 2] = ["final_linear.weight", "lm_head.weight"];

fn starts_with_any(key: &str, fronts: &[&str]) -> bool {
    fronts.iter().any(|front| key.starts_with(front))
}

impl LayerNames {
    /// Tells the layers by their keys.
    pub(super) fn new<'k>(keys: impl IntoIterator<Item = (u64, &'k str)>) -> Self {
        let mut layers: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
        for (layer, key) in keys {
            layers.entry(layer).or_default().insert(key);
        }
        let is_neox = layers.values().flatten().any(|key| starts_with_any(key, &ATTENTION));
        let mut names = Self { is_neox, ..Self::default() };
        for (layer, keys) in &layers {
            let has = |wanted: &[&str]| keys.iter().any(|key| wanted.contains(key));
            let all = |wanted: &[&str]| keys.iter().all(|key| wanted.contains(key));
            let is_layer = keys
                .iter()
                .any(|key| starts_with_any(key, &ATTENTION) || starts_with_any(key, &IN_LAYERS));
            let role = if has(&["word_embeddings.weight"]) {
                names.embeddings.insert(*layer);
                Role::Top
            } else if has(&OUTPUTS) {
                names.output = Some(*layer);
                Role::Top
            } else if is_layer {
                let number = names.transformer.len() as u64;
                names.transformer.insert(*layer);
                Role::Transformer(number)
            } else if all(&["norm.weight", "norm.bias", "norm.scale"])
                || all(&["weight", "bias", "scale"])
            {
                Role::FinalNorm
            } else {
                Role::Other
            };
            names.roles.insert(*layer, role);
        }
        names
    }

    /// The global name of a layer's entry.
    pub(super) fn name(&self, layer: u64, key: &str) -> String {
        let role = if self.is_neox { self.roles.get(&layer) } else { None };
        match role {
            Some(Role::Top) => key.to_owned(),
            Some(Role::Transformer(number)) => format!("layers.{number}.{key}"),
            Some(Role::FinalNorm) => {
                format!("final.norm.{}", key.strip_prefix("norm.").unwrap_or(key))
            }
            Some(Role::Other) | None => format!("{layer:02}.{key}"),
        }
    }

    /// The global name of a parameter as DeepSpeed's optimizer calls it: `2.attention.dense.weight`,
    /// `tied_modules.embed.word_embeddings.weight`, or that of a module that is no pipeline.
    pub(super) fn of_param(&self, param: &str) -> String {
        match split_layer(param) {
            Some((layer, key)) => self.name(layer, key),
            None if self.is_neox => match param.strip_prefix("tied_modules.") {
                Some(rest) => rest.split_once('.').map_or(rest, |(_, key)| key).to_owned(),
                None => param.to_owned(),
            },
            None => param.to_owned(),
        }
    }

    /// The numbers of transformer layers that are missing between the first and the last one, or up to `count`.
    pub(super) fn missing(&self, count: Option<u64>) -> Vec<u64> {
        let (Some(first), Some(last)) = (self.transformer.first(), self.transformer.last()) else {
            return Vec::new();
        };
        // One function lies between the embeddings and the first layer.
        let first = match self.embeddings.first() {
            Some(embeddings) if embeddings < first => (embeddings + 2).min(*first),
            _ => *first,
        };
        let end = count.map_or(last + 1, |count| (first + count).max(last + 1));
        (first..end).filter(|layer| !self.transformer.contains(layer)).take(64).collect()
    }

    /// The tied output layer, where the embeddings are there twice and no layer has an output of its own.
    pub(super) fn tied_output(&self) -> Option<(Name, Name)> {
        let is_tied = self.is_neox && self.embeddings.len() > 1 && self.output.is_none();
        is_tied.then(|| (Name::new("final_linear.weight"), Name::new("word_embeddings.weight")))
    }
}

/// `sequential.<LL>.<key>` or `<LL>.<key>`.
pub(super) fn split_layer(name: &str) -> Option<(u64, &str)> {
    let rest = name.strip_prefix("sequential.").unwrap_or(name);
    split_index(rest).filter(|(layer, key)| *layer < LIMITS.layers && !key.is_empty())
}
