//! Names as Hugging Face models have them: which entries are no weights, what is put in front, what is tied.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::names::pattern::SuffixTable;
use crate::names::{Name, without_prefixes};
use crate::tensor::LogicalTensor;

/// Tables and masks, by the least number of dimensions they have: a mask is `[1, 1, n, n]`, a bias is not.
static BUFFERS: LazyLock<SuffixTable<usize>> = LazyLock::new(|| {
    SuffixTable::new([
        ("rotary_emb.inv_freq", 0),
        ("{attn,attention}.bias", 2),
        ("{attn,attention}.masked_bias", 0),
        ("position_ids", 0),
    ])
});

/// Tells whether an entry of a state dict is no weight.
pub(super) fn is_buffer(name: &str, shape: &[u64]) -> bool {
    BUFFERS.find(name).is_some_and(|found| shape.len() >= *found.value)
}

/// A name without what wrappers of a module put in front (data parallel, torch.compile, PEFT).
pub(super) fn unwrapped(name: &str) -> &str {
    without_prefixes(name, &["module.", "_orig_mod.", "base_model.model."])
}

/// GPT-2 as it was first published has its names without `transformer.`.
pub(super) fn with_prefix(tensors: BTreeMap<Name, LogicalTensor>) -> BTreeMap<Name, LogicalTensor> {
    let has = |name| tensors.contains_key(&Name::new(name));
    if !(has("wte.weight") && has("wpe.weight") && has("h.0.ln_1.weight")) {
        return tensors;
    }
    let of_body =
        |name: &str| ["wte.", "wpe.", "h.", "ln_f."].iter().any(|module| name.starts_with(module));
    let renamed = tensors.into_iter().map(|(name, tensor)| match of_body(name.as_str()) {
        true => (Name::new(format!("transformer.{}", name.as_str())), tensor),
        false => (name, tensor),
    });
    renamed.collect()
}

/// The output layer of each architecture, by the end of the name of its word embeddings.
const OUTPUTS: [(&str, &str); 4] = [
    ("embed_tokens.weight", "lm_head.weight"),
    ("wte.weight", "lm_head.weight"),
    ("word_embeddings.weight", "lm_head.weight"),
    ("embed_in.weight", "embed_out.weight"),
];

/// Types of models whose output layer shares the word embeddings where `config.json` does not say `tie_word_embeddings`: the
/// default of all configurations, which the other language models set to false (transformers 4.57.1,
/// `configuration_utils.py` and the `configuration_*.py` of each model, listed by making each of them).
#[rustfmt::skip]
static TIED_BY_DEFAULT: &[&str] = &[
    "aya_vision", "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "cohere", "cohere2",
    "cohere2_vision", "cpmant", "ctrl", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_mamba", "florence2", "gemma", "gemma2",
    "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox_japanese", "jetmoe", "kosmos-2", "led", "lfm2", "lfm2_vl", "longt5", "m2m_100", "mamba", "marian", "mbart",
    "modernbert-decoder", "mpt", "mvp", "nllb-moe", "openai-gpt", "opt", "paligemma", "pegasus", "pegasus_x", "plbart",
    "recurrent_gemma", "shieldgemma2", "smollm3", "starcoder2", "switch_transformers", "t5", "t5gemma", "transfo-xl",
    "umt5", "vaultgemma", "whisper", "xglm", "zamba", "zamba2",
];

/// Tells whether models of a type tie their output layer where they do not say it.
pub(super) fn is_tied_by_default(model_type: &str) -> bool {
    TIED_BY_DEFAULT.binary_search(&model_type).is_ok()
}

/// The output layer and the embeddings that it may share; `None` where there are no embeddings, or several.
pub(super) fn tied_pair<'n>(names: impl Iterator<Item = &'n Name>) -> Option<(Name, Name)> {
    let mut found = names.filter_map(|name| {
        let is_end = |end: &str| name.as_str().strip_suffix(end).is_some_and(is_boundary);
        let (_, output) = OUTPUTS.iter().find(|(end, _)| is_end(end))?;
        Some((Name::new(*output), name.clone()))
    });
    found.next().filter(|_| found.next().is_none())
}

fn is_boundary(before: &str) -> bool {
    before.is_empty() || before.ends_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_tied_models_are_looked_up() {
        assert!(TIED_BY_DEFAULT.is_sorted());
        for model_type in ["gpt2", "gemma3_text", "opt", "t5"] {
            assert!(is_tied_by_default(model_type), "{model_type}");
        }
        for model_type in ["llama", "qwen2", "gpt_neox", "deepseek_v3", "of_mine"] {
            assert!(!is_tied_by_default(model_type), "{model_type}");
        }
    }

    #[test]
    fn masks_are_no_weights_and_biases_are() {
        assert!(is_buffer("transformer.h.0.attn.bias", &[1, 1, 8, 8]));
        assert!(is_buffer("h.0.attn.masked_bias", &[]));
        assert!(is_buffer("model.layers.3.self_attn.rotary_emb.inv_freq", &[4]));
        assert!(!is_buffer("encoder.attention.bias", &[8]));
        assert!(!is_buffer("transformer.h.0.attn.c_attn.bias", &[24]));
    }

    #[test]
    fn wrappers_are_no_part_of_a_name() {
        assert_eq!(unwrapped("module._orig_mod.model.norm.weight"), "model.norm.weight");
        assert_eq!(unwrapped("base_model.model.model.norm.weight"), "model.norm.weight");
        assert_eq!(unwrapped("modules.norm.weight"), "modules.norm.weight");
    }

    #[test]
    fn an_output_layer_shares_the_only_embeddings() {
        let pair = |names: &[&str]| {
            let names: Vec<Name> = names.iter().map(|name| Name::new(*name)).collect();
            tied_pair(names.iter()).map(|(output, to)| (output.to_string(), to.to_string()))
        };
        let tied = |output: &str, to: &str| Some((output.to_owned(), to.to_owned()));
        assert_eq!(
            pair(&["model.embed_tokens.weight", "x"]),
            tied("lm_head.weight", "model.embed_tokens.weight")
        );
        assert_eq!(
            pair(&["gpt_neox.embed_in.weight"]),
            tied("embed_out.weight", "gpt_neox.embed_in.weight")
        );
        assert_eq!(pair(&["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]), None);
        assert_eq!(pair(&["not_wte.weight"]), None);
    }
}
