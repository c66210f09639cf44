//! Local -> global indices of layers and experts.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::base::limits::{LIMITS, OverLimit};
use crate::names::index;

use super::{ArgName, RunArgs, stage_layout};

/// A model chunk: virtual stage and pipeline stage. Ordered as layers are laid out, virtual stage first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelChunk {
    /// Virtual pipeline stage.
    pub vp: u64,
    /// Pipeline stage.
    pub pp: u64,
}

/// A name cut at its first list of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerName<'n> {
    /// The text before `layers.`, its dot included.
    pub stack: &'n str,
    /// The index behind it.
    pub index: u64,
    /// The text behind the index, its dot included.
    pub rest: &'n str,
}

impl<'n> LayerName<'n> {
    /// Cuts a name at its first `layers.N`; `None` where it has none.
    #[must_use]
    pub(super) fn parse(name: &'n str) -> Option<Self> {
        let stack = match name.strip_prefix("layers.") {
            Some(_) => "",
            None => &name[..=name.find(".layers.")?],
        };
        let numbered = &name[stack.len() + "layers.".len()..];
        let digits = numbered.find('.').unwrap_or(numbered.len());
        let index = index::index(&numbered[..digits])?;
        Some(Self { stack, index, rest: &numbered[digits..] })
    }

    /// The name with another index.
    #[must_use]
    pub(super) fn with_index(&self, index: u64) -> String {
        format!("{}layers.{index}{}", self.stack, self.rest)
    }
}

/// The limit that an index of a name is over: so far up, sums over ranks would not fit.
#[must_use]
pub(super) fn excessive_index(name: &str) -> Option<OverLimit> {
    let over = |what, limit, index: u64| {
        (index >= limit).then(|| OverLimit::found(what, limit, index.saturating_add(1)))
    };
    let layer = LayerName::parse(name);
    let layer = layer.and_then(|layer| over("layers in one list", LIMITS.layers, layer.index));
    let expert = || over("experts in one layer", LIMITS.experts, split_expert(name)?.1);
    layer.or_else(expert)
}

/// The reason for which layers cannot be numbered.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum NumberingError {
    /// The stages hold more or fewer layers than the model has.
    #[error(
        "the stages hold {found} layers of `{stack}layers` but the checkpoint says {declared}; \
         if the shards are right, say so with --set {arg}={found}"
    )]
    LayerCount {
        /// The list of layers.
        stack: String,
        /// Layers found in the files.
        found: u64,
        /// Layers that `args` declares.
        declared: u64,
        /// The name in `args`.
        arg: ArgName,
    },
    /// A stage holds a layer beyond its own number of them.
    #[error(
        "stage pp {pp}, virtual stage {vp} holds layer {index} but should have {expected} layers"
    )]
    LayerBeyondStage {
        /// Pipeline stage.
        pp: u64,
        /// Virtual stage.
        vp: u64,
        /// Local index of the layer.
        index: u64,
        /// Layers that the stage should have.
        expected: u64,
    },
    /// A schedule that fixes the chunks is declared, but the chunks are others.
    #[error("dualpipev needs two equal model chunks on every stage of {layers} layers in all")]
    NotDualPipe {
        /// Number of layers.
        layers: u64,
    },
}

/// The first global index of each chunk, and the indices that hold no parameters.
#[derive(Debug, Default)]
pub struct LayerNumbers {
    offsets: BTreeMap<ModelChunk, u64>,
    /// Global indices of placeholder layers, ascending.
    noop: Vec<u64>,
}

impl LayerNumbers {
    /// Numbers the layers of one list (`decoder.`, `encoder.`, `mtp.`, ...).
    ///
    /// `counts` says for every chunk of the model one more than its largest local index, 0 where it has none.
    /// The offset of a chunk is the sum over all chunks before it, virtual stage by virtual stage: this
    /// equals Megatron's own formula for even and uneven splits, interleaving and custom layouts
    /// (`get_transformer_layer_offset`, core 0.16).
    ///
    /// # Errors
    /// [`NumberingError`] where files and `args` contradict each other.
    pub fn new(
        stack: &str,
        counts: &BTreeMap<ModelChunk, u64>,
        args: &RunArgs,
    ) -> Result<Self, NumberingError> {
        let (arg, declared) = declared_layers(stack, args);
        let noop = match stack {
            "decoder." => args.sizes(ArgName::NOOP_LAYERS).unwrap_or_default(),
            _ => Vec::new(),
        };
        if args.text(ArgName::SCHEDULES_METHOD) == Some("dualpipev") && stack == "decoder." {
            return Self::dual_pipe(counts, declared.unwrap_or(0), noop);
        }
        let found: u64 = counts.values().sum();
        let sizes =
            match declared {
                Some(declared) if found != declared && counts.len() > 1 => {
                    stage_sizes(counts, declared, args).ok_or_else(|| {
                        NumberingError::LayerCount { stack: stack.to_owned(), found, declared, arg }
                    })?
                }
                _ => counts.clone(),
            };
        let mut offset = 0;
        let mut offsets = BTreeMap::new();
        for (chunk, size) in sizes {
            offsets.insert(chunk, offset);
            offset += size;
        }
        Ok(Self { offsets, noop: sorted(noop) })
    }

    /// MindSpeed's V-shaped schedule: stage p holds the p-th chunk from the front and the p-th from the back
    /// (`core/pipeline_parallel/dualpipev/dualpipev_chunks.py`).
    fn dual_pipe(
        counts: &BTreeMap<ModelChunk, u64>,
        layers: u64,
        noop: Vec<u64>,
    ) -> Result<Self, NumberingError> {
        let stages = counts.keys().map(|chunk| chunk.pp + 1).max().unwrap_or(1);
        let size = layers / (2 * stages);
        let fits = counts.iter().all(|(chunk, &count)| chunk.vp < 2 && count <= size);
        if !fits || size * 2 * stages != layers {
            return Err(NumberingError::NotDualPipe { layers });
        }
        let offset = |chunk: &ModelChunk| match chunk.vp {
            0 => chunk.pp * size,
            _ => layers - (chunk.pp + 1) * size,
        };
        let offsets = counts.keys().map(|chunk| (*chunk, offset(chunk))).collect();
        Ok(Self { offsets, noop: sorted(noop) })
    }

    /// Layers whose indices are those of the whole model already; only placeholders are left to be taken out.
    #[must_use]
    pub(super) fn of_whole(args: &RunArgs) -> Self {
        let noop = sorted(args.sizes(ArgName::NOOP_LAYERS).unwrap_or_default());
        Self { offsets: BTreeMap::new(), noop }
    }

    /// Says whether the layer of this global index has no parameters.
    #[must_use]
    pub(super) fn is_placeholder(&self, index: u64) -> bool {
        self.noop.binary_search(&index).is_ok()
    }

    /// The global index of a chunk's layer, placeholders not counted.
    #[must_use]
    pub fn global(&self, chunk: ModelChunk, local: u64) -> u64 {
        let index = self.offsets.get(&chunk).copied().unwrap_or(0).saturating_add(local);
        let placeholders = self.noop.partition_point(|&noop| noop < index) as u64;
        index - placeholders
    }
}

fn sorted(mut indices: Vec<u64>) -> Vec<u64> {
    indices.sort_unstable();
    indices.dedup();
    indices
}

/// The name under which `args` declares the layers of a list, and their number.
fn declared_layers(stack: &str, args: &RunArgs) -> (ArgName, Option<u64>) {
    let names: &[ArgName] = match stack {
        "decoder." => &[ArgName::DECODER_NUM_LAYERS, ArgName::NUM_LAYERS],
        "encoder." => &[ArgName::ENCODER_NUM_LAYERS, ArgName::NUM_LAYERS],
        _ => &[],
    };
    names
        .iter()
        .find_map(|name| args.size(*name).map(|size| (*name, Some(size))))
        .unwrap_or((ArgName::NUM_LAYERS, None))
}

/// Layers a chunk, where some leave no name behind: they have no parameters, or are missing. A checkpoint that lacks layers
/// is told so elsewhere; here the others keep their numbers.
fn stage_sizes(
    counts: &BTreeMap<ModelChunk, u64>,
    declared: u64,
    args: &RunArgs,
) -> Option<BTreeMap<ModelChunk, u64>> {
    let listed = [ArgName::PIPELINE_NUM_TRANSFORMER_LAYERS, ArgName::NUM_LAYER_LIST]
        .iter()
        .find_map(|name| args.sizes(*name))
        .or_else(|| stage_layout::decoder_layers(args))
        .filter(|sizes| sizes.len() == counts.len() && sizes.iter().sum::<u64>() == declared);
    let sizes = listed
        .or_else(|| uneven_ends(counts, declared, args))
        .or_else(|| even_sizes(counts.len(), declared, args))?;
    let sizes: BTreeMap<ModelChunk, u64> = counts.keys().copied().zip(sizes).collect();
    let fits = counts.iter().all(|(chunk, count)| count <= &sizes[chunk]);
    fits.then_some(sizes)
}

/// First and last stages of a size of their own, the others even (Megatron-Core 0.9 to 0.19, `get_num_layers_to_build`).
fn uneven_ends(
    counts: &BTreeMap<ModelChunk, u64>,
    declared: u64,
    args: &RunArgs,
) -> Option<Vec<u64>> {
    let [first, last] =
        [ArgName::DECODER_FIRST_PIPELINE_NUM_LAYERS, ArgName::DECODER_LAST_PIPELINE_NUM_LAYERS]
            .map(|name| args.size(name));
    let ends = u64::from(first.is_some()) + u64::from(last.is_some());
    let others = (counts.len() as u64).checked_sub(ends)?;
    if ends == 0 || counts.keys().any(|chunk| chunk.vp > 0) {
        return None;
    }
    let rest = declared.checked_sub(first.unwrap_or(0))?.checked_sub(last.unwrap_or(0))?;
    let is_even = if others == 0 { rest == 0 } else { rest.is_multiple_of(others) };
    let even = vec![rest / others.max(1); usize::try_from(others).ok()?];
    is_even.then(|| first.into_iter().chain(even).chain(last).collect())
}

/// Chunks of one size; the first and the last may be one shorter, for the embeddings and the loss.
fn even_sizes(chunks: usize, declared: u64, args: &RunArgs) -> Option<Vec<u64>> {
    let [embedding, loss] = [
        ArgName::ACCOUNT_FOR_EMBEDDING_IN_PIPELINE_SPLIT,
        ArgName::ACCOUNT_FOR_LOSS_IN_PIPELINE_SPLIT,
    ]
    .map(|name| u64::from(args.is_on(name)));
    let total = declared + embedding + loss;
    if !total.is_multiple_of(chunks as u64) {
        return None;
    }
    let mut sizes = vec![total / chunks as u64; chunks];
    let first = sizes.first_mut()?;
    *first = first.checked_sub(embedding)?;
    let last = sizes.last_mut()?;
    *last = last.checked_sub(loss)?;
    Some(sizes)
}

/// The place of a rank's experts among those of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertNumbers {
    /// Experts that the rank holds.
    pub local: u64,
    /// The rank's place among those that share the experts out.
    pub slot: u64,
}

impl ExpertNumbers {
    /// The global index of the rank's `index`-th expert.
    #[must_use]
    pub(super) fn global(&self, index: u64) -> u64 {
        self.slot.saturating_mul(self.local).saturating_add(index)
    }
}

/// A name cut at its expert index: what is before, the index, what follows it.
#[must_use]
pub(super) fn split_expert(name: &str) -> Option<(&str, u64, &str)> {
    const LIST: &str = ".experts.local_experts.";
    let start = name.find(LIST)? + LIST.len();
    let digits = name[start..].find('.')?;
    let index = index::index(&name[start..start + digits])?;
    Some((&name[..start], index, &name[start + digits..]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::base::plain::PlainValue;
    use proptest::prelude::*;

    fn args(pairs: &[(&str, PlainValue)]) -> RunArgs {
        RunArgs::new(
            pairs.iter().map(|(name, arg)| ((*name).to_owned(), arg.clone())).collect(),
            &[],
        )
    }

    fn counts(rows: &[(u64, u64, u64)]) -> BTreeMap<ModelChunk, u64> {
        rows.iter().map(|&(vp, pp, count)| (ModelChunk { vp, pp }, count)).collect()
    }

    #[test]
    fn uneven_and_empty_stages_are_counted() {
        let stages = counts(&[(0, 0, 0), (0, 1, 2), (0, 2, 3), (0, 3, 1)]);
        let numbers =
            LayerNumbers::new("decoder.", &stages, &args(&[("num_layers", PlainValue::Int(6))]))
                .unwrap();
        let first = |pp| numbers.global(ModelChunk { vp: 0, pp }, 0);
        assert_eq!((first(1), first(2), first(3)), (0, 2, 5));
    }

    #[test]
    fn virtual_stages_go_before_pipeline_stages() {
        let stages = counts(&[(0, 0, 1), (0, 1, 2), (1, 0, 2), (1, 1, 1)]);
        let numbers = LayerNumbers::new("decoder.", &stages, &RunArgs::default()).unwrap();
        assert_eq!(numbers.global(ModelChunk { vp: 1, pp: 0 }, 0), 3);
        assert_eq!(numbers.global(ModelChunk { vp: 1, pp: 1 }, 0), 5);
    }

    #[test]
    fn dualpipev_folds_the_back_half() {
        let known = args(&[
            ("num_layers", PlainValue::Int(8)),
            ("schedules_method", PlainValue::Text("dualpipev".into())),
        ]);
        let stages = counts(&[(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]);
        let numbers = LayerNumbers::new("decoder.", &stages, &known).unwrap();
        let first = |vp, pp| numbers.global(ModelChunk { vp, pp }, 0);
        assert_eq!([first(0, 0), first(0, 1), first(1, 1), first(1, 0)], [0, 2, 4, 6]);
    }

    #[test]
    fn placeholders_are_not_counted() {
        let noop = PlainValue::List(vec![PlainValue::Int(2), PlainValue::Int(7)]);
        let known = args(&[("num_layers", PlainValue::Int(8)), ("noop_layers", noop)]);
        // The last layer of the second stage is a placeholder, so its largest local index is 2.
        let stages = counts(&[(0, 0, 4), (0, 1, 3)]);
        let numbers = LayerNumbers::new("decoder.", &stages, &known).unwrap();
        assert_eq!(numbers.global(ModelChunk { vp: 0, pp: 0 }, 3), 2);
        assert_eq!(numbers.global(ModelChunk { vp: 0, pp: 1 }, 0), 3);
    }

    #[test]
    fn a_lost_layer_is_not_numbered_over() {
        let stages = counts(&[(0, 0, 1), (0, 1, 2), (0, 2, 1)]);
        let known = args(&[("num_layers", PlainValue::Int(5))]);
        assert!(LayerNumbers::new("decoder.", &stages, &known).is_err());
    }

    #[test]
    fn a_lost_layer_moves_no_other_one() {
        let int = |name, value| (name, PlainValue::Int(value));
        let on = |name| (name, PlainValue::Bool(true));
        let (first, last) =
            ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers");
        let (embedding, loss) =
            ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split");
        let by_hand = PlainValue::Text("Et|ttt|tttL".to_owned());
        let by_hand = ("pipeline_model_parallel_layout", by_hand);
        for (given, sizes, starts) in [
            (vec![int("num_layers", 6)], [1, 2, 2], [0, 2, 4]),
            (vec![int("num_layers", 7), int(first, 1), int(last, 2)], [1, 3, 2], [0, 1, 5]),
            (vec![int("num_layers", 7), int(last, 1)], [3, 2, 1], [0, 3, 6]),
            (vec![int("num_layers", 7), by_hand], [1, 1, 3], [0, 1, 4]),
            (vec![int("num_layers", 7), on(embedding), on(loss)], [2, 2, 2], [0, 2, 5]),
        ] {
            let stages: Vec<(u64, u64, u64)> =
                (0..).zip(sizes).map(|(pp, size)| (0, pp, size)).collect();
            let numbers = LayerNumbers::new("decoder.", &counts(&stages), &args(&given)).unwrap();
            let found = [0, 1, 2].map(|pp| numbers.global(ModelChunk { vp: 0, pp }, 0));
            assert_eq!(found, starts, "{given:?}");
        }
    }

    proptest! {
        #[test]
        fn every_layer_gets_one_number(sizes in prop::collection::vec(0_u64..4, 1..9), stages in 1_u64..4) {
            let counts: BTreeMap<ModelChunk, u64> = (0..).zip(&sizes)
                .map(|(at, &size)| (ModelChunk { vp: at / stages, pp: at % stages }, size)).collect();
            let numbers = LayerNumbers::new("decoder.", &counts, &RunArgs::default()).unwrap();
            let mut seen: Vec<u64> = counts.iter()
                .flat_map(|(&chunk, &size)| (0..size).map(move |local| (chunk, local)))
                .map(|(chunk, local)| numbers.global(chunk, local)).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..sizes.iter().sum()).collect::<Vec<_>>());
        }
    }
}
