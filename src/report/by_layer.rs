//! The layers on the screen: where it begins to differ, how much in all, and a table in the order of the forward pass.

use std::io;

use crate::judge::verdict::TensorVerdict;
use crate::names::forward::Kind;
use crate::names::place::Place;
use crate::names::printable;

use super::document::Tensor;
use super::fit::COLUMNS;
use super::layers::{FirstDifference, Layer, Layers, Module, Overall};
use super::units::{counted, grouped, scientific, shape, share};
use super::{Report, Screen};

/// Writes all of it, as far as there is something to tell.
pub(super) fn write(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let Layers { overall, first_difference, layers } = Layers::of(report);
    if overall.tensors.differing == 0 && !screen.view.by_layer {
        return Ok(());
    }
    writeln!(screen.out)?;
    if let Some(first) = &first_difference {
        let title = "first difference:";
        let first = screen.style.shortened(&first_text(first), COLUMNS - title.len() - 1);
        writeln!(screen.out, "{} {first}", screen.style.heading(title))?;
    }
    for line in overall_lines(&overall) {
        writeln!(screen.out, "{}", screen.style.wrapped(&line, 3))?;
    }
    for of_state in layers.chunk_by(|one, other| one.state == other.state) {
        let differing = of_state.iter().filter(|layer| !is_equal(&layer.verdict)).count();
        let is_worth_it = differing > 1 && first_difference.is_some() && !overall.noise;
        if screen.view.by_layer || is_worth_it {
            write_table(of_state, screen)?;
        }
    }
    Ok(())
}

/// The layer and the module, with the number of the expert.
pub(super) fn first_text(first: &FirstDifference) -> String {
    let FirstDifference { state, layer, module, tensor } = first;
    let of = if state.is_empty() { String::new() } else { format!("{state} of ") };
    let expert = Place::of(tensor).expert.map(|expert| expert.to_string());
    let module = if module.is_empty() { tensor } else { module };
    let module = module.replacen('*', expert.as_deref().unwrap_or("*"), 1);
    printable(&format!("{of}{layer}, {module}")).into_owned()
}

/// A tensor that does not pass, in a line.
pub(super) fn verdict_text(tensor: &Tensor) -> String {
    let Tensor { name, verdict, metrics, shape: shapes, error, worst, .. } = tensor;
    let mut parts = vec![format!("{name}: {verdict}")];
    match error {
        Some(error) => parts.push(format!("{}: {}: {}", error.side, error.file, error.message)),
        None if shapes.a != shapes.b => {
            parts.push(format!("shape {} in a, {} in b", shape(&shapes.a), shape(&shapes.b)));
        }
        None => {
            let [rel_l2, max_abs] = [metrics.rel_l2, metrics.max_abs].map(scientific);
            parts.push(format!("rel_l2 {rel_l2}, max_abs {max_abs}"));
            parts.extend(
                worst.as_ref().map(|worst| {
                    format!("at {}: a {}, b {}", shape(&worst.index), worst.a, worst.b)
                }),
            );
        }
    }
    parts.join(", ")
}

/// What is to be said of it all.
pub(super) fn overall_lines(overall: &Overall) -> Vec<String> {
    let Overall { rel_l2, tensors, elements, without_distance, noise, unrelated, .. } = overall;
    let mut lines = Vec::new();
    if tensors.differing == 0 {
        return lines;
    }
    let size = rel_l2.map(|rel_l2| format!("overall rel_l2 {}; ", scientific(Some(rel_l2))));
    lines.push(format!(
        "{}differ: {} of {} tensors, {} of all elements",
        size.unwrap_or_default(),
        grouped(tensors.differing),
        grouped(tensors.of),
        share(elements.differing, elements.of)
    ));
    if *without_distance > 0 {
        let count = counted(*without_distance, "tensor");
        lines.push(format!("no distance: {count}, of two shapes or not finite"));
    }
    if *noise {
        lines.push("noise: nothing differs by more than 2 ulp of the coarser dtype".to_owned());
    }
    if *unrelated > 0 {
        let (count, all) = (grouped(*unrelated as u64), grouped(tensors.of));
        lines.push(format!(
            "unrelated: {count} of {all} tensors: rel_l2 about 1.41, cosine about 0"
        ));
    }
    lines
}

/// A line of the table: a layer, or several that follow each other.
pub(super) struct Line<'l> {
    layers: &'l [Layer],
}

fn write_table(layers: &[Layer], screen: &mut Screen<'_>) -> io::Result<()> {
    let lines =
        if screen.view.by_layer { singly(layers) } else { folded(layers, screen.view.rows) };
    let mut kinds = kinds(layers);
    let state = layers.first().map_or("", |layer| &layer.state);
    let of = if state.is_empty() { String::new() } else { format!(" of {}", printable(state)) };
    let heading = format!("rel_l2 by layer{of}");
    let titles: Vec<String> = lines.iter().map(Line::title).collect();
    let longest = titles.iter().chain([&heading]).map(|title| title.chars().count()).max();
    let longest = longest.unwrap_or(0);
    let first = if screen.style.fits { longest.min(30) } else { longest };
    while screen.style.fits
        && first + WIDTH + kinds.iter().map(|kind| width(*kind)).sum::<usize>() > COLUMNS
    {
        kinds.pop();
    }
    let mut text = format!("{:first$}{:>WIDTH$}", screen.style.shortened(&heading, first), "worst");
    for kind in &kinds {
        text.push_str(&format!("{:>1$}", column(*kind), width(*kind)));
    }
    writeln!(screen.out, "\n{}", screen.style.heading(&text))?;
    for (line, title) in lines.iter().zip(&titles) {
        let title = screen.style.shortened(title, first);
        let mut text = match line.word() {
            Some(word) => format!("{title:first$}  {word}"),
            None => format!("{title:first$}{:>WIDTH$}", line.worst(None)),
        };
        if line.word().is_none() && line.is_layer() {
            for kind in &kinds {
                text.push_str(&format!("{:>1$}", line.worst(Some(*kind)), width(*kind)));
            }
        }
        writeln!(screen.out, "{}", text.trim_end())?;
    }
    Ok(())
}

/// The kinds of modules that differ in any layer.
pub(super) fn kinds(layers: &[Layer]) -> Vec<Kind> {
    let modules =
        || layers.iter().filter(|layer| layer.number.is_some()).flat_map(|one| &one.modules);
    let has = |kind: &Kind| modules().any(|one| one.kind == kind.name() && !is_equal(&one.verdict));
    Kind::ALL.into_iter().filter(has).collect()
}

/// Columns of a number, with the space before it.
const WIDTH: usize = 10;

/// The heading of a column.
fn column(kind: Kind) -> &'static str {
    match kind {
        Kind::CrossAttention => "cross",
        _ => kind.name(),
    }
}

fn width(kind: Kind) -> usize {
    WIDTH.max(column(kind).len() + 2)
}

impl Line<'_> {
    /// The name of the layer, or of the first and the last one.
    pub(super) fn title(&self) -> String {
        let text = match self.layers {
            [first, .., last] => {
                let last = last.number.map_or(String::new(), |number| number.to_string());
                // `layer 3` and the last number.
                match first.title.rsplit_once("layer ") {
                    Some((before, number)) => format!("{before}layers {number}-{last}"),
                    None => first.title.clone(),
                }
            }
            _ => self.layers.iter().map(|layer| layer.title.clone()).collect(),
        };
        printable(&text).into_owned()
    }

    /// It is in a list of layers.
    pub(super) fn is_layer(&self) -> bool {
        self.layers.iter().any(|layer| layer.number.is_some())
    }

    /// The worst verdict.
    pub(super) fn verdict(&self) -> String {
        let rank = |layer: &&Layer| {
            TensorVerdict::ALL.iter().position(|verdict| verdict.name() == layer.verdict)
        };
        self.layers.iter().max_by_key(rank).map_or(String::new(), |layer| layer.verdict.to_string())
    }

    /// The word for it where nothing differs.
    pub(super) fn word(&self) -> Option<&'static str> {
        let all = |word: &str| self.layers.iter().all(|layer| layer.verdict == word);
        let is_equal = self.layers.iter().all(|layer| is_equal(&layer.verdict));
        is_equal.then(|| if all("identical") { "identical" } else { "equal" })
    }

    /// The largest distance of the modules of a kind, or of all.
    pub(super) fn worst(&self, kind: Option<Kind>) -> String {
        let is_of = |module: &&Module| kind.is_none_or(|kind| module.kind == kind.name());
        let modules = || self.layers.iter().flat_map(|layer| &layer.modules).filter(is_of);
        let differing: Vec<&Module> =
            modules().filter(|module| !is_equal(&module.verdict)).collect();
        if differing.is_empty() {
            let is_there = modules().next().is_some();
            return if is_there { "0" } else { "" }.to_owned();
        }
        let is_known = differing.iter().all(|module| module.without_distance == 0);
        let worst = differing.iter().filter_map(|module| module.worst_rel_l2).reduce(f64::max);
        scientific(worst.filter(|_| is_known))
    }
}

fn is_equal(verdict: &str) -> bool {
    ["identical", "equal"].contains(&verdict)
}

pub(super) fn singly(layers: &[Layer]) -> Vec<Line<'_>> {
    layers.chunks(1).map(|layers| Line { layers }).collect()
}

/// The layers with what follows each other put together: those that are equal, and where the lines are more than twice `rows`, those
/// that differ in equal steps, but for the first one of each run.
pub(super) fn folded(layers: &[Layer], rows: usize) -> Vec<Line<'_>> {
    let lists = || {
        layers.chunk_by(|one, other| {
            one.list == other.list && one.number.is_some() && other.number.is_some()
        })
    };
    let count: usize = lists().map(|list| equal_runs(list).len()).sum();
    if count <= rows.saturating_mul(2) {
        return lists().flat_map(equal_runs).collect();
    }
    let differs = |layer: &Layer| !is_equal(&layer.verdict);
    let runs: Vec<&[Layer]> = lists()
        .flat_map(|list| list.chunk_by(|one, other| differs(one) == differs(other)))
        .collect();
    // Where equal and other layers alternate, steps go over both.
    let runs = if runs.len() <= rows.saturating_mul(2) { runs } else { lists().collect() };
    let longer: usize = runs.iter().map(|run| run.len() - 1).sum();
    let step = longer.div_ceil(rows.max(1)).max(2);
    let mut lines = Vec::new();
    for run in runs {
        let begin = run.iter().position(differs).unwrap_or(run.len());
        let (equal, others) = run.split_at(begin);
        let (first, others) = others.split_at(others.len().min(1));
        let parts = [equal, first].into_iter().chain(others.chunks(step));
        lines.extend(parts.filter(|part| !part.is_empty()).map(|layers| Line { layers }));
    }
    lines
}

/// The layers that are equal put together, the others one by one.
fn equal_runs(list: &[Layer]) -> Vec<Line<'_>> {
    let runs = list.chunk_by(|one, other| is_equal(&one.verdict) && is_equal(&other.verdict));
    runs.map(|layers| Line { layers }).collect()
}
