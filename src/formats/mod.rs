//! A path in, a catalog out.
//!
//! # To add a format
//!
//! 1. Make a folder (or a file) here with a `FORMAT` in it, a row as [`Format`] says, and add it to [`FORMATS`].
//! 2. `claim` says what the format makes of a path, by what a `Probe` shows of it: nothing; a checkpoint
//!    (`Claim::here`); or a folder with one (`Claim::below`), as its trackers or the numbers of its folders tell. The most
//!    specific evidence wins; two formats with evidence of their own are an error that names both.
//! 3. `read` puts what lies at the root into a [`Catalog`](crate::catalog::Catalog); what the names of files and first bytes
//!    cannot tell, it says in an [`OpenError`].
//! 4. `looked_for` goes into the error where nobody knows a path, `usual_folders` are looked into before. `rank_folders`
//!    are what shards are called by.
//!
//! A format does not name another one, and nothing else here names a format (`tests/tidy.rs`). What two of them share is a
//! module of its own: `iterations` and `roots` for the way to a checkpoint, `identity` for files that say who they are, `walk`, `nest`, `state` and `wrappers` for what torch
//! files hold.

mod dcp;
mod deepspeed;
mod error;
mod files;
mod format;
mod fsdp_ranks;
mod hugging_face;
mod identity;
mod infinitrain;
mod iterations;
mod leftovers;
mod megatron_dist;
mod megatron_torch;
mod model_config;
mod nest;
mod probe;
mod roots;
mod run_state;
mod state;
mod torch_file;
mod walk;
mod wrappers;

use std::path::Path;
use std::rc::Rc;

use crate::catalog::{Catalog, Problem, Section};
use crate::completeness;
use crate::storage::{self, Target};

pub use error::{MissingFile, MissingShard, OpenError};
pub use format::{Format, OpenOptions};
pub use identity::ForeignFile;
pub use leftovers::leftovers;
pub use run_state::has_section;

use probe::Probe;
use roots::Choice;

/// All formats.
#[rustfmt::skip]
pub static FORMATS: &[Format] = &[
    megatron_torch::FORMAT,
    megatron_dist::torch_dist::FORMAT,
    megatron_dist::zarr::FORMAT,
    megatron_dist::fsdp::FORMAT,
    dcp::FORMAT,
    deepspeed::FORMAT,
    infinitrain::FORMAT,
    fsdp_ranks::FORMAT,
    hugging_face::FORMAT,
    torch_file::FORMAT,
];

/// Opens a checkpoint: finds it, tells its format, reads everything but the elements of its tensors.
///
/// # Errors
/// [`OpenError`] where there is no checkpoint, or one that cannot be put together. Single tensors
/// that cannot be read are among the catalog's problems instead.
pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let path = path.as_ref();
    if !options.wants(Section::State) {
        return open_tensors(path, options);
    }
    // What is state shows only beside all that is none.
    let all = OpenOptions { sections: Section::OF_TENSORS.to_vec(), ..options.clone() };
    let whole = open_tensors(path, &all)?;
    let has_all = Section::OF_TENSORS.iter().all(|section| options.wants(*section));
    let mut catalog = match options.sections[..] {
        [Section::State] => {
            let mut rest = open_tensors(path, &all)?;
            rest.forget_tensors();
            run_state::read(&mut rest, Some(&whole));
            rest
        }
        _ if has_all => {
            let mut catalog = whole;
            run_state::read(&mut catalog, None);
            catalog
        }
        _ => {
            let sections = options.sections.iter().copied().filter(|one| *one != Section::State);
            let tensors = OpenOptions { sections: sections.collect(), ..options.clone() };
            let mut catalog = open_tensors(path, &tensors)?;
            run_state::read(&mut catalog, Some(&whole));
            catalog
        }
    };
    catalog.origin.sections.clone_from(&options.sections);
    catalog.origin.unread.remove(&Section::State);
    if catalog.kept.has_optimizer() && options.wants(Section::Optimizer) {
        // Its tensors are compared as state.
        catalog.origin.unread.remove(&Section::Optimizer);
    }
    Ok(catalog)
}

/// Opens a checkpoint for its tensors.
fn open_tensors(named_path: &Path, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let folder = folder_of_index(named_path).filter(|_| options.format.is_none());
    let path = folder.unwrap_or(named_path);
    let forced = options.format.as_deref().map(named).transpose()?;
    let choice = Choice { formats: FORMATS, forced };
    let probe = Probe::new(path).map_err(OpenError::with_remedy)?;
    let (format, root) = choice.resolve(Rc::clone(&probe))?;
    let mut catalog = (format.read)(&root, options)?;
    catalog.files.watch(probe.watched());
    catalog.origin.path = path.to_path_buf();
    catalog.origin.sections.clone_from(&options.sections);
    catalog.given.clone_from(&options.run_args);
    if catalog.origin.resolved.as_os_str().is_empty() {
        catalog.origin.resolved = root.path;
    }
    if !catalog.state.is_empty() {
        catalog.origin.unread.insert(Section::State, None);
    }
    // What no single file is to blame for is the checkpoint's.
    for problem in &mut catalog.problems {
        problem.file.get_or_insert_with(|| catalog.origin.resolved.clone());
    }
    let of_index = folder.map(|_| format!("the folder of {}", named_path.display()));
    catalog.notes.splice(0..0, of_index.into_iter().chain(root.notes));
    let rank_folders = FORMATS.iter().flat_map(|format| format.rank_folders);
    catalog.files.label_by_folder(rank_folders.copied().collect());
    let missing = completeness::missing(&catalog);
    catalog.problems.extend(missing);
    if let Some(merge) = options.replicas {
        catalog.merge_replicas(merge);
    }
    if catalog.tensors.is_empty() && catalog.problems.is_empty() {
        let message = nothing_text(&options.sections, catalog.origin.left_out);
        catalog.problems.push(Problem::of_file(path, message));
    }
    Ok(catalog)
}

/// The folder of a file that says no more than what lies beside it.
fn folder_of_index(path: &Path) -> Option<&Path> {
    let name = path.file_name()?.to_str()?;
    let is_index = name == ".metadata" || name.ends_with(".index.json");
    let is_file = || matches!(storage::look(path), Ok(Target::File(_)));
    let folder = path.parent().filter(|_| is_index && is_file())?;
    Some(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
}

/// Says what is not there of the sections that were to be read.
fn nothing_text(sections: &[Section], left_out: usize) -> String {
    let wanted = match sections {
        [only] => only.contents(),
        _ => "tensor",
    };
    let others = match left_out {
        0 => String::new(),
        1 => ", only 1 buffer, which is left out".to_owned(),
        count => format!(", only {count} buffers, which are left out"),
    };
    format!("no {wanted} in this checkpoint{others}")
}

fn named(name: &str) -> Result<&'static Format, OpenError> {
    FORMATS.iter().find(|format| format.name == name).ok_or_else(|| OpenError::NoSuchFormat {
        name: name.to_owned(),
        known: FORMATS.iter().map(|format| format.name).collect(),
    })
}
