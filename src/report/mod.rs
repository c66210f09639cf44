//! A finished comparison or check -> bytes: one file a form. Nothing here compares or reads.

mod by_layer;
pub mod catalog;
mod causes;
pub mod check;
pub mod document;
mod fit;
pub mod forms;
pub mod html;
mod json;
pub mod layers;
pub mod problems;
pub mod profile;
pub mod progress;
pub mod rules;
mod screen;
mod state;
mod style;
mod totals;
mod units;
mod unpaired;

pub use forms::Form;
pub use style::Style;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use crate::catalog::{Catalog, Origin, Problem, Section};
use crate::causes::Causes;
use crate::compare::metrics::Metric;
use crate::compare::{Suggestions, TensorComparison};
use crate::judge::policy::{Excused, Policy, UnusedRule};
use crate::judge::state::StateJudgement;
use crate::judge::verdict::{Judgement, Verdict};
use crate::names::renames::{Rename, Renames};
use crate::names::{Name, printable};
use crate::pairing::Selection;

use units::{counted, grouped};

/// The report on a comparison.
pub struct Report {
    /// The checkpoints, `a` first.
    pub checkpoints: [CheckpointReport; 2],
    /// Names that only one side has, for each side.
    pub only_in: [Vec<Name>; 2],
    /// Likely partners of those.
    pub suggested: Suggestions,
    /// The names before a user gave new ones, by these, for each side.
    pub renamed_from: [BTreeMap<Name, Name>; 2],
    /// Every pair, in natural order of the names.
    pub tensors: Vec<Judged>,
    /// Why tensors differ, where that was looked for.
    pub causes: Option<Causes>,
    /// Names that rules keep from being a difference.
    pub excused: Excused,
    /// Rules that decide about no tensor.
    pub unused: Vec<UnusedRule>,
    /// The state of the run, where it was compared.
    pub state: Option<StateJudgement>,
    /// Globs of the selection that match no name, with their flags.
    pub idle_globs: Vec<String>,
    /// The verdict on it all.
    pub verdict: Verdict,
    /// The metrics that the JSON result has of each pair.
    pub metrics: Vec<&'static Metric>,
    /// The bounds and rules that it was judged by.
    pub policy: Policy,
    /// The names that took part.
    pub selection: Selection,
    /// The names that the user gave.
    pub renames: Vec<RenameUse>,
    /// The fp32 masters of a side that has any were compared in the place of its weights.
    pub takes_masters: bool,
    /// Replicas that disagree are no difference.
    pub allow_diverged: bool,
}

/// A rule that gives tensors new names, and the number of those that it renamed on each side.
pub struct RenameUse {
    /// The rule.
    pub rule: Rename,
    /// The tensors.
    pub counts: [usize; 2],
}

impl RenameUse {
    /// All rules, with their counts by number.
    pub fn of(renames: &Renames, counts: impl Fn(usize) -> [usize; 2]) -> Vec<Self> {
        let rules = renames.rules().iter().enumerate();
        rules.map(|(number, rule)| Self { rule: rule.clone(), counts: counts(number) }).collect()
    }

    /// A line for each rule that matches no name.
    #[must_use]
    pub fn idle(rules: &[Self]) -> Vec<String> {
        let idle = rules.iter().filter(|used| used.counts == [0; 2]);
        let text = |Self { rule, .. }: &Self| {
            let place = rule.place.as_ref().map(|(file, line)| format!("{file}, line {line}: "));
            let of = rule.side.map(|side| format!(" of {side}")).unwrap_or_default();
            let text = format!("--map {}{}", place.unwrap_or_default(), rule.text());
            format!("{}: matches no name{of}", printable(&text))
        };
        idle.map(text).collect()
    }
}

/// A compared pair and the judgement on it.
pub struct Judged {
    /// The comparison.
    pub tensor: TensorComparison,
    /// The judgement.
    pub judgement: Judgement,
    /// The line of the rule that decided, where one did.
    pub rule: Option<usize>,
}

impl Report {
    /// Returns whether no tensors but those in the state were to be compared.
    #[must_use]
    pub fn is_of_state_alone(&self) -> bool {
        self.checkpoints.iter().all(|side| side.origin.sections == [Section::State])
    }

    fn comparisons(&self) -> impl Iterator<Item = &TensorComparison> {
        self.tensors.iter().map(|judged| &judged.tensor)
    }

    /// Writes the JSON result: one object, name -> metrics, in natural order of the names.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        json::write(self, out)
    }

    /// Writes the whole of it as a document of its own, by `schema/compare-report.schema.json`; `exit_zero` where the command
    /// exits with 0 even if something differs.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_document(&self, exit_zero: bool, out: &mut dyn Write) -> io::Result<()> {
        document::Document::of(self, exit_zero)?.write_json(out)
    }

    /// Writes the summary for people.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_screen(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        self.write_screen_naming(&[], View::default(), style, out)
    }

    /// Writes the summary for people, with the names of the files that were written.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_screen_naming(
        &self,
        written: &[&Path],
        view: View,
        style: Style,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        screen::write(self, written, view, style, out)
    }
}

/// What the screen shows.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// Entries of a list before it is cut short.
    pub rows: usize,
    /// Every layer has a line of its own.
    pub by_layer: bool,
}

impl Default for View {
    /// Ten rows, layers put together.
    fn default() -> Self {
        Self { rows: 10, by_layer: false }
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
    view: View,
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
        writeln!(
            self.out,
            "{}\n{}",
            printable(&path),
            self.style.wrapped(&format!("   {}", parts.join(", ")), 3)
        )?;
        for note in &checkpoint.notes {
            let note = self.style.wrapped(&format!("   {}", printable(note)), 3);
            writeln!(self.out, "{}", self.style.faint(&note))?;
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
        for entry in entries.iter().take(self.view.rows) {
            writeln!(self.out, "{}", text(entry))?;
        }
        match entries.len().saturating_sub(self.view.rows) {
            0 => Ok(()),
            more => writeln!(self.out, "and {} more", grouped(more as u64)),
        }
    }
}
