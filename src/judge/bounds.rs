//! The bounds that a tensor has to hold, where equal values are not asked for.

use std::str::FromStr;

use crate::base::dtype::Dtype;
use crate::compare::metrics::{MAX_ULP, ONE_MINUS_COS};
use crate::compare::{TensorComparison, Wanted};
use crate::kernel::{Closeness, Spread, Stats};

/// The bounds that a tensor has to hold; those that are not given ask nothing, and with none at all the values have to be
/// equal.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bounds {
    /// The distance of each element, relative to b.
    pub rtol: Option<f64>,
    /// The distance of each element, in units of the tensor.
    pub atol: Option<f64>,
    /// Both by the dtypes, as far as they are not given.
    pub torch: Option<bool>,
    /// Largest values of metrics.
    pub max: Vec<MetricBound>,
    /// A side may be the other, rounded to its dtype.
    pub allow_cast: Option<bool>,
    /// NaN at the same place on both sides is equal.
    pub equal_nan: Option<bool>,
}

impl Bounds {
    /// These bounds, and where they say nothing the others. A list of metrics takes the place of the other list.
    #[must_use]
    pub fn over(&self, other: &Self) -> Self {
        Self {
            rtol: self.rtol.or(other.rtol),
            atol: self.atol.or(other.atol),
            torch: self.torch.or(other.torch),
            max: if self.max.is_empty() { other.max.clone() } else { self.max.clone() },
            allow_cast: self.allow_cast.or(other.allow_cast),
            equal_nan: self.equal_nan.or(other.equal_nan),
        }
    }

    /// The bound on each element of tensors of these dtypes, where there is one.
    #[must_use]
    pub fn closeness(&self, dtypes: [Dtype; 2]) -> Option<Closeness> {
        let is_torch = self.torch == Some(true);
        if self.rtol.is_none() && self.atol.is_none() && !is_torch {
            return None;
        }
        let [rtol, atol] = if is_torch { torch_defaults(dtypes) } else { [0.0; 2] };
        Some(Closeness {
            rtol: self.rtol.unwrap_or(rtol),
            atol: self.atol.unwrap_or(atol),
            equal_nan: self.equal_nan == Some(true),
        })
    }

    /// The statistics that the bounds ask for.
    #[must_use]
    pub fn wanted(&self, dtypes: [Dtype; 2]) -> Wanted {
        let asks = |name| self.max.iter().any(|bound| bound.metric.name == name);
        Wanted {
            closeness: self.closeness(dtypes),
            spread: asks(MAX_ULP),
            one_minus_cos: asks(ONE_MINUS_COS),
        }
    }
}

/// `rtol` and `atol` of `torch.testing.assert_close` where neither is given: for each the larger one of the two dtypes
/// (`torch/testing/_comparison.py`, torch 2.9: `default_tolerances`).
fn torch_defaults(dtypes: [Dtype; 2]) -> [f64; 2] {
    let of = |dtype| -> [f64; 2] {
        match dtype {
            Dtype::Float16 => [1e-3, 1e-5],
            Dtype::BFloat16 => [1.6e-2, 1e-5],
            Dtype::Float32 | Dtype::Complex64 => [1.3e-6, 1e-5],
            Dtype::Float64 | Dtype::Complex128 => [1e-7, 1e-7],
            _ => [0.0, 0.0],
        }
    };
    let [[a_rtol, a_atol], [b_rtol, b_atol]] = dtypes.map(of);
    [a_rtol.max(b_rtol), a_atol.max(b_atol)]
}

/// A metric that a bound may be set on.
#[derive(Debug)]
pub struct BoundedMetric {
    /// Its name, as in the JSON result.
    pub name: &'static str,
    /// Its value; none where it is not defined. Statistics of the elements that count are given apart.
    pub value: fn(&TensorComparison, &Stats) -> Option<f64>,
}

impl PartialEq for BoundedMetric {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// All of them; each is 0 for equal values.
pub static BOUNDED: &[BoundedMetric] = &[
    BoundedMetric { name: "l2", value: |_, stats| stats.l2() },
    BoundedMetric { name: "rel_l2", value: |_, stats| stats.rel_l2() },
    BoundedMetric {
        name: ONE_MINUS_COS,
        value: |tensor, stats| tensor.one_minus_cos.or(stats.one_minus_cos()),
    },
    BoundedMetric {
        name: "max_abs",
        value: |_, stats| stats.max_abs().filter(|_| stats.is_finite()),
    },
    BoundedMetric { name: "mean_abs", value: |_, stats| stats.mean_abs() },
    BoundedMetric {
        name: MAX_ULP,
        value: |tensor, stats| {
            let ulp = tensor.spread.as_ref().map(Spread::max_ulp).filter(|_| stats.is_finite());
            ulp.map(|ulp| ulp as f64)
        },
    },
    BoundedMetric { name: "differing", value: |_, stats| Some(stats.differing() as f64) },
];

/// The largest value of a metric that passes.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricBound {
    /// The metric.
    pub metric: &'static BoundedMetric,
    /// The bound, included.
    pub max: f64,
}

impl MetricBound {
    /// A bound on the metric of this name.
    ///
    /// # Errors
    /// No metric of this name has bounds, or the value is none.
    pub fn new(name: &str, max: f64) -> Result<Self, String> {
        let Some(metric) = BOUNDED.iter().find(|metric| metric.name == name) else {
            let all: Vec<&str> = BOUNDED.iter().map(|metric| metric.name).collect();
            let hint = if name == "cos" { " (one_minus_cos is the way to bound it)" } else { "" };
            return Err(format!("no bound for {name}{hint}: there are {}", all.join(", ")));
        };
        Ok(Self { metric, max: magnitude(max)? })
    }
}

impl FromStr for MetricBound {
    type Err = String;

    /// Reads `METRIC=VALUE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').ok_or("not METRIC=VALUE, e.g. rel_l2=1e-3")?;
        let value = value.parse().map_err(|_| format!("{value:?} is no number"))?;
        Self::new(name, value)
    }
}

/// A number that is a bound: finite and not negative.
///
/// # Errors
/// It is neither.
pub fn magnitude(value: f64) -> Result<f64, String> {
    let is_one = value.is_finite() && value >= 0.0;
    is_one.then_some(value).ok_or_else(|| format!("{value} is no bound: 0 or more"))
}
