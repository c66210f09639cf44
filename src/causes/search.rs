//! The search for the cause of each pair that differs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rayon::prelude::*;

use crate::base::dtype::{Dtype, DtypeKind};
use crate::base::side::Side;
use crate::compare::{
    Answer, ENOUGH_VALUES, Outcome, Places, Question, ReadError, TensorFingerprints, fingerprints,
    matrix, relate,
};
use crate::kernel::{Relation, Stats, is_narrower};
use crate::names::place::Place;

use super::Compared;
use super::extents::{self, Axis};
use super::moved;
use super::orders::{self, Order, Permutation, Subject};
use super::role::{Role, second_linear};

/// Why one tensor differs.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TensorCause {
    /// That of a is that of b at another place.
    Moved(usize),
    /// The rows have another order, or the columns.
    Order(Order, Direction),
    /// Rows and columns change places.
    Transposed,
    /// This side is all zeros.
    Zero(Side),
    /// This side is the other one, rounded.
    Rounded(Side, Dtype),
    /// a is b and this number.
    Plus(f64),
    /// a is b times this number.
    Times(f64),
    /// This side is infinite where the other one is beyond the range of `float16`.
    Overflow(Side),
    /// This side has values that nobody wrote.
    Uninitialised(Side),
    /// Only these rows or columns differ.
    Extent(String),
}

/// Rows or columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Rows,
    Columns,
}

/// The findings of a search.
#[derive(Default)]
pub(super) struct Found {
    /// The cause of each pair that has one.
    pub causes: BTreeMap<usize, TensorCause>,
    /// Pairs that are too large for it.
    pub skipped: Vec<usize>,
    /// Pairs with a file that could not be read.
    pub errors: Vec<(usize, ReadError)>,
}

/// Bytes of fingerprints at a time.
const BUDGET: u64 = 64 << 20;

/// Pairs that are held against relations at a time.
const AT_A_TIME: usize = 64;

/// The relative difference that sums of the same squares may have, taken in another order.
const SAME_NORM: f64 = 1e-12;

/// Fewer elements have the same values or the same ratio by chance.
const LEAST: u64 = 16;

/// A pair, and the sides of which fingerprints are wanted.
type Wanted = (usize, [bool; 2]);

/// A tensor as a whole.
struct Whole {
    fingerprint: u128,
    /// It is no other one by chance.
    has_many_values: bool,
}

/// What fingerprints tell of a pair.
struct Fingerprinted {
    /// Both sides as a whole.
    whole: [Option<Whole>; 2],
    cause: Option<TensorCause>,
}

pub(super) fn search(compared: Compared<'_>, places: &[usize]) -> Found {
    let search = Search::new(compared, places);
    let mut found = Found::default();
    for place in search.places.iter().copied() {
        if let Some(side) = search.zero_side(place) {
            found.causes.insert(place, TensorCause::Zero(side));
        }
    }
    search.by_fingerprints(&mut found);
    let left = |place: &usize, found: &Found| {
        !found.causes.contains_key(place) && !found.errors.iter().any(|(at, _)| at == place)
    };
    let unexplained: Vec<usize> =
        search.places.iter().copied().filter(|place| left(place, &found)).collect();
    let mut uncertain = Vec::new();
    for some in unexplained.chunks(AT_A_TIME) {
        let related: Vec<_> =
            some.par_iter().map(|place| (*place, search.by_relations(*place))).collect();
        for (place, cause) in related {
            match cause {
                Ok(Some((cause, true))) => drop(found.causes.insert(place, cause)),
                Ok(Some((cause, false))) => uncertain.push((place, cause)),
                Ok(None) => {}
                Err(error) => found.errors.push((place, error)),
            }
        }
    }
    // What happened to other tensors happened to one with few different values too, if it explains all of them.
    uncertain.retain(|(_, cause)| found.causes.values().any(|certain| certain == cause));
    found.causes.extend(uncertain);
    found.errors.sort_by_key(|(place, _)| *place);
    found
}

struct Search<'a> {
    compared: Compared<'a>,
    /// The pairs that differ and may have a cause.
    places: Vec<usize>,
    /// All pairs by name.
    by_name: HashMap<&'a str, usize>,
    /// The norms of each side among the pairs that differ, in order.
    norms: [Vec<f64>; 2],
}

impl<'a> Search<'a> {
    fn new(compared: Compared<'a>, places: &[usize]) -> Self {
        let names = compared.pairs.iter().map(|pair| pair.name.as_str());
        let mut search = Self {
            compared,
            places: Vec::new(),
            by_name: names.zip(0..).collect(),
            norms: [Vec::new(), Vec::new()],
        };
        let is_real = |place: &usize| {
            let pair = &compared.pairs[*place];
            let is_read = !matches!(compared.tensors[*place].outcome, Outcome::Unreadable(_));
            let is_real = pair.dtypes().iter().all(|dtype| dtype.kind() == DtypeKind::Float);
            is_read && is_real && pair.sides.iter().all(|side| side.numel() > 0)
        };
        search.places = places.iter().copied().filter(is_real).collect();
        for side in Side::BOTH {
            let norms = search.places.iter().filter_map(|place| search.norm(*place, side));
            let mut norms: Vec<f64> = norms.collect();
            norms.sort_by(f64::total_cmp);
            search.norms[side] = norms;
        }
        search
    }

    fn stats(&self, place: usize) -> Option<&'a Stats> {
        match &self.compared.tensors[place].outcome {
            Outcome::Compared(stats) => Some(stats),
            Outcome::ShapeDiffers | Outcome::Unreadable(_) => None,
        }
    }

    fn norm(&self, place: usize, side: Side) -> Option<f64> {
        let stats = self.stats(place)?;
        match side {
            Side::A => stats.norm_a(),
            Side::B => stats.norm_b(),
        }
    }

    /// The side that is all zeros, where the other one is not.
    fn zero_side(&self, place: usize) -> Option<Side> {
        let stats = self.stats(place).filter(|stats| stats.count() >= LEAST / 2)?;
        let norms = [stats.norm_a(), stats.norm_b()];
        let is_zero = |side: &Side| norms[*side] == Some(0.0) && stats.differing() > 0;
        Side::BOTH.into_iter().find(is_zero)
    }

    /// Returns whether this side of a pair may hold the values of some other side of a pair that differs, in whatever order.
    fn may_be_elsewhere(&self, place: usize, side: Side) -> bool {
        let pair = &self.compared.pairs[place];
        if pair.sides[side].numel() < LEAST {
            return false;
        }
        // Nothing was summed up of tensors whose shapes differ.
        if self.stats(place).is_none() {
            return true;
        }
        let other = if side == Side::A { Side::B } else { Side::A };
        self.norm(place, side).filter(|norm| *norm > 0.0).is_some_and(|norm| {
            let others = &self.norms[other];
            let first = others.partition_point(|other| *other < norm * (1.0 - SAME_NORM));
            others.get(first).is_some_and(|other| *other <= norm * (1.0 + SAME_NORM))
        })
    }

    /// Finds what was moved or has another order.
    fn by_fingerprints(&self, found: &mut Found) {
        let wanted = |place: &usize| -> Option<Wanted> {
            let sides = Side::BOTH.map(|side| self.may_be_elsewhere(*place, side));
            let is_open = !found.causes.contains_key(place) && sides.contains(&true);
            is_open.then_some((*place, sides))
        };
        let wanted: Vec<_> = self.places.iter().filter_map(wanted).collect();
        let rank = |place: usize| self.compared.pairs[place].sides[Side::B].shape().len();
        // The order of a bias is told by that of its weight.
        let (weights, biases): (Vec<_>, Vec<_>) =
            wanted.into_iter().partition(|(place, _)| rank(*place) > 1);
        let mut whole: [BTreeMap<usize, Whole>; 2] = Default::default();
        for tensors in [weights, biases] {
            let mut rest = &tensors[..];
            while !rest.is_empty() {
                let (wave, later) = self.wave(rest, found);
                rest = later;
                let of = |(place, sides): &Wanted| {
                    (*place, self.fingerprinted(*place, *sides, &found.causes))
                };
                let results: Vec<_> = wave.par_iter().with_max_len(1).map(of).collect();
                for (place, result) in results {
                    match result {
                        Ok(told) => {
                            found.causes.extend(told.cause.map(|cause| (place, cause)));
                            for (all, own) in whole.iter_mut().zip(told.whole) {
                                all.extend(own.map(|own| (place, own)));
                            }
                        }
                        Err(error) => found.errors.push((place, error)),
                    }
                }
            }
        }
        self.find_moved(&whole, found);
    }

    /// Finds tensors whose values are those of another one. One with few different values is no other one by chance only if
    /// other tensors of its layer, or of its expert, were moved just so.
    fn find_moved(&self, [of_a, of_b]: &[BTreeMap<usize, Whole>; 2], found: &mut Found) {
        let mut in_b: HashMap<u128, Vec<usize>> = HashMap::new();
        for (place, whole) in of_b {
            in_b.entry(whole.fingerprint).or_default().push(*place);
        }
        let name = |place: usize| self.compared.pairs[place].name.as_str();
        let mut steps = BTreeSet::new();
        let mut uncertain = Vec::new();
        for (&place, whole) in of_a {
            if found.causes.contains_key(&place) {
                continue;
            }
            match in_b.get(&whole.fingerprint).map(Vec::as_slice) {
                Some([other]) if *other != place && whole.has_many_values => {
                    found.causes.insert(place, TensorCause::Moved(*other));
                    steps.extend(moved::step(name(place), name(*other)));
                }
                Some(others) => uncertain.push((place, others)),
                None => {}
            }
        }
        for (place, others) in uncertain {
            let is_known = |other: &usize| {
                moved::step(name(place), name(*other)).is_some_and(|step| steps.contains(&step))
            };
            let known: Vec<usize> = others.iter().copied().filter(is_known).collect();
            if let [other] = known[..] {
                found.causes.insert(place, TensorCause::Moved(other));
            }
        }
    }

    /// As many pairs as there is memory for, and the rest. One that is too large alone is skipped.
    fn wave<'w>(&self, pairs: &'w [Wanted], found: &mut Found) -> (Vec<Wanted>, &'w [Wanted]) {
        let mut wave = Vec::new();
        let mut left = BUDGET;
        for (at, (place, sides)) in pairs.iter().enumerate() {
            let of_side = |side: Side| {
                let [rows, columns] = matrix(self.compared.pairs[*place].sides[side].shape());
                rows.saturating_add(columns).saturating_mul(8)
            };
            let bytes = Side::BOTH.into_iter().filter(|side| sides[*side]).map(of_side);
            let bytes = bytes.fold(0, u64::saturating_add);
            if bytes > BUDGET {
                found.skipped.push(*place);
            } else if bytes > left {
                return (wave, &pairs[at..]);
            } else {
                left -= bytes;
                wave.push((*place, *sides));
            }
        }
        (wave, &[])
    }

    fn fingerprinted(
        &self,
        place: usize,
        sides: [bool; 2],
        causes: &BTreeMap<usize, TensorCause>,
    ) -> Result<Fingerprinted, ReadError> {
        let pair = &self.compared.pairs[place];
        let of_side = |side: Side| {
            let take = || fingerprints(side, &pair.sides[side], self.compared.files[side]);
            sides[side].then(take).transpose()
        };
        let (a, b) = (of_side(Side::A)?, of_side(Side::B)?);
        let cause = match (&a, &b) {
            (Some(a), Some(b)) => self.order(place, a, b, causes),
            _ => None,
        };
        let whole = [a, b].map(|side| {
            side.map(|side| Whole {
                fingerprint: side.whole(),
                has_many_values: has_many_values(&side),
            })
        });
        Ok(Fingerprinted { whole, cause })
    }

    fn order(
        &self,
        place: usize,
        a: &TensorFingerprints,
        b: &TensorFingerprints,
        causes: &BTreeMap<usize, TensorCause>,
    ) -> Option<TensorCause> {
        let pair = &self.compared.pairs[place];
        let shapes = pair.sides.each_ref().map(|side| side.shape());
        if shapes[0].len() == 2 && are_all_different(&b.rows) && are_all_different(&b.columns) {
            let is_transposed = a.rows == b.columns && a.columns == b.rows;
            if is_transposed {
                return Some(TensorCause::Transposed);
            }
        }
        if shapes[0] != shapes[1] {
            return None;
        }
        let facts = self.compared.facts;
        if shapes[0].len() < 2 {
            return self.order_of_bias(place, [&a.rows, &b.rows], causes);
        }
        [(Direction::Rows, &a.rows, &b.rows), (Direction::Columns, &a.columns, &b.columns)]
            .into_iter()
            .find_map(|(direction, a, b)| {
                let found = orders::permutation(a, b)?;
                let subject = self.subject(place, direction);
                Some(TensorCause::Order(orders::order(&found, subject, facts), direction))
            })
    }

    /// The order of a bias is that of its weight, if anything: its values may repeat.
    fn order_of_bias(
        &self,
        place: usize,
        [a, b]: [&[u64]; 2],
        causes: &BTreeMap<usize, TensorCause>,
    ) -> Option<TensorCause> {
        let weight = self.weight_of(place)?;
        let TensorCause::Order(order, direction) = causes.get(&weight)? else { return None };
        let subject = self.subject(weight, *direction);
        let is_it =
            |rows: Permutation| rows.iter().zip(a).all(|(row, value)| b.get(*row) == Some(value));
        let mut rows = orders::rows_of(order, b.len(), subject, self.compared.facts);
        rows.any(is_it).then(|| TensorCause::Order(order.clone(), *direction))
    }

    /// The weight of the module of a bias.
    fn weight_of(&self, place: usize) -> Option<usize> {
        let name = self.compared.pairs[place].name.as_str().strip_suffix("bias")?;
        self.by_name.get(format!("{name}weight").as_str()).copied()
    }

    /// What the rows of a tensor are, or its columns.
    fn subject(&self, place: usize, direction: Direction) -> Subject {
        let pair = &self.compared.pairs[place];
        let name = pair.name.as_str();
        let shape = pair.sides[Side::B].shape();
        let size = |size: u64| usize::try_from(size).unwrap_or(usize::MAX);
        let own = Place::of(name);
        let [rows, columns] = matrix(shape);
        let experts = match (shape, direction) {
            ([experts, _, _], Direction::Rows) => size(*experts),
            _ => 1,
        };
        let is_gated =
            own.module.ends_with("gate_up_proj") || own.parameter.contains("gate_up_proj") || {
                let second =
                    second_linear(name).and_then(|second| self.by_name.get(second.as_str()));
                let width = second
                    .map(|second| matrix(self.compared.pairs[*second].sides[Side::B].shape())[1]);
                width.is_some_and(|width| width.checked_mul(2) == Some(rows))
            };
        Subject {
            role: Role::of(&own.module, own.parameter),
            is_gated,
            experts,
            hidden: size(if direction == Direction::Rows { columns } else { rows }),
        }
    }

    /// Finds the relation in which all elements of a pair are, or the rows that alone differ.
    fn by_relations(&self, place: usize) -> Result<Option<(TensorCause, bool)>, ReadError> {
        let Some(stats) = self.stats(place) else { return Ok(None) };
        let pair = &self.compared.pairs[place];
        let facts = self.compared.facts;
        let relations = relations(stats, pair.dtypes());
        let axes =
            [Direction::Rows, Direction::Columns].map(|direction| self.axis(place, direction));
        let [of_rows, of_columns] = axes;
        let may_be_some = stats.differing() < stats.count();
        let may_be_extent = |rows: &Places, columns: &Places| {
            may_be_some
                && (extents::may_be_one(rows, of_rows, facts)
                    || columns.len() > 1 && extents::may_be_one(columns, of_columns, facts))
        };
        let counts_outliers = may_be_unwritten(stats);
        if relations.is_empty() && !may_be_some && !counts_outliers {
            return Ok(None);
        }
        let question =
            Question { relations: &relations, may_be_extent: &may_be_extent, counts_outliers };
        let answer = relate(pair, self.compared.files, &question)?;
        let related = holding(&answer, &relations, stats);
        let others = || unwritten(&answer, stats).or_else(|| self.extent(&answer, axes, stats));
        Ok(match related {
            Some((cause, false)) => others().map(|other| (other, true)).or(Some((cause, false))),
            certain => certain.or_else(|| others().map(|other| (other, true))),
        })
    }

    fn axis(&self, place: usize, direction: Direction) -> Axis {
        let subject = self.subject(place, direction);
        let name = self.compared.pairs[place].name.as_str();
        // Those that have them group by group: Megatron's, GPT-NeoX's and BLOOM's.
        let has_groups = ["linear_qkv", "query_key_value"].iter().any(|part| name.contains(part));
        let words = match direction {
            Direction::Rows => ["row", "rows"],
            Direction::Columns => ["column", "columns"],
        };
        Axis { subject, has_blocks: !has_groups, words }
    }

    fn extent(
        &self,
        answer: &Answer,
        [of_rows, of_columns]: [Axis; 2],
        stats: &Stats,
    ) -> Option<TensorCause> {
        let [rows, columns] = answer.extent.as_ref()?;
        let facts = self.compared.facts;
        let found = extents::extent(rows, of_rows, facts, stats.differing()).or_else(|| {
            let columns = Some(columns).filter(|columns| columns.len() > 1)?;
            extents::extent(columns, of_columns, facts, stats.differing())
        });
        found.map(|extent| TensorCause::Extent(extent.text))
    }
}

/// The relations that the statistics leave, those that say more first.
fn relations(stats: &Stats, dtypes: [Dtype; 2]) -> Vec<(Side, Relation)> {
    const NARROW: [Dtype; 4] =
        [Dtype::BFloat16, Dtype::Float16, Dtype::Float8E4M3Fn, Dtype::Float8E5M2];
    let mut relations = Vec::new();
    let [inf, nan] = [stats.inf(), stats.nan()];
    if nan == [0; 2] {
        for (side, [own, other]) in [(Side::A, inf), (Side::B, [inf[1], inf[0]])] {
            if own > 0 && other == 0 {
                relations.push((side, Relation::Overflow));
            }
        }
    }
    if !stats.is_finite() {
        return relations;
    }
    let is_close = |most: f64| stats.rel_l2().is_some_and(|distance| distance < most);
    if dtypes[0] == dtypes[1] && stats.differing() >= LEAST && is_close(0.5) {
        for narrow in NARROW.into_iter().filter(|narrow| is_narrower(*narrow, dtypes[0])) {
            relations.extend(Side::BOTH.map(|side| (side, Relation::Rounded(narrow))));
        }
    }
    if stats.mean_abs().is_some_and(|mean| (0.5..1.5).contains(&mean)) {
        relations.extend([
            (Side::A, Relation::Plus(1.0)),
            (Side::B, Relation::Plus(-1.0)),
            (Side::A, Relation::Plus(-1.0)),
            (Side::B, Relation::Plus(1.0)),
        ]);
    }
    if let Some(factor) = factor(stats) {
        let coarser = if is_narrower(dtypes[0], dtypes[1]) { dtypes[0] } else { dtypes[1] };
        let shorter = NARROW[..2].iter().filter(|narrow| is_narrower(**narrow, coarser));
        let precisions = [coarser].into_iter().chain(shorter.copied());
        relations.extend(precisions.map(|precision| (Side::A, Relation::Times(factor, precision))));
    }
    relations
}

/// The number that a is b times, if what is left is no more than roundings and it is far enough from 1.
fn factor(stats: &Stats) -> Option<f64> {
    let (cos, angle) = (stats.cos()?, stats.one_minus_cos()?);
    let factor = cos * stats.norm_a()? / stats.norm_b()?;
    let residual = (angle * (2.0 - angle)).max(0.0).sqrt();
    let is_far = (factor - 1.0).abs() > (2f64.powi(-6)).max(32.0 * residual);
    let is_one = stats.count() >= LEAST && residual < 2f64.powi(-7) && is_far;
    (is_one && factor.is_finite() && factor != 0.0).then_some(factor)
}

/// The first relation that holds, and whether it does so for enough different values to be no chance.
fn holding(
    answer: &Answer,
    relations: &[(Side, Relation)],
    stats: &Stats,
) -> Option<(TensorCause, bool)> {
    let [of_a, of_b] = answer.distinct.map(|count| count >= ENOUGH_VALUES);
    answer.holding.iter().find_map(|at| match relations.get(*at)? {
        (side, Relation::Rounded(dtype)) => {
            Some((TensorCause::Rounded(*side, *dtype), [of_a, of_b][*side]))
        }
        (side, Relation::Plus(number)) => {
            let number = if *side == Side::A { *number } else { -*number };
            Some((TensorCause::Plus(number), of_a && of_b))
        }
        (_, Relation::Times(factor, precision)) => {
            // As many digits as the elements have.
            let digits = if is_narrower(*precision, Dtype::Float16) { 3 } else { 4 };
            let factor = to_digits(*factor, digits);
            (of_a && of_b).then_some((TensorCause::Times(factor), true))
        }
        (side, Relation::Overflow) => {
            (stats.count() >= LEAST).then_some((TensorCause::Overflow(*side), true))
        }
    })
}

/// A number with so many digits.
fn to_digits(number: f64, digits: usize) -> f64 {
    format!("{number:.0$e}", digits - 1).parse().unwrap_or(number)
}

/// A value that no model has.
const HUGE: f64 = (1u128 << 64) as f64;

fn may_be_unwritten(stats: &Stats) -> bool {
    let is_huge = stats.max_abs().is_none_or(|largest| largest > HUGE);
    stats.count() >= LEAST && (is_huge || !stats.is_finite())
}

/// A side with values that nobody wrote: many sizes far beyond those of a model among others, where the other side has none.
fn unwritten(answer: &Answer, stats: &Stats) -> Option<TensorCause> {
    let is_it = |side: &Side| {
        let [own, other] = match side {
            Side::A => answer.outliers,
            Side::B => [answer.outliers[1], answer.outliers[0]],
        };
        own.huge >= 8
            && own.exponents.count_ones() >= 4
            && own.ordinary >= stats.count() / 8
            && other.huge == 0
            && other.ordinary == stats.count()
    };
    Side::BOTH.into_iter().find(is_it).map(TensorCause::Uninitialised)
}

fn are_all_different(fingerprints: &[u64]) -> bool {
    different(fingerprints) == fingerprints.len()
}

fn different(fingerprints: &[u64]) -> usize {
    let mut sorted = fingerprints.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    sorted.len()
}

/// Returns whether a tensor has so many different values that it is no other one by chance.
fn has_many_values(tensor: &TensorFingerprints) -> bool {
    different(&tensor.rows).max(different(&tensor.columns)) > ENOUGH_VALUES
}
