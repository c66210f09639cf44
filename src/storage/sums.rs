//! Content sums: what the containers of a checkpoint say that parts of its files sum up to.

use std::sync::{Mutex, PoisonError};

use super::{FileSet, Region};

/// A part of a file, and the CRC-32 that its container keeps of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summed {
    /// Its bytes.
    pub region: Region,
    /// The CRC-32 of zip (ISO 3309) that they should have.
    pub crc: u32,
    /// Its name in the container.
    pub name: Box<str>,
}

/// The sums that containers promised on opening and nobody has verified yet.
#[derive(Debug, Default)]
pub(super) struct Promised(Mutex<Vec<Summed>>);

impl FileSet {
    /// Remembers parts of files with their sums, for whoever reads all of them.
    pub fn promise_sums(&self, parts: impl IntoIterator<Item = Summed>) {
        self.promised.0.lock().unwrap_or_else(PoisonError::into_inner).extend(parts);
    }

    /// All parts of files whose sums were promised, each once, in order of the files and of their place there.
    #[must_use]
    pub fn promised_sums(&self) -> Vec<Summed> {
        let promised = self.promised.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut parts = promised.clone();
        parts.sort_by(|one, other| {
            let place = |part: &Summed| (part.region.file, part.region.offset, part.region.len);
            place(one).cmp(&place(other)).then_with(|| one.name.cmp(&other.name))
        });
        // A file that was opened twice promises the same.
        parts.dedup_by(|one, other| one.region == other.region && one.crc == other.crc);
        parts
    }
}
