//! The options that decide, and the rules.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::judge::bounds;
use crate::judge::policy;
use crate::pairing::{Globs, Selection};
use crate::report::Report;

use super::side_name;

/// The options that the verdict depends on.
#[derive(Serialize)]
pub(super) struct Options<'a> {
    bounds: Bounds,
    rules: Vec<Rule<'a>>,
    include: Vec<&'a str>,
    exclude: Vec<&'a str>,
    vocab_size: Option<u64>,
    allow_diverged: bool,
}

/// Bounds; null where nothing is said.
#[derive(Serialize)]
struct Bounds {
    rtol: Option<f64>,
    atol: Option<f64>,
    tolerance: Option<&'static str>,
    max: BTreeMap<&'static str, f64>,
    allow_cast: Option<bool>,
    equal_nan: Option<bool>,
}

#[derive(Serialize)]
struct Rule<'a> {
    line: usize,
    #[serde(rename = "match")]
    globs: &'a [String],
    bounds: Bounds,
    ignore: bool,
    allow_missing: Vec<&'static str>,
    required: bool,
}

/// A rule that decides about no tensor.
#[derive(Serialize)]
pub(super) struct UnusedRule<'a> {
    line: usize,
    #[serde(rename = "match")]
    globs: &'a [String],
    required: bool,
}

impl<'a> Options<'a> {
    pub(super) fn of(report: &'a Report) -> Self {
        let Selection { include, exclude, vocab_size } = &report.selection;
        Self {
            bounds: Bounds::of(&report.policy.bounds),
            rules: report.policy.rules.iter().map(Rule::of).collect(),
            include: Globs::texts(include).collect(),
            exclude: Globs::texts(exclude).collect(),
            vocab_size: *vocab_size,
            allow_diverged: report.allow_diverged,
        }
    }
}

impl Bounds {
    fn of(bounds: &bounds::Bounds) -> Self {
        // Of two bounds on one metric the smaller one decides.
        let mut max = BTreeMap::new();
        for bound in &bounds.max {
            let smallest = max.entry(bound.metric.name).or_insert(bound.max);
            *smallest = smallest.min(bound.max);
        }
        Self {
            rtol: bounds.rtol,
            atol: bounds.atol,
            tolerance: (bounds.torch == Some(true)).then_some("torch"),
            max,
            allow_cast: bounds.allow_cast,
            equal_nan: bounds.equal_nan,
        }
    }
}

impl<'a> Rule<'a> {
    fn of(rule: &'a policy::Rule) -> Self {
        Self {
            line: rule.line,
            globs: &rule.globs,
            bounds: Bounds::of(&rule.bounds),
            ignore: rule.ignore,
            allow_missing: rule.allow_missing.iter().copied().map(side_name).collect(),
            required: rule.required,
        }
    }
}

impl<'a> UnusedRule<'a> {
    pub(super) fn of(unused: &'a policy::UnusedRule) -> Self {
        Self { line: unused.line, globs: &unused.globs, required: unused.required }
    }
}
