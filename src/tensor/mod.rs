//! Tensors as strided pieces over file regions: what was written ([`StoredTensor`]), what it is
//! a part of ([`LogicalTensor`]), and the view algebra between the two. Pure metadata, no reads.

mod logical;
mod stored;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod tiling;
mod view;

pub use logical::{LogicalTensor, Merge, Replica, Source, TensorError};
pub use stored::{ByteOrder, StorageView, StoredError, StoredTensor};
pub use view::Piece;
