//! Undoes the transforms of slices (`torch/distributed/checkpoint/_extension.py`, torch 2.7 to 2.15).
//!
//! A compressed slice cannot be read in place. It is decompressed once, in pieces, to an unnamed file in the folder for
//! temporary files, where it takes as much room as the tensor: memory is bounded, and the room is given back
//! when the process ends, whatever ends it.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ruzstd::decoding::StreamingDecoder;

use super::slice::SliceError;
use crate::base::limits::OverLimit;
use crate::storage::{FileId, FileSet, Region};

/// Bytes that are read or written at a time.
const BUFFER: usize = 256 << 10;

/// The unnamed file, made when it is first needed.
#[derive(Debug)]
pub(super) struct Spool {
    /// The name that messages have for it.
    name: PathBuf,
    file: Option<(std::fs::File, FileId)>,
    len: u64,
}

impl Spool {
    /// None yet; `folder` is that of the checkpoint.
    pub(super) fn of(folder: &Path) -> Self {
        Self { name: folder.join("(decompressed)"), file: None, len: 0 }
    }

    /// The bytes of a slice with its transforms undone, at most `limit` of them.
    pub(super) fn unpack(
        &mut self,
        files: &mut FileSet,
        packed: Region,
        transforms: &[Arc<str>],
        limit: u64,
    ) -> Result<Region, SliceError> {
        // All names first: an unknown one must not cost the work for the others.
        if let Some(name) = transforms.iter().find(|name| !is_zstd(name)) {
            return Err(SliceError::Transform { name: name.to_string() });
        }
        let mut region = packed;
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
        let mut left = limit;
        let mut source = BufReader::with_capacity(BUFFER, RegionReader { files, rest: packed });
        while !source.fill_buf()?.is_empty() {
            let mut frame = StreamingDecoder::new(&mut source).map_err(io::Error::other)?;
            let written = io::copy(&mut frame.by_ref().take(left.saturating_add(1)), &mut out)?;
            let too_much = || io::Error::other(OverLimit::new("decompressed bytes", limit));
            left = left.checked_sub(written).ok_or_else(too_much)?;
            let frame = frame.into_frame_decoder();
            let written_sum = frame.get_checksum_from_data();
            if written_sum.is_some() && written_sum != frame.get_calculated_checksum() {
                return Err(io::Error::other("its checksum is not that of its bytes"));
            }
        }
        out.flush()?;
        let region = Region { file: *id, offset: self.len, len: limit - left };
        self.len += region.len;
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
