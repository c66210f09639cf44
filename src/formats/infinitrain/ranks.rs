//! The folders of a step -> a catalog: which ranks there are, what each holds, global names, tied weights.
//!
//! Facts from InfiniTrain 0.6.0 (`infini_train/include/nn/parallel/global.h`: ranks count tensor parallel first, then
//! context and data parallel, then pipeline; `nn/modules/transformer/transformer.cc`: GPT-2 ties its output layer where there is
//! one stage).

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use crate::base::in_order::InOrder;
use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Extent, Origin, Problem, Section};
use crate::formats::error::{MissingShard, OpenError};
use crate::formats::files::add;
use crate::formats::format::OpenOptions;
use crate::formats::identity::{FolderStep, Witness, foreign, refuse};
use crate::formats::probe::Probe;
use crate::formats::roots::{Root, step_behind};
use crate::layout::rules::Rules;
use crate::layout::{
    ArgName, HeadOrder, LayoutError, ParallelLayout, RankCoord, RunArgs, Shard, ShardedModel,
};
use crate::names::index::number;
use crate::names::{self, Name};
use crate::storage::{FileId, FileSet, is_lfs_pointer};

use super::adam::add_adam;
use super::native::{self, NativeError, NativeFile};
use super::rules::{RULES, in_layer, is_buffer, layer_of, unwrapped};
use super::stages::Stages;
use super::trainer_state::{self, TrainerState};
use super::{Content, LM_HEAD, STEPS, WTE, model_file};

/// The number of a rank's folder.
fn rank_number(folder: &str) -> Option<u64> {
    let digits = folder.strip_prefix("rank_")?;
    number(digits).filter(|_| digits.len() >= 6)
}

/// Tells whether a folder has ranks' folders in it.
pub(super) fn are_in(probe: &Probe) -> Result<bool, OpenError> {
    for name in probe.names().filter(|name| rank_number(name).is_some()) {
        if let Some(rank) = probe.child(name)?
            && (rank.has(trainer_state::FILE) || model_file(&rank)?.is_some())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A rank, and what there is of it.
struct Rank {
    coord: RankCoord,
    /// Its folder's name; empty where it is all there is.
    label: String,
    folder: PathBuf,
    model: NativeFile,
    optimizer: Option<NativeFile>,
}

/// The layout of the ranks of a step, and what the run says of itself.
struct Run {
    state: TrainerState,
    state_file: PathBuf,
    run_args: RunArgs,
    world: ParallelLayout,
    /// Ranks that hold the same part of the model.
    replicas: u64,
    /// One of several ranks' files is all there is.
    is_shard: bool,
    problems: Vec<Problem>,
    notes: Vec<String>,
}

/// Reads one file, whatever it is a part of.
pub(super) fn read_single(
    root: &Root,
    file: &Path,
    options: &OpenOptions,
) -> Result<Catalog, OpenError> {
    let folder = file.parent().unwrap_or(Path::new(""));
    // Beside a lone file may lie what belongs to another one.
    let is_folder = !root.probe.is_file();
    let states = is_folder.then(|| (String::new(), folder.to_path_buf()));
    let mut files = FileSet::default();
    let mut run = Run::new(states.into_iter().collect(), &mut files, root, options)?;
    let ParallelLayout { tp, pp, .. } = run.world;
    run.is_shard = tp * pp > 1;
    if run.is_shard {
        run.notes.push(format!("one shard of tp={tp} pp={pp}, compared as the shard that it is"));
        run.world = ParallelLayout { tp: 1, pp: 1, ep: 1, etp: 1, ..run.world };
    }
    let optimizer = if is_folder { optimizer_file(&root.probe) } else { None };
    let rank = RankFiles::add(&mut files, String::new(), folder, file, optimizer)?;
    let rank = rank.read(&files, RankCoord::default(), options)?;
    let mut catalog = run.into_catalog(files, vec![rank], root, options);
    // Nothing beside it says how many ranks there were.
    if !is_folder {
        catalog.origin.extent = Extent::Part;
    }
    Ok(catalog)
}

/// Reads all ranks of a step.
pub(super) fn read_all(root: &Root, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let path = &root.path;
    let folders = rank_folders(&root.probe)?;
    let states = folders.values().map(|name| (name.clone(), path.join(name))).collect();
    let mut files = FileSet::default();
    let mut run = Run::new(states, &mut files, root, options)?;
    if let Some(file) = model_file(&root.probe)? {
        run.notes.push(format!("{}: left out beside rank_* folders", file.display()));
    }
    let found: Vec<u64> = folders.keys().copied().collect();
    let total = run.settle_replicas(&found, options, path)?;
    let mut missing = Vec::new();
    let mut present = Vec::new();
    for number in 0..total {
        let coord = run.coord(number);
        let folder = folders.get(&number).cloned().unwrap_or(format!("rank_{number:06}"));
        let probe = root.probe.child(&folder)?;
        let file = match &probe {
            Some(probe) => model_file(probe)?.map(|file| (probe, file)),
            None => None,
        };
        let folder = path.join(folder);
        match file {
            Some((probe, file)) => {
                let label = format!("rank_{number:06}");
                let optimizer = optimizer_file(probe);
                let rank = RankFiles::add(&mut files, label, &folder, &file, optimizer)?;
                present.push((coord, rank));
            }
            None => missing.push(MissingShard {
                path: folder.join("model.ckpt"),
                rank: coord,
                why: run.sizes_text(options),
            }),
        }
    }
    if !missing.is_empty() {
        return Err(OpenError::MissingShards { shards: missing });
    }
    for (number, folder) in folders.range(total..) {
        let message = format!("is rank {number}, but {}; left out", run.sizes_text(options));
        run.problems.push(Problem::of_file(path.join(folder), message));
    }
    let has_optimizer = present.iter().any(|(_, rank)| rank.optimizer.is_some());
    let ranks: Vec<(FileId, Rank)> = present
        .into_par_iter()
        .map(|(coord, rank)| Ok::<_, OpenError>((rank.model, rank.read(&files, coord, options)?)))
        .in_order()?;
    run.notes.extend(check_contents(&files, &ranks, &run.world, options)?);
    let ranks = ranks.into_iter().map(|(_, rank)| rank).collect();
    let mut catalog = run.into_catalog(files, ranks, root, options);
    if has_optimizer && !options.wants(Section::Optimizer) {
        catalog.origin.unread.insert(Section::Optimizer, None);
    }
    Ok(catalog)
}

/// The ranks' folders by number.
fn rank_folders(probe: &Probe) -> Result<BTreeMap<u64, String>, OpenError> {
    let mut folders = BTreeMap::new();
    for name in probe.names() {
        let Some(number) = rank_number(name) else { continue };
        if let Some(other) = folders.insert(number, name.to_owned()) {
            let what = format!("{name} and {other} are the same rank");
            return Err(OpenError::Content { path: probe.path().to_path_buf(), what });
        }
    }
    Ok(folders)
}

/// The optimizer's file of a rank.
fn optimizer_file(folder: &Probe) -> Option<PathBuf> {
    let mut names = ["optimizer.ckpt", "optimizer.bin", "optimizer.pth"].into_iter();
    names.find(|name| folder.has(name)).map(|name| folder.path().join(name))
}

/// The files of one rank, not yet read.
struct RankFiles {
    label: String,
    folder: PathBuf,
    model: FileId,
    optimizer: Option<FileId>,
}

impl RankFiles {
    fn add(
        files: &mut FileSet,
        label: String,
        folder: &Path,
        model: &Path,
        optimizer: Option<PathBuf>,
    ) -> Result<Self, OpenError> {
        let model = add(files, model)?;
        let optimizer = optimizer.map(|path| add(files, &path)).transpose()?;
        Ok(Self { label, folder: folder.to_path_buf(), model, optimizer })
    }

    fn read(
        self,
        files: &FileSet,
        coord: RankCoord,
        options: &OpenOptions,
    ) -> Result<Rank, OpenError> {
        let model = read_native(files, self.model)?;
        let optimizer = self.optimizer.filter(|_| options.wants(Section::Optimizer));
        let optimizer = optimizer.map(|file| read_native(files, file)).transpose()?;
        Ok(Rank { coord, label: self.label, folder: self.folder, model, optimizer })
    }
}

fn read_native(files: &FileSet, file: FileId) -> Result<NativeFile, OpenError> {
    let path = files.path(file);
    let refuse =
        |what: &str| Err(OpenError::Content { path: path.to_path_buf(), what: what.to_owned() });
    let head = head(files, file).map_err(OpenError::io(path))?;
    let kind = match Content::of(&head) {
        Some(Content::Native(kind)) => kind,
        Some(Content::BigEndian) => {
            return refuse(
                "written by a big-endian machine, which InfiniTrain's files do not allow for",
            );
        }
        Some(Content::LlmC(_)) => {
            return refuse("an llm.c file, where InfiniTrain's own was expected");
        }
        None if files.whole(file).len < 4 => return refuse("cut off inside its first 4 bytes"),
        None if is_lfs_pointer(&head) => {
            return refuse("this is a git-lfs pointer, not the file itself; run git lfs pull");
        }
        None => return refuse("does not begin with CKPT, so it is no file of InfiniTrain's"),
    };
    native::read(files, file, kind).map_err(|stop| match stop {
        NativeError::Io(error) => OpenError::io(path)(error),
        stop => OpenError::Content { path: path.to_path_buf(), what: stop.to_string() },
    })
}

/// The first bytes of a file.
pub(super) fn head(files: &FileSet, file: FileId) -> io::Result<Vec<u8>> {
    let len = usize::try_from(files.whole(file).len.min(64)).map_err(io::Error::other)?;
    let mut head = vec![0; len];
    files.read_exact_at(file, &mut head, 0)?;
    Ok(head)
}

impl Run {
    /// Reads what the first of these folders says of the run; others that say something else are refused.
    fn new(
        folders: Vec<(String, PathBuf)>,
        files: &mut FileSet,
        root: &Root,
        options: &OpenOptions,
    ) -> Result<Self, OpenError> {
        let mut states = Vec::new();
        let mut problems = Vec::new();
        let mut without = Vec::new();
        let several = folders.len() > 1;
        for (label, folder) in folders {
            match trainer_state::read(&folder, files) {
                Ok(Some(state)) => states.push((label, folder, state)),
                Ok(None) => without.push(label),
                Err(error) => {
                    problems.push(Problem::of_file(folder.join(trainer_state::FILE), error));
                }
            }
        }
        let mut notes = Vec::new();
        if let (Some(first), false) = (without.first(), states.is_empty()) {
            let count = without.len();
            notes.push(format!("no {} in {count} folders: {first}, ...", trainer_state::FILE));
        }
        notes.extend(check_states(&states, root, options)?);
        let (state_file, state) =
            states.into_iter().next().map_or_else(Default::default, |(_, folder, state)| {
                (folder.join(trainer_state::FILE), state)
            });
        let run_args = RunArgs::new(trainer_state::run_args(&state), &options.run_args);
        let in_layout = |source| OpenError::Layout { path: root.path.clone(), source };
        for arg in [ArgName::TENSOR_MODEL_PARALLEL_SIZE, ArgName::PIPELINE_MODEL_PARALLEL_SIZE] {
            match run_args.size(arg) {
                None if several && state.is_empty() => {
                    return Err(in_layout(LayoutError::ArgMissing { arg }));
                }
                Some(0) => {
                    let reason = "no run has so few ranks";
                    return Err(in_layout(LayoutError::Refused { arg, reason }));
                }
                _ => {}
            }
        }
        let world = ParallelLayout::new(&[], &run_args).map_err(in_layout)?;
        Ok(Self {
            state,
            state_file,
            run_args,
            world,
            replicas: 1,
            is_shard: false,
            problems,
            notes,
        })
    }

    /// Finds the number of ranks that hold the same; returns the number of all ranks.
    fn settle_replicas(
        &mut self,
        found: &[u64],
        options: &OpenOptions,
        path: &Path,
    ) -> Result<u64, OpenError> {
        let parts = self.world.tp * self.world.pp;
        let size = |name| trainer_state::integer(&self.state, name).unwrap_or(1).max(1);
        let said = size("ddp_size").checked_mul(size("cp_size"));
        self.replicas = if self.state.is_empty() || is_given(options) {
            found.last().map_or(1, |last| (last / parts).saturating_add(1))
        } else {
            said.unwrap_or(u64::MAX)
        };
        let total = parts.checked_mul(self.replicas).filter(|&total| total <= LIMITS.ranks);
        total.ok_or_else(|| OpenError::Content {
            path: path.to_path_buf(),
            what: format!("{}, more than the limit of {}", self.sizes_text(options), LIMITS.ranks),
        })
    }

    fn coord(&self, rank: u64) -> RankCoord {
        let tp = rank % self.world.tp;
        let pp = rank / self.world.tp / self.replicas;
        RankCoord { tp, pp, vp: 0, ep: 0 }
    }

    fn sizes_text(&self, options: &OpenOptions) -> String {
        let who = if is_given(options) { "--set says" } else { "trainer_state.json says" };
        let ParallelLayout { tp, pp, .. } = self.world;
        format!(
            "{who} tp={tp} pp={pp}, which with dp={} makes {} ranks",
            self.replicas,
            tp.saturating_mul(pp).saturating_mul(self.replicas)
        )
    }

    fn into_catalog(
        mut self,
        files: FileSet,
        ranks: Vec<Rank>,
        root: &Root,
        options: &OpenOptions,
    ) -> Catalog {
        let mut layout = format!("tp{} pp{}", self.world.tp, self.world.pp);
        if self.replicas > 1 {
            layout.push_str(&format!(" dp{}", self.replicas));
        }
        let stages = self.number_layers(&ranks);
        let origin = Origin {
            format: super::FORMAT.name,
            layout,
            iteration: trainer_state::integer(&self.state, "global_step").or(root.iteration),
            shards: ranks.len(),
            naming: names::Naming::InfiniTrain,
            extent: if self.is_shard { Extent::Part } else { Extent::Whole },
            ..Origin::default()
        };
        let catalog = CatalogBuilder::new(origin, files)
            .with_rules(&options.rules)
            .of_shard(self.world.tp != self.world.declared_tp);
        let mut naming = RankNaming { stages, shards: Vec::new(), catalog };
        naming.catalog.notes(self.notes);
        naming.catalog.problems(self.problems);
        let mut optimizers = Vec::new();
        let has_optimizer = ranks.iter().any(|rank| rank.optimizer.is_some());
        for rank in ranks {
            naming.add(rank.coord, rank.model);
            match rank.optimizer {
                Some(optimizer) => optimizers.push((rank.label, optimizer)),
                None if has_optimizer => {
                    let message = "missing, where other ranks have one";
                    let path = rank.folder.join("optimizer.ckpt");
                    naming.catalog.problem(Problem::of_file(path, message));
                }
                None => {}
            }
        }
        let RankNaming { mut catalog, shards, .. } = naming;
        let rules = Rules::of_table(RULES, &options.rules);
        let model = ShardedModel {
            layout: &self.world,
            args: &self.run_args,
            order: HeadOrder::HeadsFirst,
            rules: &rules,
        };
        let assembly = model.assemble_named(shards);
        let of_tensor = |(name, error): (String, LayoutError)| Problem::of_tensor(name, error);
        catalog.problems(assembly.problems.into_iter().map(of_tensor));
        catalog.lost_copies(assembly.lacking);
        catalog.add_state(&self.state_file, self.state);
        if options.wants(Section::Model) {
            catalog.add_merged(assembly.tensors);
            let is_whole = !self.is_shard && self.world.pp == 1;
            tie_output_layer(&mut catalog, is_whole, &self.run_args);
        }
        add_adam(&mut catalog, optimizers);
        catalog.finish()
    }

    /// The layers of each stage, where there are several stages; notes what nobody says.
    fn number_layers(&mut self, ranks: &[Rank]) -> Option<Stages> {
        const VPP: ArgName = ArgName::VIRTUAL_PIPELINE_MODEL_PARALLEL_SIZE;
        let mut counts: BTreeMap<u64, u64> = (0..self.world.pp).map(|stage| (stage, 0)).collect();
        for rank in ranks {
            let names = rank.model.tensors.iter().map(|(name, _)| unwrapped(name));
            let layers = names.filter(|name| !is_buffer(name)).filter_map(layer_of);
            let count = layers.map(|(index, _)| index.saturating_add(1)).max().unwrap_or(0);
            let known = counts.entry(rank.coord.pp).or_default();
            *known = count.max(*known);
        }
        let counts: Vec<u64> = counts.into_values().collect();
        let found = counts.iter().fold(0, |sum: u64, &count| sum.saturating_add(count));
        let declared = self.run_args.size(ArgName::NUM_LAYERS).filter(|&layers| layers > 0);
        if self.is_shard || found == 0 || found > LIMITS.layers {
            return None;
        }
        let vpp = self.run_args.size(VPP).map_or(1, |vpp| vpp.clamp(1, LIMITS.chunks));
        let stages = Stages { layers: declared.unwrap_or(found), pp: self.world.pp, vpp };
        let wanted: Vec<u64> = (0..self.world.pp).map(|stage| stages.size(stage)).collect();
        if counts != wanted {
            let layers = stages.layers;
            let mut message =
                format!("the stages hold {counts:?} layers, where {layers} layers make {wanted:?}");
            if found != layers {
                message.push_str("; if nothing is missing, say so with --set num_layers=");
                message.push_str(&found.to_string());
            }
            self.problems.push(Problem::of_whole(message));
        }
        if self.world.pp > 1
            && self.run_args.get(VPP).is_none()
            && counts.iter().any(|&count| count > 1)
        {
            self.notes.push(format!(
                "no file says how many chunks of layers a stage has: took them for one; \
                 if there were more, say --set {VPP}=NUMBER"
            ));
        }
        Some(stages)
    }
}

/// The entries on which all ranks must agree.
const SHARED: [&str; 8] =
    ["n_layer", "n_head", "n_kv_head", "n_embd", "tp_size", "pp_size", "ddp_size", "global_step"];

/// Refuses ranks that say something else of the run than the others, or another step than the folder, or notes that they are
/// let pass. No file says its own rank.
fn check_states(
    states: &[(String, PathBuf, TrainerState)],
    root: &Root,
    options: &OpenOptions,
) -> Result<Vec<String>, OpenError> {
    let witness = |(label, folder, state): &(String, PathBuf, TrainerState)| Witness {
        path: folder.join(trainer_state::FILE),
        place: if label.is_empty() { root.probe.name() } else { label.clone() },
        claim: None,
        facts: SHARED
            .iter()
            .filter_map(|key| Some(((*key).to_owned(), state.get(*key)?.clone())))
            .collect(),
        ..Witness::default()
    };
    let witnesses: Vec<Witness> = states.iter().map(witness).collect();
    let says = |witness: &Witness| witness.facts.iter().any(|(name, _)| name == STEP);
    let step = step_behind(STEPS, &root.probe.name()).filter(|_| witnesses.iter().any(says));
    let folder = step.map(|step| FolderStep { path: &root.path, step, fact: STEP });
    refuse(foreign(&FileSet::default(), &witnesses, folder.as_ref(), options)?, options)
}

/// Refuses files that are there twice, or that hold what only another stage has, or notes that they are let pass.
fn check_contents(
    files: &FileSet,
    ranks: &[(FileId, Rank)],
    world: &ParallelLayout,
    options: &OpenOptions,
) -> Result<Vec<String>, OpenError> {
    let holds = |rank: &Rank, name: &str| {
        rank.model.tensors.iter().any(|(stored, _)| unwrapped(stored) == name)
    };
    let ends = [(0, "first", WTE), (world.pp - 1, "last", LAST_NORM)];
    let witness = |(file, rank): &(FileId, Rank)| {
        let mut claims =
            ends.iter().filter(|(stage, _, name)| rank.coord.pp != *stage && holds(rank, name));
        let claim = claims
            .next()
            .map(|(_, which, name)| format!("by its {name} that it is of the {which} stage"));
        Witness {
            path: files.path(*file).to_path_buf(),
            place: world.place_text(rank.coord),
            claim,
            facts: Vec::new(),
            unique: Some(*file),
            ..Witness::default()
        }
    };
    let witnesses: Vec<Witness> = ranks.iter().map(witness).collect();
    refuse(foreign(files, &witnesses, None, options)?, options)
}

/// The norm behind the last layer.
const LAST_NORM: &str = "transformer.ln_f.weight";

/// The entry with the step.
const STEP: &str = "global_step";

/// Says whether the command line gives the sizes of the layout.
fn is_given(options: &OpenOptions) -> bool {
    let sizes = [ArgName::TENSOR_MODEL_PARALLEL_SIZE, ArgName::PIPELINE_MODEL_PARALLEL_SIZE];
    options.run_args.iter().any(|(name, value)| {
        sizes.iter().any(|size| size.as_str() == name) && *value != PlainValue::None
    })
}

/// Gives every rank's tensors the names that they have in the model.
struct RankNaming<'a> {
    stages: Option<Stages>,
    shards: Vec<(Name, Shard)>,
    catalog: CatalogBuilder<'a>,
}

impl RankNaming<'_> {
    fn add(&mut self, rank: RankCoord, file: NativeFile) {
        self.catalog.problems(file.problems);
        let mut known: HashMap<Name, Arc<str>> = HashMap::new();
        for (stored_name, tensor) in file.tensors {
            let name = unwrapped(&stored_name);
            if is_buffer(name) {
                self.catalog.origin.left_out += 1;
                continue;
            }
            let mut problem = |message: String| {
                let file = self.catalog.files().path(tensor.storage().file).to_path_buf();
                let problem = Problem::of_tensor(stored_name.to_string(), message);
                self.catalog.problem(problem.in_file(file));
            };
            let name = match (layer_of(name), self.stages) {
                (Some((index, rest)), Some(stages)) => match stages.global(rank.pp, index) {
                    Some(global) => in_layer(global, rest),
                    None => {
                        problem(format!("layer {index} of a stage that should have fewer"));
                        continue;
                    }
                },
                _ => name.to_owned(),
            };
            let name = Name::new(name);
            if let Some(other) = known.insert(name.clone(), Arc::clone(&stored_name)) {
                problem(format!("also stored as {other} on the same rank"));
                continue;
            }
            let shard = Shard { name: stored_name, rank, tensor, is_shape_only: false };
            self.shards.push((name, shard));
        }
    }
}

/// GPT-2 alone has position embeddings, and with one stage it ties its output layer to the word embeddings, and writes
/// both; on several stages the two go their own ways.
fn tie_output_layer(catalog: &mut CatalogBuilder<'_>, is_whole: bool, run_args: &RunArgs) {
    let is_untied =
        run_args.get(ArgName::UNTIE_EMBEDDINGS_AND_OUTPUT_WEIGHTS) == Some(&PlainValue::Bool(true));
    let has = |name| catalog.has(&Name::new(name));
    let is_gpt2 = has("transformer.wpe.weight") && has(WTE) && has(LM_HEAD);
    if !is_gpt2 || is_untied || !is_whole {
        return;
    }
    catalog.tie(Name::new(LM_HEAD), Name::new(WTE));
}
