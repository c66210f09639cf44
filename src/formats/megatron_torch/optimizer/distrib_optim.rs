//! `distrib_optim.pt`: the states of a distributed optimizer, as flat buffers with one parameter after another.
//!
//! Data-parallel rank 0 gathers the shards of all ranks and writes them beside its `model_optim_rng.pt`: for each
//! chained optimizer `{gbuf_idx: {dtype: {state: tensors}}}`. [`crate::layout::GradBuffer`] says where each parameter
//! starts in a buffer. Facts from Megatron-LM (`distrib_optimizer.py`, `save_parameter_state` and
//! `get_parameter_state_dp_zero`): 23.06, core_v0.4 to v0.6 (a list of buckets), core_v0.7 to v0.19
//! (`buckets_coalesced`).

use std::collections::{BTreeMap, VecDeque};

use crate::base::extent;
use crate::containers::torch::{TorchFile, Value, ValueId};
use crate::formats::walk::Bounds;
use crate::layout::{
    BufferForm, BufferParam, BufferProof, GradBuffer, PackingVersion, ParamStart, RunArgs,
};
use crate::names::megatron::optimizer_state_name;
use crate::tensor::{StorageView, StoredTensor};

use super::params::{ModelParam, ParamState, ParamStates, UnmatchedState};
use super::state_dict::ChainedOptimizer;

/// Reader of the buffers of a rank.
#[derive(Debug)]
pub(super) struct BufferReader<'a> {
    /// `distrib_optim.pt`.
    pub torch: &'a TorchFile,
    /// The arguments of the run.
    pub run_args: &'a RunArgs,
    /// The parameters of the rank, in the order of the model.
    pub params: &'a [ModelParam],
    /// Bounds of the walk.
    pub bounds: &'a mut Bounds,
}

/// A buffer as the file stores it.
struct StoredBuffer {
    /// Its number and dtype, for messages.
    label: String,
    form: BufferForm,
    /// Set where it is named by the dtype of its gradients alone: it may hold parameters of any dtype.
    mixes_param_dtypes: bool,
    /// The tensors of each kind of state.
    states: BTreeMap<String, Vec<StoredTensor>>,
}

/// The parameters that the model has for one buffer, in the order of the buffer.
struct BufferParams<'a> {
    params: Vec<&'a ModelParam>,
    dtype: &'static str,
}

/// The dense parameters or those of experts, on their way into buffers.
#[derive(Default)]
struct Unread<'a> {
    /// By buffer; `None` before the first one.
    buffers: Option<VecDeque<BufferParams<'a>>>,
    /// Set where another rank has their buffers.
    are_on_other_rank: bool,
}

impl<'a> BufferReader<'a> {
    /// Reads the states of all the parameters that the file has.
    ///
    /// # Errors
    /// The buffers do not fit the parameters.
    pub(super) fn read(
        &mut self,
        optimizers: &[ChainedOptimizer],
    ) -> Result<ParamStates, UnmatchedState> {
        let sections = self.sections(optimizers)?;
        let has_expert_buffers =
            sections.iter().any(|(optimizer, _)| optimizer.is_expert_parallel());
        let mut unread = [Unread::default(), Unread::default()];
        let mut states = ParamStates::new();
        for (optimizer, section) in sections {
            let is_expert = optimizer.is_expert_parallel();
            let unread = &mut unread[usize::from(is_expert)];
            if self.torch.values().is_none(section) {
                unread.are_on_other_rank = true;
                continue;
            }
            for stored in self.buffers(section)? {
                let buffers = unread.buffers.get_or_insert_with(|| {
                    let is_expert = has_expert_buffers.then_some(is_expert);
                    self.params_by_buffer(is_expert, stored.mixes_param_dtypes)
                });
                let params = buffers.pop_front();
                self.unpack(&stored, params, is_expert, &mut states)
                    .map_err(|error| error.within(format_args!("buffer {}", stored.label)))?;
            }
        }
        for Unread { buffers, are_on_other_rank } in unread {
            let first = buffers.into_iter().flatten().next().filter(|_| !are_on_other_rank);
            if let Some(param) = first.and_then(|buffer| buffer.params.last().copied()) {
                return Err(UnmatchedState::new(format_args!("no buffer is for {}", param.name)));
            }
        }
        Ok(states)
    }

    /// The optimizers with the section of the file that each has. In some versions, one without parameters has none.
    fn sections<'o>(
        &self,
        optimizers: &'o [ChainedOptimizer],
    ) -> Result<Vec<(&'o ChainedOptimizer, ValueId)>, UnmatchedState> {
        let root = self.torch.root();
        let sections = match self.torch.values().elements(root) {
            Some(sections) => sections.to_vec(),
            None => vec![root],
        };
        let has_all = sections.len() == optimizers.len();
        let with_section: Vec<&ChainedOptimizer> =
            optimizers.iter().filter(|optimizer| has_all || optimizer.is_distributed).collect();
        if with_section.len() != sections.len() {
            let (found, wanted) = (sections.len(), optimizers.len());
            let reason =
                format!("states of {found} optimizers, but model_optim_rng.pt has {wanted}");
            return Err(UnmatchedState::new(reason));
        }
        Ok(with_section.into_iter().zip(sections).collect())
    }

    /// The parameters of each buffer of an optimizer: by chunk, then by dtype in the order of their first parameters.
    fn params_by_buffer(
        &self,
        is_expert: Option<bool>,
        mixes_param_dtypes: bool,
    ) -> VecDeque<BufferParams<'a>> {
        let mut buffers: VecDeque<(u64, BufferParams<'a>)> = VecDeque::new();
        let is_wanted =
            |param: &&ModelParam| is_expert.is_none_or(|wanted| wanted == param.is_expert());
        for param in self.params.iter().filter(is_wanted) {
            let dtype = param.weight.dtype().name();
            let buffer = buffers.iter_mut().find(|(chunk, buffer)| {
                *chunk == param.chunk && (mixes_param_dtypes || buffer.dtype == dtype)
            });
            match buffer {
                Some((_, buffer)) => buffer.params.push(param),
                None => {
                    let params = vec![param];
                    buffers.push_back((param.chunk, BufferParams { params, dtype }));
                }
            }
        }
        let in_buffer_order = |(_, mut buffer): (u64, BufferParams<'a>)| {
            buffer.params.reverse();
            buffer
        };
        buffers.into_iter().map(in_buffer_order).collect()
    }

    /// Reads the buffers of one optimizer, in order.
    fn buffers(&mut self, section: ValueId) -> Result<Vec<StoredBuffer>, UnmatchedState> {
        let torch = self.torch;
        let values = torch.values();
        let items = values.mapping(section).ok_or_else(|| UnmatchedState::new("not a dict"))?;
        let is_coalesced = values.dict_get(section, "buckets_coalesced").is_some();
        let numbered: BTreeMap<u64, ValueId> =
            items.filter_map(|(key, value)| Some((values.as_u64(key)?, value))).collect();
        let mut buffers = Vec::new();
        for (number, dtypes) in numbered {
            let at_number = |reason| UnmatchedState::new(reason).within(format!("buffer {number}"));
            let dtypes = values.mapping(dtypes).ok_or_else(|| at_number("not a dict"))?;
            for (dtype, tensors) in dtypes {
                let dtypes = match values.elements(dtype) {
                    Some(param_and_grad) => param_and_grad.to_vec(),
                    None => vec![dtype],
                };
                let dtype = dtypes.first().and_then(|dtype| values.class_name(*dtype));
                let dtype = dtype.ok_or_else(|| at_number("its key is not a dtype"))?;
                let label = format!("{number} ({})", dtype.trim_start_matches("torch."));
                let (form, states) = self
                    .flat_tensors(tensors)
                    .map_err(|error| error.within(format_args!("buffer {label}")))?;
                let form = if is_coalesced && form == BufferForm::Whole {
                    BufferForm::Coalesced
                } else {
                    form
                };
                let mixes_param_dtypes = dtypes.len() == 1;
                buffers.push(StoredBuffer { label, form, mixes_param_dtypes, states });
            }
        }
        Ok(buffers)
    }

    /// Reads the tensors of one buffer by kind of state.
    fn flat_tensors(
        &mut self,
        buffer: ValueId,
    ) -> Result<(BufferForm, BTreeMap<String, Vec<StoredTensor>>), UnmatchedState> {
        let torch = self.torch;
        let values = torch.values();
        let items = values.mapping(buffer).ok_or_else(|| UnmatchedState::new("not a dict"))?;
        let mut form = BufferForm::Whole;
        let mut states = BTreeMap::new();
        for (kind, value) in items {
            let Some(kind) = values.as_str(kind) else { continue };
            let ids = match values.get(value) {
                Value::List(buckets) => {
                    form = BufferForm::Buckets;
                    buckets.to_vec()
                }
                _ => vec![value],
            };
            let mut tensors = Vec::with_capacity(ids.len());
            for id in ids {
                self.bounds.enter(kind, 0)?;
                match torch.tensor(id) {
                    Ok(Some(tensor)) if tensor.shape().len() == 1 && tensor.is_contiguous() => {
                        tensors.push(tensor);
                    }
                    // Sizes and the like.
                    Ok(None) => {}
                    Ok(Some(_)) => return Err(UnmatchedState::new("not flat").within(kind)),
                    Err(error) => return Err(UnmatchedState::unreadable(kind, error)),
                }
            }
            if !tensors.is_empty() {
                states.insert(kind.to_owned(), tensors);
            }
        }
        Ok((form, states))
    }

    /// Cuts a buffer into the states of its parameters.
    fn unpack(
        &mut self,
        stored: &StoredBuffer,
        params: Option<BufferParams>,
        is_expert_parallel: bool,
        states: &mut ParamStates,
    ) -> Result<(), UnmatchedState> {
        let BufferParams { params, dtype } =
            params.ok_or_else(|| UnmatchedState::new("the model has no parameters for it"))?;
        if !stored.mixes_param_dtypes && !stored.label.contains(dtype) {
            let reason = format_args!("the model's next parameters are {dtype}");
            return Err(UnmatchedState::new(reason));
        }
        let rank_numels = self.params.iter().map(ModelParam::numel);
        let param =
            |param: &&ModelParam| BufferParam::new(&param.name, param.numel(), self.run_args);
        let buffer = GradBuffer {
            params: params.iter().map(param).collect(),
            is_expert_parallel,
            rank_numel: rank_numels.fold(0, u64::saturating_add),
            args: self.run_args,
        };
        let views = offsets_of_views(&params);
        let proof = views.as_deref().map_or(BufferProof::Sizes, BufferProof::Views);
        let starts = buffer
            .param_starts(stored.versions(), stored.form, &stored.numels()?, proof)
            .map_err(UnmatchedState::new)?;
        for (kind, tensors) in &stored.states {
            let named = states.entry(optimizer_state_name(kind).to_owned()).or_default();
            for (param, start) in params.iter().zip(&starts) {
                self.bounds.enter(&param.name, 0)?;
                let flat = tensors.get(start.tensor);
                let tensor = flat.and_then(|flat| slice(flat, *start, param)).ok_or_else(|| {
                    UnmatchedState::new(format_args!("{kind} ends before {}", param.name))
                })?;
                named.push(ParamState::of(param, tensor));
            }
        }
        Ok(())
    }
}

impl StoredBuffer {
    /// The versions that stored buffers in its form.
    fn versions(&self) -> &'static [PackingVersion] {
        use PackingVersion::{Core0_4, Core0_6, Core0_7, Core0_8, Megatron23_06};
        match (self.form, self.mixes_param_dtypes) {
            (BufferForm::Whole, _) => &[Megatron23_06],
            (BufferForm::Buckets | BufferForm::UnpaddedBuckets, true) => &[Core0_4],
            (BufferForm::Buckets | BufferForm::UnpaddedBuckets, false) => &[Core0_6, Core0_7],
            (BufferForm::Coalesced, _) => &[Core0_7, Core0_8],
        }
    }

    /// The number of elements of each of its tensors, which is the same for every kind of state.
    fn numels(&self) -> Result<Vec<u64>, UnmatchedState> {
        let numel = |tensor: &StoredTensor| tensor.shape().first().copied().unwrap_or(0);
        let mut kinds =
            self.states.values().map(|tensors| tensors.iter().map(numel).collect::<Vec<_>>());
        let numels = kinds.next().ok_or_else(|| UnmatchedState::new("it holds no tensor"))?;
        if kinds.any(|other| other != numels) {
            return Err(UnmatchedState::new("its states differ in size"));
        }
        Ok(numels)
    }
}

/// The offsets of weights in the buffer that they are views of, as the distributed optimizer makes them; `None` where
/// every weight has a storage of its own.
fn offsets_of_views(params: &[&ModelParam]) -> Option<Vec<u64>> {
    let [first, rest @ ..] = params else { return None };
    let storage = first.weight.storage();
    let is_view =
        |param: &&ModelParam| param.weight.storage() == storage && param.weight.is_contiguous();
    let are_views = !rest.is_empty() && params.iter().all(is_view);
    are_views.then(|| params.iter().map(|param| param.weight.storage_offset()).collect())
}

/// The range of a flat tensor that starts at an element and is as large as a parameter, in the parameter's shape.
fn slice(flat: &StoredTensor, start: ParamStart, param: &ModelParam) -> Option<StoredTensor> {
    let shape = param.weight.shape();
    let end = start.offset.checked_add(extent::numel(shape)?)?;
    if end > *flat.shape().first()? {
        return None;
    }
    let offset = flat.storage_offset().checked_add(start.offset)?;
    let strides = extent::row_major(shape)?;
    let view = StorageView { storage: flat.storage(), storage_offset: offset, strides };
    StoredTensor::new(flat.dtype(), shape.to_vec(), view, flat.byte_order()).ok()
}
