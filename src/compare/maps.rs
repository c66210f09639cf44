//! What a unit of work need not read, as it can be looked at in the page cache.

use std::io;
use std::ops::Range;

use crate::base::extent::boxes_of_range;
use crate::storage::{FileSet, LEAST_MAPPED, Map, Region};
use crate::tensor::Piece;

use super::copies::Failure;
use super::gather::{DENSITY, Element};

/// Bytes of a map from which on it costs little to make.
pub(super) const MAPPED: u64 = 8 << 20;

/// Spans of files in memory.
#[derive(Default)]
pub(super) struct Maps(Vec<(Region, Map)>);

impl Maps {
    /// What of these pieces a range of a tensor takes, where that is long and mostly wanted.
    pub(super) fn of(
        files: &FileSet,
        shape: &[u64],
        pieces: &[Piece],
        element: Element,
        range: &Range<u64>,
    ) -> Self {
        let size = element.size as u64;
        let bytes = |piece: &&Piece| piece.extent.sizes.iter().product::<u64>() * size;
        let spans =
            pieces.iter().filter(|piece| bytes(piece) >= LEAST_MAPPED).filter_map(|piece| {
                let (mut first, mut end, mut wanted) = (u64::MAX, 0, 0);
                boxes_of_range(shape, range.start, range.end, &mut |extent, _| {
                    if let Some(part) = piece.clip(&extent, size) {
                        let dims = part.extent.sizes.iter().zip(&part.strides);
                        let last: u64 = dims.map(|(size, stride)| (size - 1) * stride).sum();
                        first = first.min(part.offset);
                        end = end.max(part.offset + (last + 1) * size);
                        wanted += part.extent.sizes.iter().product::<u64>() * size;
                    }
                });
                let len = end.checked_sub(first)?;
                let is_dense =
                    len <= DENSITY as u64 * wanted && !element.is_swapped(piece.byte_order);
                is_dense.then_some(Region { file: piece.file, offset: first, len })
            });
        Self(spans.filter_map(|span| Some((span, files.map(span)?))).collect())
    }

    /// This region alone.
    pub(super) fn one(files: &FileSet, region: Region) -> Self {
        Self(files.map(region).map(|map| (region, map)).into_iter().collect())
    }

    /// The bytes of a region, if one map has all of them.
    pub(super) fn bytes(&self, wanted: Region) -> Option<&[u8]> {
        self.0.iter().find_map(|(region, map)| {
            let skipped = wanted.offset.checked_sub(region.offset)?;
            region.part(skipped, wanted.len).filter(|part| *part == wanted)?;
            let start = usize::try_from(skipped).ok()?;
            map.bytes().get(start..)?.get(..usize::try_from(wanted.len).ok()?)
        })
    }

    /// Whether the files still had all that was looked at; if one had not, a read tells why.
    pub(super) fn check(&self, files: &FileSet) -> Result<(), Failure> {
        let lost = |(region, map): &(Region, Map)| {
            if map.is_intact() {
                return Ok(());
            }
            let mut bytes = vec![0; usize::try_from(region.len).unwrap_or(0)];
            let read = files.read_exact_at(region.file, &mut bytes, region.offset);
            let error = read.err().unwrap_or_else(|| io::Error::other("changed while it was read"));
            Err((region.file, error))
        };
        self.0.iter().try_for_each(lost)
    }
}
