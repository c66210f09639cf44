//! One rank's optimizer: the states of each parameter, under the parameter's stored name.
//!
//! ```text
//! model_optim_rng.pt                        distrib_optim.pt
//!   `optimizer`: a dict or a list             a section for each optimizer of the list
//!       │                                         │
//!   state_dict                                distrib_optim
//!     ChainedOptimizer                          StoredBuffer: flat tensors, whole or by bucket
//!       │ param groups; states by id,             │ params_by_buffer, layout::GradBuffer:
//!       │ fp32 main params                        │ the range of each parameter
//!   param_groups                                  │
//!     the parameters of each group                │
//!   param_ids                                     │
//!     id -> parameter                             │
//!       └───────────────► ParamState ◄────────────┘
//!                         { chunk, name, tensor }, by kind: exp_avg, exp_avg_sq, fp32_param, ...
//! ```
//!
//! A checkpoint stores no names of parameters here. They are found by the order of the model and Megatron's own
//! rules, and by shapes and sizes that must agree.

mod distrib_optim;
mod param_groups;
mod param_ids;
mod params;
mod state_dict;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::base::plain::PlainValue;
use crate::catalog::Problem;
use crate::containers::torch::TorchFile;
use crate::formats::state::scalar;
use crate::formats::walk::Bounds;
use crate::layout::RunArgs;
use crate::storage::{FileId, FileSet};
use crate::tensor::{LogicalTensor, StoredTensor};

use distrib_optim::BufferReader;
use param_ids::states_by_name;
use params::params_in_order;
use state_dict::{ChainedOptimizer, StateDictReader, run_state};

pub(super) use params::{ModelChunks, ModelParam, ParamState, ParamStates};

/// The key of the optimizer at the top of a rank's file.
pub(super) const OPTIMIZER: &str = "optimizer";

/// The file of a distributed optimizer's tensors, beside the model file.
pub(super) const DISTRIB_OPTIM: &str = "distrib_optim.pt";

/// The files of one rank.
#[derive(Debug)]
pub(super) struct OptimizerFiles<'a> {
    /// All files of the checkpoint.
    pub files: &'a FileSet,
    /// The path of the model file.
    pub path: &'a Path,
    /// The model file, which has the param groups and, unless it is distributed, the states.
    pub torch: &'a TorchFile,
    /// `distrib_optim.pt` beside it.
    pub distrib_optim: Option<FileId>,
}

/// The optimizer of one rank.
#[derive(Debug, Default)]
pub(super) struct RankOptimizer {
    /// All the parameters that it trains.
    pub params: Vec<ModelParam>,
    /// Their states.
    pub states: ParamStates,
    /// The path of the states that are missing.
    pub missing_file: Option<PathBuf>,
    /// The plain values that it stores, by key.
    pub run_state: BTreeMap<String, PlainValue>,
    /// Number of entries that are no tensor of a parameter.
    pub left_out: usize,
    /// Problems with its files.
    pub problems: Vec<Problem>,
}

impl RankOptimizer {
    /// Reads the optimizer of a rank; `None` where its file has none. Its states are all in the model file, or all in
    /// `distrib_optim.pt` beside it.
    pub(super) fn read(
        source: &OptimizerFiles,
        chunks: &ModelChunks,
        run_args: &RunArgs,
    ) -> Option<Self> {
        let OptimizerFiles { files, path, torch, distrib_optim } = *source;
        let values = torch.values();
        let id = values.dict_get(torch.root(), OPTIMIZER).filter(|id| !values.is_none(*id))?;
        let mut rank = Self { params: params_in_order(chunks), ..Self::default() };
        rank.run_state.insert(OPTIMIZER.to_owned(), run_state(torch, id));
        let mut bounds = Bounds::new(path);
        let mut reader =
            StateDictReader { torch, bounds: &mut bounds, left_out: 0, steps: Vec::new() };
        let states = reader.optimizers(id).and_then(|optimizers| {
            rank.left_out = reader.left_out;
            rank.set_steps(files, &reader.steps);
            if !optimizers.iter().any(|optimizer| optimizer.is_distributed) {
                return states_by_name(&optimizers, &rank.params);
            }
            match distrib_optim {
                Some(file) => Ok(rank.read_buffers(files, file, &optimizers, run_args)),
                None => {
                    rank.missing_file = Some(path.with_file_name(DISTRIB_OPTIM));
                    Ok(ParamStates::new())
                }
            }
        });
        match states {
            Ok(states) => rank.states = states,
            Err(error) => bounds.problem("", error),
        }
        rank.problems.extend(bounds.into_problems());
        Some(rank)
    }

    /// Keeps the steps of all parameters as plain values: torch counts those of each in a tensor.
    fn set_steps(&mut self, files: &FileSet, counters: &[StoredTensor]) {
        let mut steps = BTreeSet::new();
        for tensor in counters {
            match counter(files, tensor) {
                Ok(Some(step)) => drop(steps.insert(step)),
                Ok(None) => break,
                Err(error) => {
                    let path = files.path(tensor.storage().file);
                    self.problems.push(Problem::of_file(path, error));
                    break;
                }
            }
        }
        if !steps.is_empty() {
            let steps = steps.into_iter().filter_map(|step| i64::try_from(step).ok());
            let steps = PlainValue::List(steps.map(PlainValue::Int).collect());
            self.run_state.insert(format!("{OPTIMIZER}.step"), steps);
        }
    }

    /// Reads `distrib_optim.pt`. One that cannot be read leaves the weights to compare.
    fn read_buffers(
        &mut self,
        files: &FileSet,
        file: FileId,
        optimizers: &[ChainedOptimizer],
        run_args: &RunArgs,
    ) -> ParamStates {
        let mut bounds = Bounds::new(files.path(file));
        let mut states = ParamStates::new();
        match TorchFile::open(files, files.whole(file)) {
            Err(error) => bounds.problem("", error),
            Ok(torch) => {
                let params = &self.params;
                let mut reader =
                    BufferReader { torch: &torch, run_args, params, bounds: &mut bounds };
                match reader.read(optimizers) {
                    Ok(found) => states = found,
                    Err(error) => bounds.problem("", error),
                }
            }
        }
        self.problems.extend(bounds.into_problems());
        states
    }
}

/// A counter that is a tensor: torch counts the steps of each parameter in one.
fn counter(files: &FileSet, tensor: &StoredTensor) -> io::Result<Option<u64>> {
    let count = scalar(&LogicalTensor::from_stored(tensor, "step"), files)?;
    Ok(count.and_then(|count| match count {
        // Counters are whole; what is none is no counter.
        PlainValue::Float(steps) if steps >= 0.0 && steps.fract() == 0.0 && steps < 9e15 => {
            format!("{steps:.0}").parse().ok()
        }
        count => count.as_u64(),
    }))
}
