//! Damaged and malicious checkpoints: whatever is in a file, the command ends soon, in bounded memory,
//! with an exit code of its own and a reason; nothing in a file reaches the terminal unescaped.

#![cfg(unix)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc;
use std::time::Duration;

use crate::common;
use ckptcmp::compare::{Outcome, TensorComparison};
use ckptcmp::containers::torch::{TorchFile, ValueId};
use ckptcmp::formats::{self, OpenOptions};
use ckptcmp::pairing::{Selection, pair};
use ckptcmp::storage::FileSet;

use crate::common::hostile_files::{
    Checkpoint, P, all_commands, compare, counts, dict, file, namespace, object, run, tensor,
    tensor_of, text, zip,
};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/layouts").join(path)
}

/// The files of a checkpoint that hold a model.
fn shards(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(shards(&path));
        } else if path.extension().is_some_and(|extension| extension == "pt") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The same numbers in every run.
fn random(number: u64) -> u64 {
    let mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 20
}

#[test]
fn tensors_inside_objects_are_tensors() {
    let one = || tensor(&[3]);
    // A module as it is, which keeps what it holds in dicts of its own.
    let linear = object(
        "Linear",
        &dict([("training", P::Bool(true)), ("_parameters", dict([("weight", one())]))]),
    );
    let module = object(
        "Net",
        &dict([("_buffers", dict([("b", one())])), ("_modules", dict([("l", linear)]))]),
    );
    let pair = P::Call("m", "Pair", vec![P::Int(1), one()]);
    let config = object("Config", &dict([("scale", one()), ("name", text("x"))]));
    let objects = dict([("net", module), ("pair", pair), ("config", config), ("w", one())]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("objects.pt");
    fs::write(&path, file(objects.pickle())).unwrap();
    let found = formats::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(found.problems, []);
    let names: Vec<&str> = found.tensors.keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["config.scale", "net.b", "net.l.weight", "pair.1", "w"]);
}

#[test]
fn objects_that_hold_themselves_or_each_other_in_chains_end() {
    // Itself: an object in the memo before its state is built.
    let own = P::Raw([&b"cm\nNode\n)\x81q\x07}X\x04\0\0\0selfh\x07sb"[..]].concat());
    let mut chain = P::None;
    for _ in 0..200 {
        chain = object("ChainedOptimizer", &dict([("next", chain)]));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("objects.pt");
    let write = |objects: P| fs::write(&path, file(objects.pickle())).unwrap();
    write(dict([("own", own), ("w", tensor(&[3]))]));
    let found = formats::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!((found.tensors.len(), found.problems.len()), (1, 0));
    write(dict([("chain", chain), ("w", tensor(&[3]))]));
    let found = formats::open(&path, &OpenOptions::default()).unwrap();
    assert_eq!(found.tensors.len(), 1);
    assert!(found.problems[0].to_string().contains("chain: holds dicts more than"));
}

/// Opens and compares in this process. What comes of it does not matter, only that something does.
fn compared(a: &Path, b: &Path) -> Option<Vec<TensorComparison>> {
    let options = OpenOptions::default();
    let a = formats::open(a, &options).ok()?;
    let b = formats::open(b, &options).ok()?;
    let pairing = pair(&a, &b, &Selection::default());
    Some(ckptcmp::compare::compare(&pairing.pairs, [&a.files, &b.files], true, &AtomicU64::new(0)))
}

/// Does a step for every number, and fails where one panics or takes too long.
fn for_all(
    count: u64,
    context: &str,
    step: impl Fn(u64) + Send + Sync + std::panic::UnwindSafe + std::panic::RefUnwindSafe + 'static,
) {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for number in 0..count {
            let result = catch_unwind(|| step(number)).is_ok();
            if sender.send(result).is_err() || !result {
                return;
            }
        }
    });
    for number in 0..count {
        let result = receiver.recv_timeout(Duration::from_secs(60));
        assert_eq!(result, Ok(true), "{context}: step {number}");
    }
}

/// Small checkpoints of every container, and one whose experts are taken apart.
const SAMPLES: [&str; 4] =
    ["gpt-small/tp2", "gpt/nonzip-tp2", "gpt/mindtorch-tp2", "moe/grouped-ep2"];

/// A copy of a sample, the shard to be damaged, and its bytes.
struct Victim {
    _folder: tempfile::TempDir,
    path: PathBuf,
    shard: PathBuf,
    bytes: Vec<u8>,
}

impl Victim {
    fn new(sample: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("copy");
        common::copy(&fixture(sample), &path);
        let shard = shards(&path).pop().unwrap();
        let bytes = fs::read(&shard).unwrap();
        Self { _folder: folder, path, shard, bytes }
    }

    fn truncate(&self, number: u64, count: u64) {
        let len = self.bytes.len() as u64 * number / count;
        fs::write(&self.shard, &self.bytes[..usize::try_from(len).unwrap()]).unwrap();
    }

    /// The bytes that are no storage: pickles, zip headers, the zip directory.
    fn structure(&self) -> Vec<u64> {
        let mut files = FileSet::default();
        let id = files.add(&self.shard).unwrap();
        let torch = TorchFile::open(&files, files.whole(id)).unwrap();
        let mut is_data = vec![false; self.bytes.len()];
        storages(&torch, torch.root(), 0, &mut is_data);
        (0..is_data.len() as u64).filter(|&at| !is_data[usize::try_from(at).unwrap()]).collect()
    }
}

fn storages(torch: &TorchFile, id: ValueId, depth: usize, is_data: &mut [bool]) {
    if let Some(tensor) = torch.tensor(id).unwrap() {
        let storage = tensor.storage();
        let [start, len] = [storage.offset, storage.len].map(|at| usize::try_from(at).unwrap());
        return is_data[start..start + len].fill(true);
    }
    for (_, member) in torch.values().mapping(id).into_iter().flatten() {
        if depth < 8 {
            storages(torch, member, depth + 1, is_data);
        }
    }
}

#[test]
fn a_file_cut_off_anywhere_is_an_ordinary_outcome() {
    for sample in SAMPLES {
        let victim = Victim::new(sample);
        for_all(200, sample, move |number| {
            victim.truncate(number, 200);
            compared(&victim.path, &fixture(sample));
        });
    }
}

#[test]
fn the_command_says_that_a_file_is_cut_off() {
    for sample in SAMPLES {
        let victim = Victim::new(sample);
        for number in 0..8 {
            victim.truncate(number, 8);
            let context = format!("{sample}, {number} eighths");
            let run = compare(&context, &victim.path, &fixture(sample));
            assert_eq!(run.code, 2, "{context}");
            assert!(run.stderr.contains("model_optim_rng.pt"), "{context}: {}", run.stderr);
        }
    }
}

#[test]
fn any_changed_byte_of_the_structure_is_an_ordinary_outcome() {
    for (turn, sample) in SAMPLES.into_iter().enumerate() {
        let victim = Victim::new(sample);
        let places = victim.structure();
        let file = File::options().write(true).open(&victim.shard).unwrap();
        for_all(2000, sample, move |number| {
            let seed = turn as u64 * 1_000_003 + number;
            let at = places[usize::try_from(random(seed) % places.len() as u64).unwrap()];
            let byte = victim.bytes[usize::try_from(at).unwrap()];
            let change = 1 + (random(seed + 500_000) % 255) as u8;
            file.write_all_at(&[byte ^ change], at).unwrap();
            compared(&victim.path, &fixture(sample));
            file.write_all_at(&[byte], at).unwrap();
        });
    }
}

#[test]
fn the_command_survives_changed_bytes_in_little_memory() {
    for (turn, sample) in SAMPLES.into_iter().enumerate() {
        let victim = Victim::new(sample);
        let places = victim.structure();
        for number in 0..40 {
            let seed = 77_000_000 + turn as u64 * 1000 + number;
            let at = usize::try_from(places[usize::try_from(random(seed)).unwrap() % places.len()]);
            let mut bytes = victim.bytes.clone();
            bytes[at.unwrap()] = random(seed + 500).to_le_bytes()[0];
            fs::write(&victim.shard, bytes).unwrap();
            compare(&format!("{sample}, change {number}"), &victim.path, &fixture(sample));
        }
    }
}

/// A model that is as it should be, but for what is added to it.
fn model_with<'a>(more: impl IntoIterator<Item = (&'a str, P)>) -> P {
    let whole = [("decoder.layers.0.input_layernorm.weight", tensor(&[8]))];
    dict(whole.into_iter().chain(more))
}

fn plain_args() -> P {
    namespace([("num_layers", P::Int(1)), ("tensor_model_parallel_size", P::Int(1))])
}

#[test]
fn what_the_helpers_write_is_a_checkpoint() {
    let good = Checkpoint::with(model_with([]), plain_args());
    let run = all_commands("a good one", &good);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert!(run.stdout.contains("compared 1 tensor, 8 elements"), "{}", run.stdout);
}

#[test]
fn lengths_that_no_pickle_holds_cost_nothing() {
    let huge: [(&str, Vec<u8>); 12] = [
        ("text", b"X\xff\xff\xff\xffabc".to_vec()),
        ("text of 64 bits", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc".to_vec()),
        ("text of 2^64 - 1", b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc".to_vec()),
        ("bytes", b"B\xff\xff\xff\xffabc".to_vec()),
        ("bytes of 64 bits", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc".to_vec()),
        ("byte array", b"\x96\xff\xff\xff\xff\xff\xff\xff\xffabc".to_vec()),
        ("old text", b"T\xff\xff\xff\x7fabc".to_vec()),
        ("negative text", b"T\xff\xff\xff\xffabc".to_vec()),
        ("long", b"\x8b\xff\xff\xff\x7fabc".to_vec()),
        ("negative long", b"\x8b\xff\xff\xff\xffabc".to_vec()),
        ("frame", b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN".to_vec()),
        ("text long", [b"L".as_slice(), &b"9".repeat(200_000), b"L\n"].concat()),
    ];
    for (name, opcodes) in huge {
        let checkpoint = Checkpoint::with(model_with([("weight", P::Raw(opcodes))]), P::None);
        all_commands(name, &checkpoint);
    }
}

#[test]
fn memo_indices_cost_nothing() {
    for (name, opcodes) in [
        ("put", b"Nr\xff\xff\xff\xff".to_vec()),
        ("get", b"j\xff\xff\xff\xff".to_vec()),
        ("text put", b"Np4294967295\n".to_vec()),
        ("text put beyond", b"Np99999999999999999999\n".to_vec()),
        ("negative put", b"Np-1\n".to_vec()),
        (
            "sparse puts",
            (0..5000_u32)
                .flat_map(|n| [&b"Nr"[..], &(n * 800_000).to_le_bytes(), b"0"].concat())
                .chain(*b"N")
                .collect(),
        ),
    ] {
        all_commands(name, &Checkpoint::with(model_with([("x", P::Raw(opcodes))]), P::None));
    }
}

#[test]
fn nesting_without_end_is_refused() {
    let deep = |depth: usize| {
        let mut opcodes = b"}(X\x01\0\0\0a".repeat(depth);
        opcodes.push(b'N');
        opcodes.extend(b"u".repeat(depth));
        P::Raw(opcodes)
    };
    let lists = P::Raw([b"]".repeat(100_000), b"a".repeat(99_999)].concat());
    let tuples = P::Raw([b"N".to_vec(), b"\x85".repeat(100_000)].concat());
    for (name, value) in [
        ("60 dicts", deep(60)),
        ("100 dicts", deep(100)),
        ("100,000 dicts", deep(100_000)),
        ("lists", lists),
        ("tuples", tuples),
    ] {
        let in_model = Checkpoint::with(model_with([("x", value.clone())]), P::None);
        let run = all_commands(name, &in_model);
        assert_eq!(run.code == 2, name.starts_with("100"), "{name}: {}", run.stderr);
        all_commands(name, &Checkpoint::with(model_with([]), namespace([("x", value.clone())])));
        all_commands(name, &Checkpoint::with(model_with([]), value.clone()));
        all_commands(name, &Checkpoint::of(&value));
    }
}

/// Every level refers so many times to the next one.
fn shared(levels: u32, times: u32, last: P, level: impl Fn(Vec<P>) -> P) -> P {
    let mut value = P::Put(0, Box::new(last));
    let mut whole = value.clone();
    for number in 1..=levels {
        let first = whole;
        let further = (1..times).map(|_| P::Get(number - 1));
        value = level(std::iter::once(first).chain(further).collect());
        whole = P::Put(number, Box::new(value));
    }
    whole
}

fn dict_of(members: Vec<P>) -> P {
    let members = members.into_iter().enumerate();
    P::Dict(members.map(|(number, member)| (text(&format!("k{number}")), member)).collect())
}

#[test]
fn values_that_are_shared_without_end_are_walked_only_so_far() {
    let long = "n".repeat(1 << 20);
    let long_named = |members: Vec<P>| {
        let members = members.into_iter().enumerate();
        P::Dict(members.map(|(at, member)| (text(&format!("{at}{long}")), member)).collect())
    };
    for (name, value) in [
        ("pairs of dicts", shared(60, 2, tensor(&[2]), dict_of)),
        ("pairs of dicts too deep", shared(70, 2, tensor(&[2]), dict_of)),
        ("pairs of dicts of nothing", shared(60, 2, P::None, dict_of)),
        (
            "pairs of dicts of what cannot be read",
            shared(60, 2, P::Call("a", "B", vec![]), dict_of),
        ),
        ("thousands", shared(4, 3000, tensor(&[2]), dict_of)),
        ("long names", shared(40, 2, tensor(&[2]), long_named)),
    ] {
        let in_model = Checkpoint::with(value.clone(), plain_args());
        assert_eq!(all_commands(name, &in_model).code, 2, "{name}");
        // A file that is not Megatron's is walked on another path.
        let alone = Checkpoint::of(&dict([("weights", value)]));
        assert_eq!(all_commands(name, &alone).code, 2, "{name}");
    }
    for (name, value) in [
        ("lists", shared(3, 4000, P::Int(1), P::List)),
        ("long text", shared(1, 4000, text(&long), P::List)),
    ] {
        let args = namespace((0..20).map(|_| ("noop_layers", value.clone())));
        all_commands(name, &Checkpoint::with(model_with([]), args));
        let keys: Vec<String> = (0..1000).map(|key| format!("fact{key}")).collect();
        let first = std::iter::once(("first", value.clone()));
        let args = namespace(first.chain(keys.iter().map(|key| (key.as_str(), P::Get(0)))));
        all_commands(name, &Checkpoint::with(model_with([]), args));
    }
}

#[test]
fn a_model_that_holds_itself_is_refused() {
    // The dict is in the memo before its members are.
    let once = b"}r\x07\0\0\0(X\x01\0\0\0aj\x07\0\0\0u".to_vec();
    let twice = b"}r\x07\0\0\0(X\x01\0\0\0aj\x07\0\0\0X\x01\0\0\0bj\x07\0\0\0u".to_vec();
    let list = b"]r\x07\0\0\0(j\x07\0\0\0j\x07\0\0\0e".to_vec();
    for (name, opcodes) in [("once", once), ("twice", twice), ("list", list)] {
        let value = P::Raw(opcodes);
        all_commands(name, &Checkpoint::with(value.clone(), value.clone()));
        all_commands(name, &Checkpoint::with(model_with([("x", value.clone())]), P::None));
        all_commands(name, &Checkpoint::of(&value));
    }
}

#[test]
fn absurd_shapes_and_strides_are_refused_or_harmless() {
    const TOP: u64 = 1 << 63;
    let tensors: [(&str, P); 15] = [
        ("2^60 x 0", tensor_of("0", 64, 0, &[1 << 60, 0], &[1, 1])),
        ("2^40 x 2^40 x 0", tensor_of("0", 64, 0, &[1 << 40, 1 << 40, 0], &[1, 1, 1])),
        ("2^48 x 0", tensor_of("0", 64, 0, &[1 << 48, 0], &[0, 0])),
        ("0 x 2^48 x 2^48 x 2^48", tensor_of("0", 64, 0, &[0, 1 << 48, 1 << 48, 1 << 48], &[0; 4])),
        ("2^63 - 1", tensor_of("0", 64, 0, &[TOP - 1], &[0])),
        ("2^64 - 1", tensor_of("0", 64, 0, &[u64::MAX], &[0])),
        ("expanded", tensor_of("0", 64, 0, &[1 << 40], &[0])),
        ("expanded twice", tensor_of("0", 64, 0, &[1 << 31, 1 << 31], &[0, 0])),
        ("stride of one row", tensor_of("0", 64, 0, &[1, 8], &[u64::MAX, 1])),
        ("stride of one", tensor_of("0", 64, 63, &[1, 1, 1], &[TOP, u64::MAX, TOP - 1])),
        ("stride", tensor_of("0", 64, 0, &[2, 8], &[TOP, 1])),
        ("offset", tensor_of("0", 64, TOP - 1, &[8], &[1])),
        ("offset of nothing", tensor_of("0", 64, TOP - 1, &[0], &[1])),
        ("count", tensor_of("0", TOP, 0, &[8], &[1])),
        ("no strides", tensor_of("0", 64, 0, &[1 << 40, 1 << 40], &[])),
    ];
    for (name, value) in tensors {
        for parameter in [
            "decoder.layers.0.pre_mlp_layernorm.weight",
            "embedding.word_embeddings.weight",
            "decoder.layers.0.mlp.experts.weight1",
            "decoder.layers.0.mlp.experts.linear_fc1.weight",
            "decoder.layers.0.self_attention.linear_qkv_down_proj.weight",
        ] {
            let context = format!("{name} as {parameter}");
            let model = model_with([(parameter, value.clone())]);
            all_commands(&context, &Checkpoint::with(model, plain_args()));
        }
        // Several of them: no sum may overflow either.
        let names: Vec<String> = (0..9).map(|number| format!("norm.{number}.weight")).collect();
        let all = names.iter().map(|name| (name.as_str(), value.clone()));
        let many = Checkpoint::with(model_with(all), plain_args());
        all_commands(&format!("nine of {name}"), &many);
        let good = Checkpoint::with(
            model_with(names.iter().map(|name| (name.as_str(), tensor(&[8])))),
            plain_args(),
        );
        compare(&format!("{name} against a good one"), &many.path(), &good.path());
    }
    let long = P::Tuple((0..300_000).map(|_| P::Int(1)).collect());
    let rank = P::Put(5, Box::new(long));
    let names: Vec<String> = (0..2000).map(|number| format!("norm.{number}.weight")).collect();
    let of = |size: P| {
        let mut with_size = tensor(&[8]);
        if let P::Call(_, _, args) = &mut with_size {
            args[2] = size;
            args[3] = P::Get(5);
        }
        with_size
    };
    let all = names.iter().enumerate().map(|(number, name)| {
        (name.as_str(), of(if number == 0 { rank.clone() } else { P::Get(5) }))
    });
    all_commands("300,000 dimensions", &Checkpoint::with(model_with(all), plain_args()));
}

#[test]
fn experts_without_end_are_refused() {
    let args = |experts: P| namespace([("num_experts", experts), ("swiglu", P::Bool(true))]);
    let router = "decoder.layers.0.mlp.router.weight";
    let (first, second) =
        ("decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.mlp.experts.weight2");
    let alone = |context: &str, checkpoint: &Checkpoint| {
        compare(context, &checkpoint.path(), &checkpoint.path());
    };
    for experts in [0, 1, 7, 65_536, 65_537, 1 << 40, 1 << 48, 1 << 60] {
        for width in [0, 1, 1 << 40] {
            let rows = tensor_of("0", 64, 0, &[experts, 0], &[1, 1]);
            let weight1 = tensor_of("0", 64, 0, &[0, width], &[1, 1]);
            let weight2 = tensor_of("0", 64, 0, &[width, 0], &[1, 1]);
            let model = model_with([(router, rows), (first, weight1), (second, weight2)]);
            let context = format!("{experts} rows, width {width}");
            alone(&context, &Checkpoint::with(model, args(P::None)));
        }
        let packed = tensor_of("0", 64, 0, &[experts, 0, 0], &[1, 1, 1]);
        let name = "decoder.layers.0.mlp.experts.linear_fc1.weight";
        alone("packed", &Checkpoint::with(model_with([(name, packed)]), args(P::None)));
    }
    // As many as one layer may have, in layer after layer.
    let names: Vec<String> = (0..400)
        .map(|layer| format!("decoder.layers.{layer}.mlp.experts.linear_fc1.weight"))
        .collect();
    let packed = || tensor_of("0", 64, 0, &[1 << 16, 0, 0], &[1, 1, 1]);
    let all = names.iter().map(|name| (name.as_str(), packed()));
    alone("layers of experts", &Checkpoint::with(model_with(all), args(P::None)));
}

#[test]
fn tensors_that_fall_to_pieces_are_refused() {
    // Rows in the order of old versions, head by head: so many heads, so many pieces.
    let names: Vec<String> = (0..200)
        .map(|layer| {
            format!("language_model.encoder.layers.{layer}.self_attention.query_key_value.weight")
        })
        .collect();
    let heads = 120_000;
    let value = || tensor_of("0", 3 * heads, 0, &[3 * heads, 1], &[1, 1]);
    let large = |object: &P| {
        let storage = vec![0; usize::try_from(3 * heads * 4).unwrap()];
        let entries = [("a/data.pkl", object.pickle()), ("a/data/0", storage)];
        Checkpoint::of_bytes(&zip(&entries.map(|(name, bytes)| (name.to_owned(), bytes))))
    };
    let args = namespace([("num_attention_heads", P::Unsigned(heads))]);
    let version = ("checkpoint_version", P::Int(0));
    let all = dict(names.iter().map(|name| (name.as_str(), value())));
    let heads = large(&dict([("args", args), version, ("model", all)]));
    let run = compare("heads", &heads.path(), &heads.path());
    assert!(run.code == 2 && run.stderr.contains("more parts"), "{}", run.stderr);

    let names: Vec<String> = (0..200)
        .map(|expert| {
            format!("decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight")
        })
        .collect();
    let value = || tensor_of("0", 240_000, 0, &[240_000, 1], &[1, 1]);
    let args = namespace([("moe_mlp_glu_interleave_size", P::Int(2)), ("swiglu", P::Bool(true))]);
    let all = dict(names.iter().map(|name| (name.as_str(), value())));
    let interleaved = large(&dict([("args", args), ("model", all)]));
    let run = compare("interleaved", &interleaved.path(), &interleaved.path());
    assert!(run.code == 2 && run.stderr.contains("more parts"), "{}", run.stderr);
}

/// Every kind of layer that some fact is asked about.
fn curious_model() -> P {
    let layer = "decoder.layers.0.";
    let names = [
        ("self_attention.linear_qkv.weight", &[12, 4][..]),
        ("self_attention.linear_qkv_down_proj.weight", &[12, 4]),
        ("self_attention.linear_kv_down_proj.weight", &[12, 4]),
        ("self_attention.linear_qk_nope.weight", &[8, 4]),
        ("self_attention.linear_qk_rope.weight", &[4, 4]),
        ("mlp.experts.weight1", &[4, 16]),
        ("mlp.experts.weight2", &[16, 4]),
        ("mlp.experts.local_experts.0.linear_fc1.weight", &[8, 4]),
        ("mlp.linear_fc1.weight", &[16, 4]),
        ("mixer.in_proj.weight", &[16, 4]),
    ];
    let names: Vec<(String, P)> =
        names.iter().map(|(name, shape)| (format!("{layer}{name}"), tensor(shape))).collect();
    let legacy =
        ("language_model.encoder.layers.0.self_attention.query_key_value.weight", tensor(&[12, 4]));
    model_with(names.iter().map(|(name, value)| (name.as_str(), value.clone())).chain([legacy]))
}

#[test]
fn absurd_arguments_are_refused_or_ignored() {
    const TOP: i64 = i64::MAX;
    let numbers = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers",
        "decoder_num_layers",
        "num_experts",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_pos_emb_head_dim",
        "moe_mlp_glu_interleave_size",
        "mtp_num_layers",
        "padded_vocab_size",
    ];
    for name in numbers {
        for value in [0, -1, 1 << 19, 1 << 20, 1 << 30, 1 << 48, 1 << 62, TOP, i64::MIN] {
            for version in [0, 1, 3] {
                let others = numbers.iter().map(|other| (*other, P::Int(2)));
                let args = namespace(others.chain([(name, P::Int(value))]));
                let object = dict([
                    ("args", args),
                    ("checkpoint_version", P::Int(version)),
                    ("model", curious_model()),
                ]);
                let checkpoint = Checkpoint::of(&object);
                let context = format!("{name}={value}, version {version}");
                compare(&context, &checkpoint.path(), &checkpoint.path());
                let file = checkpoint.path().join("mp_rank_00/model_optim_rng.pt");
                compare(&format!("{context}, file"), &file, &file);
            }
        }
    }
    let lists = ["noop_layers", "pipeline_num_transformer_layers", "num_layer_list"];
    for name in lists {
        for list in [
            counts(&[1 << 63, 1 << 63]),
            counts(&[u64::MAX, 1, u64::MAX]),
            P::List(vec![P::Int(TOP), P::Int(TOP), P::Int(TOP)]),
            P::Int(-1),
            text("18446744073709551615,18446744073709551615"),
            text("9223372036854775807,9223372036854775807"),
        ] {
            for schedule in ["1f1b", "dualpipev"] {
                let args = namespace([
                    (name, list.clone()),
                    ("schedules_method", text(schedule)),
                    ("num_layers", P::Int(4)),
                    ("pipeline_model_parallel_size", P::Int(2)),
                ]);
                let object = file(dict([("args", args), ("model", model_with([]))]).pickle());
                let checkpoint = Checkpoint::of_bytes(&object);
                fs::remove_dir_all(checkpoint.path()).unwrap();
                checkpoint.add("mp_rank_00_000", &object);
                checkpoint.add("mp_rank_00_001", &object);
                compare(name, &checkpoint.path(), &checkpoint.path());
            }
        }
    }
    let all_large = namespace(numbers.map(|name| (name, P::Int((1 << 20) - 1))));
    all_commands("all large", &Checkpoint::with(curious_model(), all_large));
    let stages = namespace([
        ("tensor_model_parallel_size", P::Int(1 << 10)),
        ("pipeline_model_parallel_size", P::Int(1 << 19)),
    ]);
    all_commands("stages", &Checkpoint::with(curious_model(), stages));
}

#[test]
fn absurd_indices_in_names_are_refused() {
    let layer = |index: &str| format!("decoder.layers.{index}.input_layernorm.bias");
    let expert = |index: &str| {
        format!("decoder.layers.0.mlp.experts.local_experts.{index}.linear_fc1.weight")
    };
    let indices = [
        "9999999",
        "4294967296",
        "9223372036854775807",
        "18446744073709551614",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999999999999999",
    ];
    for index in indices {
        for name in [layer(index), expert(index)] {
            let model = model_with([(name.as_str(), tensor(&[8, 2]))]);
            let object = file(dict([("model", model), ("iteration", P::Int(1))]).pickle());
            let checkpoint = Checkpoint::of_bytes(&object);
            let run = all_commands(&name, &checkpoint);
            assert_eq!(run.code, 2, "{name}: {}{}", run.stdout, run.stderr);
            assert!(run.stderr.contains(index), "{name}: {}", run.stderr);
            // The same on two stages and on two expert ranks.
            for (ranks, args) in [
                (["mp_rank_00_000", "mp_rank_00_001"], "pipeline_model_parallel_size"),
                (["mp_rank_00_000", "mp_rank_00_001"], "expert_model_parallel_size"),
            ] {
                let model = model_with([(name.as_str(), tensor(&[8, 2]))]);
                let args = namespace([(args, P::Int(2)), ("num_experts", P::Int(2))]);
                let object = file(dict([("model", model), ("args", args)]).pickle());
                fs::remove_dir_all(checkpoint.path()).unwrap();
                ranks.iter().for_each(|rank| checkpoint.add(rank, &object));
                let run = compare(&name, &checkpoint.path(), &checkpoint.path());
                assert_eq!(run.code, 2, "{name}: {}{}", run.stdout, run.stderr);
            }
        }
    }
}

#[test]
fn model_chunks_without_end_are_refused() {
    let stacks: Vec<String> =
        (0..20_000).map(|stack| format!("stack{stack}.layers.0.norm.weight")).collect();
    let model = dict(stacks.iter().map(|name| (name.as_str(), tensor(&[8]))));
    let far =
        dict([("model0", model.clone()), ("model9999", model.clone()), ("args", plain_args())]);
    all_commands("a far chunk", &Checkpoint::of(&far));
    let chunks: Vec<String> = (0..5000).map(|chunk| format!("model{chunk}")).collect();
    let shared = P::Put(9, Box::new(model));
    let all = chunks.iter().enumerate().map(|(number, name)| {
        (name.as_str(), if number == 0 { shared.clone() } else { P::Get(9) })
    });
    all_commands("many chunks", &Checkpoint::of(&dict(all.chain([("args", plain_args())]))));
}

#[test]
fn many_entries_are_read() {
    let names: Vec<String> = (0..200_000)
        .map(|layer| format!("decoder.layers.{layer}.input_layernorm.weight"))
        .collect();
    let model = dict(names.iter().map(|name| (name.as_str(), tensor(&[8]))));
    let checkpoint = Checkpoint::with(model, P::None);
    let run = compare("200,000 entries", &checkpoint.path(), &checkpoint.path());
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("compared 200,000 tensors"), "{}", run.stdout);

    let object = dict([("model", model_with([])), ("args", plain_args())]).pickle();
    let mut entries =
        vec![("a/data.pkl".to_owned(), object), ("a/data/0".to_owned(), vec![0; 256])];
    entries.extend((1..100_000).map(|number| (format!("a/data/{number}"), vec![0; 4])));
    let run = all_commands("100,000 zip entries", &Checkpoint::of_bytes(&zip(&entries)));
    assert_eq!(run.code, 0, "{}", run.stderr);
}

#[test]
fn names_cannot_write_to_the_terminal() {
    for evil in [
        "\x1b[2J\x1b]0;owned\x07",
        "red\x1b[31m.weight",
        "line\nckptcmp: a: all is well",
        "\r\x08\x7fback",
        "c1\u{9b}31m\u{85}",
        "bidi\u{202e}thgir",
        "nul\0",
    ] {
        let name = format!("decoder.{evil}.weight");
        let one = Checkpoint::with(model_with([(name.as_str(), tensor(&[8]))]), plain_args());
        let other = tensor_of("0", 64, 8, &[8], &[1]);
        let other = Checkpoint::with(model_with([(name.as_str(), other)]), plain_args());
        let long = Checkpoint::with(model_with([(name.as_str(), tensor(&[9]))]), plain_args());
        let without = Checkpoint::with(model_with([]), plain_args());
        all_commands(evil, &one);
        let run = compare(evil, &one.path(), &other.path());
        assert!(run.stdout.contains("decoder."), "{}", run.stdout);
        compare(evil, &one.path(), &long.path());
        compare(evil, &one.path(), &without.path());
        // In what is said of what cannot be read: names, classes, storage keys, facts.
        for value in [
            P::Raw(format!("c{}\n{}\n)R", "torch._utils", evil.replace('\n', "")).into_bytes()),
            P::Raw(format!("c{}\nTensor\n)R", evil.replace('\n', "")).into_bytes()),
            tensor_of(evil, 64, 0, &[8], &[1]),
        ] {
            all_commands(
                evil,
                &Checkpoint::with(model_with([(name.as_str(), value)]), plain_args()),
            );
        }
        let args = namespace([(evil, text(evil)), ("schedules_method", text(evil))]);
        all_commands(evil, &Checkpoint::with(model_with([]), args));
        let keys = zip(&[(format!("{evil}/data.pkl"), b"garbage".to_vec())]);
        all_commands(evil, &Checkpoint::of_bytes(&keys));
        let two = ["x", evil].map(|folder| (format!("{folder}/data.pkl"), b"N.".to_vec()));
        all_commands(evil, &Checkpoint::of_bytes(&zip(&two)));
    }
}

#[test]
fn bad_stream_keys_cannot_write_to_the_terminal() {
    const HEADER: &[u8] = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";
    let evil = "\x1b[2J\nckptcmp: b: fine";
    let object = dict([("model", dict([("w", tensor_of(evil, 64, 0, &[8], &[1]))]))]).pickle();
    for keys in [P::List(vec![text(evil)]), P::List(vec![text("x\x1b[0m")])] {
        let bytes = [HEADER, &object, &keys.pickle(), &[1, 2, 3]].concat();
        assert_eq!(all_commands("stream", &Checkpoint::of_bytes(&bytes)).code, 2);
    }
}

#[test]
fn very_long_names_are_no_trouble_to_print() {
    for len in [1000, 70_000, 10 << 20] {
        let name = format!("decoder.{}.weight", "x".repeat(len));
        let one = Checkpoint::with(model_with([(name.as_str(), tensor(&[8]))]), plain_args());
        let other = tensor_of("0", 64, 8, &[8], &[1]);
        let other = Checkpoint::with(model_with([(name.as_str(), other)]), plain_args());
        let without = Checkpoint::with(model_with([]), plain_args());
        all_commands("a long name", &one);
        compare("a long name that differs", &one.path(), &other.path());
        compare("a long name on one side", &one.path(), &without.path());
    }
    // One long name must not make every line of a table long.
    let mut names: Vec<String> =
        (0..50_000).map(|layer| format!("decoder.layers.{layer}.input_layernorm.weight")).collect();
    names.push(format!("decoder.{}.weight", "x".repeat(3000)));
    let model = dict(names.iter().map(|name| (name.as_str(), tensor(&[8]))));
    run("a table", &[Path::new("inspect"), &Checkpoint::with(model, P::None).path()]);
    let class = format!("c{}\nTensor\n)R", "m".repeat(1 << 20)).into_bytes();
    let shared = P::Put(3, Box::new(P::Raw(class)));
    let all = names.iter().enumerate().map(|(number, name)| {
        (name.as_str(), if number == 0 { shared.clone() } else { P::Get(3) })
    });
    all_commands("a long class", &Checkpoint::with(dict(all), P::None));
}

/// A checkpoint of two tensor parallel ranks that does not say so.
fn two_ranks() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("copy");
    common::copy(&fixture("gpt/noargs-tp2pp2"), &root);
    (folder, root)
}

#[test]
fn something_else_in_the_place_of_a_shard_is_not_passed_over() {
    type Replace = fn(&Path);
    let replacements: [(&str, Replace); 4] = [
        ("a FIFO", |path| {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("a folder", |path| fs::create_dir(path).unwrap()),
        ("a dangling link", |path| std::os::unix::fs::symlink("nowhere", path).unwrap()),
        ("a link to itself", |path| std::os::unix::fs::symlink(path, path).unwrap()),
    ];
    for (name, replace) in replacements {
        let (_folder, root) = two_ranks();
        // Without the last ranks, nothing else would tell that there were two stages.
        for rank in ["mp_rank_00_001", "mp_rank_01_001"] {
            let shard = root.join("iter_0000005").join(rank).join("model_optim_rng.pt");
            fs::remove_file(&shard).unwrap();
            replace(&shard);
        }
        let run = compare(name, &root, &root);
        assert_eq!(run.code, 2, "{name}: {}", run.stdout);
        assert!(run.stderr.contains("_001/model_optim_rng.pt"), "{name}: {}", run.stderr);
        let rank = root.join("iter_0000005/mp_rank_00_001");
        assert_eq!(compare(name, &rank, &rank).code, 2, "{name}");
        let shard = rank.join("model_optim_rng.pt");
        assert_eq!(compare(name, &shard, &shard).code, 2, "{name}");
    }
}

#[test]
fn a_tracker_that_is_no_file_is_not_waited_for() {
    let good = Checkpoint::with(model_with([]), plain_args());
    let root = good.scratch().to_path_buf();
    let tracker = root.join("latest_checkpointed_iteration.txt");
    assert!(Command::new("mkfifo").arg(&tracker).status().unwrap().success());
    compare("a FIFO", &root, &root);
    fs::remove_file(&tracker).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &tracker).unwrap();
    compare("a device", &root, &root);
    fs::remove_file(&tracker).unwrap();
    fs::create_dir(&tracker).unwrap();
    compare("a folder", &root, &root);
    fs::remove_dir(&tracker).unwrap();
    fs::write(&tracker, "\x1b[2J").unwrap();
    assert_eq!(compare("escapes", &root, &root).code, 2);
    let device = Path::new("/dev/zero");
    assert_eq!(compare("a device alone", device, device).code, 2);
}

#[test]
fn a_rank_that_may_not_be_read_is_not_passed_over() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, root) = two_ranks();
    let ranks =
        ["mp_rank_00_001", "mp_rank_01_001"].map(|rank| root.join("iter_0000005").join(rank));
    let set_mode = |mode| {
        for rank in &ranks {
            fs::set_permissions(rank, fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    set_mode(0);
    let may_read_anything = fs::read_dir(&ranks[0]).is_ok();
    if !may_read_anything {
        let run = compare("no rights", &root, &root);
        assert_eq!(run.code, 2, "{}", run.stdout);
        assert!(run.stderr.contains("_001"), "{}", run.stderr);
    }
    set_mode(0o755);
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_unreadable() {
    let victim = Victim::new("gpt-small/tp2");
    let options = OpenOptions::default();
    let a = formats::open(&fixture("gpt-small/tp1"), &options).unwrap();
    let b = formats::open(&victim.path, &options).unwrap();
    let pairing = pair(&a, &b, &Selection::default());
    File::options().write(true).open(&victim.shard).unwrap().set_len(100).unwrap();
    let found =
        ckptcmp::compare::compare(&pairing.pairs, [&a.files, &b.files], true, &AtomicU64::new(0));
    assert_eq!(found.len(), pairing.pairs.len());
    for tensor in &found {
        let Outcome::Unreadable(error) = &tensor.outcome else { panic!("{tensor:?}") };
        assert_eq!((error.side, &error.file), (1, &victim.shard));
    }
    assert_eq!(b.files.changed(), Some(victim.shard.as_path()));
}
