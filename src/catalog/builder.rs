//! The way to a catalog: every format adds what it found here, and what holds for all formats is decided here once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::layout::rules::UserRule;
use crate::layout::{ArgName, Lacking, Merged, RunArgs};
use crate::names::{Name, is_vocabulary};
use crate::storage::{FileId, FileSet};
use crate::tensor::LogicalTensor;

use super::{Catalog, Entry, Listing, Origin, Problem, RunState, Section, Tied};

/// A catalog in the making.
#[derive(Debug)]
pub struct CatalogBuilder<'a> {
    /// The path, format and layout that it comes from.
    pub origin: Origin,
    catalog: Catalog,
    /// Sharding rules of the command line, where the format asks for any.
    rules: &'a [UserRule],
    is_shard: bool,
    /// Names that no sharding rule knows.
    without_rule: BTreeSet<Name>,
    /// Some names have a sharding rule.
    has_rules: bool,
}

impl<'a> CatalogBuilder<'a> {
    /// An empty catalog over these files.
    #[must_use]
    pub fn new(origin: Origin, files: FileSet) -> Self {
        let catalog = Catalog::new(Origin::default(), files);
        let without_rule = BTreeSet::new();
        Self { origin, catalog, rules: &[], is_shard: false, without_rule, has_rules: false }
    }

    /// Remarks on those of these rules that no name ends with.
    #[must_use]
    pub fn with_rules(self, rules: &'a [UserRule]) -> Self {
        Self { rules, ..self }
    }

    /// Takes the tensors for those of one shard of several: the rows of its vocabulary are not all there are, so that
    /// fewer of them are no padding.
    #[must_use]
    pub fn of_shard(self, is_shard: bool) -> Self {
        Self { is_shard, ..self }
    }

    /// The files that its tensors point into.
    #[must_use]
    pub fn files(&self) -> &FileSet {
        &self.catalog.files
    }

    /// The same, to add some.
    pub fn files_mut(&mut self) -> &mut FileSet {
        &mut self.catalog.files
    }

    /// Tells whether there is a tensor of this name.
    #[must_use]
    pub fn has(&self, name: &Name) -> bool {
        self.catalog.tensors.contains_key(name)
    }

    /// The tensors so far.
    pub fn tensors(&self) -> impl Iterator<Item = (&Name, &LogicalTensor)> {
        self.catalog.tensors.iter().map(|(name, entry)| (name, &entry.tensor))
    }

    /// The state of the run so far.
    #[must_use]
    pub fn state(&self) -> &RunState {
        &self.catalog.state
    }

    /// Adds a tensor under a name that says whether its rows are a vocabulary.
    pub fn add(&mut self, name: Name, tensor: LogicalTensor) {
        let is_vocab = is_vocabulary(name.as_str());
        self.insert(name, tensor, is_vocab);
    }

    /// Adds a tensor that is known by a position only.
    pub fn add_position(&mut self, name: Name, tensor: LogicalTensor) {
        self.catalog.positions.insert(name.clone());
        self.insert(name, tensor, false);
    }

    /// Adds the parameters that shards were put together to.
    pub fn add_merged(&mut self, merged: impl IntoIterator<Item = (Name, Merged)>) {
        for (name, Merged { tensor, is_vocab, has_no_rule }) in merged {
            // States of the optimizer are cut as their weights are, which say it.
            if Section::of(name.as_str()) == Section::Model {
                self.has_rules |= !has_no_rule;
                if has_no_rule {
                    self.without_rule.insert(name.clone());
                }
            }
            self.insert(name, tensor, is_vocab);
        }
    }

    fn insert(&mut self, name: Name, tensor: LogicalTensor, is_vocab: bool) {
        if self.catalog.tensors.contains_key(&name) {
            self.problem(Problem::of_tensor(name.as_str(), "two tensors go by this name"));
            return;
        }
        self.catalog.insert(name, Entry { tensor, is_vocab: is_vocab && !self.is_shard });
    }

    /// Says that `name` shares the values of `to`; what is stored under `name` all the same is checked as a further copy.
    /// Without `to`, that copy is all there is, and stays a tensor of its own.
    pub fn tie(&mut self, name: Name, to: Name) {
        let Catalog { tensors, tied, .. } = &mut self.catalog;
        if name == to || tied.contains_key(&name) || !tensors.contains_key(&to) {
            return;
        }
        let copy = tensors.remove(&name).map(|entry| entry.tensor);
        let checked = match (tensors.get_mut(&to), &copy) {
            (Some(entry), Some(copy)) => entry.tensor.add_copy(copy.clone()),
            _ => Ok(()),
        };
        let problem = checked.err().map(|error| Problem::of_tensor(name.as_str(), error));
        tied.insert(name, Tied { to, copy });
        self.problems(problem);
    }

    /// Ties Megatron's output layer to the word embeddings where the run says so; the last of several stages keeps a
    /// copy. `prefix` is that of the state of an optimizer which they are.
    pub fn tie_output_layer(
        &mut self,
        prefix: &str,
        copy: Option<LogicalTensor>,
        run_args: &RunArgs,
    ) {
        let output = Name::new(format!("{prefix}output_layer.weight"));
        let embedding = Name::new(format!("{prefix}embedding.word_embeddings.weight"));
        match copy {
            // The stage that predicts further tokens has its own copy; this one is not kept up (Megatron-LM
            // `language_module.py`), so it says nothing.
            Some(_) if run_args.size(ArgName::MTP_NUM_LAYERS).is_some_and(|layers| layers > 0) => {
                self.note("left out a copy of the tied output layer that training does not use");
            }
            Some(copy) => self.add(output.clone(), copy),
            None if self.catalog.tensors.contains_key(&output) || !run_args.are_weights_tied() => {
                return;
            }
            None => {}
        }
        self.tie(output, embedding);
    }

    /// Adds what a file says of the run, by key.
    pub fn add_state(
        &mut self,
        file: &Path,
        entries: impl IntoIterator<Item = (String, PlainValue)>,
    ) {
        for (key, value) in entries {
            self.catalog.state.insert(key, file, value);
        }
    }

    /// Adds what several files say of the run.
    pub fn add_run_state(&mut self, state: RunState) {
        self.catalog.state.extend(state);
    }

    /// Adds the arguments of the run, as the file says them and the command line overrides them.
    pub fn add_args(&mut self, file: &Path, run_args: &RunArgs) {
        let args = run_args.of_run().map(|args| ("args".to_owned(), PlainValue::Map(args)));
        self.add_state(file, args);
    }

    /// Adds tensors that a file says there are.
    pub fn list(&mut self, listing: Listing) {
        self.catalog.listings.extend((!listing.names.is_empty()).then_some(listing));
    }

    /// Adds something that could not be read or put together.
    pub fn problem(&mut self, problem: Problem) {
        self.catalog.problems.push(problem);
    }

    /// Adds all that could not be read or put together.
    pub fn problems(&mut self, problems: impl IntoIterator<Item = Problem>) {
        self.catalog.problems.extend(problems);
    }

    /// Adds what files have lost that others of their place hold, one problem a file.
    pub fn lost_copies(&mut self, lacking: impl IntoIterator<Item = Lacking>) {
        let mut by_file: BTreeMap<FileId, Lacking> = BTreeMap::new();
        for lost in lacking {
            match by_file.get_mut(&lost.file) {
                Some(first) => first.count += lost.count,
                None => drop(by_file.insert(lost.file, lost)),
            }
        }
        for Lacking { file, twin, first, count } in by_file.into_values() {
            let [file, twin] = [file, twin].map(|file| self.catalog.files.path(file));
            let problem = Problem::lost_copies(file, twin, first.as_str(), count);
            self.catalog.problems.push(problem);
        }
    }

    /// Adds bytes or files that no tensor comes from.
    pub fn leftover(&mut self, leftover: Problem) {
        self.catalog.leftovers.push(leftover);
    }

    /// Adds an informational note for the user.
    pub fn note(&mut self, note: impl Into<String>) {
        self.catalog.notes.push(note.into());
    }

    /// Adds several notes.
    pub fn notes(&mut self, notes: impl IntoIterator<Item = String>) {
        self.catalog.notes.extend(notes);
    }

    /// Takes out the tensors for which no budget of elements is left: a few bytes may stand for elements without end, and
    /// under any number of names.
    fn hold_to_budget(&mut self) {
        let Catalog { tensors, tied, files, positions, problems, .. } = &mut self.catalog;
        let limit = files.bytes_at_hand().saturating_mul(LIMITS.uses);
        let limit = limit.saturating_add(LIMITS.repeated);
        let (mut left, mut over) = (limit, Vec::new());
        let mut pays = |name: &Name, tensor: &LogicalTensor| {
            let rest = left.checked_sub(tensor.stored_elements());
            left = rest.unwrap_or(left);
            if rest.is_none() {
                over.push(name.clone());
            }
            rest.is_some()
        };
        tensors.retain(|name, entry| pays(name, &entry.tensor));
        tied.retain(|name, Tied { to, copy }| {
            let shared = tensors.get(to).map(|entry| &entry.tensor);
            copy.as_ref().or(shared).is_some_and(|tensor| pays(name, tensor))
        });
        positions.retain(|name| tensors.contains_key(name));
        if let Some(first) = over.first() {
            let more = OverLimit::new("elements in so few bytes", limit);
            let message = format!(
                "the checkpoint has {more}, so that {} of its tensors are left out",
                over.len()
            );
            problems.push(Problem::of_tensor(first.as_str(), message));
        }
    }

    /// The catalog, with remarks on names without a rule and on rules without a name.
    #[must_use]
    pub fn finish(mut self) -> Catalog {
        self.hold_to_budget();
        // Names of the user's own modules, none of which a table could know, are no finding.
        if let Some(first) = self.without_rule.first().filter(|_| self.has_rules) {
            self.note(format!(
                "no sharding rule for {} names, taken whole from their only shard: {first}, ...",
                self.without_rule.len()
            ));
        }
        for rule in self.rules {
            if !self.catalog.tensors.keys().any(|name| rule.matches(name.as_str())) {
                self.note(format!("--rule {rule} matches no tensor name"));
            }
        }
        Catalog { origin: self.origin, ..self.catalog }
    }
}
