//! A region with its first and last bytes at hand.
//!
//! An archive is described at both ends: its pickle comes first, its directory last. A checkpoint may consist of very
//! many small archives, so both ends are read once, and a small archive as a whole.

use std::io;

use crate::storage::{FileSet, Region};

/// Bytes of each end: enough for the directory and the pickle of a single tensor.
pub(super) const EDGE: usize = 4096;

pub(super) struct Peek<'a> {
    files: &'a FileSet,
    pub(super) region: Region,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl<'a> Peek<'a> {
    pub(super) fn new(files: &'a FileSet, region: Region) -> io::Result<Self> {
        let len = usize::try_from(region.len).unwrap_or(usize::MAX);
        let mut head = vec![0; if len <= 2 * EDGE { len } else { EDGE }];
        files.read_exact_at(region.file, &mut head, region.offset)?;
        let mut tail = vec![0; (len - head.len()).min(EDGE)];
        if !tail.is_empty() {
            let start = region.offset + region.len - tail.len() as u64;
            files.read_exact_at(region.file, &mut tail, start)?;
        }
        Ok(Self { files, region, head, tail })
    }

    /// The files that it is one of.
    pub(super) fn files(&self) -> &FileSet {
        self.files
    }

    /// The first bytes of the region.
    pub(super) fn head(&self) -> &[u8] {
        &self.head[..self.head.len().min(EDGE)]
    }

    /// Fills `buffer` from byte `offset` of the region.
    pub(super) fn read_exact(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let tail_start = self.region.len - self.tail.len() as u64;
        let at_hand = match offset.checked_sub(tail_start) {
            Some(skip) => part(&self.tail, skip, buffer.len()),
            None => part(&self.head, offset, buffer.len()),
        };
        match at_hand {
            Some(bytes) => buffer.copy_from_slice(bytes),
            None => {
                let rest = self.region.len.checked_sub(offset);
                if rest.is_none_or(|rest| (buffer.len() as u64) > rest) {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.files.read_exact_at(self.region.file, buffer, self.region.offset + offset)?;
            }
        }
        Ok(())
    }

    /// Fills `buffer` from the first byte of a part of the region.
    pub(super) fn read_part(&self, buffer: &mut [u8], part: Region) -> io::Result<()> {
        self.read_exact(buffer, part.offset.saturating_sub(self.region.offset))
    }
}

fn part(bytes: &[u8], offset: u64, len: usize) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get(start..start.checked_add(len)?)
}
