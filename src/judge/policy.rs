//! The policy of a comparison: which bounds each tensor has to hold, which names may be on one side only.

use std::collections::BTreeSet;
use std::ops::Range;
use std::str::FromStr;

use globset::GlobSet;
use thiserror::Error;

use crate::base::side::Side;
use crate::names::Name;
use crate::pairing::Pairing;

use super::bounds::Bounds;
use super::rules_file;
use super::state::{StateGlobs, StatePolicy};

/// A list of rules of which the first that matches a name decides, and bounds that go before those of any rule.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// The bounds that hold for every tensor, whatever the rules say.
    pub bounds: Bounds,
    /// The rules, the first that matches decides.
    pub rules: Vec<Rule>,
    /// The state that may differ.
    pub state: StatePolicy,
}

/// A rule about the tensors of some names.
#[derive(Debug, Clone)]
pub struct Rule {
    /// The line of the file on which it begins, from 1.
    pub line: usize,
    /// The names, as they are written.
    pub globs: Vec<String>,
    /// The names.
    pub names: GlobSet,
    /// The bounds of these tensors.
    pub bounds: Bounds,
    /// They are not compared, and may be on one side only.
    pub ignore: bool,
    /// The sides on which they may be missing.
    pub allow_missing: Vec<Side>,
    /// At least one tensor of these names has to be compared.
    pub required: bool,
}

/// A rules file that cannot be read, with the place from 1.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("line {line}, column {column}: {message}")]
pub struct RulesError {
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
    /// Its cause.
    pub message: String,
}

impl RulesError {
    pub(super) fn at(text: &str, place: Option<Range<usize>>, message: impl Into<String>) -> Self {
        let start = place.map_or(0, |place| place.start).min(text.len());
        let before = text.get(..start).unwrap_or_default();
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        Self { line: line_of(text, start), column, message: message.into() }
    }
}

/// The number of the line with a byte, from 1.
pub(super) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1
}

/// The rules of a file, in TOML.
#[derive(Debug, Default)]
pub struct Rules {
    /// The rules about tensors.
    pub rules: Vec<Rule>,
    /// Key paths of state that are ignored.
    pub ignored_state: StateGlobs,
}

impl FromStr for Rules {
    type Err = RulesError;

    /// Reads the text of a rules file.
    fn from_str(text: &str) -> Result<Self, RulesError> {
        rules_file::parse(text)
    }
}

impl Policy {
    /// The first rule for a name, with its number from 0.
    #[must_use]
    pub fn rule(&self, name: &Name) -> Option<(usize, &Rule)> {
        self.rules.iter().enumerate().find(|(_, rule)| rule.names.is_match(name.as_str()))
    }

    /// The bounds of the tensor of this name.
    #[must_use]
    pub fn bounds(&self, name: &Name) -> Bounds {
        match self.rule(name) {
            Some((_, rule)) => self.bounds.over(&rule.bounds),
            None => self.bounds.clone(),
        }
    }

    /// Takes the names out of a pairing that take no part, or may be missing on the other side.
    #[must_use]
    pub fn excuse(&self, pairing: &mut Pairing) -> Excused {
        let mut excused = Excused::default();
        let ignores = |name: &Name| self.rule(name).is_some_and(|(_, rule)| rule.ignore);
        let ignored = pairing.pairs.extract_if(.., |pair| ignores(&pair.name));
        excused.ignored.extend(ignored.map(|pair| pair.name));
        for [side, other] in [[Side::A, Side::B], [Side::B, Side::A]] {
            let names = &mut pairing.only_in[side];
            excused.ignored.extend(names.extract_if(.., |name| ignores(name)));
            let may_miss = |name: &mut Name| {
                self.rule(name).is_some_and(|(_, rule)| rule.allow_missing.contains(&other))
            };
            excused.only_in[side].extend(names.extract_if(.., may_miss));
        }
        excused
    }

    /// The rules that decide about no name; a required one has to decide about one that is compared.
    #[must_use]
    pub fn unused<'a>(
        &self,
        compared: impl Iterator<Item = &'a Name>,
        excused: &Excused,
    ) -> Vec<UnusedRule> {
        let number = |name: &Name| self.rule(name).map(|(number, _)| number);
        let compared: BTreeSet<usize> = compared.filter_map(number).collect();
        let others = excused.only_in.iter().flatten().chain(&excused.ignored);
        let others: BTreeSet<usize> = others.filter_map(number).collect();
        let is_unused = |(number, rule): &(usize, &Rule)| {
            !compared.contains(number) && (rule.required || !others.contains(number))
        };
        let unused = self.rules.iter().enumerate().filter(is_unused);
        unused
            .map(|(_, rule)| UnusedRule {
                line: rule.line,
                globs: rule.globs.clone(),
                required: rule.required,
            })
            .collect()
    }
}

/// The names that rules keep from being a difference.
#[derive(Debug, Default)]
pub struct Excused {
    /// Those that take no part.
    pub ignored: Vec<Name>,
    /// Those that may be on one side only, for each side.
    pub only_in: [Vec<Name>; 2],
}

/// A rule that decides about no tensor.
#[derive(Debug)]
pub struct UnusedRule {
    /// The line of the file on which it begins.
    pub line: usize,
    /// The names, as they are written.
    pub globs: Vec<String>,
    /// Some tensor has to be compared by it.
    pub required: bool,
}
