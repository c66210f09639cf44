//! Everything that a checkpoint keeps beside the tensors of its model and its optimizer, out of all of its files.
//!
//! ```text
//! Catalog of all sections ─► claims   the bytes that are tensors of the model or the optimizer
//! files of the folder ─────► values   pickles, objects of distributed checkpoints, JSON, YAML: all that is none of these
//!                              └─────► state::KeptState
//! ```
//! So whatever a file holds is either compared as a tensor or kept here; no format has to know what its software writes.

mod claims;
mod values;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, Problem, Section};
use crate::containers::dcp::{Checkpoint, METADATA, Metadata, Wanted, rank_of_metadata};
use crate::containers::torch::{self, TorchFile};
use crate::containers::yaml;
use crate::state::{KeptState, StateValue};
use crate::storage::{self, EntryKind, FileId, FileSet, Target, present};

use self::claims::Claims;
use self::values::PartState;

/// Reads the state of the checkpoint behind a catalog. `whole` is that of all sections of the same checkpoint.
pub(super) fn read(catalog: &mut Catalog, whole: Option<&Catalog>) {
    let claims = Claims::of(whole.unwrap_or(catalog));
    let mut listing = Listing { left: LIMITS.folder_entries, ..Listing::default() };
    let resolved = catalog.origin.resolved.clone();
    listing.collect(&resolved);
    let mut state = KeptState::default();
    let mut problems = std::mem::take(&mut listing.problems);
    let mut reader = Reader {
        claims: &claims,
        files: &mut catalog.files,
        state: &mut state,
        problems: &mut problems,
    };
    reader.read_files(&listing.files);
    for folder in &listing.distributed {
        reader.read_distributed(folder);
    }
    // What only the format can read: headers of its own kinds of files.
    for (key, entry) in &catalog.state {
        if !state.has(key) && key != "args" && key != "index" {
            if is_partly_opaque(&entry.value) {
                let message =
                    "holds an object of which no more than the class is known: not compared";
                problems.push(Problem::of_tensor(key, message).in_file(&entry.file));
            }
            let mut part = PartState::default();
            if let Err(over) = part.add_plain(key, &entry.value) {
                problems.push(Problem::of_file(&entry.file, over));
            }
            let number = state.part("");
            part.entries.into_iter().for_each(|(path, value)| state.add(&path, number, value));
        }
    }
    catalog.kept = state;
    catalog.problems.extend(problems);
}

/// Tells whether there is something in a value that is known by its class alone.
fn is_partly_opaque(value: &PlainValue) -> bool {
    match value {
        PlainValue::Opaque(_) => true,
        PlainValue::List(members) => members.iter().any(is_partly_opaque),
        PlainValue::Map(entries) => entries.values().any(is_partly_opaque),
        _ => false,
    }
}

/// The files of a checkpoint that may say something of the run.
#[derive(Default)]
struct Listing {
    /// Entries that may still be looked at.
    left: usize,
    /// The files, with their paths inside of the checkpoint.
    files: Vec<(PathBuf, String)>,
    /// Folders that hold torch's distributed checkpoints.
    distributed: Vec<PathBuf>,
    problems: Vec<Problem>,
}

/// The folder beside a model's folder, by the name of that, in which the same software keeps what it knows of the run: NeMo 2
/// (`nemo/lightning/io`), Hugging Face accelerate with FSDP (`accelerate/utils/fsdp_utils.py`).
const BESIDE: [(&str, &str); 2] = [("weights", "context"), ("pytorch_model_fsdp_0", "")];

/// Folders that are a checkpoint of their own, or none.
const SEPARATE: [&str; 5] = ["modelopt_state", "sharded", "original", "configs", "optimizer_0"];

/// Endings of the names of files with values in them that are no tensors alone.
const ENDINGS: [&str; 8] = [".pt", ".pth", ".bin", ".ckpt", ".pkl", ".json", ".yaml", ".yml"];

/// Beginnings of the names of files that say nothing of a run: the words of a model, forms of files.
const NOT_OF_RUN: [&str; 9] = [
    "tokenizer",
    "vocab",
    "merges",
    "added_tokens",
    "special_tokens",
    "chat_template",
    "preprocessor_config",
    "metadata.json",
    "latest",
];

impl Listing {
    fn collect(&mut self, resolved: &Path) {
        match storage::look(resolved) {
            Ok(Target::Folder) => self.folder(resolved, "", LIMITS.folder_depth),
            Ok(_) => {
                let name = resolved.file_name().unwrap_or_default().to_string_lossy().into_owned();
                self.files.push((resolved.to_path_buf(), name));
            }
            Err(error) => self.problems.push(Problem::of_file(resolved, error)),
        }
        let name = resolved.file_name().unwrap_or_default();
        for (_, beside) in BESIDE.iter().filter(|(own, _)| name == *own) {
            let Some(parent) = resolved.parent() else { continue };
            let folder = if beside.is_empty() { parent.to_path_buf() } else { parent.join(beside) };
            match present(storage::look(&folder)) {
                Ok(Some(Target::Folder)) => self.folder(&folder, "", 0),
                Ok(_) => {}
                Err(error) => self.problems.push(Problem::of_file(folder, error)),
            }
        }
    }

    fn folder(&mut self, folder: &Path, inside: &str, depth: usize) {
        let entries = match storage::list(folder) {
            Ok(entries) => entries,
            Err(error) => return self.problems.push(Problem::of_file(folder, error)),
        };
        if entries.keys().any(|name| name == METADATA || rank_of_metadata(name).is_some()) {
            self.distributed.push(folder.to_path_buf());
        }
        for (name, kind) in entries {
            if self.left == 0 {
                let message = format!(
                    "more than {} files and folders: its state is not compared",
                    LIMITS.folder_entries
                );
                return self.problems.push(Problem::of_file(folder, message));
            }
            self.left -= 1;
            let path = folder.join(&name);
            let below = if inside.is_empty() { name.clone() } else { format!("{inside}/{name}") };
            match is_folder(&path, kind) {
                Ok(true) if depth > 0 && !SEPARATE.contains(&name.as_str()) => {
                    self.folder(&path, &below, depth - 1);
                }
                Ok(true) => {}
                Ok(false) if is_of_run(&name) => self.files.push((path, below)),
                Ok(false) => {}
                Err(error) => self.problems.push(Problem::of_file(path, error)),
            }
        }
    }
}

fn is_folder(path: &Path, kind: EntryKind) -> io::Result<bool> {
    match kind {
        EntryKind::Link => Ok(present(storage::look(path))? == Some(Target::Folder)),
        kind => Ok(kind == EntryKind::Folder),
    }
}

fn is_of_run(name: &str) -> bool {
    ENDINGS.iter().any(|end| name.ends_with(end))
        && !name.ends_with(".index.json")
        && !NOT_OF_RUN.iter().any(|start| name.starts_with(start))
}

/// Files of ranks and of whole checkpoints whose entries go by their own keys: all others' keys begin with the name of the file.
const WITHOUT_PREFIX: [&str; 5] =
    ["model_optim_rng", "model_rng", "common", "model_states", "optim_states"];

/// The beginning of the key paths of a file: its name without the numbers of ranks, or that of the folder it is a shard of.
fn prefix_of(inside: &str) -> String {
    let mut names = inside.rsplit('/');
    let name = names.next().unwrap_or_default();
    let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
    if stem.starts_with("shard_") {
        return names.next().unwrap_or_default().to_owned();
    }
    if WITHOUT_PREFIX.iter().any(|end| stem.ends_with(end)) {
        return String::new();
    }
    let stem = stem.split_once("_world_size_").map_or(stem, |(stem, _)| stem);
    let is_of_number = |char: char| char.is_ascii_digit() || char == '_' || char == '-';
    let cut = stem.trim_end_matches(is_of_number);
    if cut.is_empty() { stem.to_owned() } else { cut.to_owned() }
}

struct Reader<'a> {
    claims: &'a Claims,
    files: &'a mut FileSet,
    state: &'a mut KeptState,
    problems: &'a mut Vec<Problem>,
}

/// A file, and what it holds.
enum Content {
    Torch(FileId),
    Small(PartState),
    Nothing,
}

impl Reader<'_> {
    fn read_files(&mut self, listed: &[(PathBuf, String)]) {
        let known: HashMap<PathBuf, FileId> =
            self.files.ids().map(|file| (self.files.path(file).to_path_buf(), file)).collect();
        let mut contents = Vec::new();
        for (path, inside) in listed {
            match self.content(path, inside, &known) {
                Ok(content) => contents.push((path, inside, content)),
                Err(problem) => self.problems.push(problem),
            }
        }
        let (files, claims) = (&*self.files, self.claims);
        let read = contents.into_par_iter().filter_map(|(path, inside, content)| {
            let part = match content {
                Content::Nothing => return None,
                Content::Small(part) => part,
                Content::Torch(file) => match TorchFile::open(files, files.whole(file)) {
                    Ok(torch) => values::of_torch(&torch, path, &prefix_of(inside), files, claims),
                    // A stray file of weights is the catalog's business.
                    Err(error) => PartState {
                        problems: vec![Problem::of_file(path, error)],
                        ..PartState::default()
                    },
                },
            };
            Some((inside, part))
        });
        let read: Vec<(&String, PartState)> = read.collect();
        for (inside, part) in read {
            self.add(inside, part);
        }
    }

    /// Looks at a file; one that torch wrote is read later.
    fn content(
        &mut self,
        path: &Path,
        inside: &str,
        known: &HashMap<PathBuf, FileId>,
    ) -> Result<Content, Problem> {
        let failed = |error: io::Error| Problem::of_file(path, error);
        let prefix = prefix_of(inside);
        if [".json", ".yaml", ".yml"].iter().any(|end| inside.ends_with(end)) {
            let limit = if inside.ends_with(".json") {
                LIMITS.state_bytes as u64
            } else {
                LIMITS.text_file
            };
            let bytes = self.files.read_small(path, limit).map_err(failed)?;
            let text = String::from_utf8(bytes).map_err(|error| Problem::of_file(path, error))?;
            let mut part = PartState::default();
            let added = if inside.ends_with(".json") {
                let json = json_of(&text).map_err(|error| Problem::of_file(path, error))?;
                part.add_json(&prefix, &json)
            } else {
                let value = yaml::read(&text).map_err(|error| Problem::of_file(path, error))?;
                part.add_plain(&prefix, &value)
            };
            added.map_err(|over| Problem::of_file(path, over))?;
            return Ok(Content::Small(part));
        }
        if storage::look(path).map_err(failed)? == Target::Other {
            return Ok(Content::Nothing);
        }
        const HEAD: usize = 64;
        let head = storage::head(path, HEAD).map_err(failed)?;
        if torch::may_start_with(&head) {
            let file = match known.get(path) {
                Some(file) => *file,
                None => self.files.add(path).map_err(failed)?,
            };
            return Ok(Content::Torch(file));
        }
        if self.claims.has_file(path) {
            return Ok(Content::Nothing);
        }
        let bytes = self.files.read_small(path, LIMITS.state_bytes as u64).map_err(failed)?;
        let mut part = PartState::default();
        part.add_bytes(&prefix, &bytes).map_err(|over| Problem::of_file(path, over))?;
        Ok(Content::Small(part))
    }

    fn add(&mut self, name: &str, part: PartState) {
        let number = self.state.part(name);
        for (path, value) in part.entries {
            self.state.add(&path, number, value);
        }
        for (path, names) in part.parameters {
            self.state.add_parameters(&path, number, names);
        }
        self.problems.extend(part.problems);
    }

    /// Reads the objects of a distributed checkpoint, and the tensors that are neither weights nor of the optimizer.
    fn read_distributed(&mut self, folder: &Path) {
        let metadata = match Metadata::read(folder, self.files) {
            Ok(metadata) => metadata,
            Err(error) => return self.problems.push(Problem::of_file(folder, error)),
        };
        let claims = self.claims;
        let objects: HashSet<_> = metadata.objects.keys().cloned().collect();
        let wanted = |key: &str| {
            !key.contains("_extra_state") && (objects.contains(key) || !claims.has_stored(key))
        };
        let checkpoint = Checkpoint::of(metadata, folder, self.files, wanted, Wanted::All);
        for (key, tensor) in &checkpoint.tensors {
            match tensor {
                Ok(tensor) if claims.names_in(tensor, self.files).is_empty() => {
                    let number = self.state.part("");
                    self.state.add(key, number, StateValue::Tensor(tensor.clone().into()));
                }
                Ok(_) => {}
                Err(error) => self.problems.push(Problem::of_tensor(&**key, error)),
            }
        }
        for lost in &checkpoint.lost_files {
            self.problems.push(Problem::lost_file(&lost.path, &lost.what, &lost.tensors));
        }
        let keys: Vec<_> = checkpoint.metadata.objects.keys().filter(|key| wanted(key)).collect();
        if keys.len() > LIMITS.objects {
            let message =
                format!("more than {} objects: its state is not compared", LIMITS.objects);
            return self.problems.push(Problem::of_file(folder, message));
        }
        let files = &*self.files;
        let read = keys.par_iter().map(|key| {
            let (path, shard) = key.split_once("/shard_").unwrap_or((key, ""));
            let part = match checkpoint.object(key, files) {
                Ok(torch) => values::of_torch(&torch, folder, path, files, claims),
                Err(error) => PartState {
                    problems: vec![Problem::of_tensor(&***key, error)],
                    ..PartState::default()
                },
            };
            (shard, part)
        });
        for (shard, part) in read.collect::<Vec<_>>() {
            self.add(shard, part);
        }
    }
}

/// Reads JSON as Python writes it, with NaN and infinities, which then are texts.
fn json_of(text: &str) -> serde_json::Result<serde_json::Value> {
    serde_json::from_str(text).or_else(|error| match quoted(text) {
        Some(quoted) => serde_json::from_str(&quoted),
        None => Err(error),
    })
}

/// The text with quotes around numbers that JSON does not have; `None` where there is none.
fn quoted(text: &str) -> Option<String> {
    const WORDS: [&str; 3] = ["NaN", "-Infinity", "Infinity"];
    let mut out = String::with_capacity(text.len());
    let (mut is_text, mut has_any, mut rest) = (false, false, text);
    while let Some(char) = rest.chars().next() {
        let word = WORDS.into_iter().find(|word| !is_text && rest.starts_with(word));
        let len = match (word, char) {
            (Some(word), _) => {
                has_any = true;
                out.extend(["\"", word, "\""]);
                rest = &rest[word.len()..];
                continue;
            }
            (None, '\\') if is_text => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            (None, char) => {
                is_text ^= char == '"';
                char.len_utf8()
            }
        };
        out.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    has_any.then_some(out)
}

/// Tells whether anything of a section is in what was read: an optimizer may also be part of the state.
#[must_use]
pub fn has_section(catalog: &Catalog, section: Section) -> bool {
    match section {
        Section::State => !catalog.kept.is_empty(),
        Section::Optimizer => catalog.count(section) > 0 || catalog.kept.has_optimizer(),
        Section::Model => catalog.count(section) > 0,
    }
}
