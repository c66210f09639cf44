//! Whole tensors in memory, to be cut and written again in other forms.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{gather, sizes};

/// A whole tensor: its elements in row-major order.
#[derive(Clone)]
pub(crate) struct Array {
    /// As `inspect` names it.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Array {
    /// The values of a tensor of `inspect --json`.
    pub(crate) fn of(tensor: &Value) -> Self {
        let dtype = tensor["dtype"].as_str().unwrap().to_owned();
        Self { dtype, shape: sizes(&tensor["shape"]), bytes: gather(tensor) }
    }

    /// A row of float32.
    pub(crate) fn float32(values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { dtype: "float32".to_owned(), shape: vec![values.len()], bytes }
    }

    /// These rows, in this order.
    pub(crate) fn rows(&self, rows: impl IntoIterator<Item = usize>) -> Self {
        let row = self.bytes.len() / self.shape[0];
        let rows: Vec<usize> = rows.into_iter().collect();
        let bytes = rows.iter().flat_map(|at| &self.bytes[at * row..][..row]).copied().collect();
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        Self { dtype: self.dtype.clone(), shape, bytes }
    }

    /// Rows and columns exchanged.
    pub(crate) fn transposed(&self) -> Self {
        let [rows, columns] = self.shape[..] else { panic!("no matrix") };
        let element = self.bytes.len() / (rows * columns);
        let of = |row: usize, column: usize| {
            &self.bytes[(row * columns + column) * element..][..element]
        };
        let bytes = (0..columns).flat_map(|column| (0..rows).flat_map(move |row| of(row, column)));
        Self {
            dtype: self.dtype.clone(),
            shape: vec![columns, rows],
            bytes: bytes.copied().collect(),
        }
    }

    /// Tensors of one shape as one with another axis in front.
    pub(crate) fn stacked(parts: &[Self]) -> Self {
        assert!(parts.iter().all(|part| part.shape == parts[0].shape));
        let bytes = parts.iter().flat_map(|part| &part.bytes).copied().collect();
        let shape = [&[parts.len()], &parts[0].shape[..]].concat();
        Self { dtype: parts[0].dtype.clone(), shape, bytes }
    }
}

/// Writes a safetensors file of these tensors.
pub(crate) fn write_safetensors<'a>(
    file: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Array)>,
    metadata: &Value,
) {
    let mut header = json!({ "__metadata__": metadata });
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let dtype = match tensor.dtype.as_str() {
            "float32" => "F32",
            "float16" => "F16",
            "bfloat16" => "BF16",
            other => other,
        };
        let range = [data.len(), data.len() + tensor.bytes.len()];
        header[name] = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": range });
        data.extend(&tensor.bytes);
    }
    let header = header.to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data[..]].concat();
    fs::write(file, bytes).unwrap();
}
