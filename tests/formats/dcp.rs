//! Promise: what `torch.distributed.checkpoint` writes compares as the values that were saved, in every form, and
//! whatever of it is missing or damaged is named.

use std::fs;

use ckptcmp::formats::{self, OpenOptions};
use ckptcmp::names::Name;

use crate::common::{self, Copied, compare, compare_with, fixture, inspect, replace, run};

/// All forms of one set of values.
const FORMS: [&str; 8] = [
    "single",
    "wrapped",
    "zstd",
    "sharded",
    "per-rank",
    "safetensors",
    "hf-shards",
    "hf-consolidated",
];

fn form(name: &str) -> std::path::PathBuf {
    fixture("dcp").join(name)
}

fn copy(name: &str) -> Copied {
    Copied::of(&form(name))
}

#[test]
fn a_changed_element_is_found_in_every_form() {
    // The first element of embed.weight lies somewhere in each of them as it is.
    let weights = fs::read(form("weights.pt")).unwrap();
    let single = fs::read(form("hf-consolidated/model-00001-of-00001.safetensors")).unwrap();
    let header = usize::from(single[0]) + 256 * usize::from(single[1]);
    let first = &single[8 + header..][..12];
    assert!(weights.windows(12).any(|part| part == first));
    let mut changed = first.to_vec();
    changed[3] ^= 0x40;
    for name in FORMS.into_iter().filter(|name| *name != "zstd") {
        let copied = copy(name);
        let data: Vec<_> = common::files(&copied.path())
            .into_iter()
            .filter(|path| !path.parent().is_some_and(|folder| folder.ends_with("sharded")))
            .collect();
        let count: usize = data.iter().map(|path| replace(path, first, &changed)).sum();
        // Without collectives every rank may write its own copy.
        assert!(count >= 1, "{name}");
        let run = compare(&form("weights.pt"), &copied.path());
        assert_eq!(run.code, 1, "{name}: {}", run.stderr);
        assert_eq!(run.verdict(), "different: 1 of 3 tensors differ", "{name}");
    }
}

#[test]
fn the_state_of_an_optimizer_has_the_names_of_its_weights() {
    let flags = ["--section", "model,optimizer"];
    let run = compare_with(&form("single"), &form("wrapped"), &flags);
    assert_eq!(
        (run.code, run.verdict()),
        (0, "identical: all 9 tensors bit for bit"),
        "{}",
        run.stderr
    );
    let result = run.json();
    for name in ["optimizer.exp_avg.embed.weight", "optimizer.step.layers.0.weight"] {
        assert!(result.get(name).is_some(), "{name}");
    }
}

#[test]
fn numbers_beside_the_model_are_state() {
    for name in ["single", "wrapped"] {
        let seen = inspect(&form(name));
        assert_eq!(seen["iteration"], 3, "{name}");
        assert_eq!(seen["state"]["iteration"], 3, "{name}");
        assert_eq!(seen["state"]["counter"], 5, "{name}");
        assert_eq!(seen["state"]["optimizer.param_groups.0.lr"], 0.25, "{name}: {}", seen["state"]);
    }
}

#[test]
fn a_missing_data_file_is_named_with_every_tensor_that_needs_it() {
    for name in ["sharded", "safetensors"] {
        let copied = copy(name);
        fs::remove_file(copied.path().join("__2_0.distcp")).unwrap();
        let run = compare(&form("weights.pt"), &copied.path());
        run.refuses(&[
            "__2_0.distcp: cannot be read: no such file",
            "lost with it: ",
            "embed.weight",
        ]);
        // One line, whatever the number of tensors.
        let named = run.stderr.lines().filter(|line| line.contains("__2_0.distcp")).count();
        assert_eq!(named, 1, "{}", run.stderr);
    }
}

#[test]
fn a_data_file_that_is_cut_off_is_named() {
    let copied = copy("sharded");
    let path = copied.path().join("__3_0.distcp");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 700]).unwrap();
    let run = compare(&form("weights.pt"), &copied.path());
    run.refuses(&["__3_0.distcp: byte ", "it is cut off; copy or save it again"]);
}

#[test]
fn a_missing_rank_leaves_a_gap_that_is_named() {
    let copied = copy("per-rank");
    fs::remove_file(copied.path().join("__3.metadata")).unwrap();
    let run = compare(&form("weights.pt"), &copied.path());
    run.refuses(&[
        "copy: missing __3.metadata: what rank 3 wrote is not known",
        "copy: embed.weight: no shard holds all of it: 72 of 88 elements are covered",
    ]);
    let copied = copy("per-rank");
    fs::remove_file(copied.path().join("__1.metadata")).unwrap();
    fs::remove_file(copied.path().join("__1_0.distcp")).unwrap();
    compare(&form("weights.pt"), &copied.path()).refuses(&["copy: missing __1.metadata"]);
    let copied = copy("hf-shards");
    fs::remove_file(copied.path().join("shard-00002-model-00001-of-00001.safetensors")).unwrap();
    compare(&form("weights.pt"), &copied.path()).refuses(&[
        "shard-00002-model-*.safetensors: missing shard",
        "copy: embed.weight: no shard holds all of it",
    ]);
}

#[test]
fn copies_by_several_ranks_are_compared_with_one_another() {
    // Without collectives every rank writes what all of them have.
    let catalog = formats::open(form("weights.pt"), &OpenOptions::default()).unwrap();
    let start = catalog.tensors[&Name::new("norm.weight")].tensor.pieces()[0].offset;
    let bytes = fs::read(form("weights.pt")).unwrap();
    let norm = &bytes[usize::try_from(start).unwrap()..][..64];
    let copied = copy("per-rank");
    let mut changed = norm.to_vec();
    changed[7] ^= 0x40;
    assert_eq!(replace(&copied.path().join("__3_0.distcp"), norm, &changed), 1);
    let run = compare(&form("weights.pt"), &copied.path());
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("norm.weight") && run.stderr.contains("__3_0.distcp"), "{run:?}");
}

#[test]
fn metadata_that_contradicts_the_data_names_both() {
    let copied = copy("single");
    assert_eq!(replace(&copied.path().join(".metadata"), b"bfloat16", b"qfloat16"), 1);
    compare(&form("weights.pt"), &copied.path())
        .refuses(&["copy: model.layers.0.weight: dtype qfloat16 is not supported"]);
    let copied = copy("single");
    assert_eq!(replace(&copied.path().join(".metadata"), b"\x07float32", b"\x07float16"), 1);
    compare(&form("weights.pt"), &copied.path())
        .refuses(&["__0_0.distcp: byte ", "the metadata says float16 and the file holds float32"]);
}

#[test]
fn an_unknown_transform_is_named() {
    let copied = copy("zstd");
    assert!(replace(&copied.path(), b"stream.zstd/1", b"stream.lzma/1") > 0);
    let run = compare(&form("weights.pt"), &copied.path());
    run.refuses(&["copy: model.embed.weight: ", "unsupported transform stream.lzma/1"]);
}

#[test]
fn damaged_compressed_bytes_are_named() {
    let copied = copy("zstd");
    let path = copied.path().join("__0_0.distcp");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 100;
    bytes[last..].fill(0);
    fs::write(&path, bytes).unwrap();
    compare(&form("weights.pt"), &copied.path()).refuses(&["__0_0.distcp: byte "]);
}

#[test]
fn nothing_outside_of_the_folder_is_opened() {
    let copied = copy("single");
    let metadata = copied.path().join(".metadata");
    assert!(replace(&metadata, b"__0_0.distcp", b"../0_0.distc") > 0);
    compare(&form("weights.pt"), &copied.path())
        .refuses(&["../0_0.distc: byte ", "no name of a file in this folder"]);
}

#[test]
fn no_metadata_at_all_is_an_interrupted_save() {
    let copied = copy("sharded");
    fs::remove_file(copied.path().join(".metadata")).unwrap();
    let run = run(["inspect", copied.path().to_str().unwrap()]);
    run.refuses(&[".metadata: missing: ", "the save was interrupted"]);
}

#[test]
fn the_folder_above_that_of_the_model_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    common::copy(&form("single"), &folder.path().join("pytorch_model_fsdp_0"));
    let run = compare(&form("weights.pt"), folder.path());
    assert_eq!(
        (run.code, run.verdict()),
        (0, "identical: all 3 tensors bit for bit"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_data_file_on_its_own_leads_to_its_folder() {
    let file = fixture("dcp/sharded/__0_0.distcp");
    compare(&file, &file).refuses(&["__0_0.distcp", "name the folder"]);
}
