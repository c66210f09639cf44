//! Megatron-Core's distributed checkpoints: whole tensors under global names, whatever ranks wrote them.
//!
//! Names, sections and the state of the run are the same for all of them and read here; the places of the bytes are each
//! backend's own business. Facts from Megatron-LM core_v0.4 to core_v0.19 (`megatron/training/checkpointing.py`,
//! `core/dist_checkpointing`, `core/optimizer/distrib_optimizer.py`).

mod dcp;
pub(super) mod fsdp;
pub(super) mod torch_dist;
pub(super) mod zarr;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Origin, Problem, RunState, Section};
use crate::containers::torch::{TorchFile, ValueId};
use crate::layout::rules::Rules;
use crate::layout::{ArgName, Global, RunArgs, from_global};
use crate::names::megatron::{optimizer_state_name, without_wrappers};
use crate::names::{Name, Naming};
use crate::storage::FileSet;
use crate::tensor::LogicalTensor;

use super::probe::{Probe, SmallFile};
use super::roots::Root;
use super::state::{args_of, state_at};
use super::walk::Bounds;
use super::{OpenError, OpenOptions};

/// The file that says which backend wrote a checkpoint. It is written last.
const METADATA: &str = "metadata.json";
/// The file of everything that is no tensor of any rank's own, up to core 0.18; later it is an object among the others.
const COMMON: &str = "common.pt";
/// A checkpoint within a checkpoint, which NVIDIA's model optimizer keeps for itself.
const MODELOPT: &str = "modelopt_state";

/// Folders of Megatron Bridge and NeMo with a checkpoint in them, and those of the roles in verl's.
const USUAL_FOLDERS: &[&str] = &["weights", "dist_ckpt", "actor", "critic"];

/// The name of the backend that `metadata.json` gives; `None` where there is no such file or it says none.
fn backend(folder: &Probe) -> Result<Option<String>, OpenError> {
    let SmallFile::Text(text) = folder.small_file(METADATA)? else { return Ok(None) };
    let content: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let name = content.get("sharded_backend").and_then(|name| name.as_str());
    Ok(name.map(str::to_owned))
}

/// A tensor of a distributed checkpoint.
struct Stored {
    key: Arc<str>,
    tensor: LogicalTensor,
    /// The shape of the parameter, where this is a grid of flattened parts of it.
    flattened: Option<Vec<u64>>,
}

/// The contents of a checkpoint as a backend finds them.
struct Found {
    files: FileSet,
    tensors: Vec<Stored>,
    /// The keys of objects that are no tensors.
    objects: Vec<String>,
    common: Common,
    problems: Vec<Problem>,
    notes: Vec<String>,
    /// Files with tensors in them.
    shards: usize,
}

/// The state of the run, which the checkpoint holds once for all ranks.
#[derive(Debug, Default)]
struct Common {
    args: BTreeMap<String, PlainValue>,
    /// The file with the arguments in it.
    args_file: PathBuf,
    /// Everything else.
    state: RunState,
    iteration: Option<u64>,
}

impl Common {
    /// Reads it from a dict.
    fn read(torch: &TorchFile, root: ValueId, path: &Path) -> (Self, Vec<Problem>) {
        let values = torch.values();
        let mut bounds = Bounds::new(path);
        let args = values.dict_get(root, "args");
        if values.mapping(root).is_none() {
            bounds.problem("", "holds no dict of what the run says of itself");
        }
        let mut common = Self {
            args: args.and_then(|args| args_of(torch, args, &mut bounds)).unwrap_or_default(),
            args_file: path.to_path_buf(),
            state: RunState::default(),
            iteration: values.dict_get(root, "iteration").and_then(|id| values.as_u64(id)),
        };
        for (key, value) in state_at(torch, root, |key| key != "args") {
            common.state.insert(key, path, value);
        }
        (common, bounds.into_problems())
    }

    /// `common.pt`; `None` where there is no such file. Without it the tensors are the same, so a damaged one is a problem only.
    fn of_folder(folder: &Path, files: &mut FileSet) -> Option<(Self, Vec<Problem>)> {
        let path = folder.join(COMMON);
        path.symlink_metadata().ok()?;
        let added = files.add(&path).map_err(|error| Problem::of_file(&path, error));
        let opened = added.and_then(|file| {
            let opened = TorchFile::open(files, files.whole(file));
            opened.map_err(|error| Problem::of_file(&path, error))
        });
        Some(match opened {
            Ok(torch) => Self::read(&torch, torch.root(), &path),
            Err(problem) => (Self::default(), vec![problem]),
        })
    }

    /// The way in which the distributed optimizer cut its state, where it says so.
    fn optimizer_sharding(&self) -> Option<&str> {
        let text = |outer, inner| self.state.get(outer)?.as_map()?.get(inner)?.as_text();
        text("optimizer", "param_state_sharding_type")
            .or_else(|| text("content_metadata", "distrib_optim_sharding_type"))
    }
}

/// The thing that a key names.
#[derive(Debug, PartialEq, Eq)]
enum Key<'k> {
    /// A parameter.
    Weight(&'k str),
    /// A state of the optimizer for a parameter.
    State { state: &'k str, name: &'k str },
    /// A state of the optimizer for all the parameters of a bucket. Each of several optimizers counts its buckets from 0.
    Bucket { chain: &'k str, state: &'k str, bucket: &'k str },
    /// Something else of the optimizer.
    Optimizer(&'k str),
}

/// `[chained_<k>.]optimizer.state.<state>.<parameter>`, `[chained_<k>.]optimizer.distributed.<bucket>.<state>`, else a weight.
fn parse(key: &str) -> Key<'_> {
    let chain = key.strip_prefix("chained_").and_then(|rest| {
        let digits = rest.find('.').filter(|&end| rest[..end].bytes().all(|c| c.is_ascii_digit()));
        digits.map(|digits| &key[..="chained_".len() + digits])
    });
    let chain = chain.unwrap_or("");
    let Some(of_optimizer) = key[chain.len()..].strip_prefix("optimizer.") else {
        return Key::Weight(key);
    };
    if let Some((state, name)) =
        of_optimizer.strip_prefix("state.").and_then(|rest| rest.split_once('.'))
    {
        return Key::State { state, name };
    }
    match of_optimizer.rsplit_once('.') {
        Some((bucket, state)) if bucket.starts_with("distributed.") => {
            Key::Bucket { chain, state, bucket }
        }
        _ => Key::Optimizer(of_optimizer),
    }
}

/// The states that the optimizer stored for whole groups of parameters.
#[derive(Default)]
struct Buckets {
    tensors: Vec<(Name, LogicalTensor)>,
    /// Objects with the states of a group of ranks in them, without any names.
    nameless: Vec<String>,
}

/// Puts the contents that a backend found under canonical names.
fn into_catalog(
    found: Found,
    format: &'static str,
    located: &Root,
    options: &OpenOptions,
    parse: impl Fn(&str) -> Key<'_>,
) -> Catalog {
    let Found { files, tensors, objects, common, problems, notes, shards } = found;
    let run_args = RunArgs::new(common.args.clone(), &options.run_args);
    let wants_optimizer = options.wants(Section::Optimizer);
    let mut buckets = Buckets::default();
    let mut globals = Vec::new();
    let mut states: BTreeSet<Arc<str>> = BTreeSet::new();
    for Stored { key, tensor, flattened } in tensors {
        let (state, name) = match parse(&key) {
            Key::Weight(name) => (None, name),
            _ if !wants_optimizer => continue,
            Key::State { state, name } => (Some(optimizer_state_name(state).into()), name),
            Key::Bucket { chain, state, bucket } => {
                let name = format!("optimizer.{}.{chain}{bucket}", optimizer_state_name(state));
                buckets.tensors.push((Name::new(name), tensor));
                continue;
            }
            Key::Optimizer(rest) => {
                buckets.tensors.push((Name::new(format!("optimizer.{rest}")), tensor));
                continue;
            }
        };
        states.extend(state.clone());
        let name = without_wrappers(name).to_owned();
        globals.push(Global { stored_name: Arc::clone(&key), state, name, tensor, flattened });
    }
    if wants_optimizer {
        let has_states =
            |key: &&String| key.contains("optimizer.distributed.") && key.contains(".param_state/");
        buckets.nameless = objects.iter().filter(has_states).cloned().collect();
    }
    let rules = Rules::new(&options.rules);
    let assembly = from_global(globals, &run_args, &rules);
    let origin = Origin {
        format,
        layout: layout_text(&run_args),
        iteration: common.iteration.or(located.iteration),
        shards,
        left_out: objects.len() + assembly.buffers,
        naming: Naming::Canonical,
        ..Origin::default()
    };
    let sharding = common.optimizer_sharding().map(str::to_owned);
    let mut catalog = CatalogBuilder::new(origin, files).with_rules(&options.rules);
    catalog.problems(problems);
    catalog.notes(notes);
    catalog.add_run_state(common.state);
    catalog.add_args(&common.args_file, &run_args);
    for (name, error) in assembly.problems {
        catalog.problem(Problem::of_tensor(name, error));
    }
    let mut merged = assembly.tensors;
    merged.retain(|name, _| options.wants(Section::of(name.as_str())));
    catalog.add_merged(merged);
    add_buckets(&mut catalog, buckets, sharding.as_deref());
    let prefixes = states.iter().map(|state| format!("optimizer.{state}."));
    let model = options.wants(Section::Model).then(String::new);
    for prefix in model.into_iter().chain(prefixes) {
        catalog.tie_output_layer(&prefix, None, &run_args);
    }
    if located.path.join(MODELOPT).is_dir() {
        catalog.note(format!("left out {MODELOPT}, which is no part of the model"));
    }
    catalog.finish()
}

/// Buckets go in under their own names: only one of the same layout is comparable.
fn add_buckets(catalog: &mut CatalogBuilder<'_>, buckets: Buckets, sharding: Option<&str>) {
    let kind = sharding.map(|kind| format!(" ({kind})")).unwrap_or_default();
    if !buckets.tensors.is_empty() {
        catalog.note(format!(
            "the optimizer's states are stored by bucket{kind}, without the names of parameters: a bucket is compared with \
             the same bucket only, and what lies between its parameters is not initialised"
        ));
    }
    for (name, tensor) in buckets.tensors {
        catalog.add(name, tensor);
    }
    for key in buckets.nameless {
        let message = format!(
            "holds the optimizer's states of a group of ranks{kind} without the names of parameters, so they cannot be compared"
        );
        catalog.problem(Problem::of_tensor(key, message));
    }
}

/// The layout of the run that wrote it, which shows in nothing but its own words.
fn layout_text(run_args: &RunArgs) -> String {
    let axes = [
        ("tp", ArgName::TENSOR_MODEL_PARALLEL_SIZE, true),
        ("pp", ArgName::PIPELINE_MODEL_PARALLEL_SIZE, true),
        ("ep", ArgName::EXPERT_MODEL_PARALLEL_SIZE, false),
    ];
    let sizes = axes.iter().filter_map(|(axis, fact, always)| {
        let size = run_args.size(*fact).filter(|&size| *always || size > 1)?;
        Some(format!("{axis}{size}"))
    });
    sizes.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_optimizer_are_told_from_weights() {
        let state = |state, name| Key::State { state, name };
        for (key, expected) in [
            ("decoder.final_layernorm.weight", Key::Weight("decoder.final_layernorm.weight")),
            (
                "optimizer.state.exp_avg.output_layer.weight",
                state("exp_avg", "output_layer.weight"),
            ),
            (
                "chained_1.optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight",
                state("fp32_param", "decoder.layers.mlp.linear_fc1.weight"),
            ),
            (
                "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_1.exp_avg",
                Key::Bucket {
                    chain: "chained_1.",
                    state: "exp_avg",
                    bucket: "distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_1",
                },
            ),
            ("optimizer.other", Key::Optimizer("other")),
        ] {
            assert_eq!(parse(key), expected, "{key}");
        }
    }
}
