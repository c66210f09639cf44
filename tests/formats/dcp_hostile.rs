//! Damaged and malicious checkpoints of `torch.distributed.checkpoint`: no panic, no equality with something missing.

#![cfg(unix)]

use std::fs;

use ckptcmp::catalog::Section;
use ckptcmp::formats::{self, OpenOptions};

use crate::common::crafted::{self, P, counts, dict, object, text};
use crate::common::damage::Victim;
use crate::common::{fixture, run};

#[test]
fn a_metadata_cut_off_anywhere_is_refused() {
    for (form, file, cuts) in [("single", ".metadata", 400), ("per-rank", "__1.metadata", 200)] {
        Victim::new(&fixture("dcp").join(form), file).any_cut_is_refused(cuts);
    }
}

#[test]
fn any_changed_byte_is_found_or_refused() {
    for (form, file, step) in [
        ("single", ".metadata", 1),
        ("single", "__0_0.distcp", 5),
        ("zstd", "__0_0.distcp", 5),
        ("safetensors", "__1_0.distcp", 3),
        ("hf-shards", "shard-00001-model-00001-of-00001.safetensors", 3),
    ] {
        Victim::new(&fixture("dcp").join(form), file)
            .any_changed_byte_is_found_or_refused((0..).step_by(step), |_| true);
    }
}

fn size(sizes: &[u64]) -> P {
    P::Call("torch", "Size", vec![counts(sizes)])
}

fn chunk(offsets: &[u64], sizes: &[u64]) -> P {
    object("ChunkStorageMetadata", &dict([("offsets", size(offsets)), ("sizes", size(sizes))]))
}

fn described(shape: &[u64], chunks: Vec<P>) -> P {
    let properties = P::Tuple(vec![
        P::Raw(b"ctorch\nfloat32\n".to_vec()),
        P::None,
        P::Bool(false),
        P::None,
        P::Bool(false),
    ]);
    let state = dict([
        ("properties", object("TensorProperties", &properties)),
        ("size", size(shape)),
        ("chunks", P::List(chunks)),
    ]);
    object("TensorStorageMetadata", &state)
}

fn stored(name: &str, offset: &[u64], path: &str, at: u64, len: u64) -> (P, P) {
    let index = dict([("fqn", text(name)), ("index", P::None), ("offset", size(offset))]);
    let info = dict([
        ("relative_path", text(path)),
        ("offset", P::Unsigned(at)),
        ("length", P::Unsigned(len)),
    ]);
    (object("MetadataIndex", &index), object("_StorageInfo", &info))
}

/// A folder with this metadata, and a data file of a `torch.save` of two rows of three floats.
fn folder(described: Vec<(P, P)>, stored: Vec<(P, P)>) -> tempfile::TempDir {
    let state = P::Dict(vec![
        (text("state_dict_metadata"), P::Dict(described)),
        (text("planner_data"), P::None),
        (text("storage_data"), P::Dict(stored)),
    ]);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(".metadata"), object("Metadata", &state).pickle()).unwrap();
    fs::write(folder.path().join("__0_0.distcp"), slice()).unwrap();
    folder
}

fn slice() -> Vec<u8> {
    let tensor = crafted::tensor(&[2, 3]).pickle();
    crafted::zip(&[("archive/data.pkl".into(), tensor), ("archive/data/0".into(), vec![0; 256])])
}

/// As [`folder`], but the data file is a `torch.save` of this object, which the metadata calls `name`.
fn folder_of_object(class: &str, name: &str, value: &P) -> tempfile::TempDir {
    let file = crafted::zip(&[
        ("archive/data.pkl".into(), value.pickle()),
        ("archive/data/0".into(), vec![0; 256]),
    ]);
    let info = dict([
        ("relative_path", text("__0_0.distcp")),
        ("offset", P::Int(0)),
        ("length", P::Unsigned(file.len() as u64)),
    ]);
    let index = object("MetadataIndex", &dict([("fqn", text(name)), ("index", P::None)]));
    let bytes = P::Raw(b"cm\nBytesStorageMetadata\n)\x81".to_vec());
    let state = P::Dict(vec![
        (text("state_dict_metadata"), P::Dict(vec![(text(name), bytes)])),
        (text("storage_data"), P::Dict(vec![(index, object("_StorageInfo", &info))])),
    ]);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(".metadata"), object(class, &state).pickle()).unwrap();
    fs::write(folder.path().join("__0_0.distcp"), file).unwrap();
    folder
}

fn names_in(folder: &tempfile::TempDir) -> Vec<String> {
    let options = OpenOptions { sections: Section::OF_TENSORS.to_vec(), ..OpenOptions::default() };
    let found = formats::open(folder.path(), &options).unwrap();
    assert_eq!(found.problems, []);
    found.tensors.keys().map(|name| name.as_str().to_owned()).collect()
}

#[test]
fn tensors_inside_an_object_are_tensors() {
    let tensor = || crafted::tensor(&[2, 3]);
    // A planner takes dicts and lists apart, but no tuple.
    let tuple = P::Tuple(vec![tensor(), P::Int(7), tensor()]);
    assert_eq!(names_in(&folder_of_object("Metadata", "pair", &tuple)), ["pair.0", "pair.2"]);
    // With `flatten_state_dict=False` it takes nothing apart.
    let model = dict([("a.weight", tensor()), ("b", dict([("weight", tensor())]))]);
    let whole = folder_of_object("Metadata", "model", &model);
    assert_eq!(names_in(&whole), ["a.weight", "b.weight"]);
    let state = dict([("state", dict([("a", dict([("exp_avg", tensor())]))]))]);
    let optimizer = folder_of_object("Metadata", "optimizer", &state);
    assert_eq!(names_in(&optimizer), ["optimizer.exp_avg.a"]);
}

#[test]
fn the_step_that_torchtitan_says_is_held_against_its_folder() {
    let whole = dict([("step", P::Int(1000))]);
    for (name, value) in [("train_state.step", P::Int(1000)), ("train_state", whole)] {
        let saved = folder_of_object("Metadata", name, &value);
        for (folder, says) in [("step-1000", None), ("step-2000", Some("2000")), ("other", None)] {
            let root = saved.path().join(folder);
            fs::create_dir(&root).unwrap();
            for file in [".metadata", "__0_0.distcp"] {
                fs::copy(saved.path().join(file), root.join(file)).unwrap();
            }
            let found = formats::open(&root, &OpenOptions::default());
            let found = found.err().map(|error| error.to_string());
            let said = says
                .map(|step| format!("its name says train_state.step {step}, its files say 1000"));
            assert!(
                found.as_deref().unwrap_or_default().contains(said.as_deref().unwrap_or_default())
            );
            assert_eq!(found.is_some(), said.is_some(), "{folder}: {found:?}");
        }
    }
}

#[test]
fn the_metadata_of_megatron_core_0_15_is_a_subclass() {
    let folder = folder_of_object("MCoreMetadata", "pair", &P::Tuple(vec![crafted::tensor(&[2])]));
    assert_eq!(names_in(&folder), ["pair.0"]);
}

fn complaint(folder: &tempfile::TempDir) -> String {
    let run = run(["inspect", folder.path().to_str().unwrap()]);
    assert_eq!(run.code, 2, "{run:?}");
    run.stderr
}

fn one(chunks: &[[u64; 2]]) -> Vec<(P, P)> {
    let chunks = chunks.iter().map(|offsets| chunk(offsets, &[2, 3])).collect();
    vec![(text("w"), described(&[4, 3], chunks))]
}

fn at(offset: [u64; 2]) -> (P, P) {
    stored("w", &offset, "__0_0.distcp", 0, slice().len() as u64)
}

#[test]
fn what_the_helpers_write_is_a_checkpoint() {
    let folder = folder(one(&[[2, 0], [0, 0]]), vec![at([0, 0]), at([2, 0])]);
    let run = run(["inspect", folder.path().to_str().unwrap()]);
    assert_eq!(run.code, 0, "{run:?}");
}

#[test]
fn chunks_that_are_missing_doubled_or_elsewhere_are_named() {
    for (chunks, stored, words) in [
        (
            &[[0, 0], [2, 0]][..],
            vec![at([0, 0])],
            "w: its chunk at [2, 0]: the metadata does not say where it is",
        ),
        (&[[0, 0]], vec![at([0, 0])], "w: no shard holds all of it: 6 of 12 elements are covered"),
        (
            &[[0, 0], [1, 0], [2, 0]],
            vec![at([0, 0]), at([1, 0]), at([2, 0])],
            "w: two shards hold the same elements, from [1, 0] on",
        ),
        (
            &[[0, 0], [2, 0], [2, 0]],
            vec![at([0, 0]), at([2, 0])],
            "w: two shards hold the same elements, from [2, 0] on",
        ),
        (
            &[[0, 0], [3, 0]],
            vec![at([0, 0]), at([3, 0])],
            "w: the box at [3, 0] of sizes [2, 3] is not inside shape [4, 3]",
        ),
        (
            &[[0, 0], [2, 0]],
            vec![at([0, 0]), at([2, 0]), at([2, 0])],
            "w: the metadata describes 2 chunks of it and says of 3 where they are",
        ),
        (&[[0, 0], [u64::MAX, 0]], vec![at([0, 0]), at([u64::MAX, 0])], "w: the box at ["),
    ] {
        let said = complaint(&folder(one(chunks), stored));
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

#[test]
fn a_shape_that_the_data_contradicts_is_named() {
    let (zero, two) = (chunk(&[0, 0], &[2, 4]), chunk(&[2, 0], &[2, 4]));
    let whole = vec![(text("w"), described(&[4, 4], vec![zero, two]))];
    let said = complaint(&folder(whole, vec![at([0, 0]), at([2, 0])]));
    let words = "w: its chunk at [0, 0] (and 1 more of its chunks): __0_0.distcp: byte 0: the metadata says \
                 shape [2, 4] and the file holds [2, 3]\n";
    assert!(said.contains(words), "{said}");
}

#[test]
fn the_cause_of_a_lost_object_is_said_once() {
    // A list of one dict by this name makes it a checkpoint of Megatron-Core's.
    let folder = folder_of_object("Metadata", "common_state/x", &P::List(vec![dict([])]));
    fs::remove_file(folder.path().join("__0_0.distcp")).unwrap();
    let said = complaint(&folder);
    let words = "common_state/x: __0_0.distcp: byte 0: no such file or directory (os error 2)\n";
    assert!(said.contains(words), "{said}");
}

#[test]
fn names_that_are_stored_or_described_only_are_named() {
    let other = stored("other", &[0, 0], "__0_0.distcp", 0, 10);
    let said = complaint(&folder(one(&[[0, 0], [2, 0]]), vec![at([0, 0]), at([2, 0]), other]));
    assert!(said.contains("other: is stored, and the metadata does not describe it"), "{said}");
    let mut more = one(&[[0, 0], [2, 0]]);
    more.push((text("odd"), P::Int(5)));
    let said = complaint(&folder(more, vec![at([0, 0]), at([2, 0])]));
    assert!(said.contains("odd: its metadata is not as torch writes it"), "{said}");
}

#[test]
fn absurd_numbers_are_refused() {
    for (shape, offset, len) in [
        (&[u64::MAX, u64::MAX][..], 0, 10),
        (&[1 << 62], 0, 10),
        (&[4, 3], u64::MAX, u64::MAX),
        (&[4, 3], 0, u64::MAX),
        (&[], 0, 0),
    ] {
        let origin = vec![0; shape.len()];
        let whole = vec![(text("w"), described(shape, vec![chunk(&origin, shape)]))];
        let place = stored("w", &origin, "__0_0.distcp", offset, len);
        complaint(&folder(whole, vec![place]));
    }
}

#[test]
fn other_pickles_are_no_metadata() {
    let folder = folder(Vec::new(), Vec::new());
    let path = folder.path().join(".metadata");
    let endless = [&b"\x80\x04"[..], &[b'('; 1 << 20], b"."].concat();
    let shared = {
        // One large dict given to very many objects as their state.
        let mut bytes = b"\x80\x04}\x94(".to_vec();
        (0..10_000).for_each(|_| bytes.extend(b"K\x01K\x02"));
        bytes.extend(b"u0");
        (0..100_000).for_each(|_| bytes.extend(b"cm\nMetadataIndex\n)\x81h\x00b0"));
        bytes.extend(b"N.");
        bytes
    };
    let itself = b"\x80\x04]\x94h\x00ah\x00a.".to_vec();
    for (bytes, words) in [
        (P::None.pickle(), "not the metadata of torch.distributed.checkpoint"),
        (dict([("a", P::None)]).pickle(), "not the metadata of torch.distributed.checkpoint"),
        (itself, "not the metadata of torch.distributed.checkpoint"),
        (shared, "not the metadata of torch.distributed.checkpoint"),
        (endless, "cannot be read; copy or save the checkpoint again"),
        (b"\x80\x04j\xff\xff\xff\x7f.".to_vec(), "memo entry"),
        (Vec::new(), "the pickle ends too early"),
        (b"\x80\x04X\xff\xff\xff\x7f".to_vec(), "the pickle ends too early"),
    ] {
        fs::write(&path, bytes).unwrap();
        let said = complaint(&folder);
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

/// A zstd frame of so many zeros, in blocks that repeat one byte (RFC 8878, section 3.1.1).
fn zeros(blocks: usize) -> Vec<u8> {
    const BLOCK: u32 = 128 << 10;
    let mut frame = b"\x28\xb5\x2f\xfd\x00\x38".to_vec();
    for number in 1..=blocks {
        let header = u32::from(number == blocks) | 1 << 1 | BLOCK << 3;
        frame.extend(&header.to_le_bytes()[..3]);
        frame.push(0);
    }
    frame
}

/// A folder of tensors that are compressed slices of zeros.
fn folder_of_zeros(tensors: usize, blocks: usize) -> tempfile::TempDir {
    let slice = zeros(blocks);
    let numel = blocks as u64 * (128 << 10) / 4;
    let names: Vec<String> = (0..tensors).map(|number| format!("weight{number}")).collect();
    let described_ = |name: &String| (text(name), described(&[numel], vec![chunk(&[0], &[numel])]));
    let stored_ = |(number, name): (usize, &String)| {
        let index = dict([("fqn", text(name)), ("index", P::None), ("offset", size(&[0]))]);
        let info = dict([
            ("relative_path", text("__0_0.distcp")),
            ("offset", P::Unsigned((number * slice.len()) as u64)),
            ("length", P::Unsigned(slice.len() as u64)),
            ("transform_descriptors", P::List(vec![text("stream.zstd/1")])),
        ]);
        (object("MetadataIndex", &index), object("_StorageInfo", &info))
    };
    let folder = folder(
        names.iter().map(described_).collect(),
        names.iter().enumerate().map(stored_).collect(),
    );
    fs::write(folder.path().join("__0_0.distcp"), slice.repeat(tensors)).unwrap();
    folder
}

#[test]
fn slices_are_decompressed_only_so_far() {
    for (tensors, blocks) in [(1, 15_000), (40, 400)] {
        let folder = folder_of_zeros(tensors, blocks);
        let run = crafted::run("zeros", &["check".as_ref(), folder.path()]);
        assert_eq!(run.code, 2);
        let said = "more decompressed bytes of the checkpoint than the limit";
        assert!(run.stderr.contains(said), "{}", run.stderr);
    }
    // Listing them takes none of the work, and nobody asks whether they are archives.
    let run = run(["inspect".as_ref(), folder_of_zeros(2, 15_000).path().as_os_str()]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("[491520000]"), "{}", run.stdout);
}
