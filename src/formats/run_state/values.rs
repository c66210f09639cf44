//! A pickle, JSON or YAML -> values without parts under key paths.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;
use thiserror::Error;

use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::catalog::{Problem, Section};
use crate::containers::torch::{Call, DTensorError, RebuildError, TorchFile, Value, ValueId};
use crate::formats::nest::key_text;
use crate::formats::walk::joined;
use crate::state::StateValue;
use crate::storage::FileSet;
use crate::tensor::{LogicalTensor, StoredTensor};

use super::claims::Claims;

/// What one part of a checkpoint says.
#[derive(Default)]
pub(super) struct PartState {
    /// Values by key path.
    pub entries: Vec<(String, StateValue)>,
    /// The parameters whose optimizer state lies under a key path.
    pub parameters: Vec<(String, BTreeSet<Arc<str>>)>,
    /// What could not be read.
    pub problems: Vec<Problem>,
    /// Bytes of key paths and values.
    pub bytes: usize,
}

/// More of them than [`LIMITS`] allow.
const OVER: OverLimit = OverLimit::new("bytes of state", LIMITS.state_bytes as u64);

/// Levels of lists, dicts and objects.
const OVER_DEPTH: OverLimit = OverLimit::new("levels of state", LIMITS.depth as u64);

/// Attributes and options are all that there is to these classes.
const TRANSPARENT: [&str; 2] = ["argparse.Namespace", "types.SimpleNamespace"];

impl PartState {
    fn push(&mut self, path: &str, value: StateValue) -> Result<(), OverLimit> {
        let own = match &value {
            StateValue::Text(text) | StateValue::Class(text) => text.len(),
            StateValue::Bytes(bytes) | StateValue::BigInt(bytes) => bytes.len(),
            _ => size_of::<StateValue>(),
        };
        self.bytes = self.bytes.saturating_add(path.len() + own);
        if self.bytes > LIMITS.state_bytes {
            return Err(OVER);
        }
        self.entries.push((path.to_owned(), value));
        Ok(())
    }

    /// Adds a plain value.
    pub(super) fn add_plain(&mut self, path: &str, value: &PlainValue) -> Result<(), OverLimit> {
        match value {
            PlainValue::None => self.push(path, StateValue::None),
            PlainValue::Bool(value) => self.push(path, StateValue::Bool(*value)),
            PlainValue::Int(value) => self.push(path, StateValue::Int(*value)),
            PlainValue::Float(value) => self.push(path, StateValue::Float(*value)),
            PlainValue::Text(text) => self.push(path, StateValue::Text(text.as_str().into())),
            PlainValue::Opaque(class) => self.push(path, StateValue::Class(class.as_str().into())),
            PlainValue::List(members) if members.is_empty() => self.push(path, StateValue::Empty),
            PlainValue::Map(entries) if entries.is_empty() => self.push(path, StateValue::Empty),
            PlainValue::List(members) => {
                let mut members = members.iter().enumerate();
                members.try_for_each(|(at, member)| {
                    self.add_plain(&joined(path, &at.to_string()), member)
                })
            }
            PlainValue::Map(entries) => entries
                .iter()
                .try_for_each(|(key, value)| self.add_plain(&joined(path, key), value)),
        }
    }

    /// Adds a value of JSON; its reader bounds how deep it is.
    pub(super) fn add_json(&mut self, path: &str, value: &Json) -> Result<(), OverLimit> {
        match value {
            Json::Null => self.push(path, StateValue::None),
            Json::Bool(value) => self.push(path, StateValue::Bool(*value)),
            Json::Number(number) => {
                let value = match (number.as_i64(), number.as_u64(), number.as_f64()) {
                    (Some(int), ..) => StateValue::Int(int),
                    (None, Some(int), _) => StateValue::BigInt(int.to_le_bytes().as_slice().into()),
                    (None, None, float) => StateValue::Float(float.unwrap_or(f64::NAN)),
                };
                self.push(path, value)
            }
            Json::String(text) => self.push(path, StateValue::Text(text.as_str().into())),
            Json::Array(members) if members.is_empty() => self.push(path, StateValue::Empty),
            Json::Object(entries) if entries.is_empty() => self.push(path, StateValue::Empty),
            Json::Array(members) => {
                let mut members = members.iter().enumerate();
                members.try_for_each(|(at, member)| {
                    self.add_json(&joined(path, &at.to_string()), member)
                })
            }
            Json::Object(entries) => {
                entries.iter().try_for_each(|(key, value)| self.add_json(&joined(path, key), value))
            }
        }
    }

    /// Adds bytes as they are.
    pub(super) fn add_bytes(&mut self, path: &str, bytes: &[u8]) -> Result<(), OverLimit> {
        self.push(path, StateValue::Bytes(bytes.into()))
    }
}

/// Reads all of a torch file that is neither the model nor a tensor of the optimizer. `place` is the file, as a user knows it.
pub(super) fn of_torch(
    torch: &TorchFile,
    place: &Path,
    prefix: &str,
    files: &FileSet,
    claims: &Claims,
) -> PartState {
    let mut reader =
        TorchReader { torch, files, claims, inside: Vec::new(), state: PartState::default() };
    if let Err(over) = reader.top(prefix) {
        // What was read so far is a part of nobody knows what.
        reader.state.entries.clear();
        reader.state.problems.push(Problem::of_whole(format!("the state in it has {over}")));
    }
    let mut state = reader.state;
    state.problems = state.problems.into_iter().map(|problem| problem.in_file(place)).collect();
    state
}

struct TorchReader<'a> {
    torch: &'a TorchFile,
    files: &'a FileSet,
    claims: &'a Claims,
    /// The values that the walk is in, which may hold one another.
    inside: Vec<ValueId>,
    state: PartState,
}

/// Reason why a tensor cannot be read.
#[derive(Debug, Error)]
enum TensorError {
    #[error(transparent)]
    Rebuild(#[from] RebuildError),
    #[error(transparent)]
    Distributed(#[from] DTensorError),
}

/// The section of a tensor, where it is one of the catalog's.
enum Claim {
    Section(Section),
    Free,
}

impl TorchReader<'_> {
    /// Reads what was saved; an entry at the top that holds weights is the model.
    fn top(&mut self, prefix: &str) -> Result<(), OverLimit> {
        let root = self.torch.root();
        let Some(entries) = self.torch.values().mapping(root) else {
            return self.value(prefix, root, 0);
        };
        let entries: Vec<(ValueId, ValueId)> = entries.collect();
        if entries.iter().any(|(_, value)| {
            matches!(self.claim_of(*value), Ok(Some(Claim::Section(Section::Model))))
        }) {
            return Ok(());
        }
        if entries.is_empty() && !prefix.is_empty() {
            return self.state.push(prefix, StateValue::Empty);
        }
        for (key, value) in entries {
            let path = joined(prefix, &key_text(self.torch, key));
            let (values, parameters) = (self.state.entries.len(), self.state.parameters.len());
            let problems = self.state.problems.len();
            self.value(&path, value, 0)?;
            let is_weight = |(_, names): &(String, BTreeSet<Arc<str>>)| {
                names.iter().any(|name| Section::of(name) == Section::Model)
            };
            let is_model = MODELS.iter().any(|start| key_text(self.torch, key).starts_with(start));
            if is_model && self.state.parameters[parameters..].iter().any(is_weight) {
                self.state.entries.truncate(values);
                self.state.parameters.truncate(parameters);
                self.state.problems.truncate(problems);
            }
        }
        Ok(())
    }

    /// The section that a tensor belongs to; `None` where this is no tensor.
    ///
    /// # Errors
    /// It is one that is damaged.
    fn claim_of(&self, id: ValueId) -> Result<Option<Claim>, TensorError> {
        let Some(tensor) = self.tensor(id)? else { return Ok(None) };
        let tensor = LogicalTensor::from_stored(&tensor, "");
        let names = self.claims.names_in(&tensor, self.files);
        Ok(Some(names.first().map_or(Claim::Free, |name| Claim::Section(Section::of(name)))))
    }

    /// The tensor that a value stands for, or the part of a `DTensor` that is in this file; `None` where it is neither.
    ///
    /// # Errors
    /// It is one that is damaged, or laid out in a way that is not read.
    fn tensor(&self, id: ValueId) -> Result<Option<StoredTensor>, TensorError> {
        match self.torch.dtensor(id)? {
            Some(part) => Ok(Some(part.local)),
            None => Ok(self.torch.tensor(id)?),
        }
    }

    fn value(&mut self, path: &str, id: ValueId, depth: usize) -> Result<(), OverLimit> {
        if depth > LIMITS.depth {
            return Err(OVER_DEPTH);
        }
        let values = self.torch.values();
        let leaf = match values.get(id) {
            Value::None => StateValue::None,
            Value::Bool(value) => StateValue::Bool(value),
            Value::Int(value) => StateValue::Int(value),
            Value::BigInt(bytes) => StateValue::BigInt(bytes.into()),
            Value::Float(value) => StateValue::Float(value),
            Value::Str(text) => StateValue::Text(text.into()),
            Value::Bytes(bytes) => StateValue::Bytes(bytes.into()),
            Value::Global { .. } => StateValue::Class(self.class_name(id)),
            Value::Persistent(_) => {
                self.problem(path, "a storage that no tensor is made of is not compared");
                return Ok(());
            }
            _ if self.inside.contains(&id) => StateValue::Class("itself".into()),
            _ => {
                self.inside.push(id);
                let read = self.parts(path, id, depth);
                self.inside.pop();
                return read;
            }
        };
        self.state.push(path, leaf)
    }

    /// Reads a value with parts.
    fn parts(&mut self, path: &str, id: ValueId, depth: usize) -> Result<(), OverLimit> {
        let values = self.torch.values();
        if let Some(bytes) = values.as_bytes(id) {
            return self.state.push(path, StateValue::Bytes((&*bytes).into()));
        }
        match self.tensor(id) {
            Ok(None) => {}
            Ok(Some(tensor)) => {
                let tensor = LogicalTensor::from_stored(&tensor, path);
                let names = self.claims.names_in(&tensor, self.files);
                if names.is_empty() {
                    return self.state.push(path, StateValue::Tensor(tensor.into()));
                }
                let owner = path.rsplit_once('.').map_or("", |(owner, _)| owner);
                let own = names.iter().map(|name| parameter_of(name)).collect();
                let is_model = names.iter().any(|name| Section::of(name) == Section::Model);
                // Weights keep their names, by which the model is known.
                self.state.parameters.push((owner.to_owned(), if is_model { names } else { own }));
                return Ok(());
            }
            Err(error) => {
                self.problem(path, error);
                return Ok(());
            }
        }
        let call = match values.get(id) {
            Value::Call(call) => Some(call),
            _ => None,
        };
        let state = call.and_then(|call| call.state);
        if let Some(entries) = values.mapping(id) {
            let entries: Vec<(ValueId, ValueId)> = entries.collect();
            if entries.is_empty() && state.is_none() {
                return self.state.push(path, StateValue::Empty);
            }
            for (key, value) in entries {
                let key = key_text(self.torch, key);
                self.value(&joined(path, &key), value, depth + 1)?;
            }
            return state
                .map_or(Ok(()), |state| self.value(&joined(path, "__state__"), state, depth + 1));
        }
        if let Some(members) = values.sequence(id) {
            let members: Vec<ValueId> = members.collect();
            if members.is_empty() {
                return self.state.push(path, StateValue::Empty);
            }
            for (at, member) in members.into_iter().enumerate() {
                self.value(&joined(path, &at.to_string()), member, depth + 1)?;
            }
            return Ok(());
        }
        match call {
            Some(call) => self.object(path, id, &call, depth),
            None => self.state.push(path, StateValue::Class("unknown".into())),
        }
    }

    /// Reads an object: its class, what it was made from, its attributes, its members.
    fn object(
        &mut self,
        path: &str,
        id: ValueId,
        call: &Call<'_>,
        depth: usize,
    ) -> Result<(), OverLimit> {
        let values = self.torch.values();
        let class = self.class_name(id);
        let args: Vec<ValueId> = values.args(call).to_vec();
        let has_more = call.state.is_some()
            || call.kwargs.is_some()
            || !call.items.is_empty()
            || !call.appends.is_empty();
        let texts: Option<Vec<String>> = args.iter().map(|arg| self.scalar_text(*arg)).collect();
        if let (Some(texts), false) = (&texts, has_more) {
            let text = format!("{class}({})", texts.join(", "));
            return self.state.push(path, StateValue::Class(text.into()));
        }
        if !TRANSPARENT.contains(&&*class) {
            self.state.push(path, StateValue::Class(class))?;
        }
        // What says no more than how the object is made has no value of its own.
        let says_much =
            |id: &ValueId| !matches!(values.get(*id), Value::None | Value::Global { .. });
        if args.iter().any(says_much) {
            for (at, arg) in args.iter().enumerate() {
                self.value(&joined(path, &format!("__args__.{at}")), *arg, depth + 1)?;
            }
        }
        if let Some(kwargs) = call.kwargs {
            self.value(&joined(path, "__kwargs__"), kwargs, depth + 1)?;
        }
        match values.attributes(id) {
            Some(attributes) => {
                let attributes: Vec<(ValueId, ValueId)> = attributes.collect();
                for (key, value) in attributes {
                    let key = key_text(self.torch, key);
                    self.value(&joined(path, &key), value, depth + 1)?;
                }
            }
            None => {
                if let Some(state) = call.state {
                    self.value(&joined(path, "__state__"), state, depth + 1)?;
                }
            }
        }
        for (at, member) in call.appends.iter().enumerate() {
            self.value(&joined(path, &at.to_string()), *member, depth + 1)?;
        }
        for (key, value) in call.items {
            let key = key_text(self.torch, *key);
            self.value(&joined(path, &key), *value, depth + 1)?;
        }
        Ok(())
    }

    /// A value without parts as text; `None` where it has some.
    fn scalar_text(&self, id: ValueId) -> Option<String> {
        let value = match self.torch.values().get(id) {
            Value::None => StateValue::None,
            Value::Bool(value) => StateValue::Bool(value),
            Value::Int(value) => StateValue::Int(value),
            Value::Float(value) => StateValue::Float(value),
            Value::Str(text) => StateValue::Text(text.into()),
            Value::Global { .. } => StateValue::Class(self.class_name(id)),
            _ => return None,
        };
        Some(value.text())
    }

    fn class_name(&self, id: ValueId) -> Arc<str> {
        self.torch.values().class_name(id).unwrap_or_else(|| "an object".to_owned()).into()
    }

    fn problem<'e>(&mut self, path: &str, cause: impl Into<Box<dyn std::error::Error + 'e>>) {
        if self.state.problems.len() < LIMITS.problems {
            self.state.problems.push(Problem::of_tensor(path, cause));
        }
    }
}

/// Beginnings of the keys that models stand under at the top of a file (Megatron-LM `model`, `model0`; DeepSpeed `module`; Lightning
/// `state_dict`; torch's examples `model_state_dict`).
const MODELS: [&str; 3] = ["model", "module", "state_dict"];

/// The parameter that a tensor of the optimizer is about: `optimizer.<state>.<parameter>`.
fn parameter_of(name: &str) -> Arc<str> {
    let rest = name.strip_prefix("optimizer.").and_then(|rest| rest.split_once('.'));
    rest.map_or(name, |(_, parameter)| parameter).into()
}
