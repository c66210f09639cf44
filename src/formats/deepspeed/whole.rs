//! All that the ranks hold, put together: parts under their global names -> catalog.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::base::extent::numel;
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Listing, Origin, Problem, Section};
use crate::formats::error::OpenError;
use crate::formats::files::add;
use crate::formats::format::OpenOptions;
use crate::formats::roots::Root;
use crate::layout::rules::{Rules, Sharding};
use crate::layout::{ArgName, LayoutError, Merger, RankCoord, RankPart, RankParts, RowBiases};
use crate::names::Name;
use crate::storage::FileSet;
use crate::tensor::{LogicalTensor, Merge, StoredTensor};

use super::identity;
use super::info::Info;
use super::pipeline::{LayerNames, split_layer};
use super::ranks::{Layer, Run, Weights};
use super::rules::{RULES, is_buffer};
use super::states::{BareStates, MASTER, ModelStates, file_name};
use super::zero::{self, OptimizerState, OptimizerStates};
use super::{FORMAT, universal};

/// A master or moment with the rank that holds it.
struct RankState {
    stage: u64,
    tp: u64,
    moment: OptimizerState,
}

/// A checkpoint on the way to a catalog.
pub(super) struct Whole<'a> {
    run: &'a Run<'a>,
    names: LayerNames,
    info: Info,
    model: RankParts,
    optimizer: RankParts,
    masters: Vec<RankState>,
    /// The rules of the checkpoint itself for single parameters.
    shardings: HashMap<String, Sharding>,
    /// Tensors without a name that ranks would share.
    unnamed: Vec<(Name, LogicalTensor)>,
    notes: Vec<String>,
    pub(super) problems: Vec<Problem>,
    left_out: usize,
    shards: usize,
    writer: Option<String>,
}

/// The part of a parameter on a tensor parallel rank of a stage.
fn rank_part(stage: u64, tp: u64, tensor: LogicalTensor) -> RankPart {
    RankPart::new(RankCoord { tp, pp: stage, ..RankCoord::default() }, tensor)
}

/// The shape of a parameter of so many elements in its layer's file; what ties modules has a name of its own.
fn layer_shape(layers: &[Layer], tp: u64, param: &str, count: u64) -> Option<Vec<u64>> {
    let (number, key) = match split_layer(param) {
        Some((number, key)) => (Some(number), key),
        None => (None, param.strip_prefix("tied_modules.")?.split_once('.')?.1),
    };
    let of_rank = layers.iter().filter(|layer| layer.tp == tp);
    let mut held = of_rank
        .filter(|layer| number.is_none_or(|number| layer.number == number))
        .flat_map(|layer| &layer.states.tensors)
        .filter(|(name, tensor)| &**name == key && numel(tensor.shape()) == Some(count));
    held.next().map(|(_, tensor)| tensor.shape().to_vec())
}

impl<'a> Whole<'a> {
    pub(super) fn new(run: &'a Run<'a>, names: LayerNames, files: &FileSet) -> Self {
        let infos = run.firsts().find_map(|(_, model)| model.info.as_ref());
        let mut whole = Self {
            run,
            names,
            info: Info::new(infos, files.bytes_at_hand()),
            model: RankParts::new(),
            optimizer: RankParts::new(),
            masters: Vec::new(),
            shardings: HashMap::new(),
            unnamed: Vec::new(),
            notes: run.notes.clone(),
            problems: Vec::new(),
            left_out: 0,
            shards: run.models.values().map(Vec::len).sum(),
            writer: run.firsts().find_map(|(_, model)| model.version.clone()),
        };
        for model in run.models.values().flatten() {
            whole.problems.extend(model.problems.iter().cloned());
        }
        if let Some(first) = whole.info.unread.first() {
            let count = whole.info.unread.len();
            let text = format!(
                "{count} patterns of universal_checkpoint_info cannot be read: {first}, ..."
            );
            whole.notes.push(text);
        }
        for path in &run.folder.unknown {
            whole.problems.push(Problem::of_file(path, "unrecognised checkpoint file"));
        }
        whole
    }

    fn part(&mut self, section: Section, name: &str, raw: &str, part: RankPart) {
        match self.info.sharding(raw) {
            Ok(Some(sharding)) => drop(self.shardings.insert(name.to_owned(), sharding.clone())),
            Ok(None) => {}
            Err(over) => {
                let what = format!("universal_checkpoint_info takes {over} to say how it is cut");
                return self.problems.push(Problem::of_tensor(name, what));
            }
        }
        let parts = match section {
            Section::Model => &mut self.model,
            Section::Optimizer | Section::State => &mut self.optimizer,
        };
        let parts = parts.entry(Name::new(name)).or_default();
        if parts.iter().any(|other| other.rank == part.rank) {
            let error = LayoutError::Duplicate { other: name.to_owned() };
            self.problems.push(Problem::of_tensor(name, &error));
        } else {
            parts.push(part);
        }
    }

    /// Reads the optimizer's partitions, or what a universal checkpoint has made of them.
    pub(super) fn read_masters(
        &mut self,
        layers: &[Layer],
        files: &mut FileSet,
        options: &OpenOptions,
    ) -> Result<(), OpenError> {
        let run = self.run;
        if let Some(root) = &run.folder.universal {
            let params = run.firsts().flat_map(|(_, model)| model.params());
            let shapes = params.map(|(name, shape)| (&**name, &**shape)).collect();
            let universal = universal::read(root, files, &shapes)?;
            self.left_out += universal.left_out;
            self.shards += universal.shards;
            self.hold(0, 0, universal.moments);
            return Ok(());
        }
        let (mut by_rank, notes) = run.read_zero(files, options)?;
        self.notes.extend(notes);
        for states in by_rank.values_mut().flatten() {
            self.shards += 1;
            self.left_out += states.left_out;
            self.problems.append(&mut states.problems);
            self.writer = self.writer.take().or(states.version.take());
        }
        for (mp, ranks) in &by_rank {
            let Some(model) = run.models.get(mp).and_then(|models| models.first()) else {
                continue;
            };
            let (stage, tp) = run.coord(*mp);
            let ranks: Vec<_> = ranks.iter().collect();
            let mut by_slices = None;
            // Ranks with experts have other parameters by the same names.
            if model.param_shapes.is_empty() && run.folder.expert_optimizers.is_empty() {
                let weight = |param: &str, count| match &model.module {
                    Some(module) => {
                        let mut named = module.iter().filter(|(name, _)| &**name == param);
                        named.next().map(|(_, tensor)| tensor.shape().to_vec())
                    }
                    None => layer_shape(layers, tp, param, count),
                };
                by_slices = zero::shapes_by_slices(&ranks, weight);
            }
            let shapes = by_slices.as_deref().unwrap_or(&model.param_shapes);
            if shapes.is_empty() {
                let message = "holds no param_shapes, which the optimizer's partitions need";
                self.problems.push(Problem::of_file(&model.path, message));
                continue;
            }
            self.hold(stage, tp, zero::moments(shapes, &ranks));
        }
        Ok(())
    }

    fn hold(&mut self, stage: u64, tp: u64, moments: OptimizerStates) {
        let note = "param_slice_mappings contradicts the order of param_shapes (round_robin_gradients), which is taken, as \
                    zero_to_fp32 does; a universal conversion by ds_to_universal takes the other";
        if moments.is_reordered && !self.notes.iter().any(|said| said == note) {
            self.notes.push(note.to_owned());
        }
        self.problems.extend(moments.problems);
        self.masters.extend(moments.found.into_iter().map(|moment| RankState {
            stage,
            tp,
            moment,
        }));
    }

    /// Tensor parallel size of masters and moments: a universal checkpoint has put the ranks together.
    fn master_tp(&self) -> u64 {
        if self.run.folder.universal.is_some() { 1 } else { self.run.tp }
    }

    pub(super) fn add_model(
        &mut self,
        layers: Vec<Layer>,
        files: &mut FileSet,
        options: &OpenOptions,
    ) -> Result<(), OpenError> {
        match self.run.weights {
            Weights::Layers => layers.into_iter().for_each(|layer| self.add_layer(layer)),
            Weights::Modules => self.add_modules(),
            Weights::Masters => self.add_masters_as_model(),
        }
        let mut experts = Vec::new();
        for ((_, mp, expert), path) in &self.run.folder.experts {
            let file = add(files, path)?;
            let place = format!("expert {expert}, mp rank {mp}");
            experts.push((*mp, (place, BareStates::read(files, file)?)));
        }
        let places = experts.iter().map(|(_, (place, states))| (place.clone(), states));
        self.notes.extend(identity::check_bare(places, files, options)?);
        for (mp, (_, states)) in experts {
            self.shards += 1;
            self.left_out += states.left_out;
            self.problems.extend(states.problems);
            let (stage, tp) = self.run.coord(mp);
            for (name, stored) in states.tensors {
                self.add_stored(&name, stage, tp, &stored);
            }
        }
        Ok(())
    }

    fn add_layer(&mut self, layer: Layer) {
        self.shards += 1;
        self.left_out += layer.states.left_out;
        self.problems.extend(layer.states.problems);
        for (key, stored) in layer.states.tensors {
            if is_buffer(&key, &stored) {
                self.left_out += 1;
                continue;
            }
            let name = self.names.name(layer.number, &key);
            let raw = format!("{}.{key}", layer.number);
            let tensor = LogicalTensor::from_stored(&stored, key);
            let part = rank_part(layer.number, layer.tp, tensor);
            self.part(Section::Model, &name, &raw, part);
        }
    }

    fn add_stored(&mut self, raw: &Arc<str>, stage: u64, tp: u64, stored: &StoredTensor) {
        let layer = raw.starts_with("sequential.").then(|| split_layer(raw)).flatten();
        let name = self.stored_name(raw);
        // Layers of one rank that share a name are tied; those of other stages are, too.
        let stage = layer.map_or(stage, |(layer, _)| layer);
        let tensor = LogicalTensor::from_stored(stored, Arc::clone(raw));
        self.part(Section::Model, name.as_str(), raw, rank_part(stage, tp, tensor));
    }

    fn add_modules(&mut self) {
        let run = self.run;
        for (mp, model) in run.firsts() {
            let (stage, tp) = run.coord(mp);
            let Some(module) = &model.module else {
                let message = "holds no module where other ranks do";
                self.problems.push(Problem::of_file(&model.path, message));
                continue;
            };
            self.left_out += model.left_out;
            for (name, stored) in module {
                if is_buffer(name, stored) {
                    self.left_out += 1;
                } else if stored.shape() == [0] {
                    let message = "is a placeholder of size 0: this file does not hold the weight";
                    let problem = Problem::of_tensor(&**name, message).in_file(&model.path);
                    self.problems.push(problem);
                } else {
                    self.add_stored(name, stage, tp, stored);
                }
            }
        }
    }

    /// The model is in the masters; frozen parameters and buffers are beside them.
    fn add_masters_as_model(&mut self) {
        let run = self.run;
        let what = if run.is_stage3() { "ZeRO-3 stores placeholders" } else { "nothing" };
        self.notes.push(format!("weights: those of the fp32 masters; {what} beside them"));
        let masters = self.masters.iter().filter(|held| held.moment.state == MASTER);
        let masters: Vec<_> = masters
            .map(|held| {
                (held.stage, held.tp, held.moment.param.clone(), held.moment.tensor.clone())
            })
            .collect();
        let mut known: BTreeSet<Arc<str>> = BTreeSet::new();
        for (stage, tp, param, tensor) in masters {
            let name = self.names.of_param(&param);
            self.part(Section::Model, &name, &param, rank_part(stage, tp, tensor));
            known.insert(param);
        }
        for (mp, models) in &run.models {
            let (stage, tp) = run.coord(*mp);
            let ranks: Vec<_> = models.iter().collect();
            let OptimizerStates { found, problems, .. } = zero::frozen(&ranks);
            self.problems.extend(problems);
            for moment in found {
                if known.insert(moment.param.clone()) || run.tp > 1 {
                    let name = self.names.of_param(&moment.param);
                    let part = rank_part(stage, tp, moment.tensor);
                    self.part(Section::Model, &name, &moment.param, part);
                }
            }
            if let Some(first) = models.first() {
                self.left_out += first.left_out;
                self.add_beside_masters(stage, tp, first, &known);
            }
        }
    }

    /// Adds what a module holds beside placeholders: buffers.
    fn add_beside_masters(
        &mut self,
        stage: u64,
        tp: u64,
        model: &ModelStates,
        known: &BTreeSet<Arc<str>>,
    ) {
        let frozen = model.frozen_shapes.iter().map(|(name, _)| &**name);
        let shared = model.shared.iter().map(|(alias, _)| alias.as_str());
        let listed = model.params().map(|(name, _)| &**name);
        let listed: BTreeSet<&str> = frozen.chain(shared).chain(listed).collect();
        for (name, stored) in model.module.iter().flatten() {
            if listed.contains(&**name) || known.contains(name) {
                continue;
            }
            if is_buffer(name, stored) {
                self.left_out += 1;
            } else if stored.shape() == [0] && !model.buffer_names.contains(&**name) {
                let message = "is a placeholder of size 0, and no partition lists it";
                self.problems.push(Problem::of_tensor(&**name, message).in_file(&model.path));
            } else {
                self.add_stored(name, stage, tp, stored);
            }
        }
    }

    pub(super) fn add_optimizer(&mut self) {
        for RankState { stage, tp, moment } in std::mem::take(&mut self.masters) {
            let OptimizerState { state, param, tensor } = moment;
            let name = format!("optimizer.{state}.{}", self.names.of_param(&param));
            self.part(Section::Optimizer, &name, &param, rank_part(stage, tp, tensor));
        }
        for path in &self.run.folder.expert_optimizers {
            let message = "the optimizer of experts without ZeRO is not read";
            self.problems.push(Problem::of_file(path, message));
        }
        for (mp, model) in self.run.firsts() {
            for (state, number, stored) in &model.plain_optimizer {
                let name = format!("optimizer.{state}.mp_rank_{mp:02}.{number}");
                let tensor = LogicalTensor::from_stored(stored, name.as_str());
                self.unnamed.push((Name::new(name), tensor));
            }
        }
        if !self.unnamed.is_empty() {
            let text = "without ZeRO the optimizer's parameters have numbers and no names: they are called \
                        optimizer.<state>.mp_rank_RR.<number>";
            self.notes.push(text.to_owned());
        }
    }

    /// The nature of the biases of row-parallel layers: as the configuration says, or as Megatron-DeepSpeed always has them.
    fn row_biases(&self) -> RowBiases {
        match self.run.run_args.get(ArgName::GPT_J_RESIDUAL) {
            Some(PlainValue::Bool(true)) => RowBiases::Partial,
            Some(_) => RowBiases::Copies,
            None => {
                let mut names = self.model.keys().chain(self.optimizer.keys());
                match names.any(|name| name.as_str().contains("self_attention.")) {
                    true => RowBiases::Copies,
                    false => RowBiases::Unknown,
                }
            }
        }
    }

    pub(super) fn into_catalog(
        mut self,
        tag: &Root,
        files: FileSet,
        options: &OpenOptions,
    ) -> Catalog {
        let origin = Origin {
            resolved: tag.path.clone(),
            format: FORMAT.name,
            layout: self.run.layout(),
            writer: self.writer.as_ref().map(|version| format!("deepspeed {version}")),
            iteration: self.run.firsts().find_map(|(_, model)| model.steps).or(tag.iteration),
            shards: self.shards,
            left_out: self.left_out,
            ..Origin::default()
        };
        let mut catalog = CatalogBuilder::new(origin, files).with_rules(&options.rules);
        catalog.notes(tag.notes.iter().cloned());
        catalog.notes(std::mem::take(&mut self.notes));
        catalog.problems(std::mem::take(&mut self.problems));
        if let Some((_, first)) = self.run.firsts().next() {
            catalog.add_state(&first.path, first.state.clone());
        }
        if let Some((_, first)) = self.run.firsts().find(|(_, model)| model.args.is_some()) {
            catalog.add_args(&first.path, &self.run.run_args);
        }
        let shardings = std::mem::take(&mut self.shardings);
        let rules = Rules::of_table(RULES, &options.rules).with_checkpoint(shardings);
        let from_masters = self.run.weights == Weights::Masters;
        let model_tp = if from_masters { self.master_tp() } else { self.run.tp };
        let merge = |catalog: &mut CatalogBuilder<'_>, parts: &RankParts, tp: u64| {
            let merger = Merger {
                parts,
                rules: &rules,
                args: &self.run.run_args,
                tp,
                etp: tp,
                row_biases: self.row_biases(),
            };
            for (name, held) in parts {
                match merger.merge(name, held) {
                    Ok(merged) => catalog.add_merged([(name.clone(), merged)]),
                    Err(error) => catalog.problem(Problem::of_tensor(name.as_str(), error)),
                }
            }
        };
        merge(&mut catalog, &self.model, model_tp);
        if options.wants(Section::Model) {
            self.list(&mut catalog);
        }
        merge(&mut catalog, &self.optimizer, self.master_tp());
        for (name, tensor) in std::mem::take(&mut self.unnamed) {
            catalog.add(name, tensor);
        }
        self.tie(&mut catalog);
        note_row_biases(&mut catalog);
        catalog.finish()
    }

    /// Lists what the files of ranks say that the model has (DeepSpeed `runtime/engine.py`, `_save_checkpoint`): parameters of an
    /// optimizer with ZeRO, frozen ones, buffers.
    fn list(&self, catalog: &mut CatalogBuilder<'_>) {
        for (_, model) in self.run.firsts() {
            let file = file_name(&model.path);
            let frozen = model.frozen_shapes.iter();
            let params = model.params().chain(frozen);
            let names = match self.run.weights {
                Weights::Modules => {
                    self.lost_params(model).into_iter().for_each(|lost| catalog.problem(lost));
                    params.map(|(raw, _)| self.stored_name(raw)).collect()
                }
                // Modules that are tied lie in the file of one of their layers, whatever its key is there.
                Weights::Layers => {
                    let of_layers = params.filter(|(raw, _)| split_layer(raw).is_some());
                    of_layers.map(|(raw, _)| Name::new(self.names.of_param(raw))).collect()
                }
                Weights::Masters => continue,
            };
            let words = format!("{file} lists it");
            catalog.list(Listing { words, names, is_certain: true });
            if self.run.weights == Weights::Modules {
                let held: BTreeSet<&str> =
                    model.module.iter().flatten().map(|(name, _)| &**name).collect();
                let lost = model.buffer_names.iter().filter(|name| !held.contains(name.as_str()));
                let names = lost.map(|raw| self.stored_name(raw)).collect();
                let words = format!("buffer_names of {file} lists it");
                catalog.list(Listing { words, names, is_certain: true });
            }
        }
    }

    /// The name of a module's entry.
    fn stored_name(&self, raw: &str) -> Name {
        match raw.starts_with("sequential.").then(|| split_layer(raw)).flatten() {
            Some((layer, key)) => Name::new(self.names.name(layer, key)),
            None => Name::new(raw),
        }
    }

    /// Without ZeRO the optimizer has no names, but it has a number of parameters, and states in their shapes.
    fn lost_params(&self, model: &ModelStates) -> Option<Problem> {
        let known = model.optimizer_params.filter(|_| self.run.folder.experts.is_empty())?;
        let is_param = |name: &str, stored: &StoredTensor| {
            !model.buffer_names.contains(name) && !is_buffer(name, stored)
        };
        let params = model.module.iter().flatten().filter(|(name, stored)| is_param(name, stored));
        let mut left: BTreeMap<&[u64], usize> = BTreeMap::new();
        params.for_each(|(_, stored)| *left.entry(stored.shape()).or_default() += 1);
        let held: usize = left.values().sum();
        let message = if held < known {
            format!("the module holds {held} parameters, and its optimizer knows {known}")
        } else {
            // Others may have shapes of their own (Adafactor), and even these in a space of fewer dimensions (GaLore).
            let is_whole = |state: &str| ["exp_avg", "momentum_buffer"].contains(&state);
            let states = model.plain_optimizer.iter().filter(|(state, _, _)| is_whole(state));
            let shapes: Vec<&[u64]> = states.map(|(_, _, stored)| stored.shape()).collect();
            let is_lost = |shape: &&&[u64]| match left.get_mut(**shape) {
                Some(count) if *count > 0 => {
                    *count -= 1;
                    false
                }
                _ => true,
            };
            let lost: Vec<&&[u64]> = shapes.iter().filter(is_lost).collect();
            let shape = lost.first().filter(|_| 2 * lost.len() <= shapes.len())?;
            format!(
                "a parameter of shape {shape:?} is missing from the module, and its optimizer has the state of it"
            )
        };
        Some(Problem::of_file(&model.path, message))
    }

    /// Ties the parameters that share another one's values.
    fn tie(&self, catalog: &mut CatalogBuilder<'_>) {
        for (_, model) in self.run.firsts() {
            for (alias, kept) in &model.shared {
                let [alias, kept] = [alias, kept].map(|name| Name::new(self.names.of_param(name)));
                catalog.tie(alias, kept);
            }
        }
        if let Some((output, embeddings)) = self.names.tied_output() {
            catalog.tie(output, embeddings);
        }
    }
}

fn note_row_biases(catalog: &mut CatalogBuilder<'_>) {
    let is_open = |tensor: &&LogicalTensor| {
        tensor.merge() == Merge::SumIfDifferent && !tensor.replicas().is_empty()
    };
    let count = catalog.tensors().map(|(_, tensor)| tensor).filter(is_open).count();
    if count > 0 {
        catalog.note(format!(
            "nothing says whether {count} biases of row-parallel layers are copies or parts of a sum: taken as parts \
             of a sum where they differ; --set gpt_j_residual=true or false settles it"
        ));
    }
}
