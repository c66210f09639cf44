//! The names that a user gave, and those that may stand for the same tensors.

use serde::{Deserialize, Serialize};

use crate::compare::{self, Suggestions};
use crate::report::RenameUse;

use super::{Sides, Word, side_name};

/// A rule that gives tensors new names.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rename {
    /// The side that it is for.
    pub side: Option<Word>,
    /// The old names as they are written.
    pub old: String,
    /// The new names as they are written.
    pub new: String,
    /// The file that it is from.
    pub file: Option<String>,
    /// Its line there.
    pub line: Option<usize>,
    /// Number of tensors that it renamed.
    pub renamed: Sides<usize>,
}

/// Likely partners of the names on one side only.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Suggested {
    /// Names that stand for the same values.
    pub partners: Vec<Partners>,
    /// Rules for names that bring all of them together.
    pub map: Vec<String>,
    /// Tensors that were not looked at.
    pub left_out: usize,
}

/// Two names that stand for the same values.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Partners {
    /// The name in `a`.
    pub a: String,
    /// The name in `b`.
    pub b: String,
    /// The values that were looked at: all or the first ones.
    pub values: Word,
}

impl Rename {
    pub(super) fn of(RenameUse { rule, counts }: &RenameUse) -> Self {
        let place = rule.place.as_ref();
        Self {
            side: rule.side.map(side_name),
            old: rule.old.clone(),
            new: rule.new.clone(),
            file: place.map(|(file, _)| file.clone()),
            line: place.map(|(_, line)| *line),
            renamed: (*counts).into(),
        }
    }
}

impl Suggested {
    pub(super) fn of(suggested: &Suggestions) -> Self {
        Self {
            partners: suggested.partners.iter().map(Partners::of).collect(),
            map: suggested.rules.clone(),
            left_out: suggested.left_out,
        }
    }
}

impl Partners {
    fn of(compare::Suggestion { names, is_whole }: &compare::Suggestion) -> Self {
        let [a, b] = names.each_ref().map(|name| name.as_str().to_owned());
        Self { a, b, values: if *is_whole { "all" } else { "first" }.into() }
    }
}
