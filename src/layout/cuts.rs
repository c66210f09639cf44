//! The second table: how GPT-NeoX, Megatron-DeepSpeed and their like cut parameters over tensor parallel ranks.
//!
//! One line a rule, as in [`super::rules`]: the end of a name -> [`Cut`]. Names are those of the writer, so a rule holds
//! for whatever layer stands in front. Sources: gpt-neox main (`megatron/model/transformer.py`, `tools/ckpts/merge20b.py`,
//! `tools/ckpts/convert_neox_to_hf.py`), Megatron-DeepSpeed (`megatron/model/transformer.py`), transformers 4
//! (`convert_bloom_original_checkpoint_to_pytorch.py`), DeepSpeed 0.19 (`checkpoint/ds_to_universal.py`).

use std::collections::BTreeMap;

use crate::names::pattern::SuffixTable;
use crate::names::{Name, is_vocabulary};
use crate::tensor::{LogicalTensor, Merge};

use super::merge::{Join, even_split, put_together};
use super::rules::{Sharding, UserRule};
use super::{LayoutError, Merged};

/// How the shards of one parameter make the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Every rank holds all of it.
    Replicated,
    /// Every rank holds all of it, and where the copies have drifted apart upstream takes their mean.
    Averaged,
    /// The bias of a row-parallel layer: a copy, or a part of a sum where the outputs are added up after it.
    RowBias,
    /// Ranks hold consecutive parts of this dimension.
    Split(usize),
    /// As `Split(0)`, over vocabulary rows that are padded to a multiple that depends on the layout.
    Vocab,
    /// Each rank holds a part of both halves: `[first; second]`.
    Halves,
    /// The first linear of an MLP: [`Cut::Halves`] where it is gated.
    Mlp,
    /// Query, key and value rows: whole heads, or `[q; k; v]` of the rank where several heads share a key.
    Heads,
    /// Each rank holds its part of every one of these sections of a dimension.
    Sections {
        /// The dimension.
        dim: usize,
        /// Sizes of the whole sections.
        sizes: Vec<u64>,
    },
}

use Cut::{Averaged, Halves, Heads, Mlp, Replicated, RowBias, Split, Vocab};

#[rustfmt::skip]
static CUTS: &[(&str, Cut)] = &[
    // embeddings and heads
    ("{word_embeddings,final_linear,lm_head,output_layer}.weight",  Vocab),
    ("{position_embeddings,tokentype_embeddings}.weight",   Replicated),
    ("rm_linear.weight",                                    Split(1)),
    // norms
    ("{input_layernorm,post_attention_layernorm,final_layernorm,norm}.{weight,bias,scale}", Averaged),
    ("{q_layernorm,k_layernorm}.{weight,bias,scale}",       Averaged),
    ("mlp.{layer_norm_weight,layer_norm_bias}",             Averaged),
    // attention
    ("attention.{query_key_value,qkv}.{weight,bias}",       Heads),
    ("attention.{dense,proj}.weight",                       Split(1)),
    ("attention.{dense,proj}.bias",                         RowBias),
    // ... of Megatron-DeepSpeed, which adds row-parallel biases once
    ("self_attention.{query_key_value,query,key_value}.{weight,bias}", Split(0)),
    ("self_attention.dense.weight",                         Split(1)),
    ("self_attention.dense.bias",                           Averaged),
    // MLP
    ("mlp.{linear1,dense_h_to_4h}.{weight,bias}",           Mlp),
    ("mlp.{fc1_weight,fc1_bias}",                           Mlp),
    ("mlp.{w1,w3}.{weight,bias}",                           Split(0)),
    ("mlp.{linear2,dense_4h_to_h,w2}.weight",               Split(1)),
    ("mlp.fc2_weight",                                      Split(1)),
    ("mlp.{linear2,dense_4h_to_h,w2}.bias",                 RowBias),
    ("mlp.fc2_bias",                                        RowBias),
    // experts
    ("router.{weight,bias}",                                Replicated),
    ("router.layer.{weight,bias}",                          Replicated),
    ("gate.wg.weight",                                      Replicated),
    ("coefficient.{weight,bias}",                           Replicated),
    ("deepspeed_experts.#.dense_h_to_4h.{weight,bias}",     Mlp),
    ("deepspeed_experts.#.dense_4h_to_h.weight",            Split(1)),
    ("deepspeed_experts.#.dense_4h_to_h.bias",              Averaged),
    // Mamba
    ("mixer.in_proj.{weight,bias}",                         Halves),
    ("mixer.conv1d.{weight,bias}",                          Split(0)),
    ("mixer.dt_proj.{weight,bias}",                         Split(0)),
    ("mixer.{A_log,D}",                                     Split(0)),
    ("mixer.{x_proj,out_proj}.weight",                      Split(1)),
    ("mixer.out_proj.bias",                                 RowBias),
    // RWKV, which has no tensor parallelism
    ("{att,ffn}.*.{weight,bias}",                           Replicated),
    ("{att,ffn}.*",                                         Replicated),
    ("{ln1,ln2}.{weight,bias}",                             Replicated),
];

/// The first linears of an MLP, and the second one beside each.
static SECOND_LINEARS: &[(&str, &str)] = &[
    ("linear1.", "linear2.weight"),
    ("dense_h_to_4h.", "dense_4h_to_h.weight"),
    ("fc1_", "fc2_weight"),
];

/// The query-key-value projections, and the output projection beside each.
static OUTPUT_PROJECTIONS: &[(&str, &str)] =
    &[("query_key_value.", "dense.weight"), ("qkv.", "proj.weight")];

/// What the biases of row-parallel layers are, if anything says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowBiases {
    /// Parts of a sum: attention and MLP are added up before their only reduction (`gpt_j_residual`).
    Partial,
    /// Copies.
    Copies,
    /// Nothing says.
    Unknown,
}

/// One rank's part of a parameter.
#[derive(Debug, Clone)]
pub struct Part {
    /// Ranks of the same stage hold different parts; other stages hold further copies.
    pub stage: u64,
    /// Tensor parallel rank.
    pub tp: u64,
    /// What it holds.
    pub tensor: LogicalTensor,
}

/// The parts of all parameters, by global name.
pub type Parts = BTreeMap<Name, Vec<Part>>;

/// The rules in force: what the checkpoint itself says, the user's and the table.
#[derive(Debug)]
pub struct Cuts {
    user: SuffixTable<Cut>,
    table: SuffixTable<Cut>,
}

impl From<Sharding> for Cut {
    fn from(sharding: Sharding) -> Self {
        match sharding {
            Sharding::Split(dim) => Split(dim),
            Sharding::Vocab => Vocab,
            Sharding::Gated => Halves,
            Sharding::Replicated
            | Sharding::QueryKeyValue
            | Sharding::Mamba(_)
            | Sharding::DeltaNet(_)
            | Sharding::Latent(_) => Replicated,
        }
    }
}

impl Cuts {
    /// The table, with the user's rules in front.
    #[must_use]
    pub fn new(user: &[UserRule]) -> Self {
        let user = user.iter().map(|rule| (rule.pattern(), rule.sharding().into()));
        Self { user: SuffixTable::new(user), table: SuffixTable::new(CUTS.iter().cloned()) }
    }

    /// The rule for a name; `told` is what the checkpoint says of it.
    #[must_use]
    pub fn find(&self, name: &str, told: Option<&Cut>) -> Option<Cut> {
        let found = |table: &SuffixTable<Cut>| table.find(name).map(|found| found.value.clone());
        found(&self.user).or_else(|| told.cloned()).or_else(|| found(&self.table))
    }
}

/// Puts the parts of parameters together.
#[derive(Debug)]
pub struct PartMerger<'a> {
    /// All parts, where the sizes of other parameters are looked up.
    pub parts: &'a Parts,
    /// The rules.
    pub cuts: &'a Cuts,
    /// What the checkpoint itself says of some parameters.
    pub told: &'a BTreeMap<Name, Cut>,
    /// Tensor parallel size.
    pub tp: u64,
    /// What biases of row-parallel layers are.
    pub row_biases: RowBiases,
}

impl PartMerger<'_> {
    /// Puts one parameter together from what every rank holds of it.
    ///
    /// # Errors
    /// A part is missing, no rule knows the name, or the parts do not fit together.
    pub fn merge(&self, name: &Name, parts: &[Part]) -> Result<Merged, LayoutError> {
        let cut = self.cuts.find(name.as_str(), self.told.get(name));
        let mut stages: BTreeMap<u64, BTreeMap<u64, &Part>> = BTreeMap::new();
        for part in parts {
            if stages.entry(part.stage).or_default().insert(part.tp, part).is_some() {
                return Err(LayoutError::Duplicate { other: name.to_string() });
            }
        }
        let mut whole: Option<LogicalTensor> = None;
        for parts in stages.values() {
            let stage = self.merge_stage(name.as_str(), cut.as_ref(), parts)?;
            match &mut whole {
                None => whole = Some(stage),
                Some(first) => first.add_copy(stage)?,
            }
        }
        let tensor = whole.ok_or(LayoutError::NoShard)?;
        let is_vocab = match &cut {
            Some(cut) => *cut == Vocab,
            None => is_vocabulary(name.as_str()),
        };
        Ok(Merged { tensor, is_vocab, has_no_rule: cut.is_none() })
    }

    fn merge_stage(
        &self,
        name: &str,
        cut: Option<&Cut>,
        parts: &BTreeMap<u64, &Part>,
    ) -> Result<LogicalTensor, LayoutError> {
        if let Some(slot) = (0..self.tp).find(|slot| !parts.contains_key(slot)) {
            return Err(LayoutError::RankMissing { axis: "tp", slot });
        }
        let shards: Vec<LogicalTensor> = parts.values().map(|part| part.tensor.clone()).collect();
        if shards.len() == 1 {
            return put_together(&Join::Copies, shards);
        }
        let disagree = |parts: &BTreeMap<u64, &Part>| {
            let text = |part: &&Part| {
                let (shape, dtype) = (part.tensor.shape(), part.tensor.dtype());
                format!("tp {} holds {shape:?} of {dtype}", part.tp)
            };
            LayoutError::PartsDisagree { parts: parts.values().map(text).collect() }
        };
        let cut = cut.ok_or(LayoutError::NoRule)?;
        let merge = match cut {
            Averaged => Merge::Mean,
            RowBias if name.starts_with("optimizer.") && !name.starts_with(MASTER) => Merge::First,
            RowBias => match self.row_biases {
                RowBiases::Partial => Merge::Sum,
                RowBiases::Copies => Merge::First,
                RowBiases::Unknown => Merge::SumIfDifferent,
            },
            _ => Merge::First,
        };
        let mut whole = match cut {
            Cut::Sections { dim: 0, sizes } => self.sections(sizes, shards),
            Cut::Sections { dim, sizes } => {
                let turned = shards.iter().map(|shard| shard.transpose(0, *dim));
                let turned = turned.collect::<Result<_, _>>()?;
                self.sections(sizes, turned).and_then(|whole| Ok(whole.transpose(0, *dim)?))
            }
            _ => put_together(&self.join(name, cut, parts)?, shards),
        }
        .map_err(|error| match error {
            LayoutError::Tensor(_) => disagree(parts),
            other => other,
        })?;
        whole.set_merge(merge);
        Ok(whole)
    }

    fn join(
        &self,
        name: &str,
        cut: &Cut,
        parts: &BTreeMap<u64, &Part>,
    ) -> Result<Join, LayoutError> {
        let rows = |part: &&Part| part.tensor.shape().first().copied().unwrap_or(0);
        let halves = || {
            let sizes = parts.values().map(|part| even_split(Some(rows(part)), 2));
            Ok(Join::Sections(sizes.collect::<Result<_, LayoutError>>()?))
        };
        match cut {
            Replicated | Averaged | RowBias => Ok(Join::Copies),
            Split(dim) => Ok(Join::Along(*dim)),
            Vocab | Cut::Sections { .. } => Ok(Join::Along(0)),
            Halves => halves(),
            Mlp => {
                let columns = self.columns_beside(name, SECOND_LINEARS, parts)?;
                let (rows, columns) = (parts.values().map(rows).sum(), columns.iter().sum::<u64>());
                match rows {
                    rows if columns.checked_mul(2) == Some(rows) => halves(),
                    rows if rows == columns => Ok(Join::Along(0)),
                    rows => Err(LayoutError::NeitherGatedNorNot { rows, columns }),
                }
            }
            Heads => {
                let queries = self.columns_beside(name, OUTPUT_PROJECTIONS, parts)?;
                let sizes = parts.values().zip(queries).map(|(part, queries)| {
                    let keys = even_split(rows(part).checked_sub(queries), 2)?;
                    Ok(std::iter::once(queries).chain(keys).collect::<Vec<u64>>())
                });
                let sizes: Vec<Vec<u64>> = sizes.collect::<Result<_, LayoutError>>()?;
                // As many keys as queries: whole heads lie one behind the other.
                let is_by_head = sizes.iter().all(|sizes| sizes[0] == sizes[1]);
                Ok(if is_by_head { Join::Along(0) } else { Join::Sections(sizes) })
            }
        }
    }

    fn sections(
        &self,
        sizes: &[u64],
        shards: Vec<LogicalTensor>,
    ) -> Result<LogicalTensor, LayoutError> {
        let parts = sizes.iter().map(|size| Ok(even_split(Some(*size), self.tp)?[0]));
        let parts: Vec<u64> = parts.collect::<Result<_, LayoutError>>()?;
        put_together(&Join::Sections(vec![parts; shards.len()]), shards)
    }

    /// The columns of the linear that `pairs` puts beside this one, on every rank.
    fn columns_beside(
        &self,
        name: &str,
        pairs: &[(&str, &str)],
        parts: &BTreeMap<u64, &Part>,
    ) -> Result<Vec<u64>, LayoutError> {
        let sibling = pairs.iter().find_map(|(one, other)| {
            let at = name.rfind(one)?;
            Some(format!("{}{other}", &name[..at]))
        });
        let sibling = sibling.ok_or(LayoutError::NoRule)?;
        let beside = self.parts.get(&Name::new(sibling.as_str()));
        let columns = parts.values().map(|part| {
            let other =
                beside?.iter().find(|other| (other.stage, other.tp) == (part.stage, part.tp));
            other?.tensor.shape().get(1).copied()
        });
        columns.collect::<Option<_>>().ok_or(LayoutError::SiblingMissing { sibling })
    }
}

/// What the names of fp32 masters start with.
const MASTER: &str = "optimizer.fp32_param.";
