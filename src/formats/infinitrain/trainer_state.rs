//! `trainer_state.json`, which is no valid JSON: InfiniTrain 0.6.0 writes no comma behind `vocab_size`.
//!
//! So it is read as InfiniTrain itself does (`infini_train/src/checkpoint/checkpoint.cc`, `ExtractNumberField`):
//! a quoted key, a colon, and a plain value up to a comma, a line's end or a brace; the first of a name counts.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::storage::{self, FileSet};

/// The name of the file.
pub(super) const FILE: &str = "trainer_state.json";

/// InfiniTrain's names of what layouts depend on, and those by which arguments of the run are asked for.
const FACTS: [(&str, &str); 4] = [
    ("n_layer", "num_layers"),
    ("n_head", "num_attention_heads"),
    ("tp_size", "tensor_model_parallel_size"),
    ("pp_size", "pipeline_model_parallel_size"),
];

/// The state of a run as it says itself, by InfiniTrain's names.
pub(super) type TrainerState = BTreeMap<String, PlainValue>;

/// Reads the file of a folder; `None` where there is none.
///
/// # Errors
/// It cannot be read, or there is nothing in it.
pub(super) fn read(folder: &Path, files: &mut FileSet) -> io::Result<Option<TrainerState>> {
    let path = folder.join(FILE);
    if !storage::is_there(&path)? {
        return Ok(None);
    }
    let text = files.read_small(&path, LIMITS.text_file)?;
    let fields = parse(&String::from_utf8_lossy(&text));
    if fields.is_empty() {
        return Err(io::Error::other("holds no `\"name\": value`"));
    }
    Ok(Some(fields))
}

/// The arguments of the run that layouts ask for.
pub(super) fn run_args(state: &TrainerState) -> BTreeMap<String, PlainValue> {
    let known = FACTS.iter().filter_map(|(own, fact)| Some((fact, state.get(*own)?)));
    known.map(|(fact, value)| ((*fact).to_owned(), value.clone())).collect()
}

/// An integer of the state.
pub(super) fn integer(state: &TrainerState, name: &str) -> Option<u64> {
    match state.get(name)? {
        PlainValue::Int(value) => u64::try_from(*value).ok(),
        _ => None,
    }
}

fn parse(text: &str) -> TrainerState {
    let mut fields = TrainerState::new();
    let mut rest = text;
    while let Some((key, behind)) = rest.split_once('"').and_then(|(_, text)| text.split_once('"'))
    {
        let Some(value) = behind.trim_start().strip_prefix(':') else {
            rest = behind;
            continue;
        };
        let value = value.trim_start();
        let (value, behind) = match value.strip_prefix('"').and_then(|text| text.split_once('"')) {
            Some((text, behind)) => (Some(PlainValue::Text(text.to_owned())), behind),
            None => {
                let end = value.find([',', '\n', '}', '"']).unwrap_or(value.len());
                let (word, behind) = value.split_at(end);
                (plain(word.trim()), behind)
            }
        };
        if let Some(value) = value {
            fields.entry(key.to_owned()).or_insert(value);
        }
        rest = behind;
    }
    fields
}

fn plain(word: &str) -> Option<PlainValue> {
    match (word, word.parse(), word.parse()) {
        ("true", ..) => Some(PlainValue::Bool(true)),
        ("false", ..) => Some(PlainValue::Bool(false)),
        ("null", ..) => Some(PlainValue::None),
        (_, Ok(integer), _) => Some(PlainValue::Int(integer)),
        (_, _, Ok(float)) => Some(PlainValue::Float(float)),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_missing_comma_is_no_loss() {
        let text = "{\n  \"vocab_size\": 24\n  \"global_step\": 3,\n  \"last_lr\": 1e-05,\n  \"pp_size\": 2\n}\n";
        let state = parse(text);
        assert_eq!(integer(&state, "vocab_size"), Some(24));
        assert_eq!(integer(&state, "global_step"), Some(3));
        assert_eq!(state["last_lr"], PlainValue::Float(1e-5));
        assert_eq!(integer(&state, "pp_size"), Some(2));
    }

    #[test]
    fn valid_json_on_one_line_is_read_as_well() {
        let state = parse(r#"{"tp_size": 2, "run": "a, b", "resumed": true, "pp_size":1}"#);
        assert_eq!(integer(&state, "tp_size"), Some(2));
        assert_eq!(state["run"], PlainValue::Text("a, b".to_owned()));
        assert_eq!(state["resumed"], PlainValue::Bool(true));
        assert_eq!(integer(&state, "pp_size"), Some(1));
    }

    #[test]
    fn the_first_of_a_name_counts() {
        assert_eq!(integer(&parse("{\"tp_size\": 2, \"tp_size\": 4}"), "tp_size"), Some(2));
    }

    proptest! {
        #[test]
        fn no_text_is_too_odd_to_be_read(text in ".{0,200}") {
            parse(&text);
        }

        #[test]
        fn no_piece_of_json_is_too_odd_to_be_read(text in "[\"{}:, \\n0-9a-z.-]{0,80}") {
            parse(&text);
        }
    }
}
