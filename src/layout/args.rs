//! What `args` says about a run, and what the command line supplies in its stead.

use std::collections::BTreeMap;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;

use super::LayoutError;

/// The arguments of a run by name, as Megatron's `args` spells them.
#[derive(Debug, Clone, Default)]
pub struct RunArgs {
    values: BTreeMap<String, PlainValue>,
    /// Whether the checkpoint itself has `args`.
    has_args: bool,
}

/// Newer and older names of the same argument (Megatron-LM v1.0, MindSpeed-LLM before 2.0).
static ALIASES: &[(&str, &str)] = &[
    ("tensor_model_parallel_size", "model_parallel_size"),
    ("qk_pos_emb_head_dim", "qk_rope_head_dim"),
];

impl RunArgs {
    /// Takes the checkpoint's own `args`, then those of the command line, which win.
    #[must_use]
    pub fn new(args: BTreeMap<String, PlainValue>, given: &[(String, PlainValue)]) -> Self {
        let has_args = !args.is_empty();
        let mut values = args;
        values.extend(given.iter().cloned());
        Self { values, has_args }
    }

    /// The checkpoint's own `args` with what the command line overrides; `None` where it has none.
    #[must_use]
    pub fn of_run(&self) -> Option<BTreeMap<String, PlainValue>> {
        self.has_args.then(|| self.values.clone())
    }

    /// The argument of this name, or of one that older writers used for it, where it is there and not `None`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&PlainValue> {
        debug_assert!(NAMES.contains(&name), "{name} is asked for, so it belongs in NAMES");
        let older = ALIASES.iter().filter(|(newer, _)| *newer == name).map(|(_, older)| *older);
        let mut found = std::iter::once(name).chain(older).filter_map(|name| self.values.get(name));
        found.find(|arg| **arg != PlainValue::None)
    }

    /// A count or size, as large as a dimension may be.
    #[must_use]
    pub fn size(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            PlainValue::Int(value) => u64::try_from(*value).ok().filter(|&size| size <= LIMITS.dim),
            _ => None,
        }
    }

    /// A count or size that nothing else says.
    ///
    /// # Errors
    /// It is not there.
    pub fn need(&self, name: &'static str) -> Result<u64, LayoutError> {
        self.size(name).ok_or(LayoutError::ArgMissing { arg: name })
    }

    /// A switch that is on; one that is absent is off.
    #[must_use]
    pub fn is_on(&self, name: &str) -> bool {
        matches!(self.get(name), Some(PlainValue::Bool(true)))
    }

    /// Whether the output layer shares the word embeddings. Where `args` does not say, it does (Megatron-LM's default);
    /// where there is no `args`, nobody knows, and arguments from the command line about other things do not change that.
    #[must_use]
    pub fn are_weights_tied(&self) -> bool {
        match self.get("untie_embeddings_and_output_weights") {
            Some(arg) => *arg != PlainValue::Bool(true),
            None => self.has_args,
        }
    }

    /// A text.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            PlainValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// All the layer counts or indices of a list, nested lists included, in order; also of a text such as `1,3,3,1`.
    /// `None` where one of them is over the limit of layers.
    #[must_use]
    pub fn sizes(&self, name: &str) -> Option<Vec<u64>> {
        let mut sizes = Vec::new();
        collect_sizes(self.get(name)?, &mut sizes)?;
        Some(sizes)
    }

    /// Forgets what only holds for all stages together, where one shard is looked at on its own.
    pub fn forget_other_stages(&mut self) {
        const OF_ALL_STAGES: [&str; 5] = [
            "num_layers",
            "decoder_num_layers",
            "encoder_num_layers",
            "noop_layers",
            "schedules_method",
        ];
        self.values.retain(|name, _| !OF_ALL_STAGES.contains(&name.as_str()));
    }

    /// Whether the checkpoint says anything of how it was trained.
    #[must_use]
    pub fn are_known(&self) -> bool {
        !self.values.is_empty()
    }
}

/// A number of layers, as large as it may be.
fn layers(number: u64) -> Option<u64> {
    (number <= LIMITS.layers).then_some(number)
}

fn collect_sizes(arg: &PlainValue, sizes: &mut Vec<u64>) -> Option<()> {
    match arg {
        PlainValue::Int(value) => sizes.push(layers(u64::try_from(*value).ok()?)?),
        PlainValue::Text(text) => {
            for part in text.split(',') {
                sizes.push(layers(part.trim().parse().ok()?)?);
            }
        }
        PlainValue::List(items) => {
            for item in items {
                collect_sizes(item, sizes)?;
            }
        }
        PlainValue::None
        | PlainValue::Bool(_)
        | PlainValue::Float(_)
        | PlainValue::Map(_)
        | PlainValue::Opaque(_) => {
            return None;
        }
    }
    Some(())
}

/// All the arguments that are ever asked for: the names that the command line may set.
static NAMES: &[&str] = &[
    "context_parallel_size",
    "data_parallel_size",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "ddp_pad_buckets_for_high_nccl_busbw",
    "decoder_num_layers",
    "encoder_num_layers",
    "encoder_pipeline_model_parallel_size",
    "encoder_tensor_model_parallel_size",
    "expert_gtp_weight_remat_size",
    "expert_model_parallel_size",
    "expert_parallel",
    "expert_tensor_parallel_size",
    "gpt_j_residual",
    "gtp_weight_remat_size",
    "kv_channels",
    "kv_lora_rank",
    "model_type",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "moe_tp_extend_ep",
    "mtp_num_layers",
    "noop_layers",
    "num_attention_heads",
    "num_distributed_optimizer_instances",
    "num_experts",
    "num_layer_list",
    "num_layers",
    "num_query_groups",
    "overlap_grad_reduce",
    "pipeline_model_parallel_size",
    "pipeline_num_transformer_layers",
    "q_lora_rank",
    "qk_pos_emb_head_dim",
    "quick_geglu",
    "schedules_method",
    "swiglu",
    "tensor_model_parallel_size",
    "tp_2d",
    "untie_embeddings_and_output_weights",
    "virtual_pipeline_model_parallel_size",
    "world_size",
];

/// The known names that are most like this one, the nearest first.
fn closest(name: &str) -> Vec<&'static str> {
    let mut names = NAMES.to_vec();
    names
        .sort_by_key(|known| (std::cmp::Reverse(shared_words(name, known)), distance(name, known)));
    names.truncate(4);
    names
}

/// Words of a name that the other one has too, in the singular or the plural.
fn shared_words(name: &str, known: &str) -> usize {
    let is_shared = |word: &&str| {
        known.split('_').any(|other| other.starts_with(word) || word.starts_with(other))
    };
    name.split('_').filter(|word| !word.is_empty()).filter(is_shared).count()
}

/// Characters to insert, drop or replace until one name is the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (at, char) in (1..).zip(one.chars()) {
        let mut diagonal = std::mem::replace(&mut row[0], at);
        for (column, known) in (1..).zip(other.chars()) {
            let replaced = diagonal + usize::from(char != known);
            diagonal = row[column];
            row[column] = replaced.min(diagonal + 1).min(row[column - 1] + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

/// Reads `NAME=VALUE` as the command line gives it: a Python literal of the simple kinds.
///
/// # Errors
/// It has another form, or no argument of this name is ever asked for.
///
/// ```
/// use ckptcmp::base::plain::PlainValue;
/// use ckptcmp::layout::parse_run_arg;
/// assert_eq!(parse_run_arg("num_experts=8"), Ok(("num_experts".to_owned(), PlainValue::Int(8))));
/// assert!(parse_run_arg("swiglu").is_err());
/// assert!(parse_run_arg("expert_num=8").is_err_and(|message| message.contains("num_experts")));
/// ```
pub fn parse_run_arg(text: &str) -> Result<(String, PlainValue), String> {
    let (name, value) = text.split_once('=').ok_or("not of the form NAME=VALUE")?;
    let (name, value) = (name.trim(), value.trim());
    let newer = ALIASES.iter().find(|(_, older)| *older == name).map(|(newer, _)| *newer);
    let name = newer.unwrap_or(name);
    if !NAMES.contains(&name) {
        return Err(format!(
            "unknown --set name {name}; the closest: {}",
            closest(name).join(", ")
        ));
    }
    let arg = match value {
        "" | "None" | "none" | "null" => PlainValue::None,
        "True" | "true" => PlainValue::Bool(true),
        "False" | "false" => PlainValue::Bool(false),
        _ => match (value.parse(), value.parse()) {
            (Ok(integer), _) => PlainValue::Int(integer),
            (_, Ok(float)) => PlainValue::Float(float),
            _ => PlainValue::Text(value.to_owned()),
        },
    };
    Ok((name.to_owned(), arg))
}
