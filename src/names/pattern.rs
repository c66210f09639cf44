//! Suffix patterns over dotted names: whole components, never substrings.
//!
//! `{a,b}` in a pattern stands for two patterns. A component `#` is a number, `weight#` is `weight`
//! with a number behind it, `*` is any one component. The numbers are `$1`, `$2`, ... of a replacement.

use std::collections::HashMap;

/// A table of values found by the longest pattern that matches the end of a name.
#[derive(Debug)]
pub struct SuffixTable<T> {
    /// By the last two components, digits at their ends taken off; one that may be anything is `*`.
    by_end: HashMap<String, HashMap<String, Vec<PatternRow<T>>>>,
}

#[derive(Debug)]
struct PatternRow<T> {
    components: Vec<Component>,
    value: T,
}

#[derive(Debug, PartialEq, Eq)]
enum Component {
    Literal(String),
    Numbered(String),
    Any,
}

/// A pattern found at the end of a name.
#[derive(Debug)]
pub struct Match<'n, 't, T> {
    /// The text before the pattern, its last dot included.
    pub prefix: &'n str,
    /// The numbers that the pattern captured.
    pub numbers: Vec<&'n str>,
    /// The value in the table.
    pub value: &'t T,
}

/// Stands for a component that may be anything, or for none.
const ANY: &str = "*";

impl<T: Clone> SuffixTable<T> {
    /// A table of `(pattern, value)` rows. Among patterns of equal length the first one wins.
    pub fn new<'p>(rows: impl IntoIterator<Item = (&'p str, T)>) -> Self {
        let mut table = Self { by_end: HashMap::new() };
        for (pattern, value) in rows {
            for pattern in expand_braces(pattern) {
                table.insert(&pattern, value.clone());
            }
        }
        table
    }

    /// Adds one pattern without braces.
    pub fn insert(&mut self, pattern: &str, value: T) {
        let components: Vec<Component> = pattern.split('.').map(Component::parse).collect();
        let mut from_end = components.iter().rev().map(|component| match component {
            Component::Literal(text) | Component::Numbered(text) => strip_digits(text).0,
            Component::Any => ANY,
        });
        let mut next = || from_end.next().unwrap_or(ANY).to_owned();
        let (last, second) = (next(), next());
        let rows = self.by_end.entry(last).or_default().entry(second).or_default();
        let place = rows.partition_point(|row| row.components.len() >= components.len());
        rows.insert(place, PatternRow { components, value });
    }

    /// The longest pattern that the end of `name` matches.
    #[must_use]
    pub fn find<'n>(&self, name: &'n str) -> Option<Match<'n, '_, T>> {
        let mut from_end = name.rsplit('.').map(|component| strip_digits(component).0);
        let (last, second) = (from_end.next().unwrap_or(ANY), from_end.next().unwrap_or(ANY));
        let ends = [last, ANY].into_iter().filter_map(|last| self.by_end.get(last));
        let rows = ends.flat_map(|end| [second, ANY].into_iter().filter_map(|key| end.get(key)));
        let rows = rows.flatten();
        let mut best: Option<(usize, Match<'n, '_, T>)> = None;
        for row in rows {
            let length = row.components.len();
            if best.as_ref().is_some_and(|(longest, _)| *longest >= length) {
                continue;
            }
            if let Some((prefix, numbers)) = match_end(&row.components, name) {
                best = Some((length, Match { prefix, numbers, value: &row.value }));
            }
        }
        best.map(|(_, found)| found)
    }
}

impl Component {
    fn parse(text: &str) -> Self {
        match text {
            "*" => Self::Any,
            _ => match text.strip_suffix('#') {
                Some(stem) => Self::Numbered(stem.to_owned()),
                None => Self::Literal(text.to_owned()),
            },
        }
    }
}

/// Matches components from the last to the first.
fn match_end<'n>(components: &[Component], name: &'n str) -> Option<(&'n str, Vec<&'n str>)> {
    let mut numbers = Vec::new();
    let mut rest = Some(name);
    for component in components.iter().rev() {
        let (before, text) = match rest?.rsplit_once('.') {
            Some((before, text)) => (Some(before), text),
            None => (None, rest?),
        };
        match component {
            Component::Any => {}
            Component::Literal(literal) => {
                if literal != text {
                    return None;
                }
            }
            Component::Numbered(stem) => {
                let (found, digits) = strip_digits(text);
                if found != stem || digits.is_empty() {
                    return None;
                }
                numbers.push(digits);
            }
        }
        rest = before;
    }
    numbers.reverse();
    let prefix = rest.map_or(0, |before| before.len() + 1);
    Some((&name[..prefix], numbers))
}

/// A component without the digits at its end, and those digits.
fn strip_digits(component: &str) -> (&str, &str) {
    component.split_at(component.trim_end_matches(|c: char| c.is_ascii_digit()).len())
}

/// All the patterns that a pattern with `{a,b}` groups stands for, the first group varying slowest.
#[must_use]
pub fn expand_braces(pattern: &str) -> Vec<String> {
    let group = pattern.split_once('{').and_then(|(before, rest)| {
        let (choices, after) = rest.split_once('}')?;
        Some((before, choices, after))
    });
    let Some((before, choices, after)) = group else {
        return vec![pattern.to_owned()];
    };
    let tails = expand_braces(after);
    choices
        .split(',')
        .flat_map(|choice| tails.iter().map(move |tail| format!("{before}{choice}{tail}")))
        .collect()
}

/// A replacement with its `$1`, `$2`, ... filled in.
#[must_use]
pub fn fill(replacement: &str, numbers: &[&str]) -> String {
    let mut filled = replacement.to_owned();
    for (index, number) in numbers.iter().enumerate() {
        filled = filled.replace(&format!("${}", index + 1), number);
    }
    filled
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_suffix_wins_whatever_the_order() {
        let table = SuffixTable::new([
            ("weight", 1),
            ("norm.weight", 2),
            ("mixer.norm.weight", 3),
            ("norm.*", 4),
        ]);
        let value = |name| table.find(name).map(|found| *found.value);
        assert_eq!(value("decoder.layers.0.mixer.norm.weight"), Some(3));
        assert_eq!(value("decoder.layers.0.norm.weight"), Some(2));
        assert_eq!(value("decoder.layers.0.xnorm.weight"), Some(1));
        assert_eq!(value("norm.bias"), Some(4));
        assert_eq!(value("bias"), None);
    }

    #[test]
    fn numbers_are_captured_in_order() {
        let table = SuffixTable::new([("local_experts.#.weight#", "x$1.y$2")]);
        let found = table.find("a.local_experts.12.weight7").unwrap();
        assert_eq!((found.prefix, fill(found.value, &found.numbers)), ("a.", "x12.y7".to_owned()));
        assert!(table.find("a.local_experts.12.weight").is_none());
    }

    #[test]
    fn braces_expand_in_order() {
        assert_eq!(expand_braces("a{1,2}.{w,b}"), ["a1.w", "a1.b", "a2.w", "a2.b"]);
    }
}
