//! From a typed command line to an exit code: open, compare or check, report.

mod check;
mod completions;
mod explain_rules;
mod inspect;
mod names;
mod outputs;
mod report;
mod result;
#[cfg(unix)]
mod signals;
mod summary;
mod whole_file;

use std::io::{self, ErrorKind, Write};
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::base::side::Side;
use crate::catalog::{Catalog, Problem, Section};
use crate::cli::{Cli, Command, CompareArgs};
use crate::compare::metrics;
use crate::formats::{self, OpenOptions};
use crate::judge::policy::{Policy, Rules};
use crate::judge::state::StatePolicy;
use crate::judge::verdict::Verdict;
use crate::pairing::{Globs, Selection};
use crate::pipeline::{self, CompareOptions};
use crate::report::{Report, Style, problems, profile};
use crate::state::Profile;

use self::outputs::Outputs;
use self::result::check_stdout;

/// Runs a command and returns its exit code.
///
/// # Errors
/// Whatever kept the command from being done; a difference is no error.
pub fn run(cli: &Cli) -> Result<u8> {
    match &cli.command {
        Command::Compare(args) if args.explain_profile => {
            on_screen(|out| profile::write(args.profile, cli.style(), out))?;
            Ok(0)
        }
        Command::Compare(args) => run_compare(args, [cli.style(), cli.error_style()]),
        Command::Check(args) => check::run(args, cli.style()),
        Command::Report(args) => report::run(args),
        Command::Inspect(args) => inspect::run(args, cli.style()),
        Command::ExplainRules(args) => explain_rules::run(args, cli.style()),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => completions::run_man(args),
    }
}

/// Compares; the styles are those of standard output and standard error.
fn run_compare(args: &CompareArgs, styles: [Style; 2]) -> Result<u8> {
    let outputs = Outputs::of(args)?;
    let mut has_written = false;
    let done = compared(args, &outputs).and_then(|report| {
        show(&report, args, &outputs, styles)?;
        has_written = true;
        outputs.write_streams(&report)?;
        Ok(report.verdict)
    });
    let verdict = done.or_else(|error| match outputs.write_failure(&error, has_written) {
        Ok(()) => Err(error),
        Err(other) => bail!("{error:#}\n{other:#}"),
    })?;
    Ok(if args.exit_zero && verdict == Verdict::Different { 0 } else { verdict.exit_code() })
}

/// Writes problems, files and the screen.
fn show(
    report: &Report,
    args: &CompareArgs,
    outputs: &Outputs<'_>,
    [style, error_style]: [Style; 2],
) -> Result<()> {
    problems::write_of_comparison(report);
    let written = outputs.write(report)?;
    let view = args.screen.view();
    unless_closed(match (args.quiet, outputs.take_stdout()) {
        (true, _) => Ok(()),
        (false, true) => {
            report.write_screen_naming(&written, view, error_style, &mut io::stderr().lock())
        }
        (false, false) => on_screen(|out| report.write_screen_naming(&written, view, style, out)),
    })?;
    Ok(())
}

fn compare_options(args: &CompareArgs) -> Result<CompareOptions> {
    Ok(CompareOptions {
        metrics: metrics::select(&args.metrics).map_err(anyhow::Error::msg)?,
        selection: Selection {
            include: Globs::new(&args.include)?,
            exclude: Globs::new(&args.exclude)?,
            vocab_size: args.vocab_size,
        },
        naming: names::options(&args.names)?,
        policy: policy(args)?,
        measures_all: !args.reports.is_empty() || args.summary.is_some(),
        allow_diverged: args.allow_diverged,
        finds_causes: !args.no_causes,
        shows_progress: !args.quiet,
    })
}

/// The bounds by flags, and the rules of a file.
fn policy(args: &CompareArgs) -> Result<Policy> {
    let read = args.rules_file.as_deref().map(read_rules).transpose()?;
    let Rules { rules, ignored_state } = read.unwrap_or_default();
    let state = StatePolicy { profile: args.profile, ignore: ignored_state };
    Ok(Policy { bounds: args.judging.bounds(), rules, state })
}

/// Most bytes of a rules file.
const RULES_FILE: u64 = 1 << 20;

fn read_rules(path: &Path) -> Result<Rules> {
    let text = names::read_text(path, "rules", RULES_FILE)?;
    text.parse().with_context(|| path.display().to_string())
}

fn compared(args: &CompareArgs, outputs: &Outputs<'_>) -> Result<Report> {
    let options = compare_options(args)?;
    if !args.quiet && !outputs.take_stdout() {
        check_stdout()?;
    }
    thread_pool(args.threads)?.install(|| {
        let (a, b) = match rayon::join(|| open(Side::A, args), || open(Side::B, args)) {
            (Err(of_a), Err(of_b)) => bail!("{of_a:#}\n{of_b:#}"),
            (a, b) => (a?, b?),
        };
        outputs.spare([&a, &b])?;
        Ok(pipeline::compare(a, b, &options)?)
    })
}

/// Opens one side as the command line says.
fn open(side: Side, args: &CompareArgs) -> Result<Catalog> {
    let path = [&args.a, &args.b][side];
    let sections = match args.profile {
        Profile::Weights => &[Section::Model][..],
        Profile::Resume | Profile::Strict => &Section::ALL,
    };
    open_side(side, path, args.input.options(side, sections), args.names.masters)
}

/// Opens one side, with its masters where they are to be compared and there are some; every line of an error names it. A section
/// that was asked for and is not there is a problem.
fn open_side(
    side: Side,
    path: &Path,
    mut options: OpenOptions,
    takes_masters: bool,
) -> Result<Catalog> {
    let asked = options.sections.clone();
    if takes_masters {
        options.sections.extend(Section::OF_TENSORS);
        options.sections.sort();
        options.sections.dedup();
    }
    let mut catalog = formats::open(path, &options).map_err(|error| {
        let causes = format!("{:#}", anyhow::Error::from(error));
        let lines = causes.lines().map(|line| format!("{side}: {line}"));
        anyhow::Error::msg(lines.collect::<Vec<_>>().join("\n"))
    })?;
    let is_absent = |section: &&Section| !formats::has_section(&catalog, **section);
    if let Some(section) = asked.iter().find(is_absent)
        && catalog.problems.is_empty()
    {
        let message = format!("no {} in this checkpoint", section.contents());
        catalog.problems.push(Problem::of_file(path, message));
    }
    Ok(catalog)
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
