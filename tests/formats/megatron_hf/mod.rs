//! A Megatron checkpoint and the same model in Hugging Face's or llm.c's form are compared under canonical names, whatever the
//! layout of the first; one changed element is found where it belongs, and what no table knows is said.
//!
//! The models are made from our fixtures by `models.rs`.

mod models;

use std::fs;

use self::models::{Model, canonical, config, folder, gpt2, llama, llama_bin};
use crate::common::array::Array;
use crate::common::{
    assert_all_equal, compare, compare_with, differing, fixture, flip, inspect, layout, models,
    names, screen, sizes,
};
use serde_json::Value;
use tempfile::TempDir;

fn gpt() -> Model {
    llama(&canonical(&layout("gpt/tp1")))
}

#[track_caller]
fn assert_equals_every_layout(model: &str, reference: &str, hf: &Model, config: &Value) {
    let folder = folder(hf, config);
    let expected = names(&inspect(&layout(&format!("{model}/{reference}")))["tensors"]).len();
    let mut bytes = None;
    for layout in models()[model].iter().map(|path| layout(path)) {
        let run = compare(&layout, folder.path());
        assert_all_equal(&run);
        assert_eq!(names(&run.json()).len(), expected, "{}: {}", layout.display(), run.stderr);
        assert_eq!(compare(folder.path(), &layout).code, 0, "{}", layout.display());
        assert_eq!(*bytes.get_or_insert(run.stdout.clone()), run.stdout, "{}", layout.display());
    }
}

#[test]
fn a_llama_equals_every_layout_of_it() {
    assert_equals_every_layout("gpt", "tp1", &gpt(), &config("qwen3"));
}

#[test]
fn a_gpt2_equals_every_layout_of_it() {
    for model in ["gpt-mha", "gpt-tied"] {
        let hf = gpt2(&canonical(&layout(model).join("tp1")));
        assert_equals_every_layout(model, "tp1", &hf, &config("gpt2"));
    }
}

#[test]
fn a_mixture_of_experts_equals_every_layout_of_it() {
    let model = canonical(&layout("moe/seq-ep1"));
    let hf = llama(&model);
    assert_equals_every_layout("moe", "seq-ep1", &hf, &config("qwen2_moe"));

    // As transformers holds it in memory: all experts of a layer in one tensor.
    let mut packed = hf.clone();
    for layer in (0..3).map(|number| format!("model.layers.{number}.mlp.experts")) {
        let mut take = |module: &str| {
            let experts = (0..4)
                .map_while(|number| packed.remove(&format!("{layer}.{number}.{module}.weight")));
            experts.collect::<Vec<_>>()
        };
        let [gate, up, down] = ["gate_proj", "up_proj", "down_proj"].map(&mut take);
        if gate.is_empty() {
            continue;
        }
        let both = gate.into_iter().zip(up).map(|(gate, up)| {
            let rows = gate.shape[0] + up.shape[0];
            let both = Array::stacked(&[gate, up]);
            Array { shape: vec![rows, both.shape[2]], ..both }
        });
        let both: Vec<Array> = both.collect();
        packed.insert(format!("{layer}.gate_up_proj"), Array::stacked(&both));
        packed.insert(format!("{layer}.down_proj"), Array::stacked(&down));
    }
    assert!(packed.len() < hf.len());
    assert_equals_every_layout("moe", "seq-ep1", &packed, &config("qwen2_moe"));

    // Both at once cannot be.
    let name = hf.keys().find(|name| name.ends_with("experts.2.down_proj.weight")).unwrap();
    packed.insert(name.clone(), hf[name].clone());
    let run = compare(&layout("moe/seq-ep2"), folder(&packed, &config("qwen2_moe")).path());
    run.refuses(&["b: model.layers.", "local_experts.2.linear_fc2.weight is there on its own too"]);
}

#[test]
fn mixtral_has_names_of_its_own() {
    const SPELLINGS: [(&str, &str); 5] = [
        (".mlp.experts.", ".block_sparse_moe.experts."),
        (".mlp.gate.weight", ".block_sparse_moe.gate.weight"),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    ];
    let hf = llama(&canonical(&layout("moe/seq-ep1"))).into_iter().map(|(name, tensor)| {
        let is_routed = name.contains(".mlp.experts.") || name.ends_with(".mlp.gate.weight");
        let spellings = SPELLINGS.iter().filter(|_| is_routed);
        (spellings.fold(name, |name, (old, new)| name.replace(old, new)), tensor)
    });
    assert_equals_every_layout("moe", "seq-ep1", &hf.collect(), &config("mixtral"));
}

#[test]
fn experts_of_gpt_oss_are_turned_and_alternate() {
    let model = canonical(&layout("moe-bias/seq-ep1"));
    let mut hf: Model =
        llama(&model).into_iter().filter(|(name, _)| !name.contains("experts")).collect();
    hf = hf
        .into_iter()
        .map(|(name, tensor)| (name.replace("mlp.gate", "mlp.router"), tensor))
        .collect();
    let pairs = |tensor: &Array| {
        let half = tensor.shape[0] / 2;
        tensor.rows((0..half).flat_map(|row| [row, half + row]))
    };
    for layer in 0..2 {
        let expert = |number: usize, rest: &str| {
            model[&format!("decoder.layers.{layer}.mlp.experts.local_experts.{number}.{rest}")]
                .clone()
        };
        let all = |rest: &str, change: &dyn Fn(&Array) -> Array| {
            let parts: Vec<Array> = (0..4).map(|number| change(&expert(number, rest))).collect();
            Array::stacked(&parts)
        };
        let mut put = |name: &str, tensor| {
            hf.insert(format!("model.layers.{layer}.mlp.experts.{name}"), tensor);
        };
        put("gate_up_proj", all("linear_fc1.weight", &|tensor| pairs(tensor).transposed()));
        put("gate_up_proj_bias", all("linear_fc1.bias", &pairs));
        put("down_proj", all("linear_fc2.weight", &Array::transposed));
        put("down_proj_bias", all("linear_fc2.bias", &Array::clone));
    }
    assert_equals_every_layout("moe-bias", "seq-ep1", &hf, &config("gpt_oss"));
}

#[test]
fn latent_attention_equals_every_layout_of_it() {
    let hf = llama(&canonical(&layout("mla/tp1")));
    assert!(hf.contains_key("model.layers.1.self_attn.kv_a_proj_with_mqa.weight"));
    assert_equals_every_layout("mla", "tp1", &hf, &config("deepseek_v3"));
}

#[test]
fn a_layer_that_predicts_further_tokens_is_one_of_its_own() {
    let mut hf = llama(&canonical(&layout("mtp/tp1")));
    assert!(hf.contains_key("model.layers.2.eh_proj.weight"));
    assert_equals_every_layout("mtp", "tp1", &hf, &config("glm4_moe"));
    // Its own copies of what it shares are held against the original.
    hf.insert(
        "model.layers.2.embed_tokens.weight".to_owned(),
        hf["model.embed_tokens.weight"].clone(),
    );
    hf.insert("model.layers.2.shared_head.head.weight".to_owned(), hf["lm_head.weight"].clone());
    assert_equals_every_layout("mtp", "tp1", &hf, &config("glm4_moe"));
    hf.get_mut("model.layers.2.shared_head.head.weight").unwrap().bytes[0] ^= 1;
    let run = compare(&layout("mtp/tp1"), folder(&hf, &config("glm4_moe")).path());
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("replicas that disagree: 1"), "{run:?}");
}

#[test]
fn one_changed_element_of_any_tensor_is_found_where_it_belongs() {
    let mha = gpt2(&canonical(&layout("gpt-mha/tp1")));
    for (model, hf, model_type) in [("gpt/tp2pp2", gpt(), "qwen3"), ("gpt-mha/v2-tp2", mha, "gpt2")]
    {
        let changed = folder(&hf, &config(model_type));
        for (name, tensor) in &hf {
            let last: Vec<usize> = tensor.shape.iter().map(|size| size - 1).collect();
            flip(changed.path(), name, &last);
            let run = compare(changed.path(), &layout(model));
            assert_eq!((run.code, differing(&run.json()).len()), (1, 1), "{name}: {run:?}");
            flip(changed.path(), name, &last);
        }
    }
}

#[test]
fn a_row_of_a_part_is_told_by_its_place_in_the_whole() {
    // Two groups of two heads of two rows, a key and a value: 8 rows a group.
    let attention = "decoder.layers.3.self_attention.linear_qkv";
    let mlp = "decoder.layers.3.mlp.linear_fc1";
    let changed = folder(&gpt(), &config("qwen3"));
    for (part, index, whole, expected) in [
        ("self_attn.q_proj.weight", vec![5, 7], format!("{attention}.weight"), vec![9, 7]),
        ("self_attn.k_proj.weight", vec![1, 2], format!("{attention}.weight"), vec![5, 2]),
        ("self_attn.k_proj.weight", vec![3, 0], format!("{attention}.weight"), vec![13, 0]),
        ("self_attn.v_proj.weight", vec![2, 4], format!("{attention}.weight"), vec![14, 4]),
        ("self_attn.k_proj.bias", vec![2], format!("{attention}.bias"), vec![12]),
        ("mlp.gate_proj.weight", vec![11, 1], format!("{mlp}.weight"), vec![11, 1]),
        ("mlp.up_proj.weight", vec![3, 6], format!("{mlp}.weight"), vec![15, 6]),
    ] {
        let name = format!("model.layers.3.{part}");
        flip(changed.path(), &name, &index);
        let flags = ["--metrics", "max_abs_index,differing"];
        let run = compare_with(&layout("gpt/tp4"), changed.path(), &flags);
        assert_eq!(differing(&run.json()), [whole.as_str()], "{run:?}");
        let entry = &run.json()[&whole];
        assert_eq!(sizes(&entry["max_abs_index"]), expected, "{name}");
        assert_eq!(entry["differing"], 1);
        flip(changed.path(), &name, &index);
    }
}

#[test]
fn the_screen_says_whose_names_were_made_megatrons_and_what_was_padded() {
    let run = screen(&layout("gpt/tp2"), folder(&gpt(), &config("qwen3")).path(), &[]);
    for text in [
        "names of llama models, mapped to Megatron names",
        "output_layer.weight: compared 50 vocabulary rows; left out 14 padded rows of a, 0 of b",
    ] {
        assert!(run.stdout.contains(text), "{run:?}");
    }
}

#[test]
fn names_are_chosen_by_those_that_are_shown() {
    let hf = folder(&gpt(), &config("qwen3"));
    let run = compare_with(&layout("gpt/tp2"), hf.path(), &["--include", "*.linear_qkv.*"]);
    assert_all_equal(&run);
    assert_eq!(names(&run.json()).len(), 12);
}

#[test]
fn tied_and_untied_models_are_compared() {
    let mut tied = gpt();
    tied.remove("lm_head.weight");
    let mut description = config("qwen3");
    description["tie_word_embeddings"] = true.into();
    let run = compare(&layout("gpt/tp2"), folder(&tied, &description).path());
    assert_eq!((run.code, differing(&run.json())), (1, vec!["output_layer.weight"]), "{run:?}");
    assert!(
        run.stderr.contains("output_layer.weight: tied to the word embeddings in b"),
        "{run:?}"
    );
}

#[test]
fn without_a_description_the_names_and_the_other_side_tell() {
    let bare = folder(&gpt(), &Value::Null);
    assert_all_equal(&compare(&layout("gpt/tp2"), bare.path()));
    assert_all_equal(&compare(&layout("gpt/tp2"), &bare.path().join("model.safetensors")));
    // Where that says nothing either, the command line may.
    let mut no_heads = config("qwen3");
    no_heads.as_object_mut().unwrap().remove("num_attention_heads");
    let no_heads = folder(&gpt(), &no_heads);
    let silent = layout("gpt/noargs-tp2pp2");
    compare(&silent, no_heads.path()).refuses(&[
        "b: model.layers.0.self_attn.q_proj",
        "supply it with --set num_attention_heads=NUMBER",
    ]);
    assert_all_equal(&compare_with(&silent, no_heads.path(), &["--set", "num_attention_heads=4"]));
}

#[test]
fn heads_that_do_not_come_to_the_rows_are_no_guess() {
    for (key, value) in [("num_attention_heads", 3), ("num_key_value_heads", 4), ("head_dim", 4)] {
        let mut wrong = config("qwen3");
        wrong[key] = value.into();
        let run = compare(&layout("gpt/tp2"), folder(&gpt(), &wrong).path());
        run.refuses(&["b: model.layers.0.self_attn.q_proj.bias: ", "are not those of"]);
        assert!(!names(&run.json()).iter().any(|name| name.contains("linear_qkv")));
    }
}

#[test]
fn parts_of_odd_shapes_are_named_and_the_rest_compared() {
    let scalar = Array { dtype: "bfloat16".to_owned(), shape: Vec::new(), bytes: vec![0; 2] };
    let row = Array { shape: vec![24], bytes: vec![0; 48], ..scalar.clone() };
    let wide = Array { dtype: "float32".to_owned(), bytes: vec![0; 96], ..row.clone() };
    let gpt2 = gpt2(&canonical(&layout("gpt-mha/tp1")));
    for (layout_name, model, model_type, name) in [
        ("gpt/tp2", gpt(), "qwen3", "model.layers.0.self_attn.q_proj.weight"),
        ("gpt/tp2", gpt(), "qwen3", "model.layers.0.self_attn.v_proj.weight"),
        ("gpt/tp2", gpt(), "qwen3", "model.layers.0.mlp.up_proj.weight"),
        ("gpt-mha/tp1", gpt2.clone(), "gpt2", "transformer.h.0.attn.c_attn.weight"),
        ("gpt-mha/tp1", gpt2, "gpt2", "transformer.h.0.mlp.c_fc.weight"),
        ("moe/seq-ep1", gpt(), "qwen2_moe", "model.layers.0.mlp.experts.gate_up_proj"),
    ] {
        for odd in [&scalar, &row, &wide] {
            let mut model = model.clone();
            model.insert(name.to_owned(), odd.clone());
            let run = compare(&layout(layout_name), folder(&model, &config(model_type)).path());
            assert!(matches!(run.code, 1 | 2), "{name}: {run:?}");
            assert!(!names(&run.json()).is_empty(), "{name}: {run:?}");
        }
    }
}

#[test]
fn a_model_without_a_table_is_said_to_have_none() {
    let other = folder(&gpt(), &config("martian"));
    let run = compare(&layout("gpt/tp2"), other.path());
    run.refuses(&[
        "b: ",
        "no table has Megatron's names for model_type \"martian\"",
        "--set model_type=...: llama, ",
    ]);
    assert_all_equal(&compare_with(
        &layout("gpt/tp2"),
        other.path(),
        &["--set", "b:model_type=llama"],
    ));

    let mut odd = gpt();
    odd.insert("model.layers.0.mystery.weight".to_owned(), odd["model.norm.weight"].clone());
    compare(folder(&odd, &Value::Null).path(), &layout("gpt/tp2")).refuses(&[
        "a: ",
        "no table knows all its names",
        "--set model_type=...",
    ]);
}

#[test]
fn a_name_without_a_row_is_named_and_the_rest_compared() {
    let mut odd = gpt();
    odd.insert("model.layers.0.mystery.weight".to_owned(), odd["model.norm.weight"].clone());
    let odd = folder(&odd, &config("qwen3"));
    let run = compare(&layout("gpt/tp2"), odd.path());
    run.refuses(&[
        "b: model.layers.0.mystery.weight: ",
        "llama models has no such name",
        "--exclude",
    ]);
    assert_eq!(differing(&run.json()), [""; 0]);
    assert_all_equal(&compare_with(&layout("gpt/tp2"), odd.path(), &["--exclude", "*mystery*"]));
}

#[test]
fn a_part_that_is_missing_is_named() {
    let mut fewer = gpt();
    fewer.remove("model.layers.1.self_attn.k_proj.weight");
    let run = compare(&layout("gpt/tp2"), folder(&fewer, &config("qwen3")).path());
    run.refuses(&[
        "b: model.layers.1.self_attn.k_proj.weight: missing",
        "so decoder.layers.1.self_attention.linear_qkv.weight was not compared",
    ]);
}

#[test]
fn quantized_weights_are_not_compared_by_their_bits() {
    let mut quantized = gpt();
    let name = "model.layers.0.mlp.down_proj.weight";
    quantized.insert(format!("{name}_scale_inv"), quantized["model.norm.weight"].clone());
    let run = compare(&layout("gpt/tp2"), folder(&quantized, &config("qwen3")).path());
    run.refuses(&[&format!("b: {name}: is quantized"), "dequantize the model first"]);
    assert_eq!(run.stderr.matches("ckptcmp: ").count(), 1, "{run:?}");
}

#[test]
fn the_file_that_llm_c_starts_from_equals_the_model_that_megatron_trains() {
    let checkpoint = fixture("megatron/llama-bf16/A/tp1pp2-first3-torch");
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("llama.bin");
    fs::write(&file, llama_bin(&canonical(&checkpoint), 2)).unwrap();
    let run = compare(&checkpoint, &file);
    assert_all_equal(&run);
    assert_eq!(names(&run.json()).len(), 51);
    // The first key row of the second group, which leads a pair.
    flip(&file, "transformer.h.2.attn.c_attn.weight", &[40, 3]);
    let run = compare_with(&file, &checkpoint, &["--metrics", "max_abs_index"]);
    let whole = "decoder.layers.2.self_attention.linear_qkv.weight";
    assert_eq!((run.code, differing(&run.json())), (1, vec![whole]), "{run:?}");
}
