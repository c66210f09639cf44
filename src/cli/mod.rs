//! The command line: typed flags, no I/O. One file a subcommand.

mod check;
mod compare;
mod completions;
mod explain_rules;
mod inspect;
mod names;
mod report;

use std::io::IsTerminal;
use std::str::FromStr;

use clap::builder::PossibleValuesParser;
use clap::{Args, ColorChoice, Parser, Subcommand};
use clap_complete::engine::ArgValueCandidates;

use crate::base::plain::PlainValue;
use crate::base::side::Side;
use crate::catalog::Section;
use crate::formats::{FORMATS, OpenOptions};
use crate::layout::parse_run_arg;
use crate::layout::rules::UserRule;
use crate::report::Style;
use crate::tensor::Merge;

pub use check::{CheckArgs, FailOn};
pub use compare::CompareArgs;
pub use completions::{CompletionsArgs, ManArgs, complete, man_pages, write_registration};
pub use explain_rules::ExplainRulesArgs;
pub use inspect::InspectArgs;
pub use names::NameArgs;
pub use report::{ReportArgs, SummaryOf};

const EXAMPLES: &str = "\
Examples:
  ckptcmp compare run1 run2    are two checkpoints the same?
  ckptcmp check run1           is one checkpoint complete, finite and consistent?
  ckptcmp inspect run1         which tensors are in it?

  ckptcmp help compare         all options of a command";

/// The parts of a help text: examples come before the options, as they are what is read first.
fn help_template(examples: &str, exit_codes: &str) -> String {
    format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{examples}\n\n{{all-args}}\n\n{exit_codes}"
    )
}

/// Compare two training checkpoints of large models tensor by tensor, across formats and parallel layouts
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, help_template = help_template(EXAMPLES, EXIT_CODES))]
pub struct Cli {
    /// Colour the output; auto does so on a terminal unless NO_COLOR is set
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: ColorChoice,
    /// The subcommand
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  everything was compared and is equal
  1  something differs
  2  trouble: bad usage, unreadable or incomplete input, nothing to compare";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compare two checkpoints and write the metrics of every tensor as JSON
    Compare(Box<CompareArgs>),
    /// Check one checkpoint: copies that disagree, weights that are not their masters rounded, NaN and Inf, missing parts,
    /// unreferenced files
    Check(CheckArgs),
    /// Make a report in any form from the document of a comparison, without reading a checkpoint
    Report(ReportArgs),
    /// List the tensors of a checkpoint without reading their values
    Inspect(InspectArgs),
    /// Say which rule of a file decides about which tensor of two checkpoints, without reading their values
    ExplainRules(Box<ExplainRulesArgs>),
    /// Write what makes a shell complete commands, options and their values
    Completions(CompletionsArgs),
    /// Write the manual pages
    Man(ManArgs),
}

impl Cli {
    /// The style of the text on standard output: coloured or not.
    #[must_use]
    pub fn style(&self) -> Style {
        self.style_of(&std::io::stdout())
    }

    /// The style of the text on standard error.
    #[must_use]
    pub fn error_style(&self) -> Style {
        self.style_of(&std::io::stderr())
    }

    fn style_of(&self, stream: &impl IsTerminal) -> Style {
        let has_color = match self.color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => {
                let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                stream.is_terminal() && !no_color
            }
        };
        Style { has_color, fits: stream.is_terminal() }
    }
}

/// Options for reading checkpoints.
#[derive(Debug, Args)]
pub struct InputArgs {
    /// Read as this format instead of detecting it
    #[arg(long, value_name = "FORMAT", help_heading = "Input", value_parser = format_names())]
    format: Option<String>,
    /// Sections to read, comma-separated: model, optimizer, state (what is kept beside tensors, for compare), or all. By default
    /// compare reads what its profile says, other commands all tensors
    #[arg(long = "section", value_name = "NAMES", help_heading = "Input", value_delimiter = ',', value_parser = section, add = ArgValueCandidates::new(completions::sections))]
    sections: Vec<SectionArg>,
    /// Set an argument of the training run that the checkpoint lacks or has wrong, e.g. num_experts=8; a:NAME=VALUE or
    /// b:NAME=VALUE for one side only; may be repeated
    #[arg(long = "set", value_name = "[SIDE:]NAME=VALUE", help_heading = "Input")]
    run_args: Vec<SidedFact>,
    /// Say how tensors whose names end in NAME are sharded: replicated, column, row, gated or vocab; may be repeated
    #[arg(long = "rule", value_name = "NAME=HOW", help_heading = "Input")]
    rules: Vec<UserRule>,
    /// Value to use where copies of a tensor disagree: first or mean [default: mean for GPT-NeoX norms, else first]
    #[arg(long, value_name = "HOW", help_heading = "Input", value_parser = replicas)]
    replicas: Option<Merge>,
    /// Read files that say to be another rank, layout or iteration than their names do as what their names say
    #[arg(long, help_heading = "Input")]
    allow_foreign_ranks: bool,
}

impl InputArgs {
    /// The sections to read: those asked for, or else these.
    #[must_use]
    pub fn sections(&self, otherwise: &[Section]) -> Vec<Section> {
        let asked = self.sections.iter().flat_map(|one| match one {
            SectionArg::All => Section::ALL.to_vec(),
            SectionArg::One(section) => vec![*section],
        });
        let mut asked: Vec<Section> = asked.collect();
        asked.sort();
        asked.dedup();
        if asked.is_empty() { otherwise.to_vec() } else { asked }
    }

    /// The arguments supplied for a side.
    #[must_use]
    pub fn run_args(&self, side: Side) -> Vec<(String, PlainValue)> {
        let run_args =
            self.run_args.iter().filter(|fact| fact.side.is_none_or(|only| only == side));
        run_args.map(|fact| (fact.name.clone(), fact.value.clone())).collect()
    }

    /// The options for a side, with these sections unless others were asked for.
    #[must_use]
    pub fn options(&self, side: Side, sections: &[Section]) -> OpenOptions {
        OpenOptions {
            sections: self.sections(sections),
            format: self.format.clone(),
            run_args: self.run_args(side),
            rules: self.rules.clone(),
            no_values: false,
            replicas: self.replicas,
            allow_foreign_ranks: self.allow_foreign_ranks,
        }
    }
}

/// A section, or all of them.
#[derive(Debug, Clone, Copy)]
enum SectionArg {
    All,
    One(Section),
}

fn section(text: &str) -> Result<SectionArg, String> {
    if text == "all" {
        return Ok(SectionArg::All);
    }
    let all = Section::ALL.map(Section::name).join(", ");
    let found = Section::ALL.into_iter().find(|section| section.name() == text);
    let found = found.map(SectionArg::One);
    found.ok_or_else(|| format!("no section is called {text}: there are {all}, all"))
}

fn replicas(text: &str) -> Result<Merge, &'static str> {
    match text {
        "first" => Ok(Merge::First),
        "mean" => Ok(Merge::Mean),
        _ => Err("neither first nor mean"),
    }
}

fn format_names() -> PossibleValuesParser {
    FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().into()
}

/// A fact for one side or for both.
#[derive(Debug, Clone)]
struct SidedFact {
    side: Option<Side>,
    name: String,
    value: PlainValue,
}

impl FromStr for SidedFact {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (side, text) = match (text.strip_prefix("a:"), text.strip_prefix("b:")) {
            (Some(rest), _) => (Some(Side::A), rest),
            (_, Some(rest)) => (Some(Side::B), rest),
            (None, None) => (None, text),
        };
        let (name, value) = parse_run_arg(text)?;
        Ok(Self { side, name, value })
    }
}
