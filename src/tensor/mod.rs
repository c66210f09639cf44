//! Tensors as strided pieces over file regions.

mod stored;

pub use stored::{ByteOrder, StoredError, StoredTensor};
