//! The arguments of a run: those of `args`, and what the command line supplies in their stead.

use std::collections::BTreeMap;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;

use super::LayoutError;
use super::arg_name::{ArgName, closest};

/// The arguments of a run by name, as Megatron's `args` spells them.
#[derive(Debug, Clone, Default)]
pub struct RunArgs {
    values: BTreeMap<String, PlainValue>,
    /// The checkpoint itself has `args`.
    has_args: bool,
}

/// Newer and older names of the same argument (Megatron-LM v1.0, MindSpeed-LLM before 2.0).
static ALIASES: &[(ArgName, &str)] = &[
    (ArgName::TENSOR_MODEL_PARALLEL_SIZE, "model_parallel_size"),
    (ArgName::QK_POS_EMB_HEAD_DIM, "qk_rope_head_dim"),
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
    pub fn get(&self, name: ArgName) -> Option<&PlainValue> {
        let older = ALIASES.iter().filter(|(newer, _)| *newer == name).map(|(_, older)| *older);
        let mut found =
            std::iter::once(name.as_str()).chain(older).filter_map(|name| self.values.get(name));
        found.find(|arg| **arg != PlainValue::None)
    }

    /// A count or size, as large as a dimension may be.
    #[must_use]
    pub fn size(&self, name: ArgName) -> Option<u64> {
        match self.get(name)? {
            PlainValue::Int(value) => u64::try_from(*value).ok().filter(|&size| size <= LIMITS.dim),
            _ => None,
        }
    }

    /// A count or size that nothing else says.
    ///
    /// # Errors
    /// It is not there.
    pub fn need(&self, name: ArgName) -> Result<u64, LayoutError> {
        self.size(name).ok_or(LayoutError::ArgMissing { arg: name })
    }

    /// A switch that is on; one that is absent is off.
    #[must_use]
    pub fn is_on(&self, name: ArgName) -> bool {
        matches!(self.get(name), Some(PlainValue::Bool(true)))
    }

    /// Says whether the output layer shares the word embeddings. Where `args` does not say, it does (Megatron-LM's default);
    /// where there is no `args`, nobody knows, and arguments from the command line about other things do not change that.
    #[must_use]
    pub fn are_weights_tied(&self) -> bool {
        match self.get(ArgName::UNTIE_EMBEDDINGS_AND_OUTPUT_WEIGHTS) {
            Some(arg) => *arg != PlainValue::Bool(true),
            None => self.has_args,
        }
    }

    /// A text.
    #[must_use]
    pub fn text(&self, name: ArgName) -> Option<&str> {
        match self.get(name)? {
            PlainValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// All the layer counts or indices of a list, nested lists included, in order; also of a text such as `1,3,3,1`.
    /// `None` where one of them is over the limit of layers.
    #[must_use]
    pub fn sizes(&self, name: ArgName) -> Option<Vec<u64>> {
        let mut sizes = Vec::new();
        collect_sizes(self.get(name)?, &mut sizes)?;
        Some(sizes)
    }

    /// Forgets what only holds for all stages together, where one shard is looked at on its own.
    pub fn forget_other_stages(&mut self) {
        const OF_ALL_STAGES: [ArgName; 5] = [
            ArgName::NUM_LAYERS,
            ArgName::DECODER_NUM_LAYERS,
            ArgName::ENCODER_NUM_LAYERS,
            ArgName::NOOP_LAYERS,
            ArgName::SCHEDULES_METHOD,
        ];
        self.values.retain(|name, _| !OF_ALL_STAGES.iter().any(|stage| stage.as_str() == name));
    }

    /// Says whether the checkpoint tells anything of how it was trained.
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
    let newer = ALIASES.iter().find(|(_, older)| *older == name).map(|(newer, _)| newer.as_str());
    let name = newer.unwrap_or(name);
    if ArgName::ALL.iter().all(|known| known.as_str() != name) {
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
