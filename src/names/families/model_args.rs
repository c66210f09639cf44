//! Names that the families have for the arguments of a model, in the description that comes with it.
//!
//! Sources: transformers 4 and 5 (`configuration_*.py`), InfiniTrain 0.6.0, gpt-neox (`megatron/neox_arguments`,
//! `megatron/model/activations.py`).

/// The type of the model.
pub const MODEL_TYPE: &[&str] = &["model_type"];

/// Query heads.
pub const HEADS: &[&str] = &["num_attention_heads", "n_head"];

/// Heads of keys, and of values.
pub const QUERY_GROUPS: &[&str] = &["num_key_value_heads", "n_kv_head", "num_kv_heads"];

/// Rows of a head.
pub const HEAD_SIZE: &[&str] = &["head_dim"];

/// The activation of the MLP, as GPT-NeoX calls it.
pub const ACTIVATION: &[&str] = &["activation"];

/// True for an activation that has a gate.
#[must_use]
pub fn is_gated(activation: &str) -> bool {
    ["geglu", "reglu", "swiglu", "bilinear", "glu"].contains(&activation)
}
