//! The JSON result: canonical name -> metrics, nothing else.

use std::io::{self, Write};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::compare::{Outcome, TensorComparison};
use crate::names::is_control;

use super::Report;

/// Writes the result with an indent of four, as existing consumers read it.
///
/// Numbers are the shortest text that reads back to the same `f64`. A tensor that could not be read has no entry.
///
/// # Errors
/// The sink cannot be written to.
pub(super) fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let formatter = Escaping(PrettyFormatter::with_indent(b"    "));
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, formatter);
    let compared = |tensor: &&TensorComparison| !matches!(tensor.outcome, Outcome::Unreadable(_));
    let mut map = serializer.serialize_map(None)?;
    for tensor in report.comparisons().filter(compared) {
        let entry: serde_json::Map<String, Value> = report
            .metrics
            .iter()
            .map(|metric| (metric.name.to_owned(), (metric.value)(tensor)))
            .collect();
        map.serialize_entry(tensor.name.as_str(), &entry)?;
    }
    map.end()?;
    writeln!(out)
}

/// Writes any other value, with an indent of two.
pub(super) fn write_value(value: &impl Serialize, out: &mut dyn Write) -> io::Result<()> {
    let formatter = Escaping(PrettyFormatter::new());
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, formatter);
    value.serialize(&mut serializer)?;
    writeln!(out)
}

/// Writes as the formatter inside, but every character that a terminal would obey as an escape: JSON itself
/// asks for that below U+0020 only.
struct Escaping(PrettyFormatter<'static>);

/// Hands methods on to the formatter inside.
macro_rules! hand_on {
    ($($method:ident($($argument:ident: $kind:ty),*);)*) => {
        $(fn $method<W: ?Sized + Write>(&mut self, out: &mut W $(, $argument: $kind)*) -> io::Result<()> {
            self.0.$method(out $(, $argument)*)
        })*
    };
}

impl Formatter for Escaping {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        out: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for piece in fragment.split_inclusive(is_control) {
            let last = piece.chars().next_back().filter(|&last| is_control(last));
            out.write_all(&piece.as_bytes()[..piece.len() - last.map_or(0, char::len_utf8)])?;
            if let Some(last) = last {
                write!(out, "\\u{:04x}", u32::from(last))?;
            }
        }
        Ok(())
    }

    hand_on! {
        begin_array();
        end_array();
        begin_array_value(first: bool);
        end_array_value();
        begin_object();
        end_object();
        begin_object_key(first: bool);
        end_object_key();
        begin_object_value();
        end_object_value();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_escaped_and_reads_back() {
        let text = "a\u{7f}\u{9b}31m\u{202e}é\"\n";
        let mut out = Vec::new();
        let formatter = Escaping(PrettyFormatter::with_indent(b" "));
        let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
        assert!(serde::Serialize::serialize(&[text, ""], &mut serializer).is_ok());
        let json = String::from_utf8_lossy(&out);
        assert_eq!(json, "[\n \"a\\u007f\\u009b31m\\u202eé\\\"\\n\",\n \"\"\n]");
        assert_eq!(
            serde_json::from_str::<Vec<String>>(&json).ok(),
            Some(vec![text.into(), "".into()])
        );
    }
}
