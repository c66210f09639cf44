//! A function for each reader of untrusted files: any bytes in; no panic, no hang, no memory without bounds; and what
//! [`hold`] says of whatever opens.
//!
//! Readers of one file get the bytes as that file. Those of a folder get them cut at [`CUT`] into files of given names. A
//! part that is to be a torch file may be its pickle alone: [`archive`] adds the rest.
//!
//! From the root of the repository, with a nightly compiler and cargo-fuzz:
//!
//! ```sh
//! python3 fuzz/seeds.py
//! cargo +nightly fuzz run dcp -- -dict=fuzz/words.dict -max_len=40960 -timeout=5 -rss_limit_mb=512
//! ```
//!
//! What is found goes into `tests/promises/hostile`, small and by hand.

mod archive;
mod folder;

use std::path::Path;

use ckptcmp::catalog::{Catalog, Section};
use ckptcmp::containers::safetensors::Safetensors;
use ckptcmp::containers::torch::pickle::{self, decode};
use ckptcmp::containers::torch::{TorchFile, ValueId, Values};
use ckptcmp::layout::parse_run_arg;
use ckptcmp::layout::rules::{Rules, UserRule};
use ckptcmp::names::megatron::Dialect;
use ckptcmp::report::catalog::{write_json, write_screen};
use ckptcmp::storage::FileSet;
use ckptcmp::{CheckOptions, CompareOptions, OpenOptions, Soundness, Style, Verdict};

pub use folder::CUT;
use folder::{File, Folder};

/// A zip archive of torch, byte by byte.
pub fn torch_zip(bytes: &[u8]) {
    torch_file(&[b"PK\x03\x04", bytes.get(4..).unwrap_or_default()].concat());
}

/// A stream of torch's before 1.6.
pub fn torch_stream(bytes: &[u8]) {
    torch_file(bytes);
}

/// A pickle in an archive with some storages: calls that make tensors.
pub fn rebuild(pickle: &[u8]) {
    torch_file(&archive::around(pickle));
}

fn torch_file(bytes: &[u8]) {
    let file = File::of("model.pt", bytes);
    let (files, region) = file.region();
    if let Ok(torch) = TorchFile::open(&files, region) {
        for id in torch.values().ids() {
            let _ = torch.tensor(id);
        }
        look(torch.values());
    }
    hold(file.path());
}

/// A pickle: the one that is read at once, and its opcodes one by one.
pub fn pickle(bytes: &[u8]) {
    let whole = pickle::read(bytes);
    let mut at = 0;
    let ends = loop {
        match decode(&bytes[at..]) {
            Ok((pickle::Op::Stop, len)) => break Some(at + len),
            Ok((_, len)) => at += len,
            Err(_) => break None,
        }
    };
    if let Ok(pickle) = whole {
        assert_eq!(Some(pickle.consumed), ends, "read to another end than its opcodes have");
        look(&pickle.values);
    }
}

/// Asks every value for all that it may be.
fn look(values: &Values) {
    let some = |ids: &mut dyn Iterator<Item = ValueId>| ids.take(64).count();
    for id in values.ids() {
        let _ = (values.as_i64(id), values.as_u64(id), values.as_f64(id), values.as_bool(id));
        let _ = (values.as_str(id), values.as_bytes(id), values.elements(id));
        let _ = (values.global(id), values.class_name(id), values.state(id));
        let _ = values.sequence(id).map(|mut ids| some(&mut ids));
        let _ = values.mapping(id).map(|pairs| some(&mut pairs.map(|(key, _)| key)));
        let _ = values.attributes(id).map(|pairs| some(&mut pairs.map(|(key, _)| key)));
    }
}

/// A safetensors file: what opens is tiled by its tensors.
pub fn safetensors(bytes: &[u8]) {
    let file = File::of("model.safetensors", bytes);
    let (files, region) = file.region();
    if let Ok(found) = Safetensors::open(&files, region) {
        let stored = found.tensors.values().flatten();
        let data: u64 = stored.map(|stored| stored.storage().len).sum();
        assert!(data < region.len, "more bytes in tensors than in the file");
    }
    hold(file.path());
}

/// A folder of Hugging Face: index, configuration, one file of each kind.
pub fn hugging_face(bytes: &[u8]) {
    let names = [
        "model.safetensors.index.json",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00001.bin",
        "adapter_config.json",
        "adapter_model.safetensors",
    ];
    hold(Folder::of(&names, bytes).path());
}

/// A folder of `torch.distributed.checkpoint`.
pub fn dcp(bytes: &[u8]) {
    let names = [".metadata", "__0_0.distcp", "__1_0.distcp", "__0.metadata", "__1.metadata"];
    hold(Folder::of(&names, bytes).path());
}

/// A folder of Megatron-Core's `torch_dist`.
pub fn torch_dist(bytes: &[u8]) {
    let names = ["metadata.json", "common.pt", ".metadata", "__0_0.distcp", "__0_1.distcp"];
    hold(Folder::of(&names, bytes).path());
}

/// A folder of Megatron-Core's `zarr`.
pub fn zarr(bytes: &[u8]) {
    let names = [
        "metadata.json",
        "common.pt",
        "decoder.layers.mlp.linear_fc1.weight/.zarray",
        "decoder.layers.mlp.linear_fc1.weight/0.0.0",
        "decoder.layers.mlp.linear_fc1.weight/1.0.0",
        "decoder.final_layernorm.weight/.zarray",
        "decoder.final_layernorm.weight/0",
        "optimizer.state.exp_avg.decoder.final_layernorm.weight/.zarray",
        "optimizer.state.exp_avg.decoder.final_layernorm.weight/0",
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_1.pt",
    ];
    hold(Folder::of(&names, bytes).path());
}

/// Rank files of Megatron-LM.
pub fn megatron(bytes: &[u8]) {
    let names = [
        "latest_checkpointed_iteration.txt",
        "iter_0000005/mp_rank_00/model_optim_rng.pt",
        "iter_0000005/mp_rank_01/model_optim_rng.pt",
        "iter_0000005/mp_rank_00/distrib_optim.pt",
        "iter_0000005/mp_rank_01/distrib_optim.pt",
    ];
    hold(Folder::of(&names, bytes).path());
}

/// A folder of DeepSpeed: ZeRO, layers, experts, universal.
pub fn deepspeed(bytes: &[u8]) {
    let names = [
        "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        "layer_00-model_00-model_states.pt",
        "layer_02-model_00-model_states.pt",
        "layer_0_expert_0_mp_rank_00_model_states.pt",
        "zero/1.weight/fp32.pt",
        "zero/1.weight/exp_avg.pt",
    ];
    hold(Folder::of(&names, bytes).path());
}

/// Rank files of FSDP, models and optimizers of two ranks.
pub fn fsdp_ranks(bytes: &[u8]) {
    let names = [
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
        "optim_world_size_2_rank_0.pt",
        "optim_world_size_2_rank_1.pt",
        "huggingface/config.json",
    ];
    hold(Folder::of(&names, bytes).path());
}

/// A step's folder of InfiniTrain.
pub fn infinitrain(bytes: &[u8]) {
    let names = [
        "trainer_state.json",
        "model.ckpt",
        "optimizer.ckpt",
        "rank_000000/model.ckpt",
        "rank_000000/trainer_state.json",
        "rank_000001/model.ckpt",
        "rank_000001/trainer_state.json",
    ];
    hold(Folder::of(&names, bytes).path());
}

/// A model file of llm.c.
pub fn llmc(bytes: &[u8]) {
    hold(File::of("gpt2_124M.bin", bytes).path());
}

/// Trackers, and folders whose names are lines of the last part.
pub fn trackers(bytes: &[u8]) {
    let names = [
        "latest_checkpointed_iteration.txt",
        "latest",
        "latest_universal",
        "latest_wandb_artifact_path.txt",
        "args.json",
        "iter_0000005/mp_rank_00/model_optim_rng.pt",
        "global_step1/mp_rank_00_model_states.pt",
    ];
    hold(Folder::with_folders(&names, bytes).path());
}

/// Sharding rules, arguments and names, a line each.
pub fn rules(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().take(64).collect();
    let user: Vec<UserRule> = lines.iter().filter_map(|line| line.parse().ok()).collect();
    let rules = Rules::new(&user);
    let dialect = Dialect::detect(lines.iter().copied());
    for line in &lines {
        let _ = parse_run_arg(line);
        let canonical = dialect.canonical(line);
        let _ = rules.find(&format!("{canonical:?}"));
        if user.iter().any(|rule| rule.matches(line)) {
            assert!(rules.find(line).is_some(), "a rule of the user's is for {line:?}");
        }
    }
}

/// Elements up to which the values are read, too: so many take no time.
const FEW: u64 = 1 << 20;

/// Holds a reader to its promises: a path opens twice to the same, or fails twice for the same reason; what opens can be
/// listed, checked and compared with itself; and what is sound is identical with itself.
fn hold(path: &Path) {
    let options = OpenOptions { sections: Section::ALL.to_vec(), ..OpenOptions::default() };
    let open = || ckptcmp::open(path, &options);
    let (a, b) = match (open(), open()) {
        (Ok(a), Ok(b)) => (a, b),
        (Err(a), Err(b)) => return assert_eq!(format!("{a:?}"), format!("{b:?}")),
        (a, b) => panic!("opens only once: {a:?} {b:?}"),
    };
    assert_eq!(shown(&a), shown(&b), "opened twice, seen twice");
    let elements = |catalog: &Catalog| {
        let copies = |tensor: &ckptcmp::tensor::LogicalTensor| tensor.replicas().len() as u64 + 1;
        let tensors = catalog.tensors.values().map(|entry| &entry.tensor);
        tensors.fold(0, |sum: u64, tensor| {
            sum.saturating_add(tensor.numel().saturating_mul(copies(tensor)))
        })
    };
    if elements(&a) > FEW {
        return;
    }
    let Ok(c) = open() else { panic!("opens only twice") };
    let check = ckptcmp::check(c, &CheckOptions::default()).expect("nobody changes the files");
    let mut out = Vec::new();
    check.write_json(&mut out).expect("room");
    check.write_screen(Style::PLAIN, &mut out).expect("room");
    let has_state = !a.kept.is_empty();
    let report = ckptcmp::compare(a, b, &CompareOptions::default());
    let report = report.expect("nobody changes the files");
    report.write_json(&mut out).expect("room");
    report.write_document(false, &mut out).expect("room");
    report.write_screen(Style::PLAIN, &mut out).expect("room");
    // State that was asked for and is not there is trouble.
    let same = if has_state { Verdict::Identical } else { Verdict::Trouble };
    if check.soundness == Soundness::Sound {
        assert_eq!(report.verdict, same, "sound, and not identical with itself");
    }
}

/// All that is said of a checkpoint without its values.
fn shown(catalog: &Catalog) -> String {
    let mut out = Vec::new();
    write_json(catalog, &mut out).expect("room");
    write_screen(catalog, Style::PLAIN, &mut out).expect("room");
    String::from_utf8(out).expect("text")
}

/// The files of a set of one.
fn files_of(path: &Path) -> (FileSet, ckptcmp::storage::Region) {
    let mut files = FileSet::default();
    let id = files.add(path).expect("the file is there");
    let region = files.whole(id);
    (files, region)
}
