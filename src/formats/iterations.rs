//! The save folder of a Megatron run, whatever the format of its checkpoints: a folder an iteration, and a tracker.
//!
//! Facts from Megatron-LM (`checkpointing.py`, `get_checkpoint_tracker_filename`, `get_checkpoint_name`) and verl
//! (`verl/utils/checkpoint/checkpoint_manager.py`: the same tracker, other folders).

use super::error::OpenError;
use super::probe::Probe;
use super::roots::{Claim, Score, newest_note, numbered, step_of, tracked};

/// The file that names the newest iteration.
const TRACKER: &str = "latest_checkpointed_iteration.txt";

/// Words for what is looked for here.
pub(super) const LOOKED_FOR: [&str; 2] = [TRACKER, "iter_* or release folders"];

/// The beginning of the name of an iteration's folder.
pub(super) const ITERATION: &str = "iter_";

/// The folder of weights that were converted from elsewhere.
const RELEASE: &str = "release";

/// The tracker that DeepSpeed writes.
const OF_DEEPSPEED: &str = "latest";

/// The iteration that the tracker names, else the only or the newest one.
///
/// # Errors
/// The tracker, or a folder that it may name, is there and cannot be looked at.
pub(super) fn newest(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if let Some(word) = tracked(probe, TRACKER)? {
        match follow(probe, word)? {
            Err(what) => {
                let error = OpenError::Tracker { path: probe.path().join(TRACKER), what };
                return Ok(Some(Claim::broken(Score::Tracker, TRACKER, error)));
            }
            Ok(Some(folder)) => return Ok(Some(to(probe, &folder, Vec::new()))),
            Ok(None) => {}
        }
    }
    let iterations = numbered(probe, &[ITERATION])?;
    let has_release = probe.has_folder(RELEASE)?;
    let Some((_, newest)) = iterations.last() else {
        return Ok(has_release.then(|| to(probe, RELEASE, Vec::new())));
    };
    let count = iterations.len() + usize::from(has_release);
    let among = format!("no {TRACKER} and {count} checkpoints");
    Ok(Some(to(probe, newest, newest_note(probe, count, &among, newest))))
}

fn to(probe: &Probe, folder: &str, notes: Vec<String>) -> Claim {
    Claim::below(Score::Tracker, TRACKER, probe, folder, notes)
}

/// The folder that the tracker names, or why it names none; `None` where another tracker counts.
fn follow(
    probe: &Probe,
    word: Result<String, String>,
) -> Result<Result<Option<String>, String>, OpenError> {
    let word = word.map_err(|what| format!("{what}; name an iter_* folder instead"));
    let (word, folder) = match word.and_then(|word| Ok((folder_of(&word)?, word))) {
        Ok((folder, word)) => (word, folder),
        Err(what) => return Ok(Err(what)),
    };
    for folder in [&folder, &format!("global_step_{word}")] {
        if probe.has_folder(folder)? {
            return Ok(Ok(Some(folder.clone())));
        }
    }
    // Megatron-DeepSpeed writes both trackers, and the folders of DeepSpeed's.
    if probe.has(OF_DEEPSPEED) && !probe.has_folder(OF_DEEPSPEED)? {
        return Ok(Ok(None));
    }
    let hint = what_is_there(probe);
    Ok(Err(format!("says {word}, but there is no folder {folder}; {hint}")))
}

/// The folder that a word stands for: Megatron's; verl's has the same number.
fn folder_of(word: &str) -> Result<String, String> {
    let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    match word.parse::<u64>() {
        Ok(iteration) if is_number => Ok(format!("iter_{iteration:07}")),
        _ if word == RELEASE => Ok(RELEASE.to_owned()),
        _ if word.is_empty() => {
            Err("the tracker is empty: its save was interrupted; name an iter_* folder instead"
                .to_owned())
        }
        _ => Err(format!(
            "{word:?} is neither an iteration number nor `release`; name an iter_* folder instead"
        )),
    }
}

fn what_is_there(probe: &Probe) -> String {
    let newest = probe.names().filter(|name| step_of(name).is_some()).max();
    match newest {
        Some(newest) => format!("name a folder instead, e.g. {newest}"),
        None => "there is no iteration here at all".to_owned(),
    }
}
