//! Rules for names that stand for the same tensors.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::base::side::Side;
use crate::names::Name;
use crate::names::natural::is_number;

use super::Renames;

/// Stand for numbers.
const LETTERS: [&str; 4] = ["{i}", "{j}", "{k}", "{l}"];

/// Rules for the side `a` that give the first name of each pair the second one, as few as it takes, and leave the names that are
/// `kept` alone; none where names have characters that mean something in a rule.
///
/// ```
/// use ckptcmp::names::{Name, renames::rules_between};
///
/// let pair = |layer| {
///     [format!("h.{layer}.attn.weight"), format!("decoder.layers.{layer}.self_attention.weight")]
///         .map(Name::new)
/// };
/// let rules = rules_between(&[pair(0), pair(1)], &[]);
/// assert_eq!(rules, ["a:h.{i}.attn=decoder.layers.{i}.self_attention"]);
/// ```
#[must_use]
pub fn rules_between(pairs: &[[Name; 2]], kept: &[&Name]) -> Vec<String> {
    let is_special = |char: char| "*{}=#\"".contains(char) || char.is_whitespace();
    if pairs.iter().flatten().any(|name| name.as_str().contains(is_special)) {
        return Vec::new();
    }
    // Of equally many, the first: it says most.
    let forms = [(true, true), (false, true), (true, false), (false, false)];
    let rules = forms.into_iter().map(|(is_general, is_of_modules)| {
        let rule = |pair: &[Name; 2]| rule(components(pair, is_general), is_of_modules);
        let rules: BTreeSet<String> = pairs.iter().map(rule).collect();
        let mut rules: Vec<String> = rules.into_iter().collect();
        // What is about fewer names goes first.
        let components = |rule: &String| rule.split('=').next().map(|old| old.split('.').count());
        rules.sort_by_key(|rule| Reverse(components(rule)));
        rules
    });
    let right = rules.filter(|rules| are_right(rules, pairs, kept));
    right.min_by_key(Vec::len).unwrap_or_default()
}

/// Returns whether the rules give each first name the second one, and no kept name another one.
fn are_right(rules: &[String], pairs: &[[Name; 2]], kept: &[&Name]) -> bool {
    let mut renames = Renames::default();
    let renamed = |renames: &Renames, name: &Name| {
        renames.rename(Side::A, name.as_str(), |_| true).map(|(_, new)| new)
    };
    rules.iter().all(|rule| renames.add(rule).is_ok())
        && pairs.iter().all(|[old, new]| renamed(&renames, old).as_deref() == Some(new.as_str()))
        && kept.iter().all(|name| renamed(&renames, name).is_none())
}

/// Two names, or the modules in front of where they are the same.
fn rule([mut old, mut new]: [Vec<&str>; 2], is_of_modules: bool) -> String {
    let is_part = |last: Option<&&str>| last.is_some_and(|last| !is_number(last));
    while is_of_modules
        && old.len().min(new.len()) > 1
        && old.last() == new.last()
        && is_part(old.last())
    {
        old.pop();
        new.pop();
    }
    format!("a:{}={}", old.join("."), new.join("."))
}

/// The components of two names, with letters for the numbers where those are the same, if `is_general`.
fn components(pair: &[Name; 2], is_general: bool) -> [Vec<&str>; 2] {
    let [old, new] = pair;
    let is_general =
        is_general && old.numbers().count() <= LETTERS.len() && old.numbers().eq(new.numbers());
    pair.each_ref().map(|name| {
        let mut letters = LETTERS.iter().filter(|_| is_general);
        let component = |part| match is_number(part) {
            true => letters.next().copied().unwrap_or(part),
            false => part,
        };
        name.as_str().split('.').map(component).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(pairs: &[[&str; 2]], kept: &[&str]) -> Vec<String> {
        let pairs: Vec<[Name; 2]> = pairs.iter().map(|pair| pair.map(Name::new)).collect();
        let kept: Vec<Name> = kept.iter().map(|name| Name::new(*name)).collect();
        rules_between(&pairs, &kept.iter().collect::<Vec<_>>())
    }

    #[test]
    fn few_rules_bring_many_names_together_and_touch_no_other() {
        let pairs = [
            ["h.0.attn.q.weight", "l.0.attention.query.weight"],
            ["h.0.attn.q.bias", "l.0.attention.query.bias"],
            ["h.0.norm.weight", "l.0.norm.weight"],
            ["h.1.norm.weight", "l.1.norm.weight"],
            ["embed.weight", "tok.weight"],
        ];
        let few = ["a:h.{i}.attn.q=l.{i}.attention.query", "a:embed=tok", "a:h=l"];
        assert_eq!(rules(&pairs, &["x.0.norm.weight"]), few);
        let kept = rules(&pairs, &["h.1.attn.weight"]);
        assert_eq!(kept.len(), 4, "{kept:?}");
        assert!(kept.contains(&"a:h.{i}.norm.weight=l.{i}.norm.weight".to_owned()), "{kept:?}");
        let exact = rules(&pairs[2..3], &["h.1.norm.weight"]);
        assert_eq!(exact, ["a:h.0=l.0"]);
        let exact = rules(&pairs[2..3], &["h.1.norm.weight", "h.0.x"]);
        assert_eq!(exact, ["a:h.0.norm.weight=l.0.norm.weight"]);
        assert_eq!(rules(&[["h.0.w", "h.1.w"], ["h.1.w", "h.0.w"]], &[]).len(), 2);
        assert!(rules(&[["h.0.*", "l.0.w"]], &[]).is_empty());
    }
}
