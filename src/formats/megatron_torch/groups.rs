//! Which parameters a group of an optimizer holds.
//!
//! Megatron-LM makes the groups by rules (`_get_params_for_weight_decay_optimization` of v1.0 to v2.6, `get_param_groups`
//! of 23.06, `_get_param_groups` of core_v0.6 to core_v0.19; Muon: core_v0.16 `core/optimizer/muon.py`); each holds its
//! parameters in the order of the model. The rules that the versions follow are tried, and one that does not give every
//! group as many parameters, and of the same shapes, as it has is none.

use crate::torch::{ValueId, Values};

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

    fn takes(&self, param: &Param, rule: Decay) -> bool {
        let is = |says: Option<bool>, is: bool| says.is_none_or(|says| says == is);
        let is_muon = param.weight.shape().len() == 2 && !param.is_embedding();
        !self.params.is_empty()
            && is(self.decays, rule.holds(param))
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
    for rule in Decay::ALL {
        let assigned = by_rule(params, groups, rule).and_then(|assigned| {
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

fn by_rule(params: &[Param], groups: &[&Group], rule: Decay) -> Result<Vec<Vec<usize>>, String> {
    let mut assigned = vec![Vec::new(); groups.len()];
    for (index, param) in params.iter().enumerate() {
        let mut takers = groups.iter().enumerate().filter(|(_, group)| group.takes(param, rule));
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
