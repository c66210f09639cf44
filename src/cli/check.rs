//! `ckptcmp check`.

use std::path::PathBuf;

use clap::Args;

use super::InputArgs;

const EXAMPLES: &str = "\
Examples:
  ckptcmp check run1                     newest iteration
  ckptcmp check run1/iter_0000100 --json | jq .replicas

Exit codes:
  0  sound: everything was read, all copies agree, every element is finite
  1  copies that disagree, NaN or Inf, files that belong to nothing
  2  trouble: bad usage, unreadable or incomplete input";

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CheckArgs {
    /// The checkpoint: a root, an iteration's folder, a rank's folder or a file
    pub path: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// How the checkpoint is read
    #[command(flatten)]
    pub input: InputArgs,
    /// Print nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
    /// Threads to use; all cores by default
    #[arg(long, value_name = "N")]
    pub threads: Option<std::num::NonZeroUsize>,
}
