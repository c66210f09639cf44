//! Promise: the same weights are put together to the same bytes whatever layout, dialect and file form they are saved in.
//!
//! The SHA-256 of every tensor of `fixtures/layouts`, as the catalog says it is put together. `tests/conformance.rs`
//! compares the checkpoints.

use std::collections::BTreeSet;

use crate::common::{
    self, assert_all_equal, compare, compare_with, gather, layout, models, read_json, sha256, sizes,
};
use serde_json::{Map, Value};

/// One checkpoint of the index.
struct Layout {
    path: String,
    vocab_rows: u64,
}

fn layouts(model: &str) -> Vec<Layout> {
    let index = read_json(&layout("index.json"));
    let entries = index.as_array().unwrap().iter().map(|entry| Layout {
        path: entry["path"].as_str().unwrap().to_owned(),
        vocab_rows: entry["vocab_rows"].as_u64().unwrap(),
    });
    entries.filter(|layout| layout.path.split('/').next() == Some(model)).collect()
}

fn expected(model: &str) -> Map<String, Value> {
    let Value::Object(tensors) = read_json(&layout(model).join("expected.json")) else {
        panic!("{model}: not an object");
    };
    tensors
}

fn assert_merged_bytes(model: &str, found: &Layout) {
    let inspected = common::inspect(&layout(&found.path));
    let expected = expected(model);
    let tensors = inspected["tensors"].as_object().unwrap();
    let is_weight = |name: &&String| !name.starts_with("optimizer.");
    let names: BTreeSet<&String> = tensors.keys().filter(is_weight).collect();
    assert_eq!(names, expected.keys().collect(), "{}", found.path);
    for (name, wanted) in &expected {
        let tensor = &tensors[name];
        assert_eq!(tensor["dtype"], wanted["dtype"], "{}: {name}", found.path);
        let mut bytes = gather(tensor);
        if found.path.contains("bigendian") {
            let element = common::element_size(wanted["dtype"].as_str().unwrap());
            bytes.chunks_exact_mut(element).for_each(<[u8]>::reverse);
        }
        let digest = match wanted.get("rows_sha256") {
            Some(by_rows) => &by_rows[found.vocab_rows.to_string()],
            None => &wanted["sha256"],
        };
        assert_eq!(sha256::hex(&bytes), digest.as_str().unwrap(), "{}: {name}", found.path);
    }
}

macro_rules! models {
    ($($model:ident = $folder:literal),* $(,)?) => {
        const MODELS: &[&str] = &[$($folder),*];

        $(mod $model {
            use super::{assert_merged_bytes, layouts};

            #[test]
            fn every_layout_is_put_together_to_the_same_bytes() {
                layouts($folder).iter().for_each(|layout| assert_merged_bytes($folder, layout));
            }
        })*
    };
}

models! {
    bert = "bert", bert_legacy = "bert-legacy", gdn = "gdn", gpt = "gpt", gpt8 = "gpt8", gpt_mha = "gpt-mha",
    gpt_small = "gpt-small", gpt_tied = "gpt-tied", hybrid = "hybrid", mla = "mla", moe = "moe",
    moe_bias = "moe-bias", moe_ungated = "moe-ungated", mtp = "mtp", mtp_tied = "mtp-tied", t5 = "t5",
    t5_legacy = "t5-legacy",
}

#[test]
fn no_model_of_the_index_is_forgotten() {
    let listed: BTreeSet<String> = models().into_keys().collect();
    assert_eq!(listed, MODELS.iter().map(|model| (*model).to_owned()).collect());
}

#[test]
fn the_digest_is_sha_256() {
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!((sha256::hex(b"").as_str(), sha256::hex(b"abc").as_str()), (empty, abc));
}

#[test]
fn rows_of_padding_are_left_out_and_counted_on_each_side() {
    let run = compare(&layout("gpt/tp2"), &layout("gpt/tp1"));
    for name in ["embedding.word_embeddings.weight", "output_layer.weight"] {
        let line =
            format!("{name}: compared 56 vocabulary rows; left out 8 padded rows of a, 0 of b");
        assert!(run.stderr.contains(&line), "{}", run.stderr);
    }
}

#[test]
fn the_true_vocabulary_cuts_both_sides() {
    let run = compare_with(&layout("gpt/tp1"), &layout("gpt/tp2"), &["--vocab-size", "50"]);
    assert_all_equal(&run);
    let result = run.json();
    assert_eq!(sizes(&result["output_layer.weight"]["shape"]), [50, 8]);
    assert_eq!(sizes(&result["embedding.word_embeddings.weight"]["shape"]), [50, 8]);
    assert!(run.stderr.contains("left out 6 padded rows of a, 14 of b"), "{}", run.stderr);
}

#[test]
fn every_dtype_and_stride_of_a_plain_file_is_read_as_its_values() {
    let expected = read_json(&layout("dtypes/expected.json"));
    for file in ["all.pt", "all-noncontiguous.pt"] {
        let inspected = common::inspect(&layout("dtypes").join(file));
        let tensors = inspected["tensors"].as_object().unwrap();
        for (name, wanted) in expected.as_object().unwrap() {
            let tensor = tensors.get(name).unwrap_or_else(|| panic!("{file}: no {name}"));
            assert_eq!(tensor["shape"], wanted["shape"], "{file}: {name}");
            assert_eq!(tensor["dtype"], wanted["dtype"], "{file}: {name}");
            assert_eq!(
                sha256::hex(&gather(tensor)),
                wanted["sha256"].as_str().unwrap(),
                "{file}: {name}"
            );
        }
    }
}
