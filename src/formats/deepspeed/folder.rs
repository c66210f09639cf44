//! The place of a DeepSpeed checkpoint, and its files by their names.
//!
//! Facts from DeepSpeed 0.3 to 0.19 (`runtime/engine.py`: `_get_ckpt_name`, `_get_rank_zero_ckpt_name`,
//! `_get_expert_ckpt_name`, `_get_optimizer_ckpt_name`; `runtime/pipe/module.py`: `ckpt_layer_path`).

use std::collections::BTreeMap;
use std::mem;
use std::path::PathBuf;

use crate::base::limits::LIMITS;
use crate::formats::error::OpenError;
use crate::formats::probe::Probe;
use crate::formats::roots::{Claim, DEEPSPEED, Score, newest_note, numbered, step_behind, tracked};
use crate::names::{index, printable};

use super::FORMAT;

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

/// Tells whether these are the names of two files of one kind and of different ranks or layers.
pub(super) fn are_of_different_places(name: &str, other: &str) -> bool {
    let place = |name| {
        Some(match kind_of(name)? {
            Kind::Layer { layer, tp } => Kind::Layer { layer, tp: tp.or(Some(0)) },
            kind => kind,
        })
    };
    let (Some(one), Some(other)) = (place(name), place(other)) else { return false };
    mem::discriminant(&one) == mem::discriminant(&other) && one != other
}

fn is_universal(tag: &Probe) -> Result<bool, OpenError> {
    let Some(params) = tag.child(UNIVERSAL)? else { return Ok(false) };
    for param in params.folders()? {
        if params.child(param)?.is_some_and(|param| param.has("fp32.pt")) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Says whether this folder holds the files of one tag.
pub(super) fn is_tag(probe: &Probe) -> Result<bool, OpenError> {
    Ok(probe.names().any(|name| kind_of(name).is_some()) || is_universal(probe)?)
}

/// Claims the folder of a tag, or that which a save folder's `latest` names, or the newest one there.
pub(super) fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if is_tag(probe)? {
        return Ok(Some(Claim::here(Score::Names, FORMAT.name)));
    }
    let mut tags = Vec::new();
    for (_, name) in numbered(probe, &[DEEPSPEED])? {
        if has_tag(probe, name)? {
            tags.push(name);
        }
    }
    // Others have a file `latest`, too: it counts by what it names.
    let mut is_own = !tags.is_empty();
    for tracker in TRACKERS {
        if let Some(Ok(tag)) = tracked(probe, tracker)? {
            is_own |= step_behind(DEEPSPEED, &tag).is_some() || has_tag(probe, &tag)?;
        }
    }
    if !is_own {
        return Ok(None);
    }
    let to = |tag: &str, notes| Claim::below(Score::Names, FORMAT.name, probe, tag, notes);
    for tracker in TRACKERS {
        match follow(probe, tracker) {
            Ok(None) => {}
            Ok(Some(tag)) => return Ok(Some(to(&tag, Vec::new()))),
            Err(error) => return Ok(Some(Claim::broken(Score::Names, FORMAT.name, error))),
        }
    }
    Ok(tags.last().map(|newest| {
        let among = format!("no {} and {} tags", TRACKERS[0], tags.len());
        to(newest, newest_note(probe, tags.len(), &among, newest))
    }))
}

/// Tells whether a folder has one of this name that holds a tag.
fn has_tag(probe: &Probe, name: &str) -> Result<bool, OpenError> {
    probe.child(name)?.map_or(Ok(false), |tag| is_tag(&tag))
}

/// The folder that a tracker names; `None` where there is no tracker.
fn follow(probe: &Probe, tracker: &str) -> Result<Option<String>, OpenError> {
    let problem = |what: String| OpenError::Tracker { path: probe.path().join(tracker), what };
    if probe.has_folder(tracker)? {
        return Ok(None);
    }
    let tag = match tracked(probe, tracker)? {
        None => return Ok(None),
        Some(tag) => {
            tag.map_err(|what| problem(format!("{what}; name the tag's folder instead")))?
        }
    };
    if tag.is_empty() {
        let what = "is empty: its save was interrupted; name the tag's folder instead";
        return Err(problem(what.to_owned()));
    }
    if !probe.has_folder(&tag)? {
        let hint = match numbered(probe, &[DEEPSPEED])?.last() {
            Some((_, newest)) => format!("name a folder instead, e.g. {}", printable(newest)),
            None => "there is no tag here at all".to_owned(),
        };
        let what = format!("says {}, but there is no such folder; {hint}", printable(&tag));
        return Err(problem(what));
    }
    Ok(Some(tag))
}

impl Folder {
    /// Sorts the files of a tag.
    pub(super) fn read(tag: &Probe) -> Result<Self, OpenError> {
        let (path, mut folder) = (tag.path(), Self::default());
        for name in tag.names() {
            let file = path.join(name);
            let same = |other: Option<PathBuf>| match other {
                None => Ok(()),
                Some(other) => {
                    let other = other.file_name().unwrap_or_default().to_string_lossy();
                    let what =
                        format!("{} and {} are the same rank", printable(name), printable(&other));
                    Err(OpenError::Content { path: path.to_path_buf(), what })
                }
            };
            match kind_of(name) {
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
        folder.universal = is_universal(tag)?.then(|| path.join(UNIVERSAL));
        Ok(folder)
    }

    /// Tells whether there are files of the optimizer.
    pub(super) fn has_optimizer(&self) -> bool {
        !self.zero.is_empty() || !self.expert_optimizers.is_empty() || self.universal.is_some()
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

    #[test]
    fn names_of_one_kind_tell_places_apart() {
        for (name, other, are_different) in [
            ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt", true),
            ("mp_rank_00_model_states.pt", "archive.pt", false),
            ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_01_model_states.pt", false),
            ("layer_03-model_states.pt", "layer_03-model_00-model_states.pt", false),
            ("layer_03-model_00-model_states.pt", "layer_03-model_01-model_states.pt", true),
            (
                "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
                false,
            ),
        ] {
            assert_eq!(are_of_different_places(name, other), are_different, "{name}, {other}");
        }
    }
}
