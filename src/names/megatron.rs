//! Megatron dialects -> canonical names: megatron.legacy of every era, Megatron-Core with local or
//! Transformer Engine layers, MindSpeed-LLM.
//!
//! A canonical name is the Megatron-Core local-spec name. Here indices are still the rank's own:
//! making them global is the layout's business. Sources: Megatron-LM v1.0 to core_v0.19
//! (`megatron/model`, `megatron/legacy/model`, `megatron/core`), Transformer Engine 0.8 on
//! (`transformer.py`, `layernorm_mlp.py`), MindSpeed-LLM (`tasks/checkpoint/model_builder.py`).

use std::collections::HashSet;
use std::sync::LazyLock;

use super::pattern::{SuffixTable, expand_braces, fill};
use super::without_prefixes;

/// When a rewrite holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    /// The layer has cross attention, so what follows self-attention is the norm before that.
    CrossAttention,
    /// No name of the model is already canonical for it.
    NoPreMlpNorm,
    /// The layer has MindSpeed-LLM's names of latent attention, where `k_layernorm` is the norm of the latent.
    MindSpeedMla,
}

/// End of a stored name, end of the canonical one. Groups in braces go together in order.
#[rustfmt::skip]
static REWRITES: &[(&str, &str, When)] = &[
    // megatron.legacy
    ("attention.query_key_value.{weight,bias}",       "self_attention.linear_qkv.{weight,bias}",  When::Always),
    ("attention.dense.{weight,bias}",                 "self_attention.linear_proj.{weight,bias}", When::Always),
    ("self_attention.query_key_value.{weight,bias}",  "self_attention.linear_qkv.{weight,bias}",  When::Always),
    ("self_attention.dense.{weight,bias}",            "self_attention.linear_proj.{weight,bias}", When::Always),
    ("inter_attention.query.{weight,bias}",           "cross_attention.linear_q.{weight,bias}",   When::Always),
    ("inter_attention.key_value.{weight,bias}",       "cross_attention.linear_kv.{weight,bias}",  When::Always),
    ("inter_attention.dense.{weight,bias}",           "cross_attention.linear_proj.{weight,bias}", When::Always),
    ("mlp.dense_h_to_4h.{weight,bias}",               "mlp.linear_fc1.{weight,bias}",             When::Always),
    ("mlp.dense_4h_to_h.{weight,bias}",               "mlp.linear_fc2.{weight,bias}",             When::Always),
    ("mlp.local_experts.#.dense_h_to_4h.{weight,bias}", "mlp.experts.local_experts.$1.linear_fc1.{weight,bias}", When::Always),
    ("mlp.local_experts.#.dense_4h_to_h.{weight,bias}", "mlp.experts.local_experts.$1.linear_fc2.{weight,bias}", When::Always),
    ("input_norm.{weight,bias}",                      "input_layernorm.{weight,bias}",            When::Always),
    ("post_attention_{norm,layernorm}.{weight,bias}", "pre_{mlp_layernorm,mlp_layernorm}.{weight,bias}", When::Always),
    ("post_attention_{norm,layernorm}.{weight,bias}", "pre_{cross_attn_layernorm,cross_attn_layernorm}.{weight,bias}", When::CrossAttention),
    ("post_inter_attention_{norm,layernorm}.{weight,bias}", "pre_{mlp_layernorm,mlp_layernorm}.{weight,bias}", When::Always),
    ("post_self_attn_layernorm.{weight,bias}",        "pre_mlp_layernorm.{weight,bias}",          When::NoPreMlpNorm),
    ("final_norm.{weight,bias}",                      "final_layernorm.{weight,bias}",            When::Always),
    // megatron.legacy with Transformer Engine's own layer
    ("self_attention.layernorm_qkv.layer_norm_{weight,bias}", "input_layernorm.{weight,bias}",    When::Always),
    ("self_attention.layernorm_qkv.{weight,bias}",    "self_attention.linear_qkv.{weight,bias}",  When::Always),
    ("self_attention.proj.{weight,bias}",             "self_attention.linear_proj.{weight,bias}", When::Always),
    ("layernorm_mlp.layer_norm_{weight,bias}",        "pre_mlp_layernorm.{weight,bias}",          When::Always),
    ("layernorm_mlp.fc{1,2}_{weight,bias}",           "mlp.linear_fc{1,2}.{weight,bias}",         When::Always),
    // Megatron-Core with Transformer Engine: norms live inside the linear that follows them
    ("self_attention.linear_qkv.layer_norm_{weight,bias}",           "input_layernorm.{weight,bias}",               When::Always),
    ("self_attention.linear_qkv_down_proj.layer_norm_{weight,bias}", "input_layernorm.{weight,bias}",               When::Always),
    ("self_attention.linear_{q,kv}_up_proj.layer_norm_{weight,bias}", "self_attention.{q,kv}_layernorm.{weight,bias}", When::Always),
    ("self_attention.in_proj.layer_norm_{weight,bias}",              "input_layernorm.{weight,bias}",               When::Always),
    ("cross_attention.linear_q.layer_norm_{weight,bias}",            "pre_cross_attn_layernorm.{weight,bias}",      When::Always),
    ("mlp.linear_fc1.layer_norm_{weight,bias}",       "pre_mlp_layernorm.{weight,bias}",          When::Always),
    // ... or inside the one linear that stands for a whole attention or MLP (`heterogeneous_layer_specs.py`)
    ("self_attention.layer_norm_{weight,bias}",       "input_layernorm.{weight,bias}",            When::Always),
    ("mlp.layer_norm_{weight,bias}",                  "pre_mlp_layernorm.{weight,bias}",          When::Always),
    ("mixer.in_proj.layer_norm_{weight,bias}",        "norm.{weight,bias}",                       When::Always),
    ("mixer.conv1d_{weight,bias}",                    "mixer.conv1d.{weight,bias}",               When::Always),
    ("self_attention.conv1d_{weight,bias}",           "self_attention.conv1d.{weight,bias}",      When::Always),
    // experts
    ("mlp.local_experts.#.linear_fc{1,2}.{weight,bias}",     "mlp.experts.local_experts.$1.linear_fc{1,2}.{weight,bias}", When::Always),
    ("mlp.experts.linear_fc{1,2}.{weight,bias}#",            "mlp.experts.local_experts.$1.linear_fc{1,2}.{weight,bias}", When::Always),
    // T5 registers its output layer twice
    ("lm_head.output_layer.{weight,bias}",            "output_layer.{weight,bias}",               When::Always),
    // MindSpeed-LLM
    ("self_attention.linear_{qb,kvb}.{weight,bias}",  "self_attention.linear_{q,kv}_up_proj.{weight,bias}", When::Always),
    ("self_attention.k_layernorm.{weight,bias}",      "self_attention.kv_layernorm.{weight,bias}", When::MindSpeedMla),
    ("mlp.shared_expert_gate.weight",                 "mlp.shared_experts.gate_weight",           When::Always),
    ("mtp.final_layernorms.#.{weight,bias}",          "mtp.layers.$1.final_layernorm.{weight,bias}", When::Always),
];

/// Buffers that are no weights: what training recomputes or keeps for itself.
static BUFFERS: &[&str] = &[
    "inv_freq",
    "causal_mask",
    "attention_mask",
    "attn_mask",
    "masked_bias",
    "cos_cached",
    "sin_cached",
    "local_tokens_per_expert",
    "global_tokens_per_expert",
    "tokens_per_expert",
    "ga_steps",
];

/// Buffers that are kept like weights and that no optimizer trains: the router adjusts them itself.
static UNTRAINED: &[&str] = &["expert_bias", "qb_beta"];

/// True where an optimizer knows the tensor of this stored name.
#[must_use]
pub fn is_trained(stored: &str) -> bool {
    let last = stored.rsplit('.').next().unwrap_or(stored);
    !last.starts_with("_extra_state") && !BUFFERS.contains(&last) && !UNTRAINED.contains(&last)
}

/// Whether a stored name is that of a routed expert's parameter.
#[must_use]
pub fn is_expert_parameter(stored: &str) -> bool {
    stored.contains(".experts.") || stored.contains(".local_experts.")
}

/// Whether a stored name is that of an embedding or output layer (`is_embedding_or_output_parameter`).
#[must_use]
pub fn is_embedding_or_output(stored: &str) -> bool {
    ["word_embeddings.weight", "word_embeddings_for_head.weight", "output_layer.weight"]
        .iter()
        .any(|end| stored.ends_with(end))
}

/// The kind of an optimizer's state by the name it has in all optimizers: `fp32_param` is the main parameter.
#[must_use]
pub fn optimizer_state_name(stored: &str) -> &str {
    match stored {
        "param" | "master_param" => "fp32_param",
        other => other,
    }
}

/// Heads that tell a BERT from a GPT: only there is an `encoder` of megatron.legacy an encoder.
static ENCODER_HEADS: &[&str] = &["lm_head.", "binary_head.", "pooler.", "language_model.pooler."];

static TABLE: LazyLock<SuffixTable<Vec<(String, When)>>> = LazyLock::new(|| {
    let mut rows: Vec<(String, Vec<(String, When)>)> = Vec::new();
    for (stored, canonical, when) in REWRITES {
        for (stored, canonical) in expand_braces(stored).into_iter().zip(expand_braces(canonical)) {
            match rows.iter_mut().find(|(pattern, _)| *pattern == stored) {
                Some((_, choices)) => choices.push((canonical, *when)),
                None => rows.push((stored, vec![(canonical, *when)])),
            }
        }
    }
    SuffixTable::new(rows.iter().map(|(pattern, choices)| (pattern.as_str(), choices.clone())))
});

/// The meaning of a stored name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Canonical {
    /// A parameter, under its canonical name with the rank's own indices.
    Parameter(String),
    /// The copy of the word embeddings that the last stage keeps, under the output layer's name.
    TiedCopy(String),
    /// No weight: left out and counted.
    Buffer,
}

/// The dialect of one model's names: the part of it that can only be known from all of them together.
#[derive(Debug, Default)]
pub struct Dialect {
    /// `language_model.` is the wrapper of megatron.legacy, not a part of a multimodal model.
    strips_language_model: bool,
    /// The `encoder` of megatron.legacy is the one stack of a GPT.
    encoder_is_decoder: bool,
    has_pre_mlp_norm: bool,
    /// Layers (`...layers.N.`) with `inter_attention` or `cross_attention`.
    cross_attention: HashSet<String>,
    /// Layers with MindSpeed-LLM's names of latent attention.
    mindspeed_mla: HashSet<String>,
}

impl Dialect {
    /// Reads the dialect off all the stored names of a model.
    pub fn detect<'n>(names: impl Iterator<Item = &'n str> + Clone) -> Self {
        let multimodal = |name: &str| {
            name.starts_with("vision_model.") || name.starts_with("vision_projection.")
        };
        let wrapped = names.clone().any(|name| name.starts_with("language_model."));
        let strips_language_model = wrapped && !names.clone().any(multimodal);
        let has_decoder = names.clone().any(|name| {
            name.starts_with("decoder.") || name.starts_with("language_model.decoder.")
        });
        let has_head =
            names.clone().any(|name| ENCODER_HEADS.iter().any(|head| name.starts_with(head)));
        let mut dialect = Self {
            strips_language_model,
            encoder_is_decoder: strips_language_model && !has_decoder && !has_head,
            ..Self::default()
        };
        for name in names {
            let Some(layer) = layer_of(name) else { continue };
            let module = name[layer.len()..].split('.');
            let [first, second] = take_two(module);
            match first {
                "pre_mlp_layernorm" => dialect.has_pre_mlp_norm = true,
                "inter_attention" | "cross_attention" => {
                    dialect.cross_attention.insert(layer.to_owned());
                }
                "self_attention"
                    if matches!(second, "linear_qb" | "linear_kvb" | "linear_kv_nope") =>
                {
                    dialect.mindspeed_mla.insert(layer.to_owned());
                }
                _ => {}
            }
        }
        dialect
    }

    /// The canonical name of a stored one, with the rank's own indices.
    #[must_use]
    pub fn canonical(&self, stored: &str) -> Canonical {
        if is_buffer(stored) {
            return Canonical::Buffer;
        }
        if stored.ends_with("word_embeddings_for_head.weight") {
            return Canonical::TiedCopy("output_layer.weight".to_owned());
        }
        let name = self.with_canonical_prefix(stored);
        let layer = layer_of(stored).unwrap_or_default();
        let Some(found) = TABLE.find(&name) else {
            return Canonical::Parameter(name);
        };
        // The last choice that holds is the most particular one.
        let choice = found.value.iter().rev().find(|(_, when)| self.holds(*when, layer));
        Canonical::Parameter(match choice {
            Some((canonical, _)) => format!("{}{}", found.prefix, fill(canonical, &found.numbers)),
            None => name,
        })
    }

    fn holds(&self, when: When, layer: &str) -> bool {
        match when {
            When::Always => true,
            When::CrossAttention => self.cross_attention.contains(layer),
            When::NoPreMlpNorm => !self.has_pre_mlp_norm,
            When::MindSpeedMla => self.mindspeed_mla.contains(layer),
        }
    }

    /// The name with its beginning made canonical: wrappers taken off, the stack named as Megatron-Core names it.
    fn with_canonical_prefix(&self, stored: &str) -> String {
        let legacy =
            if self.strips_language_model { stored.strip_prefix("language_model.") } else { None };
        let name = legacy.unwrap_or(stored);
        let name = name.replace(".base_layer.", ".");
        let stack = if self.encoder_is_decoder { "decoder." } else { "encoder." };
        let (first, rest) = name.split_once('.').unwrap_or((&name, ""));
        match (first, legacy.is_some()) {
            ("encoder" | "transformer", true) => format!("{stack}{rest}"),
            ("final_layernorm" | "final_norm", _) => format!("decoder.final_layernorm.{rest}"),
            ("mtp", _) => name.replacen(".mtp_model_layer.", ".transformer_layer.", 1),
            _ => name,
        }
    }
}

/// The name without the modules that only wrap the model (Megatron-LM `fsdp_dtensor_checkpoint.py`, `_strip_wrapper_prefixes`).
#[must_use]
pub fn without_wrappers(stored: &str) -> &str {
    without_prefixes(stored, &["module.", "model."])
}

/// True where a stored name is that of a buffer, which is no weight.
#[must_use]
pub fn is_buffer(stored: &str) -> bool {
    let last = stored.rsplit('.').next().unwrap_or(stored);
    last.starts_with("_extra_state") || BUFFERS.contains(&last)
}

/// The name up to the first `layers.N.`, that included.
fn layer_of(name: &str) -> Option<&str> {
    let start = match name.strip_prefix("layers.") {
        Some(_) => 0,
        None => name.find(".layers.")? + 1,
    };
    let number = start + "layers.".len();
    let digits = name[number..].find('.')?;
    Some(&name[..=number + digits])
}

fn take_two<'n>(mut components: impl Iterator<Item = &'n str>) -> [&'n str; 2] {
    [components.next().unwrap_or_default(), components.next().unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(names: &[&str], expected: &[(&str, &str)]) {
        let all = names.iter().copied().chain(expected.iter().map(|(stored, _)| *stored));
        let dialect = Dialect::detect(all);
        for (stored, canonical) in expected {
            let expected = Canonical::Parameter((*canonical).to_owned());
            assert_eq!(dialect.canonical(stored), expected, "{stored}");
        }
    }

    #[test]
    fn legacy_gpt_names_of_every_era_become_canonical() {
        check(
            &[],
            &[
                (
                    "language_model.embedding.word_embeddings.weight",
                    "embedding.word_embeddings.weight",
                ),
                (
                    "language_model.transformer.layers.1.attention.query_key_value.bias",
                    "decoder.layers.1.self_attention.linear_qkv.bias",
                ),
                (
                    "language_model.transformer.layers.1.post_attention_layernorm.weight",
                    "decoder.layers.1.pre_mlp_layernorm.weight",
                ),
                (
                    "language_model.encoder.layers.0.input_norm.weight",
                    "decoder.layers.0.input_layernorm.weight",
                ),
                (
                    "language_model.encoder.layers.0.self_attention.dense.weight",
                    "decoder.layers.0.self_attention.linear_proj.weight",
                ),
                (
                    "language_model.encoder.layers.0.layernorm_mlp.fc1_weight",
                    "decoder.layers.0.mlp.linear_fc1.weight",
                ),
                (
                    "language_model.encoder.layers.1.mlp.local_experts.2.dense_h_to_4h.weight",
                    "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
                ),
                ("language_model.encoder.final_norm.bias", "decoder.final_layernorm.bias"),
                ("language_model.output_layer.weight", "output_layer.weight"),
            ],
        );
    }

    #[test]
    fn an_encoder_stays_one_beside_a_decoder_or_a_head() {
        check(
            &["language_model.decoder.layers.0.inter_attention.query.weight"],
            &[
                (
                    "language_model.encoder.layers.0.input_norm.weight",
                    "encoder.layers.0.input_layernorm.weight",
                ),
                (
                    "language_model.decoder.layers.0.post_attention_norm.weight",
                    "decoder.layers.0.pre_cross_attn_layernorm.weight",
                ),
                (
                    "language_model.decoder.layers.0.post_inter_attention_norm.weight",
                    "decoder.layers.0.pre_mlp_layernorm.weight",
                ),
                (
                    "language_model.encoder.layers.0.post_attention_norm.weight",
                    "encoder.layers.0.pre_mlp_layernorm.weight",
                ),
            ],
        );
        check(
            &["lm_head.dense.weight"],
            &[
                (
                    "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
                    "encoder.layers.0.mlp.linear_fc1.weight",
                ),
                ("lm_head.dense.bias", "lm_head.dense.bias"),
                ("language_model.pooler.dense.weight", "pooler.dense.weight"),
            ],
        );
    }

    #[test]
    fn transformer_engine_norms_leave_the_linears() {
        check(
            &[],
            &[
                (
                    "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
                    "decoder.layers.2.input_layernorm.weight",
                ),
                (
                    "decoder.layers.2.mlp.linear_fc1.layer_norm_bias",
                    "decoder.layers.2.pre_mlp_layernorm.bias",
                ),
                (
                    "decoder.layers.2.self_attention.linear_kv_up_proj.layer_norm_weight",
                    "decoder.layers.2.self_attention.kv_layernorm.weight",
                ),
                (
                    "decoder.layers.2.self_attention.layer_norm_weight",
                    "decoder.layers.2.input_layernorm.weight",
                ),
                (
                    "decoder.layers.2.mlp.layer_norm_weight",
                    "decoder.layers.2.pre_mlp_layernorm.weight",
                ),
                (
                    "decoder.layers.2.mixer.in_proj.layer_norm_weight",
                    "decoder.layers.2.norm.weight",
                ),
                (
                    "mtp.layers.0.mtp_model_layer.mlp.linear_fc1.layer_norm_weight",
                    "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
                ),
            ],
        );
    }

    #[test]
    fn experts_of_every_spelling_become_local_experts() {
        check(
            &[],
            &[
                (
                    "decoder.layers.1.mlp.experts.linear_fc1.weight3",
                    "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight",
                ),
                (
                    "decoder.layers.1.mlp.local_experts.0.linear_fc2.bias",
                    "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.bias",
                ),
                (
                    "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight",
                    "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight",
                ),
            ],
        );
    }

    #[test]
    fn a_multimodal_language_model_keeps_its_name() {
        check(
            &["vision_model.conv1.weight"],
            &[(
                "language_model.decoder.layers.0.input_layernorm.weight",
                "language_model.decoder.layers.0.input_layernorm.weight",
            )],
        );
    }

    #[test]
    fn k_layernorm_is_the_latent_norm_only_beside_mindspeed_latent_attention() {
        let stored = "decoder.layers.0.self_attention.k_layernorm.weight";
        check(
            &["decoder.layers.0.self_attention.linear_kvb.weight"],
            &[(stored, "decoder.layers.0.self_attention.kv_layernorm.weight")],
        );
        check(&["decoder.layers.0.self_attention.linear_qkv.weight"], &[(stored, stored)]);
    }

    #[test]
    fn buffers_are_no_weights() {
        let dialect = Dialect::detect(std::iter::empty());
        for stored in ["decoder.layers.0.mlp.linear_fc1._extra_state", "rotary_pos_emb.inv_freq"] {
            assert_eq!(dialect.canonical(stored), Canonical::Buffer, "{stored}");
        }
    }
}
