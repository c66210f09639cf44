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
use crate::names::Name;
use crate::verdict::Verdict;

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

/// How the sides are called.
pub const SIDES: [&str; 2] = ["a", "b"];
