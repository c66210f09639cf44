//! Why tensors differ, in the document.

use serde::{Deserialize, Serialize};

use crate::causes;
use crate::names::printable;
use crate::report::units::{counted, grouped};

use super::{Word, names};

/// Why tensors differ.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Causes {
    /// Number of tensors that a cause was looked for.
    pub searched: usize,
    /// Number of those that have one.
    pub explained: usize,
    /// The causes, in the order of the first tensor of each.
    pub found: Vec<Cause>,
    /// Tensors with more rows and columns than there is memory for.
    pub skipped: Vec<String>,
}

/// A cause of which some tensors differ.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cause {
    /// Its kind.
    pub kind: Word,
    /// What the tensors are, without their layers; none where it is more than one thing.
    pub subject: Option<String>,
    /// Words for it.
    pub text: String,
    /// The tensors that it explains.
    pub tensors: Vec<String>,
    /// Number of tensors of this subject that were compared.
    pub of: Option<usize>,
}

impl Causes {
    pub(super) fn of(causes: &causes::Causes) -> Self {
        Self {
            searched: causes.searched,
            explained: causes.explained(),
            found: causes.found.iter().map(Cause::of).collect(),
            skipped: names(&causes.skipped),
        }
    }

    /// The title of a list of causes.
    #[must_use]
    pub fn title(&self) -> String {
        let explained = grouped(self.explained as u64);
        format!("why: {explained} of {} explained exactly", counted(self.searched, "tensor"))
    }
}

impl Cause {
    /// The cause as the document has it.
    pub(in crate::report) fn of(cause: &causes::Cause) -> Self {
        Self {
            kind: cause.kind.into(),
            subject: Some(cause.subject.clone()).filter(|subject| !subject.is_empty()),
            text: cause.text.clone(),
            tensors: names(&cause.tensors),
            of: cause.of,
        }
    }

    /// It in one line: `24 of 24 mlp.linear_fc1.weight: gate and up are swapped`.
    #[must_use]
    pub fn line(&self) -> String {
        let count = self.tensors.len();
        let line = match (&self.subject, self.of) {
            (Some(subject), Some(of)) => {
                format!(
                    "{} of {} {subject}: {}",
                    grouped(count as u64),
                    grouped(of as u64),
                    self.text
                )
            }
            _ => format!("{} ({})", self.text, counted(count, "tensor")),
        };
        printable(&line).into_owned()
    }
}
