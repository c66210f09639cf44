//! A tensor of the document.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::base::extent;
use crate::catalog::Section;
use crate::compare::metrics::METRICS;
use crate::compare::{Example, Outcome, ReadError, ReplicaDifference, TensorComparison};
use crate::judge::verdict::{BrokenBound, WeakBound};
use crate::names::Name;
use crate::report::{Judged, Report};

use super::{Sides, Word, side_name, text};

/// A tensor of both sides.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tensor {
    /// The canonical name.
    pub name: String,
    /// Its names before rules gave it this one.
    pub renamed_from: Sides<Option<String>>,
    /// The section that it belongs to.
    pub section: Word,
    /// The best that is true of it.
    pub verdict: Word,
    /// It is good enough by the bounds that it has to hold.
    pub passes: bool,
    /// The line of the rule that decides about it.
    pub rule: Option<usize>,
    /// The element types.
    pub dtype: Sides<Word>,
    /// The shapes as compared.
    pub shape: Sides<Vec<u64>>,
    /// Number of elements.
    pub numel: Sides<u64>,
    /// The metrics.
    pub metrics: Metrics,
    /// The bounds that do not hold, where it does not pass.
    pub broken: Vec<Broken>,
    /// Number of elements beyond the tolerance, where one was given.
    pub beyond_tolerance: Option<u64>,
    /// A tolerance that zeros would hold.
    pub weak_tolerance: Option<Weak>,
    /// The side that looks like the other one, rounded.
    pub cast: Option<Cast>,
    /// The element that shows the difference.
    pub worst: Option<Worst>,
    /// Copies that are not the first one.
    pub replicas: Vec<Replica>,
    /// Rows of the vocabulary that were not compared.
    pub vocabulary_rows_left_out: Sides<u64>,
    /// The side on which it shares another tensor's values.
    pub tied_side: Option<Word>,
    /// The side that could not be read.
    pub error: Option<Unread>,
}

/// The metrics that have no place of their own in a tensor, as [`METRICS`] defines them; null where they are not defined.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "each is the metric of the same name")]
pub struct Metrics {
    pub l2: Option<f64>,
    pub cos: Option<f64>,
    pub one_minus_cos: Option<f64>,
    pub rel_l2: Option<f64>,
    pub max_abs: Option<f64>,
    pub max_abs_index: Option<Vec<u64>>,
    pub max_ulp: Option<u64>,
    pub histogram: Option<BTreeMap<i32, u64>>,
    pub mean_abs: Option<f64>,
    pub differing: Option<u64>,
    pub identical: Option<bool>,
    pub norm_a: Option<f64>,
    pub norm_b: Option<f64>,
    pub nan_a: Option<u64>,
    pub nan_b: Option<u64>,
    pub inf_a: Option<u64>,
    pub inf_b: Option<u64>,
}

/// A bound that does not hold.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "bound", rename_all = "lowercase")]
pub enum Broken {
    /// Elements beyond the tolerance.
    Elements {
        /// Their number.
        count: u64,
    },
    /// A metric larger than its bound, or not defined.
    Metric {
        /// Its name.
        metric: Word,
        /// Its value.
        value: Option<f64>,
        /// Its bound.
        max: f64,
    },
}

/// A bound that zeros would hold.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "bound", rename_all = "lowercase")]
pub enum Weak {
    /// Relative.
    Rtol {
        /// The bound.
        rtol: f64,
    },
    /// Absolute.
    Atol {
        /// The bound.
        atol: f64,
        /// The root mean square of b.
        rms: f64,
    },
}

/// The side that is the other one, rounded, but for some elements.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cast {
    /// The side.
    pub rounded: Word,
    /// The number of these elements.
    pub misses: u64,
}

/// One element of both sides.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Worst {
    /// Its index.
    pub index: Vec<u64>,
    /// Its value in a, in full.
    pub a: String,
    /// Its value in b, in full.
    pub b: String,
}

/// A copy that is not the first one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Replica {
    /// The side that it belongs to.
    pub side: Word,
    /// The shard with the first copy.
    pub first: String,
    /// The shard with this one.
    pub copy: String,
    /// Its name there.
    pub stored_name: String,
    /// It is no part of a sum.
    pub disagrees: bool,
    /// The distance from the first copy.
    pub l2: Option<f64>,
    /// The cosine of the angle to it.
    pub cos: Option<f64>,
    /// The largest difference.
    pub max_abs: Option<f64>,
    /// Number of elements that differ.
    pub differing: u64,
}

/// A side that could not be read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Unread {
    /// The side.
    pub side: Word,
    /// The file.
    pub file: String,
    /// The reason.
    pub message: String,
}

impl Tensor {
    pub(super) fn of(judged: &Judged, report: &Report) -> serde_json::Result<Self> {
        let Judged { tensor, judgement, rule } = judged;
        let old = |names: &BTreeMap<Name, Name>| {
            names.get(&tensor.name).map(|old| old.as_str().to_owned())
        };
        let numel = |shape: &Vec<u64>| extent::numel(shape).unwrap_or(u64::MAX);
        Ok(Self {
            name: tensor.name.as_str().to_owned(),
            renamed_from: report.renamed_from.each_ref().map(old).into(),
            section: Section::of(tensor.name.as_str()).name().into(),
            verdict: judgement.verdict.name().into(),
            passes: judgement.passes,
            rule: *rule,
            dtype: tensor.dtypes.map(|dtype| dtype.name().into()).into(),
            shape: tensor.shapes.clone().into(),
            numel: tensor.shapes.each_ref().map(numel).into(),
            metrics: Metrics::of(tensor)?,
            broken: judgement.broken.iter().map(Broken::of).collect(),
            beyond_tolerance: tensor.beyond.map(|beyond| beyond.count),
            weak_tolerance: judgement.weak.map(Weak::of),
            cast: judgement.rounded.map(|(side, misses)| Cast {
                rounded: if side == 0 { "a" } else { "b" }.into(),
                misses,
            }),
            worst: tensor.example.as_ref().map(Worst::of),
            replicas: tensor.replicas.iter().map(Replica::of).collect(),
            vocabulary_rows_left_out: tensor.rows_left_out.into(),
            tied_side: tensor.tied_side.map(side_name),
            error: match &tensor.outcome {
                Outcome::Unreadable(error) => Some(Unread::of(error)),
                Outcome::Compared(_) | Outcome::ShapeDiffers => None,
            },
        })
    }
}

impl Metrics {
    /// All metrics of a tensor; every one in the table has to have a place.
    fn of(tensor: &TensorComparison) -> serde_json::Result<Self> {
        let is_elsewhere = |name: &str| ["numel", "shape", "dtype"].contains(&name);
        let metrics = METRICS.iter().filter(|metric| !is_elsewhere(metric.name));
        let values = metrics.map(|metric| (metric.name.to_owned(), (metric.value)(tensor)));
        serde_json::from_value(Value::Object(values.collect()))
    }
}

impl Broken {
    fn of(broken: &BrokenBound) -> Self {
        match *broken {
            BrokenBound::Elements(count) => Self::Elements { count },
            BrokenBound::Metric { name, value, max } => {
                Self::Metric { metric: name.into(), value, max }
            }
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

impl Worst {
    fn of(Example { index, values: [a, b] }: &Example) -> Self {
        Self { index: index.clone(), a: a.clone(), b: b.clone() }
    }
}

impl Replica {
    fn of(replica: &ReplicaDifference) -> Self {
        let stats = &replica.stats;
        Self {
            side: side_name(replica.side),
            first: replica.first.to_string(),
            copy: replica.copy.to_string(),
            stored_name: replica.stored_name.to_string(),
            disagrees: replica.is_divergence(),
            l2: stats.l2(),
            cos: stats.cos(),
            max_abs: stats.max_abs().filter(|_| stats.is_finite()),
            differing: stats.differing(),
        }
    }
}

impl Unread {
    fn of(ReadError { side, file, message }: &ReadError) -> Self {
        Self { side: side_name(*side), file: text(file), message: message.clone() }
    }
}
