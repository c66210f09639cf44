//! The description of a model that lies beside its weights where no `args` do, as the arguments that it stands for.
//!
//! Facts from Megatron Bridge 067f987 (`training/config.py`, `ConfigContainer`; `training/checkpointing.py`; `models/gpt_provider.py`) and
//! NeMo 1.20 to 2.5 (`lightning/io/mixin.py`, `io_dump`; `collections/llm/gpt/model/base.py`): both describe a model by the
//! fields of Megatron-Core's `TransformerConfig` and some of their own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::Problem;
use crate::containers::yaml;
use crate::layout::ArgName;
use crate::storage::{self, FileSet};

type Entries = BTreeMap<String, PlainValue>;

/// A description: in the folder of the weights or beside it, and the dict in it that the model is.
struct Place {
    is_inside: bool,
    file: &'static str,
    model: Option<&'static str>,
}

/// Where descriptions lie, the nearest first: Megatron Bridge's in an iteration or a release, NeMo 2's beside `weights`, NeMo 1's.
const PLACES: [Place; 4] = [
    Place { is_inside: true, file: "run_config.yaml", model: Some("model") },
    Place { is_inside: false, file: "run_config.yaml", model: Some("model") },
    Place { is_inside: false, file: "context/model.yaml", model: Some("config") },
    Place { is_inside: false, file: "model_config.yaml", model: None },
];

/// Fields that go by another name among the arguments.
const RENAMED: [(&str, ArgName); 2] =
    [("num_moe_experts", ArgName::NUM_EXPERTS), ("gated_linear_unit", ArgName::SWIGLU)];

/// Settings of the optimizer's buffers, and the arguments that these are (Megatron-LM `core/distributed/distributed_data_parallel_config.py`).
const OF_BUFFERS: [(&str, ArgName); 4] = [
    ("overlap_grad_reduce", ArgName::OVERLAP_GRAD_REDUCE),
    ("bucket_size", ArgName::DDP_BUCKET_SIZE),
    ("pad_buckets_for_high_nccl_busbw", ArgName::DDP_PAD_BUCKETS_FOR_HIGH_NCCL_BUSBW),
    ("num_distributed_optimizer_instances", ArgName::NUM_DISTRIBUTED_OPTIMIZER_INSTANCES),
];

/// A model as it is described.
pub(super) struct Described {
    pub file: PathBuf,
    pub args: Entries,
    /// Only what an adapter adds to the model was trained, and is stored.
    pub is_adapter: bool,
}

/// Reads the nearest description; a damaged one is a note.
///
/// # Errors
/// It cannot be read.
pub(super) fn find(
    folder: &Path,
    files: &mut FileSet,
    notes: &mut Vec<String>,
) -> Result<Option<Described>, Problem> {
    for place in &PLACES {
        let file = match folder.file_name() {
            _ if place.is_inside => folder.join(place.file),
            Some(_) => folder.with_file_name(place.file),
            None => folder.join("..").join(place.file),
        };
        let failed = |error| Problem::of_file(&file, error);
        if !storage::is_there(&file).map_err(failed)? {
            continue;
        }
        let bytes = files.read_small(&file, LIMITS.json_bytes).map_err(failed)?;
        let run = yaml::read(&String::from_utf8_lossy(&bytes));
        let run = match run {
            Ok(PlainValue::Map(run)) => run,
            Ok(_) => {
                notes.push(format!("{}: describes no model", place.file));
                return Ok(None);
            }
            Err(error) => {
                notes.push(format!("{}: {error}", place.file));
                return Ok(None);
            }
        };
        let is_adapter = matches!(run.get("peft"), Some(PlainValue::Map(_)));
        let args = args_of(run, place.model);
        return Ok(args.map(|args| Described { file, args, is_adapter }));
    }
    Ok(None)
}

/// The arguments that a description stands for; `None` where there is no model in it.
fn args_of(mut run: Entries, model: Option<&str>) -> Option<Entries> {
    let mut args = match model {
        Some(key) => match run.remove(key)? {
            PlainValue::Map(model) => model,
            _ => return None,
        },
        None => std::mem::take(&mut run),
    };
    let mut renamed: Vec<(ArgName, PlainValue)> = Vec::new();
    for (field, arg) in RENAMED {
        renamed.extend(args.get(field).map(|value| (arg, value.clone())));
    }
    if let Some(PlainValue::Bool(is_shared)) = args.get("share_embeddings_and_output_weights") {
        let is_untied = PlainValue::Bool(!is_shared);
        renamed.push((ArgName::UNTIE_EMBEDDINGS_AND_OUTPUT_WEIGHTS, is_untied));
    }
    // NeMo 1 names the function, and leaves the gate to it.
    if let Some(PlainValue::Text(activation)) = args.get("activation") {
        renamed.push((ArgName::SWIGLU, PlainValue::Bool(activation.ends_with("glu"))));
    }
    let buffers = run.get("ddp").and_then(PlainValue::as_map);
    for (field, arg) in OF_BUFFERS {
        let setting = buffers.and_then(|buffers| buffers.get(field));
        renamed.extend(setting.map(|value| (arg, value.clone())));
    }
    let ranks = run.get(ArgName::DATA_PARALLEL_SIZE.as_str());
    renamed.extend(ranks.map(|value| (ArgName::DATA_PARALLEL_SIZE, value.clone())));
    for (arg, value) in renamed {
        args.entry(arg.as_str().to_owned()).or_insert(value);
    }
    let optimizer = run.get("optimizer").and_then(|optimizer| optimizer.as_map()?.get("optimizer"));
    if let Some(optimizer) = optimizer {
        args.insert("optimizer".to_owned(), optimizer.clone());
    }
    Some(args)
}
