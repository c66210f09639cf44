//! The shards of one parameter -> one logical tensor, by its rule.

use std::collections::BTreeMap;

use crate::names::{Name, is_vocabulary};
use crate::tensor::{LogicalTensor, Merge};

use super::rules::{Rules, Sharding};
use super::sections::{Placement, Shards};
use super::{LayoutError, RankCoord, RunArgs};

/// One rank's part of a parameter.
#[derive(Debug, Clone)]
pub struct RankPart {
    /// The rank that stores it. Ranks of the same stage hold different parts; other stages hold further copies.
    pub rank: RankCoord,
    /// Its bytes, as a view.
    pub tensor: LogicalTensor,
    /// Every rank holds all of it, whatever the rule says of the name.
    pub(super) is_whole: bool,
    /// It only tells names and shapes, see [`super::Shard`].
    pub(super) is_shape_only: bool,
}

/// The parts of all parameters, by global name.
pub type RankParts = BTreeMap<Name, Vec<RankPart>>;

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

/// The nature of the biases of row-parallel layers, if anything says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowBiases {
    /// Parts of a sum: attention and MLP are added up before their only reduction (`gpt_j_residual`).
    Partial,
    /// Copies.
    Copies,
    /// Nothing says.
    Unknown,
}

/// Puts the parts of parameters together.
#[derive(Debug)]
pub struct Merger<'a> {
    /// All parts, where the sizes of other parameters are looked up.
    pub parts: &'a RankParts,
    /// The rules.
    pub rules: &'a Rules,
    /// The run's arguments, which say what neither a rule nor a shape does.
    pub args: &'a RunArgs,
    /// Tensor parallel size.
    pub tp: u64,
    /// Tensor parallel size inside an expert.
    pub etp: u64,
    /// The nature of the biases of row-parallel layers.
    pub row_biases: RowBiases,
}

impl RankPart {
    /// A part of which nothing more is known.
    #[must_use]
    pub fn new(rank: RankCoord, tensor: LogicalTensor) -> Self {
        Self { rank, tensor, is_whole: false, is_shape_only: false }
    }

    /// Size of the first dimension.
    pub(super) fn rows(&self) -> u64 {
        self.tensor.shape().first().copied().unwrap_or(0)
    }
}

impl Merger<'_> {
    /// Puts one parameter together from what every rank holds of it.
    ///
    /// # Errors
    /// A part is missing, no rule knows the name, or the parts do not fit together.
    pub fn merge(&self, name: &Name, parts: &[RankPart]) -> Result<Merged, LayoutError> {
        let sharding = self.rules.find(name.as_str());
        let mut stages: BTreeMap<(u64, u64), Vec<&RankPart>> = BTreeMap::new();
        for part in parts.iter().filter(|part| !part.is_shape_only) {
            stages.entry((part.rank.pp, part.rank.vp)).or_default().push(part);
        }
        // What several stages hold (embeddings beside an MTP layer, say) is one parameter and its copies.
        let mut whole: Option<LogicalTensor> = None;
        for parts in stages.into_values() {
            let stage = self.merge_stage(name.as_str(), sharding, parts)?;
            match &mut whole {
                None => whole = Some(stage),
                Some(first) => first.add_copy(stage)?,
            }
        }
        let tensor = whole.ok_or(LayoutError::NoShard)?;
        let is_vocab = match sharding {
            Some(sharding) => *sharding == Sharding::Vocab,
            None => is_vocabulary(name.as_str()),
        };
        Ok(Merged { tensor, is_vocab, has_no_rule: sharding.is_none() })
    }

    fn merge_stage(
        &self,
        name: &str,
        sharding: Option<&Sharding>,
        mut parts: Vec<&RankPart>,
    ) -> Result<LogicalTensor, LayoutError> {
        parts.sort_by_key(|part| (part.rank.ep, part.rank.tp));
        let is_expert = super::is_expert(name);
        let width = if is_expert { self.etp } else { self.tp };
        // Of what several ranks hold alike, the first rank's is the part and the others are copies of it.
        let mut slots: BTreeMap<u64, (&RankPart, LogicalTensor)> = BTreeMap::new();
        for part in parts {
            let slot = if is_expert { part.rank.tp % width } else { part.rank.tp };
            match slots.get_mut(&slot) {
                None => {
                    slots.insert(slot, (part, part.tensor.clone()));
                }
                Some((_, first)) => first.add_copy(part.tensor.clone())?,
            }
        }
        if let Some(slot) = (0..width).find(|slot| !slots.contains_key(slot)) {
            let axis = if is_expert { "etp" } else { "tp" };
            return Err(LayoutError::RankMissing { axis, slot });
        }
        let (firsts, tensors): (Vec<&RankPart>, Vec<LogicalTensor>) = slots.into_values().unzip();
        // Where one part is all there is, nothing has to be known of how it was cut.
        if tensors.len() == 1 || firsts.iter().all(|part| part.is_whole) {
            return put_together(&Placement::Replicate, tensors).map_err(disagreement(&firsts));
        }
        let sharding = sharding.ok_or(LayoutError::NoRule)?;
        let shards = Shards { name, parts: &firsts, shapes: self.parts, args: self.args };
        let placement = shards.placement(sharding)?;
        let mut whole = put_together(&placement, tensors).map_err(disagreement(&firsts))?;
        whole.set_merge(self.merge_of(name, sharding));
        Ok(whole)
    }

    /// The way in which copies make the value.
    fn merge_of(&self, name: &str, sharding: &Sharding) -> Merge {
        match sharding {
            Sharding::Averaged => Merge::Mean,
            Sharding::RowBias => match self.row_biases {
                // A moment of a partial bias is no part of a sum.
                _ if name.starts_with("optimizer.") && !name.starts_with(MASTER) => Merge::First,
                RowBiases::Partial => Merge::Sum,
                RowBiases::Copies => Merge::First,
                RowBiases::Unknown => Merge::SumIfDifferent,
            },
            _ => Merge::First,
        }
    }
}

/// The names of fp32 masters start with this.
const MASTER: &str = "optimizer.fp32_param.";

/// Tells of all parts where they do not fit together.
fn disagreement(parts: &[&RankPart]) -> impl Fn(LayoutError) -> LayoutError {
    |error| match error {
        LayoutError::Tensor(_) => {
            let text = |part: &&RankPart| {
                let (shape, dtype) = (part.tensor.shape(), part.tensor.dtype());
                format!("tp {} holds {shape:?} of {dtype}", part.rank.tp)
            };
            LayoutError::PartsDisagree { parts: parts.iter().map(text).collect() }
        }
        other => other,
    }
}

fn put_together(
    placement: &Placement,
    parts: Vec<LogicalTensor>,
) -> Result<LogicalTensor, LayoutError> {
    match placement {
        Placement::Shard(dim) => Ok(LogicalTensor::concat(*dim, parts)?),
        Placement::Replicate => {
            let mut parts = parts.into_iter();
            let mut first = parts.next().ok_or(LayoutError::NoShard)?;
            for part in parts {
                first.add_copy(part)?;
            }
            Ok(first)
        }
        Placement::Sections { dim, sizes } => {
            let count = sizes.first().map_or(0, Vec::len);
            let mut sections = Vec::with_capacity(count * parts.len());
            let mut starts = vec![0; parts.len()];
            for section in 0..count {
                for ((part, sizes), start) in parts.iter().zip(sizes).zip(&mut starts) {
                    sections.push(part.slice(*dim, *start, sizes[section])?);
                    *start += sizes[section];
                }
            }
            for (part, start) in parts.iter().zip(starts) {
                let rows = part.shape().get(*dim).copied().unwrap_or(0);
                if rows != start {
                    return Err(LayoutError::UnexpectedRows { rows, wanted: start });
                }
            }
            Ok(LogicalTensor::concat(*dim, sections)?)
        }
    }
}
