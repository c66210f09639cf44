//! `ckptcmp compare`.

use std::path::PathBuf;

use clap::Args;
use globset::Glob;

use super::{EXIT_CODES, InputArgs, help_template};

const EXAMPLES: &str = "\
Examples:
  ckptcmp compare run1 run2                      newest iteration of each
  ckptcmp compare run1/iter_0000100 run2 -o -    JSON on standard output
  ckptcmp compare a b --quiet -o result.json     in scripts: only the exit code
  ckptcmp compare a b --include '*.mlp.*'        only some tensors
  ckptcmp compare a b --section model,optimizer  the optimizer's state too
  ckptcmp compare a b --metrics rel_l2,max_abs   more keys in the JSON";

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(help_template = help_template(EXAMPLES, EXIT_CODES))]
pub struct CompareArgs {
    /// First checkpoint: a save folder, an iteration's folder, a rank's folder or a file
    pub a: PathBuf,
    /// Second checkpoint; relative metrics are relative to it
    pub b: PathBuf,
    /// File for the JSON result; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "./ckpt_similarity.json")]
    pub output: PathBuf,
    /// Overwrite the file if it exists
    #[arg(long)]
    pub force: bool,
    /// More metrics in the JSON, comma-separated, or all: dtype, one_minus_cos, rel_l2, max_abs, max_abs_index, mean_abs,
    /// differing, identical, norm_a, norm_b, nan_a, nan_b, inf_a, inf_b
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
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
    /// Options for reading checkpoints
    #[command(flatten)]
    pub input: InputArgs,
    /// Print errors only
    #[arg(short, long)]
    pub quiet: bool,
    /// Report copies that disagree within one checkpoint, but do not count them as a difference
    #[arg(long)]
    pub allow_diverged: bool,
    /// Exit with 0 even if something differs; trouble is still 2
    #[arg(long)]
    pub exit_zero: bool,
    /// Threads to use; no more than 64, or 8 a core, are started [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<std::num::NonZeroUsize>,
}
