//! `ckptcmp compare`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{ArgPredicate, PathBufValueParser, PossibleValuesParser, TypedValueParser};
use clap_complete::engine::ArgValueCandidates;
use globset::Glob;

use crate::judge::bounds::{Bounds, MetricBound, magnitude};
use crate::report::{Form, View};
use crate::state::Profile;

use super::completions::metrics;
use super::report::{SummaryOf, report};
use super::{EXIT_CODES, InputArgs, NameArgs, help_template};

const EXAMPLES: &str = "\
Examples:
  ckptcmp compare run1 run2                      newest iteration of each
  ckptcmp compare run1/iter_0000100 run2 -o -    JSON on standard output
  ckptcmp compare a b --quiet -o result.json     in scripts: only the exit code
  ckptcmp compare a b --report report.json       everything about it, for scripts
  ckptcmp compare a b --report report.html       the same as a page, for people
  ckptcmp compare a b --by-layer --rows 50       each layer, and more of the worst tensors
  ckptcmp compare a b --include '*.mlp.*'        only some tensors
  ckptcmp compare a b --section model,optimizer  the optimizer's state too
  ckptcmp compare a b --profile resume           all that a resumed run depends on
  ckptcmp compare a b --metrics rel_l2,max_abs   more keys in the JSON
  ckptcmp compare fp32 bf16 --allow-cast         exact casts pass
  ckptcmp compare a b --rtol 1e-3 --atol 1e-6    a tolerance for each element
  ckptcmp compare a b --max rel_l2=1e-4          a bound on a metric";

/// The flag that needs no checkpoints.
const NO_PATHS: &str = "explain_profile";

fn profile_names() -> impl TypedValueParser<Value = Profile> {
    let names = PossibleValuesParser::new(Profile::ALL.map(Profile::name));
    names.map(|name| {
        let found = Profile::ALL.into_iter().find(|profile| profile.name() == name);
        found.unwrap_or_default()
    })
}

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(help_template = help_template(EXAMPLES, EXIT_CODES))]
pub struct CompareArgs {
    /// First checkpoint: a save folder, an iteration's folder, a rank's folder or a file
    #[arg(required = false, required_unless_present = NO_PATHS, default_value_if(NO_PATHS, ArgPredicate::IsPresent, "-"))]
    pub a: PathBuf,
    /// Second checkpoint; relative metrics are relative to it
    #[arg(required = false, required_unless_present = NO_PATHS, default_value_if(NO_PATHS, ArgPredicate::IsPresent, "-"))]
    pub b: PathBuf,
    /// File for the JSON result; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "./ckpt_similarity.json")]
    pub output: PathBuf,
    /// Write a report of the whole comparison in the form of the suffix: FILE.json (everything about every tensor), FILE.html (a
    /// page), FILE.md, FILE.csv, FILE.xml (JUnit), or - for JSON on standard output; may be repeated
    #[arg(long = "report", value_name = "FILE", value_parser = PathBufValueParser::new().try_map(report))]
    pub reports: Vec<(Form, PathBuf)>,
    /// Append Markdown to the summary of a CI step, and annotate it: github
    #[arg(long, value_name = "WHERE")]
    pub summary: Option<SummaryOf>,
    /// Overwrite files that exist
    #[arg(long)]
    pub force: bool,
    /// More metrics in the JSON, comma-separated, or all: dtype, one_minus_cos, rel_l2, max_abs, max_abs_index, max_ulp,
    /// histogram, mean_abs, differing, identical, norm_a, norm_b, nan_a, nan_b, inf_a, inf_b
    #[arg(long, value_name = "NAMES", value_delimiter = ',', add = ArgValueCandidates::new(metrics))]
    pub metrics: Vec<String>,
    /// Compare only names that match, e.g. '*.mlp.*'; may be repeated
    #[arg(long, value_name = "GLOB", help_heading = "Selection")]
    pub include: Vec<Glob>,
    /// Leave out names that match; may be repeated
    #[arg(long, value_name = "GLOB", help_heading = "Selection")]
    pub exclude: Vec<Glob>,
    /// Size of the vocabulary without padding: compare only that many rows of embeddings and output layers
    #[arg(long, value_name = "N", help_heading = "Selection")]
    pub vocab_size: Option<u64>,
    /// Names that tensors get before they are compared
    #[command(flatten)]
    pub names: NameArgs,
    /// What is compared: weights (the model), resume (everything but what a resume may change), strict (everything)
    #[arg(long, value_name = "NAME", help_heading = "Selection", default_value = "weights", value_parser = profile_names())]
    pub profile: Profile,
    /// Print what the profiles compare, and the keys of state that resume ignores, each with its reason
    #[arg(long, help_heading = "Selection")]
    pub explain_profile: bool,
    /// Bounds that tensors have to hold
    #[command(flatten)]
    pub judging: JudgingArgs,
    /// File with rules in TOML: bounds, names to ignore, names that may be missing or are required
    #[arg(long = "rules", value_name = "FILE", help_heading = "Judging")]
    pub rules_file: Option<PathBuf>,
    /// Options for reading checkpoints
    #[command(flatten)]
    pub input: InputArgs,
    /// What the screen shows
    #[command(flatten)]
    pub screen: ScreenArgs,
    /// Print errors only
    #[arg(short, long)]
    pub quiet: bool,
    /// Report copies that disagree within one checkpoint, but do not count them as a difference
    #[arg(long)]
    pub allow_diverged: bool,
    /// Do not look for causes: differing tensors whose sums leave one open are read once more for it
    #[arg(long)]
    pub no_causes: bool,
    /// Exit with 0 even if something differs; trouble is still 2
    #[arg(long)]
    pub exit_zero: bool,
    /// Threads to use; no more than 64, or 8 a core, are started [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<std::num::NonZeroUsize>,
}

/// What the screen shows.
#[derive(Debug, Args)]
#[command(next_help_heading = "Screen")]
pub struct ScreenArgs {
    /// Rows of each list before it is cut short [default: 10]
    #[arg(long, value_name = "N")]
    rows: Option<usize>,
    /// Show every layer on a line of its own
    #[arg(long)]
    by_layer: bool,
    /// Show every layer and all rows of every list
    #[arg(long, conflicts_with_all = ["rows", "by_layer"])]
    all: bool,
}

impl ScreenArgs {
    /// What was asked for.
    #[must_use]
    pub fn view(&self) -> View {
        let View { rows, .. } = View::default();
        View {
            rows: if self.all { usize::MAX } else { self.rows.unwrap_or(rows) },
            by_layer: self.all || self.by_layer,
        }
    }
}

/// Bounds that tensors have to hold; all that are given.
#[derive(Debug, Args)]
#[command(next_help_heading = "Judging")]
pub struct JudgingArgs {
    /// Let floats pass that are the other side's, rounded to their dtype, every element
    #[arg(long)]
    allow_cast: bool,
    /// Let elements pass with |a - b| <= ATOL + R * |b|
    #[arg(long, value_name = "R", value_parser = bound)]
    rtol: Option<f64>,
    /// Let elements pass with |a - b| <= A + RTOL * |b|
    #[arg(long, value_name = "A", value_parser = bound)]
    atol: Option<f64>,
    /// Take rtol and atol by the dtypes, as torch.testing.assert_close does
    #[arg(long, value_name = "NAME", value_parser = ["torch"])]
    tolerance: Option<String>,
    /// Let tensors pass whose metric is at most VALUE: l2, rel_l2, one_minus_cos, max_abs, mean_abs, max_ulp, differing; may be
    /// repeated, then all have to hold
    #[arg(long, value_name = "METRIC=VALUE")]
    max: Vec<MetricBound>,
    /// Take NaN and infinities at the same place on both sides as equal
    #[arg(long)]
    equal_nan: bool,
}

impl JudgingArgs {
    /// The bounds that were given.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        Bounds {
            rtol: self.rtol,
            atol: self.atol,
            torch: self.tolerance.as_ref().map(|_| true),
            max: self.max.clone(),
            allow_cast: self.allow_cast.then_some(true),
            equal_nan: self.equal_nan.then_some(true),
        }
    }
}

fn bound(text: &str) -> Result<f64, String> {
    magnitude(text.parse().map_err(|_| format!("{text:?} is no number"))?)
}
