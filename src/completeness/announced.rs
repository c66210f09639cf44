//! What a checkpoint announces: numbers of layers and experts, what tells layers apart, each with the words for who says so.
//!
//! Facts from Megatron-LM core_v0.4 to 0.19 (`megatron/training/arguments.py`, `core/transformer/transformer_config.py`),
//! MindSpeed-LLM 2.x (`mindspeed_llm/features_manager`), gpt-neox 2.0 (`megatron/neox_arguments`), transformers 4 and 5
//! (`configuration_*.py`), InfiniTrain 0.6.0.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, StateKind};
use crate::names::Naming;

use super::stacks::Stack;

type Entries = BTreeMap<String, PlainValue>;

/// Keys for the number of layers of the only list there is.
const LAYERS: [&str; 7] =
    ["num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks", "depth", "layers"];
/// The same of a decoder, and of an encoder, beside the other.
const DECODER_LAYERS: [&str; 3] = ["decoder_num_layers", "num_decoder_layers", "decoder_layers"];
const ENCODER_LAYERS: [&str; 3] = ["encoder_num_layers", "num_encoder_layers", "encoder_layers"];
/// Layers that predict further tokens.
const PREDICTION_LAYERS: [&str; 1] = ["mtp_num_layers"];
/// Routed experts of a layer.
const EXPERTS: [&str; 6] = [
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
];
/// Switches that say whether the output layer shares the word embeddings, and the value by which it does.
const TIES: [(&str, bool); 4] = [
    ("untie_embeddings_and_output_weights", false),
    ("tie_word_embeddings", true),
    ("share_embeddings_and_output_weights", true),
    ("no_weight_tying", false),
];

/// Levels of configurations within configurations that are looked into.
const DEPTH: usize = 3;

/// Levels of lists and dicts that parameter groups lie in.
const GROUPS_DEPTH: usize = 6;

/// Somebody who says something of the model.
#[derive(Debug, Clone)]
struct Speaker<'c> {
    /// `args say`, `config.json says`.
    words: String,
    entries: &'c Entries,
}

/// All that is said of one checkpoint, by who wins over the others.
pub(super) struct Announced<'c> {
    /// Arguments of the command line.
    given: Entries,
    speakers: Vec<Speaker<'c>>,
    /// The architecture that the configuration names: `LlamaForCausalLM`.
    pub architecture: Option<&'c str>,
    /// The arguments of a run say all that tells its layers apart.
    pub is_certain: bool,
    state: Entries,
    /// Parameter groups of the optimizer have what Adam and its kin take.
    has_adam_groups: bool,
}

/// A number that is announced.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Said {
    pub value: u64,
    /// `args say num_layers=6`.
    pub text: String,
}

/// The part of a model that a list of layers is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Only,
    Decoder,
    Encoder,
    Prediction,
}

/// What a list of layers, or a configuration, is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tower {
    Text,
    Vision,
    Audio,
}

impl Role {
    pub(super) fn of(path: &str) -> Self {
        let has = |word| path.split('.').any(|component| component == word);
        match () {
            () if has("mtp") => Self::Prediction,
            () if has("decoder") => Self::Decoder,
            () if has("encoder") => Self::Encoder,
            () => Self::Only,
        }
    }
}

impl Tower {
    pub(super) fn of(words: &str) -> Self {
        let has = |any: &[&str]| any.iter().any(|word| words.contains(word));
        if has(&["vision", "visual", "image", "video", "vit", "backbone"]) {
            Self::Vision
        } else if has(&["audio", "speech", "sound"]) {
            Self::Audio
        } else {
            Self::Text
        }
    }
}

impl<'c> Announced<'c> {
    pub(super) fn of(catalog: &'c Catalog) -> Self {
        let state = &catalog.state;
        let args = state.args().map(|entries| Speaker { words: "args say".to_owned(), entries });
        let configs = state.of_kind(StateKind::Config).filter_map(|(_, entry)| {
            let file = entry.file.file_name().unwrap_or_default().to_string_lossy();
            Some(Speaker { words: format!("{file} says"), entries: entry.value.as_map()? })
        });
        let configs: Vec<Speaker<'_>> = configs.collect();
        let text = |key| configs.iter().find_map(|config| config.entries.get(key));
        let architecture = match text("architectures") {
            Some(PlainValue::List(all)) => all.first().and_then(PlainValue::as_text),
            _ => None,
        };
        let is_certain = args.is_some() && catalog.origin.naming == Naming::Canonical;
        let loose =
            LAYERS.iter().filter_map(|key| Some(((*key).to_owned(), state.get(key)?.clone())));
        Self {
            given: catalog.given.iter().cloned().collect(),
            architecture,
            is_certain,
            state: loose.collect(),
            speakers: args.into_iter().chain(configs).collect(),
            has_adam_groups: state
                .of_kind(StateKind::OptimizerGroups)
                .any(|(key, entry)| key.ends_with(".betas") || has_betas(&entry.value, 0)),
        }
    }

    /// The number of layers of a list.
    pub(super) fn layers(&self, path: &str) -> Option<Said> {
        let role = Role::of(path);
        let own: &[&str] = match role {
            Role::Decoder => &DECODER_LAYERS,
            Role::Encoder => &ENCODER_LAYERS,
            Role::Prediction => &PREDICTION_LAYERS,
            Role::Only => &[],
        };
        let shared: &[&str] = if role == Role::Prediction { &[] } else { &LAYERS };
        let said = self.number(path, own).or_else(|| self.number(path, shared))?;
        let idle = if role == Role::Prediction { 0 } else { self.placeholders(path, said.value) };
        Some(Said { value: said.value - idle, ..said })
    }

    /// Says that there is a decoder beside an encoder.
    pub(super) fn has_decoder(&self) -> bool {
        self.number("decoder", &DECODER_LAYERS).is_some_and(|said| said.value > 0)
    }

    /// The number of experts of a layer in a list.
    pub(super) fn experts(&self, path: &str) -> Option<Said> {
        self.number(path, &EXPERTS).filter(|said| said.value > 0)
    }

    /// Says whether the output layer shares the word embeddings, where anybody says it, and who does.
    pub(super) fn is_tied(&self) -> Option<(bool, String)> {
        self.scope("").iter().find_map(|speaker| {
            TIES.iter().find_map(|(key, tied)| match speaker.entries.get(*key)? {
                PlainValue::Bool(value) => {
                    Some((value == tied, format!("{} {key}={value}", speaker.words)))
                }
                _ => None,
            })
        })
    }

    /// A text that is said of the run.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.scope("").into_iter().find_map(|speaker| speaker.entries.get(key)?.as_text())
    }

    /// A switch of the run.
    pub(super) fn switch(&self, key: &str) -> Option<bool> {
        self.scope("").into_iter().find_map(|speaker| match speaker.entries.get(key)? {
            PlainValue::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// Layers without parameters among the first `layers` (MindSpeed's `noop_layers`), whose numbers the others take.
    fn placeholders(&self, path: &str, layers: u64) -> u64 {
        let listed =
            self.scope(path).into_iter().find_map(|speaker| speaker.entries.get("noop_layers"));
        let mut all = BTreeSet::new();
        match listed {
            Some(PlainValue::List(numbers)) => {
                all.extend(numbers.iter().filter_map(PlainValue::as_u64));
            }
            Some(PlainValue::Text(text)) => {
                all.extend(text.split(',').filter_map(|number| number.trim().parse::<u64>().ok()));
            }
            _ => {}
        }
        all.range(..layers).count() as u64
    }

    /// Says that the optimizer is Adam, and who says so.
    pub(super) fn adam(&self) -> Option<String> {
        let name = self.text("optimizer").filter(|name| name.to_ascii_lowercase().contains("adam"));
        let named = name.map(|name| format!("args say optimizer={name}"));
        named.or_else(|| self.has_adam_groups.then(|| "its groups have betas and eps".to_owned()))
    }

    fn number(&self, path: &str, keys: &[&str]) -> Option<Said> {
        self.scope(path).iter().find_map(|speaker| {
            keys.iter().find_map(|key| {
                let value = speaker.entries.get(*key)?.as_u64()?;
                Some(Said { value, text: format!("{} {key}={value}", speaker.words) })
            })
        })
    }

    /// Who speaks of a list of layers, first who wins. Of several configurations in one that could be meant, none is.
    fn scope<'s>(&'s self, path: &str) -> Vec<Speaker<'s>> {
        let mut scope = vec![Speaker { words: "--set says".to_owned(), entries: &self.given }];
        let (tower, role) = (Tower::of(path), Role::of(path));
        for speaker in &self.speakers {
            let mut towers = Vec::new();
            collect_towers(speaker, "", 0, &mut towers);
            towers.retain(|(words, _)| {
                let is_other = |word, own| words.contains(word) && role != own;
                Tower::of(words) == tower
                    && !is_other("encoder", Role::Encoder)
                    && !is_other("decoder", Role::Decoder)
            });
            if let [(_, only)] = &towers[..] {
                scope.push(only.clone());
            }
            if towers.len() < 2 && tower == Tower::Text {
                scope.push(speaker.clone());
            }
        }
        if tower == Tower::Text {
            scope.push(Speaker { words: "the checkpoint says".to_owned(), entries: &self.state });
        }
        scope
    }

    /// What tells the layers of a list apart.
    pub(super) fn kinds(&self, stack: &Stack<'_>) -> Kinds {
        let layers = self.layers(stack.path).map_or_else(|| stack.end(), |said| said.value);
        let mut kinds = Kinds { bounds: vec![layers], ..Kinds::default() };
        for speaker in self.scope(stack.path) {
            for (key, value) in speaker.entries {
                kinds.add(key, value, layers);
            }
        }
        kinds.lists.truncate(MOST_SIGNS);
        kinds.marks.truncate(MOST_SIGNS);
        kinds.periods.truncate(MOST_SIGNS);
        kinds.bounds.truncate(MOST_SIGNS);
        kinds
    }
}

/// Says whether a parameter group in these has Adam's betas and eps; Lion has no eps.
fn has_betas(value: &PlainValue, depth: usize) -> bool {
    match value {
        PlainValue::Map(entries) if entries.contains_key("betas") => entries.contains_key("eps"),
        PlainValue::Map(entries) if depth < GROUPS_DEPTH => {
            entries.values().any(|value| has_betas(value, depth + 1))
        }
        PlainValue::List(entries) if depth < GROUPS_DEPTH => {
            entries.iter().any(|value| has_betas(value, depth + 1))
        }
        _ => false,
    }
}

/// The configurations within a configuration that have layers of their own.
fn collect_towers<'c>(
    speaker: &Speaker<'c>,
    words: &str,
    depth: usize,
    towers: &mut Vec<(String, Speaker<'c>)>,
) {
    if depth >= DEPTH || towers.len() >= MOST_SIGNS {
        return;
    }
    let maps = speaker.entries.iter().filter_map(|(key, value)| Some((key, value.as_map()?)));
    for (key, entries) in maps {
        let words = format!("{words}.{key}");
        let inner = Speaker { words: speaker.words.clone(), entries };
        let has_layers = LAYERS.iter().chain(&DECODER_LAYERS).chain(&ENCODER_LAYERS);
        if has_layers
            .into_iter()
            .any(|key| entries.get(*key).is_some_and(|value| value.as_u64().is_some()))
        {
            towers.push((words.clone(), inner.clone()));
        }
        collect_towers(&inner, &words, depth + 1, towers);
    }
}

/// What may tell layers apart, as far as anything is said of it. Two layers are of one kind where all of it agrees; more kinds
/// than there are cost nothing but certainty.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    /// An entry for every layer: `layer_types`, a list of 0 and 1, the letters of a hybrid pattern.
    lists: Vec<Vec<usize>>,
    /// Layers that are named by number: `cross_attention_layers`.
    marks: Vec<BTreeSet<u64>>,
    /// Every so many layers: `moe_layer_freq`, `decoder_sparse_step`.
    periods: Vec<u64>,
    /// Up to a layer, from the front or the back: `first_k_dense_replace`, `num_kv_shared_layers`.
    bounds: Vec<u64>,
}

/// Lists, marks, periods or bounds that are looked at, and configurations within one; no model has as many.
const MOST_SIGNS: usize = 64;

/// Different entries that a list of kinds may have.
const MOST_KINDS: usize = 8;

impl Kinds {
    fn add(&mut self, key: &str, value: &PlainValue, layers: u64) {
        let has = |words: &[&str]| words.iter().any(|word| key.contains(word));
        // The share of layers that a stage has, how exactly they are computed and what is kept of that: not what they are.
        if has(&["pipeline", "bf16", "fp8", "fp4", "recompute", "backend"]) {
            return;
        }
        let is_of_layers = has(&[
            "layer",
            "attn",
            "attention",
            "moe",
            "expert",
            "sparse",
            "dense",
            "cross",
            "window",
        ]);
        match value {
            PlainValue::List(entries) if entries.len() as u64 == layers && layers > 1 => {
                self.add_list(entries.iter().map(kind_text));
            }
            PlainValue::List(entries) if has(&["layer", "idx", "indic", "index"]) => {
                let numbers: BTreeSet<u64> =
                    entries.iter().filter_map(PlainValue::as_u64).collect();
                if !numbers.is_empty() && numbers.len() == entries.len() {
                    self.marks.push(numbers);
                }
            }
            PlainValue::Text(text) if has(&["pattern"]) => self.add_pattern(text, layers),
            PlainValue::Text(text) if has(&["config"]) && text.starts_with('{') => {
                self.add_blocks(text, layers);
            }
            PlainValue::Int(number) => {
                let Some(number) = u64::try_from(*number).ok().filter(|n| (1..layers).contains(n))
                else {
                    return;
                };
                let is_period =
                    ["freq", "period", "interval", "step", "every", "pattern", "stride"];
                let is_bound = [
                    "dense",
                    "first",
                    "start",
                    "end",
                    "shared_layers",
                    "window_layers",
                    "hash",
                    "offset",
                ];
                if is_of_layers && has(&is_period) && number > 1 {
                    self.periods.push(number);
                } else if is_of_layers && has(&is_bound) {
                    self.bounds.extend([number, layers - number]);
                }
            }
            _ => {}
        }
    }

    fn add_list(&mut self, entries: impl Iterator<Item = String>) {
        let mut numbers = BTreeMap::new();
        let mut list = Vec::new();
        for entry in entries {
            let next = numbers.len();
            list.push(*numbers.entry(entry).or_insert(next));
        }
        // A size that differs in every layer tells nothing of its names.
        if (2..=MOST_KINDS).contains(&numbers.len()) {
            self.lists.push(list);
        }
    }

    /// `M*M-|M*/MM`: a letter a layer, bars between stages, further tokens behind the slash (Megatron-Core
    /// `core/models/hybrid`).
    fn add_pattern(&mut self, text: &str, layers: u64) {
        let main = text.split('/').next().unwrap_or_default();
        let letters: Vec<String> =
            main.chars().filter(|letter| *letter != '|').map(String::from).collect();
        if letters.len() as u64 == layers {
            self.add_list(letters.into_iter());
        }
    }

    /// JSON with an entry of `block_configs` for every layer (Megatron-Core `heterogeneous_config.py`).
    fn add_blocks(&mut self, text: &str, layers: u64) {
        let Ok(config) = serde_json::from_str::<serde_json::Value>(text) else { return };
        let blocks = config.get("block_configs").and_then(|blocks| blocks.as_array());
        if let Some(blocks) = blocks.filter(|blocks| blocks.len() as u64 == layers) {
            self.add_list(blocks.iter().map(|block| {
                let of = |part| {
                    ["no_op", "replace_with_linear"].map(|key| {
                        block
                            .get(part)
                            .and_then(|part| part.get(key))
                            .and_then(serde_json::Value::as_bool)
                    })
                };
                format!("{:?}", [of("attention"), of("mlp"), of("ffn")])
            }));
        }
    }

    /// The same for layers of one kind.
    pub(super) fn of(&self, layer: u64) -> Vec<u64> {
        let at = usize::try_from(layer).unwrap_or(usize::MAX);
        let listed = self.lists.iter().map(|list| list.get(at).map_or(0, |kind| 1 + *kind as u64));
        let marked = self.marks.iter().map(|marks| u64::from(marks.contains(&layer)));
        let periodic = self.periods.iter().map(|period| layer % period);
        let bounded = self.bounds.iter().map(|bound| u64::from(layer < *bound));
        listed.chain(marked).chain(periodic).chain(bounded).collect()
    }
}

/// What an entry says of the kind of its layer: of a dict only its switches.
fn kind_text(value: &PlainValue) -> String {
    match value {
        PlainValue::Text(text) => text.clone(),
        PlainValue::Int(number) => number.to_string(),
        PlainValue::Bool(value) => value.to_string(),
        PlainValue::Map(entries) => {
            let inner = entries.iter().filter(|(_, value)| {
                matches!(value, PlainValue::Bool(_) | PlainValue::None | PlainValue::Map(_))
            });
            inner.map(|(key, value)| format!("{key}:{} ", kind_text(value))).collect()
        }
        PlainValue::None | PlainValue::Float(_) | PlainValue::List(_) | PlainValue::Opaque(_) => {
            String::new()
        }
    }
}
