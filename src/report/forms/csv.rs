//! All tensors as a table, by RFC 4180: fields with quotes where they need them, lines that end in CR LF.
//!
//! Whoever reads nothing but the column `passes` is told the truth: names on one side only and errors have lines, too, and where the
//! comparison fails at least one line does. Text that a spreadsheet would take for a formula has an apostrophe before it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::names::printable;
use crate::report::document::{Document, Metrics, Tensor};
use crate::report::layers::{Layer, Module};

/// The bytes that it begins with.
pub(super) const START: &str = "name,section,verdict,passes,rule,dtype_a,dtype_b,";

/// The columns behind those.
const COLUMNS: &str = "shape_a,shape_b,numel_a,numel_b,state,layer,module,kind,l2,cos,one_minus_cos,rel_l2,max_abs,\
    max_abs_index,max_ulp,histogram,mean_abs,differing,identical,norm_a,norm_b,nan_a,nan_b,inf_a,inf_b,beyond_tolerance,\
    cast_misses,worst_index,worst_a,worst_b,replicas_that_disagree,error";

/// Number of columns.
fn width() -> usize {
    START.matches(',').count() + COLUMNS.matches(',').count() + 1
}

pub(super) fn write(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "{START}{COLUMNS}\r\n")?;
    let mut places: BTreeMap<usize, (&Layer, &Module)> = BTreeMap::new();
    for layer in document.layers.iter().flatten() {
        for module in &layer.modules {
            places.extend(module.tensors.iter().map(|index| (*index, (layer, module))));
        }
    }
    let mut has_failed = false;
    for (index, tensor) in document.tensors.iter().flatten().enumerate() {
        has_failed |= !tensor.passes;
        write_row(&row(tensor, places.get(&index).copied()), out)?;
    }
    let empty = [String::new(), String::new()].map(|_| Vec::new());
    let sides = document.only_in.as_ref().map_or(empty, |sides| [sides.a.clone(), sides.b.clone()]);
    for (side, names) in ["a", "b"].into_iter().zip(&sides) {
        for name in names {
            has_failed = true;
            write_row(&other_row(name, &format!("only in {side}"), ""), out)?;
        }
    }
    for error in &document.errors {
        has_failed = true;
        write_row(&other_row("", "trouble", error), out)?;
    }
    if !document.passes && !has_failed {
        let summary = document.summary.as_deref().unwrap_or_default();
        write_row(&other_row("", &document.verdict, summary), out)?;
    }
    Ok(())
}

/// A line about something that is no pair of tensors, and does not pass.
fn other_row(name: &str, verdict: &str, error: &str) -> Vec<String> {
    let mut fields = vec![String::new(); width()];
    fields[0] = text(name);
    fields[2] = verdict.to_owned();
    fields[3] = "false".to_owned();
    fields[width() - 1] = text(error);
    fields
}

fn row(tensor: &Tensor, place: Option<(&Layer, &Module)>) -> Vec<String> {
    let Tensor { dtype, shape, numel, metrics, worst, cast, .. } = tensor;
    let disagree = tensor.replicas.iter().filter(|copy| copy.disagrees).count();
    let (layer, module) = place.unzip();
    let mut fields = vec![
        text(&tensor.name),
        text(&tensor.section),
        text(&tensor.verdict),
        tensor.passes.to_string(),
        shown(tensor.rule.as_ref()),
        text(&dtype.a),
        text(&dtype.b),
        indices(&shape.a),
        indices(&shape.b),
        numel.a.to_string(),
        numel.b.to_string(),
        text(layer.map_or("", |layer| &layer.state)),
        text(layer.map_or("", |layer| &layer.title)),
        text(module.map_or("", |module| &module.name)),
        text(module.map_or("", |module| &module.kind)),
    ];
    fields.extend(metric_fields(metrics));
    fields.extend([
        shown(tensor.beyond_tolerance.as_ref()),
        shown(cast.as_ref().map(|cast| &cast.misses)),
        worst.as_ref().map_or(String::new(), |worst| indices(&worst.index)),
        text(worst.as_ref().map_or("", |worst| &worst.a)),
        text(worst.as_ref().map_or("", |worst| &worst.b)),
        disagree.to_string(),
        text(tensor.error.as_ref().map_or("", |error| &error.message)),
    ]);
    fields
}

fn metric_fields(metrics: &Metrics) -> [String; 17] {
    let powers = metrics.histogram.as_ref().map_or(String::new(), |powers| {
        let counts: Vec<String> =
            powers.iter().map(|(power, count)| format!("2^{power}:{count}")).collect();
        counts.join(" ")
    });
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:?}"));
    [
        number(metrics.l2),
        number(metrics.cos),
        number(metrics.one_minus_cos),
        number(metrics.rel_l2),
        number(metrics.max_abs),
        metrics.max_abs_index.as_deref().map_or(String::new(), indices),
        shown(metrics.max_ulp.as_ref()),
        powers,
        number(metrics.mean_abs),
        shown(metrics.differing.as_ref()),
        shown(metrics.identical.as_ref()),
        number(metrics.norm_a),
        number(metrics.norm_b),
        shown(metrics.nan_a.as_ref()),
        shown(metrics.nan_b.as_ref()),
        shown(metrics.inf_a.as_ref()),
        shown(metrics.inf_b.as_ref()),
    ]
}

fn shown(value: Option<&impl ToString>) -> String {
    value.map_or(String::new(), ToString::to_string)
}

fn indices(numbers: &[u64]) -> String {
    crate::report::units::shape(numbers)
}

/// Text that is no formula: one that begins like a formula and is no number has an apostrophe before it.
fn text(text: &str) -> String {
    let shown = printable(text);
    let is_formula = shown.starts_with(['=', '+', '-', '@']) && shown.parse::<f64>().is_err();
    if is_formula { format!("'{shown}") } else { shown.into_owned() }
}

fn write_row(fields: &[String], out: &mut dyn Write) -> io::Result<()> {
    for (index, field) in fields.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(out, "{comma}{}", quoted(field))?;
    }
    out.write_all(b"\r\n")
}

/// The field, in quotes where it has a character that needs them.
fn quoted(field: &str) -> Cow<'_, str> {
    if field.contains([',', '"', '\r', '\n']) || field != field.trim() {
        Cow::Owned(format!("\"{}\"", field.replace('"', "\"\"")))
    } else {
        Cow::Borrowed(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formula_is_text_and_quotes_are_doubled() {
        assert_eq!(text("=HYPERLINK(\"x\")"), "'=HYPERLINK(\"x\")");
        assert_eq!(text("@x"), "'@x");
        assert_eq!(text("-1.5e3"), "-1.5e3");
        assert_eq!(text("a\r\n=b"), "a\\u{d}\\u{a}=b");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(quoted("plain"), "plain");
    }
}
