//! Numbers of elements, experts, parts, chunks and entries that no machine has room for.

use super::{model_with, plain_args};
use crate::common::crafted::{
    Checkpoint, P, all_commands, compare, dict, namespace, tensor, tensor_of, zip,
};

#[test]
fn absurd_shapes_and_strides_are_refused_or_harmless() {
    const TOP: u64 = 1 << 63;
    let tensors: [(&str, P); 15] = [
        ("2^60 x 0", tensor_of("0", 64, 0, &[1 << 60, 0], &[1, 1])),
        ("2^40 x 2^40 x 0", tensor_of("0", 64, 0, &[1 << 40, 1 << 40, 0], &[1, 1, 1])),
        ("2^48 x 0", tensor_of("0", 64, 0, &[1 << 48, 0], &[0, 0])),
        ("0 x 2^48 x 2^48 x 2^48", tensor_of("0", 64, 0, &[0, 1 << 48, 1 << 48, 1 << 48], &[0; 4])),
        ("2^63 - 1", tensor_of("0", 64, 0, &[TOP - 1], &[0])),
        ("2^64 - 1", tensor_of("0", 64, 0, &[u64::MAX], &[0])),
        ("expanded", tensor_of("0", 64, 0, &[1 << 40], &[0])),
        ("expanded twice", tensor_of("0", 64, 0, &[1 << 31, 1 << 31], &[0, 0])),
        ("stride of one row", tensor_of("0", 64, 0, &[1, 8], &[u64::MAX, 1])),
        ("stride of one", tensor_of("0", 64, 63, &[1, 1, 1], &[TOP, u64::MAX, TOP - 1])),
        ("stride", tensor_of("0", 64, 0, &[2, 8], &[TOP, 1])),
        ("offset", tensor_of("0", 64, TOP - 1, &[8], &[1])),
        ("offset of nothing", tensor_of("0", 64, TOP - 1, &[0], &[1])),
        ("count", tensor_of("0", TOP, 0, &[8], &[1])),
        ("no strides", tensor_of("0", 64, 0, &[1 << 40, 1 << 40], &[])),
    ];
    for (name, value) in tensors {
        for parameter in [
            "decoder.layers.0.pre_mlp_layernorm.weight",
            "embedding.word_embeddings.weight",
            "decoder.layers.0.mlp.experts.weight1",
            "decoder.layers.0.mlp.experts.linear_fc1.weight",
            "decoder.layers.0.self_attention.linear_qkv_down_proj.weight",
        ] {
            let context = format!("{name} as {parameter}");
            let model = model_with([(parameter, value.clone())]);
            all_commands(&context, &Checkpoint::with(model, plain_args()));
        }
        // Several of them: no sum may overflow either.
        let names: Vec<String> = (0..9).map(|number| format!("norm.{number}.weight")).collect();
        let all = names.iter().map(|name| (name.as_str(), value.clone()));
        let many = Checkpoint::with(model_with(all), plain_args());
        all_commands(&format!("nine of {name}"), &many);
        let good = Checkpoint::with(
            model_with(names.iter().map(|name| (name.as_str(), tensor(&[8])))),
            plain_args(),
        );
        compare(&format!("{name} against a good one"), &many.path(), &good.path());
    }
    let long = P::Tuple((0..300_000).map(|_| P::Int(1)).collect());
    let rank = P::Put(5, Box::new(long));
    let names: Vec<String> = (0..2000).map(|number| format!("norm.{number}.weight")).collect();
    let of = |size: P| {
        let mut with_size = tensor(&[8]);
        if let P::Call(_, _, args) = &mut with_size {
            args[2] = size;
            args[3] = P::Get(5);
        }
        with_size
    };
    let all = names.iter().enumerate().map(|(number, name)| {
        (name.as_str(), of(if number == 0 { rank.clone() } else { P::Get(5) }))
    });
    all_commands("300,000 dimensions", &Checkpoint::with(model_with(all), plain_args()));
}

#[test]
fn experts_without_end_are_refused() {
    let args = |experts: P| namespace([("num_experts", experts), ("swiglu", P::Bool(true))]);
    let router = "decoder.layers.0.mlp.router.weight";
    let (first, second) =
        ("decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.mlp.experts.weight2");
    let alone = |context: &str, checkpoint: &Checkpoint| {
        compare(context, &checkpoint.path(), &checkpoint.path());
    };
    for experts in [0, 1, 7, 65_536, 65_537, 1 << 40, 1 << 48, 1 << 60] {
        for width in [0, 1, 1 << 40] {
            let rows = tensor_of("0", 64, 0, &[experts, 0], &[1, 1]);
            let weight1 = tensor_of("0", 64, 0, &[0, width], &[1, 1]);
            let weight2 = tensor_of("0", 64, 0, &[width, 0], &[1, 1]);
            let model = model_with([(router, rows), (first, weight1), (second, weight2)]);
            let context = format!("{experts} rows, width {width}");
            alone(&context, &Checkpoint::with(model, args(P::None)));
        }
        let packed = tensor_of("0", 64, 0, &[experts, 0, 0], &[1, 1, 1]);
        let name = "decoder.layers.0.mlp.experts.linear_fc1.weight";
        alone("packed", &Checkpoint::with(model_with([(name, packed)]), args(P::None)));
    }
    // As many as one layer may have, in layer after layer.
    let names: Vec<String> = (0..400)
        .map(|layer| format!("decoder.layers.{layer}.mlp.experts.linear_fc1.weight"))
        .collect();
    let packed = || tensor_of("0", 64, 0, &[1 << 16, 0, 0], &[1, 1, 1]);
    let all = names.iter().map(|name| (name.as_str(), packed()));
    alone("layers of experts", &Checkpoint::with(model_with(all), args(P::None)));
}

#[test]
fn tensors_that_fall_to_pieces_are_refused() {
    // Rows in the order of old versions, head by head: so many heads, so many pieces.
    let names: Vec<String> = (0..200)
        .map(|layer| {
            format!("language_model.encoder.layers.{layer}.self_attention.query_key_value.weight")
        })
        .collect();
    let heads = 120_000;
    let value = || tensor_of("0", 3 * heads, 0, &[3 * heads, 1], &[1, 1]);
    let large = |object: &P| {
        let storage = vec![0; usize::try_from(3 * heads * 4).unwrap()];
        let entries = [("a/data.pkl", object.pickle()), ("a/data/0", storage)];
        Checkpoint::of_bytes(&zip(&entries.map(|(name, bytes)| (name.to_owned(), bytes))))
    };
    let args = namespace([("num_attention_heads", P::Unsigned(heads))]);
    let version = ("checkpoint_version", P::Int(0));
    let all = dict(names.iter().map(|name| (name.as_str(), value())));
    let heads = large(&dict([("args", args), version, ("model", all)]));
    let run = compare("heads", &heads.path(), &heads.path());
    assert!(
        run.code == 2 && run.stderr.contains("more bytes of tensor names and pieces"),
        "{}",
        run.stderr
    );

    let names: Vec<String> = (0..200)
        .map(|expert| {
            format!("decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight")
        })
        .collect();
    let value = || tensor_of("0", 240_000, 0, &[240_000, 1], &[1, 1]);
    let args = namespace([("moe_mlp_glu_interleave_size", P::Int(2)), ("swiglu", P::Bool(true))]);
    let all = dict(names.iter().map(|name| (name.as_str(), value())));
    let interleaved = large(&dict([("args", args), ("model", all)]));
    let run = compare("interleaved", &interleaved.path(), &interleaved.path());
    assert!(
        run.code == 2 && run.stderr.contains("more bytes of tensor names and pieces"),
        "{}",
        run.stderr
    );
}

#[test]
fn model_chunks_without_end_are_refused() {
    let stacks: Vec<String> =
        (0..20_000).map(|stack| format!("stack{stack}.layers.0.norm.weight")).collect();
    let model = dict(stacks.iter().map(|name| (name.as_str(), tensor(&[8]))));
    let far =
        dict([("model0", model.clone()), ("model9999", model.clone()), ("args", plain_args())]);
    all_commands("a far chunk", &Checkpoint::of(&far));
    let chunks: Vec<String> = (0..5000).map(|chunk| format!("model{chunk}")).collect();
    let shared = P::Put(9, Box::new(model));
    let all = chunks.iter().enumerate().map(|(number, name)| {
        (name.as_str(), if number == 0 { shared.clone() } else { P::Get(9) })
    });
    all_commands("many chunks", &Checkpoint::of(&dict(all.chain([("args", plain_args())]))));
}

#[test]
fn many_entries_are_read() {
    let names: Vec<String> = (0..200_000)
        .map(|layer| format!("decoder.layers.{layer}.input_layernorm.weight"))
        .collect();
    let model = dict(names.iter().map(|name| (name.as_str(), tensor(&[8]))));
    let checkpoint = Checkpoint::with(model, P::None);
    let run = compare("200,000 entries", &checkpoint.path(), &checkpoint.path());
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("compared 200,000 tensors"), "{}", run.stdout);

    let object = dict([("model", model_with([])), ("args", plain_args())]).pickle();
    let mut entries =
        vec![("a/data.pkl".to_owned(), object), ("a/data/0".to_owned(), vec![0; 256])];
    entries.extend((1..100_000).map(|number| (format!("a/data/{number}"), vec![0; 4])));
    let run = all_commands("100,000 zip entries", &Checkpoint::of_bytes(&zip(&entries)));
    assert_eq!(run.code, 0, "{}", run.stderr);
}

/// Not hostile, but only crafted files have it: Transformer Engine may store rows of gate and up in turn.
#[test]
fn interleaved_rows_of_gate_and_up_are_put_in_order() {
    /// The rest of the model.
    const OTHERS: [&str; 8] = [
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
    ];
    let name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight";
    let stored = |rows: [f32; 4], interleave| {
        let args = [("moe_mlp_glu_interleave_size", interleave), ("swiglu", P::Bool(true))];
        let others = OTHERS.map(|name| (name, tensor_of("0", 4, 0, &[1, 1], &[1, 1])));
        let own = (name, tensor_of("0", 4, 0, &[4, 1], &[1, 1]));
        let model = dict(others.into_iter().chain([own]));
        let version = ("checkpoint_version", P::Int(3));
        let object = dict([("args", namespace(args)), version, ("model", model)]);
        let storage = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let entries = [("a/data.pkl", object.pickle()), ("a/data/0", storage)];
        Checkpoint::of_bytes(&zip(&entries.map(|(name, bytes)| (name.to_owned(), bytes))))
    };
    let in_turn = stored([0.0, 10.0, 1.0, 11.0], P::Int(1));
    let in_order = stored([0.0, 1.0, 10.0, 11.0], P::Int(0));
    let run = compare("in order", &in_turn.path(), &in_order.path());
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    let as_stored = stored([0.0, 10.0, 1.0, 11.0], P::Int(0));
    assert_eq!(compare("as stored", &in_turn.path(), &as_stored.path()).code, 1);
}
