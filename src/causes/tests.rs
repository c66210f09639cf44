//! Orders, moves and extents by hand.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;

use crate::compare::Places;

use super::extents::{self, Axis};
use super::factors::meaning;
use super::facts::Facts;
use super::moved::put_together;
use super::orders::{Order, Permutation, Subject, order, permutation, rows_of};
use super::role::{Role, second_linear};

fn facts() -> Facts {
    Facts {
        heads: Some(8),
        groups: Some(4),
        head_size: Some(8),
        vocab_size: Some(100),
        hidden_size: Some(64),
        rank_counts: vec![4],
        ..Facts::default()
    }
}

fn subject(role: Role) -> Subject {
    Subject { role, is_gated: role == Role::GateAndUp, experts: 1, hidden: 64 }
}

/// What is said where row `at` of a is row `row(at)` of b.
fn said(rows: usize, role: Role, facts: &Facts, row: impl Fn(usize) -> usize) -> String {
    let found: Permutation = (0..rows).map(row).collect();
    assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), rows, "a permutation");
    order(&found, subject(role), facts).to_string()
}

#[test]
fn orders_are_known_by_their_permutations() {
    let known = facts();
    // Groups of 2 query heads, a key head and a value head, 8 rows each.
    let head = |at: usize| (at / 32, at % 32 / 8, at % 8);
    let swapped = |at| {
        let (group, head, row) = head(at);
        group * 32 + [0, 1, 3, 2][head] * 8 + row
    };
    assert_eq!(said(128, Role::Attention, &known, swapped), "key and value are swapped");
    let of_blocks = |at: usize| match at / 8 {
        query @ 0..8 => query / 2 * 32 + query % 2 * 8 + at % 8,
        key @ 8..12 => (key - 8) * 32 + 16 + at % 8,
        value => (value - 12) * 32 + 24 + at % 8,
    };
    let blocks = "query, key, value are blocks in a, by group in b";
    assert_eq!(said(128, Role::Attention, &known, of_blocks), blocks);
    // Without a word about heads the size of the embeddings tells as much.
    assert_eq!(said(128, Role::Attention, &Facts::default(), of_blocks), blocks);
    let neighbours = |at: usize| at - at % 8 + at % 2 * 4 + at % 8 / 2;
    let rotary = "rotary pairs are neighbours in a, halves in b";
    assert_eq!(said(32, Role::Keys, &known, neighbours), rotary);
    let dealt = |at: usize| (at / 8 % 4 * 2 + at / 32) * 8 + at % 8;
    let robin = "query heads are dealt round robin to the groups in a";
    assert_eq!(said(64, Role::Queries, &known, dealt), robin);
    assert_eq!(said(64, Role::Output, &known, dealt), robin);
    let halves = |at: usize| (at + 48) % 96;
    assert_eq!(said(96, Role::GateAndUp, &known, halves), "gate and up are swapped");
    assert_eq!(said(96, Role::Other, &known, halves), "the two halves are swapped");
    let shards = |at: usize| at / 24 % 2 * 48 + at / 48 * 24 + at % 24;
    let alternating = "gate and up alternate in a in 2 parts (TP shards end to end)";
    assert_eq!(said(96, Role::GateAndUp, &known, shards), alternating);
    let rotated = |at: usize| (at + 5) % 96;
    assert_eq!(said(96, Role::Other, &known, rotated), "rotated by 5: 0 of a is 5 of b");
    let two = |at: usize| if at < 2 { 1 - at } else { at };
    let other = "2 of 96 moved, 0 of a is 1 of b";
    assert_eq!(said(96, Role::Other, &known, two), other);
}

#[test]
fn experts_of_one_tensor_are_told_apart() {
    let of_experts = Subject { experts: 4, ..subject(Role::GateAndUp) };
    let rotated: Permutation = (0..40).map(|at| (at + 10) % 40).collect();
    let swapped: Permutation = (0..40).map(|at| at / 10 * 10 + (at % 10 + 5) % 10).collect();
    assert_eq!(order(&rotated, of_experts, &facts()), Order::ExpertsRotated { by: 1 });
    let text = order(&swapped, of_experts, &facts()).to_string();
    assert_eq!(text, "in each expert, gate and up are swapped");
}

#[test]
fn an_order_is_told_of_different_rows_only() {
    assert_eq!(permutation(&[1, 2, 3], &[3, 1, 2]), Some(vec![1, 2, 0]));
    for (a, b) in [([1, 2, 3], [1, 2, 3]), ([1, 1, 2], [1, 2, 1]), ([1, 2, 4], [1, 2, 3])] {
        assert_eq!(permutation(&a, &b), None, "{a:?} {b:?}");
    }
}

#[test]
fn the_order_of_a_weight_has_rows_for_its_bias() {
    for wanted in
        [Order::KeysAndValues, Order::Rotary { in_a: false }, Order::Blocks { in_a: true }]
    {
        let known = facts();
        let mut rows = rows_of(&wanted, 128, subject(Role::Attention), &known);
        let rows = rows.next().unwrap();
        assert_eq!(order(&rows, subject(Role::Attention), &known), wanted);
    }
}

fn moves(pairs: &[(&str, &str)]) -> Vec<String> {
    put_together(pairs).into_iter().map(|one| format!("{}: {}", one.of.len(), one.text)).collect()
}

#[test]
fn moves_are_put_together() {
    let layer = |number: u64| format!("decoder.layers.{number}.mlp.linear_fc1.weight");
    let layers = |steps: &[(u64, u64)]| {
        let names: Vec<_> = steps.iter().map(|(a, b)| (layer(*a), layer(*b))).collect();
        moves(&names.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect::<Vec<_>>())
    };
    assert_eq!(layers(&[(0, 2), (2, 0)]), ["2: layers 0 and 2 are swapped"]);
    let rotated = "4: layers are rotated by 1: layer 0 of a is layer 1 of b";
    assert_eq!(layers(&[(0, 1), (1, 2), (2, 3), (3, 0)]), [rotated]);
    let shifted = ["3: layers 0-2 of a are layers 1-3 of b"];
    assert_eq!(layers(&[(0, 1), (1, 2), (2, 3)]), shifted);
    assert_eq!(layers(&[(5, 3)]), ["1: layer 5 of a is layer 3 of b"]);
    let [gate, up, q] = ["mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"]
        .map(|module| format!("model.layers.1.{module}.weight"));
    assert_eq!(
        moves(&[(&gate, &up), (&up, &gate)]),
        ["2: mlp.gate_proj.weight and mlp.up_proj.weight are swapped"]
    );
    assert_eq!(moves(&[(&gate, &up)]), ["1: mlp.gate_proj.weight of a is mlp.up_proj.weight of b"]);
    assert_eq!(moves(&[(&q, "lm_head.weight")]), [format!("1: {q} of a is lm_head.weight of b")]);
    let expert =
        |layer: u64, number: u64| format!("model.layers.{layer}.mlp.experts.{number}.w1.weight");
    let names: Vec<_> = (0..2)
        .flat_map(|layer| (0..4).map(move |number| (layer, number)))
        .map(|(layer, number)| (expert(layer, number), expert(layer, (number + 1) % 4)))
        .collect();
    let names: Vec<_> = names.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    let rotated = "8: in 2 layers, experts are rotated by 1: expert 0 of a is expert 1 of b";
    assert_eq!(moves(&names), [rotated]);
}

fn extent(role: Role, len: u64, rows: impl IntoIterator<Item = u64>) -> Option<String> {
    let axis = Axis { subject: subject(role), has_blocks: false, words: ["row", "rows"] };
    let places = Places::of(len, rows);
    assert!(extents::may_be_one(&Places::of(len, []), axis, &facts()));
    let found = extents::extent(&places, axis, &facts(), places.count() * 64)?;
    assert!(extents::may_be_one(&places, axis, &facts()), "{found:?}");
    Some(found.text)
}

#[test]
fn rows_that_alone_differ_go_by_what_they_are() {
    let text = |text: &str| Some(text.to_owned());
    let key = |group: u64| group * 32 + 16..group * 32 + 24;
    assert_eq!(extent(Role::Attention, 128, key(3)), text("only the key rows of group 3 differ"));
    assert_eq!(
        extent(Role::Attention, 128, (0..4).flat_map(key)),
        text("only the key rows differ")
    );
    assert_eq!(
        extent(Role::Attention, 128, 17..20),
        text("only rows 17-19 differ: key heads of group 0")
    );
    assert_eq!(
        extent(Role::Vocabulary, 128, 100..128),
        text("only rows 100-127 differ: padding of the vocabulary")
    );
    assert_eq!(extent(Role::Queries, 64, 16..24), text("only rows 16-23 differ: head 2"));
    assert_eq!(extent(Role::GateAndUp, 96, 48..96), text("only rows 48-95 differ: up"));
    assert_eq!(extent(Role::Other, 96, 7..8), text("only row 7 differs"));
    assert_eq!(extent(Role::Other, 96, [3, 9]), None);
    assert_eq!(extent(Role::Other, 96, 0..96), None);
    assert_eq!(extent(Role::Other, 96, 5..90), None);
}

#[test]
fn few_differences_are_no_extent() {
    let axis = Axis { subject: subject(Role::Other), has_blocks: false, words: ["row", "rows"] };
    let places = Places::of(96, 10..12);
    assert_eq!(extents::extent(&places, axis, &facts(), 3), None);
    assert!(extents::extent(&places, axis, &facts(), 30).is_some());
}

#[test]
fn factors_are_those_of_the_model() {
    let meaning = |factor, role| meaning(factor, role, 64, &facts());
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(meaning(8.0, Role::Vocabulary), text("sqrt(64), hidden size"));
    assert_eq!(meaning(8f64.sqrt().recip(), Role::Queries), text("1/sqrt(8), head size"));
    assert_eq!(meaning(0.25, Role::Other), text("divided by 4 ranks"));
    assert_eq!(meaning(-1.0, Role::Other), text("negated"));
    assert_eq!(meaning(3.3, Role::Other), None);
}

#[test]
fn roles_go_by_the_last_component_of_a_module() {
    assert_eq!(Role::of("self_attention.linear_qkv", "weight"), Role::Attention);
    assert_eq!(Role::of("mlp.experts", "gate_up_proj"), Role::GateAndUp);
    assert_eq!(Role::of("query_norm", "weight"), Role::Other);
    assert_eq!(second_linear("a.linear_fc1.bias").as_deref(), Some("a.linear_fc2.weight"));
    assert_eq!(second_linear("a.linear_qkv.weight"), None);
}
