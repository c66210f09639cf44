//! Promise: a file that says who it is must be the one that its place makes of it. Swapped, copied, stale and foreign ranks
//! are named with what they say to be, on either side of a comparison, by `check` and by `inspect`; whole checkpoints are
//! not blamed for anything.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Copied, Run, compare, compare_with, copy, fixture, rename_key, replace, run};

use tempfile::TempDir;

/// A checkpoint of several ranks, the folder of its iteration, and the places of two of its files.
struct Victim {
    path: &'static str,
    iteration: &'static str,
    first: Rank,
    second: Rank,
}

/// The file of a rank below the iteration's folder, and what it says to be.
struct Rank {
    file: &'static str,
    says: &'static str,
    place: &'static str,
}

const fn rank(file: &'static str, says: &'static str, place: &'static str) -> Rank {
    Rank { file, says, place }
}

/// Written by Megatron-LM itself, but for the first one.
const MEGATRON: [Victim; 4] = [
    Victim {
        path: "layouts/gpt/tp2pp2",
        iteration: "iter_0000005",
        first: rank("mp_rank_01_000/model_optim_rng.pt", "rank 1 (tp 1, pp 0)", "tp 1, pp 0"),
        second: rank("mp_rank_00_001/model_optim_rng.pt", "rank 2 (tp 0, pp 1)", "tp 0, pp 1"),
    },
    Victim {
        path: "megatron/mla-fp32/B/tp2pp1-torch",
        iteration: "iter_0000004",
        first: rank("mp_rank_00/model_optim_rng.pt", "rank 0 (tp 0, pp 0)", "tp 0, pp 0"),
        second: rank("mp_rank_01/model_optim_rng.pt", "rank 1 (tp 1, pp 0)", "tp 1, pp 0"),
    },
    Victim {
        path: "megatron/llama-bf16/A/tp1pp2-first3-torch",
        iteration: "iter_0000003",
        first: rank("mp_rank_00_000/model_optim_rng.pt", "rank 0 (tp 0, pp 0)", "tp 0, pp 0"),
        second: rank("mp_rank_00_001/model_optim_rng.pt", "rank 1 (tp 0, pp 1)", "tp 0, pp 1"),
    },
    Victim {
        path: "megatron/moe-grouped-bf16/A/tp1pp1ep2-torch",
        iteration: "iter_0000003",
        first: rank("mp_rank_00_000/model_optim_rng.pt", "rank 0 (tp 0, pp 0, ep 0)", "pp 0, ep 0"),
        second: rank(
            "mp_rank_00_001/model_optim_rng.pt",
            "rank 1 (tp 0, pp 0, ep 1)",
            "pp 0, ep 1",
        ),
    },
];

/// A copy that is damaged, beside the whole checkpoint.
struct Case {
    whole: PathBuf,
    copied: Copied,
    iteration: &'static str,
}

impl Case {
    fn of(victim: &Victim) -> Self {
        let whole = fixture(victim.path);
        let copied = Copied::of(&whole);
        Self { whole, copied, iteration: victim.iteration }
    }

    fn file(&self, rank: &Rank) -> PathBuf {
        self.folder().join(rank.file)
    }

    fn folder(&self) -> PathBuf {
        self.copied.path().join(self.iteration)
    }

    /// All commands end with 2 and say one line that has all of these words, and nothing of other files.
    #[track_caller]
    fn says(&self, lines: &[&[&str]]) {
        let copied = self.copied.path();
        let path = copied.to_str().unwrap();
        let runs: [Run; 5] = [
            run(["check", path]),
            run(["inspect", path]),
            compare(&self.whole, &copied),
            compare(&copied, &self.whole),
            compare(&copied, &copied),
        ];
        for run in &runs {
            assert_eq!(run.code, 2, "{run:?}");
            for words in lines {
                let has_all = |line: &&str| words.iter().all(|word| line.contains(word));
                let found = run.stderr.lines().filter(has_all).count();
                assert!(found >= 1, "{words:?} is not in a line of {}", run.stderr);
            }
        }
        let named = runs[0].stderr.lines().filter(|line| line.contains("says")).count();
        assert!(named <= lines.len(), "{}", runs[0].stderr);
    }

    /// With the flag that goes by names alone, the fault is a note.
    #[track_caller]
    fn is_let_pass(&self, word: &str) -> Run {
        let run = compare_with(&self.whole, &self.copied.path(), &["--allow-foreign-ranks"]);
        assert_ne!(run.code, 2, "{}", run.stderr);
        let is_note = |line: &str| line.contains("--allow-foreign-ranks") && line.contains(word);
        assert!(run.stderr.lines().any(is_note), "{}", run.stderr);
        run
    }
}

/// Changes an integer below a key of the pickle in a file, as `torch.save` writes it.
fn set(file: &Path, key: &str, value: u8) {
    let length = u32::try_from(key.len()).unwrap().to_le_bytes();
    let named = [b"X", &length[..], key.as_bytes()].concat();
    let bytes = fs::read(file).unwrap();
    let parts = bytes.windows(named.len()).enumerate().filter(|(_, part)| *part == named);
    // BINPUT or LONG_BINPUT of the key, then BININT1.
    let entry = |at: usize| {
        let memo = if bytes[at + named.len()] == b'q' { 2 } else { 5 };
        let value = at + named.len() + memo;
        (bytes[value] == b'K').then(|| bytes[at..value + 2].to_vec())
    };
    let found: Vec<Vec<u8>> = parts.filter_map(|(at, _)| entry(at)).collect();
    assert!(!found.is_empty(), "no number {key} in {}", file.display());
    for from in found {
        let to = [&from[..from.len() - 1], &[value]].concat();
        assert!(replace(file, &from, &to) > 0);
    }
    without_sums(file);
}

/// Takes the sums out of the directory of an archive, as torch writes it with `set_crc32_options(False)`.
fn without_sums(file: &Path) {
    const ENTRY: &[u8] = b"PK\x01\x02";
    const SUM_AT: usize = 16;
    let mut bytes = fs::read(file).unwrap();
    let entries: Vec<usize> =
        (0..bytes.len() - SUM_AT).filter(|&at| bytes[at..].starts_with(ENTRY)).collect();
    for at in entries {
        bytes[at + SUM_AT..][..4].fill(0);
    }
    fs::write(file, bytes).unwrap();
}

fn swap(one: &Path, other: &Path) {
    let aside = one.with_extension("aside");
    fs::rename(one, &aside).unwrap();
    fs::rename(other, one).unwrap();
    fs::rename(&aside, other).unwrap();
}

#[test]
fn swapped_ranks_are_named_with_what_they_say_to_be() {
    for victim in &MEGATRON {
        let case = Case::of(victim);
        let Victim { first, second, .. } = victim;
        swap(&case.file(first), &case.file(second));
        case.says(&[
            &[first.file, second.says, "in the place of", first.place],
            &[second.file, first.says, "in the place of", second.place],
        ]);
    }
}

#[test]
fn a_rank_copied_over_another_is_named_with_what_it_says_to_be() {
    for victim in &MEGATRON {
        let case = Case::of(victim);
        fs::copy(case.file(&victim.first), case.file(&victim.second)).unwrap();
        case.says(&[&[victim.second.file, victim.first.says, victim.second.place]]);
        let case = Case::of(victim);
        fs::copy(case.file(&victim.second), case.file(&victim.first)).unwrap();
        case.says(&[&[victim.first.file, victim.second.says, victim.first.place]]);
    }
}

#[test]
fn a_rank_that_says_another_iteration_layout_or_model_is_named() {
    for victim in &MEGATRON {
        for (key, words) in [
            ("iteration", "iteration 77 where"),
            ("world_size", "world_size 77 where"),
            ("tensor_model_parallel_size", "tensor_model_parallel_size 77 where"),
            ("pipeline_model_parallel_size", "pipeline_model_parallel_size 77 where"),
            ("num_layers", "num_layers 77 where"),
            ("hidden_size", "hidden_size 77 where"),
            ("num_attention_heads", "num_attention_heads 77 where"),
        ] {
            let case = Case::of(victim);
            set(&case.file(&victim.second), key, 77);
            case.says(&[&[words]]);
        }
        let case = Case::of(victim);
        set(&case.file(&victim.second), "rank", 77);
        case.says(&[&[victim.second.file, "it is rank 77 of", victim.second.place]]);
    }
}

#[test]
fn a_folder_of_another_iteration_than_its_files_is_named() {
    for victim in &MEGATRON {
        let case = Case::of(victim);
        fs::rename(case.folder(), case.copied.path().join("iter_0000077")).unwrap();
        let step = &victim.iteration[11..];
        let tracker = case.copied.path().join("latest_checkpointed_iteration.txt");
        if tracker.exists() {
            fs::write(tracker, "77").unwrap();
        }
        let says = format!("its files say {step}");
        case.says(&[&["iter_0000077: ", "its name says iteration 77", &says]]);
        case.is_let_pass("iter_0000077");
    }
}

#[test]
fn a_folder_that_is_left_over_from_a_larger_layout_is_named_as_that() {
    for (victim, stray) in [
        (&MEGATRON[0], "mp_rank_02_001"),
        (&MEGATRON[0], "mp_rank_01_003"),
        (&MEGATRON[1], "mp_rank_02"),
        (&MEGATRON[2], "mp_rank_00_002"),
        (&MEGATRON[3], "mp_rank_00_002"),
    ] {
        let case = Case::of(victim);
        let from = case.file(&victim.second);
        copy(from.parent().unwrap(), &case.folder().join(stray));
        case.says(&[&[stray, "does not belong", "a larger layout"]]);
        let run = case.is_let_pass(stray);
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    // Names of another form.
    let case = Case::of(&MEGATRON[0]);
    copy(case.file(&MEGATRON[0].first).parent().unwrap(), &case.folder().join("mp_rank_00"));
    case.says(&[&["mp_rank_00: ", "does not belong", "tp=2 pp=2", "another layout"]]);
}

#[test]
fn one_ranks_folder_is_held_against_its_name() {
    let victim = &MEGATRON[0];
    let case = Case::of(victim);
    let one = |rank: &Rank| case.file(rank).parent().unwrap().to_path_buf();
    assert_eq!(run([Path::new("check"), &one(&victim.first)]).code, 0);
    set(&case.file(&victim.first), "rank", 3);
    let found = run([Path::new("check"), &one(&victim.first)]);
    found.refuses(&[victim.first.file, "it is rank 3 (tp 1, pp 1)", victim.first.place]);
}

/// Megatron's converters write all files from one process, without random states, so `rank` is no claim; a file that is there twice is found all
/// the same. What training makes different on every rank is no claim either.
#[test]
fn what_converters_and_training_write_is_no_finding() {
    let ranks = ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"];
    let case = Case::of(&MEGATRON[0]);
    rename_key(&case.copied.path(), "rng_state", "rng_stale");
    for rank in ranks {
        set(&case.folder().join(rank).join("model_optim_rng.pt"), "rank", 0);
    }
    let run = compare(&case.whole, &case.copied.path());
    assert_eq!(run.code, 0, "{}", run.stderr);
    let file = |at: usize| case.folder().join(ranks[at]).join("model_optim_rng.pt");
    fs::copy(file(2), file(3)).unwrap();
    case.says(&[&["mp_rank_01_001/", "has the same bytes as mp_rank_01_000/"]]);

    let case = Case::of(&MEGATRON[1]);
    for (key, value) in [("local_rank", 7), ("log_interval", 9), ("num_workers", 4)] {
        set(&case.file(&MEGATRON[1].second), key, value);
    }
    let run = compare(&case.whole, &case.copied.path());
    assert_eq!(run.code, 0, "{}", run.stderr);
}

#[test]
fn an_argument_that_the_user_sets_is_not_held_against_a_file() {
    let case = Case::of(&MEGATRON[1]);
    set(&case.file(&MEGATRON[1].second), "num_layers", 77);
    case.says(&[&["num_layers 77"]]);
    let run = compare_with(&case.whole, &case.copied.path(), &["--set", "num_layers=3"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
}

#[test]
fn the_iteration_of_a_distributed_checkpoint_is_held_against_its_folder() {
    let step = "iter_0000077";
    for path in ["torch_dist/gpt-small/tp2pp2/iter_0000005", "torch_dist/flattened/zarr"] {
        let folder = TempDir::new().unwrap();
        let renamed = folder.path().join(step);
        copy(&fixture(path), &renamed);
        let says = format!("{step}: its name says iteration 77, its files say ");
        run([Path::new("check"), &renamed]).refuses(&[&says]);
        compare(&fixture(path), &renamed).refuses(&["b: ", &says]);
        let flags = ["--allow-foreign-ranks"];
        assert_eq!(compare_with(&fixture(path), &renamed, &flags).code, 0);
    }
}

#[test]
fn what_the_trainer_says_is_held_against_its_folder() {
    let folder = TempDir::new().unwrap();
    let step = folder.path().join("checkpoint-90");
    copy(&fixture("hf/single"), &step);
    let say = |number| {
        let text = format!("{{\"epoch\": 1.0, \"global_step\": {number}}}");
        fs::write(step.join("trainer_state.json"), text).unwrap();
    };
    say(90);
    assert_eq!(run([Path::new("inspect"), &step]).code, 0);
    say(80);
    let words = ["checkpoint-90: its name says global_step 90, its files say 80"];
    run([Path::new("inspect"), &step]).refuses(&words);
}

/// Copies a fixture, and with it every pair of its files that the closure damages.
fn damaged(path: &str, damage: impl Fn(&Path)) -> Copied {
    let copied = Copied::of(&fixture(path));
    damage(&copied.path());
    copied
}

/// `check`, `inspect` and `compare` end with 2 and say all of these words in one line.
#[track_caller]
fn all_say(copied: &Copied, words: &[&str]) {
    let path = copied.path();
    let sections = ["--section", "model,optimizer"];
    let runs = [
        run([Path::new("check"), &path]),
        run([Path::new("inspect"), &path]),
        compare_with(&path, &path, &sections),
    ];
    for run in runs {
        assert_eq!(run.code, 2, "{run:?}");
        let has_all = |line: &str| words.iter().all(|word| line.contains(word));
        assert!(run.stderr.lines().any(has_all), "{words:?} is not in {}", run.stderr);
    }
}

#[test]
fn ranks_of_infinitrain_are_held_against_each_other_and_their_folder() {
    const WHOLE: &str = "infinitrain/gpt2/tp2pp2/checkpoint_step_000007";
    let state = |path: &Path| path.join("rank_000001/trainer_state.json");
    let model = |path: &Path, rank: u32| path.join(format!("rank_{rank:06}/model.ckpt"));
    let edited = |from: &'static str, to: &'static str| {
        damaged(WHOLE, move |path| {
            assert!(replace(&state(path), from.as_bytes(), to.as_bytes()) > 0);
        })
    };
    let step = edited("\"global_step\": 7", "\"global_step\": 3");
    all_say(&step, &["rank_000001/", "says global_step 3 where 3 other files say 7"]);
    let layout = edited("\"tp_size\": 2", "\"tp_size\": 4");
    all_say(&layout, &["rank_000001/", "says tp_size 4 where"]);
    let copied = damaged(WHOLE, |path| {
        fs::copy(model(path, 0), model(path, 1)).unwrap();
    });
    all_say(&copied, &["rank_000001/model.ckpt", "has the same bytes as rank_000000/", "tp 1"]);
    let swapped = damaged(WHOLE, |path| swap(&model(path, 0), &model(path, 2)));
    all_say(&swapped, &["rank_000002/model.ckpt", "of the first stage", "tp 0, pp 1"]);
    all_say(&swapped, &["rank_000000/model.ckpt", "of the last stage", "tp 0, pp 0"]);
}

#[test]
fn ranks_of_deepspeed_are_held_against_each_other() {
    let partition = |path: &Path, rank: u32| {
        path.join(format!("bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    };
    for stage in ["z1", "z2-round-robin", "z3"] {
        let tag = format!("deepspeed/zero/{stage}/global_step2");
        let copied = damaged(&tag, |path| {
            fs::copy(partition(path, 0), partition(path, 1)).unwrap();
        });
        all_say(&copied, &["zero_pp_rank_1_", "has the same bytes as", "dp rank 1"]);
    }
    let copied = damaged("deepspeed/zero/z3/global_step2", |path| {
        set(&path.join("zero_pp_rank_1_mp_rank_00_model_states.pt"), "global_steps", 77);
    });
    all_say(&copied, &["zero_pp_rank_1_mp", "says global_steps 77 where", "dp rank 1"]);
}

/// A torch archive keeps the name under which it was written; no test of the files' contents could tell these apart.
#[test]
fn files_that_were_saved_under_the_name_of_another_rank_are_named() {
    for (checkpoint, [one, other], place) in [
        (
            "deepspeed/zero/z1/global_step2",
            [0, 1].map(|rank| format!("bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")),
            "mp rank 0, dp rank 1",
        ),
        (
            "deepspeed/zero/pipe/global_step2",
            [0, 1].map(|rank| format!("mp_rank_0{rank}_model_states.pt")),
            "mp rank 1, dp rank 0",
        ),
        (
            "deepspeed/neox/tp2pp2/global_step5",
            [0, 1].map(|rank| format!("layer_02-model_0{rank}-model_states.pt")),
            "layer 2, tp 1",
        ),
        (
            "fsdp/replicas",
            [0, 2].map(|rank| format!("extra_state_world_size_4_rank_{rank}.pt")),
            "rank 2",
        ),
    ] {
        let swapped = damaged(checkpoint, |path| swap(&path.join(&one), &path.join(&other)));
        let line = format!("{other}: was saved as {one}, in the place of {place}");
        all_say(&swapped, &[&line]);
        let path = swapped.path();
        let passed = run([Path::new("check"), &path, Path::new("--allow-foreign-ranks")]);
        assert!(passed.stdout.contains("let pass by --allow-foreign-ranks"), "{passed:?}");
    }
    let copied = damaged("deepspeed/neox/tp2pp2/global_step5", |path| {
        let layer = |rank| path.join(format!("layer_03-model_0{rank}-model_states.pt"));
        fs::copy(layer(0), layer(1)).unwrap();
    });
    all_say(&copied, &["layer_03-model_01", "saved as layer_03-model_00-model_states.pt"]);
}

/// Their masters are all that tells these files apart.
#[test]
fn optimizers_beside_the_weights_of_another_rank_are_named() {
    for (checkpoint, [one, other], [place, owner]) in [
        (
            "optimizer/dense/tp2dp2-distributed/iter_0000002",
            ["mp_rank_00", "mp_rank_01"],
            ["tp 1, pp 0", "tp 0, pp 0"],
        ),
        (
            "optimizer/moe/ep2-distributed/iter_0000002",
            ["mp_rank_00_000", "mp_rank_00_001"],
            ["tp 0, pp 0, ep 1", "tp 0, pp 0, ep 0"],
        ),
    ] {
        let file = |path: &Path, rank: &str| path.join(rank).join("distrib_optim.pt");
        let swapped = damaged(checkpoint, |path| swap(&file(path, one), &file(path, other)));
        let path = swapped.path();
        let run = compare_with(&path, &path, &["--section", "optimizer"]);
        let line = format!(
            "{other}/distrib_optim.pt: holds the masters of the weights of {owner}, in the place of {place}"
        );
        run.refuses(&[&line]);
    }
}

/// Without the name under which each was written, as where it went through a buffer.
#[test]
fn partitions_tell_by_their_parameters_whose_they_are() {
    let name = |rank: u32| format!("bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    let renamed = |path: &Path, from: u32| {
        let stem = |rank: u32| name(rank).trim_end_matches(".pt").to_owned();
        assert!(replace(path, stem(from).as_bytes(), stem(1 - from).as_bytes()) > 0);
    };
    let swapped = damaged("deepspeed/zero/z1/global_step2", |path| {
        swap(&path.join(name(0)), &path.join(name(1)));
        renamed(&path.join(name(0)), 1);
        renamed(&path.join(name(1)), 0);
    });
    let line = |rank: u32, owner: u32| {
        format!(
            "{}: holds the parameters of dp rank {owner}, in the place of mp rank 0, dp rank {rank}",
            name(rank)
        )
    };
    all_say(&swapped, &[&line(0, 1)]);
    all_say(&swapped, &[&line(1, 0)]);
}
