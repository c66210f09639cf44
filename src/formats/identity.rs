//! Files that say who they are, against the places they stand in and against each other.
//!
//! A checkpoint of many files is put together by their names alone, so a file that was swapped, copied or left over goes
//! unnoticed unless what it says of itself is held against its name. A format makes a [`Witness`] of every file; what is
//! decided from them is decided here.
//!
//! Proof, and an error:
//! - a file's own rank is another one than its place. (A format says so only where that rank is one of the process that
//!   wrote the file: see `rank_claim` in `megatron_torch/identity.rs` for what converters write.)
//! - a file says other things of the model, the layout or the iteration than the others: the files of one checkpoint are
//!   written by one run in one moment. The value that most of them say is taken for right, so that one stale file is named
//!   and not all others; the file is named whichever of them is wrong.
//! - all of them say another iteration than the folder's name, where the software makes that name of the iteration.
//! - a file bears a sign of another place: a torch file the name under which it was written ([`saved_elsewhere`]), an
//!   optimizer's the masters of another rank's weights (`megatron_torch/masters.rs`).
//! - two files of different places have the same bytes, though each holds parts that no other place has.
//!
//! No proof, and never held against a file: what it does not say; what training makes different on each rank (random
//! states, timers, local ranks, devices, hosts, paths, seeds), which formats leave out of [`Witness::facts`]; what the user
//! sets himself (`--set`). Files swapped between ranks that say the same and bear no sign, as
//! the data files of a distributed checkpoint, cannot be known: their shapes are all there is.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use crate::base::plain::PlainValue;
use crate::names::printable;
use crate::storage::{FileId, FileSet};

use super::error::OpenError;
use super::format::OpenOptions;

/// A file, its place, and what it says of itself.
#[derive(Debug, Default)]
pub(super) struct Witness {
    pub path: PathBuf,
    /// The words for its place, e.g. `tp 1, pp 0`.
    pub place: String,
    /// The words for what it says to be, where that is another place: `it is rank 0 (tp 0, pp 0)`.
    pub claim: Option<String>,
    /// The words for a sign that it is another place's, where it says nothing itself: `was saved as ...`
    /// ([`saved_elsewhere`]).
    pub sign: Option<String>,
    /// Things that all files of a checkpoint say alike, by name, the most telling ones first.
    pub facts: Vec<(String, PlainValue)>,
    /// The file, where some of its contents are at no other place.
    pub unique: Option<FileId>,
}

/// A file that is not what its place makes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignFile {
    /// The file or folder.
    pub path: PathBuf,
    /// The contradiction.
    pub what: String,
}

/// The step that the name of a checkpoint's folder says, where the software makes that name of it.
#[derive(Debug)]
pub(super) struct FolderStep<'a> {
    pub path: &'a Path,
    pub step: u64,
    /// The name of the same thing among [`Witness::facts`].
    pub fact: &'static str,
}

/// Arguments that describe the model, the layout and the run, the same on every rank; names that begin so, where they end
/// in a star. All others are none of a rank's identity: paths, ports, logging, timers and seeds differ where they like.
/// (`megatron/training/arguments.py`, core 0.16.1 and MindSpeed's; of 657 arguments that real runs wrote at TP, PP and EP
/// up to 4, only `rank` and `local_rank` differed between ranks.)
#[rustfmt::skip]
static SHARED: &[&str] = &[
    // The layout.
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_*", "virtual_pipeline_model_parallel_size",
    "transformer_pipeline_model_parallel_size", "model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "expert_parallel", "context_parallel_size", "data_parallel_size",
    "hierarchical_context_parallel_sizes", "sequence_parallel", "use_tp_pp_dp_mapping", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "pipeline_num_transformer_layers", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "account_for_*", "noop_layers", "num_layer_list", "schedules_method",
    "use_distributed_optimizer", "pipe_parallel_size", "num_distributed_optimizer_instances", "gtp_weight_remat_size", "expert_gtp_weight_remat_size",
    // The model.
    "num_layers", "encoder_num_layers", "decoder_num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "num_query_groups", "group_query_attention", "kv_channels", "max_position_embeddings", "seq_length", "encoder_seq_length",
    "decoder_seq_length", "position_embedding_type", "rotary_*", "rope_*", "use_rope_scaling", "normalization", "norm_epsilon",
    "layernorm_epsilon", "apply_layernorm_1p", "swiglu", "quick_geglu", "squared_relu", "openai_gelu", "add_bias_linear",
    "add_qkv_bias", "add_position_embedding", "qk_layernorm", "untie_embeddings_and_output_weights", "vocab_size",
    "padded_vocab_size", "make_vocab_size_divisible_by", "model_type", "spec", "transformer_impl", "use_legacy_models",
    "window_size", "window_attn_skip_freq", "num_experts", "moe_*", "multi_latent_attention",
    "multi_head_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_*", "v_head_dim", "mla_*", "mamba_*", "is_hybrid_model",
    "hybrid_*", "linear_*", "experimental_attention_variant", "mtp_*", "heterogeneous_layers_config_encoded_json",
    "params_dtype", "bf16", "fp16", "fp8",
    // The run.
    "iteration", "consumed_train_samples", "train_iters", "train_samples", "global_batch_size", "micro_batch_size", "optimizer",
    "lr", "min_lr", "lr_*", "weight_decay", "adam_*", "clip_grad",
];

/// The arguments of a run that all of its files say alike, the most telling ones first; `iteration`, at which it began, as
/// `args.iteration`.
pub(super) fn shared_args(args: &BTreeMap<String, PlainValue>) -> Vec<(String, PlainValue)> {
    let place = |name: &str| {
        SHARED.iter().position(|shared| match shared.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == *shared,
        })
    };
    let shared = |(name, value): (&String, &PlainValue)| {
        let place = place(name)?;
        let name = if name == "iteration" { format!("args.{name}") } else { name.clone() };
        Some((place, name, value.clone()))
    };
    let mut args: Vec<_> = args.iter().filter_map(shared).collect();
    args.sort_by_key(|(place, ..)| *place);
    args.into_iter().map(|(_, name, value)| (name, value)).collect()
}

/// The sign that a torch file was written under the name of another place: its archive keeps the name that it had then.
/// `is_other` tells whether two names are of the same scheme and of different places; any other name, as that of a file that
/// was renamed or written to a buffer, proves nothing.
pub(super) fn saved_elsewhere(
    path: &Path,
    saved_as: Option<&str>,
    is_other: impl Fn(&str, &str) -> bool,
) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let saved_as = match name.rsplit_once('.') {
        Some((_, ending)) => format!("{}.{ending}", saved_as?),
        None => saved_as?.to_owned(),
    };
    is_other(name, &saved_as).then(|| format!("was saved as {}", short(&saved_as)))
}

/// The files that contradict their places, the others or the folder's name, in the order of the witnesses.
///
/// # Errors
/// A file cannot be read.
pub(super) fn foreign(
    files: &FileSet,
    witnesses: &[Witness],
    folder: Option<&FolderStep<'_>>,
    options: &OpenOptions,
) -> Result<Vec<ForeignFile>, OpenError> {
    let mut found = Vec::new();
    let mut contradictions: Vec<Vec<String>> = vec![Vec::new(); witnesses.len()];
    let is_given = |name: &str| options.run_args.iter().any(|(given, _)| given == name);
    for name in names(witnesses).filter(|name| !is_given(name)) {
        let votes = Votes::of(witnesses, name);
        let step = folder.filter(|folder| folder.fact == name);
        let right = votes.right(step.map(|folder| folder.step.to_string()).as_deref());
        if let Some(FolderStep { path, step, .. }) = step
            && right != step.to_string()
        {
            let what = format!("its name says {name} {step}, its files say {}", short(right));
            found.push(ForeignFile { path: path.to_path_buf(), what });
        }
        let others = votes.others_say(right);
        for (text, members) in votes.by_text.iter().filter(|(text, _)| *text != right) {
            for &member in members {
                contradictions[member].push(format!("{name} {} where {others}", short(text)));
            }
        }
    }
    let copies = copies(files, witnesses)?;
    for (witness, facts) in witnesses.iter().zip(contradictions) {
        let is_copy = copies.iter().any(|(copy, _)| std::ptr::eq(*copy, witness));
        found.extend(line(witness, facts, is_copy));
    }
    for (copy, original) in copies {
        let original = end_of(&original.path);
        let what = format!("has the same bytes as {original}, in the place of {}", copy.place);
        found.push(ForeignFile { path: copy.path.clone(), what });
    }
    Ok(found)
}

/// The names of all facts, each once, in the order in which they are said.
fn names(witnesses: &[Witness]) -> impl Iterator<Item = &str> {
    let mut seen = HashSet::new();
    let facts = witnesses.iter().flat_map(|witness| &witness.facts);
    facts.map(|(name, _)| name.as_str()).filter(move |name| seen.insert(*name))
}

/// Refuses a checkpoint with foreign files, or gives the notes that tell of them where the user lets them pass.
///
/// # Errors
/// There are some, and they are not let pass.
pub(super) fn refuse(
    files: Vec<ForeignFile>,
    options: &OpenOptions,
) -> Result<Vec<String>, OpenError> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    if !options.allow_foreign_ranks {
        return Err(OpenError::Foreign { files });
    }
    let note = |ForeignFile { path, what }: &ForeignFile| {
        format!("let pass by --allow-foreign-ranks: {}: {what}", path.display())
    };
    let mut notes: Vec<String> = files.iter().take(SHOWN).map(note).collect();
    if files.len() > SHOWN {
        notes.push(format!("let pass by --allow-foreign-ranks: {} more", files.len() - SHOWN));
    }
    Ok(notes)
}

/// Foreign files that are named before the others are counted.
pub(super) const SHOWN: usize = 8;

/// Contradictions of one file that are named.
const FACTS_SHOWN: usize = 3;

/// Characters of a value that are shown.
const VALUE_SHOWN: usize = 60;

/// The witnesses by the value that each says something has.
struct Votes<'a> {
    witnesses: &'a [Witness],
    by_text: BTreeMap<String, Vec<usize>>,
}

impl<'a> Votes<'a> {
    fn of(witnesses: &'a [Witness], name: &str) -> Self {
        let mut by_text: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (at, witness) in witnesses.iter().enumerate() {
            if let Some((_, value)) = witness.facts.iter().find(|(fact, _)| fact == name) {
                by_text.entry(text_of(value)).or_default().push(at);
            }
        }
        Self { witnesses, by_text }
    }

    /// The value that is expected, else the one that most say; of two that as many say, the first one's.
    fn right(&self, expected: Option<&str>) -> &str {
        let votes = |(text, members): (&'_ String, &Vec<usize>)| {
            let is_expected = Some(text.as_str()) == expected;
            (is_expected, members.len(), std::cmp::Reverse(members.first().copied()))
        };
        let most = self.by_text.iter().max_by_key(|(text, members)| votes((text, members)));
        most.map_or("", |(text, _)| text)
    }

    /// The words for those who say the right value.
    fn others_say(&self, right: &str) -> String {
        let members = self.by_text.get(right).map_or(&[][..], Vec::as_slice);
        match members {
            &[one] => {
                format!("{} says {}", end_of(&self.witnesses[one].path), short(right))
            }
            many => format!("{} other files say {}", many.len(), short(right)),
        }
    }
}

/// The line on a file that contradicts its place or the others; the signs of a copy are its original's.
fn line(witness: &Witness, facts: Vec<String>, is_copy: bool) -> Option<ForeignFile> {
    let count = facts.len();
    let mut says: Vec<String> = witness.claim.clone().into_iter().collect();
    says.extend(facts.into_iter().take(FACTS_SHOWN));
    if count > FACTS_SHOWN {
        says.push(format!("{} more such things", count - FACTS_SHOWN));
    }
    let says = (!says.is_empty()).then(|| format!("says {}", says.join(", ")));
    let sign = witness.sign.clone().filter(|_| !is_copy);
    let told: Vec<String> = sign.into_iter().chain(says).collect();
    (!told.is_empty()).then(|| ForeignFile {
        path: witness.path.clone(),
        what: format!("{}, in the place of {}", told.join(", "), witness.place),
    })
}

/// Pairs of files with the same bytes, each with the first of them; those whose claims betray them are left out.
fn copies<'w>(
    files: &FileSet,
    witnesses: &'w [Witness],
) -> Result<Vec<(&'w Witness, &'w Witness)>, OpenError> {
    let mut by_end: BTreeMap<(u64, Vec<u8>), Alike<'_>> = BTreeMap::new();
    let mut found = Vec::new();
    for witness in witnesses.iter().filter(|one| one.claim.is_none()) {
        let Some(file) = witness.unique else { continue };
        let len = files.whole(file).len;
        let end = TAIL.min(len);
        let alike = by_end.entry((len, read(files, file, len - end, end)?)).or_default();
        let mut original = None;
        for (other, first) in alike.iter() {
            if have_same_bytes(files, file, *other)? {
                original = Some(*first);
                break;
            }
        }
        match original {
            Some(original) if original.place != witness.place => found.push((witness, original)),
            Some(_) => {}
            None => alike.push((file, witness)),
        }
    }
    Ok(found)
}

/// Files of one length and end, each with its witness.
type Alike<'w> = Vec<(FileId, &'w Witness)>;

/// Bytes at the end of a file that tell most pairs apart: there a zip archive keeps the sums of its records.
const TAIL: u64 = 4096;

/// Bytes that are held against each other at a time.
const BLOCK: u64 = 1 << 20;

/// Tells whether two files of one length hold the same; most differ in their first block.
fn have_same_bytes(files: &FileSet, one: FileId, other: FileId) -> Result<bool, OpenError> {
    let len = files.whole(one).len;
    let mut at = 0;
    while at < len {
        let block = BLOCK.min(len - at);
        if read(files, one, at, block)? != read(files, other, at, block)? {
            return Ok(false);
        }
        at += block;
    }
    Ok(true)
}

fn read(files: &FileSet, file: FileId, at: u64, len: u64) -> Result<Vec<u8>, OpenError> {
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    files.read_exact_at(file, &mut bytes, at).map_err(OpenError::io(files.path(file)))?;
    Ok(bytes)
}

/// The last two parts of a path: a rank's folder and its file.
fn end_of(path: &Path) -> String {
    let parts: Vec<_> = path.iter().rev().take(2).map(|part| part.to_string_lossy()).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

fn short(text: &str) -> String {
    let shown: String = text.chars().take(VALUE_SHOWN).collect();
    let rest = if shown.len() < text.len() { "..." } else { "" };
    format!("{}{rest}", printable(&shown))
}

/// A value as text; equal values have equal ones.
fn text_of(value: &PlainValue) -> String {
    match value {
        PlainValue::None => "None".to_owned(),
        PlainValue::Bool(true) => "True".to_owned(),
        PlainValue::Bool(false) => "False".to_owned(),
        PlainValue::Int(value) => value.to_string(),
        PlainValue::Float(value) => value.to_string(),
        PlainValue::Text(text) | PlainValue::Opaque(text) => text.clone(),
        PlainValue::List(members) => {
            format!("[{}]", members.iter().map(text_of).collect::<Vec<_>>().join(", "))
        }
        PlainValue::Map(entries) => {
            let entry =
                |(name, value): (&String, &PlainValue)| format!("{name}: {}", text_of(value));
            format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
    }
}
