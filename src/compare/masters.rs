//! Weights against their masters: is each weight its fp32 master, rounded?
//!
//! Mixed precision copies masters into weights after every step with `copy_`, which rounds to nearest, ties to even:
//! Megatron-LM core 0.4 to 0.19 (`optimizer/optimizer.py`, `distrib_optimizer.py`: `_copy_main_params_to_model_params`), Apex
//! (`_process_optimizer.py`), DeepSpeed 0.9 to 0.19 (`runtime/bf16_optimizer.py`, `runtime/zero/stage_1_and_2.py` and
//! `stage3.py`, `runtime/fp16/fused_optimizer.py`). A weight and its master are read together, each once.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use crate::base::dtype::{Dtype, DtypeKind};
use crate::kernel::{DenseBlock, Spread, Stats, compare_block, not_rounded};
use crate::names::Name;
use crate::tensor::LogicalTensor;

use super::pass::{self, Extra, PassTotals, TensorPass};
use super::side_files::{ReadError, SideFiles};
use super::side_reader::SideReader;

/// The names of masters are this and the name of their weight.
const MASTER: &str = "optimizer.fp32_param.";

/// A weight held against its master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounding {
    /// Number of its elements that are not those of the master, rounded to its dtype.
    pub misses: u64,
    /// The largest number of steps of its dtype that such an element is off.
    pub max_ulp: u64,
}

/// What is taken of a weight and its master beside the statistics of the weight.
#[derive(Default)]
struct Found {
    misses: u64,
    spread: Spread,
    /// The statistics of the master.
    master: Stats,
}

impl Extra for Found {
    fn merge(&mut self, other: Self) {
        self.misses += other.misses;
        self.spread.merge(&other.spread);
        self.master.merge(&other.master);
    }
}

impl Found {
    fn add(&mut self, [weight, master]: [DenseBlock<'_>; 2], first: u64) {
        self.master.merge(&compare_block(master, master, first));
        let misses = not_rounded(weight, master);
        if misses > 0 {
            self.misses += misses;
            self.spread.merge(&Spread::of_block(weight, master, &compare_block(weight, master, 0)));
        }
    }
}

/// The outcome of one tensor of a pair, as of one that is read alone; and that of the pair, for the weight.
type Outcome = (PassTotals<1>, Option<Rounding>);

/// The outcomes of the tensors that are of a pair, by their place among all.
#[derive(Default)]
pub(super) struct Pairs {
    /// Those that were read.
    pub read: BTreeMap<usize, Outcome>,
    /// The weights of the pairs of which a file could not be read, with that. Neither tensor of them is among the others.
    pub unread: BTreeMap<usize, ReadError>,
}

/// Holds all weights that have a master against it, and both against their own copies.
pub(super) fn checked(
    tensors: &[(&Name, &LogicalTensor)],
    files: SideFiles<'_>,
    unit_bytes: u64,
    done: &AtomicU64,
) -> Pairs {
    let pairs = pairs(tensors);
    let reader = |at: usize| SideReader::unmerged(files, tensors[at].1);
    let pass = |pair: &[usize; 2]| TensorPass::new(pair.map(reader), unit_bytes);
    let passes: Vec<TensorPass<'_, 2>> = pairs.iter().map(pass).collect();
    let of_block = |_, blocks: [DenseBlock<'_>; 2], first, found: &mut Found| {
        found.add(blocks, first);
        compare_block(blocks[0], blocks[0], first)
    };
    let totals = pass::run_all(&passes.iter().collect::<Vec<_>>(), of_block, done);
    let mut found = Pairs::default();
    for (pair, totals) in pairs.into_iter().zip(totals) {
        let [weight, master] = pair;
        let PassTotals { stats, extra, differing: [weight_differing, master_differing], error } =
            totals;
        if let Some(error) = error {
            found.unread.insert(weight, error);
            continue;
        }
        let rounding = Rounding { misses: extra.misses, max_ulp: extra.spread.max_ulp() };
        let alone = |stats, differing| PassTotals {
            stats,
            differing: [differing],
            ..PassTotals::default()
        };
        found.read.insert(weight, (alone(stats, weight_differing), Some(rounding)));
        found.read.insert(master, (alone(extra.master, master_differing), None));
    }
    found
}

/// The places of each weight and its master, of those that can be compared.
fn pairs(tensors: &[(&Name, &LogicalTensor)]) -> Vec<[usize; 2]> {
    let places = tensors.iter().enumerate().map(|(at, (name, _))| (name.as_str(), at));
    let places: BTreeMap<&str, usize> = places.collect();
    let pair = |(&name, &master): (&&str, &usize)| {
        let weight = *places.get(name.strip_prefix(MASTER)?)?;
        are_comparable([weight, master].map(|at| tensors[at].1)).then_some([weight, master])
    };
    places.iter().filter_map(pair).collect()
}

/// Returns whether the weight may be the master, rounded, and is not that itself, as a reader of ZeRO-3 has it. That of one byte is scaled, and by a factor that lies elsewhere.
fn are_comparable([weight, master]: [&LogicalTensor; 2]) -> bool {
    let is_float = |dtype: Dtype| dtype.kind() == DtypeKind::Float && dtype.size() > 1;
    weight.shape() == master.shape()
        && weight.pieces() != master.pieces()
        && is_float(weight.dtype())
        && is_float(master.dtype())
        && weight.dtype().size() <= master.dtype().size()
        && master.dtype().size() >= Dtype::Float32.size()
}
