//! What is said of a model: heads, vocabulary, ranks. By the command line, the arguments of the run, the description of the model.

use std::collections::BTreeMap;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::Catalog;
use crate::names::families::model_args;

/// Sizes of heads that models have, for those of which nothing is said.
const USUAL_HEADS: [u64; 14] = [64, 128, 96, 80, 256, 112, 72, 48, 192, 160, 32, 16, 8, 4];

/// Arguments that count the ranks of a group.
const RANK_COUNTS: [&str; 6] = [
    "world_size",
    "data_parallel_size",
    "tensor_model_parallel_size",
    "model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
];

/// What is said of the model of a comparison; where the sides disagree, what b says.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// Query heads.
    pub heads: Option<u64>,
    /// Heads of keys, and of values.
    pub groups: Option<u64>,
    /// Rows of a head.
    pub head_size: Option<u64>,
    /// Tokens, without padding.
    pub vocab_size: Option<u64>,
    /// Numbers of layers.
    pub layers: Option<u64>,
    /// Sizes of the embeddings.
    pub hidden_size: Option<u64>,
    /// Sizes of groups of ranks, above 1.
    pub rank_counts: Vec<u64>,
}

/// The heads of a tensor with queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Heads {
    /// Query heads of a group.
    pub of_group: usize,
    /// Groups: heads of keys, and of values.
    pub groups: usize,
    /// Rows of a head.
    pub size: usize,
}

impl Facts {
    /// What the two sides say.
    #[must_use]
    pub fn of([a, b]: [&Catalog; 2]) -> Self {
        let given = |catalog: &Catalog| catalog.given.iter().cloned().collect::<BTreeMap<_, _>>();
        let given = [given(b), given(a)];
        let states = [&b.state, &a.state];
        let maps = states.into_iter().flat_map(|state| {
            let text = state.config().and_then(|config| config.get("text_config")?.as_map());
            [state.args(), state.config(), text]
        });
        let maps: Vec<&BTreeMap<String, PlainValue>> = given.iter().chain(maps.flatten()).collect();
        let size = |map: &BTreeMap<String, PlainValue>, name: &str| match map.get(name) {
            Some(PlainValue::Int(size)) => {
                u64::try_from(*size).ok().filter(|size| (1..=LIMITS.dim).contains(size))
            }
            _ => None,
        };
        let found = |names: &[&[&str]]| {
            let names = || names.iter().copied().flatten();
            maps.iter().find_map(|map| names().find_map(|name| size(map, name)))
        };
        let heads = found(&[model_args::HEADS]);
        let shares_none = maps
            .iter()
            .any(|map| map.get("group_query_attention") == Some(&PlainValue::Bool(false)));
        let groups = found(&[model_args::QUERY_GROUPS])
            .or_else(|| if shares_none { heads } else { found(&[&["num_query_groups"]]) });
        let hidden_size = found(&[&["hidden_size", "n_embd", "d_model"]]);
        let head_size = found(&[model_args::HEAD_SIZE, &["kv_channels"]]).or_else(|| {
            let (hidden, heads) = (hidden_size?, heads?);
            Some(hidden / heads).filter(|size| size * heads == hidden)
        });
        let counts =
            RANK_COUNTS.iter().flat_map(|name| maps.iter().map(move |map| size(map, name)));
        let mut rank_counts: Vec<u64> = counts.flatten().filter(|count| *count > 1).collect();
        rank_counts.sort_unstable();
        rank_counts.dedup();
        Self {
            heads,
            groups: groups.or(heads),
            head_size,
            vocab_size: found(&[&["vocab_size", "n_vocab"]]),
            layers: found(&[&["num_layers", "num_hidden_layers", "n_layer"]]),
            hidden_size,
            rank_counts,
        }
    }

    /// The heads in so many rows of queries, keys and values, if they are those that are said.
    pub(super) fn said_heads(&self, rows: usize) -> Option<Heads> {
        let number = |number: Option<u64>| usize::try_from(number?).ok().filter(|n| *n > 0);
        let (heads, groups) = (number(self.heads)?, number(self.groups)?);
        let all = groups.checked_mul(2)?.checked_add(heads)?;
        let size = rows / all;
        let is_whole =
            size > 0 && size.checked_mul(all) == Some(rows) && heads.is_multiple_of(groups);
        let is_said = number(self.head_size).is_none_or(|said| said == size);
        (is_whole && is_said).then_some(Heads { of_group: heads / groups, groups, size })
    }

    /// The heads that there may be in so many rows of queries, keys and values of a model with embeddings of a size: those that are
    /// said, or else all usual ones.
    pub(super) fn possible_heads(&self, rows: usize, hidden: usize) -> Vec<Heads> {
        if let Some(said) = self.said_heads(rows) {
            return vec![said];
        }
        let Some(keys) = rows.checked_sub(hidden).map(|both| both / 2).filter(|keys| *keys > 0)
        else {
            return Vec::new();
        };
        if keys * 2 + hidden != rows || !hidden.is_multiple_of(keys) {
            return Vec::new();
        }
        let sizes = self.head_sizes(keys);
        sizes.map(|size| Heads { of_group: hidden / keys, groups: keys / size, size }).collect()
    }

    /// The sizes that heads may have whose rows are so many: the one that is said, or else all usual ones.
    pub(super) fn head_sizes(&self, rows: usize) -> impl Iterator<Item = usize> + use<> {
        let said: Vec<u64> = match self.head_size {
            Some(size) => vec![size],
            None => USUAL_HEADS.to_vec(),
        };
        let sizes = said.into_iter().filter_map(|size| usize::try_from(size).ok());
        sizes.filter(move |size| *size > 1 && rows.is_multiple_of(*size))
    }
}
