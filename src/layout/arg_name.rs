//! The names of the arguments that are ever asked for: those that the command line may set.

/// The name of an argument of a run, as Megatron's `args` spells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArgName(&'static str);

macro_rules! arg_names {
    ($($constant:ident = $name:literal,)*) => {
        impl ArgName {
            $(#[doc = concat!("`", $name, "`.")] pub const $constant: Self = Self($name);)*

            /// All names, in order.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$constant),*];
        }
    };
}

arg_names! {
    ACCOUNT_FOR_EMBEDDING_IN_PIPELINE_SPLIT = "account_for_embedding_in_pipeline_split",
    ACCOUNT_FOR_LOSS_IN_PIPELINE_SPLIT = "account_for_loss_in_pipeline_split",
    CONTEXT_PARALLEL_SIZE = "context_parallel_size",
    DATA_PARALLEL_SIZE = "data_parallel_size",
    DDP_BUCKET_SIZE = "ddp_bucket_size",
    DDP_NUM_BUCKETS = "ddp_num_buckets",
    DDP_PAD_BUCKETS_FOR_HIGH_NCCL_BUSBW = "ddp_pad_buckets_for_high_nccl_busbw",
    DECODER_FIRST_PIPELINE_NUM_LAYERS = "decoder_first_pipeline_num_layers",
    DECODER_LAST_PIPELINE_NUM_LAYERS = "decoder_last_pipeline_num_layers",
    DECODER_NUM_LAYERS = "decoder_num_layers",
    ENCODER_NUM_LAYERS = "encoder_num_layers",
    ENCODER_PIPELINE_MODEL_PARALLEL_SIZE = "encoder_pipeline_model_parallel_size",
    ENCODER_TENSOR_MODEL_PARALLEL_SIZE = "encoder_tensor_model_parallel_size",
    EXPERT_GTP_WEIGHT_REMAT_SIZE = "expert_gtp_weight_remat_size",
    EXPERT_MODEL_PARALLEL_SIZE = "expert_model_parallel_size",
    EXPERT_PARALLEL = "expert_parallel",
    EXPERT_TENSOR_PARALLEL_SIZE = "expert_tensor_parallel_size",
    GPT_J_RESIDUAL = "gpt_j_residual",
    GTP_WEIGHT_REMAT_SIZE = "gtp_weight_remat_size",
    HYBRID_LAYER_PATTERN = "hybrid_layer_pattern",
    KV_CHANNELS = "kv_channels",
    KV_LORA_RANK = "kv_lora_rank",
    MODEL_TYPE = "model_type",
    MOE_GROUPED_GEMM = "moe_grouped_gemm",
    MOE_MLP_GLU_INTERLEAVE_SIZE = "moe_mlp_glu_interleave_size",
    MOE_SHARED_EXPERT_GLU_INTERLEAVE_SIZE = "moe_shared_expert_glu_interleave_size",
    MOE_TP_EXTEND_EP = "moe_tp_extend_ep",
    MOE_USE_LEGACY_GROUPED_GEMM = "moe_use_legacy_grouped_gemm",
    MTP_NUM_LAYERS = "mtp_num_layers",
    NOOP_LAYERS = "noop_layers",
    NUM_ATTENTION_HEADS = "num_attention_heads",
    NUM_DISTRIBUTED_OPTIMIZER_INSTANCES = "num_distributed_optimizer_instances",
    NUM_EXPERTS = "num_experts",
    NUM_LAYER_LIST = "num_layer_list",
    NUM_LAYERS = "num_layers",
    NUM_QUERY_GROUPS = "num_query_groups",
    OVERLAP_GRAD_REDUCE = "overlap_grad_reduce",
    PIPELINE_MODEL_PARALLEL_LAYOUT = "pipeline_model_parallel_layout",
    PIPELINE_MODEL_PARALLEL_SIZE = "pipeline_model_parallel_size",
    PIPELINE_NUM_TRANSFORMER_LAYERS = "pipeline_num_transformer_layers",
    Q_LORA_RANK = "q_lora_rank",
    QK_POS_EMB_HEAD_DIM = "qk_pos_emb_head_dim",
    QUICK_GEGLU = "quick_geglu",
    SCHEDULES_METHOD = "schedules_method",
    SWIGLU = "swiglu",
    TENSOR_MODEL_PARALLEL_SIZE = "tensor_model_parallel_size",
    TP_2D = "tp_2d",
    TRANSFORMER_IMPL = "transformer_impl",
    UNTIE_EMBEDDINGS_AND_OUTPUT_WEIGHTS = "untie_embeddings_and_output_weights",
    USE_TP_PP_DP_MAPPING = "use_tp_pp_dp_mapping",
    VIRTUAL_PIPELINE_MODEL_PARALLEL_SIZE = "virtual_pipeline_model_parallel_size",
    WORLD_SIZE = "world_size",
}

impl ArgName {
    /// The name itself.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.0
    }
}

impl std::fmt::Display for ArgName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// The known names that are most like this one, the nearest first.
pub(super) fn closest(name: &str) -> Vec<&'static str> {
    let mut names = ArgName::ALL.map(ArgName::as_str).to_vec();
    names
        .sort_by_key(|known| (std::cmp::Reverse(shared_words(name, known)), distance(name, known)));
    names.truncate(4);
    names
}

/// Words of a name that the other one has too, in the singular or the plural.
fn shared_words(name: &str, known: &str) -> usize {
    let is_shared = |word: &&str| {
        known.split('_').any(|other| other.starts_with(word) || word.starts_with(other))
    };
    name.split('_').filter(|word| !word.is_empty()).filter(is_shared).count()
}

/// Characters to insert, drop or replace until one name is the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (at, char) in (1..).zip(one.chars()) {
        let mut diagonal = std::mem::replace(&mut row[0], at);
        for (column, known) in (1..).zip(other.chars()) {
            let replaced = diagonal + usize::from(char != known);
            diagonal = row[column];
            row[column] = replaced.min(diagonal + 1).min(row[column - 1] + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}
