//! DeepSpeed checkpoints: what the real software wrote, GPT-NeoX layouts of the same weights, replicas that differ, faults.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use ckptcmp::compare::{Outcome, TensorComparison};
use ckptcmp::pairing::{Selection, pair};

use serde_json::json;

use crate::common::array::{Array, write_safetensors};
use crate::common::damage::{Victim, sampled};
use crate::common::{
    Copied, Run, assert_all_equal, compare_with, copy, differing, files, fixture, in_process,
    inspect, names, places, rename_key, run, screen,
};

const BOTH: &[&str] = &["--section", "model,optimizer"];

fn zero(name: &str) -> PathBuf {
    fixture("deepspeed/zero").join(name)
}

fn neox(name: &str) -> PathBuf {
    fixture("deepspeed/neox").join(name)
}

/// Layer files do not depend on the number of stages: those of TP 2 PP 2 beside the other files of TP 2.
fn neox_tp2() -> Copied {
    let copied = Copied::of(&neox("tp2-without-layers"));
    for file in files(&neox("tp2pp2")) {
        let name = file.file_name().unwrap();
        if name.to_string_lossy().starts_with("layer_") {
            copy(&file, &copied.path().join("global_step5").join(name));
        }
    }
    copied
}

fn tag(copied: &Copied) -> PathBuf {
    let tag = |name: &str| copied.path().join(name);
    ["global_step2", "global_step5"].into_iter().map(tag).find(|tag| tag.is_dir()).unwrap()
}

#[test]
fn a_universal_checkpoint_is_the_one_that_it_was_made_from() {
    for stage in ["z1", "z3"] {
        let run = compare_with(&zero(stage), &zero(&format!("universal-from-{stage}")), BOTH);
        assert_all_equal(&run);
        assert!(run.stderr.contains("compared 22 tensors"), "{}", run.stderr);
    }
}

#[test]
fn names_without_a_sharding_rule_are_remarked() {
    let run = compare_with(&zero("z3"), &zero("z3"), &[]);
    let note = "no sharding rule for 5 names, taken whole from their only shard: embed.weight, ...";
    assert!(run.stderr.contains(note), "{}", run.stderr);
}

#[test]
fn what_deepspeed_writes_is_sound() {
    let checkpoints = [
        "z0",
        "z1",
        "z2-round-robin",
        "z3",
        "pipe",
        "pipe-without-zero",
        "universal-from-z1",
        "universal-from-z3",
    ];
    let checkpoints = checkpoints.map(zero);
    for path in checkpoints.into_iter().chain([neox("tp1"), neox("tp2pp2")]) {
        let run = run([OsStr::new("check"), path.as_os_str()]);
        assert_eq!(run.code, 0, "{run:?}");
    }
}

#[test]
fn the_folder_of_a_trainer_holds_two_checkpoints() {
    let copied = Copied::of(&zero("z1"));
    let file = copied.path().join("model.safetensors");
    write_safetensors(&file, [("w", &Array::float32(&[0.0]))], &json!({}));
    let run = compare_with(&copied.path(), &zero("z1"), &[]);
    run.refuses(&["both deepspeed and hf; choose one with --format"]);
    assert_all_equal(&compare_with(&copied.path(), &zero("z1"), &["--format", "deepspeed"]));
    assert_all_equal(&compare_with(&tag(&copied), &zero("z1"), &[]));
}

#[test]
fn an_order_that_only_the_slices_have_is_told() {
    let run = compare_with(&zero("z2-round-robin"), &zero("z2-round-robin"), BOTH);
    assert_all_equal(&run);
    assert!(run.stderr.contains("param_slice_mappings contradicts the order of param_shapes"));
}

#[test]
fn without_zero_16_bit_runs_have_masters_by_number() {
    let found = inspect(&zero("z0"));
    for (number, shape) in [[5, 3], [7, 3]].iter().enumerate() {
        for state in ["fp32_param", "exp_avg", "exp_avg_sq"] {
            let tensor = &found["tensors"][format!("optimizer.{state}.mp_rank_00.{number}")];
            assert_eq!(tensor["shape"], serde_json::json!(shape), "{state} {number}");
            assert_eq!(tensor["dtype"], "float32");
        }
    }
}

#[test]
fn weights_and_masters_are_sections_of_their_own() {
    let z1 = inspect(&zero("z1"));
    let dtype = |name: &str| z1["tensors"][name]["dtype"].as_str().unwrap().to_owned();
    assert_eq!(dtype("fc.weight"), "bfloat16");
    assert_eq!(dtype("still.weight"), "bfloat16");
    assert_eq!(dtype("places"), "int64");
    assert_eq!(dtype("optimizer.fp32_param.fc.weight"), "float32");
    assert_eq!(z1["tensors"]["optimizer.fp32_param.still.weight"], serde_json::Value::Null);
    assert_eq!(z1["tied"]["out.weight"], "embed.weight");
    assert_eq!(z1["writer"], "deepspeed 0.19.8");
    assert_eq!(z1["iteration"], 2);
    assert_eq!(z1["layout"], "tp1 pp1 dp2 zero1");

    let z3 = inspect(&zero("z3"));
    assert_eq!(z3["tensors"]["fc.weight"]["dtype"], "float32");
    assert_eq!(z3["tensors"]["still.weight"]["dtype"], "bfloat16");
    let run = screen(&zero("z3"), &zero("z1"), &[]);
    let note = "weights: those of the fp32 masters; ZeRO-3 stores placeholders beside them";
    assert!(run.stdout.contains(note), "{}", run.stdout);
}

#[test]
fn only_the_sections_asked_for_are_opened() {
    let copied = Copied::of(&zero("z1"));
    for file in files(&tag(&copied)) {
        if file.to_string_lossy().contains("optim_states") {
            fs::write(file, "no torch file").unwrap();
        }
    }
    assert_all_equal(&compare_with(&copied.path(), &zero("z1"), &[]));
    compare_with(&copied.path(), &zero("z1"), BOTH).refuses(&["bf16_zero_pp_rank_0_mp_rank_00"]);
}

#[test]
fn a_pipeline_is_called_after_its_layers() {
    let pipe = inspect(&zero("pipe"));
    let layers = ["00.table.weight", "02.bias", "02.weight", "03.bias", "03.weight"];
    let masters = layers.map(|name| format!("optimizer.fp32_param.{name}"));
    let expected: Vec<&str> =
        layers.iter().copied().chain(masters.iter().map(String::as_str)).collect();
    assert_eq!(names(&pipe["tensors"]), expected);
    assert_eq!(pipe["layout"], "tp1 pp2 dp1 zero1");
}

#[test]
fn the_same_weights_are_equal_in_every_layout() {
    let tp2 = neox_tp2();
    for path in [tp2.path(), neox("tp2pp2")] {
        assert_all_equal(&compare_with(&neox("tp1"), &path, &[]));
        assert_all_equal(&compare_with(&path, &neox("tp1"), &[]));
    }
    let run = compare_with(&neox("tp1"), &tp2.path(), BOTH);
    assert_all_equal(&run);
    let result = run.json();
    let expected = [
        "layers.0.attention.query_key_value.weight",
        "layers.0.mlp.linear1.bias",
        "layers.1.mlp.dense_4h_to_h.weight",
        "word_embeddings.weight",
        "final.norm.weight",
        "final_linear.weight",
        "optimizer.fp32_param.layers.0.attention.query_key_value.bias",
        "optimizer.exp_avg.final.norm.bias",
    ];
    for name in expected {
        assert!(result.get(name).is_some(), "{name} is not in {:?}", names(&result));
    }
    assert!(names(&result).iter().all(|name| !name.contains("inv_freq")));
}

/// Makes the second copy of an element another number.
fn drift(checkpoint: &Path, tensor: &str) {
    let copies = places(checkpoint, tensor, &[1]);
    assert_eq!(copies.len(), 2, "{tensor}");
    copies[1].edit(|bytes| {
        let value = f32::from_le_bytes(*bytes.first_chunk().unwrap());
        bytes[..4].copy_from_slice(&(value + 0.5).to_le_bytes());
    });
}

fn comparison(a: &Path, b: &Path, name: &str) -> TensorComparison {
    let [a, b] = [a, b].map(|path| in_process::open(path).unwrap());
    let mut pairing = pair(&a, &b, &Selection::default());
    pairing.pairs.retain(|pair| pair.name.as_str() == name);
    in_process::compare(&pairing, &a, &b).remove(0)
}

#[test]
fn norms_that_have_drifted_apart_count_as_their_mean_or_as_the_first() {
    let copied = Copied::of(&neox("tp2pp2"));
    let name = "layers.0.input_layernorm.weight";
    drift(&copied.path(), name);
    let run = screen(&copied.path(), &neox("tp2pp2"), &[]);
    assert_eq!(run.code, 1);
    let line = "a: layers.0.input_layernorm.weight: layer_02-model_01-model_states.pt differs from \
                layer_02-model_00-model_states.pt by up to 5.00e-1";
    assert!(run.stdout.contains(line), "{}", run.stdout);
    assert!(run.stdout.contains("1 differing; compared: their mean"), "{}", run.stdout);

    let found = comparison(&copied.path(), &neox("tp1"), name);
    let Outcome::Compared(stats) = &found.outcome else { unreachable!("{found:?}") };
    assert!((stats.l2().unwrap() - 0.25).abs() < 1e-6, "half of what one of two copies moved");
    let [replica] = &found.replicas[..] else { unreachable!("{found:?}") };
    assert!((replica.stats.l2().unwrap() - 0.5).abs() < 1e-6);
    assert_eq!((replica.stats.differing(), replica.is_divergence()), (1, true));

    let first = compare_with(&copied.path(), &neox("tp1"), &["--replicas", "first"]);
    assert_eq!((first.code, differing(&first.json())), (1, vec![]));
    let flags = ["--replicas", "first", "--allow-diverged"];
    let allowed = compare_with(&copied.path(), &neox("tp1"), &flags);
    assert_all_equal(&allowed);
    assert!(allowed.stderr.contains("replicas that disagree: 1"), "{}", allowed.stderr);
    let mean = compare_with(&copied.path(), &neox("tp1"), &["--replicas", "mean"]);
    assert_eq!((mean.code, differing(&mean.json())), (1, vec![name]));
}

#[test]
fn the_biases_of_row_parallel_layers_are_what_the_configuration_says() {
    let name = "layers.0.attention.dense.bias";
    let configured = |gpt_j_residual: bool| {
        let copied = Copied::of(&neox("tp2pp2"));
        let configs = tag(&copied).join("configs");
        fs::create_dir(&configs).unwrap();
        let text = format!("{{\n  \"gpt-j-residual\": {gpt_j_residual},\n}}\n");
        fs::write(configs.join("small.yml"), text).unwrap();
        copied
    };
    let l2 = |run: &Run| run.json()[name]["l2"].as_f64().unwrap();
    let ambiguous =
        "nothing says whether 2 biases of row-parallel layers are copies or parts of a sum";

    // Equal copies that nothing is known of are one value.
    let unknown = Copied::of(&neox("tp2pp2"));
    let run = compare_with(&unknown.path(), &neox("tp1"), &[]);
    assert_all_equal(&run);
    assert!(run.stderr.contains(ambiguous), "{}", run.stderr);

    // Copies that differ and of which nothing is known are a sum, and no divergence.
    drift(&unknown.path(), name);
    let run = compare_with(&unknown.path(), &neox("tp1"), &[]);
    assert_eq!((run.code, differing(&run.json())), (1, vec![name]));
    assert!(run.stderr.contains("a: 1 tensor summed over the ranks"), "{}", run.stderr);
    assert!(!run.stderr.contains("replicas that disagree"), "{}", run.stderr);
    assert!(l2(&run) > 1.0);

    // Told that they are parts of a sum, even equal ones are added up.
    let partial = configured(true);
    let run = compare_with(&partial.path(), &neox("tp1"), &[]);
    assert_eq!(differing(&run.json()), [name, "layers.0.mlp.linear2.bias"]);
    assert!(!run.stderr.contains(ambiguous), "{}", run.stderr);

    // Told that they are copies, those that differ have diverged.
    let copies = configured(false);
    drift(&copies.path(), name);
    let run = compare_with(&copies.path(), &neox("tp1"), &[]);
    assert_eq!((run.code, differing(&run.json())), (1, vec![]));
    assert!(run.stderr.contains("replicas that disagree: 1"), "{}", run.stderr);

    // The command line knows better than the files.
    let told = ["--set", "a:gpt_j_residual=true"];
    let run = compare_with(&copies.path(), &neox("tp1"), &told);
    assert_eq!(differing(&run.json()), [name, "layers.0.mlp.linear2.bias"]);
}

#[test]
fn a_name_without_a_rule_is_a_problem_until_a_rule_is_given() {
    let [one, two] = ["tp1", "tp2pp2"].map(|name| Copied::of(&neox(name)));
    for copied in [&one, &two] {
        for front in ["", "6."] {
            let [from, to] = ["final", "weird"].map(|name| format!("{front}{name}_linear.weight"));
            rename_key(&copied.path(), &from, &to);
        }
    }
    let run = compare_with(&one.path(), &two.path(), &[]);
    run.refuses(&[
        "global_step5: 06.weird_linear.weight: no sharding rule for this name",
        "--rule",
    ]);
    let rule = ["--rule", "weird_linear.weight=column"];
    assert_all_equal(&compare_with(&one.path(), &two.path(), &rule));
}

#[test]
fn a_save_folder_leads_to_its_newest_tag() {
    let copied = Copied::of(&zero("z1"));
    assert_all_equal(&compare_with(&tag(&copied), &zero("z1"), BOTH));
    copy(&tag(&copied), &copied.path().join("global_step10"));
    fs::remove_file(copied.path().join("latest")).unwrap();
    let run = compare_with(&copied.path(), &zero("z1"), &[]);
    assert_all_equal(&run);
    assert!(run.stderr.contains("no latest and 2 tags: took the newest, global_step10"), "{run:?}");
    // Megatron-DeepSpeed leaves a tracker of Megatron's beside DeepSpeed's.
    fs::write(copied.path().join("latest"), "global_step2\n").unwrap();
    fs::write(copied.path().join("latest_checkpointed_iteration.txt"), "2").unwrap();
    assert_all_equal(&compare_with(&copied.path(), &zero("z1"), &[]));
    for (text, words) in [
        ("", "latest: is empty: its save was interrupted"),
        ("global_step3", "latest: says global_step3, but there is no such folder"),
        ("../copy/global_step2", "but there is no such folder"),
    ] {
        fs::write(copied.path().join("latest"), text).unwrap();
        compare_with(&copied.path(), &zero("z1"), &[]).refuses(&[words]);
    }
}

/// A copy of a checkpoint with one file gone must be refused with its name.
#[track_caller]
fn refused_without(source: &Path, file: &str, flags: &[&str], words: &[&str]) {
    let copied = Copied::of(source);
    fs::remove_file(tag(&copied).join(file)).unwrap();
    let run = compare_with(&copied.path(), source, flags);
    run.refuses(words);
    assert!(run.stderr.contains(file), "{file} is not named: {}", run.stderr);
}

#[test]
fn a_missing_file_is_named() {
    let missing = &["missing"];
    refused_without(&neox("tp2pp2"), "mp_rank_02_model_states.pt", &[], missing);
    refused_without(&neox("tp2pp2"), "mp_rank_03_model_states.pt", &[], missing);
    refused_without(&neox("tp2pp2"), "layer_03-model_01-model_states.pt", &[], missing);
    refused_without(&zero("pipe"), "layer_03-model_states.pt", &[], missing);
    refused_without(&zero("z1"), "mp_rank_00_model_states.pt", &[], missing);
    let partition = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
    refused_without(&zero("z1"), partition, BOTH, &["partition_count", "is 2"]);
    let partition = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt";
    refused_without(&zero("z1"), partition, BOTH, missing);
    refused_without(&zero("z3"), partition, &[], missing);
    refused_without(&zero("z3"), "zero_pp_rank_1_mp_rank_00_model_states.pt", &[], missing);
    let moment = Copied::of(&zero("universal-from-z1"));
    let folder = moment.path().join("global_step2_universal/zero/fc.bias");
    fs::remove_dir_all(folder).unwrap();
    compare_with(&moment.path(), &zero("z1"), BOTH).refuses(&["zero/fc.bias/fp32.pt: missing"]);
}

#[test]
fn a_layer_missing_on_all_ranks_is_named() {
    let copied = Copied::of(&neox("tp2pp2"));
    for rank in 0..2 {
        fs::remove_file(tag(&copied).join(format!("layer_03-model_0{rank}-model_states.pt")))
            .unwrap();
    }
    compare_with(&copied.path(), &neox("tp1"), &[])
        .refuses(&["layer_03-model_00-model_states.pt: missing"]);
}

#[test]
fn a_missing_expert_is_named() {
    let copied = Copied::of(&zero("z1"));
    let layer = zero("pipe").join("global_step2/layer_02-model_states.pt");
    let expert = |number: u64| format!("layer_0_expert_{number}_mp_rank_00_model_states.pt");
    copy(&layer, &tag(&copied).join(expert(0)));
    copy(&layer, &tag(&copied).join(expert(2)));
    compare_with(&copied.path(), &zero("z1"), &[]).refuses(&[&expert(1), "missing"]);
}

#[test]
fn partitions_of_two_saves_are_refused() {
    let copied = Copied::of(&zero("z1"));
    let name = |rank: u64| format!("bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    copy(&tag(&copied).join(name(1)), &tag(&copied).join(name(2)));
    compare_with(&copied.path(), &zero("z1"), BOTH)
        .refuses(&["partition_count", "is 2, but there are 3 partitions"]);
}

#[test]
fn a_placeholder_in_the_place_of_a_weight_is_a_problem() {
    let copied = Copied::of(&zero("z3"));
    let states = tag(&copied).join("zero_pp_rank_0_mp_rank_00_model_states.pt");
    let model = tag(&copied).join("mp_rank_00_model_states.pt");
    for file in files(&tag(&copied)) {
        if file != states {
            fs::remove_file(file).unwrap();
        }
    }
    fs::rename(states, model).unwrap();
    compare_with(&copied.path(), &zero("z1"), &[])
        .refuses(&["mp_rank_00_model_states.pt: fc.weight: is a placeholder of size 0"]);
}

#[test]
fn a_git_lfs_pointer_is_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    for (source, file) in [
        (zero("z1"), "mp_rank_00_model_states.pt"),
        (zero("z1"), "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        (neox("tp2pp2"), "layer_05-model_01-model_states.pt"),
    ] {
        let copied = Copied::of(&source);
        fs::write(tag(&copied).join(file), pointer).unwrap();
        let run = compare_with(&copied.path(), &source, BOTH);
        run.refuses(&[file, "git-lfs pointer"]);
    }
}

#[test]
fn an_unknown_part_is_not_passed_over() {
    let copied = Copied::of(&zero("z1"));
    fs::write(tag(&copied).join("shard_00_model_states.pt"), "?").unwrap();
    compare_with(&copied.path(), &zero("z1"), &[])
        .refuses(&["shard_00_model_states.pt: unrecognised checkpoint file"]);
}

#[test]
fn a_file_cut_off_anywhere_is_named() {
    for source in [zero("z1"), zero("z3"), zero("pipe"), neox("tp2pp2")] {
        for file in files(&source).iter().filter(|file| !file.ends_with("latest")) {
            Victim::new(&source, file.strip_prefix(&source).unwrap()).any_cut_is_refused(4);
        }
    }
}

#[test]
fn any_changed_byte_is_found_or_refused() {
    let universal = zero("universal-from-z3");
    for source in [zero("z1"), zero("z3"), zero("pipe"), universal, neox("tp2pp2"), neox("tp1")] {
        let files = files(&source);
        for file in &files {
            let victim = Victim::new(&source, file.strip_prefix(&source).unwrap());
            let places = sampled(victim.bytes().len(), 400_usize.div_ceil(files.len()));
            victim.any_changed_byte_is_found_or_refused(places, |_| true);
        }
    }
}
