//! Weights that never go without each other: a linear and the one that takes what it gives.
//!
//! Layers are held against each other elsewhere; this also tells what all of them lack.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Bound;

use crate::names::Naming;

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
];

const WEIGHT: &str = ".weight";

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
    weights.filter_map(lack).collect()
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
    }
}
