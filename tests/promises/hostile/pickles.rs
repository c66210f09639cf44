//! Pickles that no `torch.save` writes: lengths, memo indices, nesting, sharing and cycles without end.

use std::fs;

use ckptcmp::formats::{self, OpenOptions};

use super::{model_with, plain_args};
use crate::common::crafted::{
    Checkpoint, P, all_commands, dict, file, namespace, object, tensor, text,
};

#[test]
fn tensors_inside_objects_are_tensors() {
    let one = || tensor(&[3]);
    // A module as it is, which keeps what it holds in dicts of its own.
    let linear = object(
        "Linear",
        &dict([("training", P::Bool(true)), ("_parameters", dict([("weight", one())]))]),
    );
    let module = object(
        "Net",
        &dict([("_buffers", dict([("b", one())])), ("_modules", dict([("l", linear)]))]),
    );
    let pair = P::Call("m", "Pair", vec![P::Int(1), one()]);
    let config = object("Config", &dict([("scale", one()), ("name", text("x"))]));
    let objects = dict([("net", module), ("pair", pair), ("config", config), ("w", one())]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("objects.pt");
    fs::write(&path, file(objects.pickle())).unwrap();
    let found = formats::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(found.problems, []);
    let names: Vec<&str> = found.tensors.keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["config.scale", "net.b", "net.l.weight", "pair.1", "w"]);
}

#[test]
fn objects_that_hold_themselves_or_each_other_in_chains_end() {
    // Itself: an object in the memo before its state is built.
    let own = P::Raw([&b"cm\nNode\n)\x81q\x07}X\x04\0\0\0selfh\x07sb"[..]].concat());
    let mut chain = P::None;
    for _ in 0..200 {
        chain = object("ChainedOptimizer", &dict([("next", chain)]));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("objects.pt");
    let write = |objects: P| fs::write(&path, file(objects.pickle())).unwrap();
    write(dict([("own", own), ("w", tensor(&[3]))]));
    let found = formats::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!((found.tensors.len(), found.problems.len()), (1, 0));
    write(dict([("chain", chain), ("w", tensor(&[3]))]));
    let found = formats::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(found.tensors.len(), 1);
    assert!(
        found.problems[0].to_string().contains("chain: holds more levels of nested dicts than")
    );
}

#[test]
fn lengths_that_no_pickle_holds_cost_nothing() {
    let huge: [(&str, Vec<u8>); 12] = [
        ("text", b"X\xff\xff\xff\xffabc".to_vec()),
        ("text of 64 bits", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc".to_vec()),
        ("text of 2^64 - 1", b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc".to_vec()),
        ("bytes", b"B\xff\xff\xff\xffabc".to_vec()),
        ("bytes of 64 bits", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc".to_vec()),
        ("byte array", b"\x96\xff\xff\xff\xff\xff\xff\xff\xffabc".to_vec()),
        ("old text", b"T\xff\xff\xff\x7fabc".to_vec()),
        ("negative text", b"T\xff\xff\xff\xffabc".to_vec()),
        ("long", b"\x8b\xff\xff\xff\x7fabc".to_vec()),
        ("negative long", b"\x8b\xff\xff\xff\xffabc".to_vec()),
        ("frame", b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN".to_vec()),
        ("text long", [b"L".as_slice(), &b"9".repeat(200_000), b"L\n"].concat()),
    ];
    for (name, opcodes) in huge {
        let checkpoint = Checkpoint::with(model_with([("weight", P::Raw(opcodes))]), P::None);
        all_commands(name, &checkpoint);
    }
}

#[test]
fn memo_indices_cost_nothing() {
    for (name, opcodes) in [
        ("put", b"Nr\xff\xff\xff\xff".to_vec()),
        ("get", b"j\xff\xff\xff\xff".to_vec()),
        ("text put", b"Np4294967295\n".to_vec()),
        ("text put beyond", b"Np99999999999999999999\n".to_vec()),
        ("negative put", b"Np-1\n".to_vec()),
        (
            "sparse puts",
            (0..5000_u32)
                .flat_map(|n| [&b"Nr"[..], &(n * 800_000).to_le_bytes(), b"0"].concat())
                .chain(*b"N")
                .collect(),
        ),
    ] {
        all_commands(name, &Checkpoint::with(model_with([("x", P::Raw(opcodes))]), P::None));
    }
}

#[test]
fn nesting_without_end_is_refused() {
    let deep = |depth: usize| {
        let mut opcodes = b"}(X\x01\0\0\0a".repeat(depth);
        opcodes.push(b'N');
        opcodes.extend(b"u".repeat(depth));
        P::Raw(opcodes)
    };
    let lists = P::Raw([b"]".repeat(100_000), b"a".repeat(99_999)].concat());
    let tuples = P::Raw([b"N".to_vec(), b"\x85".repeat(100_000)].concat());
    for (name, value) in [
        ("60 dicts", deep(60)),
        ("100 dicts", deep(100)),
        ("100,000 dicts", deep(100_000)),
        ("lists", lists),
        ("tuples", tuples),
    ] {
        let in_model = Checkpoint::with(model_with([("x", value.clone())]), P::None);
        let run = all_commands(name, &in_model);
        assert_eq!(run.code == 2, name.starts_with("100"), "{name}: {}", run.stderr);
        all_commands(name, &Checkpoint::with(model_with([]), namespace([("x", value.clone())])));
        all_commands(name, &Checkpoint::with(model_with([]), value.clone()));
        all_commands(name, &Checkpoint::of(&value));
    }
}

/// Every level refers so many times to the next one.
fn shared(levels: u32, times: u32, last: P, level: impl Fn(Vec<P>) -> P) -> P {
    let mut value = P::Put(0, Box::new(last));
    let mut whole = value.clone();
    for number in 1..=levels {
        let first = whole;
        let further = (1..times).map(|_| P::Get(number - 1));
        value = level(std::iter::once(first).chain(further).collect());
        whole = P::Put(number, Box::new(value));
    }
    whole
}

fn dict_of(members: Vec<P>) -> P {
    let members = members.into_iter().enumerate();
    P::Dict(members.map(|(number, member)| (text(&format!("k{number}")), member)).collect())
}

#[test]
fn values_that_are_shared_without_end_are_walked_only_so_far() {
    let long = "n".repeat(1 << 20);
    let long_named = |members: Vec<P>| {
        let members = members.into_iter().enumerate();
        P::Dict(members.map(|(at, member)| (text(&format!("{at}{long}")), member)).collect())
    };
    for (name, value) in [
        ("pairs of dicts", shared(60, 2, tensor(&[2]), dict_of)),
        ("pairs of dicts too deep", shared(70, 2, tensor(&[2]), dict_of)),
        ("pairs of dicts of nothing", shared(60, 2, P::None, dict_of)),
        (
            "pairs of dicts of what cannot be read",
            shared(60, 2, P::Call("a", "B", vec![]), dict_of),
        ),
        ("thousands", shared(4, 3000, tensor(&[2]), dict_of)),
        ("long names", shared(40, 2, tensor(&[2]), long_named)),
    ] {
        let in_model = Checkpoint::with(value.clone(), plain_args());
        assert_eq!(all_commands(name, &in_model).code, 2, "{name}");
        // A file that is not Megatron's is walked on another path.
        let alone = Checkpoint::of(&dict([("weights", value)]));
        assert_eq!(all_commands(name, &alone).code, 2, "{name}");
    }
    for (name, value) in [
        ("lists", shared(3, 4000, P::Int(1), P::List)),
        ("long text", shared(1, 4000, text(&long), P::List)),
    ] {
        let args = namespace((0..20).map(|_| ("noop_layers", value.clone())));
        all_commands(name, &Checkpoint::with(model_with([]), args));
        let keys: Vec<String> = (0..1000).map(|key| format!("fact{key}")).collect();
        let first = std::iter::once(("first", value.clone()));
        let args = namespace(first.chain(keys.iter().map(|key| (key.as_str(), P::Get(0)))));
        all_commands(name, &Checkpoint::with(model_with([]), args));
    }
}

#[test]
fn a_model_that_holds_itself_is_refused() {
    // The dict is in the memo before its members are.
    let once = b"}r\x07\0\0\0(X\x01\0\0\0aj\x07\0\0\0u".to_vec();
    let twice = b"}r\x07\0\0\0(X\x01\0\0\0aj\x07\0\0\0X\x01\0\0\0bj\x07\0\0\0u".to_vec();
    let list = b"]r\x07\0\0\0(j\x07\0\0\0j\x07\0\0\0e".to_vec();
    for (name, opcodes) in [("once", once), ("twice", twice), ("list", list)] {
        let value = P::Raw(opcodes);
        all_commands(name, &Checkpoint::with(value.clone(), value.clone()));
        all_commands(name, &Checkpoint::with(model_with([("x", value.clone())]), P::None));
        all_commands(name, &Checkpoint::of(&value));
    }
}
