//! The sections of a parameter: in which order the shards of several ranks make it up.
//!
//! Most of it follows from the sizes of other tensors of the same module on the same rank.

use crate::base::limits::LIMITS;
use crate::names::Name;

use super::merge::{RankPart, RankParts};
use super::rules::{Fused, Latent, Sharding};
use super::{ArgName, LayoutError, RankCoord, RunArgs};

/// The places of the shards of one parameter in it.
pub(super) enum Placement {
    /// Every shard is all of it.
    Replicate,
    /// One behind the other along a dimension.
    Shard(usize),
    /// Section by section along a dimension; a row of sizes for each shard.
    Sections { dim: usize, sizes: Vec<Vec<u64>> },
}

/// Tensors whose sizes can be looked up by name and rank.
pub(super) trait Shapes {
    /// The shape of a tensor on one rank.
    fn shape(&self, name: &str, rank: RankCoord) -> Option<&[u64]>;
}

impl Shapes for RankParts {
    fn shape(&self, name: &str, rank: RankCoord) -> Option<&[u64]> {
        let part = self.get(&Name::new(name))?.iter().find(|part| part.rank == rank)?;
        Some(part.tensor.shape())
    }
}

/// A module on one rank, where the sizes of its tensors are looked up.
#[derive(Clone, Copy)]
pub(super) struct Module<'a> {
    /// All tensors.
    pub shapes: &'a dyn Shapes,
    /// Its name, the dot behind it included.
    pub prefix: &'a str,
    /// The rank.
    pub rank: RankCoord,
    /// The run's arguments, which say what no shape shows.
    pub args: &'a RunArgs,
}

impl Module<'_> {
    /// A dimension of one of its tensors.
    pub(super) fn dim(&self, suffix: &str, dim: usize) -> Option<u64> {
        let name = format!("{}{suffix}", self.prefix);
        self.shapes.shape(&name, self.rank)?.get(dim).copied()
    }

    fn need(&self, suffix: &str, dim: usize) -> Result<u64, LayoutError> {
        self.dim(suffix, dim).ok_or_else(|| LayoutError::SiblingMissing {
            sibling: format!("{}{suffix}", self.prefix),
        })
    }

    /// Rows of a latent attention's query down-projection over all ranks.
    pub(super) fn latent_query_rows(&self) -> Result<u64, LayoutError> {
        match self.dim("linear_q_up_proj.weight", 1) {
            Some(columns) => Ok(columns),
            None => self.args.need(ArgName::Q_LORA_RANK),
        }
    }

    /// Columns of a latent attention's key-value up-projection: as one tensor, or the first of two.
    pub(super) fn latent_key_value_columns(&self) -> Option<u64> {
        let names = ["linear_kv_up_proj.weight", "linear_kv_nope.weight"];
        names.iter().find_map(|name| self.dim(name, 1))
    }

    /// Rows of a latent attention's key-value down-projection over all ranks, rotary ones included.
    pub(super) fn latent_key_value_rows(&self) -> Result<u64, LayoutError> {
        let compressed = match self.latent_key_value_columns() {
            Some(columns) => columns,
            None => self.args.need(ArgName::KV_LORA_RANK)?,
        };
        Ok(compressed + self.args.need(ArgName::QK_POS_EMB_HEAD_DIM)?)
    }

    /// Section sizes of a Mamba-2 or gated-delta-product mixer (Megatron-LM `core/ssm/mamba_mixer.py`): in_proj is
    /// z, x, B, C, dt; conv1d is x, B, C.
    fn mamba(&self, fused: Fused) -> Result<Vec<u64>, LayoutError> {
        let inner = self.need("mixer.out_proj.weight", 1)?;
        let heads = self.need("mixer.A_log", 0)?;
        let conv = self.need("mixer.conv1d.weight", 0)?;
        let projected = self.need("mixer.in_proj.weight", 0)?;
        // A gated delta product has a number of copies of x, of B and of dt; Mamba-2 has none to spare.
        let spare = projected.checked_sub(inner + conv + heads);
        let spare = spare.filter(|spare| heads > 0 && spare % heads == 0);
        let copies = spare
            .ok_or(LayoutError::UnexpectedRows { rows: projected, wanted: inner + conv + heads })?
            / heads.max(1);
        if copies > LIMITS.householders {
            return Err(LayoutError::UnexpectedRows { rows: projected, wanted: inner + conv });
        }
        let (values, states) = if copies == 0 {
            (vec![inner], even_split(conv.checked_sub(inner), 2)?)
        } else {
            let states = even_split(conv.checked_sub(inner * copies), copies + 1)?;
            (repeat(inner, copies), states)
        };
        let conv = values.into_iter().chain(states);
        Ok(match fused {
            Fused::Conv => conv.collect(),
            Fused::InProj | Fused::Heads | Fused::OutProj => {
                std::iter::once(inner).chain(conv).chain(repeat(heads, copies + 1)).collect()
            }
        })
    }

    /// Section sizes of a gated delta net: in_proj is q, k, v, z, beta, alpha; conv1d is q, k, v.
    fn delta_net(&self, fused: Fused) -> Result<Vec<u64>, LayoutError> {
        let value = self.need("self_attention.out_proj.weight", 1)?;
        let heads = self.need("self_attention.A_log", 0)?;
        let conv = self.need("self_attention.conv1d.weight", 0)?;
        let projected = self.need("self_attention.in_proj.weight", 0)?;
        let key = even_split(conv.checked_sub(value), 2)?[0];
        if fused == Fused::Conv {
            return Ok(vec![key, key, value]);
        }
        let first = 2 * (key + value + heads);
        let second = 4 * key + 3 * value;
        match projected {
            rows if rows == first => Ok(vec![key, key, value, value, heads, heads]),
            rows if rows == second => Ok(vec![key, key, value, value, key, key, value]),
            rows => Err(LayoutError::UnexpectedRows { rows, wanted: first }),
        }
    }
}

/// The first linears of an MLP, and the second one beside each.
static SECOND_LINEARS: &[(&str, &str)] = &[
    ("linear_fc1.", "linear_fc2.weight"),
    ("linear1.", "linear2.weight"),
    ("dense_h_to_4h.", "dense_4h_to_h.weight"),
    ("fc1_", "fc2_weight"),
];

/// The query-key-value projections, and the output projection beside each.
static OUTPUT_PROJECTIONS: &[(&str, &str)] =
    &[("query_key_value.", "dense.weight"), ("qkv.", "proj.weight"), ("c_attn.", "c_proj.weight")];

/// The shards of one parameter, rank by rank, and where sizes are looked up.
pub(super) struct Shards<'a> {
    pub name: &'a str,
    pub parts: &'a [&'a RankPart],
    pub shapes: &'a dyn Shapes,
    pub args: &'a RunArgs,
}

impl<'a> Shards<'a> {
    /// The places of the shards under a rule.
    pub(super) fn placement(&self, sharding: &Sharding) -> Result<Placement, LayoutError> {
        match sharding {
            Sharding::Replicated | Sharding::Averaged | Sharding::RowBias => {
                Ok(Placement::Replicate)
            }
            Sharding::Split(dim) => Ok(Placement::Shard(*dim)),
            Sharding::Vocab => Ok(Placement::Shard(0)),
            Sharding::Halves => self.halves(),
            Sharding::Gated => self.gated(),
            Sharding::QueryKeyValue => {
                Ok(Placement::Sections { dim: 0, sizes: self.query_key_value()? })
            }
            Sharding::Heads => {
                let sizes = self.query_key_value()?;
                // As many keys as queries: whole heads lie one behind the other.
                let is_by_head = sizes.iter().all(|sizes| sizes[0] == sizes[1]);
                let sections = Placement::Sections { dim: 0, sizes };
                Ok(if is_by_head { Placement::Shard(0) } else { sections })
            }
            Sharding::Sections { dim, sizes } => {
                let ranks = self.parts.len() as u64;
                let of_rank = sizes.iter().map(|size| Ok(even_split(Some(*size), ranks)?[0]));
                let of_rank: Vec<u64> = of_rank.collect::<Result<_, LayoutError>>()?;
                Ok(Placement::Sections { dim: *dim, sizes: vec![of_rank; self.parts.len()] })
            }
            Sharding::Mamba(fused) => {
                self.sections(|part| self.module("mixer.", part).mamba(*fused))
            }
            Sharding::DeltaNet(fused) => self.delta_net(*fused),
            Sharding::Latent(latent) => self.latent(*latent),
        }
    }

    /// The module that holds the parameter on a part's rank: all of the name before `component`.
    fn module(&self, component: &str, part: &RankPart) -> Module<'a> {
        let prefix = &self.name[..self.name.rfind(component).unwrap_or(0)];
        Module { shapes: self.shapes, prefix, rank: part.rank, args: self.args }
    }

    fn sections(
        &self,
        sizes: impl Fn(&RankPart) -> Result<Vec<u64>, LayoutError>,
    ) -> Result<Placement, LayoutError> {
        let sizes = self.parts.iter().map(|part| sizes(part)).collect::<Result<_, _>>()?;
        Ok(Placement::Sections { dim: 0, sizes })
    }

    fn halves(&self) -> Result<Placement, LayoutError> {
        self.sections(|part| even_split(Some(part.rows()), 2))
    }

    /// Gated if the rows of the first linear are twice the columns of the second one.
    fn gated(&self) -> Result<Placement, LayoutError> {
        let rows: u64 = self.parts.iter().map(|part| part.rows()).sum();
        let columns = self.columns_beside(SECOND_LINEARS).ok();
        let is_gated = match columns.map(|columns| columns.iter().sum::<u64>()) {
            Some(columns) if columns.checked_mul(2) == Some(rows) => true,
            Some(columns) if columns == rows => false,
            Some(columns) => return Err(LayoutError::NeitherGatedNorNot { rows, columns }),
            None if self.args.get(ArgName::SWIGLU).is_some() => {
                self.args.is_on(ArgName::SWIGLU) || self.args.is_on(ArgName::QUICK_GEGLU)
            }
            None => return Err(LayoutError::ArgMissing { arg: ArgName::SWIGLU }),
        };
        if is_gated { self.halves() } else { Ok(Placement::Shard(0)) }
    }

    /// The projection behind the attention has a column for every query row; key and value share the other rows.
    fn query_key_value(&self) -> Result<Vec<Vec<u64>>, LayoutError> {
        let queries = self.columns_beside(OUTPUT_PROJECTIONS)?;
        let sizes = self.parts.iter().zip(queries).map(|(part, queries)| {
            let others = even_split(part.rows().checked_sub(queries), 2)?;
            Ok([vec![queries], others].concat())
        });
        sizes.collect()
    }

    fn delta_net(&self, fused: Fused) -> Result<Placement, LayoutError> {
        let module = |part: &RankPart| self.module("self_attention.", part);
        let is_whole =
            |part: &&RankPart| module(part).dim("self_attention.in_proj_qkvz.weight", 0).is_some();
        match fused {
            _ if self.parts.iter().all(is_whole) => Ok(Placement::Replicate),
            Fused::Heads => Ok(Placement::Shard(0)),
            Fused::OutProj => Ok(Placement::Shard(1)),
            Fused::InProj | Fused::Conv => self.sections(|part| module(part).delta_net(fused)),
        }
    }

    /// Split in core 0.10 to 0.13 and in local layers, replicated from 0.14 on: the rows tell.
    fn latent(&self, latent: Latent) -> Result<Placement, LayoutError> {
        let first = self.parts.first().ok_or(LayoutError::NoShard)?;
        let attention = self.module("linear_", first);
        let wanted = match latent {
            Latent::Query => attention.latent_query_rows()?,
            Latent::KeyValue => attention.latent_key_value_rows()?,
        };
        if self.parts.iter().all(|part| part.rows() == wanted) {
            return Ok(Placement::Replicate);
        }
        match self.parts.iter().map(|part| part.rows()).sum() {
            total if total == wanted => Ok(Placement::Shard(0)),
            rows => Err(LayoutError::UnexpectedRows { rows, wanted }),
        }
    }

    /// The columns of the linear that `pairs` puts beside this one, on every rank.
    fn columns_beside(&self, pairs: &[(&str, &str)]) -> Result<Vec<u64>, LayoutError> {
        let mut pairs = pairs.iter().filter(|(one, _)| self.name.contains(one));
        let (one, other) = pairs.next().ok_or(LayoutError::NoRule)?;
        self.parts.iter().map(|part| self.module(one, part).need(other, 1)).collect()
    }
}

fn repeat(size: u64, times: u64) -> Vec<u64> {
    (0..times).map(|_| size).collect()
}

fn even_split(rows: Option<u64>, parts: u64) -> Result<Vec<u64>, LayoutError> {
    match rows {
        Some(rows) if rows % parts == 0 => Ok(repeat(rows / parts, parts)),
        _ => Err(LayoutError::UnexpectedRows { rows: rows.unwrap_or(0), wanted: parts }),
    }
}
