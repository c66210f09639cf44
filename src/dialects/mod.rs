//! Two catalogs of different dialects -> two that speak the same names: where one side is of a Megatron family, the other one
//! gets canonical names and shapes, by the tables of [`crate::names::families`].
//!
//! All of it is metadata: query, key and value are dealt out by group, gate and up put one behind the other, experts taken
//! apart, as views. Where both sides are of other dialects, their names stay.

mod attention;
mod convert;
mod masters;
mod renames;
mod source_naming;
mod sources;

use std::collections::{BTreeMap, BTreeSet};

use crate::base::limits::{ENTRY, LIMITS, OVER_GLOBAL_METADATA};
use crate::base::plain::PlainValue;
use crate::base::side::Side;
use crate::catalog::{Catalog, Entry, Problem, Tied};
use crate::names::families::{CanonicalPart, Conversion};
use crate::names::renames::Renames;
use crate::names::{Name, Naming, is_vocabulary};
use crate::tensor::LogicalTensor;

use attention::HeadCounts;
use source_naming::SourceNaming;
use sources::Sources;

pub use masters::take_masters;
pub use renames::RenameCounts;

/// Gives tensors the names that the user says, and the side that speaks another dialect canonical names where the other side's are.
///
/// A rename is one of the names that a checkpoint has of its own; only where it matches none of them, of those that are compared.
pub fn agree(a: &mut Catalog, b: &mut Catalog, names: &Renames) -> RenameCounts {
    let mut counts = RenameCounts::of(names);
    let mut apply = |sides: [&mut Catalog; 2]| {
        let before = counts.clone();
        for (side, catalog) in Side::BOTH.into_iter().zip(sides) {
            renames::rename(side, catalog, names, &before, &mut counts);
        }
    };
    apply([a, b]);
    translate_one(a, b);
    apply([a, b]);
    counts
}

/// Gives the side that speaks another dialect canonical names where the other side's are.
fn translate_one(a: &mut Catalog, b: &mut Catalog) {
    let is_canonical = [&*a, &*b].map(|side| side.origin.naming == Naming::Canonical);
    match is_canonical {
        [true, false] => translate(b, a),
        [false, true] => translate(a, b),
        [true, true] | [false, false] => {}
    }
}

/// Gives one side canonical names and shapes; a tensor that no row knows is a problem and left out.
fn translate(side: &mut Catalog, other: &Catalog) {
    let sources = Sources::of(side, other);
    let names: BTreeSet<&str> = side
        .tensors
        .iter()
        .filter(|(name, entry)| is_of_weight(side, other, name, entry))
        .map(|(name, _)| split_state(name.as_str()).1)
        .collect();
    let names: Vec<&str> = names.into_iter().collect();
    let naming = match SourceNaming::of(&names, side.origin.naming, &sources) {
        Ok(naming) => naming,
        // Tensors that have a partner all the same are compared as they are.
        Err(_) if side.tensors.keys().any(|name| other.tensors.contains_key(name)) => return,
        Err(message) => {
            side.problems.push(Problem::of_file(&side.origin.path, message));
            return;
        }
    };
    let counts = HeadCounts::of(&sources);
    let zero_centered_gamma = sources.others("apply_layernorm_1p") == Some(&PlainValue::Bool(true));
    if zero_centered_gamma && !naming.are_norms_zero_centered() {
        let note = "norm weights are stored as w - 1 on the other side (apply_layernorm_1p) and as w here: they differ by one";
        side.notes.push(note.to_owned());
    }
    if !matches!(naming, SourceNaming::Megatron(..)) {
        side.notes.push(format!("names of {} models, mapped to Megatron names", naming.name()));
    }
    let quantized = names.iter().filter_map(|name| quantized_by(name));
    let quantized = quantized.filter(|weight| names.binary_search(weight).is_ok());
    let mut translation = Translation {
        quantized: quantized.map(str::to_owned).collect(),
        naming,
        counts,
        partials: BTreeMap::new(),
        replicas: Vec::new(),
        kept: BTreeMap::new(),
        problems: Vec::new(),
    };
    for (name, entry) in std::mem::take(&mut side.tensors) {
        match is_of_weight(side, other, &name, &entry) {
            true => translation.take(&name, entry),
            false => drop(translation.kept.insert(name, entry)),
        }
    }
    translation.finish(side);
}

/// True for a weight, or a state of the optimizer of a weight's shape: a step has no parts to be dealt out, and a tensor
/// that is known by its position has no name. One that the user gave a name of the other side's has its name already.
fn is_of_weight(side: &Catalog, other: &Catalog, name: &Name, entry: &Entry) -> bool {
    let (state, _) = split_state(name.as_str());
    let is_named = side.renamed.contains_key(name) && other.tensors.contains_key(name);
    let has_parts = !(entry.tensor.shape().is_empty() || side.positions.contains(name));
    !is_named && (state.is_empty() || has_parts)
}

/// The weight whose scales a tensor of this name holds (DeepSeek-V3's 8-bit blocks, compressed-tensors, ModelOpt).
fn quantized_by(name: &str) -> Option<&str> {
    ["_scale_inv", "_scale"].iter().find_map(|end| name.strip_suffix(end))
}

/// A canonical tensor on its way: its parts in their places.
struct PartialTensor {
    conversion: Conversion,
    /// Names of all parts in the dialect.
    names: Vec<String>,
    parts: Vec<Option<LogicalTensor>>,
}

/// Another copy of a tensor.
struct ExtraCopy {
    /// Its own name.
    name: Name,
    /// The canonical name of what it is a copy of.
    of: Name,
    tensor: LogicalTensor,
}

struct Translation {
    naming: SourceNaming,
    counts: HeadCounts,
    /// Weights with scales beside them.
    quantized: BTreeSet<String>,
    /// By what stands before the name of an optimizer's state, and by canonical name.
    partials: BTreeMap<(String, String), PartialTensor>,
    replicas: Vec<ExtraCopy>,
    /// Tensors without the name of a weight.
    kept: BTreeMap<Name, Entry>,
    problems: Vec<Problem>,
}

impl Translation {
    fn take(&mut self, name: &Name, entry: Entry) {
        if let Err(message) = self.place(name, entry.tensor) {
            self.problems.push(Problem::of_tensor(name.as_str(), message));
        }
    }

    fn place(&mut self, name: &Name, tensor: LogicalTensor) -> Result<(), String> {
        let (state, weight) = split_state(name.as_str());
        if quantized_by(weight).is_some_and(|weight| self.quantized.contains(weight)) {
            return Ok(());
        }
        if self.quantized.contains(weight) {
            return Err("is quantized, and its scales, a tensor of their own, are not applied: dequantize the model first".to_owned());
        }
        let place = self.naming.place(weight).ok_or_else(|| {
            let kind = self.naming.name();
            format!("the table of {kind} models has no such name, so it was not compared; --exclude leaves it out")
        })?;
        let CanonicalPart { canonical, conversion, part, parts: names } = place;
        if conversion == Conversion::Replica {
            let of = Name::new(format!("{state}{canonical}"));
            self.replicas.push(ExtraCopy { name: name.clone(), of, tensor });
            return Ok(());
        }
        let parts = names.iter().map(|_| None).collect();
        let key = (state.to_owned(), canonical);
        let whole = self.partials.entry(key).or_insert(PartialTensor { conversion, names, parts });
        let is_of_it = whole.conversion == conversion
            && whole.names.get(part).is_some_and(|own| own == weight);
        match whole.parts.get_mut(part).filter(|place| is_of_it && place.is_none()) {
            Some(place) => *place = Some(tensor),
            None => return Err(format!("duplicates {}", whole.names.join(", "))),
        }
        Ok(())
    }

    fn finish(mut self, side: &mut Catalog) {
        side.problems.append(&mut self.problems);
        side.tensors = std::mem::take(&mut self.kept);
        let mut left = LIMITS.global_metadata;
        for ((state, canonical), whole) in std::mem::take(&mut self.partials) {
            let inserted = convert::converted(&whole, &self.counts).and_then(|tensors| {
                let pieces: usize = tensors.iter().map(|tensor| tensor.pieces().len()).sum();
                let bytes = pieces.saturating_mul(ENTRY);
                left =
                    left.checked_sub(bytes).ok_or_else(|| (0, OVER_GLOBAL_METADATA.to_string()))?;
                let mut tensors = tensors.into_iter().enumerate();
                tensors.try_for_each(|(number, tensor)| {
                    let name = canonical.replace('*', &number.to_string());
                    let is_vocab = is_vocabulary(&name);
                    let name = Name::new(format!("{state}{name}"));
                    if side.tensors.contains_key(&name) {
                        return Err((0, format!("{name} is there on its own too")));
                    }
                    side.insert(name, Entry { tensor, is_vocab });
                    Ok(())
                })
            });
            if let Err((part, message)) = inserted {
                let name = whole.names.get(part).map_or("", String::as_str);
                let message = format!("{message}; so {state}{canonical} was not compared");
                side.problems.push(Problem::of_tensor(format!("{state}{name}"), message));
            }
        }
        let tied = std::mem::take(&mut side.tied).into_iter();
        side.tied = tied.filter_map(|(name, tied)| self.renamed(&name, tied)).collect();
        for ExtraCopy { name, of, tensor } in std::mem::take(&mut self.replicas) {
            let of = side.tied.get(&of).map_or(of, |tied| tied.to.clone());
            match side.tensors.get_mut(&of) {
                Some(entry) => {
                    if let Err(error) = entry.tensor.add_copy(tensor) {
                        side.problems.push(Problem::of_tensor(name.as_str(), error));
                    }
                }
                None => side.insert(of, Entry { tensor, is_vocab: true }),
            }
        }
    }

    /// A tied parameter under canonical names.
    fn renamed(&self, name: &Name, Tied { to, copy }: Tied) -> Option<(Name, Tied)> {
        let canonical = |name: &Name| {
            let (state, weight) = split_state(name.as_str());
            let place =
                self.naming.place(weight).filter(|place| place.conversion == Conversion::Same)?;
            Some(Name::new(format!("{state}{}", place.canonical)))
        };
        Some((canonical(name)?, Tied { to: canonical(&to)?, copy }))
    }
}

/// `optimizer.<state>.`, where it is in front, and the name of the weight.
fn split_state(name: &str) -> (&str, &str) {
    let weight = name.strip_prefix("optimizer.").and_then(|rest| rest.split_once('.'));
    match weight {
        Some((_, weight)) => name.split_at(name.len() - weight.len()),
        None => ("", name),
    }
}
