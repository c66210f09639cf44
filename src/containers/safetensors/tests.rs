//! What the reference reader of safetensors 0.8 accepts and rejects, case by case, and damaged headers.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::Write;

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;

/// A file of this header and so many bytes of data.
fn open(header: &str, data: usize) -> Result<Safetensors, SafetensorsError> {
    open_bytes(&file(header, data))
}

fn file(header: &str, data: usize) -> Vec<u8> {
    let len = u64::try_from(header.len()).unwrap().to_le_bytes();
    [&len[..], header.as_bytes(), &vec![1; data]].concat()
}

fn open_bytes(bytes: &[u8]) -> Result<Safetensors, SafetensorsError> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let mut files = FileSet::default();
    let id = files.add(file.path()).unwrap();
    Safetensors::open(&files, files.whole(id))
}

fn entry(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}"#)
}

fn header(entries: &[String]) -> String {
    format!("{{{}}}", entries.join(","))
}

#[test]
fn tensors_are_ranges_behind_the_header() {
    let header = header(&[
        r#""__metadata__":{"format":"pt"}"#.to_owned(),
        entry("b", "BF16", "2,3", 4, 16),
        entry("a", "F32", "", 0, 4),
    ]);
    let read = open(&header, 16).unwrap();
    assert_eq!(read.metadata["format"], "pt");
    let tensor = read.tensors["b"].as_ref().unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::BFloat16, &[2, 3][..]));
    assert_eq!(tensor.storage().offset, 8 + header.len() as u64 + 4);
    assert_eq!(read.tensors["a"].as_ref().unwrap().shape(), [0_u64; 0]);
}

#[test]
fn accepts_what_the_reference_accepts() {
    let whole = entry("a", "F32", "2", 0, 8);
    let whole = header(&[whole]);
    for header in [
        whole.clone(),
        format!(" {whole}"),
        format!("{whole}   "),
        header(&[
            entry("byte", "U8", "1", 0, 1),
            entry("odd", "F32", "1", 1, 5),
            entry("r", "I8", "3", 5, 8),
        ]),
        header(&[entry("empty", "F64", "0,4", 0, 0), entry("a", "F16", "4", 0, 8)]),
        header(&[entry("packed", "F4", "16", 0, 8)]),
        header(&[entry("six", "F6_E2M3", "4", 0, 3), entry("r", "I8", "5", 3, 8)]),
    ] {
        open(&header, 8).unwrap();
    }
    assert!(open("{}", 0).unwrap().tensors.is_empty());
    assert!(open(r#"{"__metadata__":{"a":"b"}}"#, 0).unwrap().tensors.is_empty());
}

#[test]
fn rejects_what_the_reference_rejects() {
    let whole = header(&[entry("a", "F32", "2", 0, 8)]);
    for (header, data) in [
        (format!("{whole}\0"), 8),
        (whole.clone(), 9),
        (whole, 7),
        (header(&[entry("a", "F32", "1", 0, 4), entry("b", "F32", "1", 8, 12)]), 12),
        (header(&[entry("a", "F32", "2", 0, 8), entry("b", "F32", "1", 4, 8)]), 8),
        (header(&[entry("a", "F32", "2", 0, 8), entry("b", "F32", "2", 0, 8)]), 8),
        (header(&[entry("a", "F32", "3", 0, 8)]), 8),
        (header(&[entry("a", "F32", "2", 8, 0)]), 8),
        (header(&[entry("a", "F4", "3", 0, 2)]), 2),
        (header(&[entry("a", "F32", "4294967296,4294967296", 0, 8)]), 8),
        (r#"{"__metadata__":{"a":1}}"#.to_owned(), 0),
        ("[]".to_owned(), 0),
        (String::new(), 0),
        (r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#.to_owned(), 4),
    ] {
        assert!(open(&header, data).is_err(), "{header}, {data}");
    }
}

#[test]
fn one_odd_dtype_does_not_hide_the_other_tensors() {
    let entries =
        [entry("a", "F4", "8", 0, 4), entry("b", "F32", "1", 4, 8), entry("c", "X9", "7", 8, 9)];
    let read = open(&header(&entries), 9).unwrap();
    let unsupported = |name: &str| Err(SafetensorsTensorError::Dtype { name: name.to_owned() });
    assert_eq!(read.tensors["a"], unsupported("F4"));
    assert_eq!(read.tensors["c"], unsupported("X9"));
    assert!(read.tensors["b"].is_ok());
}

#[test]
fn a_repeated_name_is_told_and_its_last_entry_counts() {
    let entries = [entry("a", "F32", "1", 0, 4), entry("a", "I32", "1", 0, 4)];
    let read = open(&header(&entries), 4).unwrap();
    assert_eq!(read.repeated, ["a"]);
    assert_eq!(read.tensors["a"].as_ref().unwrap().dtype(), Dtype::Int32);
}

#[test]
fn every_dtype_has_the_size_of_its_bits() {
    for (name, bits, dtype) in DTYPES {
        assert!(dtype.is_none_or(|dtype| dtype.size() * 8 == bits), "{name}");
    }
}

#[test]
fn says_what_stands_in_the_place_of_a_file() {
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n";
    assert!(matches!(open_bytes(lfs), Err(SafetensorsError::LfsPointer)));
    assert!(matches!(open_bytes(b""), Err(SafetensorsError::Short { len: 0 })));
    let cut = &file(&header(&[entry("a", "F32", "2", 0, 8)]), 8)[..20];
    assert!(matches!(open_bytes(cut), Err(SafetensorsError::HeaderBeyondFile { .. })));
}

proptest! {
    #[test]
    fn a_damaged_file_is_an_ordinary_outcome(at in 0_usize..200, byte in any::<u8>()) {
        let header = header(&[entry("a", "F32", "2", 0, 8), entry("b", "F16", "4", 8, 16)]);
        let mut bytes = file(&header, 16);
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = open_bytes(&bytes);
        let _ = open_bytes(&bytes[..at]);
    }
}
