//! Promise: only what is not found is absent. What is there and cannot be looked at is exit 2, and named.

#![cfg(unix)]

use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::common::{Copied, Run, ckptcmp, fixture};

fn check(path: &Path) -> Run {
    Run::of(ckptcmp().arg("check").arg(path))
}

/// Things in the place of a file or a folder that are there and cannot be read; root may read whatever it may not.
fn spoil(path: &Path, how: &str) {
    if path.is_dir() {
        fs::rename(path, path.with_extension("away")).unwrap();
    } else {
        fs::remove_file(path).unwrap();
    }
    match how {
        "a link to nowhere" => symlink("/no/such/place", path).unwrap(),
        "a loop of links" => symlink(path, path).unwrap(),
        "a link through a file" => symlink("/dev/null/inside", path).unwrap(),
        _ => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
    }
}

const LINKS: [&str; 3] = ["a link to nowhere", "a loop of links", "a link through a file"];

#[test]
fn what_cannot_be_looked_at_is_named_and_never_taken_for_absent() {
    for (source, inside) in [
        ("deepspeed/zero/universal-from-z1", "global_step2_universal/zero"),
        ("torch_dist/gpt-small/tp2pp2", "iter_0000005/common.pt"),
        ("layouts/gpt-small/tp2", "iter_0000005/mp_rank_01"),
        ("layouts/gpt-small/tp2", "iter_0000005/mp_rank_01/model_optim_rng.pt"),
        ("optimizer/dense/tp2dp2-distributed", "iter_0000002/mp_rank_00/distrib_optim.pt"),
        ("hf/sharded", "config.json"),
        ("hf/sharded", "model.safetensors.index.json"),
        ("infinitrain/llama3/tp2pp2", "checkpoint_step_000007/rank_000001/trainer_state.json"),
        ("dcp/sharded", ".metadata"),
    ] {
        for how in LINKS {
            let copied = Copied::of(&fixture(source));
            let path = copied.path().join(inside);
            assert!(path.exists(), "{source}/{inside}");
            spoil(&path, how);
            let run = check(&copied.path());
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            assert!(
                run.code == 2 && run.stderr.contains(&name),
                "{source}: {inside}: {how}: {run:?}"
            );
        }
    }
}

/// A checkpoint of the zarr backend with two tensors.
fn zarr(folder: &Path) {
    let backend = r#"{"sharded_backend": "zarr", "sharded_backend_version": 1}"#;
    fs::write(folder.join("metadata.json"), backend).unwrap();
    for name in ["decoder.final_layernorm.weight", "embedding.word_embeddings.weight"] {
        let header = r#"{"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f4", "order": "C",
            "compressor": null, "filters": null, "fill_value": null}"#;
        fs::create_dir(folder.join(name)).unwrap();
        fs::write(folder.join(name).join(".zarray"), header).unwrap();
        fs::write(folder.join(name).join("0"), [0; 8]).unwrap();
    }
}

#[test]
fn an_array_of_zarr_that_is_no_folder_is_named() {
    const NAME: &str = "decoder.final_layernorm.weight";
    for how in ["a file", LINKS[0], LINKS[1], LINKS[2]] {
        let folder = tempfile::tempdir().unwrap();
        zarr(folder.path());
        assert_eq!(check(folder.path()).code, 0);
        let path = folder.path().join(NAME);
        fs::remove_dir_all(&path).unwrap();
        fs::write(&path, "").unwrap();
        if how != "a file" {
            spoil(&path, how);
        }
        let run = check(folder.path());
        assert!(run.code == 2 && run.stderr.contains(NAME), "{how}: {run:?}");
        assert_eq!(run.stderr.lines().count(), 1, "{how}: {run:?}");
    }
}

#[test]
fn pipes_and_devices_are_refused_at_once_wherever_a_file_is_looked_for() {
    for (source, inside) in [
        ("layouts/gpt-small/tp2", "latest_checkpointed_iteration.txt"),
        ("layouts/gpt-small/tp2", "iter_0000005/mp_rank_01/model_optim_rng.pt"),
        ("hf/sharded", "model.safetensors.index.json"),
        ("dcp/sharded", ".metadata"),
    ] {
        for is_pipe in [true, false] {
            let copied = Copied::of(&fixture(source));
            let path = copied.path().join(inside);
            fs::write(&path, "").unwrap();
            match is_pipe {
                true => spoil(&path, "a pipe"),
                false => {
                    fs::remove_file(&path).unwrap();
                    symlink("/dev/zero", &path).unwrap();
                }
            }
            let run = check(&copied.path());
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            assert!(run.code == 2 && run.stderr.contains(&name), "{source}: {inside}: {run:?}");
        }
    }
    let run = check(Path::new("/dev/zero"));
    run.refuses(&["/dev/zero: cannot be read: neither a file nor a folder"]);
}

/// A program that is stopped while it reads, and goes on when a file of it was rewritten in place and its time of
/// modification set back: no result may be a mixture of both.
#[cfg(target_os = "linux")]
#[test]
fn a_file_rewritten_meanwhile_is_told_though_its_time_is_set_back() {
    const LEN: usize = 12 << 20;
    let signal = |signal: &str, id: u32| {
        assert!(Command::new("kill").args([signal, &id.to_string()]).status().unwrap().success());
    };
    let folder = tempfile::tempdir().unwrap();
    let [path, other] = ["a.safetensors", "b.safetensors"].map(|name| folder.path().join(name));
    let header =
        format!(r#"{{"w": {{"dtype": "U8", "shape": [{LEN}], "data_offsets": [0, {LEN}]}}}}"#);
    let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    for path in [&path, &other] {
        fs::write(path, [head.clone(), vec![1; LEN]].concat()).unwrap();
    }
    let command = || {
        let mut command = ckptcmp();
        command.args(["compare", "-o", "-", "--threads", "1"]).args([&path, &other]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let start = Instant::now();
    assert_eq!(Run::of(&mut command()).code, 0);
    let took = start.elapsed();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut told = 0;
    for run in 0..12 {
        let child = command().spawn().unwrap();
        std::thread::sleep(took * run / 12);
        signal("-STOP", child.id());
        let bytes = vec![if run % 2 == 0 { 2 } else { 1 }; LEN];
        file.write_all_at(&bytes, head.len() as u64).unwrap();
        file.set_modified(modified).unwrap();
        signal("-CONT", child.id());
        let output = child.wait_with_output().unwrap();
        if output.status.code() == Some(2) {
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains("a.safetensors: changed while it was read"), "{stderr}");
            told += 1;
            continue;
        }
        let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let differing = result["w"]["l2"].as_f64().unwrap().powi(2).round();
        assert!(differing == 0.0 || differing == LEN as f64, "a mixture: {result}");
    }
    assert!(told > 0, "the file was never caught");
}
