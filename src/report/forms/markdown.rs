//! Text in GitHub's Markdown. Whatever comes from a checkpoint stands in code spans, where nothing is obeyed.

use std::cmp::Ordering;
use std::io::{self, Write};

use crate::names::forward::Kind;
use crate::names::printable;
use crate::report::by_layer::{Line, first_text, overall_lines, singly};
use crate::report::document::{Cause, Checkpoint, Document, Replica, StateDifference, Tensor};
use crate::report::fit::shortened;
use crate::report::layers::Layer;
use crate::report::units::{bytes, counted, grouped, scientific, shape, share};

/// The bytes that it begins with.
pub(super) const START: &str = "# ckptcmp compare: ";

/// Tensors in the table of the worst.
const WORST: usize = 50;

/// Entries of any other list.
const LISTED: usize = 50;

/// Layers in the table, half of those that are put together where there are more.
const LAYERS: usize = 60;

/// Most characters of a text from a checkpoint.
const LONGEST: usize = 300;

pub(super) fn write(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{START}{}\n", document.verdict)?;
    if let Some(summary) = &document.summary {
        writeln!(out, "**{}**\n", plain(summary))?;
    }
    write_sides(document, out)?;
    write_list("Trouble", &document.errors, out)?;
    write_overview(document, out)?;
    for of_state in document
        .layers
        .as_deref()
        .unwrap_or_default()
        .chunk_by(|one, other| one.state == other.state)
    {
        write_layers(of_state, out)?;
    }
    write_worst(document, out)?;
    if let Some(causes) = document.causes.as_ref().filter(|causes| causes.searched > 0) {
        let lines: Vec<String> = causes.found.iter().map(Cause::line).collect();
        writeln!(out, "## {}\n", plain(&causes.title()))?;
        lines.iter().take(LISTED).try_for_each(|line| writeln!(out, "- {}", code(line)))?;
        write_more(lines.len(), LISTED, out)?;
    }
    if let Some(state) = &document.state {
        let lines: Vec<String> = state.differences.iter().map(StateDifference::line).collect();
        write_list("State that differs", &lines, out)?;
    }
    for (side, names) in document.only_in.iter().flat_map(|only_in| only_in.both()) {
        write_list(&format!("Only in {side}"), names, out)?;
    }
    write_replicas(document, out)?;
    write_not_finite(document, out)?;
    let version = &document.tool.version;
    writeln!(out, "<sub>{} {}</sub>", plain(&document.tool.name), plain(version))
}

fn write_sides(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "| | a | b |\n|---|---|---|")?;
    let sides = [&document.sides.a, &document.sides.b];
    let mut row = |title: &str, text: &dyn Fn(&Checkpoint) -> Option<String>| {
        let texts = sides.map(text);
        if texts.iter().all(Option::is_none) {
            return Ok(());
        }
        let cells = texts.map(|text| text.map_or(String::new(), |text| cell(&text)));
        writeln!(out, "| {title} | {} | {} |", cells[0], cells[1])
    };
    row("path", &|side| Some(side.resolved.clone().unwrap_or_else(|| side.path.clone())))?;
    row("format", &|side| side.format.as_deref().map(str::to_owned))?;
    row("layout", &|side| side.layout.clone().filter(|layout| !layout.is_empty()))?;
    row("iteration", &|side| side.iteration.map(|iteration| iteration.to_string()))?;
    row("writer", &|side| side.writer.clone())?;
    row("shards", &|side| side.shards.map(|shards| shards.to_string()))?;
    writeln!(out)?;
    if let Some(totals) = &document.totals {
        let (elements, size) = (grouped(totals.elements), bytes(totals.bytes));
        let tensors = counted(totals.compared, "tensor");
        writeln!(out, "Compared {tensors}, {elements} elements, {size}.")?;
        let sections = document.sections.iter().flat_map(|sections| &sections.not_compared);
        let sections: Vec<String> = sections.map(|section| plain(section)).collect();
        if !sections.is_empty() {
            writeln!(out, "Not compared: {}.", sections.join(", "))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn write_overview(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    let mut lines = Vec::new();
    if let Some(first) = &document.first_difference {
        lines.push(format!("first difference: {}", code(&first_text(first))));
    }
    if let Some(overall) = &document.overall {
        lines.extend(overall_lines(overall).iter().map(|line| plain(line)));
    }
    lines.iter().try_for_each(|line| writeln!(out, "- {line}"))?;
    if lines.is_empty() { Ok(()) } else { writeln!(out) }
}

/// Writes a table of layers, where any differs; layers that are equal and follow each other are one line.
fn write_layers(layers: &[Layer], out: &mut dyn Write) -> io::Result<()> {
    let lines: Vec<Line<'_>> = singly(layers);
    if lines.iter().all(|line| line.word().is_some()) {
        return Ok(());
    }
    let lines: Vec<Line<'_>> = crate::report::by_layer::folded(layers, LAYERS / 2);
    let kinds: Vec<Kind> = crate::report::by_layer::kinds(layers);
    let state = layers.first().map_or("", |layer| &layer.state);
    let of = if state.is_empty() { String::new() } else { format!(" of {}", code(state)) };
    writeln!(out, "## rel\\_l2 by layer{of}\n")?;
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    let heading: Vec<&str> = ["layer", "verdict", "worst"].into_iter().chain(names).collect();
    writeln!(out, "| {} |", heading.join(" | "))?;
    writeln!(out, "|---|---|{}", "---:|".repeat(heading.len() - 2))?;
    for line in &lines {
        let worst = |kind| if line.word().is_some() { String::new() } else { line.worst(kind) };
        let mut cells = vec![cell(&line.title()), line.verdict(), worst(None)];
        let has_kinds = line.is_layer();
        cells.extend(kinds.iter().map(|kind| match has_kinds {
            true => worst(Some(*kind)),
            false => String::new(),
        }));
        writeln!(out, "| {} |", cells.join(" | "))?;
    }
    writeln!(out)
}

fn write_worst(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    let tensors = document.tensors.iter().flatten();
    let mut worst: Vec<&Tensor> = tensors.filter(|tensor| !tensor.passes).collect();
    if worst.is_empty() {
        return Ok(());
    }
    worst.sort_by(|one, other| by_distance(one, other));
    writeln!(out, "## Tensors that do not pass: {}\n", grouped(worst.len() as u64))?;
    writeln!(out, "| tensor | verdict | rel\\_l2 | cos | max\\_abs | differ | worst element |")?;
    writeln!(out, "|---|---|---:|---:|---:|---:|---|")?;
    for tensor in worst.iter().take(WORST) {
        let metrics = &tensor.metrics;
        let differ =
            metrics.differing.map_or_else(String::new, |count| share(count, tensor.numel.b));
        let cos = metrics.cos.map_or_else(|| "-".to_owned(), |cos| format!("{cos:.6}"));
        let cells = [
            cell(&tensor.name),
            plain(&tensor.verdict),
            scientific(metrics.rel_l2),
            cos,
            scientific(metrics.max_abs),
            plain(&differ),
            detail(tensor),
        ];
        writeln!(out, "| {} |", cells.join(" | "))?;
    }
    write_more(worst.len(), WORST, out)
}

/// The element that shows the difference, or the reason why there is none.
fn detail(tensor: &Tensor) -> String {
    if let Some(error) = &tensor.error {
        return cell(&format!("{}: {}", error.side, error.message));
    }
    if tensor.shape.a != tensor.shape.b {
        return format!("shape {} in a, {} in b", shape(&tensor.shape.a), shape(&tensor.shape.b));
    }
    tensor.worst.as_ref().map_or(String::new(), |worst| {
        let index = shape(&worst.index);
        format!("at {index}: a {}, b {}", cell(&worst.a), cell(&worst.b))
    })
}

/// Worst first; what has no distance is worse than any.
fn by_distance(one: &Tensor, other: &Tensor) -> Ordering {
    let distance = |tensor: &Tensor| match tensor.metrics.l2 {
        Some(_) => (false, tensor.metrics.rel_l2.unwrap_or(f64::INFINITY)),
        None => (true, 0.0),
    };
    let (one, other) = (distance(one), distance(other));
    other.0.cmp(&one.0).then_with(|| other.1.total_cmp(&one.1))
}

fn write_replicas(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    let tensors = document.tensors.iter().flatten();
    let replicas =
        tensors.flat_map(|tensor| tensor.replicas.iter().map(move |copy| (tensor, copy)));
    let lines = replicas.filter(|(_, copy)| copy.disagrees).map(|(tensor, copy)| {
        let Replica { side, first, copy, max_abs, .. } = copy;
        let largest = scientific(*max_abs);
        format!("{side}: {}: {copy} differs from {first} by up to {largest}", tensor.name)
    });
    write_list("Replicas that disagree", &lines.collect::<Vec<_>>(), out)
}

fn write_not_finite(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    let lines = document.tensors.iter().flatten().filter_map(|tensor| {
        let metrics = &tensor.metrics;
        let counts = [metrics.nan_a?, metrics.nan_b?, metrics.inf_a?, metrics.inf_b?];
        let [nan_a, nan_b, inf_a, inf_b] = counts;
        (counts != [0; 4]).then(|| {
            let name = &tensor.name;
            format!("{name}: NaN {nan_a} in a, {nan_b} in b; Inf {inf_a} in a, {inf_b} in b")
        })
    });
    write_list("Not finite", &lines.collect::<Vec<_>>(), out)
}

/// Writes a list with its number of entries, cut short; nothing where there are none.
fn write_list(title: &str, entries: &[String], out: &mut dyn Write) -> io::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    writeln!(out, "## {title}: {}\n", grouped(entries.len() as u64))?;
    entries.iter().take(LISTED).try_for_each(|entry| writeln!(out, "- {}", code(entry)))?;
    write_more(entries.len(), LISTED, out)
}

fn write_more(count: usize, shown: usize, out: &mut dyn Write) -> io::Result<()> {
    match count.saturating_sub(shown) {
        0 => writeln!(out),
        more => writeln!(out, "\nand {} more\n", grouped(more as u64)),
    }
}

/// A code span in a table, which is cut at bars before spans are looked for, and takes the backslash before them back.
fn cell(text: &str) -> String {
    code(text).replace('|', "\\|")
}

/// A code span, in which nothing is obeyed.
fn code(text: &str) -> String {
    let text = shortened(&printable(text), LONGEST);
    if text.is_empty() {
        return String::new();
    }
    let longest = text.split(|char| char != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest + 1);
    let is_padded = text.starts_with(['`', ' ']) || text.ends_with(['`', ' ']);
    let space = if is_padded { " " } else { "" };
    format!("{fence}{space}{text}{space}{fence}")
}

/// Words of ours: punctuation is no markup.
fn plain(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in printable(text).chars() {
        if "\\`*_{}[]<>()#|~&!@".contains(char) {
            escaped.push('\\');
        }
        escaped.push(char);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_code_span_is_obeyed() {
        assert_eq!(code("a.weight"), "`a.weight`");
        assert_eq!(code("a`b``c"), "```a`b``c```");
        assert_eq!(code("`x`"), "`` `x` ``");
        assert_eq!((code("a|b"), cell("a|b")), ("`a|b`".into(), "`a\\|b`".into()));
        assert_eq!(code("<img src=x>\n# h"), "`<img src=x>\\u{a}# h`");
        assert_eq!(plain("<0.01% of *all*"), "\\<0.01% of \\*all\\*");
    }
}
