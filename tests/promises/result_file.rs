//! Promise: the result goes where `-o` says, whole or not at all, and nothing is overwritten unasked.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{Run, assert_all_equal, ckptcmp, compare, layout, names, read_json, screen};
use tempfile::TempDir;

fn small() -> PathBuf {
    layout("gpt-small/tp1")
}

/// `compare` of the small model against itself, run in a folder.
fn in_folder(folder: &TempDir) -> Command {
    let mut command = ckptcmp();
    command.current_dir(folder.path()).arg("compare").args([small(), small()]);
    command
}

fn entries(folder: &TempDir) -> Vec<String> {
    let names = fs::read_dir(folder.path()).unwrap();
    names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn the_result_is_ckpt_similarity_json_in_the_current_folder_and_nothing_else_is_left() {
    let folder = TempDir::new().unwrap();
    let run = Run::of(&mut in_folder(&folder));
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert_eq!(entries(&folder), ["ckpt_similarity.json"]);
    let result = read_json(&folder.path().join("ckpt_similarity.json"));
    assert_eq!(result, compare(&small(), &small()).json());
}

#[test]
fn a_result_that_exists_is_refused_before_anything_is_read() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("ckpt_similarity.json"), "mine").unwrap();
    let refusal = Run::of(&mut in_folder(&folder));
    refusal.refuses(&["ckpt_similarity.json: the file exists", "--force", "-o"]);
    assert_eq!(refusal.stdout, "");
    let mut nowhere = ckptcmp();
    nowhere.current_dir(folder.path()).args(["compare", "/no/such/a", "/no/such/b"]);
    let run = Run::of(&mut nowhere);
    run.refuses(&["the file exists"]);
    assert!(!run.stderr.contains("/no/such"), "{}", run.stderr);
    assert_eq!(fs::read(folder.path().join("ckpt_similarity.json")).unwrap(), b"mine");
    assert_eq!(entries(&folder), ["ckpt_similarity.json"]);
}

#[test]
fn force_overwrites_only_with_a_result() {
    let folder = TempDir::new().unwrap();
    let output = folder.path().join("ckpt_similarity.json");
    fs::write(&output, "mine").unwrap();
    let mut nowhere = ckptcmp();
    nowhere.current_dir(folder.path()).args(["compare", "/no/such/a", "/no/such/b", "--force"]);
    assert_eq!(Run::of(&mut nowhere).code, 2);
    assert_eq!(fs::read(&output).unwrap(), b"mine");
    assert_eq!(Run::of(in_folder(&folder).arg("--force")).code, 0);
    assert_eq!(names(&read_json(&output)).len(), 15);
    assert_eq!(entries(&folder), ["ckpt_similarity.json"]);
}

#[cfg(unix)]
#[test]
fn a_dangling_link_in_the_place_of_the_result_is_not_followed() {
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("elsewhere");
    std::os::unix::fs::symlink(&target, folder.path().join("ckpt_similarity.json")).unwrap();
    Run::of(&mut in_folder(&folder)).refuses(&["the file exists"]);
    assert!(!target.exists());
}

#[test]
fn a_folder_for_the_result_must_exist_and_be_no_result() {
    let folder = TempDir::new().unwrap();
    let run = Run::of(in_folder(&folder).args(["-o", "no/such/result.json"]));
    run.refuses(&["no/such/result.json: the folder no/such does not exist"]);
    Run::of(in_folder(&folder).args(["-o", "."])).refuses(&[".: is a folder"]);
    assert_eq!(entries(&folder), [""; 0]);
}

#[test]
fn a_dash_puts_json_alone_on_standard_output_and_the_screen_on_standard_error() {
    let folder = TempDir::new().unwrap();
    let run = Run::of(in_folder(&folder).args(["-o", "-"]));
    assert_all_equal(&run);
    assert_eq!(entries(&folder), [""; 0]);
    let on_screen = screen(&small(), &small(), &[]);
    assert_eq!(run.stderr, on_screen.stdout.replace('\\', "/"));
}

#[cfg(unix)]
#[test]
fn the_file_has_the_mode_that_the_umask_leaves() {
    use std::os::unix::fs::PermissionsExt;
    for (umask, mode) in [("022", 0o644), ("027", 0o640), ("077", 0o600)] {
        let folder = TempDir::new().unwrap();
        let mut shell = Command::new("sh");
        shell
            .current_dir(folder.path())
            .arg("-c")
            .arg(format!("umask {umask}; exec \"$0\" \"$@\""));
        shell.arg(env!("CARGO_BIN_EXE_ckptcmp")).arg("compare").args([small(), small()]);
        assert_eq!(Run::of(&mut shell).code, 0);
        let written = fs::metadata(folder.path().join("ckpt_similarity.json")).unwrap();
        assert_eq!(written.permissions().mode() & 0o777, mode, "umask {umask}");
    }
}

#[test]
fn a_comparison_without_a_single_tensor_leaves_no_file() {
    let folder = TempDir::new().unwrap();
    let run = Run::of(in_folder(&folder).args(["--include", "nothing.is.called.so"]));
    run.refuses(&["nothing to compare"]);
    assert_eq!(entries(&folder), [""; 0]);
}

#[cfg(unix)]
#[test]
fn force_replaces_what_a_link_leads_to_and_not_the_link() {
    let folder = TempDir::new().unwrap();
    let (target, link) = (folder.path().join("target"), folder.path().join("ckpt_similarity.json"));
    fs::write(&target, "mine").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    assert_eq!(Run::of(in_folder(&folder).arg("--force")).code, 0);
    assert!(link.symlink_metadata().unwrap().is_symlink());
    assert_eq!(names(&read_json(&target)).len(), 15);
}

#[cfg(unix)]
#[test]
fn a_pipe_is_written_into_without_force_and_stays_a_pipe() {
    use std::os::unix::fs::FileTypeExt;
    let folder = TempDir::new().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for flags in [&[][..], &["--force"]] {
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read_to_string(pipe).unwrap()
        });
        assert_eq!(Run::of(in_folder(&folder).arg("-o").arg(&pipe).args(flags)).code, 0);
        assert!(pipe.metadata().unwrap().file_type().is_fifo());
        let result: serde_json::Value = serde_json::from_str(&reader.join().unwrap()).unwrap();
        assert_eq!(result, compare(&small(), &small()).json());
    }
    assert_eq!(entries(&folder), ["pipe"]);
}
