//! Why tensors differ, for people: a line for each cause, in the order of the model.

use std::io;

use super::document::Cause;
use super::units::{counted, grouped};
use super::{Report, Screen};

/// Writes the causes; nothing where there is none.
pub(super) fn write(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let Some(causes) = &report.causes else { return Ok(()) };
    let (explained, searched) =
        (grouped(causes.explained() as u64), counted(causes.searched, "tensor"));
    let title = format!("why: {explained} of {searched} explained exactly");
    let style = screen.style;
    screen.list(&title, &causes.found, |cause| style.wrapped(&Cause::of(cause).line(), 3))?;
    if let Some(first) = causes.skipped.first() {
        let skipped = counted(causes.skipped.len(), "tensor");
        let line = format!(
            "too many rows and columns to look for their order: {skipped}, the first is {first}"
        );
        writeln!(screen.out, "\n{}", style.wrapped(&line, 3))?;
    }
    Ok(())
}
