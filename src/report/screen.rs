//! The verdict for people: what was compared, what is worst, what is missing, one closing line.
//!
//! Nothing here depends on time or on the number of threads: the same inputs print the same bytes.

use std::cmp::Ordering;
use std::io::{self, Write};

use crate::base::side::Side;
use crate::compare::{Outcome, TensorComparison};
use crate::judge::verdict::{self, Verdict};
use crate::kernel::Stats;
use crate::names::{Name, printable};
use crate::tensor::Merge;

use super::catalog::WIDEST;
use super::units::{bytes, counted, grouped, scientific, shape};
use super::{Report, Style, origin_text};

/// Rows of a list before it is cut short.
const ROWS: usize = 10;

/// Writes the summary.
///
/// # Errors
/// The sink cannot be written to.
pub fn write(report: &Report, style: Style, out: &mut dyn Write) -> io::Result<()> {
    for (name, side) in Side::BOTH.iter().zip(&report.sides) {
        writeln!(out, "{}  {}", style.heading(&name.to_string()), origin_text(&side.origin))?;
        for note in &side.notes {
            writeln!(out, "   {}", style.faint(&printable(note)))?;
        }
    }
    writeln!(out, "\n{}", totals(report))?;
    write_worst(report, style, out)?;
    for (name, side) in Side::BOTH.iter().zip(&report.sides) {
        write_names(&format!("only in {name}"), &side.only_here, style, out)?;
    }
    write_replicas(report, style, out)?;
    write_non_finite(report, style, out)?;
    write_remarks(report, out)?;
    writeln!(out, "\n{}", closing(report, style))
}

fn totals(report: &Report) -> String {
    let tensors = &report.tensors;
    let elements: u64 = tensors.iter().filter_map(stats).map(Stats::count).sum();
    let size = |tensor: &TensorComparison| {
        let count = stats(tensor).map_or(0, Stats::count);
        tensor.dtypes.iter().map(|dtype| count.saturating_mul(dtype.size())).sum::<u64>()
    };
    let compared = tensors.iter().filter(|tensor| stats(tensor).is_some()).count();
    format!(
        "compared {}, {} elements, {}",
        counted(compared, "tensor"),
        grouped(elements),
        bytes(tensors.iter().map(size).sum()),
    )
}

fn stats(tensor: &TensorComparison) -> Option<&Stats> {
    match &tensor.outcome {
        Outcome::Compared(stats) => Some(stats),
        Outcome::ShapeDiffers | Outcome::Unreadable(_) => None,
    }
}

/// The tensors that differ, the ones without a distance first, then by relative distance.
fn write_worst(report: &Report, style: Style, out: &mut dyn Write) -> io::Result<()> {
    let mut worst: Vec<&TensorComparison> = report
        .tensors
        .iter()
        .filter(|tensor| verdict::of_tensor(tensor) == Verdict::Different)
        .collect();
    if worst.is_empty() {
        return Ok(());
    }
    worst.sort_by(|one, other| by_distance(one, other).then_with(|| one.name.cmp(&other.name)));
    let shown = &worst[..worst.len().min(ROWS)];
    let width = shown.iter().map(|tensor| tensor.name.as_str().len()).max().unwrap_or(0);
    let width = width.clamp(6, WIDEST);
    let heading = format!(
        "{:width$}  {:>8}  {:>8}  {:>8}  {:>10}",
        "tensor", "rel_l2", "l2", "max_abs", "differing"
    );
    writeln!(out, "\n{}", style.heading(&heading))?;
    for tensor in shown {
        match stats(tensor) {
            Some(stats) => {
                writeln!(
                    out,
                    "{:width$}  {:>8}  {:>8}  {:>8}  {:>10}",
                    tensor.name,
                    scientific(stats.rel_l2()),
                    scientific(stats.l2()),
                    scientific(stats.max_abs().filter(|_| stats.is_finite())),
                    grouped(stats.differing()),
                )?;
                if let Some(example) = &tensor.example {
                    let [a, b] = &example.values;
                    let at = format!("at {}: a {a}, b {b}", shape(&example.index));
                    writeln!(out, "   {}", style.faint(&at))?;
                }
            }
            None => {
                let [a, b] = tensor.shapes.each_ref().map(|sizes| shape(sizes));
                writeln!(out, "{:width$}  shape {a} in a, {b} in b", tensor.name)?;
            }
        }
    }
    if worst.len() > shown.len() {
        writeln!(out, "and {} more", grouped((worst.len() - shown.len()) as u64))?;
    }
    Ok(())
}

/// Worst first; what has no distance is worse than any distance.
fn by_distance(one: &TensorComparison, other: &TensorComparison) -> Ordering {
    let distance = |tensor: &TensorComparison| {
        let stats = stats(tensor)?;
        stats.l2()?;
        Some(stats.rel_l2().unwrap_or(f64::INFINITY))
    };
    match (distance(one), distance(other)) {
        (Some(one), Some(other)) => other.total_cmp(&one),
        (one, other) => one.is_some().cmp(&other.is_some()),
    }
}

fn write_names(title: &str, names: &[Name], style: Style, out: &mut dyn Write) -> io::Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let title = format!("{title}: {}", counted(names.len(), "tensor"));
    writeln!(out, "\n{}", style.heading(&title))?;
    for name in names.iter().take(ROWS) {
        writeln!(out, "{name}")?;
    }
    if names.len() > ROWS {
        writeln!(out, "and {} more", grouped((names.len() - ROWS) as u64))?;
    }
    Ok(())
}

fn write_replicas(report: &Report, style: Style, out: &mut dyn Write) -> io::Result<()> {
    let diverged: Vec<_> = report
        .tensors
        .iter()
        .flat_map(|tensor| tensor.replicas.iter().map(move |replica| (tensor, replica)))
        .filter(|(_, replica)| replica.is_divergence())
        .collect();
    if diverged.is_empty() {
        return Ok(());
    }
    let title = format!("replicas that disagree: {}", diverged.len());
    writeln!(out, "\n{}", style.heading(&title))?;
    for (tensor, replica) in diverged.iter().take(ROWS) {
        let side = replica.side;
        let stats = &replica.stats;
        let largest = scientific(stats.max_abs());
        let (first, copy) = (printable(&replica.first), printable(&replica.copy));
        let used = if replica.merge == Merge::Mean { "their mean" } else { "the first" };
        writeln!(out, "{side}: {}: {copy} differs from {first} by up to {largest}", tensor.name)?;
        let (l2, differing) = (scientific(stats.l2()), grouped(stats.differing()));
        let cos = stats.cos().map_or_else(|| "-".to_owned(), |cos| cos.to_string());
        let line = format!("l2 {l2}, cos {cos}, {differing} differing; compared: {used}");
        writeln!(out, "   {}", style.faint(&line))?;
        if !replica.stored_name.ends_with(tensor.name.as_str()) && first == copy {
            writeln!(out, "   stored as {}", printable(&replica.stored_name))?;
        }
    }
    if diverged.len() > ROWS {
        writeln!(out, "and {} more", grouped((diverged.len() - ROWS) as u64))?;
    }
    Ok(())
}

fn write_non_finite(report: &Report, style: Style, out: &mut dyn Write) -> io::Result<()> {
    let broken: Vec<_> = report
        .tensors
        .iter()
        .filter_map(|tensor| Some((tensor, stats(tensor).filter(|stats| !stats.is_finite())?)))
        .collect();
    if broken.is_empty() {
        return Ok(());
    }
    let title = format!("not finite: {}", counted(broken.len(), "tensor"));
    writeln!(out, "\n{}", style.heading(&title))?;
    for (tensor, stats) in broken.iter().take(ROWS) {
        let (nan, inf) = (stats.nan(), stats.inf());
        writeln!(
            out,
            "{}: NaN {} in a, {} in b; Inf {} in a, {} in b",
            tensor.name, nan[0], nan[1], inf[0], inf[1]
        )?;
    }
    if broken.len() > ROWS {
        writeln!(out, "and {} more", grouped((broken.len() - ROWS) as u64))?;
    }
    Ok(())
}

/// What is no difference but should be known: rows not compared, tied weights, other dtypes.
fn write_remarks(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let mut remarks = Vec::new();
    for tensor in &report.tensors {
        let [a, b] = tensor.rows_left_out;
        if a + b > 0 {
            let rows = tensor.shapes[0].first().copied().unwrap_or(0);
            remarks.push(format!(
                "{}: compared {} vocabulary rows; left out {a} padded rows of a, {b} of b",
                tensor.name,
                grouped(rows)
            ));
        }
        if let Some(side) = tensor.tied_side {
            remarks.push(format!(
                "{}: tied to the word embeddings in {side}, a tensor of its own on the other side",
                tensor.name
            ));
        }
    }
    for side in Side::BOTH {
        let is_summed = |tensor: &&TensorComparison| {
            tensor.replicas.iter().any(|copy| copy.side == side && !copy.is_divergence())
        };
        let mut summed = report.tensors.iter().filter(is_summed);
        if let Some(first) = summed.next() {
            let count = counted(1 + summed.count(), "tensor");
            remarks.push(format!(
                "{side}: {count} summed over the ranks, each of which holds a part of it; the first is {}",
                first.name
            ));
        }
    }
    let retyped: Vec<_> =
        report.tensors.iter().filter(|tensor| tensor.dtypes[0] != tensor.dtypes[1]).collect();
    if let Some(first) = retyped.first() {
        let [a, b] = first.dtypes;
        remarks.push(format!(
            "dtypes differ: {}, the first is {}: {a} in a, {b} in b",
            counted(retyped.len(), "tensor"),
            first.name
        ));
    }
    if !remarks.is_empty() {
        writeln!(out)?;
    }
    remarks.iter().try_for_each(|remark| writeln!(out, "{remark}"))
}

fn closing(report: &Report, style: Style) -> String {
    let count = |wanted| {
        report.tensors.iter().filter(|tensor| verdict::of_tensor(tensor) == wanted).count()
    };
    let total = report.tensors.len();
    match report.verdict {
        Verdict::Identical => {
            format!("{}: all {} bit for bit", style.good("identical"), counted(total, "tensor"))
        }
        Verdict::Equal => format!(
            "{}: all {} have the same values, {} bit for bit",
            style.good("equal"),
            counted(total, "tensor"),
            grouped(count(Verdict::Identical) as u64)
        ),
        Verdict::Different => {
            format!(
                "{}: {}",
                style.bad("different"),
                differences(report, count(Verdict::Different))
            )
        }
        Verdict::Trouble if total == 0 => {
            format!("{}: nothing to compare", style.bad("trouble"))
        }
        Verdict::Trouble => {
            let problems: usize = report.sides.iter().map(|side| side.problems.len()).sum();
            let unread = count(Verdict::Trouble);
            format!(
                "{}: {} could not be read or put together; for the rest, {}",
                style.bad("trouble"),
                counted(problems + unread, "part"),
                differences(report, count(Verdict::Different))
            )
        }
    }
}

fn differences(report: &Report, different: usize) -> String {
    let total = report.tensors.len();
    let mut parts = Vec::new();
    if different > 0 {
        parts.push(format!("{} of {} differ", grouped(different as u64), counted(total, "tensor")));
    } else {
        parts.push(format!("all {} on both sides are equal", counted(total, "tensor")));
    }
    let unpaired: usize = report.sides.iter().map(|side| side.only_here.len()).sum();
    if unpaired > 0 {
        parts.push(format!("{} on one side only", grouped(unpaired as u64)));
    }
    let replicas = report.tensors.iter().flat_map(|tensor| &tensor.replicas);
    let diverged = replicas.filter(|replica| replica.is_divergence()).count();
    if diverged > 0 {
        let verb = if diverged == 1 { "disagrees" } else { "disagree" };
        parts.push(format!("{} {verb} with the first copy", counted(diverged, "replica")));
    }
    parts.join(", ")
}
