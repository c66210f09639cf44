//! Checkpoints of the `torch_dist` backend (core 0.5 on): torch's distributed checkpoint with Megatron's names in it.

use crate::catalog::{Catalog, Problem, Section};
use crate::containers::dcp::{Checkpoint, METADATA as DCP_METADATA, Metadata};

use super::{
    COMMON, CommonState, Contents, Key, METADATA, USUAL_FOLDERS, backend, dcp, into_catalog, parse,
    unread_optimizer,
};
use crate::formats::error::OpenError;
use crate::formats::format::{Format, OpenOptions};
use crate::formats::iterations::{self, LOOKED_FOR};
use crate::formats::probe::{OpenedMetadata, Probe};
use crate::formats::roots::{Claim, METADATA as EVIDENCE, Root, Score};

/// `megatron-torch_dist`: `metadata.json` says `torch_dist`.
pub(in crate::formats) const FORMAT: Format = Format {
    name: "megatron-torch_dist",
    looked_for: &[LOOKED_FOR[0], LOOKED_FOR[1], METADATA],
    usual_folders: USUAL_FOLDERS,
    rank_folders: &[],
    claim,
    read,
};

/// The object that is `common.pt` since core 0.19.
const COMMON_OBJECT: &str = "common_state/";

/// The backend's name in `metadata.json`.
const BACKEND: &str = "torch_dist";

/// Claims what `metadata.json` says is of this backend; where that is missing because a save was interrupted, what holds
/// what the run says of itself as this backend keeps it.
fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if let Some(iteration) = iterations::newest(probe)? {
        return Ok(Some(iteration));
    }
    let is_interrupted = || -> Result<bool, OpenError> {
        let holds_common =
            |metadata: &Metadata| metadata.objects.keys().any(|key| key.starts_with(COMMON_OBJECT));
        Ok(probe.has_metadata() && (probe.has(COMMON) || probe.metadata_says(holds_common)?))
    };
    let is_own = match backend(probe)? {
        Some(name) => name == BACKEND,
        // A file of this name that does not say so is damaged: to be said by the reader.
        None if probe.has(METADATA) => probe.has_metadata(),
        None => is_interrupted()?,
    };
    Ok(is_own.then(|| Claim::here(Score::Declared, EVIDENCE)))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let probe = &root.probe;
    if options.format.is_none() && probe.has(METADATA) && backend(probe)?.is_none() {
        let what =
            "says of no backend that it wrote this checkpoint; name one with --format".to_owned();
        return Err(OpenError::Content { path: probe.path().join(METADATA), what });
    }
    let OpenedMetadata { files, metadata } = probe.take_metadata()?;
    // All weights, also where only the optimizer is wanted: the shapes of its states are looked up there.
    let wanted = |key: &str| match parse(key) {
        Key::Weight(_) => true,
        _ => options.wants(Section::Optimizer),
    };
    let unread = unread_optimizer(metadata.tensors.keys().map(|key| parse(key)), options);
    let (checkpoint, mut found) = dcp::open(metadata, files, &root.path, wanted, options.values());
    let (common, problems) = match CommonState::of_folder(&root.path, &mut found.files)? {
        Some(common) => common,
        None => of_object(&checkpoint, &found),
    };
    found.common = common;
    found.problems.extend(problems);
    if !probe.has(METADATA) {
        found.notes.push(format!(
            "no {METADATA}, which is written last: the save was interrupted, but all that {DCP_METADATA} lists can be read"
        ));
    }
    let mut catalog = into_catalog(found, FORMAT.name, root, options, parse)?;
    catalog.origin.unread.extend(unread);
    Ok(catalog)
}

/// Reads the state of the run from a list with one dict in it; nothing where there is none.
fn of_object(checkpoint: &Checkpoint, found: &Contents) -> (CommonState, Vec<Problem>) {
    let is_common =
        |key: &&String| key.starts_with(COMMON_OBJECT) && !checkpoint.is_lost_with_file(key);
    let Some(key) = found.objects.iter().find(is_common) else {
        return (CommonState::default(), Vec::new());
    };
    let torch = match checkpoint.object(key, &found.files) {
        Ok(torch) => torch,
        Err(error) => return (CommonState::default(), vec![Problem::of_tensor(key, error)]),
    };
    let path = checkpoint.path_of_object(key).unwrap_or_default();
    let first = torch.values().sequence(torch.root()).and_then(|mut members| members.next());
    CommonState::read(&torch, first.unwrap_or(torch.root()), &path)
}
