//! One rank's file: its tensors by name, and who it says to be.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::base::limits::OverLimit;
use crate::base::plain::PlainValue;
use crate::catalog::Problem;
use crate::containers::torch::{DTensor, TorchFile, Value, ValueId};
use crate::formats::error::OpenError;
use crate::formats::files::open_torch;
use crate::formats::identity::{Witness, saved_elsewhere};
use crate::formats::nest::key_text;
use crate::formats::state::state_at;
use crate::formats::walk::Bounds;
use crate::formats::wrappers::{is_flat_parameter, without_wrappers};
use crate::names::index::is_number;
use crate::storage::{FileId, FileSet};
use crate::tensor::StoredTensor;

use super::are_of_different_ranks;

/// The parameter groups of an optimizer, for the state of the run.
pub(super) type Groups = BTreeMap<String, PlainValue>;

/// A tensor of one rank.
#[derive(Debug)]
pub(super) enum Held {
    /// The whole, of which every rank has a copy.
    Plain(StoredTensor),
    /// A part of it that knows its place.
    Shard(DTensor),
}

/// The tensors of one rank.
#[derive(Debug)]
pub(super) struct RankFile {
    /// The rank that the name of the file says.
    pub rank: u64,
    path: PathBuf,
    /// The name under which it was written, without its ending.
    saved_as: Option<String>,
    pub tensors: Vec<(String, Held)>,
    pub problems: Vec<Problem>,
}

impl RankFile {
    /// Reads the state dict of a model.
    ///
    /// # Errors
    /// It cannot be read, or is no dict.
    pub(super) fn read_model(
        files: &FileSet,
        file: FileId,
        rank: u64,
    ) -> Result<(Self, Groups), OpenError> {
        let torch = open_torch(files, file)?;
        let mut reader = Reader::new(&torch, files, file);
        reader.dict(torch.root(), without_wrappers)?;
        Ok((reader.finish(rank), Groups::new()))
    }

    /// Reads the state dict of an optimizer: `optimizer.<state>.<name>`, where the name may be a number.
    ///
    /// # Errors
    /// It cannot be read, or is no dict with `state` in it.
    pub(super) fn read_optimizer(
        files: &FileSet,
        file: FileId,
        rank: u64,
    ) -> Result<(Self, Groups), OpenError> {
        let torch = open_torch(files, file)?;
        let values = torch.values();
        let mut reader = Reader::new(&torch, files, file);
        let params = values.dict_get(torch.root(), "state").and_then(|state| values.mapping(state));
        let params = params.ok_or_else(|| reader.content("holds no state of an optimizer"))?;
        for (key, states) in params {
            let param = without_wrappers(&key_text(&torch, key));
            reader.dict(states, |state| format!("optimizer.{state}.{param}"))?;
        }
        let groups = state_at(&torch, torch.root(), |key| key == "param_groups");
        let groups = groups.into_iter().map(|(key, value)| (format!("optimizer.{key}"), value));
        Ok((reader.finish(rank), groups.collect()))
    }

    /// The file as a witness of its rank.
    pub(super) fn witness(&self) -> Witness {
        let said = self.tensors.iter().find_map(|(_, held)| match held {
            Held::Shard(DTensor { rank: Some(rank), .. }) => Some(*rank),
            _ => None,
        });
        let claim = said.filter(|&said| said != self.rank).map(|said| format!("it is rank {said}"));
        // One cause, one line.
        let saved_as = self.saved_as.as_deref().filter(|_| claim.is_none());
        Witness { claim, ..witness(&self.path, self.rank, saved_as) }
    }
}

/// The witness of a rank that says nothing but the name under which it was written.
fn witness(path: &Path, rank: u64, saved_as: Option<&str>) -> Witness {
    Witness {
        path: path.to_path_buf(),
        place: format!("rank {rank}"),
        sign: saved_elsewhere(path, saved_as, are_of_different_ranks),
        ..Witness::default()
    }
}

/// Tells whether the state of an optimizer stands under a number, which is no name of a parameter.
pub(super) fn is_position(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(is_number) && name.split('.').count() == 3
}

/// Reads the schedule and random states of a rank.
///
/// # Errors
/// The file cannot be read.
pub(super) fn extra_state(
    files: &FileSet,
    file: FileId,
    rank: u64,
) -> Result<(Groups, Witness), OpenError> {
    let torch = open_torch(files, file)?;
    let witness = witness(files.path(file), rank, torch.saved_as());
    Ok((state_at(&torch, torch.root(), |_| true), witness))
}

/// The way through the dicts of one file.
struct Reader<'a> {
    torch: &'a TorchFile,
    path: PathBuf,
    bounds: Bounds,
    tensors: BTreeMap<String, Held>,
}

impl<'a> Reader<'a> {
    fn new(torch: &'a TorchFile, files: &FileSet, file: FileId) -> Self {
        let path = files.path(file).to_path_buf();
        Self { torch, bounds: Bounds::new(&path), path, tensors: BTreeMap::new() }
    }

    fn content(&self, what: impl Into<String>) -> OpenError {
        OpenError::Content { path: self.path.clone(), what: what.into() }
    }

    /// Collects the tensors of a dict by the names that `name` makes of its keys.
    fn dict(&mut self, dict: ValueId, name: impl Fn(&str) -> String) -> Result<(), OpenError> {
        let torch = self.torch;
        let Some(members) = torch.values().mapping(dict) else {
            return Err(self.content("holds no dict of tensors"));
        };
        for (key, member) in members {
            let name = name(&key_text(torch, key));
            let entered = self.bounds.enter(&name, 0);
            entered.map_err(|excess: OverLimit| self.content(format!("has {excess}")))?;
            self.member(name, member);
        }
        Ok(())
    }

    fn member(&mut self, name: String, id: ValueId) {
        if is_flat_parameter(&name) {
            let message = "a flat parameter of FSDP (LOCAL_STATE_DICT), which does not say what is in it; save a \
                           sharded state dict";
            return self.bounds.problem(&name, message);
        }
        let held = match self.torch.dtensor(id) {
            Ok(Some(shard)) => Held::Shard(shard),
            Err(error) => return self.bounds.problem(&name, error),
            Ok(None) => match self.torch.tensor(id) {
                Ok(Some(stored)) => Held::Plain(stored),
                Err(error) => return self.bounds.problem(&name, error),
                Ok(None) => return self.other(&name, id),
            },
        };
        if self.tensors.contains_key(&name) {
            return self.bounds.problem(&name, "two entries have this name");
        }
        self.tensors.insert(name, held);
    }

    /// Notes an object that may hold a tensor, such as the `ShardedTensor` of FSDP 1.
    fn other(&mut self, name: &str, id: ValueId) {
        let values = self.torch.values();
        let is_object = matches!(values.get(id), Value::Call(_)) && values.mapping(id).is_none();
        if is_object && !name.contains("_extra_state") {
            let class = values.class_name(id).unwrap_or_else(|| "an object".to_owned());
            self.bounds
                .problem(name, format!("holds {class}, which is no tensor that can be read"));
        }
    }

    fn finish(self, rank: u64) -> RankFile {
        let tensors = self.tensors.into_iter().collect();
        let saved_as = self.torch.saved_as().map(str::to_owned);
        RankFile { rank, path: self.path, saved_as, tensors, problems: self.bounds.into_problems() }
    }
}
