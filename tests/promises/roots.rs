//! Promise: the folders in which programs keep checkpoints lead to them, and where it is not clear to which, the message
//! names those there are.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{self, Run, assert_all_equal, compare, inspect, layout, run};
use tempfile::TempDir;

const TRACKER: &str = "latest_checkpointed_iteration.txt";

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

/// An iteration of Megatron's distributed checkpoints.
fn torch_dist() -> PathBuf {
    fixture("torch_dist/gpt-small/tp2pp2/iter_0000005")
}

/// A new folder with copies of checkpoints at these places in it.
fn with(checkpoints: &[(&str, &Path)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (at, source) in checkpoints {
        let to = folder.path().join(at);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        match source.is_dir() {
            true => common::copy(source, &to),
            false => drop(fs::copy(source, &to).unwrap()),
        }
    }
    folder
}

fn screen(path: &Path) -> Run {
    run(["inspect", path.to_str().unwrap()])
}

#[track_caller]
fn leads_to(root: &Path, place: &str, words: &[&str]) {
    let found = inspect(root);
    assert_eq!(Path::new(found["path"].as_str().unwrap()), root.join(place));
    let run = screen(root);
    assert_eq!(run.code, 0, "{run:?}");
    for word in words {
        assert!(format!("{run:?}").contains(word), "{word}: {run:?}");
    }
}

#[test]
fn the_folder_above_weights_or_a_distributed_checkpoint_is_enough() {
    for place in ["weights", "dist_ckpt"] {
        let nemo = with(&[(place, &torch_dist())]);
        fs::create_dir(nemo.path().join("context")).unwrap();
        leads_to(nemo.path(), place, &[&format!("took {place}/")]);
        assert_all_equal(&compare(nemo.path(), &layout("gpt-small/tp1")));
    }
}

#[test]
fn of_two_usual_folders_neither_is_taken() {
    let both = with(&[("weights", &torch_dist()), ("dist_ckpt", &torch_dist())]);
    screen(both.path()).refuses(&[
        "no checkpoint here, but below: dist_ckpt (megatron-torch_dist), weights (megatron-torch_dist); name one of them",
    ]);
}

#[test]
fn a_role_of_reinforcement_learning_is_taken_where_it_is_the_only_one() {
    let saved = with(&[("global_step_5/actor/dist_ckpt", &torch_dist())]);
    fs::create_dir(saved.path().join("global_step_5/actor/huggingface")).unwrap();
    fs::write(saved.path().join("global_step_5/actor/huggingface/config.json"), "{}").unwrap();
    fs::write(saved.path().join(TRACKER), "5").unwrap();
    leads_to(saved.path(), "global_step_5/actor/dist_ckpt", &["took actor/", "took dist_ckpt/"]);
    let step = saved.path().join("global_step_5");
    leads_to(&step, "actor/dist_ckpt", &["took actor/"]);
    common::copy(&fixture("dcp/single"), &step.join("critic"));
    let words = "below: actor (megatron-torch_dist), critic (dcp); name one of them";
    screen(&step).refuses(&["no checkpoint here", words]);
    screen(saved.path()).refuses(&["global_step_5: no checkpoint here", words]);
    assert_all_equal(&compare(&step.join("critic"), &fixture("dcp/single")));
}

#[test]
fn a_broken_role_does_not_lead_to_the_other_one() {
    let saved = with(&[("actor", &torch_dist()), ("critic", &fixture("dcp/single"))]);
    fs::write(saved.path().join("actor").join(TRACKER), "7").unwrap();
    screen(saved.path()).refuses(&["no checkpoint here, but below: actor (broken), critic (dcp)"]);
    fs::remove_dir_all(saved.path().join("critic")).unwrap();
    screen(saved.path()).refuses(&["actor", TRACKER, "7"]);
}

#[test]
fn weights_of_two_kinds_beside_each_other_are_named() {
    let actor = with(&[("dist_ckpt", &torch_dist()), ("huggingface", &fixture("hf/single"))]);
    let words = "below: dist_ckpt (megatron-torch_dist), huggingface (hf); name one of them";
    screen(actor.path()).refuses(&["no checkpoint here", words]);
}

#[test]
fn the_trainer_saves_into_numbered_folders() {
    let single = fixture("hf/single");
    let saved = with(&[("checkpoint-90", &single), ("checkpoint-500", &single)]);
    leads_to(saved.path(), "checkpoint-500", &["2 checkpoints: took the newest, checkpoint-500"]);
    fs::remove_dir_all(saved.path().join("checkpoint-90")).unwrap();
    let run = compare(saved.path(), &single);
    assert_all_equal(&run);
    assert!(!run.stderr.contains("took"), "{run:?}");
    // The model that is beside them is the one that was saved at the end.
    fs::copy(single.join("model.safetensors"), saved.path().join("model.safetensors")).unwrap();
    leads_to(saved.path(), "", &[]);
}

#[test]
fn steps_of_distributed_checkpoints_lie_in_numbered_folders() {
    let single = fixture("dcp/single");
    for [old, new] in [["step-9", "step-10"], ["step_9", "step_10"]] {
        let saved = with(&[(old, &single), (new, &single)]);
        leads_to(saved.path(), new, &[&format!("2 checkpoints: took the newest, {new}")]);
    }
}

#[test]
fn what_lies_below_is_named_with_its_format() {
    let several = with(&[
        ("first", &fixture("hf/single")),
        ("second", &layout("gpt-small/tp1")),
        ("third.pt", &fixture("dcp/weights.pt")),
        ("notes/run", &fixture("hf/single")),
    ]);
    fs::write(several.path().join("README.md"), "see below").unwrap();
    let words =
        "below: first (hf), second (megatron-torch), third.pt (torch-file); name one of them";
    screen(several.path()).refuses(&["no checkpoint here, but ", words]);
    // What is two levels down is not looked for, and what is found is not taken.
    screen(&several.path().join("notes")).refuses(&["but below: run (hf); name it"]);
    fs::remove_dir_all(several.path().join("notes")).unwrap();
    for gone in ["first", "second"] {
        fs::remove_dir_all(several.path().join(gone)).unwrap();
    }
    fs::remove_file(several.path().join("third.pt")).unwrap();
    screen(several.path()).refuses(&[
        "no checkpoint here: looked for ",
        TRACKER,
        "model.safetensors",
    ]);
}

#[test]
fn one_file_of_a_distributed_checkpoint_is_none() {
    let copied = with(&[("__0_0.distcp", &fixture("dcp/single/__0_0.distcp"))]);
    let file = copied.path().join("__0_0.distcp");
    screen(&file).refuses(&["one file of a distributed checkpoint", "name the folder"]);
    screen(copied.path()).refuses(&[".metadata: missing: the *.distcp files beside it"]);
}

#[test]
fn metadata_of_megatrons_that_says_nothing_is_refused() {
    let copied = with(&[("iter_0000005", &torch_dist())]);
    let metadata = copied.path().join("iter_0000005/metadata.json");
    fs::write(&metadata, "").unwrap();
    screen(copied.path()).refuses(&["metadata.json: ", "name one with --format"]);
    let forced = ["--format", "megatron-torch_dist"];
    let run = common::compare_with(copied.path(), &torch_dist(), &forced);
    assert_all_equal(&run);
}

#[test]
fn a_rank_file_is_read_as_the_format_that_is_asked_for() {
    let file = layout("gpt-small/tp1/iter_0000005/mp_rank_00/model_optim_rng.pt");
    let formats = |name| {
        let run = run(["inspect", file.to_str().unwrap(), "--json", "--format", name]);
        let found: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        found["format"].as_str().unwrap().to_owned()
    };
    assert_eq!(inspect(&file)["format"], "megatron-torch");
    assert_eq!(formats("megatron-torch"), "megatron-torch");
    assert_eq!(formats("torch-file"), "torch-file");
}
