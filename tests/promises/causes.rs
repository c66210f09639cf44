//! Promise: why tensors differ is told where a cause explains every value, and nothing is told otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::array::{Array, write_safetensors};
use crate::common::damage::random;
use crate::common::{Run, ckptcmp, compare_with, fixture, inspect, screen};

type Model = BTreeMap<String, Array>;

fn model(checkpoint: &Path) -> Model {
    let inspected = inspect(checkpoint);
    let tensors = inspected["tensors"].as_object().unwrap().iter();
    tensors.map(|(name, tensor)| (name.clone(), Array::of(tensor))).collect()
}

fn write(folder: &TempDir, file: &str, model: &Model) -> std::path::PathBuf {
    let path = folder.path().join(file);
    write_safetensors(&path, model.iter().map(|(name, array)| (name.as_str(), array)), &json!({}));
    path
}

/// The document of a comparison.
fn document(a: &Path, b: &Path, flags: &[&str]) -> (Run, Value) {
    let folder = TempDir::new().unwrap();
    let output = folder.path().join("result.json");
    let mut command = ckptcmp();
    command.arg("compare").args([a, b]).args(["--force", "--quiet", "--report", "-", "-o"]);
    let run = Run::of(command.arg(output).args(flags));
    let document = run.json();
    (run, document)
}

/// What is said of each tensor.
fn said(document: &Value) -> BTreeMap<String, String> {
    let found = document["causes"]["found"].as_array().unwrap();
    let of_cause = |cause: &Value| {
        let text = cause["text"].as_str().unwrap().to_owned();
        let tensors = cause["tensors"].as_array().unwrap().clone();
        tensors.into_iter().map(move |name| (name.as_str().unwrap().to_owned(), text.clone()))
    };
    found.iter().flat_map(of_cause).collect()
}

fn differing(document: &Value) -> BTreeSet<String> {
    let tensors = document["tensors"].as_array().unwrap().iter();
    let fails = tensors.filter(|tensor| tensor["passes"] == false);
    fails.map(|tensor| tensor["name"].as_str().unwrap().to_owned()).collect()
}

fn values(array: &Array) -> Vec<f32> {
    match array.dtype.as_str() {
        "float32" => array.bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        "bfloat16" => {
            let bits = array.bytes.as_chunks().0.iter().map(|x| u32::from(u16::from_le_bytes(*x)));
            bits.map(|bits| f32::from_bits(bits << 16)).collect()
        }
        other => panic!("{other}"),
    }
}

/// Number of different values.
fn different(array: &Array) -> usize {
    values(array).into_iter().map(f32::to_bits).collect::<BTreeSet<_>>().len()
}

/// Each value changed by its number, and rounded to the dtype that it had.
fn changed(array: &Array, change: impl Fn(usize, f32) -> f32) -> Array {
    let changed = values(array).into_iter().enumerate().map(|(at, value)| change(at, value));
    let bytes = match array.dtype.as_str() {
        "float32" => changed.flat_map(f32::to_le_bytes).collect(),
        _ => changed.flat_map(|value| bfloat16(value).to_le_bytes()).collect(),
    };
    Array { bytes, ..array.clone() }
}

fn bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    u16::try_from((bits + 0x7fff + (bits >> 16 & 1)) >> 16).unwrap()
}

/// Models of several families, in several formats.
const MODELS: [&str; 7] = [
    "megatron/llama-bf16/B/tp1pp1-torch",
    "megatron/moe-grouped-bf16/A/tp1pp1ep2-torch",
    "megatron/gpt2-fp32/B/tp1pp1-torch",
    "torch_dist/gpt-small/tp2pp2",
    "deepspeed/neox/tp2pp2",
    "hf/single",
    "hf/gpt2",
];

/// A cause: the part of the names of the tensors that it changes, what it does, what is said.
type Injection = (&'static str, fn(&Array) -> Array, &'static str);

const INJECTIONS: [Injection; 7] = [
    (
        "linear_fc1.weight",
        |array| {
            let rows = array.shape[0];
            array.rows((0..rows).map(|row| (row + rows / 2) % rows))
        },
        "gate and up are swapped|rows: the two halves are swapped",
    ),
    (
        "down_proj.weight",
        |array| {
            let rows = array.shape[0];
            array.rows((0..rows).rev())
        },
        "the same rows in another order; the first: 4 of 4 moved, 0 of a is 3 of b",
    ),
    (
        "norm.weight",
        |array| changed(array, |_, value| value + 1.0),
        "a is b + 1 (zero-centred gamma on one side)",
    ),
    ("embed", |array| changed(array, |_, value| value * -3.0), "a is -3 times b"),
    ("dense", |array| changed(array, |_, value| value * 2.0), "a is 2 times b ("),
    ("fc2.weight", |array| changed(array, |_, _| 0.0), "all zeros in a"),
    ("c_attn.weight", |array| changed(array, |_, value| -value), "a is -1 times b (negated)"),
];

#[test]
fn causes_that_explain_every_value_are_named_in_every_format() {
    let mut tried = BTreeMap::new();
    for path in MODELS {
        let checkpoint = fixture(path);
        let b = model(&checkpoint);
        for (part, change, expected) in INJECTIONS {
            let is_changed =
                |name: &str, array: &Array| name.contains(part) && different(array) > 16;
            let a: Model = b
                .iter()
                .map(|(name, array)| {
                    let array = if is_changed(name, array) { change(array) } else { array.clone() };
                    (name.clone(), array)
                })
                .collect();
            let folder = TempDir::new().unwrap();
            let a = write(&folder, "model.safetensors", &a);
            let (run, document) = document(&a, &checkpoint, &[]);
            let differing = differing(&document);
            let said = said(&document);
            assert_eq!(
                said.keys().cloned().collect::<BTreeSet<_>>(),
                differing,
                "{path}, {part}: {}",
                run.stderr
            );
            for (name, said) in said {
                assert!(
                    expected.split('|').any(|one| said.contains(one)),
                    "{path}, {name}: {said}"
                );
            }
            *tried.entry(part).or_insert(0) += usize::from(!differing.is_empty());
        }
    }
    assert!(tried.values().all(|count| *count > 0), "{tried:?}");
}

#[test]
fn heads_in_another_order_are_told_whatever_the_layout_of_the_other_side() {
    // Groups of two query heads, a key head and a value head of 4 rows each.
    let checkpoint = fixture("megatron/llama-bf16/A/tp1pp2-first3-torch");
    let b = model(&checkpoint);
    let swapped = |at: usize| at / 16 * 16 + [0, 1, 3, 2][at % 16 / 4] * 4 + at % 4;
    let a: Model = b
        .iter()
        .map(|(name, array)| match name.contains("linear_qkv") {
            true => (name.clone(), array.rows((0..array.shape[0]).map(swapped))),
            false => (name.clone(), array.clone()),
        })
        .collect();
    let folder = TempDir::new().unwrap();
    let a = write(&folder, "model.safetensors", &a);
    let run = screen(&a, &checkpoint, &[]);
    let line = "8 of 8 self_attention.linear_qkv.weight: key and value are swapped\n";
    assert!(run.stdout.contains("\nwhy: 8 of 8 tensors explained exactly\n"), "{}", run.stdout);
    assert!(run.stdout.contains(line), "{}", run.stdout);
    let causes = run.stdout.lines().skip_while(|line| !line.starts_with("why"));
    assert!(causes.take(2).all(|line| line.chars().count() <= 80));
    let quiet = screen(&a, &checkpoint, &["--no-causes"]);
    assert!(!quiet.stdout.contains("why:"), "{}", quiet.stdout);
    let (_, document) = document(&a, &checkpoint, &["--no-causes"]);
    assert_eq!(document["causes"], Value::Null);
    let threads = |count: &str| screen(&a, &checkpoint, &["--threads", count]).stdout;
    assert_eq!(threads("1"), threads("7"));
}

#[test]
fn layers_and_experts_at_another_place_are_told() {
    let checkpoint = fixture("megatron/moe-grouped-bf16/A/tp1pp1ep2-torch");
    let b = model(&checkpoint);
    let renamed = |from: [&str; 2]| -> Model {
        let other = |name: &str| {
            let [one, two] = from;
            if name.contains(one) { name.replace(one, two) } else { name.replace(two, one) }
        };
        b.iter().map(|(name, array)| (other(name), array.clone())).collect()
    };
    for (names, expected) in [
        ([".layers.0.", ".layers.2."], "layers 0 and 2 are swapped"),
        ([".local_experts.1.", ".local_experts.3."], "experts 1 and 3 are swapped"),
    ] {
        let folder = TempDir::new().unwrap();
        let a = write(&folder, "model.safetensors", &renamed(names));
        let (run, document) = document(&a, &checkpoint, &[]);
        let said = said(&document);
        assert_eq!(
            said.keys().cloned().collect::<BTreeSet<_>>(),
            differing(&document),
            "{}",
            run.stderr
        );
        assert!(!said.is_empty() && said.values().all(|said| said.ends_with(expected)), "{said:?}");
    }
}

#[test]
fn of_noise_no_cause_is_told() {
    let sizes: [&[usize]; 6] = [&[64, 32], &[32, 32], &[32], &[8], &[1], &[2, 12, 8]];
    let names = ["qkv_proj.weight", "o_proj.weight", "bias", "norm.weight", "gate_up_proj"];
    let number = |at: u64| random(at) as f64 / (1u64 << 44) as f64 - 0.5;
    let mut models = [Model::new(), Model::new()];
    for tensor in 0..300_usize {
        let shape = sizes[tensor % sizes.len()].to_vec();
        let count: usize = shape.iter().product();
        let of = |seed: usize| -> Vec<f64> {
            (0..count).map(|at| number((tensor * 2 + seed) as u64 * 10_000 + at as u64)).collect()
        };
        let (noise, b) = (of(0), of(1));
        let pairs = b.iter().zip(&noise);
        let (a, b): (Vec<f64>, Vec<f64>) = match tensor % 7 {
            0 => (noise, b),
            1 => (pairs.map(|(b, noise)| b * (1.0 + 1e-2 * noise)).collect(), b),
            2 => (pairs.map(|(b, noise)| b + 1e-2 * noise).collect(), b),
            3 => (pairs.map(|(b, noise)| if *noise > 0.49 { 0.5 } else { *b }).collect(), b),
            4 => (noise.iter().map(|noise| 1.0 + 0.01 * noise).collect(), vec![1.0; count]),
            5 => (vec![0.5; count], vec![1.0; count]),
            _ => {
                (noise.iter().map(|x| x.signum()).collect(), b.iter().map(|x| x.signum()).collect())
            }
        };
        let name = format!("model.layers.{tensor}.{}", names[tensor % names.len()]);
        for (model, values) in models.iter_mut().zip([a, b]) {
            #[expect(clippy::cast_possible_truncation, reason = "that is wanted")]
            let single =
                Array::float32(&values.iter().map(|value| *value as f32).collect::<Vec<_>>());
            let bytes = values_as(tensor, &single);
            model.insert(name.clone(), Array { shape: shape.clone(), ..bytes });
        }
    }
    let folder = TempDir::new().unwrap();
    let [a, b] = ["a.safetensors", "b.safetensors"];
    let (a, b) = (write(&folder, a, &models[0]), write(&folder, b, &models[1]));
    let (_, document) = document(&a, &b, &[]);
    assert!(differing(&document).len() > 250, "{}", differing(&document).len());
    assert_eq!(document["causes"]["searched"], differing(&document).len());
    assert_eq!(said(&document), BTreeMap::new());
}

/// Some tensors in `bfloat16`.
fn values_as(tensor: usize, single: &Array) -> Array {
    match tensor % 2 {
        0 => single.clone(),
        _ => {
            let halves = values(single).into_iter().flat_map(|value| bfloat16(value).to_le_bytes());
            Array { dtype: "bfloat16".to_owned(), shape: Vec::new(), bytes: halves.collect() }
        }
    }
}

#[test]
fn rounded_overflown_and_transposed_tensors_and_single_rows_are_told() {
    const SIZE: usize = 32;
    let number = |at: usize| (random(at as u64) >> 20) as f32 / 1e5 - 80.0;
    let matrix = |of: &dyn Fn(usize) -> f32| {
        let values: Vec<f32> = (0..SIZE * SIZE).map(of).collect();
        Array { shape: vec![SIZE, SIZE], ..Array::float32(&values) }
    };
    let b = matrix(&number);
    let large = matrix(&|at| number(at) * 2000.0);
    let is_far = |at: usize| (number(at) * 2000.0).abs() > 65504.0;
    let halved = matrix(&|at| match is_far(at) {
        true => f32::INFINITY.copysign(number(at)),
        false => number(at) * 2000.0,
    });
    let in_rows = |at: usize| (8..12).contains(&(at / SIZE));
    let in_columns = |at: usize| at % SIZE == 5;
    let garbage = matrix(&|at| f32::from_bits(u32::try_from(random(at as u64) >> 12).unwrap()));
    for (a, b, expected) in [
        (
            changed(&b, |_, x| f32::from_bits(u32::from(bfloat16(x)) << 16)),
            &b,
            "a is b rounded to bfloat16",
        ),
        (halved, &large, "Inf in a where b is beyond the range of float16"),
        (b.transposed(), &b, "transposed"),
        (
            changed(&b, |at, x| if in_rows(at) { number(at + 9999) } else { x }),
            &b,
            "only rows 8-11 differ",
        ),
        (
            changed(&b, |at, x| if in_columns(at) { x + 1.5 } else { x }),
            &b,
            "only column 5 differs",
        ),
        (garbage, &b, "a holds memory that nobody wrote: magnitudes without any order"),
    ] {
        let folder = TempDir::new().unwrap();
        let one =
            |array: &Array| Model::from([("model.layers.0.weight".to_owned(), array.clone())]);
        let (a, b) =
            (write(&folder, "a.safetensors", &one(&a)), write(&folder, "b.safetensors", &one(b)));
        let (_, document) = document(&a, &b, &[]);
        assert_eq!(said(&document).into_values().collect::<Vec<_>>(), [expected]);
    }
}

#[test]
fn equal_checkpoints_have_no_causes() {
    let checkpoint = fixture("hf/single");
    let (run, document) = document(&checkpoint, &fixture("hf/sharded"), &[]);
    assert_eq!(run.code, 0);
    assert_eq!(
        document["causes"],
        json!({"searched": 0, "explained": 0, "found": [], "skipped": []})
    );
    assert!(!compare_with(&checkpoint, &checkpoint, &[]).stderr.contains("why"));
}
