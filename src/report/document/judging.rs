//! The options that decide, and the rules.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::judge::bounds;
use crate::judge::policy;
use crate::pairing::{Globs, Selection};
use crate::report::Report;

use super::naming::Rename;
use super::{Word, side_name};

/// The options that the verdict depends on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Options {
    /// The bounds that hold for every tensor.
    pub bounds: Bounds,
    /// The rules, of which the first that matches a name decides.
    pub rules: Vec<Rule>,
    /// The globs of the names that took part.
    pub include: Vec<String>,
    /// The globs of those that did not.
    pub exclude: Vec<String>,
    /// Rows of the vocabulary that were compared.
    pub vocab_size: Option<u64>,
    /// The rules that give tensors new names.
    pub map: Vec<Rename>,
    /// The fp32 masters of a side that has any were compared in the place of its weights.
    pub masters: bool,
    /// Copies that disagree are no difference.
    pub allow_diverged: bool,
    /// The profile.
    pub profile: Word,
    /// Key paths of state that rules ignore.
    pub ignored_state: Vec<String>,
}

/// Bounds; null where nothing is said.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Bounds {
    /// Relative to each element of b.
    pub rtol: Option<f64>,
    /// Of each element.
    pub atol: Option<f64>,
    /// The name of a table that has both by dtype.
    pub tolerance: Option<Word>,
    /// Largest values of metrics.
    pub max: BTreeMap<Word, f64>,
    /// Exact casts pass.
    pub allow_cast: Option<bool>,
    /// NaN at the same place is equal.
    pub equal_nan: Option<bool>,
}

/// A rule of the rules file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rule {
    /// The line on which it begins.
    pub line: usize,
    /// Its globs.
    #[serde(rename = "match")]
    pub globs: Vec<String>,
    /// The bounds of these tensors.
    pub bounds: Bounds,
    /// These names are not compared.
    pub ignore: bool,
    /// The sides on which they may be missing.
    pub allow_missing: Vec<Word>,
    /// At least one of these tensors has to be compared.
    pub required: bool,
}

/// A rule that decides about no tensor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UnusedRule {
    /// The line on which it begins.
    pub line: usize,
    /// Its globs.
    #[serde(rename = "match")]
    pub globs: Vec<String>,
    /// So the verdict is trouble.
    pub required: bool,
}

impl Options {
    pub(super) fn of(report: &Report) -> Self {
        let Selection { include, exclude, vocab_size } = &report.selection;
        Self {
            bounds: Bounds::of(&report.policy.bounds),
            rules: report.policy.rules.iter().map(Rule::of).collect(),
            include: Globs::texts(include).map(str::to_owned).collect(),
            exclude: Globs::texts(exclude).map(str::to_owned).collect(),
            vocab_size: *vocab_size,
            map: report.renames.iter().map(Rename::of).collect(),
            masters: report.takes_masters,
            allow_diverged: report.allow_diverged,
            profile: report.policy.state.profile.name().into(),
            ignored_state: report.policy.state.ignore.texts().to_vec(),
        }
    }
}

impl Bounds {
    fn of(bounds: &bounds::Bounds) -> Self {
        // Of two bounds on one metric the smaller one decides.
        let mut max = BTreeMap::new();
        for bound in &bounds.max {
            let smallest = max.entry(bound.metric.name.into()).or_insert(bound.max);
            *smallest = smallest.min(bound.max);
        }
        Self {
            rtol: bounds.rtol,
            atol: bounds.atol,
            tolerance: (bounds.torch == Some(true)).then_some("torch".into()),
            max,
            allow_cast: bounds.allow_cast,
            equal_nan: bounds.equal_nan,
        }
    }
}

impl Rule {
    fn of(rule: &policy::Rule) -> Self {
        Self {
            line: rule.line,
            globs: rule.globs.clone(),
            bounds: Bounds::of(&rule.bounds),
            ignore: rule.ignore,
            allow_missing: rule.allow_missing.iter().copied().map(side_name).collect(),
            required: rule.required,
        }
    }
}

impl UnusedRule {
    pub(super) fn of(unused: &policy::UnusedRule) -> Self {
        Self { line: unused.line, globs: unused.globs.clone(), required: unused.required }
    }
}
