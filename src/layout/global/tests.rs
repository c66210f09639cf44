//! Names, axes and sections of distributed checkpoints, on tensors of which only the metadata exists.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use super::*;
use crate::base::dtype::Dtype;
use crate::base::plain::PlainValue;
use crate::tensor::testing::pretended;
use crate::tensor::{ByteOrder, StoredTensor};

/// A tensor of bytes whose elements are numbered by where they lie in the file.
fn numbered(shape: &[u64]) -> LogicalTensor {
    let file = pretended(1 << 20);
    let stored = StoredTensor::contiguous(Dtype::UInt8, shape.to_vec(), file, ByteOrder::Little);
    LogicalTensor::from_stored(&stored.unwrap(), "stored")
}

fn weight(name: &str, shape: &[u64]) -> Global {
    Global {
        stored_name: name.into(),
        state: None,
        name: name.to_owned(),
        tensor: numbered(shape),
        flattened: None,
    }
}

fn args(pairs: &[(&str, PlainValue)]) -> RunArgs {
    let pairs = pairs.iter().map(|(name, arg)| ((*name).to_owned(), arg.clone()));
    RunArgs::new(pairs.collect(), &[])
}

fn assembled(tensors: Vec<Global>, args: &RunArgs) -> Assembly {
    from_global(tensors, args, &Rules::new(&[]))
}

fn shapes(assembly: &Assembly) -> BTreeMap<String, Vec<u64>> {
    let tensors = assembly.tensors.iter();
    tensors.map(|(name, merged)| (name.to_string(), merged.tensor.shape().to_vec())).collect()
}

/// The place of each element in the file, in row-major order.
fn places(tensor: &LogicalTensor) -> Vec<u64> {
    assert_eq!(tensor.check_tiling(), Ok(()));
    let strides = crate::base::extent::row_major(tensor.shape()).unwrap();
    let mut places = vec![0; usize::try_from(tensor.numel()).unwrap()];
    for piece in tensor.pieces() {
        for number in 0..piece.extent.numel() {
            let (mut rest, mut at, mut place) = (number, 0, piece.offset);
            for dim in (0..tensor.shape().len()).rev() {
                let inside = rest % piece.extent.sizes[dim];
                rest /= piece.extent.sizes[dim];
                at += (piece.extent.offsets[dim] + inside) * strides[dim];
                place += inside * piece.strides[dim];
            }
            places[usize::try_from(at).unwrap()] = place;
        }
    }
    places
}

#[track_caller]
fn check(stored: &[(&str, &[u64])], expected: &[(&str, &[u64])]) {
    let tensors = stored.iter().map(|(name, shape)| weight(name, shape)).collect();
    let assembly = assembled(tensors, &RunArgs::default());
    assert_eq!(assembly.problems, []);
    let expected: BTreeMap<String, Vec<u64>> =
        expected.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect();
    assert_eq!(shapes(&assembly), expected);
}

#[test]
fn a_list_without_numbers_is_an_axis_wherever_it_is() {
    check(
        &[
            ("vision_model.decoder.layers.mlp.linear_fc2.weight", &[2, 4, 6]),
            ("language_model.decoder.layers.0.mlp.linear_fc2.weight", &[4, 6]),
            ("mtp.layers.0.mtp_model_layer.layers.norm.weight", &[1, 4]),
        ],
        &[
            ("vision_model.decoder.layers.0.mlp.linear_fc2.weight", &[4, 6]),
            ("vision_model.decoder.layers.1.mlp.linear_fc2.weight", &[4, 6]),
            ("language_model.decoder.layers.0.mlp.linear_fc2.weight", &[4, 6]),
            ("mtp.layers.0.transformer_layer.layers.0.norm.weight", &[4]),
        ],
    );
}

#[test]
fn experts_lie_behind_the_layers_or_by_number() {
    check(
        &[
            ("decoder.layers.mlp.experts.experts.linear_fc2.weight", &[1, 2, 4, 3]),
            ("decoder.layers.mlp.router.expert_bias", &[1, 2]),
            ("decoder.layers.mlp.shared_experts.gate_weight", &[1, 1, 4]),
            ("mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.bias", &[1, 6]),
            ("mtp.layers.1.transformer_layer.mlp.experts.experts.3.linear_fc1.weight_w", &[3, 4]),
            ("mtp.layers.1.transformer_layer.mlp.experts.experts.3.linear_fc1.weight_v", &[3, 4]),
            ("mtp.layers.1.transformer_layer.mlp.experts.linear_fc1.weight5_w", &[3, 4]),
            ("mtp.layers.1.transformer_layer.mlp.experts.linear_fc1.weight5_v", &[3, 4]),
        ],
        &[
            ("decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight", &[4, 3]),
            ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", &[4, 3]),
            ("decoder.layers.0.mlp.router.expert_bias", &[2]),
            ("decoder.layers.0.mlp.shared_experts.gate_weight", &[1, 4]),
            ("mtp.layers.0.transformer_layer.mlp.experts.local_experts.0.linear_fc1.bias", &[6]),
            (
                "mtp.layers.1.transformer_layer.mlp.experts.local_experts.3.linear_fc1.weight",
                &[6, 4],
            ),
            (
                "mtp.layers.1.transformer_layer.mlp.experts.local_experts.5.linear_fc1.weight",
                &[6, 4],
            ),
        ],
    );
}

#[test]
fn every_mixer_has_its_own_list_of_sections() {
    let stored = [
        ("decoder.layers.0.mixer.in_proj.weight", "z V0 V1 K0 K1 Q b0 b1 a"),
        ("decoder.layers.0.mixer.conv1d.weight", "V0 V1 K0 K1 Q"),
        ("decoder.layers.1.self_attention.in_proj.weight", "query key value z f b w"),
        ("decoder.layers.2.mixer.conv1d_weight", "x B C"),
    ];
    let mut tensors = Vec::new();
    for (base, sections) in stored {
        let sections = sections.split(' ');
        tensors.extend(sections.map(|section| weight(&format!("{base}.{section}"), &[2, 3])));
    }
    let assembly = assembled(tensors, &RunArgs::default());
    assert_eq!(assembly.problems, []);
    let rows: Vec<(String, u64)> =
        shapes(&assembly).into_iter().map(|(name, shape)| (name, shape[0])).collect();
    let expected = [
        ("decoder.layers.0.mixer.conv1d.weight", 10),
        ("decoder.layers.0.mixer.in_proj.weight", 18),
        ("decoder.layers.1.self_attention.in_proj.weight", 14),
        ("decoder.layers.2.mixer.conv1d.weight", 6),
    ];
    assert_eq!(rows, expected.map(|(name, rows)| (name.to_owned(), rows)));
}

#[test]
fn sections_that_make_up_nothing_are_a_problem() {
    for sections in [&["z", "x", "B", "dt"][..], &["V0", "K0"], &["z", "x", "B", "C", "dt", "a"]] {
        let name = "decoder.layers.0.mixer.in_proj.weight";
        let tensors =
            sections.iter().map(|section| weight(&format!("{name}.{section}"), &[2, 3])).collect();
        let assembly = assembled(tensors, &RunArgs::default());
        assert!(assembly.tensors.is_empty());
        let [(_, LayoutError::SectionsIncomplete { found, .. })] = &*assembly.problems else {
            unreachable!("{:?}", assembly.problems)
        };
        assert_eq!(found.len(), sections.len());
    }
}

#[test]
fn lists_of_different_lengths_are_a_problem() {
    let tensors = vec![
        weight("decoder.layers.mlp.linear_fc1.weight", &[3, 8, 4]),
        weight("decoder.layers.mlp.linear_fc2.weight", &[2, 4, 8]),
    ];
    let assembly = assembled(tensors, &RunArgs::default());
    assert_eq!(assembly.tensors.len(), 3);
    let [(name, LayoutError::LayersDisagree { layers: 2, others: 3, .. })] = &*assembly.problems
    else {
        unreachable!("{:?}", assembly.problems)
    };
    assert_eq!(name, "decoder.layers.mlp.linear_fc2.weight");
}

#[test]
fn placeholder_layers_are_not_counted() {
    let noop = args(&[("noop_layers", PlainValue::List(vec![PlainValue::Int(1)]))]);
    let mut stacked = numbered(&[3, 4]);
    let kept = [stacked.slice(0, 0, 1).unwrap(), stacked.slice(0, 2, 1).unwrap()];
    // Nothing was written for the second layer.
    stacked = stacked.slice(0, 0, 3).unwrap();
    let boxes = [0, 2].map(|layer| {
        let extent = crate::base::extent::Extent { offsets: vec![layer, 0], sizes: vec![1, 4] };
        let region = pretended(1 << 20).part(layer * 4, 4).unwrap();
        let stored =
            StoredTensor::contiguous(Dtype::UInt8, vec![1, 4], region, ByteOrder::Little).unwrap();
        (extent, stored)
    });
    let source = stacked.source().clone();
    let holed = LogicalTensor::from_boxes(Dtype::UInt8, vec![3, 4], source, boxes).unwrap();
    let mut global = weight("decoder.layers.mlp.linear_fc1.layer_norm_weight", &[3, 4]);
    global.tensor = holed;
    let assembly = assembled(vec![global], &noop);
    let found: Vec<(String, Vec<u64>)> = assembly
        .tensors
        .iter()
        .map(|(name, merged)| (name.to_string(), places(&merged.tensor)))
        .collect();
    let names = [0, 1].map(|layer| format!("decoder.layers.{layer}.pre_mlp_layernorm.weight"));
    let kept = kept.map(|row| places(&row));
    assert_eq!(found, names.into_iter().zip(kept).collect::<Vec<_>>());
}

#[test]
fn a_grid_of_flattened_parts_is_the_parameter_again() {
    // [4, 6] in parts of [2, 3], each flat.
    let flat = numbered(&[2, 2, 6]);
    let whole = unflattened(&flat, &[4, 6]).unwrap();
    let expected = [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
        [12, 13, 14, 18, 19, 20],
        [15, 16, 17, 21, 22, 23],
    ];
    assert_eq!(places(&whole), expected.concat());
    assert_eq!(places(&unflattened(&numbered(&[3, 2]), &[6]).unwrap()), [0, 1, 2, 3, 4, 5]);
    for (stored, wanted) in [(&[2, 2, 6][..], &[4, 5][..]), (&[2, 2, 5], &[4, 6]), (&[4], &[])] {
        let error = unflattened(&numbered(stored), wanted).unwrap_err();
        assert!(matches!(error, LayoutError::NoGrid { .. }), "{stored:?} {wanted:?}: {error}");
    }
}

#[test]
fn alternating_gate_and_up_rows_are_parted_whatever_ranks_shared_them() {
    let name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight";
    let interleave = ("moe_mlp_glu_interleave_size", PlainValue::Int(2));
    let known = args(&[interleave, ("tensor_model_parallel_size", PlainValue::Int(2))]);
    // One rank: gates 0 1, ups 2 3, gates 4 5, ups 6 7.
    let whole = deinterleaved(name, numbered(&[8]), &known, 1).unwrap();
    assert_eq!(places(&whole), [0, 1, 4, 5, 2, 3, 6, 7]);
    // Two ranks with eight rows each, of which the first halves come first.
    let global = weight("decoder.layers.0.mlp.experts.experts.0.linear_fc1.weight", &[16, 1]);
    let assembly = assembled(vec![global], &known);
    let merged = &assembly.tensors[&Name::new(name)];
    let gates = [0, 1, 8, 9, 4, 5, 12, 13];
    let ups = [2, 3, 10, 11, 6, 7, 14, 15];
    assert_eq!(places(&merged.tensor), [gates, ups].concat());
}

#[test]
fn grouped_experts_have_their_states_untransposed() {
    let name = "decoder.layers.mlp.experts.experts.linear_fc1.weight";
    let mut state = weight(name, &[1, 2, 1, 1, 24]);
    state.state = Some("exp_avg".into());
    state.flattened = Some(vec![1, 2, 4, 6]);
    let assembly = assembled(vec![weight(name, &[1, 2, 6, 4]), state], &RunArgs::default());
    assert_eq!(assembly.problems, []);
    let name = "optimizer.exp_avg.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight";
    let found = &assembly.tensors[&Name::new(name)].tensor;
    assert_eq!(found.shape(), [6, 4]);
    assert_eq!(places(found)[..5], [24, 30, 36, 42, 25]);
}

#[test]
fn no_tensor_makes_more_layers_than_any_model_has() {
    let assembly =
        assembled(vec![weight("decoder.layers.a.weight", &[1 << 20, 1])], &RunArgs::default());
    assert!(assembly.tensors.is_empty());
    let [(_, LayoutError::OverLimit(_))] = &*assembly.problems else {
        unreachable!("{:?}", assembly.problems)
    };
}

#[test]
fn buffers_are_left_out_and_counted() {
    let tensors = vec![
        weight("decoder.layers.mlp.linear_fc1._extra_state", &[2, 4]),
        weight("rotary_pos_emb.inv_freq", &[4]),
    ];
    let assembly = assembled(tensors, &RunArgs::default());
    assert_eq!((assembly.buffers, assembly.tensors.len()), (2, 0));
}
