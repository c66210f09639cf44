//! The files of one side, read and mapped with errors that name the side and the file.

use std::io;
use std::path::PathBuf;

use crate::base::side::Side;
use crate::storage::{FileId, FileSet, Map, Region};

use super::sums::ContentSums;

/// A file that cannot be read.
#[derive(Debug)]
pub struct ReadError {
    /// The side that it is on.
    pub side: Side,
    /// The file.
    pub file: PathBuf,
    /// The system's words.
    pub message: String,
}

/// The files of one side.
#[derive(Clone, Copy)]
pub(super) struct SideFiles<'a> {
    pub side: Side,
    pub files: &'a FileSet,
    /// The sums to take of what is read, if any.
    pub sums: Option<&'a ContentSums>,
}

impl SideFiles<'_> {
    /// Fills `buffer` from byte `offset` of a file.
    pub(super) fn read_exact_at(
        self,
        file: FileId,
        buffer: &mut [u8],
        offset: u64,
    ) -> Result<(), ReadError> {
        let read = self.files.read_exact_at(file, buffer, offset);
        read.map_err(|error| self.error(file, &error))?;
        self.add_to_sums(Region { file, offset, len: buffer.len() as u64 }, buffer);
        Ok(())
    }

    /// Takes the sums of bytes that were read or looked at.
    pub(super) fn add_to_sums(self, region: Region, bytes: &[u8]) {
        if let Some(sums) = self.sums {
            sums.add(region, bytes);
        }
    }

    fn error(self, file: FileId, error: &io::Error) -> ReadError {
        let file = self.files.path(file).to_path_buf();
        ReadError { side: self.side, file, message: error.to_string() }
    }
}

/// Bytes of a map from which on it costs little to make.
pub(super) const MAPPED: u64 = 8 << 20;

/// Regions of files that need not be read, as they can be looked at in the page cache.
#[derive(Default)]
pub(super) struct Maps(Vec<(Region, Map)>);

impl Maps {
    /// Maps those of the regions for which that pays.
    pub(super) fn of(files: SideFiles<'_>, regions: impl IntoIterator<Item = Region>) -> Self {
        // What cannot be mapped is read, and the read says why it cannot be.
        let map = |region| Some((region, files.files.map(region).ok()??));
        Self(regions.into_iter().filter_map(map).collect())
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

    /// Checks that the files still had all that was looked at; if one had not, a read tells why.
    pub(super) fn check(&self, files: SideFiles<'_>) -> Result<(), ReadError> {
        let Some((region, _)) = self.0.iter().find(|(_, map)| !map.is_intact()) else {
            return Ok(());
        };
        let mut bytes = vec![0; usize::try_from(region.len).unwrap_or(0)];
        files.read_exact_at(region.file, &mut bytes, region.offset)?;
        Err(files.error(region.file, &io::Error::other("changed while it was read")))
    }
}
