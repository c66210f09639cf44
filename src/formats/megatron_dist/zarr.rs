//! Checkpoints of the `zarr` backend (core 0.4 to 0.15): a zarr array a tensor.

use std::num::NonZeroUsize;

use crate::base::limits::LIMITS;
use crate::catalog::{Catalog, Problem};
use crate::containers::zarr::{self, HEADER};
use crate::storage::FileSet;

use super::{
    CommonState, Contents, GlobalTensor, METADATA, MODELOPT, USUAL_FOLDERS, backend, into_catalog,
    parse, unread_optimizer,
};
use crate::formats::error::OpenError;
use crate::formats::format::{Format, OpenOptions};
use crate::formats::iterations::{self, LOOKED_FOR};
use crate::formats::probe::Probe;
use crate::formats::roots::{Claim, METADATA as EVIDENCE, Root, Score};

/// `megatron-zarr`: `metadata.json` says `zarr`.
pub(in crate::formats) const FORMAT: Format = Format {
    name: "megatron-zarr",
    looked_for: &[LOOKED_FOR[0], LOOKED_FOR[1], METADATA],
    usual_folders: USUAL_FOLDERS,
    rank_folders: &[],
    claim,
    read,
};

fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if let Some(iteration) = iterations::newest(probe)? {
        return Ok(Some(iteration));
    }
    let is_own = backend(probe)?.as_deref() == Some("zarr");
    Ok(is_own.then(|| Claim::here(Score::Declared, EVIDENCE)))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let mut files = FileSet::default();
    let common = CommonState::of_folder(&root.path, &mut files)?;
    let (common, mut problems) = common.unwrap_or_default();
    let mut tensors = Vec::new();
    let mut objects = Vec::new();
    let mut shards = 0;
    for key in root.probe.names().filter(|key| is_key(key)) {
        let folder = match root.probe.child(key) {
            Ok(Some(probe)) if probe.is_file() => {
                if !is_companion(key) {
                    let message = "is a file, where an array has a folder";
                    problems.push(Problem::of_file(probe.path(), message));
                }
                continue;
            }
            Ok(Some(folder)) => folder,
            Ok(None) => continue,
            Err(OpenError::Io { path, source }) => {
                problems.push(Problem::of_tensor(key, source).in_file(path));
                continue;
            }
            Err(error) => return Err(error),
        };
        if !folder.has(HEADER) {
            objects.extend(read_objects(&mut files, &folder, key, &mut problems));
            continue;
        }
        // What is missing beyond so many chunks is said by the first one of each array.
        let left = LIMITS.problems.saturating_sub(problems.len());
        let most_missing = NonZeroUsize::new(left).unwrap_or(NonZeroUsize::MIN);
        match zarr::open(&mut files, folder.path(), key, most_missing) {
            Ok(array) if array.missing.is_empty() => {
                shards += array.chunks;
                tensors.push(GlobalTensor {
                    key: key.into(),
                    tensor: array.tensor,
                    flattened: None,
                });
            }
            Ok(array) => {
                let (count, first) = (array.missing.len(), array.missing.into_iter().next());
                let others = match count {
                    0 | 1 => String::new(),
                    count => format!(", and those of {} more of its chunks", count - 1),
                };
                let message = format!("the file of this chunk is missing{others}");
                let tensor = Some(key.to_owned());
                problems.push(Problem { file: first, tensor, message, ..Problem::default() });
            }
            Err(error) => problems.push(Problem::of_tensor(key, error)),
        }
    }
    let unread = unread_optimizer(tensors.iter().map(|tensor| parse(&tensor.key)), options);
    let found =
        Contents { files, tensors, objects, common, problems, shards, ..Contents::default() };
    let mut catalog = into_catalog(found, FORMAT.name, root, options, parse)?;
    catalog.origin.unread.extend(unread);
    Ok(catalog)
}

/// Tells whether an entry of this name may be a tensor or an object. Those that end in `.sync` are locks with empty files
/// in them.
fn is_key(name: &str) -> bool {
    !name.ends_with(".sync") && !name.starts_with('.') && name != MODELOPT
}

/// Tells whether a file of this name stands beside arrays, by its ending: no key has one.
fn is_companion(name: &str) -> bool {
    const ENDINGS: [&str; 9] = ["pt", "json", "jsonl", "yaml", "yml", "txt", "md", "log", "model"];
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    ending.is_none_or(|ending| ENDINGS.contains(&ending))
}

/// The objects of a folder that holds no array: a torch file each. Anything else there is what is left of an array.
fn read_objects(
    files: &mut FileSet,
    folder: &Probe,
    key: &str,
    problems: &mut Vec<Problem>,
) -> Vec<String> {
    let mut objects = Vec::new();
    for name in folder.names() {
        match name.strip_suffix(".pt").filter(|name| name.starts_with("shard_")) {
            Some(shard) => {
                // Known, though nothing of it is read: `check` looks for unreferenced files.
                let path = folder.path().join(name);
                if let Err(error) = files.add(&path) {
                    problems.push(Problem::of_file(path, error));
                }
                objects.push(format!("{key}/{shard}"));
            }
            None => {
                let message = format!("holds {name} but no {HEADER}, so it cannot be read");
                problems.push(Problem::of_tensor(key, message).in_file(folder.path()));
                break;
            }
        }
    }
    objects
}
