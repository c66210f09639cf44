//! `ckptcmp compare`.

use std::path::PathBuf;

use clap::Args;
use globset::Glob;

use super::{EXIT_CODES, InputArgs};

const EXAMPLES: &str = "\
Examples:
  ckptcmp compare run1 run2                     newest iteration of each
  ckptcmp compare run1/iter_0000100 run2 -o -   JSON on standard output
  ckptcmp compare a b --include '*.mlp.*'       only some tensors
  ckptcmp compare a b --section model,optimizer  the optimizer's state too
  ckptcmp compare a b --metrics rel_l2,max_abs  more keys in the JSON
  ckptcmp compare gpu npu --exit-zero           report only";

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{EXIT_CODES}"))]
pub struct CompareArgs {
    /// The first checkpoint: a root, an iteration's folder, a rank's folder or a file
    pub a: PathBuf,
    /// The second checkpoint, the reference of relative metrics
    pub b: PathBuf,
    /// Where the JSON result goes; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "./ckpt_similarity.json")]
    pub output: PathBuf,
    /// Overwrite the result if it exists
    #[arg(long)]
    pub force: bool,
    /// Further metrics in the JSON, or all: dtype, one_minus_cos, rel_l2, max_abs, max_abs_index, mean_abs,
    /// differing, identical, norm_a, norm_b, nan_a, nan_b, inf_a, inf_b
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub metrics: Vec<String>,
    /// Compare only names that match; * matches anything, dots included; may be repeated
    #[arg(long, value_name = "GLOB", help_heading = "Selection")]
    pub include: Vec<Glob>,
    /// Leave out names that match; may be repeated
    #[arg(long, value_name = "GLOB", help_heading = "Selection")]
    pub exclude: Vec<Glob>,
    /// The true vocabulary: compare only that many rows of embeddings and output layers
    #[arg(long, value_name = "N", help_heading = "Selection")]
    pub vocab_size: Option<u64>,
    /// How checkpoints are read
    #[command(flatten)]
    pub input: InputArgs,
    /// Print nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
    /// Report replicas of one checkpoint that disagree, but do not count them as a difference
    #[arg(long)]
    pub allow_diverged: bool,
    /// Exit with 0 where there are differences; trouble is still 2
    #[arg(long)]
    pub exit_zero: bool,
    /// Threads to use; all cores by default
    #[arg(long, value_name = "N")]
    pub threads: Option<std::num::NonZeroUsize>,
}
