//! The files of a model, each read on its own: safetensors, or what `torch.save` wrote.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::base::in_order::InOrder;
use crate::catalog::Problem;
use crate::containers::safetensors::Safetensors;
use crate::formats::error::OpenError;
use crate::formats::files::open_torch;
use crate::formats::nest::tensors_of;
use crate::formats::walk::Bounds;
use crate::storage::{FileId, FileSet};
use crate::tensor::StoredTensor;

/// The contents of one file.
pub(super) struct ModelFile {
    /// Its name in the folder.
    pub file: String,
    pub tensors: Vec<(String, StoredTensor)>,
    /// `__metadata__` of safetensors.
    pub metadata: BTreeMap<String, String>,
    pub problems: Vec<Problem>,
}

/// Reads the headers of all files.
///
/// # Errors
/// One of them is damaged or no file of its kind.
pub(super) fn read_parts(
    files: &FileSet,
    parts: Vec<(String, FileId)>,
) -> Result<Vec<ModelFile>, OpenError> {
    let read = |(name, file): (String, FileId)| match name.ends_with(".bin") {
        true => read_torch(files, file, name),
        false => read_safetensors(files, file, name),
    };
    parts.into_par_iter().map(read).in_order()
}

fn read_torch(files: &FileSet, file: FileId, name: String) -> Result<ModelFile, OpenError> {
    let torch = open_torch(files, file)?;
    let (tensors, problems) = tensors_of(&torch, files.path(file));
    Ok(ModelFile { file: name, tensors, metadata: BTreeMap::new(), problems })
}

fn read_safetensors(files: &FileSet, file: FileId, name: String) -> Result<ModelFile, OpenError> {
    let path = files.path(file);
    let Safetensors { tensors, metadata, repeated } =
        Safetensors::open(files, files.whole(file))
            .map_err(|source| OpenError::Safetensors { path: path.to_path_buf(), source })?;
    let mut bounds = Bounds::new(path);
    for name in repeated {
        bounds.problem(&name, "two entries have this name");
    }
    let mut readable = Vec::new();
    for (name, tensor) in tensors {
        match tensor {
            Ok(tensor) => readable.push((name, tensor)),
            Err(error) => bounds.problem(&name, error),
        }
    }
    Ok(ModelFile { file: name, tensors: readable, metadata, problems: bounds.into_problems() })
}
