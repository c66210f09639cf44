//! Plain checkpoints of `torch.distributed.checkpoint`: FSDP, DTensor and whatever else saves a state dict with it.
//!
//! The names are those of the state dict without its `model.` and without what wrappers put between; see `names.rs`.
//! The shards of `HuggingFaceStorageWriter` are read here too; see `distributed.rs`.

mod distributed;
mod names;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use crate::base::limits::{ENTRY, LIMITS, OVER_METADATA};
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Listing, Origin, Problem, Section};
use crate::containers::dcp::{Checkpoint, EntryError, METADATA, Metadata, SliceError};
use crate::containers::torch::TorchFile;
use crate::names::Name;
use crate::tensor::LogicalTensor;

use super::error::{MissingFile, OpenError};
use super::format::{Format, OpenOptions};
use super::identity::{FolderStep, Witness, foreign, refuse};
use super::nest::tensors_of;
use super::probe::{OpenedMetadata, Probe};
use super::roots::{
    Claim, FILE, METADATA as EVIDENCE, Root, Score, newest_note, numbered, step_behind,
};
use super::state::{scalar, state_of};
use super::walk::joined;
use super::wrappers::is_flat_parameter;
use names::{KeyForm, KeyMeaning};

/// `dcp`: a folder of data files with `.metadata`, with `__<rank>.metadata` of every rank, or of safetensors shards.
pub(super) const FORMAT: Format = Format {
    name: "dcp",
    looked_for: &[METADATA],
    usual_folders: &["actor", "critic"],
    rank_folders: &[],
    claim,
    read,
};

/// Prefixes of the folders of torchtitan and others that hold the checkpoint of one step each.
const STEPS: [&str; 2] = ["step-", "step_"];

/// The step at which torchtitan saved a checkpoint, which is also that of the folder's name, `step-1000`
/// (`torchtitan/components/checkpoint.py`: `_create_checkpoint_id`; `torchtitan/train.py`: `state_dict`, v0.1 to v0.2).
const STEP: &str = "train_state.step";

/// End of the names of data files (torch 2.1 to 2.15, `torch/distributed/checkpoint/filesystem.py`, `DEFAULT_SUFFIX`).
const DATA_FILE: &str = ".distcp";

/// The folder into which Hugging Face accelerate puts the model, beside `optimizer_0` (accelerate 1.0, `utils/constants.py`).
const OF_ACCELERATE: &str = "pytorch_model_fsdp_0";

/// Claims a checkpoint by the names of its files, that of accelerate inside of a folder, or that of the newest step.
fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if probe.is_file() {
        let what = "one file of a distributed checkpoint, which its .metadata takes apart; name the folder";
        let error =
            || OpenError::Content { path: probe.path().to_path_buf(), what: what.to_owned() };
        let is_own = probe.name().ends_with(DATA_FILE);
        return Ok(is_own.then(|| Claim::broken(Score::Names, FILE, error())));
    }
    if probe.has_metadata() || distributed::is_distributed(probe) {
        return Ok(Some(Claim::here(Score::Names, EVIDENCE)));
    }
    if let Some(model) = probe.child(OF_ACCELERATE)?
        && model.has_metadata()
    {
        let note =
            format!("took {OF_ACCELERATE}/; an optimizer_0/ beside it is a checkpoint of its own");
        return Ok(Some(Claim::below(Score::Names, EVIDENCE, probe, OF_ACCELERATE, vec![note])));
    }
    if probe.names().any(|name| name.ends_with(DATA_FILE)) {
        let why = "the *.distcp files beside it cannot be read without it; the save was interrupted, or it was not copied";
        let missing = MissingFile { path: probe.path().join(METADATA), why: why.to_owned() };
        let error = OpenError::MissingFiles { files: vec![missing] };
        return Ok(Some(Claim::broken(Score::File, EVIDENCE, error)));
    }
    let steps = numbered(probe, &STEPS)?;
    Ok(steps.last().map(|(_, newest)| {
        let among = format!("{} checkpoints", steps.len());
        let notes = newest_note(probe, steps.len(), &among, newest);
        Claim::below(Score::Below, STEPS[0], probe, newest, notes)
    }))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    if distributed::is_distributed(&root.probe) {
        return distributed::read(root, options);
    }
    let OpenedMetadata { mut files, metadata } = root.probe.take_metadata()?;
    let keys = metadata.tensors.keys().map(|key| &**key);
    let objects = metadata.objects.keys().map(|key| &**key);
    let names = KeyForm::of(keys, objects, metadata.parents.as_ref());
    let wanted = |key: &str| match names.read(key) {
        _ if metadata.objects.contains_key(key) => {
            !names.is_of_optimizer(key) || options.wants(Section::Optimizer)
        }
        KeyMeaning::Model(_) => options.wants(Section::Model),
        KeyMeaning::Optimizer(_) => options.wants(Section::Optimizer),
        KeyMeaning::State(name) => name == STEP,
        KeyMeaning::Buffer => false,
    };
    let wanted: HashSet<Arc<str>> = metadata
        .tensors
        .keys()
        .chain(metadata.objects.keys())
        .filter(|key| wanted(key))
        .cloned()
        .collect();
    let mut checkpoint = Checkpoint::of(
        metadata,
        &root.path,
        &mut files,
        |key| wanted.contains(key),
        options.values(),
    );
    let origin = Origin {
        format: FORMAT.name,
        iteration: root.iteration,
        shards: checkpoint.data_files,
        ..Origin::default()
    };
    let catalog = CatalogBuilder::new(origin, files);
    let mut reading = CatalogReader { names, catalog, stored: HashMap::new() };
    reading.list(&checkpoint.metadata, options);
    for error in std::mem::take(&mut checkpoint.metadata.errors) {
        let is_of_optimizer =
            error.name.as_ref().is_some_and(|name| reading.names.is_of_optimizer(name));
        if !is_of_optimizer || options.wants(Section::Optimizer) {
            reading.error(error);
        }
    }
    for file in &checkpoint.lost_files {
        let problem = Problem::lost_file(&file.path, &file.what, &file.tensors);
        reading.catalog.problem(problem);
    }
    reading.add_state(&checkpoint, |key| wanted.contains(key), options);
    reading.count_left_out(&checkpoint.metadata);
    reading.count_unread(&checkpoint.metadata, options);
    for (file, bytes) in &checkpoint.behind {
        let leftover = Problem::bytes_behind(reading.catalog.files().path(*file), *bytes);
        reading.catalog.leftover(leftover);
    }
    let tensors = std::mem::take(&mut checkpoint.tensors);
    // The places of very many chunks need not be there while the catalog grows.
    drop(checkpoint);
    for (key, tensor) in tensors {
        match tensor {
            Ok(tensor) => reading.add_tensor(&key, tensor),
            Err(error) => reading.catalog.problem(Problem::of_tensor(&*key, error)),
        }
    }
    reading.check_step(root, options)?;
    Ok(reading.catalog.finish())
}

/// A checkpoint on the way to a catalog.
struct CatalogReader {
    names: KeyForm,
    catalog: CatalogBuilder<'static>,
    /// The key under which each name was stored.
    stored: HashMap<Name, Arc<str>>,
}

impl CatalogReader {
    fn error(&mut self, error: EntryError) {
        let EntryError { file, name, message } = error;
        let file = file.map(|file| self.catalog.files().path(file).to_path_buf());
        let tensor = name.map(|name| name.to_string());
        self.catalog.problem(Problem { file, tensor, message, ..Problem::default() });
    }

    fn add_tensor(&mut self, key: &Arc<str>, tensor: LogicalTensor) {
        if self.names.is_beside_model(key)
            && !self.names.is_of_optimizer(key)
            && tensor.numel() == 1
            && let Some(value) = self.scalar(key, &tensor)
        {
            let path = self.catalog.files().path(tensor.source().file).to_path_buf();
            self.catalog.add_state(&path, [(self.names.of_object(key).to_owned(), value)]);
            return;
        }
        let (KeyMeaning::Model(name) | KeyMeaning::Optimizer(name)) = self.names.read(key) else {
            return;
        };
        let name = Name::new(name);
        if let Some(other) = self.stored.insert(name.clone(), Arc::clone(key)) {
            let message = format!("{other} and {key} are one name without what wrappers add to it");
            self.catalog.problem(Problem::of_tensor(name.as_str(), message));
            return;
        }
        self.catalog.add(name, tensor);
    }

    /// Reads the only element of a tensor of the run's state.
    fn scalar(&mut self, key: &str, tensor: &LogicalTensor) -> Option<PlainValue> {
        let files = self.catalog.files();
        let path = files.path(tensor.source().file).to_path_buf();
        scalar(tensor, files).unwrap_or_else(|error| {
            self.catalog.problem(Problem::of_tensor(key, error).in_file(path));
            None
        })
    }

    /// Reads the objects that are no tensors.
    fn add_state(
        &mut self,
        checkpoint: &Checkpoint,
        wanted: impl Fn(&str) -> bool,
        options: &OpenOptions,
    ) {
        let mut wanted = checkpoint.metadata.objects.keys().filter(|key| wanted(key));
        let keys: Vec<&Arc<str>> = wanted.by_ref().take(LIMITS.objects).collect();
        if let Some(key) = wanted.next() {
            let message =
                format!("not read, as all after {} objects: they may hold tensors", LIMITS.objects);
            self.catalog.problem(Problem::of_tensor(&**key, message));
        }
        let files = self.catalog.files();
        let read = keys.par_iter().map(|key| {
            let torch = checkpoint.object(key, files)?;
            Ok((state_of(&torch, torch.root()), holds_tensors(&torch)))
        });
        let read: Vec<Result<(PlainValue, bool), SliceError>> = read.collect();
        let mut left = LIMITS.metadata;
        for (key, found) in keys.into_iter().zip(read) {
            match found {
                Ok((fact, holds_tensors)) => {
                    let file = checkpoint.path_of_object(key).unwrap_or_default();
                    self.catalog.add_state(&file, [(self.names.of_object(key).to_owned(), fact)]);
                    if holds_tensors
                        && !matches!(
                            self.names.read(key),
                            KeyMeaning::State(_) | KeyMeaning::Buffer
                        )
                    {
                        self.add_tensors_of(key, checkpoint, &mut left, options);
                    }
                }
                Err(_) if checkpoint.is_lost_with_file(key) => {}
                Err(error) => self.catalog.problem(Problem::of_tensor(&**key, error)),
            }
        }
        const ITERATIONS: [&str; 3] = ["iteration", "step", "global_step"];
        let state = self.catalog.state();
        let said = ITERATIONS.iter().find_map(|key| state.get(key)?.as_u64());
        self.catalog.origin.iteration = self.catalog.origin.iteration.or(said);
    }

    /// Adds the tensors inside an object: planners take dicts and lists apart, tuples never, and nothing at all with
    /// `flatten_state_dict=False`.
    fn add_tensors_of(
        &mut self,
        key: &Arc<str>,
        checkpoint: &Checkpoint,
        left: &mut usize,
        options: &OpenOptions,
    ) {
        let torch = match checkpoint.object(key, self.catalog.files()) {
            Ok(torch) => torch,
            Err(error) => {
                return self.catalog.problem(Problem::of_tensor(&**key, error));
            }
        };
        let (tensors, problems) = tensors_of(&torch, Path::new(&**key));
        self.catalog.problems(problems);
        for (below, stored) in tensors {
            let name = joined(key, &below);
            let Some(rest) = left.checked_sub(name.len() + ENTRY) else {
                return self.catalog.problem(Problem::of_tensor(&**key, OVER_METADATA));
            };
            *left = rest;
            let section =
                if self.names.is_of_optimizer(&name) { Section::Optimizer } else { Section::Model };
            if options.wants(section) {
                let tensor = LogicalTensor::from_stored(&stored, name.as_str());
                self.add_tensor(&name.into(), tensor);
            }
        }
    }

    /// Holds the step that torchtitan says against the one in the name that it gave to the folder.
    fn check_step(&mut self, root: &Root, options: &OpenOptions) -> Result<(), OpenError> {
        let state = self.catalog.state();
        let whole = || state.get(STEP.split('.').next()?)?.as_map()?.get("step");
        let said = state.get(STEP).or_else(whole);
        let name = root.probe.name();
        if let (Some(said), Some(step)) = (said, step_behind(STEPS[0], &name)) {
            let witness = Witness {
                path: root.path.join(METADATA),
                place: name,
                facts: vec![(STEP.to_owned(), said.clone())],
                ..Witness::default()
            };
            let folder = FolderStep { path: &root.path, step, fact: STEP };
            let found = foreign(self.catalog.files(), &[witness], Some(&folder), options)?;
            self.catalog.notes(refuse(found, options)?);
        }
        Ok(())
    }

    /// Lists what there should be: what was to be saved, and the weights of which the optimizer has something. Objects of single
    /// ranks need not have been saved; tensors end as others do.
    fn list(&mut self, metadata: &Metadata, options: &OpenOptions) {
        let last = |key: &str| key.rsplit('.').next().unwrap_or(key).to_owned();
        let lasts: HashSet<String> = metadata.tensors.keys().map(|key| last(key)).collect();
        let planned = metadata.unsaved.iter().filter(|key| lasts.contains(&last(key)));
        let wanted = |key: &Arc<str>| match self.names.read(key) {
            KeyMeaning::Model(name) if options.wants(Section::Model) => Some(Name::new(name)),
            KeyMeaning::Optimizer(name) if options.wants(Section::Optimizer) => {
                Some(Name::new(name))
            }
            _ => None,
        };
        let names = planned.filter_map(wanted).collect();
        let words = format!("planner_data of {METADATA} lists it");
        self.catalog.list(Listing { words, names, is_certain: true });
        if !options.wants(Section::Model) {
            return;
        }
        let keys = metadata.tensors.keys().chain(metadata.objects.keys());
        let names = keys.filter_map(|key| self.names.weight_of(key)).map(Name::new).collect();
        let words = "the optimizer knows it".to_owned();
        self.catalog.list(Listing { words, names, is_certain: false });
    }

    /// Counts the tensors of the optimizer, where they are not to be read.
    fn count_unread(&mut self, metadata: &Metadata, options: &OpenOptions) {
        let is_of_optimizer =
            |key: &&Arc<str>| matches!(self.names.read(key), KeyMeaning::Optimizer(_));
        let count = metadata.tensors.keys().filter(is_of_optimizer).count();
        if count > 0 && !options.wants(Section::Optimizer) {
            self.catalog.origin.unread.insert(Section::Optimizer, Some(count));
        }
    }

    /// Counts what is no weight, and says what else a user should know of the names.
    fn count_left_out(&mut self, metadata: &Metadata) {
        let mut of_run = Vec::new();
        let mut flat = Vec::new();
        for key in metadata.tensors.keys() {
            match self.names.read(key) {
                KeyMeaning::Buffer => self.catalog.origin.left_out += 1,
                KeyMeaning::State(name) if name != STEP => of_run.push(name),
                KeyMeaning::Model(name) if is_flat_parameter(&name) => flat.push(name),
                KeyMeaning::Model(_) | KeyMeaning::Optimizer(_) | KeyMeaning::State(_) => {}
            }
        }
        self.catalog.origin.left_out += of_run.len();
        if let Some(first) = of_run.first() {
            let count = of_run.len();
            self.catalog
                .note(format!("{count} tensors beside the model are no weights: {first}, ..."));
        }
        if let Some(first) = flat.first() {
            self.catalog.note(format!(
                "{} names are flat parameters of FSDP (LOCAL_STATE_DICT), which only compare with those of \
                 the same wrapping and number of ranks: {first}, ...",
                flat.len()
            ));
        }
        if let Some(version) =
            metadata.version.as_ref().filter(|version| !version.starts_with("1."))
        {
            self.catalog
                .note(format!("{METADATA} is of version {version}, newer than any that is known"));
        }
    }
}

fn holds_tensors(torch: &TorchFile) -> bool {
    torch.values().ids().any(|id| !matches!(torch.tensor(id), Ok(None)))
}
