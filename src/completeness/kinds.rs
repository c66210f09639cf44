//! Kinds of layers: what a run or a configuration says that tells the layers of a list apart.
//!
//! The arguments of a Megatron run are known by name: only those listed here tell layers apart, as others go by like names and
//! say how a layer is computed or where. A `config.json` is one of hundreds, which are read by the words of their keys.
//!
//! Facts from Megatron-LM core_v0.4 to 0.19 and d98e8a6 (`megatron/training/arguments.py`, `core/transformer/transformer_config.py`,
//! `core/models/hybrid`), Megatron-DeepSpeed (`--expert-interval`), MindSpeed-LLM 2.x (`mindspeed_llm/features_manager`,
//! `core/transformer/transformer_block.py`), Megatron Bridge 067f987 (`models/*/*_provider.py`).

use std::collections::{BTreeMap, BTreeSet};

use crate::base::plain::PlainValue;

use super::frequency::{Frequency, frequency};

/// What an argument that tells layers apart has for a value.
#[derive(Debug, Clone, Copy)]
enum Sign {
    /// Every so many layers, or an entry for each layer.
    Frequency,
    /// Number of layers from the front.
    Front,
    /// Number of layers from the back.
    Back,
    /// Layers by number.
    Numbers,
    /// A letter a layer.
    Pattern,
    /// JSON with a block a layer.
    Blocks,
}

/// The arguments of a run that tell its layers apart. What a stage has of them, how exactly they are computed and what is kept of
/// that is no such thing, nor are windows and positions, which have no weights.
#[rustfmt::skip]
const ARGS: &[(&str, Sign)] = &[
    // Megatron-LM
    ("moe_layer_freq", Sign::Frequency),
    ("linear_attention_freq", Sign::Frequency),
    ("dsa_indexer_topk_freq", Sign::Frequency),
    ("dsa_indexer_skip_topk_offset", Sign::Front),
    ("hybrid_override_pattern", Sign::Pattern),
    ("hybrid_layer_pattern", Sign::Pattern),
    ("heterogeneous_layers_config_encoded_json", Sign::Blocks),
    // Megatron-DeepSpeed
    ("expert_interval", Sign::Frequency),
    // MindSpeed-LLM
    ("first_k_dense_replace", Sign::Front),
    ("full_attention_interval", Sign::Frequency),
    ("cla_share_factor", Sign::Frequency),
    ("n_hash_layers", Sign::Front),
    ("compress_ratios", Sign::Frequency),
    ("index_topk_freq", Sign::Frequency),
    ("index_skip_topk_offset", Sign::Front),
    ("index_topk_pattern", Sign::Pattern),
    // Megatron Bridge
    ("layer_types", Sign::Frequency),
    ("hybrid_attention_pattern", Sign::Frequency),
    ("kimi_kda_layers", Sign::Numbers),
    ("lightning_indexer_layers", Sign::Numbers),
    ("mlp_only_layers", Sign::Numbers),
    ("num_kv_shared_layers", Sign::Back),
];

/// What may tell layers apart, as far as anything is said of it. Two layers are of one kind where all of it agrees; more kinds
/// than there are cost nothing but certainty.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    /// Layers of the list.
    layers: u64,
    /// An entry for every layer: `layer_types`, a list of 0 and 1, the letters of a hybrid pattern.
    lists: Vec<Vec<usize>>,
    /// Layers that are named by number: `cross_attention_layers`.
    marks: Vec<BTreeSet<u64>>,
    /// Every so many layers: `moe_layer_freq`, `decoder_sparse_step`.
    periods: Vec<u64>,
    /// Up to a layer, from the front or the back: `first_k_dense_replace`, `num_kv_shared_layers`.
    bounds: Vec<u64>,
}

/// Lists, marks, periods or bounds that are looked at; no model has as many.
const MOST_SIGNS: usize = 64;

/// Different entries that a list of kinds may have.
const MOST_KINDS: usize = 8;

impl Kinds {
    /// Nothing told yet of so many layers.
    pub(super) fn new(layers: u64) -> Self {
        Self { layers, bounds: vec![layers], ..Self::default() }
    }

    /// Adds what the arguments of a run say.
    pub(super) fn add_args(&mut self, args: &BTreeMap<String, PlainValue>) {
        for (key, sign) in ARGS {
            if let Some(value) = args.get(*key) {
                self.add_arg(*sign, value);
            }
        }
    }

    fn add_arg(&mut self, sign: Sign, value: &PlainValue) {
        match (sign, value) {
            (Sign::Frequency, PlainValue::Text(text)) => match frequency(text) {
                Some(Frequency::Every(number)) => self.add_period(number),
                Some(Frequency::Each(list)) => self.add_list(list.iter().map(u64::to_string)),
                None => {}
            },
            (Sign::Frequency, PlainValue::List(entries)) => {
                self.add_list(entries.iter().map(kind_text));
            }
            (Sign::Numbers, PlainValue::List(entries)) => self.add_marks(entries),
            (Sign::Pattern, PlainValue::Text(text)) => self.add_pattern(text),
            (Sign::Blocks, PlainValue::Text(text)) => {
                if let Some(blocks) = blocks_of(text) {
                    self.add_list(blocks.iter().map(kind_text));
                }
            }
            (sign, value) => match (sign, value.as_u64()) {
                (Sign::Frequency, Some(number)) => self.add_period(number),
                (Sign::Front, Some(number)) => self.add_bound(number),
                (Sign::Back, Some(number)) => self.add_bound(self.layers.saturating_sub(number)),
                _ => {}
            },
        }
    }

    /// Adds what a configuration says under keys that sound as if they told layers apart.
    pub(super) fn add_config(&mut self, config: &BTreeMap<String, PlainValue>) {
        for (key, value) in config {
            self.add_entry(key, value);
        }
    }

    fn add_entry(&mut self, key: &str, value: &PlainValue) {
        let has = |words: &[&str]| words.iter().any(|word| key.contains(word));
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
        let is_period = ["freq", "period", "interval", "step", "every", "pattern", "stride"];
        let is_bound =
            ["dense", "first", "start", "end", "shared_layers", "window_layers", "hash", "offset"];
        match value {
            PlainValue::List(entries) if entries.len() as u64 == self.layers => {
                self.add_list(entries.iter().map(kind_text));
            }
            PlainValue::List(entries) if has(&["layer", "idx", "indic", "index"]) => {
                self.add_marks(entries);
            }
            PlainValue::Text(text) if has(&["pattern"]) => self.add_pattern(text),
            PlainValue::Int(_) if is_of_layers => match value.as_u64() {
                Some(number) if has(&is_period) && number > 1 => self.add_period(number),
                Some(number) if has(&is_bound) => {
                    self.add_bound(number);
                    self.add_bound(self.layers.saturating_sub(number));
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn add_period(&mut self, period: u64) {
        if (2..self.layers).contains(&period) && self.periods.len() < MOST_SIGNS {
            self.periods.push(period);
        }
    }

    fn add_bound(&mut self, bound: u64) {
        if (1..self.layers).contains(&bound) && self.bounds.len() < MOST_SIGNS {
            self.bounds.push(bound);
        }
    }

    fn add_marks(&mut self, entries: &[PlainValue]) {
        let numbers: BTreeSet<u64> = entries.iter().filter_map(PlainValue::as_u64).collect();
        let is_of_numbers = !numbers.is_empty() && numbers.len() == entries.len();
        if is_of_numbers && self.marks.len() < MOST_SIGNS {
            self.marks.push(numbers);
        }
    }

    /// Adds a list with an entry for each layer; what is behind the last one is of layers that predict further tokens.
    fn add_list(&mut self, entries: impl Iterator<Item = String>) {
        let layers = usize::try_from(self.layers).unwrap_or(usize::MAX);
        let mut numbers = BTreeMap::new();
        let mut list = Vec::new();
        for entry in entries.take(layers) {
            let next = numbers.len();
            list.push(*numbers.entry(entry).or_insert(next));
        }
        // A size that differs in every layer tells nothing of its names.
        let is_of_kinds = (2..=MOST_KINDS).contains(&numbers.len());
        if list.len() == layers && is_of_kinds && self.lists.len() < MOST_SIGNS {
            self.lists.push(list);
        }
    }

    /// Adds `M*M-|M*/MM`: a letter a layer, bars between stages, further tokens behind the slash (Megatron-Core
    /// `core/models/hybrid`).
    fn add_pattern(&mut self, text: &str) {
        let main = text.split('/').next().unwrap_or_default();
        let letters = || main.chars().filter(|letter| *letter != '|');
        if letters().count() as u64 == self.layers {
            self.add_list(letters().map(String::from));
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

/// The key of the blocks in a description of layers that are not alike.
const BLOCKS: &str = "block_configs";

/// The layers that have no weights, as neither attention nor MLP is there: their numbers are theirs all the same (Megatron-Core
/// `core/transformer/heterogeneous/heterogeneous_config.py`, and `config.json` of the models that it comes from).
pub(super) fn empty_layers(entries: &BTreeMap<String, PlainValue>) -> BTreeSet<u64> {
    let is_idle = |block: &PlainValue, part: &str| {
        let part = block.as_map().and_then(|block| block.get(part)?.as_map());
        part.and_then(|part| part.get("no_op")) == Some(&PlainValue::Bool(true))
    };
    let is_empty = |block: &PlainValue| {
        is_idle(block, "attention") && (is_idle(block, "mlp") || is_idle(block, "ffn"))
    };
    let numbers = |blocks: &[PlainValue]| {
        let empty = (0..).zip(blocks).filter(|(_, block)| is_empty(block));
        empty.map(|(number, _)| number).collect()
    };
    match (entries.get("heterogeneous_layers_config_encoded_json"), entries.get(BLOCKS)) {
        (Some(PlainValue::Text(text)), _) => {
            blocks_of(text).map(|blocks| numbers(&blocks)).unwrap_or_default()
        }
        (_, Some(PlainValue::List(blocks))) => numbers(blocks),
        _ => BTreeSet::new(),
    }
}

/// The blocks of a description that is JSON within an argument.
fn blocks_of(text: &str) -> Option<Vec<PlainValue>> {
    match PlainValue::from(serde_json::from_str::<serde_json::Value>(text).ok()?) {
        PlainValue::Map(mut entries) => match entries.remove(BLOCKS)? {
            PlainValue::List(blocks) => Some(blocks),
            _ => None,
        },
        _ => None,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(layers: u64, args: &[(&str, PlainValue)]) -> Vec<Vec<u64>> {
        let args = args.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        let mut kinds = Kinds::new(layers);
        kinds.add_args(&args);
        let all: Vec<Vec<u64>> = (0..layers).map(|layer| kinds.of(layer)).collect();
        // Numbers by first appearance, so that kinds of other forms compare.
        let mut seen: Vec<Vec<u64>> = Vec::new();
        let mut groups: Vec<Vec<u64>> = Vec::new();
        for (layer, kind) in (0..).zip(all) {
            match seen.iter().position(|other| *other == kind) {
                Some(at) => groups[at].push(layer),
                None => {
                    seen.push(kind);
                    groups.push(vec![layer]);
                }
            }
        }
        groups
    }

    #[test]
    fn arguments_tell_layers_apart_by_what_they_are() {
        let text = |text: &str| PlainValue::Text(text.to_owned());
        let numbers =
            |all: &[i64]| PlainValue::List(all.iter().map(|n| PlainValue::Int(*n)).collect());
        let one_dense = [vec![0], vec![1, 2, 3]];
        for same in [
            ("moe_layer_freq", numbers(&[0, 1, 1, 1])),
            ("moe_layer_freq", text("([0]*1+[1]*3)*1")),
            ("first_k_dense_replace", PlainValue::Int(1)),
            ("compress_ratios", numbers(&[0, 4, 4, 4, 0])),
            ("hybrid_override_pattern", text("M-|--/MM")),
            ("mlp_only_layers", numbers(&[0])),
            ("num_kv_shared_layers", PlainValue::Int(3)),
        ] {
            assert_eq!(kinds(4, std::slice::from_ref(&same)), one_dense, "{same:?}");
        }
        assert_eq!(kinds(4, &[("moe_layer_freq", text("2"))]), [vec![0, 2], vec![1, 3]]);
        assert_eq!(kinds(4, &[("moe_layer_freq", PlainValue::Int(1))]).len(), 1);
    }

    #[test]
    fn shares_and_precision_make_no_kinds() {
        for key in [
            "decoder_first_pipeline_num_layers",
            "num_layers_at_start_in_bf16",
            "num_layers_in_first_pipeline_stage",
            "recompute_num_layers",
            "window_attn_skip_freq",
            "no_rope_freq",
            "moe_layer_recompute_interval",
        ] {
            assert_eq!(kinds(4, &[(key, PlainValue::Int(2))]).len(), 1, "{key}");
        }
    }

    #[test]
    fn blocks_without_anything_are_empty_layers() {
        let block = |attention: bool, mlp: bool| {
            format!("{{\"attention\": {{\"no_op\": {attention}}}, \"mlp\": {{\"no_op\": {mlp}}}}}")
        };
        let all = [block(false, false), block(true, true), block(true, false)].join(", ");
        let text = PlainValue::Text(format!("{{\"block_configs\": [{all}]}}"));
        let key = "heterogeneous_layers_config_encoded_json";
        assert_eq!(kinds(3, &[(key, text.clone())]).len(), 3);
        assert_eq!(empty_layers(&BTreeMap::from([(key.to_owned(), text)])), BTreeSet::from([1]));
    }
}
