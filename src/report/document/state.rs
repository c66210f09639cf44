//! The state of the run in the document.

use serde::{Deserialize, Serialize};

use crate::judge::state::{Ignored, StateJudgement};
use crate::state::{self, DifferenceKind};

use super::{Sides, Word, side_name};

/// What is said of the state where it was compared.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    /// Key paths that were looked at.
    pub compared: usize,
    /// The differences that count.
    pub differences: Vec<StateDifference>,
    /// Those that the profile or the rules ignore.
    pub ignored: Vec<IgnoredDifference>,
    /// Tensors in it that could not be read.
    pub unread: Vec<UnreadState>,
    /// Globs of the rules file under which nothing differs.
    pub unused_globs: Vec<String>,
}

/// A difference; the value of a side that has none is null.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StateDifference {
    /// The key path.
    pub path: String,
    /// The parts of the checkpoint, or the parameters of the group, where it is not all of them.
    pub place: Option<String>,
    /// The way in which the sides differ.
    pub kind: Word,
    /// Both values as text.
    pub values: Sides<Option<String>>,
    /// The side that has the key.
    pub only_in: Option<Word>,
    /// Elements of the tensor that differ.
    pub differing: Option<u64>,
    /// Elements of the tensor.
    pub elements: Option<u64>,
}

/// A difference that does not count.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct IgnoredDifference {
    /// The difference.
    #[serde(flatten)]
    pub difference: StateDifference,
    /// The reason in the profile's table, or the glob of a rule.
    pub why: String,
}

/// A tensor in the state that could not be read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UnreadState {
    /// The key path.
    pub path: String,
    /// The cause.
    pub message: String,
}

impl State {
    pub(super) fn of(judgement: &StateJudgement) -> Self {
        let ignored = |ignored: &Ignored| IgnoredDifference {
            difference: StateDifference::of(&ignored.difference),
            why: ignored.why.clone(),
        };
        let unread = |(path, message): &(String, String)| UnreadState {
            path: path.clone(),
            message: message.clone(),
        };
        Self {
            compared: judgement.compared,
            differences: judgement.differences.iter().map(StateDifference::of).collect(),
            ignored: judgement.ignored.iter().map(ignored).collect(),
            unread: judgement.unread.iter().map(unread).collect(),
            unused_globs: judgement.idle.clone(),
        }
    }
}

impl StateDifference {
    fn of(difference: &state::Difference) -> Self {
        let state::Difference { path, place, values, kind } = difference;
        let (name, only_in, elements) = match kind {
            DifferenceKind::Value => ("value", None, None),
            DifferenceKind::OnlyIn(side) => ("only_in", Some(side_name(*side)), None),
            DifferenceKind::Elements { differing, of } => {
                ("elements", None, Some((*differing, *of)))
            }
            DifferenceKind::PartsDiffer => ("parts_differ", None, None),
        };
        Self {
            path: path.clone(),
            place: place.clone(),
            kind: name.into(),
            values: values.clone().into(),
            only_in,
            differing: elements.map(|(differing, _)| differing),
            elements: elements.map(|(_, of)| of),
        }
    }
}
