//! Files in a checkpoint's folder that look as if they held tensors and that no tensor comes from, and bytes behind the
//! end of a file's format.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::base::limits::LIMITS;
use crate::catalog::{Catalog, Problem};
use crate::containers::torch::{self, TorchError, TorchFile, globals};
use crate::storage::{self, EntryKind, FileId, FileSet, Region, Target, present};

/// Endings of the names of files with tensors in them.
const ENDINGS: [&str; 7] = [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".npy"];

/// Endings of the names of other files that may be pickles.
const PICKLES: [&str; 6] = [".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"];

/// Files that stand beside tensors and hold none of a model or its optimizer.
static COMPANIONS: &[&str] =
    &["common", "rng_state", "random_states", "scheduler", "training_args"];

/// Folders that are a checkpoint of their own, or none.
static SEPARATE: &[&str] = &["modelopt_state", "sharded", "original", "configs"];

/// Lists the files and bytes that no tensor comes from, in order of the files: no writer leaves them so. Their foreign globals
/// and those of files beside them are noted: whoever resumes from the checkpoint loads them too. What cannot be looked at
/// becomes a problem of the catalog.
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
    let is_unread = |path: &PathBuf| !read.contains(path.as_path());
    let walk = Walk::through(&catalog.origin.resolved);
    unreadable.extend(walk.unreadable);
    let unread: Vec<PathBuf> = walk.found.into_iter().filter(is_unread).collect();
    let companions: Vec<PathBuf> = walk.companions.into_iter().filter(is_unread).collect();
    found
        .extend(unread.iter().map(|path| Problem::of_file(path, "no tensor comes from this file")));
    found.sort();
    for path in unread.into_iter().chain(companions) {
        if let Err(error) = note_globals_of(&mut catalog.files, &path) {
            unreadable.push(Problem::of_file(path, error));
        }
    }
    add_new(&mut catalog.problems, unreadable);
    found
}

/// Adds the problems with files that nothing was said of.
fn add_new(problems: &mut Vec<Problem>, found: Vec<Problem>) {
    let known: HashSet<PathBuf> =
        problems.iter().filter_map(|problem| problem.file.clone()).collect();
    let is_new = |problem: &Problem| problem.file.as_ref().is_none_or(|file| !known.contains(file));
    problems.extend(found.into_iter().filter(is_new));
}

/// Only what cannot be read is an error: what is no file of torch's names no globals.
fn note_globals_of(files: &mut FileSet, path: &Path) -> io::Result<()> {
    if storage::look(path)? == Target::Other {
        return Ok(());
    }
    let file = files.add(path)?;
    let whole = files.whole(file);
    match TorchFile::open(files, whole) {
        Err(error) if storage::is_of_system(&error) => Err(io::Error::other(error)),
        Err(TorchError::PlainPickle | TorchError::NotTorch { .. } | TorchError::Legacy(_)) => {
            let pickles = Region { len: whole.len.min(LIMITS.pickle_bytes), ..whole };
            files.note_globals(whole, globals::foreign_in(files, pickles)?);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The walk through the folders of a checkpoint.
#[derive(Default)]
struct Walk {
    /// Entries that may still be looked at.
    left: usize,
    /// Files that look as if they held tensors.
    found: Vec<PathBuf>,
    /// Other files that may be pickles.
    companions: Vec<PathBuf>,
    unreadable: Vec<Problem>,
}

impl Walk {
    fn through(root: &Path) -> Self {
        let mut walk = Self { left: LIMITS.folder_entries, ..Self::default() };
        match storage::look(root) {
            Ok(Target::Folder) => walk.collect(root, LIMITS.folder_depth),
            Ok(_) => {}
            Err(error) => walk.unreadable.push(Problem::of_file(root, error)),
        }
        walk
    }

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
                    let ends = |endings: &[&str]| endings.iter().any(|end| name.ends_with(end));
                    if !is_companion && ends(&ENDINGS) {
                        self.found.push(path);
                    } else if ends(&PICKLES) {
                        self.companions.push(path);
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
