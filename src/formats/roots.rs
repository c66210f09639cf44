//! From the path that a user gives to the file or folder that holds the shards.
//!
//! Formats make claims to a path: it is a checkpoint of theirs, or it leads to another path. The claim that rests on the
//! most specific evidence is followed until a format claims the path itself.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::rc::Rc;

use crate::base::limits::{LIMITS, OverLimit};
use crate::names::index::number;
use crate::names::printable;
use crate::storage;

use super::error::OpenError;
use super::format::Format;
use super::probe::{Probe, SmallFile};

/// The place of a checkpoint.
#[derive(Debug, Clone)]
pub(super) struct Root {
    /// A file, or the folder of one iteration or of one rank.
    pub path: PathBuf,
    /// The iteration, where a name on the way told it.
    pub iteration: Option<u64>,
    /// Notes for the user on the way to it.
    pub notes: Vec<String>,
    /// The probe of the path.
    pub probe: Rc<Probe>,
}

/// The claim of a format to a path.
#[derive(Debug)]
pub(super) struct Claim {
    /// The thing that it rests on: the same thing is of one format, two things may be two checkpoints.
    evidence: &'static str,
    score: Score,
    target: Target,
}

/// Degree to which the evidence of a claim is one format's only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Score {
    /// Folders in it have names that others may use, too.
    Below,
    /// It is a file.
    File,
    /// A file begins as those of this kind do.
    Kind,
    /// Names of files are this format's.
    Names,
    /// Keys inside of the files are this format's.
    Keys,
    /// It says by a name, a number or a word that is only for this format that it is one.
    Declared,
    /// A tracker, or the folders of one that is missing, lead to a checkpoint.
    Tracker,
}

/// The path that a claim is to.
#[derive(Debug)]
enum Target {
    /// The path that was looked at.
    Here,
    /// Another one, with what the user should know of the choice.
    There(Rc<Probe>, Vec<String>),
    /// One that should be there.
    Broken(OpenError),
}

/// Evidence that is not one format's only.
pub(super) const FILE: &str = "a file";
/// The same for folders with the metadata of a distributed checkpoint.
pub(super) const METADATA: &str = "metadata of a distributed checkpoint";

impl Claim {
    /// The path that was looked at is a checkpoint.
    pub(super) fn here(score: Score, evidence: &'static str) -> Self {
        Self { evidence, score, target: Target::Here }
    }

    /// The checkpoint is in a folder of the path.
    pub(super) fn below(
        score: Score,
        evidence: &'static str,
        probe: &Probe,
        folder: &str,
        notes: Vec<String>,
    ) -> Self {
        let target = match probe.child(folder) {
            Ok(Some(child)) => Target::There(child, notes),
            Ok(None) => {
                let (path, source) = (probe.path().join(folder), ErrorKind::NotFound.into());
                Target::Broken(OpenError::Io { path, source })
            }
            Err(error) => Target::Broken(error),
        };
        Self { evidence, score, target }
    }

    /// The path is this format's, and leads nowhere.
    pub(super) fn broken(score: Score, evidence: &'static str, error: OpenError) -> Self {
        Self { evidence, score, target: Target::Broken(error) }
    }

    /// Tells whether it makes another claim void.
    fn beats(&self, other: &Self) -> bool {
        let is_apart = self.evidence != other.evidence && other.score >= Score::Names;
        self.score > other.score && (self.score == Score::Tracker || !is_apart)
    }

    /// Tells whether it is the same claim as another format's.
    fn repeats(&self, other: &Self) -> bool {
        let is_way = !matches!(self.target, Target::Here);
        is_way && self.score == other.score && self.evidence == other.evidence
    }
}

impl Root {
    /// The path that the user gave.
    fn new(probe: Rc<Probe>) -> Self {
        let path = probe.path().to_path_buf();
        let iteration = if probe.is_file() { None } else { step_of(&probe.name()) };
        Self { path, iteration, notes: Vec::new(), probe }
    }

    fn then(self, probe: Rc<Probe>, notes: Vec<String>) -> Self {
        let next = Self::new(probe);
        let notes = self.notes.into_iter().chain(notes).collect();
        Self { iteration: next.iteration.or(self.iteration), notes, ..next }
    }
}

/// The formats, and the one that is to be taken.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    /// All of them.
    pub formats: &'static [Format],
    /// The one that the user asked for.
    pub forced: Option<&'static Format>,
}

impl Choice {
    /// Finds the checkpoint that a path leads to, and its format.
    ///
    /// # Errors
    /// There is none, there are two, or what should lead there leads nowhere.
    pub(super) fn resolve(self, probe: Rc<Probe>) -> Result<(&'static Format, Root), OpenError> {
        let root = match self.follow(Root::new(probe), LIMITS.way)? {
            Ok(found) => return Ok(found),
            Err(root) => root,
        };
        if let Some(format) = self.forced {
            return Ok((format, root));
        }
        let below = self.below(&root.probe)?;
        Err(match below.is_empty() {
            true => OpenError::Unrecognized { path: root.path, looked_for: self.looked_for() },
            false => OpenError::Below { path: root.path, below },
        })
    }

    /// Goes where claims lead; where it ends without one, the root is given back.
    fn follow(
        self,
        mut root: Root,
        longest: usize,
    ) -> Result<Result<(&'static Format, Root), Root>, OpenError> {
        for left in (0..longest).rev() {
            root = match self.claim(&root.probe)? {
                Some((format, Target::Here)) => return Ok(Ok((format, root))),
                Some((_, Target::There(probe, notes))) => root.then(probe, notes),
                Some((_, Target::Broken(error))) => return Err(error),
                None => match self.usual_folder(&root.probe, left)? {
                    Some(probe) => {
                        let note = format!("{}: took {}/", root.path.display(), probe.name());
                        root.then(probe, vec![note])
                    }
                    None => break,
                },
            };
        }
        Ok(Err(root))
    }

    /// The strongest claim to a path.
    fn claim(self, probe: &Probe) -> Result<Option<(&'static Format, Target)>, OpenError> {
        let mut claims = Vec::new();
        for format in self.formats {
            // Where many files lie, each of them is a file.
            let is_telling = |claim: &Claim| !probe.is_shallow() || claim.score != Score::File;
            claims.extend((format.claim)(probe)?.filter(is_telling).map(|claim| (format, claim)));
        }
        if let Some(forced) = self.forced {
            let is_forced = |(format, _): &(&Format, Claim)| format.name == forced.name;
            match claims.iter().any(is_forced) {
                true => claims.retain(is_forced),
                // Whatever it is, it may lie where others keep theirs.
                false => claims.retain(|(_, claim)| claim.score == Score::Tracker),
            }
        }
        let is_void = |at: usize| {
            let claim = |at: usize| &claims[at].1;
            (0..claims.len()).any(|other| claim(other).beats(claim(at)))
                || (0..at).any(|before| claim(before).repeats(claim(at)))
        };
        let void: Vec<bool> = (0..claims.len()).map(is_void).collect();
        let mut valid = claims.into_iter().zip(void).filter(|(_, is_void)| !is_void);
        match (valid.next(), valid.next()) {
            (Some(((first, _), _)), Some(((second, _), _))) => Err(OpenError::Ambiguous {
                path: probe.path().to_path_buf(),
                first: first.name,
                second: second.name,
            }),
            (first, _) => Ok(first.map(|((format, claim), _)| (format, claim.target))),
        }
    }

    /// The only one of the folders in which checkpoints are usually kept that holds one, be it a broken one.
    ///
    /// # Errors
    /// One of them cannot be looked at.
    fn usual_folder(self, probe: &Probe, longest: usize) -> Result<Option<Rc<Probe>>, OpenError> {
        let mut names: Vec<&str> =
            self.formats.iter().flat_map(|format| format.usual_folders).copied().collect();
        names.sort_unstable();
        names.dedup();
        let mut found = Vec::new();
        for name in names {
            if !probe.has_folder(name)? {
                continue;
            }
            let Some(child) = probe.child(name)? else { continue };
            match self.follow(Root::new(Rc::clone(&child)), longest) {
                Err(error) if storage::is_of_system(&error) => return Err(error),
                // Whoever goes to a broken one is told what is wrong with it.
                Ok(Ok(_)) | Err(_) => found.push(child),
                Ok(Err(_)) => {}
            }
        }
        let first = found.pop();
        Ok(first.filter(|_| found.is_empty()))
    }

    /// The entries of a folder that are checkpoints, each with its format.
    ///
    /// # Errors
    /// There is none, and something cannot be looked at that might be one.
    fn below(self, probe: &Probe) -> Result<Vec<String>, OpenError> {
        let mut found = Vec::new();
        let mut unread = None;
        for name in probe.names().take(LIMITS.listed_below) {
            let followed = probe.glance(name).and_then(|child| {
                let child = child.map(|child| self.follow(Root::new(child), LIMITS.way));
                child.transpose()
            });
            let format = match followed {
                Ok(Some(Ok((format, _)))) => format.name.to_owned(),
                Err(OpenError::Ambiguous { first, second, .. }) => format!("{first} or {second}"),
                // A link to nowhere is no checkpoint.
                Err(OpenError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                    continue;
                }
                Err(error) if storage::is_of_system(&error) => {
                    unread.get_or_insert(error);
                    continue;
                }
                Ok(Some(Err(_)) | None) => continue,
                Err(_) => "broken".to_owned(),
            };
            found.push(format!("{} ({format})", printable(name)));
        }
        match unread {
            Some(error) if found.is_empty() => Err(error),
            _ => Ok(found),
        }
    }

    fn looked_for(self) -> String {
        let mut words: Vec<&str> = Vec::new();
        for word in self.formats.iter().flat_map(|format| format.looked_for) {
            if !words.contains(word) {
                words.push(word);
            }
        }
        words.join(", ")
    }
}

/// Prefix of the folders of DeepSpeed.
pub(super) const DEEPSPEED: &str = "global_step";

/// Names of folders that hold a checkpoint each, up to the number of the step at which it was saved: of Megatron,
/// InfiniTrain, verl, DeepSpeed, Hugging Face's Trainer, torchtitan and others.
const NUMBERED: [&str; 7] =
    ["iter_", "checkpoint_step_", "global_step_", DEEPSPEED, "checkpoint-", "step-", "step_"];

/// The step that the name of a checkpoint's folder tells; Megatron's `release` is 0.
pub(super) fn step_of(folder: &str) -> Option<u64> {
    let mut steps = NUMBERED.iter().map(|prefix| step_behind(prefix, folder));
    steps.find_map(|step| step).or_else(|| (folder == "release").then_some(0))
}

/// The number behind a prefix, with nothing behind it but `_universal`, in DeepSpeed's folders.
pub(super) fn step_behind(prefix: &str, folder: &str) -> Option<u64> {
    let digits = folder.strip_prefix(prefix)?;
    let universal = digits.strip_suffix("_universal").filter(|_| prefix == DEEPSPEED);
    number(universal.unwrap_or(digits))
}

/// The folders of a path whose names are a prefix and a number, by number.
///
/// # Errors
/// One of them is a link that cannot be followed.
pub(super) fn numbered<'p>(
    probe: &'p Probe,
    prefixes: &[&str],
) -> Result<Vec<(u64, &'p str)>, OpenError> {
    let mut found = Vec::new();
    for name in probe.names() {
        if let Some(step) = prefixes.iter().find_map(|prefix| step_behind(prefix, name))
            && probe.has_folder(name)?
        {
            found.push((step, name));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Says that the newest of `count` folders was taken, where there is more than one; `count` is in `among`.
pub(super) fn newest_note(probe: &Probe, count: usize, among: &str, newest: &str) -> Vec<String> {
    let note = || format!("{}: {among}: took the newest, {newest}", probe.path().display());
    (count > 1).then(note).into_iter().collect()
}

/// The word that a tracker holds, or why it holds none; `None` where there is no such file.
///
/// # Errors
/// It is there and cannot be read.
pub(super) fn tracked(
    probe: &Probe,
    tracker: &str,
) -> Result<Option<Result<String, String>>, OpenError> {
    let too_long = |len: u64| {
        Some(Err(OverLimit::found("bytes of a tracker", LIMITS.tracker as u64, len).to_string()))
    };
    Ok(match probe.small_file(tracker)? {
        SmallFile::Absent => None,
        SmallFile::NotAFile => Some(Err("is no regular file".to_owned())),
        SmallFile::TooLong(len) => too_long(len),
        SmallFile::Text(text) if text.len() > LIMITS.tracker => too_long(text.len() as u64),
        SmallFile::Text(text) => Some(Ok(text.trim_start_matches('\u{feff}').trim().to_owned())),
    })
}
