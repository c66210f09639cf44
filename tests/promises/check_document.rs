//! Promise: what `check --json` prints holds its schema, and its verdict is the exit code.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Run, ckptcmp, fixture, layout, read_json};
use serde_json::Value;

fn checkpoints() -> Vec<PathBuf> {
    let folders =
        ["layouts/faults", "layouts/gpt", "layouts/moe", "optimizer/dense", "deepspeed/zero"];
    let entries = folders.iter().flat_map(|folder| fs::read_dir(fixture(folder)).unwrap());
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn what_check_prints_holds_its_schema_and_its_verdict_is_the_exit_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/check-report.schema.json");
    let schema = read_json(&path);
    jsonschema::meta::validate(&schema).expect("the schema is one");
    let validator = jsonschema::validator_for(&schema).expect("the schema is one");
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for path in checkpoints() {
        let run = Run::of(ckptcmp().args(["check", "--json"]).arg(&path));
        if run.stdout.is_empty() {
            assert_eq!(run.code, 2, "{}: no document without an error", path.display());
            continue;
        }
        let document = run.json();
        let errors: Vec<String> = validator
            .iter_errors(&document)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect();
        assert!(errors.is_empty(), "{}: {errors:#?}", path.display());
        let verdict = document["verdict"].as_str().unwrap();
        let code = ["sound", "unsound", "trouble"].iter().position(|word| *word == verdict);
        assert_eq!(code, usize::try_from(run.code).ok(), "{}", path.display());
        let has_problems = document["problems"].as_array().is_some_and(|found| !found.is_empty());
        assert_eq!(has_problems, run.code == 2, "{}", path.display());
        *seen.entry(verdict.to_owned()).or_default() += 1;
        let counted = |key: &str| document[key].as_object().is_some_and(|found| !found.is_empty());
        for key in ["replicas", "partial_sums", "not_finite", "tied", "globals"] {
            if counted(key) {
                *seen.entry(key.to_owned()).or_default() += 1;
            }
        }
    }
    for kind in ["sound", "unsound", "trouble", "replicas", "not_finite", "tied"] {
        assert!(seen.contains_key(kind), "no checkpoint with {kind}: {seen:?}");
    }
}

#[test]
fn a_document_with_another_key_does_not_hold_the_schema() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/check-report.schema.json");
    let validator = jsonschema::validator_for(&read_json(&path)).unwrap();
    let small = layout("gpt-small/tp1");
    let mut document = Run::of(ckptcmp().args(["check", "--json"]).arg(&small)).json();
    assert!(validator.is_valid(&document));
    document["more"] = Value::Null;
    assert!(!validator.is_valid(&document));
    document.as_object_mut().unwrap().remove("more");
    document.as_object_mut().unwrap().remove("replicas");
    assert!(!validator.is_valid(&document));
}
