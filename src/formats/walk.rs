//! The bounds of a walk through the dicts of one file. Their values may be shared and may hold themselves,
//! so that a small file can describe a tree without end.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::limits::{ENTRY, LIMITS, OVER_GLOBAL_METADATA, OVER_METADATA, OverLimit};
use crate::catalog::Problem;
use crate::containers::torch::{TorchFile, Value, ValueId};
use crate::tensor::StoredTensor;

use super::nest::key_text;

/// Counts what a walk has come by, and keeps what was wrong.
#[derive(Debug)]
pub(super) struct Bounds {
    path: PathBuf,
    entries: usize,
    left: usize,
    over: OverLimit,
    problems: Vec<Problem>,
    unlisted: usize,
}

/// Dicts are nested deeper than [`LIMITS`] allow.
pub(super) const OVER_DEPTH: OverLimit =
    OverLimit::new("levels of nested dicts", LIMITS.depth as u64);

/// Dicts are shared more often than [`LIMITS`] allow.
const OVER_SHARED: OverLimit =
    OverLimit::new("entries for each reference of its pickle", LIMITS.shared as u64);

impl Bounds {
    pub(super) fn new(path: &Path) -> Self {
        let path = path.to_path_buf();
        let (left, over) = (LIMITS.metadata, OVER_METADATA);
        Self { path, entries: usize::MAX, left, over, problems: Vec::new(), unlisted: 0 }
    }

    /// Bounds for what a pickle describes: as many entries as it has references, and some more for those it shares.
    pub(super) fn of_torch(path: &Path, torch: &TorchFile) -> Self {
        let entries = torch.values().references().saturating_mul(LIMITS.shared);
        Self { entries: entries.saturating_add(LIMITS.shared_entries), ..Self::new(path) }
    }

    /// Bounds for all files of a checkpoint that knows no ranks.
    pub(super) fn of_whole(path: &Path) -> Self {
        let (left, over) = (LIMITS.global_metadata, OVER_GLOBAL_METADATA);
        Self { left, over, ..Self::new(path) }
    }

    /// Pays for an entry. After an error there is no going on.
    pub(super) fn enter(&mut self, name: &str, depth: usize) -> Result<(), OverLimit> {
        if depth > LIMITS.depth {
            return Err(OVER_DEPTH);
        }
        if name.len() > LIMITS.name {
            let (limit, found) = (LIMITS.name as u64, name.len() as u64);
            return Err(OverLimit::found("bytes in one name", limit, found));
        }
        self.entries = self.entries.checked_sub(1).ok_or(OVER_SHARED)?;
        let left = self.left.checked_sub(name.len() + ENTRY);
        self.left = left.ok_or(self.over)?;
        Ok(())
    }

    /// Notes that an entry cannot be read.
    pub(super) fn problem<'a>(&mut self, name: &str, cause: impl Into<Box<dyn Error + 'a>>) {
        if self.problems.len() >= LIMITS.problems {
            self.unlisted += 1;
            return;
        }
        let problem = match name {
            "" => Problem::of_whole(cause),
            name => Problem::of_tensor(name, cause),
        };
        self.problems.push(problem.in_file(&self.path));
    }

    /// All that was noted.
    pub(super) fn into_problems(mut self) -> Vec<Problem> {
        if self.unlisted > 0 {
            let message = format!("{} more entries cannot be read", self.unlisted);
            self.problems.push(Problem::of_file(self.path, message));
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

/// Collects the tensors of a nest of dicts under dotted names.
pub(super) struct TensorWalk<'a> {
    pub torch: &'a TorchFile,
    pub bounds: &'a mut Bounds,
    pub left_out: usize,
    pub tensors: Vec<(Arc<str>, StoredTensor)>,
}

impl TensorWalk<'_> {
    pub(super) fn collect(
        &mut self,
        name: &str,
        id: ValueId,
        depth: usize,
    ) -> Result<(), OverLimit> {
        self.bounds.enter(name, depth)?;
        let values = self.torch.values();
        let is_extra_state =
            name.rsplit('.').next().is_some_and(|last| last.starts_with("_extra_state"));
        if is_extra_state {
            self.left_out += 1;
            return Ok(());
        }
        match self.torch.tensor(id) {
            Ok(Some(tensor)) => {
                self.tensors.push((name.into(), tensor));
                return Ok(());
            }
            Err(error) => {
                self.bounds.problem(name, error);
                return Ok(());
            }
            Ok(None) => {}
        }
        if let Some(members) = values.mapping(id) {
            for (key, member) in members {
                let name = joined(name, &key_text(self.torch, key));
                self.collect(&name, member, depth + 1)?;
            }
            return Ok(());
        }
        match values.get(id) {
            Value::Call(_) => {
                let class = values.class_name(id).unwrap_or_else(|| "an object".to_owned());
                let message = format!("holds {class}, which is no tensor that can be read");
                self.bounds.problem(name, message);
            }
            _ => self.left_out += 1,
        }
        Ok(())
    }
}
