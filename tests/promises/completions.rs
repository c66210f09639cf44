//! Promise: shells and manual pages know what the command line knows.

#![cfg(unix)]

use std::process::Command;

use crate::common::{Run, ckptcmp};
use tempfile::TempDir;

const COMMANDS: [&str; 6] = ["compare", "check", "inspect", "explain-rules", "completions", "man"];

/// The completions of the last of these words.
fn completed(words: &[&str]) -> Vec<String> {
    let mut command = ckptcmp();
    command.env("CKPTCMP_COMPLETE", "bash").env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_INDEX", words.len().to_string());
    let run = Run::of(command.args(["--", "ckptcmp"]).args(words));
    assert_eq!((run.code, &*run.stderr), (0, ""));
    run.stdout.lines().map(str::to_owned).collect()
}

#[test]
fn commands_options_and_their_values_are_completed() {
    assert_eq!(completed(&["comp"]), ["compare", "completions"]);
    assert_eq!(completed(&["compare", "--rto"]), ["--rtol"]);
    assert_eq!(completed(&["compare", "--section", "model,o"]), ["model,optimizer"]);
    assert_eq!(completed(&["compare", "--metrics", "rel_l2,max_u"]), ["rel_l2,max_ulp"]);
    assert_eq!(completed(&["inspect", "--format", "infi"]), ["infinitrain"]);
    assert_eq!(completed(&["man", "explain"]), ["explain-rules"]);
    assert_eq!(completed(&["completions", "z"]), ["zsh"]);
}

#[test]
fn bash_completes_by_what_it_is_told_to_run() {
    let script = Run::of(ckptcmp().args(["completions", "bash"])).stdout;
    let folder = TempDir::new().unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ckptcmp"), folder.path().join("ckptcmp"))
        .unwrap();
    let path = std::env::var("PATH").unwrap();
    let asked = "COMP_WORDS=(ckptcmp check --se); COMP_CWORD=2; COMP_TYPE=9
        _clap_complete_ckptcmp ckptcmp --se check; echo \"${COMPREPLY[*]}\"";
    let bash = Command::new("bash")
        .args(["--norc", "-c", &format!("{script}\n{asked}")])
        .env("PATH", format!("{}:{path}", folder.path().display()))
        .output()
        .unwrap();
    let found = String::from_utf8(bash.stdout).unwrap();
    assert_eq!(found.split_whitespace().collect::<Vec<_>>(), ["--section", "--set"]);
}

#[test]
fn every_command_has_a_page_with_all_its_options_and_examples() {
    let folder = TempDir::new().unwrap();
    let man = || Run::of(ckptcmp().args(["man", "-o"]).arg(folder.path()));
    assert_eq!(man().code, 0);
    let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(page("ckptcmp.1").contains("explain\\-rules"));
    for command in COMMANDS {
        let page = page(&format!("ckptcmp-{command}.1"));
        let alone = Run::of(ckptcmp().args(["man", command])).stdout;
        assert_eq!(alone, page);
        let help = Run::of(ckptcmp().args([command, "--help"])).stdout;
        let words = help.split_whitespace().filter(|word| word.starts_with("--") && word.len() > 2);
        let options = words.map(|word| word.trim_matches(|letter: char| !letter.is_alphanumeric()));
        for option in options {
            let escaped = option.replace('-', "\\-");
            assert!(page.contains(&escaped), "{command}: no {option}");
        }
        assert!(page.contains(".SH EXAMPLES\n.nf\n"), "{command}");
    }
    // Pages that are there are not overwritten unasked.
    assert_eq!(man().code, 2);
    let forced = Run::of(ckptcmp().args(["man", "--force", "-o"]).arg(folder.path()));
    assert_eq!(forced.code, 0);
    Run::of(ckptcmp().args(["man", "nonsense"])).refuses(&["nonsense"]);
}
