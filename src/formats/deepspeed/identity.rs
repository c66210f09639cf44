//! The files of a tag against each other and their places: what each says of the run, and partitions that are there twice.
//!
//! A file does not say its own rank but by the name under which it was written, which a torch archive keeps, and a partition
//! by the parameters that it holds. The tag is any text that the user likes, so that a number in it proves nothing: one
//! that is not that of the files is noted (DeepSpeed 0.3 to 0.19, `runtime/engine.py`: `_save_checkpoint`,
//! `_save_zero_checkpoint`; `runtime/zero/stage_1_and_2.py`, `stage3.py`: `state_dict`).

use std::collections::BTreeMap;
use std::path::Path;

use crate::base::plain::PlainValue;
use crate::formats::error::OpenError;
use crate::formats::format::OpenOptions;
use crate::formats::identity::{Witness, foreign, refuse, saved_elsewhere, shared_args};
use crate::formats::roots::{DEEPSPEED, step_behind};
use crate::storage::{FileId, FileSet};

use super::folder::are_of_different_places;
use super::ranks::Run;
use super::states::{BareStates, ModelStates, Tensors, ZeroStates};
use super::zero;

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
            sign: sign(&model.path, model.saved_as.as_deref()),
            facts,
            unique: is_unique.then_some(*file),
            ..Witness::default()
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
    models: &BTreeMap<u64, Vec<ModelStates>>,
    files: &FileSet,
    options: &OpenOptions,
) -> Result<Vec<String>, OpenError> {
    let mut owners: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    for (mp, models) in models {
        let of_rank = partitions.range((*mp, 0)..=(*mp, u64::MAX));
        let (places, ranks): (Vec<_>, Vec<_>) = of_rank.map(|(at, (_, rank))| (*at, rank)).unzip();
        let shapes = models.first().map_or(&[][..], |model| &model.param_shapes);
        let found = places.into_iter().zip(zero::owners(shapes, &ranks));
        owners.extend(found.filter_map(|(at, owner)| Some((at, owner?))));
    }
    let witness = |((mp, dp), (file, states)): (&(u64, u64), &(FileId, ZeroStates))| {
        let owner = owners.get(&(*mp, *dp));
        let owner = owner.map(|owner| format!("holds the parameters of dp rank {owner}"));
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
            sign: sign(&states.path, states.saved_as.as_deref()).or(owner),
            facts,
            unique: is_unique.then_some(*file),
            ..Witness::default()
        }
    };
    let witnesses: Vec<Witness> = partitions.iter().map(witness).collect();
    refuse(foreign(files, &witnesses, None, options)?, options)
}

/// Refuses layers and experts that were written as those of other places, or notes that they are let pass. Nothing else is held
/// against them: a layer of norms is the same on every rank.
///
/// # Errors
/// There are some.
pub(super) fn check_bare<'a>(
    places: impl Iterator<Item = (String, &'a BareStates)>,
    files: &FileSet,
    options: &OpenOptions,
) -> Result<Vec<String>, OpenError> {
    let witness = |(place, BareStates { path, saved_as, .. }): (String, &BareStates)| Witness {
        path: path.clone(),
        place,
        sign: sign(path, saved_as.as_deref()),
        ..Witness::default()
    };
    let witnesses: Vec<Witness> = places.map(witness).collect();
    refuse(foreign(files, &witnesses, None, options)?, options)
}

fn sign(path: &Path, saved_as: Option<&str>) -> Option<String> {
    saved_elsewhere(path, saved_as, are_of_different_places)
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
