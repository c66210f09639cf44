//! Promise: a checkpoint that lacks a part which it announces, or which its kin have, is never sound and never identical to
//! one that lacks the same; and one that is whole is never said to lack anything.
//!
//! Models are made of names alone, and a part is taken away from them before they are written.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;

use crate::common::array::{Array, write_safetensors};
use crate::common::crafted::{P, dict, file, namespace, tensor};
use crate::common::{Copied, Run, ckptcmp, compare, fixture, rename_key, replace, run};

/// A part: what it is called, the names that go with it, and what is said of it.
type Loss = (&'static str, fn(&str) -> bool, &'static str);

fn check(path: &Path) -> Run {
    Run::of(ckptcmp().arg("check").arg(path))
}

/// A model without a part is trouble for itself, against itself and against the whole one on either side, and the part is named.
#[track_caller]
fn is_missed(what: &str, whole: &Path, damaged: &Path, words: &str) {
    check(damaged).refuses(&[words]);
    for (found, sides) in [
        (compare(damaged, damaged), &["a", "b"][..]),
        (compare(whole, damaged), &["b"]),
        (compare(damaged, whole), &["a"]),
    ] {
        found.refuses(&[words]);
        let told = |side: &&str| {
            let front = format!("ckptcmp: {side}: ");
            found.stderr.lines().any(|line| line.starts_with(&front) && line.contains(words))
        };
        assert!(sides.iter().all(told), "{what}: {}", found.stderr);
    }
    let lines = check(damaged).stderr.lines().count();
    assert_eq!(lines, 1, "{what}: one cause is one line: {}", check(damaged).stderr);
}

#[track_caller]
fn are_missed(whole: &[String], losses: &[Loss], write: impl Fn(&Path, &[String])) {
    let folder = TempDir::new().unwrap();
    let path = |number: usize| folder.path().join(format!("model{number}"));
    write(&path(0), whole);
    let sound = check(&path(0));
    assert_eq!(sound.code, 0, "{sound:?}");
    for (number, (what, is_lost, words)) in (1..).zip(losses) {
        let rest: Vec<String> = whole.iter().filter(|name| !is_lost(name)).cloned().collect();
        assert!(rest.len() < whole.len(), "{what} is in no name");
        write(&path(number), &rest);
        is_missed(what, &path(0), &path(number), words);
    }
}

/// A Megatron model of four layers, the first one dense, the others of four experts, and one that predicts further tokens.
fn megatron_names() -> Vec<String> {
    let attention =
        ["linear_qkv", "linear_proj"].map(|name| format!("self_attention.{name}.weight"));
    let norms = ["input_layernorm.weight", "pre_mlp_layernorm.weight"].map(str::to_owned);
    let linears = ["linear_fc1.weight", "linear_fc2.weight"];
    let dense: Vec<String> = linears.iter().map(|name| format!("mlp.{name}")).collect();
    let experts = |count: u64| {
        let expert = move |name: &&str| {
            let name = (*name).to_owned();
            (0..count).map(move |number| format!("mlp.experts.local_experts.{number}.{name}"))
        };
        linears.iter().flat_map(expert).chain(["mlp.router.weight".to_owned()]).collect::<Vec<_>>()
    };
    let layer = |before: &str, mlp: &[String]| -> Vec<String> {
        let all = attention.iter().chain(&norms).chain(mlp);
        all.map(|name| format!("{before}{name}")).collect()
    };
    let outside = [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ];
    let mut names: Vec<String> = outside.map(str::to_owned).to_vec();
    names.extend(layer("decoder.layers.0.", &dense));
    (1..4)
        .for_each(|number| names.extend(layer(&format!("decoder.layers.{number}."), &experts(4))));
    names.extend(layer("mtp.layers.0.transformer_layer.", &experts(4)));
    names.extend(
        ["enorm", "hnorm", "eh_proj", "final_layernorm"]
            .map(|name| format!("mtp.layers.0.{name}.weight")),
    );
    names
}

fn megatron_args() -> P {
    let list = |numbers: &[i64]| P::List(numbers.iter().map(|number| P::Int(*number)).collect());
    namespace([
        ("num_layers", P::Int(4)),
        ("mtp_num_layers", P::Int(1)),
        ("num_experts", P::Int(4)),
        ("moe_layer_freq", list(&[0, 1, 1, 1])),
        ("untie_embeddings_and_output_weights", P::Bool(true)),
        ("position_embedding_type", P::Str("learned_absolute".to_owned())),
        ("num_attention_heads", P::Int(4)),
        ("kv_channels", P::Int(2)),
    ])
}

fn write_megatron(path: &Path, names: &[String], args: P) {
    let shape = |name: &str| if name.contains("norm") { vec![8] } else { vec![8, 8] };
    let model = dict(names.iter().map(|name| (name.as_str(), tensor(&shape(name)))));
    let whole = dict([
        ("args", args),
        ("checkpoint_version", P::Int(3)),
        ("iteration", P::Int(5)),
        ("model", model),
    ]);
    let folder = path.join("iter_0000005/mp_rank_00");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("model_optim_rng.pt"), file(whole.pickle())).unwrap();
}

#[test]
fn every_part_of_a_megatron_model_is_missed() {
    #[rustfmt::skip]
    let losses: &[Loss] = &[
        ("last layer", |name| name.starts_with("decoder.layers.3."), "decoder.layers.3: layer 3 is missing: args say num_layers=4"),
        ("first layer", |name| name.starts_with("decoder.layers.0."), "decoder.layers.0: layer 0 is missing: args say num_layers=4"),
        ("two layers", |name| name.starts_with("decoder.layers.1.") || name.starts_with("decoder.layers.2."), "decoder.layers: layers 1, 2 are missing: args say num_layers=4"),
        ("half a layer", |name| name.starts_with("decoder.layers.2.mlp."), "decoder.layers.2: lacks mlp."),
        ("qkv", |name| name == "decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.1.self_attention.linear_qkv.weight: missing"),
        ("qkv everywhere", |name| name.starts_with("decoder.") && name.ends_with("linear_qkv.weight"), "decoder.layers: layers 0-3 lack self_attention.linear_qkv.weight"),
        ("norm of a layer", |name| name == "decoder.layers.3.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight: missing"),
        ("expert", |name| name.starts_with("decoder.layers.2.mlp.experts.local_experts.1."), "decoder.layers.2.mlp.experts.local_experts.1: expert 1 is missing: args say num_experts=4"),
        ("half an expert", |name| name == "decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight", "decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight: missing"),
        ("last experts", |name| name.starts_with("decoder.") && name.contains("local_experts.3."), "decoder.layers: experts 3 of mlp.experts.local_experts are missing in layers 1-3: args say num_experts=4"),
        ("embedding", |name| name.starts_with("embedding.word"), "embedding.word_embeddings.weight: missing"),
        ("position embedding", |name| name.starts_with("embedding.position"), "embedding.position_embeddings.weight: missing: args say position_embedding_type=learned_absolute"),
        ("final norm", |name| name.starts_with("decoder.final"), "decoder.final_layernorm.weight: missing"),
        ("output layer", |name| name.starts_with("output"), "output_layer.weight: missing: args say untie_embeddings_and_output_weights=true"),
        ("further tokens", |name| name.starts_with("mtp."), "mtp.layers: missing altogether: args say mtp_num_layers=1"),
        ("norm of the only dense layer", |name| name == "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight: missing, though mlp is there"),
        ("half of further tokens", |name| name == "mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.weight: missing"),
    ];
    let write = |path: &Path, names: &[String]| write_megatron(path, names, megatron_args());
    are_missed(&megatron_names(), losses, write);
}

#[test]
fn the_share_and_the_precision_of_layers_make_no_kind_of_them() {
    let folder = TempDir::new().unwrap();
    let is_dense = |name: &String| !name.contains("experts") && !name.contains("router");
    let args = || {
        namespace([
            ("num_layers", P::Int(4)),
            ("decoder_first_pipeline_num_layers", P::Int(1)),
            ("num_layers_at_start_in_bf16", P::Int(1)),
            ("num_layers_at_end_in_bf16", P::Int(1)),
            ("num_attention_heads", P::Int(4)),
            ("kv_channels", P::Int(2)),
        ])
    };
    let mut names = megatron_names();
    names.retain(|name| !name.starts_with("mtp.") && is_dense(name));
    for layer in 1..4 {
        names.extend(["1", "2"].map(|n| format!("decoder.layers.{layer}.mlp.linear_fc{n}.weight")));
    }
    write_megatron(&folder.path().join("whole"), &names, args());
    assert_eq!(check(&folder.path().join("whole")).code, 0);
    names.retain(|name| !name.starts_with("decoder.layers.0.mlp."));
    write_megatron(&folder.path().join("half"), &names, args());
    check(&folder.path().join("half")).refuses(&["decoder.layers.0: lacks mlp."]);
}

#[test]
fn layers_without_weights_and_a_layer_that_is_used_again_are_no_loss() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    let block = |is_idle: bool| {
        format!("{{\"attention\": {{\"no_op\": {is_idle}}}, \"mlp\": {{\"no_op\": {is_idle}}}}}")
    };
    let blocks = [false, true, false, true].map(block).join(", ");
    let args = |predictions: i64| {
        namespace([
            ("num_layers", P::Int(4)),
            ("mtp_num_layers", P::Int(predictions)),
            ("mtp_use_repeated_layer", P::Bool(true)),
            (
                "heterogeneous_layers_config_encoded_json",
                P::Str(format!("{{\"block_configs\": [{blocks}]}}")),
            ),
            ("num_attention_heads", P::Int(4)),
            ("kv_channels", P::Int(2)),
        ])
    };
    let mut names = megatron_names();
    names.retain(|name| {
        !["1", "3"].iter().any(|n| name.starts_with(&format!("decoder.layers.{n}.")))
    });
    write_megatron(&path("whole"), &names, args(3));
    let whole = check(&path("whole"));
    assert_eq!(whole.code, 0, "{whole:?}");
    names.retain(|name| !name.starts_with("decoder.layers.2.") && !name.starts_with("mtp."));
    write_megatron(&path("less"), &names, args(3));
    check(&path("less")).refuses(&[
        "decoder.layers.2: layer 2 is missing: args say num_layers=4",
        "mtp.layers: missing altogether: args say mtp_num_layers=3, mtp_use_repeated_layer=true",
    ]);
}

#[test]
fn a_number_on_the_command_line_wins_over_that_of_the_checkpoint() {
    let folder = TempDir::new().unwrap();
    let names = megatron_names();
    let rest: Vec<String> =
        names.into_iter().filter(|name| !name.starts_with("decoder.layers.3.")).collect();
    write_megatron(folder.path(), &rest, megatron_args());
    check(folder.path()).refuses(&["--set num_layers=3"]);
    let given = run(["check", "--set", "num_layers=3", folder.path().to_str().unwrap()]);
    assert_eq!(given.code, 0, "{given:?}");
}

/// Numbers of layers that nobody has are compared and never counted up to.
#[test]
fn an_announced_number_costs_nothing() {
    let folder = TempDir::new().unwrap();
    let many = namespace([("num_layers", P::Int(1 << 40)), ("num_experts", P::Int(1 << 39))]);
    let names: Vec<String> =
        megatron_names().into_iter().filter(|name| !name.starts_with("mtp.")).collect();
    write_megatron(folder.path(), &names, many);
    check(folder.path()).refuses(&["num_layers=1099511627776"]);
}

/// A Hugging Face model as `config.json` announces it.
fn write_hf(path: &Path, names: &[String], config: &str) {
    fs::create_dir_all(path).unwrap();
    fs::write(path.join("config.json"), config).unwrap();
    let value = Array::float32(&[1.0, 2.0]);
    write_safetensors(
        &path.join("model.safetensors"),
        names.iter().map(|name| (name.as_str(), &value)),
        &json!({}),
    );
}

fn hf_names() -> Vec<String> {
    let inside = [
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate",
    ];
    let experts = (0..4).flat_map(|expert| {
        ["gate_proj", "up_proj", "down_proj"].map(|name| format!("mlp.experts.{expert}.{name}"))
    });
    let inside: Vec<String> = inside.map(str::to_owned).into_iter().chain(experts).collect();
    let mut names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
        .map(str::to_owned)
        .to_vec();
    for number in 0..3 {
        names.extend(inside.iter().map(|name| format!("model.layers.{number}.{name}.weight")));
    }
    names
}

#[test]
fn every_part_of_a_hugging_face_model_is_missed() {
    let config = r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 4, "tie_word_embeddings": false}"#;
    #[rustfmt::skip]
    let losses: &[Loss] = &[
        ("last layer", |name| name.starts_with("model.layers.2."), "model.layers.2: layer 2 is missing: config.json says num_hidden_layers=3"),
        ("middle layer", |name| name.starts_with("model.layers.1."), "model.layers.1: layer 1 is missing"),
        ("half a layer", |name| name.starts_with("model.layers.1.self_attn."), "model.layers.1: lacks self_attn."),
        ("query", |name| name == "model.layers.2.self_attn.q_proj.weight", "model.layers.2.self_attn.q_proj.weight: missing"),
        ("expert", |name| name.starts_with("model.layers.0.mlp.experts.3."), "model.layers.0.mlp.experts.3: expert 3 is missing: config.json says num_experts=4"),
        ("embedding", |name| name.starts_with("model.embed"), "model.embed_tokens.weight: missing"),
        ("final norm", |name| name == "model.norm.weight", "model.norm.weight: missing"),
        ("output layer", |name| name == "lm_head.weight", "lm_head.weight: missing: config.json says tie_word_embeddings=false"),
    ];
    are_missed(&hf_names(), losses, |path, names| write_hf(path, names, config));
}

/// What is not whole on purpose lacks nothing.
#[test]
fn parts_named_on_purpose_are_not_judged() {
    let rank = fixture("layouts/gpt/tp2pp2/iter_0000005/mp_rank_01_001");
    assert_eq!(check(&rank).code, 0, "{rank:?}");
    let folder = TempDir::new().unwrap();
    let names: Vec<String> =
        hf_names().into_iter().filter(|name| name.contains("layers.1.self")).collect();
    let value = Array::float32(&[1.0]);
    for name in ["adapter_model.safetensors", "model-00002-of-00009.safetensors"] {
        let path: PathBuf = folder.path().join(name);
        write_safetensors(&path, names.iter().map(|name| (name.as_str(), &value)), &json!({}));
        let found = check(&path);
        assert_eq!(found.code, 0, "{found:?}");
    }
}

/// Real layers that differ by rule: the first of T5, dense layers before those of experts, other heads and no head at all.
#[test]
fn models_that_are_whole_lack_nothing() {
    let folder = TempDir::new().unwrap();
    let base: Vec<String> =
        hf_names().into_iter().filter(|name| name != "lm_head.weight").collect();
    let config = r#"{"architectures": ["Qwen3MoeModel"], "num_hidden_layers": 3, "num_experts": 4, "tie_word_embeddings": false}"#;
    write_hf(folder.path(), &base, config);
    assert_eq!(check(folder.path()).code, 0, "{:?}", check(folder.path()));
}

/// Real files from which a name is taken: it becomes that of a buffer, which is no weight.
#[test]
fn parts_of_real_files_are_missed() {
    #[rustfmt::skip]
    let cases: &[(&str, &str, &str)] = &[
        ("layouts/gpt-tied/pp2", "output_layer.weight", "output_layer.weight: missing: of tied weights the last of several stages stores its own copy"),
        ("layouts/bert/tp2", "lm_head.dense.weight", "lm_head.dense.weight: missing, though lm_head.dense.bias is there"),
        ("layouts/bert/tp2", "lm_head.layer_norm.bias", "lm_head.layer_norm.bias: missing, though lm_head.dense.bias is there"),
        ("layouts/bert/tp1", "binary_head.weight", "binary_head.weight: missing, though binary_head.bias is there"),
        ("layouts/bert/tp1", "pooler.dense.bias", "pooler.dense.bias: missing, though pooler.dense.weight is there"),
        ("layouts/gpt/pp2", "decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers: layers 1, 4 lack self_attention.linear_qkv.weight, which 4 others"),
        ("layouts/gpt/tp2pp2", "decoder.final_layernorm.weight", "decoder.final_layernorm.weight: missing"),
        ("layouts/gpt-small/tp1", "embedding.word_embeddings.weight", "embedding.word_embeddings.weight: missing"),
    ];
    for (source, name, words) in cases {
        let copied = Copied::of(&fixture(source));
        let end = "._extra_state";
        let buffer = format!("{}{end}", "x".repeat(name.len() - end.len()));
        rename_key(&copied.path(), name, &buffer);
        is_missed(name, &fixture(source), &copied.path(), words);
    }
}

/// Names of a model of GPT-2's, as `config.json` says it is.
fn gpt2_names() -> Vec<String> {
    let modules = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"];
    let inside =
        (0..4).flat_map(|layer| modules.map(|name| format!("transformer.h.{layer}.{name}")));
    let both = inside.chain(["transformer.ln_f".to_owned()]);
    let names = both.flat_map(|name| ["weight", "bias"].map(|end| format!("{name}.{end}")));
    names.chain(["wte", "wpe"].map(|name| format!("transformer.{name}.weight"))).collect()
}

#[test]
fn every_part_of_a_gpt2_is_missed() {
    let config = r#"{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 4}"#;
    #[rustfmt::skip]
    let losses: &[Loss] = &[
        ("positions", |name| name == "transformer.wpe.weight", "transformer.wpe.weight: missing: config.json says model_type=gpt2"),
        ("bias of the final norm", |name| name == "transformer.ln_f.bias", "transformer.ln_f.bias: missing, though layers have ln_1.bias"),
        ("embedding", |name| name == "transformer.wte.weight", "transformer.wte.weight: missing"),
    ];
    are_missed(&gpt2_names(), losses, |path, names| write_hf(path, names, config));
}

/// A name that became another one is lost, though one of its layer is as good as any for who counts names.
#[test]
fn a_name_that_nobody_knows_stands_for_no_other() {
    let config = r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 4, "tie_word_embeddings": false}"#;
    for (name, new, words) in [
        (
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.1.self_attn.q_prox.weight",
            "model.layers.1.self_attn.q_proj.weight: missing",
        ),
        (
            "model.layers.2.input_layernorm.weight",
            "model.layers.2.inputlayernorm.weight",
            "model.layers.2.input_layernorm.weight: missing",
        ),
    ] {
        let folder = TempDir::new().unwrap();
        let names = hf_names();
        let renamed = names.iter().map(|own| if own == name { new } else { own }.to_owned());
        write_hf(&folder.path().join("whole"), &names, config);
        write_hf(&folder.path().join("renamed"), &renamed.collect::<Vec<_>>(), config);
        is_missed(name, &folder.path().join("whole"), &folder.path().join("renamed"), words);
    }
}

/// Layers that predict further tokens are wanted where one of them is there, and none of them need be.
#[test]
fn further_tokens_are_missed_where_some_are_kept() {
    let config = r#"{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 3, "num_nextn_predict_layers": 2, "n_routed_experts": 4, "tie_word_embeddings": false}"#;
    let mut names = hf_names();
    let folder = TempDir::new().unwrap();
    write_hf(folder.path(), &names, config);
    assert_eq!(check(folder.path()).code, 0, "{:?}", check(folder.path()));
    let own = |name: &&String| name.starts_with("model.layers.2.");
    let kept: Vec<String> = hf_names().iter().filter(own).cloned().collect();
    for layer in 3..5 {
        names
            .extend(kept.iter().map(|name| name.replace("layers.2.", &format!("layers.{layer}."))));
        names.extend(
            ["enorm", "hnorm", "eh_proj"].map(|name| format!("model.layers.{layer}.{name}.weight")),
        );
    }
    #[rustfmt::skip]
    let losses: &[Loss] = &[
        ("the last one", |name| name.starts_with("model.layers.4."), "model.layers.4: layer 4 is missing"),
        ("its projection", |name| name == "model.layers.4.eh_proj.weight", "model.layers.4.eh_proj.weight: missing"),
        ("its query", |name| name == "model.layers.4.self_attn.q_proj.weight", "model.layers.4.self_attn.q_proj.weight: missing"),
    ];
    are_missed(&names, losses, |path, names| write_hf(path, names, config));
}

/// What one file of a place has lost and another one holds, in real files.
#[test]
fn what_only_one_of_several_files_lost_is_missed() {
    let buffer = |name: &str, end: &str| format!("{}{end}", "x".repeat(name.len() - end.len()));
    #[rustfmt::skip]
    let cases: &[(&str, &str, &str, &str)] = &[
        ("layouts/moe/seq-ep2", "mp_rank_00_001", "decoder.final_layernorm.weight", "decoder.final_layernorm.weight: missing, which mp_rank_00_000/model_optim_rng.pt holds"),
        ("layouts/moe/seq-tp2ep2", "mp_rank_01_000", "decoder.layers.1.mlp.router.weight", "decoder.layers.1.mlp.router.weight: missing, which mp_rank_00_000/model_optim_rng.pt holds"),
        ("layouts/moe/pp2ep2", "mp_rank_00_001_000", "output_layer.weight", "output_layer.weight: missing, which mp_rank_00_001_001/model_optim_rng.pt holds"),
        ("layouts/moe/seq-tp4ep2etp1", "mp_rank_02_000", "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight", "linear_fc1.weight: missing, which mp_rank_00_000/model_optim_rng.pt holds"),
        ("layouts/gpt/tp2pp2", "mp_rank_01_001", "decoder.final_layernorm.weight", "decoder.final_layernorm.weight: missing on tp rank 1"),
    ];
    for (source, rank, name, words) in cases {
        let copied = Copied::of(&fixture(source));
        let rank = copied.path().join("iter_0000005").join(rank);
        rename_key(&rank, name, &buffer(name, "._extra_state"));
        let damaged = copied.path();
        check(&damaged).refuses(&[words]);
        compare(&damaged, &damaged).refuses(&[words]);
        compare(&fixture(source), &damaged).refuses(&[words]);
    }
    let copied = Copied::of(&fixture("infinitrain/gpt2/tp2dp2"));
    let name = "transformer.ln_f.weight";
    let rank = copied.path().join("checkpoint_step_000007/rank_000003");
    assert_eq!(replace(&rank, name.as_bytes(), buffer(name, ".freqs_cis").as_bytes()), 1);
    check(&copied.path())
        .refuses(&[&format!("{name}: missing, which rank_000000/model.ckpt holds")]);
}

/// A DeepSpeed module, and what the file says of its parameters beside it.
fn write_deepspeed(path: &Path, names: &[String], said: &[(&str, P)]) {
    let module = dict(names.iter().map(|name| (name.as_str(), tensor(&[2, 2]))));
    let said = said.iter().map(|(key, value)| (*key, value.clone()));
    let whole = dict([("module", module), ("global_steps", P::Int(5))].into_iter().chain(said));
    let folder = path.join("global_step5");
    fs::create_dir_all(&folder).unwrap();
    fs::write(path.join("latest"), "global_step5").unwrap();
    fs::write(folder.join("mp_rank_00_model_states.pt"), file(whole.pickle())).unwrap();
}

/// Of modules with names of their own all that is known is what their checkpoints list.
#[test]
fn what_a_checkpoint_lists_is_missed() {
    let names = ["enc.a.weight", "enc.b.weight", "mean"].map(str::to_owned);
    let shape = || P::List(vec![P::Int(2), P::Int(2)]);
    let shapes = |names: &[&str]| dict(names.iter().map(|name| (*name, shape())));
    let with_zero = [
        ("param_shapes", P::List(vec![shapes(&["enc.a.weight"])])),
        ("frozen_param_shapes", shapes(&["enc.b.weight"])),
        ("buffer_names", P::List(vec![P::Str("mean".to_owned())])),
    ];
    #[rustfmt::skip]
    let losses: &[Loss] = &[
        ("parameter", |name| name == "enc.a.weight", "enc.a.weight: missing: mp_rank_00_model_states.pt lists it"),
        ("frozen", |name| name == "enc.b.weight", "enc.b.weight: missing: mp_rank_00_model_states.pt lists it"),
        ("buffer", |name| name == "mean", "mean: missing: buffer_names of mp_rank_00_model_states.pt lists it"),
    ];
    are_missed(&names, losses, |path, names| write_deepspeed(path, names, &with_zero));
    let group = dict([("params", P::List((0..3).map(P::Int).collect()))]);
    let adam = dict([("state", P::Dict(Vec::new())), ("param_groups", P::List(vec![group]))]);
    let plain = [("optimizer", adam)];
    let losses: &[Loss] = &[(
        "one of three",
        |name| name == "mean",
        "the module holds 2 parameters, and its optimizer knows 3",
    )];
    are_missed(&names, losses, |path, names| write_deepspeed(path, names, &plain));

    let state = |n: i64| {
        P::Dict(vec![(P::Str("exp_avg".to_owned()), tensor(&[2 + n.unsigned_abs() / 2, 2]))])
    };
    let states = P::Dict((0..3).map(|n| (P::Int(n), state(n))).collect());
    let group = dict([("params", P::List((0..3).map(P::Int).collect()))]);
    let adam = dict([("state", states), ("param_groups", P::List(vec![group]))]);
    let folder = TempDir::new().unwrap();
    write_deepspeed(folder.path(), &names, &[("optimizer", adam)]);
    let words = "a parameter of shape [3, 2] is missing from the module";
    check(folder.path()).refuses(&[words]);

    let copied = Copied::of(&fixture("dcp/wrapped"));
    let [name, other] = ["t", "x"].map(|end| format!("app.model.module._orig_mod.norm.weigh{end}"));
    assert!(replace(&copied.path(), name.as_bytes(), other.as_bytes()) > 0);
    let words = "norm.weight: missing: the optimizer knows it";
    is_missed(&name, &fixture("dcp/wrapped"), &copied.path(), words);
}
