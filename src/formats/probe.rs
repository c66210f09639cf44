//! A path as formats look at it to tell whose it is: its listing, its first bytes, what small files say. Each of them is
//! read once, however many formats ask.
//!
//! Only what the system says is not found is absent; whatever else cannot be looked at is an error.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::fs::{File, FileType, Metadata as FileMetadata};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::base::limits::{LIMITS, OverLimit};
use crate::containers::dcp;
use crate::containers::torch::{self, TorchFile};
use crate::storage::{FileId, FileSet};

use super::error::OpenError;
use super::files::{add, open_torch};

/// Bytes of a file's head.
const HEAD: usize = 64;

/// A file or folder, looked at.
#[derive(Debug)]
pub(super) struct Probe {
    path: PathBuf,
    /// Number of bytes of a file.
    len: u64,
    /// The entries of a folder by name; `None` for a file.
    listing: Option<BTreeMap<String, FileType>>,
    /// Names and first bytes are all that may be looked at.
    is_shallow: bool,
    head: OnceCell<Vec<u8>>,
    children: RefCell<BTreeMap<String, Option<Rc<Self>>>>,
    small_files: RefCell<BTreeMap<String, SmallFile>>,
    torch: OnceCell<RefCell<Option<OpenedTorch>>>,
    metadata: OnceCell<RefCell<Option<OpenedMetadata>>>,
}

/// A file that holds a few words, such as the name of the newest checkpoint.
#[derive(Debug, Clone)]
pub(super) enum SmallFile {
    Absent,
    /// A folder, a pipe, a device.
    NotAFile,
    /// So many bytes, more than any such file has.
    TooLong(u64),
    /// Its bytes; where they are no UTF-8, with replacement characters.
    Text(String),
}

/// A file of torch's, and the set of files that it is the first of.
#[derive(Debug)]
pub(super) struct OpenedTorch {
    pub files: FileSet,
    pub file: FileId,
    pub torch: TorchFile,
}

/// The metadata of a distributed checkpoint, and the set of files that it was read from.
#[derive(Debug)]
pub(super) struct OpenedMetadata {
    pub files: FileSet,
    pub metadata: dcp::Metadata,
}

impl Probe {
    /// Looks at a path.
    ///
    /// # Errors
    /// It cannot be looked at, or is a folder that cannot be listed.
    pub(super) fn new(path: &Path) -> Result<Rc<Self>, OpenError> {
        Self::read(path, false).map_err(OpenError::io(path))
    }

    /// Looks at what is inside of this folder by names and first bytes alone; `None` where there is no such entry.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub(super) fn glance(&self, name: &str) -> Result<Option<Rc<Self>>, OpenError> {
        if !self.has(name) {
            return Ok(None);
        }
        let path = self.path.join(name);
        present(Self::read(&path, true)).map_err(OpenError::io(&path))
    }

    fn read(path: &Path, is_shallow: bool) -> io::Result<Rc<Self>> {
        let meta = std::fs::metadata(path)?;
        let listing = if meta.is_file() { None } else { Some(list(path)?) };
        Ok(Rc::new(Self {
            path: path.to_path_buf(),
            len: meta.len(),
            listing,
            is_shallow,
            head: OnceCell::new(),
            children: RefCell::default(),
            small_files: RefCell::default(),
            torch: OnceCell::new(),
            metadata: OnceCell::new(),
        }))
    }

    /// The path that was looked at.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The last part of the path.
    pub(super) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Tells whether it is a file and no folder.
    pub(super) fn is_file(&self) -> bool {
        self.listing.is_none()
    }

    /// Tells whether names and first bytes are all that may be looked at.
    pub(super) fn is_shallow(&self) -> bool {
        self.is_shallow
    }

    /// Number of bytes of a file.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The names of a folder's entries, sorted; none for a file.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.listing.iter().flat_map(|listing| listing.keys().map(String::as_str))
    }

    /// Tells whether the folder has such an entry, whatever it is.
    pub(super) fn has(&self, name: &str) -> bool {
        self.listing.as_ref().is_some_and(|listing| listing.contains_key(name))
    }

    /// Tells whether the folder has such a folder. A link that cannot be followed counts as one: to go there is to learn why.
    pub(super) fn has_folder(&self, name: &str) -> bool {
        match self.listing.as_ref().and_then(|listing| listing.get(name)) {
            Some(kind) if kind.is_symlink() => {
                self.path.join(name).metadata().map_or(true, |meta| meta.is_dir())
            }
            Some(kind) => kind.is_dir(),
            None => false,
        }
    }

    /// The entry of this name, looked at; `None` where there is none, or a link to nowhere.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub(super) fn child(&self, name: &str) -> Result<Option<Rc<Self>>, OpenError> {
        if !self.has(name) {
            return Ok(None);
        }
        if let Some(child) = self.children.borrow().get(name) {
            return Ok(child.clone());
        }
        let path = self.path.join(name);
        let child = present(Self::read(&path, self.is_shallow)).map_err(OpenError::io(&path))?;
        self.children.borrow_mut().insert(name.to_owned(), child.clone());
        Ok(child)
    }

    /// The first bytes of a file; none of a folder's.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn head(&self) -> Result<&[u8], OpenError> {
        if let Some(head) = self.head.get() {
            return Ok(head);
        }
        let mut head = Vec::new();
        if self.is_file() {
            File::open(&self.path)
                .and_then(|file| file.take(HEAD as u64).read_to_end(&mut head))
                .map_err(OpenError::io(&self.path))?;
        }
        Ok(self.head.get_or_init(|| head))
    }

    /// The content of a small file of this folder.
    ///
    /// # Errors
    /// It is there and cannot be read.
    pub(super) fn small_file(&self, name: &str) -> Result<SmallFile, OpenError> {
        if !self.has(name) {
            return Ok(SmallFile::Absent);
        }
        if let Some(known) = self.small_files.borrow().get(name) {
            return Ok(known.clone());
        }
        let path = self.path.join(name);
        let found = read_small(&path).map_err(OpenError::io(&path))?;
        self.small_files.borrow_mut().insert(name.to_owned(), found.clone());
        Ok(found)
    }

    /// Tells whether `test` holds for what `torch.save` wrote in this file; not where this is no such file, or a damaged one.
    pub(super) fn torch_says(&self, test: impl FnOnce(&TorchFile) -> bool) -> bool {
        let is_torch = || self.head().is_ok_and(torch::may_start_with);
        if !self.is_file() || self.is_shallow || !is_torch() {
            return false;
        }
        let opened = self.torch.get_or_init(|| RefCell::new(self.open_torch().ok()));
        opened.borrow().as_ref().is_some_and(|opened| test(&opened.torch))
    }

    /// The file of torch's that this is, read again only if it was not read before.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub(super) fn take_torch(&self) -> Result<OpenedTorch, OpenError> {
        let known = self.torch.get().and_then(RefCell::take);
        known.map_or_else(|| self.open_torch(), Ok)
    }

    fn open_torch(&self) -> Result<OpenedTorch, OpenError> {
        let mut files = FileSet::default();
        let file = add(&mut files, &self.path)?;
        let torch = open_torch(&files, file)?;
        Ok(OpenedTorch { files, file, torch })
    }

    /// Tells whether this folder has the metadata of a distributed checkpoint, of one coordinator or of every rank.
    pub(super) fn has_metadata(&self) -> bool {
        self.has(dcp::METADATA) || self.names().any(|name| dcp::rank_of_metadata(name).is_some())
    }

    /// Tells whether `test` holds for the metadata of this folder; not where there is none, or a damaged one.
    pub(super) fn metadata_says(&self, test: impl FnOnce(&dcp::Metadata) -> bool) -> bool {
        if self.is_shallow || !self.has_metadata() {
            return false;
        }
        let opened = self.metadata.get_or_init(|| RefCell::new(self.open_metadata().ok()));
        opened.borrow().as_ref().is_some_and(|opened| test(&opened.metadata))
    }

    /// The metadata of this folder, read again only if it was not read before.
    ///
    /// # Errors
    /// It cannot be read, or there is none.
    pub(super) fn take_metadata(&self) -> Result<OpenedMetadata, OpenError> {
        let known = self.metadata.get().and_then(RefCell::take);
        known.map_or_else(|| self.open_metadata(), Ok)
    }

    fn open_metadata(&self) -> Result<OpenedMetadata, OpenError> {
        let mut files = FileSet::default();
        let metadata = dcp::Metadata::read(&self.path, &mut files)?;
        Ok(OpenedMetadata { files, metadata })
    }
}

/// Takes what is not found for absent, and no other error.
fn present<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names of what lies in a folder, in order.
pub(super) fn names_in(folder: &Path) -> Result<Vec<String>, OpenError> {
    Ok(list(folder).map_err(OpenError::io(folder))?.into_keys().collect())
}

fn list(folder: &Path) -> io::Result<BTreeMap<String, FileType>> {
    let mut listing = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if listing.len() >= LIMITS.listing {
            return Err(io::Error::other(OverLimit::new("entries", LIMITS.listing as u64)));
        }
        listing.insert(entry.file_name().to_string_lossy().into_owned(), entry.file_type()?);
    }
    Ok(listing)
}

fn read_small(path: &Path) -> io::Result<SmallFile> {
    let meta: FileMetadata = std::fs::metadata(path)?;
    // Anything but a file could keep us waiting.
    if !meta.is_file() {
        return Ok(SmallFile::NotAFile);
    }
    if meta.len() > LIMITS.small_file {
        return Ok(SmallFile::TooLong(meta.len()));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(LIMITS.small_file).read_to_end(&mut bytes)?;
    Ok(SmallFile::Text(String::from_utf8_lossy(&bytes).into_owned()))
}
