//! The ranks that there are, those that there should be, and the names of their folders.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::limits::{LIMITS, OverLimit};
use crate::names::index::number;

use super::{ArgName, LayoutError, ModelChunk, RunArgs};

/// A rank of the model: its coordinates along each axis that shows in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RankCoord {
    /// Tensor parallel rank.
    pub tp: u64,
    /// Pipeline stage.
    pub pp: u64,
    /// Virtual pipeline stage.
    pub vp: u64,
    /// Expert parallel rank.
    pub ep: u64,
}

impl RankCoord {
    /// The model chunk that it belongs to.
    #[must_use]
    pub fn chunk(&self) -> ModelChunk {
        ModelChunk { vp: self.vp, pp: self.pp }
    }
}

/// The name of a rank's folder, cut in its parts: `mp_rank_TT[_PPP][_EEE]`
/// (Megatron-LM `megatron/training/checkpointing.py`, `get_checkpoint_name`, v1.0 to core 0.19).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankName {
    /// Tensor parallel rank.
    pub tp: u64,
    /// One or two further numbers: a pipeline stage, an expert parallel rank.
    pub suffixes: Vec<u64>,
}

impl RankName {
    /// Reads a folder's name; `None` where it is no rank's.
    #[must_use]
    pub fn parse(folder: &str) -> Option<Self> {
        let mut numbers = folder
            .strip_prefix("mp_rank_")?
            .split('_')
            .map(|digits| number(digits).filter(|_| digits.len() >= 2));
        let tp = numbers.next()??;
        let suffixes: Vec<u64> = numbers.collect::<Option<_>>()?;
        let in_range = |&number: &u64| number < LIMITS.ranks;
        (suffixes.len() <= 2 && in_range(&tp) && suffixes.iter().all(in_range))
            .then_some(Self { tp, suffixes })
    }
}

/// The meaning of the numbers behind the tensor parallel rank in one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FolderNaming {
    /// `mp_rank_TT`.
    Tp,
    /// `mp_rank_TT_PPP`.
    TpPp,
    /// `mp_rank_TT_EEE`.
    TpEp,
    /// `mp_rank_TT_PPP_EEE`.
    TpPpEp,
}

impl FolderNaming {
    /// The meaning of the numbers, as the number of them and `args` tell; `None` where only the contents can.
    ///
    /// # Errors
    /// Folders with different numbers of parts.
    pub fn of(names: &[RankName], args: &RunArgs) -> Result<Option<Self>, LayoutError> {
        let counts: BTreeSet<usize> = names.iter().map(|name| name.suffixes.len()).collect();
        let mut counts = counts.into_iter();
        let (Some(count), None) = (counts.next(), counts.next()) else {
            return Err(LayoutError::MixedNames);
        };
        let several = |name| args.size(name).is_some_and(|size| size > 1);
        Ok(match count {
            0 => Some(Self::Tp),
            2 => Some(Self::TpPpEp),
            _ => match (
                several(ArgName::PIPELINE_MODEL_PARALLEL_SIZE),
                several(ArgName::EXPERT_MODEL_PARALLEL_SIZE)
                    || args.is_on(ArgName::EXPERT_PARALLEL),
            ) {
                (true, false) => Some(Self::TpPp),
                (false, true) => Some(Self::TpEp),
                (true, true) | (false, false) => None,
            },
        })
    }

    /// The coordinates that a folder's name gives.
    #[must_use]
    pub fn coord(self, name: &RankName) -> RankCoord {
        let suffix = |index: usize| name.suffixes.get(index).copied().unwrap_or(0);
        let (pp, ep) = match self {
            Self::Tp => (0, 0),
            Self::TpPp => (suffix(0), 0),
            Self::TpEp => (0, suffix(0)),
            Self::TpPpEp => (suffix(0), suffix(1)),
        };
        RankCoord { tp: name.tp, pp, vp: 0, ep }
    }

    /// The form of the names with a number for every axis of this size, where a rank is missing that would have shown it.
    #[must_use]
    pub fn with_axes(self, layout: &ParallelLayout) -> Self {
        match (layout.pp > 1, layout.ep > 1) {
            (true, true) => Self::TpPpEp,
            (true, false) => Self::TpPp,
            (false, true) => Self::TpEp,
            (false, false) => self,
        }
    }

    /// The folder of a rank.
    #[must_use]
    pub fn folder(self, rank: RankCoord) -> String {
        let RankCoord { tp, pp, ep, .. } = rank;
        match self {
            Self::Tp => format!("mp_rank_{tp:02}"),
            Self::TpPp => format!("mp_rank_{tp:02}_{pp:03}"),
            Self::TpEp => format!("mp_rank_{tp:02}_{ep:03}"),
            Self::TpPpEp => format!("mp_rank_{tp:02}_{pp:03}_{ep:03}"),
        }
    }
}

/// The sizes of the axes that shards are spread over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelLayout {
    /// Tensor parallel size.
    pub tp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Expert parallel size.
    pub ep: u64,
    /// Tensor parallel size inside an expert.
    pub etp: u64,
    /// MindSpeed's `moe_tp_extend_ep`: experts are shared out over tensor parallel ranks as well.
    pub experts_over_tp: bool,
    /// Tensor parallel size that the writer had; another one where a single shard is looked at.
    pub declared_tp: u64,
    /// Ranks that shared the experts of a layer out.
    pub declared_expert_shares: u64,
}

impl ParallelLayout {
    /// The axes of a whole checkpoint: what `args` says, or more where more ranks are there.
    ///
    /// # Errors
    /// A layout whose files do not hold enough to put the tensors together, with the reason.
    pub fn new(ranks: &[RankCoord], args: &RunArgs) -> Result<Self, LayoutError> {
        refuse_unrecoverable(args)?;
        let size = |arg: ArgName, axis: fn(&RankCoord) -> u64| {
            let found = ranks.iter().map(|rank| axis(rank) + 1).max().unwrap_or(1);
            found.max(args.size(arg).unwrap_or(1))
        };
        let tp = size(ArgName::TENSOR_MODEL_PARALLEL_SIZE, |rank| rank.tp);
        let pp = size(ArgName::PIPELINE_MODEL_PARALLEL_SIZE, |rank| rank.pp);
        let ep = size(ArgName::EXPERT_MODEL_PARALLEL_SIZE, |rank| rank.ep);
        let experts_over_tp = args.is_on(ArgName::MOE_TP_EXTEND_EP);
        let etp = match args.size(ArgName::EXPERT_TENSOR_PARALLEL_SIZE).filter(|&size| size > 0) {
            _ if experts_over_tp => 1,
            Some(etp) => etp,
            None => tp,
        };
        let has_experts = args.size(ArgName::NUM_EXPERTS).is_some_and(|count| count > 0);
        if etp != tp && (has_experts || ep > 1) && (etp > tp || tp % etp != 0) {
            return Err(LayoutError::ExpertsLost { tp, etp });
        }
        let ranks = tp.checked_mul(pp).and_then(|ranks| ranks.checked_mul(ep));
        if ranks.is_none_or(|ranks| ranks > LIMITS.ranks) {
            let what = "ranks by the parallel sizes of its args";
            return Err(OverLimit { what, limit: LIMITS.ranks, found: ranks }.into());
        }
        Ok(Self {
            tp,
            pp,
            ep,
            etp: etp.min(tp),
            experts_over_tp,
            declared_tp: tp,
            declared_expert_shares: if experts_over_tp { ep * tp } else { ep },
        })
    }

    /// One rank's shard on its own: whatever the layout was, it is looked at as all there is.
    ///
    /// # Errors
    /// As [`ParallelLayout::new`].
    pub fn single(args: &RunArgs) -> Result<Self, LayoutError> {
        let whole = Self::new(&[RankCoord::default()], args)?;
        Ok(Self { tp: 1, pp: 1, ep: 1, etp: 1, experts_over_tp: false, ..whole })
    }

    /// The shares in which a rank holds the experts of a layer.
    #[must_use]
    pub fn expert_slot(&self, rank: RankCoord) -> u64 {
        if self.experts_over_tp { rank.ep * self.tp + rank.tp } else { rank.ep }
    }

    /// The ranks without which some tensor has a hole, and why each is needed.
    ///
    /// Not every combination exists: where experts have a tensor parallel size of their own, rank `r` of a
    /// stage is `tp = r % TP` for dense layers and `etp = r % ETP`, `ep = r / ETP % EP` for experts.
    #[must_use]
    pub fn missing(&self, ranks: &BTreeSet<RankCoord>) -> Vec<(RankCoord, &'static str)> {
        let mut missing = BTreeMap::new();
        for pp in 0..self.pp {
            let stage: Vec<&RankCoord> = ranks.iter().filter(|rank| rank.pp == pp).collect();
            for tp in 0..self.tp {
                if !stage.iter().any(|rank| rank.tp == tp) {
                    let ep = if self.ep > 1 { tp / self.etp % self.ep } else { 0 };
                    missing.insert(RankCoord { tp, pp, vp: 0, ep }, "dense layers");
                }
            }
            if self.ep == 1 {
                continue;
            }
            for ep in 0..self.ep {
                let slots = if self.experts_over_tp { self.tp } else { self.etp };
                for slot in 0..slots {
                    let holds = |rank: &&&RankCoord| rank.ep == ep && rank.tp % slots == slot;
                    if !stage.iter().any(|rank| holds(&rank)) {
                        let tp = (slot + slots * ep) % self.tp;
                        let tp = if slots == self.tp { slot } else { tp };
                        missing.entry(RankCoord { tp, pp, vp: 0, ep }).or_insert("experts");
                    }
                }
            }
        }
        missing.into_iter().collect()
    }
}

/// Layouts in which several ranks write one file, or a tensor's cut does not show in it.
fn refuse_unrecoverable(args: &RunArgs) -> Result<(), LayoutError> {
    let shared = "several ranks write the same file, so part of each weight is lost";
    let sizes = [
        (ArgName::GTP_WEIGHT_REMAT_SIZE, 1, shared),
        (ArgName::EXPERT_GTP_WEIGHT_REMAT_SIZE, 1, shared),
        (
            ArgName::ENCODER_TENSOR_MODEL_PARALLEL_SIZE,
            0,
            "the encoder has ranks of its own under the same folder names",
        ),
        (
            ArgName::ENCODER_PIPELINE_MODEL_PARALLEL_SIZE,
            0,
            "the encoder has stages of its own under the same folder names",
        ),
    ];
    for (arg, most, reason) in sizes {
        if args.size(arg).is_some_and(|size| size > most) {
            return Err(LayoutError::Refused { arg, reason });
        }
    }
    if args.is_on(ArgName::TP_2D) {
        let reason = "weights are cut along two axes, which the files do not record";
        return Err(LayoutError::Refused { arg: ArgName::TP_2D, reason });
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::base::plain::PlainValue;

    fn args(sizes: &[(&str, i64)]) -> RunArgs {
        let args = sizes.iter().map(|&(name, size)| (name.to_owned(), PlainValue::Int(size)));
        RunArgs::new(args.collect(), &[])
    }

    fn ranks(pairs: &[(u64, u64)]) -> BTreeSet<RankCoord> {
        pairs.iter().map(|&(tp, ep)| RankCoord { tp, pp: 0, vp: 0, ep }).collect()
    }

    #[test]
    fn rank_folders_of_every_era_are_read() {
        let parse = |name| RankName::parse(name).map(|rank| (rank.tp, rank.suffixes));
        assert_eq!(parse("mp_rank_07"), Some((7, vec![])));
        assert_eq!(parse("mp_rank_00_001"), Some((0, vec![1])));
        assert_eq!(parse("mp_rank_12_003_1000"), Some((12, vec![3, 1000])));
        for other in ["mp_rank_", "mp_rank_0x", "mp_rank_00_000_000_000", "rank_00", "mp_rank_-1"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_single_suffix_means_what_args_says() {
        let names = [RankName::parse("mp_rank_00_001").unwrap()];
        let naming = |sizes: &[(&str, i64)]| FolderNaming::of(&names, &args(sizes)).unwrap();
        assert_eq!(naming(&[("pipeline_model_parallel_size", 2)]), Some(FolderNaming::TpPp));
        assert_eq!(naming(&[("expert_model_parallel_size", 2)]), Some(FolderNaming::TpEp));
        assert_eq!(naming(&[]), None);
    }

    #[test]
    fn a_sparse_expert_grid_is_complete() {
        let sizes = [
            ("tensor_model_parallel_size", 2),
            ("expert_model_parallel_size", 4),
            ("expert_tensor_parallel_size", 1),
            ("num_experts", 4),
        ];
        let found = ranks(&[(0, 0), (1, 1), (0, 2), (1, 3)]);
        let all: Vec<RankCoord> = found.iter().copied().collect();
        let layout = ParallelLayout::new(&all, &args(&sizes)).unwrap();
        assert_eq!(layout.missing(&found), []);
        let fewer = ranks(&[(0, 0), (1, 1), (1, 3)]);
        assert_eq!(layout.missing(&fewer), [(RankCoord { tp: 0, pp: 0, vp: 0, ep: 2 }, "experts")]);
    }

    #[test]
    fn dense_shards_that_old_writers_lost_are_missed() {
        let sizes = [
            ("tensor_model_parallel_size", 4),
            ("expert_model_parallel_size", 2),
            ("expert_tensor_parallel_size", 1),
            ("num_experts", 4),
        ];
        let found = ranks(&[(0, 0), (1, 1)]);
        let all: Vec<RankCoord> = found.iter().copied().collect();
        let layout = ParallelLayout::new(&all, &args(&sizes)).unwrap();
        let missing: Vec<(u64, u64)> =
            layout.missing(&found).iter().map(|(rank, _)| (rank.tp, rank.ep)).collect();
        assert_eq!(missing, [(2, 0), (3, 1)]);
    }

    #[test]
    fn unrecoverable_layouts_are_refused() {
        for sizes in [
            vec![
                ("tensor_model_parallel_size", 1),
                ("expert_tensor_parallel_size", 2),
                ("num_experts", 4),
            ],
            vec![("gtp_weight_remat_size", 2)],
            vec![("encoder_tensor_model_parallel_size", 1)],
        ] {
            assert!(
                ParallelLayout::new(&[RankCoord::default()], &args(&sizes)).is_err(),
                "{sizes:?}"
            );
        }
    }
}
