//! What one rank's `model_optim_rng.pt` holds: model chunks, `args`, what the run says of itself, the optimizer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::base::dtype::Dtype;
use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::Problem;
use crate::containers::torch::{TorchFile, ValueId};
use crate::formats::chain_text;
use crate::formats::state::{facts_of, state_at};
use crate::formats::walk::{Bounds, TensorWalk};
use crate::layout::RunArgs;
use crate::storage::{FileId, FileSet};
use crate::tensor::{ByteOrder, StoredTensor};

use super::distrib_optim::Buffers;
use super::optimizer::{
    ChainedOptimizer, Chunks, Param, Reader, States, numbered, params_in_order, plain_state,
};

/// What one rank's file holds.
pub(super) struct RankFile {
    pub path: PathBuf,
    pub args: Option<BTreeMap<String, PlainValue>>,
    pub iteration: Option<u64>,
    pub version: Option<f64>,
    /// What the run says of itself, `args` apart.
    pub state: BTreeMap<String, PlainValue>,
    /// By virtual pipeline stage.
    pub chunks: Chunks,
    /// What the optimizer keeps, where that is wanted and there.
    pub optimizer: Option<RankOptimizer>,
    pub left_out: usize,
    pub problems: Vec<Problem>,
}

/// What a rank's optimizer keeps.
pub(super) struct RankOptimizer {
    /// All the parameters that it trains.
    pub params: Vec<Param>,
    /// What it keeps of them.
    pub states: States,
    /// Where the states should be that are missing.
    pub missing_file: Option<PathBuf>,
}

impl RankFile {
    pub(super) fn read(files: &FileSet, file: FileId, torch: &TorchFile) -> Self {
        let values = torch.values();
        let top = |key: &str| values.dict_get(torch.root(), key);
        let path = files.path(file);
        let mut bounds = Bounds::new(path);
        let mut rank = Self {
            path: path.to_path_buf(),
            args: top("args").and_then(|args| facts_of(torch, args, &mut bounds)),
            iteration: top("iteration").and_then(|id| values.as_u64(id)),
            version: top("checkpoint_version").and_then(|id| values.as_f64(id)),
            state: state_at_top(torch),
            chunks: BTreeMap::new(),
            optimizer: None,
            left_out: 0,
            problems: Vec::new(),
        };
        match values.mapping(torch.root()) {
            None => bounds.problem("", "the file holds no dict with a model in it"),
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
                // What was found so far is a part of nobody knows what.
                bounds.problem("", format_args!("the model in this file has {excess}"));
                self.chunks.clear();
                return;
            }
            self.left_out += walk.left_out;
            if self.chunks.insert(chunk, walk.tensors).is_some() {
                bounds.problem("", "holds two models of the same number, `model` and `model0`");
            }
        }
        if self.chunks.is_empty() {
            bounds.problem("", "no `model` in this file");
        }
        if let Some(first) = self.chunks.split_off(&LIMITS.chunks).keys().next() {
            bounds.problem("", format_args!("holds model{first}: no run has so many model chunks"));
        }
    }

    /// Reads what the optimizer keeps: all of it is in this file, or its tensors are in `distrib_optim.pt` beside it.
    pub(super) fn read_optimizer(
        &mut self,
        files: &FileSet,
        torch: &TorchFile,
        beside: Option<FileId>,
        given: &[(String, PlainValue)],
    ) {
        let values = torch.values();
        let id = values.dict_get(torch.root(), OPTIMIZER);
        let Some(id) = id.filter(|id| !values.is_none(*id)) else { return };
        self.state.insert(OPTIMIZER.to_owned(), plain_state(torch, id));
        let params = params_in_order(&self.chunks);
        let run_args = RunArgs::new(self.args.clone().unwrap_or_default(), given);
        let mut bounds = Bounds::new(&self.path);
        let mut reader = Reader { torch, bounds: &mut bounds, left_out: 0, steps: Vec::new() };
        let mut rank = RankOptimizer { params, states: States::new(), missing_file: None };
        match reader.links(id) {
            Err(error) => bounds.problem("", format_args!("{UNMATCHED}: {error}")),
            Ok(links) => {
                self.left_out += reader.left_out;
                let steps = reader.steps.iter().map_while(|step| scalar(files, step));
                let steps: BTreeSet<u64> = steps.collect();
                if !steps.is_empty() {
                    let steps = steps.into_iter().filter_map(|step| i64::try_from(step).ok());
                    let steps = PlainValue::List(steps.map(PlainValue::Int).collect());
                    self.state.insert(format!("{OPTIMIZER}.step"), steps);
                }
                if links.iter().any(|link| link.is_distributed) {
                    match beside {
                        None => rank.missing_file = Some(self.path.with_file_name(DISTRIBUTED)),
                        Some(file) => {
                            let (states, problems) =
                                read_buffers(files, file, &links, &rank.params, &run_args);
                            rank.states = states;
                            self.problems.extend(problems);
                        }
                    }
                } else {
                    match numbered(&links, &rank.params) {
                        Ok(states) => rank.states = states,
                        Err(error) => bounds.problem("", format_args!("{UNMATCHED}: {error}")),
                    }
                }
            }
        }
        self.problems.extend(bounds.into_problems());
        self.optimizer = Some(rank);
    }

    pub(super) fn dense_names(&self) -> BTreeSet<&str> {
        let names = self.chunks.values().flatten().map(|(name, _)| &**name);
        names.filter(|name| !name.contains("experts.")).collect()
    }
}

/// The key of the optimizer at the top of a file.
const OPTIMIZER: &str = "optimizer";

/// Where a distributed optimizer keeps its tensors.
pub(super) const DISTRIBUTED: &str = "distrib_optim.pt";

const UNMATCHED: &str = "optimizer state cannot be matched to parameters";

/// Reads `distrib_optim.pt`. One that cannot be read leaves the weights to compare.
fn read_buffers(
    files: &FileSet,
    file: FileId,
    links: &[ChainedOptimizer],
    params: &[Param],
    run_args: &RunArgs,
) -> (States, Vec<Problem>) {
    let mut bounds = Bounds::new(files.path(file));
    let states = match TorchFile::open(files, files.whole(file)) {
        Err(error) => Err(chain_text(&error)),
        Ok(torch) => {
            let mut buffers = Buffers { torch: &torch, run_args, params, bounds: &mut bounds };
            buffers.read(links).map_err(|error| format!("{UNMATCHED}: {error}"))
        }
    };
    let states = states.unwrap_or_else(|error| {
        bounds.problem("", error);
        States::new()
    });
    (states, bounds.into_problems())
}

/// A counter that is a tensor: torch counts the steps of each parameter in one.
fn scalar(files: &FileSet, tensor: &StoredTensor) -> Option<u64> {
    let (dtype, storage) = (tensor.dtype(), tensor.storage());
    let size = usize::try_from(dtype.size()).ok().filter(|&size| size <= 8)?;
    let at = tensor.storage_offset().checked_mul(dtype.size())?;
    let mut bytes = [0; 8];
    let offset = storage.offset.checked_add(at)?;
    files.read_exact_at(storage.file, bytes.get_mut(..size)?, offset).ok()?;
    if tensor.byte_order() == ByteOrder::Big {
        bytes.get_mut(..size)?.reverse();
    }
    let word = u64::from_le_bytes(bytes);
    let steps = match dtype {
        Dtype::Int64 => return Some(word),
        Dtype::Float64 => f64::from_bits(word),
        Dtype::Float32 => f64::from(f32::from_bits(u32::try_from(word).ok()?)),
        _ => return None,
    };
    // Counters are whole; what is none is no counter.
    let whole = steps >= 0.0 && steps.fract() == 0.0 && steps < 9e15;
    whole.then(|| format!("{steps:.0}").parse().ok()).flatten()
}

/// Everything at the top but models, optimizers and `args`.
fn state_at_top(torch: &TorchFile) -> BTreeMap<String, PlainValue> {
    state_at(torch, torch.root(), |key| {
        chunk_number(key).is_none() && !key.ends_with("_model") && key != OPTIMIZER && key != "args"
    })
}

/// `model` is the only chunk, `model0`, `model1`, ... are virtual pipeline stages. `ema_model` and the like are no model.
fn chunk_number(key: &str) -> Option<u64> {
    let digits = key.strip_prefix("model")?;
    if digits.is_empty() {
        return Some(0);
    }
    let is_number = digits.len() <= 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}
