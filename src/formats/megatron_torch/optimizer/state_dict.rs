//! The `optimizer` entry of a `model_optim_rng.pt`: chained optimizers, each with param groups and, unless it is
//! distributed, states by parameter id.
//!
//! Facts from Megatron-LM v1.0 (`megatron/fp16/fp16.py`), v2.0 to 23.06 (`megatron/optimizer/optimizer.py`),
//! core_v0.5 to core_v0.19 (`megatron/core/optimizer/optimizer.py`: `FP32Optimizer`,
//! `Float16OptimizerWithFloat16Params`, `ChainedOptimizer`; `distrib_optimizer.py`: `state_dict`).

use std::collections::BTreeMap;

use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::containers::torch::{TorchFile, ValueId};
use crate::formats::nest::key_text;
use crate::formats::state::state_without;
use crate::formats::walk::Bounds;
use crate::tensor::StoredTensor;

use super::param_groups::{ParamGroup, set_weight_decay};
use super::params::UnmatchedState;

/// The states of one parameter by kind.
pub(super) type StatesByKind = BTreeMap<String, StoredTensor>;

/// One of a chain of optimizers.
#[derive(Debug, Default)]
pub(super) struct ChainedOptimizer {
    /// Its param groups; those of a distributed one list no parameters.
    pub groups: Vec<ParamGroup>,
    /// Set where the states of its parameters are in `distrib_optim.pt`.
    pub is_distributed: bool,
    /// The main parameters of each group: 32-bit copies of its 16-bit parameters.
    pub main_params: Option<Vec<Vec<StoredTensor>>>,
    /// The states by parameter id.
    pub states: BTreeMap<u64, StatesByKind>,
}

impl ChainedOptimizer {
    /// Returns whether it trains the experts that ranks do not share.
    pub(super) fn is_expert_parallel(&self) -> bool {
        self.groups.iter().any(|group| group.is_expert_parallel == Some(true))
    }

    /// Returns whether it keeps this kind of state of any parameter.
    fn has_state(&self, kind: &str) -> bool {
        self.states.values().any(|states| states.contains_key(kind))
    }

    /// Returns whether it is Muon, which keeps a momentum only.
    fn is_muon(&self) -> bool {
        self.has_state("momentum_buffer") && !self.has_state("exp_avg")
    }
}

/// Keys of the main parameters, newer and older.
const MAIN_PARAMS: [&str; 2] = ["fp32_from_fp16_params", "fp32_from_fp16"];

/// The key of a data-parallel rank's shards of them, as a distributed optimizer before 23.06 has it.
const MAIN_PARAM_SHARDS: &str = "shard_fp32_from_float16_groups";

/// Keys of tensors and parameter ids, by the thousand, which say nothing of the run.
const NO_RUN_STATE: &[&str] =
    &["state", MAIN_PARAMS[0], MAIN_PARAMS[1], MAIN_PARAM_SHARDS, "params"];

/// Keys of the torch optimizer inside Megatron's state dict.
const INNER: [&str; 2] = ["optimizer", "optimizer_state_dict"];

/// Reads the plain values of a state dict: settings of param groups, a loss scaler.
pub(super) fn run_state(torch: &TorchFile, id: ValueId) -> PlainValue {
    state_without(torch, id, NO_RUN_STATE)
}

/// Reader of the optimizers of a file.
#[derive(Debug)]
pub(super) struct StateDictReader<'a> {
    /// The file.
    pub torch: &'a TorchFile,
    /// Bounds of the walk.
    pub bounds: &'a mut Bounds,
    /// Number of entries that are no tensor of a parameter.
    pub left_out: usize,
    /// The step counter of each parameter, where it has one.
    pub steps: Vec<StoredTensor>,
}

impl StateDictReader<'_> {
    /// Reads the optimizers of a chain, in order; a lone one is a chain of one.
    ///
    /// # Errors
    /// One of them has another form than Megatron's.
    pub(super) fn optimizers(
        &mut self,
        id: ValueId,
    ) -> Result<Vec<ChainedOptimizer>, UnmatchedState> {
        let ids: Vec<ValueId> = match self.torch.values().elements(id) {
            Some(chain) => chain.to_vec(),
            None => vec![id],
        };
        let mut optimizers = Vec::new();
        let (mut groups, mut param_ids) = (0_usize, 0_usize);
        for (at, id) in ids.iter().enumerate() {
            let mut optimizer = if ids.len() == 1 {
                self.optimizer(*id)?
            } else {
                self.optimizer(*id).map_err(|error| error.within(format_args!("optimizer {at}")))?
            };
            groups += optimizer.groups.len().max(1);
            for group in &mut optimizer.groups {
                param_ids += group.param_ids.len();
                if ids.len() > 1 {
                    group.label = format!("optimizer {at}, {}", group.label);
                }
            }
            check_limit("param groups", LIMITS.param_groups, groups)?;
            check_limit("parameter ids", LIMITS.pickle_values, param_ids)?;
            optimizers.push(optimizer);
        }
        keep_distinguishing_attributes(&mut optimizers);
        Ok(optimizers)
    }

    fn optimizer(&mut self, id: ValueId) -> Result<ChainedOptimizer, UnmatchedState> {
        let values = self.torch.values();
        let mut optimizer = ChainedOptimizer::default();
        let Some(mut items) = values.mapping(id) else {
            let is_absent = values.is_none(id);
            return is_absent.then_some(optimizer).ok_or_else(|| UnmatchedState::new("not a dict"));
        };
        if items.next().is_none() {
            return Ok(optimizer);
        }
        if values.dict_get(id, MAIN_PARAM_SHARDS).is_some() {
            return Err(UnmatchedState::new(
                "a shard for each data-parallel rank, as Megatron-LM 23.04 and older wrote; \
                 load and save it with 23.06 or newer",
            ));
        }
        let inner = INNER.iter().find_map(|key| values.dict_get(id, key)).unwrap_or(id);
        let groups = values.dict_get(inner, "param_groups").and_then(|list| values.elements(list));
        let groups = groups.ok_or_else(|| UnmatchedState::new("no param_groups"))?;
        let has_ids = |group: &ValueId| values.dict_get(*group, "params").is_some();
        optimizer.is_distributed = !groups.is_empty() && !groups.iter().any(has_ids);
        for (at, group) in groups.iter().enumerate().take(LIMITS.param_groups + 1) {
            optimizer.groups.push(ParamGroup::read(values, *group, format!("group {at}"))?);
        }
        set_weight_decay(&mut optimizer.groups);
        if let Some(states) = values.dict_get(inner, "state") {
            optimizer.states = self.states(states)?;
        }
        if let Some(groups) = MAIN_PARAMS.iter().find_map(|key| values.dict_get(id, key)) {
            let groups = values.elements(groups).unwrap_or_default().iter();
            optimizer.main_params =
                Some(groups.map(|group| self.main_params(*group)).collect::<Result<_, _>>()?);
        }
        Ok(optimizer)
    }

    /// Reads the states of a torch optimizer by parameter id.
    fn states(&mut self, id: ValueId) -> Result<BTreeMap<u64, StatesByKind>, UnmatchedState> {
        let values = self.torch.values();
        let mut by_id = BTreeMap::new();
        let items = values.mapping(id).ok_or_else(|| UnmatchedState::new("state is not a dict"))?;
        for (param_id, states) in items {
            let param_id = values
                .as_u64(param_id)
                .ok_or_else(|| UnmatchedState::new("a key of state is not a parameter id"))?;
            let mut tensors = BTreeMap::new();
            for (kind, value) in values.mapping(states).into_iter().flatten() {
                let kind = key_text(self.torch, kind);
                self.bounds.enter(&kind, 0)?;
                match self.torch.tensor(value) {
                    Ok(Some(tensor)) if tensor.shape().is_empty() => {
                        self.left_out += 1;
                        self.steps.extend(kind.ends_with("step").then_some(tensor));
                    }
                    Ok(Some(tensor)) => {
                        tensors.insert(kind, tensor);
                    }
                    Ok(None) => self.left_out += 1,
                    Err(error) => {
                        let place = format_args!("parameter {param_id}: {kind}");
                        return Err(UnmatchedState::unreadable(place, error));
                    }
                }
            }
            by_id.insert(param_id, tensors);
        }
        Ok(by_id)
    }

    fn main_params(&mut self, group: ValueId) -> Result<Vec<StoredTensor>, UnmatchedState> {
        let mut tensors = Vec::new();
        for id in self.torch.values().elements(group).unwrap_or_default() {
            self.bounds.enter("", 0)?;
            match self.torch.tensor(*id) {
                Ok(Some(tensor)) => tensors.push(tensor),
                Ok(None) => return Err(UnmatchedState::new("a main parameter is not a tensor")),
                Err(error) => {
                    return Err(UnmatchedState::unreadable("a main parameter", error));
                }
            }
        }
        Ok(tensors)
    }
}

fn check_limit(what: &'static str, limit: usize, found: usize) -> Result<(), UnmatchedState> {
    if found > limit {
        let error = OverLimit::found(what, limit as u64, found as u64);
        return Err(UnmatchedState::new(error));
    }
    Ok(())
}

/// Forgets the attributes that are the same in all groups: they do not tell which parameters a group has.
fn keep_distinguishing_attributes(optimizers: &mut [ChainedOptimizer]) {
    let any = |test: fn(&ParamGroup) -> bool| {
        optimizers.iter().flat_map(|optimizer| &optimizer.groups).any(test)
    };
    let has_experts = any(|group| group.is_expert_parallel == Some(true));
    let has_decoupled_lr = any(|group| group.is_decoupled_lr == Some(true));
    // Muon trains matrices, an Adam beside it the rest.
    let has_muon = optimizers.iter().any(ChainedOptimizer::is_muon)
        && optimizers.iter().any(|optimizer| optimizer.has_state("exp_avg"));
    for optimizer in optimizers {
        let is_muon = has_muon.then(|| optimizer.is_muon());
        for group in &mut optimizer.groups {
            group.is_expert_parallel = group.is_expert_parallel.filter(|_| has_experts);
            group.is_decoupled_lr = group.is_decoupled_lr.filter(|_| has_decoupled_lr);
            group.is_muon = is_muon;
        }
    }
}
