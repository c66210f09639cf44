//! Promise: whatever a checkpoint keeps beside its tensors is compared, and each thing that differs is named.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Copied, Run, ckptcmp, files, fixture, sum_again};
use ckptcmp::catalog::Section;
use ckptcmp::containers::torch::pickle::{Op, decode};
use ckptcmp::state::Difference;
use ckptcmp::{CompareOptions, OpenOptions, Report, Verdict};
use serde_json::json;

/// Checkpoints of each family that keep something of a run.
const FAMILIES: [&str; 8] = [
    "layouts/gpt-small/optimizer-tp1",
    "optimizer/dense/tp2dp2-distributed",
    "optimizer/moe/ep2-distributed",
    "torch_dist/gpt-small/tp2pp2",
    "torch_dist/flattened/zarr",
    "deepspeed/zero/z1",
    "deepspeed/zero/z3",
    "fsdp/shards",
];

/// Values that are changed in each of them, at most.
const CHANGED: usize = 60;

/// Compares all sections, nothing ignored; `None` where one side cannot be opened.
fn compared(a: &Path, b: &Path) -> Option<Report> {
    let options = OpenOptions { sections: Section::ALL.to_vec(), ..OpenOptions::default() };
    let open = |path: &Path| ckptcmp::open(path, &options).ok();
    Some(ckptcmp::compare(open(a)?, open(b)?, &CompareOptions::default()).unwrap())
}

/// Words before values that are none of a run: the device of a storage, the version of a module's code, and how a tensor is cut,
/// by the attributes of Megatron-LM's parameters (`core/tensor_parallel/layers.py`) and the meshes of torch's DTensors.
const NO_STATE: [&str; 12] = [
    "cpu",
    "version",
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "sequence_parallel",
    "allreduce",
    "shared",
    "stride",
    "_preserve_rank_order",
    "_flatten_rank_map",
    "use_strided_shard_as_shard_order",
];

/// A number or truth value in a pickle, which stands behind a key.
#[derive(Debug)]
struct Scalar {
    key: String,
    /// The byte that is changed.
    at: usize,
    mask: u8,
}

/// The numbers and truth values behind keys, in all pickles of a file.
fn scalars(bytes: &[u8]) -> Vec<Scalar> {
    let mut found = Vec::new();
    let short = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let headers = bytes.windows(4).enumerate().filter(|(_, head)| *head == b"PK\x03\x04");
    for (header, _) in headers.filter(|(at, _)| at + 30 < bytes.len()) {
        let name = header + 30..header + 30 + short(header + 26);
        if bytes.get(name.clone()).is_some_and(|name| name.ends_with(b"data.pkl")) {
            add_scalars(bytes, name.end + short(header + 28), &mut found);
        }
    }
    found
}

fn add_scalars(bytes: &[u8], mut at: usize, found: &mut Vec<Scalar>) {
    let mut key: Option<String> = None;
    while let Ok((op, len)) = decode(&bytes[at..]) {
        let place = match op {
            Op::Stop => return,
            Op::Put(_) | Op::Memoize => {
                at += len;
                continue;
            }
            // The last byte of the exponent, the lowest one of an integer.
            Op::Float(_) => Some((at + 2, 0x10)),
            Op::Bool(_) => Some((at, 0x01)),
            Op::Int(_) => Some((at + 1, 0x01)),
            _ => None,
        };
        let is_key = |key: &String| !NO_STATE.contains(&&**key) && key.parse::<u64>().is_err();
        if let (Some((at, mask)), Some(key)) = (place, key.take().filter(is_key)) {
            found.push(Scalar { key, at, mask });
        }
        if let Op::Str(text) = op {
            key = Some(String::from_utf8_lossy(text).into_owned());
        }
        at += len;
    }
}

#[test]
fn every_single_value_that_is_changed_alone_is_named_or_refused() {
    for family in FAMILIES {
        let intact = fixture(family);
        let report = compared(&intact, &intact).unwrap();
        assert_eq!(report.verdict, Verdict::Identical, "{family}");
        assert!(report.state.is_some_and(|state| state.compared > 0), "{family}");
        let copied = Copied::of(&intact);
        let mut all: Vec<(PathBuf, Scalar)> = Vec::new();
        let mut paths = files(&copied.path());
        paths.sort();
        for path in paths {
            let bytes = fs::read(&path).unwrap();
            all.extend(scalars(&bytes).into_iter().map(|scalar| (path.clone(), scalar)));
        }
        assert!(!all.is_empty(), "{family}");
        let step = all.len().div_ceil(CHANGED);
        let mut named = 0;
        for (path, Scalar { key, at, mask }) in all.iter().step_by(step) {
            let bytes = fs::read(path).unwrap();
            let mut changed = bytes.clone();
            changed[*at] ^= mask;
            sum_again(&mut changed);
            fs::write(path, &changed).unwrap();
            let place = format!("{family}: {key} at {at} of {}", path.display());
            match compared(&intact, &copied.path()) {
                Some(report) if report.verdict != Verdict::Trouble => {
                    assert_eq!(report.verdict, Verdict::Different, "{place}");
                    let state = report.state.unwrap();
                    let is_state = !state.differences.is_empty();
                    let is_tensor = report.tensors.iter().any(|one| !one.judgement.passes);
                    assert!(is_state || is_tensor, "{place}");
                    let is_of_key = |one: &Difference| one.path.contains(key);
                    named += usize::from(state.differences.iter().any(is_of_key));
                }
                // It makes the checkpoint another one, or none.
                _ => {}
            }
            fs::write(path, &bytes).unwrap();
        }
        assert!(named > 0, "{family}");
    }
}

/// A file of a run, and the same with another learning rate and another folder.
fn rewritten(from: &str, to: &str) -> (PathBuf, Copied) {
    let intact = fixture("fsdp/shards");
    let copied = Copied::of(&intact);
    let config = copied.path().join("config.yaml");
    fs::write(&config, from).unwrap();
    let other = Copied::of(&copied.path());
    fs::write(other.path().join("config.yaml"), to).unwrap();
    drop(intact);
    // Kept for as long as the other one is.
    let kept = other.path().join("..").join("first");
    crate::common::copy(&copied.path(), &kept);
    (kept, other)
}

#[test]
fn a_difference_of_state_counts_on_the_screen_in_the_document_and_in_the_exit_code() {
    let (a, b) = rewritten("lr: 0.1\nname: one\n", "lr: 0.2\nname: two\n");
    let run = |args: &[&str]| {
        Run::of(ckptcmp().arg("compare").arg(&a).arg(b.path()).args(["-o", "/dev/null"]).args(args))
    };
    let weights = run(&[]);
    assert_eq!(weights.code, 0, "{}", weights.stderr);
    let all = run(&["--section", "model,state"]);
    assert_eq!(all.code, 1, "{}", all.stderr);
    assert!(all.stdout.contains("\nconfig.lr\n   a 0.1, b 0.2\n"), "{}", all.stdout);
    assert!(all.stdout.contains("\nconfig.name\n   a 'one', b 'two'\n"), "{}", all.stdout);
    let document = run(&["--section", "state", "--report", "-"]).json();
    assert_eq!(document["verdict"], "different");
    assert_eq!(document["state"]["differences"][0]["path"], "config.lr");
    assert_eq!(document["state"]["differences"][0]["values"], json!({"a": "0.1", "b": "0.2"}));

    for (form, place) in
        [("md", "- `config.lr: a 0.1, b 0.2`"), ("xml", ">config.lr: a 0.1, b 0.2\n")]
    {
        let report = b.path().with_extension(form);
        let run = run(&["--section", "model,state", "--report", report.to_str().unwrap()]);
        assert_eq!(run.code, 1, "{}", run.stderr);
        let report = fs::read_to_string(report).unwrap();
        assert!(report.contains(place), "{report}");
    }

    let rules = b.path().with_extension("toml");
    fs::write(&rules, "[state]\nignore = ['config.*', 'nothing.*']\n").unwrap();
    let rules = ["--section", "model,state", "--rules", rules.to_str().unwrap()];
    let ignored = run(&rules);
    assert_eq!(ignored.code, 0, "{}", ignored.stderr);
    assert!(ignored.stdout.contains("state: 2 differences ignored by rules"), "{}", ignored.stdout);
    assert!(ignored.stdout.contains("no difference of state to ignore under nothing.*"));
}

#[test]
fn the_table_of_the_profile_is_printed_without_any_checkpoint() {
    let run = Run::of(ckptcmp().args(["compare", "--explain-profile"]));
    assert_eq!(run.code, 0, "{}", run.stderr);
    for row in ckptcmp::state::IGNORED_ON_RESUME {
        assert!(row.keys.iter().all(|key| run.stdout.contains(key)), "{row:?}");
    }
    assert!(run.stdout.lines().all(|line| line.chars().count() <= 80), "{}", run.stdout);
    assert_eq!(Run::of(ckptcmp().args(["compare"])).code, 2);
}
