//! One rank's `model_optim_rng.pt`: model chunks, `args`, state of the run, the optimizer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::catalog::Problem;
use crate::containers::torch::{TorchFile, ValueId};
use crate::formats::state::{args_of, state_at};
use crate::formats::walk::{Bounds, TensorWalk};
use crate::layout::RunArgs;
use crate::names::index::number;
use crate::storage::{FileId, FileSet};

use super::optimizer::{ModelChunks, OPTIMIZER, OptimizerFiles, RankOptimizer};

/// The contents of one rank's file.
pub(super) struct RankFile {
    pub path: PathBuf,
    pub args: Option<BTreeMap<String, PlainValue>>,
    pub iteration: Option<u64>,
    pub version: Option<f64>,
    /// A process of the run wrote it, with the random states or the optimizer that only such a one has.
    pub is_of_process: bool,
    /// It has an optimizer, or what a distributed one leaves here.
    pub has_optimizer: bool,
    /// State of the run, `args` apart.
    pub state: BTreeMap<String, PlainValue>,
    /// Tensors by virtual pipeline stage.
    pub chunks: ModelChunks,
    /// The optimizer, where it is wanted and there.
    pub optimizer: Option<RankOptimizer>,
    /// Number of entries of the model that are no tensors.
    pub left_out: usize,
    pub problems: Vec<Problem>,
}

impl RankFile {
    pub(super) fn read(files: &FileSet, file: FileId, torch: &TorchFile) -> Self {
        let values = torch.values();
        let top = |key: &str| values.dict_get(torch.root(), key);
        let is_set = |key: &str| top(key).is_some_and(|value| !values.is_none(value));
        let path = files.path(file);
        let mut bounds = Bounds::of_torch(path, torch);
        let mut rank = Self {
            path: path.to_path_buf(),
            args: top("args").and_then(|args| args_of(torch, args, &mut bounds)),
            iteration: top("iteration").and_then(|id| values.as_u64(id)),
            version: top("checkpoint_version").and_then(|id| values.as_f64(id)),
            is_of_process: ["rng_state", "cuda_rng_state", OPTIMIZER].into_iter().any(is_set),
            has_optimizer: is_set(OPTIMIZER),
            state: state_at_top(torch),
            chunks: BTreeMap::new(),
            optimizer: None,
            left_out: 0,
            problems: Vec::new(),
        };
        match values.mapping(torch.root()) {
            None => bounds.problem("", "not a dict with a model in it"),
            Some(entries) => rank.read_chunks(torch, entries, &mut bounds),
        }
        rank.problems.extend(bounds.into_problems());
        rank
    }

    /// Reads `model`, or `model0` and those that follow it.
    fn read_chunks(
        &mut self,
        torch: &TorchFile,
        entries: impl Iterator<Item = (ValueId, ValueId)>,
        bounds: &mut Bounds,
    ) {
        for (key, model) in entries {
            let Some(chunk) = torch.values().as_str(key).and_then(chunk_number) else { continue };
            let mut walk = TensorWalk { torch, bounds, left_out: 0, tensors: Vec::new() };
            if let Err(excess) = walk.collect("", model, 0) {
                // The tensors so far are an unknown part of the model.
                bounds.problem("", format!("the model in this file has {excess}"));
                self.chunks.clear();
                return;
            }
            self.left_out += walk.left_out;
            if self.chunks.insert(chunk, walk.tensors).is_some() {
                bounds.problem("", format!("two entries hold model chunk {chunk}"));
            }
        }
        if self.chunks.is_empty() {
            bounds.problem("", "no `model` in this file");
        }
        if !self.chunks.split_off(&LIMITS.chunks).is_empty() {
            bounds.problem("", OverLimit::new("model chunks", LIMITS.chunks));
        }
    }

    /// Reads the optimizer, with `distrib_optim.pt` beside the file where there is one. `given` are arguments of the
    /// run from the command line.
    pub(super) fn read_optimizer(
        &mut self,
        files: &FileSet,
        torch: &TorchFile,
        distrib_optim: Option<FileId>,
        given: &[(String, PlainValue)],
    ) {
        let run_args = RunArgs::new(self.args.clone().unwrap_or_default(), given);
        let source = OptimizerFiles { files, path: &self.path, torch, distrib_optim };
        if let Some(mut optimizer) = RankOptimizer::read(&source, &self.chunks, &run_args) {
            self.state.append(&mut optimizer.run_state);
            self.left_out += optimizer.left_out;
            self.problems.append(&mut optimizer.problems);
            self.optimizer = Some(optimizer);
        }
    }

    /// The names of the parameters that are no experts'.
    pub(super) fn dense_names(&self) -> BTreeSet<&str> {
        let names = self.chunks.values().flatten().map(|(name, _)| &**name);
        names.filter(|name| !name.contains("experts.")).collect()
    }
}

/// Everything at the top but models, optimizers and `args`.
fn state_at_top(torch: &TorchFile) -> BTreeMap<String, PlainValue> {
    state_at(torch, torch.root(), |key| {
        chunk_number(key).is_none() && !key.ends_with("_model") && key != OPTIMIZER && key != "args"
    })
}

/// `model` is the only chunk, `model0`, `model1`, ... are virtual pipeline stages. `ema_model` and the like are no
/// model.
fn chunk_number(key: &str) -> Option<u64> {
    let digits = key.strip_prefix("model")?;
    if digits.is_empty() {
        return Some(0);
    }
    number(digits).filter(|_| digits.len() <= 4)
}
