//! Two catalogs -> the pairs to compare, and the names that have no partner. Pure.

use std::collections::BTreeSet;

use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::base::side::Side;
use crate::catalog::{Catalog, Entry, Problem};
use crate::names::Name;
use crate::tensor::LogicalTensor;

/// The tensors to compare, and those without a partner.
#[derive(Debug, Default)]
pub struct Pairing {
    /// Tensors on both sides, in natural order of their names.
    pub pairs: Vec<Pair>,
    /// Names that only one side has, for each side.
    pub only_in: [Vec<Name>; 2],
    /// The globs of the selection that match no name of either side, with their flags: `--include mlp*`.
    pub idle_globs: Vec<String>,
}

/// One tensor on both sides.
#[derive(Debug)]
pub struct Pair {
    /// The canonical name.
    pub name: Name,
    /// The tensor of each side, `a` first.
    pub sides: [LogicalTensor; 2],
    /// Vocabulary rows beyond those that are compared, on each side.
    pub rows_left_out: [u64; 2],
    /// The side on which it is no tensor of its own but shares another one's values.
    pub tied_side: Option<Side>,
}

/// Globs over names.
#[derive(Debug, Clone, Default)]
pub struct Globs {
    globs: Vec<Glob>,
    set: GlobSet,
}

impl Globs {
    /// Takes some globs together.
    ///
    /// # Errors
    /// They are too many or too long.
    pub fn new(globs: &[Glob]) -> Result<Self, globset::Error> {
        let mut set = GlobSetBuilder::new();
        for glob in globs {
            set.add(glob.clone());
        }
        Ok(Self { globs: globs.to_vec(), set: set.build()? })
    }

    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.globs.is_empty()
    }

    /// The globs as they are written.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.globs.iter().map(Glob::glob)
    }

    fn is_match(&self, name: &str) -> bool {
        self.set.is_match(name)
    }

    /// Those that match none of these names.
    fn idle<'a>(&self, names: impl Iterator<Item = &'a str>) -> impl Iterator<Item = &str> {
        let used: BTreeSet<usize> = match self.is_empty() {
            true => BTreeSet::new(),
            false => names.flat_map(|name| self.set.matches(name)).collect(),
        };
        self.texts().enumerate().filter(move |(at, _)| !used.contains(at)).map(|(_, text)| text)
    }
}

/// The selection of names that the user asks for.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// Names that take part; all where there is none.
    pub include: Globs,
    /// Names that do not, whatever `include` says.
    pub exclude: Globs,
    /// The true size of the vocabulary: both sides are cut to it.
    pub vocab_size: Option<u64>,
}

impl Selection {
    fn takes(&self, name: &str) -> bool {
        (self.include.is_empty() || self.include.is_match(name)) && !self.exclude.is_match(name)
    }

    /// Returns whether a problem is that of a tensor, or of several, which are excluded by name. What `include` leaves out counts all the
    /// same: the name that a problem tells need not be the one that the tensor would have had.
    #[must_use]
    pub fn leaves_out(&self, problem: &Problem) -> bool {
        let is_excluded = |name: &String| self.exclude.is_match(name);
        problem.tensor.as_ref().is_some_and(is_excluded)
            || !problem.lost.is_empty() && problem.lost.iter().all(is_excluded)
    }

    /// Globs that match no name of either side, with their flags.
    #[must_use]
    pub fn idle_globs(&self, sides: [&Catalog; 2]) -> Vec<String> {
        let names = |side: &'_ Catalog| -> Vec<String> {
            let tensors = side.tensors.keys().chain(side.tied.keys()).map(|name| name.to_string());
            tensors.chain(side.problems.iter().filter_map(|found| found.tensor.clone())).collect()
        };
        let names = sides.map(names).concat();
        let idle = |flag: &'static str, globs: &Globs| -> Vec<String> {
            let idle = globs.idle(names.iter().map(String::as_str));
            idle.map(|glob| format!("{flag} {glob}")).collect()
        };
        [idle("--include", &self.include), idle("--exclude", &self.exclude)].concat()
    }
}

/// Takes out the tensors that are known by a position only, unless the other side has the same positions with the same
/// shapes: otherwise the same position need not be the same parameter.
pub fn settle_positions(a: &mut Catalog, b: &mut Catalog) {
    let reason = {
        let shape = |side: &Catalog, name| {
            side.tensors.get(name).map(|entry| entry.tensor.shape().to_vec())
        };
        let (positions, others) = (&a.positions, &b.positions);
        let odd = positions.union(others).find(|name| shape(a, name) != shape(b, name));
        let Some(name) = odd else { return };
        let text = |side| match shape(side, name) {
            Some(shape) => format!("is of shape {shape:?} in"),
            None => "is not in".to_owned(),
        };
        format!("{name} {} a and {} b", text(a), text(b))
    };
    for side in [a, b] {
        let Some(first) = side.positions.first().cloned() else { continue };
        let message = format!(
            "{} tensors without a name were not compared: they are known by position only, and the two sides do \
             not have the same ones: {reason}",
            side.positions.len()
        );
        side.problems.push(Problem::of_tensor(first.as_str(), message));
        side.tensors.retain(|name, _| !side.positions.contains(name));
    }
}

/// Pairs the tensors of two catalogs by name.
#[must_use]
pub fn pair(a: &Catalog, b: &Catalog, selection: &Selection) -> Pairing {
    let mut pairing = Pairing::default();
    let names: BTreeSet<&Name> = a.tensors.keys().chain(b.tensors.keys()).collect();
    for name in names {
        if !selection.takes(name.as_str()) {
            continue;
        }
        let found = [find(a, name), find(b, name)];
        match found {
            [Some((first, a_is_tied)), Some((second, b_is_tied))] => {
                let tied_side = a_is_tied.then_some(Side::A).or(b_is_tied.then_some(Side::B));
                let pair = Pair {
                    name: name.clone(),
                    sides: [first.tensor, second.tensor],
                    rows_left_out: [0, 0],
                    tied_side,
                };
                let is_vocab = first.is_vocab && second.is_vocab;
                pairing.pairs.push(if is_vocab {
                    pair.over_shared_rows(selection.vocab_size)
                } else {
                    pair
                });
            }
            [Some(_), None] => pairing.only_in[Side::A].push(name.clone()),
            [None, _] => pairing.only_in[Side::B].push(name.clone()),
        }
    }
    pairing
}

/// The tensor of this name; where it is tied to another one, its own copy or that other one.
#[must_use]
pub fn find(catalog: &Catalog, name: &Name) -> Option<(Entry, bool)> {
    if let Some(entry) = catalog.tensors.get(name) {
        return Some((entry.clone(), false));
    }
    let tied = catalog.tied.get(name)?;
    match &tied.copy {
        Some(copy) => Some((Entry { tensor: copy.clone(), is_vocab: true }, true)),
        None => catalog.tensors.get(&tied.to).map(|entry| (entry.clone(), true)),
    }
}

impl Pair {
    /// Cuts both sides to the vocabulary rows that both hold, or to the true vocabulary where it is given.
    fn over_shared_rows(mut self, vocab_size: Option<u64>) -> Self {
        let rows = self.sides.each_ref().map(|side| side.shape().first().copied());
        let [Some(first), Some(second)] = rows else { return self };
        let shared = first.min(second).min(vocab_size.unwrap_or(u64::MAX));
        for (side, rows) in Side::BOTH.into_iter().zip([first, second]) {
            if let Ok(cut) = self.sides[side].slice(0, 0, shared) {
                self.sides[side] = cut;
                self.rows_left_out[side] = rows - shared;
            }
        }
        self
    }
}
