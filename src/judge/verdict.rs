//! Statistics -> a verdict, and the exit code that says it. Pure.

use crate::compare::{Outcome, ReplicaDifference, TensorComparison};

/// What the comparison comes to, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The same bits.
    Identical,
    /// The same values, though not all the same bits: another dtype, or zeros of another sign.
    Equal,
    /// At least one difference.
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

/// What one tensor comes to. Elements that are not finite have no distance, so they never count as equal.
#[must_use]
pub fn of_tensor(tensor: &TensorComparison) -> Verdict {
    match &tensor.outcome {
        Outcome::Unreadable(_) => Verdict::Trouble,
        Outcome::ShapeDiffers => Verdict::Different,
        Outcome::Compared(stats) => match (stats.differing(), stats.is_finite()) {
            (0, true) if stats.is_identical() => Verdict::Identical,
            (0, true) => Verdict::Equal,
            _ => Verdict::Different,
        },
    }
}

/// What everything together comes to.
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
    let Some(worst) = worst.filter(|_| problems == 0) else {
        return Verdict::Trouble;
    };
    let mut replicas = tensors.iter().flat_map(|tensor| &tensor.replicas);
    let has_diverged = !allows_divergence && replicas.any(ReplicaDifference::is_divergence);
    if unpaired > 0 || has_diverged { worst.max(Verdict::Different) } else { worst }
}

/// What a checkpoint held against itself comes to: `Identical` where it is sound.
///
/// `leftovers` counts what belongs to nothing, `problems` what could not be read before checking.
#[must_use]
pub fn of_check(tensors: &[TensorComparison], leftovers: usize, problems: usize) -> Verdict {
    match of_all(tensors, leftovers, problems, false) {
        Verdict::Equal => Verdict::Identical,
        verdict => verdict,
    }
}
