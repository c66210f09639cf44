//! The tensors of a page by column: a tenth of the bytes that a list of objects takes.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::names::Name;
use crate::names::forward::Position;
use crate::names::place::Place;
use crate::report::document::{Broken, Cast, Document, Replica, Tensor, Unread, Weak, Worst};
use crate::report::units;

/// Digits of a distance behind the first one, as `decimal` formats it.
const DIGITS: i32 = 3;

/// Every name of both sides in the order of the forward pass; entry `i` of each column belongs to name `i`.
#[derive(Serialize)]
pub(super) struct Columns<'a> {
    count: usize,
    name: Names<'a>,
    verdict: Words,
    passes: Vec<u8>,
    section: Words,
    dtype: [Words; 2],
    shape: [Words; 2],
    numel: Vec<Option<u64>>,
    place: Places,
    /// Distances, to a few digits.
    distances: BTreeMap<&'static str, Rounded>,
    /// Counts, exact.
    counts: BTreeMap<&'static str, Vec<Option<u64>>>,
    worst: Worsts<'a>,
    /// What only few of them have.
    more: BTreeMap<usize, More<'a>>,
    /// Elements of all tensors by the power of two below their difference.
    powers: BTreeMap<i32, u64>,
}

/// Texts, each by the number of UTF-16 units that it begins with as the one before, and the rest.
#[derive(Serialize, Default)]
struct Names<'a> {
    shared: Vec<usize>,
    rest: Vec<&'a str>,
}

/// Texts of which many are the same, each by its place among the different ones.
#[derive(Serialize, Default)]
struct Words {
    words: Vec<String>,
    of: Vec<usize>,
    #[serde(skip)]
    seen: HashMap<String, usize>,
}

/// The places that the names say.
#[derive(Serialize, Default)]
struct Places {
    state: Words,
    list: Words,
    layer: Vec<Option<u64>>,
    module: Words,
    expert: Vec<Option<u64>>,
    parameter: Words,
}

/// Numbers as an integer of some digits times a power of ten.
#[derive(Serialize, Default)]
struct Rounded {
    digits: Vec<Option<i64>>,
    exponent: Vec<i32>,
}

/// The elements that show the differences.
#[derive(Serialize, Default)]
struct Worsts<'a> {
    index: Vec<Option<&'a [u64]>>,
    a: Vec<Option<&'a str>>,
    b: Vec<Option<&'a str>>,
}

/// What there is to say about few tensors.
#[derive(Serialize)]
struct More<'a> {
    rule: Option<usize>,
    broken: &'a [Broken],
    beyond_tolerance: Option<u64>,
    weak_tolerance: Option<&'a Weak>,
    cast: Option<&'a Cast>,
    replicas: &'a [Replica],
    vocabulary_rows_left_out: [u64; 2],
    tied_side: Option<&'a str>,
    error: Option<&'a Unread>,
}

/// A row of the table.
enum Row<'a> {
    /// A tensor of both sides.
    Pair(&'a Tensor),
    /// A name without a partner, or one that was not compared.
    Alone { name: &'a str, verdict: &'static str, passes: bool },
}

/// A distance by its name.
type Distance = (&'static str, fn(&Tensor) -> Option<f64>);

const DISTANCES: [Distance; 7] = [
    ("rel_l2", |tensor| tensor.metrics.rel_l2),
    ("one_minus_cos", |tensor| tensor.metrics.one_minus_cos),
    ("l2", |tensor| tensor.metrics.l2),
    ("max_abs", |tensor| tensor.metrics.max_abs),
    ("max_ulp", |tensor| tensor.metrics.max_ulp.map(|ulp| ulp as f64)),
    ("norm_a", |tensor| tensor.metrics.norm_a),
    ("norm_b", |tensor| tensor.metrics.norm_b),
];

/// A count by its name.
type Count = (&'static str, fn(&Tensor) -> Option<u64>);

const COUNTS: [Count; 5] = [
    ("differing", |tensor| tensor.metrics.differing),
    ("nan_a", |tensor| tensor.metrics.nan_a),
    ("nan_b", |tensor| tensor.metrics.nan_b),
    ("inf_a", |tensor| tensor.metrics.inf_a),
    ("inf_b", |tensor| tensor.metrics.inf_b),
];

impl<'a> Columns<'a> {
    pub(super) fn of(document: &'a Document) -> Self {
        let rows = rows(document);
        let pairs: Vec<Option<&Tensor>> = rows.iter().map(Row::pair).collect();
        let text = |text: fn(&Tensor) -> String| {
            Words::of(pairs.iter().map(|pair| pair.map(text).unwrap_or_default()))
        };
        Self {
            count: rows.len(),
            name: Names::of(rows.iter().map(Row::name)),
            verdict: Words::of(rows.iter().map(Row::verdict)),
            passes: rows.iter().map(|row| u8::from(row.passes())).collect(),
            section: text(|tensor| tensor.section.to_string()),
            dtype: [
                text(|tensor| tensor.dtype.a.to_string()),
                text(|tensor| tensor.dtype.b.to_string()),
            ],
            shape: [
                text(|tensor| units::shape(&tensor.shape.a)),
                text(|tensor| units::shape(&tensor.shape.b)),
            ],
            numel: pairs.iter().map(|pair| Some((*pair)?.numel.a)).collect(),
            place: Places::of(rows.iter().map(Row::name)),
            distances: DISTANCES
                .iter()
                .map(|(name, value)| {
                    (*name, Rounded::of(pairs.iter().map(|pair| (*pair).and_then(value))))
                })
                .collect(),
            counts: COUNTS
                .iter()
                .map(|(name, value)| {
                    (*name, pairs.iter().map(|pair| (*pair).and_then(value)).collect())
                })
                .collect(),
            worst: Worsts::of(pairs.iter().map(|pair| (*pair)?.worst.as_ref())),
            more: pairs
                .iter()
                .enumerate()
                .filter_map(|(at, pair)| Some((at, More::of((*pair)?)?)))
                .collect(),
            powers: powers(pairs.iter().copied().flatten()),
        }
    }
}

/// All names of the document in the order of the forward pass.
fn rows<'a>(document: &'a Document) -> Vec<Row<'a>> {
    let mut rows: Vec<Row<'_>> = document.tensors.iter().flatten().map(Row::Pair).collect();
    let mut add = |names: &'a [String], verdict, passes| {
        rows.extend(names.iter().map(|name| Row::Alone { name, verdict, passes }));
    };
    if let Some(only_in) = &document.only_in {
        add(&only_in.a, "only in a", false);
        add(&only_in.b, "only in b", false);
    }
    if let Some(excused) = &document.excused {
        add(&excused.only_in.a, "only in a, allowed", true);
        add(&excused.only_in.b, "only in b, allowed", true);
        add(&excused.ignored, "ignored", true);
    }
    rows.sort_by_cached_key(|row| {
        let name = Name::new(row.name());
        (Position::of(&name), name)
    });
    rows
}

/// Adds up the histograms of all tensors.
fn powers<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> BTreeMap<i32, u64> {
    let mut powers = BTreeMap::new();
    for (power, count) in tensors.filter_map(|tensor| tensor.metrics.histogram.as_ref()).flatten() {
        let sum: &mut u64 = powers.entry(*power).or_default();
        *sum = sum.saturating_add(*count);
    }
    powers
}

impl<'a> Row<'a> {
    fn name(&self) -> &'a str {
        match self {
            Self::Pair(tensor) => &tensor.name,
            Self::Alone { name, .. } => name,
        }
    }

    fn verdict(&self) -> String {
        match self {
            Self::Pair(tensor) => tensor.verdict.to_string(),
            Self::Alone { verdict, .. } => (*verdict).to_owned(),
        }
    }

    fn passes(&self) -> bool {
        match self {
            Self::Pair(tensor) => tensor.passes,
            Self::Alone { passes, .. } => *passes,
        }
    }

    fn pair(&self) -> Option<&'a Tensor> {
        match self {
            Self::Pair(tensor) => Some(tensor),
            Self::Alone { .. } => None,
        }
    }
}

impl<'a> Names<'a> {
    fn of(texts: impl Iterator<Item = &'a str>) -> Self {
        let mut names = Self::default();
        let mut before = "";
        for text in texts {
            let same = before.chars().zip(text.chars()).take_while(|(one, other)| one == other);
            let (mut bytes, mut units) = (0, 0);
            for (char, _) in same {
                bytes += char.len_utf8();
                units += char.len_utf16();
            }
            names.shared.push(units);
            names.rest.push(&text[bytes..]);
            before = text;
        }
        names
    }
}

impl Words {
    fn of(texts: impl Iterator<Item = String>) -> Self {
        let mut words = Self::default();
        texts.for_each(|text| words.add(&text));
        words
    }

    fn add(&mut self, text: &str) {
        let at = self.seen.get(text).copied().unwrap_or_else(|| {
            self.words.push(text.to_owned());
            self.seen.insert(text.to_owned(), self.words.len() - 1);
            self.words.len() - 1
        });
        self.of.push(at);
    }
}

impl Places {
    fn of<'n>(names: impl Iterator<Item = &'n str>) -> Self {
        let mut places = Self::default();
        for name in names {
            let position = Position::of(&Name::new(name));
            let Place { expert, parameter, .. } = Place::of(name);
            places.state.add(position.state.as_str());
            places.list.add(position.list.as_str());
            places.layer.push(position.layer);
            places.module.add(position.module.as_str());
            places.expert.push(expert);
            places.parameter.add(parameter);
        }
        places
    }
}

impl Rounded {
    fn of(values: impl Iterator<Item = Option<f64>>) -> Self {
        let mut rounded = Self::default();
        for value in values {
            let parts = value.and_then(decimal);
            rounded.digits.push(parts.map(|(digits, _)| digits));
            rounded.exponent.push(parts.map_or(0, |(_, exponent)| exponent));
        }
        rounded
    }
}

/// The integer and the power of ten that are a number to some digits.
fn decimal(value: f64) -> Option<(i64, i32)> {
    let text = format!("{value:.3e}");
    let (digits, exponent) = text.split_once('e')?;
    let exponent: i32 = exponent.parse().ok()?;
    Some((digits.replace('.', "").parse().ok()?, exponent - DIGITS))
}

impl<'a> Worsts<'a> {
    fn of(elements: impl Iterator<Item = Option<&'a Worst>>) -> Self {
        let mut worst = Self::default();
        for element in elements {
            worst.index.push(element.map(|element| element.index.as_slice()));
            worst.a.push(element.map(|element| element.a.as_str()));
            worst.b.push(element.map(|element| element.b.as_str()));
        }
        worst
    }
}

impl<'a> More<'a> {
    /// Nothing where there is nothing to say.
    fn of(tensor: &'a Tensor) -> Option<Self> {
        let left_out = &tensor.vocabulary_rows_left_out;
        let more = Self {
            rule: tensor.rule,
            broken: &tensor.broken,
            beyond_tolerance: tensor.beyond_tolerance,
            weak_tolerance: tensor.weak_tolerance.as_ref(),
            cast: tensor.cast.as_ref(),
            replicas: &tensor.replicas,
            vocabulary_rows_left_out: [left_out.a, left_out.b],
            tied_side: tensor.tied_side.as_deref(),
            error: tensor.error.as_ref(),
        };
        let says_something = more.rule.is_some()
            || !more.broken.is_empty()
            || more.beyond_tolerance.is_some()
            || more.weak_tolerance.is_some()
            || more.cast.is_some()
            || !more.replicas.is_empty()
            || more.vocabulary_rows_left_out != [0; 2]
            || more.tied_side.is_some()
            || more.error.is_some();
        says_something.then_some(more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_first_digits() {
        assert_eq!(decimal(0.000_123_456), Some((1235, -7)));
        assert_eq!(decimal(0.0), Some((0, -3)));
        assert_eq!(decimal(-9.9999), Some((-1000, -2)));
        assert_eq!(decimal(f64::INFINITY), None);
        assert_eq!(decimal(5e-324), Some((4941, -327)));
    }

    #[test]
    fn names_share_what_they_begin_with() {
        let names = Names::of(["a.\u{1f600}1", "a.\u{1f600}2", "a.\u{1f601}", ""].into_iter());
        assert_eq!(names.shared, [0, 4, 2, 0]);
        assert_eq!(names.rest, ["a.\u{1f600}1", "2", "\u{1f601}", ""]);
    }

    #[test]
    fn equal_words_are_there_once() {
        let words = Words::of(["x", "y", "x"].into_iter().map(str::to_owned));
        assert_eq!((words.words, words.of), (vec!["x".to_owned(), "y".to_owned()], vec![0, 1, 0]));
    }
}
