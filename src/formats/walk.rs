//! The bounds of a walk through the dicts of one file. Their values may be shared and may hold themselves,
//! so that a small file can describe a tree without end.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::catalog::Problem;
use crate::limits::{ENTRY, LIMITS};

/// Counts what a walk has come by, and keeps what was wrong.
#[derive(Debug)]
pub(super) struct Bounds {
    path: PathBuf,
    left: usize,
    problems: Vec<Problem>,
    unlisted: usize,
}

/// Why a walk ends before the file does.
#[derive(Debug, Error)]
pub(super) enum Excess {
    #[error("dicts more than {} levels deep", LIMITS.depth)]
    Depth,
    #[error("names of more than {} bytes", LIMITS.name)]
    Name,
    #[error("more entries than any model has")]
    Entries,
}

impl Bounds {
    pub(super) fn new(path: &Path) -> Self {
        let path = path.to_path_buf();
        Self { path, left: LIMITS.metadata, problems: Vec::new(), unlisted: 0 }
    }

    /// Pays for an entry. After an error there is no going on.
    pub(super) fn enter(&mut self, name: &str, depth: usize) -> Result<(), Excess> {
        if depth > LIMITS.depth {
            return Err(Excess::Depth);
        }
        if name.len() > LIMITS.name {
            return Err(Excess::Name);
        }
        let left = self.left.checked_sub(name.len() + ENTRY);
        self.left = left.ok_or(Excess::Entries)?;
        Ok(())
    }

    /// Notes that an entry cannot be read.
    pub(super) fn problem(&mut self, name: &str, message: impl Display) {
        if self.problems.len() >= LIMITS.problems {
            self.unlisted += 1;
            return;
        }
        let tensor = (!name.is_empty()).then(|| name.to_owned());
        let message = message.to_string();
        self.problems.push(Problem { file: Some(self.path.clone()), tensor, message });
    }

    /// All that was noted.
    pub(super) fn into_problems(mut self) -> Vec<Problem> {
        if self.unlisted > 0 {
            let message = format!("{} more entries cannot be read", self.unlisted);
            self.problems.push(Problem { file: Some(self.path), tensor: None, message });
        }
        self.problems
    }
}

/// `name.key`. What is longer than any name is cut just so that it is seen to be.
pub(super) fn joined(name: &str, key: &str) -> String {
    let cut: String;
    let key = if key.len() > LIMITS.name {
        cut = key.chars().take(LIMITS.name + 1).collect();
        &cut
    } else {
        key
    };
    if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") }
}
