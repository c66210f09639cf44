//! Megatron-LM and MindSpeed `torch` checkpoints: a folder a rank, `model_optim_rng.pt` in each.
//!
//! Facts from Megatron-LM v1.0 to core_v0.19 (`megatron/training/checkpointing.py`: `get_checkpoint_name`,
//! `generate_state_dict`, `save_checkpoint`) and MindSpeed (`core/multi_modal/dist_train`).

mod assembly;
mod buffer_plan;
mod distrib_optim;
mod groups;
mod optimizer;
mod rank_file;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::catalog::{Catalog, Problem, Section};
use crate::containers::torch::TorchFile;
use crate::layout::{FolderNaming, ParallelLayout, RankCoord, RankName, RunArgs};
use crate::names::printable;
use crate::storage::{FileId, FileSet};

use self::assembly::{Ranks, sizes_text};
pub(super) use self::optimizer::state_name;
use self::rank_file::{DISTRIBUTED, RankFile};
use super::{Format, Located, MissingShard, OpenError, OpenOptions};

/// `megatron-torch`: `--ckpt-format torch`, and all there was before it had a name.
pub(super) const FORMAT: Format = Format { name: "megatron-torch", detect, read };

/// The model file of a rank, by era: `model_rng.pt` where the optimizer had folders of its own (2022-03 to 2023-05).
const MODEL_FILES: [&str; 2] = ["model_optim_rng.pt", "model_rng.pt"];

fn detect(path: &Path) -> bool {
    if model_file(path).is_some() {
        return true;
    }
    let names = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| RankName::parse(&name).is_some() || is_dist_train(&name))
}

/// The model file of a rank: whatever is in its place. What cannot be read there, or not even
/// looked at, is no reason to go on without the rank.
fn model_file(folder: &Path) -> Option<PathBuf> {
    let is_there = |path: &PathBuf| match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    };
    MODEL_FILES.iter().map(|name| folder.join(name)).find(is_there)
}

/// MindSpeed's multimodal training puts several models side by side: `mp_{model}_rank_TT`.
fn is_dist_train(folder: &str) -> bool {
    let model = folder.strip_prefix("mp_").and_then(|rest| rest.split_once("_rank_"));
    model.is_some_and(|(model, _)| !model.is_empty())
}

/// Whether a file's top level is that of a Megatron rank.
pub(super) fn is_megatron(torch: &TorchFile) -> bool {
    let has = |key| torch.values().dict_get(torch.root(), key).is_some();
    (has("model") || has("model0"))
        && ["args", "checkpoint_version", "iteration"].into_iter().any(has)
}

fn read(located: &Located, options: &OpenOptions) -> Result<Catalog, OpenError> {
    if let Some(path) = model_file(&located.path) {
        let mut files = FileSet::default();
        let file = add(&mut files, &path)?;
        let torch = open(&files, file)?;
        return read_single(located, files, file, &torch, options);
    }
    let mut files = FileSet::default();
    let folders = rank_folders(&located.path, &mut files, options)?;
    let opened: Vec<RankFile> = folders
        .par_iter()
        .enumerate()
        .map(|(index, folder)| {
            let torch = open(&files, folder.file)?;
            let mut rank = RankFile::read(&files, folder.file, &torch);
            if options.wants(Section::Optimizer) {
                rank.read_optimizer(&files, &torch, folder.optimizer, &options.run_args);
            }
            if index > 0 {
                // The run says the same of itself in every file.
                rank.state.clear();
            }
            Ok(rank)
        })
        .collect::<Result<_, OpenError>>()?;
    let args = opened.iter().find_map(|rank| rank.args.clone()).unwrap_or_default();
    let run_args = RunArgs::new(args, &options.run_args);

    let naming = naming(located, &folders, &opened, &run_args)?;
    let coords: Vec<RankCoord> = folders.iter().map(|folder| naming.coord(&folder.name)).collect();
    let in_layout = |source| OpenError::Layout { path: located.path.clone(), source };
    let layout = ParallelLayout::new(&coords, &run_args).map_err(in_layout)?;
    let present: BTreeSet<RankCoord> = coords.iter().copied().collect();
    check_present(located, &layout, naming, &present, &run_args, options)?;

    let mut ranks = Ranks { located, files, layout, run_args, notes: Vec::new() };
    ranks.note_sizes();
    let mut catalog = ranks.into_catalog(coords.into_iter().zip(opened).collect(), options);
    if options.wants(Section::Optimizer) {
        tell_unread_optimizer(&located.path, &mut catalog);
    }
    Ok(catalog)
}

/// An optimizer may keep a part for every data parallel rank, which is not put together.
fn tell_unread_optimizer(path: &Path, catalog: &mut Catalog) {
    let folders = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
    folders.sort();
    let first =
        |name: &str| folders.iter().map(|folder| folder.join(name)).find(|file| file.is_file());
    const WHAT: &str = "a part of the optimizer for each data parallel rank is not put together";
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
        catalog.problems.push(Problem { file: Some(file), tensor: None, message });
    }
}

/// One rank's file on its own, looked at as if it were the whole.
pub(super) fn read_single(
    located: &Located,
    mut files: FileSet,
    file: FileId,
    torch: &TorchFile,
    options: &OpenOptions,
) -> Result<Catalog, OpenError> {
    let mut rank = RankFile::read(&files, file, torch);
    if options.wants(Section::Optimizer) {
        let beside = beside(&mut files, file, options)?;
        rank.read_optimizer(&files, torch, beside, &options.run_args);
    }
    let mut run_args = RunArgs::new(rank.args.clone().unwrap_or_default(), &options.run_args);
    let whole = ParallelLayout::new(&[RankCoord::default()], &run_args);
    let layout = ParallelLayout::single(&run_args)
        .map_err(|source| OpenError::Layout { path: located.path.clone(), source })?;
    run_args.forget_other_stages();
    let mut notes = Vec::new();
    if let Ok(whole) = whole
        && whole.tp * whole.pp * whole.ep > 1
    {
        let sizes = sizes_text(&whole);
        notes.push(format!("one shard of {sizes}, compared as the shard that it is"));
    }
    let ranks = Ranks { located, files, layout, run_args, notes };
    Ok(ranks.into_catalog(vec![(RankCoord::default(), rank)], options))
}

/// A rank's folder and the files in it.
struct RankFolder {
    name: RankName,
    file: FileId,
    /// The tensors of a distributed optimizer.
    optimizer: Option<FileId>,
}

fn add(files: &mut FileSet, path: &Path) -> Result<FileId, OpenError> {
    files.add(path).map_err(|source| OpenError::Io { path: path.to_path_buf(), source })
}

fn open(files: &FileSet, file: FileId) -> Result<TorchFile, OpenError> {
    TorchFile::open(files, files.whole(file))
        .map_err(|source| OpenError::Torch { path: files.path(file).to_path_buf(), source })
}

/// `distrib_optim.pt` beside a model file, where it is wanted and there.
fn beside(
    files: &mut FileSet,
    model: FileId,
    options: &OpenOptions,
) -> Result<Option<FileId>, OpenError> {
    let path = files.path(model).with_file_name(DISTRIBUTED);
    let is_there = options.wants(Section::Optimizer) && path.symlink_metadata().is_ok();
    is_there.then(|| add(files, &path)).transpose()
}

/// The folders that hold a model file, in the order of their ranks. One without is an optimizer's and no shard.
fn rank_folders(
    path: &Path,
    files: &mut FileSet,
    options: &OpenOptions,
) -> Result<Vec<RankFolder>, OpenError> {
    let io_error = |source| OpenError::Io { path: path.to_path_buf(), source };
    let mut found: BTreeMap<RankName, String> = BTreeMap::new();
    for entry in std::fs::read_dir(path).map_err(io_error)? {
        let text = entry.map_err(io_error)?.file_name().to_string_lossy().into_owned();
        if is_dist_train(&text) {
            let what = format!(
                "{} is one of several models of a multimodal run (MindSpeed dist_train), \
                 whose ranks have numbers of their own; compare the rank folders one by one",
                printable(&text)
            );
            return Err(OpenError::Content { path: path.to_path_buf(), what });
        }
        let Some(name) = RankName::parse(&text) else { continue };
        if model_file(&path.join(&text)).is_none() {
            continue;
        }
        if let Some(other) = found.insert(name, text.clone()) {
            let what = format!("{text} and {other} are the same rank");
            return Err(OpenError::Content { path: path.to_path_buf(), what });
        }
    }
    if found.is_empty() {
        return Err(OpenError::Unrecognized {
            path: path.to_path_buf(),
            looked_for: "model_optim_rng.pt in the mp_rank_* folders",
        });
    }
    let folder = |(name, text): (RankName, String)| {
        let path = model_file(&path.join(&text)).unwrap_or_default();
        let file = add(files, &path)?;
        Ok(RankFolder { name, file, optimizer: beside(files, file, options)? })
    };
    found.into_iter().map(folder).collect()
}

/// What the numbers of the folders mean; where neither their form nor `args` tells, what is in them does:
/// expert parallel ranks hold the same dense layers, pipeline stages do not.
fn naming(
    located: &Located,
    folders: &[RankFolder],
    opened: &[RankFile],
    run_args: &RunArgs,
) -> Result<FolderNaming, OpenError> {
    let names: Vec<RankName> = folders.iter().map(|folder| folder.name.clone()).collect();
    let told = FolderNaming::of(&names, run_args)
        .map_err(|source| OpenError::Layout { path: located.path.clone(), source })?;
    if let Some(naming) = told {
        return Ok(naming);
    }
    let dense: BTreeSet<BTreeSet<&str>> = opened.iter().map(RankFile::dense_names).collect();
    Ok(if dense.len() == 1 && folders.len() > 1 { FolderNaming::TpEp } else { FolderNaming::TpPp })
}

fn check_present(
    located: &Located,
    layout: &ParallelLayout,
    naming: FolderNaming,
    present: &BTreeSet<RankCoord>,
    run_args: &RunArgs,
    options: &OpenOptions,
) -> Result<(), OpenError> {
    let missing = layout.missing(present);
    if missing.is_empty() {
        return Ok(());
    }
    let says = match (options.run_args.is_empty(), run_args.are_known()) {
        (false, _) => "the checkpoint and --set say",
        (true, true) => "the checkpoint says",
        (true, false) => "the other folders make it",
    };
    let has_experts = layout.ep > 1 || run_args.size("num_experts").is_some_and(|count| count > 0);
    let hint = if has_experts && layout.etp < layout.tp {
        "; Megatron-Core 0.10 to 0.18.0 never writes some of them in this layout"
    } else if layout.ep > 1 && run_args.get("expert_tensor_parallel_size").is_none() {
        "; if experts are not split like dense layers, say --set expert_tensor_parallel_size=1"
    } else {
        ""
    };
    let shards = missing.into_iter().map(|(rank, part)| {
        let naming = naming.with_axes(layout);
        let path = located.path.join(naming.folder(rank)).join(MODEL_FILES[0]);
        MissingShard {
            path,
            rank,
            why: format!("{says} {} ({part} need it{hint})", sizes_text(layout)),
        }
    });
    Err(OpenError::MissingShards { shards: shards.collect() })
}
