//! Hugging Face folders hold the same model however it is cut into files; what an index, a name or a part is missing is
//! named and nothing passes for equal.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::array::{Array, write_safetensors};
use crate::common::damage::Victim;
use crate::common::{
    self, Copied, assert_all_equal, compare, compare_with, copy, differing, fixture, flip, inspect,
    names, places, replace, sizes,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const TENSORS: usize = 21;
const EMBEDDINGS: &str = "model.embed_tokens.weight";
const FORMS: [&str; 4] = ["single", "sharded", "bin-single", "bin-sharded"];

fn hf(path: &str) -> PathBuf {
    fixture("hf").join(path)
}

fn copied(path: &str) -> Copied {
    Copied::of(&hf(path))
}

/// A name and its values.
type Tensor<'a> = (&'a str, &'a [f32]);

/// Writes a safetensors file of these tensors, each a row of float32.
fn write(file: &Path, tensors: &[Tensor<'_>], metadata: &Value) {
    let arrays = tensors.iter().map(|(name, values)| (*name, Array::float32(values)));
    let arrays: Vec<_> = arrays.collect();
    write_safetensors(file, arrays.iter().map(|(name, array)| (*name, array)), metadata);
}

/// A folder of such files.
fn folder(files: &[(&str, &[Tensor<'_>])]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (file, tensors) in files {
        write(&folder.path().join(file), tensors, &json!({}));
    }
    folder
}

fn edit_json(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = common::read_json(file);
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

#[test]
fn one_changed_element_in_any_file_is_found_and_named() {
    for form in FORMS {
        let inspected = inspect(&hf(form));
        for (name, tensor) in inspected["tensors"].as_object().unwrap() {
            let last: Vec<usize> = sizes(&tensor["shape"]).iter().map(|size| size - 1).collect();
            let changed = copied(form);
            flip(&changed.path(), name, &last);
            let flags = ["--metrics", "max_abs_index,differing"];
            let run = compare_with(&changed.path(), &hf("single"), &flags);
            assert_eq!((run.code, differing(&run.json())), (1, vec![name.as_str()]), "{run:?}");
            assert_eq!(sizes(&run.json()[name]["max_abs_index"]), last, "{form}: {name}");
        }
    }
}

#[test]
fn the_model_says_of_itself_what_it_is() {
    let inspected = inspect(&hf("sharded"));
    assert_eq!(inspected["state"]["config"]["model_type"], "llama");
    assert_eq!(inspected["state"]["index"]["total_size"], 680);
    assert_eq!(inspected["writer"], "transformers 5.23.0");
}

#[test]
fn tables_and_masks_are_left_out_and_counted() {
    let run = compare(&hf("bin-sharded"), &hf("single"));
    assert!(run.stderr.contains("2 buffers left out"), "{run:?}");
    let inspected = inspect(&hf("gpt2-old"));
    assert!(inspected["tensors"]["transformer.h.0.attn.bias"].is_null());
    assert!(inspected["tensors"]["transformer.h.0.attn.c_attn.bias"].is_object());
}

#[test]
fn a_tied_output_layer_is_compared_with_one_that_is_stored() {
    let run = compare(&hf("tied"), &hf("single"));
    assert_eq!((run.code, differing(&run.json())), (1, vec!["lm_head.weight"]), "{run:?}");
    assert!(run.stderr.contains("lm_head.weight: tied to the word embeddings in a"), "{run:?}");
    assert_eq!(names(&compare(&hf("tied"), &hf("tied")).json()).len(), TENSORS - 1);

    // Stored all the same, it is checked as a copy: of these embeddings it is none.
    let stored = copied("single");
    edit_json(&stored.path().join("config.json"), |config| {
        config["tie_word_embeddings"] = true.into();
    });
    let run = compare(&stored.path(), &hf("tied"));
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("replicas that disagree: 1"), "{run:?}");
    assert_eq!(names(&run.json()).len(), TENSORS - 1);
}

#[test]
fn an_untied_model_without_its_output_layer_is_not_whole() {
    let bare = copied("tied");
    edit_json(&bare.path().join("config.json"), |config| {
        config["tie_word_embeddings"] = false.into();
    });
    let run = compare(&bare.path(), &hf("single"));
    run.refuses(&["a: lm_head.weight: missing: config.json says tie_word_embeddings=false"]);
    assert!(run.stderr.contains("only in b"), "{run:?}");
    assert!(!names(&run.json()).contains(&"lm_head.weight"));
}

#[test]
fn a_file_of_several_is_tied_only_where_the_model_says_so() {
    let part = |number| hf("sharded").join(format!("model-0000{number}-of-00002.safetensors"));
    let has_embeddings = |number: &i32| {
        let tensors = inspect(&part(*number))["tensors"].clone();
        tensors["model.embed_tokens.weight"].is_object() && tensors["lm_head.weight"].is_null()
    };
    let number = [1, 2].into_iter().find(has_embeddings).unwrap();
    assert_eq!(inspect(&part(number))["tied"], json!({}));
    let run = compare(&part(number), &hf("single"));
    assert!(!names(&run.json()).contains(&"lm_head.weight"), "{run:?}");

    // Nothing is beside it that would say so.
    let alone = TempDir::new().unwrap();
    let file = alone.path().join("model.safetensors");
    fs::copy(hf("tied/model.safetensors"), &file).unwrap();
    assert_eq!(inspect(&file)["tied"], json!({}));
    let config = |text: &str| fs::write(alone.path().join("config.json"), text).unwrap();
    let tied = json!({ "lm_head.weight": "model.embed_tokens.weight" });
    for (text, expected) in [
        (r#"{"tie_word_embeddings": true}"#, &tied),
        // What transformers takes for granted for a type of model.
        (r#"{"model_type": "gemma2"}"#, &tied),
        (r#"{"model_type": "llama"}"#, &json!({})),
        (r#"{}"#, &json!({})),
    ] {
        config(text);
        assert_eq!(inspect(&file)["tied"], *expected, "{text}");
        assert_eq!(inspect(alone.path())["tied"], *expected, "{text}");
    }
    // Of one that is not tied, the output layer is missing.
    config(r#"{"tie_word_embeddings": false, "model_type": "gemma2"}"#);
    let run = common::Run::of(common::ckptcmp().arg("inspect").arg(alone.path()));
    run.refuses(&["lm_head.weight: missing"]);
}

#[test]
fn a_name_that_safetensors_left_out_is_the_one_it_points_to() {
    let alias = TempDir::new().unwrap();
    let tensors: [Tensor<'_>; 1] = [("a.weight", &[1.0, 2.0])];
    let metadata = json!({ "b.weight": "a.weight", "format": "pt" });
    write(&alias.path().join("model.safetensors"), &tensors, &metadata);
    let both =
        folder(&[("model.safetensors", &[("a.weight", &[1.0, 2.0]), ("b.weight", &[1.0, 2.0])])]);
    let run = compare(alias.path(), both.path());
    assert_all_equal(&run);
    assert_eq!(names(&run.json()), ["a.weight", "b.weight"]);
}

#[test]
fn a_part_that_the_index_names_must_be_there() {
    for form in ["sharded", "bin-sharded"] {
        for number in [1, 2] {
            let fewer = copied(form);
            let (stem, ending) =
                if form == "sharded" { ("model", "safetensors") } else { ("pytorch_model", "bin") };
            let part = format!("{stem}-{number:05}-of-00002.{ending}");
            fs::remove_file(fewer.path().join(&part)).unwrap();
            let run = compare(&fewer.path(), &hf("single"));
            run.refuses(&["ckptcmp: a: ", &part, "cannot be read", "the index has 1"]);
            assert_eq!(differing(&run.json()), [""; 0], "the rest is compared");
            // Without the index the numbers tell.
            fs::remove_file(fewer.path().join(format!("{stem}.{ending}.index.json"))).unwrap();
            let run = compare(&fewer.path(), &hf("single"));
            run.refuses(&["ckptcmp: a: ", &format!("{part}: missing")]);
        }
    }
}

#[test]
fn parts_without_an_index_are_taken_together() {
    let bare = copied("sharded");
    fs::remove_file(bare.path().join("model.safetensors.index.json")).unwrap();
    let run = compare(&bare.path(), &hf("single"));
    assert_all_equal(&run);
    assert_eq!(names(&run.json()).len(), TENSORS);
}

#[test]
fn an_index_and_its_files_must_agree() {
    let index = |copied: &Copied| copied.path().join("model.safetensors.index.json");
    let first = "model-00001-of-00002.safetensors";
    let second = "model-00002-of-00002.safetensors";

    let more = copied("sharded");
    edit_json(&index(&more), |index| index["weight_map"]["model.ghost.weight"] = first.into());
    compare(&more.path(), &hf("single")).refuses(&[
        first,
        "model.ghost.weight",
        "which does not hold it",
    ]);

    let fewer = copied("sharded");
    edit_json(&index(&fewer), |index| {
        index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight");
    });
    let run = compare(&fewer.path(), &hf("single"));
    run.refuses(&[second, "model.norm.weight", "is not in the index"]);
    assert_eq!(names(&run.json()).len(), TENSORS);

    let elsewhere = copied("sharded");
    edit_json(&index(&elsewhere), |index| index["weight_map"]["model.norm.weight"] = first.into());
    compare(&elsewhere.path(), &hf("single")).refuses(&["model.norm.weight", "but is in", second]);

    for (change, word) in [
        (json!({ "weight_map": { "a": "../model.safetensors" } }), "is no file of this folder"),
        (json!({ "weight_map": { "a": "/etc/passwd" } }), "is no file of this folder"),
        (json!({ "weight_map": {} }), "its weight_map is empty"),
        (json!({ "metadata": {} }), "no index of tensors"),
        (json!([1]), "no index of tensors"),
    ] {
        let odd = copied("sharded");
        edit_json(&index(&odd), |index| *index = change.clone());
        compare(&odd.path(), &hf("single")).refuses(&["model.safetensors.index.json", word]);
    }
}

#[test]
fn what_is_left_out_beside_the_model_is_said() {
    let both = copied("single");
    copy(&hf("bin-sharded"), &both.path());
    copy(&hf("single"), &both.path());
    let run = compare(&both.path(), &hf("single"));
    assert_all_equal(&run);
    let note = "left out pytorch_model.bin.index.json and 2 more: model.safetensors comes first";
    assert!(run.stderr.contains(note), "{run:?}");

    let stale = copied("sharded");
    let part = stale.path().join("model-00003-of-00003.safetensors");
    fs::copy(hf("single").join("model.safetensors"), part).unwrap();
    let run = compare(&stale.path(), &hf("single"));
    assert_all_equal(&run);
    let note = "left out model-00003-of-00003.safetensors: the index does not name it";
    assert!(run.stderr.contains(note), "{run:?}");
}

#[test]
fn a_tensor_in_two_parts_is_one_and_its_copy() {
    let parts = |second: &[f32]| {
        folder(&[
            ("model-00001-of-00002.safetensors", &[("a", &[1.0, 2.0]), ("b", &[3.0])]),
            ("model-00002-of-00002.safetensors", &[("a", second)]),
        ])
    };
    let reference = folder(&[("model.safetensors", &[("a", &[1.0, 2.0]), ("b", &[3.0])])]);
    assert_all_equal(&compare(parts(&[1.0, 2.0]).path(), reference.path()));
    let run = compare(parts(&[1.0, 2.5]).path(), reference.path());
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("a: a: model-00002-of-00002.safetensors differs"), "{run:?}");
    compare(parts(&[1.0]).path(), reference.path()).refuses(&["another one than in another file"]);
}

#[test]
fn one_part_is_compared_as_the_part_that_it_is() {
    let part = hf("sharded").join("model-00001-of-00002.safetensors");
    let run = compare(&part, &part);
    assert_all_equal(&run);
    assert!(run.stderr.contains("one of 2 files, compared as the part that it is"), "{run:?}");
    let run = compare(&part, &hf("single"));
    assert_eq!(run.code, 1, "{run:?}");
    let torch = hf("bin-single").join("pytorch_model.bin");
    assert_all_equal(&compare(&torch, &hf("single").join("model.safetensors")));
}

#[test]
fn a_safetensors_file_is_known_whatever_its_name() {
    let other = TempDir::new().unwrap();
    let file = other.path().join("weights.pt");
    fs::copy(hf("single").join("model.safetensors"), &file).unwrap();
    assert_all_equal(&compare(&file, &hf("single")));
    let lone = other.path().join("lone");
    fs::create_dir(&lone).unwrap();
    fs::copy(&file, lone.join("consolidated.safetensors")).unwrap();
    assert_all_equal(&compare(&lone, &hf("single")));
}

#[test]
fn adapters_are_compared() {
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let adapter = folder(&[("adapter_model.safetensors", &[(name, &[1.0, 2.0])])]);
    fs::write(adapter.path().join("adapter_config.json"), r#"{"r": 2}"#).unwrap();
    let run = compare(adapter.path(), adapter.path());
    assert_all_equal(&run);
    assert_eq!(names(&run.json()), ["model.layers.0.self_attn.q_proj.lora_A.weight"]);
    assert_eq!(inspect(adapter.path())["state"]["adapter_config"]["r"], 2);
}

#[cfg(unix)]
#[test]
fn the_cache_of_the_hub_is_followed() {
    use std::os::unix::fs::symlink;
    let cache = TempDir::new().unwrap();
    let model = cache.path().join("models--org--tiny");
    let snapshot = |hash: &str| {
        let snapshot = model.join("snapshots").join(hash);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(model.join("blobs")).unwrap();
        for file in common::files(&hf("sharded")) {
            let name = file.file_name().unwrap().to_str().unwrap();
            let blob = model.join("blobs").join(format!("blob-{name}"));
            fs::copy(&file, &blob).unwrap();
            symlink(Path::new("../../blobs").join(blob.file_name().unwrap()), snapshot.join(name))
                .unwrap();
        }
        snapshot
    };
    let first = snapshot("0123abcd");
    assert_all_equal(&compare(&first, &hf("single")));
    assert_all_equal(&compare(&model, &hf("single")));
    snapshot("4567abcd");
    compare(&model, &hf("single")).refuses(&["no checkpoint here"]);
    fs::create_dir(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), "4567abcd").unwrap();
    assert_all_equal(&compare(&model, &hf("single")));
    let blob = model.join("blobs/blob-model-00002-of-00002.safetensors");
    fs::remove_file(blob).unwrap();
    compare(&model, &hf("single")).refuses(&["model-00002-of-00002.safetensors", "cannot be read"]);
}

#[test]
fn each_damage_is_named_with_its_file() {
    let damaged = |change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let damaged = copied("single");
        let file = damaged.path().join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(file, change(bytes)).unwrap();
        let run = compare(&damaged.path(), &hf("sharded"));
        run.refuses(&["ckptcmp: a: ", "model.safetensors"]);
        run
    };
    damaged(&|bytes| bytes[..bytes.len() - 1].to_vec()).refuses(&["end at byte 680"]);
    damaged(&|bytes| [&bytes[..], &[0]].concat()).refuses(&["end at byte 680"]);
    damaged(&|_| Vec::new()).refuses(&["save it again"]);
    damaged(&|_| b"version https://git-lfs.github.com/spec/v1\noid".to_vec())
        .refuses(&["git lfs pull"]);
    let text =
        damaged(&|bytes| String::from_utf8_lossy(&bytes).replacen("BF16", "BF17", 1).into_bytes());
    assert_eq!(text.code, 2);
}

#[test]
fn a_tensor_of_an_unknown_dtype_leaves_the_others_compared() {
    let odd = copied("single");
    let name = r#""model.norm.weight":{"dtype":""#;
    assert_eq!(
        replace(&odd.path(), format!("{name}BF16").as_bytes(), format!("{name}XY16").as_bytes()),
        1
    );
    let run = compare(&odd.path(), &hf("single"));
    run.refuses(&["model.safetensors: model.norm.weight: dtype XY16 is not supported"]);
    assert_eq!(names(&run.json()).len(), TENSORS - 1);
    assert_eq!(differing(&run.json()), [""; 0]);
}

#[test]
fn vocabularies_padded_on_one_side_are_compared_over_the_shared_rows() {
    let place = |row| places(&hf("single"), EMBEDDINGS, &[row, 0])[0].offset;
    assert_eq!(place(1) - place(0), 8);
    let padded = TempDir::new().unwrap();
    let rows = |count: usize| -> Vec<f32> {
        (0..count).map(|row| [1.0, 2.0, 3.0, 4.0][row % 4]).collect()
    };
    for (file, count) in [("a.safetensors", 6), ("b.safetensors", 8)] {
        write(&padded.path().join(file), &[(EMBEDDINGS, &rows(count))], &json!({}));
    }
    let run = compare(&padded.path().join("a.safetensors"), &padded.path().join("b.safetensors"));
    assert_all_equal(&run);
    assert!(run.stderr.contains("left out 0 padded rows of a, 2 of b"), "{run:?}");
}

#[test]
fn no_changed_byte_of_a_file_passes_for_equal() {
    let victim = Victim::new(&hf("single"), "model.safetensors");
    let said = br#""format":"pt""#;
    let start = victim.bytes().windows(said.len()).position(|part| part == said).unwrap();
    let metadata = start..start + said.len();
    victim.any_changed_byte_is_found_or_refused((0..).step_by(3), move |at| metadata.contains(&at));
}
