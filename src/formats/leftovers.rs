//! Files in a checkpoint's folder that look as if they held tensors and that no tensor comes from, and bytes behind the
//! end of a file's format.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::base::limits::LIMITS;
use crate::catalog::{Catalog, Problem};
use crate::containers::torch;

/// Endings of the names of files with tensors in them.
const ENDINGS: [&str; 7] = [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".npy"];

/// Files that stand beside tensors and hold none of a model or its optimizer.
static COMPANIONS: &[&str] =
    &["common", "rng_state", "random_states", "scheduler", "training_args"];

/// Folders that are a checkpoint of their own, or none.
static SEPARATE: &[&str] = &["modelopt_state", "sharded", "original", "configs"];

/// Lists the files and bytes that no tensor comes from, in order of the files: no writer leaves them so.
#[must_use]
pub fn leftovers(catalog: &Catalog) -> Vec<Problem> {
    let files = &catalog.files;
    let mut found: Vec<Problem> = files
        .ids()
        .collect::<Vec<_>>()
        .par_iter()
        .filter_map(|&file| {
            let bytes = torch::bytes_behind(files, files.whole(file))?;
            Some(Problem::bytes_behind(files.path(file), bytes))
        })
        .collect();
    let read: HashSet<&Path> = files.ids().map(|file| files.path(file)).collect();
    let mut unread = Vec::new();
    let mut left = LIMITS.folder_entries;
    collect(&catalog.origin.resolved, LIMITS.folder_depth, &mut left, &mut unread);
    unread.retain(|path| !read.contains(path.as_path()));
    let unread = unread.into_iter();
    found.extend(unread.map(|path| Problem::of_file(path, "no tensor comes from this file")));
    found.extend(catalog.leftovers.iter().cloned());
    found.sort();
    found
}

fn collect(folder: &Path, depth: usize, left: &mut usize, found: &mut Vec<PathBuf>) {
    // A folder that cannot be listed is the reader's to complain of.
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        let is_companion = COMPANIONS.iter().any(|stem| name.starts_with(stem));
        if path.is_dir() {
            if depth > 0 && !SEPARATE.contains(&name.as_str()) {
                collect(&path, depth - 1, left, found);
            }
        } else if !is_companion && ENDINGS.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}
