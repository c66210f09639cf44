//! Promise: a distributed checkpoint of Megatron-Core holds what the rank folders of the same weights hold, whichever way
//! it names and stacks them: all layers in one tensor or each in its own, experts in an axis or by number, gate and up
//! apart, the sections of a mixer apart.
//!
//! The weights of `fixtures/layouts` are written once more as the `zarr` backend would (core 0.4 to 0.15): of all backends
//! the one whose files a test can write in a few lines. Names and axes are the same for all of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::array::Array;
use crate::common::damage::{Victim, sampled};
use crate::common::{
    self, Copied, assert_all_equal, compare, compare_with, differing, fixture, inspect, layout,
    sizes,
};
use tempfile::TempDir;

/// Writes a tensor in chunks of this shape; those at the edge are as long as the others.
fn write_chunks(array: &Array, folder: &Path, chunks: &[usize]) {
    fs::create_dir_all(folder).unwrap();
    let dtype = match array.dtype.as_str() {
        "float32" => "<f4",
        "float16" => "<f2",
        other => other,
    };
    let header = format!(
        r#"{{"zarr_format": 2, "shape": {:?}, "chunks": {chunks:?}, "dtype": "{dtype}", "order": "C", "compressor": null, "filters": null, "fill_value": null}}"#,
        array.shape
    );
    fs::write(folder.join(".zarray"), header).unwrap();
    let element = common::element_size(&array.dtype);
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for (number, bytes) in array.bytes.chunks(element).enumerate() {
        let (mut rest, mut at, mut stride) = (number, 0, 1);
        let mut place = Vec::new();
        for dim in (0..array.shape.len()).rev() {
            let index = rest % array.shape[dim];
            rest /= array.shape[dim];
            at += index % chunks[dim] * stride;
            stride *= chunks[dim];
            place.insert(0, (index / chunks[dim]).to_string());
        }
        let file = files.entry(place.join(".")).or_insert_with(|| vec![0xff; stride * element]);
        file[at * element..][..element].copy_from_slice(bytes);
    }
    for (name, bytes) in files {
        fs::write(folder.join(name), bytes).unwrap();
    }
}

/// The way in which names and axes are made.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// All layers of a list in one tensor, all experts of a layer in an axis of it.
    Homogeneous,
    /// Layers by number, experts in an axis.
    Numbered,
    /// Layers and experts by number, gate and up apart (`singleton_local_shards`).
    Singleton,
}

use Form::{Homogeneous, Numbered, Singleton};

/// The sections of mixers, with their sizes in the models of `fixtures/gen/logical.py`.
const SECTIONS: &[(&str, &[(&str, usize)])] = &[
    ("mixer.in_proj.weight", &[("z", 16), ("x", 16), ("B", 6), ("C", 6), ("dt", 4)]),
    ("mixer.conv1d.weight", &[("x", 16), ("B", 6), ("C", 6)]),
    ("mixer.conv1d.bias", &[("x", 16), ("B", 6), ("C", 6)]),
    (
        "self_attention.in_proj.weight",
        &[("query", 6), ("key", 6), ("value", 20), ("z", 20), ("beta", 4), ("alpha", 4)],
    ),
    ("self_attention.conv1d.weight", &[("query", 6), ("key", 6), ("value", 20)]),
];

/// A parameter in its sections, each under the name that it is stored with.
fn sections(name: &str, array: &Array, is_gated: bool, form: Form) -> Vec<(String, Array)> {
    let mixer = SECTIONS.iter().find(|(end, _)| name.ends_with(end));
    let parts: Vec<(String, usize)> = match mixer {
        Some((_, parts)) => {
            parts.iter().map(|(part, rows)| (format!("{name}.{part}"), *rows)).collect()
        }
        None if form == Singleton && is_gated && name.contains(".linear_fc1.") => {
            ["w", "v"].map(|half| (format!("{name}_{half}"), array.shape[0] / 2)).to_vec()
        }
        None => return vec![(name.to_owned(), array.clone())],
    };
    let mut start = 0;
    let mut found = Vec::new();
    for (name, rows) in parts {
        found.push((name, array.rows(start..start + rows)));
        start += rows;
    }
    assert_eq!(start, array.shape[0], "{name}");
    found
}

/// The name that distributed checkpoints have for a canonical one: Transformer Engine's names of norms, experts twice.
fn stored_name(name: &str, form: Form) -> String {
    let mut name = name
        .replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        .replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        .replace(".experts.local_experts.", ".experts.experts.");
    if form != Homogeneous && name.starts_with("decoder.final_layernorm") {
        name = name.replace("final_layernorm", "final_norm");
    }
    name
}

/// Cuts a name at the number behind `list`: what is before, the number, what follows.
fn cut<'n>(name: &'n str, list: &str) -> Option<(&'n str, usize, &'n str)> {
    let start = name.find(list)? + list.len();
    let (number, rest) = name[start..].split_once('.')?;
    Some((&name[..start], number.parse().ok()?, rest))
}

/// Stacks what stands behind a list's numbers, name by name.
fn stacked(arrays: BTreeMap<String, Array>, list: &str) -> BTreeMap<String, Array> {
    let mut stacks: BTreeMap<String, BTreeMap<usize, Array>> = BTreeMap::new();
    let mut others = BTreeMap::new();
    for (name, array) in arrays {
        match cut(&name, list) {
            Some((before, number, rest)) if !name.starts_with("mtp.") => {
                stacks.entry(format!("{before}{rest}")).or_default().insert(number, array);
            }
            _ => drop(others.insert(name, array)),
        }
    }
    others.extend(stacks.into_iter().map(|(name, arrays)| {
        let arrays: Vec<Array> = arrays.into_values().collect();
        (name, Array::stacked(&arrays))
    }));
    others
}

/// The tensors of a checkpoint as a distributed one stores them.
fn stored(source: &Path, form: Form) -> BTreeMap<String, Array> {
    let inspected = inspect(source);
    let tensors = inspected["tensors"].as_object().unwrap();
    let mut arrays = BTreeMap::new();
    for (name, tensor) in tensors {
        let array = Array::of(tensor);
        let is_gated = name.contains(".linear_fc1.") && {
            let module = &name[..name.find("linear_fc1.").unwrap()];
            let down = &tensors[&format!("{module}linear_fc2.weight")];
            array.shape[0] == 2 * sizes(&down["shape"])[1]
        };
        arrays.extend(sections(&stored_name(name, form), &array, is_gated, form));
    }
    if form != Singleton {
        arrays = stacked(arrays, ".experts.experts.");
    }
    if form == Homogeneous {
        arrays = stacked(arrays, ".layers.");
    }
    arrays
}

/// A checkpoint of the zarr backend, gone with the value.
struct Zarr {
    folder: TempDir,
}

impl Zarr {
    /// With the weights of `source`, and with what its first rank says of the run.
    fn of(source: &Path, form: Form) -> Self {
        let zarr = Self { folder: TempDir::new().unwrap() };
        for (key, array) in stored(source, form) {
            zarr.add(&key, &array);
        }
        let rank = source.join("iter_0000005/mp_rank_00/model_optim_rng.pt");
        fs::copy(rank, zarr.path().join("common.pt")).unwrap();
        let metadata = r#"{"sharded_backend": "zarr", "sharded_backend_version": 1}"#;
        fs::write(zarr.path().join("metadata.json"), metadata).unwrap();
        let lock = zarr.path().join("decoder.final_layernorm.weight.sync");
        fs::create_dir(&lock).unwrap();
        fs::write(lock.join(".zarray"), "").unwrap();
        zarr
    }

    fn add(&self, key: &str, array: &Array) {
        // A row of the stack a chunk, rows in chunks that do not fit evenly.
        let last = array.shape.len() - 1;
        let chunk = |(dim, size): (usize, &usize)| if dim == last { *size } else { size / 3 + 1 };
        let chunks: Vec<usize> = array.shape.iter().enumerate().map(chunk).collect();
        write_chunks(array, &self.path().join(key), &chunks);
    }

    fn path(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }
}

#[track_caller]
fn assert_equal(model: &str, forms: &[Form]) {
    let source = layout(model);
    for form in forms {
        let zarr = Zarr::of(&source, *form);
        let run = compare(&zarr.path(), &source);
        assert_all_equal(&run);
        let both = inspect(&zarr.path());
        let expected = inspect(&source);
        assert_eq!(common::names(&both["tensors"]), common::names(&expected["tensors"]));
        assert_eq!(common::names(&run.json()), common::names(&expected["tensors"]));
    }
}

#[test]
fn a_gpt_is_the_same_with_its_layers_in_one_tensor_or_by_number() {
    assert_equal("gpt/tp1", &[Homogeneous, Numbered, Singleton]);
    assert_equal("gpt-tied/tp1", &[Homogeneous, Numbered]);
}

#[test]
fn experts_are_the_same_in_an_axis_or_by_number() {
    assert_equal("moe/seq-ep1", &[Numbered, Singleton]);
    assert_equal("moe-ungated/seq-ep1", &[Homogeneous, Numbered, Singleton]);
    assert_equal("moe-bias/seq-ep1", &[Homogeneous, Numbered, Singleton]);
}

#[test]
fn latent_attention_is_the_same() {
    assert_equal("mla/tp1", &[Homogeneous, Numbered, Singleton]);
}

#[test]
fn the_sections_of_mixers_are_put_together() {
    assert_equal("hybrid/tp1", &[Numbered, Singleton]);
    assert_equal("gdn/tp1", &[Numbered, Singleton]);
}

#[test]
fn further_predictions_are_the_same() {
    assert_equal("mtp/tp1", &[Homogeneous, Numbered, Singleton]);
    assert_equal("mtp-tied/tp1", &[Homogeneous, Numbered]);
}

#[test]
fn encoders_are_the_same() {
    assert_equal("t5/tp1", &[Homogeneous, Numbered]);
    assert_equal("bert/tp1", &[Homogeneous, Numbered]);
}

#[test]
fn one_changed_element_is_found_and_named() {
    let source = layout("moe-bias/seq-ep1");
    let zarr = Zarr::of(&source, Homogeneous);
    let name = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight";
    common::flip(&zarr.path(), name, &[7, 3]);
    let run = compare_with(&zarr.path(), &source, &["--metrics", "max_abs_index,differing"]);
    assert_eq!(run.code, 1, "{run:?}");
    let result = run.json();
    assert_eq!(differing(&result), [name]);
    assert_eq!(sizes(&result[name]["max_abs_index"]), [7, 3]);
    assert_eq!(result[name]["differing"], 1);
}

#[test]
fn states_of_the_optimizer_go_by_the_names_of_their_weights() {
    let source = layout("gpt/tp1");
    let [homogeneous, numbered] = [Homogeneous, Numbered].map(|form| {
        let zarr = Zarr::of(&source, form);
        for (key, array) in stored(&source, form) {
            let bytes = array.bytes.iter().map(|byte| byte ^ 1).collect();
            let state = Array { bytes, ..array };
            zarr.add(&format!("optimizer.state.exp_avg.{key}"), &state);
            zarr.add(&format!("optimizer.state.exp_avg_sq.{key}"), &state);
            zarr.add(&format!("chained_0.optimizer.state.fp32_param.{key}"), &state);
        }
        zarr
    });
    let both = ["--section", "model,optimizer", "--metrics", "max_abs_index"];
    let run =
        compare_with(&homogeneous.path(), &numbered.path(), &["--section", "model,optimizer"]);
    assert_all_equal(&run);
    let result = run.json();
    for state in ["", "optimizer.exp_avg.", "optimizer.fp32_param."] {
        let name = format!("{state}decoder.layers.5.input_layernorm.weight");
        assert!(result.get(&name).is_some(), "{name}");
    }
    let name = "decoder.layers.3.mlp.linear_fc2.weight";
    let folder = numbered.path().join(format!("optimizer.state.exp_avg.{name}"));
    let chunk = folder.join("0.0");
    let mut bytes = fs::read(&chunk).unwrap();
    bytes[2] ^= 1;
    fs::write(&chunk, bytes).unwrap();
    let run = compare_with(&homogeneous.path(), &numbered.path(), &both);
    assert_eq!(run.code, 1, "{run:?}");
    let result = run.json();
    let name = format!("optimizer.exp_avg.{name}");
    assert_eq!(differing(&result), [&name]);
    assert_eq!(sizes(&result[&name]["max_abs_index"]), [0, 1]);
    let run = compare(&homogeneous.path(), &numbered.path());
    assert_all_equal(&run);
}

#[test]
fn a_missing_chunk_is_named() {
    let source = layout("gpt-small/tp1");
    let zarr = Zarr::of(&source, Homogeneous);
    fs::remove_file(zarr.path().join("decoder.layers.mlp.linear_fc2.weight/0.1.0")).unwrap();
    let run = compare(&zarr.path(), &source);
    run.refuses(&[
        "decoder.layers.mlp.linear_fc2.weight/0.1.0",
        "the file of this chunk is missing",
    ]);
    assert!(run.stdout.is_empty() || run.json().get("output_layer.weight").is_some());
}

#[test]
fn a_missing_section_is_named() {
    let source = layout("hybrid/tp1");
    let zarr = Zarr::of(&source, Numbered);
    fs::remove_dir_all(zarr.path().join("decoder.layers.0.mixer.in_proj.weight.B")).unwrap();
    let run = compare(&zarr.path(), &source);
    run.refuses(&["decoder.layers.0.mixer.in_proj.weight", "z, x, B, C, dt make it up"]);
}

#[test]
fn a_compressed_array_is_refused_by_name() {
    let source = layout("gpt-small/tp1");
    let zarr = Zarr::of(&source, Numbered);
    let header = zarr.path().join("output_layer.weight/.zarray");
    let text = fs::read_to_string(&header).unwrap();
    fs::write(&header, text.replace(r#""compressor": null"#, r#""compressor": {"id": "zlib"}"#))
        .unwrap();
    let run = compare(&zarr.path(), &source);
    run.refuses(&["output_layer.weight", r#"its compressor is {"id":"zlib"}"#]);
}

/// A checkpoint that Megatron-Core or torch itself wrote; see `fixtures/README.md`.
fn real(path: &str) -> PathBuf {
    fixture("torch_dist").join(path)
}

#[test]
fn an_element_that_one_rank_wrote_is_found_and_named() {
    let changed = Copied::of(&real("gpt-small/tp2pp2"));
    let name = "decoder.layers.1.mlp.linear_fc1.weight";
    common::flip(&changed.path(), name, &[20, 5]);
    let flags = ["--metrics", "max_abs_index,differing"];
    let run = compare_with(&layout("gpt-small/tp2"), &changed.path(), &flags);
    assert_eq!(run.code, 1, "{run:?}");
    let result = run.json();
    assert_eq!(differing(&result), [name]);
    assert_eq!(sizes(&result[name]["max_abs_index"]), [20, 5]);
    assert_eq!(result[name]["differing"], 1);
}

#[test]
fn a_missing_data_file_is_named_and_the_rest_compared() {
    let damaged = Copied::of(&real("gpt-small/tp2pp2"));
    fs::remove_file(damaged.iteration().join("__3_1.distcp")).unwrap();
    compare(&damaged.path(), &layout("gpt-small/tp1")).refuses(&["__3_1.distcp"]);
}

#[test]
fn a_save_that_was_interrupted_before_its_last_file_is_still_read() {
    let interrupted = Copied::of(&real("gpt-small/tp2pp2"));
    fs::remove_file(interrupted.iteration().join("metadata.json")).unwrap();
    let run = compare(&interrupted.path(), &layout("gpt-small/tp1"));
    assert_all_equal(&run);
    assert!(run.stderr.contains("no metadata.json, which is written last"), "{}", run.stderr);
}

#[test]
fn without_its_metadata_nothing_is_known() {
    let interrupted = Copied::of(&real("gpt-small/tp2pp2"));
    fs::remove_file(interrupted.iteration().join(".metadata")).unwrap();
    compare(&interrupted.path(), &layout("gpt-small/tp1")).refuses(&["iter_0000005", ".metadata"]);
}

#[test]
fn a_damaged_common_file_costs_no_weights() {
    let damaged = Copied::of(&real("gpt-small/tp2pp2"));
    fs::write(damaged.iteration().join("common.pt"), "no archive").unwrap();
    let run = compare(&damaged.path(), &layout("gpt-small/tp1"));
    run.refuses(&["common.pt"]);
    assert_eq!(common::names(&run.json()).len(), 15);
}

#[test]
fn the_run_says_what_it_is() {
    let inspected = inspect(&real("gpt-small/tp2pp2"));
    assert_eq!(inspected["format"], "megatron-torch_dist");
    assert_eq!(inspected["layout"], "tp2 pp2");
    assert_eq!(inspected["iteration"], 5);
    assert_eq!(inspected["state"]["args"]["num_layers"], 2);
    assert_eq!(inspect(&real("gpt-small/fsdp"))["state"]["args"]["num_layers"], 2);
}

#[test]
fn flattened_states_are_what_they_were() {
    let (flat, whole) = (real("flattened/torch_dist"), real("flattened/zarr"));
    let both = ["--section", "model,optimizer"];
    let run = compare_with(&flat, &whole, &both);
    assert_all_equal(&run);
    assert_eq!(common::names(&run.json()).len(), 14);
    let changed = Copied::of(&whole);
    // The last element of the second layer.
    let chunk =
        changed.path().join("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight/1.1.0");
    let mut bytes = fs::read(&chunk).unwrap();
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    fs::write(&chunk, bytes).unwrap();
    let flags = [&both[..], &["--metrics", "max_abs_index"]].concat();
    let run = compare_with(&flat, &changed.path(), &flags);
    assert_eq!(run.code, 1, "{run:?}");
    let result = run.json();
    let name = "optimizer.exp_avg.decoder.layers.1.mlp.linear_fc1.weight";
    assert_eq!(differing(&result), [name]);
    assert_eq!(sizes(&result[name]["max_abs_index"]), [7, 5]);
}

#[test]
fn buckets_that_do_not_fit_the_model_are_not_compared() {
    let source = layout("gpt-small/tp1");
    let with_bucket = |values: usize| {
        let zarr = Zarr::of(&source, Homogeneous);
        let bucket =
            Array { dtype: "float32".to_owned(), shape: vec![values], bytes: vec![1; 4 * values] };
        let key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg";
        zarr.add(key, &bucket);
        zarr
    };
    let [one, other] = [128, 120].map(with_bucket);
    for (a, b) in [(&one, &one), (&one, &other)] {
        let run = compare_with(&a.path(), &b.path(), &["--section", "model,optimizer"]);
        run.refuses(&[
            "optimizer: cannot be compared",
            "without the names of parameters",
            "--section model",
        ]);
        // One cause, one line a side.
        assert_eq!(run.stderr.matches("cannot be compared").count(), 2, "{}", run.stderr);
        assert_all_equal(&compare(&a.path(), &b.path()));
    }
}

#[test]
fn states_without_any_names_are_not_compared_in_silence() {
    let source = layout("gpt-small/tp1");
    let zarr = Zarr::of(&source, Homogeneous);
    let folder = zarr.path().join("optimizer.distributed.dp_group_idx_0.param_state");
    fs::create_dir(&folder).unwrap();
    fs::copy(zarr.path().join("common.pt"), folder.join("shard_0_1.pt")).unwrap();
    assert_all_equal(&compare(&zarr.path(), &source));
    let run = compare_with(&zarr.path(), &source, &["--section", "model,optimizer"]);
    run.refuses(&["dp_group_idx_0.param_state", "without the names of parameters"]);
}

#[test]
fn absurd_sizes_are_refused_and_nothing_is_allocated_for_them() {
    let source = layout("gpt-small/tp1");
    for (shape, chunks) in [
        ("[1000000000000, 8]", "[1, 8]"),
        ("[18446744073709551615, 8]", "[18446744073709551615, 8]"),
        ("[56, 8]", "[0, 8]"),
        ("[56, 8]", "[56]"),
        ("[1000000000000, 1000000000000]", "[1000000000000, 1000000000000]"),
    ] {
        let zarr = Zarr::of(&source, Numbered);
        let header = zarr.path().join("output_layer.weight/.zarray");
        let text = format!(
            r#"{{"zarr_format": 2, "shape": {shape}, "chunks": {chunks}, "dtype": "bfloat16", "order": "C", "compressor": null, "filters": null, "fill_value": null}}"#
        );
        fs::write(&header, text).unwrap();
        compare(&zarr.path(), &source).refuses(&["output_layer.weight"]);
    }
}

#[test]
fn any_changed_byte_of_what_describes_the_tensors_is_found_or_refused() {
    for (checkpoint, file) in [
        ("gpt-small/tp2pp2", "iter_0000005/.metadata"),
        ("gpt-small/tp2pp2", "iter_0000005/common.pt"),
        ("gpt-small/tp2pp2", "iter_0000005/metadata.json"),
        ("gpt-small/fsdp", "iter_0000005/.metadata"),
        ("flattened/torch_dist", ".metadata"),
        ("flattened/zarr", "decoder.layers.mlp.linear_fc1.weight/.zarray"),
    ] {
        Victim::new(&real(checkpoint), file).any_cut_is_refused(30);
        let victim = Victim::new(&real(checkpoint), file);
        let places = sampled(victim.bytes().len(), 120);
        victim.any_changed_byte_is_found_or_refused(places, |_| true);
    }
}
