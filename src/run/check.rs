//! `check`: open, hold against itself, report.

use anyhow::Result;

use crate::base::side::Side;
use crate::catalog::Section;
use crate::cli::{CheckArgs, FailOn};
use crate::formats;
use crate::pipeline::{self, CheckOptions};
use crate::report::check::CheckReport;
use crate::report::{Style, problems};

use super::result::{check_stdout, to_stdout};
use super::{on_screen, thread_pool};

pub(super) fn run(args: &CheckArgs, style: Style) -> Result<u8> {
    if !args.quiet || args.json {
        check_stdout()?;
    }
    let report = thread_pool(args.threads)?.install(|| checked(args))?;
    problems::write_of_check(&report);
    match (args.json, args.quiet) {
        (true, _) => to_stdout(|out| report.write_json(out))?,
        (false, true) => {}
        (false, false) => on_screen(|out| report.write_screen(style, out))?,
    }
    Ok(report.soundness.exit_code())
}

fn checked(args: &CheckArgs) -> Result<CheckReport> {
    let mut options = args.input.options(Side::A, &Section::OF_TENSORS);
    options.sections.retain(|section| *section != Section::State);
    let catalog = formats::open(&args.path, &options)?;
    let options = CheckOptions {
        verifies_sums: !args.no_crc,
        fails_on_globals: args.fail_on.contains(&FailOn::Globals),
        shows_progress: !args.quiet,
    };
    Ok(pipeline::check(catalog, &options)?)
}
