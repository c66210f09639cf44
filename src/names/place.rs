//! The place of a tensor in a model, as its name says it: list of layers, layer, module, expert.

use std::borrow::Cow;

use super::index::{index, split_index};

/// Components of a name that a layer's number follows.
const LISTS: [&str; 7] = ["layers", "layer", "h", "blocks", "block", "resblocks", "encoder_layers"];

/// Components that an expert's number follows (Megatron-Core, Hugging Face, DeepSpeed `moe/experts.py`).
const EXPERTS: [&str; 3] = ["local_experts", "experts", "deepspeed_experts"];

/// The part of a component before an expert's number (transformers `switch_transformers`, `nllb_moe`).
const EXPERT: &str = "expert_";

/// The first component of the names of an optimizer's tensors; the kind of state follows.
const OPTIMIZER: &str = "optimizer.";

/// The place of a tensor in a model.
///
/// ```
/// use ckptcmp::names::place::Place;
///
/// let place = Place::of("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight");
/// assert_eq!((place.list, place.layer, place.expert), ("decoder.layers", Some(3), Some(7)));
/// assert_eq!((&*place.module, place.parameter), ("mlp.experts.local_experts.*.linear_fc1", "weight"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place<'n> {
    /// The kind of an optimizer's state, such as `exp_avg`; empty for a weight.
    pub state: &'n str,
    /// The list of layers, such as `decoder.layers`; empty outside of all layers, and where a name begins with the number.
    pub list: &'n str,
    /// The number of the layer.
    pub layer: Option<u64>,
    /// The module within the layer, or the whole model outside of all; the number of an expert is `*`.
    pub module: Cow<'n, str>,
    /// The number of the expert.
    pub expert: Option<u64>,
    /// The last component: `weight`, `bias`.
    pub parameter: &'n str,
    /// The name without the layer and the last component.
    pub path: &'n str,
}

impl<'n> Place<'n> {
    /// The place that a name says.
    #[must_use]
    pub fn of(name: &'n str) -> Self {
        let state = name.strip_prefix(OPTIMIZER).and_then(|rest| rest.split_once('.'));
        let (state, name) = state.unwrap_or(("", name));
        let (list, layer, rest) = match split_layer(name) {
            Some((path, layer, rest)) => (path.trim_end_matches('.'), Some(layer), rest),
            // The layer files of a DeepSpeed pipeline: their number is the layer.
            None => match split_index(name) {
                Some((layer, rest)) => ("", Some(layer), rest),
                None => ("", None, name),
            },
        };
        let (path, parameter) = rest.rsplit_once('.').unwrap_or(("", rest));
        let (module, expert) = match split_expert(rest) {
            Some((list, expert, part)) => {
                let inner = part.rsplit_once('.').map(|(inner, _)| format!(".{inner}"));
                (Cow::Owned(format!("{list}*{}", inner.unwrap_or_default())), Some(expert))
            }
            None => (Cow::Borrowed(path), None),
        };
        Self { state, list, layer, module, expert, parameter, path }
    }
}

/// Cuts a name at the number of its layer: what is before, the number, what follows its dot.
#[must_use]
pub fn split_layer(name: &str) -> Option<(&str, u64, &str)> {
    split_at_number(name, |before| LISTS.contains(&before))
}

/// Cuts the rest of a layer's name at the number of an expert.
#[must_use]
pub fn split_expert(rest: &str) -> Option<(&str, u64, &str)> {
    let numbered = || split_at_number(rest, |before| EXPERTS.contains(&before));
    let worded = || {
        let (at, _) = rest.match_indices(EXPERT).find(|(at, _)| rest[..*at].ends_with('.'))?;
        let list = &rest[..at + EXPERT.len()];
        let (number, part) = rest[list.len()..].split_once('.')?;
        Some((list, index(number)?, part))
    };
    numbered().or_else(worded)
}

/// Cuts a name at the first number behind a component of this kind.
#[must_use]
pub fn split_at_number(name: &str, is_list: impl Fn(&str) -> bool) -> Option<(&str, u64, &str)> {
    let mut start = 0;
    let mut before = "";
    while let Some(length) = name[start..].find('.') {
        let component = &name[start..start + length];
        let behind = start + length + 1;
        if is_list(before)
            && let Some(number) = index(component)
        {
            return Some((&name[..start], number, &name[behind..]));
        }
        (before, start) = (component, behind);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_at_layers_and_experts() {
        assert_eq!(
            split_layer("decoder.layers.12.mlp.linear_fc1.weight"),
            Some(("decoder.layers.", 12, "mlp.linear_fc1.weight"))
        );
        assert_eq!(split_layer("layers.0.x"), Some(("layers.", 0, "x")));
        assert_eq!(split_layer("decoder.layers.self_attention.weight"), None);
        assert_eq!(split_layer("projector.0.weight"), None);
        let expert = |rest| split_expert(rest);
        assert_eq!(
            expert("mlp.experts.local_experts.3.linear_fc1.weight"),
            Some(("mlp.experts.local_experts.", 3, "linear_fc1.weight"))
        );
        assert_eq!(expert("mlp.experts.3.w1.weight"), Some(("mlp.experts.", 3, "w1.weight")));
        let worded = Some(("ffn.experts.expert_", 7, "fc1.weight"));
        assert_eq!(expert("ffn.experts.expert_7.fc1.weight"), worded);
        assert_eq!(expert("mlp.shared_experts.gate.weight"), None);
    }

    #[test]
    fn a_name_says_its_place() {
        let place = |name| {
            let Place { state, list, layer, module, expert, parameter, .. } = Place::of(name);
            (state, list, layer, module.into_owned(), expert, parameter)
        };
        for (name, expected) in [
            (
                "decoder.final_layernorm.weight",
                ("", "", None, "decoder.final_layernorm", None, "weight"),
            ),
            ("lm_head.weight", ("", "", None, "lm_head", None, "weight")),
            ("alone", ("", "", None, "", None, "alone")),
            ("h.11.attn.c_attn.bias", ("", "h", Some(11), "attn.c_attn", None, "bias")),
            ("h.0.scale", ("", "h", Some(0), "", None, "scale")),
            ("03.attention.dense.bias", ("", "", Some(3), "attention.dense", None, "bias")),
            (
                "optimizer.exp_avg.decoder.layers.2.mlp.linear_fc1.weight",
                ("exp_avg", "decoder.layers", Some(2), "mlp.linear_fc1", None, "weight"),
            ),
            (
                "model.layers.1.mlp.experts.5.w1.weight",
                ("", "model.layers", Some(1), "mlp.experts.*.w1", Some(5), "weight"),
            ),
        ] {
            let (state, list, layer, module, expert, parameter) = expected;
            assert_eq!(place(name), (state, list, layer, module.to_owned(), expert, parameter));
        }
    }
}
