//! Promise: the same inputs give the same bytes, for any number of threads, any run, any layout of the same weights.

use std::fs;
use std::path::Path;

use crate::common::crafted::{P, dict, tensor_of, zip};
use crate::common::{self, Copied, Run, compare_with, flip, layout, models, screen};
use tempfile::TempDir;

const GPT: [(&str, [usize; 2]); 5] = [
    ("embedding.word_embeddings.weight", [49, 7]),
    ("decoder.layers.0.mlp.linear_fc1.weight", [0, 0]),
    ("decoder.layers.3.mlp.linear_fc1.weight", [13, 5]),
    ("decoder.layers.5.self_attention.linear_qkv.weight", [9, 1]),
    ("output_layer.weight", [0, 3]),
];

const MOE: [(&str, [usize; 2]); 3] = [
    ("decoder.layers.1.mlp.router.weight", [3, 0]),
    ("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", [1, 1]),
    ("decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight", [7, 2]),
];

fn changed(path: &str, elements: &[(&str, [usize; 2])]) -> Copied {
    let copied = Copied::of(&layout(path));
    for (tensor, index) in elements {
        flip(&copied.path(), tensor, index);
    }
    copied
}

/// Every layout of a model against one changed checkpoint gives one result.
fn assert_same_for_every_layout(model: &str, other: &Path, differing: usize) {
    let flags = ["--vocab-size", "50", "--metrics", "all"];
    let mut first: Option<[String; 2]> = None;
    for path in &models()[model] {
        let runs = [
            compare_with(&layout(path), other, &flags),
            compare_with(other, &layout(path), &flags),
        ];
        assert_eq!(runs.each_ref().map(|run| run.code), [1, 1], "{path}: {}", runs[0].stderr);
        let results = runs.map(|run| run.stdout);
        let first = first.get_or_insert_with(|| results.clone());
        assert_eq!(&results, first, "{path}");
    }
    let result = serde_json::from_str(&first.unwrap()[0]).unwrap();
    assert_eq!(common::differing(&result).len(), differing, "{model}");
}

#[test]
fn every_layout_of_a_gpt_gives_the_same_bytes_against_another_checkpoint() {
    let other = changed("gpt/tp1", &GPT);
    assert_same_for_every_layout("gpt", &other.path(), GPT.len());
}

#[test]
fn the_other_checkpoint_may_be_sharded_too() {
    let other = changed("gpt/tp2pp2", &GPT);
    assert_same_for_every_layout("gpt", &other.path(), GPT.len());
}

#[test]
fn every_layout_of_an_moe_gives_the_same_bytes_against_another_checkpoint() {
    let other = changed("moe/seq-tp2ep2", &MOE);
    assert_same_for_every_layout("moe", &other.path(), MOE.len());
}

/// The JSON and the screen of a comparison.
fn both(a: &Path, b: &Path, flags: &[&str]) -> (String, String) {
    let metrics = [&["--metrics", "all"], flags].concat();
    (compare_with(a, b, &metrics).stdout, screen(a, b, flags).stdout)
}

#[test]
fn threads_and_repetition_change_no_byte() {
    let other = changed("gpt/tp2pp2", &GPT);
    let a = layout("gpt/pp3vpp2");
    let first = both(&a, &other.path(), &[]);
    assert!(first.1.contains("different: 5 of"), "{}", first.1);
    for threads in ["1", "2", "7"] {
        for _ in 0..3 {
            assert_eq!(
                both(&a, &other.path(), &["--threads", threads]),
                first,
                "{threads} threads"
            );
        }
    }
}

/// A file as `torch.save` writes it, with one float32 matrix below `model`.
fn torch_file(name: &str, rows: usize, columns: usize, values: &[f32]) -> Vec<u8> {
    let [rows, columns] = [rows, columns].map(|size| size as u64);
    let matrix = tensor_of("0", rows * columns, 0, &[rows, columns], &[columns, 1]);
    let object = dict([("checkpoint_version", P::Int(3)), ("model", dict([(name, matrix)]))]);
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    zip(&[("w/data.pkl".to_owned(), object.pickle()), ("w/data/0".to_owned(), bytes)])
}

/// Numbers of all sizes, the same for the same seed.
fn noise(count: usize, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let sign = seed & 0x8000_0000;
        f32::from_bits(sign | (110 + (seed >> 26) % 20) << 23 | (seed >> 5 & 0x007f_ffff))
    };
    (0..count).map(|_| next()).collect()
}

/// Sums over many blocks are where the order of threads could show.
#[test]
fn tensors_of_many_blocks_give_the_same_bytes_for_any_threads_and_any_cut() {
    const NAME: &str = "vision_projection.encoder.linear_fc2.weight";
    const ROWS: usize = 1024;
    const COLUMNS: usize = 1538;
    let folder = TempDir::new().unwrap();
    let write = |path: &str, columns: usize, values: &[f32]| {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, torch_file(NAME, ROWS, columns, values)).unwrap();
    };
    let (a, b) = (noise(ROWS * COLUMNS, 1), noise(ROWS * COLUMNS, 2));
    write("a/mp_rank_00/model_optim_rng.pt", COLUMNS, &a);
    write("b/mp_rank_00/model_optim_rng.pt", COLUMNS, &b);
    for (rank, half) in ["mp_rank_00", "mp_rank_01"].iter().zip([0, 1]) {
        let rows = a.chunks_exact(COLUMNS);
        let part = rows.flat_map(|row| row[half * COLUMNS / 2..][..COLUMNS / 2].to_vec());
        write(&format!("cut/{rank}/model_optim_rng.pt"), COLUMNS / 2, &part.collect::<Vec<_>>());
    }
    let path = |name: &str| folder.path().join(name);
    let result = |name: &str, threads: &str| -> Run {
        let run =
            compare_with(&path(name), &path("b"), &["--metrics", "all", "--threads", threads]);
        assert_eq!(run.code, 1, "{}", run.stderr);
        run
    };
    let first = result("a", "1");
    let entry = &first.json()[NAME];
    assert_eq!(common::sizes(&entry["shape"]), [ROWS, COLUMNS]);
    let pairs = a.iter().zip(&b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    let l2 = pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
    assert!((entry["l2"].as_f64().unwrap() / l2 - 1.0).abs() < 1e-10, "{entry}");
    for threads in ["1", "2", "7"] {
        assert_eq!(result("a", threads).stdout, first.stdout, "{threads} threads");
        assert_eq!(result("cut", threads).stdout, first.stdout, "{threads} threads, two ranks");
    }
    common::assert_all_equal(&common::compare(&path("a"), &path("cut")));
}
