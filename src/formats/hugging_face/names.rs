//! Names as Hugging Face models have them: which entries are no weights, what is put in front.

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
