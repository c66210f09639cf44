//! The verdict of a page in words, and below it how much differs.

use crate::report::document::Document;
use crate::report::layers::{FirstDifference, Overall};
use crate::report::units::{counted, grouped, scientific};

/// The verdict in words.
pub(super) fn of(document: &Document) -> String {
    match &*document.verdict {
        "cast" => "equal after cast".to_owned(),
        "within" => "within tolerance".to_owned(),
        "different" => different(document),
        verdict => verdict.to_owned(),
    }
}

fn different(document: &Document) -> String {
    let is_unrelated = |overall: &Overall| overall.unrelated as u64 * 2 > overall.tensors.of;
    if document.overall.as_ref().is_some_and(is_unrelated) {
        return "different: unrelated weights".to_owned();
    }
    if document.overall.as_ref().is_some_and(|overall| overall.noise) {
        return "different, by noise alone".to_owned();
    }
    match &document.first_difference {
        Some(first) => format!("different: first difference at {}", place(first)),
        None => "different".to_owned(),
    }
}

fn place(first: &FirstDifference) -> String {
    let FirstDifference { state, layer, module, tensor } = first;
    let of = if state.is_empty() { String::new() } else { format!("{state} of ") };
    let module = if module.is_empty() { tensor } else { module };
    format!("{of}{layer}, {module}")
}

/// The closing line of the screen without the verdict, and how much differs.
pub(super) fn lines(document: &Document) -> Vec<String> {
    let mut lines: Vec<String> = document.summary.iter().cloned().collect();
    lines.extend(document.overall.iter().flat_map(overall_lines));
    lines
}

fn overall_lines(overall: &Overall) -> Vec<String> {
    let Overall { rel_l2, elements, without_distance, noise, unrelated, .. } = overall;
    let mut lines = Vec::new();
    if overall.tensors.differing == 0 {
        return lines;
    }
    lines.push(format!(
        "overall rel_l2 {}; {} of {} elements differ",
        scientific(*rel_l2),
        grouped(elements.differing),
        grouped(elements.of)
    ));
    if *without_distance > 0 {
        lines.push(format!(
            "no distance: {}, of two shapes or not finite",
            counted(*without_distance, "tensor")
        ));
    }
    if *noise {
        lines.push("noise: nothing differs by more than 2 ulp of the coarser dtype".to_owned());
    }
    if *unrelated > 0 {
        lines.push(format!(
            "unrelated: {}: rel_l2 about 1.41, cosine about 0",
            counted(*unrelated, "tensor")
        ));
    }
    lines
}
