//! The logical tensor: global shape, the pieces that tile it, and the further copies of its parts.

mod ranges;

use std::collections::HashSet;
use std::sync::Arc;

use thiserror::Error;

use crate::base::dtype::Dtype;
use crate::base::extent::{Extent, numel};
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::{FileId, Region};

use super::stored::too_large;
use super::tiling;
use super::{Piece, StoredTensor};

/// A logical (global, unsharded) tensor as strided pieces over file regions.
///
/// Slicing, concatenating, splitting and transposing are metadata: new sets of pieces over the same bytes.
///
/// ```
/// use ckptcmp::{base::dtype::Dtype, storage::FileSet, tensor::{ByteOrder, LogicalTensor, StoredTensor}};
/// let path = std::env::temp_dir().join("ckptcmp-doc-logical");
/// std::fs::write(&path, [0_u8; 24])?;
/// let mut files = FileSet::default();
/// let file = files.add(&path)?;
/// let stored =
///     StoredTensor::contiguous(Dtype::Float32, vec![2, 3], files.whole(file), ByteOrder::Little)?;
/// let tensor = LogicalTensor::from_stored(&stored, "weight");
/// let columns = [tensor.slice(1, 0, 1)?, tensor.slice(1, 1, 2)?];
/// assert_eq!(LogicalTensor::concat(1, columns)?.shape(), [2, 3]);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct LogicalTensor {
    dtype: Dtype,
    shape: Vec<u64>,
    source: Source,
    pieces: Vec<Piece>,
    replicas: Vec<Replica>,
    merge: Merge,
}

/// The way the copies of a tensor make its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Merge {
    /// They should be the same; the first one counts.
    #[default]
    First,
    /// They should be the same; where they are not, their mean counts.
    Mean,
    /// They are parts of a sum, and the sum counts: the biases of row-parallel layers whose outputs are added up.
    Sum,
    /// Nobody says which: a sum if they differ anywhere, one and the same value if not.
    SumIfDifferent,
}

impl Merge {
    /// True where copies that differ are at odds, rather than parts of a sum.
    #[must_use]
    pub fn is_of_replicas(self) -> bool {
        matches!(self, Self::First | Self::Mean)
    }

    /// The word for it in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Mean => "mean",
            Self::Sum | Self::SumIfDifferent => "sum",
        }
    }
}

/// The place where a copy is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The shard file.
    pub file: FileId,
    /// The name under which the file holds it.
    pub name: Arc<str>,
}

/// Another copy of a part of a tensor, or of all of it.
#[derive(Debug, Clone)]
pub struct Replica {
    /// The rank's file that holds it, and the name it has there.
    pub source: Source,
    /// The boxes that it holds, disjoint.
    pub pieces: Vec<Piece>,
}

const OVER_PIECES: OverLimit = OverLimit::new("pieces of one tensor", LIMITS.pieces as u64);

/// Pieces do not make a tensor.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorError {
    /// Parts that should agree in shape do not.
    #[error("shapes {first:?} and {second:?} do not fit together")]
    ShapesDisagree {
        /// One of the shapes.
        first: Vec<u64>,
        /// The other one.
        second: Vec<u64>,
    },
    /// Parts of one tensor have different element types.
    #[error("shards are {first} and {second}")]
    DtypesDisagree {
        /// One of the dtypes.
        first: Dtype,
        /// The other one.
        second: Dtype,
    },
    /// A cut lies outside the tensor.
    #[error("no {len} indices from {start} on in dimension {dim} of shape {shape:?}")]
    OutOfRange {
        /// The dimension that was to be cut.
        dim: usize,
        /// First index asked for.
        start: u64,
        /// Number of indices asked for.
        len: u64,
        /// Shape of the tensor.
        shape: Vec<u64>,
    },
    /// A box lies outside the tensor.
    #[error("the box at {:?} of sizes {:?} is not inside shape {shape:?}", extent.offsets, extent.sizes)]
    BoxOutside {
        /// The box.
        extent: Extent,
        /// Shape of the tensor.
        shape: Vec<u64>,
    },
    /// A size or the element count is over its limit.
    #[error("{}", too_large(shape))]
    TooLarge {
        /// The shape as stored.
        shape: Vec<u64>,
    },
    /// A dimension cannot be split evenly.
    #[error("dimension {dim} of shape {shape:?} is no multiple of {inner}")]
    NotDivisible {
        /// The dimension.
        dim: usize,
        /// The size asked for.
        inner: u64,
        /// Shape of the tensor.
        shape: Vec<u64>,
    },
    /// More pieces than the limit.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// Some element has no bytes.
    #[error("no shard holds all of it: {covered} of {numel} elements are covered")]
    Gap {
        /// Elements that have bytes.
        covered: u64,
        /// Elements of the tensor.
        numel: u64,
    },
    /// Boxes that no cut takes apart, and too many of them to compare all pairs.
    #[error(
        "its pieces lie too irregularly to prove that they are all there: {}",
        OverLimit::new("pairs of them to compare", LIMITS.tiling_pairs)
    )]
    Irregular,
    /// Some element has bytes twice.
    #[error("two shards hold the same elements, from {at:?} on")]
    Overlap {
        /// First index of the shared box.
        at: Vec<u64>,
    },
}

impl LogicalTensor {
    /// The tensor that one shard holds, under the name it has there.
    #[must_use]
    pub fn from_stored(stored: &StoredTensor, name: impl Into<Arc<str>>) -> Self {
        let storage = stored.storage();
        let extent = Extent::whole(stored.shape());
        let pieces = if extent.is_empty() { Vec::new() } else { vec![Piece::of(extent, stored)] };
        Self {
            dtype: stored.dtype(),
            shape: stored.shape().to_vec(),
            source: Source { file: storage.file, name: name.into() },
            pieces,
            replicas: Vec::new(),
            merge: Merge::First,
        }
    }

    /// The tensor of this shape whose parts lie in these boxes. A box may be missing, and two may overlap:
    /// [`LogicalTensor::check_tiling`] tells. Boxes without elements are left out.
    ///
    /// # Errors
    /// A box is not of the shape or dtype of what it holds, or reaches beyond the tensor; or there are too many.
    pub fn from_boxes(
        dtype: Dtype,
        shape: Vec<u64>,
        source: Source,
        boxes: impl IntoIterator<Item = (Extent, StoredTensor)>,
    ) -> Result<Self, TensorError> {
        let fits = shape.len() <= LIMITS.rank && shape.iter().all(|&size| size <= LIMITS.dim);
        if !fits || numel(&shape).is_none() {
            return Err(TensorError::TooLarge { shape });
        }
        let merge = Merge::default();
        let mut tensor =
            Self { dtype, shape, source, pieces: Vec::new(), replicas: Vec::new(), merge };
        for (extent, stored) in boxes {
            if tensor.pieces.len() >= LIMITS.boxes {
                return Err(OverLimit::new("chunks of one tensor", LIMITS.boxes as u64).into());
            }
            tensor.put(extent, &stored)?;
        }
        if let Some(first) = tensor.pieces.first() {
            tensor.source.file = first.file;
        }
        Ok(tensor)
    }

    fn put(&mut self, extent: Extent, stored: &StoredTensor) -> Result<(), TensorError> {
        if stored.dtype() != self.dtype {
            return Err(TensorError::DtypesDisagree { first: self.dtype, second: stored.dtype() });
        }
        if extent.sizes != stored.shape() {
            let (first, second) = (extent.sizes, stored.shape().to_vec());
            return Err(TensorError::ShapesDisagree { first, second });
        }
        let ends = extent.offsets.iter().zip(&extent.sizes);
        let ends = ends.map(|(offset, size)| offset.checked_add(*size)).collect::<Option<Vec<_>>>();
        let is_inside = extent.offsets.len() == self.shape.len()
            && extent.sizes.len() == self.shape.len()
            && ends.is_some_and(|ends| ends.iter().zip(&self.shape).all(|(end, size)| end <= size));
        if !is_inside {
            return Err(TensorError::BoxOutside { extent, shape: self.shape.clone() });
        }
        if !extent.is_empty() {
            self.pieces.push(Piece::of(extent, stored));
        }
        Ok(())
    }

    /// Lets the copies make its value in this way.
    pub fn set_merge(&mut self, merge: Merge) {
        self.merge = merge;
    }

    /// Joins parts along dimension `dim`, in order.
    ///
    /// # Errors
    /// The parts differ in dtype or in another dimension, or there is none.
    pub fn concat(dim: usize, parts: impl IntoIterator<Item = Self>) -> Result<Self, TensorError> {
        let mut parts = parts.into_iter();
        let Some(mut whole) = parts.next() else {
            return Err(TensorError::Gap { covered: 0, numel: 0 });
        };
        for part in parts {
            whole.append(dim, part)?;
        }
        Ok(whole)
    }

    fn append(&mut self, dim: usize, part: Self) -> Result<(), TensorError> {
        self.same_dtype(&part)?;
        let mut expected = self.shape.clone();
        if dim < expected.len() && dim < part.shape.len() {
            expected[dim] = part.shape[dim];
        }
        let total = self.shape.get(dim).and_then(|size| size.checked_add(*part.shape.get(dim)?));
        let (true, Some(total)) = (expected == part.shape, total) else {
            return Err(TensorError::ShapesDisagree {
                first: self.shape.clone(),
                second: part.shape,
            });
        };
        let shift = self.shape[dim];
        self.shape[dim] = total;
        if numel(&self.shape).is_none() {
            return Err(TensorError::TooLarge { shape: self.shape.clone() });
        }
        let moved = |mut piece: Piece| {
            piece.extent.offsets[dim] += shift;
            piece
        };
        self.pieces.extend(part.pieces.into_iter().map(moved));
        for Replica { source, pieces } in part.replicas {
            self.push_replica(&source, pieces.into_iter().map(moved).collect());
        }
        self.check_piece_count()
    }

    /// Adds all that `copy` holds, its own replicas included, as further copies of this tensor.
    ///
    /// # Errors
    /// The copy differs in dtype or shape.
    pub fn add_copy(&mut self, copy: Self) -> Result<(), TensorError> {
        self.same_dtype(&copy)?;
        if copy.shape != self.shape {
            return Err(TensorError::ShapesDisagree {
                first: self.shape.clone(),
                second: copy.shape,
            });
        }
        self.push_replica(&copy.source, copy.pieces);
        for Replica { source, pieces } in copy.replicas {
            self.push_replica(&source, pieces);
        }
        Ok(())
    }

    /// Files a copy under its sources, one for each file that it lies in. Pieces that are the very bytes of the first
    /// copy are no copy.
    fn push_replica(&mut self, source: &Source, mut pieces: Vec<Piece>) {
        let known: HashSet<_> =
            self.pieces.iter().map(|piece| (piece.file, piece.offset)).collect();
        let is_new = |piece: &Piece| {
            !known.contains(&(piece.file, piece.offset)) || !self.pieces.contains(piece)
        };
        pieces.retain(is_new);
        pieces.sort_by_key(|piece| piece.file);
        for pieces in pieces.chunk_by(|one, other| one.file == other.file) {
            let source = Source { file: pieces[0].file, name: Arc::clone(&source.name) };
            match self.replicas.iter_mut().find(|replica| replica.source == source) {
                Some(replica) => replica.pieces.extend_from_slice(pieces),
                None => self.replicas.push(Replica { source, pieces: pieces.to_vec() }),
            }
        }
    }

    fn same_dtype(&self, other: &Self) -> Result<(), TensorError> {
        if self.dtype == other.dtype {
            return Ok(());
        }
        Err(TensorError::DtypesDisagree { first: self.dtype, second: other.dtype })
    }

    /// The indices `start..start + len` of dimension `dim`.
    ///
    /// # Errors
    /// They reach beyond the tensor.
    pub fn slice(&self, dim: usize, start: u64, len: u64) -> Result<Self, TensorError> {
        let inside = self
            .shape
            .get(dim)
            .is_some_and(|&size| start.checked_add(len).is_some_and(|end| end <= size));
        if !inside {
            return Err(TensorError::OutOfRange { dim, start, len, shape: self.shape.clone() });
        }
        let element = self.dtype.size();
        let mut sliced = self.map(|piece, out| out.extend(piece.slice(dim, start, len, element)));
        sliced.shape[dim] = len;
        Ok(sliced)
    }

    /// The tensor at one index of dimension `dim`, without that dimension.
    ///
    /// # Errors
    /// The index reaches beyond the tensor.
    pub fn select(&self, dim: usize, index: u64) -> Result<Self, TensorError> {
        let mut selected = self.slice(dim, index, 1)?.map(|piece, out| {
            let mut piece = piece.clone();
            piece.squeeze(dim);
            out.push(piece);
        });
        selected.shape.remove(dim);
        Ok(selected)
    }

    /// The tensors at all the indices of dimension `dim`, each without that dimension. One pass over the pieces, however many there are of both.
    ///
    /// # Errors
    /// It has no such dimension, or one too long.
    pub fn unbind(&self, dim: usize) -> Result<Vec<Self>, TensorError> {
        self.check_dim(dim)?;
        let count = self.shape[dim];
        let rows = |pieces: &[Piece]| -> u64 {
            pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.extent.sizes[dim]))
        };
        let further = self.replicas.iter().map(|replica| rows(&replica.pieces));
        let mut sizes = further.chain([count, rows(&self.pieces)]);
        let count = usize::try_from(count).ok().filter(|_| sizes.all(|size| size <= LIMITS.layers));
        let over = OverLimit::new("indices of a dimension that is taken apart", LIMITS.layers);
        let count = count.ok_or(over)?;
        let mut shape = self.shape.clone();
        shape.remove(dim);
        let source = |source: &Source| Self {
            dtype: self.dtype,
            shape: shape.clone(),
            source: source.clone(),
            pieces: Vec::new(),
            replicas: Vec::new(),
            merge: self.merge,
        };
        let mut parts = vec![source(&self.source); count];
        let element = self.dtype.size();
        for piece in &self.pieces {
            piece.unbind(dim, element, |at, piece| {
                if let Some(part) = parts.get_mut(at) {
                    part.pieces.push(piece);
                }
            });
        }
        for replica in &self.replicas {
            for piece in &replica.pieces {
                piece.unbind(dim, element, |at, piece| {
                    let Some(part) = parts.get_mut(at) else { return };
                    match part.replicas.iter_mut().find(|known| known.source == replica.source) {
                        Some(known) => known.pieces.push(piece),
                        None => part
                            .replicas
                            .push(Replica { source: replica.source.clone(), pieces: vec![piece] }),
                    }
                });
            }
        }
        Ok(parts)
    }

    /// The tensor with two dimensions exchanged.
    ///
    /// # Errors
    /// It has no such dimensions.
    pub fn transpose(&self, first: usize, second: usize) -> Result<Self, TensorError> {
        self.check_dim(first.max(second))?;
        let mut transposed = self.map(|piece, out| {
            let mut piece = piece.clone();
            piece.transpose(first, second);
            out.push(piece);
        });
        transposed.shape.swap(first, second);
        Ok(transposed)
    }

    /// Dimension `dim` as two, the inner one of size `inner`.
    ///
    /// # Errors
    /// Its size is no multiple of `inner`.
    pub fn split_axis(&self, dim: usize, inner: u64) -> Result<Self, TensorError> {
        self.check_dim(dim)?;
        let size = self.shape[dim];
        if inner == 0 || !size.is_multiple_of(inner) {
            return Err(TensorError::NotDivisible { dim, inner, shape: self.shape.clone() });
        }
        let element = self.dtype.size();
        let mut split = self.map(|piece, out| piece.split_axis(dim, inner, element, out));
        split.shape.splice(dim..=dim, [size / inner, inner]);
        split.check_piece_count()?;
        Ok(split)
    }

    /// Dimensions `dim` and `dim + 1` as one.
    ///
    /// # Errors
    /// It has no such dimensions, or there would be too many pieces.
    pub fn merge_axes(&self, dim: usize) -> Result<Self, TensorError> {
        self.check_dim(dim + 1)?;
        let (outer, inner) = (self.shape[dim], self.shape[dim + 1]);
        let rows = |pieces: &[Piece]| -> u64 {
            pieces.iter().map(|piece| piece.rows_when_merged(dim, inner)).sum()
        };
        let further = self.replicas.iter().map(|replica| rows(&replica.pieces));
        if further.chain([rows(&self.pieces)]).any(|rows| rows > LIMITS.pieces as u64) {
            return Err(OVER_PIECES.into());
        }
        let size = outer.checked_mul(inner).filter(|&size| size <= LIMITS.dim);
        let size = size.ok_or_else(|| TensorError::TooLarge { shape: self.shape.clone() })?;
        let element = self.dtype.size();
        let mut merged = self.map(|piece, out| piece.merge_axes(dim, inner, element, out));
        merged.shape.splice(dim..=dim + 1, [size]);
        merged.check_piece_count()?;
        Ok(merged)
    }

    /// Applies one operation to the pieces of the tensor and of its replicas; the caller mends the shape.
    fn map(&self, operation: impl Fn(&Piece, &mut Vec<Piece>)) -> Self {
        let apply = |pieces: &[Piece]| {
            let mut out = Vec::with_capacity(pieces.len());
            pieces.iter().for_each(|piece| operation(piece, &mut out));
            out
        };
        let replicas = self.replicas.iter().map(|replica| Replica {
            source: replica.source.clone(),
            pieces: apply(&replica.pieces),
        });
        Self {
            pieces: apply(&self.pieces),
            replicas: replicas.filter(|replica| !replica.pieces.is_empty()).collect(),
            shape: self.shape.clone(),
            source: self.source.clone(),
            dtype: self.dtype,
            merge: self.merge,
        }
    }

    fn check_dim(&self, dim: usize) -> Result<(), TensorError> {
        if dim < self.shape.len() {
            return Ok(());
        }
        Err(TensorError::OutOfRange { dim, start: 0, len: 0, shape: self.shape.clone() })
    }

    fn check_piece_count(&self) -> Result<(), TensorError> {
        if self.pieces.len() <= LIMITS.pieces {
            return Ok(());
        }
        Err(OVER_PIECES.into())
    }

    /// Proves that the pieces tile the shape: none missing, none twice.
    ///
    /// # Errors
    /// As [`LogicalTensor::check_tiling_within`].
    pub fn check_tiling(&self) -> Result<(), TensorError> {
        self.check_tiling_within(&mut LIMITS.tiling_pairs.clone())
    }

    /// The same, where other tensors draw on as many steps, too.
    ///
    /// # Errors
    /// [`TensorError::Gap`], [`TensorError::Overlap`], or [`TensorError::Irregular`] where it would take too long.
    pub fn check_tiling_within(&self, steps: &mut u64) -> Result<(), TensorError> {
        let mut boxes: Vec<&Extent> = self.pieces.iter().map(|piece| &piece.extent).collect();
        tiling::prove(&mut boxes, self.numel(), steps)
    }

    /// Number of elements of all its copies, as many as are read for it.
    #[must_use]
    pub fn stored_elements(&self) -> u64 {
        let copies = self.replicas.iter().map(|replica| &replica.pieces);
        let pieces = copies.chain([&self.pieces]).flatten();
        pieces.fold(0, |sum: u64, piece| sum.saturating_add(piece.extent.numel()))
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Global shape.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        // Every constructor has checked that it fits.
        numel(&self.shape).unwrap_or(0)
    }

    /// The place of its first part.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The boxes that tile it.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Further copies of parts of it.
    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// The bytes of each piece and of those of its copies, from the first element to the last.
    pub fn regions(&self) -> impl Iterator<Item = Region> {
        let copies = self.replicas.iter().flat_map(|replica| &replica.pieces);
        self.pieces.iter().chain(copies).map(|piece| piece.region(self.dtype.size()))
    }

    /// The way the copies make its value.
    #[must_use]
    pub fn merge(&self) -> Merge {
        self.merge
    }

    /// Other boxes than an operation would make.
    #[cfg(test)]
    pub(super) fn set_pieces(&mut self, pieces: Vec<Piece>) {
        self.pieces = pieces;
    }
}
