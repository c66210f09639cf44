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
    /// It in one line: `args.lr: a 0.1, b 0.2`.
    #[must_use]
    pub fn line(&self) -> String {
        let value = |value: &Option<String>| value.as_deref().unwrap_or("nothing").to_owned();
        let (a, b) = (value(&self.values.a), value(&self.values.b));
        let place = self.place.iter().map(|place| format!(" in {place}")).collect::<String>();
        format!("{}{place}: a {a}, b {b}", self.path)
    }

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
