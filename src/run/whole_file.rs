//! A file that is written whole or not at all, whatever ends the program meanwhile.
//!
//! Where the file system has files without a name (`O_TMPFILE`), the result gets its name when it is complete and on the disk.
//! Elsewhere it has a temporary name beside the result, and signals that end the program remove it.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

#[cfg(unix)]
use super::signals::Removal;

/// Begins the names of files that are not complete.
const PREFIX: &str = ".ckptcmp-";

/// Writes a file and puts it in its place; one that is there is replaced if `force`, else an error.
pub(super) fn write(output: &Path, force: bool, bytes: &[u8]) -> io::Result<()> {
    let folder = folder_of(output);
    #[cfg(target_os = "linux")]
    let is_done = unnamed::write(folder, output, bytes, force)?;
    #[cfg(not(target_os = "linux"))]
    let is_done = false;
    if !is_done {
        write_named(folder, output, force, bytes)?;
    }
    sync_folder(folder)
}

/// The folder of a file.
pub(super) fn folder_of(output: &Path) -> &Path {
    output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write_named(folder: &Path, output: &Path, force: bool, bytes: &[u8]) -> io::Result<()> {
    let mut builder = Builder::new();
    builder.prefix(PREFIX);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    #[cfg(unix)]
    let removal = Removal::new()?;
    #[cfg(unix)]
    let mut file = removal.of(|| builder.tempfile_in(folder), NamedTempFile::path)?;
    #[cfg(not(unix))]
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    match force {
        true => file.persist(output)?,
        false => file.persist_noclobber(output)?,
    };
    Ok(())
}

/// Makes the new name last. Not every file system can sync a folder, nor every system open one.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        // A folder that may be written in and not read.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        done => done,
    }
}

#[cfg(target_os = "linux")]
mod unnamed {
    use std::fs::File;
    use std::io::{self, Write};
    use std::os::fd::AsRawFd;
    use std::path::Path;

    use rustix::fs::{AtFlags, CWD, Mode, OFlags};

    use super::{PREFIX, Removal};
    use crate::storage;

    /// Writes by way of a file without a name; false where the file system has none.
    pub(super) fn write(
        folder: &Path,
        output: &Path,
        bytes: &[u8],
        force: bool,
    ) -> io::Result<bool> {
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        // Whatever else keeps a file from being made here, the other way to make one will tell.
        let Ok(file) = rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666)) else {
            return Ok(false);
        };
        let mut file = File::from(file);
        file.write_all(bytes)?;
        file.sync_all()?;
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        if !storage::is_there(Path::new(&own))? {
            return Ok(false);
        }
        let link = |to: &Path| rustix::fs::linkat(CWD, &*own, CWD, to, AtFlags::SYMLINK_FOLLOW);
        match link(output) {
            Err(rustix::io::Errno::EXIST) if force => {}
            done => return Ok(done.map(|()| true)?),
        }
        // A name of its own, from which it takes that of the file before it in one step.
        let removal = Removal::new()?;
        let named = removal.of(
            || tempfile::Builder::new().prefix(PREFIX).make_in(folder, |path| Ok(link(path)?)),
            tempfile::NamedTempFile::path,
        )?;
        named.persist(output)?;
        Ok(true)
    }
}
