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

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::catalog::Catalog;
use crate::storage::FileSet;

use super::{Format, Located, OpenError, OpenOptions};

/// `infinitrain`: a step's folder with a folder a rank or without, or a single file.
pub(super) const FORMAT: Format = Format { name: "infinitrain", detect, read };

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
    /// The content of a file, as far as its first bytes tell.
    fn of(path: &Path) -> Option<Self> {
        // Anything but a file could keep us waiting.
        if !path.metadata().ok()?.is_file() {
            return None;
        }
        let mut magic = [0; 4];
        File::open(path).ok()?.read_exact(&mut magic).ok()?;
        let known = |magic| MAGICS.iter().find(|row| row.0 == magic).map(|row| row.1);
        let swapped = || known(u32::from_be_bytes(magic)).map(|_| Self::BigEndian);
        known(u32::from_le_bytes(magic)).or_else(swapped)
    }
}

/// The model file of a rank; the two last ones by what is in them, for others use these names too.
fn model_file(folder: &Path) -> Option<PathBuf> {
    let is_there = |path: &PathBuf| path.symlink_metadata().is_ok();
    let own = Some(folder.join("model.ckpt")).filter(is_there);
    own.or_else(|| {
        let others = ["model.bin", "model.pth"].map(|name| folder.join(name));
        others.into_iter().find(|path| Content::of(path).is_some())
    })
}

/// Says whether a file is one of these, by its first bytes.
pub(super) fn is_own(file: &Path) -> bool {
    Content::of(file).is_some()
}

fn detect(path: &Path) -> bool {
    is_own(path) || model_file(path).is_some() || ranks::are_in(path)
}

fn read(located: &Located, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let path = &located.path;
    if path.is_dir() && ranks::are_in(path) {
        return ranks::read_all(located, options);
    }
    let file = if path.is_dir() { model_file(path) } else { Some(path.clone()) };
    let Some(file) = file else {
        return Err(OpenError::Unrecognized {
            path: path.clone(),
            looked_for: "model.ckpt, rank_* folders",
        });
    };
    match Content::of(&file) {
        Some(Content::LlmC(model)) => {
            let mut files = FileSet::default();
            let id =
                files.add(&file).map_err(|source| OpenError::Io { path: file.clone(), source })?;
            llmc::read(files, id, model, options)
        }
        _ => ranks::read_single(located, &file, options),
    }
}
