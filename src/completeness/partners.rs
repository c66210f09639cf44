//! Weights that never go without each other: a linear and the one that takes what it gives.
//!
//! Layers are held against each other elsewhere; this also tells what all of them lack.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Bound;

use crate::names::Naming;

use super::stacks::{Layer, Stack, module};

/// A weight, and those of which one stands in the same module, the usual one first.
type Partners = (&'static str, &'static [&'static str]);

/// Megatron-Core's (`core/transformer/attention.py`, `multi_latent_attention.py`, `mlp.py`, `moe`, `multi_token_prediction.py`).
#[rustfmt::skip]
const CANONICAL: &[Partners] = &[
    ("linear_proj", &["linear_qkv", "linear_q", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "in_proj"]),
    ("linear_qkv",  &["linear_proj"]),
    ("linear_fc1",  &["linear_fc2"]),
    ("linear_fc2",  &["linear_fc1"]),
    ("router",      &[EXPERTS]),
    ("enorm",       &["hnorm"]),
    ("hnorm",       &["eh_proj"]),
    ("eh_proj",     &["enorm"]),
];

/// Those of transformers 4 and 5 (`modeling_llama.py`, `modeling_gpt2.py`, `modeling_gpt_neox.py`) and of what shares its names.
#[rustfmt::skip]
const MODULES: &[Partners] = &[
    ("down_proj",   &["up_proj", "gate_up_proj"]),
    ("up_proj",     &["down_proj"]),
    ("k_proj",      &["q_proj", "q_a_proj", "q_b_proj"]),
    ("v_proj",      &["k_proj"]),
    ("o_proj",      &["q_proj", "qkv_proj", "q_a_proj", "q_b_proj", "in_proj", "W_pack"]),
    ("c_fc",        &["c_proj"]),
    ("c_attn",      &["c_proj"]),
    ("dense_h_to_4h", &["dense_4h_to_h"]),
    ("dense_4h_to_h", &["dense_h_to_4h"]),
    ("query_key_value", &["dense"]),
    ("enorm",       &["hnorm"]),
    ("hnorm",       &["eh_proj"]),
    ("eh_proj",     &["enorm"]),
];

/// Modules of a layer of Megatron-Core's, and the norms around each, of which it has one (`core/transformer/transformer_layer.py`,
/// `core/ssm/mamba_layer.py`; MindSpeed-LLM).
const NORMS: &[Partners] = &[
    ("self_attention.", &["input_layernorm", "post_attn_norm", "post_self_attn_layernorm"]),
    ("cross_attention.", &["pre_cross_attn_layernorm"]),
    ("mixer.", &["norm"]),
    ("mlp.", &["pre_mlp_layernorm", "post_mlp_layernorm"]),
];

const WEIGHT: &str = ".weight";

/// The module beside the experts that chooses among them.
const ROUTER: &str = "router";

/// A partner that is many weights.
const EXPERTS: &str = "experts";

/// The weights that a layer of these names lacks, each with the one that shows it.
pub(super) fn lacks(names: &BTreeSet<Cow<'_, str>>, naming: Naming) -> Vec<(String, String)> {
    let table = if naming == Naming::Canonical { CANONICAL } else { MODULES };
    let weights = names.iter().filter_map(|name| Some((name, name.strip_suffix(WEIGHT)?)));
    let lack = |(name, module): (&Cow<'_, str>, &str)| {
        let own = module.rsplit('.').next().unwrap_or(module);
        let before = &module[..module.len() - own.len()];
        let (_, partners) = table.iter().find(|(known, _)| *known == own)?;
        let is_there = |partner: &str| match partner {
            EXPERTS => {
                let below = format!("{before}{EXPERTS}.");
                let range = (Bound::Included(&*below), Bound::Unbounded);
                names.range::<str, _>(range).next().is_some_and(|next| next.starts_with(&below))
            }
            _ => names.contains(&*format!("{before}{partner}{WEIGHT}")),
        };
        let usual =
            partners.first().filter(|_| !partners.iter().any(|partner| is_there(partner)))?;
        let end = if *usual == EXPERTS { "" } else { WEIGHT };
        Some((format!("{before}{usual}{end}"), name.to_string()))
    };
    let router = if naming == Naming::Canonical { lost_router(names) } else { None };
    weights.filter_map(lack).chain(router).collect()
}

/// The router that experts need, with the first weight of these.
fn lost_router(names: &BTreeSet<Cow<'_, str>>) -> Option<(String, String)> {
    let before = |name: &str| {
        let (before, _) = name.split_once("experts.")?;
        (before.is_empty() || before.ends_with('.')).then(|| before.to_owned())
    };
    let (expert, before) = names.iter().find_map(|name| Some((name, before(name)?)))?;
    let router = format!("{before}{ROUTER}{WEIGHT}");
    (!names.contains(&*router)).then(|| (router, expert.to_string()))
}

/// The norms that layers of a list of Megatron's lack, each with the module that shows it: where other layers have one around such
/// a module, or where only this layer has none at all.
pub(super) fn lost_norms(stack: &Stack<'_>) -> Vec<(u64, String, String)> {
    let is_norm =
        |name: &Cow<'_, str>| ["norm", "ln"].iter().any(|word| module(name).contains(word));
    let has_norms = |layer: &Layer<'_>| layer.names.iter().any(is_norm);
    if !stack.layers.values().any(has_norms) {
        return Vec::new();
    }
    let mut lost = Vec::new();
    for (part, norms) in NORMS {
        let layers: Vec<_> = stack.layers.iter().filter(|(_, layer)| has(layer, part)).collect();
        let own = |layer: &Layer<'_>| norms.iter().find(|norm| has(layer, &format!("{norm}.")));
        let used = layers.iter().find_map(|(_, layer)| own(layer));
        let usual = used.or(norms.first()).copied().unwrap_or_default();
        let is_fused = |name: &Cow<'_, str>| name.starts_with(part) && name.contains(FUSED);
        let lacks = |layer: &Layer<'_>| {
            let is_wanted = used.is_some() || !has_norms(layer);
            is_wanted && own(layer).is_none() && !layer.names.iter().any(is_fused)
        };
        let lacking = layers.into_iter().filter(|(_, layer)| lacks(layer));
        let beside = part.trim_end_matches('.');
        lost.extend(
            lacking.map(|(number, _)| (*number, format!("{usual}{WEIGHT}"), beside.to_owned())),
        );
    }
    lost
}

/// A norm that is a part of the linear behind it (Transformer Engine).
const FUSED: &str = "layer_norm";

fn has(layer: &Layer<'_>, front: &str) -> bool {
    let range = (Bound::Included(front), Bound::Unbounded);
    layer.names.range::<str, _>(range).next().is_some_and(|name| name.starts_with(front))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_shows_that_its_partner_is_gone() {
        let found = |names: &[&'static str]| {
            let names: BTreeSet<Cow<'_, str>> = names.iter().map(|name| (*name).into()).collect();
            lacks(&names, Naming::Canonical).into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        let [qkv, proj] =
            ["linear_qkv", "linear_proj"].map(|own| format!("self_attention.{own}.weight"));
        assert_eq!(found(&["self_attention.linear_proj.weight"]), [qkv]);
        assert_eq!(found(&["self_attention.linear_qkv.weight"]), [proj]);
        assert!(
            found(&[
                "self_attention.linear_proj.weight",
                "self_attention.linear_kv_up_proj.weight"
            ])
            .is_empty()
        );
        assert!(
            found(&[
                "mlp.experts.local_experts.*.linear_fc1.weight",
                "mlp.experts.local_experts.*.linear_fc2.weight",
                "mlp.router.weight"
            ])
            .is_empty()
        );
        assert_eq!(found(&["mlp.router.weight"]), ["mlp.experts"]);
        let grouped = ["mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"];
        assert_eq!(found(&grouped), ["mlp.router.weight"]);
        let shared =
            ["mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"];
        assert!(found(&shared).is_empty());
    }
}
