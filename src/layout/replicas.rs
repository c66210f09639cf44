//! Replicas: all files of a stage hold its dense parameters, and all those of an expert parallel rank its experts, each a part or
//! a copy. What another one holds and a file does not, it has lost: training writes all of it (Megatron-LM
//! `megatron/training/checkpointing.py`, `save_checkpoint`).

use std::collections::{BTreeMap, BTreeSet};

use crate::names::Name;
use crate::storage::FileId;

use super::merge::{RankPart, RankParts};
use super::{ModelChunk, ParallelLayout, RankCoord, is_expert};

/// A file that lacks what others of its place hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lacking {
    /// The file.
    pub file: FileId,
    /// One that holds the first of them.
    pub twin: FileId,
    /// The first parameter.
    pub first: Name,
    /// Number of parameters.
    pub count: usize,
}

/// What files hold alike: the dense parameters of a model chunk, or the experts of one slot in it.
type Share = (ModelChunk, Option<u64>);

/// The holders of a share.
#[derive(Default)]
struct Holders<'p> {
    /// Each parameter, with a file that holds it.
    names: BTreeMap<&'p Name, FileId>,
    files: BTreeMap<FileId, BTreeSet<&'p Name>>,
}

/// The files that lack what others of their place hold, among the parameters that `is_whole` says have all their parts. Time and
/// space are linear in the number of parts.
pub(super) fn lacking(
    parts: &RankParts,
    layout: &ParallelLayout,
    is_whole: impl Fn(&Name) -> bool,
) -> Vec<Lacking> {
    let mut shares: BTreeMap<Share, Holders<'_>> = BTreeMap::new();
    let mut stand_ins: BTreeSet<RankCoord> = BTreeSet::new();
    let mut experts: BTreeSet<(RankCoord, FileId)> = BTreeSet::new();
    for (name, parts) in parts.iter().filter(|(name, _)| is_whole(name)) {
        let is_expert = is_expert(name.as_str());
        for RankPart { rank, tensor, is_shape_only, .. } in parts {
            if *is_shape_only {
                stand_ins.extend((!is_expert).then_some(*rank));
                continue;
            }
            // One without elements is nowhere.
            let Some(file) = tensor.pieces().first().map(|piece| piece.file) else { continue };
            let slot = is_expert.then(|| layout.expert_slot(*rank));
            let holders = shares.entry((rank.chunk(), slot)).or_default();
            holders.names.entry(name).or_insert(file);
            holders.files.entry(file).or_default().insert(name);
            experts.extend(is_expert.then_some((*rank, file)));
        }
    }
    // A file with experts alone has lost all the rest, but for states that another file has.
    for (rank, file) in experts.iter().filter(|(rank, _)| !stand_ins.contains(rank)) {
        if let Some(dense) = shares.get_mut(&(rank.chunk(), None)) {
            dense.files.entry(*file).or_default();
        }
    }
    shares.values().flat_map(Holders::lacking).collect()
}

impl Holders<'_> {
    fn lacking(&self) -> impl Iterator<Item = Lacking> {
        self.files.iter().filter_map(|(file, own)| {
            let count = self.names.len() - own.len();
            let mut own = own.iter();
            let lost = self.names.iter().find(|(name, _)| own.next() != Some(*name));
            let (first, twin) = lost?;
            Some(Lacking { file: *file, twin: *twin, first: (*first).clone(), count })
        })
    }
}
