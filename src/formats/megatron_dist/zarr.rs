//! Checkpoints of the `zarr` backend (core 0.4 to 0.15): a zarr array a tensor.

use std::path::Path;

use crate::catalog::{Catalog, Problem};
use crate::containers::zarr::{self, HEADER};
use crate::formats::probe::names_in;
use crate::storage::FileSet;

use super::{
    CommonState, Contents, GlobalTensor, METADATA, MODELOPT, USUAL_FOLDERS, backend, into_catalog,
    parse,
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
    if let Some(iteration) = iterations::newest(probe) {
        return Ok(Some(iteration));
    }
    let is_own = backend(probe)?.as_deref() == Some("zarr");
    Ok(is_own.then(|| Claim::here(Score::Declared, EVIDENCE)))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let mut files = FileSet::default();
    let (common, mut problems) = CommonState::of_folder(&root.path, &mut files).unwrap_or_default();
    let mut tensors = Vec::new();
    let mut objects = Vec::new();
    let mut shards = 0;
    for key in keys(&root.path)? {
        let folder = root.path.join(&key);
        if folder.join(HEADER).symlink_metadata().is_err() {
            objects.extend(read_objects(&mut files, &folder, &key, &mut problems)?);
            continue;
        }
        match zarr::open(&mut files, &folder, &key) {
            Ok(array) if array.missing.is_empty() => {
                shards += array.chunks;
                tensors.push(GlobalTensor {
                    key: key.into(),
                    tensor: array.tensor,
                    flattened: None,
                });
            }
            Ok(array) => problems.extend(array.missing.into_iter().map(|path| Problem {
                file: Some(path),
                tensor: Some(key.clone()),
                message: "the file of this chunk is missing".to_owned(),
            })),
            Err(error) => problems.push(Problem::of_tensor(key, error)),
        }
    }
    let found = Contents { files, tensors, objects, common, problems, notes: Vec::new(), shards };
    Ok(into_catalog(found, FORMAT.name, root, options, parse))
}

/// The folders of tensors and objects, sorted. Those that end in `.sync` are locks with empty files in them.
fn keys(path: &Path) -> Result<Vec<String>, OpenError> {
    let mut keys = names_in(path)?;
    keys.retain(|key| !key.ends_with(".sync") && key != MODELOPT && path.join(key).is_dir());
    Ok(keys)
}

/// The objects of a folder that holds no array: a torch file each. Anything else there is what is left of an array.
fn read_objects(
    files: &mut FileSet,
    folder: &Path,
    key: &str,
    problems: &mut Vec<Problem>,
) -> Result<Vec<String>, OpenError> {
    let mut objects = Vec::new();
    for name in names_in(folder)? {
        match name.strip_suffix(".pt").filter(|name| name.starts_with("shard_")) {
            Some(shard) => {
                // Known, though nothing of it is read: `check` looks for unreferenced files.
                drop(files.add(&folder.join(&name)));
                objects.push(format!("{key}/{shard}"));
            }
            None => {
                let message = format!("holds {name} but no {HEADER}, so it cannot be read");
                problems.push(Problem::of_tensor(key, message).in_file(folder));
                break;
            }
        }
    }
    Ok(objects)
}
