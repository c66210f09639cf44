//! From the path that a user gives to the file or folder that holds the shards.

use std::path::{Path, PathBuf};

use super::OpenError;

/// The file that names the newest iteration (Megatron-LM `checkpointing.py`, `get_checkpoint_tracker_filename`).
const TRACKER: &str = "latest_checkpointed_iteration.txt";

/// What InfiniTrain calls the folder of a step; it has no tracker file.
const STEP: &str = "checkpoint_step_";

/// Where a checkpoint is.
#[derive(Debug, Clone)]
pub struct Located {
    /// A file, or the folder of one iteration or of one rank.
    pub path: PathBuf,
    /// The iteration, where a name told it.
    pub iteration: Option<u64>,
    /// What the user should know of how it was found.
    pub notes: Vec<String>,
}

/// Finds the checkpoint below a path: what the tracker says, else the only or the newest iteration.
///
/// # Errors
/// The path cannot be read, or its tracker leads nowhere.
pub fn locate(path: &Path) -> Result<Located, OpenError> {
    let io_error = |source| OpenError::Io { path: path.to_path_buf(), source };
    if std::fs::metadata(path).map_err(io_error)?.is_file() {
        return Ok(Located { path: path.to_path_buf(), iteration: None, notes: Vec::new() });
    }
    if let Some(located) = follow_tracker(path)? {
        return Ok(located);
    }
    if let Some(snapshot) = snapshot(path) {
        return Ok(Located { path: snapshot, iteration: None, notes: Vec::new() });
    }
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io_error)? {
        folders.push(entry.map_err(io_error)?.file_name().to_string_lossy().into_owned());
    }
    let found = |folder: &str, notes| Located {
        path: path.join(folder),
        iteration: iteration_of(folder),
        notes,
    };
    let mut iterations: Vec<(u64, &str)> = folders
        .iter()
        .filter_map(|folder| {
            Some((iteration_of(folder).filter(|_| folder != "release")?, &**folder))
        })
        .collect();
    iterations.sort_unstable();
    let has_release = folders.iter().any(|folder| folder == "release");
    match (iterations.last(), has_release) {
        (Some((_, newest)), _) => {
            let others = iterations.len() - 1 + usize::from(has_release);
            let without =
                if newest.starts_with(STEP) { String::new() } else { format!("no {TRACKER} and ") };
            let note = format!(
                "{}: {without}{} checkpoints: took the newest, {newest}",
                path.display(),
                others + 1
            );
            Ok(found(newest, if others > 0 { vec![note] } else { Vec::new() }))
        }
        (None, true) => Ok(found("release", Vec::new())),
        (None, false) => {
            let iteration = iteration_of(&path_name(path));
            Ok(Located { path: path.to_path_buf(), iteration, notes: Vec::new() })
        }
    }
}

/// `iter_0000010` is iteration 10, as is InfiniTrain's `checkpoint_step_000010`, `release` is 0.
fn iteration_of(folder: &str) -> Option<u64> {
    match folder.strip_prefix("iter_").or(folder.strip_prefix(STEP)) {
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok(),
        Some(_) => None,
        None => (folder == "release").then_some(0),
    }
}

fn follow_tracker(root: &Path) -> Result<Option<Located>, OpenError> {
    /// A tracker holds one word; what is longer is something else.
    const LONGEST: u64 = 4096;
    let path = root.join(TRACKER);
    let problem = |what: String| OpenError::Tracker { path: path.clone(), what };
    let meta = match std::fs::metadata(&path) {
        Ok(meta) => meta,
        Err(_) if path.symlink_metadata().is_err() => return Ok(None),
        Err(source) => return Err(OpenError::Io { path, source }),
    };
    if !meta.is_file() {
        return Err(problem("is no regular file; name an iter_* folder instead".to_owned()));
    }
    if meta.len() > LONGEST {
        return Err(problem(format!("{} bytes are no iteration number", meta.len())));
    }
    let bytes =
        std::fs::read(&path).map_err(|source| OpenError::Io { path: path.clone(), source })?;
    let text = String::from_utf8_lossy(&bytes);
    let word = text.trim_start_matches('\u{feff}').trim();
    let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let (folder, iteration) = match word.parse::<u64>() {
        Ok(iteration) if is_number => (format!("iter_{iteration:07}"), iteration),
        _ if word == "release" => ("release".to_owned(), 0),
        _ if word.is_empty() => {
            return Err(problem(
                "the tracker is empty: its save was interrupted; name an iter_* folder instead"
                    .to_owned(),
            ));
        }
        _ => {
            return Err(problem(format!(
                "{word:?} is neither an iteration number nor `release`; name an iter_* folder instead"
            )));
        }
    };
    let target = root.join(&folder);
    if !target.is_dir() {
        return Err(problem(format!(
            "says {word}, but there is no folder {folder}; {}",
            what_is_there(root)
        )));
    }
    Ok(Some(Located { path: target, iteration: Some(iteration), notes: Vec::new() }))
}

fn what_is_there(root: &Path) -> String {
    let mut folders: Vec<String> = std::fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| iteration_of(name).is_some())
        .collect();
    folders.sort_unstable();
    match folders.last() {
        Some(newest) => format!("name a folder instead, e.g. {newest}"),
        None => "there is no iteration here at all".to_owned(),
    }
}

/// In a model's folder of the Hugging Face cache: the snapshot that `refs/main` names, or the only one
/// (huggingface_hub, `file_download.py`).
fn snapshot(model: &Path) -> Option<PathBuf> {
    let snapshots = model.join("snapshots");
    let name = path_name(model);
    if !name.starts_with("models--") && !model.join("refs").is_dir() {
        return None;
    }
    let main = model.join("refs/main");
    let is_short = std::fs::metadata(&main).is_ok_and(|meta| meta.is_file() && meta.len() < 256);
    let named = is_short.then(|| std::fs::read_to_string(main).ok()).flatten();
    let named = named.filter(|name| name.trim().bytes().all(|byte| byte.is_ascii_alphanumeric()));
    let named = named.map(|name| snapshots.join(name.trim()));
    let mut all = std::fs::read_dir(&snapshots).ok()?.flatten().map(|entry| entry.path());
    named.filter(|path| path.is_dir() && *path != snapshots).or_else(|| {
        let first = all.next()?;
        all.next().is_none().then_some(first)
    })
}

fn path_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
