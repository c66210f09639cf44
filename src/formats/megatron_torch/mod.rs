//! Megatron-LM and MindSpeed `torch` checkpoints: a folder for each rank, `model_optim_rng.pt` in each.
//!
//! ```text
//! rank_folders   mp_rank_TT[_PPP][_EEE]/: which ranks there are, and the files of each
//!      │
//! rank_file      model_optim_rng.pt: model chunks, args, state of the run
//!      │
//! identity       the rank and layout that each says, against its folder and the others; masters: whose they are
//!      │
//! optimizer      its `optimizer` entry, and distrib_optim.pt: chained optimizers -> param groups, or buckets of a
//!      │         buffer -> parameters -> the states of each, in its shape and under its stored name
//! assembly       tensors and states of all ranks -> layout -> Catalog: `<name>` and `optimizer.<state>.<name>`
//! ```
//!
//! Facts from Megatron-LM v1.0 to core_v0.19 (`megatron/training/checkpointing.py`: `get_checkpoint_name`,
//! `generate_state_dict`, `save_checkpoint`) and MindSpeed (`core/multi_modal/dist_train`).

mod assembly;
mod identity;
mod masters;
mod optimizer;
mod rank_file;
mod rank_folders;

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::base::in_order::InOrder;
use crate::catalog::{Catalog, Extent, Problem, Section};
use crate::containers::torch::TorchFile;
use crate::formats::files::{add, open_torch};
use crate::layout::{ArgName, ParallelLayout, RankCoord, RankName, RunArgs};
use crate::storage::{FileId, FileSet};

use self::assembly::RankedCheckpoint;
use self::identity::{Gathered, Members};
use self::rank_file::RankFile;
use self::rank_folders::{
    MODEL_FILES, RankGrid, distrib_optim_beside, is_dist_train, model_file, rank_folders,
    sizes_text,
};
use super::error::OpenError;
use super::format::{Format, OpenOptions};
use super::identity::refuse;
use super::iterations::{self, ITERATION, LOOKED_FOR};
use super::probe::{OpenedTorch, Probe};
use super::roots::{Claim, FILE, Root, Score, step_behind};

/// `megatron-torch`: `--ckpt-format torch`, and all there was before it had a name.
pub(super) const FORMAT: Format = Format {
    name: "megatron-torch",
    looked_for: &[LOOKED_FOR[0], LOOKED_FOR[1], "mp_rank_* folders", MODEL_FILES[0]],
    usual_folders: &[],
    rank_folders: &["mp_rank_"],
    claim,
    read,
};

/// Claims a save folder, an iteration by the names of its rank folders, a rank folder, and a file by the keys in it.
fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if let Some(iteration) = iterations::newest(probe)? {
        return Ok(Some(iteration));
    }
    if probe.is_file() {
        let is_rank = probe.torch_says(is_megatron)?;
        return Ok(is_rank.then(|| Claim::here(Score::Keys, FILE)));
    }
    let is_rank = |name: &str| RankName::parse(name).is_some() || is_dist_train(name);
    let is_own = model_file(probe).is_some() || probe.names().any(is_rank);
    Ok(is_own.then(|| Claim::here(Score::Names, FORMAT.name)))
}

/// Whether a file's top level is that of a Megatron rank.
fn is_megatron(torch: &TorchFile) -> bool {
    let has = |key| torch.values().dict_get(torch.root(), key).is_some();
    (has("model") || has("model0"))
        && ["args", "checkpoint_version", "iteration"].into_iter().any(has)
}

fn read(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    if root.probe.is_file() {
        let OpenedTorch { files, file, torch } = root.probe.take_torch()?;
        return read_single(root, files, file, &torch, options);
    }
    let mut files = FileSet::default();
    if let Some(path) = model_file(&root.probe) {
        let file = add(&mut files, &path)?;
        let torch = open_torch(&files, file)?;
        return read_single(root, files, file, &torch, options);
    }
    let folders = rank_folders(&root.probe, &mut files, options)?;
    let ranks: Vec<RankFile> = folders
        .par_iter()
        .enumerate()
        .map(|(index, folder)| {
            let torch = open_torch(&files, folder.model)?;
            let mut rank = RankFile::read(&files, folder.model, &torch);
            if options.wants(Section::Optimizer) {
                rank.read_optimizer(&files, &torch, folder.distrib_optim, &options.run_args);
            }
            if index > 0 {
                // The run says the same of itself in every file.
                rank.state.clear();
            }
            Ok::<_, OpenError>(rank)
        })
        .in_order()?;
    let has_optimizer = ranks.iter().any(|rank| rank.has_optimizer);
    let step = step_behind(ITERATION, &root.probe.name());
    let gathered = Gathered { path: &root.path, step, folders: &folders, ranks: &ranks, options };
    let speaker = gathered.speaker();
    let args = ranks.get(speaker).and_then(|rank| rank.args.clone()).unwrap_or_default();
    let run_args = RunArgs::new(args, &options.run_args);
    let of_layout = |source| OpenError::Layout { path: root.path.clone(), source };
    let Members { naming, own, stray } = gathered.members(speaker, &run_args).map_err(of_layout)?;
    let names = own.iter().map(|&at| &folders[at].name);
    let grid = RankGrid::new(&root.path, names, naming, &run_args).map_err(of_layout)?;
    grid.check_complete(&run_args, options)?;

    let RankGrid { coords, layout, .. } = grid;
    let placed: Vec<(usize, RankCoord)> = own.iter().copied().zip(coords).collect();
    let mut foreign = gathered.foreign(&files, speaker, &placed, &layout)?;
    foreign.extend(stray);
    let mut notes = refuse(foreign, options)?;
    notes.extend(undeclared_ranks(&layout, &run_args));
    let mut places: BTreeMap<usize, RankCoord> = placed.into_iter().collect();
    let ranks = ranks.into_iter().enumerate();
    let ranks = ranks.filter_map(|(at, rank)| Some((places.remove(&at)?, rank))).collect();
    let checkpoint = RankedCheckpoint { root, files, layout, run_args, ranks, notes };
    let mut catalog = checkpoint.into_catalog(FORMAT.name, options);
    if options.wants(Section::Optimizer) {
        note_unread_optimizer(&root.probe, &mut catalog)?;
    } else if has_optimizer {
        catalog.origin.unread.insert(Section::Optimizer, None);
    }
    Ok(catalog)
}

/// Notes on axes along which there are more ranks than `args` says; all of them are read.
fn undeclared_ranks(layout: &ParallelLayout, run_args: &RunArgs) -> Vec<String> {
    let axes = [
        (ArgName::TENSOR_MODEL_PARALLEL_SIZE, layout.tp),
        (ArgName::PIPELINE_MODEL_PARALLEL_SIZE, layout.pp),
        (ArgName::EXPERT_MODEL_PARALLEL_SIZE, layout.ep),
    ];
    let note = |(arg, found): (ArgName, u64)| {
        let declared = run_args.size(arg).filter(|&declared| declared < found)?;
        Some(format!("args says {arg}={declared}, the folders make it {found}"))
    };
    axes.into_iter().filter_map(note).collect()
}

/// Notes optimizer state that is not read: a shard for every data-parallel rank.
fn note_unread_optimizer(probe: &Probe, catalog: &mut Catalog) -> Result<(), OpenError> {
    let mut folders = Vec::new();
    for name in probe.names().filter(|name| name.starts_with(FORMAT.rank_folders[0])) {
        folders.extend(probe.child(name)?);
    }
    let first = |name: &str| {
        folders.iter().find(|folder| folder.has(name)).map(|folder| folder.path().join(name))
    };
    const WHAT: &str = "optimizer shards of data-parallel ranks are not put together";
    // Folders of their own (Megatron-LM 2022-03 to 2023-05, `megatron/checkpointing.py`): nothing else is of the optimizer.
    if let Some(file) = first("optim.pt") {
        let file = file.display();
        catalog.notes.push(format!(
            "{file} and others: {WHAT}; to compare it, save it with Megatron-LM 23.06 or newer"
        ));
    }
    // Muon's (core 0.16, `core/optimizer/layer_wise_optimizer.py`), which may be a part of the optimizer only.
    if let Some(file) = first("layer_wise_optimizer_0.pt") {
        let message = format!("{WHAT}; save it with --ckpt-format torch_dist");
        catalog.problems.push(Problem::of_file(file, message));
    }
    Ok(())
}

/// Reads one rank's file on its own, as if it were the whole.
fn read_single(
    root: &Root,
    mut files: FileSet,
    file: FileId,
    torch: &TorchFile,
    options: &OpenOptions,
) -> Result<Catalog, OpenError> {
    let mut rank = RankFile::read(&files, file, torch);
    if options.wants(Section::Optimizer) {
        let distrib_optim = distrib_optim_beside(&mut files, file, options)?;
        rank.read_optimizer(&files, torch, distrib_optim, &options.run_args);
    }
    let foreign = identity::foreign_alone(&files, &root.path, (file, &rank), options)?;
    let mut notes = refuse(foreign, options)?;
    let mut run_args = RunArgs::new(rank.args.clone().unwrap_or_default(), &options.run_args);
    let whole = ParallelLayout::new(&[RankCoord::default()], &run_args);
    let layout = ParallelLayout::single(&run_args)
        .map_err(|source| OpenError::Layout { path: root.path.clone(), source })?;
    let mut extent = Extent::Whole;
    if rank.args.is_none() {
        extent = Extent::Part;
        notes
            .push("one rank, of how many nobody says: compared as the shard that it is".to_owned());
    }
    match whole {
        Ok(whole) if whole.tp * whole.pp * whole.ep == 1 => {}
        Ok(whole) => {
            run_args.forget_other_stages();
            extent = Extent::Part;
            let sizes = sizes_text(&whole);
            notes.push(format!("one shard of {sizes}, compared as the shard that it is"));
        }
        Err(_) => extent = Extent::Part,
    }
    let ranks = vec![(RankCoord::default(), rank)];
    let checkpoint = RankedCheckpoint { root, files, layout, run_args, ranks, notes };
    let mut catalog = checkpoint.into_catalog(FORMAT.name, options);
    catalog.origin.extent = extent;
    Ok(catalog)
}
