//! Descriptions of a model beside its weights: Megatron Bridge's and NeMo's take the place of the `args` that they do not store.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::common::{Copied, Run, ckptcmp, compare, fixture, inspect};

/// What Megatron Bridge writes of a model of two layers, as far as it matters and as its dumper forms it.
fn run_config(changes: &[(&str, &str)]) -> String {
    let text = "\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  save_optim: true
data_parallel_size: 1
ddp: null
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  gated_linear_unit: true
  hidden_size: 8
  init_method:
    _args_: []
    _partial_: true
    _target_: torch.nn.init.normal_
    mean: 0.0
    std: 0.02
  kv_channels: 2
  layernorm_epsilon: 1.0e-05
  moe_layer_freq: 1
  num_attention_heads: 4
  num_layers: 2
  num_moe_experts: null
  num_query_groups: 2
  pipeline_model_parallel_size: 2
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
optimizer:
  _target_: megatron.core.optimizer.optimizer_config.OptimizerConfig
  optimizer: adam
peft: null
";
    changes.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    })
}

/// A checkpoint that says nothing of its run.
fn without_args() -> Copied {
    let copied = Copied::of(&fixture("torch_dist/gpt-small/tp2pp2"));
    fs::remove_file(copied.iteration().join("common.pt")).unwrap();
    copied
}

fn check(path: &Path) -> Run {
    Run::of(ckptcmp().arg("check").arg(path))
}

#[test]
fn a_description_in_the_folder_is_held_against_the_weights() {
    let bridge = without_args();
    let file = bridge.iteration().join("run_config.yaml");
    fs::write(&file, run_config(&[])).unwrap();
    assert_eq!(check(&bridge.path()).code, 0);
    let whole = fixture("torch_dist/gpt-small/tp2pp2");
    assert_eq!(compare(&bridge.path(), &whole).code, 0);
    assert_eq!(inspect(&bridge.path())["layout"], "tp2 pp2");
    for (changes, words) in [
        (
            ("num_layers: 2", "num_layers: 3"),
            "decoder.layers.2: layer 2 is missing: run_config.yaml says num_layers=3",
        ),
        (
            ("num_layers: 2", "num_layers: 2\n  mtp_num_layers: 1"),
            "mtp.layers: missing altogether: run_config.yaml says mtp_num_layers=1",
        ),
        (
            ("position_embedding_type: rope", "position_embedding_type: learned_absolute"),
            "embedding.position_embeddings.weight: missing",
        ),
    ] {
        fs::write(&file, run_config(&[changes])).unwrap();
        check(&bridge.path()).refuses(&[words]);
        compare(&bridge.path(), &whole).refuses(&[words]);
    }
}

#[test]
fn a_description_beside_the_folder_is_found() {
    let model = run_config(&[("num_layers: 2", "num_layers: 3")]);
    let of_nemo = model[model.find("model:").unwrap()..model.find("optimizer:").unwrap()].replacen(
        "model:",
        "_target_: nemo.collections.llm.gpt.model.base.GPTModel\nconfig:",
        1,
    );
    for (place, text, words) in [
        ("run_config.yaml", model.as_str(), "run_config.yaml says num_layers=3"),
        ("context/model.yaml", of_nemo.as_str(), "model.yaml says num_layers=3"),
        (
            "model_config.yaml",
            "num_layers: 3\nactivation: swiglu\n",
            "model_config.yaml says num_layers=3",
        ),
    ] {
        let copied = without_args();
        let folder = TempDir::new().unwrap();
        let weights = folder.path().join("weights");
        fs::rename(copied.iteration(), &weights).unwrap();
        assert_eq!(check(&weights).code, 0);
        let file = folder.path().join(place);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
        check(&weights).refuses(&[words]);
    }
}

#[test]
fn the_arguments_of_the_checkpoint_itself_win() {
    let copied = Copied::of(&fixture("torch_dist/gpt-small/tp2pp2"));
    let text = run_config(&[("num_layers: 2", "num_layers: 3")]);
    fs::write(copied.iteration().join("run_config.yaml"), text).unwrap();
    assert_eq!(check(&copied.path()).code, 0);
}

#[test]
fn a_damaged_description_is_noted_and_costs_no_weights() {
    for text in ["model: [", "- 1\n", "a: &a [*a, *a]\nmodel: *b\n"] {
        let copied = without_args();
        fs::write(copied.iteration().join("run_config.yaml"), text).unwrap();
        let run = check(&copied.path());
        assert_eq!(run.code, 0, "{run:?}");
        assert!(run.stdout.contains("run_config.yaml"), "{run:?}");
    }
}

#[test]
fn what_an_adapter_adds_is_a_part() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("metadata.json"), r#"{"sharded_backend": "zarr"}"#).unwrap();
    for layer in [0, 2] {
        let name =
            format!("decoder.layers.{layer}.self_attention.linear_qkv.adapter.linear_in.weight");
        let array = folder.path().join(name);
        fs::create_dir(&array).unwrap();
        let header = r#"{"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f4", "order": "C", "compressor": null, "filters": null, "fill_value": null}"#;
        fs::write(array.join(".zarray"), header).unwrap();
        fs::write(array.join("0"), [0; 8]).unwrap();
    }
    let description =
        |peft| run_config(&[("num_layers: 2", "num_layers: 4"), ("peft: null", peft)]);
    let file = folder.path().join("run_config.yaml");
    fs::write(&file, description("peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: 8"))
        .unwrap();
    let run = check(folder.path());
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("what an adapter adds"), "{run:?}");
    fs::write(&file, description("peft: null")).unwrap();
    check(folder.path()).refuses(&["layers 1, 3 are missing"]);
}
