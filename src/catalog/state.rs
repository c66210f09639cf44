//! The state of a run beside its tensors: arguments, schedules, random states, each with the file that says it.

use std::collections::{BTreeMap, btree_map};
use std::path::{Path, PathBuf};

use crate::base::plain::PlainValue;

/// The state of a run as its files say it, in order of the keys.
#[derive(Debug, Clone, Default)]
pub struct RunState {
    entries: BTreeMap<String, StateEntry>,
}

/// An entry of a run's state.
#[derive(Debug, Clone, PartialEq)]
pub struct StateEntry {
    /// The thing that it is about.
    pub kind: StateKind,
    /// The file that it was read from.
    pub file: PathBuf,
    /// The value.
    pub value: PlainValue,
}

/// The thing that an entry of a run's state is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateKind {
    /// The arguments of the run, such as Megatron's `args`.
    Args,
    /// The description of the model: the `config.json` of a Hugging Face model.
    Config,
    /// Steps, samples and epochs that training has come to.
    Iteration,
    /// Parameter groups and steps of the optimizer.
    OptimizerGroups,
    /// The schedule of the learning rate.
    Scheduler,
    /// States of random number generators.
    Rng,
    /// Anything else.
    Other,
}

/// Keys at the top of a state dict by what they are about (Megatron-LM, DeepSpeed, torch.distributed.checkpoint, torchtitan,
/// Hugging Face accelerate, InfiniTrain).
const KINDS: &[(StateKind, &[&str])] = &[
    (StateKind::Args, &["args"]),
    (StateKind::Config, &["config"]),
    (
        StateKind::Iteration,
        &[
            "iteration",
            "step",
            "global_step",
            "global_steps",
            "global_samples",
            "skipped_steps",
            "epoch",
            "num_floating_point_operations_so_far",
            "train_state",
        ],
    ),
    (StateKind::OptimizerGroups, &["optimizer", "optim", "param_groups"]),
    (StateKind::Scheduler, &["opt_param_scheduler", "lr_scheduler", "scheduler"]),
    (
        StateKind::Rng,
        &[
            "rng",
            "rng_state",
            "rng_states",
            "random_states",
            "random_rng_state",
            "np_rng_state",
            "torch_rng_state",
            "cuda_rng_state",
        ],
    ),
];

impl StateKind {
    /// The kind of an entry of this key: of the whole key, or of the dict that the entry was taken out of.
    #[must_use]
    pub fn of_key(key: &str) -> Self {
        let kind_of = |key: &str| KINDS.iter().find(|(_, keys)| keys.contains(&key));
        let of_outer = || {
            let (outer, _) = key.split_once('.')?;
            // A dict of arguments is one entry; what was taken out of one is no dict of arguments.
            kind_of(outer).filter(|(kind, _)| !matches!(kind, Self::Args | Self::Config))
        };
        kind_of(key).or_else(of_outer).map_or(Self::Other, |(kind, _)| *kind)
    }
}

impl RunState {
    /// Adds what a file says under a key; what was said under it before is forgotten.
    pub fn insert(&mut self, key: String, file: &Path, value: PlainValue) {
        let (kind, file) = (StateKind::of_key(&key), file.to_path_buf());
        self.entries.insert(key, StateEntry { kind, file, value });
    }

    /// Adds all entries of another one.
    pub(super) fn extend(&mut self, other: Self) {
        self.entries.extend(other.entries);
    }

    /// Tells that there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries with their keys, in order of these.
    pub fn iter(&self) -> btree_map::Iter<'_, String, StateEntry> {
        self.entries.iter()
    }

    /// The entries of one kind.
    pub fn of_kind(&self, kind: StateKind) -> impl Iterator<Item = (&str, &StateEntry)> {
        let entries = self.entries.iter().filter(move |(_, entry)| entry.kind == kind);
        entries.map(|(key, entry)| (key.as_str(), entry))
    }

    /// The value under a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&PlainValue> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// The arguments of the run by name.
    #[must_use]
    pub fn args(&self) -> Option<&BTreeMap<String, PlainValue>> {
        self.map(StateKind::Args)
    }

    /// The description of the model by name.
    #[must_use]
    pub fn config(&self) -> Option<&BTreeMap<String, PlainValue>> {
        self.map(StateKind::Config)
    }

    /// The option of the run by which its weights are not its fp32 masters rounded to nearest, ties to even.
    #[must_use]
    pub fn rounds_otherwise(&self) -> Option<&'static str> {
        let args = self.args()?;
        ROUND_OTHERWISE.into_iter().find(|option| is_on(args, option, CONFIG_DEPTH))
    }

    fn map(&self, kind: StateKind) -> Option<&BTreeMap<String, PlainValue>> {
        self.of_kind(kind).find_map(|(_, entry)| entry.value.as_map())
    }
}

/// Options by which weights are no masters rounded: weights that were quantized and back (Megatron-LM core 0.9 to 0.19,
/// `--fp8-param-gather`, `--fp4-param-gather`), masters that are put together from weights and 16 more bits, where ties are
/// rounded away from zero (Transformer Engine 2, `FusedAdam` with `store_param_remainders`; MindSpeed 2, `--reuse-fp32-param`).
const ROUND_OTHERWISE: [&str; 7] = [
    "fp8_param_gather",
    "fp8_param",
    "fp4_param_gather",
    "fp4_param",
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "reuse_fp32_param",
];

/// Levels of dicts that the options of a run lie in: Megatron's `args` have one, the `run_config.yaml` of Megatron Bridge two.
const CONFIG_DEPTH: usize = 2;

fn is_on(config: &BTreeMap<String, PlainValue>, option: &str, depth: usize) -> bool {
    let is_on_inside = |value: &PlainValue| {
        value.as_map().is_some_and(|inner| is_on(inner, option, depth.saturating_sub(1)))
    };
    config.get(option) == Some(&PlainValue::Bool(true))
        || depth > 1 && config.values().any(is_on_inside)
}

impl<'a> IntoIterator for &'a RunState {
    type Item = (&'a String, &'a StateEntry);
    type IntoIter = btree_map::Iter<'a, String, StateEntry>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_known_by_their_keys() {
        for (key, kind) in [
            ("args", StateKind::Args),
            ("args.seq_length", StateKind::Other),
            ("optimizer.param_groups.0.lr", StateKind::OptimizerGroups),
            ("lr_scheduler", StateKind::Scheduler),
            ("train_state.step", StateKind::Iteration),
            ("rng_state", StateKind::Rng),
            ("checkpoint_version", StateKind::Other),
        ] {
            assert_eq!(StateKind::of_key(key), kind, "{key}");
        }
    }

    #[test]
    fn options_that_round_otherwise_are_found_in_sections_too() {
        let map = |key: &str, value| PlainValue::Map(BTreeMap::from([(key.to_owned(), value)]));
        let on = || map("fp8_param_gather", PlainValue::Bool(true));
        for (args, found) in [
            (on(), Some("fp8_param_gather")),
            (map("ddp", on()), Some("fp8_param_gather")),
            (map("fp8_param_gather", PlainValue::Bool(false)), None),
            (map("a", map("b", on())), None),
        ] {
            let mut state = RunState::default();
            state.insert("args".to_owned(), Path::new("a.pt"), args);
            assert_eq!(state.rounds_otherwise(), found);
        }
    }

    #[test]
    fn a_state_is_looked_up_by_kind_and_told_in_order_with_its_files() {
        let mut state = RunState::default();
        let args = PlainValue::Map(BTreeMap::from([("lr".to_owned(), PlainValue::Float(0.1))]));
        for (key, value) in [("rng_state", PlainValue::None), ("args", args)] {
            state.insert(key.to_owned(), Path::new("a.pt"), value);
        }
        assert_eq!(state.args().and_then(|args| args.get("lr")), Some(&PlainValue::Float(0.1)));
        assert_eq!(state.of_kind(StateKind::Rng).count(), 1);
        let told = state.iter().map(|(key, entry)| (key.as_str(), entry.file.as_path()));
        assert!(told.eq([("args", Path::new("a.pt")), ("rng_state", Path::new("a.pt"))]));
    }
}
