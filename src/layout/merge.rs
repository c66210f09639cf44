//! The shards of one parameter -> one logical tensor, by its rule.

use std::collections::BTreeMap;

use crate::names::Name;
use crate::tensor::LogicalTensor;

use super::rules::{Fused, Latent, Rules, Sharding};
use super::{LayoutError, Local, ParallelLayout, RankCoord, RunArgs};

/// All ranks' tensors by global canonical name.
pub(super) type Groups = BTreeMap<Name, Vec<Local>>;

/// A parameter put together.
#[derive(Debug)]
pub struct Merged {
    /// The whole tensor.
    pub tensor: LogicalTensor,
    /// Its rows are a vocabulary, padded as the layout wants.
    pub is_vocab: bool,
    /// No rule knows the name; one shard held all of it, so nothing had to be known.
    pub has_no_rule: bool,
}

/// Most copies of its values that a gated delta product has; Megatron's default is 3.
const MAX_HOUSEHOLDER: u64 = 64;

/// What merging needs to know beside the shards themselves.
pub(super) struct Merger<'a> {
    pub groups: &'a Groups,
    pub rules: &'a Rules,
    pub layout: &'a ParallelLayout,
    pub args: &'a RunArgs,
}

/// How the parts of one parameter go together.
pub(super) enum Join {
    /// All parts are the same.
    Copies,
    /// One behind the other along a dimension.
    Along(usize),
    /// Section by section along dimension 0; a row of sizes for each part.
    Sections(Vec<Vec<u64>>),
}

impl Merger<'_> {
    /// Puts a parameter together from what every rank holds of it.
    pub(super) fn merge(&self, name: &Name, locals: &[Local]) -> Result<Merged, LayoutError> {
        let sharding = self.rules.find(name.as_str());
        let mut stages: BTreeMap<(u64, u64), Vec<&Local>> = BTreeMap::new();
        for local in locals.iter().filter(|local| !local.is_shape_only) {
            stages.entry((local.rank.pp, local.rank.vp)).or_default().push(local);
        }
        // What several stages hold (embeddings beside an MTP layer, say) is one parameter and its copies.
        let mut whole: Option<LogicalTensor> = None;
        for locals in stages.into_values() {
            let stage = self.merge_stage(name, sharding, locals)?;
            match &mut whole {
                None => whole = Some(stage),
                Some(first) => first.add_copy(stage)?,
            }
        }
        let tensor = whole.ok_or(LayoutError::NoShard)?;
        let is_vocab = sharding == Some(Sharding::Vocab);
        Ok(Merged { tensor, is_vocab, has_no_rule: sharding.is_none() })
    }

    fn merge_stage(
        &self,
        name: &Name,
        sharding: Option<Sharding>,
        mut locals: Vec<&Local>,
    ) -> Result<LogicalTensor, LayoutError> {
        locals.sort_by_key(|local| (local.rank.ep, local.rank.tp));
        let is_expert = super::is_expert(name.as_str());
        let width = if is_expert { self.layout.etp } else { self.layout.tp };
        // Of what several ranks hold alike, the first rank's is the part and the others are copies of it.
        let mut parts: BTreeMap<u64, (&Local, LogicalTensor)> = BTreeMap::new();
        for local in locals {
            let slot = local.rank.tp % width;
            match parts.get_mut(&slot) {
                None => {
                    parts.insert(slot, (local, local.tensor.clone()));
                }
                Some((_, part)) => part.add_copy(local.tensor.clone())?,
            }
        }
        if let Some(slot) = (0..width).find(|slot| !parts.contains_key(slot)) {
            return Err(LayoutError::RankMissing {
                axis: if is_expert { "etp" } else { "tp" },
                slot,
            });
        }
        let (firsts, parts): (Vec<&Local>, Vec<LogicalTensor>) = parts.into_values().unzip();
        // Where one part is all there is, nothing has to be known of how it was cut.
        let join = if parts.len() == 1 || firsts.iter().all(|local| local.whole) {
            Join::Copies
        } else {
            let sharding = sharding.ok_or(LayoutError::NoRule)?;
            self.join(name.as_str(), sharding, &firsts)?
        };
        put_together(&join, parts).map_err(|error| match error {
            LayoutError::Tensor(_) => parts_disagree(&firsts),
            other => other,
        })
    }

    fn join(&self, name: &str, sharding: Sharding, parts: &[&Local]) -> Result<Join, LayoutError> {
        match sharding {
            Sharding::Replicated => Ok(Join::Copies),
            Sharding::Split(dim) => Ok(Join::Along(dim)),
            Sharding::Vocab => Ok(Join::Along(0)),
            Sharding::Gated => self.gated(name, parts),
            Sharding::Mamba(fused) => self.mamba(name, fused, parts),
            Sharding::DeltaNet(fused) => self.delta_net(name, fused, parts),
            Sharding::Latent(latent) => self.latent(name, latent, parts),
            Sharding::QueryKeyValue => self.query_key_value(name, parts),
        }
    }

    /// Gated if the rows of the first linear are twice the columns of the second one.
    fn gated(&self, name: &str, parts: &[&Local]) -> Result<Join, LayoutError> {
        let module = &name[..name.rfind("linear_fc1.").unwrap_or(0)];
        let rows: Vec<u64> = parts.iter().map(|part| rows(part)).collect();
        let columns = parts
            .iter()
            .map(|part| self.dim(module, "linear_fc2.weight", 1, part.rank))
            .sum::<Option<u64>>();
        let total: u64 = rows.iter().sum();
        let is_gated = match columns {
            Some(columns) if total == columns * 2 => true,
            Some(columns) if total == columns => false,
            Some(columns) => return Err(LayoutError::NeitherGatedNorNot { rows: total, columns }),
            None if self.args.get("swiglu").is_some() => {
                self.args.is_on("swiglu") || self.args.is_on("quick_geglu")
            }
            None => return Err(LayoutError::ArgMissing { arg: "swiglu" }),
        };
        if !is_gated {
            return Ok(Join::Along(0));
        }
        Ok(Join::Sections(rows.into_iter().map(|rows| vec![rows / 2, rows - rows / 2]).collect()))
    }

    /// Section sizes of a Mamba-2 or gated-delta-product mixer, from the shapes beside it
    /// (Megatron-LM `core/ssm/mamba_mixer.py`): in_proj is z, x, B, C, dt; conv1d is x, B, C.
    fn mamba(&self, name: &str, fused: Fused, parts: &[&Local]) -> Result<Join, LayoutError> {
        let module = &name[..name.rfind("mixer.").unwrap_or(0)];
        let sections = parts.iter().map(|part| {
            let size = |suffix, dim| self.need(module, suffix, dim, part.rank);
            let inner = size("mixer.out_proj.weight", 1)?;
            let heads = size("mixer.A_log", 0)?;
            let conv = size("mixer.conv1d.weight", 0)?;
            let projected = size("mixer.in_proj.weight", 0)?;
            // A gated delta product has a number of copies of x, of B and of dt; Mamba-2 has none to spare.
            let spare = projected.checked_sub(inner + conv + heads);
            let spare = spare.filter(|spare| heads > 0 && spare % heads == 0);
            let copies = spare.ok_or(LayoutError::UnexpectedRows {
                rows: projected,
                wanted: inner + conv + heads,
            })? / heads.max(1);
            if copies > MAX_HOUSEHOLDER {
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
        });
        Ok(Join::Sections(sections.collect::<Result<_, LayoutError>>()?))
    }

    /// Section sizes of a gated delta net: in_proj is q, k, v, z, beta, alpha; conv1d is q, k, v.
    fn delta_net(&self, name: &str, fused: Fused, parts: &[&Local]) -> Result<Join, LayoutError> {
        let module = &name[..name.rfind("self_attention.").unwrap_or(0)];
        let is_whole = |part: &&Local| {
            self.dim(module, "self_attention.in_proj_qkvz.weight", 0, part.rank).is_some()
        };
        if parts.iter().all(is_whole) {
            return Ok(Join::Copies);
        }
        match fused {
            Fused::Heads => return Ok(Join::Along(0)),
            Fused::OutProj => return Ok(Join::Along(1)),
            Fused::InProj | Fused::Conv => {}
        }
        let sections = parts.iter().map(|part| {
            let size = |suffix, dim| self.need(module, suffix, dim, part.rank);
            let value = size("self_attention.out_proj.weight", 1)?;
            let heads = size("self_attention.A_log", 0)?;
            let conv = size("self_attention.conv1d.weight", 0)?;
            let projected = size("self_attention.in_proj.weight", 0)?;
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
        });
        Ok(Join::Sections(sections.collect::<Result<_, LayoutError>>()?))
    }

    /// Split in core 0.10 to 0.13 and in local layers, replicated from 0.14 on: the rows tell.
    fn latent(&self, name: &str, latent: Latent, parts: &[&Local]) -> Result<Join, LayoutError> {
        let module = &name[..name.rfind("linear_").unwrap_or(0)];
        let rank = parts[0].rank;
        let arg = |arg| self.args.size(arg).ok_or(LayoutError::ArgMissing { arg });
        let wanted = match latent {
            Latent::Query => match self.dim(module, "linear_q_up_proj.weight", 1, rank) {
                Some(columns) => columns,
                None => arg("q_lora_rank")?,
            },
            Latent::KeyValue => {
                let compressed = match self.dim(module, "linear_kv_up_proj.weight", 1, rank) {
                    Some(columns) => columns,
                    None => arg("kv_lora_rank")?,
                };
                compressed + arg("qk_pos_emb_head_dim")?
            }
        };
        let sizes: Vec<u64> = parts.iter().map(|part| rows(part)).collect();
        if sizes.iter().all(|&rows| rows == wanted) {
            return Ok(Join::Copies);
        }
        let total = sizes.iter().sum();
        if total == wanted {
            return Ok(Join::Along(0));
        }
        Err(LayoutError::UnexpectedRows { rows: total, wanted })
    }

    /// The projection behind the attention has a column for every query row; key and value share the other rows.
    fn query_key_value(&self, name: &str, parts: &[&Local]) -> Result<Join, LayoutError> {
        let module = &name[..name.rfind("c_attn.").unwrap_or(0)];
        let sections = parts.iter().map(|part| {
            let query = self.need(module, "c_proj.weight", 1, part.rank)?;
            let others = even_split(rows(part).checked_sub(query), 2)?;
            Ok([vec![query], others].concat())
        });
        Ok(Join::Sections(sections.collect::<Result<_, LayoutError>>()?))
    }

    /// A dimension of another tensor of the same module on the same rank.
    fn dim(&self, module: &str, suffix: &str, dim: usize, rank: RankCoord) -> Option<u64> {
        let group = self.groups.get(&Name::new(format!("{module}{suffix}")))?;
        let local = group.iter().find(|local| local.rank == rank)?;
        local.tensor.shape().get(dim).copied()
    }

    fn need(
        &self,
        module: &str,
        suffix: &str,
        dim: usize,
        rank: RankCoord,
    ) -> Result<u64, LayoutError> {
        self.dim(module, suffix, dim, rank)
            .ok_or_else(|| LayoutError::SiblingMissing { sibling: format!("{module}{suffix}") })
    }
}

fn parts_disagree(parts: &[&Local]) -> LayoutError {
    let part = |local: &&Local| {
        let (shape, dtype) = (local.tensor.shape(), local.tensor.dtype());
        format!("tp {} holds {shape:?} of {dtype}", local.rank.tp)
    };
    LayoutError::PartsDisagree { parts: parts.iter().map(part).collect() }
}

pub(super) fn put_together(
    join: &Join,
    parts: Vec<LogicalTensor>,
) -> Result<LogicalTensor, LayoutError> {
    match join {
        Join::Along(dim) => Ok(LogicalTensor::concat(*dim, parts)?),
        Join::Copies => {
            let mut parts = parts.into_iter();
            let mut first = parts.next().ok_or(LayoutError::NoShard)?;
            for part in parts {
                first.add_copy(part)?;
            }
            Ok(first)
        }
        Join::Sections(sizes) => {
            let count = sizes.first().map_or(0, Vec::len);
            let mut sections = Vec::with_capacity(count * parts.len());
            let mut starts = vec![0; parts.len()];
            for section in 0..count {
                for ((part, sizes), start) in parts.iter().zip(sizes).zip(&mut starts) {
                    sections.push(part.slice(0, *start, sizes[section])?);
                    *start += sizes[section];
                }
            }
            for (part, start) in parts.iter().zip(starts) {
                let rows = part.shape().first().copied().unwrap_or(0);
                if rows != start {
                    return Err(LayoutError::UnexpectedRows { rows, wanted: start });
                }
            }
            Ok(LogicalTensor::concat(0, sections)?)
        }
    }
}

fn rows(local: &Local) -> u64 {
    local.tensor.shape().first().copied().unwrap_or(0)
}

fn repeat(size: u64, times: u64) -> Vec<u64> {
    (0..times).map(|_| size).collect()
}

pub(super) fn even_split(rows: Option<u64>, parts: u64) -> Result<Vec<u64>, LayoutError> {
    match rows {
        Some(rows) if rows % parts == 0 => Ok(repeat(rows / parts, parts)),
        _ => Err(LayoutError::UnexpectedRows { rows: rows.unwrap_or(0), wanted: parts }),
    }
}
