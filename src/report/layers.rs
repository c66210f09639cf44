//! A comparison by layer, in the order of the forward pass: where it begins to differ, and how much.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::base::dtype::DtypeKind;
use crate::judge::verdict::TensorVerdict;
use crate::kernel::Spread;
use crate::names::forward::{Part, Position, Tower};
use crate::names::{Name, place};

use super::document::Word;
use super::totals::stats;
use super::{Judged, Report};

/// A comparison by layer.
#[derive(Debug, Clone)]
pub struct Layers {
    /// How much differs in all.
    pub overall: Overall,
    /// The first tensor in the order of the forward pass that does not pass.
    pub first_difference: Option<FirstDifference>,
    /// The layers in this order, and what is outside of all.
    pub layers: Vec<Layer>,
}

/// How much differs in all.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Overall {
    /// The norm of all differences over that of all elements of b; of tensors that have a distance.
    pub rel_l2: Option<f64>,
    /// Tensors that are not equal, of those that were read.
    pub tensors: Share,
    /// Elements that differ, of those that were compared.
    pub elements: Share,
    /// Tensors that were read and have no distance: of two shapes, or not finite.
    pub without_distance: usize,
    /// The largest difference in steps between numbers of the coarser dtype, where it is known of all floats that differ.
    pub max_ulp: Option<u64>,
    /// Something differs, and no more than by two such steps, as rounding does it.
    pub noise: bool,
    /// Tensors that are no more alike than two of random numbers.
    pub unrelated: usize,
}

/// A part of a whole.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Share {
    /// Those that differ.
    pub differing: u64,
    /// All.
    pub of: u64,
}

/// The first tensor that does not pass.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FirstDifference {
    /// The kind of an optimizer's state, empty for a weight.
    pub state: String,
    /// The layer as people call it.
    pub layer: String,
    /// The module in the layer, or the whole path outside of all.
    pub module: String,
    /// The name.
    pub tensor: String,
}

/// A layer, or the embeddings, the final norm and so on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Layer {
    /// What people call it.
    pub title: String,
    /// The kind of an optimizer's state, empty for weights.
    pub state: String,
    /// The list of layers, empty outside of all.
    pub list: String,
    /// Its number there.
    pub number: Option<u64>,
    /// The verdict on it.
    pub verdict: Word,
    /// All its tensors pass.
    pub passes: bool,
    /// The largest of its tensors.
    pub worst_rel_l2: Option<f64>,
    /// Its modules in the order of the forward pass.
    pub modules: Vec<Module>,
}

/// A module of a layer, all experts as one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Module {
    /// Its name in the layer, or the whole path outside of all; the number of an expert is `*`.
    pub name: String,
    /// Its kind: attention, mlp, norm and so on.
    pub kind: Word,
    /// The worst verdict on a tensor.
    pub verdict: Word,
    /// All tensors pass.
    pub passes: bool,
    /// Number of tensors that are not equal.
    pub differing: usize,
    /// Number of experts.
    pub experts: usize,
    /// The largest of all tensors.
    pub worst_rel_l2: Option<f64>,
    /// The median of all tensors.
    pub median_rel_l2: Option<f64>,
    /// Tensors without a distance: of two shapes, not finite, or not read.
    pub without_distance: usize,
    /// The largest difference in steps between numbers of the coarser dtype.
    pub max_ulp: Option<u64>,
    /// Something differs, and no more than by two such steps.
    pub noise: bool,
    /// Its tensors, as indices in the list of all.
    pub tensors: Vec<usize>,
}

impl Layers {
    /// A finished comparison by layer.
    #[must_use]
    pub fn of(report: &Report) -> Self {
        let mut order: Vec<(Position, usize)> = (0..)
            .zip(&report.tensors)
            .map(|(index, judged)| (Position::of(&judged.tensor.name), index))
            .collect();
        order.sort();
        let titles = Titles::of(order.iter().map(|(position, _)| position));
        let fails = |(_, index): &&(Position, usize)| {
            let judgement = &report.tensors[*index].judgement;
            !judgement.passes && judgement.verdict != TensorVerdict::Unread
        };
        let first = order.iter().find(fails).map(|(position, index)| FirstDifference {
            state: position.state.as_str().to_owned(),
            layer: titles.title(position),
            module: position.module.as_str().to_owned(),
            tensor: report.tensors[*index].tensor.name.as_str().to_owned(),
        });
        let rows = order.chunk_by(|(one, _), (other, _)| one.row() == other.row());
        Self {
            overall: Overall::of(report),
            first_difference: first,
            layers: rows.map(|row| Layer::of(row, &titles, report)).collect(),
        }
    }
}

/// Whether a layer's number alone says which one it is.
struct Titles {
    /// The kinds of state of which the language model has several lists of layers.
    several: BTreeSet<Name>,
}

impl Titles {
    fn of<'p>(positions: impl Iterator<Item = &'p Position>) -> Self {
        let mut lists: BTreeMap<&Name, BTreeSet<&Name>> = BTreeMap::new();
        for position in positions {
            if position.tower == Tower::Main && position.part == Part::Layers {
                lists.entry(&position.state).or_default().insert(&position.list);
            }
        }
        let several = lists.into_iter().filter(|(_, lists)| lists.len() > 1);
        Self { several: several.map(|(state, _)| state.clone()).collect() }
    }

    fn title(&self, position: &Position) -> String {
        position.title(self.several.contains(&position.state))
    }
}

impl Layer {
    fn of(row: &[(Position, usize)], titles: &Titles, report: &Report) -> Self {
        let modules = row.chunk_by(|(one, _), (other, _)| one.module == other.module);
        let modules: Vec<Module> = modules.map(|module| Module::of(module, report)).collect();
        let judgements = || row.iter().map(|(_, index)| &report.tensors[*index].judgement);
        let worst = judgements().map(|one| one.verdict).max().unwrap_or(TensorVerdict::Identical);
        let worsts = modules.iter().filter_map(|module| module.worst_rel_l2);
        let position = &row[0].0;
        Self {
            title: titles.title(position),
            state: position.state.as_str().to_owned(),
            list: position.list.as_str().to_owned(),
            number: position.layer,
            verdict: worst.name().into(),
            passes: judgements().all(|one| one.passes),
            worst_rel_l2: worsts.max_by(f64::total_cmp),
            modules,
        }
    }
}

impl Module {
    fn of(tensors: &[(Position, usize)], report: &Report) -> Self {
        let position = &tensors[0].0;
        let judged = || tensors.iter().map(|(_, index)| &report.tensors[*index]);
        let experts = judged().filter_map(|one| place::Place::of(one.tensor.name.as_str()).expert);
        let mut distances: Vec<f64> = judged().filter_map(rel_l2).collect();
        distances.sort_by(f64::total_cmp);
        let middle = distances.len() / 2;
        let median = match distances.len() % 2 {
            _ if distances.is_empty() => None,
            0 => Some(f64::midpoint(distances[middle - 1], distances[middle])),
            _ => Some(distances[middle]),
        };
        let worst = judged().map(|one| one.judgement.verdict).max();
        Self {
            name: position.module.as_str().to_owned(),
            kind: position.kind().name().into(),
            verdict: worst.unwrap_or(TensorVerdict::Identical).name().into(),
            passes: judged().all(|one| one.judgement.passes),
            differing: judged().filter(|one| differs(one)).count(),
            experts: experts.collect::<BTreeSet<u64>>().len(),
            worst_rel_l2: distances.last().copied(),
            median_rel_l2: median,
            without_distance: tensors.len() - distances.len(),
            max_ulp: largest_ulp(judged()),
            noise: judged().any(differs) && judged().filter(|one| differs(one)).all(is_noise),
            tensors: tensors.iter().map(|(_, index)| *index).collect(),
        }
    }
}

impl Overall {
    fn of(report: &Report) -> Self {
        let read = || report.tensors.iter().filter(|one| !is_unread(one));
        let compared = || read().filter_map(|one| stats(&one.tensor));
        let finite = || read().filter(|one| rel_l2(one).is_some() || has_no_reference(one));
        let norm = |of: fn(&crate::kernel::Stats) -> Option<f64>| {
            norm_of(finite().filter_map(|one| of(stats(&one.tensor)?)))
        };
        let (distance, reference) = (norm(|stats| stats.l2()), norm(|stats| stats.norm_b()));
        let ratio = if distance == 0.0 { 0.0 } else { distance / reference };
        let differing = || read().filter(|one| differs(one));
        let max_ulp = largest_ulp(differing());
        Self {
            rel_l2: (finite().next().is_some() && ratio.is_finite()).then_some(ratio),
            tensors: Share { differing: differing().count() as u64, of: read().count() as u64 },
            elements: Share {
                differing: compared().map(|stats| stats.differing()).fold(0, u64::saturating_add),
                of: compared().map(|stats| stats.count()).fold(0, u64::saturating_add),
            },
            without_distance: read().count() - finite().count(),
            max_ulp,
            noise: differing().next().is_some() && differing().all(is_noise),
            unrelated: read().filter(|one| is_unrelated(one)).count(),
        }
    }
}

/// The root of the sum of squares, in the order of the names, and in range wherever the result is.
fn norm_of(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let largest = values.clone().fold(0.0, f64::max);
    if largest == 0.0 {
        return 0.0;
    }
    let squares = values.map(|value| (value / largest) * (value / largest));
    largest * squares.sum::<f64>().sqrt()
}

fn is_unread(judged: &Judged) -> bool {
    judged.judgement.verdict == TensorVerdict::Unread
}

/// Not even the values are the same.
fn differs(judged: &Judged) -> bool {
    !is_unread(judged) && judged.judgement.verdict > TensorVerdict::Equal
}

fn rel_l2(judged: &Judged) -> Option<f64> {
    stats(&judged.tensor)?.rel_l2()
}

/// It has a distance, but b is all zeros.
fn has_no_reference(judged: &Judged) -> bool {
    stats(&judged.tensor).is_some_and(|stats| stats.l2().is_some() && stats.norm_b() == Some(0.0))
}

fn is_noise(judged: &Judged) -> bool {
    stats(&judged.tensor).is_some() && judged.tensor.is_noise
}

fn is_float(judged: &Judged) -> bool {
    judged.tensor.dtypes.iter().all(|dtype| dtype.kind() != DtypeKind::Integer)
}

/// The largest difference of all in steps, where it is known of each that differs.
fn largest_ulp<'j>(tensors: impl Iterator<Item = &'j Judged>) -> Option<u64> {
    let of = |judged: &Judged| match &judged.tensor.spread {
        _ if !is_float(judged) => Some(0),
        Some(spread) if stats(&judged.tensor)?.is_finite() => Some(Spread::max_ulp(spread)),
        Some(_) => None,
        None => (!differs(judged)).then_some(0),
    };
    tensors.map(of).try_fold(0, |largest, steps| Some(largest.max(steps?)))
}

/// Elements from which on a small cosine tells something: that of two random tensors is below 0.1 more often than nine times in
/// ten.
const ENOUGH: u64 = 256;

/// Returns whether the sides are no more alike than two tensors of random numbers: at a right angle, almost, and of like norms.
fn is_unrelated(judged: &Judged) -> bool {
    let Some(stats) = stats(&judged.tensor) else { return false };
    let (Some(cos), Some(rel_l2)) = (stats.cos(), stats.rel_l2()) else { return false };
    stats.count() >= ENOUGH && cos.abs() < 0.1 && (1.2..1.7).contains(&rel_l2)
}
