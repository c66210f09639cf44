//! The whole of a comparison as one JSON document, by the schema in `schema/compare-report.schema.json`: a struct a part.
//!
//! Whoever reads it and nothing else can never take a failing run for a passing one: the verdict comes first, and a
//! comparison that did not come to its end is a document too, of which all that would be a result is null.

mod judging;
mod tensors;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use crate::base::side::Side;
use crate::catalog::{Problem, Section};
use crate::judge::verdict::Verdict;
use crate::names::Name;

use super::totals::Totals;
use super::{CheckpointReport, Report, json, problems, screen};

use judging::{Options, UnusedRule};
use tensors::Tensor;

/// The `$id` of the schema; it changes where something changes that was there before.
pub const SCHEMA: &str = "urn:ckptcmp:schema:compare-report:1";

/// The form of every document of this schema from the first byte on.
const START: &[u8] = b"{\n  \"schema\": \"urn:ckptcmp:schema:compare-report:";

/// Returns whether a file that begins like this is such a document, of whatever version.
#[must_use]
pub fn is_one(start: &[u8]) -> bool {
    start.starts_with(START)
}

/// Bytes of a file that [`is_one`] asks for.
pub const START_LEN: usize = START.len();

/// What there is of each side.
#[derive(Serialize)]
struct Sides<T> {
    a: T,
    b: T,
}

impl<T> From<[T; 2]> for Sides<T> {
    fn from([a, b]: [T; 2]) -> Self {
        Self { a, b }
    }
}

/// The document. What is null in one that tells a failure is an option.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'a str,
    tool: Tool,
    verdict: &'a str,
    passes: bool,
    exit_code: u8,
    exit_zero: bool,
    summary: Option<String>,
    errors: Vec<String>,
    sides: Sides<Checkpoint<'a>>,
    sections: Option<Sections>,
    options: Option<Options<'a>>,
    totals: Option<Sums>,
    tensors: Option<Vec<Tensor<'a>>>,
    only_in: Option<Sides<Names<'a>>>,
    excused: Option<Excused<'a>>,
    unused_rules: Option<Vec<UnusedRule<'a>>>,
    unused_globs: Option<&'a [String]>,
}

type Names<'a> = Vec<&'a str>;

#[derive(Serialize)]
struct Tool {
    name: &'static str,
    version: &'static str,
}

const TOOL: Tool = Tool { name: env!("CARGO_PKG_NAME"), version: env!("CARGO_PKG_VERSION") };

/// One checkpoint; only the path is known of one that could not be opened.
#[derive(Serialize, Default)]
struct Checkpoint<'a> {
    path: String,
    resolved: Option<String>,
    format: Option<&'a str>,
    layout: Option<&'a str>,
    iteration: Option<u64>,
    writer: Option<&'a str>,
    shards: Option<usize>,
    left_out: Option<usize>,
    unread: Option<Vec<Unread>>,
    problems: Option<Vec<Trouble<'a>>>,
    notes: Option<&'a [String]>,
}

/// A section that is there and was not to be read.
#[derive(Serialize)]
struct Unread {
    section: &'static str,
    tensors: Option<usize>,
}

#[derive(Serialize)]
struct Trouble<'a> {
    file: Option<String>,
    tensor: Option<&'a str>,
    message: &'a str,
}

#[derive(Serialize)]
struct Sections {
    compared: Vec<&'static str>,
    not_compared: Vec<&'static str>,
}

#[derive(Serialize)]
struct Sums {
    tensors: usize,
    compared: usize,
    elements: u64,
    bytes: u64,
    passing: usize,
    failing: usize,
    verdicts: BTreeMap<&'static str, usize>,
    only_in: Sides<usize>,
    replicas_that_disagree: usize,
    problems: usize,
}

/// Names that rules keep from being a difference.
#[derive(Serialize)]
struct Excused<'a> {
    ignored: Names<'a>,
    only_in: Sides<Names<'a>>,
}

/// Writes the document of a comparison.
///
/// # Errors
/// The sink cannot be written to.
pub(super) fn write(report: &Report, exit_zero: bool, out: &mut dyn Write) -> io::Result<()> {
    let totals = Totals::of(report);
    let document = Document {
        summary: Some(screen::closing(report, &totals, super::Style::PLAIN)),
        errors: problems::of_comparison(report).concat(),
        sides: report.checkpoints.each_ref().map(Checkpoint::of).into(),
        sections: Some(Sections::of(report)),
        options: Some(Options::of(report)),
        totals: Some(Sums::of(&totals, report)),
        tensors: Some(report.tensors.iter().map(Tensor::of).collect()),
        only_in: Some(names_of(&report.only_in)),
        excused: Some(Excused {
            ignored: names(&report.excused.ignored),
            only_in: names_of(&report.excused.only_in),
        }),
        unused_rules: Some(report.unused.iter().map(UnusedRule::of).collect()),
        unused_globs: Some(&report.idle_globs),
        ..Document::bare(report.verdict, exit_zero)
    };
    json::write_value(&document, out)
}

/// Writes the document of a comparison of two paths that did not come to its end, with the lines of the error.
///
/// # Errors
/// The sink cannot be written to.
pub fn write_failure(
    paths: [&Path; 2],
    error: &str,
    exit_zero: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let side = |path: &Path| Checkpoint { path: text(path), ..Checkpoint::default() };
    let document = Document {
        errors: error.lines().map(str::to_owned).collect(),
        sides: paths.map(side).into(),
        ..Document::bare(Verdict::Trouble, exit_zero)
    };
    json::write_value(&document, out)
}

impl Document<'_> {
    /// The verdict, and nothing else yet.
    fn bare(verdict: Verdict, exit_zero: bool) -> Self {
        Self {
            schema: SCHEMA,
            tool: TOOL,
            verdict: verdict.name(),
            passes: verdict.exit_code() == 0,
            exit_code: verdict.exit_code(),
            exit_zero,
            summary: None,
            errors: Vec::new(),
            sides: [(); 2].map(|()| Checkpoint::default()).into(),
            sections: None,
            options: None,
            totals: None,
            tensors: None,
            only_in: None,
            excused: None,
            unused_rules: None,
            unused_globs: None,
        }
    }
}

impl<'a> Checkpoint<'a> {
    fn of(checkpoint: &'a CheckpointReport) -> Self {
        let CheckpointReport { origin, problems, notes } = checkpoint;
        Self {
            path: text(&origin.path),
            resolved: Some(text(&origin.resolved)),
            format: Some(origin.format),
            layout: Some(&origin.layout),
            iteration: origin.iteration,
            writer: origin.writer.as_deref(),
            shards: Some(origin.shards),
            left_out: Some(origin.left_out),
            unread: Some(origin.unread.iter().map(Unread::of).collect()),
            problems: Some(problems.iter().map(Trouble::of).collect()),
            notes: Some(notes),
        }
    }
}

impl Unread {
    fn of((section, count): (&Section, &Option<usize>)) -> Self {
        Self { section: section.name(), tensors: *count }
    }
}

impl<'a> Trouble<'a> {
    fn of(Problem { file, tensor, message, .. }: &'a Problem) -> Self {
        Self { file: file.as_deref().map(text), tensor: tensor.as_deref(), message }
    }
}

impl Sections {
    fn of(report: &Report) -> Self {
        let is_compared = |section: &Section| {
            report.checkpoints.iter().all(|side| side.origin.sections.contains(section))
        };
        let (compared, others): (Vec<_>, Vec<_>) = Section::ALL.into_iter().partition(is_compared);
        let names = |sections: Vec<Section>| sections.into_iter().map(Section::name).collect();
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
            verdicts: totals.by_verdict().map(|(verdict, count)| (verdict.name(), count)).collect(),
            only_in: report.only_in.each_ref().map(Vec::len).into(),
            replicas_that_disagree: totals.diverged,
            problems: totals.problems,
        }
    }
}

fn names(names: &[Name]) -> Names<'_> {
    names.iter().map(Name::as_str).collect()
}

fn names_of(sides: &[Vec<Name>; 2]) -> Sides<Names<'_>> {
    sides.each_ref().map(|of_side| names(of_side)).into()
}

/// A path as text; what is no Unicode is replaced.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The name of a side.
fn side_name(side: Side) -> &'static str {
    match side {
        Side::A => "a",
        Side::B => "b",
    }
}
