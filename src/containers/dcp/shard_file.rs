//! A safetensors file that holds chunks: which box of its tensor each entry is.
//!
//! `torch/distributed/checkpoint/_hf_utils.py` and `hf_storage.py`, torch 2.8 to 2.15: `__metadata__` has a text of
//! JSON under `DCP_SHARDING_INFO`, `{name: {"saved_offsets": [...]}}`.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::containers::safetensors::{Safetensors, SafetensorsError};
use crate::storage::{FileSet, Region};
use crate::tensor::StoredTensor;

const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// A safetensors file with the places of its chunks.
#[derive(Debug)]
pub struct ShardFile {
    /// The file.
    pub safetensors: Safetensors,
    /// The start of each chunk in its tensor.
    offsets: BTreeMap<String, Saved>,
}

#[derive(Debug, Deserialize)]
struct Saved {
    saved_offsets: Vec<u64>,
}

impl ShardFile {
    /// Reads the header of the file that fills `region`.
    ///
    /// # Errors
    /// As [`Safetensors::open`], and where the places of the chunks cannot be read.
    pub fn open(files: &FileSet, region: Region) -> Result<Self, SafetensorsError> {
        let safetensors = Safetensors::open(files, region)?;
        let offsets = match safetensors.metadata.get(SHARDING_INFO) {
            None => BTreeMap::new(),
            Some(text) => serde_json::from_str(text).map_err(|error| SafetensorsError::Header {
                what: format!("{SHARDING_INFO}: {error}"),
            })?,
        };
        Ok(Self { safetensors, offsets })
    }

    /// The chunk of a tensor that the file holds, and where it starts in the tensor.
    ///
    /// # Errors
    /// A sentence, where the file does not hold it or does not say which chunk it holds.
    pub fn chunk(&self, name: &str) -> Result<(&[u64], &StoredTensor), String> {
        let stored = self.safetensors.tensors.get(name).ok_or("does not hold this tensor")?;
        let stored = stored.as_ref().map_err(ToString::to_string)?;
        let saved = self.offsets.get(name);
        let saved = saved.ok_or("does not say which chunk of this tensor it holds")?;
        if saved.saved_offsets.len() != stored.shape().len() {
            return Err(format!(
                "says that a chunk of shape {:?} starts at {:?}",
                stored.shape(),
                saved.saved_offsets
            ));
        }
        Ok((&saved.saved_offsets, stored))
    }
}
