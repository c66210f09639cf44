//! The records behind a zip directory, as far as a reader could do without them: damage there is damage too.
//!
//! ```text
//! directory   [zip64 end record   zip64 locator]   end record   comment
//! ```
//! (APPNOTE.TXT 6.3.10, sections 4.3.14 to 4.3.16.) torch writes the zip64 records always, other writers never.

use super::archive::ArchiveError;
use super::peek::Peek;

const END_RECORD: usize = 22;
const LOCATOR: usize = 20;
const ZIP64_RECORD: usize = 56;

/// Checks that the end records describe the directory that begins at one offset, and one another: `end_record` is the
/// offset of the last one.
pub(super) fn check(peek: &Peek<'_>, directory: u64, end_record: u64) -> Result<(), ArchiveError> {
    let damaged = |what: &str| ArchiveError::Damaged { what: what.to_owned() };
    let wrong = || damaged("its end record does not describe it");
    let mut end = [0; END_RECORD];
    peek.read_exact(&mut end, end_record)?;
    // Numbers of disks: 0, or the largest one where the zip64 record says it.
    if ![number(&end, 4, 2), number(&end, 6, 2)].iter().all(|disk| matches!(disk, 0 | 0xffff)) {
        return Err(damaged("it is one of several parts"));
    }
    if number(&end, 8, 2) != number(&end, 10, 2) {
        return Err(wrong());
    }
    let between = end_record.checked_sub(directory).ok_or_else(wrong)?;
    if number(&end, 12, 4) == between {
        return Ok(());
    }
    let locator_at = end_record.checked_sub(LOCATOR as u64).ok_or_else(wrong)?;
    let mut locator = [0; LOCATOR];
    peek.read_exact(&mut locator, locator_at)?;
    let record_at = number(&locator, 8, 8);
    let is_locator = locator.starts_with(b"PK\x06\x07")
        && (number(&locator, 4, 4), number(&locator, 16, 4)) == (0, 1);
    let record_len = locator_at.checked_sub(record_at);
    let len = record_len.filter(|len| is_locator && *len >= ZIP64_RECORD as u64);
    let len = len.ok_or_else(|| damaged("its zip64 locator is none"))?;
    let mut record = [0; ZIP64_RECORD];
    peek.read_exact(&mut record, record_at)?;
    let size = record_at.checked_sub(directory);
    // Its own length without the first fields, two disks, two numbers of entries, size and offset of the directory.
    let is_record = record.starts_with(b"PK\x06\x06")
        && number(&record, 4, 8) == len - 12
        && (number(&record, 16, 4), number(&record, 20, 4)) == (0, 0)
        && number(&record, 24, 8) == number(&record, 32, 8)
        && Some(number(&record, 40, 8)) == size
        && number(&record, 48, 8) == directory
        && (Some(number(&end, 12, 4)) == size || number(&end, 12, 4) == 0xffff_ffff);
    if is_record { Ok(()) } else { Err(damaged("its zip64 record does not describe it")) }
}

/// A little-endian number of so many bytes, up to 8.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let field = bytes.get(at..at + len).unwrap_or_default();
    field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
