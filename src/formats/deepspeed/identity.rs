//! The files of a tag against each other: what each says of the run, and partitions that are there twice.
//!
//! A file does not say its own rank. The tag is any text that the user likes, so that a number in it proves nothing: one
//! that is not that of the files is noted (DeepSpeed 0.3 to 0.19, `runtime/engine.py`: `_save_checkpoint`,
//! `_save_zero_checkpoint`; `runtime/zero/stage_1_and_2.py`, `stage3.py`: `state_dict`).

use std::collections::BTreeMap;

use crate::base::plain::PlainValue;
use crate::formats::error::OpenError;
use crate::formats::format::OpenOptions;
use crate::formats::identity::{Witness, foreign, refuse, shared_args};
use crate::formats::roots::{DEEPSPEED, step_behind};
use crate::storage::{FileId, FileSet};

use super::ranks::Run;
use super::states::{ModelStates, Tensors, ZeroStates};

/// What every file with model states says of the run.
const SHARED: [&str; 3] = ["dp_world_size", "global_samples", "skipped_steps"];

/// Refuses model states of another run, layout or step than the others, or notes that they are let pass.
///
/// # Errors
/// There are some, or a file cannot be read.
pub(super) fn check_models(
    models: &[((u64, u64), FileId, ModelStates)],
    files: &FileSet,
    options: &OpenOptions,
) -> Result<Vec<String>, OpenError> {
    let witness = |((mp, dp), file, model): &((u64, u64), FileId, ModelStates)| {
        let number = |name: &str, number: Option<u64>| {
            let number = i64::try_from(number?).ok()?;
            Some((name.to_owned(), PlainValue::Int(number)))
        };
        let shared = |name: &&str| Some(((*name).to_owned(), model.state.get(*name)?.clone()));
        let version = model.version.clone().map(PlainValue::Text);
        let mut facts: Vec<(String, PlainValue)> = Vec::new();
        facts.extend(number("global_steps", model.steps));
        facts.extend(number("mp_world_size", model.mp_world));
        facts.extend(SHARED.iter().filter_map(shared));
        facts.extend(version.map(|version| ("ds_version".to_owned(), version)));
        facts.extend(
            model.state.get("iteration").map(|step| ("iteration".to_owned(), step.clone())),
        );
        facts.extend(model.args.iter().flat_map(shared_args));
        // Under ZeRO-3 there is no weight in them, and in a pipeline none in any: such ranks may well hold the same.
        let is_empty =
            |module: &Tensors| module.iter().all(|(_, weight)| weight.shape().contains(&0));
        let is_unique = *dp == 0 && !model.module.as_ref().is_none_or(is_empty);
        Witness {
            path: model.path.clone(),
            place: place(*mp, *dp),
            claim: None,
            facts,
            unique: is_unique.then_some(*file),
        }
    };
    let witnesses: Vec<Witness> = models.iter().map(witness).collect();
    refuse(foreign(files, &witnesses, None, options)?, options)
}

/// Refuses partitions of another run than the others, or that are there twice; or notes that they are let pass.
///
/// # Errors
/// There are some, or a file cannot be read.
pub(super) fn check_partitions(
    partitions: &BTreeMap<(u64, u64), (FileId, ZeroStates)>,
    files: &FileSet,
    options: &OpenOptions,
) -> Result<Vec<String>, OpenError> {
    let witness = |((mp, dp), (file, states)): (&(u64, u64), &(FileId, ZeroStates))| {
        // Stages have other groups, but share the largest one out among as many ranks.
        let count = states.partitions.iter().max().and_then(|count| i64::try_from(*count).ok());
        let count = count.map(|count| ("partition_count".to_owned(), PlainValue::Int(count)));
        let version = states.version.clone().map(PlainValue::Text);
        let mut facts: Vec<(String, PlainValue)> = count.into_iter().collect();
        facts.extend(version.map(|version| ("ds_version".to_owned(), version)));
        let flats = states.flats.values().flatten().flatten();
        let is_unique = flats.into_iter().any(|flat| !flat.shape().contains(&0));
        Witness {
            path: states.path.clone(),
            place: place(*mp, *dp),
            claim: None,
            facts,
            unique: is_unique.then_some(*file),
        }
    };
    let witnesses: Vec<Witness> = partitions.iter().map(witness).collect();
    refuse(foreign(files, &witnesses, None, options)?, options)
}

/// A note on a tag with another number than that of the step, by either of the two names that it goes by.
pub(super) fn note_on_tag(tag: &str, run: &Run<'_>) -> Option<String> {
    let (_, model) = run.firsts().next()?;
    let (named, steps) = (step_behind(DEEPSPEED, tag)?, model.steps?);
    let iteration = model.state.get("iteration").and_then(PlainValue::as_u64);
    (named != steps && iteration != Some(named))
        .then(|| format!("the tag says step {named}, its files say global_steps {steps}"))
}

fn place(mp: u64, dp: u64) -> String {
    format!("mp rank {mp}, dp rank {dp}")
}
