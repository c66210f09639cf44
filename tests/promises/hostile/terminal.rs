//! Nothing in a file writes to the terminal, and long names do not flood it.

use std::path::Path;

use super::{model_with, plain_args};
use crate::common::crafted::{
    Checkpoint, P, all_commands, compare, dict, namespace, run, tensor, tensor_of, text, zip,
};

#[test]
fn names_cannot_write_to_the_terminal() {
    for evil in [
        "\x1b[2J\x1b]0;owned\x07",
        "red\x1b[31m.weight",
        "line\nckptcmp: a: all is well",
        "\r\x08\x7fback",
        "c1\u{9b}31m\u{85}",
        "bidi\u{202e}thgir",
        "nul\0",
    ] {
        let name = format!("decoder.{evil}.weight");
        let one = Checkpoint::with(model_with([(name.as_str(), tensor(&[8]))]), plain_args());
        let other = tensor_of("0", 64, 8, &[8], &[1]);
        let other = Checkpoint::with(model_with([(name.as_str(), other)]), plain_args());
        let long = Checkpoint::with(model_with([(name.as_str(), tensor(&[9]))]), plain_args());
        let without = Checkpoint::with(model_with([]), plain_args());
        all_commands(evil, &one);
        let run = compare(evil, &one.path(), &other.path());
        assert!(run.stdout.contains("decoder."), "{}", run.stdout);
        compare(evil, &one.path(), &long.path());
        compare(evil, &one.path(), &without.path());
        // In what is said of what cannot be read: names, classes, storage keys, facts.
        for value in [
            P::Raw(format!("c{}\n{}\n)R", "torch._utils", evil.replace('\n', "")).into_bytes()),
            P::Raw(format!("c{}\nTensor\n)R", evil.replace('\n', "")).into_bytes()),
            tensor_of(evil, 64, 0, &[8], &[1]),
        ] {
            all_commands(
                evil,
                &Checkpoint::with(model_with([(name.as_str(), value)]), plain_args()),
            );
        }
        let args = namespace([(evil, text(evil)), ("schedules_method", text(evil))]);
        all_commands(evil, &Checkpoint::with(model_with([]), args));
        let keys = zip(&[(format!("{evil}/data.pkl"), b"garbage".to_vec())]);
        all_commands(evil, &Checkpoint::of_bytes(&keys));
        let two = ["x", evil].map(|folder| (format!("{folder}/data.pkl"), b"N.".to_vec()));
        all_commands(evil, &Checkpoint::of_bytes(&zip(&two)));
    }
}

#[test]
fn bad_stream_keys_cannot_write_to_the_terminal() {
    const HEADER: &[u8] = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";
    let evil = "\x1b[2J\nckptcmp: b: fine";
    let object = dict([("model", dict([("w", tensor_of(evil, 64, 0, &[8], &[1]))]))]).pickle();
    for keys in [P::List(vec![text(evil)]), P::List(vec![text("x\x1b[0m")])] {
        let bytes = [HEADER, &object, &keys.pickle(), &[1, 2, 3]].concat();
        assert_eq!(all_commands("stream", &Checkpoint::of_bytes(&bytes)).code, 2);
    }
}

#[test]
fn very_long_names_are_no_trouble_to_print() {
    for len in [1000, 70_000, 10 << 20] {
        let name = format!("decoder.{}.weight", "x".repeat(len));
        let one = Checkpoint::with(model_with([(name.as_str(), tensor(&[8]))]), plain_args());
        let other = tensor_of("0", 64, 8, &[8], &[1]);
        let other = Checkpoint::with(model_with([(name.as_str(), other)]), plain_args());
        let without = Checkpoint::with(model_with([]), plain_args());
        all_commands("a long name", &one);
        compare("a long name that differs", &one.path(), &other.path());
        compare("a long name on one side", &one.path(), &without.path());
    }
    // One long name must not make every line of a table long.
    let mut names: Vec<String> =
        (0..50_000).map(|layer| format!("decoder.layers.{layer}.input_layernorm.weight")).collect();
    names.push(format!("decoder.{}.weight", "x".repeat(3000)));
    let model = dict(names.iter().map(|name| (name.as_str(), tensor(&[8]))));
    run("a table", &[Path::new("inspect"), &Checkpoint::with(model, P::None).path()]);
    let class = format!("c{}\nTensor\n)R", "m".repeat(1 << 20)).into_bytes();
    let shared = P::Put(3, Box::new(P::Raw(class)));
    let all = names.iter().enumerate().map(|(number, name)| {
        (name.as_str(), if number == 0 { shared.clone() } else { P::Get(3) })
    });
    all_commands("a long class", &Checkpoint::with(dict(all), P::None));
}
