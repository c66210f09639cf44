//! What a checkpoint announces: numbers of layers and experts, what tells layers apart, each with the words for who says so.
//!
//! Facts from Megatron-LM core_v0.4 to 0.19 (`megatron/training/arguments.py`, `core/transformer/transformer_config.py`),
//! MindSpeed-LLM 2.x (`mindspeed_llm/features_manager`), gpt-neox 2.0 (`megatron/neox_arguments`), transformers 4 and 5
//! (`configuration_*.py`), InfiniTrain 0.6.0.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, StateKind};
use crate::names::Naming;

use super::kinds::{Kinds, empty_layers};
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
/// Switch by which one layer predicts all further tokens, one after the other.
const ONE_PREDICTION: &str = "mtp_use_repeated_layer";
/// Routed experts of a layer.
const EXPERTS: [&str; 6] = [
    "num_moe_experts",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
];
/// Switches that say whether the output layer shares the word embeddings, and the value by which it does.
const TIES: [(&str, bool); 4] = [
    ("share_embeddings_and_output_weights", true),
    ("untie_embeddings_and_output_weights", false),
    ("tie_word_embeddings", true),
    ("no_weight_tying", false),
];

/// Configurations within one that are looked at; no model has as many.
const MOST_TOWERS: usize = 64;

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
    /// Its words are Megatron's arguments.
    is_megatron: bool,
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
        let (state, naming) = (&catalog.state, catalog.origin.naming);
        let args = state.of_kind(StateKind::Args).find_map(|(_, entry)| {
            // Arguments are an object within a file; a description is a file of its own.
            let file = entry.file.file_name().unwrap_or_default().to_string_lossy();
            let words = match file.ends_with(".yaml") {
                true => format!("{file} says"),
                false => "args say".to_owned(),
            };
            let is_megatron = naming == Naming::Canonical;
            Some(Speaker { words, entries: entry.value.as_map()?, is_megatron })
        });
        let configs = state.of_kind(StateKind::Config).filter_map(|(_, entry)| {
            let file = entry.file.file_name().unwrap_or_default().to_string_lossy();
            let entries = entry.value.as_map()?;
            Some(Speaker { words: format!("{file} says"), entries, is_megatron: false })
        });
        let configs: Vec<Speaker<'_>> = configs.collect();
        let text = |key| configs.iter().find_map(|config| config.entries.get(key));
        let architecture = match text("architectures") {
            Some(PlainValue::List(all)) => all.first().and_then(PlainValue::as_text),
            _ => None,
        };
        let is_certain = args.is_some() && naming == Naming::Canonical;
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
        if role == Role::Prediction && said.value > 1 && self.switch(ONE_PREDICTION) == Some(true) {
            return Some(Said { value: 1, text: format!("{}, {ONE_PREDICTION}=true", said.text) });
        }
        let idle = if role == Role::Prediction { 0 } else { self.placeholders(path, said.value) };
        Some(Said { value: said.value - idle, ..said })
    }

    /// The number of layers behind those of a list that predict further tokens (transformers `configuration_deepseek_v3.py`).
    pub(super) fn predictions(&self, path: &str) -> Option<Said> {
        self.number(path, &["num_nextn_predict_layers"])
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
        let named = self.scope("").into_iter().find_map(|speaker| {
            let name = speaker.entries.get("optimizer")?.as_text()?;
            let is_adam = name.to_ascii_lowercase().contains("adam");
            Some(is_adam.then(|| format!("{} optimizer={name}", speaker.words)))
        });
        let named = named.flatten();
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
        let speaker =
            |words: &str, entries| Speaker { words: words.to_owned(), entries, is_megatron: true };
        let mut scope = vec![speaker("--set says", &self.given)];
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
            scope.push(speaker("the checkpoint says", &self.state));
        }
        scope
    }

    /// What tells the layers of a list apart.
    pub(super) fn kinds(&self, stack: &Stack<'_>) -> Kinds {
        let layers = self.layers(stack.path).map_or_else(|| stack.end(), |said| said.value);
        let mut kinds = Kinds::new(layers);
        // All that predict further tokens are alike.
        if Role::of(stack.path) == Role::Prediction {
            return kinds;
        }
        for speaker in self.scope(stack.path) {
            if speaker.is_megatron {
                kinds.add_args(speaker.entries);
            } else {
                kinds.add_config(speaker.entries);
            }
        }
        kinds
    }

    /// Layers of a list that have no weights, and keep their numbers.
    pub(super) fn empty_layers(&self, path: &str) -> BTreeSet<u64> {
        if Role::of(path) == Role::Prediction {
            return BTreeSet::new();
        }
        self.scope(path).iter().flat_map(|speaker| empty_layers(speaker.entries)).collect()
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
    if depth >= DEPTH || towers.len() >= MOST_TOWERS {
        return;
    }
    let maps = speaker.entries.iter().filter_map(|(key, value)| Some((key, value.as_map()?)));
    for (key, entries) in maps {
        let words = format!("{words}.{key}");
        let inner = Speaker { entries, ..speaker.clone() };
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
