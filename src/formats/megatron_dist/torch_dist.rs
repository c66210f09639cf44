//! Checkpoints of the `torch_dist` backend (core 0.5 on): torch's distributed checkpoint with Megatron's names in it.

use std::path::Path;

use crate::catalog::{Catalog, Problem, Section};
use crate::containers::dcp::{Checkpoint, METADATA as DCP_METADATA, Metadata};
use crate::storage::FileSet;

use super::{COMMON, Common, Found, Key, METADATA, backend, dcp, into_catalog, parse};
use crate::formats::{Format, Located, OpenError, OpenOptions};

/// `megatron-torch_dist`: `metadata.json` says `torch_dist`.
pub(in crate::formats) const FORMAT: Format = Format { name: "megatron-torch_dist", detect, read };

/// The object that is `common.pt` since core 0.19.
const COMMON_OBJECT: &str = "common_state/";

fn detect(path: &Path) -> bool {
    backend(path).as_deref() == Some("torch_dist")
}

/// Tells whether a distributed checkpoint without `metadata.json` is of this backend: its save was interrupted.
pub(super) fn claims(metadata: &Metadata, folder: &Path) -> bool {
    folder.join(COMMON).symlink_metadata().is_ok()
        || metadata.objects.keys().any(|key| key.starts_with(COMMON_OBJECT))
}

fn read(located: &Located, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let mut files = FileSet::default();
    let metadata = Metadata::read(&located.path, &mut files)?;
    Ok(read_with(metadata, files, located, options))
}

/// Reads a checkpoint whose metadata was read before.
pub(super) fn read_with(
    metadata: Metadata,
    files: FileSet,
    located: &Located,
    options: &OpenOptions,
) -> Catalog {
    // All weights, also where only the optimizer is wanted: the shapes of its states are looked up there.
    let wanted = |key: &str| match parse(key) {
        Key::Weight(_) => true,
        _ => options.wants(Section::Optimizer),
    };
    let (checkpoint, mut found) = dcp::open(metadata, files, &located.path, wanted);
    let (common, problems) = match Common::of_folder(&located.path, &mut found.files) {
        Some(common) => common,
        None => of_object(&checkpoint, &found),
    };
    found.common = common;
    found.problems.extend(problems);
    if located.path.join(METADATA).symlink_metadata().is_err() {
        found.notes.push(format!(
            "no {METADATA}, which is written last: the save was interrupted, but all that {DCP_METADATA} lists can be read"
        ));
    }
    into_catalog(found, FORMAT.name, located, options, parse)
}

/// Reads the state of the run from a list with one dict in it; nothing where there is none.
fn of_object(checkpoint: &Checkpoint, found: &Found) -> (Common, Vec<Problem>) {
    let Some(key) = found.objects.iter().find(|key| key.starts_with(COMMON_OBJECT)) else {
        return (Common::default(), Vec::new());
    };
    let torch = match checkpoint.object(key, &found.files) {
        Ok(torch) => torch,
        Err(error) => return (Common::default(), vec![Problem::of_tensor(key, error)]),
    };
    let path = checkpoint.path_of_object(key).unwrap_or_default();
    let first = torch.values().sequence(torch.root()).and_then(|mut members| members.next());
    Common::read(&torch, first.unwrap_or(torch.root()), &path)
}
