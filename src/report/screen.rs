//! A comparison for people: totals, the worst tensors, what is missing, one closing line.
//!
//! Nothing here depends on time or on the number of threads: the same inputs print the same bytes.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use crate::base::side::Side;
use crate::catalog::Section;
use crate::compare::{ReplicaDifference, TensorComparison};
use crate::judge::policy::{Excused, UnusedRule};
use crate::judge::verdict::{BrokenBound, TensorVerdict, Verdict, WeakBound};
use crate::kernel::Stats;
use crate::names::printable;
use crate::tensor::Merge;

use super::catalog::WIDEST;
use super::fit::COLUMNS;
use super::totals::{Totals, stats};
use super::units::{bytes, counted, grouped, scientific, shape, share};
use super::{Judged, RenameUse, Report, Screen, Style, View, by_layer, causes, unpaired};

/// Writes the summary.
///
/// # Errors
/// The sink cannot be written to.
pub(super) fn write(
    report: &Report,
    written: &[&Path],
    view: View,
    style: Style,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut screen = Screen { style, view, out };
    for (side, checkpoint) in Side::BOTH.iter().zip(&report.checkpoints) {
        write!(screen.out, "{}  ", style.heading(&side.to_string()))?;
        screen.checkpoint(checkpoint)?;
    }
    let totals = Totals::of(report);
    if !report.is_of_state_alone() {
        writeln!(screen.out, "\n{}", compared(&totals))?;
    }
    if let Some(sections) = not_compared(report) {
        writeln!(screen.out, "{}", screen.style.wrapped(&format!("not compared: {sections}"), 3))?;
    }
    by_layer::write(report, &mut screen)?;
    write_worst(report, &mut screen)?;
    causes::write(report, &mut screen)?;
    unpaired::write(report, &mut screen)?;
    super::state::write(report, &mut screen)?;
    write_replicas(report, &mut screen)?;
    write_non_finite(report, &mut screen)?;
    let mut remarks = remarks(report, screen.view.rows);
    remarks.extend(super::state::remarks(report));
    let name = |path: &&Path| path.strip_prefix(".").unwrap_or(path).display().to_string();
    remarks.extend(written.iter().map(|path| format!("wrote {}", printable(&name(path)))));
    if !remarks.is_empty() {
        writeln!(screen.out)?;
    }
    remarks
        .iter()
        .try_for_each(|remark| writeln!(screen.out, "{}", screen.style.wrapped(remark, 3)))?;
    writeln!(screen.out, "\n{}", screen.style.wrapped(&closing(report, &totals, style), 3))
}

/// The sections that are there and were not to be read, with the larger number of tensors where one is known.
fn not_compared(report: &Report) -> Option<String> {
    let mut sections: BTreeMap<Section, Option<usize>> = BTreeMap::new();
    for (section, count) in report.checkpoints.iter().flat_map(|side| &side.origin.unread) {
        let known = sections.entry(*section).or_default();
        *known = (*known).max(*count);
    }
    let text = |(section, count): (Section, Option<usize>)| match count {
        Some(count) => format!("{} ({})", section.name(), counted(count, "tensor")),
        None => section.name().to_owned(),
    };
    let texts: Vec<String> = sections.into_iter().map(text).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

fn compared(totals: &Totals) -> String {
    format!(
        "compared {}, {} elements, {}",
        counted(totals.compared, "tensor"),
        grouped(totals.elements),
        bytes(totals.bytes),
    )
}

/// Writes the tensors that do not pass, the ones without a distance first, then by relative distance.
fn write_worst(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let fails = |judged: &&Judged| {
        !judged.judgement.passes && judged.judgement.verdict != TensorVerdict::Unread
    };
    let mut worst: Vec<&Judged> = report.tensors.iter().filter(fails).collect();
    let name = |judged: &Judged| judged.tensor.name.clone();
    worst.sort_by(|one, other| {
        by_distance(&one.tensor, &other.tensor).then_with(|| name(one).cmp(&name(other)))
    });
    let names = worst.iter().take(screen.view.rows).map(|judged| judged.tensor.name.to_string());
    let width = names
        .map(|name| name.chars().count())
        .max()
        .unwrap_or(0)
        .clamp(6, if screen.style.fits { NAME } else { WIDEST });
    let style = screen.style;
    let row = |name: &str, [rel_l2, max_abs, differing]: [&str; 3]| {
        let name = style.shortened(name, width);
        format!("{name:width$}  {rel_l2:>8}  {max_abs:>8}  {differing:>6}")
    };
    let title = row("tensor", ["rel_l2", "max_abs", "differ"]);
    screen.list(&title, &worst, |Judged { tensor, judgement, .. }| {
        let name = tensor.name.to_string();
        let mut details = Vec::new();
        let mut text = match stats(tensor) {
            None => {
                let [a, b] = tensor.shapes.each_ref().map(|sizes| shape(sizes));
                details.push(format!("shape {a} in a, {b} in b"));
                style.shortened(&name, COLUMNS)
            }
            Some(stats) => {
                let max_abs = stats.max_abs().filter(|_| stats.is_finite());
                let [rel_l2, max_abs] = [stats.rel_l2(), max_abs].map(scientific);
                details.extend(tensor.example.as_ref().map(|example| {
                    let [a, b] = &example.values;
                    format!("at {}: a {a}, b {b}", shape(&example.index))
                }));
                details.extend(judgement.broken.iter().map(|broken| broken_text(broken, stats)));
                row(&name, [&rel_l2, &max_abs, &share(stats.differing(), stats.count())])
            }
        };
        for detail in details {
            text.push('\n');
            text.push_str(&style.faint(&style.wrapped(&format!("   {detail}"), 5)));
        }
        text
    })
}

/// Most columns of a name beside its numbers.
const NAME: usize = COLUMNS - 10 - 10 - 8;

fn broken_text(broken: &BrokenBound, stats: &Stats) -> String {
    match broken {
        BrokenBound::Elements(count) => format!(
            "{} of {} elements beyond the tolerance",
            grouped(*count),
            grouped(stats.count())
        ),
        BrokenBound::Metric { name, value: Some(value), max } => {
            format!("{name} {} is more than {max}", scientific(Some(*value)))
        }
        BrokenBound::Metric { name, value: None, max } => {
            format!("{name} is not defined here, so not at most {max}")
        }
    }
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
        .comparisons()
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
        let text =
            format!("{side}: {}: {copy} differs from {first} by up to {largest}", tensor.name);
        let mut text = format!("{}\n   {}", style.wrapped(&text, 3), style.faint(&details));
        if !replica.stored_name.ends_with(tensor.name.as_str()) && first == copy {
            text.push_str(&format!("\n   stored as {}", printable(&replica.stored_name)));
        }
        text
    })
}

fn write_non_finite(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let not_finite = |tensor| Some((tensor, stats(tensor).filter(|stats| !stats.is_finite())?));
    let broken: Vec<(&TensorComparison, &Stats)> =
        report.comparisons().filter_map(not_finite).collect();
    let title = format!("not finite: {}", counted(broken.len(), "tensor"));
    let style = screen.style;
    screen.list(&title, &broken, |(tensor, stats)| {
        let ([nan_a, nan_b], [inf_a, inf_b]) = (stats.nan(), stats.inf());
        let name = &tensor.name;
        let counts = format!("NaN {nan_a} in a, {nan_b} in b; Inf {inf_a} in a, {inf_b} in b");
        style.wrapped(&format!("{name}: {counts}"), 3)
    })
}

/// Remarks on what is no difference but should be known: rows not compared, tied weights, other dtypes.
fn remarks(report: &Report, rows: usize) -> Vec<String> {
    let mut remarks = Vec::new();
    for tensor in report.comparisons() {
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
        let mut summed = report.comparisons().filter(is_summed);
        if let Some(first) = summed.next() {
            let count = counted(1 + summed.count(), "tensor");
            remarks.push(format!(
                "{side}: {count} summed over the ranks, each of which holds a part of it; the first is {}",
                first.name
            ));
        }
    }
    remarks.extend(dtype_remarks(report));
    remarks.extend(policy_remarks(report, rows));
    remarks.extend(unpaired::remarks(report, rows));
    remarks
}

/// Remarks on dtypes that differ: which of these tensors are casts, and how far the others are from being ones.
fn dtype_remarks(report: &Report) -> Vec<String> {
    let retyped = |judged: &&Judged| judged.tensor.dtypes[0] != judged.tensor.dtypes[1];
    let retyped: Vec<&Judged> = report.tensors.iter().filter(retyped).collect();
    let Some(first) = retyped.first() else { return Vec::new() };
    let [a, b] = first.tensor.dtypes;
    let mut remarks = vec![format!(
        "dtypes differ: {}, the first is {}: {a} in a, {b} in b",
        counted(retyped.len(), "tensor"),
        first.tensor.name
    )];
    let rounded: Vec<_> = retyped.iter().filter_map(|judged| judged.judgement.rounded).collect();
    let casts = rounded.iter().filter(|(_, misses)| *misses == 0).count();
    if casts > 0 {
        let may_pass = retyped.iter().all(|judged| judged.judgement.passes);
        let hint = if may_pass { "" } else { "; --allow-cast lets them pass" };
        let are = if casts == 1 { "is" } else { "are" };
        remarks.push(format!(
            "casts: {} {are} the other side rounded, every element{hint}",
            counted(casts, "tensor")
        ));
    }
    let missed: u64 = rounded.iter().map(|(_, misses)| misses).sum();
    if missed > 0 {
        remarks.push(format!(
            "no casts: {}, where {} are not the other side rounded",
            counted(rounded.len() - casts, "tensor"),
            counted(usize::try_from(missed).unwrap_or(usize::MAX), "element")
        ));
    }
    remarks
}

/// Remarks on the bounds and rules that were given.
fn policy_remarks(report: &Report, rows: usize) -> Vec<String> {
    let mut remarks = Vec::new();
    let weak = |judged: &'_ Judged| Some((judged.tensor.name.clone(), judged.judgement.weak?));
    let mut weak = report.tensors.iter().filter_map(weak);
    if let Some((name, bound)) = weak.next() {
        let count = counted(1 + weak.count(), "tensor");
        let reason = match bound {
            WeakBound::Rtol(rtol) => format!("zeros would hold rtol {rtol}"),
            WeakBound::Atol { atol, rms } => {
                format!("atol {atol} is more than the RMS of b, {}", scientific(Some(rms)))
            }
        };
        remarks.push(format!("weak tolerance: {count}, the first is {name}: {reason}"));
    }
    for glob in &report.idle_globs {
        remarks
            .push(format!("{}: matches no name; a glob has to match all of one", printable(glob)));
    }
    remarks.extend(RenameUse::idle(&report.renames).into_iter().take(rows));
    let Excused { ignored, only_in } = &report.excused;
    if !ignored.is_empty() {
        remarks.push(format!("ignored by rules: {}", counted(ignored.len(), "name")));
    }
    for (side, names) in Side::BOTH.iter().zip(only_in) {
        if !names.is_empty() {
            let count = counted(names.len(), "tensor");
            remarks.push(format!("only in {side}, as rules allow: {count}"));
        }
    }
    for UnusedRule { line, globs, required } in &report.unused {
        let trouble = if *required { ", which is required" } else { "" };
        let names = printable(&globs.join(", ")).into_owned();
        remarks.push(format!("the rule on line {line} decides about no tensor{trouble}: {names}"));
    }
    remarks
}

/// The closing line.
pub(super) fn closing(report: &Report, totals: &Totals, style: Style) -> String {
    if report.is_of_state_alone() {
        return super::state::closing_alone(report, style);
    }
    of_tensors(report, totals, style) + &super::state::closing(report)
}

/// The closing line as far as tensors go.
fn of_tensors(report: &Report, totals: &Totals, style: Style) -> String {
    let total = counted(totals.tensors, "tensor");
    let of = |verdict| grouped(totals.with(verdict) as u64);
    match report.verdict {
        Verdict::Identical => format!("{}: all {total} bit for bit", style.good("identical")),
        Verdict::Equal => format!(
            "{}: all {total} have the same values, {} bit for bit",
            style.good("equal"),
            of(TensorVerdict::Identical)
        ),
        Verdict::Cast => format!(
            "{}: {} of {total} are casts, the others have the same values",
            style.good("equal after cast"),
            of(TensorVerdict::Cast)
        ),
        Verdict::Within => format!(
            "{}: {} of {total} differ, as far as they may",
            style.good("within tolerance"),
            grouped(totals.tolerated as u64)
        ),
        Verdict::Different => {
            format!("{}: {}", style.bad("different"), differences(report, totals))
        }
        Verdict::Trouble if report.tensors.is_empty() => {
            format!("{}: nothing to compare", style.bad("trouble"))
        }
        Verdict::Trouble => {
            let cause = match totals.problems + totals.with(TensorVerdict::Unread) {
                0 => format!(
                    "nothing was compared for {} that requires it",
                    counted(totals.unmet_rules, "rule")
                ),
                parts => format!("{} could not be read or put together", counted(parts, "part")),
            };
            let rest = differences(report, totals);
            format!("{}: {cause}; for the rest, {rest}", style.bad("trouble"))
        }
    }
}

fn differences(report: &Report, totals: &Totals) -> String {
    let mut parts = Vec::new();
    match totals.failing {
        0 => parts.push(format!("{} equal", counted(totals.passing, "tensor"))),
        different => {
            let total = counted(totals.tensors, "tensor");
            parts.push(format!("{} of {total} differ", grouped(different as u64)));
            match totals.tolerated {
                0 => {}
                within => parts.push(format!("{} as far as they may", grouped(within as u64))),
            }
        }
    }
    for (side, names) in Side::BOTH.iter().zip(&report.only_in) {
        if !names.is_empty() {
            parts.push(format!("{} only in {side}", grouped(names.len() as u64)));
        }
    }
    if totals.diverged > 0 {
        let verb = if totals.diverged == 1 { "disagrees" } else { "disagree" };
        parts.push(format!("{} {verb} with the first copy", counted(totals.diverged, "replica")));
    }
    parts.join(", ")
}
