//! Promise: checkpoints that Megatron-LM itself wrote compare as its own tensors do, in float64.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::{self, compare, fixture, read_json};

/// The distances and angles of `a` against `b` are those of the oracle.
fn assert_oracle(a: &str, b: &str, oracle: &str) {
    let in_fixtures = |path: &str| fixture("megatron").join(path);
    let run = compare(&in_fixtures(a), &in_fixtures(b));
    assert_eq!(run.code, 1, "{a}: {}", run.stderr);
    let result = run.json();
    let oracle = read_json(&in_fixtures(oracle));
    let found: BTreeSet<&String> = result.as_object().unwrap().keys().collect();
    assert_eq!(found, oracle.as_object().unwrap().keys().collect(), "{a}");
    let mut differing = 0;
    for (name, wanted) in oracle.as_object().unwrap() {
        let entry = &result[name];
        assert_eq!(entry["shape"], wanted["shape"], "{a}: {name}");
        assert_eq!(entry["numel"], wanted["numel"], "{a}: {name}");
        let number = |value: &serde_json::Value| value.as_f64().unwrap();
        let (l2, wanted_l2) = (number(&entry["l2"]), number(&wanted["l2"]));
        if wanted_l2 == 0.0 {
            assert_eq!((l2, number(&entry["cos"])), (0.0, 1.0), "{a}: {name}");
            continue;
        }
        differing += 1;
        assert!((l2 / wanted_l2 - 1.0).abs() <= 1e-9, "{a}: {name}: l2 {l2}, oracle {wanted_l2}");
        let (cos, wanted_cos) = (number(&entry["cos"]), number(&wanted["cos"]));
        assert!((cos - wanted_cos).abs() <= 1e-12, "{a}: {name}: cos {cos}, oracle {wanted_cos}");
    }
    assert!(differing > 0, "{a}: an oracle in which nothing differs proves little");
    let closing = format!("different: {differing} of {} tensors differ", found.len());
    assert_eq!(run.verdict(), closing);
}

#[test]
fn a_gpt_in_float32() {
    // The A of this configuration is the legacy one below; against itself B is equal.
    let path = fixture("megatron/gpt2-fp32/B/tp1pp1-torch");
    common::assert_all_equal(&compare(&path, &path));
}

#[test]
fn a_legacy_gpt_against_a_core_one() {
    assert_oracle(
        "legacy-gpt2-fp32/A/tp1pp1-torch",
        "gpt2-fp32/B/tp1pp1-torch",
        "gpt2-fp32/oracle-A-vs-B.json",
    );
}

#[test]
fn a_llama_with_an_uneven_pipeline() {
    assert_oracle(
        "llama-bf16/A/tp1pp2-first3-torch",
        "llama-bf16/B/tp1pp1-torch",
        "llama-bf16/oracle-A-vs-B.json",
    );
}

#[test]
fn grouped_experts_on_two_expert_ranks() {
    assert_oracle(
        "moe-grouped-bf16/A/tp1pp1ep2-torch",
        "moe-grouped-bf16/B/tp1pp1ep1-torch",
        "moe-grouped-bf16/oracle-A-vs-B.json",
    );
}

#[test]
fn latent_attention_on_two_tensor_ranks() {
    assert_oracle(
        "mla-fp32/A/tp1pp1-torch",
        "mla-fp32/B/tp2pp1-torch",
        "mla-fp32/oracle-A-vs-B.json",
    );
}

#[test]
fn a_hybrid_mamba_on_two_tensor_ranks() {
    assert_oracle(
        "hybrid-mamba-bf16/A/tp1pp1-torch",
        "hybrid-mamba-bf16/B/tp2pp1-torch",
        "hybrid-mamba-bf16/oracle-A-vs-B.json",
    );
}

#[test]
fn no_oracle_is_forgotten() {
    let this = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats/megatron_real.rs"),
    )
    .unwrap();
    for entry in std::fs::read_dir(fixture("megatron")).unwrap() {
        let folder = entry.unwrap().file_name().to_string_lossy().into_owned();
        if fixture("megatron").join(&folder).join("oracle-A-vs-B.json").is_file() {
            assert!(this.contains(&format!("\"{folder}/oracle-A-vs-B.json\"")), "{folder}");
        }
    }
}
