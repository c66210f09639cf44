//! `check`: open, hold against itself, report.

use std::io::{self, Write};

use anyhow::Result;

use crate::base::side::Side;
use crate::catalog::Section;
use crate::cli::CheckArgs;
use crate::formats;
use crate::pipeline::{self, CheckOptions};
use crate::report::check::CheckReport;
use crate::report::{Style, problems};

use super::{thread_pool, unless_closed};

pub(super) fn run(args: &CheckArgs, style: Style) -> Result<u8> {
    let report = thread_pool(args.threads)?.install(|| checked(args))?;
    problems::write_of_check(&report);
    let mut out = io::BufWriter::new(io::stdout().lock());
    unless_closed(
        match (args.json, args.quiet) {
            (true, _) => report.write_json(&mut out),
            (false, true) => Ok(()),
            (false, false) => report.write_screen(style, &mut out),
        }
        .and_then(|()| out.flush()),
    )?;
    Ok(report.soundness.exit_code())
}

fn checked(args: &CheckArgs) -> Result<CheckReport> {
    let catalog = formats::open(&args.path, &args.input.options(Side::A, &Section::ALL))?;
    let options = CheckOptions { verifies_sums: !args.no_crc, shows_progress: !args.quiet };
    Ok(pipeline::check(catalog, &options)?)
}
