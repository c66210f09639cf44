//! The pipeline on one screen: open twice, pair, compare, judge, report.

mod check;
mod result;

use std::io::{self, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::base::side::Side;
use crate::catalog::{Catalog, Problem, Section};
use crate::cli::{Cli, Command, CompareArgs, InspectArgs};
use crate::compare::metrics::{self, ONE_MINUS_COS};
use crate::compare::{Outcome, bytes_to_compare, compare};
use crate::dialects;
use crate::formats;
use crate::judge::verdict::{self, Verdict};
use crate::pairing::{Selection, pair, settle_positions};
use crate::report::{self, Report, SideReport, Style, progress};

use self::result::Destination;

/// Runs a command and returns its exit code.
///
/// # Errors
/// Whatever kept the command from being done; a difference is no error.
pub fn run(cli: &Cli) -> Result<u8> {
    match &cli.command {
        Command::Compare(args) => run_compare(args, cli.style()),
        Command::Check(args) => check::run(args, cli.style()),
        Command::Inspect(args) => run_inspect(args, cli.style()),
    }
}

fn run_compare(args: &CompareArgs, style: Style) -> Result<u8> {
    let metrics = metrics::select(&args.metrics).map_err(anyhow::Error::msg)?;
    let selection = Selection {
        include: glob_set(&args.include)?,
        exclude: glob_set(&args.exclude)?,
        vocab_size: args.vocab_size,
    };
    let destination = Destination::of(&args.output, args.force)?;
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = args.threads {
        pool = pool.num_threads(threads.get());
    }
    let report = pool.build().context("cannot start threads")?.install(|| {
        let exact_one_minus_cos = metrics.iter().any(|metric| metric.name == ONE_MINUS_COS);
        compared(args, &selection, exact_one_minus_cos)
    })?;

    print_problems(&report, !args.include.is_empty() || !args.exclude.is_empty());
    let is_written =
        report.tensors.iter().any(|tensor| !matches!(tensor.outcome, Outcome::Unreadable(_)));
    if is_written {
        let mut json = Vec::new();
        report::json::write(&report, &metrics, &mut json)?;
        destination.write(&json)?;
    }
    unless_closed(match (args.quiet, destination == Destination::Stdout) {
        (true, _) => Ok(()),
        (false, true) => report::screen::write(&report, Style::PLAIN, &mut io::stderr().lock()),
        (false, false) => report::screen::write(&report, style, &mut io::stdout().lock()),
    })?;
    Ok(match report.verdict {
        Verdict::Different if args.exit_zero => 0,
        verdict => verdict.exit_code(),
    })
}

/// Whoever reads our output may have seen enough: no reason to complain, nor to change the verdict.
fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    written.or_else(|error| if error.kind() == ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

fn compared(
    args: &CompareArgs,
    selection: &Selection,
    exact_one_minus_cos: bool,
) -> Result<Report> {
    let (a, b) = rayon::join(|| open(Side::A, &args.a, args), || open(Side::B, &args.b, args));
    let (mut a, mut b) = (a?, b?);
    let given = Side::BOTH.map(|side| args.input.run_args(side));
    dialects::agree(&mut a, &mut b, given.each_ref().map(Vec::as_slice));
    settle_positions(&mut a, &mut b);
    for side in [&mut a, &mut b] {
        side.problems.retain(|problem| !selection.leaves_out(problem));
    }
    let pairing = pair(&a, &b, selection);
    let total = bytes_to_compare(&pairing.pairs);
    let tensors = progress::with_progress(total, !args.quiet, |done| {
        compare(&pairing.pairs, [&a.files, &b.files], exact_one_minus_cos, done)
    });
    for (name, side) in Side::BOTH.iter().zip([&a, &b]) {
        if let Some(path) = side.files.changed() {
            bail!(
                "{name}: {}: changed while it was read; compare again when its writer is done",
                path.display()
            );
        }
    }
    let unpaired = pairing.a_only.len() + pairing.b_only.len();
    let problems = a.problems.len() + b.problems.len();
    let side = |catalog: Catalog, only_here| SideReport {
        origin: catalog.origin,
        problems: catalog.problems,
        notes: catalog.notes,
        only_here,
    };
    Ok(Report {
        verdict: verdict::of_all(&tensors, unpaired, problems, args.allow_diverged),
        sides: [side(a, pairing.a_only), side(b, pairing.b_only)],
        tensors,
    })
}

/// Opens one side; every line of what may go wrong says which.
fn open(side: Side, path: &Path, args: &CompareArgs) -> Result<Catalog> {
    let options = args.input.options(side, &[Section::Model]);
    let mut catalog = formats::open(path, &options).map_err(|error| {
        let causes = format!("{:#}", anyhow::Error::from(error));
        let lines = causes.lines().map(|line| format!("{side}: {line}"));
        anyhow::Error::msg(lines.collect::<Vec<_>>().join("\n"))
    })?;
    let is_absent = |section: &&Section| catalog.count(**section) == 0;
    if let Some(section) = options.sections.iter().find(is_absent)
        && catalog.problems.is_empty()
    {
        let message = format!("no tensor of its {} in this checkpoint", section.name());
        catalog.problems.push(Problem { file: Some(path.to_path_buf()), tensor: None, message });
    }
    Ok(catalog)
}

fn glob_set(globs: &[Glob]) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for glob in globs {
        set.add(glob.clone());
    }
    Ok(set.build()?)
}

/// Says on standard error what could not be read, a line each.
fn print_problems(report: &Report, is_selective: bool) {
    for (name, side) in Side::BOTH.iter().zip(&report.sides) {
        print_list(&side.problems, |problem| format!("{name}: {problem}"));
    }
    let unreadable = report.tensors.iter().filter_map(|tensor| match &tensor.outcome {
        Outcome::Unreadable(error) => Some((&tensor.name, error)),
        Outcome::Compared(_) | Outcome::ShapeDiffers => None,
    });
    print_list(&unreadable.collect::<Vec<_>>(), |(tensor, error)| {
        format!("{}: {}: {tensor}: {}", error.side, error.file.display(), error.message)
    });
    if report.tensors.is_empty() {
        let only = report.sides.each_ref().map(|side| side.only_here.len());
        crate::report::complain(&if is_selective && only == [0, 0] {
            "nothing to compare: --include and --exclude leave no name".to_owned()
        } else {
            let [a, b] = only;
            format!("nothing to compare: no name is on both sides ({a} only in a, {b} only in b)")
        });
    }
}

/// The first problems in full; what breaks once often breaks in every layer.
fn print_list<T>(problems: &[T], text: impl Fn(&T) -> String) {
    const SHOWN: usize = 20;
    for problem in problems.iter().take(SHOWN) {
        crate::report::complain(&text(problem));
    }
    if problems.len() > SHOWN {
        crate::report::complain(&format!("and {} more problems", problems.len() - SHOWN));
    }
}

fn run_inspect(args: &InspectArgs, style: Style) -> Result<u8> {
    let catalog = formats::open(&args.path, &args.input.options(Side::A, &Section::ALL))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = match args.json {
        true => report::catalog::write_json(&catalog, &mut out),
        false => report::catalog::write_screen(&catalog, style, &mut out),
    };
    unless_closed(written.and_then(|()| out.flush()))?;
    print_list(&catalog.problems, ToString::to_string);
    Ok(if catalog.problems.is_empty() { 0 } else { 2 })
}
