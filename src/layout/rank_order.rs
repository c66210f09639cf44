//! The order in which a run numbers its processes: from `args.rank` to a place in the grid.
//!
//! Megatron numbers tensor parallel ranks first, then context and data parallel ones, pipeline stages last; with
//! `--use-tp-pp-dp-mapping` stages go before data parallel ranks (Megatron-LM v1.0 to core 0.20, `core/parallel_state.py`:
//! `initialize_model_parallel`, `RankGenerator` with `tp-cp-ep-dp-pp` or `tp-cp-ep-pp-dp`). The expert parallel rank of a
//! process changed its meaning where experts have a tensor parallel size of their own or context parallelism is on:
//! up to core 0.9 it counts groups of TP * CP processes, since 0.10 groups of ETP. Either is taken for right.
//!
//! Which data parallel rank writes a folder changed as well (rank 0 of its group; with experts rank 0 of the expert group
//! in core 0.10 to 0.18.1, of either one since; up to 0.7 every context parallel rank), so a file may come from any of them.

use super::{ArgName, ParallelLayout, RankCoord, RunArgs};

/// The numbering of a run's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankOrder {
    tp: u64,
    cp: u64,
    pp: u64,
    /// Processes in all.
    world: u64,
    /// Sizes of the groups that share an expert parallel rank, by version; none where that rank cannot be told.
    expert_groups: Option<[u64; 2]>,
    ep: u64,
    stages_before_data: bool,
}

impl RankOrder {
    /// The numbering, where the sizes in `args` make up its `world_size`, as Megatron asserts. Others are of a converter,
    /// which is one process whatever layout it writes, and say nothing of the ranks.
    #[must_use]
    pub fn of(args: &RunArgs) -> Option<Self> {
        let size = |arg| args.size(arg).filter(|&size| size > 0);
        let world = size(ArgName::WORLD_SIZE)?;
        let tp = size(ArgName::TENSOR_MODEL_PARALLEL_SIZE)?;
        let pp = size(ArgName::PIPELINE_MODEL_PARALLEL_SIZE).unwrap_or(1);
        let cp = size(ArgName::CONTEXT_PARALLEL_SIZE).unwrap_or(1);
        let model = tp.checked_mul(cp)?.checked_mul(pp)?;
        let is_whole = match size(ArgName::DATA_PARALLEL_SIZE) {
            Some(dp) => model.checked_mul(dp)? == world,
            None => world.is_multiple_of(model),
        };
        if !is_whole {
            return None;
        }
        let ep = size(ArgName::EXPERT_MODEL_PARALLEL_SIZE).unwrap_or(1);
        let etp = size(ArgName::EXPERT_TENSOR_PARALLEL_SIZE).unwrap_or(tp);
        // MindSpeed shares experts out in a way of its own; in 2023 a data parallel rank stood in the folder's name.
        let is_other =
            args.is_on(ArgName::MOE_TP_EXTEND_EP) || args.is_on(ArgName::EXPERT_PARALLEL);
        let expert_groups = (!is_other).then_some([tp * cp, etp]);
        let stages_before_data = args.is_on(ArgName::USE_TP_PP_DP_MAPPING);
        Some(Self { tp, cp, pp, world, expert_groups, ep, stages_before_data })
    }

    /// Processes in all.
    #[must_use]
    pub fn world_size(&self) -> u64 {
        self.world
    }

    /// The place of a process, its expert parallel rank as the newest version has it; `None` where there is no such process.
    #[must_use]
    pub fn coord(&self, rank: u64) -> Option<RankCoord> {
        if rank >= self.world {
            return None;
        }
        let behind_cp = rank / (self.tp * self.cp);
        let pp = match self.stages_before_data {
            true => behind_cp % self.pp,
            false => rank / (self.world / self.pp),
        };
        let ep = self.expert_groups.map_or(0, |[_, newest]| rank / newest % self.ep);
        Some(RankCoord { tp: rank % self.tp, pp, vp: 0, ep })
    }

    /// Tells whether a process may have written the file of this place, by any version's numbering.
    #[must_use]
    pub fn may_be(&self, rank: u64, place: RankCoord) -> bool {
        let has_ep =
            |groups: [u64; 2]| groups.iter().any(|group| rank / group % self.ep == place.ep);
        self.coord(rank).is_some_and(|coord| (coord.tp, coord.pp) == (place.tp, place.pp))
            && self.expert_groups.is_none_or(has_ep)
    }
}

impl ParallelLayout {
    /// The words for a place: `tp 1, pp 0`, with the expert parallel rank where there are several.
    #[must_use]
    pub fn place_text(&self, RankCoord { tp, pp, ep, .. }: RankCoord) -> String {
        let expert = if self.ep > 1 { format!(", ep {ep}") } else { String::new() };
        format!("tp {tp}, pp {pp}{expert}")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::base::plain::PlainValue;

    fn order(sizes: &[(ArgName, i64)]) -> Option<RankOrder> {
        let args = sizes.iter().map(|(name, size)| {
            let value = match *name {
                ArgName::USE_TP_PP_DP_MAPPING => PlainValue::Bool(*size > 0),
                _ => PlainValue::Int(*size),
            };
            (name.as_str().to_owned(), value)
        });
        RankOrder::of(&RunArgs::new(args.collect(), &[]))
    }

    const TP: ArgName = ArgName::TENSOR_MODEL_PARALLEL_SIZE;
    const PP: ArgName = ArgName::PIPELINE_MODEL_PARALLEL_SIZE;
    const DP: ArgName = ArgName::DATA_PARALLEL_SIZE;
    const CP: ArgName = ArgName::CONTEXT_PARALLEL_SIZE;
    const EP: ArgName = ArgName::EXPERT_MODEL_PARALLEL_SIZE;
    const ETP: ArgName = ArgName::EXPERT_TENSOR_PARALLEL_SIZE;
    const WORLD: ArgName = ArgName::WORLD_SIZE;

    /// The places of all processes as `(tp, pp, ep)`.
    fn places(order: &RankOrder) -> Vec<(u64, u64, u64)> {
        let coords = (0..order.world).map(|rank| order.coord(rank).unwrap());
        coords.map(|coord| (coord.tp, coord.pp, coord.ep)).collect()
    }

    #[test]
    fn stages_are_numbered_last_unless_the_mapping_says_otherwise() {
        let sizes = [(TP, 2), (PP, 2), (DP, 2), (WORLD, 8)];
        let usual = order(&sizes).unwrap();
        let stages: Vec<u64> = places(&usual).into_iter().map(|(_, pp, _)| pp).collect();
        assert_eq!(stages, [0, 0, 0, 0, 1, 1, 1, 1]);
        let mapped = order(&[&sizes[..], &[(ArgName::USE_TP_PP_DP_MAPPING, 1)]].concat()).unwrap();
        let stages: Vec<u64> = places(&mapped).into_iter().map(|(_, pp, _)| pp).collect();
        assert_eq!(stages, [0, 0, 1, 1, 0, 0, 1, 1]);
        assert_eq!(usual.coord(8), None);
    }

    /// The sparse grid of folders that Megatron-Core 0.16.1 itself wrote for these sizes (`fixtures/layouts/moe`).
    #[test]
    fn experts_have_an_order_of_their_own() {
        let found = order(&[(TP, 2), (PP, 1), (DP, 2), (EP, 4), (ETP, 1), (WORLD, 4)]).unwrap();
        assert_eq!(places(&found), [(0, 0, 0), (1, 0, 1), (0, 0, 2), (1, 0, 3)]);
        // With context parallelism, versions differ: both are right.
        let found = order(&[(TP, 2), (CP, 2), (DP, 2), (EP, 2), (ETP, 2), (WORLD, 8)]).unwrap();
        for ep in [0, 1] {
            assert!(found.may_be(2, RankCoord { ep, ..RankCoord::default() }));
        }
        assert!(!found.may_be(2, RankCoord { tp: 1, ..RankCoord::default() }));
    }

    #[test]
    fn sizes_that_do_not_make_up_the_world_tell_nothing() {
        assert_eq!(order(&[(TP, 2), (PP, 1), (DP, 1), (WORLD, 4)]), None);
        assert_eq!(order(&[(TP, 2)]), None);
        assert!(order(&[(TP, 2), (WORLD, 4)]).is_some());
    }
}
