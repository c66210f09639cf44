//! What one rank's optimizer keeps of each parameter, under the parameter's stored name.
//!
//! An optimizer numbers its parameters group by group, or packs them into flat buffers; no names are stored.
//! [`super::groups`] and [`super::distrib_optim`] find them again, by the order of the model and Megatron's own rules.
//!
//! Facts from Megatron-LM v1.0 (`megatron/fp16/fp16.py`), v2.0 to 23.06 (`megatron/optimizer/optimizer.py`), core_v0.5 to
//! core_v0.19 (`megatron/core/optimizer/optimizer.py`: `FP32Optimizer`, `Float16OptimizerWithFloat16Params`,
//! `ChainedOptimizer`; `distrib_optimizer.py`: `state_dict`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::base::dtype::Dtype;
use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::containers::torch::{TorchFile, ValueId};
use crate::formats::state::state_without;
use crate::formats::torch_file::key_text;
use crate::formats::walk::{Bounds, joined};
use crate::names::megatron::is_trained;
use crate::tensor::StoredTensor;

use super::groups::{Group, assign, tell_decay};

/// Tensors of one rank by model chunk, as the file lists them.
pub(super) type Chunks = BTreeMap<u64, Vec<(Arc<str>, StoredTensor)>>;

/// A parameter that is trained.
#[derive(Debug, Clone)]
pub(super) struct Param {
    /// Its model chunk.
    pub chunk: u64,
    /// The name in the file.
    pub name: Arc<str>,
    /// The weight.
    pub weight: StoredTensor,
}

impl Param {
    /// Whether it belongs to a routed expert.
    pub(super) fn is_expert(&self) -> bool {
        self.name.contains(".experts.") || self.name.contains(".local_experts.")
    }

    /// Whether it is an embedding or an output layer (`is_embedding_or_output_parameter`).
    pub(super) fn is_embedding(&self) -> bool {
        ["word_embeddings.weight", "word_embeddings_for_head.weight", "output_layer.weight"]
            .iter()
            .any(|end| self.name.ends_with(end))
    }

    /// Whether the optimizer keeps a copy of it in 32 bits.
    fn has_master(&self) -> bool {
        matches!(self.weight.dtype(), Dtype::Float16 | Dtype::BFloat16)
    }
}

/// The parameters of a rank in the order of `named_parameters`: that of the state dict, for both follow the modules.
pub(super) fn params_in_order(chunks: &Chunks) -> Vec<Param> {
    let mut params: Vec<Param> = Vec::new();
    for (&chunk, tensors) in chunks {
        let start = params.len();
        let mut first_at: HashMap<(u64, u64), usize> = HashMap::new();
        for (name, weight) in tensors.iter().filter(|(name, _)| is_trained(name)) {
            // A module under two names, as T5's output layer is, has its parameters once.
            let place = (weight.storage().offset, weight.storage_offset());
            let first = *first_at.entry(place).or_insert(params.len());
            let is_again = |first: &Param| {
                let is_part = name.ends_with(&*first.name) || first.name.ends_with(&**name);
                is_part && first.weight == *weight
            };
            if !params.get(first).is_some_and(is_again) {
                params.push(Param { chunk, name: Arc::clone(name), weight: weight.clone() });
            }
        }
        // megatron.legacy makes the copy of the embeddings before the heads, and stores it behind them.
        let at = |names: [&str; 2]| {
            let is_one = |param: &Param| names.iter().any(|name| param.name.starts_with(name));
            params.iter().skip(start).position(is_one).map(|at| at + start)
        };
        let copy = at(["word_embeddings_for_head.", "word_embeddings_for_head."]);
        if let (Some(head), Some(copy)) = (at(["lm_head.", "binary_head."]), copy)
            && head < copy
        {
            params[head..=copy].rotate_right(1);
        }
    }
    params
}

/// What an optimizer keeps of one parameter.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    /// The parameter's model chunk.
    pub chunk: u64,
    /// The parameter's stored name.
    pub name: Arc<str>,
    /// As large as the parameter.
    pub tensor: StoredTensor,
}

/// What is kept of all parameters, by state: `exp_avg`, `fp32_param`, ...
pub(super) type States = BTreeMap<String, Vec<Kept>>;

/// The name of a state, whatever the optimizer calls it.
pub(in crate::formats) fn state_name(stored: &str) -> &str {
    match stored {
        "param" | "master_param" => "fp32_param",
        other => other,
    }
}

/// One of a chain of optimizers.
#[derive(Debug)]
pub(super) struct ChainedOptimizer {
    /// Its groups; a distributed one keeps no parameters in them.
    pub groups: Vec<Group>,
    /// It keeps the states of its parameters in buffers elsewhere.
    pub is_distributed: bool,
    /// By group, the 32-bit copies of its 16-bit parameters.
    pub masters: Option<Vec<Vec<StoredTensor>>>,
    /// The states by index.
    pub states: BTreeMap<u64, BTreeMap<String, StoredTensor>>,
}

impl ChainedOptimizer {
    /// It trains the experts that ranks do not share.
    pub(super) fn is_expert(&self) -> bool {
        self.groups.iter().any(|group| group.is_expert == Some(true))
    }

    /// It keeps this state of some parameter.
    pub(super) fn has(&self, state: &str) -> bool {
        self.states.values().any(|states| states.contains_key(state))
    }
}

/// Where 32-bit copies are, newer and older.
const MASTERS: [&str; 2] = ["fp32_from_fp16_params", "fp32_from_fp16"];

/// Where they are in the parts of a distributed optimizer before 23.06.
const SHARDS: &str = "shard_fp32_from_float16_groups";

/// Where an optimizer keeps tensors, by the thousand, and the numbers of its parameters, which say nothing of the run.
const NO_STATE: &[&str] = &["state", MASTERS[0], MASTERS[1], SHARDS, "params"];

/// Keys of the optimizer inside another one's state dict.
const INNER: [&str; 2] = ["optimizer", "optimizer_state_dict"];

/// Groups of all the optimizers of a rank: far more than any run has.
const MOST_GROUPS: usize = 4096;

/// What an optimizer says of itself.
pub(super) fn plain_state(torch: &TorchFile, id: ValueId) -> PlainValue {
    state_without(torch, id, NO_STATE)
}

/// Reads the optimizers of a file.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    /// The file.
    pub torch: &'a TorchFile,
    /// What the walk may cost.
    pub bounds: &'a mut Bounds,
    /// Entries that are no tensor of a parameter.
    pub left_out: usize,
    /// The steps of each parameter, where they are counted.
    pub steps: Vec<StoredTensor>,
}

impl Reader<'_> {
    /// The optimizers of a chain, in order; a lone one is a chain of one.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub(super) fn links(&mut self, id: ValueId) -> Result<Vec<ChainedOptimizer>, String> {
        let ids: Vec<ValueId> = match self.torch.values().elements(id) {
            Some(links) => links.to_vec(),
            None => vec![id],
        };
        let mut links: Vec<ChainedOptimizer> = Vec::new();
        for (at, id) in ids.iter().enumerate() {
            let prefix = if ids.len() > 1 { format!("optimizer {at}, ") } else { String::new() };
            links.push(self.link(*id, &prefix)?);
            let groups = links.iter().map(|link| link.groups.len().max(1)).sum::<usize>();
            let numbers =
                links.iter().flat_map(|link| &link.groups).map(|group| group.params.len());
            if groups > MOST_GROUPS || numbers.sum::<usize>() > LIMITS.pickle_values {
                return Err("more groups than any run has".to_owned());
            }
        }
        tell_apart(&mut links);
        Ok(links)
    }

    fn link(&mut self, id: ValueId, prefix: &str) -> Result<ChainedOptimizer, String> {
        let values = self.torch.values();
        let mut link = ChainedOptimizer {
            groups: Vec::new(),
            is_distributed: false,
            masters: None,
            states: BTreeMap::new(),
        };
        let Some(mut items) = values.mapping(id) else {
            return if values.is_none(id) { Ok(link) } else { Err(format!("{prefix}no dict")) };
        };
        if items.next().is_none() {
            return Ok(link);
        }
        if values.dict_get(id, SHARDS).is_some() {
            return Err(format!(
                "{prefix}a part for every data parallel rank, as Megatron-LM 23.04 and older wrote; \
                 load and save it with 23.06 or newer"
            ));
        }
        let inner = INNER.iter().find_map(|key| values.dict_get(id, key)).unwrap_or(id);
        let groups = values.dict_get(inner, "param_groups").and_then(|list| values.elements(list));
        let groups = groups.ok_or_else(|| format!("{prefix}no param_groups"))?;
        let is_numbered = |group: &ValueId| values.dict_get(*group, "params").is_some();
        link.is_distributed = !groups.is_empty() && !groups.iter().any(is_numbered);
        for (at, group) in groups.iter().enumerate().take(MOST_GROUPS + 1) {
            link.groups.push(Group::read(values, *group, format!("{prefix}group {at}"))?);
        }
        tell_decay(&mut link.groups);
        if let Some(states) = values.dict_get(inner, "state") {
            link.states = self.states(states, prefix)?;
        }
        let masters = MASTERS.iter().find_map(|key| values.dict_get(id, key));
        if let Some(masters) = masters {
            let masters = values.elements(masters).unwrap_or_default();
            link.masters =
                Some(masters.iter().map(|list| self.tensors(*list)).collect::<Result<_, _>>()?);
        }
        Ok(link)
    }

    /// The states of a torch optimizer by the number of the parameter.
    fn states(
        &mut self,
        id: ValueId,
        prefix: &str,
    ) -> Result<BTreeMap<u64, BTreeMap<String, StoredTensor>>, String> {
        let values = self.torch.values();
        let mut by_index = BTreeMap::new();
        let items = values.mapping(id).ok_or_else(|| format!("{prefix}its state is no dict"))?;
        for (index, states) in items {
            let index = values.as_u64(index).ok_or_else(|| format!("{prefix}no number"))?;
            let mut tensors = BTreeMap::new();
            for (state, value) in values.mapping(states).into_iter().flatten() {
                let name = joined(prefix, &key_text(self.torch, state));
                self.bounds.enter(&name, 0).map_err(|excess| excess.to_string())?;
                match self.torch.tensor(value) {
                    Ok(Some(tensor)) if tensor.shape().is_empty() => {
                        self.left_out += 1;
                        self.steps.extend((name.ends_with("step")).then_some(tensor));
                    }
                    Ok(Some(tensor)) => {
                        tensors.insert(key_text(self.torch, state), tensor);
                    }
                    Ok(None) => self.left_out += 1,
                    Err(error) => {
                        return Err(format!("{prefix}parameter {index}: {name}: {error}"));
                    }
                }
            }
            by_index.insert(index, tensors);
        }
        Ok(by_index)
    }

    fn tensors(&mut self, list: ValueId) -> Result<Vec<StoredTensor>, String> {
        let mut tensors = Vec::new();
        for id in self.torch.values().elements(list).unwrap_or_default() {
            self.bounds.enter("", 0).map_err(|excess| excess.to_string())?;
            match self.torch.tensor(*id) {
                Ok(Some(tensor)) => tensors.push(tensor),
                Ok(None) => return Err("a master that is no tensor".to_owned()),
                Err(error) => return Err(format!("a master: {error}")),
            }
        }
        Ok(tensors)
    }
}

/// Only what one group says and another does not tells parameters apart.
fn tell_apart(links: &mut [ChainedOptimizer]) {
    let any = |test: fn(&Group) -> bool| links.iter().flat_map(|link| &link.groups).any(test);
    let has_experts = any(|group| group.is_expert == Some(true));
    let has_decoupled = any(|group| group.is_decoupled == Some(true));
    // Muon trains matrices, an Adam beside it the rest.
    let is_muon = |link: &ChainedOptimizer| link.has("momentum_buffer") && !link.has("exp_avg");
    let is_mixed = links.iter().any(is_muon) && links.iter().any(|link| link.has("exp_avg"));
    for link in links {
        let is_muon = is_mixed.then(|| is_muon(link));
        for group in &mut link.groups {
            group.is_expert = group.is_expert.filter(|_| has_experts);
            group.is_decoupled = group.is_decoupled.filter(|_| has_decoupled);
            group.is_muon = is_muon;
        }
    }
}

/// Finds the parameters of optimizers that number them.
///
/// # Errors
/// Why the numbers do not fit the parameters.
pub(super) fn numbered(links: &[ChainedOptimizer], params: &[Param]) -> Result<States, String> {
    let mut numbered = Vec::new();
    for link in links {
        for (at, group) in link.groups.iter().enumerate() {
            let masters = match &link.masters {
                None => None,
                Some(masters) => Some(
                    masters.get(at).ok_or_else(|| format!("{}: no list of masters", group.at))?,
                ),
            };
            numbered.push((group, masters, &link.states));
        }
    }
    let groups: Vec<&Group> = numbered.iter().map(|(group, ..)| *group).collect();
    let fits = |at: usize, members: &[usize]| {
        let (group, masters, states) = numbered[at];
        let members: Vec<&Param> = members.iter().map(|&at| &params[at]).collect();
        check(group, masters.map(Vec::as_slice), states, &members)
    };
    let assigned = assign(params, &groups, fits)?;
    let mut found = States::new();
    for ((group, masters, states), members) in numbered.into_iter().zip(assigned) {
        let mut masters = masters.into_iter().flatten();
        for (index, at) in group.params.iter().zip(members) {
            let Param { chunk, name, .. } = &params[at];
            let mut keep = |state: &str, tensor: &StoredTensor| {
                let kept = Kept { chunk: *chunk, name: Arc::clone(name), tensor: tensor.clone() };
                found.entry(state_name(state).to_owned()).or_default().push(kept);
            };
            for (state, tensor) in states.get(index).into_iter().flatten() {
                keep(state, tensor);
            }
            if params[at].has_master()
                && let Some(master) = masters.next()
            {
                keep("fp32_param", master);
            }
        }
    }
    Ok(found)
}

/// Whether everything that a group keeps is as large as the parameters it would belong to.
fn check(
    group: &Group,
    masters: Option<&[StoredTensor]>,
    states: &BTreeMap<u64, BTreeMap<String, StoredTensor>>,
    members: &[&Param],
) -> Result<(), String> {
    let at = &group.at;
    if group.params.len() != members.len() {
        let (numbers, count) = (group.params.len(), members.len());
        return Err(format!("{at} has {numbers} parameters where the model has {count} for it"));
    }
    let differs = |state: &str, tensor: &StoredTensor, param: &Param| {
        let (found, wanted) = (tensor.shape(), param.weight.shape());
        (found != wanted).then(|| {
            format!("{at}: {state} of shape {found:?} where {} has {wanted:?}", param.name)
        })
    };
    for (index, param) in group.params.iter().zip(members) {
        for (state, tensor) in states.get(index).into_iter().flatten() {
            differs(state, tensor, param).map_or(Ok(()), Err)?;
        }
    }
    let Some(masters) = masters else { return Ok(()) };
    let halves: Vec<&&Param> = members.iter().filter(|param| param.has_master()).collect();
    if masters.len() != halves.len() {
        let (found, wanted) = (masters.len(), halves.len());
        return Err(format!("{at} has {found} masters for {wanted} parameters of 16 bits"));
    }
    for (master, param) in masters.iter().zip(halves) {
        differs("a master", master, param).map_or(Ok(()), Err)?;
    }
    Ok(())
}
