//! The rank folders of a checkpoint, `mp_rank_TT[_PPP][_EEE]`, and the files in them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::catalog::Section;
use crate::formats::error::{MissingShard, OpenError};
use crate::formats::files::add;
use crate::formats::format::OpenOptions;
use crate::formats::probe::Probe;
use crate::layout::{
    ArgName, FolderNaming, LayoutError, ParallelLayout, RankCoord, RankName, RunArgs,
};
use crate::names::printable;
use crate::storage::{FileId, FileSet};

use super::optimizer::DISTRIB_OPTIM;

/// The model file of a rank, by era: `model_rng.pt` where the optimizer had folders of its own (2022-03 to 2023-05).
pub(super) const MODEL_FILES: [&str; 2] = ["model_optim_rng.pt", "model_rng.pt"];

/// A rank's folder and the files in it.
pub(super) struct RankFolder {
    pub name: RankName,
    /// The model file.
    pub model: FileId,
    /// The tensors of a distributed optimizer.
    pub distrib_optim: Option<FileId>,
}

/// The model file of a rank: anything in its place. One that cannot be read is no reason to go on without the rank.
pub(super) fn model_file(folder: &Probe) -> Option<PathBuf> {
    let name = MODEL_FILES.iter().find(|name| folder.has(name))?;
    Some(folder.path().join(name))
}

/// Whether a folder is a rank of one of several models side by side, as MindSpeed's multimodal training writes them:
/// `mp_{model}_rank_TT`.
pub(super) fn is_dist_train(folder: &str) -> bool {
    let model = folder.strip_prefix("mp_").and_then(|rest| rest.split_once("_rank_"));
    model.is_some_and(|(model, _)| !model.is_empty())
}

/// `distrib_optim.pt` beside a model file, where it is wanted and there.
pub(super) fn distrib_optim_beside(
    files: &mut FileSet,
    model: FileId,
    options: &OpenOptions,
) -> Result<Option<FileId>, OpenError> {
    if !options.wants(Section::Optimizer) {
        return Ok(None);
    }
    let path = files.path(model).with_file_name(DISTRIB_OPTIM);
    files.add_if_there(&path).map_err(OpenError::io(&path))
}

/// The folders that hold a model file, in the order of their ranks. One without is an optimizer's and no shard.
pub(super) fn rank_folders(
    probe: &Probe,
    files: &mut FileSet,
    options: &OpenOptions,
) -> Result<Vec<RankFolder>, OpenError> {
    let content = |what| OpenError::Content { path: probe.path().to_path_buf(), what };
    let mut by_rank: BTreeMap<RankName, (&str, PathBuf)> = BTreeMap::new();
    for folder in probe.names() {
        if is_dist_train(folder) {
            return Err(content(format!(
                "{} is one of several models of a multimodal run (MindSpeed dist_train), \
                 whose ranks have numbers of their own; compare the rank folders one by one",
                printable(folder)
            )));
        }
        let Some(name) = RankName::parse(folder) else { continue };
        let rank = probe.child(folder)?;
        let Some(model) = rank.and_then(|rank| model_file(&rank)) else { continue };
        if let Some((other, _)) = by_rank.insert(name, (folder, model)) {
            return Err(content(format!("{folder} and {other} are the same rank")));
        }
    }
    if by_rank.is_empty() {
        return Err(OpenError::Unrecognized {
            path: probe.path().to_path_buf(),
            looked_for: format!("{} in the mp_rank_* folders", MODEL_FILES[0]),
        });
    }
    let with_files = |(name, (_, path)): (RankName, (&str, PathBuf))| {
        let model = add(files, &path)?;
        Ok(RankFolder { name, model, distrib_optim: distrib_optim_beside(files, model, options)? })
    };
    by_rank.into_iter().map(with_files).collect()
}

/// The ranks of a checkpoint in its parallel layout.
pub(super) struct RankGrid<'a> {
    /// The folder of the checkpoint.
    pub path: &'a Path,
    /// The meaning of the numbers in the names of rank folders.
    pub naming: FolderNaming,
    /// The rank of each folder.
    pub coords: Vec<RankCoord>,
    pub layout: ParallelLayout,
}

impl<'a> RankGrid<'a> {
    /// The grid of these folders.
    ///
    /// # Errors
    /// As [`ParallelLayout::new`].
    pub(super) fn new<'n>(
        path: &'a Path,
        names: impl Iterator<Item = &'n RankName>,
        naming: FolderNaming,
        run_args: &RunArgs,
    ) -> Result<Self, LayoutError> {
        let coords: Vec<RankCoord> = names.map(|name| naming.coord(name)).collect();
        let layout = ParallelLayout::new(&coords, run_args)?;
        Ok(Self { path, naming, coords, layout })
    }

    /// Refuses a checkpoint without some of the shards that its tensors need.
    pub(super) fn check_complete(
        &self,
        run_args: &RunArgs,
        options: &OpenOptions,
    ) -> Result<(), OpenError> {
        let Self { path, naming, layout, .. } = self;
        let present: BTreeSet<RankCoord> = self.coords.iter().copied().collect();
        let missing = layout.missing(&present);
        if missing.is_empty() {
            return Ok(());
        }
        let says = match (options.run_args.is_empty(), self.is_declared(run_args)) {
            (false, _) => "the checkpoint and --set say",
            (true, true) => "the checkpoint says",
            (true, false) => "the other folders make it",
        };
        let has_experts =
            layout.ep > 1 || run_args.size(ArgName::NUM_EXPERTS).is_some_and(|count| count > 0);
        let hint = if has_experts && layout.etp < layout.tp {
            "; Megatron-Core 0.10 to 0.18.0 never writes some of them in this layout"
        } else if layout.ep > 1 && run_args.get(ArgName::EXPERT_TENSOR_PARALLEL_SIZE).is_none() {
            "; if experts are not split like dense layers, say --set expert_tensor_parallel_size=1"
        } else {
            ""
        };
        let naming = naming.with_axes(layout);
        let shards = missing.into_iter().map(|(rank, needed_by)| MissingShard {
            path: path.join(naming.folder(rank)).join(MODEL_FILES[0]),
            rank,
            why: format!("{says} {} ({needed_by} need it{hint})", sizes_text(layout)),
        });
        Err(OpenError::MissingShards { shards: shards.collect() })
    }

    /// Tells whether it is `args` that say how large the layout is, and not the names of folders.
    fn is_declared(&self, run_args: &RunArgs) -> bool {
        let axes = [
            (ArgName::TENSOR_MODEL_PARALLEL_SIZE, self.layout.tp),
            (ArgName::PIPELINE_MODEL_PARALLEL_SIZE, self.layout.pp),
            (ArgName::EXPERT_MODEL_PARALLEL_SIZE, self.layout.ep),
        ];
        run_args.are_known()
            && axes.iter().all(|(arg, size)| *size == run_args.size(*arg).unwrap_or(1))
    }
}

/// The sizes of a layout by axis: `tp=2 pp=2 ep=4 etp=1`.
pub(super) fn sizes_text(layout: &ParallelLayout) -> String {
    let mut text = format!("tp={}", layout.tp);
    let axes = [("pp", layout.pp, 1), ("ep", layout.ep, 1), ("etp", layout.etp, layout.tp)];
    for (axis, size, usual) in axes {
        if size != usual {
            text.push_str(&format!(" {axis}={size}"));
        }
    }
    text
}
