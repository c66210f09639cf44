//! InfiniTrain checkpoints of any layout and the llm.c files that they start from hold the same weights; one changed
//! element is found and named; what is damaged or missing is named with its file and place.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::damage::Victim;
use crate::common::{
    self, Copied, Run, assert_all_equal, compare, compare_with, differing, files, fixture, flip,
    inspect, names, sizes,
};
use tempfile::TempDir;

const STEP: &str = "checkpoint_step_000007";
const VPP: [&str; 2] = ["--set", "b:virtual_pipeline_model_parallel_size=2"];

/// Tensors of the model, one tied to another one not counted.
const GPT2_TENSORS: usize = 4 + 12 * 3;

fn infinitrain(path: &str) -> PathBuf {
    fixture("infinitrain").join(path)
}

/// A copy of a checkpoint, to be changed.
fn copied(path: &str) -> Copied {
    Copied::of(&infinitrain(path))
}

fn model(copied: &Copied) -> PathBuf {
    copied.path().join(STEP).join("model.ckpt")
}

fn edit(file: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(file).unwrap();
    change(&mut bytes);
    fs::write(file, bytes).unwrap();
}

/// The place of a text in a file.
fn find(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).position(|part| part == text.as_bytes()).unwrap()
}

#[test]
fn a_file_of_bfloat16_holds_the_same_values() {
    let run = compare(&infinitrain("gpt2/native"), &infinitrain("gpt2/llmc-bf16.bin"));
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(differing(&run.json()), [""; 0]);
    assert!(run.verdict().starts_with("equal: "), "{run:?}");
}

#[test]
fn chunks_of_a_stage_are_numbered_as_the_user_says() {
    let (native, chunks) = (infinitrain("gpt2/native"), infinitrain("gpt2/pp2vpp2"));
    let run = compare(&native, &chunks);
    assert_eq!(run.code, 1, "{run:?}");
    let note = "no file says how many chunks of layers a stage has";
    assert!(run.stderr.contains(note), "{run:?}");
    let run = compare_with(&native, &chunks, &VPP);
    assert_all_equal(&run);
    assert!(!run.stderr.contains(note), "{run:?}");
}

#[test]
fn padded_rows_of_the_vocabulary_are_left_out_and_counted() {
    let run = compare(&infinitrain("gpt2/native"), &infinitrain("gpt2/llmc.bin"));
    assert_eq!(sizes(&run.json()["transformer.wte.weight"]["shape"]), [10, 4]);
    assert!(run.stderr.contains("left out 0 padded rows of a, 2 of b"), "{run:?}");
}

#[test]
fn a_causal_mask_is_no_parameter() {
    let changed = copied("gpt2/native");
    edit(&model(&changed), |bytes| {
        let name = "transformer.h.1.attn.bias";
        // Behind the name: dtype, four dimensions and their number, length.
        let data = find(bytes, name) + name.len() + 1 + 4 + 32 + 8;
        bytes[data] ^= 1;
    });
    assert_all_equal(&compare(&changed.path(), &infinitrain("gpt2/native")));
    let inspected = inspect(&changed.path());
    assert!(inspected["tensors"]["transformer.h.1.attn.bias"].is_null());
    assert!(inspected["tensors"]["transformer.h.1.attn.c_attn.bias"].is_object());
}

#[test]
fn one_changed_element_in_any_shard_is_found_and_named() {
    for (path, reference) in [("gpt2/tp2pp2", "gpt2/native"), ("llama3/tp2pp2", "llama3/llmc.bin")]
    {
        let inspected = inspect(&infinitrain(path));
        for (name, tensor) in inspected["tensors"].as_object().unwrap() {
            let mut last: Vec<usize> =
                sizes(&tensor["shape"]).iter().map(|size| size - 1).collect();
            if ["transformer.wte.weight", "lm_head.weight"].contains(&name.as_str()) {
                last[0] = 9;
            }
            let changed = copied(path);
            flip(&changed.path(), name, &last);
            let flags = ["--metrics", "max_abs_index,differing"];
            let run = compare_with(&changed.path(), &infinitrain(reference), &flags);
            assert_eq!(run.code, 1, "{name}: {run:?}");
            let result = run.json();
            assert_eq!(differing(&result), [name.as_str()]);
            assert_eq!(result[name]["differing"], 1, "{name}");
            assert_eq!(sizes(&result[name]["max_abs_index"]), last, "{name}");
        }
    }
}

#[test]
fn a_data_parallel_rank_that_differs_is_named() {
    let changed = copied("gpt2/tp2dp2");
    let file = changed.path().join(STEP).join("rank_000003/model.ckpt");
    edit(&file, |bytes| {
        let name = "transformer.h.2.ln_1.weight";
        let data = find(bytes, name) + name.len() + 1 + 4 + 8 + 8;
        bytes[data + 2] ^= 1;
    });
    let run = compare(&changed.path(), &infinitrain("gpt2/native"));
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("a: transformer.h.2.ln_1.weight: rank_000003 differs"), "{run:?}");
}

#[test]
fn a_tied_output_layer_that_differs_is_named() {
    let changed = copied("gpt2/native");
    edit(&model(&changed), |bytes| {
        let data = find(bytes, "lm_head.weight") + 14 + 1 + 4 + 16 + 8;
        bytes[data + 2] ^= 1;
    });
    let run = compare(&changed.path(), &infinitrain("gpt2/native"));
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("lm_head.weight"), "{run:?}");
    // Who says that they are not tied has two tensors.
    let untied = ["--set", "untie_embeddings_and_output_weights=True"];
    let run = compare_with(&changed.path(), &infinitrain("gpt2/native"), &untied);
    assert_eq!(differing(&run.json()), ["lm_head.weight"]);
}

#[test]
fn what_a_file_is_its_first_bytes_say() {
    let renamed = copied("gpt2/native");
    for name in ["model.bin", "model.pth"] {
        let folder = renamed.path().join(STEP);
        let [from, to] = [files(&folder)[0].clone(), folder.join(name)];
        fs::rename(from, to).unwrap();
        assert_all_equal(&compare(&renamed.path(), &infinitrain("gpt2/native")));
    }
    let started = copied("gpt2/native");
    fs::copy(infinitrain("gpt2/llmc.bin"), model(&started)).unwrap();
    assert_all_equal(&compare(&started.path(), &infinitrain("gpt2/native")));
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("weights.pt");
    fs::copy(model(&copied("llama3/native")), &file).unwrap();
    assert_all_equal(&compare(&file, &infinitrain("llama3/native")));
}

#[test]
fn the_newest_of_several_steps_is_taken() {
    let several = copied("gpt2/native");
    common::copy(&several.path().join(STEP), &several.path().join("checkpoint_step_000006"));
    let run = compare(&several.path(), &infinitrain("gpt2/native"));
    assert_all_equal(&run);
    assert!(
        run.stderr.contains("2 checkpoints: took the newest, checkpoint_step_000007"),
        "{run:?}"
    );
}

#[test]
fn a_ranks_folder_is_compared_as_the_shard_that_it_is() {
    let rank = infinitrain("gpt2/tp2pp2").join(STEP).join("rank_000002");
    let run = compare(&rank, &rank.with_file_name("rank_000002"));
    assert_all_equal(&run);
    assert!(run.stderr.contains("one shard of tp=2 pp=2"), "{run:?}");
    // Its rows are a part of the vocabulary and no padding is missing.
    let run = compare(&rank.with_file_name("rank_000000"), &infinitrain("gpt2/native"));
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.json()["transformer.wte.weight"]["l2"].is_null());
}

#[test]
fn lora_weights_are_read() {
    let lora = infinitrain("lora.bin");
    let run = compare(&lora, &lora);
    assert_all_equal(&run);
    let result = run.json();
    assert_eq!(sizes(&result["transformer.h.0.attn.c_attn.lora_B"]["shape"]), [12, 2]);
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("lora.bin");
    let whole = fs::read(&lora).unwrap();
    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    compare(&file, &lora).refuses(&["lora.bin", "lora_B", "cut off at byte 255"]);
    fs::write(&file, [&whole[..], &[0]].concat()).unwrap();
    compare(&file, &lora)
        .refuses(&["lora.bin", "1 bytes behind its last tensor, from byte 256 on"]);
}

#[test]
fn each_damage_of_a_file_is_named_with_its_place() {
    let name = "transformer.h.1.ln_1.weight";
    let ln_1 = |bytes: &[u8]| find(bytes, name);
    type Damage<'a> = (&'a str, Box<dyn Fn(&mut Vec<u8>) + 'a>, &'a [&'a str]);
    let damages: &[Damage] = &[
        ("header", Box::new(|bytes| bytes.truncate(7)), &["cut off at byte 7"]),
        ("nothing", Box::new(Vec::clear), &["cut off inside its first 4 bytes"]),
        ("magic", Box::new(|bytes| bytes[0] = b'X'), &["does not begin with CKPT"]),
        ("big-endian", Box::new(|bytes| bytes[..4].reverse()), &["big-endian"]),
        (
            "pointer",
            Box::new(|bytes| *bytes = b"version https://git-lfs.github.com/spec/v1\n".to_vec()),
            &["git lfs pull"],
        ),
        ("version", Box::new(|bytes| bytes[4] = 2), &["version 2", "only version 1"]),
        (
            "cut",
            Box::new(|bytes| bytes.truncate(ln_1(bytes) + 40)),
            &[name, "cut off at byte", "what follows is lost"],
        ),
        (
            "rest",
            Box::new(|bytes| bytes.extend([0; 5])),
            &["5 bytes behind its last tensor", "from byte 4773 on"],
        ),
        ("count", Box::new(|bytes| bytes[8] -= 1), &["bytes behind its last tensor"]),
        (
            "more",
            Box::new(|bytes| bytes[8] += 1),
            &["the length of a name", "cut off at byte 4773"],
        ),
        ("none", Box::new(|bytes| bytes[8] = 0), &["holds no tensor, but 4761 bytes follow"]),
        (
            "dtype",
            Box::new(|bytes| {
                let at = ln_1(bytes) + name.len();
                bytes[at] = 13;
            }),
            &[name, "dtype 13"],
        ),
        (
            "half",
            Box::new(|bytes| {
                let at = ln_1(bytes) + name.len();
                bytes[at] = 10;
            }),
            &[name, "16 bytes, where shape [4] of float16 makes 8"],
        ),
        (
            "negative",
            Box::new(|bytes| {
                let at = ln_1(bytes) + name.len() + 5;
                bytes[at..at + 8].fill(255);
            }),
            &[name, "shape [-1]"],
        ),
        (
            "huge",
            Box::new(|bytes| {
                let at = ln_1(bytes) + name.len() + 12;
                bytes[at] = 64;
            }),
            &[name, "16 bytes, where shape"],
        ),
        (
            "rank",
            Box::new(|bytes| {
                let at = ln_1(bytes) + name.len() + 3;
                bytes[at] = 1;
            }),
            &[name, "65537 dimensions", "damaged"],
        ),
        (
            "length",
            Box::new(|bytes| {
                let at = ln_1(bytes) + name.len() + 13;
                bytes[at] = 12;
            }),
            &[name, "12 bytes, where shape [4] of float32 makes 16"],
        ),
        (
            "beyond",
            Box::new(|bytes| {
                let at = ln_1(bytes) + name.len() + 13;
                bytes[at..at + 8].fill(255);
            }),
            &[name, "its data ends at byte 18446744073709551615"],
        ),
        (
            "name",
            Box::new(|bytes| {
                let at = ln_1(bytes) - 1;
                bytes[at] = 1;
            }),
            &["a name of 16777243 bytes at byte"],
        ),
        (
            "twice",
            Box::new(|bytes| {
                let at = ln_1(bytes) + 14;
                bytes[at] = b'2';
            }),
            &["transformer.h.2.ln_1.weight", "a second tensor of this name"],
        ),
    ];
    for (what, change, words) in damages {
        let damaged = copied("llama3/native");
        edit(&model(&damaged), change);
        let run = compare(&damaged.path(), &infinitrain("llama3/native"));
        run.refuses(words);
        run.refuses(&["ckptcmp: a: ", "model.ckpt"]);
        assert!(!run.verdict().starts_with("identical"), "{what}: {run:?}");
    }
}

#[test]
fn each_damage_of_an_llm_c_file_is_named() {
    let damages: &[(usize, &[u8], &[&str])] = &[
        (4, &[4], &["version 4 of llm.c's format"]),
        (16, &[0], &["n_layer=0"]),
        (16, &[4], &["cut off at byte", "transformer."]),
        (16, &[2], &["bytes behind its last tensor"]),
        (16, &[255, 255, 255, 127], &["describes no model", "n_layer=2147483647"]),
        (12, &[255, 255, 255, 127], &["cut off", "transformer.wte.weight"]),
        (20, &[3], &["describes no model", "n_head=3"]),
        (28, &[255, 255, 255, 255], &["n_embd=-1"]),
        (36, &[0], &["multiple_of=0"]),
        (32, &[0, 0, 0, 0x7f], &["describes no model"]),
    ];
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("started.bin");
    let whole = fs::read(infinitrain("llama3/llmc.bin")).unwrap();
    for (at, bytes, words) in damages {
        let mut damaged = whole.clone();
        damaged[*at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&file, damaged).unwrap();
        compare(&infinitrain("llama3/native"), &file).refuses(words);
        compare(&infinitrain("llama3/native"), &file).refuses(&["b: ", "started.bin"]);
    }
    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    compare(&infinitrain("llama3/native"), &file)
        .refuses(&["cut off at byte 4335: lm_head.weight"]);
    fs::write(&file, &whole[..100]).unwrap();
    compare(&infinitrain("llama3/native"), &file).refuses(&["cut off at byte 100"]);
    let mut swapped = whole;
    swapped[..4].reverse();
    fs::write(&file, swapped).unwrap();
    compare(&infinitrain("llama3/native"), &file).refuses(&["big-endian"]);
}

#[test]
fn each_missing_rank_is_named() {
    for path in ["gpt2/tp2pp2", "gpt2/tp2dp2", "llama3/tp2pp2"] {
        for rank in 0..4 {
            let fewer = copied(path);
            let folder = fewer.path().join(STEP).join(format!("rank_{rank:06}"));
            fs::remove_file(folder.join("model.ckpt")).unwrap();
            let words = [&*format!("rank_{rank:06}/model.ckpt: missing shard"), "tp=2"];
            compare(&fewer.path(), &infinitrain(path)).refuses(&words);
            fs::remove_dir_all(folder).unwrap();
            compare(&fewer.path(), &infinitrain(path)).refuses(&words);
        }
    }
}

#[test]
fn a_rank_too_many_is_named() {
    let more = copied("gpt2/tp2pp2");
    let step = more.path().join(STEP);
    common::copy(&step.join("rank_000003"), &step.join("rank_000004"));
    let run = compare(&more.path(), &infinitrain("gpt2/native"));
    run.refuses(&["a: ", "rank_000004: is rank 4", "tp=2 pp=2"]);
    assert_eq!(differing(&run.json()), [""; 0]);
}

#[test]
fn ranks_that_do_not_agree_on_the_layout_are_named() {
    let odd = copied("gpt2/tp2pp2");
    let file = odd.path().join(STEP).join("rank_000002/trainer_state.json");
    edit(&file, |bytes| {
        let at = find(bytes, "\"tp_size\": 2") + 11;
        bytes[at] = b'1';
    });
    compare(&odd.path(), &infinitrain("gpt2/native"))
        .refuses(&["rank_000002/trainer_state.json: says tp_size 1 where 3 other files say 2"]);
}

#[test]
fn sizes_that_no_file_says_can_be_supplied() {
    let bare = copied("gpt2/tp2dp2");
    for file in files(&bare.path()) {
        if file.ends_with("trainer_state.json") {
            fs::remove_file(file).unwrap();
        }
    }
    let native = infinitrain("gpt2/native");
    compare(&bare.path(), &native).refuses(&["--set tensor_model_parallel_size=VALUE"]);
    let tp = "a:tensor_model_parallel_size=2";
    compare_with(&bare.path(), &native, &["--set", tp])
        .refuses(&["--set pipeline_model_parallel_size=VALUE"]);
    let pp = "a:pipeline_model_parallel_size=1";
    assert_all_equal(&compare_with(&bare.path(), &native, &["--set", tp, "--set", pp]));
    fs::remove_dir_all(bare.path().join(STEP).join("rank_000002")).unwrap();
    compare_with(&bare.path(), &native, &["--set", tp, "--set", pp])
        .refuses(&["rank_000002", "--set says tp=2 pp=1"]);
}

#[test]
fn a_stage_with_fewer_layers_than_it_should_have_is_no_renumbering() {
    let fewer = copied("gpt2/tp2pp2");
    for rank in [0, 1] {
        let file = fewer.path().join(STEP).join(format!("rank_{rank:06}/model.ckpt"));
        // The second layer of the first stage becomes what no rule and no number is for.
        edit(&file, |bytes| {
            let from = b"transformer.h.1.";
            while let Some(at) = bytes.windows(from.len()).position(|part| part == from) {
                bytes[at + 12] = b'x';
            }
        });
    }
    let run = compare(&fewer.path(), &infinitrain("gpt2/native"));
    run.refuses(&["the stages hold [1, 1] layers, where 3 layers make [2, 1]"]);
    assert!(names(&run.json()).contains(&"transformer.h.2.ln_1.weight"));
    assert_eq!(differing(&run.json()), [""; 0]);
}

#[test]
fn a_name_without_a_rule_is_taken_from_its_only_shard_and_refused_from_several() {
    let odd = |path: &str| {
        let odd = copied(path);
        assert!(common::replace(&odd.path(), b".mlp.c_fc.", b".mlp.c_zz.") > 0);
        odd
    };
    let (lone, several) = (odd("gpt2/native"), odd("gpt2/tp2pp2"));
    let run = compare(&lone.path(), &lone.path());
    assert_all_equal(&run);
    assert!(run.stderr.contains("no sharding rule for 6 names"), "{run:?}");
    let run = compare(&several.path(), &lone.path());
    run.refuses(&["transformer.h.0.mlp.c_zz.weight", "no sharding rule", "--rule"]);
    let rules = ["--rule", "c_zz.weight=column", "--rule", "c_zz.bias=column"];
    assert_all_equal(&compare_with(&several.path(), &lone.path(), &rules));
}

#[test]
fn adam_is_compared_by_position_only_where_positions_are_alike() {
    let native = infinitrain("gpt2/native");
    let flags = ["--section", "optimizer"];
    let run = compare_with(&native, &native, &flags);
    assert_all_equal(&run);
    assert!(run.stderr.contains("known by position only"), "{run:?}");
    let result = run.json();
    assert_eq!(names(&result).len(), 2 * GPT2_TENSORS + 1);
    assert!(names(&result).iter().all(|name| name.starts_with("optimizer.")));

    let changed = copied("gpt2/native");
    flip(&changed.path(), "optimizer.v.3", &[1]);
    let run = compare_with(&changed.path(), &native, &flags);
    assert_eq!((run.code, differing(&run.json())), (1, vec!["optimizer.v.3"]));

    // The same positions of another build: two parameters have changed places.
    let swapped = copied("gpt2/native");
    let file = swapped.path().join(STEP).join("optimizer.ckpt");
    edit(&file, |bytes| {
        let [one, other] = ["adam.m.0\x0b", "adam.m.1\x0b"].map(|name| find(bytes, name) + 7);
        bytes.swap(one, other);
    });
    let run = compare_with(&swapped.path(), &native, &flags);
    run.refuses(&["80 tensors without a name were not compared", "position", "is of shape"]);
    assert_eq!(names(&run.json()), ["optimizer.t"]);
    // The model is compared all the same, and without the section nothing is said of it.
    assert_all_equal(&compare(&swapped.path(), &native));
}

#[test]
fn an_optimizer_that_one_rank_lacks_is_named() {
    let some = copied("gpt2/tp2dp2");
    let step = some.path().join(STEP);
    let adam = infinitrain("gpt2/native").join(STEP).join("optimizer.ckpt");
    for rank in 0..3 {
        fs::copy(&adam, step.join(format!("rank_{rank:06}/optimizer.ckpt"))).unwrap();
    }
    let flags = ["--section", "optimizer"];
    let run = compare_with(&some.path(), &some.path(), &flags);
    run.refuses(&["rank_000003/optimizer.ckpt: missing, where other ranks have one"]);
    fs::copy(&adam, step.join("rank_000003/optimizer.ckpt")).unwrap();
    let run = compare_with(&some.path(), &some.path(), &flags);
    assert_all_equal(&run);
    assert!(names(&run.json()).contains(&"optimizer.m.rank_000003.0"));
}

#[test]
fn a_rank_that_is_no_folder_or_no_file_is_refused() {
    let odd = copied("gpt2/tp2pp2");
    let file = odd.path().join(STEP).join("rank_000001/model.ckpt");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    compare(&odd.path(), &infinitrain("gpt2/native")).refuses(&["rank_000001/model.ckpt"]);
    let run: Run = compare(&infinitrain("gpt2/native"), &infinitrain("gpt2"));
    run.refuses(&["b: ", "no checkpoint here", "native (infinitrain)"]);
}

#[test]
fn a_file_that_claims_more_than_any_model_has_is_refused() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("zeros.bin");
    let sparse = |head: &[u8], len: u64| {
        fs::write(&file, head).unwrap();
        fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(len).unwrap();
        compare(&file, &file)
    };
    let tensors = [b"CKPT", &1_u32.to_le_bytes()[..], &u32::MAX.to_le_bytes()].concat();
    sparse(&tensors, 64 << 20)
        .refuses(&["zeros.bin: a second tensor of this name", "more problems"]);
    // 300,000 layers of one column: 25 numbers each, and the rest of the model.
    let layers: u32 = 300_000;
    let header = [20_240_326_u32, 3, 1, 1, layers, 1, 1, 1].map(u32::to_le_bytes).concat();
    let len = 1024 + 4 * (25 * u64::from(layers) + 4);
    sparse(&header, len)
        .refuses(&["zeros.bin", "more bytes of tensor names and pieces than the limit"]);
}

#[test]
fn no_changed_byte_of_a_file_passes_for_equal() {
    let native = || Victim::new(&infinitrain("llama3/native"), format!("{STEP}/model.ckpt"));
    native().any_changed_byte_is_found_or_refused((0..).step_by(2), |_| false);
    // Behind the sizes the header says what no tensor depends on, and the last bits of the multiplier round away.
    let header = || (0..32).chain(36..40);
    let places = header().chain(header()).chain((1024..).step_by(19));
    let is_block_size = |at| (8..12).contains(&at);
    Victim::new(&infinitrain("llama3/llmc.bin"), "")
        .any_changed_byte_is_found_or_refused(places, is_block_size);
}

#[test]
fn no_cut_passes_for_equal() {
    Victim::new(&infinitrain("llama3/native"), format!("{STEP}/model.ckpt"))
        .any_cut_is_refused(200);
}

#[test]
fn whatever_a_trainer_state_says_all_tensors_are_compared_or_it_is_trouble() {
    Victim::new(&infinitrain("llama3/tp2pp2"), format!("{STEP}/rank_000000/trainer_state.json"))
        .any_changed_byte_is_found_or_refused(0.., |_| true);
}
