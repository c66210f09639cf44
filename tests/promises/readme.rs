//! Promise: README shows what the commands in it print.

use std::fs;
use std::path::Path;

use crate::common::{Run, ckptcmp};
use tempfile::TempDir;

/// Begins a command of README's and what it prints.
const BLOCK: &str = "```text\n$ ckptcmp ";

#[test]
fn every_screen_in_readme_is_what_its_command_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap().replace("\r\n", "\n");
    let mut shown = 0;
    for block in readme.split(BLOCK).skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        let (command, screen) = block.split_once('\n').unwrap();
        let words: Vec<&str> = command.split_whitespace().collect();
        let folder = TempDir::new().unwrap();
        let result = folder.path().join("ckpt_similarity.json");
        let mut run = ckptcmp();
        run.current_dir(root).args(&words);
        if words[0] == "compare" {
            run.arg("-o").arg(&result);
        }
        let printed =
            Run::of(&mut run).stdout.replace(&*result.to_string_lossy(), "ckpt_similarity.json");
        assert_eq!(printed, screen, "{command}");
        shown += 1;
    }
    assert!(shown >= 5, "{shown} screens");
}
