//! The ranks that a run had, what each holds, and the files that are missing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::base::in_order::InOrder;
use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::catalog::Problem;
use crate::formats::error::{MissingFile, OpenError};
use crate::formats::files::add;
use crate::formats::format::OpenOptions;
use crate::layout::{ArgName, RunArgs};
use crate::storage::{FileId, FileSet};

use super::config;
use super::folder::Folder;
use super::identity;
use super::pipeline::{LayerNames, split_layer};
use super::states::{BareStates, ModelStates, ZeroStates, file_name};

/// The place of the weights of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weights {
    /// In layer files.
    Layers,
    /// In the model file of every model parallel rank.
    Modules,
    /// Only in the fp32 masters.
    Masters,
}

/// A run as its files tell of it.
pub(super) struct Run<'a> {
    pub folder: &'a Folder,
    /// The folder of the tag.
    pub path: &'a Path,
    /// By model parallel rank; under ZeRO-3 one for every data parallel rank, else one.
    pub models: BTreeMap<u64, Vec<ModelStates>>,
    pub run_args: RunArgs,
    /// Tensor parallel size.
    pub tp: u64,
    /// Pipeline stages.
    pub pp: u64,
    pub weights: Weights,
    /// Parameters are called after the layers of a pipeline.
    pub is_pipeline: bool,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Files by model parallel rank, and notes on them.
type Noted<T> = (BTreeMap<u64, Vec<T>>, Vec<String>);

/// A file of a pipeline layer.
pub(super) struct Layer {
    pub number: u64,
    pub tp: u64,
    pub states: BareStates,
}

fn missing(files: impl IntoIterator<Item = (PathBuf, String)>) -> Result<(), OpenError> {
    let files: Vec<_> = files.into_iter().map(|(path, why)| MissingFile { path, why }).collect();
    if files.is_empty() { Ok(()) } else { Err(OpenError::MissingFiles { files }) }
}

fn model_name(mp: u64) -> String {
    format!("mp_rank_{mp:02}_model_states.pt")
}

impl<'a> Run<'a> {
    pub(super) fn open(
        folder: &'a Folder,
        path: &'a Path,
        files: &mut FileSet,
        options: &OpenOptions,
    ) -> Result<Self, OpenError> {
        let (models, notes) = open_models(folder, path, files, options)?;
        let all = || models.values().flatten();
        let mut run_args = config::run_args(path, files)?;
        run_args.extend(all().find_map(|model| model.args.clone()).unwrap_or_default());
        let run_args = RunArgs::new(run_args, &options.run_args);

        let content = |what: String| OpenError::Content { path: path.to_path_buf(), what };
        let world = all().filter_map(|model| model.mp_world).max().unwrap_or(1);
        let count = world.max(models.keys().next_back().map_or(0, |last| last + 1));
        if count > LIMITS.ranks {
            let what = "ranks by mp_world_size";
            return Err(content(OverLimit::found(what, LIMITS.ranks, count).to_string()));
        }
        let is_stage3 = !folder.zero_model.is_empty();
        let absent = (0..count).filter(|mp| !models.contains_key(mp)).map(|mp| {
            let name = if is_stage3 {
                format!("zero_pp_rank_0_{}", model_name(mp))
            } else {
                model_name(mp)
            };
            (path.join(name), format!("the checkpoint says mp_world_size={count}"))
        });
        missing(absent)?;

        // A list with a number for every layer, or one for all.
        let experts = |layer: u64| {
            let told = all().find_map(|model| model.state.get("num_experts"));
            let count = match told? {
                PlainValue::List(counts) => {
                    counts.get(usize::try_from(layer).ok()?).or(counts.first()).cloned()?
                }
                one => one.clone(),
            };
            if let PlainValue::Int(count) = count { u64::try_from(count).ok() } else { None }
        };
        let why = || "other experts of the layer are there".to_owned();
        missing(folder.missing_experts(experts).into_iter().map(|name| (path.join(name), why())))?;

        let layer_ranks = folder.layers.keys().map(|(_, tp)| tp + 1).max();
        let degree = all().find_map(|model| model.degrees).map(|(_, tp)| tp);
        let told = layer_ranks.or(degree).or(run_args.size(ArgName::TENSOR_MODEL_PARALLEL_SIZE));
        let tp = told.filter(|tp| *tp > 0 && count % tp == 0).unwrap_or(count);
        if layer_ranks.is_some_and(|ranks| ranks > tp) {
            return Err(content(format!(
                "layer files of {} tensor parallel ranks do not fit {count} model parallel ranks",
                layer_ranks.unwrap_or(0)
            )));
        }
        let has_module = all().any(|model| model.module.is_some());
        let weights = match (folder.layers.is_empty(), is_stage3, has_module) {
            (false, _, _) => Weights::Layers,
            (true, true, _) => Weights::Masters,
            (true, false, true) => Weights::Modules,
            (true, false, false) if folder.universal.is_some() => Weights::Masters,
            (true, false, false) => {
                let name = all().next().map_or_else(String::new, |model| file_name(&model.path));
                let why = format!("{name} holds no module: the weights are in layer files");
                return Err(OpenError::MissingFiles {
                    files: vec![MissingFile { path: path.join("layer_00-model_states.pt"), why }],
                });
            }
        };
        let is_sequential = |name: &str| name.starts_with("sequential.");
        let is_pipeline = weights == Weights::Layers
            || !has_module
            || all().any(|model| {
                let stored = model.module.iter().flatten().map(|(name, _)| name);
                stored.chain(model.params().map(|(name, _)| name)).any(|name| is_sequential(name))
            });
        Ok(Self { folder, path, models, run_args, tp, pp: count / tp, weights, is_pipeline, notes })
    }

    /// The first data parallel rank's model states of every model parallel rank.
    pub(super) fn firsts(&self) -> impl Iterator<Item = (u64, &ModelStates)> {
        self.models.iter().filter_map(|(mp, models)| Some((*mp, models.first()?)))
    }

    pub(super) fn is_stage3(&self) -> bool {
        !self.folder.zero_model.is_empty()
    }

    /// Pipeline stage and tensor parallel rank: the second one counts faster.
    pub(super) fn coord(&self, mp: u64) -> (u64, u64) {
        (mp / self.tp, mp % self.tp)
    }

    /// Reads all layer files, with notes on those that the user lets pass.
    pub(super) fn read_layers(
        &self,
        files: &mut FileSet,
        options: &OpenOptions,
    ) -> Result<(Vec<Layer>, Vec<String>), OpenError> {
        let added = self.folder.layers.iter().map(|(rank, path)| Ok((*rank, add(files, path)?)));
        let added: Vec<((u64, u64), FileId)> = added.collect::<Result<_, OpenError>>()?;
        let files = &*files;
        let read = |((number, tp), file): &((u64, u64), FileId)| {
            let states = BareStates::read(files, *file)?;
            Ok::<_, OpenError>(Layer { number: *number, tp: *tp, states })
        };
        let layers: Vec<Layer> = added.par_iter().map(read).in_order()?;
        let places = layers
            .iter()
            .map(|Layer { number, tp, states }| (format!("layer {number}, tp {tp}"), states));
        let notes = identity::check_bare(places, files, options)?;
        Ok((layers, notes))
    }

    /// The names of the layers, by their keys.
    pub(super) fn layer_names(&self, layers: &[Layer]) -> LayerNames {
        if !self.is_pipeline {
            return LayerNames::default();
        }
        let in_files = layers
            .iter()
            .flat_map(|layer| layer.states.tensors.iter().map(|(key, _)| (layer.number, &**key)));
        let stored = self.firsts().flat_map(|(_, model)| {
            let stored = model.module.iter().flatten().map(|(name, _)| &**name);
            stored.chain(model.params().map(|(name, _)| &**name)).filter_map(split_layer)
        });
        LayerNames::new(in_files.chain(stored))
    }

    /// Layer files that should be there: for every tensor parallel rank, for every layer between the first and the last
    /// of a stack, for every parameter that an optimizer knows.
    pub(super) fn check_layers(
        &self,
        names: &LayerNames,
        layers: &[Layer],
    ) -> Result<Option<Problem>, OpenError> {
        if layers.is_empty() {
            return Ok(None);
        }
        let has_axis = self.folder.layers.values().any(|path| file_name(path).contains("-model_0"));
        let file = |(layer, tp): (u64, u64)| {
            let axis = if has_axis { format!("-model_{tp:02}") } else { String::new() };
            self.path.join(format!("layer_{layer:02}{axis}-model_states.pt"))
        };
        let present: BTreeSet<u64> = layers.iter().map(|layer| layer.number).collect();
        let mut absent: BTreeMap<(u64, u64), String> = BTreeMap::new();
        for layer in &present {
            for tp in (0..self.tp).filter(|tp| !self.folder.layers.contains_key(&(*layer, *tp))) {
                absent
                    .insert((*layer, tp), "other tensor parallel ranks have this layer".to_owned());
            }
        }
        if names.is_neox {
            for layer in names
                .missing(self.run_args.size(ArgName::NUM_LAYERS).filter(|n| *n <= LIMITS.layers))
            {
                let why = "a transformer layer between or after those that are there".to_owned();
                absent.insert((layer, 0), why);
            }
        }
        for (mp, model) in self.firsts() {
            let tp = self.coord(mp).1;
            for (layer, _) in model.params().filter_map(|(name, _)| split_layer(name)) {
                if !present.contains(&layer) {
                    let why =
                        format!("param_shapes of {} lists its parameters", file_name(&model.path));
                    absent.insert((layer, tp), why);
                }
            }
        }
        missing(absent.into_iter().map(|(rank, why)| (file(rank), why)))?;
        Ok(self.check_count(layers, &present, file))
    }

    /// Without ZeRO the optimizer has no names, but it has a number of parameters. Where modules are tied, those of every
    /// stage that has them count, and their layer may have no file.
    fn check_count(
        &self,
        layers: &[Layer],
        present: &BTreeSet<u64>,
        file: impl Fn((u64, u64)) -> PathBuf,
    ) -> Option<Problem> {
        let stages = self.firsts().filter(|(mp, _)| self.coord(*mp).1 == 0);
        let known: Option<usize> = stages.map(|(_, model)| model.optimizer_params).sum();
        let held: usize = layers
            .iter()
            .filter(|layer| layer.tp == 0)
            .map(|layer| layer.states.tensors.len())
            .sum();
        let known = known.filter(|known| *known > held)?;
        let last = present.last().copied().unwrap_or(0);
        let gaps = (0..=last + 1).filter(|layer| !present.contains(layer)).take(8);
        let gaps: Vec<String> = gaps.map(|layer| file_name(&file((layer, 0)))).collect();
        let message = format!(
            "layer files hold {held} tensors, the optimizer knows {known} parameters: missing is one of {}, \
             or several stages count a module that is tied",
            gaps.join(", ")
        );
        Some(Problem::of_file(self.path, message))
    }

    /// The optimizer's partitions of every model parallel rank, in the order of data parallel ranks.
    pub(super) fn read_zero(
        &self,
        files: &mut FileSet,
        options: &OpenOptions,
    ) -> Result<Noted<ZeroStates>, OpenError> {
        let zero = &self.folder.zero;
        let found = zero.keys().map(|(_, dp)| dp + 1).max().unwrap_or(0);
        let file = |mp, dp| self.path.join(self.folder.zero_name(mp, dp));
        let ranks = self.models.keys().flat_map(|mp| (0..found).map(move |dp| (*mp, dp)));
        let absent = ranks.filter(|rank| !zero.contains_key(rank));
        missing(
            absent
                .map(|(mp, dp)| (file(mp, dp), format!("there are {found} partitions of others"))),
        )?;
        let added = zero.iter().map(|(rank, path)| Ok((*rank, add(files, path)?)));
        let added: Vec<((u64, u64), FileId)> = added.collect::<Result<_, OpenError>>()?;
        let files = &*files;
        let read = added.par_iter().map(|(rank, file)| {
            Ok::<_, OpenError>((*rank, (*file, ZeroStates::read(files, *file)?)))
        });
        let read: BTreeMap<(u64, u64), _> = read.in_order()?;
        // Told after what their number says.
        let notes = identity::check_partitions(&read, &self.models, files, options);
        let mut by_rank: BTreeMap<u64, Vec<ZeroStates>> = BTreeMap::new();
        for ((mp, _), (_, states)) in read {
            let content = |what: String| OpenError::Content { path: states.path.clone(), what };
            let declared = states.partitions.iter().max().copied().unwrap_or(found);
            if declared > LIMITS.ranks {
                let what = "ranks by partition_count";
                return Err(content(OverLimit::found(what, LIMITS.ranks, declared).to_string()));
            }
            if states.is_stage3 != self.is_stage3() && self.folder.universal.is_none() {
                return Err(content(
                    "is of another ZeRO stage than the model states beside it".to_owned(),
                ));
            }
            let why = format!("partition_count of {} is {declared}", file_name(&states.path));
            missing((found..declared).map(|dp| (file(mp, dp), why.clone())))?;
            if declared < found {
                let what =
                    format!("{why}, but there are {found} partitions: two saves in one folder");
                return Err(content(what));
            }
            by_rank.entry(mp).or_default().push(states);
        }
        Ok((by_rank, notes?))
    }

    /// `tp2 pp2 dp2 zero1`.
    pub(super) fn layout(&self) -> String {
        let mut text = format!("tp{} pp{}", self.tp, self.pp);
        let partitions = self.folder.zero.keys().map(|(_, dp)| dp + 1);
        if let Some(dp) = partitions.max() {
            text.push_str(&format!(" dp{dp}"));
        }
        let stage = self.firsts().find_map(|(_, model)| {
            let PlainValue::Map(config) = model.state.get("ds_config")? else { return None };
            let PlainValue::Map(zero) = config.get("zero_optimization")? else { return None };
            let PlainValue::Int(stage) = zero.get("stage")? else { return None };
            Some(*stage)
        });
        if let Some(stage) = stage {
            text.push_str(&format!(" zero{stage}"));
        }
        if self.folder.universal.is_some() {
            text.push_str(" universal");
        }
        text
    }
}

fn open_models(
    folder: &Folder,
    path: &Path,
    files: &mut FileSet,
    options: &OpenOptions,
) -> Result<Noted<ModelStates>, OpenError> {
    if let (Some(one), Some(other)) =
        (folder.model.values().next(), folder.zero_model.values().next())
    {
        let what = format!(
            "holds model states of ZeRO-3 ({}) and of another stage ({}): two saves in one folder",
            file_name(other),
            file_name(one)
        );
        return Err(OpenError::Content { path: path.to_path_buf(), what });
    }
    if folder.model.is_empty() && folder.zero_model.is_empty() {
        let why = "the other files of the checkpoint need it".to_owned();
        missing([(path.join(model_name(0)), why)])?;
    }
    let plain = folder.model.iter().map(|(mp, path)| ((*mp, 0), path));
    let zero = folder.zero_model.iter().map(|(rank, path)| (*rank, path));
    let added = plain.chain(zero).map(|(rank, path)| Ok((rank, add(files, path)?)));
    let added: Vec<((u64, u64), FileId)> = added.collect::<Result<_, OpenError>>()?;
    let files = &*files;
    let read = added
        .par_iter()
        .map(|(rank, file)| Ok::<_, OpenError>((*rank, *file, ModelStates::read(files, *file)?)));
    let read: Vec<_> = read.in_order()?;
    let notes = identity::check_models(&read, files, options)?;
    if !folder.zero_model.is_empty() {
        let declared =
            read.iter().filter_map(|(_, _, model)| match model.state.get("dp_world_size") {
                Some(PlainValue::Int(size)) => {
                    u64::try_from(*size).ok().filter(|size| *size <= LIMITS.ranks)
                }
                _ => None,
            });
        let found = folder.zero_model.keys().map(|(_, dp)| dp + 1).max().unwrap_or(0);
        let count = declared.max().unwrap_or(0).max(found);
        let mps: BTreeSet<u64> = folder.zero_model.keys().map(|(mp, _)| *mp).collect();
        let ranks = mps.iter().flat_map(|mp| (0..count).map(move |dp| (*mp, dp)));
        let absent = ranks.filter(|rank| !folder.zero_model.contains_key(rank));
        missing(absent.map(|(mp, dp)| {
            let name = format!("zero_pp_rank_{dp}_{}", model_name(mp));
            (path.join(name), format!("every parameter has a piece on each of {count} ranks"))
        }))?;
    }
    let mut models: BTreeMap<u64, Vec<ModelStates>> = BTreeMap::new();
    for ((mp, _), _, model) in read {
        models.entry(mp).or_default().push(model);
    }
    Ok((models, notes))
}
