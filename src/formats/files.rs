//! Files and folders of a checkpoint, opened with errors that name them.

use std::path::Path;

use crate::containers::torch::TorchFile;
use crate::storage::{FileId, FileSet};

use super::error::OpenError;

/// Adds a file to those of the checkpoint.
pub(super) fn add(files: &mut FileSet, path: &Path) -> Result<FileId, OpenError> {
    files.add(path).map_err(OpenError::io(path))
}

/// Opens a file that `torch.save` wrote.
pub(super) fn open_torch(files: &FileSet, file: FileId) -> Result<TorchFile, OpenError> {
    TorchFile::open(files, files.whole(file))
        .map_err(|source| OpenError::Torch { path: files.path(file).to_path_buf(), source })
}
