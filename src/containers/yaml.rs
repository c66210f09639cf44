//! A YAML file as plain values: what PyYAML's dumpers write, and nothing made of it but values.
//!
//! Tags name classes and functions in Python (`!!python/name:torch.bfloat16`); here they are words. A scalar with such a tag is opaque, a
//! list or a dict with one is that list or dict. Plain scalars are read by the core schema of YAML 1.2, which is what PyYAML
//! (6.0, `representer.py`) writes numbers, truth values and nothing in.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use granit_parser::{Event, Parser, ScalarStyle, Tag};
use thiserror::Error;

use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;

/// A text cannot be read as YAML.
#[derive(Debug, Error)]
pub enum YamlError {
    /// The text is no YAML.
    #[error("no YAML: {what}")]
    Syntax {
        /// The fault and its place.
        what: String,
    },
    /// Values are nested too deep, or are too many once the repeated ones are written out.
    #[error(transparent)]
    Over(#[from] OverLimit),
}

/// Reads the first document of a text; nothing is `None`.
///
/// # Errors
/// [`YamlError`] where it is no YAML, or asks for more than the limits.
pub fn read(text: &str) -> Result<PlainValue, YamlError> {
    let mut reader = Reader { open: Vec::new(), anchors: HashMap::new(), left: LIMITS.args };
    for event in Parser::new_from_str(text) {
        let (event, _) = event.map_err(|error| YamlError::Syntax { what: error.to_string() })?;
        if let Some(document) = reader.add(event)? {
            return Ok(document);
        }
    }
    Ok(PlainValue::None)
}

/// A list or a dict whose end has not come.
struct Open {
    value: Unfinished,
    anchor: usize,
    /// Bytes that were left where it began.
    left: usize,
}

enum Unfinished {
    List(Vec<PlainValue>),
    Map { entries: BTreeMap<String, PlainValue>, key: Option<String> },
}

struct Reader {
    open: Vec<Open>,
    /// Values that others may repeat, and the bytes that each comes to.
    anchors: HashMap<usize, (PlainValue, usize)>,
    /// Bytes that values may still take.
    left: usize,
}

impl Reader {
    /// The whole document, once it is there.
    fn add(&mut self, event: Event<'_>) -> Result<Option<PlainValue>, YamlError> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let before = self.left;
                self.spend(text.len())?;
                let value = match self.open.last() {
                    Some(Open { value: Unfinished::Map { key: None, .. }, .. }) => {
                        PlainValue::Text(text.into_owned())
                    }
                    _ => scalar(&text, style, tag.as_deref()),
                };
                self.put(value, anchor, before)
            }
            Event::SequenceStart(_, anchor, _) => self.begin(Unfinished::List(Vec::new()), anchor),
            Event::MappingStart(_, anchor, _) => {
                self.begin(Unfinished::Map { entries: BTreeMap::new(), key: None }, anchor)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { value, anchor, left }) = self.open.pop() else { return Ok(None) };
                let value = match value {
                    Unfinished::List(members) => PlainValue::List(members),
                    Unfinished::Map { entries, .. } => PlainValue::Map(entries),
                };
                self.put(value, anchor, left)
            }
            Event::Alias(anchor) => {
                let before = self.left;
                let (value, size) = match self.anchors.get(&anchor) {
                    Some((_, size)) if *size > before => return Err(too_much().into()),
                    Some((value, size)) => (value.clone(), *size),
                    // It stands within itself.
                    None => (PlainValue::Opaque("alias".to_owned()), 0),
                };
                self.spend(size)?;
                self.put(value, 0, before)
            }
            _ => Ok(None),
        }
    }

    fn begin(&mut self, value: Unfinished, anchor: usize) -> Result<Option<PlainValue>, YamlError> {
        if self.open.len() >= LIMITS.depth {
            return Err(OverLimit::new("levels of nesting", LIMITS.depth as u64).into());
        }
        self.open.push(Open { value, anchor, left: self.left });
        Ok(None)
    }

    /// Puts a finished value, which began with so many bytes left, into what it is a part of.
    fn put(
        &mut self,
        value: PlainValue,
        anchor: usize,
        before: usize,
    ) -> Result<Option<PlainValue>, YamlError> {
        self.spend(size_of::<PlainValue>())?;
        if anchor > 0 {
            let size = before - self.left;
            self.spend(size)?;
            self.anchors.insert(anchor, (value.clone(), size));
        }
        match self.open.last_mut().map(|open| &mut open.value) {
            None => return Ok(Some(value)),
            Some(Unfinished::List(members)) => members.push(value),
            Some(Unfinished::Map { entries, key }) => match (key.take(), value) {
                (Some(key), value) => {
                    entries.insert(key, value);
                }
                (None, PlainValue::Text(text)) => *key = Some(text),
                // A list or a dict is the key of nothing that is asked for.
                (None, _) => *key = Some(String::new()),
            },
        }
        Ok(None)
    }

    fn spend(&mut self, bytes: usize) -> Result<(), OverLimit> {
        self.left = self.left.checked_sub(bytes).ok_or_else(too_much)?;
        Ok(())
    }
}

fn too_much() -> OverLimit {
    OverLimit::new("bytes of values", LIMITS.args as u64)
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> PlainValue {
    match tag.map(|tag| (tag.core_suffix(), tag)) {
        Some((Some("str"), _)) => PlainValue::Text(text.to_owned()),
        Some((Some(_), _)) => plain(text),
        Some((None, tag)) => {
            let class: Cow<'_, str> = tag.suffix().into();
            PlainValue::Opaque(class.chars().take(LIMITS.class_name).collect())
        }
        None if style == ScalarStyle::Plain => plain(text),
        None => PlainValue::Text(text.to_owned()),
    }
}

/// A scalar by the core schema.
fn plain(text: &str) -> PlainValue {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return PlainValue::None,
        "true" | "True" | "TRUE" => return PlainValue::Bool(true),
        "false" | "False" | "FALSE" => return PlainValue::Bool(false),
        ".nan" | ".NaN" | ".NAN" => return PlainValue::Float(f64::NAN),
        ".inf" | "+.inf" => return PlainValue::Float(f64::INFINITY),
        "-.inf" => return PlainValue::Float(f64::NEG_INFINITY),
        _ => {}
    }
    // Rust's own words for numbers without digits are texts here.
    let is_number =
        text.trim_start_matches(['+', '-', '.']).starts_with(|c: char| c.is_ascii_digit());
    match (text.parse(), text.parse()) {
        (Ok(integer), _) if is_number => PlainValue::Int(integer),
        (_, Ok(float)) if is_number => PlainValue::Float(float),
        _ => PlainValue::Text(text.to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn value(text: &str) -> PlainValue {
        read(text).unwrap()
    }

    fn entries(text: &str) -> BTreeMap<String, PlainValue> {
        value(text).as_map().unwrap().clone()
    }

    #[test]
    fn values_are_those_that_python_wrote() {
        let text = "model:\n  _target_: a.b.C\n  fp8: null\n  layernorm_epsilon: 1.0e-05\n  moe_layer_freq:\n  - 0\n  - 1\n  \
                    name: 'true'\n  num_layers: 4\n  seed: -.inf\n  tied: false\n  word: infinity\n? [a]\n: 1\n";
        let root = entries(text);
        let model = root["model"].as_map().unwrap();
        assert_eq!(model["_target_"], PlainValue::Text("a.b.C".to_owned()));
        assert_eq!(model["fp8"], PlainValue::None);
        assert_eq!(model["layernorm_epsilon"], PlainValue::Float(1e-5));
        assert_eq!(
            model["moe_layer_freq"],
            PlainValue::List(vec![PlainValue::Int(0), PlainValue::Int(1)])
        );
        assert_eq!(model["name"], PlainValue::Text("true".to_owned()));
        assert_eq!(model["num_layers"], PlainValue::Int(4));
        assert_eq!(model["seed"], PlainValue::Float(f64::NEG_INFINITY));
        assert_eq!(model["tied"], PlainValue::Bool(false));
        assert_eq!(model["word"], PlainValue::Text("infinity".to_owned()));
        assert_eq!(value(""), PlainValue::None);
        assert_eq!(value("12"), PlainValue::Int(12));
    }

    #[test]
    fn tags_are_words() {
        let text = "a: !!python/name:torch.bfloat16 ''\nb: !!python/object:os.system {c: 1}\nd: !!str 5\n\
                    e: !!python/tuple [1]\nf: !!python/object/apply:os.system ['true']\n";
        let root = entries(text);
        assert_eq!(root["a"], PlainValue::Opaque("python/name:torch.bfloat16".to_owned()));
        assert_eq!(root["b"].as_map().unwrap()["c"], PlainValue::Int(1));
        assert_eq!(root["d"], PlainValue::Text("5".to_owned()));
        assert_eq!(root["e"], PlainValue::List(vec![PlainValue::Int(1)]));
    }

    #[test]
    fn repeated_values_are_written_out_and_paid_for() {
        let root = entries("a: &x [1, 2]\nb: *x\nc: &y [*y]\n");
        assert_eq!(root["a"], root["b"]);
        assert_eq!(root["c"], PlainValue::List(vec![PlainValue::Opaque("alias".to_owned())]));
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..20 {
            let all = vec![format!("*a{}", level - 1); 10].join(", ");
            bomb.push_str(&format!("a{level}: &a{level} [{all}]\n"));
        }
        assert!(matches!(read(&bomb), Err(YamlError::Over(_))));
    }

    #[test]
    fn damage_and_depth_are_errors() {
        for text in ["a: [1, 2", "a: b: c", "*x", "a: 'b"] {
            assert!(matches!(read(text), Err(YamlError::Syntax { .. })), "{text}");
        }
        assert!(read(&"[".repeat(100_000)).is_err());
        let nested =
            (0..100).fold(String::new(), |text, depth| format!("{text}{}a:\n", " ".repeat(depth)));
        assert!(matches!(read(&nested), Err(YamlError::Over(_))));
    }
}
