//! The state of a run out of a pickle, as plain values: `args`, schedulers, random states, parameter groups.

use std::collections::BTreeMap;
use std::io;

use crate::base::dtype::Dtype;
use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::containers::torch::{TorchFile, Value, ValueId, Values};
use crate::storage::FileSet;
use crate::tensor::{ByteOrder, LogicalTensor};

use super::walk::Bounds;

/// Reads the arguments of a run: the attributes of a namespace, or a plain dict where a converter wrote one.
pub(super) fn args_of(
    torch: &TorchFile,
    args: ValueId,
    bounds: &mut Bounds,
) -> Option<BTreeMap<String, PlainValue>> {
    let values = torch.values();
    let mut reader = PlainReader { values, left: LIMITS.args, skips: &[] };
    let run_args = match values.mapping(args) {
        Some(items) => reader.entries(items, 0),
        None => reader.entries(values.attributes(args)?, 0),
    };
    if run_args.is_none() {
        bounds.problem("", OverLimit::new("bytes of args", LIMITS.args as u64));
    }
    run_args
}

/// Reads the entries of a dict that are state of the run.
pub(super) fn state_at(
    torch: &TorchFile,
    dict: ValueId,
    is_state: impl Fn(&str) -> bool,
) -> BTreeMap<String, PlainValue> {
    let values = torch.values();
    let entries = values.mapping(dict).into_iter().flatten();
    let named = entries.filter_map(|(key, value)| Some((values.as_str(key)?, value)));
    named
        .filter(|(key, _)| is_state(key) && key.len() <= LIMITS.name)
        .take(LIMITS.state_entries)
        .map(|(key, value)| (key.to_owned(), state_of(torch, value)))
        .collect()
}

/// Reads one value of the run's state; what is longer than any such value is left out as opaque.
pub(super) fn state_of(torch: &TorchFile, id: ValueId) -> PlainValue {
    state_without(torch, id, &[])
}

/// Reads one value of the run's state, all that stands under one of these keys left out, however deep.
pub(super) fn state_without(
    torch: &TorchFile,
    id: ValueId,
    skips: &'static [&'static str],
) -> PlainValue {
    let mut reader = PlainReader { values: torch.values(), left: LIMITS.state_value, skips };
    let too_long = || {
        PlainValue::Opaque(
            OverLimit::new("bytes in one value", LIMITS.state_value as u64).to_string(),
        )
    };
    reader.value(id, 0).unwrap_or_else(too_long)
}

/// Reads the first element of a tensor of the usual number types.
///
/// # Errors
/// It cannot be read.
pub(super) fn scalar(tensor: &LogicalTensor, files: &FileSet) -> io::Result<Option<PlainValue>> {
    let Some(piece) = tensor.pieces().first() else { return Ok(None) };
    let mut bytes = [0; 8];
    let size = usize::try_from(tensor.dtype().size()).map_err(io::Error::other)?;
    let Some(bytes) = bytes.get_mut(..size) else { return Ok(None) };
    files.read_exact_at(piece.file, bytes, piece.offset)?;
    if piece.byte_order == ByteOrder::Big {
        bytes.reverse();
    }
    Ok(number(tensor.dtype(), bytes))
}

fn number(dtype: Dtype, bytes: &[u8]) -> Option<PlainValue> {
    Some(match dtype {
        Dtype::Int64 => PlainValue::Int(i64::from_le_bytes(*bytes.first_chunk()?)),
        Dtype::Int32 => PlainValue::Int(i32::from_le_bytes(*bytes.first_chunk()?).into()),
        Dtype::Bool => PlainValue::Bool(bytes.first()? != &0),
        Dtype::Float64 => PlainValue::Float(f64::from_le_bytes(*bytes.first_chunk()?)),
        Dtype::Float32 => PlainValue::Float(f32::from_le_bytes(*bytes.first_chunk()?).into()),
        _ => return None,
    })
}

struct PlainReader<'a> {
    values: &'a Values,
    left: usize,
    skips: &'static [&'static str],
}

impl PlainReader<'_> {
    /// `None` where they are too long.
    fn entries(
        &mut self,
        items: impl Iterator<Item = (ValueId, ValueId)>,
        depth: usize,
    ) -> Option<BTreeMap<String, PlainValue>> {
        let mut entries = BTreeMap::new();
        for (key, value) in items {
            let name = match self.values.get(key) {
                Value::Str(name) => name.to_owned(),
                Value::Int(number) => number.to_string(),
                _ => continue,
            };
            self.spend(name.len())?;
            if self.skips.contains(&name.as_str()) {
                continue;
            }
            entries.insert(name, self.value(value, depth)?);
        }
        Some(entries)
    }

    fn value(&mut self, id: ValueId, depth: usize) -> Option<PlainValue> {
        self.spend(size_of::<PlainValue>())?;
        Some(match self.values.get(id) {
            Value::None => PlainValue::None,
            Value::Bool(value) => PlainValue::Bool(value),
            Value::Int(value) => PlainValue::Int(value),
            Value::Float(value) => PlainValue::Float(value),
            Value::Str(text) => {
                self.spend(text.len())?;
                PlainValue::Text(text.to_owned())
            }
            _ if depth >= LIMITS.state_depth => self.opaque(id),
            _ => {
                if let Some(members) = self.values.sequence(id) {
                    let members = members.map(|id| self.value(id, depth + 1));
                    PlainValue::List(members.collect::<Option<_>>()?)
                } else if let Some(items) = self.values.mapping(id) {
                    PlainValue::Map(self.entries(items, depth + 1)?)
                } else {
                    self.opaque(id)
                }
            }
        })
    }

    fn opaque(&self, id: ValueId) -> PlainValue {
        PlainValue::Opaque(self.values.class_name(id).unwrap_or_default())
    }

    fn spend(&mut self, bytes: usize) -> Option<()> {
        self.left = self.left.checked_sub(bytes)?;
        Some(())
    }
}
