//! The order of a model's tensors in its forward pass, as their names tell it.
//!
//! Names are those of Megatron-Core (`megatron/core/transformer`, `ssm`, `models`), of transformers' models, GPT-NeoX and torchtitan.
//! What no table knows stands behind what is known, in natural order.

use super::natural::Name;
use super::place::Place;

/// The part of a model that a tensor belongs to, in the order of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tower {
    /// The embeddings of tokens.
    Embeddings,
    /// What sees or hears.
    Vision,
    /// What leads from there to the language model.
    Projector,
    /// The encoder of a model that has a decoder, or of one that has nothing else.
    Encoder,
    /// The language model.
    Main,
    /// The layers that predict further tokens.
    Mtp,
    /// The norm behind the last layer.
    FinalNorm,
    /// The heads.
    Output,
    /// What no rule knows.
    Other,
}

/// The part of a tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Before its layers.
    Embeddings,
    /// Its layers.
    Layers,
    /// The norm behind them.
    Norm,
    /// All else.
    Rest,
}

/// The kind of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Embeddings of any sort.
    Embedding,
    /// Self-attention, latent and linear ones too.
    Attention,
    /// Attention to an encoder.
    CrossAttention,
    /// A Mamba mixer.
    Mixer,
    /// A dense MLP, shared experts too.
    Mlp,
    /// What chooses the experts.
    Router,
    /// Experts.
    Experts,
    /// Norms.
    Norm,
    /// Heads.
    Output,
    /// Any other.
    Other,
}

impl Kind {
    /// All, in the order of columns.
    pub const ALL: [Self; 10] = [
        Self::Embedding,
        Self::Attention,
        Self::CrossAttention,
        Self::Mixer,
        Self::Mlp,
        Self::Router,
        Self::Experts,
        Self::Norm,
        Self::Output,
        Self::Other,
    ];

    /// The word for it in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::CrossAttention => "cross attention",
            Self::Mixer => "mixer",
            Self::Mlp => "mlp",
            Self::Router => "router",
            Self::Experts => "experts",
            Self::Norm => "norm",
            Self::Output => "output",
            Self::Other => "other",
        }
    }
}

/// The step of a layer's forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    InputNorm,
    Attention,
    PostAttentionNorm,
    CrossNorm,
    CrossAttention,
    PostCrossNorm,
    MlpNorm,
    Mlp,
    PostMlpNorm,
    Unknown,
}

/// The steps by the first component of a module that stands here.
#[rustfmt::skip]
const PHASES: &[(Phase, &[&str])] = &[
    (Phase::InputNorm, &["input_layernorm", "ln_1", "ln1", "norm1", "layer_norm1", "layernorm_before", "attention_norm",
        "self_attn_layer_norm", "norm", "enorm", "hnorm", "eh_proj"]),
    (Phase::Attention, &["self_attention", "self_attn", "attn", "attention", "SelfAttention", "mixer", "mamba", "linear_attn"]),
    (Phase::PostAttentionNorm, &["post_self_attn_layernorm", "post_attention_layernorm", "post_attention_norm"]),
    (Phase::CrossNorm, &["pre_cross_attn_layernorm", "encoder_attn_layer_norm"]),
    (Phase::CrossAttention, &["cross_attention", "cross_attn", "crossattention", "encoder_attn", "EncDecAttention", "inter_attention"]),
    (Phase::PostCrossNorm, &["post_cross_attn_layernorm"]),
    (Phase::MlpNorm, &["pre_mlp_layernorm", "ln_2", "ln2", "norm2", "layer_norm2", "layernorm_after", "ffn_norm",
        "pre_feedforward_layernorm", "pre_feedforward_layernorm_2"]),
    (Phase::Mlp, &["mlp", "feed_forward", "ffn", "moe", "block_sparse_moe", "DenseReluDense", "fc1", "fc2", "intermediate"]),
    (Phase::PostMlpNorm, &["post_mlp_layernorm", "post_feedforward_layernorm", "final_layernorm", "final_layer_norm", "output",
        "shared_head"]),
];

/// Components within a step, group by group in the order of their use.
#[rustfmt::skip]
const STEPS: &[&[&str]] = &[
    &["router", "gate", "score", "gate_weight", "shared_expert_gate"],
    &["linear_q_down_proj", "q_a_proj", "wq_a"],
    &["q_a_layernorm"],
    &["linear_q_up_proj", "q_b_proj", "wq_b"],
    &["linear_kv_down_proj", "kv_a_proj_with_mqa", "wkv_a"],
    &["kv_layernorm", "kv_a_layernorm"],
    &["linear_kv_up_proj", "kv_b_proj", "wkv_b"],
    &["linear_qkv", "query_key_value", "c_attn", "qkv", "qkv_proj", "in_proj", "in_proj_qkvz", "in_proj_ba"],
    &["linear_q", "linear_q_proj", "q_proj", "wq", "q", "query"],
    &["k_proj", "wk", "k", "key"],
    &["linear_kv", "v_proj", "wv", "v", "value"],
    &["conv1d"],
    &["q_layernorm", "q_norm"],
    &["k_layernorm", "k_norm"],
    &["out_norm", "norm", "gate_proj", "gate_up_proj", "linear_fc1", "w1", "c_fc", "fc1", "dense_h_to_4h", "wi", "wi_0"],
    &["up_proj", "w3", "c_fc2", "wi_1"],
    &["linear_proj", "o_proj", "c_proj", "dense", "proj", "wo", "o", "out_proj", "down_proj", "linear_fc2", "w2", "fc2",
        "dense_4h_to_h"],
    &["LayerNorm"],
];

const VISION: [&str; 5] = ["vision", "visual", "image", "audio", "speech"];
const PROJECTORS: [&str; 6] =
    ["projector", "projection", "merger", "connector", "resampler", "aligner"];
const EMBEDDINGS: [&str; 3] = ["wte", "wpe", "shared"];
const HEADS: [&str; 9] = [
    "output_layer",
    "embed_out",
    "output",
    "final_linear",
    "classifier",
    "score",
    "cls",
    "pooler",
    "heads",
];

/// The place of a tensor in the forward pass, with weights before an optimizer's state. Those of one layer and module are in natural order of their names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The kind of an optimizer's state, empty for a weight.
    pub state: Name,
    /// The tower.
    pub tower: Tower,
    /// The tower as the name says it, such as `vision_model`; empty for the language model.
    pub prefix: Name,
    /// The part of the tower.
    pub part: Part,
    /// The list of layers.
    pub list: Name,
    /// The number of the layer.
    pub layer: Option<u64>,
    phase: (u64, Phase),
    step: (bool, usize),
    /// The module in the layer, or in the whole model outside of all; the number of an expert is `*`.
    pub module: Name,
    name: Name,
}

impl Position {
    /// The place that a name says.
    #[must_use]
    pub fn of(name: &Name) -> Self {
        let place = Place::of(name.as_str());
        let (tower, prefix, part) = tower(&place);
        Self {
            state: Name::new(place.state),
            tower,
            prefix: Name::new(prefix),
            part,
            list: Name::new(place.list),
            layer: place.layer,
            phase: phase(&place.module),
            step: step(&place),
            module: Name::new(&*place.module),
            name: name.clone(),
        }
    }

    /// The layer, or what stands for it outside of all: the same for all tensors of one.
    #[must_use]
    pub fn row(&self) -> (&Name, Tower, &Name, Part, &Name, Option<u64>) {
        (&self.state, self.tower, &self.prefix, self.part, &self.list, self.layer)
    }

    /// The layer as people call it; with its list where `names_list`.
    #[must_use]
    pub fn title(&self, names_list: bool) -> String {
        let list = self.list.as_str();
        let list = list.rsplit_once('.').map_or(list, |(before, _)| before);
        let words = match (self.tower, self.part) {
            (_, Part::Layers) => {
                let layer = self.layer.map_or(String::new(), |layer| format!("layer {layer}"));
                let is_plain = self.tower == Tower::Main && !names_list || list.is_empty();
                return if is_plain { layer } else { format!("{list} {layer}") };
            }
            (Tower::Embeddings, _) => "embeddings",
            (Tower::FinalNorm, _) => "final norm",
            (Tower::Output, _) => "output layer",
            (Tower::Other | Tower::Main, _) => "other tensors",
            (_, Part::Embeddings) => "embeddings",
            (_, Part::Norm) => "final norm",
            (_, Part::Rest) => "",
        };
        let prefix = self.prefix.as_str();
        [prefix, words].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// The kind of the module.
    #[must_use]
    pub fn kind(&self) -> Kind {
        let module = self.module.as_str();
        let last = module.rsplit('.').next().unwrap_or_default();
        let has = |component: &str| module.split('.').any(|one| one == component);
        match self.phase.1 {
            _ if self.layer.is_none() => match (self.tower, self.part) {
                (Tower::FinalNorm, _) | (_, Part::Norm) => Kind::Norm,
                (Tower::Embeddings, _) | (_, Part::Embeddings) => Kind::Embedding,
                (Tower::Output, _) => Kind::Output,
                _ => Kind::Other,
            },
            _ if is_norm(last) => Kind::Norm,
            Phase::Attention if has("mixer") || has("mamba") => Kind::Mixer,
            Phase::Attention => Kind::Attention,
            Phase::CrossAttention => Kind::CrossAttention,
            Phase::Mlp if last == "router" || last == "gate" || module.contains(".router.") => {
                Kind::Router
            }
            Phase::Mlp if module.contains("experts.") || last == "experts" => {
                match has("shared_experts") {
                    true => Kind::Mlp,
                    false => Kind::Experts,
                }
            }
            // T5 and BERT: the second half of an MLP stands beside it.
            Phase::Mlp => Kind::Mlp,
            Phase::PostMlpNorm if has("output") => Kind::Mlp,
            _ => Kind::Other,
        }
    }
}

/// The tower of a place, what names it, and the part.
fn tower<'n>(place: &Place<'n>) -> (Tower, &'n str, Part) {
    let path = if place.layer.is_some() { place.list } else { place.path };
    let contains = |words: &[&str], one: &str| words.iter().any(|word| one.contains(word));
    let find = |is_it: &dyn Fn(&str) -> bool| {
        let mut end = 0;
        path.split('.').find_map(|one| {
            end += one.len() + 1;
            is_it(one).then(|| &path[..end - 1])
        })
    };
    let last = path.rsplit('.').next().unwrap_or_default();
    let is_head = |one: &str| HEADS.contains(&one) || one.ends_with("head") || one == "predictions";
    let is_embedding = |one: &str| {
        let is_stem = one.starts_with("conv") || one.contains("patch");
        EMBEDDINGS.contains(&one) || one.contains("embed") || one.ends_with("_pos_emb") || is_stem
    };
    let part = match () {
        () if place.layer.is_some() => Part::Layers,
        () if path.split('.').any(is_head) => Part::Rest,
        () if path.split('.').any(is_embedding) => Part::Embeddings,
        () if is_norm(last) => Part::Norm,
        () => Part::Rest,
    };
    let inner = [
        (Tower::Projector, find(&|one| contains(&PROJECTORS, one))),
        (Tower::Vision, find(&|one| contains(&VISION, one))),
        (Tower::Mtp, find(&|one| one.starts_with("mtp"))),
        (Tower::Encoder, find(&|one| one == "encoder")),
    ];
    if let Some((tower, Some(prefix))) = inner.into_iter().find(|(_, found)| found.is_some()) {
        return (tower, prefix, part);
    }
    let tower = match part {
        Part::Layers => Tower::Main,
        Part::Embeddings => Tower::Embeddings,
        Part::Norm => Tower::FinalNorm,
        Part::Rest if path.split('.').any(is_head) => Tower::Output,
        Part::Rest => Tower::Other,
    };
    (tower, "", part)
}

fn is_norm(component: &str) -> bool {
    let component = component.to_ascii_lowercase();
    component.contains("norm") || ["ln_f", "ln_1", "ln_2", "ln1", "ln2"].contains(&&*component)
}

/// The step of a layer that a module belongs to, behind the number of its sublayer where it has one, as in T5.
fn phase(module: &str) -> (u64, Phase) {
    let mut components = module.split('.');
    let mut sublayer = 0;
    if module.starts_with("layer.") {
        sublayer = components.nth(1).and_then(super::index::index).unwrap_or(0);
    }
    let known = |one: &str| PHASES.iter().find(|(_, names)| names.contains(&one));
    // The norm of a T5 sublayer comes first in it.
    let found = components.find_map(|one| match one {
        "layer_norm" => Some(Phase::InputNorm),
        _ => known(one).map(|(phase, _)| *phase),
    });
    (sublayer, found.unwrap_or(Phase::Unknown))
}

/// The order within a step: shared experts behind the others, then by the last component.
fn step(place: &Place<'_>) -> (bool, usize) {
    let last = place.module.rsplit('.').next().unwrap_or_default();
    let at = STEPS.iter().position(|names| names.contains(&last));
    (place.module.contains("shared_expert"), at.unwrap_or(STEPS.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sorts names that stand in the order of the forward pass, and says which came elsewhere.
    #[track_caller]
    fn assert_order(names: &[&str]) {
        let mut sorted: Vec<Name> = names.iter().rev().map(|name| Name::new(*name)).collect();
        sorted.sort_by_cached_key(Position::of);
        let sorted: Vec<&str> = sorted.iter().map(Name::as_str).collect();
        assert_eq!(sorted, names);
    }

    #[test]
    fn tensors_come_in_the_order_of_the_forward_pass() {
        assert_order(&[
            "embedding.word_embeddings.weight",
            "vision_model.conv1.weight",
            "vision_model.decoder.layers.0.mlp.linear_fc1.weight",
            "vision_model.ln_post.norm.weight",
            "vision_projection.encoder.linear_fc1.weight",
            "decoder.layers.2.input_layernorm.weight",
            "decoder.layers.2.self_attention.linear_qkv.bias",
            "decoder.layers.2.self_attention.linear_qkv.weight",
            "decoder.layers.2.self_attention.q_layernorm.weight",
            "decoder.layers.2.self_attention.k_layernorm.weight",
            "decoder.layers.2.self_attention.linear_proj.weight",
            "decoder.layers.2.pre_mlp_layernorm.weight",
            "decoder.layers.2.mlp.router.weight",
            "decoder.layers.2.mlp.experts.local_experts.2.linear_fc1.weight",
            "decoder.layers.2.mlp.experts.local_experts.10.linear_fc1.weight",
            "decoder.layers.2.mlp.experts.local_experts.2.linear_fc2.weight",
            "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.2.mlp.shared_experts.linear_fc2.weight",
            "decoder.layers.10.mlp.linear_fc1.weight",
            "mtp.layers.0.enorm.weight",
            "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight",
            "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight",
            "mtp.layers.0.final_layernorm.weight",
            "decoder.final_layernorm.weight",
            "output_layer.weight",
            "mystery.weight",
            "optimizer.exp_avg.embedding.word_embeddings.weight",
            "optimizer.exp_avg.output_layer.weight",
        ]);
        assert_order(&[
            "model.embed_tokens.weight",
            "model.layers.9.input_layernorm.weight",
            "model.layers.9.self_attn.q_proj.weight",
            "model.layers.9.self_attn.k_proj.weight",
            "model.layers.9.self_attn.v_proj.weight",
            "model.layers.9.self_attn.o_proj.weight",
            "model.layers.9.post_attention_layernorm.weight",
            "model.layers.9.mlp.gate_proj.weight",
            "model.layers.9.mlp.up_proj.weight",
            "model.layers.9.mlp.down_proj.weight",
            "model.layers.10.input_layernorm.weight",
            "model.norm.weight",
            "lm_head.weight",
        ]);
        assert_order(&[
            "transformer.wpe.weight",
            "transformer.wte.weight",
            "transformer.h.0.ln_1.weight",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.0.attn.c_proj.weight",
            "transformer.h.0.ln_2.weight",
            "transformer.h.0.mlp.c_fc.weight",
            "transformer.h.0.mlp.c_fc2.weight",
            "transformer.h.0.mlp.c_proj.weight",
            "transformer.ln_f.weight",
            "lm_head.weight",
        ]);
        assert_order(&[
            "gpt_neox.embed_in.weight",
            "gpt_neox.layers.0.input_layernorm.weight",
            "gpt_neox.layers.0.attention.query_key_value.weight",
            "gpt_neox.layers.0.attention.dense.weight",
            "gpt_neox.layers.0.post_attention_layernorm.weight",
            "gpt_neox.layers.0.mlp.dense_h_to_4h.weight",
            "gpt_neox.layers.0.mlp.dense_4h_to_h.weight",
            "gpt_neox.final_layer_norm.weight",
            "embed_out.weight",
        ]);
        assert_order(&[
            "tok_embeddings.weight",
            "layers.0.attention_norm.weight",
            "layers.0.attention.wq.weight",
            "layers.0.attention.wk.weight",
            "layers.0.attention.wv.weight",
            "layers.0.attention.wo.weight",
            "layers.0.ffn_norm.weight",
            "layers.0.feed_forward.w1.weight",
            "layers.0.feed_forward.w3.weight",
            "layers.0.feed_forward.w2.weight",
            "norm.weight",
            "output.weight",
        ]);
        assert_order(&[
            "02.input_layernorm.weight",
            "02.self_attention.query_key_value.weight",
            "03.input_layernorm.weight",
            "10.weight",
        ]);
        assert_order(&[
            "shared.weight",
            "encoder.block.0.layer.0.layer_norm.weight",
            "encoder.block.0.layer.0.SelfAttention.q.weight",
            "encoder.block.0.layer.0.SelfAttention.o.weight",
            "encoder.block.0.layer.1.layer_norm.weight",
            "encoder.block.0.layer.1.DenseReluDense.wi.weight",
            "encoder.final_layer_norm.weight",
            "decoder.block.0.layer.0.SelfAttention.q.weight",
            "decoder.block.0.layer.1.EncDecAttention.q.weight",
            "decoder.final_layer_norm.weight",
        ]);
    }

    #[test]
    fn modules_are_of_a_kind() {
        let kind = |name| Position::of(&Name::new(name)).kind();
        for (name, expected) in [
            ("embedding.word_embeddings.weight", Kind::Embedding),
            ("decoder.layers.0.self_attention.linear_qkv.weight", Kind::Attention),
            ("decoder.layers.0.self_attention.q_layernorm.weight", Kind::Norm),
            ("decoder.layers.0.cross_attention.linear_q.weight", Kind::CrossAttention),
            ("decoder.layers.0.mixer.A_log", Kind::Mixer),
            ("decoder.layers.0.mlp.router.expert_bias", Kind::Router),
            ("model.layers.0.mlp.gate.weight", Kind::Router),
            ("model.layers.0.mlp.gate_proj.weight", Kind::Mlp),
            ("model.layers.0.mlp.experts.gate_up_proj", Kind::Experts),
            ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", Kind::Experts),
            ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", Kind::Mlp),
            ("bert.encoder.layer.0.output.dense.weight", Kind::Mlp),
            ("bert.encoder.layer.0.output.LayerNorm.weight", Kind::Norm),
            ("model.norm.weight", Kind::Norm),
            ("lm_head.weight", Kind::Output),
            ("model.layers.0.mystery.weight", Kind::Other),
            ("optimizer.exp_avg.decoder.layers.0.mlp.linear_fc1.weight", Kind::Mlp),
        ] {
            assert_eq!(kind(name), expected, "{name}");
        }
    }
}
