//! Opening and comparing without a process, for suites of thousands of steps.

use std::path::Path;
use std::sync::atomic::AtomicU64;

use ckptcmp::catalog::{Catalog, Section};
use ckptcmp::compare::{ReplicaDifference, TensorComparison, Wanted};
use ckptcmp::formats::{self, OpenError, OpenOptions};
use ckptcmp::judge::bounds::Bounds;
use ckptcmp::judge::verdict;
use ckptcmp::pairing::{Pair, Pairing, Selection, pair};

/// Opens all sections of a checkpoint.
pub(crate) fn open(path: &Path) -> Result<Catalog, Box<OpenError>> {
    let options = OpenOptions { sections: Section::OF_TENSORS.to_vec(), ..OpenOptions::default() };
    formats::open(path, &options).map_err(Box::new)
}

/// Compares all pairs of two open checkpoints.
pub(crate) fn compare(pairing: &Pairing, a: &Catalog, b: &Catalog) -> Vec<TensorComparison> {
    let wanted = |_: &Pair| Wanted::default();
    ckptcmp::compare::compare(&pairing.pairs, wanted, [&a.files, &b.files], &AtomicU64::new(0))
}

/// The end of a comparison.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// As the command would exit.
    pub(crate) code: u8,
    /// Number of pairs compared.
    pub(crate) compared: usize,
    /// Everything that could not be read, in words.
    pub(crate) trouble: String,
}

/// Opens and compares all sections of two checkpoints.
pub(crate) fn outcome(a: &Path, b: &Path) -> Outcome {
    let (a, b) = match (open(a), open(b)) {
        (Ok(a), Ok(b)) => (a, b),
        (Err(error), _) | (_, Err(error)) => {
            return Outcome { code: 2, compared: 0, trouble: error.to_string() };
        }
    };
    let pairing = pair(&a, &b, &Selection::default());
    let compared = compare(&pairing, &a, &b);
    let unpaired = pairing.only_in.iter().map(Vec::len).sum();
    let problems: Vec<String> =
        a.problems.iter().chain(&b.problems).map(ToString::to_string).collect();
    let judgements = compared.iter().map(|tensor| verdict::of_tensor(tensor, &Bounds::default()));
    let judgements: Vec<_> = judgements.collect();
    let replicas = compared.iter().flat_map(|tensor| &tensor.replicas);
    let has_diverged = replicas.into_iter().any(ReplicaDifference::is_divergence);
    let verdict = verdict::of_all(&judgements, unpaired, problems.len(), has_diverged);
    let code = verdict.exit_code();
    Outcome { code, compared: compared.len(), trouble: format!("{problems:?} {compared:?}") }
}
