//! `check`: open, read everything once, judge, report.

use std::io::{self, Write};

use anyhow::{Result, bail};

use crate::base::side::Side;
use crate::catalog::Section;
use crate::cli::CheckArgs;
use crate::compare::{bytes_to_self_check, self_check};
use crate::formats;
use crate::judge::verdict;
use crate::report::check::{self, CheckReport};
use crate::report::{Style, problems, progress};

use super::{thread_pool, unless_closed};

pub(super) fn run(args: &CheckArgs, style: Style) -> Result<u8> {
    let report = thread_pool(args.threads)?.install(|| checked(args))?;
    problems::write_of_check(&report);
    let mut out = io::BufWriter::new(io::stdout().lock());
    unless_closed(
        match (args.json, args.quiet) {
            (true, _) => check::write_json(&report, &mut out),
            (false, true) => Ok(()),
            (false, false) => check::write_screen(&report, style, &mut out),
        }
        .and_then(|()| out.flush()),
    )?;
    Ok(report.soundness.exit_code())
}

fn checked(args: &CheckArgs) -> Result<CheckReport> {
    let mut catalog = formats::open(&args.path, &args.input.options(Side::A, &Section::ALL))?;
    let leftovers = formats::leftovers(&catalog);
    let tensors = catalog.tensors.iter().map(|(name, entry)| (name, &entry.tensor));
    let tensors: Vec<_> = tensors.collect();
    let checks = progress::with_progress(bytes_to_self_check(&tensors), !args.quiet, |done| {
        self_check(&tensors, &catalog.files, done)
    });
    let copies = tensors.iter().map(|(_, tensor)| tensor.replicas().len()).sum();
    if let Some(path) = catalog.files.changed() {
        bail!("{}: changed while it was read; check again when its writer is done", path.display());
    }
    Ok(CheckReport {
        soundness: verdict::of_check(&checks, leftovers.len(), catalog.problems.len()),
        tensors: checks,
        copies,
        tied: std::mem::take(&mut catalog.tied),
        leftovers,
        checkpoint: catalog.into(),
    })
}
