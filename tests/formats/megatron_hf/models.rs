//! Models of Hugging Face and llm.c, made from fixtures element by element and without the tables that are tested.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::array::{Array, write_safetensors};
use crate::common::inspect;

const HEADS: usize = 4;
/// Rows of the true vocabulary of `fixtures/layouts`.
const VOCABULARY: usize = 50;

pub(super) type Model = BTreeMap<String, Array>;

/// The tensors of a fixture under canonical names, the padding of the vocabulary cut off.
pub(super) fn canonical(checkpoint: &Path) -> Model {
    let inspected = inspect(checkpoint);
    let tensors = inspected["tensors"].as_object().unwrap().iter().map(|(name, tensor)| {
        let array = Array::of(tensor);
        let is_vocabulary = name.contains("word_embeddings") || name.contains("output_layer");
        (name.clone(), if is_vocabulary { array.rows(0..VOCABULARY) } else { array })
    });
    tensors.collect()
}

/// The rows of a fused projection that are queries, keys and values.
fn head_rows(rows: usize, groups: usize) -> [Vec<usize>; 3] {
    let size = rows / (HEADS + 2 * groups);
    let queries = HEADS / groups * size;
    let mut found = [const { Vec::new() }; 3];
    for row in 0..rows {
        let inside = row % (queries + 2 * size);
        found[usize::from(inside >= queries) + usize::from(inside >= queries + size)].push(row);
    }
    found
}

fn halves(tensor: &Array) -> [Array; 2] {
    let rows = tensor.shape[0];
    [tensor.rows(0..rows / 2), tensor.rows(rows / 2..rows)]
}

/// The layer's number and the rest of a canonical name.
fn in_layer<'n>(name: &'n str, list: &str) -> Option<(usize, &'n str)> {
    let (number, rest) = name.strip_prefix(list)?.split_once('.')?;
    Some((number.parse().unwrap(), rest))
}

/// A model as Llama, Qwen and DeepSeek have it, with two query groups.
pub(super) fn llama(model: &Model) -> Model {
    let layers = model.keys().filter_map(|name| in_layer(name, "decoder.layers."));
    let layers = layers.map(|(number, _)| number + 1).max().unwrap();
    let mut hf = Model::new();
    for (name, tensor) in model {
        let (number, rest) =
            match (in_layer(name, "decoder.layers."), in_layer(name, "mtp.layers.")) {
                (Some(found), _) => found,
                (_, Some((number, rest))) => {
                    let rest = rest.strip_prefix("transformer_layer.").unwrap_or(rest);
                    (layers + number, rest)
                }
                _ => {
                    let hf_name = match name.as_str() {
                        "embedding.word_embeddings.weight" => "model.embed_tokens.weight",
                        "decoder.final_layernorm.weight" => "model.norm.weight",
                        "output_layer.weight" => "lm_head.weight",
                        _ => panic!("{name}"),
                    };
                    hf.insert(hf_name.to_owned(), tensor.clone());
                    continue;
                }
            };
        let (module, kind) = rest.rsplit_once('.').unwrap();
        let of_layer = |module: &str| format!("model.layers.{number}.{module}.{kind}");
        let mut put = |module: &str, tensor: Array| drop(hf.insert(of_layer(module), tensor));
        let mlp = module.strip_suffix(".linear_fc1").or_else(|| module.strip_suffix(".linear_fc2"));
        if let Some(mlp) = mlp {
            let mlp = mlp.replace("local_experts.", "").replace("shared_experts", "shared_expert");
            if module.ends_with("fc1") {
                let [gate, up] = halves(tensor);
                put(&format!("{mlp}.gate_proj"), gate);
                put(&format!("{mlp}.up_proj"), up);
            } else {
                put(&format!("{mlp}.down_proj"), tensor.clone());
            }
            continue;
        }
        let module = match module {
            "self_attention.linear_qkv" => {
                let rows = head_rows(tensor.shape[0], 2);
                for (module, rows) in ["q_proj", "k_proj", "v_proj"].iter().zip(rows) {
                    put(&format!("self_attn.{module}"), tensor.rows(rows));
                }
                continue;
            }
            "mlp.router" if kind == "expert_bias" => {
                let name = format!("model.layers.{number}.mlp.gate.e_score_correction_bias");
                hf.insert(name, tensor.clone());
                continue;
            }
            "mlp.router" => "mlp.gate",
            "mlp.shared_experts" => {
                hf.insert(
                    format!("model.layers.{number}.mlp.shared_expert_gate.weight"),
                    tensor.clone(),
                );
                continue;
            }
            "pre_mlp_layernorm" => "post_attention_layernorm",
            "final_layernorm" => "shared_head.norm",
            "self_attention.linear_proj" => "self_attn.o_proj",
            "self_attention.q_layernorm"
                if model.keys().any(|name| name.contains("_down_proj")) =>
            {
                "self_attn.q_a_layernorm"
            }
            "self_attention.kv_layernorm" => "self_attn.kv_a_layernorm",
            "self_attention.q_layernorm" => "self_attn.q_norm",
            "self_attention.k_layernorm" => "self_attn.k_norm",
            "self_attention.linear_q_down_proj" => "self_attn.q_a_proj",
            "self_attention.linear_q_up_proj" => "self_attn.q_b_proj",
            "self_attention.linear_kv_down_proj" => "self_attn.kv_a_proj_with_mqa",
            "self_attention.linear_kv_up_proj" => "self_attn.kv_b_proj",
            other => other,
        };
        put(module, tensor.clone());
    }
    hf
}

/// A model as GPT-2 has it.
pub(super) fn gpt2(model: &Model) -> Model {
    let mut hf = Model::new();
    for (name, tensor) in model {
        let turned = if tensor.shape.len() == 2 { tensor.transposed() } else { tensor.clone() };
        let (hf_name, tensor) = match in_layer(name, "decoder.layers.") {
            None => match name.as_str() {
                "embedding.word_embeddings.weight" => ("wte.weight".to_owned(), tensor.clone()),
                "embedding.position_embeddings.weight" => ("wpe.weight".to_owned(), tensor.clone()),
                _ => (name.replace("decoder.final_layernorm", "ln_f"), tensor.clone()),
            },
            Some((number, rest)) => {
                let (module, kind) = rest.rsplit_once('.').unwrap();
                let (module, tensor) = match module {
                    "input_layernorm" => ("ln_1", tensor.clone()),
                    "pre_mlp_layernorm" => ("ln_2", tensor.clone()),
                    "self_attention.linear_qkv" => {
                        let rows = head_rows(tensor.shape[0], HEADS).concat();
                        let blocks = tensor.rows(rows);
                        ("attn.c_attn", if kind == "weight" { blocks.transposed() } else { blocks })
                    }
                    "self_attention.linear_proj" => ("attn.c_proj", turned),
                    "mlp.linear_fc1" => ("mlp.c_fc", turned),
                    "mlp.linear_fc2" => ("mlp.c_proj", turned),
                    other => panic!("{other}"),
                };
                (format!("h.{number}.{module}.{kind}"), tensor)
            }
        };
        hf.insert(format!("transformer.{hf_name}"), tensor);
    }
    hf
}

/// A folder of such a model; without a description where `config` is null.
pub(super) fn folder(model: &Model, config: &Value) -> TempDir {
    let folder = TempDir::new().unwrap();
    let tensors = model.iter().map(|(name, tensor)| (name.as_str(), tensor));
    write_safetensors(&folder.path().join("model.safetensors"), tensors, &json!({}));
    if !config.is_null() {
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    }
    folder
}

pub(super) fn config(model_type: &str) -> Value {
    json!({
        "model_type": model_type,
        "num_attention_heads": HEADS,
        "num_key_value_heads": if model_type == "gpt2" { HEADS } else { 2 },
        "tie_word_embeddings": model_type == "gpt2",
    })
}

/// llm.c's file of a Llama in bfloat16: pairs of neighbouring rows are rotated, and the second linear is the gate.
pub(super) fn llama_bin(model: &Model, groups: usize) -> Vec<u8> {
    let layers = model.keys().filter_map(|name| in_layer(name, "decoder.layers."));
    let layers = layers.map(|(number, _)| number + 1).max().unwrap();
    let of =
        |layer: usize, rest: &str| model[&format!("decoder.layers.{layer}.{rest}.weight")].clone();
    let embeddings = &model["embedding.word_embeddings.weight"];
    let [vocabulary, hidden] = embeddings.shape[..] else { panic!("no matrix") };
    let ffn = of(0, "mlp.linear_fc1").shape[0] / 2;
    let multiplier = ffn as f32 / (2 * (4 * hidden) / 3) as f32;
    let fields = [20_240_803, 5, 64, vocabulary, layers, HEADS, groups, hidden];
    let mut bytes: Vec<u8> =
        fields.iter().flat_map(|field| u32::try_from(*field).unwrap().to_le_bytes()).collect();
    bytes.extend(multiplier.to_le_bytes());
    bytes.extend(1_u32.to_le_bytes());
    bytes.resize(1024, 0);
    let qkv = |layer: usize| {
        let whole = of(layer, "self_attention.linear_qkv");
        let size = hidden / HEADS;
        let [queries, keys, values] = head_rows(whole.shape[0], groups);
        let pairs = |rows: Vec<usize>| {
            let heads = rows
                .chunks(size)
                .flat_map(|head| (0..size / 2).flat_map(|row| [head[row], head[size / 2 + row]]));
            heads.collect::<Vec<_>>()
        };
        whole.rows([pairs(queries), pairs(keys), values].concat())
    };
    bytes.extend(&embeddings.bytes);
    let kinds: [&dyn Fn(usize) -> Array; 7] = [
        &|layer| of(layer, "input_layernorm"),
        &qkv,
        &|layer| of(layer, "self_attention.linear_proj"),
        &|layer| of(layer, "pre_mlp_layernorm"),
        &|layer| halves(&of(layer, "mlp.linear_fc1"))[1].clone(),
        &|layer| halves(&of(layer, "mlp.linear_fc1"))[0].clone(),
        &|layer| of(layer, "mlp.linear_fc2"),
    ];
    for kind in kinds {
        (0..layers).for_each(|layer| bytes.extend(kind(layer).bytes));
    }
    bytes.extend(&model["decoder.final_layernorm.weight"].bytes);
    bytes.extend(&model["output_layer.weight"].bytes);
    bytes
}
