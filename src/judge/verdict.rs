//! Statistics -> verdicts, and the exit codes that say them. Pure.

use crate::compare::{Outcome, ReplicaDifference, TensorCheck, TensorComparison};
use crate::kernel::Stats;

/// The verdict on one tensor, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorVerdict {
    /// The same bits.
    Identical,
    /// The same values, though not all the same bits: another dtype, or zeros of another sign.
    Equal,
    /// At least one difference.
    Different,
    /// A file that could not be read.
    Unread,
}

/// The verdict on a comparison, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// All tensors are identical.
    Identical,
    /// All tensors are equal.
    Equal,
    /// At least one tensor differs, or is on one side only.
    Different,
    /// Something could not be read or compared.
    Trouble,
}

impl Verdict {
    /// The exit code, as `diff`, `cmp` and `h5diff` have it.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Identical | Self::Equal => 0,
            Self::Different => 1,
            Self::Trouble => 2,
        }
    }
}

impl From<TensorVerdict> for Verdict {
    fn from(verdict: TensorVerdict) -> Self {
        match verdict {
            TensorVerdict::Identical => Self::Identical,
            TensorVerdict::Equal => Self::Equal,
            TensorVerdict::Different => Self::Different,
            TensorVerdict::Unread => Self::Trouble,
        }
    }
}

/// Judges one tensor. Elements that are not finite have no distance, so they never count as equal.
#[must_use]
pub fn of_tensor(tensor: &TensorComparison) -> TensorVerdict {
    match &tensor.outcome {
        Outcome::Unreadable(_) => TensorVerdict::Unread,
        Outcome::ShapeDiffers => TensorVerdict::Different,
        Outcome::Compared(stats) => match (stats.differing(), stats.is_finite()) {
            (0, true) if stats.is_identical() => TensorVerdict::Identical,
            (0, true) => TensorVerdict::Equal,
            _ => TensorVerdict::Different,
        },
    }
}

/// Judges a comparison.
///
/// `unpaired` counts the names on one side only, `problems` what could not be read before comparing. Replicas that
/// disagree are a difference unless that is allowed; parts of a sum are none.
#[must_use]
pub fn of_all(
    tensors: &[TensorComparison],
    unpaired: usize,
    problems: usize,
    allows_divergence: bool,
) -> Verdict {
    let worst = tensors.iter().map(of_tensor).max();
    let Some(worst) = worst.filter(|_| problems == 0).map(Verdict::from) else {
        return Verdict::Trouble;
    };
    let mut replicas = tensors.iter().flat_map(|tensor| &tensor.replicas);
    let has_diverged = !allows_divergence && replicas.any(ReplicaDifference::is_divergence);
    if unpaired > 0 || has_diverged { worst.max(Verdict::Different) } else { worst }
}

/// The verdict on a checkpoint held against itself, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Soundness {
    /// All copies agree, every element is finite, and every file is part of it.
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
/// `findings` counts the unreferenced files and what else is not as it should be beside tensors, `problems` what could not be read before checking.
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
