//! Reasons why a checkpoint cannot be opened.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::containers::dcp::DcpError;
use crate::containers::safetensors::SafetensorsError;
use crate::containers::torch::TorchError;
use crate::layout::{LayoutError, RankCoord};
use crate::storage;

use super::identity::ForeignFile;

/// Reason why a checkpoint cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A file or folder cannot be read.
    #[error("{}: cannot be read", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// Nothing there, and by its form the path is one of another place.
    #[error("{}: no such file or folder; {remedy}", path.display())]
    Elsewhere {
        /// The path.
        path: PathBuf,
        /// The way to get it here.
        remedy: &'static str,
    },
    /// Nothing there that any format knows.
    #[error("{}: no checkpoint here: looked for {looked_for}", path.display())]
    Unrecognized {
        /// The file or folder.
        path: PathBuf,
        /// Words for what would have been one.
        looked_for: String,
    },
    /// Nothing there that any format knows, but in what lies in the folder.
    #[error("{}: no checkpoint here, but below: {}", path.display(), below_text(below))]
    Below {
        /// The folder.
        path: PathBuf,
        /// The checkpoints in it, each with its format.
        below: Vec<String>,
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
    #[error("no format is called {name}: there are {}", known.join(", "))]
    NoSuchFormat {
        /// The name that was asked for.
        name: String,
        /// The formats that there are.
        known: Vec<&'static str>,
    },
    /// The tracker file leads nowhere.
    #[error("{}: {what}", path.display())]
    Tracker {
        /// The tracker file.
        path: PathBuf,
        /// The fault and the remedy.
        what: String,
    },
    /// A file is damaged or no torch file.
    #[error("{}", path.display())]
    Torch {
        /// The file.
        path: PathBuf,
        /// The fault in it.
        source: TorchError,
    },
    /// A file is damaged or no safetensors file.
    #[error("{}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The fault in it.
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
        /// The fault in it.
        what: String,
    },
    /// Shards that the layout needs are not there.
    #[error("{}", missing_text(shards))]
    MissingShards {
        /// The missing shards.
        shards: Vec<MissingShard>,
    },
    /// Files that the checkpoint needs are not there.
    #[error("{}", missing_files_text(files))]
    MissingFiles {
        /// The missing files.
        files: Vec<MissingFile>,
    },
    /// Files that are not those of the place that they stand in.
    #[error("{}", foreign_text(files))]
    Foreign {
        /// The files.
        files: Vec<ForeignFile>,
    },
    /// The layout cannot be put together.
    #[error("{}", path.display())]
    Layout {
        /// The checkpoint.
        path: PathBuf,
        /// The fault in it.
        source: LayoutError,
    },
}

impl OpenError {
    /// The same error; where the path is not there, and looks like one of a hub or a store, with the remedy.
    pub(super) fn with_remedy(self) -> Self {
        match self {
            Self::Io { path, source } => match elsewhere(&path) {
                Some(remedy) if source.kind() == io::ErrorKind::NotFound => {
                    Self::Elsewhere { path, remedy }
                }
                _ => Self::Io { path, source },
            },
            other => other,
        }
    }

    /// Makes of what the system said the error of this file or folder.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        |source| Self::Io { path: path.to_path_buf(), source }
    }
}

/// The remedy for a path that is one of another place: `s3://bucket/run`, or `org/model` of the Hugging Face hub.
fn elsewhere(path: &Path) -> Option<&'static str> {
    let text = path.to_str()?;
    if text.contains("://") {
        return Some("nothing is read from a network: download it and name its folder");
    }
    let is_part = |part: &str| {
        part.starts_with(char::is_alphanumeric)
            && part.chars().all(|char| char.is_ascii_alphanumeric() || "._-".contains(char))
    };
    let (owner, model) = text.split_once('/')?;
    let is_elsewhere = || matches!(storage::is_there(Path::new(owner)), Ok(false));
    (is_part(owner) && is_part(model) && is_elsewhere())
        .then_some("if a model of the Hugging Face hub is meant, download it and name its folder")
}

/// A shard that the layout needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingShard {
    /// The place where it should be.
    pub path: PathBuf,
    /// Its rank.
    pub rank: RankCoord,
    /// Reason why it is needed.
    pub why: String,
}

/// A file that the checkpoint needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingFile {
    /// The place where it should be.
    pub path: PathBuf,
    /// Reason why it is needed.
    pub why: String,
}

/// Missing files that are named before the others are counted.
const SHOWN: usize = 8;

/// The first checkpoints by name, the others by number.
fn below_text(below: &[String]) -> String {
    let first = below.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match below.len() {
        1 => format!("{first}; name it"),
        count if count > SHOWN => format!("{first} and {} more; name one of them", count - SHOWN),
        _ => format!("{first}; name one of them"),
    }
}

fn missing_files_text(files: &[MissingFile]) -> String {
    let line =
        |MissingFile { path, why }: &MissingFile| format!("{}: missing: {why}", path.display());
    let mut lines: Vec<String> = files.iter().take(SHOWN).map(line).collect();
    if files.len() > SHOWN {
        lines.push(format!("and {} more missing files", files.len() - SHOWN));
    }
    lines.join("\n")
}

/// The first files by name, the others by number, and the remedy.
fn foreign_text(files: &[ForeignFile]) -> String {
    let line = |ForeignFile { path, what }: &ForeignFile| format!("{}: {what}", path.display());
    let mut lines: Vec<String> = files.iter().take(SHOWN).map(line).collect();
    if files.len() > SHOWN {
        lines.push(format!(
            "and {} more files that are not what they stand for",
            files.len() - SHOWN
        ));
    }
    if let Some(last) = lines.last_mut() {
        last.push_str("; --allow-foreign-ranks goes by the names of files alone");
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
