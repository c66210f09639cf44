//! Which parameters a group of an optimizer holds.
//!
//! Megatron-LM makes the groups by rules (`_get_params_for_weight_decay_optimization` of v1.0 to v2.6, `get_param_groups`
//! of 23.06, `_get_param_groups` of core_v0.6 to core_v0.19; Muon: core_v0.16 `core/optimizer/muon.py`); each holds its
//! parameters in the order of the model. The rules that the versions follow are tried, and one that does not give every
//! group as many parameters, and of the same shapes, as it has is none.

use crate::containers::torch::{ValueId, Values};

use super::optimizer::Param;

/// A group and what it says of the parameters in it; `None` where that tells nothing.
#[derive(Debug, Clone)]
pub(super) struct Group {
    /// Where it is, for whoever reads a problem.
    pub at: String,
    /// The numbers of its parameters.
    pub params: Vec<u64>,
    /// Their weights decay.
    pub decays: Option<bool>,
    /// They belong to experts that ranks do not share.
    pub is_expert: Option<bool>,
    /// They have a learning rate of their own: embeddings and output layers.
    pub is_decoupled: Option<bool>,
    /// Muon trains them.
    pub is_muon: Option<bool>,
    wd_mult: Option<f64>,
    weight_decay: Option<f64>,
}

impl Group {
    /// Reads a group.
    ///
    /// # Errors
    /// Its parameters are no numbers.
    pub(super) fn read(values: &Values, id: ValueId, at: String) -> Result<Self, String> {
        let get = |key| values.dict_get(id, key);
        let number = |key| get(key).and_then(|id| values.as_f64(id));
        let flag = |key| get(key).and_then(|id| values.as_bool(id));
        let numbers = match get("params") {
            None => Some(Vec::new()),
            Some(list) => values.sequence(list).and_then(|mut list| {
                list.try_fold(Vec::new(), |mut numbers, id| {
                    numbers.push(values.as_u64(id)?);
                    Some(numbers)
                })
            }),
        };
        let params = numbers.ok_or_else(|| format!("{at}: its parameters are no numbers"))?;
        // From core 0.16 on only this says that another learning rate was asked for.
        let is_decoupled = match (flag("is_decoupled_lr"), flag("default_config")) {
            (Some(true), _) | (_, Some(false)) => Some(true),
            (says, _) => says,
        };
        Ok(Self {
            at,
            params,
            decays: None,
            is_expert: flag("is_expert_parallel"),
            is_decoupled,
            is_muon: None,
            wd_mult: number("wd_mult"),
            weight_decay: number("weight_decay"),
        })
    }

    fn takes(&self, param: &Param, rule: Decay, is_mislabelled: bool) -> bool {
        let is = |says: Option<bool>, is: bool| says.is_none_or(|says| says == is);
        let is_muon = param.weight.shape().len() == 2 && !param.is_embedding();
        !self.params.is_empty()
            && is(self.decays, rule.holds(param) != is_mislabelled)
            && is(self.is_expert, param.is_expert())
            && is(self.is_decoupled, param.is_embedding())
            && is(self.is_muon, is_muon)
    }
}

/// Finds out which groups of an optimizer decay: by `wd_mult` (2022 on), else by the decay itself, and where that is off,
/// by their order: Megatron-LM v1.0 to v2.6 has two, the second without.
pub(super) fn tell_decay(groups: &mut [Group]) {
    let some_decay =
        groups.iter().any(|group| group.weight_decay.is_some_and(|decay| decay != 0.0));
    let are_two = groups.len() == 2;
    for (at, group) in groups.iter_mut().enumerate() {
        group.decays = match (group.wd_mult, group.weight_decay) {
            (Some(factor), _) => Some(factor != 0.0),
            (None, Some(decay)) if some_decay => Some(decay != 0.0),
            _ if are_two => Some(at == 0),
            _ => None,
        };
    }
}

/// Which weights decay.
#[derive(Debug, Clone, Copy)]
enum Decay {
    /// All but biases and what has one dimension.
    Matrices,
    /// Nor embeddings: core 0.15, `default_skip_embedding_weight_decay`.
    NoEmbeddings,
    /// The norms of queries and keys do too: core 0.16, `apply_wd_to_qk_layernorm`.
    QueryKeyNorms,
}

impl Decay {
    const ALL: [Self; 3] = [Self::Matrices, Self::NoEmbeddings, Self::QueryKeyNorms];

    fn holds(self, param: &Param) -> bool {
        let name = &param.name;
        let is_flat = name.ends_with(".bias") || param.weight.shape().len() == 1;
        match self {
            Self::Matrices => !is_flat,
            Self::NoEmbeddings => !is_flat && !name.contains("embedding"),
            Self::QueryKeyNorms => {
                !is_flat || name.contains("q_layernorm.") || name.contains("k_layernorm.")
            }
        }
    }
}

/// Gives every group its parameters: indices into `params`, in order. `fits` says what is wrong with those of one group.
///
/// # Errors
/// No rule fits, or a parameter may belong to several groups.
pub(super) fn assign(
    params: &[Param],
    groups: &[&Group],
    fits: impl Fn(usize, &[usize]) -> Result<(), String>,
) -> Result<Vec<Vec<usize>>, String> {
    let mut first_error = None;
    let mut found: Option<Vec<Vec<usize>>> = None;
    // Before core 0.14 each stage of a pipeline has its groups in the order in which it comes by them, but takes over from a
    // distributed checkpoint what the first stage says of its own: only the parameters tell then what a group is.
    let labels =
        [false, true].into_iter().flat_map(|are_wrong| Decay::ALL.map(|rule| (rule, are_wrong)));
    for (rule, are_wrong) in labels {
        if are_wrong && found.is_some() {
            break;
        }
        let assigned = by_rule(params, groups, rule, are_wrong).and_then(|assigned| {
            let mut members = assigned.iter().enumerate();
            members.try_for_each(|(at, members)| fits(at, members)).map(|()| assigned)
        });
        match (assigned, &found) {
            (Ok(assigned), None) => found = Some(assigned),
            (Ok(assigned), Some(other)) if assigned != *other => {
                return Err("its groups fit the parameters in more than one way".to_owned());
            }
            (Ok(_), Some(_)) => {}
            (Err(error), _) => first_error = first_error.or(Some(error)),
        }
    }
    found.ok_or_else(|| first_error.unwrap_or_default())
}

fn by_rule(
    params: &[Param],
    groups: &[&Group],
    rule: Decay,
    are_wrong: bool,
) -> Result<Vec<Vec<usize>>, String> {
    let mut assigned = vec![Vec::new(); groups.len()];
    for (index, param) in params.iter().enumerate() {
        let mut takers =
            groups.iter().enumerate().filter(|(_, group)| group.takes(param, rule, are_wrong));
        match (takers.next(), takers.next()) {
            (Some((at, _)), None) => assigned[at].push(index),
            (None, _) => return Err(format!("no group is for {}", param.name)),
            (Some((_, one)), Some((_, other))) => {
                let (one, other) = (&one.at, &other.at);
                return Err(format!("{} may belong to {one} or {other}", param.name));
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

    fn params(names: &[(&str, &[u64])]) -> Vec<Param> {
        let mut files = FileSet::default();
        let file = files.add(std::path::Path::new("Cargo.toml")).unwrap();
        let storage = Region { file, offset: 0, len: 1 << 20 };
        let param = |(name, shape): &(&str, &[u64])| {
            let (dtype, order) = (Dtype::BFloat16, ByteOrder::Little);
            let weight = StoredTensor::contiguous(dtype, shape.to_vec(), storage, order).unwrap();
            Param { chunk: 0, name: (*name).into(), weight }
        };
        names.iter().map(param).collect()
    }

    fn gpt() -> Vec<Param> {
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

    fn group(at: &str, count: u64) -> Group {
        Group {
            at: at.to_owned(),
            params: (0..count).collect(),
            decays: None,
            is_expert: None,
            is_decoupled: None,
            is_muon: None,
            wd_mult: None,
            weight_decay: None,
        }
    }

    fn assigned(groups: &[Group]) -> Result<Vec<Vec<usize>>, String> {
        let groups: Vec<&Group> = groups.iter().collect();
        let fits = |at: usize, members: &[usize]| {
            let is_right = groups[at].params.len() == members.len();
            is_right.then_some(()).ok_or_else(|| format!("{} has another number", groups[at].at))
        };
        assign(&gpt(), &groups, fits)
    }

    #[test]
    fn biases_and_norms_do_not_decay() {
        let with = |decay| Group { weight_decay: Some(decay), ..group("", 0) };
        let told = |decays: [f64; 2]| {
            let mut groups = decays.map(with);
            tell_decay(&mut groups);
            groups.map(|group| group.decays)
        };
        assert_eq!(told([0.1, 0.0]), [Some(true), Some(false)]);
        assert_eq!(told([0.0, 0.1]), [Some(false), Some(true)]);
        // Where nothing decays, the order of the first versions tells.
        assert_eq!(told([0.0, 0.0]), [Some(true), Some(false)]);
        let [decay, none] = [("0", 4, true), ("1", 3, false)]
            .map(|(at, count, decays)| Group { decays: Some(decays), ..group(at, count) });
        let found = assigned(&[none, decay]).unwrap();
        assert_eq!(found, [vec![1, 3, 4], vec![0, 2, 5, 6]]);
    }

    #[test]
    fn norms_of_queries_may_decay_and_embeddings_may_not() {
        let of = |counts: [u64; 2]| {
            let group =
                |at: usize| Group { decays: Some(at == 0), ..group(&at.to_string(), counts[at]) };
            assigned(&[group(0), group(1)])
        };
        assert_eq!(of([5, 2]).unwrap()[1], [1, 3]);
        assert_eq!(of([3, 4]).unwrap()[1], [0, 1, 3, 4]);
        assert_eq!(of([6, 1]).unwrap_err(), "0 has another number");
    }

    #[test]
    fn groups_that_say_of_themselves_what_another_stage_does_are_told_by_their_parameters() {
        let flat_first = [vec![1, 3, 4], vec![0, 2, 5, 6]];
        let fits = |at: usize, members: &[usize]| {
            (members == flat_first[at]).then_some(()).ok_or_else(|| "other shapes".to_owned())
        };
        let [none, decay] =
            [true, false].map(|decays| Group { decays: Some(decays), ..group("", 0) });
        let groups =
            [Group { params: vec![0, 1, 2], ..none }, Group { params: vec![3, 4, 5, 6], ..decay }];
        assert_eq!(assign(&gpt(), &groups.each_ref(), fits).unwrap(), flat_first);
    }

    #[test]
    fn experts_embeddings_and_muon_have_groups_of_their_own() {
        let dense = Group { is_expert: Some(false), is_muon: Some(true), ..group("dense", 1) };
        let expert = Group { is_expert: Some(true), is_muon: Some(true), ..group("expert", 1) };
        let rest = Group { is_muon: Some(false), is_decoupled: Some(false), ..group("rest", 3) };
        let embeddings = Group { is_decoupled: Some(true), ..group("embeddings", 2) };
        let found = assigned(&[dense, expert, rest, embeddings]).unwrap();
        assert_eq!(found, [vec![2], vec![5], vec![1, 3, 4], vec![0, 6]]);
    }

    #[test]
    fn groups_that_nothing_tells_apart_are_no_answer() {
        let error = assigned(&[group("group 0", 4), group("group 1", 3)]).unwrap_err();
        let name = "embedding.word_embeddings.weight";
        assert_eq!(error, format!("{name} may belong to group 0 or group 1"));
        let experts = Group { is_expert: Some(true), ..group("group 0", 7) };
        assert_eq!(assigned(&[experts]).unwrap_err(), format!("no group is for {name}"));
    }
}
