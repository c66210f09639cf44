//! Promise: whatever happens to a file of a checkpoint, of any family, `check` finds it and names the file.
//!
//! Every kind of fault at every file that holds tensors. `cargo test --test promises faults:: -- --nocapture` prints the table.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Copied, Run, ckptcmp, files, fixture};

/// Sound checkpoints of every family.
const FAMILIES: &[(&str, &str)] = &[
    ("megatron torch", "layouts/gpt/tp2pp2"),
    ("megatron torch with optimizer", "optimizer/dense/tp2dp2-distributed"),
    ("megatron torch_dist", "torch_dist/gpt-small/tp2pp2"),
    ("dcp", "dcp/sharded"),
    ("dcp, a metadata for each rank", "dcp/per-rank"),
    ("dcp, zstd", "dcp/zstd"),
    ("dcp, safetensors", "dcp/safetensors"),
    ("fsdp's ranks", "fsdp/replicas"),
    ("hf, parts with an index", "hf/sharded"),
    ("hf, torch parts with an index", "hf/bin-sharded"),
    ("deepspeed zero 1", "deepspeed/zero/z1"),
    ("deepspeed zero 3", "deepspeed/zero/z3"),
    ("deepspeed pipeline", "deepspeed/zero/pipe"),
    ("deepspeed universal", "deepspeed/zero/universal-from-z1"),
    ("neox", "deepspeed/neox/tp2pp2"),
    ("infinitrain", "infinitrain/llama3/tp2pp2"),
];

/// A kind of fault: what it is called, how a file is damaged, and the exit codes that tell it.
type Fault = (&'static str, fn(&Path), &'static [i32]);

const FAULTS: &[Fault] = &[
    ("missing", |file| fs::remove_file(file).unwrap(), &[2]),
    ("empty", |file| fs::write(file, "").unwrap(), &[2]),
    ("cut off", cut_off, &[2]),
    ("all zeros", zeros, &[2]),
    ("LFS pointer", pointer, &[2]),
    ("trailing bytes", trailing, &[1, 2]),
];

fn cut_off(file: &Path) {
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() * 2 / 3]).unwrap();
}

fn zeros(file: &Path) {
    fs::write(file, vec![0; fs::read(file).unwrap().len()]).unwrap();
}

fn pointer(file: &Path) {
    let text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    fs::write(file, text).unwrap();
}

fn trailing(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    bytes.extend_from_slice(b"left behind the end");
    fs::write(file, bytes).unwrap();
}

const ENDINGS: [&str; 6] = ["pt", "bin", "ckpt", "safetensors", "distcp", "metadata"];

/// The files that hold tensors or say where they are; without `common.pt`, which a reader may do without.
fn data_files(folder: &Path) -> Vec<PathBuf> {
    let is_data = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // A universal checkpoint counts its steps in files, and keeps a copy of the groups: no tensors of either section.
        let is_state = ["common.pt", "step.pt", "optimizer_state.pt"].contains(&name.as_str());
        !is_state && ENDINGS.iter().any(|ending| name.ends_with(&format!(".{ending}")))
    };
    files(folder).into_iter().filter(is_data).collect()
}

fn check(path: &Path) -> Run {
    Run::of(ckptcmp().arg("check").arg(path))
}

#[test]
fn every_fault_of_every_file_is_found_and_the_file_named() {
    let mut missed = Vec::new();
    let names: Vec<&str> = FAULTS.iter().map(|(name, ..)| *name).collect();
    println!("| family | {} |", names.join(" | "));
    for (family, path) in FAMILIES {
        let source = fixture(path);
        assert_eq!(check(&source).code, 0, "{family}: {:?}", check(&source));
        let paths = data_files(&source);
        assert!(!paths.is_empty(), "{family}");
        let mut row = Vec::new();
        for (fault, damage, codes) in FAULTS {
            let mut found = 0;
            for path in &paths {
                let copied = Copied::of(&source);
                let inside = path.strip_prefix(&source).unwrap();
                damage(&copied.path().join(inside));
                let run = check(&copied.path());
                let file = inside.file_name().unwrap().to_string_lossy().into_owned();
                let said = format!("{}{}", run.stdout, run.stderr);
                if codes.contains(&run.code) && said.contains(&file) {
                    found += 1;
                } else {
                    missed.push(format!("{family}: {fault}: {}: {run:?}", inside.display()));
                }
            }
            row.push(format!("{found}/{}", paths.len()));
        }
        println!("| {family} | {} |", row.join(" | "));
    }
    assert!(missed.is_empty(), "{} faults missed:\n{}", missed.len(), missed.join("\n"));
}

#[test]
fn a_file_that_belongs_to_nothing_is_named_in_every_family() {
    for (family, path) in FAMILIES {
        let copied = Copied::of(&fixture(path));
        let file = data_files(&copied.path()).pop().unwrap();
        let ending = file.extension().unwrap().to_string_lossy().into_owned();
        // Metadata goes with data files: a second one of those is what may be left over.
        let ending = if ending == "metadata" { "distcp".to_owned() } else { ending };
        fs::copy(&file, file.with_file_name(format!("left_over.{ending}"))).unwrap();
        let run = check(&copied.path());
        let said = format!("{}{}", run.stdout, run.stderr);
        assert!(run.code > 0 && said.contains(&format!("left_over.{ending}")), "{family}: {run:?}");
    }
}
