//! `distrib_optim.pt`: the states of a distributed optimizer, as flat buffers that hold parameter behind parameter.
//!
//! Data parallel rank 0 gathers the parts of all ranks and writes them beside its `model_optim_rng.pt`. A buffer has the
//! parameters of one model chunk and dtype, dense or expert, in the reverse order of the model; [`super::buffer_plan`]
//! says where each starts. Facts from Megatron-LM (`distrib_optimizer.py`, `save_parameter_state` and
//! `get_parameter_state_dp_zero`): 23.06, core_v0.4 to v0.6 (a list of buckets), core_v0.7 to v0.19 (`buckets_coalesced`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::base::extent;
use crate::containers::torch::{TorchFile, Value, ValueId};
use crate::formats::walk::Bounds;
use crate::layout::RunArgs;
use crate::tensor::{StorageView, StoredTensor};

use super::buffer_plan::{Packing, Plan, Slot};
use super::optimizer::{ChainedOptimizer, Kept, Param, States, state_name};

/// Reads the buffers of a rank.
#[derive(Debug)]
pub(super) struct Buffers<'a> {
    /// `distrib_optim.pt`.
    pub torch: &'a TorchFile,
    /// How the run was laid out.
    pub run_args: &'a RunArgs,
    /// The parameters of the rank, in the order of the model.
    pub params: &'a [Param],
    /// What the walk may cost.
    pub bounds: &'a mut Bounds,
}

/// The parameters of one buffer, in its order.
struct Content<'a> {
    params: Vec<&'a Param>,
    dtype: &'static str,
    is_expert: bool,
}

/// How the tensors of a buffer lie in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// One tensor for the whole buffer.
    Flat,
    /// One for each bucket.
    Buckets,
    /// One for the whole buffer, the padding of its buckets left out.
    Coalesced,
}

/// One buffer of the file.
struct Buffer {
    name: String,
    form: Form,
    /// Named by the dtype of its gradients alone: such a buffer may hold parameters of any dtype.
    of_any_dtype: bool,
    states: BTreeMap<String, Vec<StoredTensor>>,
}

impl<'a> Buffers<'a> {
    /// The states of all the parameters that the file holds.
    ///
    /// # Errors
    /// Why the buffers do not fit the parameters.
    pub(super) fn read(&mut self, links: &[ChainedOptimizer]) -> Result<States, String> {
        let torch = self.torch;
        let values = torch.values();
        let distributed: Vec<&ChainedOptimizer> =
            links.iter().filter(|link| link.is_distributed).collect();
        let parts: Vec<ValueId> = match values.elements(torch.root()) {
            Some(parts) => parts.to_vec(),
            None => vec![torch.root()],
        };
        // An optimizer without parameters has a part in some versions and none in others.
        let links: Vec<&ChainedOptimizer> = match parts.len() {
            count if count == links.len() => links.iter().collect(),
            count if count == distributed.len() => distributed,
            count => {
                return Err(format!(
                    "it is of {count} optimizers, model_optim_rng.pt of {}",
                    links.len()
                ));
            }
        };
        let splits_experts = links.iter().any(|link| link.is_expert());
        let mut contents: [Option<VecDeque<Content<'a>>>; 2] = [None, None];
        let mut is_elsewhere = [false; 2];
        let mut states = States::new();
        for (link, part) in links.iter().zip(parts) {
            let class = usize::from(link.is_expert());
            if values.is_none(part) {
                is_elsewhere[class] = true;
                continue;
            }
            for buffer in self.buffers(part)? {
                let queue = contents[class].get_or_insert_with(|| {
                    let is_expert = splits_experts.then_some(class == 1);
                    self.contents(is_expert, buffer.of_any_dtype)
                });
                let name = &buffer.name;
                let content = queue
                    .pop_front()
                    .ok_or_else(|| format!("buffer {name}: the model has no parameters for it"))?;
                if !buffer.of_any_dtype && !name.contains(content.dtype) {
                    let dtype = content.dtype;
                    return Err(format!("buffer {name}: the model's next parameters are {dtype}"));
                }
                self.unpack(&buffer, &content, &mut states)
                    .map_err(|error| format!("buffer {name}: {error}"))?;
            }
        }
        for (queue, is_elsewhere) in contents.iter().zip(is_elsewhere) {
            let left = queue.iter().flatten().next().filter(|_| !is_elsewhere);
            if let Some(param) = left.and_then(|content| content.params.last()) {
                return Err(format!("no buffer is for {}", param.name));
            }
        }
        Ok(states)
    }

    /// What the buffers of an optimizer hold: by chunk, then by dtype in the order of their first parameters.
    fn contents(&self, is_expert: Option<bool>, of_any_dtype: bool) -> VecDeque<Content<'a>> {
        let mut contents: Vec<(u64, Content<'a>)> = Vec::new();
        let wanted = |param: &&Param| is_expert.is_none_or(|wanted| wanted == param.is_expert());
        for param in self.params.iter().filter(wanted) {
            let dtype = param.weight.dtype().name();
            let place = contents.iter_mut().find(|(chunk, content)| {
                *chunk == param.chunk && (of_any_dtype || content.dtype == dtype)
            });
            match place {
                Some((_, content)) => content.params.push(param),
                None => {
                    let is_expert = is_expert == Some(true);
                    contents.push((param.chunk, Content { params: vec![param], dtype, is_expert }));
                }
            }
        }
        let in_buffer_order = |(_, mut content): (u64, Content<'a>)| {
            content.params.reverse();
            content
        };
        contents.into_iter().map(in_buffer_order).collect()
    }

    /// The buffers of one optimizer, in order.
    fn buffers(&mut self, part: ValueId) -> Result<Vec<Buffer>, String> {
        let torch = self.torch;
        let values = torch.values();
        let items = values.mapping(part).ok_or("it is no dict")?;
        let is_coalesced = values.dict_get(part, "buckets_coalesced").is_some();
        let mut numbered: BTreeMap<u64, ValueId> = BTreeMap::new();
        numbered.extend(items.filter_map(|(key, value)| Some((values.as_u64(key)?, value))));
        let mut buffers = Vec::new();
        for (number, dtypes) in numbered {
            let dtypes =
                values.mapping(dtypes).ok_or_else(|| format!("buffer {number}: no dict"))?;
            for (dtype, tensors) in dtypes {
                let names = match values.elements(dtype) {
                    Some(pair) => pair.to_vec(),
                    None => vec![dtype],
                };
                let first = names.first().and_then(|dtype| values.class_name(*dtype));
                let dtype =
                    first.ok_or_else(|| format!("buffer {number}: its key names no dtype"))?;
                let name = format!("{number} ({})", dtype.trim_start_matches("torch."));
                let mut buffer = Buffer {
                    name,
                    form: if is_coalesced { Form::Coalesced } else { Form::Flat },
                    of_any_dtype: names.len() == 1,
                    states: BTreeMap::new(),
                };
                self.fill(&mut buffer, tensors)?;
                buffers.push(buffer);
            }
        }
        Ok(buffers)
    }

    fn fill(&mut self, buffer: &mut Buffer, tensors: ValueId) -> Result<(), String> {
        let torch = self.torch;
        let values = torch.values();
        let name = buffer.name.clone();
        let items = values.mapping(tensors).ok_or_else(|| format!("buffer {name}: no dict"))?;
        for (state, value) in items {
            let Some(state) = values.as_str(state) else { continue };
            let list = match values.get(value) {
                Value::List(buckets) => {
                    buffer.form = Form::Buckets;
                    buckets.to_vec()
                }
                _ => vec![value],
            };
            let mut found = Vec::with_capacity(list.len());
            for id in list {
                self.bounds.enter(state, 0).map_err(|excess| excess.to_string())?;
                match torch.tensor(id) {
                    Ok(Some(tensor)) if tensor.shape().len() == 1 && tensor.is_contiguous() => {
                        found.push(tensor);
                    }
                    // Sizes and the like.
                    Ok(None) => {}
                    Ok(Some(_)) => return Err(format!("buffer {name}: {state} is not flat")),
                    Err(error) => return Err(format!("buffer {name}: {state}: {error}")),
                }
            }
            if !found.is_empty() {
                buffer.states.insert(state.to_owned(), found);
            }
        }
        Ok(())
    }

    /// Cuts a buffer into the parameters that it holds.
    fn unpack(
        &mut self,
        buffer: &Buffer,
        content: &Content,
        states: &mut States,
    ) -> Result<(), String> {
        let sizes = |tensors: &Vec<StoredTensor>| -> Vec<u64> {
            tensors.iter().map(|tensor| tensor.shape().first().copied().unwrap_or(0)).collect()
        };
        let mut all = buffer.states.values().map(sizes);
        let found = all.next().ok_or("it holds no tensor")?;
        if all.any(|other| other != found) {
            return Err("its states differ in size".to_owned());
        }
        let layout = Layout { run_args: self.run_args, params: self.params };
        let places = layout.places(buffer, content, &found)?;
        for (state, tensors) in &buffer.states {
            let kept = states.entry(state_name(state).to_owned()).or_default();
            for (param, (at, start)) in content.params.iter().zip(&places) {
                self.bounds.enter(&param.name, 0).map_err(|excess| excess.to_string())?;
                let tensor = tensors.get(*at).and_then(|flat| slice(flat, *start, param));
                let tensor = tensor.ok_or_else(|| format!("{state} ends before {}", param.name))?;
                kept.push(Kept { chunk: param.chunk, name: Arc::clone(&param.name), tensor });
            }
        }
        Ok(())
    }
}

/// Where parameters lie in a buffer.
struct Layout<'a> {
    run_args: &'a RunArgs,
    params: &'a [Param],
}

impl Layout<'_> {
    /// For each parameter the tensor of the buffer that it is in, and its first element there.
    fn places(
        &self,
        buffer: &Buffer,
        content: &Content,
        found: &[u64],
    ) -> Result<Vec<(usize, u64)>, String> {
        let weights = offsets_of_views(&content.params);
        let mut totals: Vec<u64> = Vec::new();
        let mut is_contradicted = false;
        let mut fitting: Vec<Vec<(usize, u64)>> = Vec::new();
        for plan in self.plans(buffer, content) {
            let (sizes, places) = match buffer.form {
                Form::Flat => {
                    (vec![plan.padded()], in_whole(plan.starts.iter().map(|start| start.in_buffer)))
                }
                Form::Coalesced => (vec![plan.unpadded()], in_whole(plan.coalesced().into_iter())),
                Form::Buckets => {
                    let sizes =
                        plan.buckets.iter().map(|bucket| bucket.end - bucket.start).collect();
                    let place = |start: &super::buffer_plan::Start| {
                        (start.bucket, start.in_buffer - plan.buckets[start.bucket].start)
                    };
                    (sizes, plan.starts.iter().map(place).collect())
                }
            };
            if sizes != found {
                totals.push(sizes.iter().sum());
                continue;
            }
            let is_seen = |offsets: &Vec<u64>| {
                offsets.iter().zip(&plan.starts).all(|(offset, start)| *offset == start.in_buffer)
            };
            if !weights.as_ref().is_none_or(is_seen) {
                is_contradicted = true;
            } else if !fitting.contains(&places) {
                fitting.push(places);
            }
        }
        match (fitting.pop(), fitting.is_empty()) {
            (Some(places), true) => Ok(places),
            (Some(_), false) => Err("its parameters may lie in it in more than one way".to_owned()),
            (None, _) if is_contradicted => Err("the weights are views of a buffer in which they \
                 lie in another order than this one has"
                .to_owned()),
            (None, _) => {
                totals.sort_unstable();
                totals.dedup();
                let wanted: Vec<String> = totals.iter().map(u64::to_string).collect();
                let (count, found) = (content.params.len(), found.iter().sum::<u64>());
                Err(format!(
                    "{found} elements, but its {count} parameters come to {}; if args does not say \
                     how many ranks there were, say --set data_parallel_size=N",
                    wanted.join(" or ")
                ))
            }
        }
    }

    /// All the ways in which a version of Megatron may have packed these parameters.
    fn plans(&self, buffer: &Buffer, content: &Content) -> Vec<Plan> {
        let ranks = self.data_parallel_ranks(content.is_expert).max(1);
        let aligned = least_common_multiple(ranks, 128);
        let packing = |align, bucket_multiple, splits_shared, pairs| Packing {
            align,
            bucket_multiple,
            splits_shared,
            pairs,
        };
        let core_0_4 = packing(1, ranks, false, true);
        let core_0_6 = packing(1, ranks, true, false);
        let core_0_7 = packing(1, aligned, true, false);
        let end = match self.run_args.is_on("ddp_pad_buckets_for_high_nccl_busbw") {
            true => least_common_multiple(aligned, 1 << 16),
            false => aligned,
        };
        let core_0_8 = packing(64, end, true, false);
        let packings = match (buffer.form, buffer.of_any_dtype) {
            (Form::Flat, _) => vec![core_0_4],
            (Form::Buckets, true) => vec![core_0_4],
            (Form::Buckets, false) => vec![core_0_6, core_0_7],
            (Form::Coalesced, _) => vec![core_0_7, core_0_8],
        };
        let sizes = match buffer.form {
            Form::Flat => vec![None],
            Form::Buckets | Form::Coalesced => self.bucket_sizes(ranks),
        };
        let slots = self.slots(content);
        let mut plans: Vec<Plan> = Vec::new();
        for packing in packings {
            for &size in &sizes {
                let plan = Plan::new(&slots, size, packing);
                plans.extend(plan.filter(|plan| !plans.contains(plan)));
            }
        }
        plans
    }

    fn slots(&self, content: &Content) -> Vec<Slot> {
        let has_further = self.run_args.size("mtp_num_layers").is_some_and(|layers| layers > 0);
        let is_tied = self.run_args.are_weights_tied();
        let stages = self.run_args.size("pipeline_model_parallel_size").unwrap_or(1);
        let slot = |param: &&Param| {
            let is_output = param.name.ends_with("output_layer.weight");
            let is_shared = if is_output { is_tied } else { is_tied || has_further };
            Slot {
                numel: extent::numel(param.weight.shape()).unwrap_or(0),
                is_shared: stages > 1 && is_shared && param.is_embedding(),
            }
        };
        content.params.iter().map(slot).collect()
    }

    /// Ranks that share a buffer: context parallel ones among them, each instance of the optimizer by itself.
    fn data_parallel_ranks(&self, is_expert: bool) -> u64 {
        let size = |fact| self.run_args.size(fact).unwrap_or(1).max(1);
        let instances = size("num_distributed_optimizer_instances");
        let tensor = self.run_args.size("tensor_model_parallel_size").unwrap_or(1);
        let expert_tensor =
            self.run_args.size("expert_tensor_parallel_size").unwrap_or(tensor).max(1);
        let ranks = match self.run_args.size("world_size").filter(|_| is_expert) {
            Some(layout) => {
                let stages = size("pipeline_model_parallel_size");
                let shares = size("expert_model_parallel_size");
                let model = expert_tensor.saturating_mul(shares).saturating_mul(stages);
                layout / model.max(1)
            }
            None => size("data_parallel_size").saturating_mul(size("context_parallel_size")),
        };
        ranks / instances
    }

    /// Elements at which a bucket is full; stages and chunks after the first have a single one.
    fn bucket_sizes(&self, ranks: u64) -> Vec<Option<u64>> {
        const DEFAULT: u64 = 40_000_000;
        let overlaps = self.run_args.get("overlap_grad_reduce");
        if overlaps.is_some() && !self.run_args.is_on("overlap_grad_reduce") {
            return vec![None];
        }
        let given = self.run_args.size("ddp_bucket_size").or_else(|| {
            let count = self.run_args.size("ddp_num_buckets").filter(|&count| count > 0)?;
            let numels = self.params.iter().filter_map(|param| extent::numel(param.weight.shape()));
            Some(numels.fold(0_u64, u64::saturating_add) / count)
        });
        let mut sizes = vec![None];
        match given {
            Some(size) => sizes.push(Some(size)),
            None => {
                let usual = DEFAULT.max(ranks.saturating_mul(1_000_000));
                sizes.extend([Some(DEFAULT), Some(usual)]);
            }
        }
        sizes
    }
}

fn in_whole(starts: impl Iterator<Item = u64>) -> Vec<(usize, u64)> {
    starts.map(|start| (0, start)).collect()
}

/// Where weights lie in the buffer that they are views of, as the distributed optimizer makes them; `None` where every
/// weight has a storage of its own.
fn offsets_of_views(params: &[&Param]) -> Option<Vec<u64>> {
    let [first, rest @ ..] = params else { return None };
    let storage = first.weight.storage();
    let is_there =
        |param: &&Param| param.weight.storage() == storage && param.weight.is_contiguous();
    let are_views = !rest.is_empty() && params.iter().all(is_there);
    are_views.then(|| params.iter().map(|param| param.weight.storage_offset()).collect())
}

/// The part of a flat tensor that starts at an element and is as large as a parameter, in the parameter's shape.
fn slice(flat: &StoredTensor, start: u64, param: &Param) -> Option<StoredTensor> {
    let shape = param.weight.shape();
    let end = start.checked_add(extent::numel(shape)?)?;
    if end > *flat.shape().first()? {
        return None;
    }
    let offset = flat.storage_offset().checked_add(start)?;
    let strides = extent::row_major(shape)?;
    let (storage, order) = (flat.storage(), flat.byte_order());
    let view = StorageView { storage, storage_offset: offset, strides };
    StoredTensor::new(flat.dtype(), shape.to_vec(), view, order).ok()
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1)).saturating_mul(b)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::base::dtype::Dtype;
    use crate::base::plain::PlainValue;
    use crate::storage::{FileSet, Region};
    use crate::tensor::ByteOrder;

    /// Parameters of these sizes, the weights in storages of their own, or views of one at these offsets.
    fn params(sizes: &[u64], offsets: Option<&[u64]>) -> Vec<Param> {
        let mut files = FileSet::default();
        let file = files.add(std::path::Path::new("Cargo.toml")).unwrap();
        let param = |(at, &size): (usize, &u64)| {
            let storage = match offsets {
                Some(_) => Region { file, offset: 0, len: 1 << 20 },
                None => Region { file, offset: at as u64 * 4096, len: size * 2 },
            };
            let offset = offsets.map_or(0, |offsets| offsets[at]);
            let (shape, strides, order) = (vec![size], vec![1], ByteOrder::Little);
            let dtype = Dtype::BFloat16;
            let view = StorageView { storage, storage_offset: offset, strides };
            let weight = StoredTensor::new(dtype, shape, view, order).unwrap();
            Param { chunk: 0, name: format!("layers.{at}.weight").into(), weight }
        };
        sizes.iter().enumerate().map(param).collect()
    }

    fn places(
        form: Form,
        of_any_dtype: bool,
        run_args: &[(&str, PlainValue)],
        params: &[Param],
        found: &[u64],
    ) -> Result<Vec<(usize, u64)>, String> {
        let run_args =
            run_args.iter().map(|(name, fact)| ((*name).to_owned(), fact.clone())).collect();
        let run_args = RunArgs::new(run_args, &[]);
        let buffer = Buffer { name: String::new(), form, of_any_dtype, states: BTreeMap::new() };
        let params = params.iter().rev().collect();
        let content = Content { params, dtype: "bfloat16", is_expert: false };
        Layout { run_args: &run_args, params: &[] }.places(&buffer, &content, found)
    }

    const FOUR_RANKS: (&str, PlainValue) = ("data_parallel_size", PlainValue::Int(4));

    #[test]
    fn the_first_flat_buffer_has_its_padding_at_the_end() {
        let params = params(&[3, 5, 2], None);
        let found = places(Form::Flat, true, &[FOUR_RANKS], &params, &[12]);
        assert_eq!(found, Ok(vec![(0, 0), (0, 2), (0, 7)]));
        let error = places(Form::Flat, true, &[], &params, &[12]).unwrap_err();
        assert!(error.contains("come to 10") && error.contains("data_parallel_size"), "{error}");
    }

    #[test]
    fn lists_of_buckets_are_cut_where_a_bucket_is_full() {
        let params = params(&[3, 5, 2, 7], None);
        let run_args = [
            FOUR_RANKS,
            ("overlap_grad_reduce", PlainValue::Bool(true)),
            ("ddp_bucket_size", PlainValue::Int(6)),
        ];
        let found = places(Form::Buckets, false, &run_args, &params, &[8, 8, 4]);
        assert_eq!(found, Ok(vec![(0, 0), (1, 0), (1, 2), (2, 0)]));
        // Before core 0.6 no bucket had a single parameter.
        let found = places(Form::Buckets, true, &run_args, &params, &[12, 8]);
        assert_eq!(found, Ok(vec![(0, 0), (0, 7), (1, 0), (1, 5)]));
    }

    #[test]
    fn coalesced_buckets_are_aligned_from_core_0_8_on() {
        let params = params(&[3, 5, 2], None);
        let older = places(Form::Coalesced, false, &[], &params, &[10]);
        assert_eq!(older, Ok(vec![(0, 0), (0, 2), (0, 7)]));
        let newer = places(Form::Coalesced, false, &[], &params, &[131]);
        assert_eq!(newer, Ok(vec![(0, 0), (0, 64), (0, 128)]));
    }

    #[test]
    fn weights_that_are_views_of_the_buffer_must_agree() {
        let agreeing = params(&[3, 5, 2], Some(&[128, 64, 0]));
        assert!(places(Form::Coalesced, false, &[], &agreeing, &[131]).is_ok());
        let others = params(&[3, 5, 2], Some(&[0, 64, 128]));
        let error = places(Form::Coalesced, false, &[], &others, &[131]).unwrap_err();
        assert!(error.contains("in another order"), "{error}");
    }

    #[test]
    fn a_full_bucket_leaves_out_its_padding() {
        let params = params(&[10, 20, 20, 10], None);
        let run_args = [
            ("overlap_grad_reduce", PlainValue::Bool(true)),
            ("ddp_bucket_size", PlainValue::Int(70)),
        ];
        let found = places(Form::Coalesced, false, &run_args, &params, &[158]);
        assert_eq!(found, Ok(vec![(0, 0), (0, 64), (0, 84), (0, 148)]));
        // The stages after the first have one bucket only.
        let found = places(Form::Coalesced, false, &run_args, &params, &[202]);
        assert_eq!(found, Ok(vec![(0, 0), (0, 64), (0, 128), (0, 192)]));
    }
}
