//! Opening and comparing without a process, for suites of thousands of steps.

use std::path::Path;
use std::sync::atomic::AtomicU64;

use ckptcmp::catalog::{Catalog, Section};
use ckptcmp::compare::TensorComparison;
use ckptcmp::formats::{self, OpenError, OpenOptions};
use ckptcmp::judge::verdict;
use ckptcmp::pairing::{Pairing, Selection, pair};

/// Opens all sections of a checkpoint.
pub(crate) fn open(path: &Path) -> Result<Catalog, Box<OpenError>> {
    let options = OpenOptions { sections: Section::ALL.to_vec(), ..OpenOptions::default() };
    formats::open(path, &options).map_err(Box::new)
}

/// Compares all pairs of two open checkpoints.
pub(crate) fn compare(pairing: &Pairing, a: &Catalog, b: &Catalog) -> Vec<TensorComparison> {
    ckptcmp::compare::compare(&pairing.pairs, [&a.files, &b.files], false, &AtomicU64::new(0))
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
    let code = verdict::of_all(&compared, unpaired, problems.len(), false).exit_code();
    Outcome { code, compared: compared.len(), trouble: format!("{problems:?} {compared:?}") }
}
