//! Heads: parts behind the layers that never go without each other.

use std::collections::BTreeMap;

use crate::catalog::Problem;
use crate::names::Naming;

use super::Present;
use super::announced::Announced;

/// Parts of which, where one of the signs is there and all that is given, each is wanted by one of its names.
struct Head {
    /// Beginnings of names of which one must be there.
    signs: &'static [&'static str],
    /// Beginnings of names that must all be there.
    given: &'static [&'static str],
    /// A switch of the run that must be on.
    switch: Option<&'static str>,
    /// The output layer shares the word embeddings, as far as anybody says.
    is_tied: bool,
    parts: &'static [&'static [&'static str]],
}

const BERT: &[&str] = &[
    "lm_head.dense.",
    "lm_head.layer_norm.",
    "lm_head.norm.",
    "lm_head.layernorm.",
    "binary_head.",
];
const BERT_BIAS: &[&str] =
    &["lm_head.layer_norm.bias", "lm_head.norm.bias", "lm_head.layernorm.bias"];
/// Over two sentences, a text, or several choices.
const OVER_TEXTS: &[&str] =
    &["binary_head.weight", "classification_head.weight", "multichoice_head.weight"];

/// The heads of Megatron's BERT and T5 (`core/models/bert`, `core/models/T5`, `megatron/legacy/model/bert_model.py`,
/// `classification.py`, `t5_model.py`).
#[rustfmt::skip]
const HEADS: &[Head] = &[
    Head { signs: BERT, given: &[], switch: None, is_tied: false, parts: &[&["lm_head.dense.weight"], &["lm_head.dense.bias"], &["lm_head.layer_norm.weight", "lm_head.norm.weight", "lm_head.layernorm.weight"], &["output_layer.bias", "lm_head.bias"]] },
    Head { signs: BERT, given: &["encoder.final_layernorm.bias"], switch: None, is_tied: false, parts: &[BERT_BIAS] },
    Head { signs: &["binary_head."], given: &[], switch: None, is_tied: false, parts: &[&["binary_head.weight"], &["binary_head.bias"], &["pooler.dense.weight"], &["embedding.tokentype_embeddings.weight"]] },
    Head { signs: &["pooler.dense."], given: &[], switch: None, is_tied: false, parts: &[&["pooler.dense.weight"], &["pooler.dense.bias"], OVER_TEXTS] },
    Head { signs: &["embedding.tokentype_embeddings."], given: &["encoder.layers."], switch: Some("bert_binary_head"), is_tied: false, parts: &[OVER_TEXTS] },
    Head { signs: &["encoder.layers."], given: &["decoder.layers.", "decoder.final_layernorm."], switch: None, is_tied: true, parts: &[&["output_layer.bias", "lm_head.bias"]] },
];

/// Parts of heads that are missing.
pub(super) fn missing(present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    if present.naming != Naming::Canonical {
        return Vec::new();
    }
    let mut lost: BTreeMap<&str, &str> = BTreeMap::new();
    for head in HEADS {
        let Some(sign) = head.sign(present, announced) else { continue };
        let parts = head.parts.iter().filter(|names| !names.iter().any(|name| present.has(name)));
        for part in parts.filter_map(|names| names.first()) {
            lost.entry(part).or_insert(sign);
        }
    }
    let problem =
        |(part, sign)| Problem::of_tensor(part, format!("missing, though {sign} is there"));
    lost.into_iter().map(problem).collect()
}

impl Head {
    /// A weight that shows that the model has it.
    fn sign<'c>(&self, present: &Present<'c>, announced: &Announced<'_>) -> Option<&'c str> {
        let find =
            |front: &str| present.weights.iter().copied().find(|name| name.starts_with(front));
        let is_on = self.switch.is_none_or(|switch| announced.switch(switch) == Some(true));
        let may_be_tied = !self.is_tied || !matches!(announced.is_tied(), Some((false, _)));
        let is_given = is_on && may_be_tied && self.given.iter().all(|front| find(front).is_some());
        is_given.then(|| self.signs.iter().find_map(|front| find(front))).flatten()
    }
}
