//! Boxes in index space: pure arithmetic, checked where a file supplies the numbers.

/// A box of a tensor: where it starts and how far it reaches in each dimension
/// (the pair of names that torch's distributed checkpoint uses).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// First index in each dimension.
    pub offsets: Vec<u64>,
    /// Number of indices in each dimension.
    pub sizes: Vec<u64>,
}

impl Extent {
    /// The box that is the whole of a tensor of this shape.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// Number of elements. Only for boxes inside a tensor whose own [`numel`] is known to fit.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.sizes.iter().product()
    }

    /// True where the box holds no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// The part that two boxes of the same tensor share, if any.
    ///
    /// ```
    /// use ckptcmp::base::extent::Extent;
    /// let rows = Extent { offsets: vec![2, 0], sizes: vec![2, 8] };
    /// let columns = Extent { offsets: vec![0, 4], sizes: vec![8, 4] };
    /// let both = rows.intersect(&columns).unwrap();
    /// assert_eq!((both.offsets, both.sizes), (vec![2, 4], vec![2, 4]));
    /// ```
    #[must_use]
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        let shared = |dim: usize| {
            let start = self.offsets[dim].max(other.offsets[dim]);
            let ends = [self, other].map(|extent| extent.offsets[dim] + extent.sizes[dim]);
            (start, ends[0].min(ends[1]))
        };
        let dims = 0..self.offsets.len();
        // Most boxes have nothing in common: one of hundreds of shards with a block.
        if dims.clone().any(|dim| shared(dim).0 >= shared(dim).1) {
            return None;
        }
        let offsets = dims.clone().map(|dim| shared(dim).0).collect();
        let sizes = dims.map(|dim| shared(dim).1 - shared(dim).0).collect();
        Some(Self { offsets, sizes })
    }
}

/// Number of elements of a shape, or `None` where it does not fit 63 bits (torch counts in `int64`).
#[must_use]
pub fn numel(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    let count = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size))?;
    (count <= i64::MAX as u64).then_some(count)
}

/// Row-major strides in elements, or `None` where they do not fit.
#[must_use]
pub fn row_major(shape: &[u64]) -> Option<Vec<u64>> {
    let mut strides = vec![1_u64; shape.len()];
    for dim in (0..shape.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1].checked_mul(shape[dim + 1].max(1))?;
    }
    Some(strides)
}

/// Cuts the flat range `start..end` of a row-major tensor into boxes, in order: at most
/// two for each dimension and one in the middle. `each` gets the box and the flat index of its first element.
pub fn boxes_of_range(shape: &[u64], start: u64, end: u64, each: &mut impl FnMut(Extent, u64)) {
    if shape.is_empty() {
        if start == 0 && end > 0 {
            each(Extent { offsets: Vec::new(), sizes: Vec::new() }, 0);
        }
        return;
    }
    let mut at = start;
    while at < end {
        let extent = largest_box(shape, at, end);
        let count = extent.numel();
        each(extent, at);
        at += count;
    }
}

/// The largest box that starts at flat index `at`, is contiguous in row-major order and does not reach beyond `end`.
fn largest_box(shape: &[u64], at: u64, end: u64) -> Extent {
    let rank = shape.len();
    let mut offsets = vec![0; rank];
    let mut rest = at;
    for dim in (0..rank).rev() {
        offsets[dim] = rest % shape[dim];
        rest /= shape[dim];
    }
    let mut sizes = vec![1; rank];
    // Take whole inner dimensions while the start is aligned to them and they fit, then as much of the next one as fits.
    let mut inner = 1_u64;
    for dim in (0..rank).rev() {
        let fitting = (end - at) / inner;
        let take = (shape[dim] - offsets[dim]).min(fitting);
        sizes[dim] = take;
        if take < shape[dim] {
            break;
        }
        inner *= shape[dim];
        if dim > 0 && (end - at) / inner == 0 {
            break;
        }
    }
    Extent { offsets, sizes }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numel_of_an_overflowing_shape_is_none() {
        assert_eq!(numel(&[u64::MAX, 2]), None);
        assert_eq!(numel(&[u64::MAX, 0]), Some(0));
        assert_eq!(numel(&[]), Some(1));
    }

    proptest! {
        #[test]
        fn the_boxes_of_a_range_are_that_range_in_order(
            shape in prop::collection::vec(1_u64..5, 1..5), cut in any::<(u64, u64)>(),
        ) {
            let total = numel(&shape).unwrap();
            let (start, end) = (cut.0 % (total + 1), cut.1 % (total + 1));
            let (start, end) = (start.min(end), start.max(end));
            let strides = row_major(&shape).unwrap();
            let mut next = start;
            boxes_of_range(&shape, start, end, &mut |extent, at| {
                assert_eq!(at, next);
                let first: u64 = extent.offsets.iter().zip(&strides).map(|(o, s)| o * s).sum();
                let last: u64 = extent.offsets.iter().zip(&extent.sizes).zip(&strides)
                    .map(|((o, n), s)| (o + n - 1) * s).sum();
                assert_eq!(first, at);
                assert_eq!(last + 1 - first, extent.numel(), "the box is contiguous");
                next = last + 1;
            });
            prop_assert_eq!(next, end);
        }
    }
}
