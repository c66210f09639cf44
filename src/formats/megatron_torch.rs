//! Megatron-LM and MindSpeed `torch` checkpoints: a folder a rank, `model_optim_rng.pt` in each.
//!
//! Facts from Megatron-LM v1.0 to core_v0.19 (`megatron/training/checkpointing.py`: `get_checkpoint_name`,
//! `generate_state_dict`, `save_checkpoint`) and MindSpeed (`core/multi_modal/dist_train`).

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use crate::catalog::{Catalog, Entry, Origin, Problem, Section};
use crate::io::{FileId, FileSet};
use crate::layout::rules::Rules;
use crate::layout::{
    Fact, Facts, HeadOrder, LayoutError, Naming, RankCoord, RankName, Shard, World, assemble,
};
use crate::limits::LIMITS;
use crate::names::{Name, printable};
use crate::tensor::StoredTensor;
use crate::torch::{TorchFile, Value, ValueId};

use super::state::{facts_of, state_at};
use super::torch_file::key_text;
use super::walk::{Bounds, Excess, joined};
use super::{Format, Located, MissingShard, OpenError, OpenOptions};

/// `megatron-torch`: `--ckpt-format torch`, and all there was before it had a name.
pub(super) const FORMAT: Format = Format { name: "megatron-torch", detect, read };

/// The model file of a rank, by era: `model_rng.pt` where the optimizer had folders of its own (2022-03 to 2023-05).
const MODEL_FILES: [&str; 2] = ["model_optim_rng.pt", "model_rng.pt"];

fn detect(path: &Path) -> bool {
    if model_file(path).is_some() {
        return true;
    }
    let names = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| RankName::parse(&name).is_some() || is_dist_train(&name))
}

/// The model file of a rank: whatever is in its place. What cannot be read there, or not even
/// looked at, is no reason to go on without the rank.
fn model_file(folder: &Path) -> Option<PathBuf> {
    let is_there = |path: &PathBuf| match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    };
    MODEL_FILES.iter().map(|name| folder.join(name)).find(is_there)
}

/// MindSpeed's multimodal training puts several models side by side: `mp_{model}_rank_TT`.
fn is_dist_train(folder: &str) -> bool {
    let model = folder.strip_prefix("mp_").and_then(|rest| rest.split_once("_rank_"));
    model.is_some_and(|(model, _)| !model.is_empty())
}

/// Whether a file's top level is that of a Megatron rank.
pub(super) fn is_megatron(torch: &TorchFile) -> bool {
    let has = |key| torch.values().dict_get(torch.root(), key).is_some();
    (has("model") || has("model0"))
        && ["args", "checkpoint_version", "iteration"].into_iter().any(has)
}

fn read(located: &Located, options: &OpenOptions) -> Result<Catalog, OpenError> {
    if let Some(path) = model_file(&located.path) {
        let mut files = FileSet::default();
        let file = add(&mut files, &path)?;
        let torch = open(&files, file)?;
        return read_single(located, files, file, &torch, options);
    }
    let mut files = FileSet::default();
    let folders = rank_folders(&located.path, &mut files)?;
    let opened: Vec<RankFile> = folders
        .par_iter()
        .enumerate()
        .map(|(index, folder)| {
            let mut rank = RankFile::read(&files, folder.file, &open(&files, folder.file)?);
            if index > 0 {
                // The run says the same of itself in every file.
                rank.state.clear();
            }
            Ok(rank)
        })
        .collect::<Result<_, OpenError>>()?;
    let args = opened.iter().find_map(|rank| rank.args.clone()).unwrap_or_default();
    let facts = Facts::new(args, &options.facts);

    let naming = naming(located, &folders, &opened, &facts)?;
    let coords: Vec<RankCoord> = folders.iter().map(|folder| naming.coord(&folder.name)).collect();
    let in_layout = |source| OpenError::Layout { path: located.path.clone(), source };
    let world = World::new(&coords, &facts).map_err(in_layout)?;
    let present: BTreeSet<RankCoord> = coords.iter().copied().collect();
    check_present(located, &world, naming, &present, &facts, options)?;

    let mut ranks = Ranks { located, files, world, facts, notes: Vec::new() };
    ranks.note_sizes();
    Ok(ranks.into_catalog(coords.into_iter().zip(opened).collect(), options))
}

/// One rank's file on its own, looked at as if it were the whole.
pub(super) fn read_single(
    located: &Located,
    files: FileSet,
    file: FileId,
    torch: &TorchFile,
    options: &OpenOptions,
) -> Result<Catalog, OpenError> {
    let rank = RankFile::read(&files, file, torch);
    let mut facts = Facts::new(rank.args.clone().unwrap_or_default(), &options.facts);
    let whole = World::new(&[RankCoord::default()], &facts);
    let world = World::single(&facts)
        .map_err(|source| OpenError::Layout { path: located.path.clone(), source })?;
    facts.forget_other_stages();
    let mut notes = Vec::new();
    if let Ok(whole) = whole
        && whole.tp * whole.pp * whole.ep > 1
    {
        let sizes = sizes_text(&whole);
        notes.push(format!("one shard of {sizes}, compared as the shard that it is"));
    }
    let ranks = Ranks { located, files, world, facts, notes };
    Ok(ranks.into_catalog(vec![(RankCoord::default(), rank)], options))
}

/// A rank's folder and the model file in it.
struct RankFolder {
    name: RankName,
    file: FileId,
}

fn add(files: &mut FileSet, path: &Path) -> Result<FileId, OpenError> {
    files.add(path).map_err(|source| OpenError::Io { path: path.to_path_buf(), source })
}

fn open(files: &FileSet, file: FileId) -> Result<TorchFile, OpenError> {
    TorchFile::open(files, files.whole(file))
        .map_err(|source| OpenError::Torch { path: files.path(file).to_path_buf(), source })
}

/// The folders that hold a model file, in the order of their ranks. One without is an optimizer's and no shard.
fn rank_folders(path: &Path, files: &mut FileSet) -> Result<Vec<RankFolder>, OpenError> {
    let io_error = |source| OpenError::Io { path: path.to_path_buf(), source };
    let mut found: BTreeMap<RankName, String> = BTreeMap::new();
    for entry in std::fs::read_dir(path).map_err(io_error)? {
        let text = entry.map_err(io_error)?.file_name().to_string_lossy().into_owned();
        if is_dist_train(&text) {
            let what = format!(
                "{} is one of several models of a multimodal run (MindSpeed dist_train), \
                 whose ranks have numbers of their own; compare the rank folders one by one",
                printable(&text)
            );
            return Err(OpenError::Content { path: path.to_path_buf(), what });
        }
        let Some(name) = RankName::parse(&text) else { continue };
        if model_file(&path.join(&text)).is_none() {
            continue;
        }
        if let Some(other) = found.insert(name, text.clone()) {
            let what = format!("{text} and {other} are the same rank");
            return Err(OpenError::Content { path: path.to_path_buf(), what });
        }
    }
    if found.is_empty() {
        return Err(OpenError::Unrecognized {
            path: path.to_path_buf(),
            seems: None,
            looked_for: "model_optim_rng.pt in the mp_rank_* folders",
        });
    }
    let folder = |(name, text): (RankName, String)| {
        let path = model_file(&path.join(&text)).unwrap_or_default();
        Ok(RankFolder { name, file: add(files, &path)? })
    };
    found.into_iter().map(folder).collect()
}

/// What the numbers of the folders mean; where neither their form nor `args` tells, what is in them does:
/// expert parallel ranks hold the same dense layers, pipeline stages do not.
fn naming(
    located: &Located,
    folders: &[RankFolder],
    opened: &[RankFile],
    facts: &Facts,
) -> Result<Naming, OpenError> {
    let names: Vec<RankName> = folders.iter().map(|folder| folder.name.clone()).collect();
    let told = Naming::of(&names, facts)
        .map_err(|source| OpenError::Layout { path: located.path.clone(), source })?;
    if let Some(naming) = told {
        return Ok(naming);
    }
    let dense: BTreeSet<BTreeSet<&str>> = opened.iter().map(RankFile::dense_names).collect();
    Ok(if dense.len() == 1 && folders.len() > 1 { Naming::TpEp } else { Naming::TpPp })
}

fn check_present(
    located: &Located,
    world: &World,
    naming: Naming,
    present: &BTreeSet<RankCoord>,
    facts: &Facts,
    options: &OpenOptions,
) -> Result<(), OpenError> {
    let missing = world.missing(present);
    if missing.is_empty() {
        return Ok(());
    }
    let says = match (options.facts.is_empty(), facts.are_known()) {
        (false, _) => "the checkpoint and --set say",
        (true, true) => "the checkpoint says",
        (true, false) => "the other folders make it",
    };
    let has_experts = world.ep > 1 || facts.size("num_experts").is_some_and(|count| count > 0);
    let hint = if has_experts && world.etp < world.tp {
        "; Megatron-Core 0.10 to 0.18.0 never writes some of them in this layout"
    } else if world.ep > 1 && facts.get("expert_tensor_parallel_size").is_none() {
        "; if experts are not split like dense layers, say --set expert_tensor_parallel_size=1"
    } else {
        ""
    };
    let shards = missing.into_iter().map(|(rank, part)| {
        let naming = naming.with_axes(world);
        let path = located.path.join(naming.folder(rank)).join(MODEL_FILES[0]);
        MissingShard {
            path,
            rank,
            why: format!("{says} {} ({part} need it{hint})", sizes_text(world)),
        }
    });
    Err(OpenError::MissingShards { shards: shards.collect() })
}

/// `tp=2 pp=2 ep=4 etp=1`.
fn sizes_text(world: &World) -> String {
    let mut text = format!("tp={}", world.tp);
    let axes = [("pp", world.pp, 1), ("ep", world.ep, 1), ("etp", world.etp, world.tp)];
    for (axis, size, usual) in axes {
        if size != usual {
            text.push_str(&format!(" {axis}={size}"));
        }
    }
    text
}

/// What one rank's file holds.
struct RankFile {
    path: PathBuf,
    args: Option<BTreeMap<String, Fact>>,
    iteration: Option<u64>,
    version: Option<f64>,
    /// What the run says of itself, `args` apart.
    state: BTreeMap<String, Fact>,
    /// By virtual pipeline stage.
    chunks: BTreeMap<u64, Vec<(Arc<str>, StoredTensor)>>,
    left_out: usize,
    problems: Vec<Problem>,
}

impl RankFile {
    fn read(files: &FileSet, file: FileId, torch: &TorchFile) -> Self {
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
            let mut walk = Walk { torch, bounds, left_out: 0, tensors: Vec::new() };
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

    fn dense_names(&self) -> BTreeSet<&str> {
        let names = self.chunks.values().flatten().map(|(name, _)| &**name);
        names.filter(|name| !name.contains("experts.")).collect()
    }
}

/// Everything at the top but models, optimizers and `args`.
fn state_at_top(torch: &TorchFile) -> BTreeMap<String, Fact> {
    state_at(torch, torch.root(), |key| {
        chunk_number(key).is_none()
            && !key.ends_with("_model")
            && key != "optimizer"
            && key != "args"
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

/// Collects the tensors of a nest of dicts under dotted names.
struct Walk<'a> {
    torch: &'a TorchFile,
    bounds: &'a mut Bounds,
    left_out: usize,
    tensors: Vec<(Arc<str>, StoredTensor)>,
}

impl Walk<'_> {
    fn collect(&mut self, name: &str, id: ValueId, depth: usize) -> Result<(), Excess> {
        self.bounds.enter(name, depth)?;
        let values = self.torch.values();
        let is_extra_state =
            name.rsplit('.').next().is_some_and(|last| last.starts_with("_extra_state"));
        if is_extra_state {
            self.left_out += 1;
            return Ok(());
        }
        match self.torch.tensor(id) {
            Ok(Some(tensor)) => {
                self.tensors.push((name.into(), tensor));
                return Ok(());
            }
            Err(error) => {
                self.bounds.problem(name, error);
                return Ok(());
            }
            Ok(None) => {}
        }
        if let Some(members) = values.mapping(id) {
            for (key, member) in members {
                let name = joined(name, &key_text(self.torch, key));
                self.collect(&name, member, depth + 1)?;
            }
            return Ok(());
        }
        match values.get(id) {
            Value::Call(_) => {
                let class = values.class_name(id).unwrap_or_else(|| "an object".to_owned());
                let message = format!("holds {class}, which is no tensor that can be read");
                self.bounds.problem(name, message);
            }
            _ => self.left_out += 1,
        }
        Ok(())
    }
}

/// All ranks of one checkpoint, on the way to a catalog.
struct Ranks<'a> {
    located: &'a Located,
    files: FileSet,
    world: World,
    facts: Facts,
    notes: Vec<String>,
}

impl Ranks<'_> {
    /// Where more ranks are there than `args` says, they are taken for what they are.
    fn note_sizes(&mut self) {
        let sizes = [
            ("tensor_model_parallel_size", self.world.tp),
            ("pipeline_model_parallel_size", self.world.pp),
            ("expert_model_parallel_size", self.world.ep),
        ];
        for (fact, found) in sizes {
            if let Some(declared) = self.facts.size(fact).filter(|&declared| declared < found) {
                self.notes
                    .push(format!("args says {fact}={declared}, the folders make it {found}"));
            }
        }
    }

    fn into_catalog(self, ranks: Vec<(RankCoord, RankFile)>, options: &OpenOptions) -> Catalog {
        let Ranks { located, files, world, facts, notes } = self;
        let chunks: BTreeSet<u64> =
            ranks.iter().flat_map(|(_, rank)| rank.chunks.keys().copied()).collect();
        let iteration = ranks.iter().find_map(|(_, rank)| rank.iteration).or(located.iteration);
        let order = HeadOrder::of_version(ranks.iter().find_map(|(_, rank)| rank.version));
        let mut shards = Vec::new();
        let mut problems = Vec::new();
        let mut left_out = 0;
        let shard_files = ranks.len();
        let mut state = BTreeMap::new();
        for (coord, rank) in ranks {
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
                let shard = |(name, tensor)| Shard { name, rank, tensor };
                shards.extend(tensors.into_iter().map(shard));
            }
        }
        let rules = Rules::new(&options.rules);
        let assembly = assemble(shards, &world, &facts, order, &rules);
        let origin = Origin {
            format: FORMAT.name,
            layout: layout_text(&world, chunks.len()),
            iteration,
            shards: shard_files,
            left_out: left_out + assembly.buffers,
            ..Origin::default()
        };
        let mut catalog = Catalog::new(origin, files);
        catalog.notes = notes;
        catalog.problems = problems;
        state.extend(facts.of_run().map(|args| ("args".to_owned(), Fact::Map(args))));
        catalog.state = state;
        let of_tensor = |(name, error): (String, LayoutError)| Problem::of_tensor(name, &error);
        catalog.problems.extend(assembly.problems.into_iter().map(of_tensor));
        let mut unruled = Vec::new();
        let model = if options.wants(Section::Model) { assembly.tensors } else { BTreeMap::new() };
        for (name, merged) in model {
            if merged.has_no_rule {
                unruled.push(name.to_string());
            }
            // The rows of a shard on its own are not all there are, so fewer of them are no padding.
            let is_vocab = merged.is_vocab && world.tp == world.declared_tp;
            catalog.insert(name, Entry { tensor: merged.tensor, is_vocab });
        }
        if let Some(first) = unruled.first() {
            catalog.notes.push(format!(
                "no sharding rule for {} names, taken whole from their only shard: {first}, ...",
                unruled.len()
            ));
        }
        for rule in &options.rules {
            if !catalog.tensors.keys().any(|name| rule.matches(name.as_str())) {
                catalog.notes.push(format!("--rule {rule}: no name ends so"));
            }
        }
        tie_output_layer(&mut catalog, assembly.tied_copies, &facts);
        catalog
    }
}

/// With tied weights the output layer is the word embeddings; the last of several stages keeps a copy.
pub(super) fn tie_output_layer(
    catalog: &mut Catalog,
    copies: BTreeMap<Name, crate::tensor::LogicalTensor>,
    facts: &Facts,
) {
    let output = Name::new("output_layer.weight");
    let embedding = Name::new("embedding.word_embeddings.weight");
    let mut copy = copies.into_values().next();
    if copy.is_none() && (!facts.are_weights_tied() || catalog.tensors.contains_key(&output)) {
        return;
    }
    if copy.is_some() && facts.size("mtp_num_layers").is_some_and(|layers| layers > 0) {
        // The stage that predicts further tokens has its own copy; this one is not kept up (Megatron-LM
        // `language_module.py`), so it says nothing.
        catalog
            .notes
            .push("left out a copy of the tied output layer that training does not use".into());
        copy = None;
    }
    catalog.tie(output, embedding, copy);
}

fn layout_text(world: &World, chunks: usize) -> String {
    let mut text = format!("tp{} pp{}", world.tp, world.pp);
    if chunks > 1 {
        text.push_str(&format!(" vp{chunks}"));
    }
    if world.ep > 1 || world.etp != world.tp {
        text.push_str(&format!(" ep{}", world.ep));
    }
    if world.etp != world.tp {
        text.push_str(&format!(" etp{}", world.etp));
    }
    text
}
