//! One side of a task: a tensor, its files, the rule that makes one value of its copies, and the buffers of a thread.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::base::extent::Extent;
use crate::base::side::Side;
use crate::kernel::{BLOCK, DenseBlock, Stats};
use crate::storage::{FileId, Region};
use crate::tensor::{LogicalTensor, Merge, Piece, Replica};

use super::copies::{Copies, Scratch};
use super::gather::{Band, CopyReader};
use super::side_files::{Maps, ReadError, SideFiles};

/// One side of a task, as all threads read it.
pub(super) struct SideReader<'a> {
    copies: Copies<'a>,
    merge: Merge,
    /// The tensor has rows across the file: it is read in bands.
    is_banded: bool,
    /// Elements of a row, of which whole ones are put in order from a band.
    row: u64,
}

impl<'a> SideReader<'a> {
    /// Reads the value that all copies make together.
    pub(super) fn merging(files: SideFiles<'a>, tensor: &'a LogicalTensor) -> Self {
        let copies = Copies { files, tensor };
        let merge = match tensor.merge() {
            // Copies that cannot be read are left to the task, which finds that too.
            Merge::SumIfDifferent if matches!(copies.differ(), Ok(false)) => Merge::First,
            Merge::SumIfDifferent => Merge::Sum,
            merge => merge,
        };
        Self { merge, ..Self::unmerged(files, tensor) }
    }

    /// Reads the first copy as it is stored, and holds the others against it.
    pub(super) fn unmerged(files: SideFiles<'a>, tensor: &'a LogicalTensor) -> Self {
        let row = tensor.shape().last().copied().unwrap_or(1).max(1);
        let copies = Copies { files, tensor };
        Self { copies, merge: Merge::First, is_banded: is_transposed(tensor), row }
    }

    pub(super) fn tensor(&self) -> &'a LogicalTensor {
        self.copies.tensor
    }

    pub(super) fn row(&self) -> u64 {
        self.row
    }

    /// Number of bands that a unit is read in: one for each copy, or none.
    pub(super) fn bands(&self) -> usize {
        if self.is_banded { 1 + self.tensor().replicas().len() } else { 0 }
    }

    /// The value of one element as text.
    pub(super) fn value_text(&self, at: u64) -> Result<String, ReadError> {
        self.copies.value_text(self.merge, at)
    }

    /// The statistics of those replicas that were found to differ.
    pub(super) fn differences(
        &self,
        differing: &BTreeSet<usize>,
    ) -> Result<Vec<ReplicaDifference>, ReadError> {
        let SideFiles { side, files, .. } = self.copies.files;
        let tensor = self.tensor();
        let replicas = self.copies.replicas().zip(tensor.replicas()).enumerate();
        let replicas = replicas.filter(|(number, _)| differing.contains(number));
        let difference = |(_, (reader, replica)): (_, (CopyReader<'_>, &Replica))| {
            let stats = self.copies.difference(&reader)?;
            let first = first_copy(tensor, stats.first_differing());
            Ok(ReplicaDifference {
                side,
                first: files.shard_label(first),
                copy: files.shard_label(replica.source.file),
                stored_name: replica.source.name.to_string(),
                merge: tensor.merge(),
                stats,
            })
        };
        replicas.map(difference).collect()
    }

    /// A range extended to whole rows where it is read from bands, unless that makes it much longer.
    fn whole_rows(&self, range: &Range<u64>) -> Range<u64> {
        if !self.is_banded || self.row > BLOCK as u64 {
            return range.clone();
        }
        let end = range.end.next_multiple_of(self.row).min(self.tensor().numel());
        range.start - range.start % self.row..end
    }

    /// Number of bytes of so many elements in memory.
    fn bytes(&self, elements: u64) -> usize {
        let size = self.copies.element().size;
        usize::try_from(elements).unwrap_or(usize::MAX).saturating_mul(size)
    }
}

/// A copy that differs from the first one.
#[derive(Debug)]
pub struct ReplicaDifference {
    /// The side that it is on.
    pub side: Side,
    /// Folder or file of the first copy.
    pub first: String,
    /// Folder or file of this copy.
    pub copy: String,
    /// The name under which this copy is stored.
    pub stored_name: String,
    /// The rule by which the copies make the value that is compared.
    pub merge: Merge,
    /// The statistics of all that this copy holds, the first copy against this one.
    pub stats: Stats,
}

impl ReplicaDifference {
    /// Returns whether the copies should be the same; parts of a sum need not.
    #[must_use]
    pub fn is_divergence(&self) -> bool {
        self.merge.is_of_replicas()
    }
}

/// Returns whether some piece has its rows across the file.
fn is_transposed(tensor: &LogicalTensor) -> bool {
    let replicas = tensor.replicas().iter().flat_map(|replica| &replica.pieces);
    tensor.pieces().iter().chain(replicas).any(|piece| {
        let dims = piece.extent.sizes.iter().zip(&piece.strides).filter(|(size, _)| **size > 1);
        let mut strides = dims.map(|(_, stride)| *stride);
        let last = strides.next_back();
        last.is_some_and(|last| strides.any(|stride| stride < last))
    })
}

/// The index of the element that comes `at`-th in row-major order.
pub(super) fn unflattened(at: u64, shape: &[u64]) -> Vec<u64> {
    let mut rest = at;
    let position = |&size: &u64| {
        let position = rest % size.max(1);
        rest /= size.max(1);
        position
    };
    let mut index: Vec<u64> = shape.iter().rev().map(position).collect();
    index.reverse();
    index
}

/// The file in which the first copy of an element lies.
fn first_copy(tensor: &LogicalTensor, at: Option<u64>) -> FileId {
    let element = at.map(|at| Extent {
        offsets: unflattened(at, tensor.shape()),
        sizes: vec![1; tensor.shape().len()],
    });
    let holds = |piece: &&Piece| {
        element.as_ref().is_some_and(|element| piece.extent.intersect(element).is_some())
    };
    tensor.pieces().iter().find(holds).map_or(tensor.source().file, |piece| piece.file)
}

/// Buffers that a thread keeps for one side from unit to unit.
#[derive(Default)]
pub(super) struct SideBuffers {
    /// The first copy of a part.
    part: Vec<u8>,
    /// Blocks of the part that are to be made of all copies.
    is_merged: Vec<bool>,
    /// Such a block.
    merged: Vec<u8>,
    /// The first copy of a unit, and all others.
    bands: Vec<Band>,
}

/// One side of a unit of work, as one thread reads it part by part.
pub(super) struct UnitReader<'a> {
    side: &'a SideReader<'a>,
    maps: Maps,
    buffers: SideBuffers,
    /// The part read last.
    part: Range<u64>,
    /// The part in a map, if it lies in a file as it is compared.
    mapped: Option<Region>,
    /// The part in its buffer otherwise.
    window: Range<usize>,
    /// Numbers of the replicas that differ from the first copy.
    pub differing: BTreeSet<usize>,
}

impl<'a> UnitReader<'a> {
    pub(super) fn new(side: &'a SideReader<'a>, unit: &Range<u64>, buffers: SideBuffers) -> Self {
        let maps = if side.is_banded { Maps::default() } else { side.copies.first().maps(unit) };
        Self {
            side,
            maps,
            buffers,
            part: 0..0,
            mapped: None,
            window: 0..0,
            differing: BTreeSet::new(),
        }
    }

    pub(super) fn into_buffers(self) -> SideBuffers {
        self.buffers
    }

    /// Reads the bands of a unit. What an earlier unit had more of is given back, so that a thread does not keep a full
    /// set for each side.
    pub(super) fn fill_bands(&mut self, unit: &Range<u64>) -> Result<(), ReadError> {
        let SideReader { copies, .. } = self.side;
        self.buffers.bands.resize_with(self.side.bands(), Band::default);
        let readers = std::iter::once(copies.first()).chain(copies.replicas());
        for (band, copy) in self.buffers.bands.iter_mut().zip(readers) {
            band.fill(&copy, self.side.whole_rows(unit))?;
        }
        Ok(())
    }

    /// Reads a part of the unit and holds every replica against the first copy.
    pub(super) fn read(
        &mut self,
        part: &Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<(), ReadError> {
        let side = self.side;
        let first = side.copies.first();
        let has_replicas = side.copies.replicas().len() > 0;
        let SideBuffers { part: buffer, is_merged, bands, .. } = &mut self.buffers;
        is_merged.clear();
        self.part = part.clone();
        let run = if has_replicas { None } else { first.run_of(part) };
        self.mapped = None;
        if let Some((run, bytes)) = run.and_then(|run| Some((run, self.maps.bytes(run)?))) {
            side.copies.files.add_to_sums(run, bytes);
            self.mapped = Some(run);
            return Ok(());
        }
        let read = side.whole_rows(part);
        self.window = side.bytes(part.start - read.start)..side.bytes(part.end - read.start);
        let Scratch { copy, lines, .. } = scratch;
        let mut fill = |number: usize, copy: &CopyReader<'_>, out: &mut [u8]| {
            if side.is_banded {
                bands[number].read(copy, read.start, out);
                return Ok(());
            }
            copy.read(&self.maps, read.start, out, lines)
        };
        buffer.resize(side.bytes(read.end - read.start), 0);
        fill(0, &first, buffer)?;
        let blocks = (part.end - part.start).div_ceil(BLOCK as u64);
        let is_sum = side.merge == Merge::Sum && has_replicas;
        is_merged.resize(usize::try_from(blocks).unwrap_or(usize::MAX), is_sum);
        for (number, replica) in side.copies.replicas().enumerate() {
            copy.clone_from(buffer);
            fill(number + 1, &replica, copy)?;
            let (first, copy) = (&buffer[self.window.clone()], &copy[self.window.clone()]);
            if copy == first {
                continue;
            }
            self.differing.insert(number);
            if side.merge == Merge::Mean {
                let block = side.bytes(BLOCK as u64);
                let blocks = first.chunks(block).zip(copy.chunks(block));
                for ((first, copy), is_merged) in blocks.zip(is_merged.iter_mut()) {
                    *is_merged |= first != copy;
                }
            }
        }
        Ok(())
    }

    /// Makes a block of the part read last of all copies, where that is not the first one.
    pub(super) fn merge(&mut self, block: usize, scratch: &mut Scratch) -> Result<(), ReadError> {
        if self.is_merged(block) {
            let start = self.part.start + (block * BLOCK) as u64;
            let range = start..(start + BLOCK as u64).min(self.part.end);
            let SideReader { copies, merge, .. } = self.side;
            copies.merge(*merge, range, &mut self.buffers.merged, scratch)?;
        }
        Ok(())
    }

    /// A block of the part read last; it must have been merged.
    pub(super) fn block(&self, block: usize) -> DenseBlock<'_> {
        if self.is_merged(block) {
            return self.side.copies.merged_block(&self.buffers.merged);
        }
        let mapped = self.mapped.and_then(|region| self.maps.bytes(region));
        let part = mapped.unwrap_or_else(|| &self.buffers.part[self.window.clone()]);
        let size = self.side.bytes(BLOCK as u64);
        let end = ((block + 1) * size).min(part.len());
        self.side.copies.block(&part[block * size..end])
    }

    fn is_merged(&self, block: usize) -> bool {
        self.buffers.is_merged.get(block).is_some_and(|is_merged| *is_merged)
    }

    /// Checks that the files still had all that was looked at.
    pub(super) fn check(&self) -> Result<(), ReadError> {
        self.maps.check(self.side.copies.files)
    }
}
