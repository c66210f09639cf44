//! Arguments and indices in names that no run has.

use std::fs;

use super::model_with;
use crate::common::crafted::{
    Checkpoint, P, all_commands, compare, counts, dict, file, namespace, tensor, text,
};

/// Every kind of layer that some fact is asked about.
fn curious_model() -> P {
    let layer = "decoder.layers.0.";
    let names = [
        ("self_attention.linear_qkv.weight", &[12, 4][..]),
        ("self_attention.linear_qkv_down_proj.weight", &[12, 4]),
        ("self_attention.linear_kv_down_proj.weight", &[12, 4]),
        ("self_attention.linear_qk_nope.weight", &[8, 4]),
        ("self_attention.linear_qk_rope.weight", &[4, 4]),
        ("mlp.experts.weight1", &[4, 16]),
        ("mlp.experts.weight2", &[16, 4]),
        ("mlp.experts.local_experts.0.linear_fc1.weight", &[8, 4]),
        ("mlp.linear_fc1.weight", &[16, 4]),
        ("mixer.in_proj.weight", &[16, 4]),
    ];
    let names: Vec<(String, P)> =
        names.iter().map(|(name, shape)| (format!("{layer}{name}"), tensor(shape))).collect();
    let legacy =
        ("language_model.encoder.layers.0.self_attention.query_key_value.weight", tensor(&[12, 4]));
    model_with(names.iter().map(|(name, value)| (name.as_str(), value.clone())).chain([legacy]))
}

#[test]
fn absurd_arguments_are_refused_or_ignored() {
    const TOP: i64 = i64::MAX;
    let numbers = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers",
        "decoder_num_layers",
        "num_experts",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_pos_emb_head_dim",
        "moe_mlp_glu_interleave_size",
        "mtp_num_layers",
        "padded_vocab_size",
    ];
    for name in numbers {
        for value in [0, -1, 1 << 19, 1 << 20, 1 << 30, 1 << 48, 1 << 62, TOP, i64::MIN] {
            for version in [0, 1, 3] {
                let others = numbers.iter().map(|other| (*other, P::Int(2)));
                let args = namespace(others.chain([(name, P::Int(value))]));
                let object = dict([
                    ("args", args),
                    ("checkpoint_version", P::Int(version)),
                    ("model", curious_model()),
                ]);
                let checkpoint = Checkpoint::of(&object);
                let context = format!("{name}={value}, version {version}");
                compare(&context, &checkpoint.path(), &checkpoint.path());
                let file = checkpoint.path().join("mp_rank_00/model_optim_rng.pt");
                compare(&format!("{context}, file"), &file, &file);
            }
        }
    }
    let lists = ["noop_layers", "pipeline_num_transformer_layers", "num_layer_list"];
    for name in lists {
        for list in [
            counts(&[1 << 63, 1 << 63]),
            counts(&[u64::MAX, 1, u64::MAX]),
            P::List(vec![P::Int(TOP), P::Int(TOP), P::Int(TOP)]),
            P::Int(-1),
            text("18446744073709551615,18446744073709551615"),
            text("9223372036854775807,9223372036854775807"),
        ] {
            for schedule in ["1f1b", "dualpipev"] {
                let args = namespace([
                    (name, list.clone()),
                    ("schedules_method", text(schedule)),
                    ("num_layers", P::Int(4)),
                    ("pipeline_model_parallel_size", P::Int(2)),
                ]);
                let object = file(dict([("args", args), ("model", model_with([]))]).pickle());
                let checkpoint = Checkpoint::of_bytes(&object);
                fs::remove_dir_all(checkpoint.path()).unwrap();
                checkpoint.add("mp_rank_00_000", &object);
                checkpoint.add("mp_rank_00_001", &object);
                compare(name, &checkpoint.path(), &checkpoint.path());
            }
        }
    }
    let all_large = namespace(numbers.map(|name| (name, P::Int((1 << 20) - 1))));
    all_commands("all large", &Checkpoint::with(curious_model(), all_large));
    let stages = namespace([
        ("tensor_model_parallel_size", P::Int(1 << 10)),
        ("pipeline_model_parallel_size", P::Int(1 << 19)),
    ]);
    all_commands("stages", &Checkpoint::with(curious_model(), stages));
}

#[test]
fn absurd_indices_in_names_are_refused() {
    let layer = |index: &str| format!("decoder.layers.{index}.input_layernorm.bias");
    let expert = |index: &str| {
        format!("decoder.layers.0.mlp.experts.local_experts.{index}.linear_fc1.weight")
    };
    let indices = [
        "9999999",
        "4294967296",
        "9223372036854775807",
        "18446744073709551614",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999999999999999",
    ];
    for index in indices {
        for name in [layer(index), expert(index)] {
            let model = model_with([(name.as_str(), tensor(&[8, 2]))]);
            let object = file(dict([("model", model), ("iteration", P::Int(5))]).pickle());
            let checkpoint = Checkpoint::of_bytes(&object);
            let run = all_commands(&name, &checkpoint);
            assert_eq!(run.code, 2, "{name}: {}{}", run.stdout, run.stderr);
            assert!(run.stderr.contains(index), "{name}: {}", run.stderr);
            // The same on two stages and on two expert ranks.
            for (ranks, args) in [
                (["mp_rank_00_000", "mp_rank_00_001"], "pipeline_model_parallel_size"),
                (["mp_rank_00_000", "mp_rank_00_001"], "expert_model_parallel_size"),
            ] {
                let model = model_with([(name.as_str(), tensor(&[8, 2]))]);
                let args = namespace([(args, P::Int(2)), ("num_experts", P::Int(2))]);
                let object = file(dict([("model", model), ("args", args)]).pickle());
                fs::remove_dir_all(checkpoint.path()).unwrap();
                ranks.iter().for_each(|rank| checkpoint.add(rank, &object));
                let run = compare(&name, &checkpoint.path(), &checkpoint.path());
                assert_eq!(run.code, 2, "{name}: {}{}", run.stdout, run.stderr);
            }
        }
    }
}
