//! What the profiles of a comparison compare, and what they ignore.

use std::io::{self, Write};

use crate::state::{Profile, When};

use super::Style;

/// Columns of a line.
const COLUMNS: usize = 80;

/// Writes every profile, and the table of each that ignores keys of state; `chosen` is marked.
///
/// # Errors
/// The sink cannot be written to.
pub fn write(chosen: Profile, style: Style, out: &mut dyn Write) -> io::Result<()> {
    for profile in Profile::ALL {
        let mark = if profile == chosen { " (chosen)" } else { "" };
        writeln!(out, "{}: {}{mark}", style.heading(profile.name()), profile.contents())?;
    }
    for profile in Profile::ALL {
        if profile.ignored().is_empty() {
            continue;
        }
        writeln!(out, "\n{}", style.heading(&format!("ignored by {}", profile.name())))?;
        for row in profile.ignored() {
            wrapped(&row.keys.join(", "), "", out)?;
            if row.when == When::PartsDiffer {
                writeln!(out, "   only where the two layouts have other parts")?;
            }
            wrapped(row.reason, "   ", out)?;
            wrapped(&format!("seen: {}", row.seen), "   ", out)?;
        }
        writeln!(
            out,
            "\n* stands for any characters. More keys: [state] ignore = [...] in --rules FILE."
        )?;
    }
    Ok(())
}

/// Writes a text in lines that fit.
fn wrapped(text: &str, indent: &str, out: &mut dyn Write) -> io::Result<()> {
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && indent.len() + line.len() + 1 + word.len() > COLUMNS {
            writeln!(out, "{indent}{line}")?;
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    writeln!(out, "{indent}{line}")
}
