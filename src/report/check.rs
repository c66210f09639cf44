//! What is wrong with one checkpoint, for people and as JSON.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::PrettyFormatter;
use serde_json::{Map, Value, json};

use crate::catalog::{Origin, Problem, Tied};
use crate::compare::{Outcome, ReadError, ReplicaDifference, TensorComparison};
use crate::judge::verdict::Verdict;
use crate::kernel::Stats;
use crate::names::{Name, printable};

use super::json::Escaping;
use super::units::{bytes, counted, grouped, scientific, shape};
use super::{Style, origin_text};

/// All that a check may tell.
#[derive(Debug)]
pub struct CheckReport {
    /// Where the checkpoint comes from.
    pub origin: Origin,
    /// What the user should know.
    pub notes: Vec<String>,
    /// What could not be read.
    pub problems: Vec<Problem>,
    /// Every tensor held against its own copies.
    pub tensors: Vec<TensorComparison>,
    /// Further copies of parts of tensors, all of which were read.
    pub copies: usize,
    /// Parameters that share the values of another one.
    pub tied: BTreeMap<Name, Tied>,
    /// Files and bytes that belong to nothing.
    pub leftovers: Vec<Problem>,
    /// What it comes to.
    pub verdict: Verdict,
}

impl CheckReport {
    /// Tensors whose files cannot be read.
    pub fn unreadable(&self) -> impl Iterator<Item = (&TensorComparison, &ReadError)> {
        self.tensors.iter().filter_map(|tensor| match &tensor.outcome {
            Outcome::Unreadable(error) => Some((tensor, error)),
            Outcome::Compared(_) | Outcome::ShapeDiffers => None,
        })
    }

    fn read(&self) -> impl Iterator<Item = (&TensorComparison, &Stats)> {
        self.tensors.iter().filter_map(|tensor| match &tensor.outcome {
            Outcome::Compared(stats) => Some((tensor, stats)),
            Outcome::Unreadable(_) | Outcome::ShapeDiffers => None,
        })
    }

    fn not_finite(&self) -> impl Iterator<Item = (&TensorComparison, &Stats)> {
        self.read().filter(|(_, stats)| !stats.is_finite())
    }

    /// Tensors with copies that should be the same and are not.
    fn diverged(&self) -> impl Iterator<Item = &TensorComparison> {
        let has_diverged = |tensor: &&TensorComparison| {
            tensor.replicas.iter().any(ReplicaDifference::is_divergence)
        };
        self.tensors.iter().filter(has_diverged)
    }

    /// Tensors of which every rank stores its own part of a sum.
    fn partial(&self) -> impl Iterator<Item = &TensorComparison> {
        let is_sum = |tensor: &&TensorComparison| {
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
pub fn write_screen(report: &CheckReport, style: Style, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", origin_text(&report.origin))?;
    for note in &report.notes {
        writeln!(out, "   {}", style.faint(&printable(note)))?;
    }
    let elements: u64 = report.read().map(|(_, stats)| stats.count()).sum();
    let size: u64 = report
        .read()
        .map(|(tensor, stats)| stats.count().saturating_mul(tensor.dtypes[0].size()))
        .fold(0, u64::saturating_add);
    writeln!(
        out,
        "\nchecked {}, {} elements, {}; {} of parts of them",
        counted(report.read().count(), "tensor"),
        grouped(elements),
        bytes(size),
        if report.copies == 1 {
            "1 further copy".to_owned()
        } else {
            format!("{} further copies", grouped(report.copies as u64))
        },
    )?;
    let diverged: Vec<String> = report.diverged().flat_map(diverged_lines).collect();
    let title = format!("copies that disagree: {}", counted(report.diverged().count(), "tensor"));
    write_list(&title, &diverged, style, out)?;
    let partial: Vec<String> = report.partial().flat_map(diverged_lines).collect();
    let title =
        format!("parts of a sum, no copies: {}", counted(report.partial().count(), "tensor"));
    write_list(&title, &partial, style, out)?;
    let not_finite: Vec<String> = report.not_finite().map(not_finite_line).collect();
    let title = format!("not finite: {}", counted(not_finite.len(), "tensor"));
    write_list(&title, &not_finite, style, out)?;
    let leftovers: Vec<String> = report.leftovers.iter().map(ToString::to_string).collect();
    let title = format!("belonging to nothing: {}", grouped(leftovers.len() as u64));
    write_list(&title, &leftovers, style, out)?;
    writeln!(out, "\n{}", closing(report, style))
}

fn write_list(title: &str, lines: &[String], style: Style, out: &mut dyn Write) -> io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}", style.heading(title))?;
    lines.iter().take(ROWS).try_for_each(|line| writeln!(out, "{line}"))?;
    if lines.len() > ROWS {
        writeln!(out, "and {} more", grouped((lines.len() - ROWS) as u64))?;
    }
    Ok(())
}

fn diverged_lines(tensor: &TensorComparison) -> Vec<String> {
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
            shape(&tensor.shapes[0]),
            scientific(stats.max_abs()),
            scientific(stats.l2()),
        )
    };
    tensor.replicas.iter().map(line).collect()
}

fn not_finite_line((tensor, stats): (&TensorComparison, &Stats)) -> String {
    let first = tensor.example.as_ref().map_or_else(String::new, |first| {
        format!(", the first at {}: {}", shape(&first.index), first.values[0])
    });
    format!(
        "{}: {} NaN, {} Inf of {}{first}",
        tensor.name,
        grouped(stats.nan()[0]),
        grouped(stats.inf()[0]),
        grouped(stats.count())
    )
}

fn closing(report: &CheckReport, style: Style) -> String {
    let mut findings = Vec::new();
    let mut add = |count: usize, noun: &str, what: &str| {
        if count > 0 {
            findings.push(format!("{} {what}", counted(count, noun)));
        }
    };
    add(report.diverged().count(), "tensor", "with copies that disagree");
    add(report.not_finite().count(), "tensor", "with NaN or Inf");
    add(report.leftovers.len(), "leftover", "belonging to nothing");
    match report.verdict {
        Verdict::Trouble if report.tensors.is_empty() => {
            format!("{}: nothing to check", style.bad("trouble"))
        }
        Verdict::Trouble => {
            let parts = report.problems.len() + report.unreadable().count();
            findings
                .insert(0, format!("{} could not be read or put together", counted(parts, "part")));
            format!("{}: {}", style.bad("trouble"), findings.join(", "))
        }
        Verdict::Different => format!("{}: {}", style.bad("unsound"), findings.join(", ")),
        Verdict::Identical | Verdict::Equal => {
            let total = counted(report.tensors.len(), "tensor");
            format!("{}: {total} read, all copies agree, all elements finite", style.good("sound"))
        }
    }
}

/// Writes the same as JSON.
///
/// # Errors
/// The sink cannot be written to.
pub fn write_json(report: &CheckReport, out: &mut dyn Write) -> io::Result<()> {
    let origin = &report.origin;
    let copies = |tensor: &TensorComparison| {
        let copies = tensor.replicas.iter().map(|copy| json_of_copy(tensor, copy));
        (tensor.name.as_str().to_owned(), copies.collect::<Value>())
    };
    let not_finite = report.not_finite().map(|(tensor, stats)| {
        let counts = json!({
            "nan": stats.nan()[0],
            "inf": stats.inf()[0],
            "numel": stats.count(),
            "first_index": tensor.example.as_ref().map(|first| &first.index),
        });
        (tensor.name.as_str().to_owned(), counts)
    });
    let unreadable = report.unreadable().map(|(tensor, error)| {
        format!("{}: {}: {}", error.file.display(), tensor.name, error.message)
    });
    let problems = report.problems.iter().map(ToString::to_string).chain(unreadable);
    let tied =
        report.tied.iter().map(|(name, tied)| (name.as_str().to_owned(), json!(tied.to.as_str())));
    let whole = json!({
        "path": origin.resolved,
        "format": origin.format,
        "layout": origin.layout,
        "iteration": origin.iteration,
        "verdict": match report.verdict {
            Verdict::Identical | Verdict::Equal => "sound",
            Verdict::Different => "unsound",
            Verdict::Trouble => "trouble",
        },
        "tensors": report.tensors.len(),
        "copies": report.copies,
        "notes": report.notes,
        "problems": problems.collect::<Vec<_>>(),
        "replicas": report.diverged().map(copies).collect::<Map<_, _>>(),
        "partial_sums": report.partial().map(copies).collect::<Map<_, _>>(),
        "not_finite": not_finite.collect::<Map<_, _>>(),
        "tied": tied.collect::<Map<_, _>>(),
        "leftovers": report.leftovers.iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    let formatter = Escaping(PrettyFormatter::new());
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, formatter);
    whole.serialize(&mut serializer)?;
    writeln!(out)
}

fn json_of_copy(tensor: &TensorComparison, replica: &ReplicaDifference) -> Value {
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
        "shape": tensor.shapes[0],
    })
}
