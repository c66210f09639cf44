//! Promise: the files of FSDP's ranks compare as the tensors that they are parts of, and what is missing of them, in the wrong place or
//! laid out in a way that is not known is named.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::crafted::{P, counts, dict, file, tensor};
use crate::common::{
    Copied, assert_all_equal, compare, compare_with, copy, fixture, flip, inspect, places,
};

/// 2 ranks; 2 x 2 ranks, each half of which is a replica of the other.
const LAYOUTS: [&str; 2] = ["shards", "replicas"];

fn saved(layout: &str) -> PathBuf {
    fixture("fsdp").join(layout)
}

fn model(folder: &Path, rank: u64) -> PathBuf {
    folder.join(format!("model_world_size_2_rank_{rank}.pt"))
}

#[test]
fn a_changed_element_of_a_shard_is_found() {
    for layout in LAYOUTS {
        let copied = Copied::of(&saved(layout));
        // The last row of an uneven cut, which the last rank holds.
        flip(&copied.path(), "embed_tokens.weight", &[6, 4]);
        let run = compare(&fixture("fsdp/full.pt"), &copied.path());
        assert_eq!(run.code, 1, "{layout}: {}", run.stderr);
        assert_eq!(run.verdict(), "different: 1 of 8 tensors differ", "{layout}");
    }
}

#[test]
fn replicas_are_checked_and_parts_lie_where_torch_puts_them() {
    let tensors = &inspect(&saved("replicas"))["tensors"];
    let embedding = &tensors["embed_tokens.weight"];
    assert_eq!(embedding["pieces"].as_array().unwrap().len(), 2);
    assert_eq!(embedding["replicas"].as_array().unwrap().len(), 2);
    // Seven rows on two ranks are four and three; of one row, the second rank holds nothing.
    assert_eq!(embedding["pieces"][1]["offsets"], serde_json::json!([4, 0]));
    assert_eq!(tensors["score.weight"]["pieces"].as_array().unwrap().len(), 1);
    // A buffer is whole on every rank.
    assert_eq!(tensors["step_scale"]["replicas"].as_array().unwrap().len(), 3);
}

#[test]
fn a_replica_that_differs_is_found() {
    let copied = Copied::of(&saved("replicas"));
    let places = places(&copied.path(), "score.weight", &[0, 0]);
    places[1].flip();
    let run = compare(&fixture("fsdp/full.pt"), &copied.path());
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("model_world_size_4_rank_2.pt"), "{}", run.stderr);
}

#[test]
fn a_missing_rank_is_named() {
    for (file, flags) in [
        ("model_world_size_2_rank_1.pt", &[][..]),
        ("optim_world_size_2_rank_0.pt", &["--section", "model,optimizer"]),
    ] {
        let copied = Copied::of(&saved("shards"));
        fs::remove_file(copied.path().join(file)).unwrap();
        let run = compare_with(&saved("shards"), &copied.path(), flags);
        run.refuses(&[file, "missing", "2 ranks"]);
    }
}

#[test]
fn ranks_in_each_others_place_are_named() {
    let copied = Copied::of(&saved("shards"));
    let [first, second] = [0, 1].map(|rank| model(&copied.path(), rank));
    fs::copy(model(&saved("shards"), 1), &first).unwrap();
    let words = "model_world_size_2_rank_0.pt: says it is rank 1, in the place of rank 0";
    compare(&saved("shards"), &copied.path()).refuses(&[words]);
    // Shards know their places, whatever the names of the files.
    fs::copy(model(&saved("shards"), 0), &second).unwrap();
    let flags = ["--allow-foreign-ranks"];
    assert_all_equal(&compare_with(&saved("shards"), &copied.path(), &flags));
    // One rank twice is no whole.
    fs::copy(&first, &second).unwrap();
    let run = compare_with(&saved("shards"), &copied.path(), &flags);
    run.refuses(&["embed_tokens.weight", "ranks 0 and 1 both say to be at [1] of the mesh"]);
}

#[test]
fn files_of_two_saves_are_refused() {
    let copied = Copied::of(&saved("shards"));
    let other = "model_world_size_4_rank_3.pt";
    fs::copy(saved("replicas").join(other), copied.path().join(other)).unwrap();
    compare(&saved("shards"), &copied.path()).refuses(&["2 ranks and of 4 ranks"]);
}

#[test]
fn a_file_on_its_own_is_the_shard_that_it_is() {
    let run = compare(&model(&saved("shards"), 0), &model(&saved("shards"), 0));
    assert_all_equal(&run);
    assert!(run.stderr.contains("compared as the part that it is"), "{}", run.stderr);
    let tensors = &inspect(&model(&saved("shards"), 1))["tensors"];
    assert_eq!(tensors["embed_tokens.weight"]["shape"], serde_json::json!([3, 5]));
}

#[test]
fn the_folder_of_a_step_leads_to_its_actor() {
    let step = tempfile::tempdir().unwrap();
    let actor = step.path().join("global_step_5/actor");
    copy(&saved("shards"), &actor);
    fs::create_dir(actor.join("huggingface")).unwrap();
    fs::write(actor.join("huggingface/config.json"), "{}").unwrap();
    fs::write(actor.join("fsdp_config.json"), "{}").unwrap();
    let run = compare(&step.path().join("global_step_5"), &fixture("fsdp/full.pt"));
    assert_all_equal(&run);
    assert!(run.stderr.contains("iteration 5"), "{}", run.stderr);
}

/// An object of this class of torch's, with these attributes.
fn made(module: &str, class: &str, attributes: &P) -> P {
    let state = attributes.pickle();
    // Without the protocol and STOP.
    let state = &state[2..state.len() - 1];
    let head = format!("ctorch.distributed.{module}\n{class}\n");
    P::Raw([head.as_bytes(), b")\x81", state, b"b"].concat())
}

fn placement(class: &str) -> P {
    made("tensor.placement_types", class, &dict([("dim", P::Int(0))]))
}

/// The file of a rank of two with one DTensor of 3 x 2 in the form of torch 2.4 to 2.8, at this place of its mesh.
fn rank_file(placements: Vec<P>, at: u64) -> Vec<u8> {
    let mesh = dict([
        ("mesh", tensor(&[2])),
        ("_flatten_mesh_list", counts(&[0, 1])),
        ("_coordinate_on_dim", counts(&[at])),
    ]);
    let spec = dict([
        ("mesh", made("device_mesh", "DeviceMesh", &mesh)),
        ("placements", P::Tuple(placements)),
    ]);
    let local = tensor(&[if at == 0 { 2 } else { 1 }, 2]);
    let parts =
        [("_local_tensor", local), ("_spec", made("tensor._dtensor_spec", "DTensorSpec", &spec))];
    let class = || P::Raw(b"ctorch.distributed.tensor\nDTensor\n".to_vec());
    let whole = P::Tuple(vec![class(), class(), counts(&[3, 2]), counts(&[2, 1])]);
    let function = P::Raw(b"ctorch._utils\n_rebuild_wrapper_subclass\n".to_vec());
    let args = vec![function, class(), whole, dict(parts)];
    let weight = P::Call("torch._tensor", "_rebuild_from_type_v2", args);
    file(dict([("weight", weight)]).pickle())
}

/// The files of two ranks with these placements.
fn ranks(placements: impl Fn() -> Vec<P>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for rank in [0, 1] {
        fs::write(model(folder.path(), rank), rank_file(placements(), rank)).unwrap();
    }
    folder
}

#[test]
fn a_mesh_of_older_torch_is_read() {
    let folder = ranks(|| vec![placement("Shard")]);
    assert_eq!(inspect(folder.path())["tensors"]["weight"]["shape"], serde_json::json!([3, 2]));
    assert_all_equal(&compare(folder.path(), folder.path()));
    // Its list of ranks says which rank a place is.
    fs::copy(model(folder.path(), 0), model(folder.path(), 1)).unwrap();
    compare(folder.path(), folder.path()).refuses(&["says it is rank 0, in the place of rank 1"]);
}

#[test]
fn placements_that_are_not_read_are_named_with_their_tensor() {
    for (placements, words) in [
        (&["Partial"][..], "Partial"),
        (&["_StridedShard"], "_StridedShard"),
        (&["Shard", "Shard"], "place in its mesh"),
        (&[], "place in its mesh"),
        // Both ranks would hold all of it, and do not.
        (&["Replicate"], "do not fit together"),
    ] {
        let folder = ranks(|| placements.iter().map(|class| placement(class)).collect());
        compare(folder.path(), folder.path()).refuses(&["weight", words]);
    }
}

/// One rank's file of a model of two layers, with the description beside it.
fn described(folder: &Path, names: &[&str], config: &str) {
    let model = dict(names.iter().map(|name| (*name, tensor(&[4, 4]))));
    fs::create_dir_all(folder.join("huggingface")).unwrap();
    fs::write(folder.join("model_world_size_1_rank_0.pt"), file(model.pickle())).unwrap();
    fs::write(folder.join("huggingface/config.json"), config).unwrap();
}

#[test]
fn the_description_beside_the_ranks_counts() {
    let layers = |name: &str| [0, 1].map(|layer| format!("model.layers.{layer}.{name}.weight"));
    let parts =
        ["self_attn.q_proj", "self_attn.o_proj", "input_layernorm", "mlp.up_proj", "mlp.down_proj"];
    let in_layers: Vec<String> = parts.iter().flat_map(|part| layers(part)).collect();
    let mut names: Vec<&str> = in_layers.iter().map(String::as_str).collect();
    names.extend(["model.embed_tokens.weight", "model.norm.weight"]);
    let config = |layers: u64, is_tied: bool| {
        format!(
            "{{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \
             \"num_hidden_layers\": {layers}, \"tie_word_embeddings\": {is_tied}}}"
        )
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("actor");
    described(&path, &names, &config(2, true));
    assert_eq!(inspect(&path)["tied"]["lm_head.weight"], "model.embed_tokens.weight");
    assert_eq!(compare(&path, &path).code, 0);
    described(&path, &names, &config(2, false));
    compare(&path, &path)
        .refuses(&["lm_head.weight: missing: config.json says tie_word_embeddings=false"]);
    described(&path, &names, &config(3, true));
    compare(&path, &path)
        .refuses(&["model.layers.2: layer 2 is missing: config.json says num_hidden_layers=3"]);
    described(&path, &names, "{");
    assert_eq!(compare(&path, &path).code, 0);
}
