//! The whole of a comparison as one JSON document, by the schema in `schema/compare-report.schema.json`: a struct a part.
//!
//! Whoever reads it and nothing else can never take a failing run for a passing one: the verdict comes first, and a
//! comparison that did not come to its end is a document too, of which all that would be a result is null.

mod causes;
mod judging;
mod naming;
mod reading;
mod state;
mod tensors;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::base::side::Side;
use crate::catalog::{Problem, Section};
use crate::judge::verdict::Verdict;
use crate::names::Name;

use super::layers::{FirstDifference, Layer, Layers, Overall};
use super::totals::Totals;
use super::{CheckpointReport, Report, html, json, problems, screen};

pub use causes::{Cause, Causes};
pub use judging::{Bounds, Options, Rule, UnusedRule};
pub use naming::{Partners, Rename, Suggested};
pub use reading::ReadError;
pub use state::{IgnoredDifference, State, StateDifference, UnreadState};
pub use tensors::{Broken, Cast, Metrics, Replica, Tensor, Unread, Weak, Worst};

/// The `$id` of the schema; it changes where something changes that was there before.
pub const SCHEMA: &str = "urn:ckptcmp:schema:compare-report:1";

/// Text that is a word of ours, or was read.
pub type Word = Cow<'static, str>;

/// What there is of each side.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Sides<T> {
    /// Of the first one.
    pub a: T,
    /// Of the second one.
    pub b: T,
}

impl<T> From<[T; 2]> for Sides<T> {
    fn from([a, b]: [T; 2]) -> Self {
        Self { a, b }
    }
}

impl<T> Sides<T> {
    /// Both, with their letters.
    pub fn both(&self) -> [(&'static str, &T); 2] {
        [("a", &self.a), ("b", &self.b)]
    }
}

/// The document. What is null in one that tells a failure is an option.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Document {
    /// The `$id` of its schema.
    pub schema: Word,
    /// The program that wrote it.
    pub tool: Tool,
    /// The verdict on it all.
    pub verdict: Word,
    /// The verdict is one that passes.
    pub passes: bool,
    /// The exit code by the verdict.
    pub exit_code: u8,
    /// The process exits with 0 where the exit code is 1.
    pub exit_zero: bool,
    /// The closing line of the screen.
    pub summary: Option<String>,
    /// The lines of standard error.
    pub errors: Vec<String>,
    /// Both checkpoints.
    pub sides: Sides<Checkpoint>,
    /// The sections that were compared, and the others.
    pub sections: Option<Sections>,
    /// The options that the verdict depends on.
    pub options: Option<Options>,
    /// The numbers that sum it up.
    pub totals: Option<Sums>,
    /// How much differs in all.
    pub overall: Option<Overall>,
    /// The first tensor in the order of the forward pass that does not pass.
    pub first_difference: Option<FirstDifference>,
    /// Every layer in this order, and what is outside of all.
    pub layers: Option<Vec<Layer>>,
    /// Why tensors differ, where that was looked for.
    pub causes: Option<Causes>,
    /// Every tensor of both sides, in natural order of the names.
    pub tensors: Option<Vec<Tensor>>,
    /// Names on one side only, where rules do not allow that.
    pub only_in: Option<Sides<Vec<String>>>,
    /// Likely partners of those.
    pub suggested: Option<Suggested>,
    /// Names that rules keep from being a difference.
    pub excused: Option<Excused>,
    /// Rules that decide about no tensor.
    pub unused_rules: Option<Vec<UnusedRule>>,
    /// Globs of the selection that match no name.
    pub unused_globs: Option<Vec<String>>,
    /// The state of the run, where it was compared.
    pub state: Option<State>,
}

/// The program that wrote a document.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tool {
    /// Its name.
    pub name: Word,
    /// Its version.
    pub version: Word,
}

const TOOL: Tool = Tool {
    name: Word::Borrowed(env!("CARGO_PKG_NAME")),
    version: Word::Borrowed(env!("CARGO_PKG_VERSION")),
};

/// One checkpoint; only the path is known of one that could not be opened.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The path as it was given.
    pub path: String,
    /// The file or folder that it led to.
    pub resolved: Option<String>,
    /// The name of the format.
    pub format: Option<Word>,
    /// The parallel layout.
    pub layout: Option<String>,
    /// The training iteration.
    pub iteration: Option<u64>,
    /// The software that wrote it.
    pub writer: Option<String>,
    /// Shard files read.
    pub shards: Option<usize>,
    /// Stored entries that are no weights.
    pub left_out: Option<usize>,
    /// Sections that are there and were not to be read.
    pub unread: Option<Vec<UnreadSection>>,
    /// All that could not be read or put together.
    pub problems: Option<Vec<Trouble>>,
    /// Remarks.
    pub notes: Option<Vec<String>>,
}

/// A section that is there and was not to be read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UnreadSection {
    /// Its name.
    pub section: Word,
    /// Number of its tensors, where it is known.
    pub tensors: Option<usize>,
}

/// Something that could not be read or put together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Trouble {
    /// The file, where one is to blame.
    pub file: Option<String>,
    /// The tensor, where one is to blame.
    pub tensor: Option<String>,
    /// The reason, and the remedy where there is one.
    pub message: String,
}

/// The sections by whether they were compared.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sections {
    /// On both sides.
    pub compared: Vec<Word>,
    /// Not read.
    pub not_compared: Vec<Word>,
}

/// The numbers that sum up a comparison.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sums {
    /// Tensors on both sides.
    pub tensors: usize,
    /// Those of them that were read and are of one shape.
    pub compared: usize,
    /// Elements of these.
    pub elements: u64,
    /// Bytes of these on both sides.
    pub bytes: u64,
    /// Tensors that pass.
    pub passing: usize,
    /// Tensors that were read and do not pass.
    pub failing: usize,
    /// Tensors by verdict.
    pub verdicts: BTreeMap<Word, usize>,
    /// Tensors on one side only.
    pub only_in: Sides<usize>,
    /// Copies within one checkpoint that disagree.
    pub replicas_that_disagree: usize,
    /// Problems of both sides.
    pub problems: usize,
}

/// Names that rules keep from being a difference.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Excused {
    /// Not compared.
    pub ignored: Vec<String>,
    /// Those that may be on one side only.
    pub only_in: Sides<Vec<String>>,
}

impl Document {
    /// The document of a comparison.
    ///
    /// # Errors
    /// A metric has no place in it.
    pub fn of(report: &Report, exit_zero: bool) -> serde_json::Result<Self> {
        let totals = Totals::of(report);
        let tensors: Result<_, _> =
            report.tensors.iter().map(|judged| Tensor::of(judged, report)).collect();
        let Layers { overall, first_difference, layers } = Layers::of(report);
        Ok(Self {
            summary: Some(screen::closing(report, &totals, super::Style::PLAIN)),
            errors: problems::of_comparison(report).concat(),
            sides: report.checkpoints.each_ref().map(Checkpoint::of).into(),
            sections: Some(Sections::of(report)),
            options: Some(Options::of(report)),
            totals: Some(Sums::of(&totals, report)),
            overall: Some(overall),
            first_difference,
            layers: Some(layers),
            causes: report.causes.as_ref().map(Causes::of),
            tensors: Some(tensors?),
            only_in: Some(names_of(&report.only_in)),
            suggested: Some(Suggested::of(&report.suggested)),
            excused: Some(Excused {
                ignored: names(&report.excused.ignored),
                only_in: names_of(&report.excused.only_in),
            }),
            unused_rules: Some(report.unused.iter().map(UnusedRule::of).collect()),
            unused_globs: Some(report.idle_globs.clone()),
            state: report.state.as_ref().map(State::of),
            ..Self::bare(report.verdict, exit_zero)
        })
    }

    /// The document of a comparison of two paths that did not come to its end, with the lines of the error.
    #[must_use]
    pub fn of_failure(paths: [&Path; 2], error: &str, exit_zero: bool) -> Self {
        let side = |path: &Path| Checkpoint { path: text(path), ..Checkpoint::default() };
        Self {
            errors: error.lines().map(str::to_owned).collect(),
            sides: paths.map(side).into(),
            ..Self::bare(Verdict::Trouble, exit_zero)
        }
    }

    /// Writes it as JSON.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        json::write_value(self, out)
    }

    /// Writes it as a page for people.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_html(&self, out: &mut dyn Write) -> io::Result<()> {
        html::write(self, out)
    }

    /// The verdict, and nothing else yet.
    fn bare(verdict: Verdict, exit_zero: bool) -> Self {
        Self {
            schema: SCHEMA.into(),
            tool: TOOL,
            verdict: verdict.name().into(),
            passes: verdict.exit_code() == 0,
            exit_code: verdict.exit_code(),
            exit_zero,
            summary: None,
            errors: Vec::new(),
            sides: Sides::default(),
            sections: None,
            options: None,
            totals: None,
            overall: None,
            first_difference: None,
            layers: None,
            causes: None,
            tensors: None,
            only_in: None,
            suggested: None,
            excused: None,
            unused_rules: None,
            unused_globs: None,
            state: None,
        }
    }
}

impl Checkpoint {
    fn of(checkpoint: &CheckpointReport) -> Self {
        let CheckpointReport { origin, problems, notes } = checkpoint;
        Self {
            path: text(&origin.path),
            resolved: Some(text(&origin.resolved)),
            format: Some(origin.format.into()),
            layout: Some(origin.layout.clone()),
            iteration: origin.iteration,
            writer: origin.writer.clone(),
            shards: Some(origin.shards),
            left_out: Some(origin.left_out),
            unread: Some(origin.unread.iter().map(UnreadSection::of).collect()),
            problems: Some(problems.iter().map(Trouble::of).collect()),
            notes: Some(notes.clone()),
        }
    }
}

impl UnreadSection {
    fn of((section, count): (&Section, &Option<usize>)) -> Self {
        Self { section: section.name().into(), tensors: *count }
    }
}

impl Trouble {
    fn of(Problem { file, tensor, message, .. }: &Problem) -> Self {
        Self {
            file: file.as_deref().map(text),
            tensor: tensor.as_deref().map(str::to_owned),
            message: message.clone(),
        }
    }
}

impl Sections {
    fn of(report: &Report) -> Self {
        let is_compared = |section: &Section| {
            report.checkpoints.iter().all(|side| side.origin.sections.contains(section))
        };
        let (compared, others): (Vec<_>, Vec<_>) = Section::ALL.into_iter().partition(is_compared);
        let names = |sections: Vec<Section>| {
            sections.into_iter().map(|section| section.name().into()).collect()
        };
        Self { compared: names(compared), not_compared: names(others) }
    }
}

impl Sums {
    fn of(totals: &Totals, report: &Report) -> Self {
        Self {
            tensors: totals.tensors,
            compared: totals.compared,
            elements: totals.elements,
            bytes: totals.bytes,
            passing: totals.passing,
            failing: totals.failing,
            verdicts: totals
                .by_verdict()
                .map(|(verdict, count)| (verdict.name().into(), count))
                .collect(),
            only_in: report.only_in.each_ref().map(Vec::len).into(),
            replicas_that_disagree: totals.diverged,
            problems: totals.problems,
        }
    }
}

fn names(names: &[Name]) -> Vec<String> {
    names.iter().map(|name| name.as_str().to_owned()).collect()
}

fn names_of(sides: &[Vec<Name>; 2]) -> Sides<Vec<String>> {
    sides.each_ref().map(|of_side| names(of_side)).into()
}

/// A path as text; what is no Unicode is replaced.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The name of a side.
fn side_name(side: Side) -> Word {
    Word::Borrowed(match side {
        Side::A => "a",
        Side::B => "b",
    })
}
