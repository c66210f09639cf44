//! A finished comparison -> bytes: one file a form. Nothing here compares or reads.

pub mod catalog;
pub mod check;
pub mod json;
pub mod progress;
pub mod screen;
mod style;
mod units;

pub use style::Style;

use crate::catalog::{Origin, Problem};
use crate::compare::TensorComparison;
use crate::judge::verdict::Verdict;
use crate::names::{Name, printable};

/// All that a report may tell.
#[derive(Debug)]
pub struct Report {
    /// The sides, `a` first.
    pub sides: [SideReport; 2],
    /// Every pair, in natural order of the names.
    pub tensors: Vec<TensorComparison>,
    /// What it comes to.
    pub verdict: Verdict,
}

/// What there is to say of one side alone.
#[derive(Debug)]
pub struct SideReport {
    /// Where it comes from.
    pub origin: Origin,
    /// What could not be read.
    pub problems: Vec<Problem>,
    /// What the user should know.
    pub notes: Vec<String>,
    /// Names that the other side does not have.
    pub only_here: Vec<Name>,
}

/// The path of a checkpoint, and below it what it is.
fn origin_text(origin: &Origin) -> String {
    let mut parts = vec![origin.format.to_owned()];
    if !origin.layout.is_empty() {
        parts.push(origin.layout.clone());
    }
    if let Some(iteration) = origin.iteration {
        parts.push(format!("iteration {iteration}"));
    }
    parts.push(units::counted(origin.shards, "shard"));
    if origin.left_out > 0 {
        parts.push(format!("{} left out", units::counted(origin.left_out, "buffer")));
    }
    let path = origin.resolved.to_string_lossy();
    format!("{}\n   {}", printable(&path), parts.join(", "))
}

/// Says on standard error what went wrong, a line for every cause, each with the program's name in front.
pub fn complain(text: &str) {
    use std::io::Write;
    let mut stderr = std::io::stderr().lock();
    for line in text.lines() {
        // Where even standard error is gone there is nobody left to tell.
        let _ = writeln!(stderr, "ckptcmp: {}", crate::names::printable(line));
    }
}
