//! Fused tensors of one rank, taken apart: each part a view, under the name it has alone.
//!
//! Here belong tensors whose stored shape or row order is not that of the canonical parameter: experts
//! in one tensor, latent attention's joint projections, the head orders of old checkpoint versions.
//! All of it is local to a rank; how the parts of the ranks go together is [`super::merge`]'s business.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::base::limits::{ENTRY, LIMITS, OVER_METADATA, OverLimit};
use crate::names::pattern::SuffixTable;
use crate::tensor::{LogicalTensor, StoredTensor, TensorError};

use super::merge::RankPart;
use super::sections::{Module, Shapes};
use super::{ArgName, LayoutError, RankCoord, RunArgs, Shard, ShardedModel};

/// The order in which megatron.legacy wrote the rows of `query_key_value` and `key_value`
/// (Megatron-LM v2.0, `megatron/checkpointing.py`, `fix_query_key_value_ordering`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadOrder {
    /// `[sections, heads, size]`: `checkpoint_version` 0, or none.
    SectionsFirst,
    /// `[heads, size, sections]`: version 1.
    SectionsLast,
    /// `[heads, sections, size]`: version 2 and later, and all of Megatron-Core.
    HeadsFirst,
}

impl HeadOrder {
    /// The order of a `checkpoint_version`.
    #[must_use]
    pub fn of_version(version: Option<f64>) -> Self {
        match version {
            Some(version) if version >= 2.0 => Self::HeadsFirst,
            Some(version) if version >= 1.0 => Self::SectionsLast,
            _ => Self::SectionsFirst,
        }
    }
}

/// A rank's tensor under its canonical name, indices still the rank's own.
#[derive(Debug, Clone)]
pub(super) struct RankTensor {
    /// Canonical name.
    pub name: String,
    /// The rank's part of it.
    pub part: RankPart,
}

impl RankTensor {
    /// About how many bytes it takes.
    fn metadata(&self) -> usize {
        self.name.len() + ENTRY * self.part.tensor.pieces().len().max(1)
    }
}

/// The shards of one model chunk of one rank, by canonical name.
pub(super) type RankShards = BTreeMap<String, Shard>;

impl Shapes for RankShards {
    fn shape(&self, name: &str, _: RankCoord) -> Option<&[u64]> {
        Some(self.get(name)?.tensor.shape())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fusion {
    /// `GroupedMLP`: all first linears as `[h, E*k*f]`, which in memory is `[E, h, k*f]`.
    GroupedFc1,
    /// `GroupedMLP`: all second linears as `[E*f, h]`, which in memory is `[E, f, h]`.
    GroupedFc2,
    /// `moe_single_grouped_weight`: one tensor `[E, out, in]`.
    Packed,
    /// Query and key-value down-projections in one.
    LatentDown,
    /// MindSpeed-LLM's `linear_qkv` of latent attention: query and key-value down-projections, whole on every rank.
    /// In other attention: the query, key and value rows, whose order old versions changed.
    Qkv { sections: u64 },
    /// The rotary and the other rows of an up-projection apart; they belong together head by head.
    HeadParts { other: &'static str, joined: &'static str },
    /// The second tensor of a [`Fusion::HeadParts`] pair.
    HeadPartsTail { first: &'static str },
}

/// Sources: Megatron-LM core_v0.5 to core_v0.19 (`core/transformer/moe/experts.py`,
/// `core/transformer/multi_latent_attention.py`), MindSpeed-LLM (`multi_latent_attention.py`).
#[rustfmt::skip]
static FUSIONS: &[(&str, Fusion)] = &[
    ("mlp.experts.weight1",                        Fusion::GroupedFc1),
    ("mlp.experts.weight2",                        Fusion::GroupedFc2),
    ("mlp.experts.{linear_fc1,linear_fc2}.{weight,bias}", Fusion::Packed),
    ("self_attention.linear_qkv_down_proj.weight", Fusion::LatentDown),
    ("self_attention.linear_qkv.{weight,bias}",    Fusion::Qkv { sections: 3 }),
    ("cross_attention.linear_kv.{weight,bias}",    Fusion::Qkv { sections: 2 }),
    ("self_attention.linear_qk_nope.weight",       Fusion::HeadParts { other: "linear_qk_rope.weight", joined: "linear_q_up_proj.weight" }),
    ("self_attention.linear_qk_rope.weight",       Fusion::HeadPartsTail { first: "linear_qk_nope.weight" }),
    ("self_attention.linear_kv_nope.weight",       Fusion::HeadParts { other: "linear_v.weight", joined: "linear_kv_up_proj.weight" }),
    ("self_attention.linear_v.weight",             Fusion::HeadPartsTail { first: "linear_kv_nope.weight" }),
];

static TABLE: LazyLock<SuffixTable<Fusion>> =
    LazyLock::new(|| SuffixTable::new(FUSIONS.iter().copied()));

/// Query and key-value down-projections of a latent attention in one tensor.
struct LatentDown<'a> {
    view: LogicalTensor,
    query_name: &'a str,
    query_rows: u64,
    /// Every rank holds all rows.
    is_whole: bool,
}

/// One model chunk of one rank.
pub(super) struct RankChunk<'a> {
    pub shards: &'a RankShards,
    pub rank: RankCoord,
    pub model: &'a ShardedModel<'a>,
}

impl RankChunk<'_> {
    /// Takes its tensors apart. One that cannot be is a problem; the others go on.
    pub(super) fn unfuse(&self, problems: &mut Vec<(String, LayoutError)>) -> Vec<RankTensor> {
        let mut tensors = Vec::with_capacity(self.shards.len());
        let mut metadata = 0;
        for (name, shard) in self.shards {
            let mut problem = |error| problems.push((shard.name.to_string(), error));
            match self.parts(name, shard) {
                Ok(mut parts) => {
                    for tensor in &mut parts {
                        tensor.part.is_shape_only = shard.is_shape_only;
                    }
                    metadata += parts.iter().map(RankTensor::metadata).sum::<usize>();
                    tensors.extend(parts);
                }
                Err(error) => problem(error),
            }
            if metadata > LIMITS.metadata {
                problem(OVER_METADATA.into());
                break;
            }
        }
        tensors
    }

    fn parts(&self, name: &str, shard: &Shard) -> Result<Vec<RankTensor>, LayoutError> {
        let Some(found) = TABLE.find(name) else {
            return Ok(vec![self.local(name.to_owned(), shard.view())?]);
        };
        let prefix = found.prefix;
        match *found.value {
            Fusion::GroupedFc1 => self.grouped_fc1(prefix, shard),
            Fusion::GroupedFc2 => self.grouped_fc2(prefix, shard),
            Fusion::Packed => self.packed(prefix, &name[prefix.len()..], shard),
            Fusion::LatentDown => self.latent_down(prefix, shard),
            Fusion::Qkv { sections } => self.qkv(name, prefix, sections, shard),
            Fusion::HeadParts { other, joined } => self.head_parts(prefix, shard, other, joined),
            Fusion::HeadPartsTail { first } => {
                // Taken with its first half; alone it has no canonical place.
                let is_paired = self.sibling(&format!("{prefix}self_attention."), first).is_some();
                let alone = (!is_paired).then(|| self.local(name.to_owned(), shard.view()));
                alone.into_iter().collect()
            }
        }
    }

    /// A tensor of this rank under its canonical name, gate rows before up rows.
    fn local(&self, name: String, tensor: LogicalTensor) -> Result<RankTensor, LayoutError> {
        let tensor = deinterleaved(&name, tensor, self.model.args, 1)?;
        Ok(RankTensor { name, part: RankPart::new(self.rank, tensor) })
    }

    fn sibling(&self, prefix: &str, suffix: &str) -> Option<&Shard> {
        self.shards.get(&format!("{prefix}{suffix}"))
    }

    fn module<'m>(&'m self, prefix: &'m str) -> Module<'m> {
        Module { shapes: self.shards, prefix, rank: self.rank, args: self.model.args }
    }

    /// Experts of this rank's grouped tensors: by the router's rows, else as `args` says.
    fn local_experts(&self, prefix: &str) -> Result<u64, LayoutError> {
        let experts = match self.module(prefix).dim("mlp.router.weight", 0) {
            Some(rows) => rows,
            None => self.model.args.need(ArgName::NUM_EXPERTS)?,
        };
        let shares = self.model.layout.declared_expert_shares;
        if experts == 0 || shares == 0 || experts % shares != 0 {
            return Err(LayoutError::ExpertsNotDivisible { experts, shares });
        }
        Ok(experts / shares)
    }

    fn grouped_fc1(&self, prefix: &str, shard: &Shard) -> Result<Vec<RankTensor>, LayoutError> {
        let experts = self.local_experts(prefix)?;
        let [hidden, columns] = two_dims(&shard.tensor)?;
        let width = divide(columns, experts, &shard.tensor)?;
        let view = shard.reshaped(&[experts, hidden, width])?;
        self.each_expert(prefix, "linear_fc1.weight", experts, |index| {
            view.select(0, index)?.transpose(0, 1)
        })
    }

    fn grouped_fc2(&self, prefix: &str, shard: &Shard) -> Result<Vec<RankTensor>, LayoutError> {
        let experts = self.local_experts(prefix)?;
        let [rows, hidden] = two_dims(&shard.tensor)?;
        let width = divide(rows, experts, &shard.tensor)?;
        let view = shard.reshaped(&[experts, width, hidden])?;
        self.each_expert(prefix, "linear_fc2.weight", experts, |index| {
            view.select(0, index)?.transpose(0, 1)
        })
    }

    fn packed(
        &self,
        prefix: &str,
        suffix: &str,
        shard: &Shard,
    ) -> Result<Vec<RankTensor>, LayoutError> {
        let linear = suffix.trim_start_matches("mlp.experts.");
        let view = shard.view();
        let experts = view.shape().first().copied().unwrap_or(0);
        self.each_expert(prefix, linear, experts, |index| view.select(0, index))
    }

    fn each_expert(
        &self,
        prefix: &str,
        linear: &str,
        experts: u64,
        view: impl Fn(u64) -> Result<LogicalTensor, TensorError>,
    ) -> Result<Vec<RankTensor>, LayoutError> {
        if experts > LIMITS.experts {
            return Err(OverLimit::found("experts on one rank", LIMITS.experts, experts).into());
        }
        let mut locals = Vec::new();
        let mut metadata = 0;
        for index in 0..experts {
            let name = format!("{prefix}mlp.experts.local_experts.{index}.{linear}");
            let tensor = view(index)?;
            let local = self.local(name, tensor)?;
            metadata += local.metadata();
            if metadata > LIMITS.metadata {
                return Err(OVER_METADATA.into());
            }
            locals.push(local);
        }
        Ok(locals)
    }

    /// `[q; kv + rope]`, whole on every rank or each rank its part of both (core 0.17 on, `--mla-down-proj-fusion`).
    fn latent_down(&self, prefix: &str, shard: &Shard) -> Result<Vec<RankTensor>, LayoutError> {
        let attention = format!("{prefix}self_attention.");
        let module = self.module(&attention);
        let (query, key_value) = (module.latent_query_rows()?, module.latent_key_value_rows()?);
        let view = shard.view();
        let rows = first_dim(&view);
        let tp = self.model.layout.declared_tp;
        let (query, is_whole) = if rows == query + key_value {
            (query, true)
        } else if rows.checked_mul(tp) == Some(query + key_value) && query % tp == 0 {
            (query / tp, false)
        } else {
            return Err(LayoutError::UnexpectedRows { rows, wanted: query + key_value });
        };
        let query_name = "linear_q_down_proj.weight";
        let fused = LatentDown { view, query_name, query_rows: query, is_whole };
        self.down_projections(&attention, &fused)
    }

    fn down_projections(
        &self,
        attention: &str,
        fused: &LatentDown<'_>,
    ) -> Result<Vec<RankTensor>, LayoutError> {
        let LatentDown { view, query_name, query_rows, is_whole } = fused;
        let rest = first_dim(view).saturating_sub(*query_rows);
        let part = |suffix: &str, start, len| {
            let mut part =
                self.local(format!("{attention}{suffix}"), view.slice(0, start, len)?)?;
            part.part.is_whole = *is_whole;
            Ok::<_, LayoutError>(part)
        };
        Ok(vec![
            part(query_name, 0, *query_rows)?,
            part("linear_kv_down_proj.weight", *query_rows, rest)?,
        ])
    }

    fn qkv(
        &self,
        name: &str,
        prefix: &str,
        sections: u64,
        shard: &Shard,
    ) -> Result<Vec<RankTensor>, LayoutError> {
        let attention = format!("{prefix}self_attention.");
        let module = self.module(&attention);
        let is_latent = module.latent_key_value_columns().is_some();
        if is_latent && name.ends_with("linear_qkv.weight") {
            let view = shard.view();
            let key_value = module.latent_key_value_rows()?;
            let query_rows = first_dim(&view).saturating_sub(key_value);
            let has_up = ["linear_q_up_proj.weight", "linear_qk_nope.weight"]
                .iter()
                .any(|suffix| self.sibling(&attention, suffix).is_some());
            let query_name =
                if has_up { "linear_q_down_proj.weight" } else { "linear_q_proj.weight" };
            let fused = LatentDown { view, query_name, query_rows, is_whole: true };
            return self.down_projections(&attention, &fused);
        }
        let is_legacy = shard.name.contains("key_value.");
        let tensor = match self.model.order {
            HeadOrder::HeadsFirst => shard.view(),
            order if is_legacy => self.in_head_order(&shard.view(), sections, order)?,
            _ => shard.view(),
        };
        Ok(vec![self.local(name.to_owned(), tensor)?])
    }

    /// Rows as `[heads, sections, head size]`, whatever order an old version wrote.
    fn in_head_order(
        &self,
        view: &LogicalTensor,
        sections: u64,
        order: HeadOrder,
    ) -> Result<LogicalTensor, LayoutError> {
        let heads = self.model.args.need(ArgName::NUM_ATTENTION_HEADS)?
            / self.model.layout.declared_tp.max(1);
        let size = first_dim(view) / heads.saturating_mul(sections).max(1);
        let (outer, inner, swapped) = match order {
            HeadOrder::SectionsFirst => (heads * size, size, (0, 1)),
            HeadOrder::SectionsLast => (size * sections, sections, (1, 2)),
            HeadOrder::HeadsFirst => return Ok(view.clone()),
        };
        let split = view.split_axis(0, outer)?.split_axis(1, inner)?;
        Ok(split.transpose(swapped.0, swapped.1)?.merge_axes(0)?.merge_axes(0)?)
    }

    /// Joins an up-projection that `mla_mm_split` stores in two: head by head the first part, then the other.
    fn head_parts(
        &self,
        prefix: &str,
        shard: &Shard,
        other: &str,
        joined: &str,
    ) -> Result<Vec<RankTensor>, LayoutError> {
        let attention = format!("{prefix}self_attention.");
        let Some(other) = self.sibling(&attention, other) else {
            return Err(LayoutError::HalfMissing { other: format!("{attention}{other}") });
        };
        let heads = (self.model.args.need(ArgName::NUM_ATTENTION_HEADS)?
            / self.model.layout.declared_tp.max(1))
        .max(1);
        let by_head = |view: LogicalTensor| view.split_axis(0, first_dim(&view) / heads);
        let parts = [by_head(shard.view())?, by_head(other.view())?];
        let tensor = LogicalTensor::concat(1, parts)?.merge_axes(0)?;
        Ok(vec![self.local(format!("{attention}{joined}"), tensor)?])
    }
}

/// First linears of an MLP, and what LoRA adds to their rows.
static FIRST_LINEARS: LazyLock<SuffixTable<()>> = LazyLock::new(|| {
    SuffixTable::new([("linear_fc1.{weight,bias}", ()), ("linear_fc1.lora_B.default.weight", ())])
});

/// All gate rows, then all up rows, of a first linear whose rows alternate where `*_glu_interleave_size` says so. Where
/// it holds the parts of several ranks, the first halves of all of them come first, then the second halves.
pub(super) fn deinterleaved(
    name: &str,
    view: LogicalTensor,
    args: &RunArgs,
    ranks: u64,
) -> Result<LogicalTensor, LayoutError> {
    if FIRST_LINEARS.find(name).is_none() {
        return Ok(view);
    }
    let arg = if name.contains(".experts.") {
        ArgName::MOE_MLP_GLU_INTERLEAVE_SIZE
    } else if name.contains(".shared_experts.") {
        ArgName::MOE_SHARED_EXPERT_GLU_INTERLEAVE_SIZE
    } else {
        return Ok(view);
    };
    let Some(run) = args.size(arg).filter(|&run| run > 0) else { return Ok(view) };
    let mut view = view;
    if ranks > 1 {
        let half = first_dim(&view) / ranks.saturating_mul(2);
        view = view.split_axis(0, half)?.split_axis(0, ranks)?.transpose(0, 1)?;
        view = view.merge_axes(0)?.merge_axes(0)?;
    }
    let rows = first_dim(&view) / ranks.max(1);
    let by_rank = view.split_axis(0, rows)?.split_axis(1, 2 * run)?.split_axis(2, run)?;
    let by_half = by_rank.transpose(1, 2)?.transpose(0, 1)?;
    Ok(by_half.merge_axes(0)?.merge_axes(0)?.merge_axes(0)?)
}

impl Shard {
    fn reshaped(&self, shape: &[u64]) -> Result<LogicalTensor, LayoutError> {
        let stored = self.tensor.view(shape).ok_or_else(|| LayoutError::NotContiguous {
            shape: self.tensor.shape().to_vec(),
            wanted: shape.to_vec(),
        })?;
        Ok(LogicalTensor::from_stored(&stored, Arc::clone(&self.name)))
    }
}

fn first_dim(view: &LogicalTensor) -> u64 {
    view.shape().first().copied().unwrap_or(0)
}

fn two_dims(stored: &StoredTensor) -> Result<[u64; 2], LayoutError> {
    <[u64; 2]>::try_from(stored.shape())
        .map_err(|_| LayoutError::NotAMatrix { shape: stored.shape().to_vec() })
}

fn divide(size: u64, parts: u64, stored: &StoredTensor) -> Result<u64, LayoutError> {
    if size.is_multiple_of(parts) {
        return Ok(size / parts);
    }
    Err(TensorError::NotDivisible { dim: 0, inner: parts, shape: stored.shape().to_vec() }.into())
}
