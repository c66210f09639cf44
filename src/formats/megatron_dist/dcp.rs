//! What Megatron's formats over torch's distributed checkpoint share: its tensors and objects, as [`Found`].

use std::path::Path;

use crate::catalog::Problem;
use crate::containers::dcp::{Checkpoint, Fault, Metadata};
use crate::storage::FileSet;

use super::{Common, Found, Stored};

/// Looks up the tensors and objects that are wanted; what the run says of itself is still to be read from them.
pub(super) fn open(
    metadata: Metadata,
    mut files: FileSet,
    folder: &Path,
    wanted: impl Fn(&str) -> bool,
) -> (Checkpoint, Found) {
    let mut checkpoint = Checkpoint::of(metadata, folder, &mut files, &wanted);
    let mut problems = Vec::new();
    for fault in &checkpoint.metadata.faults {
        if fault.name.as_deref().is_none_or(&wanted) {
            problems.push(problem_of(fault, &files));
        }
    }
    let mut tensors = Vec::new();
    for (key, tensor) in std::mem::take(&mut checkpoint.tensors) {
        match tensor {
            Ok(tensor) => {
                let shape = checkpoint.metadata.original_shapes.get(&key);
                let flattened = shape.map(|shape| shape.to_vec());
                tensors.push(Stored { key, tensor, flattened });
            }
            Err(fault) => {
                problems.push(Problem::of_tensor(&*key, fault));
            }
        }
    }
    let objects = checkpoint.metadata.objects.keys().map(ToString::to_string).collect();
    let shards = checkpoint.data_files;
    let common = Common::default();
    let found = Found { files, tensors, objects, common, problems, notes: Vec::new(), shards };
    (checkpoint, found)
}

fn problem_of(fault: &Fault, files: &FileSet) -> Problem {
    Problem {
        file: fault.file.map(|file| files.path(file).to_path_buf()),
        tensor: fault.name.as_ref().map(ToString::to_string),
        message: fault.message.clone(),
    }
}
