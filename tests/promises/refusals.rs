//! Promise: nothing is lost silently. What is incomplete, damaged or unknown is named, the rest is still compared,
//! and what the user knows better can be supplied.

use std::fs;
use std::path::Path;

use crate::common::{
    self, Copied, assert_all_equal, ckptcmp, compare, compare_with, crafted, layout, names,
    read_json, rename_key, without_args,
};
use tempfile::TempDir;

/// The words that must be said of each entry of `faults/expected.json`.
const WORDS: &[(&str, &[&str])] = &[
    ("several-iters-no-tracker", &["took the newest, iter_0000005"]),
    (
        "tracker-empty",
        &["a: ", "latest_checkpointed_iteration.txt", "empty", "name an iter_* folder"],
    ),
    (
        "tracker-to-nowhere",
        &["latest_checkpointed_iteration.txt", "7", "iter_0000007", "iter_0000005"],
    ),
    ("missing-shard", &["a: ", "mp_rank_01_001", "missing shard (tp 1, pp 1)", "tp=2 pp=2"]),
    ("optimizer-only-dirs", &["tp2 pp1", "identical"]),
    ("distrain", &["mp_gpt_rank_00", "several models", "one by one"]),
    (
        "etp-greater-than-tp",
        &["expert_tensor_parallel_size=2", "tensor_model_parallel_size=1", "cannot be recovered"],
    ),
    ("unknown-name-tp2", &["decoder.layers.0.mlp.mystery.weight", "--rule", "trouble: 1 part"]),
    (
        "diverged-replica-tp2",
        &["a: decoder.layers.1.pre_mlp_layernorm.weight: mp_rank_01 differs from mp_rank_00"],
    ),
    (
        "nan-tp1",
        &[
            "decoder.layers.0.mlp.linear_fc2.weight: NaN 1 in a, 0 in b; Inf 0 in a, 0 in b",
            "decoder.layers.1.mlp.linear_fc1.weight: NaN 0 in a, 0 in b; Inf 1 in a, 0 in b",
        ],
    ),
    (
        "sparse-tp1",
        &["mp_rank_00/model_optim_rng.pt: decoder.layers.0.mlp.linear_fc1.weight", "sparse"],
    ),
    (
        "quantized-tp1",
        &["mp_rank_00/model_optim_rng.pt: decoder.layers.0.mlp.linear_fc1.weight", "quantised"],
    ),
    (
        "wrong-shape-tp2",
        &["decoder.layers.1.self_attention.linear_proj.weight", "[8, 4]", "[7, 4]"],
    ),
    (
        "missing-key-tp2",
        &["decoder.layers.1.self_attention.linear_proj.weight", "missing on tp rank 1"],
    ),
    ("evil-pickle-tp1", &["identical"]),
    ("truncated", &["mp_rank_00/model_optim_rng.pt", "cut off"]),
    ("not-a-checkpoint", &["mp_rank_00/model_optim_rng.pt", "git lfs pull"]),
    ("no-tensors", &["a: ", "no-tensors", "no model weights", "nothing to compare"]),
    (
        "missing-tp4ep2etp1-old-writer",
        &[
            "mp_rank_02_000",
            "missing shard (tp 2, pp 0)",
            "mp_rank_03_001",
            "missing shard (tp 3, pp 0, ep 1)",
            "tp=4 ep=2 etp=1",
            "0.10 to 0.18.0",
        ],
    ),
    (
        "missing-tp2etp1-old-writer",
        &["mp_rank_01/", "missing shard (tp 1, pp 0)", "tp=2 etp=1", "0.10 to 0.18.0"],
    ),
];

#[test]
fn every_fault_has_its_exit_code_and_names_what_is_wrong() {
    let expected = read_json(&layout("faults/expected.json"));
    let expected = expected.as_object().unwrap();
    assert_eq!(expected.len(), WORDS.len());
    for (name, words) in WORDS {
        let fault = &expected[*name];
        let against = layout(fault["against"].as_str().unwrap());
        let run = compare(&layout("faults").join(name), &against);
        assert_eq!(fault["exit"], run.code, "{name}: {}", run.stderr);
        for word in *words {
            assert!(run.stderr.contains(word), "{name}: no {word:?} in {}", run.stderr);
        }
    }
}

#[test]
fn a_fault_on_the_other_side_is_said_of_that_side() {
    let expected = read_json(&layout("faults/expected.json"));
    for (name, fault) in expected.as_object().unwrap() {
        let against = layout(fault["against"].as_str().unwrap());
        let run = compare(&against, &layout("faults").join(name));
        assert_eq!(fault["exit"], run.code, "{name}: {}", run.stderr);
        assert!(!run.stderr.contains("ckptcmp: a: "), "{name}: {}", run.stderr);
        if run.code == 2 {
            assert!(run.stderr.starts_with("ckptcmp: b: "), "{name}: {}", run.stderr);
        }
    }
}

#[test]
fn a_missing_shard_is_named_with_its_folder_and_why_and_no_result_is_written() {
    let folder = TempDir::new().unwrap();
    let output = folder.path().join("result.json");
    let mut command = ckptcmp();
    command.arg("compare").args([layout("faults/missing-shard"), layout("gpt-small/tp1")]);
    let run = common::Run::of(command.arg("-o").arg(&output));
    run.refuses(&[
        "iter_0000005/mp_rank_01_001/model_optim_rng.pt: missing shard (tp 1, pp 1)",
        "the checkpoint says tp=2 pp=2",
    ]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn each_shard_of_each_axis_is_missed_when_it_is_gone() {
    for path in ["gpt/tp2pp2", "gpt/tp4", "gpt/pp3-uneven", "moe/seq-ep4", "moe/seq-tp2ep4etp1"] {
        let reference = layout(if path.starts_with("moe") { "moe/seq-ep1" } else { "gpt/tp1" });
        let ranks = fs::read_dir(layout(path).join("iter_0000005")).unwrap();
        for rank in ranks.map(|rank| rank.unwrap().file_name().to_string_lossy().into_owned()) {
            let copied = Copied::of(&layout(path));
            fs::remove_dir_all(copied.iteration().join(&rank)).unwrap();
            compare(&copied.path(), &reference).refuses(&[&format!("{rank}/"), "missing shard"]);
        }
    }
}

#[test]
fn an_unreadable_tensor_leaves_the_others_compared() {
    for fault in ["sparse-tp1", "quantized-tp1"] {
        let folder = TempDir::new().unwrap();
        let output = folder.path().join("result.json");
        let mut command = ckptcmp();
        command.arg("compare").args([layout("faults").join(fault), layout("gpt-small/tp1")]);
        let run = common::Run::of(command.arg("-o").arg(&output));
        assert_eq!(run.code, 2, "{fault}");
        let result = read_json(&output);
        assert!(!names(&result).contains(&"decoder.layers.0.mlp.linear_fc1.weight"));
        assert_eq!(names(&result).len(), 14, "{fault}");
        assert_eq!(common::differing(&result), [""; 0], "{fault}");
        assert!(run.verdict().starts_with("trouble: 1 part could not be read"), "{run:?}");
    }
}

#[test]
fn the_cause_of_an_unreadable_tensor_is_on_its_line() {
    let longer = crafted::tensor_of("0", 64, 0, &[1000], &[1]);
    let model = crafted::dict([("w", longer)]);
    let checkpoint = crafted::Checkpoint::with(model, crafted::namespace([]));
    let run = common::run(["inspect", checkpoint.path().to_str().unwrap()]);
    let words = "model_optim_rng.pt: w: storage 0: shape [1000] needs 4000 bytes of a storage of 256 bytes\n";
    assert!(run.stderr.contains(words), "{}", run.stderr);
}

#[test]
fn trouble_is_not_turned_into_success() {
    for fault in ["missing-shard", "sparse-tp1", "no-tensors", "truncated"] {
        let flags = ["--exit-zero"];
        let run = compare_with(&layout("faults").join(fault), &layout("gpt-small/tp1"), &flags);
        assert_eq!(run.code, 2, "{fault}: {}", run.stderr);
    }
}

/// Without its args the checkpoint is refused for want of this fact; with it, it is equal.
fn assert_fact_is_asked_for(path: &str, reference: &str, fact: &str, given: &[&str]) {
    let copied = without_args(&layout(path));
    let run = compare(&copied.path(), &layout(reference));
    run.refuses(&[&format!(
        "the checkpoint does not say {fact}; supply it with --set {fact}=VALUE"
    )]);
    let set: Vec<&str> = given.iter().flat_map(|fact| ["--set", fact]).collect();
    assert_all_equal(&compare_with(&copied.path(), &layout(reference), &set));
}

#[test]
fn a_missing_fact_is_named_and_can_be_supplied() {
    let fact = "qk_pos_emb_head_dim";
    for given in ["qk_pos_emb_head_dim=4", "a:qk_pos_emb_head_dim=4", "a:qk_rope_head_dim=4"] {
        assert_fact_is_asked_for("mla/tp2-column-down", "mla/tp1", fact, &[given]);
    }
    assert_fact_is_asked_for("mla/te-tp2", "mla/tp1", fact, &["a:qk_pos_emb_head_dim=4"]);
    let fact = "num_attention_heads";
    assert_fact_is_asked_for("gpt-mha/v0-tp2", "gpt-mha/tp1", fact, &["a:num_attention_heads=4"]);
}

#[test]
fn a_fact_for_the_other_side_does_not_help() {
    let copied = without_args(&layout("mla/tp2-column-down"));
    let set = ["--set", "b:qk_pos_emb_head_dim=4"];
    compare_with(&copied.path(), &layout("mla/tp1"), &set).refuses(&["qk_pos_emb_head_dim"]);
}

#[test]
fn a_grid_with_holes_is_complete_once_the_size_of_the_experts_is_supplied() {
    for path in ["moe/seq-tp2ep4etp1", "moe/seq-tp4ep2etp1"] {
        let copied = without_args(&layout(path));
        let reference = layout("moe/seq-ep1");
        compare(&copied.path(), &reference)
            .refuses(&["missing shard", "the other folders make it"]);
        let set = ["--set", "a:expert_tensor_parallel_size=1"];
        assert_all_equal(&compare_with(&copied.path(), &reference, &set));
    }
}

#[test]
fn an_order_of_layers_that_no_file_shows_is_supplied_with_the_schedule() {
    let copied = without_args(&layout("gpt8/pp2-dualpipev"));
    let reference = layout("gpt8/tp1");
    assert_eq!(compare(&copied.path(), &reference).code, 1, "layers in the order of interleaving");
    let set = ["--set", "a:schedules_method=dualpipev", "--set", "a:num_layers=8"];
    assert_all_equal(&compare_with(&copied.path(), &reference, &set));
}

#[test]
fn placeholder_layers_are_supplied_as_a_list() {
    let copied = without_args(&layout("gpt/noop-pp2"));
    let set = ["--set", "a:num_layers=8", "--set", "a:noop_layers=2,5"];
    assert_all_equal(&compare_with(&copied.path(), &layout("gpt/tp1"), &set));
}

#[test]
fn supplying_one_fact_says_nothing_of_the_others() {
    // Without args nobody says that the weights are tied, and a fact about something else does not either.
    let path = layout("gpt/noargs-tp2pp2");
    let set = ["--set", "a:num_layers=6"];
    assert_all_equal(&compare_with(&path, &layout("gpt/tp1"), &set));
}

#[test]
fn a_fact_that_nobody_asks_for_is_bad_usage_and_a_rule_for_no_name_is_remarked() {
    let run =
        compare_with(&layout("gpt-small/tp1"), &layout("gpt-small/tp1"), &["--set", "nonsense=1"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("nonsense=1") && run.stderr.contains("num_experts"));
    let run = compare_with(
        &layout("gpt-small/tp1"),
        &layout("gpt-small/tp1"),
        &["--rule", "nonsense=row"],
    );
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("--rule nonsense matches no tensor name"), "{}", run.stderr);
}

#[test]
fn rows_that_a_lone_shard_lacks_are_no_padding() {
    let shard = layout("gpt-small/tp2").join("iter_0000005/mp_rank_00");
    let run = compare_with(&layout("gpt-small/tp1"), &shard, &["--include", "*word_embeddings*"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("shape [56, 8] in a, [32, 8] in b"), "{}", run.stderr);
}

#[test]
fn a_missing_rule_can_be_supplied_and_then_the_pair_is_equal() {
    let path = layout("faults/unknown-name-tp2");
    let name = "decoder.layers.0.mlp.mystery.weight";
    let run = compare(&path, &path);
    run.refuses(&["ckptcmp: a: ", "ckptcmp: b: "]);
    let message = format!(": {name}: no sharding rule");
    assert_eq!(run.stderr.matches(&message).count(), 2, "{}", run.stderr);
    for (how, rows) in [("replicated", 3), ("column", 6)] {
        let run = compare_with(&path, &path, &["--rule", &format!("mystery.weight={how}")]);
        assert_all_equal(&run);
        assert_eq!(run.json()[name]["shape"][0], rows, "{how}");
    }
    let run = compare_with(&path, &path, &["--rule", "mystery.weight=row"]);
    assert_eq!(run.json()[name]["shape"][1], 10);
}

#[test]
fn a_rule_that_cannot_be_read_is_bad_usage() {
    let path = layout("gpt-small/tp1");
    for rule in ["mystery", "mystery=sideways", "=row"] {
        let run = compare_with(&path, &path, &["--rule", rule]);
        assert_eq!(run.code, 2);
        assert!(run.stderr.contains("replicated|column|row|gated|vocab"), "{}", run.stderr);
    }
    let run = compare_with(&path, &path, &["--set", "swiglu"]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("NAME=VALUE"), "{}", run.stderr);
}

#[test]
fn an_unknown_name_of_an_only_shard_is_taken_whole_with_a_note() {
    let copied = Copied::of(&layout("gpt-small/tp1"));
    let named = |norm: &str| [0, 1].map(|layer| format!("decoder.layers.{layer}.{norm}.weight"));
    let unknown = named("pre_mlp_mystery77");
    for (known, unknown) in named("pre_mlp_layernorm").iter().zip(&unknown) {
        rename_key(&copied.path(), known, unknown);
    }
    let run = compare(&copied.path(), &copied.path());
    assert_all_equal(&run);
    assert!(unknown.iter().all(|name| names(&run.json()).contains(&name.as_str())));
    assert!(run.stderr.contains("no sharding rule for 2 names"), "{}", run.stderr);
}

#[test]
fn layers_that_the_checkpoint_declares_but_no_stage_holds_are_missed() {
    let set = ["--set", "a:num_layers=7"];
    let run = compare_with(&layout("gpt/pp2"), &layout("gpt/tp1"), &set);
    run.refuses(&["hold 6 layers", "says 7", "--set num_layers=6"]);
}

#[test]
fn a_stage_without_one_of_its_chunks_is_an_error() {
    let copied = Copied::of(&layout("gpt/pp3vpp2"));
    rename_key(&copied.iteration().join("mp_rank_00_001"), "model1", "modelx");
    let run = compare(&copied.path(), &layout("gpt/tp1"));
    run.refuses(&["mp_rank_00_001/model_optim_rng.pt", "1 of the 2 model chunks"]);
}

#[test]
fn layouts_whose_files_wrote_over_each_other_are_refused() {
    for (set, words) in [
        ("a:gtp_weight_remat_size=2", "gtp_weight_remat_size"),
        ("a:tp_2d=true", "tp_2d"),
        ("a:encoder_tensor_model_parallel_size=1", "encoder_tensor_model_parallel_size"),
    ] {
        let path = layout("gpt-small/tp2");
        compare_with(&path, &path, &["--set", set]).refuses(&[
            "a: ",
            words,
            "cannot be put together",
        ]);
    }
}

#[test]
fn nothing_from_a_pickle_is_executed() {
    let folder = TempDir::new().unwrap();
    let mut command = ckptcmp();
    command.arg("compare").args([layout("faults/evil-pickle-tp1"), layout("gpt-small/tp1")]);
    let run = common::Run::of(command.args(["-o", "-"]).current_dir(folder.path()));
    assert_all_equal(&run);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    assert!(!Path::new("ckptcmp-executed-a-pickle").exists());
}
