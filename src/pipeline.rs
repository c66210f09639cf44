//! The pipeline on one screen: agree on names, pair, compare, judge; and a checkpoint held against itself.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;

use thiserror::Error;

use crate::base::side::Side;
use crate::catalog::{Catalog, Problem, Section};
use crate::causes::{self, Causes, Compared, Facts};
use crate::compare as compared;
use crate::compare::metrics::{self, HISTOGRAM, MAX_ULP, Metric, ONE_MINUS_COS};
use crate::compare::{
    ContentSums, Outcome, ReplicaDifference, Suggestions, TensorComparison, Wanted,
    bytes_to_compare, bytes_to_self_check, self_check,
};
use crate::dialects::{self, RenameCounts};
use crate::formats;
use crate::judge::policy::Policy;
use crate::judge::state::{StateJudgement, StatePolicy};
use crate::judge::verdict::{self, TensorVerdict};
use crate::names::Name;
use crate::names::renames::Renames;
use crate::pairing::{Pair, Pairing, Selection, find, pair, settle_positions};
use crate::report::check::{CheckReport, ForeignGlobal};
use crate::report::{Judged, RenameUse, Report, progress};
use crate::state::{self, TensorPair};

/// The way in which two checkpoints are compared.
pub struct CompareOptions {
    /// The tensors that take part.
    pub selection: Selection,
    /// The names that tensors get before they are paired.
    pub naming: NameOptions,
    /// The metrics of each tensor in the report.
    pub metrics: Vec<&'static Metric>,
    /// The bounds that tensors have to hold, and the names that may be on one side only.
    pub policy: Policy,
    /// The report has all metrics of each tensor, some of which take longer, not only those that were asked for.
    pub measures_all: bool,
    /// Replicas that disagree are no difference.
    pub allow_diverged: bool,
    /// Causes are looked for of which tensors differ.
    pub finds_causes: bool,
    /// A progress bar on standard error, where that is a terminal.
    pub shows_progress: bool,
}

/// The names that tensors get before they are paired.
#[derive(Debug, Clone, Default)]
pub struct NameOptions {
    /// Those that a user gives.
    pub renames: Renames,
    /// The fp32 masters of a side that has any take the names of their weights.
    pub takes_masters: bool,
}

impl Default for CompareOptions {
    /// All tensors, the default metrics, equal values, replicas that must agree, causes, no progress bar.
    fn default() -> Self {
        Self {
            selection: Selection::default(),
            naming: NameOptions::default(),
            metrics: metrics::defaults(),
            policy: Policy::default(),
            measures_all: false,
            allow_diverged: false,
            finds_causes: true,
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
    if a.files.is_same_as(&b.files) {
        b.notes.push("the same files as a".to_owned());
    }
    let (mut pairing, renamed) = paired(&mut a, &mut b, &options.naming, &options.selection);
    let excused = options.policy.excuse(&mut pairing);
    let total = bytes_to_compare(&pairing.pairs);
    let wanted = |pair: &Pair| options.wanted(pair);
    let tensors = progress::with_progress(total, options.shows_progress, |done| {
        compared::compare(&pairing.pairs, wanted, [&a.files, &b.files], done)
    });
    let suggested = suggested(&pairing, [&a, &b]);
    let mut tensors: Vec<Judged> =
        tensors.into_iter().map(|tensor| options.judged(tensor)).collect();
    let causes = options.finds_causes.then(|| {
        let facts = Facts::of([&a, &b]);
        options.causes(&pairing.pairs, &mut tensors, [&a, &b], &facts)
    });
    let state = sides_all(&a, &b, |side| side.origin.sections.contains(&Section::State))
        .then(|| compare_state([&a, &b], &options.policy.state));
    for (side, catalog) in Side::BOTH.into_iter().zip([&a, &b]) {
        check_unchanged(catalog, Some(side), "compare")?;
    }
    let names = tensors.iter().map(|judged| &judged.tensor.name);
    let unused = options.policy.unused(names, &excused);
    let unpaired = pairing.only_in.iter().map(Vec::len).sum();
    let unmet = unused.iter().filter(|rule| rule.required).count();
    let problems = a.problems.len() + b.problems.len() + unmet;
    let diverged = tensors.iter().flat_map(|judged| &judged.tensor.replicas);
    let has_diverged = diverged.into_iter().any(ReplicaDifference::is_divergence);
    let judgements = tensors.iter().map(|judged| &judged.judgement);
    let is_tensorless = sides_all(&a, &b, |side| side.origin.sections == [Section::State]);
    let verdict = if is_tensorless {
        verdict::without_tensors(problems)
    } else {
        verdict::of_all(judgements, unpaired, problems, has_diverged && !options.allow_diverged)
    };
    let verdict = state.as_ref().map_or(verdict, |state| verdict::with_state(verdict, state));
    Ok(Report {
        verdict,
        state,
        renamed_from: [&mut a, &mut b].map(|side| std::mem::take(&mut side.renamed)),
        checkpoints: [a.into(), b.into()],
        only_in: pairing.only_in,
        suggested,
        tensors,
        excused,
        causes,
        unused,
        idle_globs: pairing.idle_globs,
        metrics: options.metrics.clone(),
        policy: options.policy.clone(),
        selection: options.selection.clone(),
        renames: RenameUse::of(&options.naming.renames, |rule| renamed.by(rule)),
        takes_masters: options.naming.takes_masters,
        allow_diverged: options.allow_diverged,
    })
}

fn sides_all(a: &Catalog, b: &Catalog, is: impl Fn(&Catalog) -> bool) -> bool {
    is(a) && is(b)
}

/// Compares the state of two runs, the tensors in it by the kernel.
fn compare_state([a, b]: [&Catalog; 2], policy: &StatePolicy) -> StateJudgement {
    let found = state::compare([&a.kept, &b.kept]);
    let pair = |tensors: &TensorPair| Pair {
        name: Name::new(tensors.path.as_str()),
        sides: tensors.sides.each_ref().map(|tensor| (**tensor).clone()),
        rows_left_out: [0, 0],
        tied_side: None,
    };
    let pairs: Vec<Pair> = found.tensors.iter().map(pair).collect();
    let files = [&a.files, &b.files];
    let compared = compared::compare(&pairs, |_| Wanted::default(), files, &AtomicU64::new(0));
    let tensors: Vec<_> = found.tensors.into_iter().zip(compared).collect();
    policy.judge(found.compared, found.differences, &tensors)
}

/// Agrees on names and pairs the tensors of two checkpoints; the counts are those of the user's renames.
pub fn paired(
    a: &mut Catalog,
    b: &mut Catalog,
    naming: &NameOptions,
    selection: &Selection,
) -> (Pairing, RenameCounts) {
    if naming.takes_masters {
        dialects::take_masters(a, b);
    }
    let renamed = dialects::agree(a, b, &naming.renames);
    settle_positions(a, b);
    let idle_globs = selection.idle_globs([a, b]);
    for catalog in [&mut *a, &mut *b] {
        catalog.problems.retain(|problem| !selection.leaves_out(problem));
    }
    (Pairing { idle_globs, ..pair(a, b, selection) }, renamed)
}

/// The likely partners of the tensors that have none.
fn suggested(pairing: &Pairing, catalogs: [&Catalog; 2]) -> Suggestions {
    let entries = Side::BOTH.map(|side| {
        let names = pairing.only_in[side].iter();
        names.filter_map(|name| Some((name, find(catalogs[side], name)?.0))).collect::<Vec<_>>()
    });
    let unpaired = entries.each_ref().map(|entries| {
        entries.iter().map(|(name, entry)| (*name, &entry.tensor)).collect::<Vec<_>>()
    });
    let paired: Vec<&Name> = pairing.pairs.iter().map(|pair| &pair.name).collect();
    compared::suggest(&unpaired, &paired, catalogs.map(|catalog| &catalog.files))
}

impl CompareOptions {
    /// The statistics that metrics and bounds ask for.
    fn wanted(&self, pair: &Pair) -> Wanted {
        let bounds = self.policy.bounds(&pair.name).wanted(pair.dtypes());
        let asks = |names: &[&str]| {
            self.measures_all || self.metrics.iter().any(|metric| names.contains(&metric.name))
        };
        Wanted {
            spread: bounds.spread || asks(&[MAX_ULP, HISTOGRAM]),
            one_minus_cos: bounds.one_minus_cos || asks(&[ONE_MINUS_COS]),
            ..bounds
        }
    }

    /// Why those tensors differ that do not pass. One of which a file cannot be read any more is not compared.
    fn causes(
        &self,
        pairs: &[Pair],
        tensors: &mut [Judged],
        [a, b]: [&Catalog; 2],
        facts: &Facts,
    ) -> Causes {
        let fails = |(place, judged): (usize, &Judged)| {
            let is_cast = judged.judgement.verdict == TensorVerdict::Cast;
            let is_told = judged.judgement.passes || is_cast && judged.tensor.is_finite();
            (!is_told).then_some(place)
        };
        let places: Vec<usize> = tensors.iter().enumerate().filter_map(fails).collect();
        let comparisons: Vec<&TensorComparison> =
            tensors.iter().map(|judged| &judged.tensor).collect();
        let files = [&a.files, &b.files];
        let (causes, errors) =
            causes::find(Compared { pairs, tensors: &comparisons, files, facts }, &places);
        for (place, error) in errors {
            let judged = &mut tensors[place];
            judged.tensor.outcome = Outcome::Unreadable(error);
            judged.judgement =
                verdict::of_tensor(&judged.tensor, &self.policy.bounds(&judged.tensor.name));
        }
        causes
    }

    fn judged(&self, tensor: TensorComparison) -> Judged {
        let judgement = verdict::of_tensor(&tensor, &self.policy.bounds(&tensor.name));
        let rule = self.policy.rule(&tensor.name).map(|(_, rule)| rule.line);
        Judged { tensor, judgement, rule }
    }
}

/// Holds a checkpoint against itself: its replicas and tied weights, its weights and their masters, NaN and Inf, content
/// sums, missing and unreferenced files.
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
    let rounds_otherwise = catalog.state.rounds_otherwise();
    let misrounded = match rounds_otherwise {
        None => checks.iter().filter(|tensor| tensor.is_misrounded()).count(),
        Some(_) => 0,
    };
    let findings = leftovers.len() + bad_globals + misrounded;
    Ok(CheckReport {
        soundness: verdict::of_check(&checks, findings, catalog.problems.len()),
        globals,
        fails_on_globals,
        rounds_otherwise,
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
