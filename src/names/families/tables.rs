//! The tables: which names of a family make which canonical tensor, one line a rule.
//!
//! Sources: Megatron-LM (`tools/checkpoint/loader_llama_mistral.py`, `loader_mixtral_hf.py`, `core/models/gpt`), Megatron-Bridge
//! of August 2026 (`models/*/*_bridge.py`, `conversion/param_mapping.py`), transformers 4 and 5 (`models/*/modeling_*.py`),
//! InfiniTrain 0.6.0 (`nn/modules/transformer`), gpt-neox (`megatron/model/transformer.py`, `tools/ckpts/convert_neox_to_hf.py`).
//! `fixtures/hf/prove.py` shows that logits of transformers 5.23 and Megatron-Core 0.16.1 agree, for every Hugging Face type here
//! but kimi_k2, which is another deepseek_v3; only layers that predict further tokens are not among them.

use crate::names::Naming;

use super::Conversion::{Experts, HeadBlocks, Heads, Replica, Rows, Same, Transposed, UpAndGate};
use super::{Blocks, Family, FamilyRow, Packed};

#[rustfmt::skip]
const OUTSIDE: &[FamilyRow] = &[
    ("embed_tokens.weight",                          "embedding.word_embeddings.weight",                 Same),
    ("norm.{weight,bias}",                           "decoder.final_layernorm.{weight,bias}",            Same),
    ("lm_head.weight",                               "output_layer.weight",                              Same),
];

#[rustfmt::skip]
const NORMS: &[FamilyRow] = &[
    ("input_layernorm.{weight,bias}",                "input_layernorm.{weight,bias}",                    Same),
    ("post_attention_layernorm.{weight,bias}",       "pre_mlp_layernorm.{weight,bias}",                  Same),
];

#[rustfmt::skip]
const ATTENTION: &[FamilyRow] = &[
    ("self_attn.[q_proj,k_proj,v_proj].{weight,bias}", "self_attention.linear_qkv.{weight,bias}",        Heads),
    ("self_attn.qkv_proj.weight",                    "self_attention.linear_qkv.weight",                 HeadBlocks(Blocks::Rows)),
    ("self_attn.o_proj.{weight,bias}",               "self_attention.linear_proj.{weight,bias}",         Same),
    ("self_attn.{q_norm,k_norm}.weight",             "self_attention.{q_layernorm,k_layernorm}.weight",  Same),
];

#[rustfmt::skip]
const LATENT_ATTENTION: &[FamilyRow] = &[
    ("self_attn.{q_proj,q_a_proj,q_b_proj}.weight",  "self_attention.{linear_q_proj,linear_q_down_proj,linear_q_up_proj}.weight", Same),
    ("self_attn.{kv_a_proj_with_mqa,kv_b_proj}.weight", "self_attention.{linear_kv_down_proj,linear_kv_up_proj}.weight", Same),
    ("self_attn.{q_a_layernorm,kv_a_layernorm}.weight", "self_attention.{q_layernorm,kv_layernorm}.weight", Same),
    ("self_attn.o_proj.{weight,bias}",               "self_attention.linear_proj.{weight,bias}",         Same),
];

#[rustfmt::skip]
const MLP: &[FamilyRow] = &[
    ("mlp.[gate_proj,up_proj].{weight,bias}",        "mlp.linear_fc1.{weight,bias}",                     Rows),
    ("mlp.gate_up_proj.weight",                      "mlp.linear_fc1.weight",                            Same),
    ("mlp.down_proj.{weight,bias}",                  "mlp.linear_fc2.{weight,bias}",                     Same),
];

#[rustfmt::skip]
const MOE: &[FamilyRow] = &[
    ("mlp.gate.weight",                              "mlp.router.weight",                                Same),
    ("mlp.gate.e_score_correction_bias",             "mlp.router.expert_bias",                           Same),
    ("mlp.experts.#.[gate_proj,up_proj].weight",     "mlp.experts.local_experts.$1.linear_fc1.weight",   Rows),
    ("mlp.experts.#.down_proj.weight",               "mlp.experts.local_experts.$1.linear_fc2.weight",   Same),
    // as transformers 5 holds them in memory
    ("mlp.experts.gate_up_proj",                     "mlp.experts.local_experts.*.linear_fc1.weight",    Experts(Packed::Plain)),
    ("mlp.experts.down_proj",                        "mlp.experts.local_experts.*.linear_fc2.weight",    Experts(Packed::Plain)),
    ("mlp.{shared_expert,shared_experts}.[gate_proj,up_proj].weight", "mlp.{shared_experts,shared_experts}.linear_fc1.weight", Rows),
    ("mlp.{shared_expert,shared_experts}.down_proj.weight", "mlp.{shared_experts,shared_experts}.linear_fc2.weight", Same),
    ("mlp.shared_expert_gate.weight",                "mlp.shared_experts.gate_weight",                   Same),
    // Mixtral
    ("block_sparse_moe.gate.weight",                 "mlp.router.weight",                                Same),
    ("block_sparse_moe.experts.#.[w1,w3].weight",    "mlp.experts.local_experts.$1.linear_fc1.weight",   Rows),
    ("block_sparse_moe.experts.#.w2.weight",         "mlp.experts.local_experts.$1.linear_fc2.weight",   Same),
];

/// Rows for a layer behind the others that predicts further tokens; `^` is what stands before them.
#[rustfmt::skip]
const PREDICTION: &[FamilyRow] = &[
    ("{enorm,hnorm,eh_proj}.weight",                 "^{enorm,hnorm,eh_proj}.weight",                    Same),
    ("shared_head.norm.weight",                      "^final_layernorm.weight",                          Same),
    ("embed_tokens.weight",                          "embedding.word_embeddings.weight",                 Replica),
    ("shared_head.head.weight",                      "output_layer.weight",                              Replica),
];

#[rustfmt::skip]
const GPT_OSS: &[FamilyRow] = &[
    ("self_attn.sinks",                              "self_attention.core_attention.softmax_offset",     Same),
    ("mlp.router.{weight,bias}",                     "mlp.router.{weight,bias}",                         Same),
    ("mlp.experts.gate_up_proj",                     "mlp.experts.local_experts.*.linear_fc1.weight",    Experts(Packed::TransposedPairs)),
    ("mlp.experts.gate_up_proj_bias",                "mlp.experts.local_experts.*.linear_fc1.bias",      Experts(Packed::Pairs)),
    ("mlp.experts.down_proj",                        "mlp.experts.local_experts.*.linear_fc2.weight",    Experts(Packed::Transposed)),
    ("mlp.experts.down_proj_bias",                   "mlp.experts.local_experts.*.linear_fc2.bias",      Experts(Packed::Plain)),
];

#[rustfmt::skip]
const GPT2_OUTSIDE: &[FamilyRow] = &[
    ("wte.weight",                                   "embedding.word_embeddings.weight",                 Same),
    ("wpe.weight",                                   "embedding.position_embeddings.weight",             Same),
    ("ln_f.{weight,bias}",                           "decoder.final_layernorm.{weight,bias}",            Same),
    ("lm_head.weight",                               "output_layer.weight",                              Same),
];

#[rustfmt::skip]
const GPT2_NORMS: &[FamilyRow] = &[
    ("{ln_1,ln_2}.weight",                           "{input_layernorm,pre_mlp_layernorm}.weight",       Same),
    ("{ln_1,ln_2}.bias",                             "{input_layernorm,pre_mlp_layernorm}.bias",         Same),
];

#[rustfmt::skip]
const GPT2: &[FamilyRow] = &[
    ("attn.c_attn.weight",                           "self_attention.linear_qkv.weight",                 HeadBlocks(Blocks::Columns)),
    ("attn.c_attn.bias",                             "self_attention.linear_qkv.bias",                   HeadBlocks(Blocks::Rows)),
    ("attn.c_proj.weight",                           "self_attention.linear_proj.weight",                Transposed),
    ("attn.c_proj.bias",                             "self_attention.linear_proj.bias",                  Same),
    ("mlp.{c_fc,c_proj}.weight",                     "mlp.{linear_fc1,linear_fc2}.weight",               Transposed),
    ("mlp.{c_fc,c_proj}.bias",                       "mlp.{linear_fc1,linear_fc2}.bias",                 Same),
];

/// Head by head query, key and value, as Megatron's own.
#[rustfmt::skip]
const GPT_NEOX: &[FamilyRow] = &[
    ("attention.query_key_value.{weight,bias}",      "self_attention.linear_qkv.{weight,bias}",          Same),
    ("attention.dense.{weight,bias}",                "self_attention.linear_proj.{weight,bias}",         Same),
    ("mlp.dense_h_to_4h.{weight,bias}",              "mlp.linear_fc1.{weight,bias}",                     Same),
    ("mlp.dense_4h_to_h.{weight,bias}",              "mlp.linear_fc2.{weight,bias}",                     Same),
];

#[rustfmt::skip]
const GPT_NEOX_OUTSIDE: &[FamilyRow] = &[
    ("embed_in.weight",                              "embedding.word_embeddings.weight",                 Same),
    ("embed_out.weight",                             "output_layer.weight",                              Same),
    ("final_layer_norm.{weight,bias}",               "decoder.final_layernorm.{weight,bias}",            Same),
];

#[rustfmt::skip]
const NEOX: &[FamilyRow] = &[
    ("{input_layernorm,post_attention_layernorm}.scale", "{input_layernorm,pre_mlp_layernorm}.weight",   Same),
    ("attention.query_key_value.{weight,bias}",      "self_attention.linear_qkv.{weight,bias}",          HeadBlocks(Blocks::RowsIfShared)),
    ("attention.dense.{weight,bias}",                "self_attention.linear_proj.{weight,bias}",         Same),
    ("attention.{q_layernorm,k_layernorm}.{weight,bias}", "self_attention.{q_layernorm,k_layernorm}.{weight,bias}", Same),
    ("mlp.dense_h_to_4h.{weight,bias}",              "mlp.linear_fc1.{weight,bias}",                     Same),
    ("mlp.linear1.{weight,bias}",                    "mlp.linear_fc1.{weight,bias}",                     UpAndGate),
    ("mlp.[w1,w3].{weight,bias}",                    "mlp.linear_fc1.{weight,bias}",                     Rows),
    ("mlp.{dense_4h_to_h,linear2,w2}.{weight,bias}", "mlp.{linear_fc2,linear_fc2,linear_fc2}.{weight,bias}", Same),
];

#[rustfmt::skip]
const NEOX_OUTSIDE: &[FamilyRow] = &[
    ("word_embeddings.weight",                       "embedding.word_embeddings.weight",                 Same),
    ("position_embeddings.weight",                   "embedding.position_embeddings.weight",             Same),
    ("final.norm.{weight,bias}",                     "decoder.final_layernorm.{weight,bias}",            Same),
    ("final.norm.scale",                             "decoder.final_layernorm.weight",                   Same),
    ("final_linear.weight",                          "output_layer.weight",                              Same),
];

/// Rows of InfiniTrain's linears are Megatron's, but for the order of heads and their rotation.
#[rustfmt::skip]
const INFINITRAIN: &[FamilyRow] = &[
    ("attn.c_attn.{weight,bias}",                    "self_attention.linear_qkv.{weight,bias}",          HeadBlocks(Blocks::Rows)),
    ("attn.c_proj.{weight,bias}",                    "self_attention.linear_proj.{weight,bias}",         Same),
    ("mlp.c_fc.{weight,bias}",                       "mlp.linear_fc1.{weight,bias}",                     Same),
    ("mlp.c_proj.{weight,bias}",                     "mlp.linear_fc2.{weight,bias}",                     Same),
];

/// `c_fc2` is the gate.
#[rustfmt::skip]
const INFINITRAIN_LLAMA: &[FamilyRow] = &[
    ("attn.c_attn.{weight,bias}",                    "self_attention.linear_qkv.{weight,bias}",          HeadBlocks(Blocks::Rotated)),
    ("attn.c_proj.{weight,bias}",                    "self_attention.linear_proj.{weight,bias}",         Same),
    ("mlp.[c_fc2,c_fc].{weight,bias}",               "mlp.linear_fc1.{weight,bias}",                     Rows),
    ("mlp.c_proj.{weight,bias}",                     "mlp.linear_fc2.{weight,bias}",                     Same),
];

/// All families.
#[rustfmt::skip]
pub static FAMILIES: &[Family] = &[
    Family {
        name: "llama",
        naming: Naming::Modules, are_norms_zero_centered: false,
        model_types: &["llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"],
        body: "model.", layers: "layers.", outside: &[OUTSIDE], inside: &[NORMS, ATTENTION, MLP, MOE, PREDICTION],
    },
    Family {
        name: "gemma",
        naming: Naming::Modules, are_norms_zero_centered: true,
        model_types: &["gemma"],
        body: "model.", layers: "layers.", outside: &[OUTSIDE], inside: &[NORMS, ATTENTION, MLP],
    },
    Family {
        name: "deepseek",
        naming: Naming::Modules, are_norms_zero_centered: false,
        model_types: &["deepseek_v3", "deepseek_v2", "kimi_k2"],
        body: "model.", layers: "layers.", outside: &[OUTSIDE], inside: &[NORMS, LATENT_ATTENTION, MLP, MOE, PREDICTION],
    },
    Family {
        name: "gpt_oss",
        naming: Naming::Modules, are_norms_zero_centered: false,
        model_types: &["gpt_oss"],
        body: "model.", layers: "layers.", outside: &[OUTSIDE], inside: &[NORMS, ATTENTION, GPT_OSS],
    },
    Family {
        name: "gpt2",
        naming: Naming::Modules, are_norms_zero_centered: false,
        model_types: &["gpt2"],
        body: "transformer.", layers: "h.", outside: &[GPT2_OUTSIDE], inside: &[GPT2_NORMS, GPT2],
    },
    Family {
        name: "gpt_neox",
        naming: Naming::Modules, are_norms_zero_centered: false,
        model_types: &["gpt_neox"],
        body: "gpt_neox.", layers: "layers.", outside: &[GPT_NEOX_OUTSIDE], inside: &[NORMS, GPT_NEOX],
    },
    Family {
        name: "GPT-NeoX",
        naming: Naming::Modules, are_norms_zero_centered: false,
        model_types: &["neox"],
        body: "", layers: "layers.", outside: &[NEOX_OUTSIDE], inside: &[NORMS, NEOX],
    },
    Family {
        name: "InfiniTrain GPT-2",
        naming: Naming::InfiniTrain, are_norms_zero_centered: false,
        model_types: &["gpt2"],
        body: "transformer.", layers: "h.", outside: &[GPT2_OUTSIDE], inside: &[GPT2_NORMS, INFINITRAIN],
    },
    Family {
        name: "InfiniTrain Llama",
        naming: Naming::InfiniTrain, are_norms_zero_centered: false,
        model_types: &["llama"],
        body: "transformer.", layers: "h.", outside: &[GPT2_OUTSIDE], inside: &[GPT2_NORMS, INFINITRAIN_LLAMA],
    },
];
