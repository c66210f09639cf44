//! Promise: `check` finds in one checkpoint the copies that disagree, what is not finite, what is missing and what
//! belongs to nothing, names it with its file, and says nothing of a sound one.

use std::fs;
use std::path::Path;

use crate::common::{self, Copied, Run, ckptcmp, fixture, layout, names, places};
use serde_json::{Value, json};

fn check(path: &Path) -> Run {
    Run::of(ckptcmp().args(["check", "--json"]).arg(path))
}

fn screen(path: &Path) -> Run {
    Run::of(ckptcmp().arg("check").arg(path))
}

/// The report on values that somebody changed and whose sums nobody made anew, for an exit code.
#[track_caller]
fn report_without_sums(path: &Path, code: i32) -> Value {
    let run = Run::of(ckptcmp().args(["check", "--json", "--no-crc"]).arg(path));
    assert_eq!(run.code, code, "{}: {run:?}", path.display());
    run.json()
}

/// The report, for an exit code.
#[track_caller]
fn report(path: &Path, code: i32) -> Value {
    let run = check(path);
    assert_eq!(run.code, code, "{}: {run:?}", path.display());
    run.json()
}

#[test]
fn nothing_is_said_of_sound_checkpoints() {
    let folders = fs::read_dir(fixture("layouts")).unwrap().map(|entry| entry.unwrap().path());
    let is_sound = |path: &std::path::PathBuf| path.is_dir() && !path.ends_with("faults");
    let mut count = 0;
    for config in folders.filter(is_sound) {
        for layout in fs::read_dir(config).unwrap().map(|entry| entry.unwrap().path()) {
            // The optimizer there is a stand-in that belongs to no parameter.
            if !layout.is_dir() || layout.ends_with("optimizer-tp2") {
                continue;
            }
            let report = report(&layout, 0);
            assert_eq!(report["verdict"], "sound", "{}", layout.display());
            for nothing in ["problems", "leftovers"] {
                assert_eq!(report[nothing], json!([]), "{}", layout.display());
            }
            for nothing in ["replicas", "not_finite"] {
                assert_eq!(report[nothing], json!({}), "{}", layout.display());
            }
            count += 1;
        }
    }
    assert!(count > 80, "{count} layouts");
}

#[test]
fn a_replica_that_disagrees_is_named_with_ranks_and_distance() {
    let path = layout("faults/diverged-replica-tp2");
    let report = report(&path, 1);
    assert_eq!(report["verdict"], "unsound");
    assert_eq!(names(&report["replicas"]), ["decoder.layers.1.pre_mlp_layernorm.weight"]);
    let copies =
        report["replicas"]["decoder.layers.1.pre_mlp_layernorm.weight"].as_array().unwrap();
    let [copy] = copies.as_slice() else { panic!("{copies:?}") };
    assert_eq!((&copy["first"], &copy["copy"]), (&json!("mp_rank_00"), &json!("mp_rank_01")));
    assert_eq!((&copy["differing"], &copy["shape"]), (&json!(1), &json!([8])));
    assert_eq!(copy["max_abs"], copy["l2"]);
    let screen = screen(&path);
    assert!(screen.stdout.contains("mp_rank_01 differs from mp_rank_00: 1 of [8]"), "{screen:?}");
    assert!(screen.stdout.contains("unsound: 1 tensor with copies that disagree"), "{screen:?}");
}

#[test]
fn a_tied_output_layer_that_has_drifted_is_a_copy_that_disagrees() {
    let copied = Copied::of(&layout("gpt-tied/pp2"));
    let embedding = "embedding.word_embeddings.weight";
    let places = places(&copied.path(), embedding, &[2, 1]);
    assert_eq!(places.len(), 2, "the embedding and its copy on the last stage");
    places[1].flip();
    let report = report_without_sums(&copied.path(), 1);
    assert_eq!(names(&report["replicas"]), [embedding]);
    assert_eq!(report["replicas"][embedding][0]["copy"], "mp_rank_00_001");
    assert_eq!(report["tied"], json!({ "output_layer.weight": embedding }));
}

#[test]
fn norms_that_drifted_and_biases_that_are_parts_of_a_sum_are_told_apart() {
    let copied = Copied::of(&fixture("deepspeed/neox/tp2pp2"));
    let flip_second = |name: &str| places(&copied.path(), name, &[1])[1].flip();
    flip_second("layers.0.input_layernorm.weight");
    let found = report_without_sums(&copied.path(), 1);
    assert_eq!(names(&found["replicas"]), ["layers.0.input_layernorm.weight"]);
    let copy = &found["replicas"]["layers.0.input_layernorm.weight"][0];
    assert_eq!((&copy["policy"], &copy["differing"]), (&json!("mean"), &json!(1)));
    assert_eq!(copy["copy"], "layer_02-model_01-model_states.pt");
    let sums = found["partial_sums"].as_object().unwrap();
    assert!(sums.keys().all(|name| name.ends_with(".bias")), "{sums:?}");
    assert!(sums.values().all(|copies| copies[0]["policy"] == "sum"), "{sums:?}");
}

#[test]
fn what_is_not_finite_is_counted_by_tensor() {
    let report = report(&layout("faults/nan-tp1"), 1);
    let not_finite = report["not_finite"].as_object().unwrap();
    let counts: Vec<_> = not_finite.values().map(|of| (&of["nan"], &of["inf"])).collect();
    assert!(counts.contains(&(&json!(1), &json!(0))), "{report}");
    assert!(counts.contains(&(&json!(0), &json!(1))), "{report}");
    for (name, of) in not_finite {
        let index = common::sizes(&of["first_index"]);
        let place = &places(&layout("faults/nan-tp1"), name, &index)[0];
        let bytes = fs::read(&place.file).unwrap();
        // The exponent of a bfloat16 that is no number is all ones.
        assert_eq!(bytes[place.offset + 1] & 0x7f, 0x7f, "{name} {index:?}");
        assert_eq!(bytes[place.offset] & 0x80, 0x80, "{name} {index:?}");
    }
}

#[test]
fn files_and_bytes_that_belong_to_nothing_are_named() {
    let copied = Copied::of(&layout("gpt/tp2"));
    let rank = copied.iteration().join("mp_rank_01").join("model_optim_rng.pt");
    fs::copy(&rank, copied.iteration().join("mp_rank_01").join("model_optim_rng.bak.pt")).unwrap();
    let mut bytes = fs::read(&rank).unwrap();
    bytes.extend_from_slice(b"left by another writer");
    fs::write(&rank, bytes).unwrap();
    let report = report(&copied.path(), 1);
    let leftovers: Vec<&str> =
        report["leftovers"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    let [backup, trailing] = leftovers.as_slice() else { panic!("{leftovers:?}") };
    assert!(backup.contains("mp_rank_01/model_optim_rng.bak.pt: no tensor comes from"), "{backup}");
    let said = "mp_rank_01/model_optim_rng.pt: 22 bytes behind the end of what was saved";
    assert!(trailing.contains(said), "{trailing}");
}

#[test]
fn what_is_missing_cut_off_or_a_pointer_is_trouble_and_named() {
    for (fault, words) in [
        ("missing-shard", "mp_rank_01_001/model_optim_rng.pt: missing shard"),
        ("truncated", "cut off at byte"),
        ("not-a-checkpoint", "git-lfs pointer"),
        ("missing-key-tp2", "missing on"),
        ("tracker-to-nowhere", "there is no folder"),
    ] {
        check(&layout(&format!("faults/{fault}"))).refuses(&[words]);
    }
}

#[test]
fn the_report_is_the_same_for_any_number_of_threads_and_quiet_says_nothing() {
    let path = layout("faults/nan-tp1");
    let threads =
        |count: &str| Run::of(ckptcmp().args(["check", "--threads", count]).arg(&path)).stdout;
    assert_eq!(threads("1"), threads("5"));
    let quiet = Run::of(ckptcmp().args(["check", "--quiet"]).arg(&path));
    assert_eq!((quiet.code, quiet.stdout.as_str(), quiet.stderr.as_str()), (1, "", ""));
}

/// Changes one bit of a file.
fn flip_bit(file: &Path, at: usize, bit: usize) {
    let mut bytes = fs::read(file).unwrap();
    bytes[at] ^= 1 << bit;
    fs::write(file, bytes).unwrap();
}

#[test]
fn an_element_that_no_longer_has_its_sum_is_named_with_file_entry_place_and_tensor() {
    for (checkpoint, tensor) in [
        ("layouts/gpt/tp2", "decoder.layers.0.mlp.linear_fc1.weight"),
        ("torch_dist/gpt-small/tp2pp2", "decoder.layers.0.mlp.linear_fc1.weight"),
        ("hf/bin-sharded", "model.layers.1.mlp.down_proj.weight"),
        ("dcp/sharded", "embed.weight"),
    ] {
        let copied = Copied::of(&fixture(checkpoint));
        let place = places(&copied.path(), tensor, &[1, 1])[0].clone();
        place.flip();
        let run = Run::of(ckptcmp().arg("check").arg(copied.path()));
        let name = place.file.file_name().unwrap().to_string_lossy().into_owned();
        run.refuses(&[&name, "/data/", " at byte ", "CRC-32", "damaged", tensor]);
        assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
        assert!(run.stdout.contains("trouble: 1 part could not be read"), "{run:?}");
        // Nothing but the sum tells.
        assert_eq!(report_without_sums(&copied.path(), 0)["verified_sums"], Value::Null);
    }
}

#[test]
fn entries_that_hold_no_elements_have_their_sums_verified_on_opening() {
    let intact = layout("gpt/tp2");
    let copied = Copied::of(&intact);
    let rank = copied.iteration().join("mp_rank_01").join("model_optim_rng.pt");
    let bytes = fs::read(&rank).unwrap();
    let find = |text: &str| {
        bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap()
    };
    // Behind the header of 30 bytes that ends in two lengths, and behind its name, lies padding.
    let version = find("/version") + "/version".len();
    let header = bytes[..version].windows(4).rposition(|four| four == b"PK\x03\x04").unwrap();
    let padding = usize::from(u16::from_le_bytes([bytes[header + 28], bytes[header + 29]]));
    // The name of an argument that is not used to read; and the archive's version.
    for (at, entry) in [(find("hidden_size") + 2, "data.pkl"), (version + padding, "version")] {
        flip_bit(&rank, at, 0);
        let compare = common::compare(&intact, &copied.path());
        let check = Run::of(ckptcmp().args(["check", "--no-crc"]).arg(copied.path()));
        for run in [compare, check] {
            run.refuses(&["mp_rank_01", entry, "CRC-32"]);
        }
        fs::write(&rank, &bytes).unwrap();
    }
}

#[test]
fn a_file_that_was_written_without_sums_is_not_called_damaged() {
    // Of the same values, whose optimizer belongs to no weights.
    let [none, summed] = ["no_crc.pt", "protocol2.pt"]
        .map(|name| report(&fixture(&format!("torch-file/{name}")), 2));
    assert_eq!(none["problems"].as_array().unwrap().len(), 1, "{none}");
    assert_eq!((&none["tensors"], &none["verified_sums"]), (&summed["tensors"], &json!(0)));
    assert!(summed["verified_sums"].as_u64() > Some(10), "{summed}");
}

#[test]
fn globals_that_no_framework_writes_are_a_warning_with_their_files() {
    let path = layout("faults/evil-pickle-tp1");
    let rank = "mp_rank_00/model_optim_rng.pt";
    let found = report(&path, 0);
    assert_eq!(names(&found["globals"]), ["posix.system"]);
    let global = &found["globals"]["posix.system"];
    assert_eq!(global["count"], 1);
    assert!(global["files"][0].as_str().unwrap().ends_with(rank), "{global}");
    let run = screen(&path);
    assert!(run.stdout.contains("posix.system: 1 time, in "), "{run:?}");
    let failed = Run::of(ckptcmp().args(["check", "--fail-on", "globals"]).arg(&path));
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(failed.stdout.contains("unsound: 1 global that no training framework"), "{failed:?}");
}

#[test]
fn globals_of_files_beside_the_model_count_too() {
    let copied = Copied::of(&fixture("hf/sharded"));
    let flagged = |name: &str, bytes: &[u8]| {
        fs::write(copied.path().join(name), bytes).unwrap();
        let found = Run::of(ckptcmp().args(["check", "--json"]).arg(copied.path())).json();
        assert_eq!(names(&found["globals"]), ["os.system"], "{name}");
        fs::remove_file(copied.path().join(name)).unwrap();
    };
    flagged("training_args.bin", b"\x80\x02cos\nsystem\n.");
    flagged("scheduler.pt", b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.");
    flagged("state.pkl", b"(dp0\ncos\nsystem\n.");
}

#[test]
fn a_weight_that_is_not_its_master_rounded_is_a_finding() {
    let cases = [
        ("optimizer/dense/tp2dp2-distributed", 15, "decoder.layers.1.mlp.linear_fc2.weight"),
        ("optimizer/moe/ep2-distributed", 16, "output_layer.weight"),
        ("deepspeed/zero/z1", 5, "fc.weight"),
    ];
    for (path, weights, name) in cases {
        let sound = report(&fixture(path), 0);
        let all = json!({ "weights": weights, "rounded": weights, "rounds_otherwise": null, "not_rounded": {} });
        assert_eq!(sound["masters"], all, "{path}");

        let copied = Copied::of(&fixture(path));
        common::flip(&copied.path(), name, &[1, 1]);
        let masters = &report_without_sums(&copied.path(), 1)["masters"];
        assert_eq!(masters["rounded"], weights - 1, "{path}");
        let found = masters["not_rounded"].as_object().unwrap();
        assert_eq!((found.len(), &found[name]["elements"]), (1, &json!(1)), "{path}: {found:?}");
        assert_eq!(found[name]["max_ulp"], 1, "{path}: {found:?}");
        let run = Run::of(ckptcmp().args(["check", "--no-crc"]).arg(copied.path()));
        assert!(run.stdout.contains(&format!("{name}: 1 of ")), "{run:?}");
        assert!(run.stdout.contains(", off by up to 1 ulp of bfloat16\n"), "{run:?}");
    }
}

#[test]
fn weights_that_are_read_from_their_masters_prove_nothing() {
    assert_eq!(report(&fixture("deepspeed/zero/z3"), 0)["masters"]["weights"], 0);
}
