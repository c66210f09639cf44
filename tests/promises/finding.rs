//! Promise: a checkpoint is found from whatever path a user gives, and where none is found the message says what to do.

use std::fs;
use std::path::Path;

use crate::common::{self, Copied, assert_all_equal, compare, compare_with, inspect, layout, run};
use tempfile::TempDir;

const TRACKER: &str = "latest_checkpointed_iteration.txt";

fn small() -> std::path::PathBuf {
    layout("gpt-small/tp1")
}

/// A copy of the small model with this tracker.
fn tracked(tracker: &[u8]) -> Copied {
    let copied = Copied::of(&small());
    fs::write(copied.path().join(TRACKER), tracker).unwrap();
    copied
}

#[test]
fn a_tracker_with_a_number_is_followed_however_its_line_ends() {
    for tracker in [&b"5"[..], b"5\n", b"5\r\n", b"  5 \n\n", b"0000005\n", b"\xef\xbb\xbf5"] {
        let copied = tracked(tracker);
        // A newer iteration is there, but the tracker does not name it.
        let newer = copied.path().join("iter_0000009");
        fs::create_dir(&newer).unwrap();
        let run = compare(&copied.path(), &small());
        assert_all_equal(&run);
        assert!(run.stderr.contains("iteration 5"), "{tracker:?}: {}", run.stderr);
    }
}

#[test]
fn a_tracker_may_say_release() {
    let found = inspect(&layout("gpt/release-tp1"));
    assert!(
        Path::new(found["path"].as_str().unwrap()).ends_with("gpt/release-tp1/release"),
        "{found}"
    );
    assert_eq!(found["iteration"], 0);
    let copied = Copied::of(&layout("gpt/release-tp1"));
    fs::write(copied.path().join(TRACKER), "release\r\n").unwrap();
    assert_all_equal(&compare(&copied.path(), &layout("gpt/tp1")));
}

#[test]
fn an_iteration_may_have_more_than_seven_digits() {
    let copied = tracked(b"12345678\n");
    fs::rename(copied.iteration(), copied.path().join("iter_12345678")).unwrap();
    let found = inspect_renamed(&copied.path());
    assert!(Path::new(found["path"].as_str().unwrap()).ends_with("iter_12345678"), "{found}");
}

/// The report on a checkpoint whose files say another iteration than its folder.
fn inspect_renamed(path: &Path) -> serde_json::Value {
    let run = run(["inspect", "--json", "--allow-foreign-ranks", path.to_str().unwrap()]);
    assert_eq!(run.code, 0, "{run:?}");
    run.json()
}

#[test]
fn an_empty_tracker_is_an_error_that_names_the_file_and_the_way_out() {
    for tracker in [&b""[..], b"\n", b" \r\n"] {
        let copied = tracked(tracker);
        compare(&copied.path(), &small()).refuses(&[TRACKER, "empty", "iter_"]);
    }
}

#[test]
fn a_tracker_to_nowhere_names_the_folder_it_wants_and_one_that_is_there() {
    let copied = tracked(b"7");
    compare(&copied.path(), &small()).refuses(&[TRACKER, "iter_0000007", "iter_0000005"]);
    fs::remove_dir_all(copied.iteration()).unwrap();
    compare(&copied.path(), &small()).refuses(&["iter_0000007", "no iteration"]);
}

#[test]
fn garbage_in_a_tracker_is_quoted() {
    for garbage in ["five", "-5", "5.0", "5 6", "../../etc", "99999999999999999999999", "Release"] {
        let copied = tracked(garbage.as_bytes());
        compare(&copied.path(), &small()).refuses(&[TRACKER, garbage]);
    }
    let copied = tracked(&vec![b'7'; 100_000]);
    compare(&copied.path(), &small()).refuses(&[TRACKER, "100000 bytes"]);
    let copied = tracked(b"\xff\xfe5");
    compare(&copied.path(), &small()).refuses(&[TRACKER]);
}

#[test]
fn without_a_tracker_the_newest_iteration_is_taken_with_a_note() {
    let root = layout("faults/several-iters-no-tracker");
    let run = compare(&root, &small());
    assert_all_equal(&run);
    assert!(run.stderr.contains("took the newest, iter_0000005"), "{}", run.stderr);
    assert!(run.stderr.contains("2 checkpoints"), "{}", run.stderr);
    // Newest by number, not by spelling.
    let copied = Copied::of(&root);
    fs::rename(copied.iteration(), copied.path().join("iter_12345678")).unwrap();
    let found = inspect_renamed(&copied.path());
    assert!(Path::new(found["path"].as_str().unwrap()).ends_with("iter_12345678"), "{found}");
}

#[test]
fn without_a_tracker_an_only_iteration_is_taken_without_a_word() {
    let copied = Copied::of(&small());
    fs::remove_file(copied.path().join(TRACKER)).unwrap();
    assert_eq!(inspect(&copied.path())["notes"].as_array().unwrap().len(), 0);
    fs::rename(copied.iteration(), copied.path().join("release")).unwrap();
    let found = inspect(&copied.path());
    assert!(Path::new(found["path"].as_str().unwrap()).ends_with("release"), "{found}");
}

#[test]
fn an_iterations_folder_is_a_checkpoint_whatever_the_tracker_says() {
    let copied = tracked(b"");
    assert_all_equal(&compare(&copied.iteration(), &small()));
    let old = layout("faults/several-iters-no-tracker/iter_0000003");
    // Its file says that it is of iteration 5.
    let run = compare_with(&old, &small(), &["--allow-foreign-ranks"]);
    assert_eq!(run.code, 1, "iteration 3 has other values: {}", run.stderr);
}

#[test]
fn one_ranks_folder_and_its_file_are_compared_as_the_shard_that_they_are() {
    let folder = layout("gpt-small/tp2/iter_0000005/mp_rank_01");
    let file = folder.join("model_optim_rng.pt");
    let run = compare(&folder, &file);
    assert_all_equal(&run);
    assert!(run.stderr.contains("one shard of tp=2"), "{}", run.stderr);
    assert_eq!(run.json()["decoder.layers.0.self_attention.linear_qkv.weight"]["shape"][0], 8);
    let other = layout("gpt-small/tp2/iter_0000005/mp_rank_00");
    let run = compare(&folder, &other);
    assert_eq!(run.code, 1, "another shard has other values: {}", run.stderr);
}

#[test]
fn the_only_rank_may_have_numbers_for_stages_and_experts_in_its_folder() {
    for spelling in ["mp_rank_000", "mp_rank_00_000", "mp_rank_00_000_000", "mp_rank_00_0000"] {
        let copied = Copied::of(&small());
        fs::rename(copied.iteration().join("mp_rank_00"), copied.iteration().join(spelling))
            .unwrap();
        assert_all_equal(&compare(&copied.path(), &small()));
    }
}

#[test]
fn one_further_number_is_a_stage_or_an_expert_rank_as_the_checkpoint_tells() {
    for (path, wanted) in [
        ("gpt/pp2", "tp1 pp2"),
        ("moe/seq-ep2", "tp1 pp1 ep2"),
        ("moe/pp2ep2", "tp1 pp2 ep2"),
        ("gpt/noargs-tp2pp2", "tp2 pp2"),
    ] {
        assert_eq!(inspect(&layout(path))["layout"], wanted, "{path}");
    }
    // Without `args` what the folders hold decides.
    let copied = common::without_args(&layout("moe/seq-ep2"));
    assert_eq!(inspect(&copied.path())["layout"], "tp1 pp1 ep2");
    assert_all_equal(&compare(&copied.path(), &layout("moe/seq-ep1")));
}

#[test]
fn two_folders_for_one_rank_are_an_error_that_names_both() {
    let copied = Copied::of(&small());
    let iteration = copied.iteration();
    fs::create_dir(iteration.join("mp_rank_000")).unwrap();
    let file = |rank: &str| iteration.join(rank).join("model_optim_rng.pt");
    fs::copy(file("mp_rank_00"), file("mp_rank_000")).unwrap();
    compare(&copied.path(), &small()).refuses(&["mp_rank_00 ", "mp_rank_000", "same rank"]);
}

#[test]
fn folders_with_different_numbers_of_parts_are_an_error() {
    let copied = Copied::of(&layout("gpt-small/tp2"));
    let iteration = copied.iteration();
    fs::rename(iteration.join("mp_rank_01"), iteration.join("mp_rank_01_000")).unwrap();
    compare(&copied.path(), &small()).refuses(&["iter_0000005", "different forms"]);
}

#[test]
fn what_is_no_rank_lies_beside_the_ranks_unharmed() {
    let copied = Copied::of(&layout("gpt-small/tp2"));
    for folder in ["tensorboard", "mp_rank_x", "rank_00", "mp_rank_02"] {
        fs::create_dir(copied.iteration().join(folder)).unwrap();
    }
    fs::write(copied.iteration().join("notes.txt"), "hello").unwrap();
    fs::write(copied.path().join("notes.txt"), "hello").unwrap();
    assert_all_equal(&compare(&copied.path(), &small()));
}

#[test]
fn folders_of_the_optimizer_of_23_04_are_no_shards() {
    let root = layout("faults/optimizer-only-dirs");
    assert_eq!(inspect(&root)["layout"], "tp2 pp1");
    assert_eq!(inspect(&root)["shards"], 2);
    assert_all_equal(&compare(&root, &small()));
}

#[test]
fn a_path_that_does_not_exist_is_named_with_its_side() {
    let nowhere = Path::new("/no/such/checkpoint");
    compare(nowhere, &small()).refuses(&["ckptcmp: a: /no/such/checkpoint: ", "cannot be read"]);
    compare(&small(), nowhere).refuses(&["ckptcmp: b: /no/such/checkpoint: ", "cannot be read"]);
}

#[test]
fn what_is_no_checkpoint_is_refused_with_what_was_looked_for() {
    let folder = TempDir::new().unwrap();
    compare(folder.path(), &small()).refuses(&["a: ", TRACKER, "mp_rank_"]);
    let file = folder.path().join("weights.pt");
    fs::write(&file, "these are no weights").unwrap();
    compare(&small(), &file).refuses(&["b: ", "weights.pt"]);
    fs::write(&file, "").unwrap();
    compare(&small(), &file).refuses(&["b: ", "weights.pt"]);
    // A rank's folder whose file has gone is an empty checkpoint, not an equal one.
    fs::create_dir(folder.path().join("mp_rank_00")).unwrap();
    compare(&small(), folder.path()).refuses(&["b: ", "model_optim_rng.pt"]);
}

#[test]
fn an_unknown_format_is_answered_with_those_there_are() {
    let run = common::compare_with(&small(), &small(), &["--format", "zarr"]);
    assert_eq!(run.code, 2, "{}", run.stderr);
    for said in ["zarr", "megatron-torch", "torch-file"] {
        assert!(run.stderr.contains(said), "{}", run.stderr);
    }
    assert_all_equal(&common::compare_with(&small(), &small(), &["--format", "megatron-torch"]));
}
