//! The names on one side only, with their likely partners.

use std::collections::BTreeMap;
use std::io;

use crate::base::side::Side;
use crate::compare::Suggestion;
use crate::names::{Name, printable};

use super::fit::COLUMNS;
use super::units::{counted, grouped};
use super::{Report, Screen};

/// Writes the names that only one side has; a likely partner stands with the name of `a`.
pub(super) fn write(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let style = screen.style;
    let partners = report.suggested.partners.iter();
    let partners: BTreeMap<&Name, &Suggestion> =
        partners.map(|found| (&found.names[Side::A], found)).collect();
    for (side, names) in Side::BOTH.iter().zip(&report.only_in) {
        let mut title = format!("only in {side}: {}", counted(names.len(), "tensor"));
        if *side == Side::A && !partners.is_empty() {
            let count = grouped(partners.len() as u64);
            title.push_str(&format!(", {count} of them likely under another name in b"));
        }
        screen.list(&title, names, |name| {
            let partner = partners.get(name).filter(|_| *side == Side::A).map(|found| {
                let first = if found.is_whole { "" } else { ", by its first values" };
                let title = format!("in b{first}: ");
                let room = COLUMNS - 3 - title.len();
                let name = style.shortened(&found.names[Side::B].to_string(), room);
                format!("\n   {}", style.faint(&format!("{title}{name}")))
            });
            let name = style.shortened(&name.to_string(), COLUMNS);
            format!("{name}{}", partner.unwrap_or_default())
        })?;
    }
    Ok(())
}

/// Remarks on likely partners: the rules that would bring them together.
pub(super) fn remarks(report: &Report, rows: usize) -> Vec<String> {
    let mut remarks = Vec::new();
    let found = &report.suggested;
    if !found.rules.is_empty() {
        remarks.push("to compare what has the same values under other names:".to_owned());
        let shown = found.rules.iter().take(rows);
        remarks.extend(shown.map(|rule| format!("   --map '{}'", printable(rule))));
        if found.rules.len() > rows {
            remarks.push(format!("   and {} more", found.rules.len() - rows));
        }
    }
    if found.left_out > 0 {
        let count = counted(found.left_out, "tensor");
        remarks.push(format!("not looked at for a likely partner: {count}"));
    }
    remarks
}
