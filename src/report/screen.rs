//! A comparison for people: totals, the worst tensors, what is missing, one closing line.
//!
//! Nothing here depends on time or on the number of threads: the same inputs print the same bytes.

use std::cmp::Ordering;
use std::fmt::Display;
use std::io::{self, Write};

use crate::base::side::Side;
use crate::compare::{Outcome, ReplicaDifference, TensorComparison};
use crate::judge::verdict::{self, TensorVerdict, Verdict};
use crate::kernel::Stats;
use crate::names::printable;
use crate::tensor::Merge;

use super::catalog::WIDEST;
use super::units::{bytes, counted, grouped, scientific, shape};
use super::{Report, Screen, Style};

/// Rows of a list before it is cut short.
const ROWS: usize = 10;

/// Writes the summary.
///
/// # Errors
/// The sink cannot be written to.
pub(super) fn write(report: &Report, style: Style, out: &mut dyn Write) -> io::Result<()> {
    let mut screen = Screen { style, rows: ROWS, out };
    for (side, checkpoint) in Side::BOTH.iter().zip(&report.checkpoints) {
        write!(screen.out, "{}  ", style.heading(&side.to_string()))?;
        screen.checkpoint(checkpoint)?;
    }
    writeln!(screen.out, "\n{}", totals(report))?;
    write_worst(report, &mut screen)?;
    for (side, names) in Side::BOTH.iter().zip(&report.only_in) {
        let title = format!("only in {side}: {}", counted(names.len(), "tensor"));
        screen.list(&title, names, ToString::to_string)?;
    }
    write_replicas(report, &mut screen)?;
    write_non_finite(report, &mut screen)?;
    let remarks = remarks(report);
    if !remarks.is_empty() {
        writeln!(screen.out)?;
    }
    remarks.iter().try_for_each(|remark| writeln!(screen.out, "{remark}"))?;
    writeln!(screen.out, "\n{}", closing(report, style))
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

/// Writes the tensors that differ, the ones without a distance first, then by relative distance.
fn write_worst(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let is_different =
        |tensor: &&TensorComparison| verdict::of_tensor(tensor) == TensorVerdict::Different;
    let mut worst: Vec<&TensorComparison> = report.tensors.iter().filter(is_different).collect();
    worst.sort_by(|one, other| by_distance(one, other).then_with(|| one.name.cmp(&other.name)));
    let shown = worst.iter().take(ROWS);
    let width = shown.map(|tensor| tensor.name.as_str().len()).max().unwrap_or(0).clamp(6, WIDEST);
    let row = |name: &dyn Display, [rel_l2, l2, max_abs, differing]: [&str; 4]| {
        format!("{name:width$}  {rel_l2:>8}  {l2:>8}  {max_abs:>8}  {differing:>10}")
    };
    let title = row(&"tensor", ["rel_l2", "l2", "max_abs", "differing"]);
    let style = screen.style;
    screen.list(&title, &worst, |tensor| {
        let Some(stats) = stats(tensor) else {
            let [a, b] = tensor.shapes.each_ref().map(|sizes| shape(sizes));
            return format!("{:width$}  shape {a} in a, {b} in b", tensor.name);
        };
        let max_abs = stats.max_abs().filter(|_| stats.is_finite());
        let [rel_l2, l2, max_abs] = [stats.rel_l2(), stats.l2(), max_abs].map(scientific);
        let mut text = row(&tensor.name, [&rel_l2, &l2, &max_abs, &grouped(stats.differing())]);
        if let Some(example) = &tensor.example {
            let [a, b] = &example.values;
            let at = format!("at {}: a {a}, b {b}", shape(&example.index));
            text.push_str(&format!("\n   {}", style.faint(&at)));
        }
        text
    })
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

fn write_replicas(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let replicas = report
        .tensors
        .iter()
        .flat_map(|tensor| tensor.replicas.iter().map(move |replica| (tensor, replica)));
    let diverged: Vec<_> = replicas.filter(|(_, replica)| replica.is_divergence()).collect();
    let title = format!("replicas that disagree: {}", diverged.len());
    let style = screen.style;
    screen.list(&title, &diverged, |(tensor, replica)| {
        let ReplicaDifference { side, stats, .. } = replica;
        let largest = scientific(stats.max_abs());
        let (first, copy) = (printable(&replica.first), printable(&replica.copy));
        let used = if replica.merge == Merge::Mean { "their mean" } else { "the first" };
        let (l2, differing) = (scientific(stats.l2()), grouped(stats.differing()));
        let cos = stats.cos().map_or_else(|| "-".to_owned(), |cos| cos.to_string());
        let details = format!("l2 {l2}, cos {cos}, {differing} differing; compared: {used}");
        let mut text = format!(
            "{side}: {}: {copy} differs from {first} by up to {largest}\n   {}",
            tensor.name,
            style.faint(&details)
        );
        if !replica.stored_name.ends_with(tensor.name.as_str()) && first == copy {
            text.push_str(&format!("\n   stored as {}", printable(&replica.stored_name)));
        }
        text
    })
}

fn write_non_finite(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let not_finite = |tensor| Some((tensor, stats(tensor).filter(|stats| !stats.is_finite())?));
    let broken: Vec<(&TensorComparison, &Stats)> =
        report.tensors.iter().filter_map(not_finite).collect();
    let title = format!("not finite: {}", counted(broken.len(), "tensor"));
    screen.list(&title, &broken, |(tensor, stats)| {
        let ([nan_a, nan_b], [inf_a, inf_b]) = (stats.nan(), stats.inf());
        let name = &tensor.name;
        format!("{name}: NaN {nan_a} in a, {nan_b} in b; Inf {inf_a} in a, {inf_b} in b")
    })
}

/// Remarks on what is no difference but should be known: rows not compared, tied weights, other dtypes.
fn remarks(report: &Report) -> Vec<String> {
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
    remarks
}

fn closing(report: &Report, style: Style) -> String {
    let total = counted(report.tensors.len(), "tensor");
    match report.verdict {
        Verdict::Identical => format!("{}: all {total} bit for bit", style.good("identical")),
        Verdict::Equal => format!(
            "{}: all {total} have the same values, {} bit for bit",
            style.good("equal"),
            grouped(count(report, TensorVerdict::Identical) as u64)
        ),
        Verdict::Different => format!("{}: {}", style.bad("different"), differences(report)),
        Verdict::Trouble if report.tensors.is_empty() => {
            format!("{}: nothing to compare", style.bad("trouble"))
        }
        Verdict::Trouble => {
            let problems: usize =
                report.checkpoints.iter().map(|checkpoint| checkpoint.problems.len()).sum();
            let parts = counted(problems + count(report, TensorVerdict::Unread), "part");
            format!(
                "{}: {parts} could not be read or put together; for the rest, {}",
                style.bad("trouble"),
                differences(report)
            )
        }
    }
}

/// Number of tensors with this verdict.
fn count(report: &Report, wanted: TensorVerdict) -> usize {
    report.tensors.iter().filter(|tensor| verdict::of_tensor(tensor) == wanted).count()
}

fn differences(report: &Report) -> String {
    let mut parts = Vec::new();
    match count(report, TensorVerdict::Different) {
        0 => {
            let equal = [TensorVerdict::Identical, TensorVerdict::Equal];
            let equal = equal.map(|verdict| count(report, verdict)).iter().sum();
            parts.push(format!("{} equal", counted(equal, "tensor")));
        }
        different => {
            let total = counted(report.tensors.len(), "tensor");
            parts.push(format!("{} of {total} differ", grouped(different as u64)));
        }
    }
    for (side, names) in Side::BOTH.iter().zip(&report.only_in) {
        if !names.is_empty() {
            parts.push(format!("{} only in {side}", grouped(names.len() as u64)));
        }
    }
    let replicas = report.tensors.iter().flat_map(|tensor| &tensor.replicas);
    let diverged = replicas.filter(|replica| replica.is_divergence()).count();
    if diverged > 0 {
        let verb = if diverged == 1 { "disagrees" } else { "disagree" };
        parts.push(format!("{} {verb} with the first copy", counted(diverged, "replica")));
    }
    parts.join(", ")
}
