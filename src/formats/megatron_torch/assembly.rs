//! All ranks of one checkpoint -> a catalog.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::limits::{LIMITS, OverLimit};
use crate::catalog::{Catalog, CatalogBuilder, Origin, Problem, Section};
use crate::formats::format::OpenOptions;
use crate::formats::roots::Root;
use crate::layout::rules::Rules;
use crate::layout::{
    ArgName, Assembly, HeadOrder, Lacking, LayoutError, ParallelLayout, RankCoord, RunArgs, Shard,
    ShardedModel,
};
use crate::names::{Name, Naming};
use crate::storage::FileSet;

use super::optimizer::{ModelParam, ParamState, RankOptimizer};
use super::rank_file::RankFile;

/// A checkpoint by its ranks.
pub(super) struct RankedCheckpoint<'a> {
    pub root: &'a Root,
    pub files: FileSet,
    pub layout: ParallelLayout,
    pub run_args: RunArgs,
    pub ranks: Vec<(RankCoord, RankFile)>,
    pub notes: Vec<String>,
}

impl RankedCheckpoint<'_> {
    pub(super) fn into_catalog(self, format: &'static str, options: &OpenOptions) -> Catalog {
        let Self { root, files, layout, run_args, ranks, notes } = self;
        let chunks: BTreeSet<u64> =
            ranks.iter().flat_map(|(_, rank)| rank.chunks.keys().copied()).collect();
        let iteration = ranks.iter().find_map(|(_, rank)| rank.iteration).or(root.iteration);
        let order = HeadOrder::of_version(ranks.iter().find_map(|(_, rank)| rank.version));
        let origin = Origin {
            format,
            layout: layout_text(&layout, chunks.len()),
            iteration,
            shards: ranks.len(),
            naming: Naming::Canonical,
            ..Origin::default()
        };
        let mut catalog = CatalogBuilder::new(origin, files)
            .with_rules(&options.rules)
            .of_shard(layout.tp != layout.declared_tp);
        catalog.notes(notes);
        let mut shards = Vec::new();
        let mut optimizers = Vec::new();
        if let Some((_, rank)) = ranks.iter().find(|(_, rank)| rank.args.is_some()) {
            catalog.add_args(&rank.path, &run_args);
        }
        let last = ranks.iter().find(|(coord, _)| coord.pp + 1 == layout.pp);
        let last = last.map(|(_, rank)| rank.path.clone());
        for (coord, rank) in ranks {
            optimizers.extend(rank.optimizer.map(|optimizer| (coord, optimizer)));
            catalog.add_state(&rank.path, rank.state);
            catalog.origin.left_out += rank.left_out;
            catalog.problems(rank.problems);
            if !rank.chunks.keys().eq(&chunks) {
                let message = format!(
                    "holds {} of the {} model chunks that other ranks hold",
                    rank.chunks.len(),
                    chunks.len()
                );
                catalog.problem(Problem::of_file(rank.path, message));
            }
            for (vp, tensors) in rank.chunks {
                let rank = RankCoord { vp, ..coord };
                let shard = |(name, tensor)| Shard { name, rank, tensor, is_shape_only: false };
                shards.extend(tensors.into_iter().map(shard));
            }
        }
        let rules = Rules::new(&options.rules);
        let model = ShardedModel { layout: &layout, args: &run_args, order, rules: &rules };
        let assembly = model.assemble(shards);
        let lost = lost_tied_copy(&layout, &run_args, &assembly);
        let text = |(name, error): &(String, LayoutError)| (name.clone(), error.to_string());
        let weight_problems = assembly.problems.iter().map(text).collect();
        catalog.origin.left_out += assembly.buffers;
        let of_tensor = |(name, error): (String, LayoutError)| Problem::of_tensor(name, error);
        catalog.problems(assembly.problems.into_iter().map(of_tensor));
        catalog.lost_copies(assembly.lacking);
        if options.wants(Section::Model) {
            catalog.problems(last.zip(lost).map(|(file, problem)| problem.in_file(file)));
            catalog.add_merged(assembly.tensors);
            catalog.tie_output_layer("", assembly.tied_output, &run_args);
        }
        StateAssembler { model, weight_problems }.add_optimizer(&mut catalog, optimizers);
        catalog.finish()
    }
}

/// The copy of tied word embeddings that the last of several stages of a language model stores, where it is missing (Megatron-Core
/// `core/models/gpt/gpt_model.py`, `core/models/bert/bert_model.py`; `megatron/legacy/model/module.py`, `word_embeddings_for_head`).
/// With further tokens to predict it is not kept up.
fn lost_tied_copy(
    layout: &ParallelLayout,
    run_args: &RunArgs,
    assembly: &Assembly,
) -> Option<Problem> {
    const OUTPUT: &str = "output_layer.weight";
    const HEADS: [&str; 3] =
        ["classification_head.weight", "multichoice_head.weight", "value_head.weight"];
    let has = |name: &str| assembly.tensors.contains_key(&Name::new(name));
    let predicts = run_args.size(ArgName::MTP_NUM_LAYERS).is_some_and(|layers| layers > 0);
    let is_told = || assembly.problems.iter().any(|(name, _)| name.ends_with(OUTPUT));
    let is_wanted = layout.pp > 1
        && run_args.are_weights_tied()
        && !predicts
        && has("embedding.word_embeddings.weight")
        && ["decoder", "encoder"].iter().any(|part| has(&format!("{part}.final_layernorm.weight")))
        && !HEADS.iter().any(|head| has(head));
    let is_there = assembly.tied_output.is_some() || has(OUTPUT) || is_told();
    (is_wanted && !is_there).then(|| {
        let message = "missing: of tied weights the last of several stages stores its own copy";
        Problem::of_tensor(OUTPUT, message)
    })
}

/// Assembler of the states of all ranks' optimizers, which are sharded as the weights are.
struct StateAssembler<'a> {
    model: ShardedModel<'a>,
    /// Problems of the weights, by name, which their states share.
    weight_problems: BTreeSet<(String, String)>,
}

impl StateAssembler<'_> {
    fn add_optimizer(
        &mut self,
        catalog: &mut CatalogBuilder<'_>,
        ranks: Vec<(RankCoord, RankOptimizer)>,
    ) {
        let names: BTreeSet<String> =
            ranks.iter().flat_map(|(_, rank)| rank.states.keys().cloned()).collect();
        if names.len() > LIMITS.param_states {
            let (limit, found) = (LIMITS.param_states as u64, names.len() as u64);
            let error = OverLimit::found("kinds of optimizer state", limit, found);
            catalog.problem(Problem::of_tensor("optimizer", error));
            return;
        }
        let mut incomplete = IncompleteStates::default();
        let mut lacking = Vec::new();
        let mut stateless: Option<BTreeSet<Name>> = None;
        for state in &names {
            let assembly = self.assemble_state(state, &ranks);
            let named = |(name, merged): (Name, _)| (of_state(state, name.as_str()), merged);
            catalog.add_merged(assembly.tensors.into_iter().map(named));
            lacking.extend(assembly.lacking.into_iter().map(|lost| {
                let first = of_state(state, lost.first.as_str());
                Lacking { first, ..lost }
            }));
            let prefix = format!("optimizer.{state}.");
            catalog.tie_output_layer(&prefix, assembly.tied_output, self.model.args);
            for (name, error) in assembly.problems {
                if matches!(error, LayoutError::RankMissing { .. }) {
                    incomplete.note(of_state(state, &name).as_str());
                } else if !self.weight_problems.contains(&(name.clone(), error.to_string())) {
                    let name = of_state(state, &name);
                    catalog.problem(Problem::of_tensor(name.as_str(), error));
                }
            }
            stateless = Some(match stateless {
                None => assembly.shape_only_names,
                Some(others) => others.intersection(&assembly.shape_only_names).cloned().collect(),
            });
        }
        for name in stateless.into_iter().flatten() {
            incomplete.note(&format!("optimizer of {name}"));
        }
        // With expert parallelism some ranks write no file, so one is missing only where states are.
        let may_be_absent = self.model.layout.ep > 1 && incomplete.count == 0 && !names.is_empty();
        for file in ranks.into_iter().filter_map(|(_, rank)| rank.missing_file) {
            if !may_be_absent {
                let message = "missing: it holds this rank's optimizer state; \
                     leave the optimizer out with --section model";
                catalog.problem(Problem::of_file(file, message));
            }
        }
        catalog.problems(incomplete.into_problem());
        catalog.lost_copies(lacking);
    }

    fn assemble_state(&self, state: &str, ranks: &[(RankCoord, RankOptimizer)]) -> Assembly {
        let mut shards = Vec::new();
        for (coord, rank) in ranks {
            let states = rank.states.get(state).into_iter().flatten();
            let states: BTreeMap<(u64, &str), &ParamState> =
                states.map(|state| ((state.chunk, &*state.name), state)).collect();
            for ModelParam { chunk, name, weight } in &rank.params {
                let at = RankCoord { vp: *chunk, ..*coord };
                let (tensor, is_shape_only) = match states.get(&(*chunk, &**name)) {
                    Some(state) => (state.tensor.clone(), false),
                    None => (weight.clone(), true),
                };
                shards.push(Shard { name: Arc::clone(name), rank: at, tensor, is_shape_only });
            }
        }
        self.model.assemble(shards)
    }
}

/// The name of a parameter's state.
fn of_state(state: &str, name: &str) -> Name {
    Name::new(format!("optimizer.{state}.{name}"))
}

/// States of which some rank has no shard, in one problem: a lost file takes a shard of every parameter with it.
#[derive(Default)]
struct IncompleteStates {
    first: String,
    count: usize,
}

impl IncompleteStates {
    fn note(&mut self, name: &str) {
        if self.count == 0 {
            name.clone_into(&mut self.first);
        }
        self.count += 1;
    }

    fn into_problem(self) -> Option<Problem> {
        let others = match self.count.checked_sub(1)? {
            0 => String::new(),
            1 => " (and 1 more tensor)".to_owned(),
            count => format!(" (and {count} more tensors)"),
        };
        Some(Problem::of_tensor(self.first, format!("incomplete on at least one rank{others}")))
    }
}

fn layout_text(layout: &ParallelLayout, chunks: usize) -> String {
    let mut text = format!("tp{} pp{}", layout.tp, layout.pp);
    if chunks > 1 {
        text.push_str(&format!(" vp{chunks}"));
    }
    if layout.ep > 1 || layout.etp != layout.tp {
        text.push_str(&format!(" ep{}", layout.ep));
    }
    if layout.etp != layout.tp {
        text.push_str(&format!(" etp{}", layout.etp));
    }
    text
}
