//! The tensors and objects of torch's distributed checkpoint, as Megatron's formats over it share them.

use std::path::Path;

use crate::catalog::Problem;
use crate::containers::dcp::{Checkpoint, EntryError, Metadata, Wanted};
use crate::storage::FileSet;

use super::{Contents, GlobalTensor};

/// Looks up the tensors and objects that are wanted; the state of the run is still to be read from them.
pub(super) fn open(
    metadata: Metadata,
    mut files: FileSet,
    folder: &Path,
    wanted: impl Fn(&str) -> bool,
    values: Wanted,
) -> (Checkpoint, Contents) {
    let mut checkpoint = Checkpoint::of(metadata, folder, &mut files, &wanted, values);
    let mut problems = Vec::new();
    for error in &checkpoint.metadata.errors {
        if error.name.as_deref().is_none_or(&wanted) {
            problems.push(problem_of(error, &files));
        }
    }
    for file in &checkpoint.lost_files {
        problems.push(Problem::lost_file(&file.path, &file.what, &file.tensors));
    }
    let mut tensors = Vec::new();
    for (key, tensor) in std::mem::take(&mut checkpoint.tensors) {
        match tensor {
            Ok(tensor) => {
                let shape = checkpoint.metadata.original_shapes.get(&key);
                let flattened = shape.map(|shape| shape.to_vec());
                tensors.push(GlobalTensor { key, tensor, flattened });
            }
            Err(error) => {
                problems.push(Problem::of_tensor(&*key, error));
            }
        }
    }
    let objects = checkpoint.metadata.objects.keys().map(ToString::to_string).collect();
    let shards = checkpoint.data_files;
    let has_pieces = true;
    let found =
        Contents { files, tensors, objects, problems, shards, has_pieces, ..Contents::default() };
    (checkpoint, found)
}

fn problem_of(error: &EntryError, files: &FileSet) -> Problem {
    Problem {
        file: error.file.map(|file| files.path(file).to_path_buf()),
        tensor: error.name.as_ref().map(ToString::to_string),
        message: error.message.clone(),
        ..Problem::default()
    }
}
