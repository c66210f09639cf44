//! From a typed command line to an exit code: open, compare or check, report.

mod check;
mod inspect;
mod result;
#[cfg(unix)]
mod signals;
mod whole_file;

use std::io::{self, ErrorKind, Write};
use std::num::NonZeroUsize;

use anyhow::{Context, Result};
use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::base::side::Side;
use crate::catalog::{Catalog, Problem, Section};
use crate::cli::{Cli, Command, CompareArgs};
use crate::compare::Outcome;
use crate::compare::metrics;
use crate::formats;
use crate::judge::verdict::Verdict;
use crate::pairing::Selection;
use crate::pipeline::{self, CompareOptions};
use crate::report::{Report, Style, problems};

use self::result::{Destination, check_stdout};

/// Runs a command and returns its exit code.
///
/// # Errors
/// Whatever kept the command from being done; a difference is no error.
pub fn run(cli: &Cli) -> Result<u8> {
    match &cli.command {
        Command::Compare(args) => run_compare(args, cli.style()),
        Command::Check(args) => check::run(args, cli.style()),
        Command::Inspect(args) => inspect::run(args, cli.style()),
    }
}

fn run_compare(args: &CompareArgs, style: Style) -> Result<u8> {
    let options = CompareOptions {
        metrics: metrics::select(&args.metrics).map_err(anyhow::Error::msg)?,
        selection: Selection {
            include: glob_set(&args.include)?,
            exclude: glob_set(&args.exclude)?,
            vocab_size: args.vocab_size,
        },
        allow_diverged: args.allow_diverged,
        shows_progress: !args.quiet,
    };
    let destination = Destination::of(&args.output, args.force)?;
    if !args.quiet && destination != Destination::Stdout {
        check_stdout()?;
    }
    let report = thread_pool(args.threads)?.install(|| compared(args, &options, &destination))?;
    problems::write_of_comparison(&report, !args.include.is_empty() || !args.exclude.is_empty());
    let is_read = |outcome: &Outcome| !matches!(outcome, Outcome::Unreadable(_));
    if report.tensors.iter().any(|tensor| is_read(&tensor.outcome)) {
        let mut json = Vec::new();
        report.write_json(&mut json)?;
        destination.write(&json)?;
    }
    unless_closed(match (args.quiet, destination == Destination::Stdout) {
        (true, _) => Ok(()),
        (false, true) => report.write_screen(Style::PLAIN, &mut io::stderr().lock()),
        (false, false) => on_screen(|out| report.write_screen(style, out)),
    })?;
    Ok(match report.verdict {
        Verdict::Different if args.exit_zero => 0,
        verdict => verdict.exit_code(),
    })
}

fn compared(
    args: &CompareArgs,
    options: &CompareOptions,
    destination: &Destination,
) -> Result<Report> {
    let (a, b) = rayon::join(|| open(Side::A, args), || open(Side::B, args));
    let (a, b) = (a?, b?);
    destination.spare([&a, &b])?;
    Ok(pipeline::compare(a, b, options)?)
}

/// Opens one side; every line of an error names it.
fn open(side: Side, args: &CompareArgs) -> Result<Catalog> {
    let path = [&args.a, &args.b][side];
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
        let wanted = match section {
            Section::Model => "model weights",
            Section::Optimizer => "optimizer state",
        };
        let message = format!("no {wanted} in this checkpoint");
        catalog.problems.push(Problem { file: Some(path.clone()), tensor: None, message });
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

/// The threads that a command asks for, but no more than are of use: several to a core while they wait for a file system.
fn thread_pool(threads: Option<NonZeroUsize>) -> Result<rayon::ThreadPool> {
    const TO_A_CORE: usize = 8;
    const ALWAYS: usize = 64;
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = threads {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        pool = pool.num_threads(threads.get().min(ALWAYS.max(TO_A_CORE * cores)));
    }
    pool.build().context("cannot start threads")
}

/// Writes what a person reads to standard output.
fn on_screen(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    unless_closed(write(&mut out).and_then(|()| out.flush()))
}

/// Forgives a reader that has seen enough: that is no reason to complain, nor to change the verdict.
fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    written.or_else(|error| if error.kind() == ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}
