//! States by parameter id -> states by parameter name.
//!
//! A torch optimizer numbers its parameters group by group and stores no names. [`super::param_groups`] says which
//! parameters a group has; the shapes of its states and main parameters must agree.

use std::collections::BTreeMap;

use crate::names::megatron::optimizer_state_name;
use crate::tensor::StoredTensor;

use super::param_groups::{ParamGroup, assign};
use super::params::{ModelParam, ParamState, ParamStates, UnmatchedState};
use super::state_dict::{ChainedOptimizer, StatesByKind};

/// A param group with the tensors of its parameters.
struct StoredGroup<'a> {
    group: &'a ParamGroup,
    main_params: Option<&'a [StoredTensor]>,
    /// The states of the whole optimizer by parameter id.
    states: &'a BTreeMap<u64, StatesByKind>,
}

/// Names the states of optimizers that number their parameters.
///
/// # Errors
/// The groups, or the shapes of their tensors, do not fit the parameters.
pub(super) fn states_by_name(
    optimizers: &[ChainedOptimizer],
    params: &[ModelParam],
) -> Result<ParamStates, UnmatchedState> {
    let mut groups = Vec::new();
    for optimizer in optimizers {
        for (at, group) in optimizer.groups.iter().enumerate() {
            let main_params = match &optimizer.main_params {
                None => None,
                Some(lists) => Some(lists.get(at).map(Vec::as_slice).ok_or_else(|| {
                    UnmatchedState::new("no list of main parameters").within(&group.label)
                })?),
            };
            groups.push(StoredGroup { group, main_params, states: &optimizer.states });
        }
    }
    let check = |at: usize, members: &[usize]| {
        let members: Vec<&ModelParam> = members.iter().map(|&at| &params[at]).collect();
        let stored: &StoredGroup = &groups[at];
        stored.check(&members).map_err(|error| error.within(&stored.group.label))
    };
    let param_groups: Vec<&ParamGroup> = groups.iter().map(|stored| stored.group).collect();
    let assigned = assign(params, &param_groups, check)?;
    let mut named = ParamStates::new();
    for (stored, members) in groups.iter().zip(assigned) {
        stored.add_states(members.into_iter().map(|at| &params[at]), &mut named);
    }
    Ok(named)
}

impl StoredGroup<'_> {
    /// Checks that every tensor of the group has the shape of its parameter, if these are its parameters.
    fn check(&self, members: &[&ModelParam]) -> Result<(), UnmatchedState> {
        let ids = &self.group.param_ids;
        if ids.len() != members.len() {
            let (found, wanted) = (ids.len(), members.len());
            let reason = format!("{found} parameters, but the model has {wanted} for it");
            return Err(UnmatchedState::new(reason));
        }
        for (id, param) in ids.iter().zip(members) {
            for (kind, tensor) in self.states.get(id).into_iter().flatten() {
                check_shape(kind, tensor, param)?;
            }
        }
        let Some(main_params) = self.main_params else { return Ok(()) };
        let members: Vec<&&ModelParam> =
            members.iter().filter(|param| param.has_main_param()).collect();
        if main_params.len() != members.len() {
            let (found, wanted) = (main_params.len(), members.len());
            let reason = format!("{found} main parameters for {wanted} parameters of 16 bits");
            return Err(UnmatchedState::new(reason));
        }
        let mut pairs = main_params.iter().zip(members);
        pairs.try_for_each(|(tensor, param)| check_shape("main parameter", tensor, param))
    }

    /// Adds the states of the group under the names of its parameters.
    fn add_states<'p>(
        &self,
        members: impl Iterator<Item = &'p ModelParam>,
        named: &mut ParamStates,
    ) {
        let mut add = |kind: &str, param: &ModelParam, tensor: &StoredTensor| {
            let states = named.entry(optimizer_state_name(kind).to_owned()).or_default();
            states.push(ParamState::of(param, tensor.clone()));
        };
        let mut main_params = self.main_params.into_iter().flatten();
        for (id, param) in self.group.param_ids.iter().zip(members) {
            for (kind, tensor) in self.states.get(id).into_iter().flatten() {
                add(kind, param, tensor);
            }
            if param.has_main_param()
                && let Some(tensor) = main_params.next()
            {
                add("fp32_param", param, tensor);
            }
        }
    }
}

fn check_shape(
    kind: &str,
    tensor: &StoredTensor,
    param: &ModelParam,
) -> Result<(), UnmatchedState> {
    let (found, wanted) = (tensor.shape(), param.weight.shape());
    if found != wanted {
        let reason = format!("{kind} of shape {found:?}, but {} has {wanted:?}", param.name);
        return Err(UnmatchedState::new(reason));
    }
    Ok(())
}
