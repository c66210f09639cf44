//! The numbers that sum up a comparison: counted once, for the screen and for the document.

use crate::compare::{Outcome, ReplicaDifference, TensorComparison};
use crate::judge::verdict::TensorVerdict;
use crate::kernel::Stats;

use super::Report;

/// The numbers of a comparison.
#[derive(Debug)]
pub(super) struct Totals {
    /// Pairs of tensors.
    pub tensors: usize,
    /// Those of them with statistics: read, and of one shape.
    pub compared: usize,
    /// Elements of these, of one side.
    pub elements: u64,
    /// Bytes of these, of both sides.
    pub bytes: u64,
    /// Pairs that were read and are good enough.
    pub passing: usize,
    /// Those of them that are not even equal.
    pub tolerated: usize,
    /// Pairs that were read and are not good enough.
    pub failing: usize,
    /// Pairs by [`TensorVerdict`], in the order of its `ALL`.
    verdicts: [usize; TensorVerdict::ALL.len()],
    /// Replicas that disagree with the first copy.
    pub diverged: usize,
    /// Problems of either side.
    pub problems: usize,
    /// Rules that require a tensor where none was compared.
    pub unmet_rules: usize,
}

impl Totals {
    /// Counts.
    pub(super) fn of(report: &Report) -> Self {
        let compared = || report.comparisons().filter_map(|tensor| Some((tensor, stats(tensor)?)));
        let size = |(tensor, stats): (&TensorComparison, &Stats)| {
            let sizes = tensor.dtypes.iter().map(|dtype| dtype.size());
            sizes.map(|size| stats.count().saturating_mul(size)).fold(0, u64::saturating_add)
        };
        let judgements = || report.tensors.iter().map(|judged| &judged.judgement);
        let is_read = |verdict| verdict != TensorVerdict::Unread;
        let replicas = report.comparisons().flat_map(|tensor| &tensor.replicas);
        Self {
            tensors: report.tensors.len(),
            compared: compared().count(),
            elements: compared().map(|(_, stats)| stats.count()).fold(0, u64::saturating_add),
            bytes: compared().map(size).fold(0, u64::saturating_add),
            passing: judgements().filter(|one| one.passes).count(),
            tolerated: judgements()
                .filter(|one| one.passes && one.verdict > TensorVerdict::Equal)
                .count(),
            failing: judgements().filter(|one| !one.passes && is_read(one.verdict)).count(),
            verdicts: TensorVerdict::ALL
                .map(|verdict| judgements().filter(|one| one.verdict == verdict).count()),
            diverged: replicas.filter(|replica| ReplicaDifference::is_divergence(replica)).count(),
            problems: report.checkpoints.iter().map(|side| side.problems.len()).sum(),
            unmet_rules: report.unused.iter().filter(|rule| rule.required).count(),
        }
    }

    /// Number of pairs with this verdict.
    pub(super) fn with(&self, verdict: TensorVerdict) -> usize {
        self.by_verdict().find(|(one, _)| *one == verdict).map_or(0, |(_, count)| count)
    }

    /// Number of pairs with each verdict, from best to worst.
    pub(super) fn by_verdict(&self) -> impl Iterator<Item = (TensorVerdict, usize)> {
        TensorVerdict::ALL.into_iter().zip(self.verdicts)
    }
}

/// The statistics of a pair that was compared.
pub(super) fn stats(tensor: &TensorComparison) -> Option<&Stats> {
    match &tensor.outcome {
        Outcome::Compared(stats) => Some(stats),
        Outcome::ShapeDiffers | Outcome::Unreadable(_) => None,
    }
}
