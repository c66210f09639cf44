//! Megatron-Core's distributed checkpoints: whole tensors under global names, whatever ranks wrote them.
//!
//! Names, sections and the state of the run are the same for all of them and read here; the places of the bytes are each
//! backend's own business. Facts from Megatron-LM core_v0.4 to core_v0.19 (`megatron/training/checkpointing.py`,
//! `core/dist_checkpointing`, `core/optimizer/distrib_optimizer.py`).

mod dcp;
mod described;
pub(super) mod fsdp;
mod optimizer;
pub(super) mod torch_dist;
pub(super) mod zarr;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Extent, Origin, Problem, RunState, Section};
use crate::containers::torch::{TorchFile, ValueId};
use crate::layout::rules::Rules;
use crate::layout::{ArgName, Global, RunArgs, from_global};
use crate::names::Naming;
use crate::names::megatron::{optimizer_state_name, without_wrappers};
use crate::storage::FileSet;
use crate::tensor::LogicalTensor;

use self::optimizer::{Key, OptimizerBuckets, PlacedFor, add_placed, parse};
use super::error::OpenError;
use super::format::OpenOptions;
use super::identity::{FolderStep, ForeignFile, Witness, foreign, refuse};
use super::iterations::ITERATION as ITERATION_FOLDER;
use super::probe::{Probe, SmallFile};
use super::roots::{Root, step_behind};
use super::state::{args_of, scalar, state_at, state_of};
use super::walk::Bounds;

/// The file that says which backend wrote a checkpoint. It is written last.
const METADATA: &str = "metadata.json";
/// The file of everything that is no tensor of any rank's own, up to core 0.18; later it is an object among the others.
const COMMON: &str = "common.pt";
/// The file in which Megatron Bridge keeps what a run has come to, a tensor a number (`bridge/training/state.py`, `TrainState`).
const TRAIN_STATE: &str = "train_state.pt";
/// A checkpoint within a checkpoint, which NVIDIA's model optimizer keeps for itself.
const MODELOPT: &str = "modelopt_state";

/// What is in the name of every weight that Megatron Bridge adds to a model (`peft/adapter_wrapper.py`).
const ADAPTER: &str = ".adapter.";

/// What is in the name of the word embeddings.
const EMBEDDING: &str = "word_embeddings.";

/// The key of the iteration in the state of a run.
const ITERATION: &str = "iteration";

/// Folders of Megatron Bridge and NeMo with a checkpoint in them, and those of the roles in verl's.
const USUAL_FOLDERS: &[&str] = &["weights", "dist_ckpt", "actor", "critic"];

/// The name of the backend that `metadata.json` gives; `None` where there is no such file or it says none.
fn backend(folder: &Probe) -> Result<Option<String>, OpenError> {
    let SmallFile::Text(text) = folder.small_file(METADATA)? else { return Ok(None) };
    let content: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let name = content.get("sharded_backend").and_then(|name| name.as_str());
    Ok(name.map(str::to_owned))
}

/// A tensor of a distributed checkpoint.
struct GlobalTensor {
    key: Arc<str>,
    tensor: LogicalTensor,
    /// The shape of the parameter, where this is a grid of flattened parts of it.
    flattened: Option<Vec<u64>>,
}

/// The contents of a checkpoint as a backend finds them.
#[derive(Default)]
struct Contents {
    files: FileSet,
    tensors: Vec<GlobalTensor>,
    /// The keys of objects that are no tensors.
    objects: Vec<String>,
    common: CommonState,
    problems: Vec<Problem>,
    notes: Vec<String>,
    /// Files with tensors in them.
    shards: usize,
    /// Tensors are stored in the pieces that ranks made of them.
    has_pieces: bool,
}

/// The state of the run, which the checkpoint holds once for all ranks.
#[derive(Debug, Default)]
struct CommonState {
    args: BTreeMap<String, PlainValue>,
    /// The file with the arguments in it.
    args_file: PathBuf,
    /// Everything else.
    state: RunState,
    iteration: Option<u64>,
    /// The step that Megatron Bridge says.
    train_step: Option<u64>,
    /// Only an adapter was trained, and is stored.
    is_adapter: bool,
}

impl CommonState {
    /// Reads it from a dict.
    fn read(torch: &TorchFile, root: ValueId, path: &Path) -> (Self, Vec<Problem>) {
        let values = torch.values();
        let mut bounds = Bounds::new(path);
        let args = values.dict_get(root, "args");
        if values.mapping(root).is_none() {
            bounds.problem("", "holds no dict of what the run says of itself");
        }
        let mut common = Self {
            args: args.and_then(|args| args_of(torch, args, &mut bounds)).unwrap_or_default(),
            args_file: path.to_path_buf(),
            state: RunState::default(),
            iteration: values.dict_get(root, "iteration").and_then(|id| values.as_u64(id)),
            train_step: None,
            is_adapter: false,
        };
        for (key, value) in state_at(torch, root, |key| key != "args") {
            common.state.insert(key, path, value);
        }
        (common, bounds.into_problems())
    }

    /// `common.pt`; `None` where there is no such file. Without it the tensors are the same, so a damaged one is a problem only.
    ///
    /// # Errors
    /// It cannot be looked at.
    fn of_folder(
        folder: &Path,
        files: &mut FileSet,
    ) -> Result<Option<(Self, Vec<Problem>)>, OpenError> {
        let path = folder.join(COMMON);
        let added = files.add_if_there(&path).map_err(OpenError::io(&path))?;
        Ok(added.map(|file| match TorchFile::open(files, files.whole(file)) {
            Ok(torch) => Self::read(&torch, torch.root(), &path),
            Err(error) => (Self::default(), vec![Problem::of_file(&path, error)]),
        }))
    }

    /// Adds what Megatron Bridge says of the run in a file of its own, where there is one.
    fn add_train_state(&mut self, folder: &Path, files: &mut FileSet) -> Result<(), Problem> {
        let path = folder.join(TRAIN_STATE);
        let added = files.add_if_there(&path).map_err(|error| Problem::of_file(&path, error))?;
        let Some(file) = added else { return Ok(()) };
        let opened = TorchFile::open(files, files.whole(file));
        let torch = opened.map_err(|error| Problem::of_file(&path, error))?;
        let numbers = torch.values().mapping(torch.root()).into_iter().flatten();
        for (key, id) in numbers.take(LIMITS.state_entries) {
            let key = torch.values().as_str(key).filter(|key| key.len() <= LIMITS.name);
            let Some(key) = key else { continue };
            let number = torch.tensor(id).map_err(|error| Problem::of_file(&path, error))?;
            let number = number.filter(|tensor| tensor.shape().iter().all(|&size| size == 1));
            let number = number.map(|tensor| LogicalTensor::from_stored(&tensor, key));
            let value = number.map(|tensor| scalar(&tensor, files)).transpose();
            let value = value.map_err(|error| Problem::of_file(&path, error))?.flatten();
            let value = value.unwrap_or_else(|| state_of(&torch, id));
            if key == "step" {
                self.train_step = value.as_u64();
            }
            self.state.insert(format!("train_state.{key}"), &path, value);
        }
        Ok(())
    }

    /// Takes the description beside the weights for the arguments that the checkpoint does not have.
    fn describe(
        &mut self,
        folder: &Path,
        files: &mut FileSet,
        notes: &mut Vec<String>,
    ) -> Result<(), Problem> {
        if self.args.is_empty()
            && let Some(described) = described::find(folder, files, notes)?
        {
            (self.args, self.args_file) = (described.args, described.file);
            self.is_adapter = described.is_adapter;
        }
        Ok(())
    }

    /// The files that say another iteration than each other or the folder's name.
    fn foreign(
        &self,
        root: &Root,
        files: &FileSet,
        options: &OpenOptions,
    ) -> Result<Vec<ForeignFile>, OpenError> {
        let witness = |path: &Path, step: u64| Witness {
            path: path.to_path_buf(),
            place: root.probe.name(),
            claim: None,
            facts: vec![(ITERATION.to_owned(), PlainValue::Int(step.try_into().unwrap_or(-1)))],
            ..Witness::default()
        };
        let common = self.iteration.map(|step| witness(&self.args_file, step));
        let bridge = self.train_step.map(|step| witness(&root.path.join(TRAIN_STATE), step));
        let witnesses: Vec<Witness> = common.into_iter().chain(bridge).collect();
        let step =
            step_behind(ITERATION_FOLDER, &root.probe.name()).filter(|_| !witnesses.is_empty());
        let folder = step.map(|step| FolderStep { path: &root.path, step, fact: ITERATION });
        foreign(files, &witnesses, folder.as_ref(), options)
    }

    /// The sharding type of the distributed optimizer's state, where it is stored.
    fn optimizer_sharding(&self) -> Option<&str> {
        let text = |outer, inner| self.state.get(outer)?.as_map()?.get(inner)?.as_text();
        text("optimizer", "param_state_sharding_type")
            .or_else(|| text("content_metadata", "distrib_optim_sharding_type"))
    }
}

/// Puts the contents that a backend found under canonical names.
fn into_catalog(
    found: Contents,
    format: &'static str,
    root: &Root,
    options: &OpenOptions,
    parse: impl Fn(&str) -> Key<'_>,
) -> Result<Catalog, OpenError> {
    let Contents {
        mut files,
        tensors,
        objects,
        mut common,
        mut problems,
        mut notes,
        shards,
        has_pieces,
    } = found;
    problems.extend(common.add_train_state(&root.path, &mut files).err());
    notes.extend(refuse(common.foreign(root, &files, options)?, options)?);
    problems.extend(common.describe(&root.path, &mut files, &mut notes).err());
    let run_args = RunArgs::new(common.args.clone(), &options.run_args);
    let wants_optimizer = options.wants(Section::Optimizer);
    let SortedTensors { globals, states, mut buckets, problems: unsorted } =
        sort_tensors(tensors, wants_optimizer, parse);
    buckets.has_pieces = has_pieces;
    if wants_optimizer {
        buckets.add_objects(&objects);
    }
    let rules = Rules::new(&options.rules);
    let assembly = from_global(globals, &run_args, &rules);
    let has = |part: &str| assembly.tensors.keys().any(|name| name.as_str().contains(part));
    let is_part = common.is_adapter && has(ADAPTER) && !has(EMBEDDING);
    if is_part {
        notes.push("holds what an adapter adds; the model that it adds to is elsewhere".to_owned());
    }
    let origin = Origin {
        format,
        layout: layout_text(&run_args),
        iteration: common.iteration.or(common.train_step).or(root.iteration),
        shards,
        left_out: objects.len() + assembly.buffers,
        naming: Naming::Canonical,
        extent: if is_part { Extent::Part } else { Extent::Whole },
        ..Origin::default()
    };
    let sharding = common.optimizer_sharding().map(str::to_owned);
    let mut catalog = CatalogBuilder::new(origin, files).with_rules(&options.rules);
    // A bucket that cannot be read leaves the others without a place, which needs no problem of its own.
    let is_whole = unsorted.is_empty() && !problems.iter().any(is_of_optimizer);
    catalog.problems(problems.into_iter().chain(unsorted));
    catalog.notes(notes);
    catalog.add_run_state(common.state);
    catalog.add_args(&common.args_file, &run_args);
    for (name, error) in assembly.problems {
        catalog.problem(Problem::of_tensor(name, error));
    }
    let model = PlacedFor {
        weights: &assembly.tensors,
        run_args: &run_args,
        rules: &rules,
        sharding: sharding.as_deref(),
    };
    let placed = buckets.place(&model);
    let mut merged = assembly.tensors;
    merged.retain(|name, _| options.wants(Section::of(name.as_str())));
    catalog.add_merged(merged);
    match placed {
        Some(Ok(states)) => add_placed(&mut catalog, states, &run_args),
        Some(Err(reason)) if is_whole => catalog.problem(unplaced(&reason, sharding.as_deref())),
        Some(Err(_)) | None => {}
    }
    buckets.add_to(&mut catalog, sharding.as_deref());
    let prefixes = states.iter().map(|state| format!("optimizer.{state}."));
    let model = options.wants(Section::Model).then(String::new);
    for prefix in model.into_iter().chain(prefixes) {
        catalog.tie_output_layer(&prefix, None, &run_args);
    }
    if root.probe.has_folder(MODELOPT)? {
        catalog.note(format!("left out {MODELOPT}, which is no part of the model"));
    }
    Ok(catalog.finish())
}

/// Tells whether a problem is, or may be, with a part of the optimizer.
fn is_of_optimizer(problem: &Problem) -> bool {
    problem.tensor.as_deref().is_none_or(|name| name.contains("optimizer."))
}

/// The problem of states that have no place.
fn unplaced(reason: &str, sharding: Option<&str>) -> Problem {
    let kind = sharding.map(|kind| format!(" ({kind})")).unwrap_or_default();
    let message = format!(
        "cannot be compared: its states are stored by bucket{kind}, without the names of parameters, and these cannot be \
         placed: {reason}; or leave the optimizer out with --section model"
    );
    Problem::of_tensor("optimizer", message)
}

/// The tensors of a checkpoint by the way in which they go into a catalog.
#[derive(Default)]
struct SortedTensors {
    /// Parameters and their states.
    globals: Vec<Global>,
    /// The kinds of these states.
    states: BTreeSet<Arc<str>>,
    buckets: OptimizerBuckets,
    problems: Vec<Problem>,
}

/// The optimizer, where there is one and it is not to be read. Its keys are not counted: one may be all layers, or a bucket.
fn unread_optimizer<'k>(
    mut keys: impl Iterator<Item = Key<'k>>,
    options: &OpenOptions,
) -> Option<(Section, Option<usize>)> {
    let is_there = keys.any(|key| !matches!(key, Key::Weight(_)));
    (is_there && !options.wants(Section::Optimizer)).then_some((Section::Optimizer, None))
}

fn sort_tensors(
    tensors: Vec<GlobalTensor>,
    wants_optimizer: bool,
    parse: impl Fn(&str) -> Key<'_>,
) -> SortedTensors {
    let mut sorted = SortedTensors::default();
    for GlobalTensor { key, tensor, flattened } in tensors {
        let (state, name) = match parse(&key) {
            Key::Weight(name) => (None, name),
            _ if !wants_optimizer => continue,
            Key::State { state, name } => (Some(optimizer_state_name(state).into()), name),
            Key::Bucket { optimizer, bucket, state } => {
                let parts = [optimizer, bucket, state];
                let added = sorted.buckets.add_bucket(parts, tensor, flattened.is_some());
                sorted.problems.extend(added.err().map(|error| Problem::of_tensor(&*key, error)));
                continue;
            }
            Key::Optimizer(rest) => {
                sorted.buckets.add_tensor(rest, tensor);
                continue;
            }
        };
        sorted.states.extend(state.clone());
        let name = without_wrappers(name).to_owned();
        let stored_name = Arc::clone(&key);
        sorted.globals.push(Global { stored_name, state, name, tensor, flattened });
    }
    sorted
}

/// The layout of the run that wrote it, which shows in nothing but its own words.
fn layout_text(run_args: &RunArgs) -> String {
    let axes = [
        ("tp", ArgName::TENSOR_MODEL_PARALLEL_SIZE, true),
        ("pp", ArgName::PIPELINE_MODEL_PARALLEL_SIZE, true),
        ("ep", ArgName::EXPERT_MODEL_PARALLEL_SIZE, false),
    ];
    let sizes = axes.iter().filter_map(|(axis, fact, always)| {
        let size = run_args.size(*fact).filter(|&size| *always || size > 1)?;
        Some(format!("{axis}{size}"))
    });
    sizes.collect::<Vec<_>>().join(" ")
}
