//! Files: a set of them that one checkpoint reads from.
//!
//! They are read by positioned reads into reused buffers, or looked at in the page cache where that is faster
//! ([`FileSet::map`]; why, is in `map.rs`). Either way a file that shrinks or fails meanwhile is an ordinary error.

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod map;
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
#[path = "no_map.rs"]
mod map;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

pub use map::Map;

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
}

#[derive(Debug)]
struct FileEntry {
    path: PathBuf,
    len: u64,
    modified: Option<SystemTime>,
    /// A file without a name is held open as long as the set lives.
    held: Option<Arc<File>>,
}

/// The files of one checkpoint. Descriptors are opened when needed and only so many are kept,
/// so that thousands of shard files work under a small descriptor limit.
#[derive(Debug, Default)]
pub struct FileSet {
    entries: Vec<FileEntry>,
    open: Mutex<VecDeque<(FileId, Arc<File>)>>,
    maps: MapPolicy,
    rank_folders: Vec<&'static str>,
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
    /// Adds a file and remembers its length and modification time.
    ///
    /// # Errors
    /// The path cannot be read, or is no regular file.
    pub fn add(&mut self, path: &Path) -> io::Result<FileId> {
        let meta = std::fs::metadata(path)?;
        if !meta.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let id = FileId(u32::try_from(self.entries.len()).map_err(io::Error::other)?);
        let modified = meta.modified().ok();
        self.entries.push(FileEntry {
            path: path.to_path_buf(),
            len: meta.len(),
            modified,
            held: None,
        });
        Ok(id)
    }

    /// Adds a file of our own that has no name, to be shown as `path`. It may still grow.
    ///
    /// # Errors
    /// There are more files than can be numbered.
    pub fn hold(&mut self, file: File, path: &Path) -> io::Result<FileId> {
        let id = FileId(u32::try_from(self.entries.len()).map_err(io::Error::other)?);
        let (path, held) = (path.to_path_buf(), Some(Arc::new(file)));
        self.entries.push(FileEntry { path, len: 0, modified: None, held });
        Ok(id)
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
        Region { file, offset: 0, len: self.entry(file).len }
    }

    /// Bytes in all files of the set.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.entries.iter().fold(0, |sum, entry| sum.saturating_add(entry.len))
    }

    /// Fills `buffer` from byte `offset` of a file.
    ///
    /// # Errors
    /// The file cannot be opened or read, or ends before the buffer is full.
    pub fn read_exact_at(&self, file: FileId, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        read_exact_at(&*self.descriptor(file)?, buffer, offset)
    }

    /// The bytes of a region as they lie in the page cache, if that is likely to be faster than to read them.
    #[must_use]
    pub fn map(&self, region: Region) -> Option<Map> {
        let entry = self.entry(region.file);
        if region.len < LEAST_MAPPED || entry.held.is_some() || !self.maps.wants_another() {
            return None;
        }
        let file = self.descriptor(region.file).ok()?;
        let len = usize::try_from(region.len).ok()?;
        let map = Map::of(&file, region.offset, len, entry.len, map::PATIENCE);
        self.maps.note(map.is_some());
        map
    }

    fn descriptor(&self, file: FileId) -> io::Result<Arc<File>> {
        if let Some(held) = &self.entry(file).held {
            return Ok(Arc::clone(held));
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = open.iter().find(|(id, _)| *id == file) {
            return Ok(Arc::clone(found));
        }
        let opened = Arc::new(File::open(self.path(file))?);
        if open.len() >= OPEN_FILES {
            open.pop_front();
        }
        open.push_back((file, Arc::clone(&opened)));
        Ok(opened)
    }

    /// The first file whose length or modification time is no longer what it was when it was added.
    #[must_use]
    pub fn changed(&self) -> Option<&Path> {
        let is_same = |entry: &FileEntry| {
            entry.held.is_some()
                || std::fs::metadata(&entry.path).is_ok_and(|now| {
                    now.len() == entry.len && now.modified().ok() == entry.modified
                })
        };
        self.entries.iter().find(|entry| !is_same(entry)).map(|entry| entry.path.as_path())
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
