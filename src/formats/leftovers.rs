//! Files in a checkpoint's folder that look as if they held tensors and that no tensor comes from, and bytes behind the
//! end of a file's format.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::base::limits::LIMITS;
use crate::catalog::{Catalog, Problem};
use crate::containers::torch;
use crate::storage::{self, EntryKind, FileId, Target, present};

/// Endings of the names of files with tensors in them.
const ENDINGS: [&str; 7] = [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".npy"];

/// Files that stand beside tensors and hold none of a model or its optimizer.
static COMPANIONS: &[&str] =
    &["common", "rng_state", "random_states", "scheduler", "training_args"];

/// Folders that are a checkpoint of their own, or none.
static SEPARATE: &[&str] = &["modelopt_state", "sharded", "original", "configs"];

/// Lists the files and bytes that no tensor comes from, in order of the files: no writer leaves them so. What cannot be
/// looked at becomes a problem of the catalog.
#[must_use]
pub fn leftovers(catalog: &mut Catalog) -> Vec<Problem> {
    let files = &catalog.files;
    let ids: Vec<FileId> = files.ids().collect();
    let behind = |&file: &FileId| match torch::bytes_behind(files, files.whole(file)) {
        Ok(Some(bytes)) => Some(Ok(Problem::bytes_behind(files.path(file), bytes))),
        Ok(None) => None,
        Err(error) => Some(Err(Problem::of_file(files.path(file), error))),
    };
    let (mut found, mut unreadable) = (catalog.leftovers.clone(), Vec::new());
    for behind in ids.par_iter().filter_map(behind).collect::<Vec<_>>() {
        match behind {
            Ok(leftover) => found.push(leftover),
            Err(problem) => unreadable.push(problem),
        }
    }
    let read: HashSet<&Path> = files.ids().map(|file| files.path(file)).collect();
    let mut walk = Walk { left: LIMITS.folder_entries, found: Vec::new(), unreadable };
    let root = &catalog.origin.resolved;
    let (is_folder, unreadable) = match storage::look(root) {
        Ok(target) => (target == Target::Folder, None),
        Err(error) => (false, Some(Problem::of_file(root, error))),
    };
    walk.unreadable.extend(unreadable);
    if is_folder {
        walk.collect(root, LIMITS.folder_depth);
    }
    let unread = walk.found.into_iter().filter(|path| !read.contains(path.as_path()));
    found.extend(unread.map(|path| Problem::of_file(path, "no tensor comes from this file")));
    found.sort();
    let known: HashSet<PathBuf> =
        catalog.problems.iter().filter_map(|problem| problem.file.clone()).collect();
    let is_new = |problem: &Problem| problem.file.as_ref().is_none_or(|file| !known.contains(file));
    catalog.problems.extend(walk.unreadable.into_iter().filter(is_new));
    found
}

/// The walk through the folders of a checkpoint.
struct Walk {
    /// Entries that may still be looked at.
    left: usize,
    /// Files that look as if they held tensors.
    found: Vec<PathBuf>,
    unreadable: Vec<Problem>,
}

impl Walk {
    fn collect(&mut self, folder: &Path, depth: usize) {
        let entries = match storage::list(folder) {
            Ok(entries) => entries,
            Err(error) => return self.unreadable.push(Problem::of_file(folder, error)),
        };
        for (name, kind) in entries {
            if self.left == 0 {
                return;
            }
            self.left -= 1;
            let path = folder.join(&name);
            match is_folder(&path, kind) {
                Ok(true) if depth > 0 && !SEPARATE.contains(&name.as_str()) => {
                    self.collect(&path, depth - 1);
                }
                Ok(true) => {}
                Ok(false) => {
                    let is_companion = COMPANIONS.iter().any(|stem| name.starts_with(stem));
                    if !is_companion && ENDINGS.iter().any(|ending| name.ends_with(ending)) {
                        self.found.push(path);
                    }
                }
                Err(error) => self.unreadable.push(Problem::of_file(path, error)),
            }
        }
    }
}

/// Tells whether an entry is a folder, or a link to one; a link to nowhere is none.
fn is_folder(path: &Path, kind: EntryKind) -> io::Result<bool> {
    match kind {
        EntryKind::Link => Ok(present(storage::look(path))? == Some(Target::Folder)),
        kind => Ok(kind == EntryKind::Folder),
    }
}
