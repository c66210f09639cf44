//! Rank files against their folders: the rank, the layout and the model that `args` of each says.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::base::plain::PlainValue;
use crate::formats::error::OpenError;
use crate::formats::format::OpenOptions;
use crate::formats::identity::{FolderStep, ForeignFile, Witness, foreign, shared_args};
use crate::formats::iterations::ITERATION as ITERATION_FOLDER;
use crate::formats::roots::step_behind;
use crate::layout::{
    ArgName, FolderNaming, LayoutError, ParallelLayout, RankCoord, RankName, RankOrder, RunArgs,
};
use crate::storage::{FileId, FileSet};

use super::masters;
use super::rank_file::RankFile;
use super::rank_folders::{RankFolder, sizes_text};

/// Arguments that tell the layout, and with it the place of a rank.
const OF_LAYOUT: [&str; 12] = [
    "model_parallel_size",
    ArgName::TENSOR_MODEL_PARALLEL_SIZE.as_str(),
    ArgName::PIPELINE_MODEL_PARALLEL_SIZE.as_str(),
    ArgName::EXPERT_MODEL_PARALLEL_SIZE.as_str(),
    ArgName::EXPERT_TENSOR_PARALLEL_SIZE.as_str(),
    ArgName::CONTEXT_PARALLEL_SIZE.as_str(),
    ArgName::DATA_PARALLEL_SIZE.as_str(),
    ArgName::WORLD_SIZE.as_str(),
    ArgName::USE_TP_PP_DP_MAPPING.as_str(),
    ArgName::MOE_TP_EXTEND_EP.as_str(),
    ArgName::EXPERT_PARALLEL.as_str(),
    ArgName::NUM_EXPERTS.as_str(),
];

/// The rank files that there are, some of which may not belong to the others.
pub(super) struct Gathered<'a> {
    /// The folder of the iteration.
    pub path: &'a Path,
    /// The iteration that its name says.
    pub step: Option<u64>,
    pub folders: &'a [RankFolder],
    pub ranks: &'a [RankFile],
    pub options: &'a OpenOptions,
}

/// The rank files that make the checkpoint.
pub(super) struct Members {
    /// The meaning of the numbers in the names of their folders.
    pub naming: FolderNaming,
    /// Their indices.
    pub own: Vec<usize>,
    /// Folders that are left over from another layout.
    pub stray: Vec<ForeignFile>,
}

impl Gathered<'_> {
    /// The file whose `args` speak for all: of the layout that most files say and that is whole by itself.
    pub(super) fn speaker(&self) -> usize {
        let mut by_layout: BTreeMap<(usize, String), Vec<usize>> = BTreeMap::new();
        for (at, rank) in self.ranks.iter().enumerate().filter(|(_, rank)| rank.args.is_some()) {
            let layout = (self.folders[at].name.suffixes.len(), format!("{:?}", layout_args(rank)));
            by_layout.entry(layout).or_default().push(at);
        }
        let first = |members: &[usize]| members.first().copied().unwrap_or(0);
        if by_layout.len() < 2 {
            return by_layout.values().next().map_or(0, |members| first(members));
        }
        let merit = |members: &Vec<usize>| {
            let args = self.args_of(first(members));
            let is_whole = self.naming(members, &args).is_ok_and(|naming| {
                self.are_whole(&self.inside(members, naming, &args), naming, &args)
            });
            (RankOrder::of(&args).is_some(), is_whole, members.len(), Reverse(first(members)))
        };
        let best = by_layout.values().max_by_key(|members| merit(members));
        best.map_or(0, |members| first(members))
    }

    /// The files that make up the layout that `args` says, where they do without the others.
    ///
    /// # Errors
    /// The names of folders have several forms, and none of them is whole.
    pub(super) fn members(&self, speaker: usize, args: &RunArgs) -> Result<Members, LayoutError> {
        let all: Vec<usize> = (0..self.folders.len()).collect();
        let parts = |at: &usize| self.folders[*at].name.suffixes.len();
        let (form, others): (Vec<usize>, Vec<usize>) =
            all.iter().partition(|at| parts(at) == parts(&speaker));
        let naming = self.naming(&form, args)?;
        let own = self.inside(&form, naming, args);
        let is_stray = own.len() < all.len()
            && self.are_whole(&own, naming, args)
            // A converter may write the arguments of another layout into all of its files.
            && !(others.is_empty() && self.are_whole(&all, naming, args) && self.say_no_rank());
        if !is_stray {
            let naming = self.naming(&all, args)?;
            return Ok(Members { naming, own: all, stray: Vec::new() });
        }
        let layout = self.layout(&own, naming, args)?;
        let stray = |at: &usize| ForeignFile {
            path: self.ranks[*at].path.parent().unwrap_or(self.path).to_path_buf(),
            what: format!(
                "does not belong to this checkpoint of {}: left over from {} layout",
                sizes_text(&layout),
                if form.contains(at) { "a larger" } else { "another" },
            ),
        };
        let stray = all.iter().filter(|at| !own.contains(at)).map(stray).collect();
        Ok(Members { naming, own, stray })
    }

    /// The files, of those in the order of `coords`, that are not what their folders make of them.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn foreign(
        &self,
        files: &FileSet,
        speaker: usize,
        coords: &[(usize, RankCoord)],
        layout: &ParallelLayout,
    ) -> Result<Vec<ForeignFile>, OpenError> {
        let is_one_rank = self.say_one_rank(coords);
        let owners = self.owners_of_masters(files, coords)?;
        let witnesses = |&(at, coord): &(usize, RankCoord)| {
            let (folder, rank) = (&self.folders[at], &self.ranks[at]);
            let facts = facts(rank);
            let is_proof = !is_one_rank || rank.is_of_process;
            let claim = self.claim(rank, coord, layout).filter(|_| is_proof);
            let place = layout.place_text(coord);
            let other = folder.distrib_optim.map(|file| Witness {
                path: files.path(file).to_path_buf(),
                place: place.clone(),
                sign: owners.get(&at).map(|owner| {
                    format!("holds the masters of the weights of {}", layout.place_text(*owner))
                }),
                unique: Some(file),
                ..Witness::default()
            });
            let (path, unique) = (rank.path.clone(), Some(folder.model));
            let own = Witness { path, place, claim, facts, unique, ..Witness::default() };
            std::iter::once(own).chain(other)
        };
        // Where two values have as many votes, the speaker's counts.
        let (first, others): (Vec<_>, Vec<_>) = coords.iter().partition(|(at, _)| *at == speaker);
        let witnesses: Vec<Witness> = first.into_iter().chain(others).flat_map(witnesses).collect();
        let folder = self.step.map(|step| FolderStep { path: self.path, step, fact: ITERATION });
        foreign(files, &witnesses, folder.as_ref(), self.options)
    }

    /// The places of the weights to which the masters in a rank's `distrib_optim.pt` belong, where those are another rank's.
    fn owners_of_masters(
        &self,
        files: &FileSet,
        coords: &[(usize, RankCoord)],
    ) -> Result<BTreeMap<usize, RankCoord>, OpenError> {
        let has_file = |(at, _): &&(usize, RankCoord)| self.folders[*at].distrib_optim.is_some();
        let beside: Vec<(usize, RankCoord)> = coords.iter().filter(has_file).copied().collect();
        let ranks: Vec<&RankFile> = beside.iter().map(|(at, _)| &self.ranks[*at]).collect();
        let owners = masters::owners(files, &ranks)?;
        let owned = beside.iter().zip(owners);
        Ok(owned.filter_map(|((at, _), owner)| Some((*at, beside[owner?].1))).collect())
    }

    /// The words for a rank that a file says to be, where it stands in the place of another one.
    fn claim(&self, rank: &RankFile, place: RankCoord, layout: &ParallelLayout) -> Option<String> {
        let said = rank.args.as_ref()?.get(RANK)?.as_u64()?;
        let args = RunArgs::new(layout_args(rank), &self.options.run_args);
        let order = RankOrder::of(&args)?;
        if order.may_be(said, place) {
            return None;
        }
        Some(match order.coord(said) {
            Some(coord) => format!("it is rank {said} ({})", layout.place_text(coord)),
            None => format!("it is rank {said} of {}", order.world_size()),
        })
    }

    /// Tells whether every file says the same rank, as those of a converter do: it is one process, whatever it writes.
    fn say_one_rank(&self, coords: &[(usize, RankCoord)]) -> bool {
        let said = |at: usize| self.ranks[at].args.as_ref().and_then(|args| args.get(RANK));
        coords.windows(2).all(|pair| said(pair[0].0) == said(pair[1].0))
    }

    /// Tells whether no file says anything of its rank that a process of its own would.
    fn say_no_rank(&self) -> bool {
        let coords: Vec<(usize, RankCoord)> =
            (0..self.ranks.len()).map(|at| (at, RankCoord::default())).collect();
        self.say_one_rank(&coords)
    }

    fn args_of(&self, at: usize) -> RunArgs {
        RunArgs::new(layout_args(&self.ranks[at]), &self.options.run_args)
    }

    /// The meaning of the numbers of rank folders. Where neither their form nor `args` tells, the contents do:
    /// expert-parallel ranks hold the same dense layers, pipeline stages do not.
    fn naming(&self, members: &[usize], args: &RunArgs) -> Result<FolderNaming, LayoutError> {
        let names: Vec<RankName> =
            members.iter().map(|&at| self.folders[at].name.clone()).collect();
        if let Some(naming) = FolderNaming::of(&names, args)? {
            return Ok(naming);
        }
        let dense: BTreeSet<BTreeSet<&str>> =
            members.iter().map(|&at| self.ranks[at].dense_names()).collect();
        let is_expert = dense.len() == 1 && members.len() > 1;
        Ok(if is_expert { FolderNaming::TpEp } else { FolderNaming::TpPp })
    }

    fn layout(
        &self,
        members: &[usize],
        naming: FolderNaming,
        args: &RunArgs,
    ) -> Result<ParallelLayout, LayoutError> {
        let coords: Vec<RankCoord> =
            members.iter().map(|&at| naming.coord(&self.folders[at].name)).collect();
        ParallelLayout::new(&coords, args)
    }

    /// Those of the files that are inside of the sizes that `args` says.
    fn inside(&self, members: &[usize], naming: FolderNaming, args: &RunArgs) -> Vec<usize> {
        let is_below = |arg: ArgName, rank: u64| args.size(arg).is_none_or(|size| rank < size);
        let is_inside = |at: &usize| {
            let coord = naming.coord(&self.folders[*at].name);
            is_below(ArgName::TENSOR_MODEL_PARALLEL_SIZE, coord.tp)
                && is_below(ArgName::PIPELINE_MODEL_PARALLEL_SIZE, coord.pp)
                && (args.is_on(ArgName::EXPERT_PARALLEL)
                    || is_below(ArgName::EXPERT_MODEL_PARALLEL_SIZE, coord.ep))
        };
        members.iter().copied().filter(is_inside).collect()
    }

    /// Tells whether files are all that their layout needs.
    fn are_whole(&self, members: &[usize], naming: FolderNaming, args: &RunArgs) -> bool {
        let present: BTreeSet<RankCoord> =
            members.iter().map(|&at| naming.coord(&self.folders[at].name)).collect();
        !members.is_empty()
            && self
                .layout(members, naming, args)
                .is_ok_and(|layout| layout.missing(&present).is_empty())
    }
}

/// The file of one rank, looked at alone, against the names of its folder and of the iteration's.
///
/// # Errors
/// It cannot be read.
pub(super) fn foreign_alone(
    files: &FileSet,
    path: &Path,
    (model, rank): (FileId, &RankFile),
    options: &OpenOptions,
) -> Result<Vec<ForeignFile>, OpenError> {
    let name = |path: &Path| Some(path.file_name()?.to_string_lossy().into_owned());
    let Some(folder) = name(path).and_then(|name| RankName::parse(&name)) else {
        return Ok(Vec::new());
    };
    let whole = path.parent().unwrap_or(path);
    let step = name(whole).and_then(|name| step_behind(ITERATION_FOLDER, &name));
    let folders = [RankFolder { name: folder, model, distrib_optim: None }];
    let ranks = std::slice::from_ref(rank);
    let gathered = Gathered { path: whole, step, folders: &folders, ranks, options };
    let args = gathered.args_of(0);
    let Ok(Some(naming)) = FolderNaming::of(&[folders[0].name.clone()], &args) else {
        return Ok(Vec::new());
    };
    let coord = naming.coord(&folders[0].name);
    let Ok(layout) = ParallelLayout::new(&[coord], &args) else { return Ok(Vec::new()) };
    gathered.foreign(files, 0, &[(0, coord)], &layout)
}

/// The argument with the number of a process.
const RANK: &str = "rank";

/// The iteration at the top of a file, apart from the one in `args`, at which its run began.
const ITERATION: &str = "iteration";

fn layout_args(rank: &RankFile) -> BTreeMap<String, PlainValue> {
    let args = rank.args.iter().flatten().filter(|(name, _)| OF_LAYOUT.contains(&name.as_str()));
    args.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// The things that the files of one checkpoint say alike.
fn facts(rank: &RankFile) -> Vec<(String, PlainValue)> {
    let step = rank.iteration.and_then(|step| i64::try_from(step).ok());
    let step = step.map(|step| (ITERATION.to_owned(), PlainValue::Int(step)));
    step.into_iter().chain(rank.args.iter().flat_map(shared_args)).collect()
}
