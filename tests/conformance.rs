//! Every row of `fixtures/cases.jsonl` holds: the command finds what its oracle says, in float64, and exits as it must.
//!
//! A row has `name`, `family`, the paths `a` and `b` and the `oracle` below `fixtures/`, and optionally `exit`, further
//! `args`, and `subset` where the result may hold more tensors than the oracle. An oracle is `{name: {l2, cos, numel, shape}}`.
//! `fixtures/oracles.py` writes both, without any code of this crate.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use common::{compare_with, differing, files, fixture, read_json};
use serde_json::{Map, Value};

/// Largest distance of an l2 from the oracle's, relative to it.
const L2_TOLERANCE: f64 = 1e-9;
/// Largest distance of a cos from the oracle's.
const COS_TOLERANCE: f64 = 1e-12;

fn cases() -> Vec<Value> {
    let table = fs::read_to_string(fixture("cases.jsonl")).unwrap();
    table.lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

/// The text of a row's column.
fn column<'c>(case: &'c Value, key: &str) -> &'c str {
    case[key].as_str().unwrap_or_else(|| panic!("no {key} in {case}"))
}

/// The texts of a list, none where there is no list.
fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().map(|text| text.as_str().unwrap()).collect()
}

/// Holds one tensor of the result against the oracle's; the reason if they do not agree.
fn mismatch(found: &Value, wanted: &Value) -> Option<String> {
    if let Some(key) = ["numel", "shape"].into_iter().find(|key| found[key] != wanted[key]) {
        return Some(format!("{key} {}, not {}", found[key], wanted[key]));
    }
    let tolerance_of_l2 = L2_TOLERANCE * wanted["l2"].as_f64().unwrap_or_default();
    for (key, tolerance) in [("l2", tolerance_of_l2), ("cos", COS_TOLERANCE)] {
        let agree = match (found[key].as_f64(), wanted[key].as_f64()) {
            (Some(found), Some(wanted)) => (found - wanted).abs() <= tolerance,
            (found, wanted) => found.is_none() && wanted.is_none(),
        };
        if !agree {
            return Some(format!("{key} {}, not {}", found[key], wanted[key]));
        }
    }
    None
}

/// Runs the command on a row; the reason if it does not hold.
fn failure(case: &Value) -> Option<String> {
    let oracle = read_json(&fixture(column(case, "oracle")));
    let exit = case["exit"].as_i64().unwrap_or_else(|| i64::from(!differing(&oracle).is_empty()));
    let [a, b] = ["a", "b"].map(|key| fixture(column(case, key)));
    let run = compare_with(&a, &b, &texts(&case["args"]));
    if i64::from(run.code) != exit {
        return Some(format!("exit {}, not {exit}: {}", run.code, run.stderr));
    }
    if exit == 2 {
        return None;
    }
    let (result, none) = (run.json(), Map::new());
    let (found, wanted) =
        (result.as_object().unwrap_or(&none), oracle.as_object().unwrap_or(&none));
    let more = found.keys().find(|name| !wanted.contains_key(*name) && case["subset"] != true);
    let wrong = wanted.iter().find_map(|(name, wanted)| match found.get(name) {
        Some(found) => mismatch(found, wanted).map(|reason| format!("{name}: {reason}")),
        None => Some(format!("{name} is missing")),
    });
    wrong.or_else(|| more.map(|name| format!("{name} is not in the oracle")))
}

/// Runs all rows of a family and lists those that do not hold.
#[track_caller]
fn assert_holds(family: &str) {
    let cases = cases().into_iter().filter(|case| column(case, "family") == family);
    let failures = cases.filter_map(|case| {
        failure(&case).map(|reason| format!("{}: {reason}", column(&case, "name")))
    });
    let failures: Vec<String> = failures.collect();
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

macro_rules! families {
    ($($test:ident: $family:literal,)*) => {
        const FAMILIES: &[&str] = &[$($family),*];

        $(#[test]
        fn $test() {
            assert_holds($family);
        })*
    };
}

families! {
    all_layouts_of_a_megatron_model_are_equal: "layouts",
    checkpoints_of_megatron_differ_as_its_own_tensors_do: "megatron",
    all_layouts_of_a_megatron_optimizer_are_equal: "optimizer",
    distributed_checkpoints_of_megatron_are_equal: "torch_dist",
    distributed_checkpoints_equal_rank_folders: "cross",
    all_forms_of_torch_distributed_checkpoint_are_equal: "dcp",
    all_layouts_of_fsdp_are_equal: "fsdp",
    all_forms_of_deepspeed_are_equal: "deepspeed",
    all_layouts_of_gpt_neox_are_equal: "neox",
    all_forms_of_hugging_face_are_equal: "hf",
    all_layouts_of_infinitrain_are_equal: "infinitrain",
    all_forms_of_a_torch_file_are_equal: "torch-file",
    all_dtypes_and_protocols_are_read: "dtypes",
    each_fault_has_its_exit_code_on_either_side: "faults",
}

#[test]
fn no_family_of_the_table_is_forgotten() {
    let cases = cases();
    let found: BTreeSet<&str> = cases.iter().map(|case| column(case, "family")).collect();
    assert_eq!(found, FAMILIES.iter().copied().collect());
}

#[test]
fn no_checkpoint_and_no_oracle_is_forgotten() {
    let cases = cases();
    let paths = cases.iter().flat_map(|case| ["a", "b", "oracle"].map(|key| column(case, key)));
    let used: BTreeSet<PathBuf> = paths.map(fixture).collect();
    let is_used = |path: &Path| path.ancestors().any(|path| used.contains(path));
    // What only tests of one format use.
    let others = [
        "dcp/weights.pt",
        "deepspeed/neox/tp2-without-layers",
        "gpt2/pp2vpp2",
        "judging/",
        "lora.bin",
        "optimizer-tp",
    ];
    let forgotten = files(&fixture("")).into_iter().filter(|path| {
        let name = path.to_string_lossy().replace('\\', "/");
        let ending = path.extension().unwrap_or_default().to_string_lossy();
        let is_weights = ["pt", "bin", "ckpt", "safetensors", "distcp"].contains(&&*ending);
        let is_oracle = name.contains("oracle") && ending == "json";
        (is_weights || is_oracle)
            && !is_used(path)
            && !others.iter().any(|other| name.contains(other))
    });
    assert_eq!(forgotten.collect::<Vec<_>>(), Vec::<PathBuf>::new());
}

#[test]
fn an_oracle_that_differs_is_noticed() {
    let case = |key: &str, value: Value| {
        let mut wanted = serde_json::json!({"l2": 2.0, "cos": 0.5, "numel": 6, "shape": [2, 3]});
        let found = wanted.clone();
        wanted[key] = value;
        mismatch(&found, &wanted)
    };
    assert_eq!(case("l2", 2.000_000_001.into()), None);
    assert_eq!(case("l2", 2.000_000_01.into()), Some("l2 2.0, not 2.00000001".to_owned()));
    assert_eq!(case("cos", 0.500_001.into()), Some("cos 0.5, not 0.500001".to_owned()));
    assert_eq!(case("cos", Value::Null), Some("cos 0.5, not null".to_owned()));
    assert_eq!(case("shape", vec![3, 2].into()), Some("shape [2,3], not [3,2]".to_owned()));
}
