//! What property tests share: a small random generator, and a tensor beside an array that says of
//! every element where its bytes are, so that `ndarray` can be asked what the view algebra should give.

#![expect(clippy::unwrap_used, reason = "a test that cannot make its tensors fails")]

use ndarray::{ArrayD, Axis, IxDyn, Slice};

use crate::base::dtype::Dtype;
use crate::storage::{FileId, Region};

use super::{ByteOrder, LogicalTensor, Piece, StorageView, StoredTensor};

/// Random numbers (SplitMix64): the same for the same seed, everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// As `below`, to index with.
    pub(crate) fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap()
    }

    /// True once in so many times.
    pub(crate) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.index(choices.len())]
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes());
        words.take(len).collect()
    }

    /// Dimensions in random order.
    pub(crate) fn permutation(&mut self, rank: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..rank).collect();
        for last in (1..rank).rev() {
            order.swap(last, self.index(last + 1));
        }
        order
    }
}

/// The place of an element's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ElementPlace {
    pub(crate) offset: u64,
    pub(crate) order: ByteOrder,
}

/// A tensor, and what it should be.
#[derive(Debug, Clone)]
pub(crate) struct ElementModel {
    pub(crate) tensor: LogicalTensor,
    pub(crate) places: ArrayD<ElementPlace>,
    /// By source name; elements that a copy does not hold have no place.
    pub(crate) copies: Vec<(String, ArrayD<Option<ElementPlace>>)>,
}

/// Makes tensors over one file.
pub(crate) struct Maker<'r> {
    pub(crate) random: &'r mut Random,
    pub(crate) file: Region,
    pub(crate) dtype: Dtype,
    made: usize,
}

fn small(size: u64) -> usize {
    usize::try_from(size).unwrap()
}

fn dims(shape: &[u64]) -> IxDyn {
    IxDyn(&shape.iter().map(|&size| small(size)).collect::<Vec<_>>())
}

impl<'r> Maker<'r> {
    pub(crate) fn new(random: &'r mut Random, file: Region, dtype: Dtype) -> Self {
        Self { random, file, dtype, made: 0 }
    }

    pub(crate) fn shape(&mut self, most: u64) -> Vec<u64> {
        let rank = self.random.index(5);
        (0..rank).map(|_| self.random.below(most)).collect()
    }

    /// A stored tensor of this shape with random strides: permuted, padded, expanded.
    pub(crate) fn stored(&mut self, shape: &[u64]) -> ElementModel {
        let mut strides = vec![0; shape.len()];
        let mut next = 1;
        for dim in self.random.permutation(shape.len()).into_iter().rev() {
            if self.random.one_in(8) {
                continue;
            }
            next += if self.random.one_in(6) { self.random.below(4) } else { 0 };
            strides[dim] = next;
            next *= shape[dim].max(1);
        }
        for dim in 0..shape.len() {
            // The stride of a single index says nothing.
            if shape[dim] == 1 && self.random.one_in(3) {
                strides[dim] = u64::MAX;
            }
        }
        self.strided(shape, &strides)
    }

    /// A stored tensor of this shape and these strides, somewhere in the file.
    pub(crate) fn strided(&mut self, shape: &[u64], strides: &[u64]) -> ElementModel {
        let element = self.dtype.size();
        let last: u64 = shape
            .iter()
            .zip(strides)
            .filter(|(size, _)| **size > 1)
            .map(|(size, stride)| (size - 1) * stride)
            .sum();
        let storage_offset = self.random.below(5);
        let len = (storage_offset + last + 1) * element + self.random.below(9);
        let start = self.random.below(self.file.len - len + 1);
        let storage = self.file.part(start, len).unwrap();
        let order = *self.random.pick(&[ByteOrder::Little, ByteOrder::Big]);
        let view = StorageView { storage, storage_offset, strides: strides.to_vec() };
        let stored = StoredTensor::new(self.dtype, shape.to_vec(), view, order).unwrap();
        self.made += 1;
        let tensor = LogicalTensor::from_stored(&stored, format!("stored {}", self.made));
        let places = ArrayD::from_shape_fn(dims(shape), |index| {
            let steps: u64 = (0..shape.len())
                .filter(|&dim| index[dim] > 0)
                .map(|dim| index[dim] as u64 * strides[dim])
                .sum();
            ElementPlace { offset: storage.offset + (storage_offset + steps) * element, order }
        });
        ElementModel { tensor, places, copies: Vec::new() }
    }

    /// One random operation.
    pub(crate) fn changed(&mut self, model: ElementModel) -> ElementModel {
        let rank = model.places.ndim();
        if rank == 0 {
            return self.with_copy(model);
        }
        let dim = self.random.index(rank);
        let size = model.places.shape()[dim] as u64;
        match self.random.below(8) {
            0 => {
                let start = self.random.below(size + 1);
                let len = self.random.below(size - start + 1);
                let range = Slice::from(small(start)..small(start + len));
                model.map(
                    |tensor| tensor.slice(dim, start, len).unwrap(),
                    &Slicing { dim: Axis(dim), range },
                )
            }
            1 if size > 0 => {
                let at = self.random.below(size);
                let index = Selecting { dim: Axis(dim), at: small(at) };
                if self.random.one_in(2) {
                    return model.map(|tensor| tensor.select(dim, at).unwrap(), &index);
                }
                let unbound = |tensor: &LogicalTensor| tensor.unbind(dim).unwrap();
                model.map(|tensor| unbound(tensor).swap_remove(small(at)), &index)
            }
            2 | 3 => {
                let other = self.random.index(rank);
                model.map(|tensor| tensor.transpose(dim, other).unwrap(), &Swapping(dim, other))
            }
            4 if rank < 5 => {
                let divisors: Vec<u64> =
                    (1..=size.max(3)).filter(|&inner| size.is_multiple_of(inner)).collect();
                let inner = *self.random.pick(&divisors);
                let mut shape = model.tensor.shape().to_vec();
                shape.splice(dim..=dim, [size / inner, inner]);
                model.map(|tensor| tensor.split_axis(dim, inner).unwrap(), &Reshaping(dims(&shape)))
            }
            5 if dim + 1 < rank => {
                let mut shape = model.tensor.shape().to_vec();
                let inner = shape.remove(dim + 1);
                shape[dim] *= inner;
                model.map(|tensor| tensor.merge_axes(dim).unwrap(), &Reshaping(dims(&shape)))
            }
            6 => {
                let mut shape = model.tensor.shape().to_vec();
                shape[dim] = self.random.below(4);
                let mut other = self.stored(&shape);
                if self.random.one_in(3) {
                    other = self.with_copy(other);
                }
                if self.random.one_in(2) {
                    model.concat(dim, other)
                } else {
                    other.concat(dim, model)
                }
            }
            _ => self.with_copy(model),
        }
    }

    fn with_copy(&mut self, mut model: ElementModel) -> ElementModel {
        let shape = model.tensor.shape().to_vec();
        let copy = self.stored(&shape);
        model.copies.push((copy.tensor.source().name.to_string(), copy.places.mapv(Some)));
        model.tensor.add_copy(copy.tensor).unwrap();
        model
    }
}

/// An operation on arrays of any element type.
trait Change {
    fn apply<T: Clone>(&self, array: &ArrayD<T>) -> ArrayD<T>;
}

struct Slicing {
    dim: Axis,
    range: Slice,
}

impl Change for Slicing {
    fn apply<T: Clone>(&self, array: &ArrayD<T>) -> ArrayD<T> {
        array.slice_axis(self.dim, self.range).to_owned()
    }
}

struct Selecting {
    dim: Axis,
    at: usize,
}

impl Change for Selecting {
    fn apply<T: Clone>(&self, array: &ArrayD<T>) -> ArrayD<T> {
        array.index_axis(self.dim, self.at).to_owned()
    }
}

struct Swapping(usize, usize);

impl Change for Swapping {
    fn apply<T: Clone>(&self, array: &ArrayD<T>) -> ArrayD<T> {
        let mut view = array.view();
        view.swap_axes(self.0, self.1);
        view.to_owned()
    }
}

struct Reshaping(IxDyn);

impl Change for Reshaping {
    fn apply<T: Clone>(&self, array: &ArrayD<T>) -> ArrayD<T> {
        array.to_shape(self.0.clone()).unwrap().to_owned()
    }
}

impl ElementModel {
    fn map(self, tensor: impl Fn(&LogicalTensor) -> LogicalTensor, change: &impl Change) -> Self {
        Self {
            tensor: tensor(&self.tensor),
            places: change.apply(&self.places),
            copies: self
                .copies
                .iter()
                .map(|(name, places)| (name.clone(), change.apply(places)))
                .collect(),
        }
    }

    fn concat(self, dim: usize, other: Self) -> Self {
        let join = |first: &ArrayD<Option<ElementPlace>>, second: &ArrayD<Option<ElementPlace>>| {
            ndarray::concatenate(Axis(dim), &[first.view(), second.view()]).unwrap()
        };
        let nowhere = |model: &Self| ArrayD::from_elem(model.places.raw_dim(), None);
        let (before, after) = (nowhere(&self), nowhere(&other));
        let first = self.copies.iter().map(|(name, places)| (name.clone(), join(places, &after)));
        let second =
            other.copies.iter().map(|(name, places)| (name.clone(), join(&before, places)));
        let copies = first.chain(second).collect();
        let places =
            ndarray::concatenate(Axis(dim), &[self.places.view(), other.places.view()]).unwrap();
        let tensor = LogicalTensor::concat(dim, [self.tensor, other.tensor]).unwrap();
        Self { tensor, places, copies }
    }

    /// The expected look of a copy, laid over the tensor itself.
    pub(crate) fn overlaid(&self, copy: &ArrayD<Option<ElementPlace>>) -> ArrayD<ElementPlace> {
        let mut places = self.places.clone();
        places.zip_mut_with(copy, |place, copy| *place = copy.unwrap_or(*place));
        places
    }

    /// The copies that differ from the tensor itself, each as it should look: by source name.
    pub(crate) fn expected_copies(&self) -> Vec<(&str, ArrayD<ElementPlace>)> {
        let overlaid = self.copies.iter().map(|(name, copy)| (name.as_str(), self.overlaid(copy)));
        overlaid.filter(|(_, places)| *places != self.places).collect()
    }
}

/// Lays pieces over an array of places, element by element.
pub(crate) fn lay(places: &mut ArrayD<Option<ElementPlace>>, pieces: &[Piece], element: u64) {
    for piece in pieces {
        for index in ndarray::indices(dims(&piece.extent.sizes)) {
            let mut at: Vec<usize> = Vec::new();
            let mut steps = 0;
            for dim in 0..piece.extent.sizes.len() {
                at.push(index[dim] + small(piece.extent.offsets[dim]));
                steps += if index[dim] > 0 { index[dim] as u64 * piece.strides[dim] } else { 0 };
            }
            places[IxDyn(&at)] = Some(ElementPlace {
                offset: piece.offset + steps * element,
                order: piece.byte_order,
            });
        }
    }
}

/// A region of a file that is there only by name: for tests that never read.
pub(crate) fn pretended(len: u64) -> Region {
    let mut files = crate::storage::FileSet::default();
    let file: FileId = files.add(&std::env::current_exe().unwrap()).unwrap();
    Region { file, offset: 0, len }
}
