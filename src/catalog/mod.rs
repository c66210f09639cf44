//! The one type at the centre: the contents of a checkpoint, whatever its format and layout were.

mod builder;
mod problem;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::names::{Name, Naming};
use crate::state::KeptState;
use crate::storage::{FileSet, Region};
use crate::tensor::{LogicalTensor, Merge};

pub use self::builder::CatalogBuilder;
pub use self::problem::Problem;
pub use self::state::{RunState, StateEntry, StateKind};

/// The contents of a checkpoint: logical tensors under canonical names, and what was noticed on the way.
///
/// Left of it everything is formats; nothing right of it knows that a format exists.
#[derive(Debug)]
pub struct Catalog {
    /// The path, format and layout that it comes from.
    pub origin: Origin,
    /// The files that its tensors point into.
    pub files: FileSet,
    /// Whole tensors, in natural order of their names.
    pub tensors: BTreeMap<Name, Entry>,
    /// Parameters that are no tensors of their own but share another one's values.
    pub tied: BTreeMap<Name, Tied>,
    /// Those of the tensors that are known by a position only, which two checkpoints need not count alike.
    pub positions: BTreeSet<Name>,
    /// The names before a user gave new ones, by these.
    pub renamed: BTreeMap<Name, Name>,
    /// The state of the run beside its tensors.
    pub state: RunState,
    /// All that is kept beside tensors, by key path, where it was to be read.
    pub kept: KeptState,
    /// Arguments of the run that its reader was given, which win over those of the checkpoint.
    pub given: Vec<(String, PlainValue)>,
    /// Tensors that files of the checkpoint say there are.
    pub listings: Vec<Listing>,
    /// Tensors and files that could not be read or put together; the rest can still be compared.
    pub problems: Vec<Problem>,
    /// Bytes and files that no tensor comes from, as far as its reader came by them: informational.
    pub leftovers: Vec<Problem>,
    /// Remarks for the user: informational.
    pub notes: Vec<String>,
    /// Steps that are left for proofs that pieces tile a shape.
    tiling_steps: u64,
}

/// Tensors that a file of the checkpoint says there are.
#[derive(Debug, Clone)]
pub struct Listing {
    /// The place where they are listed: `param_shapes of mp_rank_00_model_states.pt lists it`.
    pub words: String,
    /// Their names.
    pub names: BTreeSet<Name>,
    /// They go by the names of the others; where that is not certain, most of them must be there.
    pub is_certain: bool,
}

/// The path, format and layout that a catalog comes from.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// The path as the user gave it.
    pub path: PathBuf,
    /// The file or folder that it led to.
    pub resolved: PathBuf,
    /// The format, by the name that `--format` takes.
    pub format: &'static str,
    /// The parallel layout, e.g. `tp2 pp2`.
    pub layout: String,
    /// The software that wrote it, where it says so, e.g. `deepspeed 0.19.8`.
    pub writer: Option<String>,
    /// The training iteration.
    pub iteration: Option<u64>,
    /// The sections that were read, where they are there.
    pub sections: Vec<Section>,
    /// Sections that are there and were not to be read, with the number of their tensors where that is known.
    pub unread: BTreeMap<Section, Option<usize>>,
    /// Shard files read.
    pub shards: usize,
    /// Stored entries that are no weights and were left out.
    pub left_out: usize,
    /// The dialect of its names.
    pub naming: Naming,
    /// All of a checkpoint, or a part of one.
    pub extent: Extent,
}

/// All of a checkpoint, or a part of one that somebody named on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Extent {
    /// All of it: what it announces should be there.
    #[default]
    Whole,
    /// One rank, one of several files, an adapter: what is not there says nothing.
    Part,
}

/// A part of a checkpoint: the model, its optimizer, the state of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    /// The weights.
    Model,
    /// The state of the optimizer: `optimizer.<state>.<name of the weight>`, masters as state `fp32_param`.
    Optimizer,
    /// What is kept beside tensors: arguments, parameter groups, schedules, random states.
    State,
}

impl Section {
    /// All of them, in the order of the checkpoint.
    pub const ALL: [Self; 3] = [Self::Model, Self::Optimizer, Self::State];

    /// Those that are tensors under names.
    pub const OF_TENSORS: [Self; 2] = [Self::Model, Self::Optimizer];

    /// The section of a tensor of this name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        if name.starts_with("optimizer.") { Self::Optimizer } else { Self::Model }
    }

    /// Words for what is in it.
    #[must_use]
    pub fn contents(self) -> &'static str {
        match self {
            Self::Model => "model weights",
            Self::Optimizer => "optimizer state",
            Self::State => "state of the run",
        }
    }

    /// The word for it on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Optimizer => "optimizer",
            Self::State => "state",
        }
    }
}

/// A tensor of a catalog.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The whole tensor.
    pub tensor: LogicalTensor,
    /// Its rows are a vocabulary, padded to a number that depends on the layout.
    pub is_vocab: bool,
}

/// A parameter tied to another one.
#[derive(Debug, Clone)]
pub struct Tied {
    /// The parameter whose values it shares.
    pub to: Name,
    /// The copy that was stored all the same.
    pub copy: Option<LogicalTensor>,
}

impl Catalog {
    /// An empty catalog over these files.
    #[must_use]
    pub fn new(origin: Origin, files: FileSet) -> Self {
        Self {
            origin,
            files,
            tensors: BTreeMap::new(),
            tied: BTreeMap::new(),
            positions: BTreeSet::new(),
            renamed: BTreeMap::new(),
            state: RunState::default(),
            kept: KeptState::default(),
            given: Vec::new(),
            listings: Vec::new(),
            problems: Vec::new(),
            leftovers: Vec::new(),
            notes: Vec::new(),
            tiling_steps: LIMITS.tiling_pairs,
        }
    }

    /// Forgets all tensors, and what is expected of them.
    pub fn forget_tensors(&mut self) {
        self.tensors.clear();
        self.tied.clear();
        self.positions.clear();
        self.listings.clear();
    }

    /// Number of tensors in a section.
    #[must_use]
    pub fn count(&self, section: Section) -> usize {
        self.tensors.keys().filter(|name| Section::of(name.as_str()) == section).count()
    }

    /// The names of the tensors that have bytes in a part of a file.
    #[must_use]
    pub fn tensors_in(&self, part: Region) -> Vec<&Name> {
        let inside = |entry: &Entry| entry.tensor.regions().any(|region| region.meets(part));
        self.tensors.iter().filter(|(_, entry)| inside(entry)).map(|(name, _)| name).collect()
    }

    /// Adds a tensor after proving that its pieces tile its shape; one that they do not is a problem instead.
    pub fn insert(&mut self, name: Name, entry: Entry) {
        match entry.tensor.check_tiling_within(&mut self.tiling_steps) {
            Ok(()) => {
                self.tensors.insert(name, entry);
            }
            Err(error) => self.problems.push(Problem::of_tensor(name.as_str(), error)),
        }
    }

    /// Lets replicas make their value in this way; parts of a sum stay what they are.
    pub fn merge_replicas(&mut self, merge: Merge) {
        for entry in self.tensors.values_mut().filter(|entry| entry.tensor.merge().is_of_replicas())
        {
            entry.tensor.set_merge(merge);
        }
    }
}
