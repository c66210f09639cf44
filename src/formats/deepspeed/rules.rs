//! The sharding of GPT-NeoX's, Megatron-DeepSpeed's and their like's parameters over tensor parallel ranks.
//!
//! One line a rule, as in [`crate::layout::rules`]. Names are those of the writer, so a rule holds for whatever layer
//! stands in front. Sources: gpt-neox main (`megatron/model/transformer.py`, `tools/ckpts/merge20b.py`,
//! `tools/ckpts/convert_neox_to_hf.py`), Megatron-DeepSpeed (`megatron/model/transformer.py`), transformers 4
//! (`convert_bloom_original_checkpoint_to_pytorch.py`), DeepSpeed 0.19 (`checkpoint/ds_to_universal.py`).

use crate::layout::rules::Sharding::{
    self, Averaged, Gated, Halves, Heads, Replicated, RowBias, Split, Vocab,
};
use crate::tensor::StoredTensor;

/// The sharding of each parameter.
#[rustfmt::skip]
pub(super) static RULES: &[(&str, Sharding)] = &[
    // embeddings and heads
    ("{word_embeddings,final_linear,lm_head,output_layer}.weight",  Vocab),
    ("{position_embeddings,tokentype_embeddings}.weight",   Replicated),
    ("rm_linear.weight",                                    Split(1)),
    // norms
    ("{input_layernorm,post_attention_layernorm,final_layernorm,norm}.{weight,bias,scale}", Averaged),
    ("{q_layernorm,k_layernorm}.{weight,bias,scale}",       Averaged),
    ("mlp.{layer_norm_weight,layer_norm_bias}",             Averaged),
    // attention
    ("attention.{query_key_value,qkv}.{weight,bias}",       Heads),
    ("attention.{dense,proj}.weight",                       Split(1)),
    ("attention.{dense,proj}.bias",                         RowBias),
    // ... of Megatron-DeepSpeed, which adds row-parallel biases once
    ("self_attention.{query_key_value,query,key_value}.{weight,bias}", Split(0)),
    ("self_attention.dense.weight",                         Split(1)),
    ("self_attention.dense.bias",                           Averaged),
    // MLP
    ("mlp.{linear1,dense_h_to_4h}.{weight,bias}",           Gated),
    ("mlp.{fc1_weight,fc1_bias}",                           Gated),
    ("mlp.{w1,w3}.{weight,bias}",                           Split(0)),
    ("mlp.{linear2,dense_4h_to_h,w2}.weight",               Split(1)),
    ("mlp.fc2_weight",                                      Split(1)),
    ("mlp.{linear2,dense_4h_to_h,w2}.bias",                 RowBias),
    ("mlp.fc2_bias",                                        RowBias),
    // experts
    ("router.{weight,bias}",                                Replicated),
    ("router.layer.{weight,bias}",                          Replicated),
    ("gate.wg.weight",                                      Replicated),
    ("coefficient.{weight,bias}",                           Replicated),
    ("deepspeed_experts.#.dense_h_to_4h.{weight,bias}",     Gated),
    ("deepspeed_experts.#.dense_4h_to_h.weight",            Split(1)),
    ("deepspeed_experts.#.dense_4h_to_h.bias",              Averaged),
    // Mamba
    ("mixer.in_proj.{weight,bias}",                         Halves),
    ("mixer.conv1d.{weight,bias}",                          Split(0)),
    ("mixer.dt_proj.{weight,bias}",                         Split(0)),
    ("mixer.{A_log,D}",                                     Split(0)),
    ("mixer.{x_proj,out_proj}.weight",                      Split(1)),
    ("mixer.out_proj.bias",                                 RowBias),
    // RWKV, which has no tensor parallelism
    ("{att,ffn}.*.{weight,bias}",                           Replicated),
    ("{att,ffn}.*",                                         Replicated),
    ("{ln1,ln2}.{weight,bias}",                             Replicated),
];

/// Buffers that follow from the configuration: rotary frequencies and causal masks.
pub(super) fn is_buffer(name: &str, stored: &StoredTensor) -> bool {
    let is_mask = stored.dtype().size() == 1 && name.ends_with(".bias");
    name.ends_with("inv_freq") || name.ends_with(".masked_bias") || is_mask
}
