//! Universal checkpoints: a folder for every parameter, in it a file for every state, put together over all ranks.
//!
//! Facts from DeepSpeed 0.19 (`checkpoint/ds_to_universal.py`): from ZeRO-1 and 2 a file holds a dict with the tensor as
//! `param`; from ZeRO-3 it holds a bare vector without a shape.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use crate::base::in_order::InOrder;
use crate::catalog::Problem;
use crate::formats::error::{MissingFile, OpenError};
use crate::formats::files::{add, open_torch};
use crate::formats::probe::Probe;
use crate::storage::{FileId, FileSet};
use crate::tensor::{LogicalTensor, StoredTensor};

use super::zero::{OptimizerState, OptimizerStates, shaped_vector};

/// The states of a universal checkpoint, by the name of the file; `step` is a number and no tensor of a parameter.
const NOT_A_STATE: &str = "step";

/// The state that all parameters share: loss scale, parameter groups.
const COMMON_STATE: &str = "optimizer_state.pt";

/// The content of the files in `zero/`.
#[derive(Default)]
pub(super) struct Universal {
    pub moments: OptimizerStates,
    /// Files with a value that is no master: the widened 16-bit weight of an alias, a frozen parameter or a buffer.
    pub left_out: usize,
    pub shards: usize,
}

struct StateFile {
    param: Arc<str>,
    state: String,
    file: FileId,
}

/// Reads the folders of all parameters; `shapes` tells which parameters there should be.
pub(super) fn read(
    root: &Path,
    files: &mut FileSet,
    shapes: &BTreeMap<&str, &[u64]>,
) -> Result<Universal, OpenError> {
    let mut universal = Universal::default();
    let sources = sources(root, files, shapes, &mut universal)?;
    let files = &*files;
    let read = |source: &StateFile| read_file(files, source, shapes);
    let found: Vec<Result<LogicalTensor, Problem>> = sources.par_iter().map(read).in_order()?;
    for (source, found) in sources.into_iter().zip(found) {
        match found {
            Ok(tensor) => {
                let StateFile { param, state, .. } = source;
                universal.moments.found.push(OptimizerState { state, param, tensor });
            }
            Err(problem) => universal.moments.problems.push(problem),
        }
        universal.shards += 1;
    }
    Ok(universal)
}

fn sources(
    root: &Path,
    files: &mut FileSet,
    shapes: &BTreeMap<&str, &[u64]>,
    universal: &mut Universal,
) -> Result<Vec<StateFile>, OpenError> {
    let probe = Probe::new(root)?;
    if probe.has(COMMON_STATE) {
        // It belongs to the checkpoint, and no tensor comes from it.
        add(files, &root.join(COMMON_STATE))?;
    }
    let folders = probe.folders()?;
    let absent = shapes.keys().filter(|name| folders.binary_search(name).is_err());
    let missing: Vec<MissingFile> = absent
        .map(|name| MissingFile {
            path: root.join(name).join("fp32.pt"),
            why: "param_shapes lists this parameter".to_owned(),
        })
        .collect();
    if !missing.is_empty() {
        return Err(OpenError::MissingFiles { files: missing });
    }
    let mut sources = Vec::new();
    let mut by_param: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    for name in folders {
        let Some(param) = probe.child(name)? else { continue };
        let folder = param.path().to_path_buf();
        let mut states = BTreeMap::new();
        for file in param.names() {
            if let Some(state) = file.strip_suffix(".pt") {
                states.insert(state.to_owned(), folder.join(file));
            }
        }
        if let Some(step) = states.remove(NOT_A_STATE) {
            add(files, &step)?;
            universal.left_out += 1;
        }
        let is_master = match shapes.is_empty() {
            true => states.len() > 1,
            false => shapes.contains_key(name),
        };
        if !is_master && let Some(path) = states.remove("fp32") {
            // Its value is that of the model, and compared there; it has to be a file all the same.
            let file = add(files, &path)?;
            open_torch(files, file)?;
            universal.left_out += 1;
            let unlisted = "a state of a parameter that param_shapes does not list";
            let unlisted = states.into_values().map(|path| Problem::of_file(path, unlisted));
            universal.moments.problems.extend(unlisted);
            continue;
        }
        if !states.contains_key("fp32") {
            let why = "this parameter has a folder".to_owned();
            let missing = MissingFile { path: folder.join("fp32.pt"), why };
            return Err(OpenError::MissingFiles { files: vec![missing] });
        }
        by_param.insert(folder, states.keys().cloned().collect());
        for (state, path) in states {
            let file = add(files, &path)?;
            let state = if state == "fp32" { "fp32_param".to_owned() } else { state };
            sources.push(StateFile { param: name.into(), state, file });
        }
    }
    let missing = missing_states(&by_param);
    if !missing.is_empty() {
        return Err(OpenError::MissingFiles { files: missing });
    }
    Ok(sources)
}

/// The states that a parameter lacks of those of another one. Two optimizers may keep different ones, but none keeps a
/// part of what it keeps of others.
fn missing_states(by_param: &BTreeMap<PathBuf, BTreeSet<String>>) -> Vec<MissingFile> {
    let sets: BTreeSet<&BTreeSet<String>> = by_param.values().collect();
    let mut missing = Vec::new();
    for (folder, states) in by_param {
        let mut fuller = sets.iter().filter(|other| other.len() > states.len());
        if let Some(fuller) = fuller.rfind(|other| other.is_superset(states)) {
            missing.extend(fuller.difference(states).map(|state| MissingFile {
                path: folder.join(format!("{state}.pt")),
                why: "other parameters have this state".to_owned(),
            }));
        }
    }
    missing
}

fn read_file(
    files: &FileSet,
    source: &StateFile,
    shapes: &BTreeMap<&str, &[u64]>,
) -> Result<Result<LogicalTensor, Problem>, OpenError> {
    let torch = open_torch(files, source.file)?;
    let name = format!("optimizer.{}.{}", source.state, source.param);
    let path = files.path(source.file);
    let dict = torch.values().dict_get(torch.root(), "param");
    let stored = match torch.tensor(dict.unwrap_or(torch.root())) {
        Ok(Some(stored)) => stored,
        Ok(None) => return Ok(Err(Problem::of_tensor(name, "holds no tensor").in_file(path))),
        Err(error) => return Ok(Err(Problem::of_tensor(name, error).in_file(path))),
    };
    let whole = |stored: &StoredTensor| LogicalTensor::from_stored(stored, name.as_str());
    Ok(match (dict, shapes.get(&*source.param)) {
        // A bare vector has the shape that the model file lists.
        (None, Some(shape)) => shaped_vector(&stored, &name, shape)
            .map_err(|error| Problem::of_tensor(name, error).in_file(path)),
        (None, None) => {
            let message = "is a vector, and nothing tells its shape";
            Err(Problem::of_tensor(name, message).in_file(path))
        }
        (Some(_), _) => Ok(whole(&stored)),
    })
}
