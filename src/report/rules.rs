//! The rules of a comparison, each with the tensors that it decides about.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::base::side::Side;
use crate::judge::bounds::Bounds;
use crate::judge::policy::{Policy, Rule};
use crate::names::{Name, printable};
use crate::pairing::Pairing;

use super::units::{counted, grouped};
use super::{RenameUse, Screen, Style, View};

/// Writes every rule with its bounds and the names that it decides about, and the names that no rule matches; all of them, or
/// the first ones. Returns whether every rule decides about a name.
///
/// # Errors
/// The sink cannot be written to.
pub fn write(
    policy: &Policy,
    pairing: &Pairing,
    renames: &[RenameUse],
    all: bool,
    style: Style,
    out: &mut dyn Write,
) -> io::Result<bool> {
    let few = View::default();
    let view = if all { View { rows: usize::MAX, ..few } } else { few };
    let mut screen = Screen { style, view, out };
    let mut decided: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let mut add = |name: &Name, place: &str| {
        let number = policy.rule(name).map_or(policy.rules.len(), |(number, _)| number);
        decided.entry(number).or_default().push(format!("   {name}{place}"));
    };
    pairing.pairs.iter().for_each(|pair| add(&pair.name, ""));
    for (side, names) in Side::BOTH.iter().zip(&pairing.only_in) {
        names.iter().for_each(|name| add(name, &format!(", only in {side}")));
    }
    let mut unused = 0;
    for (number, rule) in policy.rules.iter().enumerate() {
        let names = decided.remove(&number).unwrap_or_default();
        let globs = printable(&rule.globs.join(", ")).into_owned();
        let title = format!("line {}: {globs}", rule.line);
        let text =
            format!("{title}\n   {}: {}", counted(names.len(), "name"), rule_text(policy, rule));
        if names.is_empty() {
            unused += 1;
            writeln!(screen.out, "\n{}", style.heading(&text))?;
        }
        screen.list(&text, &names, Clone::clone)?;
    }
    let rest = decided.remove(&policy.rules.len()).unwrap_or_default();
    let text =
        format!("no rule\n   {}: {}", counted(rest.len(), "name"), bounds_text(&policy.bounds));
    screen.list(&text, &rest, Clone::clone)?;
    let idle = RenameUse::idle(renames);
    if !idle.is_empty() {
        writeln!(screen.out)?;
    }
    idle.iter().take(screen.view.rows).try_for_each(|remark| writeln!(screen.out, "{remark}"))?;
    if unused > 0 {
        let of = grouped(policy.rules.len() as u64);
        writeln!(screen.out, "\n{} of {of} rules decide about no name", grouped(unused))?;
    }
    Ok(unused == 0)
}

fn rule_text(policy: &Policy, rule: &Rule) -> String {
    if rule.ignore {
        return "ignored".to_owned();
    }
    let mut text = bounds_text(&policy.bounds.over(&rule.bounds));
    for side in &rule.allow_missing {
        text.push_str(&format!(", may be missing in {side}"));
    }
    if rule.required {
        text.push_str(", required");
    }
    text
}

fn bounds_text(bounds: &Bounds) -> String {
    let mut parts = Vec::new();
    if bounds.torch == Some(true) {
        parts.push("tolerance torch".to_owned());
    }
    parts.extend(bounds.rtol.map(|rtol| format!("rtol {rtol}")));
    parts.extend(bounds.atol.map(|atol| format!("atol {atol}")));
    parts.extend(
        bounds.max.iter().map(|bound| format!("{} at most {}", bound.metric.name, bound.max)),
    );
    if bounds.allow_cast == Some(true) {
        parts.push("casts pass".to_owned());
    }
    if parts.is_empty() {
        parts.push("equal values".to_owned());
    }
    if bounds.equal_nan == Some(true) {
        parts.push("NaN equals NaN".to_owned());
    }
    parts.join(", ")
}
