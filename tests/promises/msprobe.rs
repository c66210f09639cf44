//! Promise: none of the faults known of the comparer that users come from (msProbe's `ckpt_compare`) is ours.
//!
//! One test a fault, numbered as in our survey of it.

use std::fs;
use std::path::Path;

use crate::common::{
    self, Copied, Run, assert_all_equal, ckptcmp, compare, compare_with, inspect, layout, names,
    places, rename_key, sizes, without_args,
};
use serde_json::json;

/// A layout equals the reference; the result, for a closer look.
#[track_caller]
fn equal(path: &str, reference: &str) -> serde_json::Value {
    let run = compare(&layout(path), &layout(reference));
    assert_all_equal(&run);
    run.json()
}

/// The rank's folder in which an element lies that is compared.
fn rank_of(path: &Path, tensor: &str, index: &[usize]) -> String {
    let file = &places(path, tensor, index)[0].file;
    file.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn fault_01_a_release_is_no_iteration_number() {
    equal("gpt/release-tp1", "gpt/tp1");
}

#[test]
fn fault_02_gated_fc1_is_regrouped() {
    let fc1 = "decoder.layers.0.mlp.linear_fc1.weight";
    assert_eq!(equal("gpt/tp2", "gpt/tp1")[fc1]["l2"], 0.0);
    let path = layout("gpt/tp2");
    let ranks = [0, 6, 12, 18].map(|row| rank_of(&path, fc1, &[row, 0]));
    assert_eq!(ranks, ["mp_rank_00", "mp_rank_01", "mp_rank_00", "mp_rank_01"], "gate, then up");
}

#[test]
fn fault_03_the_norm_inside_transformer_engines_fc1_is_the_norm_before_the_mlp() {
    let result = equal("gpt/te-tp2", "gpt/tp1");
    assert_eq!(sizes(&result["decoder.layers.0.pre_mlp_layernorm.weight"]["shape"]), [8]);
}

#[test]
fn fault_04_latent_attention_and_extra_state_are_no_linear_qkv() {
    for path in ["mla/fused-down-tp2", "mla/mindspeed-tp2", "mla/mindspeed-mm-split-tp2"] {
        let result = equal(path, "mla/tp1");
        let down = "decoder.layers.0.self_attention.linear_q_down_proj.weight";
        let wanted = &inspect(&layout("mla/tp1"))["tensors"][down]["shape"];
        assert_eq!(&result[down]["shape"], wanted, "{path}");
    }
    let inspected = inspect(&layout("gpt/te-tp2"));
    assert!(inspected["left_out"].as_u64().unwrap() > 0);
    assert!(!names(&inspected["tensors"]).iter().any(|name| name.contains("_extra_state")));
}

#[test]
fn fault_05_what_is_split_is_not_taken_for_replicated() {
    for (path, reference, split) in [
        ("mla/te-tp2", "mla/tp1", "decoder.layers.0.self_attention.linear_q_up_proj.weight"),
        ("hybrid/tp2", "hybrid/tp1", "decoder.layers.0.mixer.in_proj.weight"),
        ("gdn/tp2", "gdn/tp1", "decoder.layers.0.self_attention.in_proj.weight"),
        ("mtp/tp2pp2", "mtp/tp1", "mtp.layers.0.eh_proj.weight"),
        ("bert/tp2", "bert/tp1", "output_layer.bias"),
        ("bert-legacy/tp2", "bert-legacy/tp1", "lm_head.bias"),
        ("t5/tp2", "t5/tp1", "decoder.layers.0.cross_attention.linear_kv.weight"),
        (
            "moe/grouped-tp2ep2",
            "moe/seq-ep1",
            "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight",
        ),
    ] {
        let result = equal(path, reference);
        assert_eq!(result[split]["l2"], 0.0, "{path}: {split}");
        let pieces = &inspect(&layout(path))["tensors"][split]["pieces"];
        assert!(pieces.as_array().unwrap().len() > 1, "{path}: {split} is on both ranks");
    }
}

#[test]
fn fault_06_experts_of_transformer_engine_have_global_numbers() {
    equal("moe/tegrouped-ep2", "moe/seq-ep1");
    equal("moe/tegrouped-ep2", "moe/tegrouped-ep1");
    for (expert, rank) in
        [(0, "mp_rank_00_000"), (1, "mp_rank_00_000"), (2, "mp_rank_00_001"), (3, "mp_rank_00_001")]
    {
        let name = format!("decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1.weight");
        assert_eq!(rank_of(&layout("moe/tegrouped-ep2"), &name, &[0, 0]), rank);
    }
}

#[test]
fn fault_07_grouped_experts_are_taken_apart() {
    for path in ["moe/grouped-ep1", "moe/grouped-ep2", "moe/grouped-tp2ep2", "moe/packed-ep2"] {
        let result = equal(path, "moe/seq-ep1");
        let experts =
            names(&result).iter().filter(|name| name.contains(".local_experts.3.")).count();
        assert!(experts >= 2, "{path}");
        assert!(!names(&result).iter().any(|name| name.contains("weight1")), "{path}");
    }
}

#[test]
fn fault_08_uneven_stages_have_the_layers_that_they_hold() {
    equal("gpt/pp3-uneven", "gpt/tp1");
    let stages = [0, 1, 2, 3, 4, 5].map(|layer| {
        let name = format!("decoder.layers.{layer}.input_layernorm.weight");
        rank_of(&layout("gpt/pp3-uneven"), &name, &[0])
    });
    let wanted = [0, 1, 1, 2, 2, 2].map(|stage| format!("mp_rank_00_{stage:03}"));
    assert_eq!(stages, wanted);
    equal("gpt/tp2pp2vpp2-account", "gpt/tp1");
}

#[test]
fn fault_09_a_first_stage_without_layers_counts_none() {
    equal("gpt/pp4-layout-standalone", "gpt/tp1");
    let first = "decoder.layers.0.input_layernorm.weight";
    assert_eq!(rank_of(&layout("gpt/pp4-layout-standalone"), first, &[0]), "mp_rank_00_001");
}

#[test]
fn fault_10_layers_of_multi_token_prediction_keep_their_numbers() {
    let result = equal("mtp/tp2pp2", "mtp/tp1");
    let found = names(&result);
    assert!(found.contains(&"mtp.layers.0.eh_proj.weight"));
    assert!(
        !found
            .iter()
            .any(|name| name.starts_with("mtp.layers.") && !name.starts_with("mtp.layers.0."))
    );
}

#[test]
fn fault_11_folded_schedules_and_placeholder_layers_are_known() {
    equal("gpt8/pp2-dualpipev", "gpt8/tp1");
    let ranks = [0, 2, 4, 6].map(|layer| {
        let name = format!("decoder.layers.{layer}.input_layernorm.weight");
        rank_of(&layout("gpt8/pp2-dualpipev"), &name, &[0])
    });
    assert_eq!(ranks, ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_00_001", "mp_rank_00_000"]);
    equal("gpt/noop-pp2", "gpt/tp1");
}

#[test]
fn fault_12_a_missing_or_unreadable_shard_is_no_warning() {
    let reference = layout("gpt-small/tp1");
    let copied = Copied::of(&layout("gpt-small/tp2"));
    let rank = copied.iteration().join("mp_rank_01");
    let file = rank.join("model_optim_rng.pt");
    fs::write(&file, b"PK\x03\x04 and then nothing").unwrap();
    compare(&copied.path(), &reference).refuses(&["mp_rank_01/model_optim_rng.pt"]);
    fs::remove_file(&file).unwrap();
    compare(&copied.path(), &reference).refuses(&["mp_rank_01/", "missing shard (tp 1, pp 0)"]);
    fs::remove_dir(&rank).unwrap();
    compare(&copied.path(), &reference).refuses(&["mp_rank_01/", "missing shard (tp 1, pp 0)"]);
}

#[test]
fn fault_13_experts_with_a_tensor_size_of_their_own_form_no_grid() {
    for path in
        ["moe/seq-tp2ep4etp1", "moe/seq-tp4ep2etp1", "moe/seq-tp4ep1etp2", "moe/grouped-tp2ep4etp1"]
    {
        equal(path, "moe/seq-ep1");
    }
}

#[test]
fn fault_14_padding_of_the_vocabulary_is_no_difference() {
    let result = equal("gpt/tp4", "gpt/tp1");
    assert_eq!(result["embedding.word_embeddings.weight"]["shape"], json!([56, 8]));
    assert_eq!(result["output_layer.weight"]["numel"], 448);
}

#[test]
fn fault_15_encoder_and_decoder_of_a_t5_are_two() {
    for (path, reference) in [("t5-legacy/tp2", "t5-legacy/tp1"), ("t5/tp2", "t5/tp1")] {
        let result = equal(path, reference);
        for stack in ["encoder", "decoder"] {
            let name = format!("{stack}.layers.0.self_attention.linear_qkv.weight");
            assert!(names(&result).contains(&name.as_str()), "{path}: {name}");
        }
        assert!(names(&result).contains(&"decoder.layers.0.cross_attention.linear_kv.weight"));
        assert!(!names(&result).contains(&"encoder.layers.0.cross_attention.linear_kv.weight"));
    }
}

#[test]
fn fault_16_the_dense_layers_of_berts_heads_are_no_projections() {
    for (path, reference) in [("bert-legacy/tp2", "bert-legacy/tp1"), ("bert/tp2", "bert/tp1")] {
        let result = equal(path, reference);
        for dense in ["lm_head.dense.weight", "pooler.dense.weight"] {
            assert_eq!(result[dense]["shape"], json!([8, 8]), "{path}: {dense}");
        }
    }
}

#[test]
fn fault_17_old_names_and_old_orders_of_heads_are_known() {
    equal("gpt/legacy-2021-tp2", "gpt/tp1");
    equal("gpt/legacy-te-tp2", "gpt/tp1");
    equal("gpt/legacy-tp2pp2", "gpt/tp1");
    for version in ["v0", "v1", "v2"] {
        equal(&format!("gpt-mha/{version}-tp2"), "gpt-mha/tp1");
    }
    equal("t5-legacy/tp2", "t5-legacy/tp1");
}

#[test]
fn fault_18_args_may_be_old_or_absent() {
    equal("gpt/noargs-tp2pp2", "gpt/tp1");
    equal("gpt-mha/v0-tp2", "gpt-mha/tp1");
    for path in ["gpt/tp2", "gpt/te-tp2", "gpt/legacy-tp2pp2", "gpt/pp3-uneven"] {
        let copied = without_args(&layout(path));
        assert_all_equal(&compare(&copied.path(), &layout("gpt/tp1")));
    }
    let copied = Copied::of(&layout("gpt/tp2"));
    rename_key(&copied.path(), "expert_model_parallel_size", "expert_model_parallel_sizx");
    rename_key(&copied.path(), "num_experts", "num_expertx");
    assert_all_equal(&compare(&copied.path(), &layout("gpt/tp1")));
}

#[test]
fn fault_19_folders_without_a_model_are_no_ranks() {
    equal("faults/optimizer-only-dirs", "gpt-small/tp1");
}

#[test]
fn fault_20_a_copy_of_tied_weights_is_no_tensor_of_its_own() {
    for path in ["gpt-tied/pp2", "gpt-tied/tp2pp2", "gpt-tied/legacy-pp2", "mtp-tied/tp2pp2"] {
        let reference = format!("{}/tp1", path.split('/').next().unwrap());
        let result = equal(path, &reference);
        assert!(!names(&result).iter().any(|name| name.contains("output_layer")), "{path}");
    }
}

/// A copy of a model in float32 whose last norm holds these values.
fn with_norm(values: &[f32; 8]) -> Copied {
    let copied = Copied::of(&layout("mla/tp1"));
    let place = places(&copied.path(), "decoder.final_layernorm.weight", &[0]).remove(0);
    place.edit(|bytes| {
        for (bytes, value) in bytes.chunks_exact_mut(4).zip(values) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    });
    copied
}

#[test]
fn fault_21_metrics_do_not_overflow_and_small_differences_of_large_integers_count() {
    let norm = "decoder.final_layernorm.weight";
    let [large, opposite] = [with_norm(&[1e25; 8]), with_norm(&[-1e25; 8])];
    assert_all_equal(&compare(&large.path(), &large.path()));
    let entry = &compare(&large.path(), &opposite.path()).json()[norm];
    let l2 = 2.0 * f64::from(1e25_f32) * 8_f64.sqrt();
    assert!((entry["l2"].as_f64().unwrap() / l2 - 1.0).abs() < 1e-12, "{entry}");
    assert_eq!(entry["cos"], -1.0);
    let largest = [with_norm(&[f32::MAX; 8]), with_norm(&[f32::MIN; 8])];
    let entry = &compare(&largest[0].path(), &largest[1].path()).json()[norm];
    assert!(entry["l2"].as_f64().unwrap().is_finite() && entry["cos"] == -1.0, "{entry}");

    let integers = |value: i64| {
        let copied = Copied::of(&layout("dtypes/all.pt"));
        let place = places(&copied.path(), "dtype.int64", &[1, 1]).remove(0);
        place.edit(|bytes| bytes[..8].copy_from_slice(&value.to_le_bytes()));
        copied
    };
    for power in [24, 53, 62] {
        let [a, b] = [integers(1 << power), integers((1 << power) + 1)];
        let run = compare_with(&a.path(), &b.path(), &["--metrics", "differing"]);
        assert_eq!(run.code, 1, "2^{power}: {}", run.stderr);
        let entry = &run.json()["dtype.int64"];
        assert_eq!((&entry["l2"], &entry["differing"]), (&json!(1.0), &json!(1)), "2^{power}");
    }

    let scalars = compare(&layout("dtypes/all.pt"), &layout("dtypes/all.pt")).json();
    let scalar = json!({"l2": 0.0, "cos": 1.0, "numel": 1, "shape": []});
    assert_eq!(scalars["scalar.float32"], scalar);

    let mut values = [1.0; 8];
    values[5] = f32::NAN;
    let broken = with_norm(&values);
    let run = compare(&broken.path(), &broken.path());
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.json()[norm]["l2"].is_null());
    assert!(run.stderr.contains("NaN 1 in a, 1 in b"), "{}", run.stderr);
}

#[test]
fn fault_22_the_smallest_drift_between_replicas_is_seen() {
    let copied = Copied::of(&layout("moe/seq-tp2ep2"));
    let router = "decoder.layers.1.mlp.router.weight";
    let replicas = places(&copied.path(), router, &[2, 4]);
    assert_eq!(replicas.len(), 4, "every rank has the router");
    for (number, replica) in replicas.iter().enumerate().skip(1) {
        replica.flip();
        let run = compare(&copied.path(), &layout("moe/seq-ep1"));
        assert_eq!(run.code, 1, "replica {number}");
        let folder = replica.file.parent().unwrap().file_name().unwrap().to_string_lossy();
        let line = format!("a: {router}: {folder} differs from mp_rank_00_000 by up to ");
        assert!(run.stderr.contains(&line), "{}", run.stderr);
        assert_eq!(common::differing(&run.json()), [""; 0], "{router} itself is equal");
        replica.flip();
    }
    assert_all_equal(&compare(&copied.path(), &layout("moe/seq-ep1")));
}

#[test]
fn fault_23_no_package_is_needed_to_read_a_class_and_the_result_may_be_overwritten() {
    for path in [
        "gpt/npu-tp2",
        "gpt/mindtorch-tp2",
        "gpt/rebuild-from-type-tp2",
        "gpt/protocol4-defaultdict-tp2",
    ] {
        equal(path, "gpt/tp1");
    }
    equal("faults/evil-pickle-tp1", "gpt-small/tp1");
    let folder = tempfile::TempDir::new().unwrap();
    let output = folder.path().join("result.json");
    for flags in [&[][..], &["--force"]] {
        let mut command = ckptcmp();
        command.arg("compare").args([layout("gpt-small/tp1"), layout("gpt-small/tp2")]);
        assert_eq!(Run::of(command.arg("-o").arg(&output).args(flags)).code, 0);
    }
}

#[test]
fn fault_24_a_lost_layer_is_a_difference_and_named() {
    let shallow = layout("gpt-small/tp1");
    let include = ["--include", "*input_layernorm*"];
    let run = compare_with(&shallow, &layout("gpt/tp1"), &include);
    assert_eq!(run.code, 1);
    let lost = [2, 3, 4, 5].map(|layer| format!("decoder.layers.{layer}.input_layernorm.weight\n"));
    let listed = format!("only in b: 4 tensors\n{}", lost.concat());
    assert!(run.stderr.contains(&listed), "{}", run.stderr);
    assert!(run.verdict().ends_with(", 4 only in b"), "{}", run.stderr);
    // What is there under another name is lost, whoever leaves that name out.
    let copied = Copied::of(&shallow);
    let (known, other) =
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.1.input_mystery99.weight");
    rename_key(&copied.path(), known, other);
    let run = compare_with(&shallow, &copied.path(), &["--exclude", other]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains(&format!("b: {known}: missing")), "{}", run.stderr);
    assert!(run.stderr.contains(&format!("only in a: 1 tensor\n{known}\n")), "{}", run.stderr);
}

#[test]
fn fault_25_virtual_stages_may_be_empty_and_one_rank_is_a_checkpoint() {
    equal("moe/pp2vpp2", "moe/seq-ep1");
    equal("gpt/pp3vpp2", "gpt/tp1");
    equal("faults/optimizer-only-dirs", "gpt-small/tp1");
    let rank = "gpt/pp3vpp2/iter_0000005/mp_rank_00_001";
    equal(rank, rank);
    let copied = Copied::of(&layout("gpt/pp3vpp2"));
    rename_key(&copied.iteration().join("mp_rank_00_001"), "model0", "modelx");
    compare(&copied.path(), &layout("gpt/tp1")).refuses(&["1 of the 2 model chunks"]);
}
