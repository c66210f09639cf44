//! Undoes the transforms of slices (`torch/distributed/checkpoint/_extension.py`, torch 2.7 to 2.15).
//!
//! A compressed slice cannot be read in place. It is decompressed once, in pieces, to an unnamed file in the folder for
//! temporary files, where it takes as much room as the tensor: memory is bounded, and the room is given back
//! when the process ends, whatever ends it. All of a checkpoint together may come to so many times the bytes of its files.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ruzstd::decoding::StreamingDecoder;

use super::slice::SliceError;
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::{FileId, FileSet, Region};

/// Bytes that are read or written at a time.
const BUFFER: usize = 256 << 10;

/// A slice with transforms that can be undone.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    region: Region,
    transforms: &'a [Arc<str>],
}

impl<'a> Packed<'a> {
    /// The slice, if all its transforms are known: an unknown one must not cost the work for the others.
    pub(super) fn new(region: Region, transforms: &'a [Arc<str>]) -> Result<Self, SliceError> {
        match transforms.iter().find(|name| !is_zstd(name)) {
            Some(name) => Err(SliceError::Transform { name: name.to_string() }),
            None => Ok(Self { region, transforms }),
        }
    }
}

/// The unnamed file, made when it is first needed.
#[derive(Debug)]
pub(super) struct Spool {
    /// The name that messages have for it.
    name: PathBuf,
    file: Option<(std::fs::File, FileId)>,
    len: u64,
    /// Stands for what is not decompressed: an empty file, and the bytes that it would have.
    absent: Option<(FileId, u64)>,
    /// Bytes that may still be written, and how many they were.
    left: u64,
    limit: u64,
}

impl Spool {
    /// None yet; `folder` is that of the checkpoint.
    pub(super) fn of(folder: &Path) -> Self {
        let name = folder.join("(decompressed)");
        Self {
            name,
            file: None,
            len: 0,
            absent: None,
            left: LIMITS.unpacked,
            limit: LIMITS.unpacked,
        }
    }

    /// Allows for what a data file of this length may hold.
    pub(super) fn allow(&mut self, bytes: u64) {
        let more = bytes.saturating_mul(LIMITS.unpacked_ratio);
        self.left = self.left.saturating_add(more);
        self.limit = self.limit.saturating_add(more);
    }

    /// A place for bytes that nobody will ask for: to read them is an error.
    pub(super) fn absent(&mut self, files: &mut FileSet, len: u64) -> Result<Region, SliceError> {
        let (file, offset) = match self.absent {
            Some(known) => known,
            None => {
                let empty = tempfile::tempfile().and_then(|file| files.hold(file, &self.name));
                (empty.map_err(|error| SliceError::Unpack { what: error.to_string() })?, 0)
            }
        };
        self.absent = Some((file, offset.saturating_add(len)));
        files.grow(len);
        Ok(Region { file, offset, len })
    }

    /// The bytes of a slice with its transforms undone, at most `limit` of them.
    pub(super) fn unpack(
        &mut self,
        files: &mut FileSet,
        packed: Packed<'_>,
        limit: u64,
    ) -> Result<Region, SliceError> {
        let Packed { mut region, transforms } = packed;
        for _ in transforms {
            let unpacked = self.decompress(files, region, limit);
            region = unpacked.map_err(|error| SliceError::Unpack { what: error.to_string() })?;
        }
        Ok(region)
    }

    fn decompress(
        &mut self,
        files: &mut FileSet,
        packed: Region,
        limit: u64,
    ) -> io::Result<Region> {
        if self.file.is_none() {
            let file = tempfile::tempfile()?;
            let id = files.hold(file.try_clone()?, &self.name)?;
            self.file = Some((file, id));
        }
        let Some((file, id)) = &mut self.file else { return Err(io::ErrorKind::NotFound.into()) };
        file.seek(SeekFrom::Start(self.len))?;
        let mut out = BufWriter::with_capacity(BUFFER, file);
        let over = match self.left < limit {
            true => OverLimit::new("decompressed bytes of the checkpoint", self.limit),
            false => OverLimit::new("decompressed bytes", limit),
        };
        let limit = limit.min(self.left);
        let mut left = limit;
        let mut source = BufReader::with_capacity(BUFFER, RegionReader { files, rest: packed });
        while !source.fill_buf()?.is_empty() {
            let mut frame = StreamingDecoder::new(&mut source).map_err(io::Error::other)?;
            let written = io::copy(&mut frame.by_ref().take(left.saturating_add(1)), &mut out)?;
            // What is too much, or damaged later on, was work all the same.
            self.left = self.left.saturating_sub(written);
            left = left.checked_sub(written).ok_or_else(|| io::Error::other(over))?;
            let frame = frame.into_frame_decoder();
            let written_sum = frame.get_checksum_from_data();
            if written_sum.is_some() && written_sum != frame.get_calculated_checksum() {
                return Err(io::Error::other("its checksum is not that of its bytes"));
            }
        }
        out.flush()?;
        let region = Region { file: *id, offset: self.len, len: limit - left };
        self.len += region.len;
        files.grow(region.len);
        Ok(region)
    }
}

/// The bytes of a region, one after another.
struct RegionReader<'a> {
    files: &'a FileSet,
    rest: Region,
}

impl Read for RegionReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = usize::try_from(self.rest.len).unwrap_or(usize::MAX).min(buffer.len());
        self.files.read_exact_at(self.rest.file, &mut buffer[..len], self.rest.offset)?;
        self.rest.offset += len as u64;
        self.rest.len -= len as u64;
        Ok(len)
    }
}

/// `stream.zstd/1` and its minor versions.
fn is_zstd(name: &str) -> bool {
    let version = name.strip_prefix("stream.zstd/").map(|version| version.split('.').next());
    version == Some(Some("1"))
}
