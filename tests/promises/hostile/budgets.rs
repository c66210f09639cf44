//! Small checkpoints that ask for much in total, though no part of them is over a limit of its own.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{model_with, plain_args};
use crate::common::crafted::{
    Checkpoint, P, bomb, compare, dict, file, namespace, run, tensor, tensor_of, text, zip,
};

/// A file of `torch.save` with this object, alone in a folder.
fn torch_file(object: &P) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    fs::write(&path, file(object.pickle())).unwrap();
    (folder, path)
}

#[test]
fn elements_without_bytes_of_their_own_are_few() {
    let names: Vec<String> = (0..100).map(|number| format!("mask{number}")).collect();
    let expanded = |count: usize, numel: u64| {
        let value = || tensor_of("0", 64, 0, &[numel], &[0]);
        dict(names.iter().take(count).map(|name| (name.as_str(), value())))
    };
    for (count, numel) in [(1, 1 << 32), (100, 1 << 27)] {
        let context = format!("{count} of {numel}");
        let (_folder, path) = torch_file(&expanded(count, numel));
        let run = bomb(&context, &path);
        assert_eq!(run.code, 2, "{context}");
        assert!(run.stderr.contains("more elements in so few bytes than"), "{}", run.stderr);
        bomb(&context, &Checkpoint::with(expanded(count, numel), plain_args()).path());
    }
    // A causal mask of 4,096 tokens, one row of which is stored.
    let (_folder, path) =
        torch_file(&dict([("mask", tensor_of("0", 64, 0, &[64, 4096], &[1, 0]))]));
    assert_eq!(compare("a mask", &path, &path).code, 0);
}

#[test]
fn one_storage_under_many_names_is_read_a_few_times() {
    const BYTES: usize = 1 << 20;
    let numel = BYTES as u64 / 4;
    let names: Vec<String> = (0..2000).map(|number| format!("weight{number}")).collect();
    let shared = P::Put(1, Box::new(tensor_of("0", numel, 0, &[numel], &[1])));
    let member = |at: usize| if at == 0 { shared.clone() } else { P::Get(1) };
    let with = |count: usize| {
        let all = names.iter().take(count).enumerate();
        let object = dict(all.map(|(at, name)| (name.as_str(), member(at))));
        let entries = [("a/data.pkl", object.pickle()), ("a/data/0", vec![0; BYTES])];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt");
        fs::write(&path, zip(&entries.map(|(name, bytes)| (name.to_owned(), bytes)))).unwrap();
        (folder, path)
    };
    let (_folder, path) = with(2000);
    assert_eq!(run("2,000 views of a storage", &[Path::new("inspect"), &path]).code, 2);
    let (_folder, path) = with(4);
    assert_eq!(compare("4 views of a storage", &path, &path).code, 0);
}

/// A file of safetensors with one element, and aliases of it.
fn aliases(count: usize) -> Vec<u8> {
    let names: Vec<String> = (0..count).map(|at| format!("\"alias{at}\":\"w\"")).collect();
    let tensor = r#""w":{"dtype":"F32","shape":[65536],"data_offsets":[0,262144]}"#;
    let header = format!("{{\"__metadata__\":{{{}}},{tensor}}}", names.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 262_144]].concat()
}

#[test]
fn names_for_the_same_values_are_read_a_few_times() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.safetensors"), aliases(20_000)).unwrap();
    assert_eq!(run("20,000 aliases", &[Path::new("inspect"), folder.path()]).code, 2);
    fs::write(folder.path().join("model.safetensors"), aliases(2)).unwrap();
    assert_eq!(compare("2 aliases", folder.path(), folder.path()).code, 0);
}

#[test]
fn dicts_that_are_shared_make_few_names() {
    // Every level holds the next one twice.
    let mut value = P::Put(0, Box::new(tensor(&[2])));
    for level in 1..18 {
        let both = dict([("a", value), ("b", P::Get(level - 1))]);
        value = P::Put(level, Box::new(both));
    }
    let (_folder, path) = torch_file(&value);
    assert_eq!(bomb("alone", &path).code, 2);
    let ranks = namespace([("tensor_model_parallel_size", P::Int(100))]);
    let checkpoint = Checkpoint::with(value, ranks);
    let rank = fs::read(checkpoint.path().join("mp_rank_00/model_optim_rng.pt")).unwrap();
    (1..100).for_each(|number| checkpoint.add(&format!("mp_rank_{number:02}"), &rank));
    assert_eq!(bomb("a hundred ranks", &checkpoint.path()).code, 2);

    // Two modules that share a third one are no more than that.
    let third = P::Put(3, Box::new(dict([("weight", tensor(&[2]))])));
    let (_folder, path) = torch_file(&dict([("a", third), ("b", P::Get(3))]));
    assert_eq!(compare("two modules", &path, &path).code, 0);
}

#[test]
fn empty_containers_without_end_are_refused() {
    let million = |opcode: &[u8]| {
        let opcodes = [b"(", opcode.repeat(6_000_000).as_slice(), b"t"].concat();
        torch_file(&P::Raw(opcodes))
    };
    for (name, opcode) in [("dicts", b"}"), ("lists", b"]")] {
        let (_folder, path) = million(opcode);
        let run = bomb(name, &path);
        assert!(run.stderr.contains("more lists, dicts or objects than"), "{}", run.stderr);
    }
}

fn index_of(files: usize, folder: &Path) {
    let entries: Vec<String> = (0..files)
        .map(|number| format!("\"weight{number}\":\"part{number}.safetensors\""))
        .collect();
    let index = format!("{{\"weight_map\":{{{}}}}}", entries.join(","));
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

#[test]
fn files_that_an_index_names_and_nobody_has_are_counted_once() {
    let folder = tempfile::tempdir().unwrap();
    index_of(40_000, folder.path());
    let run = bomb("40,000 absent files", folder.path());
    assert_eq!(run.code, 2);
    index_of(3, folder.path());
    let run = compare("3 absent files", folder.path(), folder.path());
    assert!(run.stderr.contains("the index has 1 tensors in it: weight2"), "{}", run.stderr);
}

#[test]
fn parts_of_models_of_many_sizes_are_not_all_missed() {
    let folder = tempfile::tempdir().unwrap();
    for count in 10_000..12_000 {
        let name = format!("model-00001-of-{count}.safetensors");
        fs::write(folder.path().join(name), "").unwrap();
    }
    assert_eq!(bomb("2,000 numbers of parts", folder.path()).code, 2);
}

#[test]
fn chunks_that_nobody_wrote_are_looked_for_only_so_often() {
    let folder = tempfile::tempdir().unwrap();
    let backend = r#"{"sharded_backend": "zarr", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}"#;
    fs::write(folder.path().join("metadata.json"), backend).unwrap();
    fs::write(folder.path().join("common.pt"), file(dict([("iteration", P::Int(5))]).pickle()))
        .unwrap();
    for array in 0..200 {
        let array = folder.path().join(format!("decoder.layers.{array}.weight"));
        fs::create_dir(&array).unwrap();
        let (shape, chunks) = (vec!["2"; 17].join(","), vec!["1"; 17].join(","));
        let header = format!(
            r#"{{"zarr_format": 2, "shape": [{shape}], "chunks": [{chunks}], "dtype": "<f4", "order": "C", "compressor": null, "filters": null}}"#
        );
        fs::write(array.join(".zarray"), header).unwrap();
    }
    let run = bomb("absent chunks", folder.path());
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("the file of this chunk is missing"), "{}", run.stderr);
}

#[test]
fn patterns_that_take_long_to_match_are_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let patterns =
        P::List((0..500).map(|at| text(&format!("{}x{at}", "(a|b|ab)*".repeat(20)))).collect());
    let info = dict([("tp_replicated_parameter_patterns", patterns)]);
    let names: Vec<String> = (0..1000).map(|at| format!("{}{at}", "a".repeat(200))).collect();
    let module = dict(names.iter().map(|name| (name.as_str(), tensor(&[2]))));
    for rank in 0..2 {
        // Two ranks are never the same bytes.
        let own = ("seed_of_rank", P::Int(rank));
        let (module, info) = (module.clone(), info.clone());
        let states = dict([("module", module), ("universal_checkpoint_info", info), own]);
        let path = folder.path().join(format!("mp_rank_0{rank}_model_states.pt"));
        fs::write(path, file(states.pickle())).unwrap();
    }
    let run = bomb("patterns", folder.path());
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("more steps to match names than"), "{}", run.stderr);
}

#[test]
fn tensors_without_elements_are_read_however_many() {
    let empty = P::Put(1, Box::new(tensor_of("0", 64, 0, &[0], &[1])));
    let names: Vec<String> = (0..30_000).map(|number| format!("empty{number}")).collect();
    let member = |at: usize| if at == 0 { empty.clone() } else { P::Get(1) };
    let model = names.iter().enumerate().map(|(at, name)| (name.as_str(), member(at)));
    let checkpoint = Checkpoint::with(model_with(model), plain_args());
    assert_eq!(bomb("30,000 empty tensors", &checkpoint.path()).code, 0);
}
