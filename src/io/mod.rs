//! Files: a set of them that one checkpoint reads from, and positioned reads.
//!
//! Plain positioned reads into reused buffers, no memory maps: measured faster on the page cache
//! (the kernel's copy is cheaper than the page faults), and a file that shrinks while it is read
//! is an ordinary error here, where a map would end the process with a signal.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

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
struct Entry {
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
    entries: Vec<Entry>,
    open: Mutex<VecDeque<(FileId, Arc<File>)>>,
}

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
        self.entries.push(Entry {
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
        self.entries.push(Entry { path, len: 0, modified: None, held });
        Ok(id)
    }

    fn entry(&self, file: FileId) -> &Entry {
        &self.entries[file.0 as usize]
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self, file: FileId) -> &Path {
        &self.entry(file).path
    }

    /// What a user calls a shard: the rank's folder, or the file where it is in none.
    #[must_use]
    pub fn shard_label(&self, file: FileId) -> String {
        let path = self.path(file);
        let folder = path.parent().and_then(|folder| folder.file_name());
        let is_rank =
            |name: &str| ["mp_rank_", "rank_"].iter().any(|start| name.starts_with(start));
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
        let is_same = |entry: &Entry| {
            entry.held.is_some()
                || std::fs::metadata(&entry.path).is_ok_and(|now| {
                    now.len() == entry.len && now.modified().ok() == entry.modified
                })
        };
        self.entries.iter().find(|entry| !is_same(entry)).map(|entry| entry.path.as_path())
    }
}

/// Whether a file that begins so is what git-lfs leaves in the place of one.
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
