//! Hugging Face folders and safetensors files: one file or numbered ones, with an index or without.
//!
//! Facts from transformers 4.x and 5.x (`modeling_utils.py`, `save_pretrained`, `utils/hub.py`), safetensors 0.8
//! (`safetensors/torch.py`, `save_model`) and huggingface_hub (cache folders).

mod index;
mod names;
mod parts;
mod sources;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Extent, Origin, Problem, Section};
use crate::containers::safetensors::Safetensors;
use crate::names::Name;
use crate::storage::{FileSet, is_of_system};
use crate::tensor::LogicalTensor;

use super::error::OpenError;
use super::format::{Format, OpenOptions};
use super::identity::{FolderStep, Witness, foreign, refuse};
use super::model_config::{entry, read_json, tie_output};
use super::probe::{Probe, SmallFile};
use super::roots::{Claim, FILE, Root, Score, newest_note, numbered, step_behind};
use super::walk::Bounds;

use index::{InFile, Index};
use parts::{ModelFile, read_parts};
use sources::ModelFiles;

/// `hf`: a folder as `save_pretrained` writes it, or a file of one.
pub(super) const FORMAT: Format = Format {
    name: "hf",
    looked_for: &["model.safetensors", "pytorch_model.bin"],
    usual_folders: &["huggingface"],
    rank_folders: &[],
    claim,
    read,
};

/// Prefix of the folders that the Trainer saves into.
const STEPS: &str = "checkpoint-";

/// The file in which the Trainer says how far it has come, and its key for that (transformers `trainer_callback.py`).
const TRAINER_STATE: &str = "trainer_state.json";
const STEP: &str = "global_step";
/// The optimizer of a Trainer (transformers 4.57 `trainer.py`, `OPTIMIZER_NAME`), which is not read.
const OPTIMIZER: &str = "optimizer.pt";

/// The description of the model.
const CONFIG: &str = "config.json";

/// The folder into which torch's `HuggingFaceStorageWriter` puts the chunks that it then makes whole tensors of
/// (`torch/distributed/checkpoint/hf_storage.py`).
const SHARDED: &str = "sharded";

/// Files beside the tensors that go into the state of the run, by the name they have there.
const COMPANIONS: [(&str, &str); 2] =
    [(CONFIG, "config"), ("adapter_config.json", "adapter_config")];

/// Claims a file by its name or its first bytes, a folder by the names of its files, the snapshot in a folder of the hub's
/// cache, or what the Trainer saved last.
fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if probe.is_file() {
        let name = probe.name();
        let is_own = sources::is_name(&name)
            || name.ends_with(".safetensors")
            || Safetensors::may_start_with(probe.head()?, probe.len());
        return Ok(is_own.then(|| Claim::here(Score::Declared, FILE)));
    }
    if let Some(snapshot) = snapshot(probe)? {
        return Ok(Some(snapshot));
    }
    if ModelFiles::find(probe).is_some() {
        return Ok(Some(Claim::here(Score::Names, FORMAT.name)));
    }
    let steps = numbered(probe, &[STEPS])?;
    Ok(steps.last().map(|(_, newest)| {
        let among = format!("{} checkpoints", steps.len());
        let notes = newest_note(probe, steps.len(), &among, newest);
        Claim::below(Score::Below, STEPS, probe, newest, notes)
    }))
}

/// In a model's folder of the cache: the snapshot that `refs/main` names, or the only one (huggingface_hub,
/// `file_download.py`).
fn snapshot(model: &Probe) -> Result<Option<Claim>, OpenError> {
    /// More than the number of any commit has.
    const LONGEST: usize = 256;
    if !model.name().starts_with("models--") && !model.has_folder("refs")? {
        return Ok(None);
    }
    let Some(snapshots) = model.child("snapshots")? else { return Ok(None) };
    let main = match model.child("refs")? {
        Some(refs) => refs.small_file("main")?,
        None => SmallFile::Absent,
    };
    let named = match &main {
        SmallFile::Text(text) if text.len() < LONGEST => Some(text.trim()),
        _ => None,
    };
    let mut all = snapshots.names();
    let only = all.next().filter(|_| all.next().is_none());
    let snapshot = match named {
        Some(name) if snapshots.has_folder(name)? => Some(name),
        _ => only,
    };
    let to = |folder| Claim::below(Score::Tracker, FORMAT.name, &snapshots, folder, Vec::new());
    Ok(snapshot.map(to))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let (path, is_file) = (&root.path, root.probe.is_file());
    let folder = if is_file { path.parent().unwrap_or(Path::new("")) } else { path };
    let source =
        if is_file { Some(ModelFiles::of_file(path)) } else { ModelFiles::find(&root.probe) };
    let Some(source) = source else {
        return Err(OpenError::Unrecognized {
            path: path.clone(),
            looked_for: format!(
                "{}, their numbered parts or an index of them",
                FORMAT.looked_for.join(", ")
            ),
        });
    };
    let extent = if source.is_part(is_file) { Extent::Part } else { Extent::Whole };
    let origin = Origin { format: FORMAT.name, extent, ..Origin::default() };
    let mut catalog = CatalogBuilder::new(origin, FileSet::default());
    catalog.notes(source.notes(is_file));
    let bounds = Bounds::of_whole(path);
    let mut folder = Folder { path: folder, bounds, catalog, config_beside: None };
    // A file on its own is what is in it and no more; but whether its layers share weights, only the model can say.
    if is_file {
        folder.config_beside = folder.read_json(CONFIG);
    } else {
        folder.read_companions();
        folder.check_step(&root.probe.name(), options)?;
        if root.probe.has(OPTIMIZER) {
            folder.catalog.origin.unread.insert(Section::Optimizer, None);
        }
        if root.probe.has_folder(SHARDED)? {
            let note = "holds the same tensors once more in chunks, and is not read";
            folder.catalog.note(format!("{SHARDED}/ {note}"));
        }
    }
    folder.read(&source, options)
}

/// A folder on the way to a catalog.
struct Folder<'a> {
    path: &'a Path,
    bounds: Bounds,
    catalog: CatalogBuilder<'a>,
    /// The model's own description beside a file that is looked at alone.
    config_beside: Option<PlainValue>,
}

impl Folder<'_> {
    fn read_companions(&mut self) {
        for (file, key) in COMPANIONS {
            let value = self.read_json(file);
            let path = self.path.join(file);
            self.catalog.add_state(&path, value.map(|value| (key.to_owned(), value)));
        }
    }

    /// Holds the step that the Trainer says against the one in the name that it gave to the folder.
    fn check_step(&mut self, name: &str, options: &OpenOptions) -> Result<(), OpenError> {
        let said = self.read_json(TRAINER_STATE);
        let said = said.as_ref().and_then(|state| state.as_map()?.get(STEP));
        if let (Some(said), Some(step)) = (said, step_behind(STEPS, name)) {
            let witness = Witness {
                path: self.path.join(TRAINER_STATE),
                place: name.to_owned(),
                claim: None,
                facts: vec![(STEP.to_owned(), said.clone())],
                ..Witness::default()
            };
            let folder = FolderStep { path: self.path, step, fact: STEP };
            let files = self.catalog.files();
            let found = foreign(files, &[witness], Some(&folder), options)?;
            self.catalog.notes(refuse(found, options)?);
        }
        Ok(())
    }

    /// A description beside the tensors; one that is damaged is noted.
    fn read_json(&mut self, file: &str) -> Option<PlainValue> {
        let path = self.path.join(file);
        match read_json(&path, self.catalog.files_mut()) {
            Ok(value) => return value,
            Err(error) if is_of_system(&error) => {
                self.catalog.problem(Problem::of_file(path, error));
            }
            Err(error) => self.catalog.note(format!("{file}: {error}")),
        }
        None
    }

    /// The model's own description.
    fn config(&self) -> Option<&BTreeMap<String, PlainValue>> {
        let beside = self.config_beside.as_ref().and_then(PlainValue::as_map);
        self.catalog.state().config().or(beside)
    }

    fn problem(&mut self, file: &str, message: String) {
        self.catalog.problem(Problem::of_file(self.path.join(file), message));
    }

    fn read(mut self, source: &ModelFiles, options: &OpenOptions) -> Result<Catalog, OpenError> {
        let index = match &source.index {
            Some(file) => {
                let path = self.path.join(file);
                let (index, metadata) = Index::read(&path, self.catalog.files_mut())?;
                self.catalog.add_state(&path, metadata.map(|value| ("index".to_owned(), value)));
                Some(index)
            }
            None => None,
        };
        let indexed = index.as_ref().map(Index::files).unwrap_or_default();
        let wanted = match &index {
            Some(_) => indexed.keys().map(|file| (*file).to_owned()).collect(),
            None => source.files.clone(),
        };
        self.catalog.notes(source.unnamed(&indexed));
        for file in &source.missing {
            self.problem(
                file,
                "missing: the numbers of the other parts say that it is one".to_owned(),
            );
        }
        let mut present = Vec::new();
        let mut absent = 0;
        for file in wanted {
            let path = self.path.join(&file);
            match (self.catalog.files_mut().add(&path), indexed.get(file.as_str())) {
                (Ok(id), _) => present.push((file, id)),
                (Err(error), None) => return Err(OpenError::io(&path)(error)),
                (Err(error), Some(InFile { tensors, first })) => {
                    absent += 1;
                    if absent > LIMITS.problems {
                        continue;
                    }
                    let inside = format!("the index has {tensors} tensors in it: {first}, ...");
                    self.problem(&file, format!("cannot be read: {error}; {inside}"));
                }
            }
        }
        if let (more @ 1.., Some(file)) = (absent.saturating_sub(LIMITS.problems), &source.index) {
            self.problem(file, format!("{more} more files that it names cannot be read"));
        }
        let parts = read_parts(self.catalog.files(), present)?;
        if let (Some(index), Some(file)) = (&index, &source.index) {
            self.catalog.problems(misplaced(index, &self.path.join(file), &parts));
        }
        Ok(self.gather(index.as_ref(), parts, options))
    }

    fn gather(
        mut self,
        index: Option<&Index>,
        parts: Vec<ModelFile>,
        options: &OpenOptions,
    ) -> Catalog {
        self.catalog.origin.shards = parts.len();
        let config = self.config().cloned();
        let version = config.as_ref().and_then(|config| entry(config, "transformers_version"));
        let version = version.and_then(PlainValue::as_text);
        self.catalog.origin.writer = version.map(|version| format!("transformers {version}"));
        let mut tensors: BTreeMap<Name, LogicalTensor> = BTreeMap::new();
        let mut aliases = BTreeMap::new();
        for ModelFile { file, tensors: found, metadata, problems } in parts {
            self.catalog.problems(problems);
            let mut bounds = Bounds::new(&self.path.join(file));
            for (stored_name, stored) in found {
                if names::is_buffer(&stored_name, stored.shape()) {
                    self.catalog.origin.left_out += 1;
                    continue;
                }
                if let Err(excess) = self.bounds.enter(&stored_name, 0) {
                    bounds.problem(&stored_name, format!("the folder has {excess}"));
                    break;
                }
                if index.is_some_and(|index| !index.has(&stored_name)) {
                    bounds.problem(&stored_name, "is not in the index");
                }
                let name = Name::new(names::unwrapped(&stored_name));
                let tensor = LogicalTensor::from_stored(&stored, stored_name.as_str());
                match tensors.get_mut(&name) {
                    // What several files hold is one tensor and its copies.
                    Some(first) => {
                        if let Err(error) = first.add_copy(tensor) {
                            let what = format!("another one than in another file: {error}");
                            bounds.problem(&stored_name, what);
                        }
                    }
                    None => {
                        tensors.insert(name, tensor);
                    }
                }
            }
            self.catalog.problems(bounds.into_problems());
            aliases.extend(metadata);
        }
        let Self { mut catalog, bounds, .. } = self;
        catalog.problems(bounds.into_problems());
        if options.wants(Section::Model) {
            for (name, tensor) in names::with_prefix(tensors) {
                catalog.add(name, tensor);
            }
            tie_aliases(&mut catalog, aliases);
            if let Some(config) = &config {
                tie_output(&mut catalog, config);
            }
        }
        catalog.finish()
    }
}

/// Entries of an index that are not where it says, though the file is there.
fn misplaced(index: &Index, path: &Path, parts: &[ModelFile]) -> Vec<Problem> {
    let mut holders: HashMap<&str, Vec<&str>> = HashMap::new();
    for part in parts {
        for (name, _) in &part.tensors {
            holders.entry(name).or_default().push(&part.file);
        }
        // Whatever is wrong with a tensor, it is there.
        for name in part.problems.iter().filter_map(|problem| problem.tensor.as_deref()) {
            holders.entry(name).or_default().push(&part.file);
        }
    }
    let read: HashSet<&str> = parts.iter().map(|part| part.file.as_str()).collect();
    let mut bounds = Bounds::new(path);
    for (name, file) in index.entries().filter(|(_, file)| read.contains(file)) {
        match holders.get(name).map(Vec::as_slice) {
            Some(holders) if holders.contains(&file) => {}
            Some([other, ..]) => {
                bounds.problem(name, format!("should be in {file}, but is in {other}"));
            }
            _ => bounds.problem(name, format!("should be in {file}, which does not hold it")),
        }
    }
    bounds.into_problems()
}

/// Ties the tensors that safetensors left out because they share another one's memory: `__metadata__` has one name for the
/// other.
fn tie_aliases(catalog: &mut CatalogBuilder<'_>, aliases: BTreeMap<String, String>) {
    for (name, to) in aliases {
        let [name, to] = [name, to].map(|name| Name::new(names::unwrapped(&name)));
        if !catalog.has(&name) {
            catalog.tie(name, to);
        }
    }
}
