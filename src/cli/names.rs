//! The options on names that `compare` and `explain-rules` share.

use clap::{Args, ValueHint};

/// The names that tensors get before they are compared.
#[derive(Debug, Args)]
#[command(next_help_heading = "Names")]
pub struct NameArgs {
    /// Compare tensors called OLD as NEW, or by all lines OLD = NEW of FILE; a:OLD=NEW or b:OLD=NEW on one side only; may be
    /// repeated, and the first that matches a name decides. OLD is a name or the modules in front of one, {i} in it a part
    /// without dots, * any part, {i+1} in NEW a number: 'h.{i}.attn=layers.{i}.self_attention', 'module=', '*.gamma=*.weight'
    #[arg(long = "map", value_name = "[SIDE:]OLD=NEW|FILE", value_hint = ValueHint::FilePath)]
    pub maps: Vec<String>,
    /// Compare the fp32 masters of the optimizer in the place of weights, on each side that has any: those of ZeRO with
    /// the file that zero_to_fp32.py makes of them
    #[arg(long, conflicts_with = "sections")]
    pub masters: bool,
}
