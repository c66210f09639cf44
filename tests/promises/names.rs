//! Names of a user's own, masters in the place of weights, and likely partners.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::array::{Array, write_safetensors};
use crate::common::{
    Copied, Run, ckptcmp, compare_with, fixture, flip, inspect, layout, names, run, screen,
};

const SMALL: &str = "gpt-small/tp2";

/// The weights of `SMALL` in a file, by other names.
fn renamed(folder: &TempDir, name: impl Fn(&str) -> String) -> PathBuf {
    let found = inspect(&layout(SMALL));
    let tensors = found["tensors"].as_object().unwrap().iter();
    let tensors: Vec<(String, Array)> =
        tensors.map(|(old, tensor)| (name(old), Array::of(tensor))).collect();
    let file = folder.path().join("renamed.safetensors");
    write_safetensors(
        &file,
        tensors.iter().map(|(name, array)| (name.as_str(), array)),
        &json!({}),
    );
    file
}

/// `decoder.layers.3.mlp.x` as `net.blocks.3.ffn.x`.
fn other(name: &str) -> String {
    let name = name.replace("decoder.layers.", "blocks.").replace(".mlp.", ".ffn.");
    format!("net.{}", name.replace("embedding.", "embed."))
}

const RULES: [&str; 6] = [
    "--map",
    "net.blocks.{i}.ffn=decoder.layers.{i}.mlp",
    "--map",
    "net.blocks=decoder.layers",
    "--map",
    "b:net.embed=embedding",
];

fn document(a: &Path, b: &Path, flags: &[&str]) -> (i32, Value) {
    let mut command = ckptcmp();
    command.arg("compare").args([a, b]).args(["-o", "/dev/null", "--report", "-"]).args(flags);
    let run = Run::of(&mut command);
    (run.code, run.json())
}

#[test]
fn names_of_another_code_base_are_compared_as_megatrons() {
    let folder = TempDir::new().unwrap();
    let file = renamed(&folder, other);
    let small = layout(SMALL);
    let whole = names(&compare_with(&small, &small, &[]).json()).len();
    let rules = [&RULES[..], &["--map", "net.*=*"]].concat();
    let run = compare_with(&small, &file, &rules);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(names(&run.json()).len(), whole);
    assert_eq!(compare_with(&file, &small, &rules).code, 1, "net.embed of a is not that of b");

    let (code, found) = document(&small, &file, &rules);
    assert_eq!((code, &found["verdict"]), (0, &json!("identical")));
    let tensors = found["tensors"].as_array().unwrap();
    for tensor in tensors {
        let name = tensor["name"].as_str().unwrap();
        assert_eq!(tensor["renamed_from"], json!({"a": null, "b": other(name)}));
    }
    let map = found["options"]["map"].as_array().unwrap();
    let counts: Vec<u64> = map.iter().map(|rule| rule["renamed"]["b"].as_u64().unwrap()).collect();
    assert_eq!(counts.iter().sum::<u64>(), tensors.len() as u64, "{counts:?}");
    assert!(map.iter().all(|rule| rule["renamed"]["a"] == 0), "{map:?}");
    assert_eq!((&map[2]["side"], &map[2]["line"]), (&json!("b"), &Value::Null));
    assert!(!counts.contains(&0));
}

#[test]
fn one_changed_element_is_named_by_the_new_name() {
    let folder = TempDir::new().unwrap();
    let file = renamed(&folder, other);
    flip(&file, "net.blocks.1.ffn.linear_fc2.weight", &[3, 2]);
    let rules = folder.path().join("names.map");
    fs::write(&rules, "# ours = Megatron's\nnet.blocks.{layer}.ffn = decoder.layers.{layer}.mlp\n\nnet.blocks = decoder.layers\nnet.embed = embedding # table\nnet = \n").unwrap();
    let run = screen(&layout(SMALL), &file, &["--map", rules.to_str().unwrap()]);
    assert_eq!(run.code, 1, "{run:?}");
    for words in ["decoder.layers.1.mlp.linear_fc2.weight", "at [3, 2]: ", "1 of 15 tensors differ"]
    {
        assert!(run.stdout.contains(words), "{}", run.stdout);
    }
}

#[test]
fn names_that_the_screen_shows_may_be_renamed_too() {
    // A Llama of Hugging Face's has Megatron's names beside a Megatron checkpoint; one of them gets a name of that one.
    let folder = TempDir::new().unwrap();
    let odd = renamed(&folder, |name| name.replace("final_layernorm", "last_norm"));
    let run =
        compare_with(&odd, &layout(SMALL), &["--map", "decoder.last_norm=decoder.final_layernorm"]);
    assert_eq!(run.code, 0, "{run:?}");
    let swap = [
        "--map",
        "b:decoder.layers.0=decoder.layers.1",
        "--map",
        "b:decoder.layers.1=decoder.layers.0",
    ];
    let run = screen(&layout(SMALL), &layout(SMALL), &swap);
    assert_eq!(run.code, 1, "swapped once, not twice: {run:?}");
    let both = swap.map(|rule| rule.trim_start_matches("b:"));
    assert_eq!(compare_with(&layout(SMALL), &layout(SMALL), &both).code, 0);
}

#[test]
fn the_tensors_of_an_optimizer_follow_their_weights() {
    let moments = layout("gpt-small/optimizer-tp2");
    let flags = ["--section", "model,optimizer", "--map", "decoder=net"];
    let run = compare_with(&moments, &layout("gpt-small/optimizer-tp1"), &flags);
    assert_eq!(run.code, 0, "{run:?}");
    let result = run.json();
    let found = names(&result);
    assert!(found.contains(&"optimizer.exp_avg.net.final_layernorm.weight"), "{found:?}");
    assert!(!found.iter().any(|name| name.contains("decoder")), "{found:?}");
}

#[test]
fn names_that_meet_are_refused_and_both_are_named() {
    let small = layout(SMALL);
    let meet = ["--map", "decoder.layers.{i}.input_layernorm=norm"];
    compare_with(&small, &small, &meet).refuses(&[
        "ckptcmp: a: norm.weight: --map gives this name to decoder.layers.0.input_layernorm.weight and \
         decoder.layers.1.input_layernorm.weight",
        "ckptcmp: b: norm.weight: --map gives this name to",
    ]);
    let taken = ["--map", "a:decoder.final_layernorm=decoder.layers.0.input_layernorm"];
    compare_with(&small, &small, &taken)
        .refuses(&["a: decoder.layers.0.input_layernorm.weight: --map gives this name to \
         decoder.final_layernorm.weight and decoder.layers.0.input_layernorm.weight"]);
}

#[test]
fn rules_that_match_nothing_are_told_and_bad_ones_refused() {
    let small = layout(SMALL);
    let folder = TempDir::new().unwrap();
    let rules = folder.path().join("x.map");
    let path = rules.to_str().unwrap();
    fs::write(&rules, "decoder = net\nnobody.{n} = x.{n}\n").unwrap();
    let run = screen(&small, &small, &["--map", path, "--map", "a:nobody=x"]);
    assert_eq!(run.code, 0);
    let idle = format!("--map {path}, line 2: nobody.{{n}}=x.{{n}}: matches no name\n");
    assert!(run.stdout.contains(&idle), "{}", run.stdout);
    assert!(run.stdout.contains("--map a:nobody=x: matches no name of a\n"), "{}", run.stdout);

    fs::write(&rules, "decoder = net\n  a.{n = x\n").unwrap();
    let refused = |flag: &str, words: &[&str]| {
        compare_with(&small, &small, &["--map", flag]).refuses(words);
    };
    refused(path, &[&format!("{path}: line 2, column 5: no }} to this {{")]);
    refused("a.{i}=b.{j}", &["--map \"a.{i}=b.{j}\": column 9: {j} is not on the left"]);
    refused("no-such-file", &["--map takes OLD=NEW, or a file: no-such-file: cannot be read"]);
}

#[test]
fn rules_are_explained_by_new_names() {
    let folder = TempDir::new().unwrap();
    let rules = folder.path().join("rules.toml");
    fs::write(&rules, "[[rule]]\nmatch = 'net.*'\nrtol = 1e-3\n").unwrap();
    let small = layout(SMALL);
    let explain = |flags: &[&str]| {
        Run::of(ckptcmp().arg("explain-rules").args([&rules, &small, &small]).args(flags))
    };
    assert_eq!(explain(&[]).code, 1);
    let run = explain(&["--map", "decoder=net", "--map", "nobody=x"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(
        run.stdout.contains("   net.final_layernorm.weight\n")
            || run.stdout.contains("   net.layers.0"),
        "{run:?}"
    );
    assert!(run.stdout.contains("--map nobody=x: matches no name\n"), "{}", run.stdout);
}

#[test]
fn likely_partners_are_suggested_and_change_no_verdict() {
    let folder = TempDir::new().unwrap();
    let file = renamed(&folder, other);
    let plain = folder.path().join("plain.safetensors");
    fs::rename(&file, &plain).unwrap();
    let file = renamed(&folder, str::to_owned);
    let (code, found) = document(&plain, &file, &[]);
    assert_eq!((code, &found["verdict"]), (2, &json!("trouble")), "no name is on both sides");
    let partners = found["suggested"]["partners"].as_array().unwrap();
    assert!(partners.len() > 8, "{partners:?}");
    for partner in partners {
        let [a, b] = ["a", "b"].map(|side| partner[side].as_str().unwrap());
        assert_eq!((a, &partner["values"]), (&*other(b), &json!("all")));
    }
    assert_eq!(found["suggested"]["left_out"], 0);
    let shown = screen(&plain, &file, &[]);
    let line =
        "\nnet.blocks.0.ffn.linear_fc1.weight\n   in b: decoder.layers.0.mlp.linear_fc1.weight\n";
    assert!(shown.stdout.contains(line), "{}", shown.stdout);

    // What is suggested does what it says.
    let rules = found["suggested"]["map"].as_array().unwrap();
    let flags: Vec<&str> =
        rules.iter().flat_map(|rule| ["--map", rule.as_str().unwrap()]).collect();
    let (code, found) = document(&plain, &file, &flags);
    assert_eq!((code, &found["verdict"]), (0, &json!("identical")), "{flags:?}");
    assert!(found["suggested"]["partners"].as_array().unwrap().is_empty());
}

#[test]
fn partners_need_the_same_values_and_a_number_in_common_where_several_have_them() {
    let folder = TempDir::new().unwrap();
    let array = |first: f32| Array::float32(&[first, 2.0, 0.0]);
    let write = |name: &str, tensors: &[(&str, Array)]| {
        let file = folder.path().join(name);
        let tensors = tensors.iter().map(|(name, array)| (*name, array));
        write_safetensors(&file, tensors, &json!({}));
        file
    };
    let shared = ("w", array(1.0));
    let a = write(
        "a.safetensors",
        &[
            shared.clone(),
            ("x.0.g", array(3.0)),
            ("x.1.g", array(3.0)),
            ("x.2.g", array(4.0)),
            ("x.2.h", array(4.0)),
            ("s", Array::float32(&[9.0])),
            ("z", array(-0.0)),
            ("u", array(8.0)),
        ],
    );
    let b = write(
        "b.safetensors",
        &[
            shared,
            ("y.1.g", array(3.0)),
            ("y.0.g", array(3.0)),
            ("y.2.g", array(4.0)),
            ("y.2.h", array(4.0)),
            ("t", Array::float32(&[9.0])),
            ("zero", array(0.0)),
            ("v", array(8.5)),
        ],
    );
    let (code, found) = document(&a, &b, &[]);
    assert_eq!(code, 1);
    let pair = |a: &str, b: &str| json!({"a": a, "b": b, "values": "all"});
    let wanted = [pair("x.0.g", "y.0.g"), pair("x.1.g", "y.1.g"), pair("z", "zero")];
    assert_eq!(found["suggested"]["partners"], json!(wanted));
    let alone = run([Path::new("compare"), &a, &a, Path::new("-o"), Path::new("/dev/null")]);
    assert!(!alone.stdout.contains("under other names"), "{alone:?}");
}

#[test]
fn masters_are_held_against_what_zero_to_fp32_makes_of_them() {
    let zero = |name: &str| fixture("deepspeed/zero").join(name);
    for (stage, code) in [("z1", 1), ("z2-round-robin", 0), ("z3", 0)] {
        let whole = zero(&format!("consolidated-{stage}"));
        let run = screen(&zero(stage), &whole, &["--masters"]);
        assert_eq!(run.code, code, "{run:?}");
        assert!(run.stdout.contains("fp32 masters in the place of weights: 5"), "{}", run.stdout);
        // ZeRO-1 notes no frozen parameters for zero_to_fp32, which so loses them.
        let is_lost = run.stdout.contains("only in a: 1 tensor\nstill.weight\n");
        assert_eq!(is_lost, code == 1, "{}", run.stdout);
        assert!(run.stdout.contains("not compared: optimizer (10 tensors)"), "{}", run.stdout);
        assert_eq!(screen(&whole, &zero(stage), &["--masters"]).code, code);

        let changed = Copied::of(&zero(stage));
        flip(&changed.path(), "optimizer.fp32_param.fc.weight", &[6, 1]);
        let run = screen(&changed.path(), &whole, &["--masters", "--allow-cast"]);
        assert_eq!(run.code, 1, "{run:?}");
        for words in ["\nfc.weight  ", "\n   at [6, 1]: ", "different: 1 of "] {
            assert!(run.stdout.contains(words), "{}", run.stdout);
        }
    }
    let refused = compare_with(&zero("consolidated-z1"), &zero("consolidated-z1"), &["--masters"]);
    refused.refuses(&["no fp32 masters here, nor on the other side"]);
    let numbered = screen(&zero("z0"), &zero("consolidated-z3"), &["--masters"]);
    assert_eq!(numbered.code, 2, "{numbered:?}");
    assert!(
        numbered.stdout.contains("fp32 masters that go by no name of a weight"),
        "{numbered:?}"
    );
    let both = compare_with(&zero("z1"), &zero("z1"), &["--masters", "--section", "model"]);
    assert_eq!(both.code, 2);
}

#[test]
fn masters_of_megatron_are_held_against_weights_of_other_names() {
    let dense = fixture("optimizer/dense/tp1");
    let found = inspect(&dense);
    let prefix = "optimizer.fp32_param.";
    let masters: Vec<(String, Array)> = found["tensors"]
        .as_object()
        .unwrap()
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?, Array::of(tensor))))
        .map(|(name, array)| (name.replace("decoder", "net"), array))
        .collect();
    assert!(masters.len() > 5);
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("fp32.safetensors");
    write_safetensors(
        &file,
        masters.iter().map(|(name, array)| (name.as_str(), array)),
        &json!({}),
    );
    let flags = ["--masters", "--map", "b:net=decoder"];
    let run = compare_with(&fixture("optimizer/dense/tp2dp2-distributed"), &file, &flags);
    assert_eq!(run.code, 0, "{run:?}");
    flip(&file, "net.final_layernorm.weight", &[1]);
    let run = screen(&dense, &file, &flags);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.contains("decoder.final_layernorm.weight"), "{}", run.stdout);
}
