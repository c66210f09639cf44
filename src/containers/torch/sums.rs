//! The sums that a zip archive keeps of its entries: those of small entries are verified on opening, all others are
//! promised to whoever reads the whole file.

use super::archive::{Archive, ArchiveError, ZipEntry};
use super::peek::{EDGE, Peek};
use crate::storage::Summed;

/// Verifies the sums of small entries that hold no elements, such as `version` and `byteorder`, and promises those of
/// storages and of all that is long. The pickle is left to its reader, which has all of it in memory.
pub(super) fn verify_small(
    peek: &Peek<'_>,
    archive: &Archive,
    pickle: &ZipEntry,
    storage_folder: &str,
) -> Result<(), ArchiveError> {
    let mut promised = Vec::new();
    let mut bytes = Vec::new();
    for entry in archive.entries().iter().filter(|entry| entry.name != pickle.name) {
        let Some(crc) = entry.crc else { continue };
        let len = usize::try_from(entry.region.len).unwrap_or(usize::MAX);
        if len > EDGE || (len > 0 && entry.name.starts_with(storage_folder)) {
            promised.push(Summed { region: entry.region, crc, name: entry.name.as_str().into() });
            continue;
        }
        bytes.resize(len, 0);
        peek.read_part(&mut bytes, entry.region)?;
        verify(entry, &bytes)?;
    }
    peek.files().promise_sums(promised);
    Ok(())
}

/// Verifies the sum of an entry that was read.
pub(super) fn verify(entry: &ZipEntry, bytes: &[u8]) -> Result<(), ArchiveError> {
    let found = crc32fast::hash(bytes);
    match entry.crc {
        Some(crc) if crc != found => {
            let (name, at) = (entry.name.clone(), entry.region.offset);
            Err(ArchiveError::Sum { name, at, crc, found })
        }
        _ => Ok(()),
    }
}
