//! A finished comparison or check -> bytes: one file a form. Nothing here compares or reads.

pub mod catalog;
pub mod check;
mod json;
pub mod problems;
pub mod progress;
mod screen;
mod style;
mod units;

pub use style::Style;

use std::io::{self, Write};

use crate::catalog::{Catalog, Origin, Problem};
use crate::compare::TensorComparison;
use crate::compare::metrics::Metric;
use crate::judge::verdict::Verdict;
use crate::names::{Name, printable};

use units::{counted, grouped};

/// The report on a comparison.
pub struct Report {
    /// The checkpoints, `a` first.
    pub checkpoints: [CheckpointReport; 2],
    /// Names that only one side has, for each side.
    pub only_in: [Vec<Name>; 2],
    /// Every pair, in natural order of the names.
    pub tensors: Vec<TensorComparison>,
    /// The verdict on it all.
    pub verdict: Verdict,
    /// The metrics that the JSON result has of each pair.
    pub metrics: Vec<&'static Metric>,
}

impl Report {
    /// Writes the JSON result: one object, name -> metrics, in natural order of the names.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        json::write(self, out)
    }

    /// Writes the summary for people.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_screen(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        screen::write(self, style, out)
    }
}

/// The report on one checkpoint alone.
#[derive(Debug)]
pub struct CheckpointReport {
    /// The place that it comes from.
    pub origin: Origin,
    /// Files and tensors that could not be read.
    pub problems: Vec<Problem>,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

impl From<Catalog> for CheckpointReport {
    fn from(Catalog { origin, problems, notes, .. }: Catalog) -> Self {
        Self { origin, problems, notes }
    }
}

/// The terminal, or what stands for it.
struct Screen<'a> {
    style: Style,
    /// Entries of a list before it is cut short.
    rows: usize,
    out: &'a mut dyn Write,
}

impl Screen<'_> {
    /// Writes the path of a checkpoint, and below it its format, its layout and the notes.
    fn checkpoint(&mut self, checkpoint: &CheckpointReport) -> io::Result<()> {
        let origin = &checkpoint.origin;
        let mut parts = vec![origin.format.to_owned()];
        if !origin.layout.is_empty() {
            parts.push(origin.layout.clone());
        }
        if let Some(iteration) = origin.iteration {
            parts.push(format!("iteration {iteration}"));
        }
        parts.push(counted(origin.shards, "shard"));
        if origin.left_out > 0 {
            parts.push(format!("{} left out", counted(origin.left_out, "buffer")));
        }
        let path = origin.resolved.to_string_lossy();
        writeln!(self.out, "{}\n   {}", printable(&path), parts.join(", "))?;
        for note in &checkpoint.notes {
            writeln!(self.out, "   {}", self.style.faint(&printable(note)))?;
        }
        Ok(())
    }

    /// Writes a title and the first entries of a list; nothing where there are none.
    fn list<T>(
        &mut self,
        title: &str,
        entries: &[T],
        text: impl Fn(&T) -> String,
    ) -> io::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        writeln!(self.out, "\n{}", self.style.heading(title))?;
        for entry in entries.iter().take(self.rows) {
            writeln!(self.out, "{}", text(entry))?;
        }
        match entries.len().saturating_sub(self.rows) {
            0 => Ok(()),
            more => writeln!(self.out, "and {} more", grouped(more as u64)),
        }
    }
}
