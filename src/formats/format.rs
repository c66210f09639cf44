//! The row of a format, and the options of reading a checkpoint.

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, Section};
use crate::containers::dcp::Wanted;
use crate::layout::rules::UserRule;
use crate::tensor::Merge;

use super::error::OpenError;
use super::probe::Probe;
use super::roots::{Claim, Root};

/// A way in which checkpoints lie on disk.
pub struct Format {
    /// The name that `--format` takes.
    pub name: &'static str,
    /// Words for what tells such a checkpoint, for those who have none.
    pub(super) looked_for: &'static [&'static str],
    /// Folders in which programs keep such a checkpoint beside other things.
    pub(super) usual_folders: &'static [&'static str],
    /// Beginnings of the names of its ranks' folders.
    pub(super) rank_folders: &'static [&'static str],
    /// Says what it makes of a path; `None` where it knows nothing there.
    pub(super) claim: fn(&Probe) -> Result<Option<Claim>, OpenError>,
    /// Reads it.
    pub(super) read: fn(&Root, &OpenOptions) -> Result<Catalog, OpenError>,
}

/// Options of reading a checkpoint.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The sections to read; a format looks at nothing that only another one needs.
    pub sections: Vec<Section>,
    /// The format, where it is not to be detected.
    pub format: Option<String>,
    /// Arguments of the run that win over those of the checkpoint's `args`.
    pub run_args: Vec<(String, PlainValue)>,
    /// Sharding rules that win over the table.
    pub rules: Vec<UserRule>,
    /// Nobody will ask for the values of tensors, as where they are only listed: what is compressed may stay so.
    pub no_values: bool,
    /// The replica that counts where some disagree, instead of that of the format's own software.
    pub replicas: Option<Merge>,
    /// Files that say to be others than their names make of them are taken for what their names say.
    pub allow_foreign_ranks: bool,
}

impl Default for OpenOptions {
    /// The model, as it is detected.
    fn default() -> Self {
        let sections = vec![Section::Model];
        Self {
            sections,
            format: None,
            run_args: Vec::new(),
            rules: Vec::new(),
            no_values: false,
            replicas: None,
            allow_foreign_ranks: false,
        }
    }
}

impl OpenOptions {
    /// The values that are asked for.
    pub(super) fn values(&self) -> Wanted {
        if self.no_values { Wanted::None } else { Wanted::All }
    }

    /// Tells whether to read a section.
    pub(super) fn wants(&self, section: Section) -> bool {
        self.sections.contains(&section)
    }
}
