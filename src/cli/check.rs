//! `ckptcmp check`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{InputArgs, help_template};

const EXAMPLES: &str = "\
Examples:
  ckptcmp check run1                               newest iteration
  ckptcmp check run1/iter_0000100 --json | jq .replicas";

const EXIT_CODES: &str = "\
Exit codes:
  0  sound: everything was read, all copies agree, every weight is its fp32 master rounded, every element is finite
  1  copies that disagree, weights that are not their fp32 masters rounded, NaN or Inf, unreferenced files, and what
     --fail-on names
  2  trouble: bad usage, unreadable or incomplete input";

/// Warnings that can be made findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FailOn {
    /// Globals that no training framework writes.
    Globals,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(help_template = help_template(EXAMPLES, EXIT_CODES))]
pub struct CheckArgs {
    /// The checkpoint: a save folder, an iteration's folder, a rank's folder or a file
    pub path: PathBuf,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Do not verify the CRC-32 that torch files keep of their tensors
    #[arg(long)]
    pub no_crc: bool,
    /// Take this for unsound too: globals, classes and functions that pickles name and no training framework writes
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    pub fail_on: Vec<FailOn>,
    /// Options for reading the checkpoint
    #[command(flatten)]
    pub input: InputArgs,
    /// Print errors only
    #[arg(short, long)]
    pub quiet: bool,
    /// Threads to use; no more than 64, or 8 a core, are started [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<std::num::NonZeroUsize>,
}
