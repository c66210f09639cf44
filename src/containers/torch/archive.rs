//! The directory of the zip archive that `torch.save` writes since torch 1.6, as names and byte ranges.
//!
//! torch stores its records uncompressed so that they can be mapped; an archive that cannot be read by byte
//! ranges is refused, not unpacked. The archive may lie anywhere in a file: all offsets count from the region's start.
//! Nothing depends on torch's 64-byte alignment, which other writers (Python's `zipfile`) do not keep.

use std::io;

use rawzip::{CompressionMethod, ReaderAt, ZipArchive, ZipFileHeaderRecord};
use thiserror::Error;

use super::end_record;
use super::peek::{EDGE, Peek};
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::{FileSet, Region};

/// One record of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZipEntry {
    /// Path inside the archive.
    pub name: String,
    /// Its bytes.
    pub region: Region,
    /// Their CRC-32; none where the writer left all sums out.
    pub crc: Option<u32>,
}

/// The records of an archive, in the order of its directory.
#[derive(Debug)]
pub struct Archive {
    entries: Vec<ZipEntry>,
    /// Their indices in the order of the names.
    by_name: Vec<usize>,
}

/// An archive cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The file cannot be read.
    #[error("cannot read the zip directory")]
    Io(#[from] io::Error),
    /// There is no end record: almost always a file that was cut off.
    #[error(
        "no zip directory at the end: the file is cut off at byte {len}; copy or save it again"
    )]
    NoDirectory {
        /// Bytes that are there.
        len: u64,
    },
    /// The directory itself is damaged.
    #[error("the zip directory is damaged ({what}); copy or save the file again")]
    Damaged {
        /// The zip reader's complaint.
        what: String,
    },
    /// More entries than the limit.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
    /// The directory holds another number of entries than it announces.
    #[error("the zip directory announces {announced} entries and holds {found}")]
    EntryCount {
        /// Entries according to the end record.
        announced: u64,
        /// Entries found.
        found: u64,
    },
    /// Something stands before the first entry, as when several archives lie in one file.
    #[error("the zip archive starts at byte {start}, not at the start of the file")]
    Prefix {
        /// Offset of the first local header.
        start: u64,
    },
    /// An entry is encrypted.
    #[error("zip entry {name:?} is encrypted; checkpoints are read as plain files only")]
    Encrypted {
        /// The entry.
        name: String,
    },
    /// An entry is compressed.
    #[error(
        "zip entry {name:?} is compressed (method {method}) and cannot be read in place; \
         load the file and save it again with torch.save, which stores entries as they are"
    )]
    Compressed {
        /// The entry.
        name: String,
        /// Number of the method in the zip format.
        method: u16,
    },
    /// Two entries have one name.
    #[error("two zip entries are named {name:?}")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// The header before the data does not belong to the directory's entry.
    #[error("zip entry {name:?}: no whole header of that name at byte {at}")]
    LocalHeader {
        /// The name in the directory.
        name: String,
        /// The place where its header should be.
        at: u64,
    },
    /// An entry's range is not its own.
    #[error(
        "zip entry {name:?} at byte {at} reaches beyond byte {end}, where something else begins"
    )]
    Overlap {
        /// The entry.
        name: String,
        /// Offset of its header.
        at: u64,
        /// Offset of the next entry or of the directory.
        end: u64,
    },
    /// A stored entry whose two sizes differ.
    #[error("zip entry {name:?} is stored but has two sizes, {stored} and {original}")]
    Sizes {
        /// The entry.
        name: String,
        /// Bytes in the archive.
        stored: u64,
        /// Bytes of the original.
        original: u64,
    },
    /// An entry whose bytes are not those that were written.
    #[error(
        "zip entry {name:?} at byte {at} has the CRC-32 {found:08x}, and its archive says {crc:08x}: \
         it is damaged; copy or save the file again"
    )]
    Sum {
        /// The entry.
        name: String,
        /// Offset of its first byte.
        at: u64,
        /// The sum that the archive says.
        crc: u32,
        /// The sum that it has.
        found: u32,
    },
}

/// An entry of the directory whose local header is still to be read.
struct Listed {
    name: String,
    /// The bytes of the name, where they are no UTF-8.
    raw_name: Option<Vec<u8>>,
    flags: u16,
    header: u64,
    len: u64,
    crc: u32,
}

impl Archive {
    /// Reads the directory and every local header of the archive that fills `region`.
    ///
    /// # Errors
    /// [`ArchiveError`] where the archive is damaged, or its entries are not plain byte ranges of their own.
    pub fn open(files: &FileSet, region: Region) -> Result<Self, ArchiveError> {
        Self::read(&Peek::new(files, region)?)
    }

    pub(super) fn read(peek: &Peek<'_>) -> Result<Self, ArchiveError> {
        let (listed, directory) = list(peek)?;
        let mut by_name: Vec<usize> = (0..listed.len()).collect();
        by_name.sort_unstable_by_key(|&index| listed[index].name.as_str());
        if let Some(twice) =
            by_name.windows(2).find(|pair| listed[pair[0]].name == listed[pair[1]].name)
        {
            return Err(ArchiveError::Duplicate { name: listed[twice[0]].name.clone() });
        }
        let entries = locate(peek, listed, directory)?;
        Ok(Self { entries, by_name })
    }

    /// All records.
    #[must_use]
    pub fn entries(&self) -> &[ZipEntry] {
        &self.entries
    }

    /// The record of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&ZipEntry> {
        let name_of = |&index: &usize| self.entries[index].name.as_str();
        let place = self.by_name.binary_search_by_key(&name, name_of).ok()?;
        self.entries.get(self.by_name[place])
    }

    /// The records, in the order of the directory.
    #[must_use]
    pub fn into_entries(self) -> Vec<ZipEntry> {
        self.entries
    }
}

/// End of the archive in its region; `None` where there is no such archive.
pub(super) fn end(files: &FileSet, region: Region) -> io::Result<Option<u64>> {
    let peek = Peek::new(files, region)?;
    let mut buffer = vec![0; rawzip::RECOMMENDED_BUFFER_SIZE];
    let locator = rawzip::ZipLocator::new();
    match locator.locate_in_reader(PeekReader(&peek), &mut buffer, region.len) {
        Ok(zip) => Ok(Some(zip.end_offset())),
        Err((_, error)) => match damaged(error, region.len) {
            ArchiveError::Io(error) => Err(error),
            _ => Ok(None),
        },
    }
}

/// Reads the directory: its entries, and where it begins.
fn list(peek: &Peek<'_>) -> Result<(Vec<Listed>, u64), ArchiveError> {
    let len = peek.region.len;
    let mut buffer = vec![0; EDGE];
    let zip = rawzip::ZipLocator::new()
        .locate_in_reader(PeekReader(peek), &mut buffer, len)
        .map_err(|(_, error)| damaged(error, len))?;
    let announced = zip.entries_hint();
    if usize::try_from(announced).map_or(true, |count| count > LIMITS.archive_entries) {
        return Err(over(announced).into());
    }
    if len.saturating_sub(zip.directory_offset()) > EDGE as u64 {
        buffer.resize(rawzip::RECOMMENDED_BUFFER_SIZE, 0);
    }
    let listed = list_entries(&zip, &mut buffer, len)?;
    let found = listed.len() as u64;
    if found != announced {
        return Err(ArchiveError::EntryCount { announced, found });
    }
    end_record::check(peek, zip.directory_offset(), zip.eocd_offset())?;
    Ok((listed, zip.directory_offset()))
}

fn list_entries(
    zip: &ZipArchive<PeekReader<'_>>,
    buffer: &mut [u8],
    len: u64,
) -> Result<Vec<Listed>, ArchiveError> {
    let mut listed = Vec::new();
    let mut entries = zip.entries(buffer);
    while let Some(record) = entries.next_entry().map_err(|error| damaged(error, len))? {
        if listed.len() >= LIMITS.archive_entries {
            return Err(over(listed.len() as u64 + 1).into());
        }
        listed.push(list_entry(&record)?);
    }
    Ok(listed)
}

fn over(found: u64) -> OverLimit {
    OverLimit::found("zip entries", LIMITS.archive_entries as u64, found)
}

fn list_entry(record: &ZipFileHeaderRecord<'_>) -> Result<Listed, ArchiveError> {
    let (name, raw_name) = match String::from_utf8(record.file_path().as_ref().to_vec()) {
        Ok(name) => (name, None),
        Err(error) => {
            let raw_name = error.into_bytes();
            (String::from_utf8_lossy(&raw_name).into_owned(), Some(raw_name))
        }
    };
    let flags = record.flags();
    if flags.is_encrypted() || flags.has_strong_encryption() || flags.is_masked() {
        return Err(ArchiveError::Encrypted { name });
    }
    let method = record.compression_method();
    if method != CompressionMethod::STORE {
        return Err(ArchiveError::Compressed { name, method: method.as_u16() });
    }
    let (stored, original) = (record.compressed_size_hint(), record.uncompressed_size_hint());
    if stored != original {
        return Err(ArchiveError::Sizes { name, stored, original });
    }
    let (header, crc) = (record.local_header_offset(), record.crc32());
    Ok(Listed { name, raw_name, flags: flags.bits(), header, len: stored, crc })
}

/// Fixed part of a local header, and what of it says no more than the directory (APPNOTE.TXT 6.3.10, section 4.3.7).
const LOCAL_HEADER: usize = 30;
const LOCAL_SIGNATURE: &[u8] = b"PK\x03\x04";
const FLAGS_AT: usize = 6;
const METHOD_AT: usize = 8;
const NAME_LEN_AT: usize = 26;
const EXTRA_LEN_AT: usize = 28;

/// Reads the local headers in the order of the file, since only they tell where the data begins, and checks
/// that no two entries share a byte.
fn locate(
    peek: &Peek<'_>,
    listed: Vec<Listed>,
    directory: u64,
) -> Result<Vec<ZipEntry>, ArchiveError> {
    let mut order: Vec<usize> = (0..listed.len()).collect();
    order.sort_by_key(|&index| listed[index].header);
    if let Some(&first) = order.first()
        && listed[first].header != 0
    {
        return Err(ArchiveError::Prefix { start: listed[first].header });
    }
    let mut window = ReadAhead { peek, start: 0, bytes: Vec::new() };
    let mut regions = vec![peek.region; listed.len()];
    for (position, &index) in order.iter().enumerate() {
        let entry = &listed[index];
        let end = order.get(position + 1).map_or(directory, |&next| listed[next].header);
        let overlap = || ArchiveError::Overlap { name: entry.name.clone(), at: entry.header, end };
        let start = data_start(&mut window, entry)?.ok_or_else(|| ArchiveError::LocalHeader {
            name: entry.name.clone(),
            at: entry.header,
        })?;
        if start.checked_add(entry.len).is_none_or(|data_end| data_end > end) {
            return Err(overlap());
        }
        regions[index] = peek.region.part(start, entry.len).ok_or_else(overlap)?;
    }
    let has_sums = has_sums(&listed);
    let located = listed.into_iter().zip(regions).map(|(Listed { name, crc, .. }, region)| {
        ZipEntry { name, region, crc: has_sums.then_some(crc) }
    });
    Ok(located.collect())
}

/// Tells whether a writer took sums of what it wrote. `torch.serialization.set_crc32_options(False)` makes torch (2.6 to
/// 2.15, `PyTorchStreamWriter` in `caffe2/serialize/inline_container.cc`) write 0 for every entry, which is the
/// sum of an empty one.
fn has_sums(listed: &[Listed]) -> bool {
    listed.iter().any(|entry| entry.len > 0 && entry.crc != 0)
}

/// Offset of the data of an entry, if its local header is that entry's.
fn data_start(window: &mut ReadAhead<'_>, entry: &Listed) -> Result<Option<u64>, io::Error> {
    let raw_name = entry.raw_name.as_deref().unwrap_or(entry.name.as_bytes());
    let Some(header) = window.get(entry.header, LOCAL_HEADER + raw_name.len())? else {
        return Ok(None);
    };
    let (fixed, name) = header.split_at(LOCAL_HEADER);
    let number = |at: usize| u64::from(u16::from_le_bytes([fixed[at], fixed[at + 1]]));
    let is_same = fixed.starts_with(LOCAL_SIGNATURE)
        && number(NAME_LEN_AT) == raw_name.len() as u64
        && name == raw_name
        && number(FLAGS_AT) == u64::from(entry.flags)
        && number(METHOD_AT) == u64::from(CompressionMethod::STORE.as_u16());
    let extra_len = number(EXTRA_LEN_AT);
    let before_extra = entry.header.checked_add(header.len() as u64);
    let Some(extra_at) = before_extra.filter(|_| is_same) else { return Ok(None) };
    let extra = window.get(extra_at, usize::try_from(extra_len).unwrap_or(usize::MAX))?;
    Ok(extra.filter(|extra| is_whole(extra)).and_then(|_| extra_at.checked_add(extra_len)))
}

/// Tells whether an extra field is a row of blocks, each with a number and its length.
fn is_whole(mut extra: &[u8]) -> bool {
    while let [_, _, low, high, rest @ ..] = extra {
        match rest.get(usize::from(u16::from_le_bytes([*low, *high]))..) {
            Some(rest) => extra = rest,
            None => return false,
        }
    }
    extra.is_empty()
}

/// A read-ahead of one page, so that runs of small records cost one read and large ones little more than their header.
struct ReadAhead<'a> {
    peek: &'a Peek<'a>,
    start: u64,
    bytes: Vec<u8>,
}

const PAGE: usize = 4096;

impl ReadAhead<'_> {
    /// `len` bytes from `offset` of the region, if they are inside.
    fn get(&mut self, offset: u64, len: usize) -> io::Result<Option<&[u8]>> {
        let Some(rest) = self.peek.region.len.checked_sub(offset) else { return Ok(None) };
        let rest = usize::try_from(rest).unwrap_or(usize::MAX);
        if len > rest {
            return Ok(None);
        }
        let mut skip = offset.checked_sub(self.start).and_then(|skip| usize::try_from(skip).ok());
        let is_inside =
            |skip: usize| skip.checked_add(len).is_some_and(|end| end <= self.bytes.len());
        if !skip.is_some_and(is_inside) {
            self.bytes.resize(len.max(PAGE).min(rest), 0);
            self.peek.read_exact(&mut self.bytes, offset)?;
            self.start = offset;
            skip = Some(0);
        }
        Ok(skip.and_then(|skip| self.bytes.get(skip..skip + len)))
    }
}

/// The region as the zip reader wants it: reads that end where the region ends.
struct PeekReader<'a>(&'a Peek<'a>);

impl ReaderAt for PeekReader<'_> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = self.0.region.len.saturating_sub(offset);
        let len = usize::try_from(rest).unwrap_or(usize::MAX).min(buffer.len());
        if len > 0 {
            self.0.read_exact(&mut buffer[..len], offset)?;
        }
        Ok(len)
    }
}

fn damaged(error: rawzip::Error, len: u64) -> ArchiveError {
    match error.into_kind() {
        rawzip::ErrorKind::IO(error) => ArchiveError::Io(error),
        rawzip::ErrorKind::MissingEndOfCentralDirectory => ArchiveError::NoDirectory { len },
        other => ArchiveError::Damaged { what: other.to_string().to_lowercase() },
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::super::testing::{TestFile, zip};
    use super::*;

    fn open(bytes: &[u8]) -> Result<Archive, ArchiveError> {
        let file = TestFile::new(bytes);
        Archive::open(&file.files, file.region)
    }

    /// An archive of two entries, and where its directory begins.
    fn sample() -> (Vec<u8>, usize) {
        let bytes = zip(&[("a/data.pkl", b"N."), ("a/data/0", b"12345678")]);
        let directory = bytes.windows(4).position(|four| four == b"PK\x01\x02").unwrap();
        (bytes, directory)
    }

    #[test]
    fn entries_are_ranges_of_the_file() {
        let (bytes, _) = sample();
        let file = TestFile::new(&bytes);
        let archive = Archive::open(&file.files, file.region).unwrap();
        let names: Vec<&str> = archive.entries().iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["a/data.pkl", "a/data/0"]);
        let Region { offset, len, .. } = archive.get("a/data/0").unwrap().region;
        assert_eq!((offset, len), (80, 8));
        assert!(archive.get("a/data/1").is_none());
    }

    #[test]
    fn entries_may_lie_in_another_order_than_their_directory() {
        let (mut bytes, directory) = sample();
        let end = bytes.windows(4).rposition(|four| four == b"PK\x05\x06").unwrap();
        let second = directory + 46 + "a/data.pkl".len();
        bytes[directory..end].rotate_left(second - directory);
        let archive = open(&bytes).unwrap();
        assert_eq!(archive.entries()[0].name, "a/data/0");
        assert_eq!(archive.get("a/data/0").unwrap().region.offset, 80);
    }

    /// Changes bytes of the first directory record.
    fn changed(at: usize, with: &[u8]) -> Result<Archive, ArchiveError> {
        let (mut bytes, directory) = sample();
        bytes[directory + at..][..with.len()].copy_from_slice(with);
        open(&bytes)
    }

    #[test]
    fn rejects_what_cannot_be_read_in_place() {
        assert!(matches!(changed(8, &[1]), Err(ArchiveError::Encrypted { .. })));
        assert!(matches!(changed(8, &[0x40]), Err(ArchiveError::Encrypted { .. })));
        assert!(matches!(changed(10, &[8]), Err(ArchiveError::Compressed { method: 8, .. })));
        assert!(matches!(changed(20, &[1]), Err(ArchiveError::Sizes { .. })));
    }

    #[test]
    fn rejects_names_that_are_not_unique_or_not_at_the_data() {
        let twice = zip(&[("a", b"1"), ("a", b"2")]);
        assert!(matches!(open(&twice), Err(ArchiveError::Duplicate { name }) if name == "a"));
        assert!(matches!(changed(46, b"b"), Err(ArchiveError::LocalHeader { at: 0, .. })));
        let (mut bytes, _) = sample();
        bytes[0] = b'Q';
        assert!(matches!(open(&bytes), Err(ArchiveError::LocalHeader { at: 0, .. })));
    }

    #[test]
    fn rejects_ranges_that_overlap_or_leave_the_file() {
        // Both sizes grow, so that the first entry reaches into the second.
        let longer = [3, 0, 0, 0, 3, 0, 0, 0];
        assert!(matches!(changed(20, &longer), Err(ArchiveError::Overlap { at: 0, end: 42, .. })));
        let (mut bytes, directory) = sample();
        let second = directory + 46 + "a/data.pkl".len();
        bytes[second + 20..][..8].fill(0xf0);
        assert!(matches!(open(&bytes), Err(ArchiveError::Overlap { at: 42, .. })));
        // The extra field of the local header moves the data.
        let mut bytes = zip(&[("a/data.pkl", b"N.\0\0"), ("a/data/0", b"12345678")]);
        bytes[28] = 4;
        assert!(matches!(open(&bytes), Err(ArchiveError::Overlap { at: 0, .. })));
        // Two records of one header.
        let (mut bytes, directory) = sample();
        let second = directory + 46 + "a/data.pkl".len();
        bytes[second + 42..][..4].fill(0);
        assert!(open(&bytes).is_err());
    }

    #[test]
    fn rejects_counts_that_are_wrong() {
        let (mut bytes, _) = sample();
        let end = bytes.len() - 22;
        bytes[end + 8..][..4].copy_from_slice(&[3, 0, 3, 0]);
        assert!(matches!(open(&bytes), Err(ArchiveError::EntryCount { announced: 3, found: 2 })));
    }

    #[test]
    fn rejects_archives_behind_something_else() {
        let (bytes, _) = sample();
        let behind = [b"PK\x03\x04junk", bytes.as_slice()].concat();
        assert!(matches!(open(&behind), Err(ArchiveError::Prefix { start: 8 })));
        let both = [bytes.clone(), bytes].concat();
        assert!(matches!(open(&both), Err(ArchiveError::Damaged { .. })));
    }

    #[test]
    fn rejects_a_cut_off_archive() {
        let (bytes, _) = sample();
        let cut = &bytes[..bytes.len() - 30];
        assert!(matches!(open(cut), Err(ArchiveError::NoDirectory { .. })));
    }

    #[test]
    fn rejects_headers_and_end_records_that_say_something_else() {
        let refused = |at: usize, bit: u8| {
            let (mut bytes, _) = sample();
            let at = if at < 30 { at } else { bytes.len() - 22 + at - 30 };
            bytes[at] ^= bit;
            open(&bytes).unwrap_err()
        };
        // Flags, method and length of the extra field of the first entry.
        for at in [6, 8, 28] {
            assert!(matches!(refused(at, 8), ArchiveError::LocalHeader { at: 0, .. }), "{at}");
        }
        // Disks, entries on this disk, size of the directory.
        for at in [4, 6, 8, 12] {
            assert!(matches!(refused(30 + at, 8), ArchiveError::Damaged { .. }), "{at}");
        }
    }

    #[test]
    fn rejects_any_changed_bit_of_the_zip64_records() {
        let whole = TestFile::fixture("protocol2.pt").bytes();
        assert!(open(&whole).is_ok());
        let records = whole.len() - 22 - 20 - 56;
        assert_eq!(whole[records..][..4], *b"PK\x06\x06");
        // The versions that wrote it and that it takes to read it are anybody's.
        for at in (records..whole.len() - 22).filter(|at| !(12..16).contains(&(at - records))) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            assert!(open(&bytes).is_err(), "{}", at - records);
        }
    }
}
