//! Everything that a checkpoint keeps beside the tensors of its model and its optimizer, by key path; compared, not judged. Pure.
//!
//! Formats fill a [`KeptState`]: one value a key path, and which of the checkpoint's parts (files of ranks, shards of objects) say it.
//! Two of them are held against each other by [`compare`](compare()); parameter groups by the parameters in them, random states
//! part by part. Tensors in it are handed on, for the kernel to compare.

mod compare;
mod groups;
mod profile;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use crate::tensor::LogicalTensor;

pub use compare::{Difference, DifferenceKind, Found, TensorPair, compare};
pub use profile::{IGNORED_ON_RESUME, IgnoredRow, Profile, When};

/// A value without parts.
#[derive(Debug, Clone)]
pub enum StateValue {
    /// Python's `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// An integer of more than 64 bits, little-endian two's complement.
    BigInt(Arc<[u8]>),
    /// A floating point number.
    Float(f64),
    /// A text.
    Text(Arc<str>),
    /// Bytes.
    Bytes(Arc<[u8]>),
    /// A class or a function, by its dotted name.
    Class(Arc<str>),
    /// A list or dict without entries.
    Empty,
    /// A tensor that is neither the model's nor the optimizer's.
    Tensor(Arc<LogicalTensor>),
}

/// Bytes that are shown of a value.
const SHOWN_BYTES: usize = 8;

impl StateValue {
    /// Tells whether two values are the same: floats by value, and NaN is NaN. Tensors are never known to be.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::None, Self::None) | (Self::Empty, Self::Empty) => true,
            (Self::Bool(one), Self::Bool(other)) => one == other,
            (Self::Int(one), Self::Int(other)) => one == other,
            (Self::Float(one), Self::Float(other)) => {
                one == other || one.is_nan() && other.is_nan()
            }
            (Self::Int(int), Self::Float(float)) | (Self::Float(float), Self::Int(int)) => {
                is_exactly(*float, *int)
            }
            (Self::Text(one), Self::Text(other)) | (Self::Class(one), Self::Class(other)) => {
                one == other
            }
            (Self::BigInt(one), Self::BigInt(other)) | (Self::Bytes(one), Self::Bytes(other)) => {
                one == other
            }
            _ => false,
        }
    }

    /// The value as text, as Python writes it; of bytes the number and the first ones.
    #[must_use]
    pub fn text(&self) -> String {
        let hex =
            |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
        match self {
            Self::None => "None".to_owned(),
            Self::Bool(true) => "True".to_owned(),
            Self::Bool(false) => "False".to_owned(),
            Self::Int(value) => value.to_string(),
            Self::BigInt(bytes) => {
                let big_endian: Vec<u8> = bytes.iter().rev().copied().collect();
                format!("0x{}", hex(&big_endian))
            }
            Self::Float(value) => format!("{value:?}"),
            Self::Text(text) => format!("'{text}'"),
            Self::Bytes(bytes) => {
                let start = hex(&bytes[..bytes.len().min(SHOWN_BYTES)]);
                let rest = if bytes.len() > SHOWN_BYTES { "..." } else { "" };
                format!("{} bytes: {start}{rest}", bytes.len())
            }
            Self::Class(name) => name.to_string(),
            Self::Empty => "empty".to_owned(),
            Self::Tensor(tensor) => format!("tensor {:?} {}", tensor.shape(), tensor.dtype()),
        }
    }
}

/// Tells whether a float is this integer; up to 2^53 every integer is one.
fn is_exactly(float: f64, int: i64) -> bool {
    const EXACT: i64 = 1 << 53;
    #[expect(clippy::cast_precision_loss, reason = "checked to be exact")]
    let as_float = int as f64;
    (-EXACT..=EXACT).contains(&int) && as_float == float
}

/// A part of a checkpoint that says something of the run: a rank's file, a shard of an object; by its number in [`KeptState`].
pub type Part = u32;

/// A value and the parts that say it.
#[derive(Debug, Clone)]
pub struct Said {
    /// The value.
    pub value: StateValue,
    /// The parts, in ascending order.
    pub by: Vec<Part>,
}

/// Everything that a checkpoint keeps beside the tensors of its model and its optimizer.
#[derive(Debug, Clone, Default)]
pub struct KeptState {
    /// What is said under each key path; what several parts say alike is there once.
    entries: BTreeMap<Arc<str>, Vec<Said>>,
    /// The names of the parts.
    parts: Vec<String>,
    /// The parameters whose optimizer state lies under a key path in a part.
    parameters: BTreeMap<(Arc<str>, Part), BTreeSet<Arc<str>>>,
}

impl KeptState {
    /// The number of a part of this name.
    pub fn part(&mut self, name: &str) -> Part {
        let at = self.parts.iter().position(|part| part == name).unwrap_or_else(|| {
            self.parts.push(name.to_owned());
            self.parts.len() - 1
        });
        Part::try_from(at).unwrap_or(Part::MAX)
    }

    /// Adds what a part says under a key path.
    pub fn add(&mut self, path: &str, part: Part, value: StateValue) {
        if !self.entries.contains_key(path) {
            self.entries.insert(path.into(), Vec::new());
        }
        let Some(said) = self.entries.get_mut(path) else { return };
        // Said twice by one part, both count.
        let is_known = |said: &&mut Said| said.value.is_same(&value) && !said.by.contains(&part);
        match said.iter_mut().find(is_known) {
            Some(known) => known.by.push(part),
            None => said.push(Said { value, by: vec![part] }),
        }
    }

    /// Says that the optimizer's state of some parameters lies under a key path in a part.
    pub fn add_parameters(
        &mut self,
        path: &str,
        part: Part,
        names: impl IntoIterator<Item = Arc<str>>,
    ) {
        self.parameters.entry((path.into(), part)).or_default().extend(names);
    }

    /// Tells that there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of key paths.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// All key paths with what is said under each, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[Said])> {
        self.entries.iter().map(|(path, said)| (&**path, said.as_slice()))
    }

    /// Tells whether there is a key path that begins so.
    #[must_use]
    pub fn has(&self, start: &str) -> bool {
        let from = self.entries.range::<str, _>((Bound::Included(start), Bound::Unbounded)).next();
        from.is_some_and(|(path, _)| path.starts_with(start))
    }

    /// Tells whether an optimizer is in it: its groups, or tensors of its state.
    #[must_use]
    pub fn has_optimizer(&self) -> bool {
        self.entries.iter().any(|(path, said)| {
            groups::place_of(path).is_some()
                || path.starts_with("optimizer")
                    && said.iter().any(|said| matches!(said.value, StateValue::Tensor(_)))
        })
    }

    fn part_name(&self, part: Part) -> &str {
        self.parts.get(part as usize).map_or("", String::as_str)
    }
}
