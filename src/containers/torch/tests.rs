//! Whole files: those that torch wrote, those that are none, and those that were damaged.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::error::Error;

use super::testing::{TestFile, fixtures, tensors, torch_file, zip};
use super::*;
use crate::base::dtype::Dtype;
use crate::tensor::StoredTensor;
use crate::tensor::testing::Random;

/// The bytes of the elements in row-major order, as torch would lay them out.
fn elements(file: &TestFile, tensor: &StoredTensor) -> String {
    let storage = tensor.storage();
    let mut bytes = vec![0; usize::try_from(storage.len).unwrap()];
    file.files.read_exact_at(storage.file, &mut bytes, storage.offset).unwrap();
    let size = usize::try_from(tensor.dtype().size()).unwrap();
    let mut index = vec![0; tensor.shape().len()];
    let mut hex = String::new();
    for _ in 0..tensor.shape().iter().product::<u64>() {
        let at: u64 =
            index.iter().zip(tensor.strides()).map(|(index, stride)| index * stride).sum();
        let at = usize::try_from(tensor.storage_offset() + at).unwrap() * size;
        let element = &bytes[at..at + size];
        let swapped: Vec<u8> = element.iter().rev().copied().collect();
        let is_big = tensor.byte_order() == ByteOrder::Big;
        for byte in if is_big { &swapped } else { element } {
            hex += &format!("{byte:02x}");
        }
        for dim in (0..index.len()).rev() {
            index[dim] += 1;
            if index[dim] < tensor.shape()[dim] {
                break;
            }
            index[dim] = 0;
        }
    }
    hex
}

#[test]
fn every_tensor_is_what_torch_loads() {
    let expected = std::fs::read_to_string(fixtures().join("expected.tsv")).unwrap();
    let mut expected: Vec<&str> = expected.lines().collect();
    let mut names: Vec<&str> = expected.iter().filter_map(|line| line.split('\t').next()).collect();
    names.dedup();
    let mut found = Vec::new();
    for name in names {
        let file = TestFile::fixture(name);
        for (path, tensor) in tensors(&file.open().unwrap()) {
            let tensor = tensor.unwrap();
            found.push(format!(
                "{name}\t{path}\t{}\t{:?}\t{:?}\t{}\t{}",
                tensor.dtype(),
                tensor.shape(),
                tensor.strides(),
                tensor.storage_offset(),
                elements(&file, &tensor)
            ));
        }
    }
    found.sort();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn the_arguments_are_read_alike_in_every_protocol() {
    let names = [
        "protocol2.pt",
        "protocol3.pt",
        "protocol4.pt",
        "protocol5.pt",
        "legacy.pt",
        "legacy_protocol4.pt",
    ];
    for name in names {
        let file = TestFile::fixture(name).open().unwrap();
        let is_legacy = name.starts_with("legacy");
        assert_eq!(file.container(), if is_legacy { Container::Legacy } else { Container::Zip });
        let values = file.values();
        let args = values.dict_get(file.root(), "args").unwrap();
        assert_eq!(values.class_name(args).unwrap(), "argparse.Namespace");
        let arg = |name: &str| values.attribute(args, name).unwrap();
        assert_eq!(values.as_u64(arg("tensor_model_parallel_size")), Some(2));
        assert_eq!(values.as_i64(arg("negative")), Some(-5));
        assert_eq!(values.as_u64(arg("negative")), None);
        assert_eq!(values.as_u64(arg("unsigned")), Some(1 << 63));
        assert_eq!(values.as_i64(arg("unsigned")), None);
        assert_eq!(values.as_f64(arg("lr")), Some(1.5e-4));
        assert_eq!(values.as_bool(arg("bf16")), Some(true));
        assert_eq!(values.as_str(arg("name")), Some("größe"));
        assert_eq!(values.class_name(arg("model_type")).unwrap(), "megatron.core.enums.ModelType");
        assert_eq!(values.global(arg("params_dtype")), Some(("torch", "bfloat16")));
        assert!(matches!(values.get(arg("huge")), Value::BigInt([0, 0, 0, 0, 0, 0, 0, 0, 0x40])));
        assert!(matches!(values.get(arg("minus")), Value::BigInt([0, 0, 0, 0, 0, 0, 0, 0, 0xc0])));
        assert_eq!(values.as_bytes(arg("raw")).unwrap().as_ref(), b"\x00\x80\xff");
        assert_eq!(values.as_bytes(arg("none")).unwrap().as_ref(), b"");
        assert_eq!(values.as_bytes(arg("array")).unwrap().as_ref(), b"ab\xe9");
        assert_eq!(arg("itself"), args);

        let numbers = |id| -> Vec<u64> {
            values.sequence(id).unwrap().map(|id| values.as_u64(id).unwrap()).collect()
        };
        assert_eq!(numbers(arg("noop_layers")), [3]);
        assert_eq!(numbers(arg("frozen")), [1, 2]);
        assert_eq!(numbers(arg("size")), [2, 3]);
        assert_eq!(numbers(arg("deque")), [1, 2]);
        assert_eq!(values.dict_get(arg("counter"), "a").and_then(|id| values.as_u64(id)), Some(2));
        let slotted = arg("slotted");
        let slot = |name| values.attribute(slotted, name).and_then(|id| values.as_u64(id));
        assert_eq!((slot("width"), slot("depth"), slot("height")), (Some(7), Some(8), None));

        let model = values.dict_get(file.root(), "model").unwrap();
        assert_eq!(values.class_name(model).unwrap(), "collections.OrderedDict");
        assert!(values.attribute(model, "_metadata").is_some());
        let extra = values.dict_get(model, "layer._extra_state").unwrap();
        assert_eq!(values.class_name(extra).unwrap(), "_io.BytesIO");
        let nested = values.dict_get(file.root(), "default").unwrap();
        let inner = values.dict_get(nested, "x").unwrap();
        assert_eq!(values.dict_get(inner, "y").and_then(|id| values.as_u64(id)), Some(1));
    }
}

#[test]
fn tied_tensors_share_their_storage() {
    let file = TestFile::fixture("protocol2.pt").open().unwrap();
    let found = tensors(&file);
    let storage = |name: &str| {
        let path = format!("/model/{name}");
        let tensor = &found.iter().find(|(found, _)| *found == path).unwrap().1;
        tensor.as_ref().unwrap().storage()
    };
    assert_eq!(storage("tied"), storage("tied_too"));
    assert_eq!(storage("whole"), storage("tail"));
    assert_ne!(storage("tied"), storage("whole"));
}

#[test]
fn tensors_that_are_not_read_are_named() {
    let file = TestFile::fixture("unreadable.pt").open().unwrap();
    let (read, unread): (Vec<_>, Vec<_>) =
        tensors(&file).into_iter().partition(|(_, tensor)| tensor.is_ok());
    let read: Vec<_> =
        read.into_iter().map(|(path, tensor)| (path, tensor.unwrap().dtype())).collect();
    assert_eq!(read, [("/e8m0".to_owned(), Dtype::Float8E8M0Fnu)]);
    let mut said: Vec<String> = unread
        .into_iter()
        .map(|(path, tensor)| format!("{path}: {}", tensor.unwrap_err()))
        .collect();
    said.sort();
    let expected = [
        "/conj: a lazily conjugated tensor (_rebuild_tensor_v2) is not read; save it as a plain tensor",
        "/engine: a quantised Transformer Engine tensor \
         (transformer_engine.pytorch.tensor.float8_tensor.Float8Tensor._make_in_reduce_ex) is not read; \
         save it as a plain tensor",
        "/engine_call: a quantised Transformer Engine tensor \
         (transformer_engine.pytorch.tensor.float8_tensor.Float8Tensor) is not read; save it as a plain tensor",
        "/meta: a meta tensor, which has no values, (torch._utils._rebuild_meta_tensor_no_storage) is not read; \
         save it as a plain tensor",
        "/neg: a lazily negated tensor (_rebuild_tensor_v2) is not read; save it as a plain tensor",
        "/quantised: a quantised tensor (torch._utils._rebuild_qtensor) is not read; save it as a plain tensor",
        "/sparse: a sparse tensor (torch._utils._rebuild_sparse_tensor) is not read; save it as a plain tensor",
        "/unknown: elsewhere.utils._rebuild_tensor_v2 makes tensors in a way that is not known; \
         save it as a plain tensor",
    ];
    assert_eq!(said, expected);
}

/// The text that a user would read: the error and its causes.
fn said(bytes: &[u8]) -> String {
    let error = TestFile::new(bytes).open().unwrap_err();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[test]
fn files_that_are_none_get_their_own_sentence() {
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    let mut tar = vec![b'x'; 512];
    tar[257..262].copy_from_slice(b"ustar");
    for (bytes, sentence) in [
        (&b""[..], "the file is empty"),
        (&[0; 5000], "the first 4096 bytes are all zero"),
        (lfs, "git-lfs pointer"),
        (&tar, "tar format"),
        (b"\x80\x02}.", "a plain pickle"),
        (b"<html>", "it starts with [3c, 68, 74, 6d, 6c, 3e]"),
        (b"PK\x03\x04", "cut off at byte 4"),
        (&zip(&[("a/version", b"3\n")]), "without data.pkl"),
        (
            &zip(&[("a/data.pkl", b"N."), ("b/data.pkl", b"N.")]),
            r#"both "a/data.pkl" and "b/data.pkl""#,
        ),
        (
            &zip(&[("a/data.pkl", b"N"), ("a/byteorder", b"little")]),
            r#"zip entry "a/data.pkl": byte 1: the pickle ends"#,
        ),
        (
            &zip(&[("a/data.pkl", b"N."), ("a/byteorder", b"middle")]),
            r#""a/byteorder" says neither"#,
        ),
        (
            &zip(&[("a/data.pkl", b"N."), ("a/byteorder", b"littlelittle")]),
            r#""a/byteorder" says neither"#,
        ),
    ] {
        let said = said(bytes);
        assert!(said.contains(sentence), "{said}");
        assert!(said.starts_with(char::is_lowercase) && !said.ends_with('.'), "{said}");
    }
}

#[test]
fn the_root_folder_may_have_any_name_or_none() {
    for folder in ["", "archive/", "a/b/", "größe "] {
        let name = |entry: &str| format!("{folder}{entry}");
        let bytes = zip(&[
            (&name("data.pkl"), b"N."),
            (&name("byteorder"), b"big"),
            (&name("data/0"), b"1234"),
        ]);
        let is_folder = folder.is_empty() || folder.ends_with('/');
        match TestFile::new(&bytes).open() {
            Ok(file) => assert!(is_folder && file.byte_order() == ByteOrder::Big),
            Err(error) => assert!(!is_folder && matches!(error, TorchError::NoPickle)),
        }
    }
}

#[test]
fn a_file_inside_a_larger_one_is_read_by_its_region() {
    let inner = TestFile::fixture("protocol2.pt");
    let bytes = [b"before".as_slice(), &inner.bytes(), b"after"].concat();
    let outer = TestFile::new(&bytes);
    assert!(outer.open().is_err());
    let region = outer.region.part(6, inner.region.len).unwrap();
    let slice = TorchFile::open(&outer.files, region).unwrap();
    let (found, expected) = (tensors(&slice), tensors(&inner.open().unwrap()));
    assert_eq!(found.len(), expected.len());
    for ((path, found), (_, expected)) in found.into_iter().zip(expected) {
        let (found, expected) = (found.unwrap(), expected.unwrap());
        assert_eq!(elements(&outer, &found), elements(&inner, &expected), "{path}");
    }
}

#[test]
fn what_is_no_tensor_is_none() {
    let file = torch_file(b"(NI1\nVtext\n]Vstorage\nQctorch\nSize\n)Rctorch\nfloat32\nt.", &[]);
    let file = file.open().unwrap();
    assert_eq!(file.values().sequence(file.root()).unwrap().count(), 7);
    assert!(tensors(&file).is_empty());
}

/// Opens damaged bytes and asks for everything; only a panic would be wrong.
fn survive(bytes: &[u8]) -> bool {
    let file = TestFile::new(bytes);
    let opened = file.open();
    for (_, tensor) in opened.iter().flat_map(tensors) {
        if let Ok(tensor) = tensor {
            let storage = tensor.storage();
            assert!(storage.offset + storage.len <= file.region.len);
        }
    }
    opened.is_ok()
}

#[test]
fn no_change_of_a_byte_is_fatal() {
    for name in ["protocol2.pt", "protocol4.pt", "legacy.pt", "mindtorch.ckpt", "legacy_views.pt"] {
        let whole = TestFile::fixture(name).bytes();
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut opened = 0;
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            // One change, sometimes several, so that checks behind other checks are reached too.
            for _ in 0..[1, 1, 1, 4][random.index(4)] {
                let at = random.index(bytes.len());
                bytes[at] = match random.below(4) {
                    0 => 0xff,
                    1 => 0,
                    2 => bytes[at] ^ (1 << random.below(8)),
                    _ => random.below(256).to_le_bytes()[0],
                };
            }
            opened += usize::from(survive(&bytes));
        }
        assert!((1..2000).contains(&opened), "{name}: {opened} of 2000 opened");
    }
}

#[test]
fn every_byte_of_the_zip_directory_may_change() {
    // The last one has 64-bit records, as torch always writes them.
    for name in ["compressed.pt", "mindtorch.ckpt", "protocol5.pt"] {
        let whole = TestFile::fixture(name).bytes();
        let directory = whole.windows(4).position(|four| four == b"PK\x01\x02").unwrap();
        for at in directory..whole.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                survive(&bytes);
            }
        }
    }
}

#[test]
fn a_cut_off_file_never_opens_unless_only_storages_are_gone() {
    for name in ["protocol2.pt", "legacy.pt", "mindtorch_big.ckpt"] {
        let whole = TestFile::fixture(name).bytes();
        for len in 0..whole.len() {
            assert!(!survive(&whole[..len]), "{name}: {len} of {} bytes", whole.len());
        }
    }
}
