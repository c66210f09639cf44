//! `*.index.json`, which says in what file each tensor is.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::{Component, Path};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;

use crate::base::limits::{ENTRY, LIMITS, OVER_GLOBAL_METADATA, OverLimit};
use crate::base::plain::PlainValue;
use crate::formats::error::OpenError;
use crate::storage::FileSet;

/// The file of each tensor of a model.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    weight_map: WeightMap,
}

/// Files by the names of the tensors in them.
#[derive(Debug)]
struct WeightMap(BTreeMap<String, Arc<str>>);

/// The part of an index that is about one file.
#[derive(Debug)]
pub(super) struct InFile<'a> {
    /// Number of its tensors.
    pub tensors: usize,
    /// The first of them.
    pub first: &'a str,
}

impl Index {
    /// Reads an index and what it says of the whole, for the state of the run.
    ///
    /// # Errors
    /// It cannot be read, is none, or names files elsewhere.
    pub(super) fn read(
        path: &Path,
        files: &mut FileSet,
    ) -> Result<(Self, Option<PlainValue>), OpenError> {
        let content = |what: String| OpenError::Content { path: path.to_path_buf(), what };
        let read = files.read_small(path, LIMITS.index_bytes);
        let bytes = read.map_err(OpenError::io(path))?;
        let index: Self = serde_json::from_slice(&bytes)
            .map_err(|error| content(format!("no index of tensors: {error}")))?;
        if let Some(file) = index.files().into_keys().find(|file| !is_inside(file)) {
            return Err(content(format!("{file:?} is no file of this folder")));
        }
        if index.weight_map.0.is_empty() {
            return Err(content("its weight_map is empty".to_owned()));
        }
        // What a longer one says of the whole is only informational, and not worth a tree of values.
        let is_short = bytes.len() as u64 <= LIMITS.json_bytes;
        let whole = is_short.then(|| serde_json::from_slice(&bytes).ok());
        let metadata = whole.flatten().and_then(|mut whole: Value| {
            let metadata = whole.get_mut("metadata")?.take();
            metadata.as_object().is_some_and(|all| !all.is_empty()).then(|| metadata.into())
        });
        Ok((index, metadata))
    }

    /// The files that hold tensors, each once, by name.
    pub(super) fn files(&self) -> BTreeMap<&str, InFile<'_>> {
        let mut files = BTreeMap::new();
        for (first, file) in self.entries() {
            files.entry(file).or_insert(InFile { tensors: 0, first }).tensors += 1;
        }
        files
    }

    /// Every tensor with its file.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map.0.iter().map(|(name, file)| (name.as_str(), &**file))
    }

    /// Tells whether there is such a tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        self.weight_map.0.contains_key(name)
    }
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of files by tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut files = BTreeMap::new();
        // Many tensors lie in few files, whose names are held once.
        let mut known: HashSet<Arc<str>> = HashSet::new();
        let mut left = LIMITS.global_metadata;
        while let Some((name, file)) = map.next_entry::<String, String>()? {
            left = left
                .checked_sub(name.len() + file.len() + ENTRY)
                .ok_or_else(|| A::Error::custom(OVER_GLOBAL_METADATA))?;
            let file = match known.get(file.as_str()) {
                Some(file) => Arc::clone(file),
                None => file.into(),
            };
            known.insert(Arc::clone(&file));
            if known.len() > LIMITS.index_files {
                let over = OverLimit::new("files", LIMITS.index_files as u64);
                return Err(A::Error::custom(over));
            }
            files.insert(name, file);
        }
        Ok(WeightMap(files))
    }
}

/// A path that leads nowhere but into the folder it is taken from.
fn is_inside(file: &str) -> bool {
    let mut components = Path::new(file).components();
    !file.is_empty() && components.all(|component| matches!(component, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_leads_nowhere_else() {
        assert!(is_inside("model-00001-of-00002.safetensors"));
        assert!(is_inside("unet/model.safetensors"));
        for path in ["", "/etc/passwd", "../model.safetensors", "a/../../b", "./a"] {
            assert!(!is_inside(path), "{path}");
        }
    }
}
