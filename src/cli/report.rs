//! `ckptcmp report`.

use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{ArgGroup, Args, ValueEnum};

use crate::report::Form;

use super::help_template;

const EXAMPLES: &str = "\
Examples:
  ckptcmp compare a b --report report.json       the document of a comparison
  ckptcmp report report.json --report out.md     from it, without reading a checkpoint:
  ckptcmp report report.json --report out.csv    any other form
  ckptcmp report report.json --summary github    the summary of a step of GitHub Actions";

const EXIT_CODES: &str = "\
Exit codes:
  0  all was written, whatever the document says of the comparison
  2  trouble: bad usage, no document, one of another version, a file that cannot be written";

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(help_template = help_template(EXAMPLES, EXIT_CODES))]
#[command(group = ArgGroup::new("outputs").required(true).multiple(true).args(["reports", "summary"]))]
pub struct ReportArgs {
    /// A document that compare --report FILE.json wrote
    pub document: PathBuf,
    /// Write it in the form of the suffix: FILE.md, FILE.csv, FILE.xml (JUnit), FILE.json, or - for JSON on standard output; may be
    /// repeated
    #[arg(long = "report", value_name = "FILE", value_parser = PathBufValueParser::new().try_map(report))]
    pub reports: Vec<(Form, PathBuf)>,
    /// Append Markdown to the summary of a CI step, and annotate it: github
    #[arg(long, value_name = "WHERE")]
    pub summary: Option<SummaryOf>,
    /// Overwrite files that exist
    #[arg(long)]
    pub force: bool,
}

/// The CI system whose summary is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SummaryOf {
    /// GitHub Actions.
    Github,
}

/// The form and the path of a report.
pub(super) fn report(path: PathBuf) -> Result<(Form, PathBuf), String> {
    Ok((Form::of(&path)?, path))
}
