//! `ckptcmp inspect`.

use std::path::PathBuf;

use clap::Args;

use super::InputArgs;

const EXAMPLES: &str = "\
Examples:
  ckptcmp inspect run1
  ckptcmp inspect run1/iter_0000100/mp_rank_00_001
  ckptcmp inspect run1 --json | jq .tensors";

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct InspectArgs {
    /// The checkpoint: a root, an iteration's folder, a rank's folder or a file
    pub path: PathBuf,
    /// Print JSON, with the place of every piece of every tensor
    #[arg(long)]
    pub json: bool,
    /// How the checkpoint is read
    #[command(flatten)]
    pub input: InputArgs,
}
