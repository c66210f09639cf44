//! `ckptcmp explain-rules`.

use std::path::PathBuf;

use clap::Args;

use super::compare::JudgingArgs;
use super::{InputArgs, NameArgs, help_template};

const EXAMPLES: &str = "\
Examples:
  ckptcmp explain-rules rules.toml run1 run2

A rules file:
  [[rule]]                          # the first rule that matches a name decides
  match = [\"decoder.layers.*.mlp.*\"]
  rtol = 1e-3                       # or atol, tolerance = \"torch\"
  max = { rel_l2 = 1e-4 }           # bounds on metrics
  allow-cast = true                 # or equal-nan
  [[rule]]
  match = \"*.rotary_emb.*\"
  ignore = true                     # or allow-missing = \"a\", \"b\", \"both\"
  [[rule]]
  match = \"embedding.*\"
  required = true                   # at least one such tensor is compared";

const EXIT_CODES: &str = "\
Exit codes:
  0  every rule decides about a tensor
  1  some rule does not
  2  trouble: bad usage, bad rules, unreadable or incomplete input";

/// Arguments of `explain-rules`.
#[derive(Debug, Args)]
#[command(help_template = help_template(EXAMPLES, EXIT_CODES))]
pub struct ExplainRulesArgs {
    /// The rules file
    pub rules_file: PathBuf,
    /// First checkpoint
    pub a: PathBuf,
    /// Second checkpoint
    pub b: PathBuf,
    /// Name every tensor, not the first ones only
    #[arg(long)]
    pub all: bool,
    /// Names that tensors get before they are compared
    #[command(flatten)]
    pub names: NameArgs,
    /// Bounds that go before those of the rules
    #[command(flatten)]
    pub judging: JudgingArgs,
    /// Options for reading checkpoints
    #[command(flatten)]
    pub input: InputArgs,
}
