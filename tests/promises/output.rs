//! Promise: the JSON, the screen, the flags and the exit codes are what scripts may rely on.

use std::path::PathBuf;

use crate::common::{
    self, Copied, Run, assert_all_equal, ckptcmp, compare, compare_with, fixture, flip, inspect,
    layout, names, places, rename_key, run, screen,
};
use serde_json::json;
use tempfile::TempDir;

const NORM: &str = "decoder.final_layernorm.weight";

fn small() -> PathBuf {
    layout("gpt-small/tp1")
}

/// A copy of the small model with one element changed.
fn changed() -> Copied {
    let copied = Copied::of(&small());
    flip(&copied.path(), NORM, &[3]);
    copied
}

// The JSON

#[test]
fn the_body_is_one_object_of_four_keys_a_tensor_indented_by_four() {
    let run = compare_with(&small(), &changed().path(), &["--include", NORM]);
    let wanted = concat!(
        "{\n",
        "    \"decoder.final_layernorm.weight\": {\n",
        "        \"l2\": L2,\n",
        "        \"cos\": COS,\n",
        "        \"numel\": 8,\n",
        "        \"shape\": [\n",
        "            8\n",
        "        ]\n",
        "    }\n",
        "}\n",
    );
    let number = |key: &str| {
        let line = run.stdout.lines().find_map(|line| line.trim().strip_prefix(key)).unwrap();
        line.trim_end_matches(',').to_owned()
    };
    let (l2, cos) = (number("\"l2\": "), number("\"cos\": "));
    assert_eq!(run.stdout, wanted.replace("L2", &l2).replace("COS", &cos));
    for text in [l2, cos] {
        let value: f64 = text.parse().unwrap();
        assert!(value > 0.0);
        assert_eq!(value.to_string(), text, "the shortest text of a number");
    }
}

#[test]
fn names_are_in_natural_order() {
    let file = layout("dtypes/all.pt");
    let copied = Copied::of(&file);
    rename_key(&copied.path(), "view.strided", "layers.2.abc");
    rename_key(&copied.path(), "view.offset", "layers.10.a");
    let result = compare(&copied.path(), &copied.path()).json();
    let found: Vec<&str> =
        names(&result).into_iter().filter(|name| name.starts_with("layers")).collect();
    assert_eq!(found, ["layers.2.abc", "layers.10.a"]);
    let inspected = inspect(&copied.path());
    assert_eq!(names(&inspected["tensors"]), names(&result));
}

/// Both sides of a pair whose metrics are known by heart: eight ones, one of them doubled in `a`.
fn ones_and_a_two() -> [Copied; 2] {
    let pair = [Copied::of(&small()), Copied::of(&small())];
    for (side, doubled) in pair.iter().zip([Some(3), None]) {
        let place = places(&side.path(), NORM, &[0]).remove(0);
        place.edit(|bytes| {
            for index in 0..8 {
                let bits: u16 = if Some(index) == doubled { 0x4000 } else { 0x3f80 };
                bytes[2 * index..][..2].copy_from_slice(&bits.to_le_bytes());
            }
        });
    }
    pair
}

#[test]
fn each_metric_has_its_key_and_its_value() {
    let [a, b] = ones_and_a_two();
    let cos = 9.0 / 88_f64.sqrt();
    let metrics = [
        ("dtype", json!("bfloat16")),
        ("one_minus_cos", json!(1.0 - cos)),
        ("rel_l2", json!(1.0 / 8_f64.sqrt())),
        ("max_abs", json!(1.0)),
        ("max_abs_index", json!([3])),
        ("max_ulp", json!(128)),
        ("histogram", json!({"0": 1})),
        ("mean_abs", json!(0.125)),
        ("differing", json!(1)),
        ("identical", json!(false)),
        ("norm_a", json!(11_f64.sqrt())),
        ("norm_b", json!(8_f64.sqrt())),
        ("nan_a", json!(0)),
        ("nan_b", json!(0)),
        ("inf_a", json!(0)),
        ("inf_b", json!(0)),
    ];
    let default = ["l2", "cos", "numel", "shape"];
    for (metric, wanted) in &metrics {
        let run = compare_with(&a.path(), &b.path(), &["--metrics", metric]);
        let entry = &run.json()[NORM];
        assert_eq!(names(entry), [&default[..], &[metric]].concat());
        match (entry[metric].as_f64(), wanted.as_f64()) {
            (Some(found), Some(wanted)) => {
                assert!((found - wanted).abs() <= 1e-12 * wanted.abs(), "{metric}: {entry}");
            }
            _ => assert_eq!(&entry[metric], wanted, "{metric}"),
        }
    }
    let run = compare_with(&a.path(), &b.path(), &["--metrics", "all"]);
    let entry = &run.json()[NORM];
    let all: Vec<&str> = default.into_iter().chain(metrics.iter().map(|metric| metric.0)).collect();
    assert_eq!(names(entry), all);
    assert_eq!(entry["l2"].as_f64(), Some(1.0));
    assert!((entry["cos"].as_f64().unwrap() - cos).abs() <= 1e-15, "{entry}");
    let run = compare_with(&a.path(), &b.path(), &["--metrics", "rel_l2,max_abs"]);
    assert_eq!(names(&run.json()[NORM]), [&default[..], &["rel_l2", "max_abs"]].concat());
}

#[test]
fn an_unknown_metric_is_bad_usage_and_is_answered_with_those_there_are() {
    let run = compare_with(&small(), &small(), &["--metrics", "rel_l2,manhattan"]);
    run.refuses(&["manhattan", "rel_l2", "max_abs_index"]);
    assert_eq!(run.stdout, "");
}

#[test]
fn what_is_not_finite_is_null_in_json_and_counted_on_the_screen() {
    let run = compare_with(&layout("faults/nan-tp1"), &small(), &["--metrics", "all"]);
    assert_eq!(run.code, 1);
    let result = run.json();
    let entry = &result["decoder.layers.0.mlp.linear_fc2.weight"];
    assert!(entry["l2"].is_null() && entry["cos"].is_null() && entry["rel_l2"].is_null());
    assert_eq!((&entry["nan_a"], &entry["nan_b"]), (&json!(1), &json!(0)));
    let entry = &result["decoder.layers.1.mlp.linear_fc1.weight"];
    assert!(entry["l2"].is_null() && entry["cos"].is_null());
    assert_eq!((&entry["inf_a"], &entry["inf_b"]), (&json!(1), &json!(0)));
    assert!(run.stderr.contains("not finite: 2 tensors"), "{}", run.stderr);
    assert!(run.stderr.contains("at [2, 5]: a NaN"), "{}", run.stderr);
    assert!(run.stderr.contains("at [7, 0]: a -inf"), "{}", run.stderr);
    assert_eq!(run.verdict(), "different: 2 of 15 tensors differ");
}

#[test]
fn equal_nans_and_infinities_are_no_equality() {
    let broken = layout("faults/nan-tp1");
    let run = compare(&broken, &broken);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("NaN 1 in a, 1 in b"), "{}", run.stderr);
    // Infinities are equal element by element, but have no distance either.
    let infinite =
        ["--include", "decoder.layers.1.mlp.linear_fc1.weight", "--metrics", "differing"];
    let run = compare_with(&broken, &broken, &infinite);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("Inf 1 in a, 1 in b"), "{}", run.stderr);
    assert_eq!(run.json()["decoder.layers.1.mlp.linear_fc1.weight"]["differing"], 0);
}

#[test]
fn where_shapes_differ_both_are_given_and_the_distances_are_null() {
    let shard = layout("gpt-small/tp2/iter_0000005/mp_rank_00");
    let run = compare(&small(), &shard);
    assert_eq!(run.code, 1);
    let name = "decoder.layers.0.mlp.linear_fc1.weight";
    let result = run.json();
    let wanted = json!({"l2": null, "cos": null, "numel": [192, 96], "shape": [[24, 8], [12, 8]]});
    assert_eq!(result[name], wanted);
    assert!(run.stderr.contains("shape [24, 8] in a, [12, 8] in b"), "{}", run.stderr);
}

// The screen

#[test]
fn the_closing_line_of_identical_checkpoints_says_so() {
    let run = screen(&small(), &layout("gpt-small/tp2"), &[]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert_eq!(run.stdout.lines().last(), Some("identical: all 15 tensors bit for bit"));
    for word in ["gpt-small/tp1", "tp1 pp1", "tp2 pp1", "iteration 5", "compared 15 tensors"] {
        assert!(run.stdout.contains(word), "no {word} in {}", run.stdout);
    }
}

#[test]
fn zeros_of_another_sign_are_equal_but_not_identical() {
    let pair = [Copied::of(&small()), Copied::of(&small())];
    for (side, sign) in pair.iter().zip([0x00, 0x80]) {
        places(&side.path(), NORM, &[3])[0].edit(|bytes| bytes[..2].copy_from_slice(&[0, sign]));
    }
    let [a, b] = pair.each_ref().map(Copied::path);
    let run = compare_with(&a, &b, &["--metrics", "differing,identical"]);
    assert_eq!(run.code, 0);
    assert_eq!(run.verdict(), "equal: all 15 tensors have the same values, 14 bit for bit");
    let entry = &run.json()[NORM];
    assert_eq!((&entry["l2"], &entry["differing"]), (&json!(0.0), &json!(0)));
    assert_eq!(entry["identical"], json!(false));
}

#[test]
fn one_different_element_is_named_with_its_index_and_both_values() {
    let [a, b] = ones_and_a_two();
    let run = screen(&a.path(), &b.path(), &[]);
    assert_eq!(run.code, 1);
    assert!(run.stdout.contains(&format!("\n{NORM}  ")), "{}", run.stdout);
    assert!(run.stdout.contains("at [3]: a 2.0, b 1.0\n"), "{}", run.stdout);
    assert_eq!(run.stdout.lines().last(), Some("different: 1 of 15 tensors differ"));
}

#[test]
fn any_changed_element_of_any_tensor_is_found_under_its_name() {
    for path in ["gpt/tp2pp2vpp2-account", "moe/grouped-tp2ep2", "mla/mindspeed-mm-split-tp2"] {
        let reference = layout(path);
        let inspected = inspect(&reference);
        for (name, tensor) in inspected["tensors"].as_object().unwrap() {
            let index: Vec<usize> =
                common::sizes(&tensor["shape"]).iter().map(|size| size * 2 / 3).collect();
            let copied = Copied::of(&reference);
            flip(&copied.path(), name, &index);
            let run =
                compare_with(&reference, &copied.path(), &["--metrics", "max_abs_index,differing"]);
            assert_eq!(run.code, 1, "{path}: {name}");
            let result = run.json();
            assert_eq!(common::differing(&result), [name], "{path}");
            assert_eq!(common::sizes(&result[name]["max_abs_index"]), index, "{path}: {name}");
            assert_eq!(result[name]["differing"], 1, "{path}: {name}");
        }
    }
}

#[test]
fn names_on_one_side_only_are_a_difference_and_listed() {
    let copied = Copied::of(&small());
    let named = |norm: &str| [0, 1].map(|layer| format!("decoder.layers.{layer}.{norm}.weight"));
    let (known, other) = (named("pre_mlp_layernorm"), named("pre_mlp_mystery77"));
    for (known, other) in known.iter().zip(&other) {
        rename_key(&copied.path(), known, other);
    }
    let run = compare(&copied.path(), &small());
    assert_eq!(run.code, 1, "{run:?}");
    let [first, second] = [0, 1].map(|at| format!("{}\n   in b: {}\n", other[at], known[at]));
    let in_a = format!(
        "only in a: 2 tensors, 2 of them likely under another name in b\n{first}{second}\n"
    );
    let in_b = format!("only in b: 2 tensors\n{}\n", known.join("\n"));
    for listed in [in_a, in_b] {
        assert!(run.stderr.contains(&listed), "{}", run.stderr);
    }
    assert_eq!(run.verdict(), "different: 13 tensors equal, 2 only in a, 2 only in b");
    assert_eq!(names(&run.json()).len(), 13);
}

#[test]
fn a_diverged_replica_is_named_with_both_ranks_and_the_largest_difference() {
    let run = compare(&layout("faults/diverged-replica-tp2"), &small());
    assert_eq!(run.code, 1);
    let line = "a: decoder.layers.1.pre_mlp_layernorm.weight: mp_rank_01 differs from mp_rank_00 by up to 7.81e-3";
    assert!(run.stderr.contains(line), "{}", run.stderr);
    assert!(run.stderr.contains("replicas that disagree: 1"), "{}", run.stderr);
    assert!(run.verdict().ends_with("1 replica disagrees with the first copy"), "{run:?}");
    assert_eq!(common::differing(&run.json()), [""; 0]);
}

#[test]
fn a_tied_and_an_untied_side_are_compared_and_the_screen_says_so() {
    let reference = layout("gpt-tied/tp1");
    let untied = layout("gpt-tied/pp2");
    let untie = ["--set", "b:untie_embeddings_and_output_weights=true"];
    let run = compare_with(&reference, &untied, &untie);
    assert_all_equal(&run);
    assert_eq!(run.json()["output_layer.weight"]["numel"], 448);
    let remark = "output_layer.weight: tied to the word embeddings in a, a tensor of its own on the other side";
    assert!(run.stderr.contains(remark), "{}", run.stderr);

    let copied = Copied::of(&untied);
    let output = common::Run::of(
        ckptcmp().args(["inspect", "--json"]).arg(copied.path()).args(["--set", &untie[1][2..]]),
    );
    let piece = &output.json()["tensors"]["output_layer.weight"]["pieces"][0];
    let offset = usize::try_from(piece["offset"].as_u64().unwrap()).unwrap();
    let place = common::Place { file: piece["file"].as_str().unwrap().into(), offset };
    place.flip();
    let run = compare_with(&reference, &copied.path(), &untie);
    assert_eq!((run.code, common::differing(&run.json())), (1, vec!["output_layer.weight"]));
    // Where both are tied the copy is a replica that has diverged.
    let run = compare(&reference, &copied.path());
    assert_eq!(run.code, 1);
    let line = "b: embedding.word_embeddings.weight: mp_rank_00_001 differs from mp_rank_00_000";
    assert!(run.stderr.contains(line), "{}", run.stderr);
    assert!(!names(&run.json()).contains(&"output_layer.weight"));
}

#[test]
fn colours_are_for_those_who_want_them() {
    let changed = changed();
    let (a, b) = (small(), changed.path());
    let escape = '\x1b';
    assert!(!screen(&a, &b, &[]).stdout.contains(escape), "a pipe is no terminal");
    assert!(screen(&a, &b, &["--color", "always"]).stdout.contains(escape));
    assert!(!screen(&a, &b, &["--color", "never"]).stdout.contains(escape));
    let run = compare_with(&a, &b, &["--color", "always"]);
    assert!(!run.stdout.contains(escape), "JSON has no colours");
    let mut command = ckptcmp();
    command.env("NO_COLOR", "1").arg("inspect").arg(&a);
    assert!(!Run::of(&mut command).stdout.contains(escape));
    let plain = screen(&a, &b, &[]).stdout;
    let painted = screen(&a, &b, &["--color", "always"]).stdout;
    let mut stripped = String::new();
    let mut parts = painted.split(escape);
    stripped.push_str(parts.next().unwrap());
    parts.for_each(|part| stripped.push_str(part.split_once('m').unwrap().1));
    assert_eq!(stripped, plain, "colours change no word");
}

#[test]
fn quiet_prints_nothing_but_errors() {
    let changed = changed();
    let run = screen(&small(), &changed.path(), &["--quiet"]);
    assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (1, "", ""));
    let run = compare_with(&small(), &changed.path(), &["-q"]);
    assert_eq!((run.code, run.stderr.as_str()), (1, ""));
    assert_eq!(common::differing(&run.json()), [NORM]);
    let run = screen(&layout("faults/sparse-tp1"), &small(), &["-q"]);
    run.refuses(&["linear_fc1.weight"]);
    assert_eq!((run.stdout.as_str(), run.stderr.lines().count()), ("", 1));
}

#[test]
fn a_reader_that_has_seen_enough_of_a_screen_is_no_error_and_a_lost_result_is() {
    for (flags, code) in [
        (&["inspect"][..], 0),
        (&["check"], 0),
        (&["compare", "-o", "/dev/null"], 0),
        (&["inspect", "--json"], 2),
        (&["check", "--json"], 2),
        (&["compare", "-o", "-"], 2),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = ckptcmp();
        command.args(flags).arg(small());
        if flags[0] == "compare" {
            command.arg(small());
        }
        let output = command.stdout(writer).stderr(std::process::Stdio::piped());
        let output = output.spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{flags:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        let is_told = said.contains("ckptcmp: standard output: cannot be written: ");
        assert!(is_told == (code == 2) && !said.contains("panicked"), "{flags:?}: {said}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_does_not_change_the_verdict() {
    for (fault, code) in [("faults/nan-tp1", 1), ("faults/sparse-tp1", 2)] {
        let output = "out.json";
        let folder = TempDir::new().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = ckptcmp();
        command.current_dir(folder.path()).args(["compare", "-o", output]);
        command.args([layout(fault), small()]);
        let status = command.stdout(writer).stderr(std::process::Stdio::null()).status();
        assert_eq!(status.unwrap().code(), Some(code), "{fault} -o {output}");
    }
}

// Selection and exit codes

#[test]
fn globs_take_names_in_and_leave_names_out() {
    let selected = |flags: &[&str]| {
        let run = compare_with(&small(), &small(), flags);
        assert_eq!(run.code, 0, "{flags:?}");
        names(&run.json()).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(selected(&["--include", "*.0.mlp.*"]).len(), 2);
    assert_eq!(selected(&["--include", "*norm*", "--include", "output_layer.*"]).len(), 6);
    assert_eq!(selected(&["--exclude", "decoder.*"]).len(), 2);
    let both = selected(&["--include", "decoder.layers.1.*", "--exclude", "*norm*"]);
    assert_eq!(both.len(), 4);
    assert!(
        both.iter().all(|name| name.starts_with("decoder.layers.1.") && !name.contains("norm"))
    );
}

#[test]
fn names_that_are_left_out_are_no_difference() {
    let changed = changed();
    assert_eq!(compare_with(&small(), &changed.path(), &["--exclude", NORM]).code, 0);
    let run = compare_with(&layout("gpt8/tp1"), &layout("gpt8/tp1"), &["--include", "*.7.*"]);
    assert_eq!(run.verdict(), "identical: all 6 tensors bit for bit");
}

#[test]
fn a_tensor_that_cannot_be_read_is_no_trouble_once_it_is_excluded() {
    let path = layout("faults/unknown-name-tp2");
    compare(&path, &path).refuses(&["mystery.weight"]);
    assert_all_equal(&compare_with(&path, &path, &["--exclude", "*.mystery.weight"]));
    let run = compare_with(&path, &path, &["--include", "decoder.final*"]);
    assert_eq!(run.code, 2, "only an exclusion by name silences a problem");
}

#[test]
fn a_selection_of_nothing_is_trouble() {
    for flags in [["--include", "nothing"], ["--exclude", "*"]] {
        compare_with(&small(), &small(), &flags).refuses(&["nothing to compare"]);
    }
}

#[test]
fn exit_zero_hides_differences_and_nothing_else() {
    let changed = changed();
    assert_eq!(screen(&small(), &changed.path(), &[]).code, 1);
    let run = screen(&small(), &changed.path(), &["--exit-zero"]);
    assert_eq!((run.code, run.verdict()), (0, "different: 1 of 15 tensors differ"));
    assert_eq!(screen(&small(), &layout("faults/sparse-tp1"), &["--exit-zero"]).code, 2);
    let nothing = ["--exit-zero", "--include", "nothing"];
    assert_eq!(screen(&small(), &small(), &nothing).code, 2);
    assert_eq!(screen(&small(), &layout("no-such"), &["--exit-zero"]).code, 2);
}

#[test]
fn bad_usage_is_trouble() {
    let path = small().display().to_string();
    let cases: [&[&str]; 10] = [
        &[],
        &["compare"],
        &["compare", &path],
        &["compare", &path, &path, &path],
        &["compare", &path, &path, "--no-such-flag"],
        &["compare", &path, &path, "--threads", "0"],
        &["compare", &path, &path, "--vocab-size", "many"],
        &["compare", &path, &path, "--include", "[a"],
        &["compare", &path, &path, "--color", "sometimes"],
        &["contrast", &path, &path],
    ];
    for args in cases {
        let run = run(args);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{args:?}");
        assert!(!run.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn help_has_examples_and_exit_codes() {
    let help = run(["--help"]);
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    for word in ["compare", "inspect", "Exit codes:", "\n  0  ", "\n  1  ", "\n  2  "] {
        assert!(help.stdout.contains(word), "no {word:?} in {}", help.stdout);
    }
    for command in ["compare", "inspect"] {
        let help = run([command, "--help"]);
        assert_eq!(help.code, 0);
        let example = format!("Examples:\n  ckptcmp {command} ");
        assert!(help.stdout.contains(&example), "{}", help.stdout);
    }
    let compare = run(["compare", "--help"]).stdout;
    for (metric, _) in [("rel_l2", 0), ("inf_b", 0), ("one_minus_cos", 0)] {
        assert!(compare.contains(metric), "{compare}");
    }
    let version = run(["--version"]);
    assert_eq!(version.stdout, concat!("ckptcmp ", env!("CARGO_PKG_VERSION"), "\n"));
}

// inspect

#[test]
fn inspect_lists_every_tensor_with_its_dtype_shape_and_shards() {
    let path = layout("gpt-tied/tp2pp2");
    let run = run(["inspect".as_ref(), path.as_os_str()]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    for words in [
        &["format", "megatron-torch"][..],
        &["layout", "tp2 pp2"],
        &["iteration", "5"],
        &["decoder.layers.3.mlp.linear_fc1.weight", "bfloat16", "[12, 8]", "2", "mp_rank_00_001"],
        &["decoder.layers.0.input_layernorm.weight", "1 + 1 copy", "mp_rank_00_000"],
        &["output_layer.weight", "tied to embedding.word_embeddings.weight"],
    ] {
        let is_said = run.stdout.lines().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(is_said, "no line with {words:?} in {}", run.stdout);
    }
    let json = inspect(&path);
    assert_eq!(json["tied"]["output_layer.weight"], "embedding.word_embeddings.weight");
    assert_eq!((&json["shards"], &json["iteration"]), (&json!(4), &json!(5)));
    assert_eq!(names(&json["tensors"]).len(), 52);
}

#[test]
fn inspect_reads_no_values_and_says_what_it_cannot_place() {
    let run_on = |path: PathBuf| Run::of(ckptcmp().args(["inspect", "--json"]).arg(path));
    assert_eq!(run_on(layout("faults/nan-tp1")).code, 0);
    let run = run_on(layout("faults/sparse-tp1"));
    run.refuses(&["decoder.layers.0.mlp.linear_fc1.weight", "sparse"]);
    assert_eq!(run.json()["problems"].as_array().unwrap().len(), 1);
    assert_eq!(names(&run.json()["tensors"]).len(), 14);
    run_on(layout("faults/missing-shard")).refuses(&["mp_rank_01_001", "missing shard"]);
    run_on(layout("no-such")).refuses(&["no-such"]);
}

// Habits

#[test]
fn the_screen_says_what_was_not_compared_and_that_both_sides_are_the_same_files() {
    let optimizer = fixture("layouts/gpt-small/optimizer-tp1");
    let run = compare(&optimizer, &small());
    assert!(run.stderr.contains("B\nnot compared: optimizer, state\n"), "{}", run.stderr);
    let both = ["--section", "all"];
    let run = compare_with(&optimizer, &optimizer, &both);
    assert!(!run.stderr.contains("not compared"), "{}", run.stderr);
    assert!(run.stderr.contains("\n   the same files as a\n"), "{}", run.stderr);
    let copied = Copied::of(&small());
    assert!(!compare(&small(), &copied.path()).stderr.contains("the same files"));
    let distributed =
        ["dcp/single", "torch_dist/flattened/torch_dist", "torch_dist/flattened/zarr"];
    for (path, count) in distributed.into_iter().zip([" (6 tensors), state", ", state", ", state"])
    {
        let run = compare(&fixture(path), &fixture(path));
        let line = format!("\nnot compared: optimizer{count}\n");
        assert!(run.stderr.contains(&line), "{path}: {}", run.stderr);
    }
}

#[test]
fn the_errors_of_both_sides_are_told_at_once_and_places_elsewhere_as_such() {
    let run = common::run(["compare", "/no/a", "/no/b", "-o", "-"]);
    run.refuses(&["ckptcmp: a: /no/a: cannot be read", "\nckptcmp: b: /no/b: cannot be read"]);
    let run = common::run(["compare", "s3://bucket/run", "org/model-7b", "-o", "-"]);
    run.refuses(&["a: s3://bucket/run: no such file or folder; nothing is read from a network"]);
    run.refuses(&["b: org/model-7b: no such file or folder; if a model of the Hugging Face hub"]);
}

#[test]
fn the_folder_of_an_index_is_opened() {
    for (folder, index) in [
        (fixture("hf/sharded"), "model.safetensors.index.json"),
        (fixture("torch_dist/gpt-small/tp2pp2/iter_0000005"), ".metadata"),
    ] {
        let run = compare(&folder.join(index), &folder);
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.stderr.contains(&format!("/{index}\n")), "{}", run.stderr);
        assert!(run.stderr.contains("the folder of "), "{}", run.stderr);
    }
}

#[test]
fn a_glob_that_matches_nothing_and_a_section_that_is_not_there_are_named() {
    let run = compare_with(&small(), &small(), &["--include", "*", "--exclude", "layers.0"]);
    assert_eq!(run.code, 0);
    let line = "\n--exclude layers.0: matches no name; a glob has to match all of one\n";
    assert!(run.stderr.contains(line), "{}", run.stderr);
    let weights = fixture("hf/sharded");
    let run = compare_with(&weights, &weights, &["--section", "optimizer"]);
    run.refuses(&["a: ", "no optimizer state in this checkpoint"]);
    assert!(!run.stderr.contains("no tensor"), "{}", run.stderr);
}

#[test]
fn colours_of_the_screen_on_standard_error_can_be_asked_for() {
    let changed = changed();
    let run = compare_with(&small(), &changed.path(), &["--color", "always"]);
    assert!(run.stderr.contains("\x1b[1;31mdifferent"), "{}", run.stderr);
    assert!(!compare(&small(), &changed.path()).stderr.contains('\x1b'));
}
