//! The JSON result: canonical name -> metrics, nothing else.

use std::io::{self, Write};

use serde::Serializer;
use serde::ser::SerializeMap;
use serde_json::ser::PrettyFormatter;

use crate::compare::metrics::Metric;
use crate::compare::{Outcome, TensorComparison};

use super::Report;

/// Writes the result with an indent of four, as existing consumers read it.
///
/// Numbers are the shortest text that reads back to the same `f64`. A tensor that could not be read has no entry.
///
/// # Errors
/// The sink cannot be written to.
pub fn write(report: &Report, metrics: &[&Metric], out: &mut dyn Write) -> io::Result<()> {
    let formatter = PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, formatter);
    let compared = |tensor: &&TensorComparison| !matches!(tensor.outcome, Outcome::Unreadable(_));
    let mut map = serializer.serialize_map(None)?;
    for tensor in report.tensors.iter().filter(compared) {
        let entry: serde_json::Map<String, serde_json::Value> =
            metrics.iter().map(|metric| (metric.name.to_owned(), (metric.value)(tensor))).collect();
        map.serialize_entry(tensor.name.as_str(), &entry)?;
    }
    map.end()?;
    writeln!(out)
}
