//! Why tensors differ, for people: a line for each cause, in the order of the model.

use std::io;

use super::document::Cause;
use super::units::{counted, grouped};
use super::{Report, Screen};

/// Columns of a screen.
const WIDTH: usize = 80;

/// Writes the causes; nothing where there is none.
pub(super) fn write(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let Some(causes) = &report.causes else { return Ok(()) };
    let (explained, searched) =
        (grouped(causes.explained() as u64), counted(causes.searched, "tensor"));
    let title = format!("why: {explained} of {searched} explained exactly");
    screen.list(&title, &causes.found, |cause| wrapped(&Cause::of(cause).line()))?;
    if let Some(first) = causes.skipped.first() {
        let skipped = counted(causes.skipped.len(), "tensor");
        let line = format!(
            "too many rows and columns to look for their order: {skipped}, the first is {first}"
        );
        writeln!(screen.out, "\n{}", wrapped(&line))?;
    }
    Ok(())
}

/// A line cut at spaces, what follows indented.
fn wrapped(line: &str) -> String {
    const INDENT: &str = "   ";
    let mut text = String::new();
    let mut width = 0;
    for word in line.split(' ') {
        let length = word.chars().count();
        if width > 0 && width + 1 + length > WIDTH {
            text.push('\n');
            text.push_str(INDENT);
            width = INDENT.len();
        } else if width > 0 {
            text.push(' ');
            width += 1;
        }
        text.push_str(word);
        width += length;
    }
    text
}
