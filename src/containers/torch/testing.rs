//! What the tests of this module share: files from bytes, small zip archives, the fixtures, and a walk to all tensors.

#![expect(clippy::unwrap_used, reason = "a test that cannot make its files fails")]

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::{RebuildError, TorchError, TorchFile, Value};
use crate::storage::{FileSet, Region};
use crate::tensor::StoredTensor;

/// A file with these bytes, deleted in the end.
pub(super) struct TestFile {
    pub(super) files: FileSet,
    pub(super) region: Region,
    _file: Option<NamedTempFile>,
}

impl TestFile {
    pub(super) fn new(bytes: &[u8]) -> Self {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let mut files = FileSet::default();
        let id = files.add(file.path()).unwrap();
        let region = files.whole(id);
        Self { files, region, _file: Some(file) }
    }

    pub(super) fn fixture(name: &str) -> Self {
        let mut files = FileSet::default();
        let id = files.add(&fixtures().join(name)).unwrap();
        let region = files.whole(id);
        Self { files, region, _file: None }
    }

    pub(super) fn open(&self) -> Result<TorchFile, TorchError> {
        TorchFile::open(&self.files, self.region)
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.region.len).unwrap()];
        self.files.read_exact_at(self.region.file, &mut bytes, self.region.offset).unwrap();
        bytes
    }
}

pub(super) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/torch-file")
}

/// An archive of stored entries, as plain as the format allows.
pub(super) fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let short = |len: usize| u16::try_from(len).unwrap().to_le_bytes();
    let long = |len: usize| u32::try_from(len).unwrap().to_le_bytes();
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in entries {
        let header = long(out.len());
        // Version, flags, method, time, date, CRC-32, two sizes, length of the name, of the extra field.
        let common = [
            &[20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..],
            &long(bytes.len()),
            &long(bytes.len()),
            &short(name.len()),
            &[0, 0],
        ]
        .concat();
        out.extend([b"PK\x03\x04", common.as_slice(), name.as_bytes(), bytes].concat());
        let tail = [&[0; 10][..], &header, name.as_bytes()].concat();
        directory.extend([b"PK\x01\x02\x14\0", common.as_slice(), &tail].concat());
    }
    let count = short(entries.len());
    let end = [&count[..], &count, &long(directory.len()), &long(out.len()), &[0, 0]].concat();
    [out, directory, [b"PK\x05\x06\0\0\0\0", end.as_slice()].concat()].concat()
}

/// A file of `torch.save` with this pickle and these storages.
pub(super) fn torch_file(pickle: &[u8], storages: &[(&str, &[u8])]) -> TestFile {
    let names: Vec<String> = storages.iter().map(|(key, _)| format!("a/data/{key}")).collect();
    let mut entries = vec![("a/data.pkl", pickle)];
    entries.extend(names.iter().zip(storages).map(|(name, (_, bytes))| (name.as_str(), *bytes)));
    TestFile::new(&zip(&entries))
}

/// A tensor by its path, or why it is none.
pub(super) type TensorAtPath = (String, Result<StoredTensor, RebuildError>);

/// All tensors in mappings, sequences and attributes, each container visited once.
pub(super) fn tensors(file: &TorchFile) -> Vec<TensorAtPath> {
    let values = file.values();
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut todo = vec![(String::new(), file.root())];
    while let Some((path, id)) = todo.pop() {
        if let Some(tensor) = file.tensor(id).transpose() {
            found.push((path, tensor));
        } else if !seen.insert(id) {
        } else if let Some(pairs) = values.mapping(id) {
            todo.extend(pairs.map(|(key, value)| match values.get(key) {
                Value::Str(key) => (format!("{path}/{key}"), value),
                Value::Int(key) => (format!("{path}/{key}"), value),
                _ => (format!("{path}/?"), value),
            }));
        } else if let Some(members) = values.sequence(id) {
            let members = members.enumerate();
            todo.extend(members.map(|(index, value)| (format!("{path}/{index}"), value)));
        } else if let Some(pairs) = values.attributes(id) {
            todo.extend(pairs.map(|(_, value)| (format!("{path}/."), value)));
        }
    }
    found
}
