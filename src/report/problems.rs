//! Errors and problems on standard error, a line each.

use std::fmt::Display;
use std::io::Write;

use crate::base::side::Side;
use crate::compare::Outcome;
use crate::names::printable;

use super::Report;
use super::check::CheckReport;

/// Problems written in full; what breaks once often breaks in every layer.
const ROWS: usize = 20;

/// Writes a line for every line of an error, each with the program's name in front.
pub fn write_error(text: &str) {
    let mut stderr = std::io::stderr().lock();
    for line in text.lines() {
        // Where even standard error is gone there is nobody left to tell.
        let _ = writeln!(stderr, "ckptcmp: {}", printable(line));
    }
}

/// Writes the first of these problems.
pub fn write_all(problems: &[impl Display]) {
    problems.iter().take(ROWS).for_each(|problem| write_error(&problem.to_string()));
    if problems.len() > ROWS {
        write_error(&format!("and {} more problems", problems.len() - ROWS));
    }
}

/// Writes what could not be read of either side; `is_selective` where `--include` or `--exclude` chose the names.
pub fn write_of_comparison(report: &Report, is_selective: bool) {
    for (side, checkpoint) in Side::BOTH.iter().zip(&report.checkpoints) {
        let problems = checkpoint.problems.iter().map(|problem| format!("{side}: {problem}"));
        write_all(&problems.collect::<Vec<_>>());
    }
    let unread = report.tensors.iter().filter_map(|tensor| match &tensor.outcome {
        Outcome::Unreadable(error) => {
            let (side, file, name) = (error.side, error.file.display(), &tensor.name);
            Some(format!("{side}: {file}: {name}: {}", error.message))
        }
        Outcome::Compared(_) | Outcome::ShapeDiffers => None,
    });
    write_all(&unread.collect::<Vec<_>>());
    if report.tensors.is_empty() {
        let [a, b] = report.only_in.each_ref().map(Vec::len);
        write_error(&if is_selective && (a, b) == (0, 0) {
            "nothing to compare: --include and --exclude leave no name".to_owned()
        } else {
            format!("nothing to compare: no name is on both sides ({a} only in a, {b} only in b)")
        });
    }
}

/// Writes what could not be read of a checkpoint.
pub fn write_of_check(report: &CheckReport) {
    write_all(&report.checkpoint.problems);
    write_all(&report.unread().collect::<Vec<_>>());
}
