//! A look at the file system. Only what the system says is not found is absent; whatever else cannot be looked at is an
//! error.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::stamp::Stamp;
use crate::base::limits::{LIMITS, OverLimit};

/// The kind of an entry of a folder. Links are not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A link to anything or nothing.
    Link,
    /// A pipe, a socket or a device.
    Other,
}

/// The thing that a path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A regular file of so many bytes.
    File(u64),
    /// A folder.
    Folder,
    /// A pipe, a socket or a device: to open it may mean to wait without end.
    Other,
}

/// The content of a file that is read as a whole.
#[derive(Debug)]
pub enum Small {
    /// All of its bytes, and the file as it was then.
    Bytes(Vec<u8>, WatchedFile),
    /// So many bytes, more than were asked for.
    TooLong(u64),
    /// A folder, a pipe, a socket or a device.
    NotAFile,
}

/// A file that was read as a whole, as it was then.
#[derive(Debug, Clone)]
pub struct WatchedFile {
    pub(super) path: PathBuf,
    pub(super) stamp: Stamp,
}

/// Takes what is not found for absent, and no other error.
///
/// # Errors
/// Every other one.
pub fn present<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Tells whether an error is the system's: no fault of what a file holds, but of reading it.
#[must_use]
pub fn is_of_system(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let system = error.downcast_ref::<io::Error>();
        if system.is_some_and(|error| error.raw_os_error().is_some()) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Looks at what a path leads to.
///
/// # Errors
/// There is nothing, or it cannot be looked at.
pub fn look(path: &Path) -> io::Result<Target> {
    let meta = follow(path)?;
    Ok(match (meta.is_file(), meta.is_dir()) {
        (true, _) => Target::File(meta.len()),
        (_, true) => Target::Folder,
        _ => Target::Other,
    })
}

/// Tells whether there is anything of this name, be it a link to nowhere.
///
/// # Errors
/// It cannot be looked at.
pub fn is_there(path: &Path) -> io::Result<bool> {
    Ok(present(uninterrupted(|| path.symlink_metadata()))?.is_some())
}

/// Lists a folder, in the order of the names; what is no UTF-8 in them is replaced.
///
/// # Errors
/// It cannot be listed, or has more entries than [`LIMITS`] allow.
pub fn list(folder: &Path) -> io::Result<BTreeMap<String, EntryKind>> {
    uninterrupted(|| list_once(folder))
}

fn list_once(folder: &Path) -> io::Result<BTreeMap<String, EntryKind>> {
    let mut listing = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if listing.len() >= LIMITS.listing {
            return Err(io::Error::other(OverLimit::new("entries", LIMITS.listing as u64)));
        }
        let kind = entry.file_type()?;
        let kind = match (kind.is_symlink(), kind.is_file(), kind.is_dir()) {
            (true, ..) => EntryKind::Link,
            (_, true, _) => EntryKind::File,
            (.., true) => EntryKind::Folder,
            _ => EntryKind::Other,
        };
        listing.insert(entry.file_name().to_string_lossy().into_owned(), kind);
    }
    Ok(listing)
}

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// There is nothing, or it cannot be read, or changes meanwhile.
pub fn read_small(path: &Path, most: u64) -> io::Result<Small> {
    let len = match look(path)? {
        Target::File(len) if len <= most => len,
        Target::File(len) => return Ok(Small::TooLong(len)),
        Target::Folder | Target::Other => return Ok(Small::NotAFile),
    };
    let (file, stamp) = open(path)?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    if stamp.len() != len || bytes.len() as u64 != len {
        return Err(changed());
    }
    Ok(Small::Bytes(bytes, WatchedFile { path: path.to_path_buf(), stamp }))
}

/// Reads the first bytes of a file, at most `most` of them.
///
/// # Errors
/// It cannot be read.
pub fn head(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    open(path)?.0.take(most as u64).read_to_end(&mut head)?;
    Ok(head)
}

/// Opens a regular file. Never waits for another program, as to open a pipe does.
pub(super) fn open(path: &Path) -> io::Result<(File, Stamp)> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    let meta = uninterrupted(|| file.metadata())?;
    Ok((file, Stamp::of_file(&meta)?))
}

/// What the system says of the file or folder that a path leads to.
pub(super) fn follow(path: &Path) -> io::Result<Metadata> {
    uninterrupted(|| fs::metadata(path))
}

/// The error of a file that is not what it was.
pub(super) fn changed() -> io::Error {
    io::Error::other("changed while it was read")
}

/// Calls again what a signal interrupted.
fn uninterrupted<T>(call: impl Fn() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
