//! The content of one file of a DeepSpeed checkpoint, taken out of its pickle.
//!
//! Facts from DeepSpeed 0.3 to 0.19 (`runtime/engine.py`: `_save_checkpoint`, `_save_zero_checkpoint`;
//! `runtime/zero/stage_1_and_2.py`, `stage3.py` and `runtime/bf16_optimizer.py`: `state_dict`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::catalog::Problem;
use crate::containers::torch::{TorchFile, ValueId};
use crate::formats::error::OpenError;
use crate::formats::files::open_torch;
use crate::formats::nest::key_text;
use crate::formats::state::{args_of, state_of};
use crate::formats::walk::{Bounds, TensorWalk};
use crate::storage::{FileId, FileSet};
use crate::tensor::StoredTensor;

/// Parameters with their shapes, in the order in which they lie in the flat partitions, by group.
pub(super) type Shapes = Vec<(Arc<str>, Vec<u64>)>;

/// Tensors under dotted names.
pub(super) type Tensors = Vec<(Arc<str>, StoredTensor)>;

/// Entries at the top of a model file that are no state of the run.
const NOT_STATE: [&str; 9] = [
    "module",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "args",
    "neox_args",
    "universal_checkpoint_info",
];

/// More entries than the top of any file has.
const STATE_ENTRIES: usize = 256;

/// A file with model states: of a model parallel rank, or of one partition of it.
#[derive(Debug, Default)]
pub(super) struct ModelStates {
    pub path: PathBuf,
    /// The name under which it was written, without its ending.
    pub saved_as: Option<String>,
    /// The module's state dict; `None` where the weights are in layer files.
    pub module: Option<Tensors>,
    pub buffer_names: BTreeSet<String>,
    pub param_shapes: Vec<Shapes>,
    pub frozen_shapes: Shapes,
    pub frozen_fragments: BTreeMap<Arc<str>, StoredTensor>,
    /// Alias and the parameter whose values it shares.
    pub shared: Vec<(String, String)>,
    /// The optimizer's own state where there is no ZeRO: state, number of the parameter, tensor.
    pub plain_optimizer: Vec<(String, u64, StoredTensor)>,
    /// Parameters that this optimizer knows.
    pub optimizer_params: Option<usize>,
    /// Pipeline and tensor parallel size, where it says so.
    pub degrees: Option<(u64, u64)>,
    pub mp_world: Option<u64>,
    pub version: Option<String>,
    pub steps: Option<u64>,
    pub args: Option<BTreeMap<String, PlainValue>>,
    pub state: BTreeMap<String, PlainValue>,
    /// `universal_checkpoint_info`, which says how parameters are cut.
    pub info: Option<PlainValue>,
    pub left_out: usize,
    pub problems: Vec<Problem>,
}

/// A file with the optimizer's partition of one rank.
#[derive(Debug, Default)]
pub(super) struct ZeroStates {
    pub path: PathBuf,
    /// The name under which it was written, without its ending.
    pub saved_as: Option<String>,
    pub is_stage3: bool,
    /// Ranks that share each group, or all of them.
    pub partitions: Vec<u64>,
    /// `fp32_param`, `exp_avg`, ...: the flat partition of every group; `None` where a group has none.
    pub flats: BTreeMap<String, Vec<Option<StoredTensor>>>,
    /// By group: where in the partition a parameter's part starts and how long it is.
    pub slices: Option<Vec<BTreeMap<String, (u64, u64)>>>,
    /// By group: elements of padding behind each parameter.
    pub paddings: Option<Vec<Vec<u64>>>,
    pub version: Option<String>,
    pub left_out: usize,
    pub problems: Vec<Problem>,
}

/// All tensors of a nest of dicts; none where the nest has no end.
fn tensors(torch: &TorchFile, id: ValueId, bounds: &mut Bounds, left_out: &mut usize) -> Tensors {
    let mut walk = TensorWalk { torch, bounds, left_out: 0, tensors: Vec::new() };
    let walked = walk.collect("", id, 0);
    let (tensors, skipped) = (walk.tensors, walk.left_out);
    *left_out += skipped;
    match walked {
        Ok(()) => {
            tensors.into_iter().map(|(name, tensor)| (own_name(&name).into(), tensor)).collect()
        }
        Err(excess) => {
            bounds.problem("", format!("the state in this file has {excess}"));
            Vec::new()
        }
    }
}

/// The state of the fp32 masters.
pub(super) const MASTER: &str = "fp32_param";

/// A parameter's name without the wrappers in front of it.
fn own_name(name: &str) -> &str {
    name.trim_start_matches("module.")
}

fn saved_as(torch: &TorchFile) -> Option<String> {
    torch.saved_as().map(str::to_owned)
}

/// A file with a bare state dict: a layer of a pipeline, or an expert.
#[derive(Debug)]
pub(super) struct BareStates {
    pub path: PathBuf,
    /// The name under which it was written, without its ending.
    pub saved_as: Option<String>,
    pub tensors: Tensors,
    pub left_out: usize,
    pub problems: Vec<Problem>,
}

impl BareStates {
    pub(super) fn read(files: &FileSet, file: FileId) -> Result<Self, OpenError> {
        let torch = open_torch(files, file)?;
        let path = files.path(file).to_path_buf();
        let mut bounds = Bounds::of_torch(&path, &torch);
        let mut left_out = 0;
        let tensors = tensors(&torch, torch.root(), &mut bounds, &mut left_out);
        let problems = bounds.into_problems();
        Ok(Self { path, saved_as: saved_as(&torch), tensors, left_out, problems })
    }
}

/// Reads plain values; every entry is paid for, since a small file can share them without end.
struct Reader<'a> {
    torch: &'a TorchFile,
    bounds: Bounds,
    excess: Option<OverLimit>,
}

impl Reader<'_> {
    fn get(&self, id: ValueId, key: &str) -> Option<ValueId> {
        let value = self.torch.values().dict_get(id, key)?;
        (!self.torch.values().is_none(value)).then_some(value)
    }

    fn top(&self, key: &str) -> Option<ValueId> {
        self.get(self.torch.root(), key)
    }

    /// Says whether another entry may be looked at.
    fn pays(&mut self, name: &str) -> bool {
        if self.excess.is_none() {
            self.excess = self.bounds.enter(name, 0).err();
        }
        self.excess.is_none()
    }

    fn items(&mut self, id: Option<ValueId>) -> Vec<(Arc<str>, ValueId)> {
        let torch = self.torch;
        let mut items = Vec::new();
        for (key, value) in id.and_then(|id| torch.values().mapping(id)).into_iter().flatten() {
            let key = key_text(torch, key);
            if !self.pays(&key) {
                break;
            }
            items.push((own_name(&key).into(), value));
        }
        items
    }

    fn list(&mut self, id: Option<ValueId>) -> Vec<ValueId> {
        let torch = self.torch;
        let members = id.and_then(|id| torch.values().sequence(id)).into_iter().flatten();
        members.take_while(|_| self.pays("")).collect()
    }

    fn into_problems(mut self) -> Vec<Problem> {
        if let Some(excess) = &self.excess {
            self.bounds.problem("", format!("the state in this file has {excess}"));
        }
        self.bounds.into_problems()
    }

    fn number(&self, id: Option<ValueId>) -> Option<u64> {
        self.torch.values().as_u64(id?)
    }

    fn text(&self, id: Option<ValueId>) -> Option<String> {
        let text = self.torch.values().as_str(id?)?;
        Some(text.chars().take(LIMITS.quoted).collect())
    }

    fn numbers(&mut self, id: ValueId) -> Option<Vec<u64>> {
        let is_list = self.torch.values().sequence(id).is_some();
        let members = is_list.then(|| self.list(Some(id)))?;
        members.into_iter().map(|id| self.torch.values().as_u64(id)).collect()
    }

    /// Names with shapes; what is no shape is a problem.
    fn shapes(&mut self, id: ValueId) -> Shapes {
        let mut shapes = Vec::new();
        for (name, shape) in self.items(Some(id)) {
            match self.numbers(shape).filter(|shape| shape.len() <= LIMITS.rank) {
                Some(shape) => shapes.push((name, shape)),
                None => self.bounds.problem(&name, "its entry in param_shapes is no shape"),
            }
        }
        shapes
    }

    fn tensor(&mut self, name: &str, id: ValueId) -> Option<StoredTensor> {
        match self.torch.tensor(id) {
            Ok(found) => found,
            Err(error) => {
                self.bounds.problem(name, error);
                None
            }
        }
    }
}

impl ModelStates {
    pub(super) fn read(files: &FileSet, file: FileId) -> Result<Self, OpenError> {
        let torch = open_torch(files, file)?;
        let path = files.path(file);
        let bounds = Bounds::of_torch(path, &torch);
        let mut reader = Reader { torch: &torch, bounds, excess: None };
        let is_dict = torch.values().mapping(torch.root()).is_some();
        if !is_dict
            || (reader.top("module").is_none()
                && reader.top("ds_version").is_none()
                && reader.top("global_steps").is_none())
        {
            let what = "holds no model states of DeepSpeed (no module, ds_version, global_steps)";
            return Err(OpenError::Content { path: path.to_path_buf(), what: what.to_owned() });
        }
        let mut states =
            Self { path: path.to_path_buf(), saved_as: saved_as(&torch), ..Self::default() };
        if let Some(module) = reader.top("module") {
            let found = tensors(&torch, module, &mut reader.bounds, &mut states.left_out);
            states.module = Some(found);
        }
        let names = reader.top("buffer_names");
        let names = reader.list(names);
        let names = names.into_iter().filter_map(|id| torch.values().as_str(id));
        states.buffer_names = names.map(|name| own_name(name).to_owned()).collect();
        if let Some(shapes) = reader.top("param_shapes") {
            // A list with a dict for every group; older versions had one dict.
            let groups = match torch.values().mapping(shapes) {
                Some(_) => vec![shapes],
                None => reader.list(Some(shapes)),
            };
            states.param_shapes = groups.into_iter().map(|group| reader.shapes(group)).collect();
        }
        if let Some(shapes) = reader.top("frozen_param_shapes") {
            states.frozen_shapes = reader.shapes(shapes);
        }
        let fragments = reader.top("frozen_param_fragments");
        for (name, id) in reader.items(fragments) {
            if let Some(tensor) = reader.tensor(&name, id) {
                states.frozen_fragments.insert(name, tensor);
            }
        }
        let shared = reader.top("shared_params");
        for (alias, kept) in reader.items(shared) {
            if let Some(kept) = torch.values().as_str(kept) {
                states.shared.push((alias.to_string(), own_name(kept).to_owned()));
            }
        }
        states.read_plain_optimizer(&mut reader);
        let degrees = reader.top("checkpoint_parallel_dimensions");
        let degree = |key| degrees.and_then(|id| reader.number(reader.get(id, key)));
        states.degrees = degree("pp_degree").zip(degree("tp_degree"));
        states.mp_world = reader.number(reader.top("mp_world_size"));
        states.version = reader.text(reader.top("ds_version"));
        states.steps = reader.number(reader.top("global_steps"));
        let args = ["neox_args", "args"].iter().find_map(|key| reader.top(key));
        states.args = args.and_then(|args| args_of(&torch, args, &mut reader.bounds));
        states.info = reader.top("universal_checkpoint_info").map(|id| state_of(&torch, id));
        let entries = torch.values().mapping(torch.root()).into_iter().flatten();
        let named = entries.filter_map(|(key, value)| Some((torch.values().as_str(key)?, value)));
        states.state = named
            .filter(|(key, _)| !NOT_STATE.contains(key) && key.len() <= LIMITS.name)
            .take(STATE_ENTRIES)
            .map(|(key, value)| (key.to_owned(), state_of(&torch, value)))
            .collect();
        states.problems = reader.into_problems();
        Ok(states)
    }

    /// `{"state": {0: {"exp_avg": ...}}, "param_groups": [...]}`: parameters have numbers and no names. With fp16 or bf16
    /// that is the `optimizer_state_dict` of a dict with the masters (DeepSpeed 0.19.8, `runtime/fp16/unfused_optimizer.py`,
    /// `fused_optimizer.py`): a list of parameters for every group, or one flat parameter.
    fn read_plain_optimizer(&mut self, reader: &mut Reader<'_>) {
        let Some(wrapper) = reader.top("optimizer") else { return };
        let optimizer = reader.get(wrapper, "optimizer_state_dict").unwrap_or(wrapper);
        let Some(groups) = reader.get(optimizer, "param_groups") else { return };
        let flat = reader.get(wrapper, "fp32_groups_flat");
        let masters = match flat {
            Some(_) => reader.list(flat),
            None => {
                let groups = reader.list(reader.get(wrapper, "fp32_groups"));
                groups.into_iter().flat_map(|group| reader.list(Some(group))).collect()
            }
        };
        for (number, id) in (0..).zip(masters) {
            match reader.tensor(&format!("optimizer.{MASTER}.{number}"), id) {
                Some(tensor) => self.plain_optimizer.push((MASTER.to_owned(), number, tensor)),
                None => self.left_out += 1,
            }
        }
        let counts = reader.list(Some(groups)).into_iter().map(|group| {
            let params = reader.get(group, "params")?;
            Some(reader.torch.values().sequence(params)?.count())
        });
        self.optimizer_params = flat.is_none().then(|| counts.sum()).flatten();
        let states = reader.get(optimizer, "state");
        for (number, states) in reader.items(states) {
            let Ok(number) = number.parse::<u64>() else { continue };
            for (state, id) in reader.items(Some(states)) {
                match reader.tensor(&format!("optimizer.{state}.{number}"), id) {
                    Some(tensor) if !tensor.shape().is_empty() => {
                        self.plain_optimizer.push((state.to_string(), number, tensor));
                    }
                    _ => self.left_out += 1,
                }
            }
        }
    }

    /// All parameters of the flat partitions.
    pub(super) fn params(&self) -> impl Iterator<Item = &(Arc<str>, Vec<u64>)> {
        self.param_shapes.iter().flatten()
    }
}

/// The flat fp32 masters, by the name that both optimizers have for them.
const FP32: [(&str, bool); 2] =
    [("single_partition_of_fp32_groups", false), ("fp32_flat_groups", true)];

impl ZeroStates {
    pub(super) fn read(files: &FileSet, file: FileId) -> Result<Self, OpenError> {
        let torch = open_torch(files, file)?;
        let path = files.path(file);
        let bounds = Bounds::of_torch(path, &torch);
        let mut reader = Reader { torch: &torch, bounds, excess: None };
        let refuse =
            |what: &str| OpenError::Content { path: path.to_path_buf(), what: what.to_owned() };
        let Some(zero) = reader.top("optimizer_state_dict") else {
            return Err(refuse("holds no optimizer_state_dict of ZeRO"));
        };
        if reader.get(zero, "local_sub_partitions_of_fp32_groups").is_some() {
            return Err(refuse(
                "written by DeepSpeed before 0.3.16: its interleaved partitions are not read",
            ));
        }
        let fp32 = FP32.iter().find_map(|(key, stage3)| Some((reader.get(zero, key)?, *stage3)));
        let Some((fp32, is_stage3)) = fp32 else {
            return Err(refuse("holds no fp32 partitions of ZeRO"));
        };
        let saved_as = saved_as(&torch);
        let mut states = Self { path: path.to_path_buf(), saved_as, is_stage3, ..Self::default() };
        states.version = reader.text(reader.top("ds_version"));
        states.version = states.version.take().or(reader.text(reader.get(zero, "ds_version")));
        if let Some(count) = reader.get(zero, "partition_count") {
            states.partitions = match reader.torch.values().as_u64(count) {
                Some(count) => vec![count],
                None => reader.numbers(count).unwrap_or_default(),
            };
        }
        let groups = reader.list(Some(fp32));
        let masters = groups.iter().map(|id| reader.tensor(MASTER, *id)).collect::<Vec<_>>();
        let group_count = masters.len();
        states.flats.insert(MASTER.to_owned(), masters);
        let inner = if is_stage3 { "optimizer_state_dict" } else { "base_optimizer_state" };
        states.read_moments(reader.get(zero, inner), group_count, &mut reader);
        let mappings = reader.get(zero, "param_slice_mappings");
        let mappings = reader.list(mappings);
        if !mappings.is_empty() {
            let slices = mappings.into_iter().map(|id| {
                let addresses = reader.items(Some(id)).into_iter().map(|(name, address)| {
                    let number = |key| {
                        let value = torch.values().attribute(address, key);
                        reader.number(value.or_else(|| reader.get(address, key)))
                    };
                    Some((name.to_string(), (number("start")?, number("numel")?)))
                });
                addresses.collect::<Option<_>>()
            });
            states.slices = slices.collect();
            if states.slices.is_none() {
                reader.bounds.problem("", "its param_slice_mappings cannot be read");
            }
        }
        let paddings = reader.get(zero, "param_alignment_paddings");
        let paddings = reader.list(paddings);
        if !paddings.is_empty() {
            states.paddings = paddings.into_iter().map(|id| reader.numbers(id)).collect();
        }
        states.problems = reader.into_problems();
        Ok(states)
    }

    /// `{"state": {group: {"exp_avg": ...}}}`, or a list with a dict for every group.
    fn read_moments(&mut self, optimizer: Option<ValueId>, groups: usize, reader: &mut Reader<'_>) {
        let Some(optimizer) = optimizer else { return };
        let by_group: Vec<(usize, ValueId)> = match reader.get(optimizer, "state") {
            Some(state) => {
                let items = reader.items(Some(state)).into_iter();
                items.filter_map(|(group, id)| Some((group.parse().ok()?, id))).collect()
            }
            None => reader.list(Some(optimizer)).into_iter().enumerate().collect(),
        };
        for (group, states) in by_group {
            for (state, id) in reader.items(Some(states)) {
                if group >= groups {
                    let name = format!("optimizer.{state}");
                    reader
                        .bounds
                        .problem(&name, format!("has a group {group} that the masters have not"));
                    continue;
                }
                match reader.tensor(&state, id) {
                    Some(tensor) if !tensor.shape().is_empty() => {
                        let flats = self.flats.entry(state.to_string());
                        flats.or_insert_with(|| vec![None; groups])[group] = Some(tensor);
                    }
                    // Steps and the like: one number for all.
                    _ => self.left_out += 1,
                }
            }
        }
    }
}

/// The folder or file, as a message names it.
pub(super) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
