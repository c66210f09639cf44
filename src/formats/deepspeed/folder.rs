//! The place of a DeepSpeed checkpoint, and its files by their names.
//!
//! Facts from DeepSpeed 0.3 to 0.19 (`runtime/engine.py`: `_get_ckpt_name`, `_get_rank_zero_ckpt_name`,
//! `_get_expert_ckpt_name`, `_get_optimizer_ckpt_name`; `runtime/pipe/module.py`: `ckpt_layer_path`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::base::limits::LIMITS;
use crate::formats::{Located, OpenError};
use crate::names::{index, printable};

/// Files that name the newest tag: an ordinary checkpoint's, and that of a universal one.
const TRACKERS: [&str; 2] = ["latest", "latest_universal"];

/// The folder of a universal checkpoint that has a folder for every parameter.
const UNIVERSAL: &str = "zero";

/// The kind of one file of a tag, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model { mp: u64 },
    ZeroModel { mp: u64, dp: u64 },
    Zero { mp: u64, dp: u64 },
    Layer { layer: u64, tp: Option<u64> },
    Expert { layer: Option<u64>, expert: u64, mp: u64 },
    ExpertOptimizer,
}

/// The files of one tag, by rank.
#[derive(Debug, Default)]
pub(super) struct Folder {
    /// `mp_rank_RR_model_states.pt`.
    pub model: BTreeMap<u64, PathBuf>,
    /// `zero_pp_rank_D_mp_rank_RR_model_states.pt` (ZeRO-3), by model and data parallel rank.
    pub zero_model: BTreeMap<(u64, u64), PathBuf>,
    /// `zero_pp_rank_D_mp_rank_RR_optim_states.pt`, also with `bf16_` or `fp16_` in front.
    pub zero: BTreeMap<(u64, u64), PathBuf>,
    /// `layer_LL-model_MM-model_states.pt`; without a model axis `MM` is 0.
    pub layers: BTreeMap<(u64, u64), PathBuf>,
    /// Experts, each in a file of its own: layer (none in old files, which hold all layers), model parallel rank, expert.
    pub experts: BTreeMap<(Option<u64>, u64, u64), PathBuf>,
    /// `expp_rank_E_mp_rank_RR_optim_states.pt`: the optimizer of a run with experts and without ZeRO.
    pub expert_optimizers: Vec<PathBuf>,
    /// `zero/`, where it holds parameters.
    pub universal: Option<PathBuf>,
    /// Files that look like a part of the checkpoint and are not recognised.
    pub unknown: Vec<PathBuf>,
}

fn number(digits: &str) -> Option<u64> {
    index::number(digits).filter(|number| *number < LIMITS.ranks)
}

/// Reads a file's name; `None` where it is none of a checkpoint's.
fn kind_of(name: &str) -> Option<Kind> {
    let stem = name.strip_suffix(".pt")?;
    if let Some(rest) = stem.strip_prefix("layer_") {
        if let Some(rest) = rest.strip_suffix("-model_states") {
            let (layer, tp) = match rest.split_once("-model_") {
                Some((layer, tp)) => (layer, Some(number(tp)?)),
                None => (rest, None),
            };
            return Some(Kind::Layer { layer: number(layer)?, tp });
        }
        let (layer, expert) = rest.split_once("_expert_")?;
        return expert_rank(Some(number(layer)?), expert);
    }
    if let Some(expert) = stem.strip_prefix("expert_") {
        return expert_rank(None, expert);
    }
    let (front, mp) = stem.rsplit_once("mp_rank_")?;
    let (mp, is_model) = match (mp.strip_suffix("_model_states"), mp.strip_suffix("_optim_states"))
    {
        (Some(mp), _) => (number(mp)?, true),
        (_, Some(mp)) => (number(mp)?, false),
        (None, None) => return None,
    };
    if front.is_empty() && is_model {
        return Some(Kind::Model { mp });
    }
    if let Some(expert) = front.strip_prefix("expp_rank_") {
        number(expert.strip_suffix('_')?)?;
        return (!is_model).then_some(Kind::ExpertOptimizer);
    }
    let front =
        ["bf16_", "fp16_"].iter().find_map(|kind| front.strip_prefix(kind)).unwrap_or(front);
    let dp = number(front.strip_prefix("zero_pp_rank_")?.strip_suffix('_')?)?;
    Some(if is_model { Kind::ZeroModel { mp, dp } } else { Kind::Zero { mp, dp } })
}

fn expert_rank(layer: Option<u64>, text: &str) -> Option<Kind> {
    let (expert, mp) = text.strip_suffix("_model_states")?.split_once("_mp_rank_")?;
    Some(Kind::Expert { layer, expert: number(expert)?, mp: number(mp)? })
}

fn names_in(path: &Path) -> Result<Vec<String>, OpenError> {
    let io_error = |source| OpenError::Io { path: path.to_path_buf(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io_error)? {
        names.push(entry.map_err(io_error)?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

fn is_universal(path: &Path) -> bool {
    let inside = std::fs::read_dir(path.join(UNIVERSAL)).into_iter().flatten().flatten();
    inside.into_iter().any(|entry| entry.path().join("fp32.pt").exists())
}

/// Says whether this folder holds the files of one tag.
fn is_tag(path: &Path) -> bool {
    names_in(path).is_ok_and(|names| names.iter().any(|name| kind_of(name).is_some()))
        || is_universal(path)
}

/// The step that a tag's name tells.
fn step_of(tag: &str) -> Option<u64> {
    let digits = tag.strip_prefix("global_step")?;
    number(digits.strip_suffix("_universal").unwrap_or(digits))
}

/// `global_step<N>` folders of a save folder, by step.
fn tags_in(path: &Path) -> BTreeMap<(u64, String), PathBuf> {
    let names = names_in(path).unwrap_or_default().into_iter();
    let tag = |name: String| {
        let folder = path.join(&name);
        (folder.is_dir()).then_some(())?;
        Some(((step_of(&name)?, name), folder))
    };
    names.filter_map(tag).collect()
}

pub(super) fn detect(path: &Path) -> bool {
    // Others have a file `latest`, too: it counts by what it names.
    let names_a_tag = |tracker: &str| match tag_of(&path.join(tracker)) {
        Ok(Some(tag)) => step_of(&tag).is_some() || (is_name(&tag) && is_tag(&path.join(tag))),
        Ok(None) | Err(_) => false,
    };
    path.is_dir()
        && (is_tag(path)
            || tags_in(path).values().any(|tag| is_tag(tag))
            || TRACKERS.iter().any(|tracker| names_a_tag(tracker)))
}

/// From the folder that was given to that of one tag: itself, what `latest` says, or the newest.
pub(super) fn locate(located: &Located) -> Result<Located, OpenError> {
    let path = &located.path;
    let iteration = |tag: &Path| tag.file_name().and_then(|name| step_of(&name.to_string_lossy()));
    let found = |tag: PathBuf, notes| Located { iteration: iteration(&tag), path: tag, notes };
    if is_tag(path) {
        return Ok(found(path.clone(), Vec::new()));
    }
    for tracker in TRACKERS {
        if let Some(tag) = follow(&path.join(tracker), path)? {
            return Ok(found(tag, Vec::new()));
        }
    }
    let tags = tags_in(path);
    let mut checkpoints = tags.iter().filter(|(_, tag)| is_tag(tag));
    let Some(((_, newest), tag)) = checkpoints.next_back() else {
        return Err(OpenError::Unrecognized {
            path: path.clone(),
            looked_for: "mp_rank_*_model_states.pt and the other files of a DeepSpeed tag",
        });
    };
    let count = 1 + checkpoints.count();
    let notes = if count > 1 {
        let text =
            format!("{}: no latest and {count} tags: took the newest, {newest}", path.display());
        vec![text]
    } else {
        Vec::new()
    };
    Ok(found(tag.clone(), notes))
}

/// Says whether a tag is the name of a folder beside its tracker, and no path to somewhere else.
fn is_name(tag: &str) -> bool {
    !tag.is_empty() && !tag.contains(['/', '\\', '\0']) && tag != "." && tag != ".."
}

/// The tag in a tracker; `None` where there is none.
fn tag_of(tracker: &Path) -> Result<Option<String>, OpenError> {
    /// A tag is one word; what is longer is something else.
    const LONGEST: u64 = 4096;
    let problem = |what: String| OpenError::Tracker { path: tracker.to_path_buf(), what };
    let io_error = |source| OpenError::Io { path: tracker.to_path_buf(), source };
    if tracker.symlink_metadata().is_err() {
        return Ok(None);
    }
    let meta = std::fs::metadata(tracker).map_err(io_error)?;
    if meta.is_dir() {
        return Ok(None);
    }
    if !meta.is_file() || meta.len() > LONGEST {
        return Err(problem("does not hold a tag; name the tag's folder instead".to_owned()));
    }
    let bytes = std::fs::read(tracker).map_err(io_error)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(Some(text.trim_start_matches('\u{feff}').trim().to_owned()))
}

/// The folder that a tracker names.
fn follow(tracker: &Path, root: &Path) -> Result<Option<PathBuf>, OpenError> {
    let problem = |what: String| OpenError::Tracker { path: tracker.to_path_buf(), what };
    let Some(tag) = tag_of(tracker)? else { return Ok(None) };
    if tag.is_empty() {
        let what = "is empty: its save was interrupted; name the tag's folder instead";
        return Err(problem(what.to_owned()));
    }
    let folder = root.join(&tag);
    if !is_name(&tag) || !folder.is_dir() {
        let there = tags_in(root);
        let hint = match there.keys().next_back() {
            Some((_, newest)) => format!("name a folder instead, e.g. {}", printable(newest)),
            None => "there is no tag here at all".to_owned(),
        };
        let what = format!("says {}, but there is no such folder; {hint}", printable(&tag));
        return Err(problem(what));
    }
    Ok(Some(folder))
}

impl Folder {
    /// Sorts the files of a tag.
    pub(super) fn read(path: &Path) -> Result<Self, OpenError> {
        let mut folder = Self::default();
        for name in names_in(path)? {
            let file = path.join(&name);
            let same = |other: Option<PathBuf>| match other {
                None => Ok(()),
                Some(other) => {
                    let other = other.file_name().unwrap_or_default().to_string_lossy();
                    let what =
                        format!("{} and {} are the same rank", printable(&name), printable(&other));
                    Err(OpenError::Content { path: path.to_path_buf(), what })
                }
            };
            match kind_of(&name) {
                Some(Kind::Model { mp }) => same(folder.model.insert(mp, file))?,
                Some(Kind::ZeroModel { mp, dp }) => same(folder.zero_model.insert((mp, dp), file))?,
                Some(Kind::Zero { mp, dp }) => same(folder.zero.insert((mp, dp), file))?,
                Some(Kind::Layer { layer, tp }) => {
                    same(folder.layers.insert((layer, tp.unwrap_or(0)), file))?;
                }
                Some(Kind::Expert { layer, expert, mp }) => {
                    same(folder.experts.insert((layer, mp, expert), file))?;
                }
                Some(Kind::ExpertOptimizer) => folder.expert_optimizers.push(file),
                None if name.ends_with("_states.pt") => folder.unknown.push(file),
                None => {}
            }
        }
        folder.universal = is_universal(path).then(|| path.join(UNIVERSAL));
        Ok(folder)
    }

    /// The files of experts that should be there as `count` says of a layer, or as its highest number does.
    pub(super) fn missing_experts(&self, count: impl Fn(u64) -> Option<u64>) -> Vec<String> {
        let mut highest: BTreeMap<(Option<u64>, u64), u64> = BTreeMap::new();
        for (layer, mp, expert) in self.experts.keys() {
            let known = highest.entry((*layer, *mp)).or_default();
            *known = (*known).max(*expert);
        }
        let mut missing = Vec::new();
        for ((layer, mp), highest) in highest {
            let declared = count(layer.unwrap_or(0)).unwrap_or(0).min(LIMITS.experts);
            let is_absent = |expert: &u64| !self.experts.contains_key(&(layer, mp, *expert));
            missing.extend((0..declared.max(highest + 1)).filter(is_absent).map(|expert| {
                let layer = layer.map_or_else(String::new, |layer| format!("layer_{layer}_"));
                format!("{layer}expert_{expert}_mp_rank_{mp:02}_model_states.pt")
            }));
        }
        missing
    }

    /// A file's name for a rank of which it is missing, after the manner of one that is there.
    pub(super) fn zero_name(&self, mp: u64, dp: u64) -> String {
        let prefix = self.zero.values().next().and_then(|path| {
            let name = path.file_name()?.to_string_lossy().into_owned();
            Some(name[..name.find("zero_pp_rank_")?].to_owned())
        });
        format!("{}zero_pp_rank_{dp}_mp_rank_{mp:02}_optim_states.pt", prefix.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_what_a_file_is() {
        let cases = [
            ("mp_rank_00_model_states.pt", Some(Kind::Model { mp: 0 })),
            ("mp_rank_107_model_states.pt", Some(Kind::Model { mp: 107 })),
            ("mp_rank_00_optim_states.pt", None),
            ("zero_pp_rank_10_mp_rank_01_model_states.pt", Some(Kind::ZeroModel { mp: 1, dp: 10 })),
            ("zero_pp_rank_3_mp_rank_00_optim_states.pt", Some(Kind::Zero { mp: 0, dp: 3 })),
            ("bf16_zero_pp_rank_3_mp_rank_02_optim_states.pt", Some(Kind::Zero { mp: 2, dp: 3 })),
            ("fp16_zero_pp_rank_0_mp_rank_00_optim_states.pt", Some(Kind::Zero { mp: 0, dp: 0 })),
            ("layer_05-model_states.pt", Some(Kind::Layer { layer: 5, tp: None })),
            ("layer_105-model_03-model_states.pt", Some(Kind::Layer { layer: 105, tp: Some(3) })),
            (
                "layer_0_expert_11_mp_rank_00_model_states.pt",
                Some(Kind::Expert { layer: Some(0), expert: 11, mp: 0 }),
            ),
            (
                "expert_1_mp_rank_02_model_states.pt",
                Some(Kind::Expert { layer: None, expert: 1, mp: 2 }),
            ),
            ("expp_rank_1_mp_rank_00_optim_states.pt", Some(Kind::ExpertOptimizer)),
            ("layer_x-model_states.pt", None),
            ("zero_pp_rank_x_mp_rank_00_optim_states.pt", None),
            ("zero_pp_rank_99999999999999999999_mp_rank_00_optim_states.pt", None),
            ("mp_rank_00", None),
        ];
        for (name, kind) in cases {
            assert_eq!(kind_of(name), kind, "{name}");
        }
    }
}
