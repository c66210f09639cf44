//! Errors and problems on standard error, a line each.

use std::fmt::Display;
use std::io::Write;

use crate::base::side::Side;
use crate::compare::Outcome;
use crate::names::printable;
use crate::pairing::Selection;

use super::check::CheckReport;
use super::state;
use super::{CheckpointReport, Report};

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

/// Writes lines as they are.
pub fn write_lines(lines: &[String]) {
    let mut stderr = std::io::stderr().lock();
    for line in lines {
        let _ = writeln!(stderr, "{line}");
    }
}

/// Writes the first of these problems.
pub fn write_all(problems: &[impl Display]) {
    problems.iter().take(ROWS).for_each(|problem| write_error(&problem.to_string()));
    if problems.len() > ROWS {
        write_error(&format!("and {} more problems", problems.len() - ROWS));
    }
}

/// Writes what keeps a comparison from a verdict.
pub fn write_of_comparison(report: &Report) {
    of_comparison(report).iter().for_each(|problems| write_all(problems));
}

/// Everything that keeps a comparison from a verdict, a line each: problems of a, of b, tensors that could not be read, rules that
/// are not met, and that nothing was compared. Where its verdict is trouble there is a line, and only there.
pub(super) fn of_comparison(report: &Report) -> Vec<Vec<String>> {
    let of_side = |(side, checkpoint): (&Side, &CheckpointReport)| {
        checkpoint.problems.iter().map(|problem| format!("{side}: {problem}")).collect()
    };
    let mut lines: Vec<Vec<String>> =
        Side::BOTH.iter().zip(&report.checkpoints).map(of_side).collect();
    let unread = report.comparisons().filter_map(|tensor| match &tensor.outcome {
        Outcome::Unreadable(error) => {
            let (side, file, name) = (error.side, error.file.display(), &tensor.name);
            Some(format!("{side}: {file}: {name}: {}", error.message))
        }
        Outcome::Compared(_) | Outcome::ShapeDiffers => None,
    });
    lines.push(unread.collect());
    let unmet = report.unused.iter().filter(|rule| rule.required);
    let unmet = unmet.map(|rule| {
        format!(
            "the rule on line {} requires a tensor, and none is compared: {}",
            rule.line,
            rule.globs.join(", ")
        )
    });
    lines.push(unmet.collect());
    let has_nothing = report.tensors.is_empty() && !report.is_of_state_alone();
    lines.push(has_nothing.then(|| nothing_text(report)).into_iter().collect());
    lines.extend(report.state.as_ref().map(state::problems));
    lines
}

fn nothing_text(report: &Report) -> String {
    let Selection { include, exclude, .. } = &report.selection;
    match report.only_in.each_ref().map(Vec::len) {
        [0, 0] if !include.is_empty() || !exclude.is_empty() => {
            "nothing to compare: --include and --exclude leave no name; a glob has to match all of a name, as *.mlp.* does".to_owned()
        }
        [a, b] => {
            format!("nothing to compare: no name is on both sides ({a} only in a, {b} only in b)")
        }
    }
}

/// Writes what could not be read of a checkpoint.
pub fn write_of_check(report: &CheckReport) {
    write_all(&report.checkpoint.problems);
    write_all(&report.unread().collect::<Vec<_>>());
}
