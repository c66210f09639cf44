//! Pairs of small states, and the lines in which they differ.

use std::sync::Arc;

use super::*;
use crate::base::side::Side;

/// A state with these values in parts: key path, part, value.
fn state(entries: &[(&str, &str, StateValue)]) -> KeptState {
    let mut state = KeptState::default();
    for (path, part, value) in entries {
        let part = state.part(part);
        state.add(path, part, value.clone());
    }
    state
}

fn text(text: &str) -> StateValue {
    StateValue::Text(text.into())
}

/// The differences as lines: key path, place, values.
fn lines(a: &KeptState, b: &KeptState) -> Vec<String> {
    let found = compare([a, b]);
    let line = |one: Difference| {
        let [a, b] = one.values.map(|value| value.unwrap_or_else(|| "-".to_owned()));
        let place = one.place.map(|place| format!(" in {place}")).unwrap_or_default();
        format!("{}{place}: {a}, {b}", one.path)
    };
    found.differences.into_iter().map(line).collect()
}

#[test]
fn floats_are_compared_by_value_and_nan_is_nan() {
    let same = [
        (StateValue::Float(1.0), StateValue::Int(1)),
        (StateValue::Float(0.0), StateValue::Float(-0.0)),
        (StateValue::Float(f64::NAN), StateValue::Float(-f64::NAN)),
    ];
    for (one, other) in same {
        assert!(one.is_same(&other) && other.is_same(&one), "{one:?} {other:?}");
    }
    let other = [
        (StateValue::Float(1.0), StateValue::Float(1.0 + f64::EPSILON)),
        (StateValue::Int(1), StateValue::Bool(true)),
        (StateValue::Int((1 << 53) + 1), StateValue::Float(9_007_199_254_740_992.0)),
        (text("1"), StateValue::Int(1)),
        (StateValue::None, StateValue::Empty),
    ];
    for (one, other) in other {
        assert!(!one.is_same(&other) && !other.is_same(&one), "{one:?} {other:?}");
    }
}

#[test]
fn a_key_on_one_side_only_is_a_difference() {
    let a = state(&[("args.lr", "", StateValue::Float(0.1)), ("step", "", StateValue::Int(3))]);
    let b = state(&[("args.lr", "", StateValue::Float(0.1)), ("epoch", "", StateValue::Int(3))]);
    assert_eq!(lines(&a, &b), ["epoch: -, 3", "step: 3, -"]);
    assert_eq!(compare([&a, &b]).differences[1].kind, DifferenceKind::OnlyIn(Side::A));
    assert_eq!(compare([&a, &b]).compared, 3);
}

#[test]
fn what_all_parts_say_alike_is_one_thing_whatever_parts_there_are() {
    let (two, one) = (["rank 0", "rank 1"], ["whole"]);
    let of = |parts: &[&str], lr: f64| {
        let entries: Vec<_> =
            parts.iter().map(|part| ("args.lr", *part, StateValue::Float(lr))).collect();
        state(&entries)
    };
    assert!(lines(&of(&two, 0.1), &of(&one, 0.1)).is_empty());
    assert_eq!(lines(&of(&two, 0.1), &of(&one, 0.2)), ["args.lr: 0.1, 0.2"]);
    let mut odd = of(&["rank 0"], 0.1);
    let part = odd.part("rank 1");
    odd.add("args.lr", part, StateValue::Float(0.3));
    assert_eq!(lines(&of(&two, 0.1), &odd), ["args.lr in rank 1: 0.1, 0.3"]);
    assert_eq!(lines(&odd, &of(&one, 0.1)), ["args.lr: 0.1 | 0.3, 0.1"]);
}

#[test]
fn random_states_are_those_of_parts_and_others_cannot_be_compared() {
    let of = |parts: &[&str]| {
        let entries: Vec<_> = parts
            .iter()
            .map(|part| ("rng_state.0.torch", *part, StateValue::Bytes(part.as_bytes().into())))
            .collect();
        state(&entries)
    };
    assert!(lines(&of(&["tp0", "tp1"]), &of(&["tp0", "tp1"])).is_empty());
    let (two, three) = (of(&["tp0", "tp1"]), of(&["tp0", "tp1", "tp2"]));
    let found = compare([&two, &three]).differences;
    assert_eq!(found[0].kind, DifferenceKind::PartsDiffer);
    assert_eq!(lines(&two, &three), ["rng_state: 2 parts, 3 parts"]);
    // What the arguments say of random numbers is no random state.
    let args = |part| state(&[("args.no_load_rng", part, StateValue::Bool(true))]);
    assert!(lines(&args("x"), &args("y")).is_empty());
}

/// An optimizer with these groups: learning rate, numbers, and the parameter behind each number.
fn optimizer(groups: &[(f64, &[(i64, &str)])]) -> KeptState {
    let mut state = KeptState::default();
    let part = state.part("");
    for (index, (lr, members)) in groups.iter().enumerate() {
        let group = format!("optimizer.param_groups.{index}");
        state.add(&format!("{group}.lr"), part, StateValue::Float(*lr));
        for (at, (number, name)) in members.iter().enumerate() {
            state.add(&format!("{group}.params.{at}"), part, StateValue::Int(*number));
            let place = format!("optimizer.state.{number}");
            state.add_parameters(&place, part, [Arc::from(*name)]);
        }
    }
    state
}

#[test]
fn groups_are_matched_by_the_parameters_in_them() {
    let a = optimizer(&[(0.1, &[(0, "w1"), (1, "w2")]), (0.2, &[(2, "bias")])]);
    let turned = optimizer(&[(0.2, &[(0, "bias")]), (0.1, &[(1, "w1"), (2, "w2")])]);
    assert!(lines(&a, &turned).is_empty(), "{:?}", lines(&a, &turned));
    let cut = optimizer(&[(0.1, &[(0, "w2")]), (0.2, &[(1, "bias")]), (0.1, &[(2, "w1")])]);
    assert!(lines(&a, &cut).is_empty(), "{:?}", lines(&a, &cut));
    // The same lists of numbers and the same rates, but of each other's parameters.
    let swapped = optimizer(&[(0.1, &[(0, "bias"), (1, "w2")]), (0.2, &[(2, "w1")])]);
    assert_eq!(
        lines(&a, &swapped),
        [
            "optimizer.param_groups.0.lr in parameter w1: 0.1, 0.2",
            "optimizer.param_groups.1.lr in parameter bias: 0.2, 0.1",
        ]
    );
    let without = optimizer(&[(0.1, &[(0, "w1"), (1, "w2")])]);
    assert_eq!(
        lines(&a, &without),
        ["optimizer.param_groups.1.params in parameter bias: in a group, -"]
    );
    let hotter = optimizer(&[(0.3, &[(0, "w1"), (1, "w2")]), (0.2, &[(2, "bias")])]);
    let place = "2 parameters, the first is w1";
    assert_eq!(lines(&a, &hotter), [format!("optimizer.param_groups.0.lr in {place}: 0.1, 0.3")]);
}

#[test]
fn groups_without_known_parameters_are_matched_by_what_their_software_knows_them_by() {
    let groups = |groups: &[(f64, f64)]| {
        let mut state = KeptState::default();
        let part = state.part("");
        for (index, (wd_mult, lr)) in groups.iter().enumerate() {
            let group = format!("optimizer.optimizer.param_groups.{index}");
            state.add(&format!("{group}.wd_mult"), part, StateValue::Float(*wd_mult));
            state.add(&format!("{group}.lr"), part, StateValue::Float(*lr));
        }
        state
    };
    let a = groups(&[(1.0, 0.1), (0.0, 0.2)]);
    assert!(lines(&a, &groups(&[(0.0, 0.2), (1.0, 0.1)])).is_empty());
    assert_eq!(
        lines(&a, &groups(&[(0.0, 0.2), (1.0, 0.3)])),
        ["optimizer.optimizer.param_groups.0.lr: 0.1, 0.3"]
    );
    assert_eq!(
        lines(&a, &groups(&[(0.5, 0.1), (0.0, 0.2)])),
        ["optimizer.optimizer.param_groups.0.wd_mult: 1.0, 0.5"]
    );
}

#[test]
fn tensors_are_handed_on() {
    let tensor = || {
        let mut files = crate::storage::FileSet::default();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let file = files.add(std::path::Path::new(path)).ok()?;
        let region = crate::storage::Region { len: 8, ..files.whole(file) };
        let stored = crate::tensor::StoredTensor::contiguous(
            crate::base::dtype::Dtype::UInt8,
            vec![8],
            region,
            crate::tensor::ByteOrder::Little,
        );
        Some(StateValue::Tensor(Arc::new(LogicalTensor::from_stored(&stored.ok()?, "t"))))
    };
    let of = || state(&[("rng_state", "", tensor().unwrap_or(StateValue::None))]);
    let found = compare([&of(), &of()]);
    assert_eq!((found.tensors.len(), found.differences.len()), (1, 0));
    let other = state(&[("rng_state", "", StateValue::Int(1))]);
    assert_eq!(compare([&of(), &other]).differences.len(), 1);
}
