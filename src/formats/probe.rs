//! A path as formats look at it to tell whose it is: its listing, its first bytes, what small files say. Each of them is
//! read once, however many formats ask.
//!
//! Only what the system says is not found is absent; whatever else cannot be looked at is an error.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::base::limits::LIMITS;
use crate::containers::dcp;
use crate::containers::torch::{self, TorchFile};
use crate::storage::{self, EntryKind, FileId, FileSet, Small, Target, WatchedFile};

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
    listing: Option<BTreeMap<String, EntryKind>>,
    /// Names and first bytes are all that may be looked at.
    is_shallow: bool,
    head: OnceCell<Vec<u8>>,
    children: RefCell<BTreeMap<String, Rc<Self>>>,
    small_files: RefCell<BTreeMap<String, SmallFile>>,
    /// The small files that were read, here or in what is below.
    watched: Rc<RefCell<Vec<WatchedFile>>>,
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
        Self::read(path, false, Rc::default()).map_err(OpenError::io(path))
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
        let read = Self::read(&path, true, Rc::clone(&self.watched));
        read.map(Some).map_err(OpenError::io(&path))
    }

    fn read(
        path: &Path,
        is_shallow: bool,
        watched: Rc<RefCell<Vec<WatchedFile>>>,
    ) -> io::Result<Rc<Self>> {
        let (len, listing) = match storage::look(path)? {
            Target::File(len) => (len, None),
            Target::Folder => (0, Some(storage::list(path)?)),
            Target::Other => return Err(io::Error::other("neither a file nor a folder")),
        };
        Ok(Rc::new(Self {
            path: path.to_path_buf(),
            len,
            listing,
            is_shallow,
            head: OnceCell::new(),
            children: RefCell::default(),
            small_files: RefCell::default(),
            watched,
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

    /// Tells whether the folder has such a folder.
    ///
    /// # Errors
    /// It has a link of this name that cannot be followed.
    pub(super) fn has_folder(&self, name: &str) -> Result<bool, OpenError> {
        match self.listing.as_ref().and_then(|listing| listing.get(name)) {
            Some(EntryKind::Link) => {
                let path = self.path.join(name);
                let target = storage::look(&path).map_err(OpenError::io(&path))?;
                Ok(target == Target::Folder)
            }
            kind => Ok(kind == Some(&EntryKind::Folder)),
        }
    }

    /// The names of the folders in this folder, sorted.
    ///
    /// # Errors
    /// As for [`Self::has_folder`].
    pub(super) fn folders(&self) -> Result<Vec<&str>, OpenError> {
        let mut folders = Vec::new();
        for name in self.names() {
            if self.has_folder(name)? {
                folders.push(name);
            }
        }
        Ok(folders)
    }

    /// The entry of this name, looked at; `None` where there is none.
    ///
    /// # Errors
    /// As for [`Self::new`], also for a link to nowhere.
    pub(super) fn child(&self, name: &str) -> Result<Option<Rc<Self>>, OpenError> {
        if !self.has(name) {
            return Ok(None);
        }
        if let Some(child) = self.children.borrow().get(name) {
            return Ok(Some(Rc::clone(child)));
        }
        let path = self.path.join(name);
        let read = Self::read(&path, self.is_shallow, Rc::clone(&self.watched));
        let child = read.map_err(OpenError::io(&path))?;
        self.children.borrow_mut().insert(name.to_owned(), Rc::clone(&child));
        Ok(Some(child))
    }

    /// The first bytes of a file; none of a folder's.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn head(&self) -> Result<&[u8], OpenError> {
        if let Some(head) = self.head.get() {
            return Ok(head);
        }
        let head = match self.listing {
            None => storage::head(&self.path, HEAD).map_err(OpenError::io(&self.path))?,
            Some(_) => Vec::new(),
        };
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
        let small = storage::read_small(&path, LIMITS.small_file).map_err(OpenError::io(&path))?;
        let found = match small {
            Small::Bytes(bytes, file) => {
                self.watched.borrow_mut().push(file);
                SmallFile::Text(String::from_utf8_lossy(&bytes).into_owned())
            }
            Small::TooLong(len) => SmallFile::TooLong(len),
            Small::NotAFile => SmallFile::NotAFile,
        };
        self.small_files.borrow_mut().insert(name.to_owned(), found.clone());
        Ok(found)
    }

    /// The small files that were read through this probe and those that it was made from or made.
    pub(super) fn watched(&self) -> Vec<WatchedFile> {
        self.watched.borrow().clone()
    }

    /// Tells whether `test` holds for what `torch.save` wrote in this file; not where this is no such file, or a damaged one.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn torch_says(
        &self,
        test: impl FnOnce(&TorchFile) -> bool,
    ) -> Result<bool, OpenError> {
        if self.is_shallow || self.listing.is_some() || !torch::may_start_with(self.head()?) {
            return Ok(false);
        }
        if self.torch.get().is_none() {
            let opened = unless_damaged(self.open_torch())?;
            self.torch.get_or_init(|| RefCell::new(opened));
        }
        let opened = self.torch.get().map(RefCell::borrow);
        Ok(opened.is_some_and(|opened| opened.as_ref().is_some_and(|opened| test(&opened.torch))))
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
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn metadata_says(
        &self,
        test: impl FnOnce(&dcp::Metadata) -> bool,
    ) -> Result<bool, OpenError> {
        if self.is_shallow || !self.has_metadata() {
            return Ok(false);
        }
        if self.metadata.get().is_none() {
            let opened = unless_damaged(self.open_metadata())?;
            self.metadata.get_or_init(|| RefCell::new(opened));
        }
        let opened = self.metadata.get().map(RefCell::borrow);
        Ok(opened
            .is_some_and(|opened| opened.as_ref().is_some_and(|opened| test(&opened.metadata))))
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

/// Takes a file that holds something else, or is damaged, for none, to be told by its reader; an error of the system stays one.
fn unless_damaged<T>(opened: Result<T, OpenError>) -> Result<Option<T>, OpenError> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(error) if storage::is_of_system(&error) => Err(error),
        Err(_) => Ok(None),
    }
}
