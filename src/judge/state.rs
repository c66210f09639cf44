//! Differences of the state of two runs -> those that count, and those that a profile or a rule ignores.

use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::compare::{Outcome, TensorComparison};
use crate::state::{Difference, DifferenceKind, IgnoredRow, Profile, TensorPair, When};

/// What of the state of a run may differ.
#[derive(Debug, Clone, Default)]
pub struct StatePolicy {
    /// The profile, with its table.
    pub profile: Profile,
    /// Key paths that are ignored besides.
    pub ignore: StateGlobs,
}

/// Globs over key paths of state.
#[derive(Debug, Clone, Default)]
pub struct StateGlobs {
    texts: Vec<String>,
    globs: Option<GlobSet>,
}

impl StateGlobs {
    /// Compiles them.
    ///
    /// # Errors
    /// One of them is no glob.
    pub fn new(texts: Vec<String>) -> Result<Self, globset::Error> {
        let mut globs = GlobSetBuilder::new();
        for text in &texts {
            globs.add(Glob::new(text)?);
        }
        let globs = Some(globs.build()?).filter(|_| !texts.is_empty());
        Ok(Self { texts, globs })
    }

    /// The globs as they are written.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    fn first(&self, path: &str) -> Option<usize> {
        self.globs.as_ref()?.matches(path).into_iter().min()
    }
}

/// The judgement on the state of two runs.
#[derive(Debug, Default)]
pub struct StateJudgement {
    /// Number of key paths that were looked at.
    pub compared: usize,
    /// The differences that count, in order of their key paths.
    pub differences: Vec<Difference>,
    /// Those that do not.
    pub ignored: Vec<Ignored>,
    /// Key paths of tensors that could not be read, with the cause.
    pub unread: Vec<(String, String)>,
    /// Globs of the rules under which nothing differs.
    pub idle: Vec<String>,
}

/// A difference that does not count.
#[derive(Debug)]
pub struct Ignored {
    /// The difference.
    pub difference: Difference,
    /// Why it does not count: the reason in the profile's table, or the glob of a rule.
    pub why: String,
}

impl StatePolicy {
    /// Judges what was found; `tensors` are the pairs in it with what the comparison of their elements says.
    #[must_use]
    pub fn judge(
        &self,
        compared: usize,
        mut differences: Vec<Difference>,
        tensors: &[(TensorPair, TensorComparison)],
    ) -> StateJudgement {
        let mut judgement = StateJudgement { compared, ..StateJudgement::default() };
        for (pair, comparison) in tensors {
            match difference(pair, comparison) {
                Ok(difference) => differences.extend(difference),
                Err(cause) => judgement.unread.push((pair.path.clone(), cause)),
            }
        }
        differences.sort();
        let rows = Rows::of(self.profile.ignored());
        let mut used = vec![false; self.ignore.texts.len()];
        for difference in differences {
            let by_rule = self.ignore.first(&difference.path);
            if let Some(used) = by_rule.and_then(|at| used.get_mut(at)) {
                *used = true;
            }
            let why = match by_rule {
                Some(at) => self.ignore.texts.get(at).map(|glob| format!("rule {glob}")),
                None => rows.row(&difference).map(|row| row.reason.to_owned()),
            };
            match why {
                Some(why) => judgement.ignored.push(Ignored { difference, why }),
                None => judgement.differences.push(difference),
            }
        }
        let idle = self.ignore.texts.iter().zip(used).filter(|(_, is_used)| !is_used);
        judgement.idle = idle.map(|(glob, _)| glob.clone()).collect();
        judgement
    }
}

/// The difference between two tensors; an error where one cannot be read.
fn difference(
    pair: &TensorPair,
    comparison: &TensorComparison,
) -> Result<Option<Difference>, String> {
    let text = |side: usize| {
        let tensor = &pair.sides[side];
        Some(format!("tensor {:?} {}", tensor.shape(), tensor.dtype()))
    };
    let of = |values, kind| Difference {
        path: pair.path.clone(),
        place: pair.place.clone(),
        values,
        kind,
    };
    match &comparison.outcome {
        Outcome::Unreadable(error) => Err(error.message.clone()),
        Outcome::ShapeDiffers => Ok(Some(of([text(0), text(1)], DifferenceKind::Value))),
        Outcome::Compared(stats) if stats.is_identical() => Ok(None),
        Outcome::Compared(stats) => {
            let example = comparison.example.as_ref();
            let values = match example {
                Some(example) => example
                    .values
                    .clone()
                    .map(|value| Some(format!("{value} at {:?}", example.index))),
                None => [text(0), text(1)],
            };
            let kind = DifferenceKind::Elements { differing: stats.differing(), of: stats.count() };
            Ok(Some(of(values, kind)))
        }
    }
}

/// The table of a profile, ready to be looked up.
struct Rows {
    globs: GlobSet,
    rows: Vec<&'static IgnoredRow>,
}

impl Rows {
    fn of(table: &'static [IgnoredRow]) -> Self {
        let mut globs = GlobSetBuilder::new();
        let mut rows = Vec::new();
        for row in table {
            for glob in row.keys.iter().filter_map(|key| Glob::new(key).ok()) {
                globs.add(glob);
                rows.push(row);
            }
        }
        Self { globs: globs.build().unwrap_or_default(), rows }
    }

    fn row(&self, difference: &Difference) -> Option<&'static IgnoredRow> {
        let matches = self.globs.matches(&difference.path);
        let mut rows = matches.into_iter().filter_map(|at| self.rows.get(at).copied());
        rows.find(|row| row.when == When::Always || difference.kind == DifferenceKind::PartsDiffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_every_table_can_be_looked_up() {
        for profile in Profile::ALL {
            let keys: usize = profile.ignored().iter().map(|row| row.keys.len()).sum();
            let rows = Rows::of(profile.ignored());
            assert_eq!((rows.rows.len(), rows.globs.len()), (keys, keys), "{}", profile.name());
        }
    }
}
