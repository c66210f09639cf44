//! Files: a set of them that one checkpoint reads from.
//!
//! They are read by positioned reads into reused buffers, or looked at in the page cache where that is faster
//! ([`FileSet::map`]; why, is in `map.rs`). Either way a file that shrinks or fails meanwhile is an ordinary error.

mod globals;
mod look;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod map;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
#[path = "no_map.rs"]
mod map;
mod stamp;
mod standard;
mod sums;

use crate::base::limits::OverLimit;
use stamp::Stamp;
use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub use look::{
    EntryKind, Small, Target, WatchedFile, head, is_of_system, is_there, list, look, present,
    read_small,
};
pub use map::Map;
pub use standard::is_stdout_closed;
pub use sums::Summed;

/// One file of a [`FileSet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(u32);

/// Bytes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// The file that holds them.
    pub file: FileId,
    /// Byte offset of the first one.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Region {
    /// The part of this region from `offset` on, `len` bytes long, if it lies inside.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self { file: self.file, offset: self.offset + offset, len })
    }

    /// Tells whether two regions have a byte in common.
    #[must_use]
    pub fn meets(&self, other: Self) -> bool {
        let ends = [*self, other].map(|region| region.offset.saturating_add(region.len));
        self.file == other.file && self.offset.max(other.offset) < ends[0].min(ends[1])
    }
}

#[derive(Debug)]
struct FileEntry {
    path: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// Under its name, as it was when it was added.
    Named(Stamp),
    /// A file without a name is held open as long as the set lives.
    Held(Arc<File>),
}

/// The files of one checkpoint. Descriptors are opened when needed and only so many are kept,
/// so that thousands of shard files work under a small descriptor limit.
#[derive(Debug, Default)]
pub struct FileSet {
    entries: Vec<FileEntry>,
    open: Mutex<VecDeque<(FileId, Arc<File>)>>,
    maps: MapPolicy,
    promised: sums::Promised,
    noted: globals::Noted,
    rank_folders: Vec<&'static str>,
    /// Bytes of files of our own.
    own_bytes: u64,
    /// Files that were read before, and count as long as they stay what they were.
    watched: Vec<WatchedFile>,
}

/// A file that is not what it was when it was added.
#[derive(Debug)]
pub struct ChangedFile<'a> {
    /// The file.
    pub path: &'a Path,
    /// The system's words, where it cannot be looked at again.
    pub error: Option<io::Error>,
}

/// The choice to try another map: after a failure some are left out, twice as many after each that follows it.
#[derive(Debug, Default)]
struct MapPolicy {
    left_out: AtomicU32,
    to_leave_out: AtomicU32,
}

impl MapPolicy {
    const MOST_LEFT_OUT: u32 = 32;

    // A change by another thread at the same time may get lost, which does no harm.
    fn wants_another(&self) -> bool {
        let left_out = self.to_leave_out.load(Ordering::Relaxed);
        self.to_leave_out.store(left_out.saturating_sub(1), Ordering::Relaxed);
        left_out == 0
    }

    fn note(&self, is_mapped: bool) {
        let before = self.left_out.load(Ordering::Relaxed);
        let now = if is_mapped { 0 } else { (2 * before).clamp(1, Self::MOST_LEFT_OUT) };
        self.left_out.store(now, Ordering::Relaxed);
        self.to_leave_out.store(now, Ordering::Relaxed);
    }
}

/// Bytes below which it makes no difference how they are read.
pub const LEAST_MAPPED: u64 = 1 << 20;

/// Descriptors kept open by one set; two sets and the usual limit of 1,024 leave ample room.
const OPEN_FILES: usize = 128;

impl FileSet {
    /// Adds a file and remembers its length, its inode and the times of its changes.
    ///
    /// # Errors
    /// The path cannot be read, or is no regular file.
    pub fn add(&mut self, path: &Path) -> io::Result<FileId> {
        let stamp = Stamp::of_file(&look::follow(path)?)?;
        self.push(path, Place::Named(stamp))
    }

    /// Adds a file where there is one; `None` where there is nothing of this name.
    ///
    /// # Errors
    /// As for [`Self::add`], also for a link to nowhere.
    pub fn add_if_there(&mut self, path: &Path) -> io::Result<Option<FileId>> {
        if is_there(path)? { self.add(path).map(Some) } else { Ok(None) }
    }

    /// Reads all of a file of at most `most` bytes, and watches that it does not change.
    ///
    /// # Errors
    /// It cannot be read, is no regular file, or longer.
    pub fn read_small(&mut self, path: &Path, most: u64) -> io::Result<Vec<u8>> {
        match look::read_small(path, most)? {
            Small::Bytes(bytes, file) => {
                self.watched.push(file);
                Ok(bytes)
            }
            Small::TooLong(len) => {
                Err(io::Error::other(OverLimit::found("bytes of such a file", most, len)))
            }
            Small::NotAFile => Err(io::Error::other("not a regular file")),
        }
    }

    /// Tells whether the file of a path is one of the set, under whatever name.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub fn holds(&self, path: &Path) -> io::Result<bool> {
        let Some(meta) = present(look::follow(path))? else { return Ok(false) };
        let stamp = Stamp::of(&meta)?;
        Ok(self.stamps().any(|(_, own)| own.is_of_same_file(&stamp)))
    }

    /// Tells whether both are the same files in the same order, under whatever names; not if there are none.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let [own, others] = [self, other].map(|set| set.stamps().map(|(_, stamp)| stamp));
        let mut pairs = own.zip(others);
        self.stamps().count() == other.stamps().count()
            && self.stamps().next().is_some()
            && pairs.all(|(one, other)| one.is_of_same_file(other))
    }

    /// Adds files that were read elsewhere to those that must not change.
    pub fn watch(&mut self, files: impl IntoIterator<Item = WatchedFile>) {
        self.watched.extend(files);
    }

    fn push(&mut self, path: &Path, place: Place) -> io::Result<FileId> {
        let id = FileId(u32::try_from(self.entries.len()).map_err(io::Error::other)?);
        self.entries.push(FileEntry { path: path.to_path_buf(), place });
        Ok(id)
    }

    /// Adds a file of our own that has no name, to be shown as `path`. It may still grow ([`FileSet::grow`]).
    ///
    /// # Errors
    /// There are more files than can be numbered.
    pub fn hold(&mut self, file: File, path: &Path) -> io::Result<FileId> {
        self.push(path, Place::Held(Arc::new(file)))
    }

    /// Counts bytes that were added to files of our own.
    pub fn grow(&mut self, bytes: u64) {
        self.own_bytes = self.own_bytes.saturating_add(bytes);
    }

    fn entry(&self, file: FileId) -> &FileEntry {
        &self.entries[file.0 as usize]
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self, file: FileId) -> &Path {
        &self.entry(file).path
    }

    /// Sets what the names of ranks' folders begin with: the files in them are known by the folder.
    pub fn label_by_folder(&mut self, prefixes: Vec<&'static str>) {
        self.rank_folders = prefixes;
    }

    /// The name that a user has for a shard: the rank's folder, or the file where it is in none.
    #[must_use]
    pub fn shard_label(&self, file: FileId) -> String {
        let path = self.path(file);
        let folder = path.parent().and_then(|folder| folder.file_name());
        let is_rank = |name: &str| self.rank_folders.iter().any(|start| name.starts_with(start));
        let folder = folder.filter(|name| is_rank(&name.to_string_lossy()));
        folder.or(path.file_name()).unwrap_or_default().to_string_lossy().into_owned()
    }

    /// All of them, in the order in which they were added.
    pub fn ids(&self) -> impl Iterator<Item = FileId> + use<> {
        (0..=u32::MAX).take(self.entries.len()).map(FileId)
    }

    /// All the bytes of a file.
    #[must_use]
    pub fn whole(&self, file: FileId) -> Region {
        Region { file, offset: 0, len: self.entry(file).len() }
    }

    /// Bytes in all files of the set, but for those of our own.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.entries.iter().fold(0, |sum, entry| sum.saturating_add(entry.len()))
    }

    /// Bytes in all files of the set, each counted once, and those of our own.
    #[must_use]
    pub fn bytes_at_hand(&self) -> u64 {
        let mut known = HashSet::new();
        let entries = self.entries.iter().filter(|entry| known.insert(&*entry.path));
        entries.fold(self.own_bytes, |sum, entry| sum.saturating_add(entry.len()))
    }

    /// Fills `buffer` from byte `offset` of a file.
    ///
    /// # Errors
    /// The file cannot be opened or read, or ends before the buffer is full.
    pub fn read_exact_at(&self, file: FileId, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        read_exact_at(&*self.descriptor(file)?, buffer, offset)
    }

    /// The bytes of a region as they lie in the page cache, if that is likely to be faster than to read them.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn map(&self, region: Region) -> io::Result<Option<Map>> {
        let Place::Named(stamp) = &self.entry(region.file).place else { return Ok(None) };
        let Ok(len) = usize::try_from(region.len) else { return Ok(None) };
        if region.len < LEAST_MAPPED || !self.maps.wants_another() {
            return Ok(None);
        }
        let file = self.descriptor(region.file)?;
        let map = Map::of(&file, region.offset, len, stamp.len(), map::PATIENCE);
        self.maps.note(map.is_some());
        Ok(map)
    }

    fn descriptor(&self, file: FileId) -> io::Result<Arc<File>> {
        let stamp = match &self.entry(file).place {
            Place::Held(held) => return Ok(Arc::clone(held)),
            Place::Named(stamp) => stamp,
        };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = open.iter().find(|(id, _)| *id == file) {
            return Ok(Arc::clone(found));
        }
        let (opened, now) = look::open(self.path(file))?;
        if now != *stamp {
            return Err(look::changed());
        }
        let opened = Arc::new(opened);
        if open.len() >= OPEN_FILES {
            open.pop_front();
        }
        open.push_back((file, Arc::clone(&opened)));
        Ok(opened)
    }

    /// All files that have a name, as they were.
    fn stamps(&self) -> impl Iterator<Item = (&Path, &Stamp)> {
        let named = self.entries.iter().filter_map(|entry| match &entry.place {
            Place::Named(stamp) => Some((entry.path.as_path(), stamp)),
            Place::Held(_) => None,
        });
        named.chain(self.watched.iter().map(|file| (file.path.as_path(), &file.stamp)))
    }

    /// The first file that is no longer what it was when it was added.
    #[must_use]
    pub fn changed(&self) -> Option<ChangedFile<'_>> {
        self.stamps().find_map(|(path, stamp)| {
            let now = present(look::follow(path)).and_then(|meta| match meta {
                Some(meta) => Ok(Stamp::of(&meta)? == *stamp),
                None => Ok(false),
            });
            match now {
                Ok(true) => None,
                Ok(false) => Some(ChangedFile { path, error: None }),
                Err(error) => Some(ChangedFile { path, error: Some(error) }),
            }
        })
    }
}

impl FileEntry {
    /// Number of bytes; 0 of a file that is held, which may grow.
    fn len(&self) -> u64 {
        match &self.place {
            Place::Named(stamp) => stamp.len(),
            Place::Held(_) => 0,
        }
    }
}

/// True where a file that begins so is the pointer that git-lfs leaves in the place of one.
#[must_use]
pub fn is_lfs_pointer(head: &[u8]) -> bool {
    head.starts_with(b"version https://git-lfs.github.com/spec/")
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !buffer.is_empty() {
        match file.seek_read(buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                buffer = &mut buffer[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
