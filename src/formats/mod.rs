//! A path in, a catalog out: one file a format, one row here.

mod dcp;
mod deepspeed;
mod hugging_face;
mod infinitrain;
mod leftovers;
mod locate;
mod megatron_dist;
mod megatron_torch;
mod state;
mod torch_file;
mod walk;

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, Problem, Section};
use crate::containers::dcp::DcpError;
use crate::containers::safetensors::SafetensorsError;
use crate::containers::torch::TorchError;
use crate::layout::rules::UserRule;
use crate::layout::{LayoutError, RankCoord};
use crate::tensor::Merge;

pub use leftovers::leftovers;
pub use locate::{Located, locate};

/// A way in which checkpoints lie on disk.
pub struct Format {
    /// The name that `--format` takes.
    pub name: &'static str,
    /// Whether a file or folder is of this format, by names and first bytes alone.
    detect: fn(&Path) -> bool,
    /// Reads it.
    read: fn(&Located, &OpenOptions) -> Result<Catalog, OpenError>,
}

/// All formats.
#[rustfmt::skip]
pub static FORMATS: &[Format] = &[
    megatron_torch::FORMAT,
    megatron_dist::torch_dist::FORMAT,
    megatron_dist::zarr::FORMAT,
    megatron_dist::fsdp::FORMAT,
    dcp::FORMAT,
    deepspeed::FORMAT,
    infinitrain::FORMAT,
    hugging_face::FORMAT,
    torch_file::FORMAT,
];

/// How a checkpoint is to be read.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The sections to read; a format looks at nothing that only another one needs.
    pub sections: Vec<Section>,
    /// The format, where it is not to be detected.
    pub format: Option<String>,
    /// RunArgs that win over those of the checkpoint's `args`.
    pub run_args: Vec<(String, PlainValue)>,
    /// Sharding rules that win over the table.
    pub rules: Vec<UserRule>,
    /// What counts where replicas disagree, instead of what the format's own software does.
    pub replicas: Option<Merge>,
}

impl Default for OpenOptions {
    /// The model, as it is detected.
    fn default() -> Self {
        let sections = vec![Section::Model];
        Self { sections, format: None, run_args: Vec::new(), rules: Vec::new(), replicas: None }
    }
}

impl OpenOptions {
    /// Whether a section is to be read.
    fn wants(&self, section: Section) -> bool {
        self.sections.contains(&section)
    }
}

/// Why a checkpoint cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A file or folder cannot be read.
    #[error("{}: cannot be read", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing there that any format knows.
    #[error("{}: no checkpoint here: looked for {looked_for}", path.display())]
    Unrecognized {
        /// The file or folder.
        path: PathBuf,
        /// What would have been one.
        looked_for: &'static str,
    },
    /// More than one format claims it.
    #[error("{}: both {first} and {second}; choose one with --format", path.display())]
    Ambiguous {
        /// The file or folder.
        path: PathBuf,
        /// One format.
        first: &'static str,
        /// Another one.
        second: &'static str,
    },
    /// The format asked for does not exist.
    #[error("no format is called {name}: there are {}", format_names())]
    NoSuchFormat {
        /// What was asked for.
        name: String,
    },
    /// The tracker file leads nowhere.
    #[error("{}: {what}", path.display())]
    Tracker {
        /// The tracker file.
        path: PathBuf,
        /// What is wrong and what to do.
        what: String,
    },
    /// A file is damaged or no torch file.
    #[error("{}", path.display())]
    Torch {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TorchError,
    },
    /// A file is damaged or no safetensors file.
    #[error("{}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: SafetensorsError,
    },
    /// The metadata of a distributed checkpoint cannot be read.
    #[error(transparent)]
    Dcp(#[from] DcpError),
    /// A file holds something else than was expected.
    #[error("{}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Shards that the layout needs are not there.
    #[error("{}", missing_text(shards))]
    MissingShards {
        /// What is missing.
        shards: Vec<MissingShard>,
    },
    /// Files that the checkpoint needs are not there.
    #[error("{}", missing_files_text(files))]
    MissingFiles {
        /// What is missing.
        files: Vec<MissingFile>,
    },
    /// The layout cannot be put together.
    #[error("{}", path.display())]
    Layout {
        /// The checkpoint.
        path: PathBuf,
        /// Why not.
        source: LayoutError,
    },
}

/// A shard that the layout needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingShard {
    /// Where it should be.
    pub path: PathBuf,
    /// Its rank.
    pub rank: RankCoord,
    /// Why it is needed.
    pub why: String,
}

/// A file that the checkpoint needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingFile {
    /// Where it should be.
    pub path: PathBuf,
    /// Why it is needed.
    pub why: String,
}

fn format_names() -> String {
    FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ")
}

/// Missing files that are named before the others are counted.
const SHOWN: usize = 8;

fn missing_files_text(files: &[MissingFile]) -> String {
    let line =
        |MissingFile { path, why }: &MissingFile| format!("{}: missing: {why}", path.display());
    let mut lines: Vec<String> = files.iter().take(SHOWN).map(line).collect();
    if files.len() > SHOWN {
        lines.push(format!("and {} more missing files", files.len() - SHOWN));
    }
    lines.join("\n")
}

/// The first shards in full, the others by number.
fn missing_text(shards: &[MissingShard]) -> String {
    let line = |MissingShard { path, rank, why }: &MissingShard| {
        let RankCoord { tp, pp, ep, .. } = rank;
        let expert = if *ep > 0 { format!(", ep {ep}") } else { String::new() };
        format!("{}: missing shard (tp {tp}, pp {pp}{expert}): {why}", path.display())
    };
    let mut lines: Vec<String> = shards.iter().take(SHOWN).map(line).collect();
    if shards.len() > SHOWN {
        lines.push(format!("and {} more missing shards", shards.len() - SHOWN));
    }
    lines.join("\n")
}

/// Opens a checkpoint: finds it, tells its format, reads everything but the elements of its tensors.
///
/// # Errors
/// [`OpenError`] where there is no checkpoint, or one that cannot be put together. Single tensors
/// that cannot be read are among the catalog's problems instead.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let located = locate(path)?;
    let format = match &options.format {
        Some(name) => FORMATS
            .iter()
            .find(|format| format.name == name)
            .ok_or_else(|| OpenError::NoSuchFormat { name: name.clone() })?,
        None => detect(&located.path)?,
    };
    let mut catalog = (format.read)(&located, options)?;
    catalog.origin.path = path.to_path_buf();
    if catalog.origin.resolved.as_os_str().is_empty() {
        catalog.origin.resolved = located.path;
    }
    catalog.notes.splice(0..0, located.notes);
    if let Some(merge) = options.replicas {
        catalog.merge_replicas(merge);
    }
    if catalog.tensors.is_empty() && catalog.problems.is_empty() {
        catalog.problems.push(Problem::of_file(path, "no tensor in this checkpoint"));
    }
    Ok(catalog)
}

fn detect(path: &Path) -> Result<&'static Format, OpenError> {
    let mut claims = FORMATS.iter().filter(|format| (format.detect)(path));
    match (claims.next(), claims.next()) {
        (Some(format), None) => Ok(format),
        (Some(first), Some(second)) => Err(OpenError::Ambiguous {
            path: path.to_path_buf(),
            first: first.name,
            second: second.name,
        }),
        (None, _) => Err(OpenError::Unrecognized {
            path: path.to_path_buf(),
            looked_for: "latest_checkpointed_iteration.txt, iter_* or release folders, \
                         mp_rank_* folders, model_optim_rng.pt, metadata.json, .metadata, latest and the files of DeepSpeed, \
                         checkpoint_step_* or rank_* folders, model.ckpt, model.safetensors, pytorch_model.bin, \
                         a torch .pt file",
        }),
    }
}
