//! Kin: things of one kind in a list (layers, the experts of one) have the same names.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use super::stacks::module;

/// Different sets of names of one kind that are held against each other; so many make no kind.
const MOST_FORMS: usize = 48;

/// So many times as many have the names, where it is not certain that all of them should.
const FEW: usize = 4;

/// Names that only the first of a list has and the others look up there (T5 and what follows it), or that only the last one has
/// (transformers `modeling_gpt_neox_japanese.py`).
const OF_ENDS: [&str; 4] = ["relative_attention_bias", "relative_bias", "pos_bias", "dense_bias"];

/// The names that some members lack and their kin have.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Lack<'n> {
    pub members: BTreeSet<u64>,
    pub names: BTreeSet<&'n str>,
    /// Kin that have them all.
    pub kin: usize,
}

/// A form: names, and the members that have just these.
type Forms<'n> = BTreeMap<Vec<&'n str>, BTreeSet<u64>>;

/// Finds what members of one kind lack. `is_certain` where nothing else than a loss makes members differ; otherwise what only a
/// few have is taken for a kind of its own.
pub(super) fn lacks<'n, S: Borrow<str> + Ord + 'n>(
    members: &[(u64, &'n BTreeSet<S>)],
    is_certain: bool,
) -> Vec<Lack<'n>> {
    let mut modules: BTreeMap<&str, Forms<'n>> = BTreeMap::new();
    let mut wholes = Forms::new();
    for (number, names) in members {
        let names = names.iter().map(Borrow::borrow);
        let names = names.filter(|name: &&str| !OF_ENDS.iter().any(|word| name.contains(word)));
        let mut own: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for name in names {
            own.entry(module(name)).or_default().push(name);
        }
        wholes.entry(own.keys().copied().collect()).or_default().insert(*number);
        for (module, names) in own {
            modules.entry(module).or_default().entry(names).or_default().insert(*number);
        }
    }
    let mut lacks: BTreeMap<BTreeSet<u64>, (BTreeSet<&str>, usize)> = BTreeMap::new();
    let mut add = |members: &BTreeSet<u64>, names: Vec<&'n str>, kin| {
        let (all, count) = lacks.entry(members.clone()).or_default();
        all.extend(names);
        *count = kin;
    };
    for (members, lost, kin) in smaller(&wholes, is_certain) {
        let full = lost.iter().filter_map(|module| modules.get(module));
        let full = full.filter_map(|forms| forms.keys().max_by_key(|names| names.len()));
        add(members, full.flatten().copied().collect(), kin);
    }
    for forms in modules.values() {
        for (members, lost, kin) in smaller(forms, is_certain) {
            add(members, lost, kin);
        }
    }
    let lack = |(members, (names, kin))| Lack { members, names, kin };
    lacks.into_iter().map(lack).collect()
}

/// The forms that are a part of another one, but for names of which nobody else has any: their members, what they lack, and how
/// many have it.
fn smaller<'f, 'n>(
    forms: &'f Forms<'n>,
    is_certain: bool,
) -> Vec<(&'f BTreeSet<u64>, Vec<&'n str>, usize)> {
    if forms.len() > MOST_FORMS {
        return Vec::new();
    }
    let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
    forms.keys().flatten().for_each(|name| *uses.entry(name).or_default() += 1);
    let mut found = Vec::new();
    for (names, members) in forms {
        let have: BTreeSet<&str> = names.iter().copied().collect();
        let own = names.iter().filter(|name| uses.get(**name) == Some(&1)).count();
        let larger = forms.iter().filter(|(other, kin)| {
            let shared = other.iter().filter(|name| have.contains(**name)).count();
            let (lost, more) = (other.len() - shared, have.len() - shared);
            // A name that became another one is lost; what has little in common is of another kind.
            let is_renamed = more <= lost && more <= own && 2 * shared > other.len();
            let is_renamed = is_renamed && kin.len() > members.len();
            lost > 0 && (more == 0 || is_renamed)
        });
        let Some((full, kin)) = larger.max_by_key(|(other, kin)| (kin.len(), other.len())) else {
            continue;
        };
        if is_certain || (kin.len() / FEW >= members.len() && !is_end(members, kin)) {
            let lost = full.iter().copied().filter(|name| !have.contains(name)).collect();
            found.push((members, lost, kin.len()));
        }
    }
    found
}

/// Says whether the only member is the first or the last one, which may be of a kind of its own.
fn is_end(members: &BTreeSet<u64>, kin: &BTreeSet<u64>) -> bool {
    members.len() == 1 && (members.first() < kin.first() || members.last() > kin.last())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(members: &[&[&str]], is_certain: bool) -> Vec<(Vec<u64>, Vec<String>)> {
        let sets: Vec<BTreeSet<String>> = members
            .iter()
            .map(|names| names.iter().map(|name| (*name).to_owned()).collect())
            .collect();
        let members: Vec<(u64, &BTreeSet<String>)> = (0..).zip(&sets).collect();
        let owned = |lack: Lack<'_>| {
            let names = lack.names.into_iter().map(str::to_owned).collect();
            (lack.members.into_iter().collect(), names)
        };
        lacks(&members, is_certain).into_iter().map(owned).collect()
    }

    const FULL: &[&str] = &["attn.o", "attn.qkv", "mlp.fc1", "mlp.fc2", "norm"];

    #[test]
    fn one_name_and_a_whole_module_are_missed() {
        let without = &["attn.o", "mlp.fc1", "mlp.fc2", "norm"][..];
        let five = &[FULL, without, FULL, FULL, FULL][..];
        assert_eq!(found(five, false), [(vec![1], vec!["attn.qkv".to_owned()])]);
        assert_eq!(found(&five[..3], false), []);
        let half = &["attn.o", "attn.qkv", "norm"][..];
        assert_eq!(found(&[FULL, half], false), []);
        let lost = vec!["mlp.fc1".to_owned(), "mlp.fc2".to_owned()];
        assert_eq!(found(&[FULL, half], true), [(vec![1], lost)]);
        assert_eq!(found(&[FULL, FULL], true), []);
    }

    #[test]
    fn two_losses_do_not_hide_each_other() {
        let first = &["attn.o", "mlp.fc1", "mlp.fc2", "norm"][..];
        let second = &["attn.o", "attn.qkv", "mlp.fc2", "norm"][..];
        assert_eq!(found(&[first, second], true).len(), 2);
    }

    #[test]
    fn a_name_that_became_another_one_is_missed() {
        let renamed = &["attn.o", "attn.qkv", "mlp.fc1", "mlp.fcx", "mlp.up", "norm"][..];
        let full = &["attn.o", "attn.qkv", "mlp.fc1", "mlp.fc2", "mlp.up", "norm"][..];
        assert_eq!(found(&[full, renamed, full], true), [(vec![1], vec!["mlp.fc2".to_owned()])]);
        let other = &["attn.o", "attn.qkv", "mlp.gate", "mlp.experts", "norm"][..];
        assert_eq!(found(&[FULL, other, FULL], true), []);
        let norm = &["attn.o", "attn.qkv", "mlp.fc1", "mlp.fc2", "norn"][..];
        assert_eq!(found(&[FULL, norm, FULL], true), [(vec![1], vec!["norm".to_owned()])]);
        assert_eq!(found(&[FULL, norm], true), []);
    }

    #[test]
    fn what_only_a_few_have_is_a_kind_of_its_own() {
        let cross = &["attn.o", "attn.qkv", "cross.q", "mlp.fc1", "mlp.fc2", "norm"][..];
        assert_eq!(found(&[FULL, FULL, FULL, cross], false), []);
        assert_eq!(found(&[FULL, FULL, FULL, cross], true).len(), 1);
        let last = &["attn.dense_bias", "attn.o", "attn.qkv", "mlp.fc1", "mlp.fc2", "norm"][..];
        assert_eq!(found(&[FULL, FULL, last], true), []);
        let mamba = &["mixer.in", "norm"][..];
        assert_eq!(found(&[FULL, mamba, mamba], true), []);
    }
}
