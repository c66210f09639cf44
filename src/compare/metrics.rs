//! The metrics of a compared tensor: one row each.

use serde_json::{Value, json};

use crate::base::extent;
use crate::kernel::{Spread, Stats};

use super::side_reader::unflattened;
use super::{Outcome, TensorComparison};

/// A number or text that a report may show of a tensor.
pub struct Metric {
    /// Its key in the JSON result.
    pub name: &'static str,
    /// It is there unasked.
    pub is_default: bool,
    /// Its value; null where it is not defined.
    pub value: fn(&TensorComparison) -> Value,
}

const fn default(name: &'static str, value: fn(&TensorComparison) -> Value) -> Metric {
    Metric { name, is_default: true, value }
}

const fn on_request(name: &'static str, value: fn(&TensorComparison) -> Value) -> Metric {
    Metric { name, is_default: false, value }
}

/// The metric for which some tensors are read a second time.
pub const ONE_MINUS_COS: &str = "one_minus_cos";

/// A metric for which the sizes of differences are taken.
pub const MAX_ULP: &str = "max_ulp";
/// Another one: how many elements differ by each power of two.
pub const HISTOGRAM: &str = "histogram";

/// All metrics, in the order in which they are written.
pub static METRICS: &[Metric] = &[
    default("l2", |tensor| of_stats(tensor, |stats| json!(stats.l2()))),
    default("cos", |tensor| of_stats(tensor, |stats| json!(stats.cos()))),
    default("numel", |tensor| one_or_both(tensor.shapes.each_ref().map(|shape| numel(shape)))),
    default("shape", |tensor| one_or_both(tensor.shapes.each_ref())),
    on_request("dtype", |tensor| one_or_both(tensor.dtypes.map(|dtype| dtype.name()))),
    on_request(ONE_MINUS_COS, |tensor| {
        of_stats(tensor, |stats| json!(tensor.one_minus_cos.or(stats.one_minus_cos())))
    }),
    on_request("rel_l2", |tensor| of_stats(tensor, |stats| json!(stats.rel_l2()))),
    on_request("max_abs", |tensor| of_finite(tensor, |stats| json!(stats.max_abs()))),
    on_request("max_abs_index", |tensor| {
        let index = |at| unflattened(at, &tensor.shapes[0]);
        of_finite(tensor, |stats| json!(stats.max_abs_index().map(index)))
    }),
    on_request(MAX_ULP, |tensor| {
        let spread = tensor.spread.as_ref();
        of_finite(tensor, |_| json!(spread.map(Spread::max_ulp)))
    }),
    on_request(HISTOGRAM, |tensor| match &tensor.spread {
        Some(spread) => of_stats(tensor, |_| json!(spread.powers())),
        None => Value::Null,
    }),
    on_request("mean_abs", |tensor| of_stats(tensor, |stats| json!(stats.mean_abs()))),
    on_request("differing", |tensor| of_stats(tensor, |stats| json!(stats.differing()))),
    on_request("identical", |tensor| of_stats(tensor, |stats| json!(stats.is_identical()))),
    on_request("norm_a", |tensor| of_stats(tensor, |stats| json!(stats.norm_a()))),
    on_request("norm_b", |tensor| of_stats(tensor, |stats| json!(stats.norm_b()))),
    on_request("nan_a", |tensor| of_stats(tensor, |stats| json!(stats.nan()[0]))),
    on_request("nan_b", |tensor| of_stats(tensor, |stats| json!(stats.nan()[1]))),
    on_request("inf_a", |tensor| of_stats(tensor, |stats| json!(stats.inf()[0]))),
    on_request("inf_b", |tensor| of_stats(tensor, |stats| json!(stats.inf()[1]))),
];

/// The metrics that are there unasked.
#[must_use]
pub fn defaults() -> Vec<&'static Metric> {
    METRICS.iter().filter(|metric| metric.is_default).collect()
}

/// The default metrics and those asked for by name.
///
/// # Errors
/// The first name that is no metric.
pub fn select(names: &[String]) -> Result<Vec<&'static Metric>, String> {
    let is_known = |name: &&String| {
        name.as_str() == "all" || METRICS.iter().any(|metric| metric.name == **name)
    };
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let all: Vec<&str> = METRICS.iter().map(|metric| metric.name).collect();
        return Err(format!("no metric is called {unknown}: there are all, {}", all.join(", ")));
    }
    let is_asked = |metric: &&Metric| {
        metric.is_default || names.iter().any(|name| name == "all" || name == metric.name)
    };
    Ok(METRICS.iter().filter(is_asked).collect())
}

fn of_stats(tensor: &TensorComparison, value: impl Fn(&Stats) -> Value) -> Value {
    match &tensor.outcome {
        Outcome::Compared(stats) => value(stats),
        Outcome::ShapeDiffers | Outcome::Unreadable(_) => Value::Null,
    }
}

/// A value that elements which are not finite leave undefined.
fn of_finite(tensor: &TensorComparison, value: impl Fn(&Stats) -> Value) -> Value {
    of_stats(tensor, |stats| if stats.is_finite() { value(stats) } else { Value::Null })
}

fn numel(shape: &[u64]) -> u64 {
    extent::numel(shape).unwrap_or(u64::MAX)
}

/// One value where the sides agree, else both.
fn one_or_both<T: PartialEq + serde::Serialize>([a, b]: [T; 2]) -> Value {
    if a == b { json!(a) } else { json!([a, b]) }
}
