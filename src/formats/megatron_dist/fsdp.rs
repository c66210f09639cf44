//! `fsdp_dtensor` and `torch_dcp`: torch's distributed checkpoint of a state dict, under the modules' own names.
//!
//! Facts from Megatron-LM core_v0.14 to 0.19 (`megatron/training/checkpointing.py`, `core/transformer/fsdp_dtensor_checkpoint.py`).

use std::path::Path;

use crate::base::limits::LIMITS;
use crate::catalog::{Catalog, Problem, Section};
use crate::containers::dcp::{Checkpoint, Metadata};
use crate::storage::FileSet;

use super::{CommonState, Key, USUAL_FOLDERS, dcp, into_catalog, unread_optimizer};
use crate::formats::error::OpenError;
use crate::formats::format::{Format, OpenOptions};
use crate::formats::iterations::{self, LOOKED_FOR};
use crate::formats::probe::{OpenedMetadata, Probe};
use crate::formats::roots::{Claim, METADATA as EVIDENCE, Root, Score};
use crate::formats::state::{args_of, state_of};
use crate::formats::walk::Bounds;

/// `megatron-fsdp`: its files are those of any distributed checkpoint, so only the names of its tensors tell it.
pub(in crate::formats) const FORMAT: Format = Format {
    name: "megatron-fsdp",
    looked_for: &[LOOKED_FOR[0], LOOKED_FOR[1]],
    usual_folders: USUAL_FOLDERS,
    rank_folders: &[],
    claim,
    read,
};

/// Linears by Megatron's own names.
const LINEARS: [&str; 4] = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"];

fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if let Some(iteration) = iterations::newest(probe)? {
        return Ok(Some(iteration));
    }
    let has_linears = |metadata: &Metadata| {
        metadata.tensors.keys().any(|key| {
            let mut components = key.split('.');
            key.contains(".layers.") && components.any(|component| LINEARS.contains(&component))
        })
    };
    Ok(probe.metadata_says(has_linears)?.then(|| Claim::here(Score::Keys, EVIDENCE)))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let OpenedMetadata { files, metadata } = root.probe.take_metadata()?;
    // A state dict of the model alone has no sections.
    let has_sections = metadata.tensors.keys().any(|key| key.starts_with("model."));
    let is_other = |key: &str| has_sections && !key.starts_with("model.");
    let wanted = |key: &str| match parse(key) {
        Key::Weight(_) => !is_other(key) || is_of_run(key),
        _ => options.wants(Section::Optimizer),
    };
    let is_left_out = |key: &str| matches!(parse(key), Key::Weight(_)) && is_other(key);
    let keys = metadata.tensors.keys().filter(|key| is_left_out(key));
    let left_out: Vec<String> = keys.map(ToString::to_string).collect();
    let unread = unread_optimizer(metadata.tensors.keys().map(|key| parse(key)), options);
    let (checkpoint, mut found) = dcp::open(metadata, files, &root.path, wanted, options.values());
    found.tensors.retain(|stored| !is_left_out(&stored.key));
    let (common, problems) = of_objects(&checkpoint, &found.files, &found.objects);
    found.common = common;
    found.problems.extend(problems);
    found.objects.extend(left_out);
    let mut catalog = into_catalog(found, FORMAT.name, root, options, parse)?;
    catalog.origin.unread.extend(unread);
    Ok(catalog)
}

/// `optimizer.state.<parameter>.<state>`, else a weight.
fn parse(key: &str) -> Key<'_> {
    let Some(of_optimizer) = key.strip_prefix("optimizer.") else { return Key::Weight(key) };
    let state = of_optimizer.strip_prefix("state.").and_then(|rest| rest.rsplit_once('.'));
    match state {
        Some((name, state)) => Key::State { state, name },
        None => Key::Optimizer(of_optimizer),
    }
}

/// Tells whether an object says something of the run in few words.
fn is_of_run(key: &str) -> bool {
    let section = key.split('.').next().unwrap_or(key);
    !matches!(section, "model" | "optimizer" | "rng_state" | "rerun_state_machine")
}

/// Reads the state of the run, an object an entry.
fn of_objects(
    checkpoint: &Checkpoint,
    files: &FileSet,
    objects: &[String],
) -> (CommonState, Vec<Problem>) {
    let mut common = CommonState::default();
    let mut problems = Vec::new();
    for key in objects.iter().filter(|key| is_of_run(key)).take(LIMITS.state_entries) {
        let torch = match checkpoint.object(key, files) {
            Ok(torch) => torch,
            Err(error) => {
                problems.push(Problem::of_tensor(key, error));
                continue;
            }
        };
        let (values, root) = (torch.values(), torch.root());
        let file = checkpoint.path_of_object(key).unwrap_or_default();
        match key.as_str() {
            "args" => {
                let mut bounds = Bounds::new(Path::new(key));
                common.args = args_of(&torch, root, &mut bounds).unwrap_or_default();
                common.args_file = file;
                problems.extend(bounds.into_problems());
            }
            _ => {
                if key == "iteration" {
                    common.iteration = values.as_u64(root);
                }
                common.state.insert(key.clone(), &file, state_of(&torch, root));
            }
        }
    }
    (common, problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_come_last_in_a_key() {
        let name = "module.module.decoder.layers.0.mlp.linear_fc1.weight_w";
        let key = format!("optimizer.state.{name}.exp_avg");
        assert_eq!(parse(&key), Key::State { state: "exp_avg", name });
        assert_eq!(parse("model.a.weight"), Key::Weight("model.a.weight"));
    }
}
