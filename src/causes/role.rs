//! What the rows of a tensor are, by the last component of its module's name.

/// What the rows of a tensor are, or its columns where a model stores it transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Queries, keys and values in one.
    Attention,
    /// Heads of queries.
    Queries,
    /// Heads of keys.
    Keys,
    /// Heads of values.
    Values,
    /// The output of attention: its columns are heads.
    Output,
    /// Gate and up in one.
    GateAndUp,
    /// The embedding of tokens, or the output layer.
    Vocabulary,
    /// Anything else.
    Other,
}

/// Names of modules (Megatron-Core, transformers, GPT-NeoX, torchtitan, InfiniTrain).
const ROLES: &[(Role, &[&str])] = &[
    (
        Role::Attention,
        &[
            "linear_qkv",
            "query_key_value",
            "c_attn",
            "qkv_proj",
            "qkv",
            "Wqkv",
            "W_pack",
            "attn_qkv",
            "wqkv",
        ],
    ),
    (Role::Queries, &["q_proj", "wq", "query", "linear_q_proj"]),
    (Role::Keys, &["k_proj", "wk", "key"]),
    (Role::Values, &["v_proj", "wv", "value"]),
    (Role::Output, &["linear_proj", "o_proj", "wo", "dense", "out_proj"]),
    (Role::GateAndUp, &["linear_fc1", "gate_up_proj", "dense_h_to_4h", "w13"]),
    (
        Role::Vocabulary,
        &[
            "word_embeddings",
            "output_layer",
            "lm_head",
            "embed_tokens",
            "wte",
            "embed_in",
            "embed_out",
            "tok_embeddings",
            "final_linear",
        ],
    ),
];

impl Role {
    /// The role of a module, or of a parameter that is none of a module.
    pub(super) fn of(module: &str, parameter: &str) -> Self {
        let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
        let names = [last(module), parameter.to_owned()];
        let has = |known: &&str| names.iter().any(|name| name == known);
        let row = ROLES.iter().find(|(_, known)| known.iter().any(has));
        row.map_or(Self::Other, |(role, _)| *role)
    }
}

/// The name of the second linear of an MLP for that of its first one: its columns tell whether the first one is gated.
pub(super) fn second_linear(name: &str) -> Option<String> {
    let pairs = [("linear_fc1", "linear_fc2"), ("dense_h_to_4h", "dense_4h_to_h")];
    let (first, second) = pairs.into_iter().find(|(first, _)| name.contains(first))?;
    let name = name.replace(first, second);
    Some(match name.strip_suffix("bias") {
        Some(module) => format!("{module}weight"),
        None => name,
    })
}
