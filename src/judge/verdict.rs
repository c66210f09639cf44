//! Statistics -> verdicts, and the exit codes that say them. Pure.

use crate::base::dtype::{Dtype, DtypeKind};
use crate::compare::{Outcome, ReplicaDifference, TensorCheck, TensorComparison};
use crate::kernel::Stats;

use super::bounds::Bounds;
use super::state::StateJudgement;

/// The verdict on one tensor, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorVerdict {
    /// The same bits.
    Identical,
    /// The same values, though not all the same bits: another dtype, or zeros of another sign.
    Equal,
    /// Every element of one side is that of the other, rounded to its dtype.
    Cast,
    /// All bounds that were given hold.
    Within,
    /// At least one difference.
    Different,
    /// A file that could not be read.
    Unread,
}

impl TensorVerdict {
    /// All, from best to worst.
    pub const ALL: [Self; 6] =
        [Self::Identical, Self::Equal, Self::Cast, Self::Within, Self::Different, Self::Unread];

    /// The word for it in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Identical => "identical",
            Self::Equal => "equal",
            Self::Cast => "cast",
            Self::Within => "within",
            Self::Different => "different",
            Self::Unread => "unread",
        }
    }
}

/// The verdict on a comparison, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// All tensors are identical.
    Identical,
    /// All tensors are equal.
    Equal,
    /// All tensors are equal, or casts where these may pass.
    Cast,
    /// All tensors hold the bounds that were given.
    Within,
    /// At least one tensor does not pass, or is on one side only.
    Different,
    /// Something could not be read or compared.
    Trouble,
}

impl Verdict {
    /// The exit code, as `diff`, `cmp` and `h5diff` have it.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Identical | Self::Equal | Self::Cast | Self::Within => 0,
            Self::Different => 1,
            Self::Trouble => 2,
        }
    }

    /// The word for it in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Identical => "identical",
            Self::Equal => "equal",
            Self::Cast => "cast",
            Self::Within => "within",
            Self::Different => "different",
            Self::Trouble => "trouble",
        }
    }
}

/// The judgement on one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The best that is true of it.
    pub verdict: TensorVerdict,
    /// It is good enough by the bounds that it has to hold.
    pub passes: bool,
    /// The bounds that do not hold, where it does not pass.
    pub broken: Vec<BrokenBound>,
    /// The side of the cast that is rounded, 0 or 1, and the number of its elements that are not: of floats of two dtypes.
    pub rounded: Option<(usize, u64)>,
    /// A bound on each element that an all-zero tensor would hold, too.
    pub weak: Option<WeakBound>,
}

/// A bound that does not hold.
#[derive(Debug, Clone, PartialEq)]
pub enum BrokenBound {
    /// So many elements are not as close as they have to be.
    Elements(u64),
    /// A metric is larger than it may be, or not defined.
    Metric {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: Option<f64>,
        /// Its bound.
        max: f64,
    },
}

/// A bound that can hardly fail.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeakBound {
    /// One that zeros in place of a hold, whatever b is.
    Rtol(f64),
    /// One that is larger than most elements of b.
    Atol {
        /// The bound.
        atol: f64,
        /// The root of the mean square of b.
        rms: f64,
    },
}

/// Judges one tensor by the bounds that it has to hold.
///
/// Elements that are not finite have no distance, so without bounds they never count as equal; with `equal_nan` they do
/// where both sides have the same ones.
#[must_use]
pub fn of_tensor(tensor: &TensorComparison, bounds: &Bounds) -> Judgement {
    let stats = match &tensor.outcome {
        Outcome::Unreadable(_) => return Judgement::failed(TensorVerdict::Unread),
        Outcome::ShapeDiffers => return Judgement::failed(TensorVerdict::Different),
        Outcome::Compared(stats) if bounds.equal_nan == Some(true) => stats.with_equal_nan(),
        Outcome::Compared(stats) => **stats,
    };
    let weak = weak_bound(tensor, &stats, bounds);
    let passed = |verdict| Judgement { passes: true, weak, ..Judgement::failed(verdict) };
    if stats.differing() == 0 && stats.is_finite() {
        let is_identical = stats.is_identical();
        return passed(if is_identical { TensorVerdict::Identical } else { TensorVerdict::Equal });
    }
    let rounded = rounded(tensor.dtypes, &stats);
    let is_cast = rounded.is_some_and(|(_, misses)| misses == 0);
    let broken = broken_bounds(tensor, &stats, bounds);
    let holds_bounds = bounds.are_given() && broken.is_empty();
    let verdict = match (is_cast, holds_bounds) {
        (true, _) => TensorVerdict::Cast,
        (false, true) => TensorVerdict::Within,
        (false, false) => TensorVerdict::Different,
    };
    let passes = holds_bounds || is_cast && bounds.allow_cast == Some(true);
    let broken = if passes { Vec::new() } else { broken };
    Judgement { verdict, passes, broken, rounded, weak }
}

impl Judgement {
    fn failed(verdict: TensorVerdict) -> Self {
        Self { verdict, passes: false, broken: Vec::new(), rounded: None, weak: None }
    }
}

impl Bounds {
    fn are_given(&self) -> bool {
        self.rtol.is_some()
            || self.atol.is_some()
            || self.torch == Some(true)
            || !self.max.is_empty()
    }
}

/// The side that looks like the other, rounded: the one with fewer elements that are not.
fn rounded(dtypes: [Dtype; 2], stats: &Stats) -> Option<(usize, u64)> {
    let is_float = |dtype: &Dtype| dtype.kind() == DtypeKind::Float;
    if dtypes[0] == dtypes[1] || !dtypes.iter().all(is_float) {
        return None;
    }
    let [a, b] = stats.not_rounded();
    Some(if a < b { (0, a) } else { (1, b) })
}

fn broken_bounds(tensor: &TensorComparison, stats: &Stats, bounds: &Bounds) -> Vec<BrokenBound> {
    let beyond = tensor.beyond.map_or(0, |beyond| beyond.count);
    let elements = (beyond > 0).then_some(BrokenBound::Elements(beyond));
    let metrics = bounds.max.iter().filter_map(|bound| {
        let value = (bound.metric.value)(tensor, stats);
        let holds = value.is_some_and(|value| value <= bound.max);
        (!holds).then_some(BrokenBound::Metric { name: bound.metric.name, value, max: bound.max })
    });
    elements.into_iter().chain(metrics).collect()
}

/// The bound on each element, where zeros in place of a would hold it in most of the tensor.
fn weak_bound(tensor: &TensorComparison, stats: &Stats, bounds: &Bounds) -> Option<WeakBound> {
    let closeness = bounds.closeness(tensor.dtypes)?;
    if closeness.rtol >= 1.0 {
        return Some(WeakBound::Rtol(closeness.rtol));
    }
    let rms = stats.norm_b()? / (stats.count() as f64).sqrt();
    let is_weak = rms > 0.0 && closeness.atol > rms;
    is_weak.then_some(WeakBound::Atol { atol: closeness.atol, rms })
}

/// Judges a comparison by the judgements on its tensors.
///
/// `unpaired` counts the names on one side only that are not allowed there, `problems` what could not be read before
/// comparing. Replicas that disagree are a difference unless that is allowed; parts of a sum are none.
#[must_use]
pub fn of_all<'a>(
    judgements: impl IntoIterator<Item = &'a Judgement>,
    unpaired: usize,
    problems: usize,
    has_diverged: bool,
) -> Verdict {
    let worst = judgements.into_iter().map(Judgement::on_all).max();
    let Some(worst) = worst.filter(|_| problems == 0) else { return Verdict::Trouble };
    if unpaired > 0 || has_diverged { worst.max(Verdict::Different) } else { worst }
}

/// Judges a comparison that no tensor takes part in.
#[must_use]
pub fn without_tensors(problems: usize) -> Verdict {
    if problems == 0 { Verdict::Identical } else { Verdict::Trouble }
}

/// The verdict on a comparison of which this is true of the tensors, and this of the state of the run.
#[must_use]
pub fn with_state(tensors: Verdict, state: &StateJudgement) -> Verdict {
    match state {
        state if !state.unread.is_empty() || state.compared == 0 => Verdict::Trouble,
        state if !state.differences.is_empty() => tensors.max(Verdict::Different),
        _ => tensors,
    }
}

impl Judgement {
    /// The verdict on a comparison of this tensor alone.
    fn on_all(&self) -> Verdict {
        match self.verdict {
            TensorVerdict::Unread => Verdict::Trouble,
            _ if !self.passes => Verdict::Different,
            TensorVerdict::Identical => Verdict::Identical,
            TensorVerdict::Equal => Verdict::Equal,
            TensorVerdict::Cast => Verdict::Cast,
            TensorVerdict::Within => Verdict::Within,
            TensorVerdict::Different => Verdict::Different,
        }
    }
}

/// The verdict on a checkpoint held against itself, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Soundness {
    /// All copies agree, every weight is its master rounded, every element is finite, and every file is part of it.
    Sound,
    /// At least one of these is not so.
    Unsound,
    /// Something could not be read or put together.
    Trouble,
}

impl Soundness {
    /// The word for it in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sound => "sound",
            Self::Unsound => "unsound",
            Self::Trouble => "trouble",
        }
    }

    /// The exit code, as that of a comparison.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Sound => 0,
            Self::Unsound => 1,
            Self::Trouble => 2,
        }
    }
}

/// Judges a self-check.
///
/// `findings` counts the unreferenced files, the weights that are not their masters rounded, and what else is not as it should
/// be beside single tensors, `problems` what could not be read before checking.
#[must_use]
pub fn of_check(tensors: &[TensorCheck], findings: usize, problems: usize) -> Soundness {
    let is_unread = tensors.iter().any(|tensor| tensor.stats.is_err());
    if tensors.is_empty() || problems > 0 || is_unread {
        return Soundness::Trouble;
    }
    let is_sound = |tensor: &TensorCheck| {
        tensor.stats.as_ref().is_ok_and(Stats::is_finite)
            && !tensor.replicas.iter().any(ReplicaDifference::is_divergence)
    };
    if findings == 0 && tensors.iter().all(is_sound) {
        Soundness::Sound
    } else {
        Soundness::Unsound
    }
}
