//! Promise: what an optimizer keeps is compared like the weights, whatever layout and optimizer it was saved by.
//!
//! `fixtures/optimizer` was written by Megatron-Core's own optimizers; its `expected.json` tells every state as the
//! parameter's own attributes did.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{
    Copied, Run, assert_all_equal, ckptcmp, compare, compare_with, differing, fixture, flip,
    gather, inspect, layout, names, read_json, screen, sha256, sizes,
};
use serde_json::Value;

const BOTH: &[&str] = &["--section", "model,optimizer"];

const KEPT: [&str; 7] = [
    "dense/tp1",
    "dense/tp2dp2-distributed",
    "tied/pp2dp2-distributed",
    "moe/ep2-distributed",
    "buckets/tp1",
    "buckets/dp2",
    "buckets/tp2-core-0.15",
];

fn optimizer(path: &str) -> PathBuf {
    fixture("optimizer").join(path)
}

/// The file of one rank in a copy of `dense/tp2dp2-distributed`.
fn distrib_optim(copied: &Copied, rank: &str) -> PathBuf {
    copied.path().join("iter_0000002").join(rank).join("distrib_optim.pt")
}

fn assert_states(path: &Path, expected: &Value) {
    let inspected = inspect(path);
    let tensors = inspected["tensors"].as_object().unwrap();
    let is_state = |name: &&String| name.starts_with("optimizer.");
    let found: BTreeSet<&String> = tensors.keys().filter(is_state).collect();
    let expected = expected.as_object().unwrap();
    assert_eq!(found, expected.keys().collect(), "{}", path.display());
    for (name, wanted) in expected {
        let numel: usize = sizes(&wanted["shape"]).iter().product();
        let mut bytes = gather(&tensors[name]);
        // More vocabulary rows are padding.
        bytes.truncate(numel * 4);
        assert_eq!(sha256::hex(&bytes), wanted["sha256"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn every_state_is_that_of_its_parameter() {
    for path in KEPT {
        let set = path.split('/').next().unwrap();
        let expected = read_json(&optimizer(set).join("expected.json"));
        assert_states(&optimizer(path), &expected);
    }
    let expected = read_json(&layout("gpt-small/expected-optimizer.json"));
    for path in ["gpt-small/optimizer-tp1", "gpt-small/optimizer-tp2"] {
        assert_states(&layout(path), &expected);
    }
}

#[test]
fn a_distributed_optimizer_equals_one_that_is_not() {
    let (a, b) = (optimizer("dense/tp1"), optimizer("dense/tp2dp2-distributed"));
    let run = compare_with(&a, &b, BOTH);
    assert_eq!(run.code, 0, "{run:?}");
    assert_all_equal(&run);
    let result = run.json();
    let names: Vec<&String> = result.as_object().unwrap().keys().collect();
    for state in ["exp_avg", "exp_avg_sq", "fp32_param"] {
        let prefix = format!("optimizer.{state}.");
        let count = names.iter().filter(|name| name.starts_with(&prefix)).count();
        assert_eq!(count * 4, names.len(), "{state}");
    }
}

#[test]
fn buckets_are_compared_by_parameter() {
    let paths = ["buckets/tp1", "buckets/dp2", "buckets/tp2-core-0.15"].map(optimizer);
    for (a, b) in [(0, 1), (0, 2), (1, 2), (2, 2)] {
        let run = compare_with(&paths[a], &paths[b], BOTH);
        assert_eq!(run.code, 0, "{run:?}");
        assert_all_equal(&run);
        assert_eq!(names(&run.json()).len(), 32);
    }
}

#[test]
fn one_changed_moment_in_a_bucket_is_named() {
    for (path, name, index) in [
        ("buckets/dp2", "optimizer.exp_avg.decoder.layers.0.mlp.linear_fc1.weight", [11, 7]),
        ("buckets/tp2-core-0.15", "optimizer.exp_avg_sq.embedding.word_embeddings.weight", [6, 0]),
    ] {
        let copied = Copied::of(&optimizer(path));
        flip(&copied.path(), name, &index);
        let flags = [BOTH, &["--metrics", "max_abs_index"]].concat();
        let run = compare_with(&optimizer("buckets/tp1"), &copied.path(), &flags);
        assert_eq!(run.code, 1, "{run:?}");
        let result = run.json();
        assert_eq!(differing(&result), [name]);
        assert_eq!(sizes(&result[name]["max_abs_index"]), index);
    }
}

#[test]
fn nothing_between_the_parameters_of_a_bucket_is_looked_at() {
    let path = optimizer("buckets/tp2-core-0.15");
    let data = fs::read(path.join("iter_0000002/__0_0.distcp")).unwrap();
    let nan = f32::NAN.to_le_bytes().repeat(8);
    assert!(data.windows(nan.len()).any(|bytes| bytes == nan), "the gaps hold no NaN");
    let run = Run::of(ckptcmp().arg("check").arg(&path));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("all elements finite"), "{run:?}");
}

#[test]
fn buckets_that_the_arguments_do_not_explain_are_refused() {
    let path = optimizer("buckets/dp2");
    for (set, reason) in [
        ("data_parallel_size=4", "pieces of other sizes"),
        ("ddp_bucket_size=64", "elements, but its"),
        ("tensor_model_parallel_size=2", "--set tensor_model_parallel_size=N"),
        ("tensor_model_parallel_size=5", "no multiple of 5"),
        ("pipeline_model_parallel_size=2", "--set"),
        ("virtual_pipeline_model_parallel_size=1000000", "more than the limit"),
    ] {
        let run = compare_with(&path, &path, &[BOTH, &["--set", set]].concat());
        run.refuses(&["optimizer: cannot be compared", reason]);
        let run = compare_with(&path, &path, &["--set", set]);
        assert_eq!(run.code, 0, "{set}: {run:?}");
    }
}

#[test]
fn masters_round_to_the_weights() {
    for path in KEPT {
        let inspected = inspect(&optimizer(path));
        let tensors = inspected["tensors"].as_object().unwrap();
        let mut rounded = 0;
        for (name, master) in tensors {
            let Some(weight) = name.strip_prefix("optimizer.fp32_param.") else { continue };
            let weight = gather(&tensors[weight]);
            let to_nearest_even = |bytes: &[u8]| {
                let bits = u32::from_le_bytes(bytes.try_into().unwrap());
                u16::try_from((bits + 0x7fff + (bits >> 16 & 1)) >> 16).unwrap().to_le_bytes()
            };
            let found: Vec<u8> = gather(master).chunks_exact(4).flat_map(to_nearest_even).collect();
            assert_eq!(found, weight, "{path}: {name}");
            rounded += 1;
        }
        assert!(rounded >= 8, "{path}");
    }
}

#[test]
fn one_changed_element_is_found_and_named() {
    let (a, b) = (optimizer("dense/tp1"), optimizer("dense/tp2dp2-distributed"));
    for name in [
        "optimizer.exp_avg.decoder.layers.1.mlp.linear_fc1.weight",
        "optimizer.fp32_param.decoder.layers.0.self_attention.linear_proj.weight",
    ] {
        let copied = Copied::of(&b);
        flip(&copied.path(), name, &[5, 6]);
        let run = compare_with(&a, &copied.path(), BOTH);
        assert_eq!(run.code, 1, "{run:?}");
        let result = run.json();
        let is_other = |(_, entry): &(&String, &Value)| entry["l2"].as_f64() != Some(0.0);
        let others: Vec<_> = result.as_object().unwrap().iter().filter(is_other).collect();
        assert_eq!(others.len(), 1, "{others:?}");
        assert_eq!(others[0].0, name);
        let shown = screen(&a, &copied.path(), BOTH).stdout;
        assert!(shown.contains(name) && shown.contains("at [5, 6]"), "{shown}");
    }
}

#[test]
fn without_its_section_nothing_of_the_optimizer_is_looked_at() {
    let copied = Copied::of(&optimizer("dense/tp2dp2-distributed"));
    fs::write(distrib_optim(&copied, "mp_rank_00"), "no torch file").unwrap();
    fs::remove_file(distrib_optim(&copied, "mp_rank_01")).unwrap();
    let run = compare(&optimizer("dense/tp1"), &copied.path());
    assert_eq!(run.code, 0, "{run:?}");
    let result = run.json();
    assert!(!result.as_object().unwrap().keys().any(|name| name.starts_with("optimizer.")));
}

#[test]
fn a_missing_distrib_optim_is_named() {
    let copied = Copied::of(&optimizer("dense/tp2dp2-distributed"));
    fs::remove_file(distrib_optim(&copied, "mp_rank_01")).unwrap();
    let run = compare_with(&optimizer("dense/tp1"), &copied.path(), BOTH);
    run.refuses(&["b: ", "mp_rank_01/distrib_optim.pt: ", "missing", "--section model"]);
    let result = run.json();
    assert_eq!(result["output_layer.weight"]["l2"], 0.0);
}

#[test]
fn a_distrib_optim_of_another_model_is_refused() {
    let copied = Copied::of(&optimizer("dense/tp2dp2-distributed"));
    let other = optimizer("tied/pp2dp2-distributed/iter_0000002/mp_rank_00_000/distrib_optim.pt");
    fs::copy(other, distrib_optim(&copied, "mp_rank_00")).unwrap();
    let run = compare_with(&optimizer("dense/tp1"), &copied.path(), BOTH);
    run.refuses(&["mp_rank_00/distrib_optim.pt: optimizer state cannot be matched to parameters"]);
}

#[test]
fn a_damaged_distrib_optim_is_named_and_the_weights_are_compared() {
    let copied = Copied::of(&optimizer("dense/tp2dp2-distributed"));
    fs::write(distrib_optim(&copied, "mp_rank_00"), "no torch file").unwrap();
    let run = compare_with(&optimizer("dense/tp1"), &copied.path(), BOTH);
    run.refuses(&["mp_rank_00/distrib_optim.pt: neither a zip archive"]);
    assert_eq!(run.json()["output_layer.weight"]["l2"], 0.0);
}

#[test]
fn experts_whose_ranks_have_no_file_are_missed() {
    let copied = Copied::of(&optimizer("moe/ep2-distributed"));
    let file = copied.path().join("iter_0000002/mp_rank_00_001/distrib_optim.pt");
    fs::remove_file(file).unwrap();
    let run = compare_with(&optimizer("moe/ep2-distributed"), &copied.path(), BOTH);
    run.refuses(&["mp_rank_00_001/distrib_optim.pt: ", "incomplete on at least one rank"]);
}

#[test]
fn parts_of_the_first_distributed_optimizer_are_no_state_that_is_read() {
    let path = layout("faults/optimizer-only-dirs");
    assert_eq!(compare(&path, &path).code, 0);
    let run = compare_with(&path, &path, BOTH);
    run.refuses(&[
        "no optimizer state in this checkpoint",
        "mp_rank_00_000/optim.pt and others: ",
        "23.06",
    ]);
}

#[test]
fn what_the_optimizer_says_of_itself_is_state_without_tensors() {
    let inspected = inspect(&optimizer("dense/tp2dp2-distributed"));
    let groups = &inspected["state"]["optimizer"]["optimizer"]["param_groups"];
    assert_eq!(groups[0]["weight_decay"], 0.1, "{groups}");
    assert_eq!(groups[0]["step"], 2.0, "{groups}");
    let inspected = inspect(&optimizer("dense/tp1"));
    assert_eq!(inspected["state"]["optimizer.step"], serde_json::json!([2]));
    let says = inspected["state"]["optimizer"].to_string();
    assert!(says.contains("wd_mult") && !says.contains("params\""), "{says}");
}
