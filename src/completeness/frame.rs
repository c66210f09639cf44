//! The frame around the layers: embeddings before them, a norm and an output layer behind them.

use crate::catalog::Problem;
use crate::names::Naming;

use super::Present;
use super::announced::Announced;
use super::stacks::{Layer, Stack, module};

/// What stands around a list of layers.
struct Frame {
    naming: Naming,
    /// The list, and beginnings of names that are in its layers.
    layers: &'static str,
    signs: &'static [&'static str],
    embedding: &'static str,
    /// The final norm, by one of its names.
    norm: &'static [&'static str],
    /// The output layer, where it need not be tied.
    output: Option<&'static str>,
    /// The output layer is never tied.
    is_untied: bool,
    /// The table of positions, where the model learns one.
    positions: Option<&'static str>,
    /// The modules of its layers: those that have no others differ only as it is announced.
    modules: &'static [&'static str],
}

/// Modules of the layers of Llama and its kin; the last ones are of layers that predict further tokens.
const LLAMA: &[&str] = &[
    "self_attn",
    "mlp",
    "block_sparse_moe",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "eh_proj",
    "enorm",
    "hnorm",
    "shared_head",
    "embed_tokens",
];
const GPT2: &[&str] = &["ln_1", "attn", "ln_2", "mlp"];
const GPT_NEOX: &[&str] = &["input_layernorm", "attention", "post_attention_layernorm", "mlp"];

const MEGATRON_DEEPSPEED: &[&str] =
    &["input_layernorm", "self_attention", "post_attention_layernorm", "mlp"];

/// All frames: Megatron-Core (`core/models/gpt`, `T5`, `bert`, `multimodal`), transformers 4 and 5, gpt-neox, Megatron-DeepSpeed
/// (`megatron/model/gpt_model.py`), InfiniTrain.
#[rustfmt::skip]
const FRAMES: &[Frame] = &[
    Frame { naming: Naming::Canonical, layers: "decoder.layers.", signs: &[""], embedding: "embedding.word_embeddings.weight", norm: &["decoder.final_layernorm.weight"], output: Some("output_layer.weight"), is_untied: false, positions: Some("embedding.position_embeddings.weight"), modules: &[] },
    Frame { naming: Naming::Canonical, layers: "encoder.layers.", signs: &[""], embedding: "embedding.word_embeddings.weight", norm: &["encoder.final_layernorm.weight"], output: None, is_untied: false, positions: Some("embedding.position_embeddings.weight"), modules: &[] },
    Frame { naming: Naming::Canonical, layers: "language_model.decoder.layers.", signs: &[""], embedding: "language_model.embedding.word_embeddings.weight", norm: &["language_model.decoder.final_layernorm.weight"], output: Some("language_model.output_layer.weight"), is_untied: false, positions: Some("language_model.embedding.position_embeddings.weight"), modules: &[] },
    Frame { naming: Naming::Modules, layers: "model.layers.", signs: &["self_attn.", "input_layernorm.", "mlp."], embedding: "model.embed_tokens.weight", norm: &["model.norm.weight"], output: Some("lm_head.weight"), is_untied: false, positions: None, modules: LLAMA },
    Frame { naming: Naming::Modules, layers: "model.language_model.layers.", signs: &["self_attn.", "input_layernorm.", "mlp."], embedding: "model.language_model.embed_tokens.weight", norm: &["model.language_model.norm.weight"], output: Some("lm_head.weight"), is_untied: false, positions: None, modules: LLAMA },
    Frame { naming: Naming::Modules, layers: "transformer.h.", signs: &["attn.", "ln_1.", "mlp."], embedding: "transformer.wte.weight", norm: &["transformer.ln_f.weight"], output: Some("lm_head.weight"), is_untied: false, positions: Some("transformer.wpe.weight"), modules: GPT2 },
    Frame { naming: Naming::Modules, layers: "h.", signs: &["attn.", "ln_1.", "mlp."], embedding: "wte.weight", norm: &["ln_f.weight"], output: None, is_untied: false, positions: Some("wpe.weight"), modules: GPT2 },
    Frame { naming: Naming::Modules, layers: "gpt_neox.layers.", signs: &["attention.", "input_layernorm."], embedding: "gpt_neox.embed_in.weight", norm: &["gpt_neox.final_layer_norm.weight"], output: Some("embed_out.weight"), is_untied: false, positions: None, modules: GPT_NEOX },
    Frame { naming: Naming::Modules, layers: "layers.", signs: &["attention.query_key_value.", "input_layernorm."], embedding: "word_embeddings.weight", norm: &["final.norm.weight", "final.norm.scale"], output: Some("final_linear.weight"), is_untied: false, positions: None, modules: GPT_NEOX },
    Frame { naming: Naming::Modules, layers: "layers.", signs: &["self_attention.query_key_value.", "input_layernorm."], embedding: "word_embeddings.weight", norm: &["final.norm.weight", "final.norm.scale"], output: Some("lm_head.weight"), is_untied: false, positions: None, modules: MEGATRON_DEEPSPEED },
    Frame { naming: Naming::InfiniTrain, layers: "transformer.h.", signs: &["attn.", "mlp.c_fc2."], embedding: "transformer.wte.weight", norm: &["transformer.ln_f.weight"], output: Some("lm_head.weight"), is_untied: true, positions: None, modules: GPT2 },
    Frame { naming: Naming::InfiniTrain, layers: "transformer.h.", signs: &["attn.", "ln_1.bias"], embedding: "transformer.wte.weight", norm: &["transformer.ln_f.weight"], output: Some("lm_head.weight"), is_untied: true, positions: Some("transformer.wpe.weight"), modules: GPT2 },
];

/// Ends of the names of models with an output layer over the vocabulary.
const WITH_OUTPUT: [&str; 3] = ["ForCausalLM", "LMHeadModel", "ForConditionalGeneration"];

/// Parts of the frame that are missing.
pub(super) fn missing(present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
    let frames = FRAMES.iter().filter(|frame| frame.naming == present.naming);
    let mut problems = Vec::new();
    for frame in frames.filter(|frame| frame.is_around(present)) {
        problems.extend(frame.missing(present, announced));
    }
    // An encoder and its decoder share their embeddings.
    problems.sort();
    problems.dedup();
    problems
}

/// Says whether a list of layers is that of a family whose layers may differ in what is not announced.
pub(super) fn is_mixed(stack: &Stack<'_>, present: &Present<'_>) -> bool {
    let mut frames = FRAMES.iter().filter(|frame| frame.naming == present.naming);
    frames.any(|frame| frame.is_pipeline() && frame.is_of(stack))
}

/// Says whether a list of layers is that of a family whose layers differ only as it is announced. A lone name that nobody knows
/// may have become another one in a few of them.
pub(super) fn is_known(stack: &Stack<'_>, present: &Present<'_>) -> bool {
    let mut frames = FRAMES.iter().filter(|frame| frame.naming == present.naming);
    frames.any(|frame| {
        let foreign = |layer: &Layer<'_>| {
            let modules = layer.names.iter().map(|name| module(name));
            let foreign: Vec<&str> =
                modules.filter(|module| !frame.modules.contains(module)).collect();
            let is_lone = foreign.windows(2).all(|pair| pair[0] != pair[1]);
            (!foreign.is_empty()).then_some(is_lone)
        };
        let foreign: Vec<bool> = stack.layers.values().filter_map(foreign).collect();
        let are_few =
            foreign.iter().all(|is_lone| *is_lone) && 2 * foreign.len() < stack.layers.len();
        // Two layers of a pipeline may be of two kinds.
        let are_enough = !frame.is_pipeline() || stack.layers.len() > 2;
        frame.is_of(stack) && are_enough && (foreign.is_empty() || are_few)
    })
}

impl Frame {
    /// Says whether its layers lie in files of their own, whose models have no module around all.
    fn is_pipeline(&self) -> bool {
        self.embedding == "word_embeddings.weight"
    }

    fn is_of(&self, stack: &Stack<'_>) -> bool {
        let has = |sign: &&str| {
            let mut names = stack.layers.values().flat_map(|layer| &layer.names);
            names.any(|name| name.starts_with(*sign))
        };
        stack.path == self.layers && stack.is_of_layers() && self.signs.iter().all(has)
    }

    fn is_around(&self, present: &Present<'_>) -> bool {
        present.stacks.iter().any(|stack| self.is_of(stack))
    }

    fn missing(&self, present: &Present<'_>, announced: &Announced<'_>) -> Vec<Problem> {
        let problem = |name: &str, why: String| Problem::of_tensor(name, format!("missing: {why}"));
        let list = self.layers.trim_end_matches('.');
        let mut problems = Vec::new();
        let own = self.is_untied.then(|| (false, "models of this kind store it".to_owned()));
        let tied = announced.is_tied().or(own);
        // The first of Megatron's stages stores the embedding whatever the last one does.
        let is_tied = |output: &str| {
            self.naming != Naming::Canonical
                && matches!(tied, Some((true, _)))
                && present.has(output)
        };
        if !present.has(self.embedding) && !self.output.is_some_and(is_tied) {
            // A family with names of its own is not this one.
            if self.has_other(present, &["embed", "wte"]) {
                return problems;
            }
            problems.push(problem(self.embedding, format!("there is none before {list}")));
        }
        if let Some((positions, words)) = self.positions(announced)
            && !present.has(positions)
        {
            problems.push(problem(positions, words));
        }
        if let Some(norm) = self.norm.first()
            && !self.norm.iter().any(|norm| present.has(norm))
            && !self.has_other(present, &["norm", "ln_f"])
        {
            problems.push(problem(norm, format!("there is none behind {list}")));
        }
        problems.extend(self.norm.iter().filter_map(|norm| self.bias(norm, present)));
        if let Some(output) = self.output
            && let Some((false, words)) = tied
            && !present.has(output)
            && !self.has_other_output(present)
            && self.needs_output(present, announced)
        {
            problems.push(problem(output, words));
        }
        problems
    }

    /// The bias of the final norm, where it is missing and the norms of the layers have one.
    fn bias(&self, norm: &str, present: &Present<'_>) -> Option<Problem> {
        const OTHERS: [&str; 2] = ["input_layernorm.bias", "ln_1.bias"];
        let bias = format!("{}bias", norm.strip_suffix("weight")?);
        let mut stacks = present.stacks.iter().filter(|stack| stack.path == self.layers);
        let mut layers = stacks.by_ref().flat_map(|stack| stack.layers.values());
        let other =
            layers.find_map(|layer| OTHERS.iter().find(|name| layer.names.contains(**name)))?;
        let is_lost = present.has(norm) && !present.has(&bias);
        is_lost.then(|| Problem::of_tensor(bias, format!("missing, though layers have {other}")))
    }

    /// The table of positions that the model learns, and who says so (Megatron-Core
    /// `core/models/common/embeddings/language_model_embedding.py`; transformers `modeling_gpt2.py`, `modeling_gpt_neo.py`,
    /// `modeling_gpt_bigcode.py`; InfiniTrain 0.6.0 `example/gpt2`, which alone has norms with a bias).
    fn positions(&self, announced: &Announced<'_>) -> Option<(&'static str, String)> {
        const KIND: &str = "position_embedding_type";
        const LEARNED: &str = "learned_absolute";
        const GPT2: [&str; 3] = ["gpt2", "gpt_neo", "gpt_bigcode"];
        let words = match self.naming {
            Naming::Canonical => {
                let is_learned = announced.is_certain
                    && announced.text(KIND) == Some(LEARNED)
                    && announced.switch("add_position_embedding") != Some(false)
                    && announced.switch("use_rotary_position_embeddings") != Some(true);
                is_learned.then(|| format!("args say {KIND}={LEARNED}"))
            }
            Naming::Modules => {
                let kind = announced.text("model_type").filter(|kind| GPT2.contains(kind));
                kind.map(|kind| format!("config.json says model_type={kind}"))
            }
            _ => Some("models of this kind store it".to_owned()),
        };
        self.positions.zip(words)
    }

    /// Says whether something else beside the layers goes by one of these words: a model with names of its own.
    fn has_other(&self, present: &Present<'_>, words: &[&str]) -> bool {
        if self.naming == Naming::Canonical {
            return false;
        }
        let module =
            self.layers.trim_end_matches('.').rsplit_once('.').map_or("", |(module, _)| module);
        let outside = present.weights.iter().filter(|name| !name.starts_with(self.layers));
        // A bias stays behind where only its weight is gone.
        let weights = outside.filter(|name| !name.ends_with("bias"));
        let mut own = weights.filter_map(|name| name.strip_prefix(module));
        own.any(|name| words.iter().any(|word| name.contains(word)))
    }

    /// Says whether something goes by another name for an output layer.
    fn has_other_output(&self, present: &Present<'_>) -> bool {
        let words = ["lm_head", "embed_out", "output"];
        let mut names = present.weights.iter().filter(|name| !name.starts_with(self.layers));
        self.naming == Naming::Modules
            && names.any(|name| words.iter().any(|word| name.contains(word)))
    }

    /// Says whether the model has an output layer over the vocabulary, and not a head of another kind or none.
    fn needs_output(&self, present: &Present<'_>, announced: &Announced<'_>) -> bool {
        match announced.architecture {
            Some(name) => WITH_OUTPUT.iter().any(|end| name.ends_with(end)),
            None => !["score.", "classifier.", "v_head.", "value_head.", "reward_head."]
                .iter()
                .any(|head| present.weights.iter().any(|name| name.starts_with(head))),
        }
    }
}
