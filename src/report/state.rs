//! The state of the run on the screen: the keys that differ with both values, and what was not held against it.

use std::io;

use crate::judge::state::StateJudgement;
use crate::judge::verdict::Verdict;
use crate::names::printable;
use crate::state::{Difference, DifferenceKind};

use super::units::{counted, grouped};
use super::{Report, Screen, Style};

/// Columns of a line.
const COLUMNS: usize = 80;

/// Writes the keys of state that differ, and how many differ as they may; nothing where it was not compared.
pub(super) fn write(report: &Report, screen: &mut Screen<'_>) -> io::Result<()> {
    let Some(state) = &report.state else { return Ok(()) };
    let title = format!("state: {}", differing(state));
    let style = screen.style;
    screen.list(&title, &state.differences, |difference| {
        let mut text = shortened(&printable(&difference.path), COLUMNS);
        for line in details(difference) {
            text.push_str(&format!(
                "\n   {}",
                style.faint(&shortened(&printable(&line), COLUMNS - 3))
            ));
        }
        text
    })?;
    let unread = format!("state that could not be read: {}", counted(state.unread.len(), "key"));
    screen.list(&unread, &state.unread, |(path, cause)| {
        format!("{}: {}", printable(path), printable(cause))
    })
}

/// The lines below the key path of a difference.
fn details(difference: &Difference) -> Vec<String> {
    let [a, b] = difference.values.each_ref().map(|value| value.as_deref().unwrap_or("nothing"));
    let place = difference.place.iter().map(|place| format!("in {place}"));
    let values = match difference.kind {
        DifferenceKind::Elements { differing, of } => {
            format!("{} of {} elements differ: a {a}, b {b}", grouped(differing), grouped(of))
        }
        DifferenceKind::PartsDiffer => {
            format!("not comparable, as the parts are others: {a} in a, {b} in b")
        }
        DifferenceKind::Value | DifferenceKind::OnlyIn(_) => {
            let line = format!("a {a}, b {b}");
            if line.chars().count() + 3 > COLUMNS {
                return [format!("a {a}"), format!("b {b}")].into_iter().chain(place).collect();
            }
            line
        }
    };
    [values].into_iter().chain(place).collect()
}

/// What keeps the comparison of state from a verdict, a line each.
pub(super) fn problems(state: &StateJudgement) -> Vec<String> {
    let nothing =
        (state.compared == 0).then(|| "nothing to compare: no state on either side".to_owned());
    let unread = state.unread.iter().map(|(path, cause)| format!("state: {path}: {cause}"));
    nothing.into_iter().chain(unread).collect()
}

/// Remarks on the state: what was compared, and what did not count.
pub(super) fn remarks(report: &Report) -> Vec<String> {
    let Some(state) = &report.state else { return Vec::new() };
    let mut remarks = Vec::new();
    if !state.ignored.is_empty() {
        let profile = report.policy.state.profile;
        let by = match state.ignored.iter().filter(|one| one.why.starts_with("rule ")).count() {
            0 => format!("profile {}", profile.name()),
            count if count == state.ignored.len() => "rules".to_owned(),
            _ => format!("profile {} and rules", profile.name()),
        };
        let count = counted(state.ignored.len(), "difference");
        remarks.push(format!("state: {count} ignored by {by}; --report FILE.json lists them"));
    }
    for glob in &state.idle {
        remarks.push(format!("no difference of state to ignore under {}", printable(glob)));
    }
    remarks
}

/// The words about the state in the closing line; empty where it was not compared.
pub(super) fn closing(report: &Report) -> String {
    match &report.state {
        None => String::new(),
        Some(state) if state.differences.is_empty() && state.unread.is_empty() => {
            format!("; {}", agreeing(state))
        }
        Some(state) if state.unread.is_empty() => format!("; of state {}", differing(state)),
        Some(state) => format!("; {} of state cannot be read", counted(state.unread.len(), "key")),
    }
}

/// The closing line where nothing but state was to be compared.
pub(super) fn closing_alone(report: &Report, style: Style) -> String {
    let Some(state) = &report.state else {
        return format!("{}: nothing to compare", style.bad("trouble"));
    };
    match report.verdict {
        Verdict::Different => format!("{}: {}", style.bad("different"), differing(state)),
        Verdict::Trouble => format!("{}: the state could not be read", style.bad("trouble")),
        _ => format!("{}: {}", style.good("identical"), agreeing(state)),
    }
}

fn agreeing(state: &StateJudgement) -> String {
    let agree = format!("{} of state agree", counted(state.compared, "key"));
    match state.ignored.len() {
        0 => agree,
        ignored => format!("{agree}, but for {} ignored", grouped(ignored as u64)),
    }
}

fn differing(state: &StateJudgement) -> String {
    let (found, total) = (state.differences.len(), counted(state.compared, "key"));
    let verb = if found == 1 { "difference" } else { "differences" };
    format!("{} {verb} in {total}", grouped(found as u64))
}

/// A text cut in its middle to fit.
fn shortened(text: &str, columns: usize) -> String {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= columns {
        return text.to_owned();
    }
    let kept = columns.saturating_sub(3);
    let (start, end) = (kept.div_ceil(2), kept / 2);
    let mut short: String = chars[..start].iter().collect();
    short.push_str("...");
    short.extend(&chars[chars.len() - end..]);
    short
}
