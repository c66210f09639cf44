//! DeepSpeed: ZeRO 0 to 3, pipeline layers of GPT-NeoX and Megatron-DeepSpeed, experts, universal checkpoints.
//!
//! ```text
//! folder    which tag, which files            states      what one file holds
//! ranks     which ranks, what is missing      pipeline    LL.<key> -> names
//! zero      flat partitions -> tensors        universal   zero/<name>/fp32.pt -> tensors
//! whole     all of it -> catalog              info, config, rules  how parameters are cut
//! ```
//! The weights of the module and the fp32 masters of the optimizer are sections of their own. Only where there are no
//! weights but those of the masters (ZeRO-3) are they the model, and a note says so.

mod config;
mod folder;
mod identity;
mod info;
mod pipeline;
mod ranks;
mod rules;
mod states;
mod universal;
mod whole;
mod zero;

use crate::catalog::{Catalog, Section};
use crate::storage::FileSet;

use super::error::OpenError;
use super::format::{Format, OpenOptions};
use super::roots::Root;

use folder::Folder;
use ranks::{Run, Weights};
use whole::Whole;

/// `deepspeed`: a save folder with `latest`, or the folder of one tag.
pub(super) const FORMAT: Format = Format {
    name: "deepspeed",
    looked_for: &["latest and the files of DeepSpeed"],
    usual_folders: &[],
    rank_folders: &[],
    claim: folder::claim,
    read,
};

fn read(tag: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    if !folder::is_tag(&tag.probe)? {
        return Err(OpenError::Unrecognized {
            path: tag.path.clone(),
            looked_for: "mp_rank_*_model_states.pt and the other files of a DeepSpeed tag"
                .to_owned(),
        });
    }
    let folder = Folder::read(&tag.probe)?;
    let mut files = FileSet::default();
    let mut run = Run::open(&folder, &tag.path, &mut files, options)?;
    run.notes.extend(identity::note_on_tag(&tag.probe.name(), &run));
    let wants_model = options.wants(Section::Model);
    // They have the shapes of the masters, where those do not say them.
    let needs_shapes = !folder.zero.is_empty()
        && run.models.values().flatten().all(|model| model.param_shapes.is_empty());
    let (layers, notes) = match wants_model || needs_shapes {
        true => run.read_layers(&mut files, options)?,
        false => (Vec::new(), Vec::new()),
    };
    run.notes.extend(notes);
    let names = run.layer_names(&layers);
    let miscounted = run.check_layers(&names, &layers)?;
    let mut whole = Whole::new(&run, names, &files);
    whole.problems.extend(miscounted);
    if options.wants(Section::Optimizer) || (wants_model && run.weights == Weights::Masters) {
        whole.read_masters(&layers, &mut files, options)?;
    }
    if wants_model {
        whole.add_model(layers, &mut files, options)?;
    }
    if options.wants(Section::Optimizer) {
        whole.add_optimizer();
    }
    let mut catalog = whole.into_catalog(tag, files, options);
    if folder.has_optimizer() && !options.wants(Section::Optimizer) {
        catalog.origin.unread.insert(Section::Optimizer, None);
    }
    Ok(catalog)
}
