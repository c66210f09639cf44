//! A self-check for people and as JSON.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use crate::catalog::{Problem, Section, Tied};
use crate::compare::{ReplicaDifference, Rounding, TensorCheck};
use crate::judge::verdict::Soundness;
use crate::kernel::Stats;
use crate::names::{Name, printable};

use super::json::write_value;
use super::units::{bytes, counted, grouped, scientific, shape};
use super::{CheckpointReport, Screen, Style, View};

/// The report on a self-check.
#[derive(Debug)]
pub struct CheckReport {
    /// The checkpoint.
    pub checkpoint: CheckpointReport,
    /// Every tensor held against its own copies.
    pub tensors: Vec<TensorCheck>,
    /// Further copies of parts of tensors, all of which were read.
    pub copies: usize,
    /// Content sums of entries that were verified, those on opening left out; none where they were not to be.
    pub verified_sums: Option<usize>,
    /// Parameters that share the values of another one.
    pub tied: BTreeMap<Name, Tied>,
    /// Unreferenced files and bytes.
    pub leftovers: Vec<Problem>,
    /// Classes and functions that pickles name and no training framework writes, by dotted name.
    pub globals: BTreeMap<String, ForeignGlobal>,
    /// These are no mere warning.
    pub fails_on_globals: bool,
    /// The option of the run by which weights need not be their masters rounded.
    pub rounds_otherwise: Option<&'static str>,
    /// The verdict on it all.
    pub soundness: Soundness,
}

/// A global that no training framework writes.
#[derive(Debug, Clone, Default)]
pub struct ForeignGlobal {
    /// Number of times that it is named.
    pub count: u64,
    /// The files that name it.
    pub files: BTreeSet<PathBuf>,
}

impl CheckReport {
    /// Writes the report as JSON.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        write_json(self, out)
    }

    /// Writes the report for people.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_screen(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        write_screen(self, style, out)
    }

    /// A line for every tensor whose files cannot be read.
    pub(super) fn unread(&self) -> impl Iterator<Item = String> {
        let unread = |tensor: &TensorCheck| {
            let error = tensor.stats.as_ref().err()?;
            Some(format!("{}: {}: {}", error.file.display(), tensor.name, error.message))
        };
        self.tensors.iter().filter_map(unread)
    }

    fn read(&self) -> impl Iterator<Item = (&TensorCheck, &Stats)> {
        self.tensors.iter().filter_map(|tensor| Some((tensor, tensor.stats.as_ref().ok()?)))
    }

    fn not_finite(&self) -> impl Iterator<Item = (&TensorCheck, &Stats)> {
        self.read().filter(|(_, stats)| !stats.is_finite())
    }

    /// Tensors with copies that should be the same and are not.
    fn diverged(&self) -> impl Iterator<Item = &TensorCheck> {
        let has_diverged =
            |tensor: &&TensorCheck| tensor.replicas.iter().any(ReplicaDifference::is_divergence);
        self.tensors.iter().filter(has_diverged)
    }

    /// Weights with their masters.
    fn mastered(&self) -> impl Iterator<Item = (&TensorCheck, Rounding)> {
        self.read().filter_map(|(tensor, _)| Some((tensor, tensor.rounding?)))
    }

    /// Weights that are not the rounding of their masters, the one with the most such elements first.
    fn misrounded(&self) -> Vec<(&TensorCheck, Rounding)> {
        let misrounded = self.mastered().filter(|(tensor, _)| tensor.is_misrounded());
        let mut misrounded: Vec<_> = misrounded.collect();
        misrounded.sort_by_key(|(_, rounding)| Reverse(rounding.misses));
        misrounded
    }

    /// Tensors of which every rank stores its own part of a sum.
    fn partial(&self) -> impl Iterator<Item = &TensorCheck> {
        let is_sum = |tensor: &&TensorCheck| {
            !tensor.replicas.is_empty()
                && !tensor.replicas.iter().any(ReplicaDifference::is_divergence)
        };
        self.tensors.iter().filter(is_sum)
    }
}

/// Rows of a list before it is cut short.
const ROWS: usize = 20;

/// Writes what was checked, what was found, one closing line.
///
/// # Errors
/// The sink cannot be written to.
fn write_screen(report: &CheckReport, style: Style, out: &mut dyn Write) -> io::Result<()> {
    let mut screen = Screen { style, view: View { rows: ROWS, ..View::default() }, out };
    screen.checkpoint(&report.checkpoint)?;
    writeln!(screen.out, "\n{}", totals(report))?;
    if let Some(sums @ 1..) = report.verified_sums {
        writeln!(screen.out, "verified {}", counted(sums, "content sum"))?;
    }
    let misrounded = report.misrounded();
    if let count @ 1.. = report.mastered().count() {
        writeln!(screen.out, "{}", masters_text(report, count, misrounded.len()))?;
    }
    let title = format!("not the rounding of its master: {}", counted(misrounded.len(), "weight"));
    screen.list(&title, &misrounded, misrounded_line)?;
    let diverged: Vec<String> = report.diverged().flat_map(diverged_lines).collect();
    let title = format!("copies that disagree: {}", counted(report.diverged().count(), "tensor"));
    screen.list(&title, &diverged, String::clone)?;
    let partial: Vec<String> = report.partial().flat_map(diverged_lines).collect();
    let title =
        format!("parts of a sum, no copies: {}", counted(report.partial().count(), "tensor"));
    screen.list(&title, &partial, String::clone)?;
    let not_finite: Vec<_> = report.not_finite().collect();
    let title = format!("not finite: {}", counted(not_finite.len(), "tensor"));
    screen.list(&title, &not_finite, not_finite_line)?;
    let title = format!("unreferenced files: {}", grouped(report.leftovers.len() as u64));
    screen.list(&title, &report.leftovers, ToString::to_string)?;
    let globals: Vec<_> = report.globals.iter().collect();
    let title = format!("warning: {} that no training framework writes", globals_text(report));
    screen.list(&title, &globals, global_line)?;
    writeln!(screen.out, "\n{}", closing(report, style))
}

fn totals(report: &CheckReport) -> String {
    let elements: u64 = report.read().map(|(_, stats)| stats.count()).sum();
    let size =
        |(tensor, stats): (&TensorCheck, &Stats)| stats.count().saturating_mul(tensor.dtype.size());
    let copies = match report.copies {
        0 => String::new(),
        1 => "; 1 further copy of parts of them".to_owned(),
        copies => format!("; {} further copies of parts of them", grouped(copies as u64)),
    };
    format!(
        "checked {}, {} elements, {}{copies}",
        counted(report.read().count(), "tensor"),
        grouped(elements),
        bytes(report.read().map(size).fold(0, u64::saturating_add)),
    )
}

/// How many weights have a master, and how many are its rounding.
fn masters_text(report: &CheckReport, count: usize, misrounded: usize) -> String {
    let is_weight =
        |(tensor, _): &(&TensorCheck, &Stats)| Section::of(tensor.name.as_str()) == Section::Model;
    let exact = match count - misrounded {
        exact if misrounded == 0 => {
            format!("{} exactly its rounding", if exact == 1 { "is" } else { "all are" })
        }
        exact => format!("{} of them exactly its rounding", grouped(exact as u64)),
    };
    let weights = counted(report.read().filter(is_weight).count(), "weight");
    let verb = if count == 1 { "has" } else { "have" };
    let but = match report.rounds_otherwise {
        Some(option) if misrounded > 0 => {
            format!(": no finding, as {option} of the run rounds in another way")
        }
        _ => String::new(),
    };
    format!("{} of {weights} {verb} an fp32 master, {exact}{but}", grouped(count as u64))
}

fn misrounded_line((tensor, rounding): &(&TensorCheck, Rounding)) -> String {
    format!(
        "{}: {} of {} elements, off by up to {} ulp of {}",
        tensor.name,
        grouped(rounding.misses),
        grouped(tensor.shape.iter().product()),
        grouped(rounding.max_ulp),
        tensor.dtype,
    )
}

fn diverged_lines(tensor: &TensorCheck) -> Vec<String> {
    let line = |replica: &ReplicaDifference| {
        let stats = &replica.stats;
        let stored = match replica.stored_name.ends_with(tensor.name.as_str()) {
            true => String::new(),
            false => format!(" ({})", printable(&replica.stored_name)),
        };
        format!(
            "{}: {}{stored} differs from {}: {} of {}, max_abs {}, l2 {}",
            tensor.name,
            printable(&replica.copy),
            printable(&replica.first),
            grouped(stats.differing()),
            shape(&tensor.shape),
            scientific(stats.max_abs()),
            scientific(stats.l2()),
        )
    };
    tensor.replicas.iter().map(line).collect()
}

fn not_finite_line((tensor, stats): &(&TensorCheck, &Stats)) -> String {
    let first = tensor.first_not_finite.as_ref().map_or_else(String::new, |(index, value)| {
        format!(", the first at {}: {value}", shape(index))
    });
    format!(
        "{}: {} NaN, {} Inf of {}{first}",
        tensor.name,
        grouped(stats.nan()[0]),
        grouped(stats.inf()[0]),
        grouped(stats.count())
    )
}

fn globals_text(report: &CheckReport) -> String {
    counted(report.globals.len(), "global")
}

fn global_line((name, global): &(&String, &ForeignGlobal)) -> String {
    let first = global.files.iter().next().map(|file| file.to_string_lossy()).unwrap_or_default();
    let others = match global.files.len() {
        0 | 1 => String::new(),
        files => format!(" and {} more", counted(files - 1, "file")),
    };
    let times = counted(usize::try_from(global.count).unwrap_or(usize::MAX), "time");
    format!("{}: {times}, in {}{others}", printable(name), printable(&first))
}

fn closing(report: &CheckReport, style: Style) -> String {
    let bad_globals = if report.fails_on_globals { report.globals.len() } else { 0 };
    let misrounded = match report.rounds_otherwise {
        None => report.misrounded().len(),
        Some(_) => 0,
    };
    let counts = [
        (misrounded, "weight", " that are not the rounding of their masters"),
        (report.diverged().count(), "tensor", " with copies that disagree"),
        (report.not_finite().count(), "tensor", " with NaN or Inf"),
        (report.leftovers.len(), "unreferenced file", ""),
        (bad_globals, "global", " that no training framework writes"),
    ];
    let counts = counts.into_iter().filter(|(count, ..)| *count > 0);
    let mut findings: Vec<String> =
        counts.map(|(count, noun, with)| format!("{}{with}", counted(count, noun))).collect();
    let word = report.soundness.name();
    match report.soundness {
        Soundness::Trouble if report.tensors.is_empty() => {
            format!("{}: nothing to check", style.bad(word))
        }
        Soundness::Trouble => {
            let parts = report.checkpoint.problems.len() + report.unread().count();
            findings
                .insert(0, format!("{} could not be read or put together", counted(parts, "part")));
            format!("{}: {}", style.bad(word), findings.join(", "))
        }
        Soundness::Unsound => format!("{}: {}", style.bad(word), findings.join(", ")),
        Soundness::Sound => {
            let total = counted(report.tensors.len(), "tensor");
            format!("{}: {total} read, all copies agree, all elements finite", style.good(word))
        }
    }
}

/// Writes the same as JSON.
///
/// # Errors
/// The sink cannot be written to.
fn write_json(report: &CheckReport, out: &mut dyn Write) -> io::Result<()> {
    let CheckpointReport { origin, problems, notes } = &report.checkpoint;
    let copies = |tensor: &TensorCheck| {
        let copies = tensor.replicas.iter().map(|copy| json_of_copy(tensor, copy));
        (tensor.name.as_str().to_owned(), copies.collect::<Value>())
    };
    let not_finite = report.not_finite().map(|(tensor, stats)| {
        let counts = json!({
            "nan": stats.nan()[0],
            "inf": stats.inf()[0],
            "numel": stats.count(),
            "first_index": tensor.first_not_finite.as_ref().map(|(index, _)| index),
        });
        (tensor.name.as_str().to_owned(), counts)
    });
    let problems = problems.iter().map(ToString::to_string).chain(report.unread());
    let tied =
        report.tied.iter().map(|(name, tied)| (name.as_str().to_owned(), json!(tied.to.as_str())));
    let whole = json!({
        "path": origin.resolved,
        "format": origin.format,
        "layout": origin.layout,
        "iteration": origin.iteration,
        "verdict": report.soundness.name(),
        "tensors": report.tensors.len(),
        "copies": report.copies,
        "verified_sums": report.verified_sums,
        "notes": notes,
        "problems": problems.collect::<Vec<_>>(),
        "replicas": report.diverged().map(copies).collect::<Map<_, _>>(),
        "partial_sums": report.partial().map(copies).collect::<Map<_, _>>(),
        "not_finite": not_finite.collect::<Map<_, _>>(),
        "masters": json_of_masters(report),
        "tied": tied.collect::<Map<_, _>>(),
        "globals": report.globals.iter().map(json_of_global).collect::<Map<_, _>>(),
        "leftovers": report.leftovers.iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    write_value(&whole, out)
}

fn json_of_masters(report: &CheckReport) -> Value {
    let misrounded = report.misrounded();
    let line = |(tensor, rounding): &(&TensorCheck, Rounding)| {
        let Rounding { misses, max_ulp } = rounding;
        let counts = json!({ "elements": misses, "max_ulp": max_ulp, "shape": tensor.shape });
        (tensor.name.as_str().to_owned(), counts)
    };
    let count = report.mastered().count();
    json!({
        "weights": count,
        "rounded": count - misrounded.len(),
        "rounds_otherwise": report.rounds_otherwise,
        "not_rounded": misrounded.iter().map(line).collect::<Map<_, _>>(),
    })
}

fn json_of_global((name, global): (&String, &ForeignGlobal)) -> (String, Value) {
    let files = global.files.iter().map(|file| file.to_string_lossy());
    (name.clone(), json!({ "count": global.count, "files": files.collect::<Vec<_>>() }))
}

fn json_of_copy(tensor: &TensorCheck, replica: &ReplicaDifference) -> Value {
    let stats = &replica.stats;
    json!({
        "first": replica.first,
        "copy": replica.copy,
        "stored_name": replica.stored_name,
        "policy": replica.merge.name(),
        "max_abs": stats.max_abs(),
        "l2": stats.l2(),
        "cos": stats.cos(),
        "differing": stats.differing(),
        "shape": tensor.shape,
    })
}
