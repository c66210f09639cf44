//! Many cuts along a first dimension at once.

use std::ops::Range;

use super::{LogicalTensor, TensorError};

impl LogicalTensor {
    /// The tensors at these ranges of the first dimension, ascending and none within another. One pass over the pieces,
    /// however many there are of both.
    ///
    /// # Errors
    /// A range reaches beyond the tensor, or starts before the one before it ends.
    pub fn ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Self>, TensorError> {
        self.check_dim(0)?;
        let size = self.shape[0];
        let mut before = 0;
        for Range { start, end } in ranges {
            if *start < before || end < start || *end > size {
                let (start, len) = (*start, end.saturating_sub(*start));
                return Err(TensorError::OutOfRange {
                    dim: 0,
                    start,
                    len,
                    shape: self.shape.clone(),
                });
            }
            before = *end;
        }
        if !self.replicas.is_empty() {
            let slice = |range: &Range<u64>| self.slice(0, range.start, range.end - range.start);
            return ranges.iter().map(slice).collect();
        }
        let part = |range: &Range<u64>| {
            let mut part = self.without_pieces();
            part.shape[0] = range.end - range.start;
            part
        };
        let mut parts: Vec<Self> = ranges.iter().map(part).collect();
        let element = self.dtype.size();
        for piece in &self.pieces {
            let (start, size) = (piece.extent.offsets[0], piece.extent.sizes[0]);
            let first = ranges.partition_point(|range| range.end <= start);
            let touched = ranges.iter().zip(&mut parts).skip(first);
            for (range, part) in touched.take_while(|(range, _)| range.start < start + size) {
                part.pieces.extend(piece.slice(0, range.start, range.end - range.start, element));
            }
        }
        Ok(parts)
    }

    fn without_pieces(&self) -> Self {
        Self {
            dtype: self.dtype,
            shape: self.shape.clone(),
            source: self.source.clone(),
            pieces: Vec::new(),
            replicas: Vec::new(),
            merge: self.merge,
        }
    }
}
