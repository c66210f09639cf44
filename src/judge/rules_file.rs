//! Rules in TOML.
//!
//! ```toml
//! [[rule]]
//! match = ["decoder.layers.*.mlp.*"]    # globs over canonical names
//! rtol = 1e-3
//! max = { rel_l2 = 1e-4 }
//!
//! [state]
//! ignore = ["args.tensorboard_dir"]      # globs over key paths
//! ```

use std::collections::BTreeMap;

use globset::{Glob, GlobSetBuilder};
use serde::Deserialize;
use toml::Spanned;

use crate::base::side::Side;

use super::bounds::{Bounds, MetricBound, magnitude};
use super::policy::{Rule, Rules, RulesError, line_of};
use super::state::StateGlobs;

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rule: Vec<Spanned<Table>>,
    #[serde(default)]
    state: State,
}

/// `[state]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct State {
    ignore: Option<Spanned<OneOrMore>>,
}

/// One `[[rule]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Table {
    #[serde(rename = "match")]
    globs: Spanned<OneOrMore>,
    tolerance: Option<Tolerance>,
    rtol: Option<Spanned<f64>>,
    atol: Option<Spanned<f64>>,
    #[serde(default)]
    max: BTreeMap<Spanned<String>, Spanned<f64>>,
    allow_cast: Option<bool>,
    equal_nan: Option<bool>,
    #[serde(default)]
    ignore: bool,
    allow_missing: Option<Missing>,
    #[serde(default)]
    required: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl OneOrMore {
    fn into_list(self) -> Vec<String> {
        match self {
            Self::One(glob) => vec![glob],
            Self::More(globs) => globs,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Tolerance {
    Torch,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Missing {
    A,
    B,
    Both,
}

/// Reads the rules of a file.
///
/// # Errors
/// The first place that is no such file, or a value that is none.
pub(super) fn parse(text: &str) -> Result<Rules, RulesError> {
    let file: File = toml::from_str(text)
        .map_err(|error| RulesError::at(text, error.span(), error.message()))?;
    let ignored_state = match file.state.ignore {
        None => StateGlobs::default(),
        Some(globs) => {
            let place = globs.span();
            StateGlobs::new(globs.into_inner().into_list())
                .map_err(|error| RulesError::at(text, Some(place), error.to_string()))?
        }
    };
    let rules = file.rule.into_iter().map(|table| rule(text, table));
    Ok(Rules { rules: rules.collect::<Result<_, _>>()?, ignored_state })
}

fn rule(text: &str, table: Spanned<Table>) -> Result<Rule, RulesError> {
    let line = line_of(text, table.span().start);
    let table = table.into_inner();
    let globs_place = table.globs.span();
    let globs = table.globs.into_inner().into_list();
    if globs.is_empty() {
        return Err(RulesError::at(text, Some(globs_place), "no name to match"));
    }
    let mut names = GlobSetBuilder::new();
    for glob in &globs {
        let bad = |error: globset::Error| {
            RulesError::at(text, Some(globs_place.clone()), error.to_string())
        };
        names.add(Glob::new(glob).map_err(bad)?);
    }
    let bad =
        |error: globset::Error| RulesError::at(text, Some(globs_place.clone()), error.to_string());
    let checked = |value: Option<Spanned<f64>>| match value {
        Some(value) => {
            let place = value.span();
            let bad = |message| RulesError::at(text, Some(place), message);
            magnitude(value.into_inner()).map(Some).map_err(bad)
        }
        None => Ok(None),
    };
    let max = table.max.into_iter().map(|(name, max)| {
        let place = name.span();
        let bad = |message| RulesError::at(text, Some(place), message);
        MetricBound::new(name.get_ref(), max.into_inner()).map_err(bad)
    });
    Ok(Rule {
        line,
        names: names.build().map_err(bad)?,
        globs,
        bounds: Bounds {
            rtol: checked(table.rtol)?,
            atol: checked(table.atol)?,
            torch: table.tolerance.map(|Tolerance::Torch| true),
            max: max.collect::<Result<_, _>>()?,
            allow_cast: table.allow_cast,
            equal_nan: table.equal_nan,
        },
        ignore: table.ignore,
        allow_missing: match table.allow_missing {
            None => Vec::new(),
            Some(Missing::A) => vec![Side::A],
            Some(Missing::B) => vec![Side::B],
            Some(Missing::Both) => Side::BOTH.to_vec(),
        },
        required: table.required,
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_rule_has_bounds_and_exceptions() {
        let text = "# two\n\n[[rule]]\nmatch = 'a.*'\nrtol = 1e-3\nmax = { rel_l2 = 0.5, differing = 3 }\n\
                    [[rule]]\nmatch = ['b', 'c.*']\ntolerance = 'torch'\nallow-missing = 'both'\nrequired = true\n";
        let rules = parse(text).unwrap().rules;
        assert_eq!(rules.iter().map(|rule| rule.line).collect::<Vec<_>>(), [3, 7]);
        let [first, second] = &rules[..] else { unreachable!() };
        assert!(first.names.is_match("a.b.c") && !first.names.is_match("b"));
        let max = ["differing=3", "rel_l2=0.5"].map(|bound| bound.parse().unwrap());
        let bounds = Bounds { rtol: Some(1e-3), max: max.to_vec(), ..Bounds::default() };
        assert_eq!((&first.bounds, first.required), (&bounds, false));
        assert_eq!(second.bounds, Bounds { torch: Some(true), ..Bounds::default() });
        assert_eq!((&second.allow_missing[..], second.required), (&Side::BOTH[..], true));
    }

    #[test]
    fn errors_name_line_and_column() {
        for (text, line, column, message) in [
            ("[[rule]]\nmatch = 'a'\nrtoll = 1\n", 3, 1, "unknown field `rtoll`"),
            ("[[rule]]\nmatch = 'a'\n  rtol = -1\n", 3, 10, "-1 is no bound"),
            ("[[rule]]\nmatch = 'a'\nmax = { cos = 1 }\n", 3, 9, "no bound for cos"),
            ("[[rule]]\nmatch = 'a'\natol = nan\n", 3, 8, "NaN is no bound"),
            ("\n[[rule]]\nmatch = ['[']\n", 3, 9, "error parsing glob"),
            ("[[rule]]\nmatch = []\n", 2, 9, "no name to match"),
            ("[[rule]]\nrtol = 1\n", 1, 1, "missing field `match`"),
            ("[[rule]]\nmatch = 'a'\nallow-missing = 'c'\n", 3, 17, "unknown variant `c`"),
            ("rule = 3\n", 1, 8, "invalid type"),
            ("x = [\n", 1, 6, "unclosed array"),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!((error.line, error.column), (line, column), "{text:?}: {error}");
            assert!(error.message.contains(message), "{error}");
        }
    }
}
