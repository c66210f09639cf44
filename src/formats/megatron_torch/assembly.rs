//! All ranks of one checkpoint -> a catalog.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, Entry, Origin, Problem, Section};
use crate::formats::merged::{insert_merged, tie_output_layer};
use crate::formats::{Located, OpenOptions};
use crate::layout::rules::Rules;
use crate::layout::{
    Assembly, HeadOrder, LayoutError, ParallelLayout, RankCoord, RunArgs, Shard, ShardedModel,
};
use crate::names::{Name, Naming};
use crate::storage::FileSet;

use super::FORMAT;
use super::optimizer::{Kept, Param};
use super::rank_file::{RankFile, RankOptimizer};

/// All ranks of one checkpoint, on the way to a catalog.
pub(super) struct Ranks<'a> {
    pub located: &'a Located,
    pub files: FileSet,
    pub layout: ParallelLayout,
    pub run_args: RunArgs,
    pub notes: Vec<String>,
}

impl Ranks<'_> {
    /// Where more ranks are there than `args` says, they are taken for what they are.
    pub(super) fn note_sizes(&mut self) {
        let sizes = [
            ("tensor_model_parallel_size", self.layout.tp),
            ("pipeline_model_parallel_size", self.layout.pp),
            ("expert_model_parallel_size", self.layout.ep),
        ];
        for (fact, found) in sizes {
            if let Some(declared) = self.run_args.size(fact).filter(|&declared| declared < found) {
                self.notes
                    .push(format!("args says {fact}={declared}, the folders make it {found}"));
            }
        }
    }

    pub(super) fn into_catalog(
        self,
        ranks: Vec<(RankCoord, RankFile)>,
        options: &OpenOptions,
    ) -> Catalog {
        let Ranks { located, files, layout, run_args, notes } = self;
        let chunks: BTreeSet<u64> =
            ranks.iter().flat_map(|(_, rank)| rank.chunks.keys().copied()).collect();
        let iteration = ranks.iter().find_map(|(_, rank)| rank.iteration).or(located.iteration);
        let order = HeadOrder::of_version(ranks.iter().find_map(|(_, rank)| rank.version));
        let mut shards = Vec::new();
        let mut problems = Vec::new();
        let mut left_out = 0;
        let shard_files = ranks.len();
        let mut state = BTreeMap::new();
        let mut optimizers = Vec::new();
        for (coord, rank) in ranks {
            optimizers.extend(rank.optimizer.map(|optimizer| (coord, optimizer)));
            state.extend(rank.state);
            left_out += rank.left_out;
            problems.extend(rank.problems);
            if !rank.chunks.keys().eq(&chunks) {
                problems.push(Problem {
                    file: Some(rank.path),
                    tensor: None,
                    message: format!(
                        "holds {} of the {} model chunks that other ranks hold",
                        rank.chunks.len(),
                        chunks.len()
                    ),
                });
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
        let told = |(name, error): &(String, LayoutError)| (name.clone(), error.to_string());
        let known = assembly.problems.iter().map(told).collect();
        let origin = Origin {
            format: FORMAT.name,
            layout: layout_text(&layout, chunks.len()),
            iteration,
            shards: shard_files,
            left_out: left_out + assembly.buffers,
            naming: Naming::Canonical,
            ..Origin::default()
        };
        let mut catalog = Catalog::new(origin, files);
        catalog.notes = notes;
        catalog.problems = problems;
        state.extend(run_args.of_run().map(|args| ("args".to_owned(), PlainValue::Map(args))));
        catalog.state = state;
        let of_tensor = |(name, error): (String, LayoutError)| Problem::of_tensor(name, &error);
        catalog.problems.extend(assembly.problems.into_iter().map(of_tensor));
        let tensors =
            if options.wants(Section::Model) { assembly.tensors } else { BTreeMap::new() };
        let is_whole = layout.tp == layout.declared_tp;
        insert_merged(&mut catalog, tensors, is_whole, &options.rules);
        if options.wants(Section::Model) {
            tie_output_layer(&mut catalog, "", assembly.tied_output, &run_args);
        }
        Assembler { model, known }.add_optimizer(&mut catalog, optimizers);
        catalog
    }
}

/// Kinds of state: the most that an optimizer is known to have is four.
const MOST_STATES: usize = 64;

/// Puts together what the optimizers of all ranks keep, as the weights are.
struct Assembler<'a> {
    model: ShardedModel<'a>,
    /// What was wrong with the weights, and is wrong with every state of theirs.
    known: BTreeSet<(String, String)>,
}

impl Assembler<'_> {
    fn add_optimizer(&mut self, catalog: &mut Catalog, ranks: Vec<(RankCoord, RankOptimizer)>) {
        let names: BTreeSet<String> =
            ranks.iter().flat_map(|(_, rank)| rank.states.keys().cloned()).collect();
        if names.len() > MOST_STATES {
            let message = format!("more than {MOST_STATES} states of each parameter");
            catalog.problems.push(Problem::of_tensor("optimizer", &message));
            return;
        }
        let mut lacking = Lacking::default();
        let mut without: Option<BTreeSet<Name>> = None;
        for state in &names {
            let assembly = self.assemble_state(state, &ranks);
            for (name, merged) in assembly.tensors {
                let is_vocab =
                    merged.is_vocab && self.model.layout.tp == self.model.layout.declared_tp;
                let entry = Entry { tensor: merged.tensor, is_vocab };
                catalog.insert(of_state(state, name.as_str()), entry);
            }
            let prefix = format!("optimizer.{state}.");
            tie_output_layer(catalog, &prefix, assembly.tied_output, self.model.args);
            for (name, error) in assembly.problems {
                if matches!(error, LayoutError::RankMissing { .. }) {
                    lacking.note(of_state(state, &name).as_str());
                } else if !self.known.contains(&(name.clone(), error.to_string())) {
                    let name = of_state(state, &name);
                    catalog.problems.push(Problem::of_tensor(name.as_str(), &error));
                }
            }
            without = Some(match without {
                None => assembly.shape_only_names,
                Some(others) => others.intersection(&assembly.shape_only_names).cloned().collect(),
            });
        }
        for name in without.into_iter().flatten() {
            lacking.note(&format!("optimizer of {name}"));
        }
        // Some ranks of a run with experts have nothing to write: their file is missing only if something is.
        let may_be_absent = self.model.layout.ep > 1 && lacking.count == 0 && !names.is_empty();
        for file in ranks.into_iter().filter_map(|(_, rank)| rank.missing_file) {
            if !may_be_absent {
                let message = "the states of this rank's distributed optimizer are not there; \
                     compare without them with --section model";
                let message = message.to_owned();
                catalog.problems.push(Problem { file: Some(file), tensor: None, message });
            }
        }
        catalog.problems.extend(lacking.into_problem());
    }

    fn assemble_state(&self, state: &str, ranks: &[(RankCoord, RankOptimizer)]) -> Assembly {
        let mut shards = Vec::new();
        for (coord, rank) in ranks {
            let kept = rank.states.get(state).into_iter().flatten();
            let kept: BTreeMap<(u64, &str), &Kept> =
                kept.map(|kept| ((kept.chunk, &*kept.name), kept)).collect();
            for Param { chunk, name, weight } in &rank.params {
                let at = RankCoord { vp: *chunk, ..*coord };
                let (tensor, is_shape_only) = match kept.get(&(*chunk, &**name)) {
                    Some(kept) => (kept.tensor.clone(), false),
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

/// States of which a part is not there, in one problem: a lost file takes one of every parameter's with it.
#[derive(Default)]
struct Lacking {
    first: String,
    count: usize,
}

impl Lacking {
    fn note(&mut self, name: &str) {
        if self.count == 0 {
            name.clone_into(&mut self.first);
        }
        self.count += 1;
    }

    fn into_problem(self) -> Option<Problem> {
        let others = match self.count.checked_sub(1)? {
            0 => String::new(),
            count => format!(", nor all of {count} more"),
        };
        Some(Problem::of_tensor(
            self.first,
            &format!("not all of it is stored on some rank{others}"),
        ))
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

/// `tp=2 pp=2 ep=4 etp=1`.
pub(super) fn sizes_text(layout: &ParallelLayout) -> String {
    let mut text = format!("tp={}", layout.tp);
    let axes = [("pp", layout.pp, 1), ("ep", layout.ep, 1), ("etp", layout.etp, layout.tp)];
    for (axis, size, usual) in axes {
        if size != usual {
            text.push_str(&format!(" {axis}={size}"));
        }
    }
    text
}
