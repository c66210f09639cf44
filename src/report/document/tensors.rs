//! A tensor of the document.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::base::extent;
use crate::catalog::Section;
use crate::compare::metrics::METRICS;
use crate::compare::{Example, Outcome, ReadError, ReplicaDifference, TensorComparison};
use crate::judge::verdict::{BrokenBound, WeakBound};
use crate::report::Judged;

use super::{Sides, side_name, text};

#[derive(Serialize)]
pub(super) struct Tensor<'a> {
    name: &'a str,
    section: &'static str,
    verdict: &'static str,
    passes: bool,
    rule: Option<usize>,
    dtype: Sides<&'static str>,
    shape: Sides<&'a [u64]>,
    numel: Sides<u64>,
    metrics: Map<String, Value>,
    broken: Vec<Broken>,
    beyond_tolerance: Option<u64>,
    weak_tolerance: Option<Weak>,
    cast: Option<Cast>,
    worst: Option<Worst<'a>>,
    replicas: Vec<Replica<'a>>,
    vocabulary_rows_left_out: Sides<u64>,
    tied_side: Option<&'static str>,
    error: Option<Unread<'a>>,
}

/// A bound that does not hold.
#[derive(Serialize)]
#[serde(tag = "bound", rename_all = "lowercase")]
enum Broken {
    Elements { count: u64 },
    Metric { metric: &'static str, value: Option<f64>, max: f64 },
}

/// A bound that zeros would hold.
#[derive(Serialize)]
#[serde(tag = "bound", rename_all = "lowercase")]
enum Weak {
    Rtol { rtol: f64 },
    Atol { atol: f64, rms: f64 },
}

/// The side that is the other one, rounded, but for some elements.
#[derive(Serialize)]
struct Cast {
    rounded: &'static str,
    misses: u64,
}

/// One element of both sides.
#[derive(Serialize)]
struct Worst<'a> {
    index: &'a [u64],
    a: &'a str,
    b: &'a str,
}

/// A copy that is not the first one.
#[derive(Serialize)]
struct Replica<'a> {
    side: &'static str,
    first: &'a str,
    copy: &'a str,
    stored_name: &'a str,
    disagrees: bool,
    l2: Option<f64>,
    cos: Option<f64>,
    max_abs: Option<f64>,
    differing: u64,
}

#[derive(Serialize)]
struct Unread<'a> {
    side: &'static str,
    file: String,
    message: &'a str,
}

impl<'a> Tensor<'a> {
    pub(super) fn of(Judged { tensor, judgement, rule }: &'a Judged) -> Self {
        let numel = |shape: &Vec<u64>| extent::numel(shape).unwrap_or(u64::MAX);
        Self {
            name: tensor.name.as_str(),
            section: Section::of(tensor.name.as_str()).name(),
            verdict: judgement.verdict.name(),
            passes: judgement.passes,
            rule: *rule,
            dtype: tensor.dtypes.map(|dtype| dtype.name()).into(),
            shape: tensor.shapes.each_ref().map(Vec::as_slice).into(),
            numel: tensor.shapes.each_ref().map(numel).into(),
            metrics: metrics(tensor),
            broken: judgement.broken.iter().map(Broken::of).collect(),
            beyond_tolerance: tensor.beyond.map(|beyond| beyond.count),
            weak_tolerance: judgement.weak.map(Weak::of),
            cast: judgement
                .rounded
                .map(|(side, misses)| Cast { rounded: if side == 0 { "a" } else { "b" }, misses }),
            worst: tensor.example.as_ref().map(Worst::of),
            replicas: tensor.replicas.iter().map(Replica::of).collect(),
            vocabulary_rows_left_out: tensor.rows_left_out.into(),
            tied_side: tensor.tied_side.map(side_name),
            error: match &tensor.outcome {
                Outcome::Unreadable(error) => Some(Unread::of(error)),
                Outcome::Compared(_) | Outcome::ShapeDiffers => None,
            },
        }
    }
}

/// The metrics that have no place of their own in a tensor.
fn metrics(tensor: &TensorComparison) -> Map<String, Value> {
    let is_elsewhere = |name: &str| ["numel", "shape", "dtype"].contains(&name);
    let metrics = METRICS.iter().filter(|metric| !is_elsewhere(metric.name));
    metrics.map(|metric| (metric.name.to_owned(), (metric.value)(tensor))).collect()
}

impl Broken {
    fn of(broken: &BrokenBound) -> Self {
        match *broken {
            BrokenBound::Elements(count) => Self::Elements { count },
            BrokenBound::Metric { name, value, max } => Self::Metric { metric: name, value, max },
        }
    }
}

impl Weak {
    fn of(weak: WeakBound) -> Self {
        match weak {
            WeakBound::Rtol(rtol) => Self::Rtol { rtol },
            WeakBound::Atol { atol, rms } => Self::Atol { atol, rms },
        }
    }
}

impl<'a> Worst<'a> {
    fn of(Example { index, values: [a, b] }: &'a Example) -> Self {
        Self { index, a, b }
    }
}

impl<'a> Replica<'a> {
    fn of(replica: &'a ReplicaDifference) -> Self {
        let stats = &replica.stats;
        Self {
            side: side_name(replica.side),
            first: &replica.first,
            copy: &replica.copy,
            stored_name: &replica.stored_name,
            disagrees: replica.is_divergence(),
            l2: stats.l2(),
            cos: stats.cos(),
            max_abs: stats.max_abs().filter(|_| stats.is_finite()),
            differing: stats.differing(),
        }
    }
}

impl<'a> Unread<'a> {
    fn of(ReadError { side, file, message }: &'a ReadError) -> Self {
        Self { side: side_name(*side), file: text(file), message }
    }
}
