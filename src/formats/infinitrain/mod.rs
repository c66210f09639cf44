//! InfiniTrain checkpoints: folders of its own binary files, LoRA weights, and the llm.c files that runs start from.
//!
//! Facts from InfiniTrain 0.6.0 (`infini_train/src/checkpoint/checkpoint.cc`, `checkpoint_manager.cc`) and the first
//! revisions of its checkpoints (2026-03), whose `model.bin` and `model.pth` hold the same bytes as `model.ckpt`: what a
//! file is, its first bytes say and not its extension.

mod adam;
mod llmc;
mod native;
mod ranks;
mod rules;
mod stages;
mod trainer_state;

use std::path::PathBuf;

use crate::catalog::Catalog;
use crate::formats::files::add;
use crate::storage::FileSet;

use super::error::OpenError;
use super::format::{Format, OpenOptions};
use super::probe::Probe;
use super::roots::{Claim, FILE, Root, Score, newest_note, numbered};

/// `infinitrain`: a step's folder with a folder a rank or without, or a single file.
pub(super) const FORMAT: Format = Format {
    name: "infinitrain",
    looked_for: &["checkpoint_step_* or rank_* folders", "model.ckpt"],
    usual_folders: &[],
    rank_folders: &["rank_"],
    claim,
    read,
};

/// Prefix of the folders of steps; there is no tracker.
const STEPS: &str = "checkpoint_step_";

/// The word embeddings, which GPT-2 shares with the output layer.
const WTE: &str = "transformer.wte.weight";
/// The output layer.
const LM_HEAD: &str = "lm_head.weight";

/// The first four bytes of each kind of file, as little-endian numbers.
const MAGICS: [(u32, Content); 4] = [
    (0x5450_4b43, Content::Native(native::Kind::StateDict)),
    (0x4c4f_5241, Content::Native(native::Kind::Lora)),
    (20_240_326, Content::LlmC(llmc::Model::Gpt2)),
    (20_240_803, Content::LlmC(llmc::Model::Llama3)),
];

/// The content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Native(native::Kind),
    LlmC(llmc::Model),
    /// One of these, written by a machine with the other byte order.
    BigEndian,
}

impl Content {
    /// The content of a file that starts so.
    fn of(head: &[u8]) -> Option<Self> {
        let magic = *head.first_chunk()?;
        let known = |magic| MAGICS.iter().find(|row| row.0 == magic).map(|row| row.1);
        let swapped = || known(u32::from_be_bytes(magic)).map(|_| Self::BigEndian);
        known(u32::from_le_bytes(magic)).or_else(swapped)
    }
}

/// The model file of a rank; the two last ones by what is in them, for others use these names too.
fn model_file(folder: &Probe) -> Result<Option<PathBuf>, OpenError> {
    const OWN: &str = "model.ckpt";
    if folder.has(OWN) {
        return Ok(Some(folder.path().join(OWN)));
    }
    for name in ["model.bin", "model.pth"] {
        if let Some(file) = folder.child(name)?
            && Content::of(file.head()?).is_some()
        {
            return Ok(Some(file.path().to_path_buf()));
        }
    }
    Ok(None)
}

/// Claims a file by its first bytes, a step's folder or a rank's by the names in it, a save folder by those of its steps.
fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if probe.is_file() {
        let is_own = Content::of(probe.head()?).is_some();
        return Ok(is_own.then(|| Claim::here(Score::Declared, FILE)));
    }
    let steps = numbered(probe, &[STEPS])?;
    if let Some((_, newest)) = steps.last() {
        let among = format!("{} checkpoints", steps.len());
        let notes = newest_note(probe, steps.len(), &among, newest);
        return Ok(Some(Claim::below(Score::Tracker, STEPS, probe, newest, notes)));
    }
    let is_own = model_file(probe)?.is_some() || ranks::are_in(probe)?;
    Ok(is_own.then(|| Claim::here(Score::Names, FORMAT.name)))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let (path, probe) = (&root.path, &root.probe);
    if ranks::are_in(probe)? {
        return ranks::read_all(root, options);
    }
    let file = if probe.is_file() { Some(path.clone()) } else { model_file(probe)? };
    let Some(file) = file else {
        return Err(OpenError::Unrecognized {
            path: path.clone(),
            looked_for: "model.ckpt, rank_* folders".to_owned(),
        });
    };
    let mut files = FileSet::default();
    let id = add(&mut files, &file)?;
    match Content::of(&ranks::head(&files, id).map_err(OpenError::io(&file))?) {
        Some(Content::LlmC(model)) => llmc::read(files, id, model, options),
        _ => ranks::read_single(root, &file, options),
    }
}
