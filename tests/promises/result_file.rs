//! Promise: the result goes where `-o` says, whole or not at all, and nothing is overwritten unasked.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{
    Copied, Run, assert_all_equal, ckptcmp, compare, layout, names, read_json, screen,
};
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
    let on_screen = screen(&small(), &small(), &[]).stdout.replace('\\', "/");
    let wrote = "\nwrote out.json\n";
    assert!(on_screen.contains(wrote), "{on_screen}");
    assert_eq!(run.stderr, on_screen.replace(wrote, ""));
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

#[test]
fn a_file_of_the_input_is_not_overwritten_even_by_force() {
    let copied = Copied::of(&layout("gpt-small/tp2"));
    let folder = TempDir::new().unwrap();
    let file = copied.path().join("iter_0000005/mp_rank_01/model_optim_rng.pt");
    let before = fs::read(&file).unwrap();
    let hard = folder.path().join("hard");
    fs::hard_link(&file, &hard).unwrap();
    let unread = copied.path().join("iter_0000005/mp_rank_01/notes.bin");
    fs::write(&unread, "mine").unwrap();
    let mut outputs = vec![
        file.clone(),
        hard,
        unread.clone(),
        copied.path().join("latest_checkpointed_iteration.txt"),
    ];
    #[cfg(unix)]
    {
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        outputs.push(link);
    }
    for output in outputs {
        for sides in [[copied.path(), small()], [small(), copied.path()]] {
            let mut command = ckptcmp();
            command.arg("compare").args(sides).arg("--force").arg("-o").arg(&output);
            Run::of(&mut command).refuses(&["which is not overwritten"]);
        }
    }
    assert!(fs::read(&file).unwrap() == before);
    assert_eq!(fs::read(&unread).unwrap(), b"mine");
    // A former result in the folder of a checkpoint is replaced as everywhere.
    let result = copied.path().join("ckpt_similarity.json");
    for _ in 0..2 {
        let mut command = ckptcmp();
        command.arg("compare").args([copied.path(), small()]).arg("--force").arg("-o").arg(&result);
        assert_eq!(Run::of(&mut command).code, 0);
    }
}

/// A command of the shell that runs the binary as `"$0" ...`.
#[cfg(target_os = "linux")]
fn shell(text: &str, folder: &TempDir) -> Run {
    let mut shell = Command::new("sh");
    shell.current_dir(folder.path()).arg("-c").arg(text).arg(env!("CARGO_BIN_EXE_ckptcmp"));
    Run::of(shell.arg(small()))
}

#[cfg(target_os = "linux")]
#[test]
fn a_result_that_standard_output_does_not_take_is_trouble() {
    let folder = TempDir::new().unwrap();
    for command in [
        r#""$0" compare "$1" "$1" -o - >&-"#,
        r#""$0" compare "$1" "$1" >&-"#,
        r#""$0" check "$1" --json >&-"#,
        r#""$0" inspect "$1" >&-"#,
    ] {
        shell(command, &folder).refuses(&["standard output is closed"]);
    }
    for command in [
        r#""$0" compare "$1" "$1" -o - >/dev/full"#,
        r#""$0" check "$1" --json >/dev/full"#,
        r#""$0" inspect "$1" --json >/dev/full"#,
        r#""$0" compare "$1" "$1" -o /dev/full"#,
    ] {
        shell(command, &folder).refuses(&["cannot be written: No space left on device"]);
    }
    let run =
        shell(r#"(sleep 1; "$0" inspect "$1" --json; echo $? >code) | true; cat code"#, &folder);
    assert_eq!(run.stdout, "2\n");
    // Who has seen enough of what people read is no trouble, and what is not written cannot get lost.
    let run = shell(r#"(sleep 1; "$0" inspect "$1"; echo $? >code) | true; cat code"#, &folder);
    assert_eq!(run.stdout, "0\n");
    assert_eq!(shell(r#""$0" compare "$1" "$1" --quiet -o result.json >&-"#, &folder).code, 0);
}

#[cfg(target_os = "linux")]
#[test]
fn more_threads_than_are_of_use_are_not_started() {
    let folder = TempDir::new().unwrap();
    // As many bytes of addresses would not suffice for the stacks of 100,000 threads.
    let text = r#"ulimit -v 4000000; "$0" compare "$1" "$1" --quiet --threads 100000"#;
    let run = shell(text, &folder);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
}
