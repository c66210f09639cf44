//! `ckptcmp inspect`.

use std::path::PathBuf;

use clap::Args;

use super::{InputArgs, help_template};

const EXAMPLES: &str = "\
Examples:
  ckptcmp inspect run1                               newest iteration
  ckptcmp inspect run1/iter_0000100/mp_rank_00_001   the shard of one rank
  ckptcmp inspect run1 --json | jq .tensors";

const EXIT_CODES: &str = "\
Exit codes:
  0  everything was read
  2  trouble: bad usage, unreadable or incomplete input";

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(help_template = help_template(EXAMPLES, EXIT_CODES))]
pub struct InspectArgs {
    /// The checkpoint: a save folder, an iteration's folder, a rank's folder or a file
    pub path: PathBuf,
    /// Print JSON, with the file, offset and strides of every piece of every tensor
    #[arg(long)]
    pub json: bool,
    /// Options for reading the checkpoint
    #[command(flatten)]
    pub input: InputArgs,
}
