//! What the system says of a file that changes whenever the file does.

use std::fs::Metadata;
use std::io;

/// The identity and the state of a regular file at one moment. Whoever rewrites a file in place may set its modification time back, but
/// not the time of that change (`ctime`); another file under the same name is another inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stamp {
    len: u64,
    #[cfg(unix)]
    times: [i64; 4],
    #[cfg(unix)]
    inode: [u64; 2],
    #[cfg(not(unix))]
    times: [std::time::SystemTime; 2],
}

impl Stamp {
    /// The stamp of a regular file.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn of_file(meta: &Metadata) -> io::Result<Self> {
        if meta.is_file() { Self::of(meta) } else { Err(io::Error::other("not a regular file")) }
    }

    #[cfg(unix)]
    #[expect(clippy::unnecessary_wraps, reason = "not every system knows these times")]
    pub(super) fn of(meta: &Metadata) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
        Ok(Self { len: meta.len(), times, inode: [meta.dev(), meta.ino()] })
    }

    #[cfg(not(unix))]
    pub(super) fn of(meta: &Metadata) -> io::Result<Self> {
        Ok(Self { len: meta.len(), times: [meta.modified()?, meta.created()?] })
    }

    /// Tells whether both are of one file, whatever its names; not known of every system.
    pub(super) fn is_of_same_file(&self, other: &Self) -> bool {
        #[cfg(unix)]
        return self.inode == other.inode;
        #[cfg(not(unix))]
        return self == other;
    }

    /// Number of bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }
}
