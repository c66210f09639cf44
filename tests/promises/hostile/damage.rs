//! Files that are cut off, changed or shrink: found or refused, in little memory.

use std::fs::{self, File};

use ckptcmp::base::side::Side;
use ckptcmp::compare::Outcome;
use ckptcmp::containers::torch::{TorchFile, ValueId};
use ckptcmp::pairing::{Selection, pair};
use ckptcmp::storage::FileSet;

use crate::common::crafted::compare;
use crate::common::damage::{Victim, pick, random};
use crate::common::{files, in_process, layout};

/// Small checkpoints of every container, and one whose experts are taken apart.
const SAMPLES: [&str; 4] =
    ["gpt-small/tp2", "gpt/nonzip-tp2", "gpt/mindtorch-tp2", "moe/grouped-ep2"];

/// The last shard of a sample.
fn victim(sample: &str) -> Victim {
    let sample = layout(sample);
    let mut shards = files(&sample);
    shards.retain(|file| file.extension().is_some_and(|extension| extension == "pt"));
    Victim::new(&sample, shards.pop().unwrap().strip_prefix(&sample).unwrap())
}

/// The bytes that are no storage: pickles, zip headers, the zip directory.
fn structure(victim: &Victim) -> Vec<usize> {
    let mut files = FileSet::default();
    let id = files.add(victim.file()).unwrap();
    let torch = TorchFile::open(&files, files.whole(id)).unwrap();
    let mut is_data = vec![false; victim.bytes().len()];
    storages(&torch, torch.root(), 0, &mut is_data);
    (0..is_data.len()).filter(|&at| !is_data[at]).collect()
}

fn storages(torch: &TorchFile, id: ValueId, depth: usize, is_data: &mut [bool]) {
    if let Some(tensor) = torch.tensor(id).unwrap() {
        let storage = tensor.storage();
        let [start, len] = [storage.offset, storage.len].map(|at| usize::try_from(at).unwrap());
        return is_data[start..start + len].fill(true);
    }
    for (_, member) in torch.values().mapping(id).into_iter().flatten() {
        if depth < 8 {
            storages(torch, member, depth + 1, is_data);
        }
    }
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    for sample in SAMPLES {
        victim(sample).any_cut_is_refused(200);
    }
}

#[test]
fn the_command_says_that_a_file_is_cut_off() {
    for sample in SAMPLES {
        let victim = victim(sample);
        for number in 0..8 {
            fs::write(victim.file(), &victim.bytes()[..victim.bytes().len() * number / 8]).unwrap();
            let context = format!("{sample}, {number} eighths");
            let run = compare(&context, &victim.path(), &layout(sample));
            assert_eq!(run.code, 2, "{context}");
            assert!(run.stderr.contains("model_optim_rng.pt"), "{context}: {}", run.stderr);
        }
    }
}

#[test]
fn any_changed_byte_of_the_structure_is_found_or_refused() {
    for (turn, sample) in SAMPLES.into_iter().enumerate() {
        let victim = victim(sample);
        let structure = structure(&victim);
        let place = |number| structure[pick(turn * 1_000_003 + number, structure.len())];
        victim.any_changed_byte_is_found_or_refused((0..2000).map(place), |_| true);
    }
}

#[test]
fn the_command_survives_changed_bytes_in_little_memory() {
    for (turn, sample) in SAMPLES.into_iter().enumerate() {
        let victim = victim(sample);
        let structure = structure(&victim);
        for number in 0..40 {
            let seed = 77_000_000 + turn * 1000 + number;
            let mut bytes = victim.bytes().to_vec();
            bytes[structure[pick(seed, structure.len())]] =
                random(seed as u64 + 500).to_le_bytes()[0];
            fs::write(victim.file(), bytes).unwrap();
            compare(&format!("{sample}, change {number}"), &victim.path(), &layout(sample));
        }
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_unreadable() {
    let victim = victim("gpt-small/tp2");
    let [a, b] =
        [layout("gpt-small/tp1"), victim.path()].map(|path| in_process::open(&path).unwrap());
    let pairing = pair(&a, &b, &Selection::default());
    File::options().write(true).open(victim.file()).unwrap().set_len(100).unwrap();
    let found = in_process::compare(&pairing, &a, &b);
    assert_eq!(found.len(), pairing.pairs.len());
    for tensor in &found {
        let Outcome::Unreadable(error) = &tensor.outcome else { panic!("{tensor:?}") };
        assert_eq!((error.side, error.file.as_path()), (Side::B, victim.file()));
    }
    assert_eq!(b.files.changed().map(|changed| changed.path), Some(victim.file()));
}
