//! `check`: open, read everything once, judge, report.

use std::io::{self, Write};

use anyhow::{Context, Result, bail};

use crate::base::side::Side;
use crate::catalog::{Catalog, Section};
use crate::cli::CheckArgs;
use crate::compare::{bytes_to_survey, survey};
use crate::formats;
use crate::judge::verdict;
use crate::pairing::Pair;
use crate::report::check::CheckReport;
use crate::report::{Style, check, progress};

use super::{print_list, unless_closed};

pub(super) fn run(args: &CheckArgs, style: Style) -> Result<u8> {
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = args.threads {
        pool = pool.num_threads(threads.get());
    }
    let report = pool.build().context("cannot start threads")?.install(|| checked(args))?;
    print_list(&report.problems, ToString::to_string);
    let unreadable: Vec<_> = report.unreadable().collect();
    print_list(&unreadable, |(tensor, error)| {
        format!("{}: {}: {}", error.file.display(), tensor.name, error.message)
    });
    let mut out = io::BufWriter::new(io::stdout().lock());
    unless_closed(
        match (args.json, args.quiet) {
            (true, _) => check::write_json(&report, &mut out),
            (false, true) => Ok(()),
            (false, false) => check::write_screen(&report, style, &mut out),
        }
        .and_then(|()| out.flush()),
    )?;
    Ok(report.verdict.exit_code())
}

fn checked(args: &CheckArgs) -> Result<CheckReport> {
    let catalog = formats::open(&args.path, &args.input.options(Side::A, &Section::ALL))?;
    let leftovers = formats::leftovers(&catalog);
    let Catalog { origin, files, tensors, tied, problems, notes, .. } = catalog;
    let pair = |(name, entry): (_, crate::catalog::Entry)| Pair {
        name,
        sides: [entry.tensor.clone(), entry.tensor],
        rows_left_out: [0, 0],
        tied_side: None,
    };
    let pairs: Vec<Pair> = tensors.into_iter().map(pair).collect();
    let tensors = progress::with_progress(bytes_to_survey(&pairs), !args.quiet, |done| {
        survey(&pairs, &files, done)
    });
    if let Some(path) = files.changed() {
        bail!("{}: changed while it was read; check again when its writer is done", path.display());
    }
    let copies = pairs.iter().map(|pair| pair.sides[0].replicas().len()).sum();
    let verdict = verdict::of_check(&tensors, leftovers.len(), problems.len());
    Ok(CheckReport { origin, notes, problems, tensors, copies, tied, leftovers, verdict })
}
