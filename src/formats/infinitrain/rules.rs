//! InfiniTrain's parameters: the sharding of each, which entries are none, how names become global.
//!
//! Facts from InfiniTrain 0.6.0 (`infini_train/src/nn/parallel/tensor_parallel.cc`, `nn/modules/transformer`,
//! `nn/lora/lora_parallel_linear.cc`).

use std::sync::LazyLock;

use crate::layout::rules::Sharding::{self, QueryKeyValue, Replicated, Split, Vocab};
use crate::names::index::split_index;
use crate::names::pattern::SuffixTable;

/// The sharding of each parameter.
#[rustfmt::skip]
pub(super) static RULES: &[(&str, Sharding)] = &[
    ("{wte,lm_head}.weight",                  Vocab),
    ("wpe.weight",                            Replicated),
    ("{ln_1,ln_2,ln_f}.{weight,bias}",        Replicated),
    ("attn.c_attn.{weight,bias}",             QueryKeyValue),
    ("mlp.{c_fc,c_fc2}.{weight,bias}",        Split(0)),
    ("{attn,mlp}.c_proj.weight",              Split(1)),
    ("{attn,mlp}.c_proj.bias",                Replicated),
    // LoRA beside a column-parallel and a row-parallel linear
    ("{c_attn,c_fc,c_fc2}.lora_A",            Replicated),
    ("attn.c_attn.lora_B",                    QueryKeyValue),
    ("mlp.{c_fc,c_fc2}.lora_B",               Split(0)),
    ("c_proj.lora_A",                         Split(1)),
    ("c_proj.lora_B",                         Replicated),
];

/// Masks and tables in the same dict: `attn.bias` is the causal mask, while `c_attn.bias` is a parameter.
static BUFFERS: LazyLock<SuffixTable<()>> =
    LazyLock::new(|| SuffixTable::new([("attn.{bias,masked_bias}", ()), ("freqs_cis", ())]));

/// Says whether an entry of a state dict is no parameter.
pub(super) fn is_buffer(name: &str) -> bool {
    BUFFERS.find(name).is_some()
}

/// A name without what data parallel wrappers put in front.
pub(super) fn unwrapped(name: &str) -> &str {
    name.trim_start_matches("module.")
}

/// The text before a layer's index, and so before all that is local to a pipeline stage.
const LAYERS: &str = "transformer.h.";

/// The layer of a parameter on its stage and the rest of its name; `None` where it is of no layer.
pub(super) fn layer_of(name: &str) -> Option<(u64, &str)> {
    split_index(name.strip_prefix(LAYERS)?)
}

/// The name of a layer's parameter.
pub(super) fn in_layer(index: u64, rest: &str) -> String {
    format!("{LAYERS}{index}.{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::rules::Rules;

    #[test]
    fn a_causal_mask_is_no_parameter_and_the_bias_of_c_attn_is_one() {
        assert!(is_buffer("transformer.h.0.attn.bias"));
        assert!(!is_buffer("transformer.h.0.attn.c_attn.bias"));
        assert!(!is_buffer("transformer.h.0.attn.c_proj.bias"));
    }

    #[test]
    fn every_parameter_of_both_models_has_a_rule() {
        let rules = Rules::of_table(RULES, &[]);
        for name in ["transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"] {
            assert!(rules.find(name).is_some(), "{name}");
        }
        for part in [
            "ln_1.weight",
            "ln_2.bias",
            "attn.c_attn.bias",
            "attn.c_proj.weight",
            "attn.c_proj.bias",
            "mlp.c_fc.weight",
            "mlp.c_fc2.weight",
            "mlp.c_proj.bias",
            "attn.c_attn.lora_B",
            "mlp.c_proj.lora_A",
        ] {
            assert!(rules.find(&in_layer(3, part)).is_some(), "{part}");
        }
        assert_eq!(rules.find("transformer.h.0.attn.mystery.weight"), None);
    }

    #[test]
    fn a_layer_is_known_by_its_number() {
        assert_eq!(layer_of("transformer.h.12.ln_1.weight"), Some((12, "ln_1.weight")));
        assert_eq!(layer_of("transformer.h.x.ln_1.weight"), None);
        assert_eq!(layer_of("transformer.wte.weight"), None);
        assert_eq!(layer_of("transformer.h.99999999999999999999999.b"), Some((u64::MAX, "b")));
    }
}
