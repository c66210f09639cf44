//! Param groups of an optimizer, and the parameters in each.
//!
//! Megatron-LM makes the groups by rules (`_get_params_for_weight_decay_optimization` of v1.0 to v2.6,
//! `get_param_groups` of 23.06, `_get_param_groups` of core_v0.6 to core_v0.19; Muon: core_v0.16
//! `core/optimizer/muon.py`); each holds its parameters in the order of the model. The rules of all versions are
//! tried; the right one gives every group as many parameters, and of the same shapes, as it has.

use crate::containers::torch::{ValueId, Values};

use super::params::{ModelParam, UnmatchedState};

/// A param group, with the attributes that tell which parameters it has; `None` where they do not.
#[derive(Debug, Clone, Default)]
pub(super) struct ParamGroup {
    /// Its place in the file, for messages.
    pub label: String,
    /// The ids of its parameters.
    pub param_ids: Vec<u64>,
    /// Set where its weights decay.
    pub has_weight_decay: Option<bool>,
    /// Set where it has the experts that ranks do not share.
    pub is_expert_parallel: Option<bool>,
    /// Set where it has embeddings and output layers, with a learning rate of their own.
    pub is_decoupled_lr: Option<bool>,
    /// Set where Muon trains it.
    pub is_muon: Option<bool>,
    wd_mult: Option<f64>,
    weight_decay: Option<f64>,
}

impl ParamGroup {
    /// Reads a param group.
    ///
    /// # Errors
    /// Its parameter ids are not a list of numbers.
    pub(super) fn read(
        values: &Values,
        id: ValueId,
        label: String,
    ) -> Result<Self, UnmatchedState> {
        let get = |key| values.dict_get(id, key);
        let number = |key| get(key).and_then(|id| values.as_f64(id));
        let flag = |key| get(key).and_then(|id| values.as_bool(id));
        let param_ids: Option<Vec<u64>> = match get("params") {
            None => Some(Vec::new()),
            Some(list) => values.sequence(list).and_then(|mut ids| {
                ids.try_fold(Vec::new(), |mut param_ids, id| {
                    param_ids.push(values.as_u64(id)?);
                    Some(param_ids)
                })
            }),
        };
        let param_ids = param_ids
            .ok_or_else(|| UnmatchedState::new("params is not a list of numbers").within(&label))?;
        // From core 0.16 on only `default_config` says that another learning rate was asked for.
        let is_decoupled_lr = match (flag("is_decoupled_lr"), flag("default_config")) {
            (Some(true), _) | (_, Some(false)) => Some(true),
            (flag, _) => flag,
        };
        Ok(Self {
            label,
            param_ids,
            has_weight_decay: None,
            is_expert_parallel: flag("is_expert_parallel"),
            is_decoupled_lr,
            is_muon: None,
            wd_mult: number("wd_mult"),
            weight_decay: number("weight_decay"),
        })
    }

    /// Returns whether a parameter belongs to it by this rule. `is_inverted` says that the groups with decay are
    /// those that claim to have none.
    fn takes(&self, param: &ModelParam, rule: WeightDecayRule, is_inverted: bool) -> bool {
        let agrees = |attribute: Option<bool>, is: bool| attribute.is_none_or(|set| set == is);
        let is_muon = param.weight.shape().len() == 2 && !param.is_embedding_or_output();
        !self.param_ids.is_empty()
            && agrees(self.has_weight_decay, rule.applies_to(param) != is_inverted)
            && agrees(self.is_expert_parallel, param.is_expert())
            && agrees(self.is_decoupled_lr, param.is_embedding_or_output())
            && agrees(self.is_muon, is_muon)
    }
}

/// Sets which groups of an optimizer decay: by `wd_mult` (2022 on), else by the decay itself, and where that is off, by
/// their order: Megatron-LM v1.0 to v2.6 has two groups, the second without decay.
pub(super) fn set_weight_decay(groups: &mut [ParamGroup]) {
    let any_decays =
        groups.iter().any(|group| group.weight_decay.is_some_and(|decay| decay != 0.0));
    let are_two = groups.len() == 2;
    for (at, group) in groups.iter_mut().enumerate() {
        group.has_weight_decay = match (group.wd_mult, group.weight_decay) {
            (Some(factor), _) => Some(factor != 0.0),
            (None, Some(decay)) if any_decays => Some(decay != 0.0),
            _ if are_two => Some(at == 0),
            _ => None,
        };
    }
}

/// A version's choice of the weights that decay.
#[derive(Debug, Clone, Copy)]
enum WeightDecayRule {
    /// All but biases and other tensors of one dimension.
    Matrices,
    /// Matrices without embeddings: core 0.15, `default_skip_embedding_weight_decay`.
    SkipEmbeddings,
    /// Matrices and the norms of queries and keys: core 0.16, `apply_wd_to_qk_layernorm`.
    WithQkLayernorm,
}

impl WeightDecayRule {
    const ALL: [Self; 3] = [Self::Matrices, Self::SkipEmbeddings, Self::WithQkLayernorm];

    fn applies_to(self, param: &ModelParam) -> bool {
        let name = &param.name;
        let is_matrix = !name.ends_with(".bias") && param.weight.shape().len() != 1;
        match self {
            Self::Matrices => is_matrix,
            Self::SkipEmbeddings => is_matrix && !name.contains("embedding"),
            Self::WithQkLayernorm => {
                is_matrix || name.contains("q_layernorm.") || name.contains("k_layernorm.")
            }
        }
    }
}

/// Gives every group its parameters: indices into `params`, in order. `check` compares those of one group with its
/// tensors.
///
/// # Errors
/// No rule fits, or a parameter may belong to several groups.
pub(super) fn assign(
    params: &[ModelParam],
    groups: &[&ParamGroup],
    check: impl Fn(usize, &[usize]) -> Result<(), UnmatchedState>,
) -> Result<Vec<Vec<usize>>, UnmatchedState> {
    let mut first_error = None;
    // Before core 0.14 every pipeline stage orders its groups by its own parameters, but loads their attributes from a
    // distributed checkpoint as the first stage stored them: then only the parameters tell which group decays.
    for is_inverted in [false, true] {
        let mut fitting: Option<Vec<Vec<usize>>> = None;
        for rule in WeightDecayRule::ALL {
            let assigned = by_rule(params, groups, rule, is_inverted).and_then(|assigned| {
                let mut members = assigned.iter().enumerate();
                members.try_for_each(|(at, members)| check(at, members)).map(|()| assigned)
            });
            match assigned {
                Ok(assigned) if fitting.as_ref().is_some_and(|other| *other != assigned) => {
                    let reason = "its param groups fit the parameters in more than one way";
                    return Err(UnmatchedState::new(reason));
                }
                Ok(assigned) => fitting = Some(assigned),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        if let Some(assigned) = fitting {
            return Ok(assigned);
        }
    }
    Err(first_error.unwrap_or_else(|| UnmatchedState::new("no param groups")))
}

fn by_rule(
    params: &[ModelParam],
    groups: &[&ParamGroup],
    rule: WeightDecayRule,
    is_inverted: bool,
) -> Result<Vec<Vec<usize>>, UnmatchedState> {
    let mut assigned = vec![Vec::new(); groups.len()];
    for (index, param) in params.iter().enumerate() {
        let mut takers =
            groups.iter().enumerate().filter(|(_, group)| group.takes(param, rule, is_inverted));
        match (takers.next(), takers.next()) {
            (Some((at, _)), None) => assigned[at].push(index),
            (None, _) => {
                return Err(UnmatchedState::new(format_args!("no group is for {}", param.name)));
            }
            (Some((_, one)), Some((_, other))) => {
                let (one, other) = (&one.label, &other.label);
                let reason = format!("{} may belong to {one} or {other}", param.name);
                return Err(UnmatchedState::new(reason));
            }
        }
    }
    Ok(assigned)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::storage::{FileSet, Region};
    use crate::tensor::{ByteOrder, StoredTensor};

    fn params(names: &[(&str, &[u64])]) -> Vec<ModelParam> {
        let mut files = FileSet::default();
        let file = files.add(std::path::Path::new("Cargo.toml")).unwrap();
        let storage = Region { file, offset: 0, len: 1 << 20 };
        let param = |(name, shape): &(&str, &[u64])| {
            let (dtype, order) = (Dtype::BFloat16, ByteOrder::Little);
            let weight = StoredTensor::contiguous(dtype, shape.to_vec(), storage, order).unwrap();
            ModelParam { chunk: 0, name: (*name).into(), weight }
        };
        names.iter().map(param).collect()
    }

    fn gpt() -> Vec<ModelParam> {
        params(&[
            ("embedding.word_embeddings.weight", &[8, 4]),
            ("decoder.layers.0.input_layernorm.weight", &[4]),
            ("decoder.layers.0.self_attention.linear_qkv.weight", &[12, 4]),
            ("decoder.layers.0.self_attention.linear_qkv.bias", &[12]),
            ("decoder.layers.0.self_attention.q_layernorm.weight", &[2]),
            ("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", &[6, 4]),
            ("output_layer.weight", &[8, 4]),
        ])
    }

    fn group(label: &str, count: u64) -> ParamGroup {
        let param_ids = (0..count).collect();
        ParamGroup { label: label.to_owned(), param_ids, ..ParamGroup::default() }
    }

    fn assigned(groups: &[ParamGroup]) -> Result<Vec<Vec<usize>>, UnmatchedState> {
        let groups: Vec<&ParamGroup> = groups.iter().collect();
        let check = |at: usize, members: &[usize]| {
            let is_right = groups[at].param_ids.len() == members.len();
            is_right.then_some(()).ok_or_else(|| {
                UnmatchedState::new(format_args!("{} has another number", groups[at].label))
            })
        };
        assign(&gpt(), &groups, check)
    }

    #[test]
    fn biases_and_norms_do_not_decay() {
        let with = |decay| ParamGroup { weight_decay: Some(decay), ..group("", 0) };
        let told = |decays: [f64; 2]| {
            let mut groups = decays.map(with);
            set_weight_decay(&mut groups);
            groups.map(|group| group.has_weight_decay)
        };
        assert_eq!(told([0.1, 0.0]), [Some(true), Some(false)]);
        assert_eq!(told([0.0, 0.1]), [Some(false), Some(true)]);
        // Where nothing decays, the order of the first versions tells.
        assert_eq!(told([0.0, 0.0]), [Some(true), Some(false)]);
        let [decay, none] = [("0", 4, true), ("1", 3, false)].map(|(at, count, decays)| {
            ParamGroup { has_weight_decay: Some(decays), ..group(at, count) }
        });
        let found = assigned(&[none, decay]).unwrap();
        assert_eq!(found, [vec![1, 3, 4], vec![0, 2, 5, 6]]);
    }

    #[test]
    fn norms_of_queries_may_decay_and_embeddings_may_not() {
        let of = |counts: [u64; 2]| {
            let group = |at: usize| ParamGroup {
                has_weight_decay: Some(at == 0),
                ..group(&at.to_string(), counts[at])
            };
            assigned(&[group(0), group(1)])
        };
        assert_eq!(of([5, 2]).unwrap()[1], [1, 3]);
        assert_eq!(of([3, 4]).unwrap()[1], [0, 1, 3, 4]);
        assert_eq!(of([6, 1]).unwrap_err().reason(), "0 has another number");
    }

    #[test]
    fn groups_with_the_attributes_of_another_stage_are_told_by_their_parameters() {
        let flat_first = [vec![1, 3, 4], vec![0, 2, 5, 6]];
        let check = |at: usize, members: &[usize]| {
            (members == flat_first[at])
                .then_some(())
                .ok_or_else(|| UnmatchedState::new("other shapes"))
        };
        let [none, decay] = [true, false]
            .map(|decays| ParamGroup { has_weight_decay: Some(decays), ..group("", 0) });
        let groups = [
            ParamGroup { param_ids: vec![0, 1, 2], ..none },
            ParamGroup { param_ids: vec![3, 4, 5, 6], ..decay },
        ];
        assert_eq!(assign(&gpt(), &groups.each_ref(), check).unwrap(), flat_first);
    }

    #[test]
    fn experts_embeddings_and_muon_have_groups_of_their_own() {
        let dense = ParamGroup {
            is_expert_parallel: Some(false),
            is_muon: Some(true),
            ..group("dense", 1)
        };
        let expert = ParamGroup {
            is_expert_parallel: Some(true),
            is_muon: Some(true),
            ..group("expert", 1)
        };
        let rest =
            ParamGroup { is_muon: Some(false), is_decoupled_lr: Some(false), ..group("rest", 3) };
        let embeddings = ParamGroup { is_decoupled_lr: Some(true), ..group("embeddings", 2) };
        let found = assigned(&[dense, expert, rest, embeddings]).unwrap();
        assert_eq!(found, [vec![2], vec![5], vec![1, 3, 4], vec![0, 6]]);
    }

    #[test]
    fn groups_that_nothing_tells_apart_are_no_answer() {
        let error = assigned(&[group("group 0", 4), group("group 1", 3)]).unwrap_err();
        let name = "embedding.word_embeddings.weight";
        assert_eq!(error.reason(), format!("{name} may belong to group 0 or group 1"));
        let experts = ParamGroup { is_expert_parallel: Some(true), ..group("group 0", 7) };
        assert_eq!(assigned(&[experts]).unwrap_err().reason(), format!("no group is for {name}"));
    }
}
