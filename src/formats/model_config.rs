//! The `config.json` of a Hugging Face model: read, and what it says of the output layer done.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde_json::Value;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::CatalogBuilder;
use crate::names::Name;
use crate::storage::{self, FileSet};

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

/// A value of the model's own description, or of its language model's.
pub(super) fn entry<'c>(
    config: &'c BTreeMap<String, PlainValue>,
    key: &str,
) -> Option<&'c PlainValue> {
    config.get(key).or_else(|| config.get("text_config")?.as_map()?.get(key))
}

/// Ties the output layer to the word embeddings where it shares them: as the description says it, or as transformers takes it
/// where models of this type do not say it. Where nobody says anything, it does not.
pub(super) fn tie_output(catalog: &mut CatalogBuilder<'_>, config: &BTreeMap<String, PlainValue>) {
    let is_tied = match entry(config, "tie_word_embeddings") {
        Some(PlainValue::Bool(is_tied)) => *is_tied,
        _ => entry(config, "model_type")
            .and_then(PlainValue::as_text)
            .is_some_and(is_tied_by_default),
    };
    let names = catalog.tensors().map(|(name, _)| name);
    if let Some((output, embedding)) = tied_pair(names).filter(|_| is_tied) {
        catalog.tie(output, embedding);
    }
}

/// Tells whether models of a type tie their output layer where they do not say it.
fn is_tied_by_default(model_type: &str) -> bool {
    TIED_BY_DEFAULT.binary_search(&model_type).is_ok()
}

/// The output layer and the embeddings that it may share; `None` where there are no embeddings, or several.
fn tied_pair<'n>(names: impl Iterator<Item = &'n Name>) -> Option<(Name, Name)> {
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

/// A JSON file as plain values; `None` where there is none.
///
/// # Errors
/// It cannot be read, or is no JSON.
pub(super) fn read_json(path: &Path, files: &mut FileSet) -> io::Result<Option<PlainValue>> {
    if !storage::is_there(path)? {
        return Ok(None);
    }
    let bytes = files.read_small(path, LIMITS.json_bytes)?;
    let no_json = |error| io::Error::other(format!("no JSON: {error}"));
    let value: Value = serde_json::from_slice(&bytes).map_err(no_json)?;
    Ok(Some(value.into()))
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
