//! Files and folders of given bytes, in memory where the system has that.

use std::fs;
use std::path::{Path, PathBuf};

use ckptcmp::storage::{FileSet, Region};
use tempfile::TempDir;

use super::archive;

/// Stands between the parts of an input that are files of a folder; an empty part is no file.
pub const CUT: &[u8] = b"\n%%cut%%\n";

/// The place of all of them.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("ckptcmp-fuzz-").tempdir_in(parent).expect("a temporary folder")
}

/// One file, gone with the value.
pub(crate) struct File {
    path: PathBuf,
    _folder: TempDir,
}

impl File {
    /// One of this name and content.
    pub(crate) fn of(name: &str, bytes: &[u8]) -> Self {
        let folder = scratch();
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("room for a temporary file");
        Self { path, _folder: folder }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A set of this file alone, and its bytes.
    pub(crate) fn region(&self) -> (FileSet, Region) {
        super::files_of(&self.path)
    }
}

/// A folder, gone with the value.
pub(crate) struct Folder(TempDir);

impl Folder {
    /// One with the parts of `bytes` as files of these names.
    pub(crate) fn of(names: &[&str], bytes: &[u8]) -> Self {
        let folder = Self(scratch());
        let mut parts = parts(bytes);
        for name in names {
            folder.write(name, parts.next().unwrap_or_default());
        }
        folder
    }

    /// One with the parts of `bytes` as files of these names, and with empty folders by the lines of what is left.
    pub(crate) fn with_folders(names: &[&str], bytes: &[u8]) -> Self {
        let folder = Self::of(names, bytes);
        let rest = parts(bytes).nth(names.len()).unwrap_or_default();
        for name in String::from_utf8_lossy(rest).lines().take(8) {
            if !matches!(name, "" | "." | "..") && !name.contains(['/', '\0']) {
                // A name that is too long, or there already, is none.
                let _ = fs::create_dir(folder.path().join(name));
            }
        }
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, part: &[u8]) {
        if part.is_empty() {
            return;
        }
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("inside the folder")).expect("a folder");
        let is_pickle = part[0] == 0x80;
        let is_torch = name.ends_with(".pt") || name.ends_with(".bin");
        let whole = if is_torch && is_pickle { &archive::around(part) } else { part };
        fs::write(path, whole).expect("room for a temporary file");
    }
}

fn parts(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let end = bytes.windows(CUT.len()).position(|window| window == CUT);
        let (part, rest) = match end {
            Some(end) => (&bytes[..end], &bytes[end + CUT.len()..]),
            None => (bytes, &[][..]),
        };
        bytes = rest;
        Some(part)
    })
}
