//! Something else in the place of a file or a folder.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{model_with, plain_args};
use crate::common::crafted::{Checkpoint, compare};
use crate::common::{Copied, layout};

/// A checkpoint of two tensor parallel ranks that does not say so.
fn two_ranks() -> Copied {
    Copied::of(&layout("gpt/noargs-tp2pp2"))
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
        let copied = two_ranks();
        let root = copied.path();
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
    let copied = two_ranks();
    let root = copied.path();
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
