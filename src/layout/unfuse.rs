//! What one rank stores fused, taken apart: each part a view, under the name it has alone.
//!
//! Here belong tensors whose stored shape or row order is not that of the canonical parameter: experts
//! in one tensor, latent attention's joint projections, the head orders of old checkpoint versions.
//! All of it is local to a rank; how the parts of the ranks go together is [`super::merge`]'s business.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::base::limits::{ENTRY, LIMITS};
use crate::names::pattern::SuffixTable;
use crate::tensor::{LogicalTensor, StoredTensor, TensorError};

use super::merge::RankPart;
use super::sections::{Module, Shapes};
use super::{HeadOrder, LayoutError, ParallelLayout, RankCoord, RunArgs};

/// A rank's tensor under its canonical name, indices still the rank's own.
#[derive(Debug, Clone)]
pub(super) struct Local {
    /// Canonical name.
    pub name: String,
    /// What the rank holds of it.
    pub part: RankPart,
}

impl Local {
    /// About how many bytes it takes.
    fn metadata(&self) -> usize {
        self.name.len() + ENTRY * self.part.tensor.pieces().len().max(1)
    }
}

/// One of a rank's tensors, by canonical name.
#[derive(Debug, Clone)]
pub(super) struct Named {
    /// The name in the file.
    pub stored_name: Arc<str>,
    /// The tensor.
    pub stored: StoredTensor,
    /// It only tells names and shapes, see [`super::assemble_beside`].
    pub is_shape_only: bool,
}

/// All the tensors of one model chunk of one rank, by canonical name.
pub(super) type RankTensors = BTreeMap<String, Named>;

impl Shapes for RankTensors {
    fn shape(&self, name: &str, _: RankCoord) -> Option<&[u64]> {
        Some(self.get(name)?.stored.shape())
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
    /// The first linear of a gated MLP, whose gate and up rows may alternate.
    Interleaved,
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
    ("linear_fc1.{weight,bias}",                   Fusion::Interleaved),
];

static TABLE: LazyLock<SuffixTable<Fusion>> =
    LazyLock::new(|| SuffixTable::new(FUSIONS.iter().copied()));

/// Takes one rank's tensors apart. A tensor that cannot be is reported to `problem`; the others go on.
pub(super) fn unfuse(
    tensors: &RankTensors,
    rank: RankCoord,
    layout: &ParallelLayout,
    args: &RunArgs,
    order: HeadOrder,
    mut problem: impl FnMut(&Named, LayoutError),
) -> Vec<Local> {
    let chunk = RankChunk { tensors, rank, layout, args, order };
    let mut locals = Vec::with_capacity(tensors.len());
    let mut metadata = 0;
    for (name, named) in tensors {
        match chunk.parts(name, named) {
            Ok(mut parts) => {
                for part in &mut parts {
                    part.part.is_shape_only = named.is_shape_only;
                }
                metadata += parts.iter().map(Local::metadata).sum::<usize>();
                locals.extend(parts);
            }
            Err(error) => problem(named, error),
        }
        if metadata > LIMITS.metadata {
            problem(named, LayoutError::TooManyParts);
            break;
        }
    }
    locals
}

struct RankChunk<'a> {
    tensors: &'a RankTensors,
    rank: RankCoord,
    layout: &'a ParallelLayout,
    args: &'a RunArgs,
    order: HeadOrder,
}

impl RankChunk<'_> {
    fn parts(&self, name: &str, named: &Named) -> Result<Vec<Local>, LayoutError> {
        let Some(found) = TABLE.find(name) else {
            return Ok(vec![self.local(name.to_owned(), named.view())]);
        };
        let prefix = found.prefix;
        match *found.value {
            Fusion::GroupedFc1 => self.grouped_fc1(prefix, named),
            Fusion::GroupedFc2 => self.grouped_fc2(prefix, named),
            Fusion::Packed => self.packed(prefix, &name[prefix.len()..], named),
            Fusion::LatentDown => self.latent_down(prefix, named),
            Fusion::Qkv { sections } => self.qkv(name, prefix, sections, named),
            Fusion::HeadParts { other, joined } => self.head_parts(prefix, named, other, joined),
            Fusion::HeadPartsTail { first } => {
                // Taken with its first half; alone it has no canonical place.
                let is_paired = self.sibling(&format!("{prefix}self_attention."), first).is_some();
                let alone = || vec![self.local(name.to_owned(), named.view())];
                Ok(if is_paired { Vec::new() } else { alone() })
            }
            Fusion::Interleaved => Ok(vec![self.deinterleaved(name, named.view())?]),
        }
    }

    fn local(&self, name: String, tensor: LogicalTensor) -> Local {
        Local { name, part: RankPart::new(self.rank, tensor) }
    }

    fn sibling(&self, prefix: &str, suffix: &str) -> Option<&Named> {
        self.tensors.get(&format!("{prefix}{suffix}"))
    }

    fn module<'m>(&'m self, prefix: &'m str) -> Module<'m> {
        Module { shapes: self.tensors, prefix, rank: self.rank, args: self.args }
    }

    /// Experts of this rank's grouped tensors: by the router's rows, else as `args` says.
    fn local_experts(&self, prefix: &str) -> Result<u64, LayoutError> {
        let experts = match self.module(prefix).dim("mlp.router.weight", 0) {
            Some(rows) => rows,
            None => self.args.need("num_experts")?,
        };
        let shares = self.layout.declared_expert_shares;
        if experts == 0 || shares == 0 || experts % shares != 0 {
            return Err(LayoutError::ExpertsNotDivisible { experts, shares });
        }
        Ok(experts / shares)
    }

    fn grouped_fc1(&self, prefix: &str, named: &Named) -> Result<Vec<Local>, LayoutError> {
        let experts = self.local_experts(prefix)?;
        let [hidden, columns] = two_dims(&named.stored)?;
        let width = divide(columns, experts, &named.stored)?;
        let view = named.reshaped(&[experts, hidden, width])?;
        self.each_expert(prefix, "linear_fc1.weight", experts, |index| {
            view.select(0, index)?.transpose(0, 1)
        })
    }

    fn grouped_fc2(&self, prefix: &str, named: &Named) -> Result<Vec<Local>, LayoutError> {
        let experts = self.local_experts(prefix)?;
        let [rows, hidden] = two_dims(&named.stored)?;
        let width = divide(rows, experts, &named.stored)?;
        let view = named.reshaped(&[experts, width, hidden])?;
        self.each_expert(prefix, "linear_fc2.weight", experts, |index| {
            view.select(0, index)?.transpose(0, 1)
        })
    }

    fn packed(&self, prefix: &str, suffix: &str, named: &Named) -> Result<Vec<Local>, LayoutError> {
        let linear = suffix.trim_start_matches("mlp.experts.");
        let view = named.view();
        let experts = view.shape().first().copied().unwrap_or(0);
        self.each_expert(prefix, linear, experts, |index| view.select(0, index))
    }

    fn each_expert(
        &self,
        prefix: &str,
        linear: &str,
        experts: u64,
        view: impl Fn(u64) -> Result<LogicalTensor, TensorError>,
    ) -> Result<Vec<Local>, LayoutError> {
        if experts > LIMITS.experts {
            return Err(LayoutError::TooManyExperts { experts });
        }
        let mut locals = Vec::new();
        let mut metadata = 0;
        for index in 0..experts {
            let name = format!("{prefix}mlp.experts.local_experts.{index}.{linear}");
            let tensor = view(index)?;
            let local = if linear.starts_with("linear_fc1.") {
                self.deinterleaved(&name, tensor)?
            } else {
                self.local(name, tensor)
            };
            metadata += local.metadata();
            if metadata > LIMITS.metadata {
                return Err(LayoutError::TooManyParts);
            }
            locals.push(local);
        }
        Ok(locals)
    }

    /// `[q; kv + rope]`, whole on every rank or each rank its part of both (core 0.17 on, `--mla-down-proj-fusion`).
    fn latent_down(&self, prefix: &str, named: &Named) -> Result<Vec<Local>, LayoutError> {
        let attention = format!("{prefix}self_attention.");
        let module = self.module(&attention);
        let (query, key_value) = (module.latent_query_rows()?, module.latent_key_value_rows()?);
        let view = named.view();
        let rows = first_dim(&view);
        let tp = self.layout.declared_tp;
        let (query, whole) = if rows == query + key_value {
            (query, true)
        } else if rows.checked_mul(tp) == Some(query + key_value) && query % tp == 0 {
            (query / tp, false)
        } else {
            return Err(LayoutError::UnexpectedRows { rows, wanted: query + key_value });
        };
        self.down_projections(&attention, &view, query, "linear_q_down_proj.weight", whole)
    }

    fn down_projections(
        &self,
        attention: &str,
        view: &LogicalTensor,
        query_rows: u64,
        query_name: &str,
        whole: bool,
    ) -> Result<Vec<Local>, LayoutError> {
        let rest = first_dim(view).saturating_sub(query_rows);
        let part = |suffix: &str, start, len| {
            let tensor = view.slice(0, start, len)?;
            let mut local = self.local(format!("{attention}{suffix}"), tensor);
            local.part.is_whole = whole;
            Ok::<_, LayoutError>(local)
        };
        Ok(vec![
            part(query_name, 0, query_rows)?,
            part("linear_kv_down_proj.weight", query_rows, rest)?,
        ])
    }

    fn qkv(
        &self,
        name: &str,
        prefix: &str,
        sections: u64,
        named: &Named,
    ) -> Result<Vec<Local>, LayoutError> {
        let attention = format!("{prefix}self_attention.");
        let module = self.module(&attention);
        let is_latent = module.latent_key_value_columns().is_some();
        if is_latent && name.ends_with("linear_qkv.weight") {
            let view = named.view();
            let key_value = module.latent_key_value_rows()?;
            let query = first_dim(&view).saturating_sub(key_value);
            let has_up = ["linear_q_up_proj.weight", "linear_qk_nope.weight"]
                .iter()
                .any(|suffix| self.sibling(&attention, suffix).is_some());
            let query_name =
                if has_up { "linear_q_down_proj.weight" } else { "linear_q_proj.weight" };
            return self.down_projections(&attention, &view, query, query_name, true);
        }
        let is_legacy = named.stored_name.contains("key_value.");
        let tensor = match self.order {
            HeadOrder::HeadsFirst => named.view(),
            order if is_legacy => self.in_head_order(&named.view(), sections, order)?,
            _ => named.view(),
        };
        Ok(vec![self.local(name.to_owned(), tensor)])
    }

    /// Rows as `[heads, sections, head size]`, whatever order an old version wrote.
    fn in_head_order(
        &self,
        view: &LogicalTensor,
        sections: u64,
        order: HeadOrder,
    ) -> Result<LogicalTensor, LayoutError> {
        let heads = self.args.need("num_attention_heads")? / self.layout.declared_tp.max(1);
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
        named: &Named,
        other: &str,
        joined: &str,
    ) -> Result<Vec<Local>, LayoutError> {
        let attention = format!("{prefix}self_attention.");
        let Some(other) = self.sibling(&attention, other) else {
            return Err(LayoutError::HalfMissing { other: format!("{attention}{other}") });
        };
        let heads =
            (self.args.need("num_attention_heads")? / self.layout.declared_tp.max(1)).max(1);
        let by_head = |view: LogicalTensor| view.split_axis(0, first_dim(&view) / heads);
        let parts = [by_head(named.view())?, by_head(other.view())?];
        let tensor = LogicalTensor::concat(1, parts)?.merge_axes(0)?;
        Ok(vec![self.local(format!("{attention}{joined}"), tensor)])
    }

    fn deinterleaved(&self, name: &str, view: LogicalTensor) -> Result<Local, LayoutError> {
        let tensor = deinterleaved(name, view, self.args, 1)?;
        Ok(self.local(name.to_owned(), tensor))
    }
}

/// All gate rows, then all up rows, of a first linear whose rows alternate where `*_glu_interleave_size` says so. Where
/// it holds the parts of several ranks, the first halves of all of them come first, then the second halves.
pub(super) fn deinterleaved(
    name: &str,
    view: LogicalTensor,
    args: &RunArgs,
    ranks: u64,
) -> Result<LogicalTensor, LayoutError> {
    let arg = if name.contains(".experts.") {
        "moe_mlp_glu_interleave_size"
    } else if name.contains(".shared_experts.") {
        "moe_shared_expert_glu_interleave_size"
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

impl Named {
    fn view(&self) -> LogicalTensor {
        LogicalTensor::from_stored(&self.stored, Arc::clone(&self.stored_name))
    }

    fn reshaped(&self, shape: &[u64]) -> Result<LogicalTensor, LayoutError> {
        let stored = self.stored.view(shape).ok_or_else(|| LayoutError::NotContiguous {
            shape: self.stored.shape().to_vec(),
            wanted: shape.to_vec(),
        })?;
        Ok(LogicalTensor::from_stored(&stored, Arc::clone(&self.stored_name)))
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
