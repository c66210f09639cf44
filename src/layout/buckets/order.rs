//! The order in which a model has its parameters: that in which Megatron-Core's modules register them.
//!
//! A distributed checkpoint does not store it. A name that is not listed here has no known place, so a model that has it
//! cannot be placed. Sources, the same in Megatron-LM core_v0.12 to core_v0.19 (each `__init__`): `gpt_model.py`,
//! `language_model_embedding.py`, `transformer_block.py`, `transformer_layer.py`, `attention.py`,
//! `multi_latent_attention.py`, `mlp.py`, `moe/moe_layer.py`, `moe/router.py`, `moe/experts.py`, `moe/shared_experts.py`,
//! `multi_token_prediction.py`; Transformer Engine 2.x (`layernorm_linear.py`, `grouped_linear.py`).

use crate::layout::numbering::{LayerName, split_expert};
use crate::layout::{ArgName, RunArgs};

/// A part of a model, in the model's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ModelPart {
    /// On the first stage; a stage that predicts further tokens has a copy.
    Embedding,
    /// A layer of the decoder, by its global index.
    Layer(u64),
    /// On the last stage, as all that follows.
    FinalNorm,
    /// A layer that predicts further tokens.
    Mtp(u64),
    /// The output layer.
    Output,
}

impl ModelPart {
    /// The part that a canonical name belongs to, and the name within it; `None` for models of another kind.
    pub(super) fn of(name: &str) -> Option<(Self, &str)> {
        if let Some(layer) = LayerName::parse(name) {
            let rest = layer.rest.strip_prefix('.')?;
            return match layer.stack {
                "decoder." => Some((Self::Layer(layer.index), rest)),
                "mtp." => Some((Self::Mtp(layer.index), rest)),
                _ => None,
            };
        }
        let parts = [
            ("embedding.", Self::Embedding),
            ("decoder.final_layernorm.", Self::FinalNorm),
            ("output_layer.", Self::Output),
        ];
        parts.iter().find_map(|(prefix, part)| Some((*part, name.strip_prefix(prefix)?)))
    }
}

/// The place of a parameter within its part of the model; smaller ones come first.
pub(super) type Position = [u64; 5];

/// The modules of a layer with the names of their own parameters, in the order of unfused norms.
#[rustfmt::skip]
static LAYER: &[(&str, &[&str])] = &[
    ("input_layernorm",                   &["weight", "bias"]),
    ("self_attention.core_attention",     &["softmax_offset"]),
    ("self_attention.linear_proj",        &["weight", "bias"]),
    ("self_attention.linear_qkv",         &["weight", "bias"]),
    ("self_attention.linear_q_proj",      &["weight", "bias"]),
    ("self_attention.linear_q_down_proj", &["weight", "bias"]),
    ("self_attention.linear_q_up_proj",   &["weight", "bias"]),
    ("self_attention.linear_kv_down_proj", &["weight", "bias"]),
    ("self_attention.linear_kv_up_proj",  &["weight", "bias"]),
    ("self_attention.q_layernorm",        &["weight", "bias"]),
    ("self_attention.k_layernorm",        &["weight", "bias"]),
    ("self_attention.kv_layernorm",       &["weight", "bias"]),
    ("pre_mlp_layernorm",                 &["weight", "bias"]),
    ("mlp.linear_fc1",                    &["weight", "bias"]),
    ("mlp.linear_fc2",                    &["weight", "bias"]),
    ("mlp.router",                        &["weight", "bias"]),
    ("mlp.fc1_latent_proj",               &["weight", "bias"]),
    ("mlp.fc2_latent_proj",               &["weight", "bias"]),
    ("mlp.experts",                       &[]),
    ("mlp.shared_experts",                &["gate_weight"]),
    ("mlp.shared_experts.linear_fc1",     &["weight", "bias"]),
    ("mlp.shared_experts.linear_fc2",     &["weight", "bias"]),
];

/// The modules of a layer that predicts further tokens; the fourth is a layer itself.
static MTP: [&str; 5] = ["enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm"];

/// The modules of an embedding.
static EMBEDDING: [&str; 3] = ["word_embeddings", "position_embeddings", "tokentype_embeddings"];

/// Norms that Transformer Engine fuses into the linear behind them, where they come before its weight.
static FUSED_NORMS: [(&str, &str); 3] = [
    ("input_layernorm", "self_attention.linear_qkv"),
    ("self_attention.q_layernorm", "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj"),
];

/// The way in which the experts of a rank are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpertModules {
    /// `SequentialMLP`: an MLP each.
    Sequential,
    /// `TEGroupedMLP`: all first linears, then all second ones.
    Grouped,
    /// `GroupedMLP`: all first linears in one parameter, all second ones in another, each expert's transposed.
    Flat,
}

/// What the kinds of modules say of the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ParamOrder {
    /// The norm before attention is fused into `linear_qkv`.
    fuses_input_norm: bool,
    /// The norms of latent attention are fused into its up-projections.
    fuses_latent_norms: bool,
    /// The experts of a rank.
    pub experts: ExpertModules,
}

impl ParamOrder {
    /// All orders that Megatron-Core has for a model. Latent attention has no `linear_qkv`, so its norm before attention stands alone.
    pub(super) fn all(has_experts: bool, has_latent_attention: bool) -> Vec<Self> {
        let fused_norms = if has_latent_attention {
            [(false, false), (false, true)]
        } else {
            [(false, false), (true, false)]
        };
        let experts: &[ExpertModules] = match has_experts {
            true => &[ExpertModules::Sequential, ExpertModules::Grouped, ExpertModules::Flat],
            false => &[ExpertModules::Sequential],
        };
        let with_experts = |(fuses_input_norm, fuses_latent_norms)| {
            let order = move |&experts| Self { fuses_input_norm, fuses_latent_norms, experts };
            experts.iter().map(order)
        };
        fused_norms.into_iter().flat_map(with_experts).collect()
    }

    /// Tells whether the arguments speak for this order among others that the sizes allow. What they do not say is not
    /// held against any.
    pub(super) fn agrees_with(&self, args: &RunArgs) -> bool {
        let is_fused = args.text(ArgName::TRANSFORMER_IMPL).map(|text| text != "local");
        let fuses = self.fuses_input_norm || self.fuses_latent_norms;
        let is_grouped = args.get(ArgName::MOE_GROUPED_GEMM).is_some();
        let experts = match (args.is_on(ArgName::MOE_GROUPED_GEMM), is_fused) {
            (false, _) => ExpertModules::Sequential,
            (true, Some(false)) => ExpertModules::Flat,
            (true, _) if args.is_on(ArgName::MOE_USE_LEGACY_GROUPED_GEMM) => ExpertModules::Flat,
            (true, _) => ExpertModules::Grouped,
        };
        is_fused.is_none_or(|is_fused| is_fused == fuses)
            && (!is_grouped || experts == self.experts)
    }

    /// The position of a parameter in a part, by its name within it; `None` where it is not known.
    pub(super) fn position(&self, part: ModelPart, rest: &str) -> Option<Position> {
        match part {
            ModelPart::Embedding => {
                let module = EMBEDDING.iter().position(|name| rest == format!("{name}.weight"))?;
                Some([module as u64, 0, 0, 0, 0])
            }
            ModelPart::FinalNorm | ModelPart::Output => {
                Some([leaf(&["weight", "bias"], rest)?, 0, 0, 0, 0])
            }
            ModelPart::Layer(_) => self.in_layer(rest, 0),
            ModelPart::Mtp(_) => {
                let (module, rest) = rest.split_once('.')?;
                let at = MTP.iter().position(|name| *name == module)? as u64;
                if module == "transformer_layer" {
                    return self.in_layer(rest, at);
                }
                Some([at, leaf(&["weight", "bias"], rest)?, 0, 0, 0])
            }
        }
    }

    fn in_layer(&self, rest: &str, before: u64) -> Option<Position> {
        // Behind a dot, as the list of experts is looked for in a whole name.
        if let Some((_, expert, linear)) = split_expert(&format!(".{rest}")) {
            let (linear, last) = linear.strip_prefix('.')?.split_once('.')?;
            let linear =
                ["linear_fc1", "linear_fc2"].iter().position(|name| *name == linear)? as u64;
            let last = leaf(&["weight", "bias"], last)?;
            let module = 2 * module_at("mlp.experts")?;
            return Some(match self.experts {
                ExpertModules::Sequential => [before, module, expert, linear, last],
                ExpertModules::Grouped => [before, module, linear, expert, last],
                // There is one parameter only, and no bias.
                ExpertModules::Flat if last > 0 => return None,
                ExpertModules::Flat => [before, module, linear, expert, 0],
            });
        }
        let (module, last) = rest.rsplit_once('.')?;
        let at = module_at(module)?;
        let (_, leaves) = LAYER.get(usize::try_from(at).ok()?)?;
        let last = leaf(leaves, last)?;
        let fused_into = FUSED_NORMS.iter().find(|(norm, _)| *norm == module);
        let at = match fused_into {
            Some((norm, linear)) if self.fuses(norm) => 2 * module_at(linear)? - 1,
            _ => 2 * at,
        };
        Some([before, at, last, 0, 0])
    }

    fn fuses(&self, norm: &str) -> bool {
        if norm == "input_layernorm" { self.fuses_input_norm } else { self.fuses_latent_norms }
    }
}

fn module_at(name: &str) -> Option<u64> {
    Some(LAYER.iter().position(|(module, _)| *module == name)? as u64)
}

fn leaf(leaves: &[&str], name: &str) -> Option<u64> {
    Some(leaves.iter().position(|leaf| *leaf == name)? as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(order: &ParamOrder, mut names: Vec<&'static str>) -> Vec<&'static str> {
        names.sort_by_key(|name| {
            ModelPart::of(name).map(|(part, rest)| (part, order.position(part, rest)))
        });
        names
    }

    #[test]
    fn a_norm_that_is_fused_comes_before_the_weight_of_its_linear() {
        let names = vec![
            "output_layer.weight",
            "decoder.final_layernorm.weight",
            "decoder.layers.10.self_attention.linear_qkv.weight",
            "decoder.layers.10.input_layernorm.bias",
            "decoder.layers.10.input_layernorm.weight",
            "decoder.layers.10.self_attention.linear_proj.weight",
            "decoder.layers.9.mlp.linear_fc2.weight",
            "embedding.word_embeddings.weight",
        ];
        let orders = ParamOrder::all(false, false);
        let place = |order: &ParamOrder| {
            let sorted = sorted(order, names.clone());
            sorted.iter().position(|name| name.ends_with("input_layernorm.weight"))
        };
        let places: Vec<_> = orders.iter().map(place).collect();
        assert_eq!(places, [Some(2), Some(3)]);
    }

    #[test]
    fn experts_lie_one_by_one_or_linear_by_linear() {
        let names = vec![
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight",
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
        ];
        let [second, first, other] = [names[0], names[1], names[2]];
        let mut orders = ParamOrder::all(true, false).into_iter();
        let mut next = || orders.next().map(|order| sorted(&order, names.clone()));
        assert_eq!(next(), Some(vec![other, first, second]));
        assert_eq!(next(), Some(vec![first, other, second]));
    }

    #[test]
    fn what_is_not_listed_has_no_position() {
        let order = ParamOrder::all(false, false)[0];
        for name in
            ["decoder.layers.0.mixer.in_proj.weight", "decoder.layers.0.mlp.linear_fc1.scale"]
        {
            let found = ModelPart::of(name).and_then(|(part, rest)| order.position(part, rest));
            assert_eq!(found, None, "{name}");
        }
        assert_eq!(ModelPart::of("encoder.layers.0.input_layernorm.weight"), None);
    }
}
