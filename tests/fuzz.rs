//! The functions behind the fuzz targets still compile and hold without a fuzzer: some inputs each, by hand and cut from one another.

#![allow(
    unreachable_pub,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "tests, and a crate of its own inside"
)]

#[path = "../fuzz/src/lib.rs"]
mod fuzz;

/// A fuzz target: any bytes in, no panic.
type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("dcp", fuzz::dcp),
    ("deepspeed", fuzz::deepspeed),
    ("fsdp_ranks", fuzz::fsdp_ranks),
    ("hugging_face", fuzz::hugging_face),
    ("infinitrain", fuzz::infinitrain),
    ("llmc", fuzz::llmc),
    ("megatron", fuzz::megatron),
    ("pickle", fuzz::pickle),
    ("rebuild", fuzz::rebuild),
    ("rules", fuzz::rules),
    ("safetensors", fuzz::safetensors),
    ("torch_dist", fuzz::torch_dist),
    ("torch_stream", fuzz::torch_stream),
    ("torch_zip", fuzz::torch_zip),
    ("trackers", fuzz::trackers),
    ("zarr", fuzz::zarr),
];

/// A pickle of `{"w": ([1, 2], {})}`, protocol 2.
const PICKLE: &[u8] = b"\x80\x02}X\x01\x00\x00\x00w](K\x01K\x02e}\x86s.";

#[test]
fn every_target_takes_any_bytes() {
    let safetensors = b"\x3a\0\0\0\0\0\0\0{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}    \0\0\0\0\0\0\x80\x3f";
    let folder = [b"{}", fuzz::CUT, PICKLE, fuzz::CUT, &safetensors[..], fuzz::CUT, b"5"].concat();
    for whole in
        [PICKLE, safetensors, &folder, b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."]
    {
        for len in (0..=whole.len()).step_by(7).chain([whole.len()]) {
            for (_, target) in TARGETS {
                target(&whole[..len]);
            }
        }
    }
}

#[test]
fn every_target_of_the_fuzzer_is_here() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/fuzz_targets");
    let files = std::fs::read_dir(folder).expect("the folder of the targets");
    let names = files.map(|file| file.expect("an entry").path().file_stem().map(ToOwned::to_owned));
    let mut names: Vec<_> =
        names.map(|name| name.expect("a name").into_string().expect("text")).collect();
    names.sort();
    assert_eq!(names, TARGETS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
}
