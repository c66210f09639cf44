//! The contents of a checkpoint, for people and as JSON. No value is read for it.

use std::io::{self, Write};

use serde_json::{Value, json};

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, Entry, Section};
use crate::names::{Name, printable};
use crate::tensor::{ByteOrder, LogicalTensor, Piece};

use super::Style;
use super::json::write_value;
use super::units::{bytes, counted, grouped, shape};

/// A name longer than this does not make the lines of the others longer.
pub(super) const WIDEST: usize = 120;

/// Writes a line for every tensor, and what is known of the whole.
///
/// # Errors
/// The sink cannot be written to.
pub fn write_screen(catalog: &Catalog, style: Style, out: &mut dyn Write) -> io::Result<()> {
    let origin = &catalog.origin;
    let row = |key: &str, value: &str| format!("{}  {value}", style.heading(&format!("{key:9}")));
    writeln!(out, "{}", row("path", &printable(&origin.resolved.to_string_lossy())))?;
    writeln!(out, "{}", row("format", origin.format))?;
    if !origin.layout.is_empty() {
        writeln!(out, "{}", row("layout", &origin.layout))?;
    }
    if let Some(writer) = &origin.writer {
        writeln!(out, "{}", row("writer", &printable(writer)))?;
    }
    if let Some(iteration) = origin.iteration {
        writeln!(out, "{}", row("iteration", &iteration.to_string()))?;
    }
    let size = catalog.files.total_bytes();
    let files = format!("{}, {}", counted(origin.shards, "shard"), bytes(size));
    writeln!(out, "{}", row("files", &files))?;
    let numels = catalog.tensors.values().map(|entry| entry.tensor.numel());
    let elements = numels.fold(0, u64::saturating_add);
    let tensors =
        format!("{}, {} elements", counted(catalog.tensors.len(), "tensor"), grouped(elements));
    writeln!(out, "{}", row("tensors", &tensors))?;
    let count = |section: Section| (section.name(), catalog.count(section));
    let sections = Section::OF_TENSORS.map(count).into_iter().filter(|(_, count)| *count > 0);
    let sections: Vec<String> = sections.map(|(name, count)| format!("{name} {count}")).collect();
    if sections.len() > 1 {
        writeln!(out, "{}", row("sections", &sections.join(", ")))?;
    }
    if origin.left_out > 0 {
        writeln!(out, "{}", row("left out", &counted(origin.left_out, "buffer")))?;
    }
    if !catalog.state.is_empty() {
        let entries = catalog.state.iter().map(|(key, entry)| entry_text(key, &entry.value));
        writeln!(out, "{}", row("state", &entries.collect::<Vec<_>>().join(", ")))?;
    }
    for note in &catalog.notes {
        writeln!(out, "{}", row("note", &printable(note)))?;
    }
    let width = catalog.tensors.keys().map(|name| name.as_str().len()).max().unwrap_or(0);
    let width = width.clamp(6, WIDEST);
    let heading = format!("{:width$}  {:15}  {:20}  shards", "tensor", "dtype", "shape");
    writeln!(out, "\n{}", style.heading(&heading))?;
    for (name, Entry { tensor, .. }) in &catalog.tensors {
        let shape = shape(tensor.shape());
        let shards = shards_text(catalog, tensor);
        writeln!(out, "{name:width$}  {:15}  {shape:20}  {shards}", tensor.dtype())?;
    }
    for (name, tied) in &catalog.tied {
        writeln!(out, "{name:width$}  tied to {}", tied.to)?;
    }
    Ok(())
}

/// A key of the state with its value, where that is short.
fn entry_text(key: &str, fact: &PlainValue) -> String {
    let key = printable(key);
    match fact {
        PlainValue::Bool(value) => format!("{key} {value}"),
        PlainValue::Int(value) => format!("{key} {value}"),
        PlainValue::Float(value) => format!("{key} {value}"),
        PlainValue::Text(text) if text.len() <= 40 => format!("{key} {}", printable(text)),
        PlainValue::Map(entries) => format!("{key} ({})", counted(entries.len(), "value")),
        PlainValue::None | PlainValue::Text(_) | PlainValue::List(_) | PlainValue::Opaque(_) => {
            key.into_owned()
        }
    }
}

fn json_of(fact: &PlainValue) -> Value {
    match fact {
        PlainValue::None => Value::Null,
        PlainValue::Bool(value) => json!(value),
        PlainValue::Int(value) => json!(value),
        // JSON has no NaN and no infinity; a reader of the state still wants to know.
        PlainValue::Float(value) if !value.is_finite() => json!(value.to_string()),
        PlainValue::Float(value) => json!(value),
        PlainValue::Text(text) => json!(text),
        PlainValue::List(members) => members.iter().map(json_of).collect(),
        PlainValue::Map(entries) => {
            entries.iter().map(|(key, fact)| (key.clone(), json_of(fact))).collect()
        }
        PlainValue::Opaque(class) => json!({ "class": class }),
    }
}

/// Number of shards that hold it and of those that hold it again, and the place of the first one.
fn shards_text(catalog: &Catalog, tensor: &LogicalTensor) -> String {
    let first = tensor.pieces().first().map_or(tensor.source().file, |piece| piece.file);
    let label = catalog.files.shard_label(first);
    let mut files: Vec<_> = tensor.pieces().iter().map(|piece| piece.file).collect();
    files.sort_unstable();
    files.dedup();
    let copies = tensor.replicas().len();
    let copies = match copies {
        0 => String::new(),
        1 => " + 1 copy".to_owned(),
        _ => format!(" + {copies} copies"),
    };
    format!("{}{copies}  {}", files.len(), printable(&label))
}

/// Writes the same as JSON, with the place of every piece.
///
/// # Errors
/// The sink cannot be written to.
pub fn write_json(catalog: &Catalog, out: &mut dyn Write) -> io::Result<()> {
    let origin = &catalog.origin;
    let piece = |piece: &Piece| {
        json!({
            "file": catalog.files.path(piece.file),
            "offset": piece.offset,
            "offsets": piece.extent.offsets,
            "sizes": piece.extent.sizes,
            "strides": piece.strides,
            "byte_order": if piece.byte_order == ByteOrder::Big { "big" } else { "little" },
        })
    };
    let tensor = |(name, Entry { tensor, .. }): (&Name, &Entry)| {
        let replicas = tensor.replicas().iter().map(|replica| {
            let pieces: Vec<Value> = replica.pieces.iter().map(piece).collect();
            json!({ "stored_name": &*replica.source.name, "pieces": pieces })
        });
        let value = json!({
            "dtype": tensor.dtype().name(),
            "shape": tensor.shape(),
            "stored_name": &*tensor.source().name,
            "pieces": tensor.pieces().iter().map(piece).collect::<Vec<_>>(),
            "replicas": replicas.collect::<Vec<_>>(),
        });
        (name.as_str().to_owned(), value)
    };
    let tied = |(name, tied): (&Name, &crate::catalog::Tied)| {
        (name.as_str().to_owned(), json!(tied.to.as_str()))
    };
    let whole = json!({
        "path": origin.resolved,
        "format": origin.format,
        "layout": origin.layout,
        "writer": origin.writer,
        "iteration": origin.iteration,
        "shards": origin.shards,
        "left_out": origin.left_out,
        "notes": catalog.notes,
        "problems": catalog.problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "state": catalog.state.iter().map(|(key, entry)| (key.clone(), json_of(&entry.value))).collect::<Value>(),
        "tied": catalog.tied.iter().map(tied).collect::<serde_json::Map<_, _>>(),
        "tensors": catalog.tensors.iter().map(tensor).collect::<serde_json::Map<_, _>>(),
    });
    write_value(&whole, out)
}
