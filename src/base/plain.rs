//! Plain values: what a checkpoint says of its run, without any class or code behind it.

use std::collections::BTreeMap;

use serde_json::Value;

/// A value as a pickle, a JSON or a YAML file holds it, once nothing can be executed any more.
#[derive(Debug, Clone, PartialEq)]
pub enum PlainValue {
    /// Python's `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A floating point number.
    Float(f64),
    /// A text.
    Text(String),
    /// A list, a tuple or a set.
    List(Vec<Self>),
    /// A dict, or the attributes of a namespace, by name.
    Map(BTreeMap<String, Self>),
    /// Anything else, by its class.
    Opaque(String),
}

impl PlainValue {
    /// The entries of a dict.
    #[must_use]
    pub fn as_map(&self) -> Option<&BTreeMap<String, Self>> {
        match self {
            Self::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// A text.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// An integer from 0 on.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Int(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }
}

/// JSON is nested at most 128 levels deep here: what is deeper, its reader refuses.
impl From<Value> for PlainValue {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Self::None,
            Value::Bool(value) => Self::Bool(value),
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(integer), _) => Self::Int(integer),
                (None, Some(float)) => Self::Float(float),
                (None, None) => Self::Opaque("number".to_owned()),
            },
            Value::String(text) => Self::Text(text),
            Value::Array(members) => Self::List(members.into_iter().map(Self::from).collect()),
            Value::Object(entries) => {
                Self::Map(entries.into_iter().map(|(key, value)| (key, value.into())).collect())
            }
        }
    }
}
