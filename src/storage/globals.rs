//! Globals: the classes and functions that pickles in the files of a checkpoint name and no training framework writes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::{FileId, FileSet, Region};

/// Foreign globals by the place of their pickle's container, each with how often it is named.
#[derive(Debug, Default)]
pub(super) struct Noted(Mutex<BTreeMap<(FileId, u64), BTreeMap<String, u64>>>);

impl FileSet {
    /// Remembers the foreign globals of a part of a file, for whoever warns of them; what was said of it before is
    /// forgotten.
    pub fn note_globals(&self, part: Region, globals: BTreeMap<String, u64>) {
        if !globals.is_empty() {
            let mut noted = self.noted.0.lock().unwrap_or_else(PoisonError::into_inner);
            noted.insert((part.file, part.offset), globals);
        }
    }

    /// All foreign globals with the file and the number of times, in order of the files.
    #[must_use]
    pub fn noted_globals(&self) -> Vec<(FileId, String, u64)> {
        let noted = self.noted.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_part = |(&(file, _), globals): (&(FileId, u64), &BTreeMap<String, u64>)| {
            let globals = globals.clone().into_iter();
            globals.map(move |(name, count)| (file, name, count))
        };
        noted.iter().flat_map(of_part).collect()
    }
}
