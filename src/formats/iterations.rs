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
pub(super) fn newest(probe: &Probe) -> Option<Claim> {
    match tracked(probe, TRACKER) {
        Err(error) => return Some(broken(error)),
        Ok(Some(word)) => match follow(probe, word) {
            Err(what) => {
                return Some(broken(OpenError::Tracker { path: probe.path().join(TRACKER), what }));
            }
            Ok(Some(folder)) => return Some(to(probe, &folder, Vec::new())),
            Ok(None) => {}
        },
        Ok(None) => {}
    }
    let iterations = numbered(probe, &[ITERATION]);
    let has_release = probe.has_folder(RELEASE);
    let Some((_, newest)) = iterations.last() else {
        return has_release.then(|| to(probe, RELEASE, Vec::new()));
    };
    let count = iterations.len() + usize::from(has_release);
    let among = format!("no {TRACKER} and {count} checkpoints");
    Some(to(probe, newest, newest_note(probe, count, &among, newest)))
}

fn to(probe: &Probe, folder: &str, notes: Vec<String>) -> Claim {
    Claim::below(Score::Tracker, TRACKER, probe, folder, notes)
}

fn broken(error: OpenError) -> Claim {
    Claim::broken(Score::Tracker, TRACKER, error)
}

/// The folder that the tracker names; `None` where another tracker counts.
fn follow(probe: &Probe, word: Result<String, String>) -> Result<Option<String>, String> {
    let word = word.map_err(|what| format!("{what}; name an iter_* folder instead"))?;
    let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let folder = match word.parse::<u64>() {
        Ok(iteration) if is_number => format!("iter_{iteration:07}"),
        _ if word == RELEASE => RELEASE.to_owned(),
        _ if word.is_empty() => {
            return Err(
                "the tracker is empty: its save was interrupted; name an iter_* folder instead"
                    .to_owned(),
            );
        }
        _ => {
            return Err(format!(
                "{word:?} is neither an iteration number nor `release`; name an iter_* folder instead"
            ));
        }
    };
    let of_verl = format!("global_step_{word}");
    match [folder, of_verl].map(|folder| (probe.has_folder(&folder), folder)) {
        [(true, folder), _] | [_, (true, folder)] => Ok(Some(folder)),
        // Megatron-DeepSpeed writes both trackers, and the folders of DeepSpeed's.
        _ if probe.has(OF_DEEPSPEED) && !probe.has_folder(OF_DEEPSPEED) => Ok(None),
        [(_, folder), _] => {
            Err(format!("says {word}, but there is no folder {folder}; {}", what_is_there(probe)))
        }
    }
}

fn what_is_there(probe: &Probe) -> String {
    let newest = probe.names().filter(|name| step_of(name).is_some()).max();
    match newest {
        Some(newest) => format!("name a folder instead, e.g. {newest}"),
        None => "there is no iteration here at all".to_owned(),
    }
}
