//! Parameter groups: matched by the parameters in them, wherever they stand in a list and whatever ranks have parts of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::compare::{Difference, DifferenceKind, joined_texts};
use super::{KeptState, Part, StateValue};

/// The key of a list of parameter groups in an optimizer's state dict.
const LIST: &str = "param_groups";

/// Keys of a group under which its parameters stand, by number or by name (torch 2.6 on: `named_parameters`).
const MEMBERS: [&str; 2] = ["params", "param_names"];

/// Keys by which Megatron-Core itself finds a group again (`core/optimizer/distrib_optimizer.py`, `_filter_and_reorder_param_groups`,
/// 0.9 to 0.16).
const IDENTIFIERS: [&str; 4] = ["wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"];

/// The place of a key in a list of parameter groups.
pub(super) struct Place<'a> {
    /// The key path of the list.
    list: &'a str,
    /// The number of the group in it.
    index: u64,
    /// The key path in the group.
    field: &'a str,
}

/// The place of a key path in a parameter group, where it is in one.
pub(super) fn place_of(path: &str) -> Option<Place<'_>> {
    let mut at = 0;
    for component in path.split('.') {
        let end = at + component.len();
        if component == LIST {
            let (index, field) = path.get(end + 1..)?.split_once('.')?;
            let index = index.parse().ok().filter(|_| !field.is_empty())?;
            return Some(Place { list: &path[..end], index, field });
        }
        at = end + 1;
    }
    None
}

/// A parameter group as one part of the checkpoint says it.
struct Group<'a> {
    list: &'a str,
    index: u64,
    part: &'a str,
    /// Its parameters by name, where all are known.
    members: BTreeSet<Arc<str>>,
    fields: Fields<'a>,
}

type Fields<'a> = BTreeMap<&'a str, Vec<&'a StateValue>>;

/// The groups of one side.
pub(super) struct Groups<'a>(Vec<Group<'a>>);

impl<'a> Groups<'a> {
    /// Reads the groups of a checkpoint.
    pub(super) fn of(state: &'a KeptState) -> Self {
        let mut groups: BTreeMap<(&str, u64, Part), Fields<'a>> = BTreeMap::new();
        for (path, said) in state.iter() {
            let Some(Place { list, index, field }) = place_of(path) else { continue };
            for one in said.iter().filter(|said| !matches!(said.value, StateValue::Tensor(_))) {
                for part in &one.by {
                    let group = groups.entry((list, index, *part)).or_default();
                    group.entry(field).or_default().push(&one.value);
                }
            }
        }
        let group = |((list, index, part), mut fields): ((&'a str, u64, Part), Fields<'a>)| {
            let members = members(state, list, part, &fields).unwrap_or_default();
            if !members.is_empty() {
                fields.retain(|field, _| !is_member(field));
            }
            Group { list, index, part: state.part_name(part), members, fields }
        };
        Self(groups.into_iter().map(group).collect())
    }

    fn are_named(&self) -> bool {
        self.0.iter().all(|group| !group.members.is_empty())
    }
}

fn is_member(field: &str) -> bool {
    MEMBERS.contains(&field.split('.').next().unwrap_or(field))
}

/// The names of a group's parameters: as they stand in it, or those whose states lie under its numbers. `None` where one is not
/// known.
fn members(
    state: &KeptState,
    list: &str,
    part: Part,
    fields: &Fields<'_>,
) -> Option<BTreeSet<Arc<str>>> {
    let prefix = list.strip_suffix(LIST)?;
    let values = |key: &str| {
        let own = fields.iter().filter(move |(field, _)| field.split('.').next() == Some(key));
        own.flat_map(|(_, values)| values.iter().copied()).collect::<Vec<_>>()
    };
    let text = |value: &&StateValue| match value {
        StateValue::Text(name) => Some(Arc::clone(name)),
        _ => None,
    };
    let names = values(MEMBERS[1]);
    if !names.is_empty() {
        return names.iter().map(text).collect();
    }
    let mut members = BTreeSet::new();
    for value in values(MEMBERS[0]) {
        match value {
            StateValue::Text(name) => drop(members.insert(Arc::clone(name))),
            StateValue::Int(number) => {
                let key = (format!("{prefix}state.{number}").into(), part);
                members.extend(state.parameters.get(&key)?.iter().cloned());
            }
            _ => return None,
        }
    }
    Some(members)
}

/// Compares the groups of two sides; returns the number of keys that were compared.
pub(super) fn compare(sides: &[Groups<'_>; 2], found: &mut Vec<Difference>) -> usize {
    if sides.iter().all(Groups::are_named) {
        by_parameter(sides, found)
    } else {
        by_identity(sides, found)
    }
}

/// A parameter's options, and where its group stands.
#[derive(Default)]
struct Options<'a> {
    fields: Fields<'a>,
    /// List and number of each group that it is in.
    groups: BTreeSet<(&'a str, u64)>,
}

impl<'a> Options<'a> {
    fn add(&mut self, group: &Group<'a>) {
        self.groups.insert((group.list, group.index));
        for (field, values) in &group.fields {
            let known = self.fields.entry(field).or_default();
            for value in values {
                if !known.iter().any(|one| one.is_same(value)) {
                    known.push(value);
                }
            }
        }
    }
}

/// A key path, and the value of each side.
type Differing = (String, [Option<String>; 2]);

fn by_parameter(sides: &[Groups<'_>; 2], found: &mut Vec<Difference>) -> usize {
    let [a, b] = sides.each_ref().map(|groups| {
        let mut parameters: BTreeMap<&Arc<str>, Options<'_>> = BTreeMap::new();
        for group in &groups.0 {
            for name in &group.members {
                parameters.entry(name).or_default().add(group);
            }
        }
        parameters
    });
    let mut fields = BTreeSet::new();
    let mut differing: BTreeMap<Differing, Vec<&Arc<str>>> = BTreeMap::new();
    let names: BTreeSet<&Arc<str>> = a.keys().chain(b.keys()).copied().collect();
    for name in names {
        match [a.get(name), b.get(name)] {
            [Some(a), Some(b)] => {
                fields.extend(a.fields.keys().chain(b.fields.keys()).copied());
                for (field, values) in differences([&a.fields, &b.fields]) {
                    let key = (path_text(a, field), values);
                    differing.entry(key).or_default().push(name);
                }
            }
            [one, other] => {
                let Some(options) = one.or(other) else { continue };
                let values = [one, other].map(|side| side.map(|_| "in a group".to_owned()));
                differing.entry((path_text(options, MEMBERS[0]), values)).or_default().push(name);
            }
        }
    }
    for ((path, values), names) in differing {
        let place = match names[..] {
            [name] => format!("parameter {name}"),
            [first, ..] => format!("{} parameters, the first is {first}", names.len()),
            [] => continue,
        };
        let kind = DifferenceKind::of(&values);
        found.push(Difference { path, place: Some(place), values, kind });
    }
    fields.len()
}

fn path_text(options: &Options<'_>, field: &str) -> String {
    let lists: BTreeSet<&str> = options.groups.iter().map(|(list, _)| *list).collect();
    let indices: BTreeSet<u64> = options.groups.iter().map(|(_, index)| *index).collect();
    let list = lists.first().copied().unwrap_or(LIST);
    match (indices.len(), indices.first()) {
        (1, Some(index)) => format!("{list}.{index}.{field}"),
        _ => format!("{list}.*.{field}"),
    }
}

/// The fields that differ, with their values.
fn differences<'a>(sides: [&Fields<'a>; 2]) -> Vec<(&'a str, [Option<String>; 2])> {
    let fields: BTreeSet<&str> = sides.iter().flat_map(|side| side.keys().copied()).collect();
    let mut found = Vec::new();
    for field in fields {
        let values = sides.map(|side| side.get(field).map_or(&[][..], Vec::as_slice));
        let is_in =
            |value: &&StateValue, side: &[&StateValue]| side.iter().any(|one| one.is_same(value));
        let [a, b] = values;
        if a.iter().all(|value| is_in(value, b)) && b.iter().all(|value| is_in(value, a)) {
            continue;
        }
        found.push((field, values.map(|side| joined_texts(side.iter().copied()))));
    }
    found
}

/// Matches groups by the keys that their own software knows them by, else by their numbers.
fn by_identity(sides: &[Groups<'_>; 2], found: &mut Vec<Difference>) -> usize {
    let set = |of: fn(&Group<'_>) -> String| {
        sides.each_ref().map(|side| side.0.iter().map(of).collect::<BTreeSet<_>>())
    };
    let [a, b] = set(|group| group.part.to_owned());
    let has_same_parts = a == b || a.len() == 1 && b.len() == 1;
    let is_alone = a.len() == 1;
    let [a, b] = set(|group| group.list.to_owned());
    let has_same_lists = a == b;
    let identity = |group: &Group<'_>| -> Vec<String> {
        let part = has_same_parts && !is_alone;
        let mut identity = vec![
            if part { group.part.to_owned() } else { String::new() },
            if has_same_lists { group.list.to_owned() } else { String::new() },
        ];
        let own = IDENTIFIERS.iter().filter_map(|key| Some((key, group.fields.get(key)?)));
        let own: Vec<String> = own
            .filter_map(|(key, values)| {
                Some(format!("{key} {}", joined_texts(values.iter().copied())?))
            })
            .collect();
        if own.is_empty() {
            let members = group.fields.iter().filter(|(field, _)| is_member(field));
            let members = members.flat_map(|(_, values)| values.iter().map(|value| value.text()));
            let members: Vec<String> = members.collect();
            identity.push(if members.is_empty() {
                format!("group {}", group.index)
            } else {
                members.join(",")
            });
        } else {
            identity.extend(own);
        }
        identity
    };
    let [mut a, mut b] = sides.each_ref().map(|groups| {
        let mut merged: BTreeMap<Vec<String>, Options<'_>> = BTreeMap::new();
        groups.0.iter().for_each(|group| merged.entry(identity(group)).or_default().add(group));
        merged
    });
    let mut matched: Vec<[Option<Options<'_>>; 2]> = Vec::new();
    let shared: Vec<Vec<String>> = a.keys().filter(|key| b.contains_key(*key)).cloned().collect();
    for key in shared {
        matched.push([a.remove(&key), b.remove(&key)]);
    }
    // What is left is taken in the order of the lists.
    let order = |options: &Options<'_>| {
        options.groups.first().map(|(list, index)| ((*list).to_owned(), *index))
    };
    let [mut a, mut b] = [a, b].map(|rest| {
        let mut rest: Vec<Options<'_>> = rest.into_values().collect();
        rest.sort_by_key(order);
        rest.into_iter()
    });
    loop {
        match [a.next(), b.next()] {
            [None, None] => break,
            pair => matched.push(pair),
        }
    }
    let mut compared = BTreeSet::new();
    for pair in &matched {
        let empty = Options::default();
        let sides = pair.each_ref().map(|side| side.as_ref().unwrap_or(&empty));
        let Some(named) = pair.iter().flatten().next() else { continue };
        compared.extend(
            sides.iter().flat_map(|side| side.fields.keys().map(|field| path_text(named, field))),
        );
        for (field, values) in differences(sides.map(|side| &side.fields)) {
            let kind = DifferenceKind::of(&values);
            found.push(Difference { path: path_text(named, field), place: None, values, kind });
        }
    }
    compared.len()
}
