//! Likely partners of tensors that have none: those of the other side with the same shape and the same values.
//!
//! Each of them is read once, and of large ones that are many only the first block; nothing is compared with anything. Floats are
//! the same where their values are, whatever their dtype; others where their bytes are.

use std::collections::{BTreeMap, BTreeSet};

use blake3::{Hash, Hasher};
use rayon::prelude::*;

use crate::base::dtype::DtypeKind;
use crate::base::side::Side;
use crate::kernel::{BLOCK, DenseBlock, widened};
use crate::names::Name;
use crate::names::renames::rules_between;
use crate::storage::FileSet;
use crate::tensor::LogicalTensor;

use super::pass::{TensorPass, bytes, unit_bytes};
use super::side_files::SideFiles;
use super::side_reader::SideReader;

/// Most bytes that are read of tensors as a whole, and most of the first blocks of others.
const MAX_BYTES: u64 = 1 << 30;

/// Two names that stand for the same values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suggestion {
    /// The name on each side.
    pub names: [Name; 2],
    /// All their values are the same; else only the first ones were looked at.
    pub is_whole: bool,
}

/// What there is to say of tensors without a partner.
#[derive(Debug, Default)]
pub struct Suggestions {
    /// Names that stand for the same values, in the order of the first side.
    pub partners: Vec<Suggestion>,
    /// Rules for names that bring all of them together; none where there are no such rules.
    pub rules: Vec<String>,
    /// Tensors that were not looked at: too many, or unreadable.
    pub left_out: usize,
}

/// Tensors without a partner, of both sides.
pub type Unpaired<'a> = [Vec<(&'a Name, &'a LogicalTensor)>; 2];

/// A tensor that may be the partner of another one.
struct Candidate<'a> {
    side: Side,
    name: &'a Name,
    tensor: &'a LogicalTensor,
    /// All of it is read.
    is_whole: bool,
}

/// Finds the tensors without a partner that have the same values as exactly one of the other side, or as exactly one that has
/// the same numbers in its name.
/// The rules leave names that are `paired` alone.
#[must_use]
pub fn suggest(unpaired: &Unpaired<'_>, paired: &[&Name], files: [&FileSet; 2]) -> Suggestions {
    let (candidates, mut left_out) = candidates(unpaired);
    let units: Vec<(usize, u64)> = candidates.iter().enumerate().flat_map(blocks).collect();
    let passes: Vec<TensorPass<'_, 1>> = candidates
        .iter()
        .map(|Candidate { side, tensor, .. }| {
            let files = SideFiles { side: *side, files: files[*side], sums: None };
            TensorPass::new([SideReader::merging(files, tensor)], unit_bytes(0))
        })
        .collect();
    let read = |(index, first): &(usize, u64)| {
        let pass = &passes[*index];
        let end = (first + BLOCK as u64).min(candidates[*index].tensor.numel());
        let mut found = None;
        let done = pass.each_block(&(*first..end), &mut [BTreeSet::new()], |[block], _| {
            found = Some(hash(block));
        });
        (*index, done.ok().and(found))
    };
    let hashes: Vec<(usize, Option<Hash>)> = units.par_iter().map(read).collect();
    let mut digests: BTreeMap<usize, Option<Hasher>> = BTreeMap::new();
    for (index, hash) in hashes {
        let digest = digests.entry(index).or_insert_with(|| Some(Hasher::new()));
        *digest = digest.take().zip(hash).map(|(mut digest, hash)| {
            digest.update(hash.as_bytes());
            digest
        });
    }
    let mut groups: BTreeMap<(&[u64], [u8; 32]), Vec<&Candidate<'_>>> = BTreeMap::new();
    for (index, digest) in digests {
        let candidate = &candidates[index];
        match digest {
            Some(digest) => {
                let key = (candidate.tensor.shape(), *digest.finalize().as_bytes());
                groups.entry(key).or_default().push(candidate);
            }
            None => left_out += 1,
        }
    }
    let mut partners: Vec<Suggestion> = groups.values().flat_map(|group| pairs_of(group)).collect();
    partners.sort_by(|one, other| one.names.cmp(&other.names));
    let names: Vec<[Name; 2]> = partners.iter().map(|found| found.names.clone()).collect();
    Suggestions { partners, rules: rules_between(&names, paired), left_out }
}

/// The tensors whose shape some tensor of the other side has, small ones first; and the number of those that are too much.
/// Tensors of one element are no candidates: their values say nothing.
fn candidates<'a>(unpaired: &Unpaired<'a>) -> (Vec<Candidate<'a>>, usize) {
    type Group<'a> = Vec<(Side, &'a Name, &'a LogicalTensor)>;
    let mut by_shape: BTreeMap<(u64, &[u64]), Group<'a>> = BTreeMap::new();
    for side in Side::BOTH {
        for (name, tensor) in unpaired[side].iter().filter(|(_, tensor)| tensor.numel() > 1) {
            let key = (tensor.numel(), tensor.shape());
            by_shape.entry(key).or_default().push((side, *name, *tensor));
        }
    }
    let is_on_both =
        |group: &Group<'_>| Side::BOTH.iter().all(|side| group.iter().any(|(of, _, _)| of == side));
    let mut candidates = Vec::new();
    let (mut whole, mut heads, mut left_out) = (0u64, 0u64, 0);
    for group in by_shape.into_values().filter(is_on_both) {
        let sum = |size: fn(&LogicalTensor) -> u64| {
            group.iter().map(|(_, _, tensor)| size(tensor)).fold(0, u64::saturating_add)
        };
        let head = |tensor: &LogicalTensor| {
            bytes(tensor).min(tensor.dtype().size().saturating_mul(BLOCK as u64))
        };
        let is_whole = whole.saturating_add(sum(bytes)) <= MAX_BYTES;
        if is_whole {
            whole += sum(bytes);
        } else if heads.saturating_add(sum(head)) <= MAX_BYTES {
            heads += sum(head);
        } else {
            left_out += group.len();
            continue;
        }
        candidates.extend(group.into_iter().map(|(side, name, tensor)| Candidate {
            side,
            name,
            tensor,
            is_whole,
        }));
    }
    (candidates, left_out)
}

/// The first element of each block that is read.
fn blocks((index, candidate): (usize, &Candidate<'_>)) -> impl Iterator<Item = (usize, u64)> {
    let end = if candidate.is_whole { candidate.tensor.numel() } else { 1 };
    (0..end).step_by(BLOCK).map(move |first| (index, first))
}

fn hash(block: DenseBlock<'_>) -> Hash {
    let mut hasher = Hasher::new();
    if block.dtype.kind() != DtypeKind::Float {
        hasher.update(block.dtype.name().as_bytes()).update(block.bytes);
        return hasher.finalize();
    }
    const STEP: usize = 1 << 10;
    let (_, numbers) = widened(block.dtype);
    let mut values = [0.0; STEP];
    let mut words = [0; STEP * 8];
    for part in block.parts(STEP / numbers) {
        let values = &mut values[..part.len() * numbers];
        part.widen(values);
        let words = &mut words[..values.len() * 8];
        for (word, value) in words.chunks_exact_mut(8).zip(values) {
            // Zeros are the same, and so are all that are no number.
            let value = if value.is_nan() { f64::NAN } else { *value + 0.0 };
            word.copy_from_slice(&value.to_le_bytes());
        }
        hasher.update(words);
    }
    hasher.finalize()
}

/// The partners among tensors of the same values.
fn pairs_of(group: &[&Candidate<'_>]) -> Vec<Suggestion> {
    let mut by_numbers: BTreeMap<Vec<&str>, [Vec<&Candidate<'_>>; 2]> = BTreeMap::new();
    let count = |side| group.iter().filter(|candidate| candidate.side == side).count();
    let is_certain = Side::BOTH.into_iter().all(|side| count(side) == 1);
    for candidate in group {
        let numbers = if is_certain { Vec::new() } else { candidate.name.numbers().collect() };
        by_numbers.entry(numbers).or_default()[candidate.side].push(candidate);
    }
    let pair = |sides: &[Vec<&Candidate<'_>>; 2]| match sides.each_ref().map(Vec::as_slice) {
        [[a], [b]] => {
            Some(Suggestion { names: [a.name.clone(), b.name.clone()], is_whole: a.is_whole })
        }
        _ => None,
    };
    by_numbers.values().filter_map(pair).collect()
}
