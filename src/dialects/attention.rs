//! How many heads a model has: queries, keys and values of attention are dealt out by them.

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::names::families::model_args;
use crate::tensor::LogicalTensor;

use super::Sources;

/// The head counts that are said of a model's attention, by its own or by Megatron's names.
pub(super) struct HeadCounts {
    /// Query heads.
    pub(super) heads: Option<u64>,
    /// Heads of keys, and of values.
    groups: Option<u64>,
    /// Rows of a head.
    size: Option<u64>,
    /// The first linear of an MLP is gated.
    pub(super) is_gated: bool,
    /// Neighbouring rows of a head are turned on the other side too.
    pub(super) are_pairs_rotated: bool,
}

/// The rows of queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    /// Query heads.
    pub(super) heads: u64,
    /// Query groups: heads of keys, and of values.
    pub(super) groups: u64,
    /// Rows of a head.
    pub(super) size: u64,
}

const NOT_SAID: &str =
    "nothing says how many attention heads it has; supply it with --set num_attention_heads=NUMBER";

impl HeadCounts {
    pub(super) fn of(sources: &Sources<'_>) -> Self {
        let size = |fact: Option<&PlainValue>| match fact {
            Some(PlainValue::Int(value)) => {
                u64::try_from(*value).ok().filter(|&size| size <= LIMITS.dim)
            }
            _ => None,
        };
        let heads = size(sources.given("num_attention_heads"))
            .or_else(|| size(sources.own(model_args::HEADS)));
        let groups = size(sources.given("num_query_groups"))
            .or_else(|| size(sources.own(model_args::QUERY_GROUPS)));
        let head =
            size(sources.given("kv_channels")).or_else(|| size(sources.own(model_args::HEAD_SIZE)));
        let are_pairs_rotated =
            sources.others("rotary_interleaved") == Some(&PlainValue::Bool(true));
        let is_gated = match sources.own(model_args::ACTIVATION) {
            Some(PlainValue::Text(activation)) => model_args::is_gated(activation),
            _ => false,
        };
        if heads.is_some() {
            return Self { heads, groups, size: head, is_gated, are_pairs_rotated };
        }
        // Without a word of its own the other side's hold: that is whose weights these should be.
        let shares = sources.others("group_query_attention") == Some(&PlainValue::Bool(true));
        let others = |name| size(sources.others(name));
        Self {
            heads: others("num_attention_heads"),
            groups: groups.or_else(|| others("num_query_groups").filter(|_| shares)),
            size: head.or_else(|| others("kv_channels")),
            is_gated,
            are_pairs_rotated,
        }
    }

    /// The heads in three tensors, which must be what is said.
    pub(super) fn of_parts(&self, parts: [&LogicalTensor; 3]) -> Result<Rows, String> {
        let [query, key, value] = parts.map(first_dim);
        let heads = self.heads.filter(|&heads| heads > 0).ok_or(NOT_SAID)?;
        let wrong = || {
            let said = [(self.groups, "key"), (self.size, "size of")];
            let said =
                said.iter().filter_map(|(number, word)| Some(format!(", {word} {}", (*number)?)));
            let said: String = said.collect();
            format!(
                "{query}, {key} and {value} rows of queries, keys and values are not those of {heads} heads{said}"
            )
        };
        let size = query.checked_div(heads).filter(|size| size * heads == query && *size > 0);
        let size =
            size.filter(|&size| self.size.is_none_or(|said| said == size)).ok_or_else(wrong)?;
        let groups =
            Some(key / size).filter(|groups| groups * size == key && key == value && key > 0);
        let groups = groups.filter(|groups| heads % groups == 0);
        let groups = groups.filter(|&groups| self.groups.is_none_or(|said| said == groups));
        Ok(Rows { heads, groups: groups.ok_or_else(wrong)?, size })
    }

    /// The heads in one tensor of this many rows.
    pub(super) fn of_blocks(&self, rows: u64) -> Result<Rows, String> {
        let heads = self.heads.filter(|&heads| heads > 0).ok_or(NOT_SAID)?;
        let groups = self.groups.unwrap_or(heads);
        let wrong = || {
            let said = self.size.map_or_else(String::new, |size| format!(" of {size}"));
            format!(
                "{rows} rows are not those of {heads} query, {groups} key and {groups} value heads{said}"
            )
        };
        if groups == 0 || heads % groups != 0 {
            return Err(wrong());
        }
        let all = heads.checked_add(groups.saturating_mul(2)).ok_or_else(wrong)?;
        let size = rows.checked_div(all).filter(|size| size * all == rows && *size > 0);
        let size = size.filter(|&size| self.size.is_none_or(|said| said == size));
        Ok(Rows { heads, groups, size: size.ok_or_else(wrong)? })
    }
}

pub(super) fn first_dim(tensor: &LogicalTensor) -> u64 {
    tensor.shape().first().copied().unwrap_or(0)
}
