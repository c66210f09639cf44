//! A file for each rank of FSDP, as verl writes them: `model_world_size_4_rank_0.pt`, and `optim_` and `extra_state_` beside it.
//!
//! Facts from verl 0.3 to 0.6 (`verl/utils/checkpoint/fsdp_checkpoint_manager.py`): each rank saves the sharded state dict of the
//! model, that of the optimizer, and the schedule with the random states; the first one saves the `config.json` in `huggingface/`. Shards are DTensors, which say where they belong.

mod merge;
mod ranks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::base::in_order::InOrder;
use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Extent, Origin, Problem, Section};
use crate::containers::torch::DTensor;
use crate::names::Name;
use crate::names::index::number;
use crate::names::megatron::is_buffer;
use crate::storage::{self, FileId, FileSet};
use crate::tensor::LogicalTensor;

use super::error::{MissingFile, OpenError};
use super::files::add;
use super::format::{Format, OpenOptions};
use super::identity::{Witness, foreign, refuse};
use super::model_config::{read_json, tie_output};
use super::probe::Probe;
use super::roots::{Claim, FILE, Root, Score};
use ranks::{Held, RankFile};

/// `fsdp-ranks`: a torch file for each rank, whose tensors say which part of which whole they are.
pub(super) const FORMAT: Format = Format {
    name: "fsdp-ranks",
    looked_for: &["model_world_size_*_rank_*.pt"],
    usual_folders: &["actor", "critic"],
    rank_folders: &[],
    claim,
    read,
};

const MODEL: &str = "model";
const OPTIMIZER: &str = "optim";
const EXTRA: &str = "extra_state";

/// The description of the model; the weights beside it, where there are any, are a checkpoint of their own.
const CONFIG: &str = "huggingface/config.json";

/// The number of ranks and the rank that the name of such a file says: `model_world_size_4_rank_0.pt`.
fn place(kind: &str, file: &str) -> Option<(u64, u64)> {
    let (world, rank) =
        file.strip_prefix(kind)?.strip_prefix("_world_size_")?.split_once("_rank_")?;
    Some((number(world)?, number(rank.strip_suffix(".pt")?)?))
}

/// Tells whether these are the names of two files of one kind and of different ranks.
fn are_of_different_ranks(name: &str, other: &str) -> bool {
    [MODEL, OPTIMIZER, EXTRA].into_iter().any(|kind| {
        let ranks = place(kind, name).zip(place(kind, other));
        ranks.is_some_and(|(rank, other)| rank != other)
    })
}

fn file_name(kind: &str, world: u64, rank: u64) -> String {
    format!("{kind}_world_size_{world}_rank_{rank}.pt")
}

fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if probe.is_file() {
        let is_own = place(MODEL, &probe.name()).is_some();
        return Ok(is_own.then(|| Claim::here(Score::Names, FILE)));
    }
    let has_ranks = probe.names().any(|name| place(MODEL, name).is_some());
    Ok(has_ranks.then(|| Claim::here(Score::Names, FORMAT.name)))
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    if root.probe.is_file() { read_single(root) } else { read_all(root, options) }
}

/// Reads one rank's file as the shard that it is.
fn read_single(root: &Root) -> Result<Catalog, OpenError> {
    let mut files = FileSet::default();
    let file = add(&mut files, &root.path)?;
    let (rank, _) = RankFile::read_model(&files, file, 0)?;
    let origin =
        Origin { format: FORMAT.name, shards: 1, extent: Extent::Part, ..Origin::default() };
    let mut catalog = CatalogBuilder::new(origin, files).of_shard(true);
    catalog.note("one of several files, compared as the part that it is");
    catalog.problems(rank.problems);
    for (name, held) in rank.tensors {
        if is_buffer(&name) {
            catalog.origin.left_out += 1;
            continue;
        }
        let (Held::Plain(stored) | Held::Shard(DTensor { local: stored, .. })) = held;
        catalog.add(Name::new(&*name), LogicalTensor::from_stored(&stored, name.as_str()));
    }
    Ok(catalog.finish())
}

/// Reads the files of all ranks.
fn read_all(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let world = world_size(&root.probe)?;
    let origin = Origin {
        format: FORMAT.name,
        layout: format!("fsdp{world}"),
        iteration: root.iteration,
        ..Origin::default()
    };
    let mut catalog = CatalogBuilder::new(origin, FileSet::default());
    let config = read_config(&mut catalog, &root.path);
    if options.wants(Section::Model) {
        add_section(&mut catalog, root, world, Section::Model, options)?;
        if let Some(config) = config.as_ref().and_then(PlainValue::as_map) {
            tie_output(&mut catalog, config);
        }
    }
    if root.probe.names().any(|name| place(OPTIMIZER, name).is_some()) {
        match options.wants(Section::Optimizer) {
            true => add_section(&mut catalog, root, world, Section::Optimizer, options)?,
            false => drop(catalog.origin.unread.insert(Section::Optimizer, None)),
        }
    }
    add_extra_state(&mut catalog, root, world, options)?;
    Ok(catalog.finish())
}

/// The description that lies in a folder of its own beside the ranks' files, for what it says of the model; a damaged one is noted.
fn read_config(catalog: &mut CatalogBuilder<'_>, folder: &Path) -> Option<PlainValue> {
    let path = folder.join(CONFIG);
    match read_json(&path, catalog.files_mut()) {
        Ok(config) => {
            catalog.add_state(&path, config.clone().map(|config| ("config".to_owned(), config)));
            return config;
        }
        Err(error) if storage::is_of_system(&error) => {
            catalog.problem(Problem::of_file(path, error));
        }
        Err(error) => catalog.note(format!("{CONFIG}: {error}")),
    }
    None
}

/// The number of ranks that the names of the model's files say.
fn world_size(probe: &Probe) -> Result<u64, OpenError> {
    let content = |what: String| OpenError::Content { path: probe.path().to_path_buf(), what };
    let mut found: Option<u64> = None;
    for (world, rank) in probe.names().filter_map(|name| place(MODEL, name)) {
        let name = file_name(MODEL, world, rank);
        if world > LIMITS.ranks {
            let over = OverLimit::found("ranks", LIMITS.ranks, world);
            return Err(content(format!("{name} says {over}")));
        }
        if rank >= world {
            return Err(content(format!("{name} is of a rank that {world} ranks do not have")));
        }
        if let Some(other) = found.replace(world).filter(|&other| other != world) {
            let what = format!(
                "holds the files of {other} ranks and of {world} ranks; move those of one save elsewhere"
            );
            return Err(content(what));
        }
    }
    found.ok_or_else(|| content("holds no file of a rank".to_owned()))
}

/// Reads the model's or the optimizer's files of all ranks, and puts their tensors together.
fn add_section(
    catalog: &mut CatalogBuilder<'_>,
    root: &Root,
    world: u64,
    section: Section,
    options: &OpenOptions,
) -> Result<(), OpenError> {
    let kind = if section == Section::Model { MODEL } else { OPTIMIZER };
    let paths = paths(root, kind, world)?;
    let ids: Vec<FileId> =
        paths.iter().map(|path| add(catalog.files_mut(), path)).collect::<Result<_, _>>()?;
    catalog.origin.shards += ids.len();
    let files = catalog.files();
    let read: Vec<(RankFile, ranks::Groups)> = ids
        .into_par_iter()
        .zip(0..paths.len())
        .map(|(file, rank)| match section {
            Section::Model => RankFile::read_model(files, file, rank as u64),
            Section::Optimizer | Section::State => {
                RankFile::read_optimizer(files, file, rank as u64)
            }
        })
        .in_order()?;
    let (ranks, groups): (Vec<RankFile>, Vec<_>) = read.into_iter().unzip();
    let witnesses: Vec<Witness> = ranks.iter().map(RankFile::witness).collect();
    let found = foreign(files, &witnesses, None, options)?;
    catalog.notes(refuse(found, options)?);
    if let (Some(path), Some(groups)) = (paths.first(), groups.into_iter().next()) {
        catalog.add_state(path, groups);
    }
    add_merged(catalog, ranks, section);
    Ok(())
}

/// Puts the parts of all ranks together, tensor by tensor.
fn add_merged(catalog: &mut CatalogBuilder<'_>, ranks: Vec<RankFile>, section: Section) {
    let count = ranks.len();
    let mut tensors: BTreeMap<String, Vec<(u64, Held)>> = BTreeMap::new();
    for rank in ranks {
        catalog.problems(rank.problems);
        for (name, held) in rank.tensors {
            tensors.entry(name).or_default().push((rank.rank, held));
        }
    }
    let mut by_position = false;
    for (name, parts) in tensors {
        if section == Section::Model && is_buffer(&name) {
            catalog.origin.left_out += 1;
            continue;
        }
        match merge::merge(&name, parts, count) {
            Err(cause) => catalog.problem(Problem::of_tensor(name, cause)),
            Ok(tensor) if section == Section::Optimizer && ranks::is_position(&name) => {
                by_position = true;
                catalog.add_position(Name::new(name), tensor);
            }
            Ok(tensor) => catalog.add(Name::new(name), tensor),
        }
    }
    if by_position {
        catalog.note(
            "optimizer state is known by position only and compared by it: the files have no names for it",
        );
    }
}

/// Adds the schedule and the random states of the first rank; the others' differ in the random states alone, and are only held
/// to be there and whole.
fn add_extra_state(
    catalog: &mut CatalogBuilder<'_>,
    root: &Root,
    world: u64,
    options: &OpenOptions,
) -> Result<(), OpenError> {
    if !root.probe.names().any(|name| place(EXTRA, name).is_some()) {
        return Ok(());
    }
    let mut witnesses = Vec::new();
    for (rank, path) in (0..).zip(paths(root, EXTRA, world)?) {
        let file = add(catalog.files_mut(), &path)?;
        let (state, witness) = ranks::extra_state(catalog.files(), file, rank)?;
        witnesses.push(witness);
        if rank == 0 {
            catalog.add_state(&path, state);
        }
    }
    let found = foreign(catalog.files(), &witnesses, None, options)?;
    catalog.notes(refuse(found, options)?);
    Ok(())
}

/// The files of this kind of all ranks.
fn paths(root: &Root, kind: &str, world: u64) -> Result<Vec<PathBuf>, OpenError> {
    let names = (0..world).map(|rank| file_name(kind, world, rank));
    let (there, missing): (Vec<_>, Vec<_>) = names.partition(|name| root.probe.has(name));
    if missing.is_empty() {
        return Ok(there.into_iter().map(|name| root.path.join(name)).collect());
    }
    let why = format!("the names of the files beside it say that there are {world} ranks");
    let missing = missing.into_iter().map(|name| root.path.join(name));
    let files = missing.map(|path| MissingFile { path, why: why.clone() }).collect();
    Err(OpenError::MissingFiles { files })
}
