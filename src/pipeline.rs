//! The pipeline on one screen: agree on names, pair, compare, judge; and a checkpoint held against itself.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::base::side::Side;
use crate::catalog::{Catalog, Problem};
use crate::compare as compared;
use crate::compare::metrics::{self, Metric, ONE_MINUS_COS};
use crate::compare::{ContentSums, bytes_to_compare, bytes_to_self_check, self_check};
use crate::dialects;
use crate::formats;
use crate::judge::verdict;
use crate::pairing::{Selection, pair, settle_positions};
use crate::report::check::{CheckReport, ForeignGlobal};
use crate::report::{Report, progress};

/// The way in which two checkpoints are compared.
pub struct CompareOptions {
    /// The tensors that take part.
    pub selection: Selection,
    /// The metrics of each tensor in the report.
    pub metrics: Vec<&'static Metric>,
    /// Replicas that disagree are no difference.
    pub allow_diverged: bool,
    /// A progress bar on standard error, where that is a terminal.
    pub shows_progress: bool,
}

impl Default for CompareOptions {
    /// All tensors, the default metrics, replicas that must agree, no progress bar.
    fn default() -> Self {
        Self {
            selection: Selection::default(),
            metrics: metrics::defaults(),
            allow_diverged: false,
            shows_progress: false,
        }
    }
}

/// The way in which a checkpoint is held against itself.
pub struct CheckOptions {
    /// The content sums that its files keep are verified, those of elements included.
    pub verifies_sums: bool,
    /// Globals that no training framework writes make a checkpoint unsound.
    pub fails_on_globals: bool,
    /// A progress bar on standard error, where that is a terminal.
    pub shows_progress: bool,
}

impl Default for CheckOptions {
    /// All sums, globals are no more than told, no progress bar.
    fn default() -> Self {
        Self { verifies_sums: true, fails_on_globals: false, shows_progress: false }
    }
}

/// A file that changed while it was read.
#[derive(Debug, Error)]
#[error("{}{}: {}; {again} again when its writer is done", side_text(*.side), .path.display(), self.what())]
pub struct ChangedError {
    /// The side that the file belongs to, where there are two.
    pub side: Option<Side>,
    /// The file.
    pub path: PathBuf,
    /// The system's words, where it cannot be looked at again.
    pub source: Option<io::Error>,
    again: &'static str,
}

impl ChangedError {
    fn what(&self) -> &'static str {
        match self.source {
            Some(_) => "cannot be looked at again after it was read",
            None => "changed while it was read",
        }
    }
}

fn side_text(side: Option<Side>) -> String {
    side.map(|side| format!("{side}: ")).unwrap_or_default()
}

/// Compares two checkpoints, tensor by tensor, on the threads of the current rayon pool.
///
/// Problems of reading are in the report and make its verdict [`Trouble`](crate::Verdict::Trouble).
///
/// # Errors
/// A file changed while it was read, so that nothing can be said.
///
/// # Examples
///
/// ```
/// use ckptcmp::{CompareOptions, OpenOptions, Verdict};
///
/// let root = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/layouts/gpt-small");
/// let a = ckptcmp::open(format!("{root}/tp1"), &OpenOptions::default())?;
/// let b = ckptcmp::open(format!("{root}/tp2"), &OpenOptions::default())?;
/// let report = ckptcmp::compare(a, b, &CompareOptions::default())?;
/// assert_eq!(report.verdict, Verdict::Identical);
///
/// let mut json = Vec::new();
/// report.write_json(&mut json)?;
/// assert!(String::from_utf8(json)?.contains("\"l2\": 0.0"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn compare(
    mut a: Catalog,
    mut b: Catalog,
    options: &CompareOptions,
) -> Result<Report, ChangedError> {
    dialects::agree(&mut a, &mut b);
    settle_positions(&mut a, &mut b);
    for catalog in [&mut a, &mut b] {
        catalog.problems.retain(|problem| !options.selection.leaves_out(problem));
    }

    let pairing = pair(&a, &b, &options.selection);
    let exact_one_minus_cos = options.metrics.iter().any(|metric| metric.name == ONE_MINUS_COS);
    let total = bytes_to_compare(&pairing.pairs);
    let tensors = progress::with_progress(total, options.shows_progress, |done| {
        compared::compare(&pairing.pairs, [&a.files, &b.files], exact_one_minus_cos, done)
    });
    for (side, catalog) in Side::BOTH.into_iter().zip([&a, &b]) {
        check_unchanged(catalog, Some(side), "compare")?;
    }

    let unpaired = pairing.only_in.iter().map(Vec::len).sum();
    let problems = a.problems.len() + b.problems.len();
    Ok(Report {
        verdict: verdict::of_all(&tensors, unpaired, problems, options.allow_diverged),
        checkpoints: [a.into(), b.into()],
        only_in: pairing.only_in,
        tensors,
        metrics: options.metrics.clone(),
    })
}

/// Holds a checkpoint against itself: its replicas and tied weights, NaN and Inf, content sums, missing and unreferenced
/// files.
///
/// # Errors
/// A file changed while it was read, so that nothing can be said.
///
/// # Examples
///
/// ```
/// use ckptcmp::{CheckOptions, OpenOptions, Soundness};
///
/// let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/layouts/gpt-small/tp2");
/// let catalog = ckptcmp::open(path, &OpenOptions::default())?;
/// let report = ckptcmp::check(catalog, &CheckOptions::default())?;
/// assert_eq!(report.soundness, Soundness::Sound);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn check(mut catalog: Catalog, options: &CheckOptions) -> Result<CheckReport, ChangedError> {
    let CheckOptions { verifies_sums, fails_on_globals, shows_progress } = *options;
    let sums = verifies_sums.then(|| ContentSums::of(&catalog.files));
    let leftovers = formats::leftovers(&mut catalog);
    let tensors = catalog.tensors.iter().map(|(name, entry)| (name, &entry.tensor));
    let tensors: Vec<_> = tensors.collect();
    let checks = progress::with_progress(bytes_to_self_check(&tensors), shows_progress, |done| {
        self_check(&tensors, &catalog.files, sums.as_ref(), done)
    });
    let copies = tensors.iter().map(|(_, tensor)| tensor.replicas().len()).sum();
    let verified_sums = sums.as_ref().map(ContentSums::len);
    if let Some(sums) = sums {
        verify_sums(sums, &mut catalog, shows_progress);
    }
    check_unchanged(&catalog, None, "check")?;
    let globals = foreign_globals(&catalog);
    let bad_globals = if fails_on_globals { globals.len() } else { 0 };
    let findings = leftovers.len() + bad_globals;
    Ok(CheckReport {
        soundness: verdict::of_check(&checks, findings, catalog.problems.len()),
        globals,
        fails_on_globals,
        tensors: checks,
        copies,
        verified_sums,
        tied: std::mem::take(&mut catalog.tied),
        leftovers,
        checkpoint: catalog.into(),
    })
}

/// The foreign globals of all files by name.
fn foreign_globals(catalog: &Catalog) -> BTreeMap<String, ForeignGlobal> {
    let mut globals: BTreeMap<String, ForeignGlobal> = BTreeMap::new();
    for (file, name, count) in catalog.files.noted_globals() {
        let global = globals.entry(name).or_default();
        global.count = global.count.saturating_add(count);
        global.files.insert(catalog.files.path(file).to_path_buf());
    }
    globals
}

/// Takes the sums of what no tensor reads too, and makes a problem of each that is wrong.
fn verify_sums(sums: ContentSums, catalog: &mut Catalog, shows_progress: bool) {
    let wrong = progress::with_progress(sums.bytes_left(), shows_progress, |done| {
        sums.finish(&catalog.files, done)
    });
    for wrong in wrong {
        let problem = match wrong {
            Ok(wrong) => {
                let tensors = catalog.tensors_in(wrong.summed.region);
                let path = catalog.files.path(wrong.summed.region.file);
                Problem::wrong_sum(path, &wrong.summed, wrong.found, &tensors)
            }
            Err(error) => Problem::of_file(error.file, error.message),
        };
        catalog.problems.push(problem);
    }
}

/// Makes sure that all files are what they were when they were opened.
pub(crate) fn check_unchanged(
    catalog: &Catalog,
    side: Option<Side>,
    again: &'static str,
) -> Result<(), ChangedError> {
    match catalog.files.changed() {
        Some(changed) => {
            let (path, source) = (changed.path.to_path_buf(), changed.error);
            Err(ChangedError { side, path, source, again })
        }
        None => Ok(()),
    }
}
