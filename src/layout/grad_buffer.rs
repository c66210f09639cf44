//! Layouts of the flat buffers that Megatron's distributed optimizer packs parameters into. Pure arithmetic over the
//! names and sizes of parameters and the arguments of the run.
//!
//! A param-and-grad buffer holds the parameters of one model chunk and dtype, dense or expert, in the reverse order
//! of the model, and is cut into buckets. A checkpoint stores its elements without any names, so the layout is found
//! by computing what each version of Megatron would have made and comparing sizes.
//!
//! Sources, Megatron-LM: 23.06 (`megatron/model/distributed.py`), core_v0.4 to v0.5
//! (`core/distributed/grad_buffer.py`), core_v0.6 to v0.17 (`core/distributed/param_and_grad_buffer.py`), core_v0.18
//! on (`core/optimizer/param_layout.py`).

use thiserror::Error;

use crate::names::megatron::is_embedding_or_output;

use super::{ArgName, RunArgs};

/// A version of Megatron-LM that began to pack buffers in another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackingVersion {
    /// One bucket, padded at its end.
    Megatron23_06,
    /// Buckets, a full one with a single parameter takes in another.
    Core0_4,
    /// A bucket of its own for the embedding that pipeline stages share.
    Core0_6,
    /// Buckets end at multiples of 128 elements.
    Core0_7,
    /// Parameters start at multiples of 64 elements.
    Core0_8,
}

/// The tensors in which a file stores a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferForm {
    /// One tensor for the whole buffer.
    Whole,
    /// One tensor for each bucket.
    Buckets,
    /// One tensor for each bucket, the padding at its end left out.
    UnpaddedBuckets,
    /// One tensor for the whole buffer, the padding at the end of each bucket left out.
    Coalesced,
}

/// A parameter in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferParam {
    numel: u64,
    /// Set for the embedding that several pipeline stages share.
    is_shared_embedding: bool,
}

impl BufferParam {
    /// The parameter of this stored name and number of elements.
    #[must_use]
    pub fn new(name: &str, numel: u64, args: &RunArgs) -> Self {
        let stages = args.size(ArgName::PIPELINE_MODEL_PARALLEL_SIZE).unwrap_or(1);
        let has_mtp = args.size(ArgName::MTP_NUM_LAYERS).is_some_and(|layers| layers > 0);
        let is_output = name.ends_with("output_layer.weight");
        let is_shared = args.are_weights_tied() || (has_mtp && !is_output);
        let is_shared_embedding = stages > 1 && is_shared && is_embedding_or_output(name);
        Self { numel, is_shared_embedding }
    }
}

/// Proof of a layout, besides the sizes of the tensors that store the buffer.
#[derive(Debug, Clone, Copy)]
pub enum BufferProof<'a> {
    /// None.
    Sizes,
    /// Offsets of the weights, which are views of the same buffer.
    Views(&'a [u64]),
    /// The elements of each tensor at which its stored pieces start, ascending. Every parameter and every gap between two
    /// is a piece of its own, cut where the share of a data-parallel rank ends (`sharded_param_state_dp_reshardable`).
    Pieces(&'a [Vec<u64>]),
}

/// The first element of a parameter in a stored buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamStart {
    /// The index of the tensor, of those that store the buffer.
    pub tensor: usize,
    /// The index of the element in it.
    pub offset: u64,
}

/// The reason why a stored buffer does not hold its parameters in any known layout.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BufferError {
    /// Several layouts have the stored sizes.
    #[error("its parameters fit into it in more than one way")]
    Ambiguous,
    /// The weights, which are views of the same buffer, have other offsets.
    #[error("the weights are views of a buffer with its parameters in another order")]
    OtherOrder,
    /// The pieces in which the tensors are stored are not those of the parameters.
    #[error(
        "it is stored in pieces of other sizes than its parameters; if args does not say how many ranks there were, \
         say --set data_parallel_size=N"
    )]
    OtherPieces,
    /// No layout has the stored sizes.
    #[error(
        "{found} elements, but its {params} parameters come to {}; if args does not say how many \
         ranks there were, say --set data_parallel_size=N",
        .expected.iter().map(u64::to_string).collect::<Vec<_>>().join(" or ")
    )]
    Size {
        /// Elements stored.
        found: u64,
        /// Number of parameters.
        params: usize,
        /// Elements that the known layouts have.
        expected: Vec<u64>,
    },
}

/// A buffer by its parameters.
#[derive(Debug)]
pub struct GradBuffer<'a> {
    /// The parameters in the order of the buffer, which is the reverse of the model's.
    pub params: Vec<BufferParam>,
    /// Set for a buffer of experts, which have data-parallel ranks of their own.
    pub is_expert_parallel: bool,
    /// Elements of all the parameters of the rank, those of other buffers included.
    pub rank_numel: u64,
    /// The arguments of the run.
    pub args: &'a RunArgs,
}

impl GradBuffer<'_> {
    /// The start of each parameter in a buffer that one of these versions stored in tensors of these sizes.
    ///
    /// # Errors
    /// No layout has these sizes and agrees with the proof, or several do.
    pub fn param_starts(
        &self,
        versions: &[PackingVersion],
        form: BufferForm,
        numels: &[u64],
        proof: BufferProof<'_>,
    ) -> Result<Vec<ParamStart>, BufferError> {
        let mut expected: Vec<u64> = Vec::new();
        let mut disproof = None;
        let mut fitting: Vec<Vec<ParamStart>> = Vec::new();
        for layout in self.layouts(versions) {
            let wanted = layout.numels(form);
            let starts = layout.param_starts(form);
            if wanted != numels {
                expected.push(wanted.iter().sum());
            } else if let Err(error) = self.check(&layout, form, proof) {
                disproof = Some(error);
            } else if !fitting.contains(&starts) {
                fitting.push(starts);
            }
        }
        match (fitting.pop(), fitting.is_empty(), disproof) {
            (Some(starts), true, _) => Ok(starts),
            (Some(_), false, _) => Err(BufferError::Ambiguous),
            (None, _, Some(error)) => Err(error),
            (None, _, None) => {
                expected.sort_unstable();
                expected.dedup();
                let (found, params) = (numels.iter().sum(), self.params.len());
                Err(BufferError::Size { found, params, expected })
            }
        }
    }

    fn check(
        &self,
        layout: &BufferLayout,
        form: BufferForm,
        proof: BufferProof<'_>,
    ) -> Result<(), BufferError> {
        match proof {
            BufferProof::Sizes => Ok(()),
            BufferProof::Views(offsets) if layout.offsets().eq(offsets.iter().copied()) => Ok(()),
            BufferProof::Views(_) => Err(BufferError::OtherOrder),
            BufferProof::Pieces(pieces) => {
                let wanted = layout.piece_starts(&self.params, form, self.data_parallel_size());
                if wanted == pieces { Ok(()) } else { Err(BufferError::OtherPieces) }
            }
        }
    }

    /// The different layouts that these versions may have given the buffer.
    fn layouts(&self, versions: &[PackingVersion]) -> Vec<BufferLayout> {
        let ranks = self.data_parallel_size();
        let mut layouts: Vec<BufferLayout> = Vec::new();
        for &version in versions {
            let packing = self.packing(version, ranks);
            let sizes = match version {
                PackingVersion::Megatron23_06 => vec![None],
                _ => self.bucket_sizes(ranks),
            };
            for size in sizes {
                let layout = BufferLayout::new(&self.params, size, packing);
                layouts.extend(layout.filter(|layout| !layouts.contains(layout)));
            }
        }
        layouts
    }

    fn packing(&self, version: PackingVersion, ranks: u64) -> Packing {
        let aligned = least_common_multiple(ranks, 128);
        let for_bandwidth = match self.args.is_on(ArgName::DDP_PAD_BUCKETS_FOR_HIGH_NCCL_BUSBW) {
            true => least_common_multiple(aligned, 1 << 16),
            false => aligned,
        };
        let (param_multiple, bucket_multiple) = match version {
            PackingVersion::Megatron23_06 | PackingVersion::Core0_4 | PackingVersion::Core0_6 => {
                (1, ranks)
            }
            PackingVersion::Core0_7 => (1, aligned),
            PackingVersion::Core0_8 => (64, for_bandwidth),
        };
        let is_first = matches!(version, PackingVersion::Megatron23_06 | PackingVersion::Core0_4);
        Packing {
            param_multiple,
            bucket_multiple,
            splits_shared_embedding: !is_first,
            pairs_params: is_first,
        }
    }

    /// The ranks that share the buffer: context-parallel ones among them, each instance of the optimizer by itself.
    fn data_parallel_size(&self) -> u64 {
        let size = |arg| self.args.size(arg).unwrap_or(1).max(1);
        let tp = self.args.size(ArgName::TENSOR_MODEL_PARALLEL_SIZE).unwrap_or(1);
        let etp = self.args.size(ArgName::EXPERT_TENSOR_PARALLEL_SIZE).unwrap_or(tp).max(1);
        let ranks = match self.args.size(ArgName::WORLD_SIZE).filter(|_| self.is_expert_parallel) {
            Some(world) => {
                let (pp, ep) = (
                    size(ArgName::PIPELINE_MODEL_PARALLEL_SIZE),
                    size(ArgName::EXPERT_MODEL_PARALLEL_SIZE),
                );
                world / etp.saturating_mul(ep).saturating_mul(pp).max(1)
            }
            None => size(ArgName::DATA_PARALLEL_SIZE)
                .saturating_mul(size(ArgName::CONTEXT_PARALLEL_SIZE)),
        };
        (ranks / size(ArgName::NUM_DISTRIBUTED_OPTIMIZER_INSTANCES)).max(1)
    }

    /// Elements at which a bucket is full; stages and chunks after the first have a single one.
    fn bucket_sizes(&self, ranks: u64) -> Vec<Option<u64>> {
        const DEFAULT: u64 = 40_000_000;
        let overlaps = self.args.get(ArgName::OVERLAP_GRAD_REDUCE);
        if overlaps.is_some() && !self.args.is_on(ArgName::OVERLAP_GRAD_REDUCE) {
            return vec![None];
        }
        let given = self.args.size(ArgName::DDP_BUCKET_SIZE).or_else(|| {
            let count = self.args.size(ArgName::DDP_NUM_BUCKETS).filter(|&count| count > 0)?;
            Some(self.rank_numel / count)
        });
        match given {
            Some(size) => vec![None, Some(size)],
            None => {
                let usual = DEFAULT.max(ranks.saturating_mul(1_000_000));
                vec![None, Some(DEFAULT), Some(usual)]
            }
        }
    }
}

/// The rules of one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Packing {
    /// Every parameter starts at a multiple of this.
    param_multiple: u64,
    /// Every bucket ends at a multiple of this.
    bucket_multiple: u64,
    /// The embedding that several stages share has a bucket of its own.
    splits_shared_embedding: bool,
    /// A full bucket of a single parameter takes in another one.
    pairs_params: bool,
}

/// The place of a parameter in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ParamIndex {
    bucket: usize,
    /// Its first element in the buffer.
    start: u64,
}

/// A part of a buffer that is communicated at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bucket {
    /// Its first element in the buffer.
    start: u64,
    /// The element after its padding.
    end: u64,
    /// The element after its last parameter.
    unpadded_end: u64,
}

/// The parameters and buckets of a buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct BufferLayout {
    /// The parameters, in the order of the buffer.
    params: Vec<ParamIndex>,
    /// The buckets, one behind the other.
    buckets: Vec<Bucket>,
}

impl BufferLayout {
    /// Packs parameters; `None` where their sizes overflow.
    fn new(params: &[BufferParam], bucket_size: Option<u64>, packing: Packing) -> Option<Self> {
        let mut layout = Self { params: Vec::with_capacity(params.len()), buckets: Vec::new() };
        let mut cursor = 0_u64;
        let mut bucket_start = 0_u64;
        let mut in_bucket = 0_usize;
        for param in params {
            let is_alone = param.is_shared_embedding && packing.splits_shared_embedding;
            cursor = cursor.checked_next_multiple_of(packing.param_multiple)?;
            if is_alone && in_bucket > 0 {
                cursor = layout.close(bucket_start, cursor, packing)?;
                (bucket_start, in_bucket) = (cursor, 0);
            }
            layout.params.push(ParamIndex { bucket: layout.buckets.len(), start: cursor });
            in_bucket += 1;
            cursor = cursor.checked_add(param.numel)?;
            let is_full = bucket_size.is_some_and(|size| cursor - bucket_start >= size);
            if (is_full && !(packing.pairs_params && in_bucket < 2)) || is_alone {
                cursor = layout.close(bucket_start, cursor, packing)?;
                (bucket_start, in_bucket) = (cursor, 0);
            }
        }
        if in_bucket > 0 {
            layout.close(bucket_start, cursor, packing)?;
        }
        Some(layout)
    }

    /// Ends a bucket; returns the element after its padding.
    fn close(&mut self, start: u64, unpadded_end: u64, packing: Packing) -> Option<u64> {
        let end = unpadded_end.checked_next_multiple_of(packing.bucket_multiple)?;
        self.buckets.push(Bucket { start, end, unpadded_end });
        Some(end)
    }

    /// The first element of each parameter in the buffer.
    fn offsets(&self) -> impl Iterator<Item = u64> + '_ {
        self.params.iter().map(|param| param.start)
    }

    /// The number of elements of each tensor that stores the buffer.
    fn numels(&self, form: BufferForm) -> Vec<u64> {
        let padded = self.buckets.iter().map(|bucket| bucket.end - bucket.start);
        let unpadded = self.buckets.iter().map(|bucket| bucket.unpadded_end - bucket.start);
        match form {
            BufferForm::Whole => vec![padded.sum()],
            BufferForm::Buckets => padded.collect(),
            BufferForm::UnpaddedBuckets => unpadded.collect(),
            BufferForm::Coalesced => vec![unpadded.sum()],
        }
    }

    /// The first element of each parameter in the tensors that store the buffer.
    fn param_starts(&self, form: BufferForm) -> Vec<ParamStart> {
        let coalesced: Vec<u64> = self
            .buckets
            .iter()
            .scan(0, |before, bucket| {
                let start = *before;
                *before += bucket.unpadded_end - bucket.start;
                Some(start)
            })
            .collect();
        let start = |param: &ParamIndex| {
            let in_bucket = param.start - self.buckets[param.bucket].start;
            match form {
                BufferForm::Whole => ParamStart { tensor: 0, offset: param.start },
                BufferForm::Buckets | BufferForm::UnpaddedBuckets => {
                    ParamStart { tensor: param.bucket, offset: in_bucket }
                }
                BufferForm::Coalesced => {
                    ParamStart { tensor: 0, offset: coalesced[param.bucket] + in_bucket }
                }
            }
        };
        self.params.iter().map(start).collect()
    }

    /// The first element of each piece of each tensor, see [`BufferProof::Pieces`].
    fn piece_starts(&self, params: &[BufferParam], form: BufferForm, ranks: u64) -> Vec<Vec<u64>> {
        let numels = self.numels(form);
        let mut cuts: Vec<Vec<u64>> = numels.iter().map(|_| vec![0]).collect();
        for (start, param) in self.param_starts(form).into_iter().zip(params) {
            cuts[start.tensor].extend([start.offset, start.offset + param.numel]);
        }
        for ((cuts, &numel), bucket) in cuts.iter_mut().zip(&numels).zip(&self.buckets) {
            let share = ((bucket.end - bucket.start) / ranks).max(1);
            cuts.extend((1..ranks).map_while(|rank| rank.checked_mul(share)));
            cuts.retain(|&cut| cut < numel);
            cuts.sort_unstable();
            cuts.dedup();
        }
        cuts
    }
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1)).saturating_mul(b)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::base::plain::PlainValue;

    const CORE_0_8: Packing = Packing {
        param_multiple: 64,
        bucket_multiple: 128,
        splits_shared_embedding: true,
        pairs_params: false,
    };
    const CORE_0_4: Packing = Packing {
        param_multiple: 1,
        bucket_multiple: 3,
        splits_shared_embedding: false,
        pairs_params: true,
    };

    fn params(sizes: &[u64]) -> Vec<BufferParam> {
        sizes.iter().map(|&numel| BufferParam { numel, is_shared_embedding: false }).collect()
    }

    fn layout(sizes: &[u64], bucket_size: Option<u64>, packing: Packing) -> BufferLayout {
        BufferLayout::new(&params(sizes), bucket_size, packing).unwrap()
    }

    fn offsets(layout: &BufferLayout) -> Vec<u64> {
        layout.offsets().collect()
    }

    fn coalesced(layout: &BufferLayout) -> Vec<u64> {
        let starts = layout.param_starts(BufferForm::Coalesced);
        starts.iter().map(|start| start.offset).collect()
    }

    fn sizes(layout: &BufferLayout) -> [Vec<u64>; 2] {
        [BufferForm::Whole, BufferForm::Coalesced].map(|form| layout.numels(form))
    }

    #[test]
    fn parameters_are_aligned_and_the_end_is_padded() {
        let layout = layout(&[10, 64, 65], None, CORE_0_8);
        assert_eq!(offsets(&layout), [0, 64, 128]);
        assert_eq!(sizes(&layout), [[256], [193]]);
        assert_eq!(coalesced(&layout), [0, 64, 128]);
    }

    #[test]
    fn a_full_bucket_ends_and_its_padding_is_left_out_when_coalesced() {
        let layout = layout(&[10, 70, 5, 70, 1], Some(100), CORE_0_8);
        assert_eq!(offsets(&layout), [0, 64, 256, 320, 512]);
        assert_eq!(coalesced(&layout), [0, 64, 134, 198, 268]);
        assert_eq!(sizes(&layout), [[640], [269]]);
    }

    #[test]
    fn a_shared_embedding_has_a_bucket_of_its_own() {
        let mut params = params(&[10, 20, 30]);
        params[1].is_shared_embedding = true;
        let layout = BufferLayout::new(&params, None, CORE_0_8).unwrap();
        assert_eq!(offsets(&layout), [0, 128, 256]);
        // The bucket before it is closed where it would have started, the padding of its start included.
        assert_eq!(coalesced(&layout), [0, 64, 84]);
    }

    #[test]
    fn the_first_versions_put_no_parameter_in_a_bucket_alone() {
        let layout = layout(&[10, 1, 10], Some(5), CORE_0_4);
        assert_eq!(offsets(&layout), [0, 10, 12]);
        assert_eq!(layout.numels(BufferForm::Whole), [24]);
    }

    #[test]
    fn sizes_beyond_all_bounds_are_no_layout() {
        assert_eq!(BufferLayout::new(&params(&[u64::MAX, 2]), None, CORE_0_4), None);
    }

    /// The tensor and first element of each parameter of a model, whose order is the reverse of the buffer's.
    fn starts(
        sizes: &[u64],
        args: &[(&str, PlainValue)],
        (versions, form): (&[PackingVersion], BufferForm),
        numels: &[u64],
        views: Option<&[u64]>,
    ) -> Result<Vec<(usize, u64)>, BufferError> {
        let args = args.iter().map(|(name, arg)| ((*name).to_owned(), arg.clone())).collect();
        let args = RunArgs::new(args, &[]);
        let params = params(sizes).into_iter().rev().collect();
        let buffer = GradBuffer { params, is_expert_parallel: false, rank_numel: 0, args: &args };
        let proof = views.map_or(BufferProof::Sizes, BufferProof::Views);
        let starts = buffer.param_starts(versions, form, numels, proof)?;
        Ok(starts.iter().map(|start| (start.tensor, start.offset)).collect())
    }

    const FOUR_RANKS: (&str, PlainValue) = ("data_parallel_size", PlainValue::Int(4));
    const WHOLE: (&[PackingVersion], BufferForm) =
        (&[PackingVersion::Megatron23_06], BufferForm::Whole);
    const FIRST_BUCKETS: (&[PackingVersion], BufferForm) =
        (&[PackingVersion::Core0_4], BufferForm::Buckets);
    const BUCKETS: (&[PackingVersion], BufferForm) =
        (&[PackingVersion::Core0_6, PackingVersion::Core0_7], BufferForm::Buckets);
    const COALESCED: (&[PackingVersion], BufferForm) =
        (&[PackingVersion::Core0_7, PackingVersion::Core0_8], BufferForm::Coalesced);

    #[test]
    fn the_first_whole_buffer_has_its_padding_at_the_end() {
        let found = starts(&[3, 5, 2], &[FOUR_RANKS], WHOLE, &[12], None);
        assert_eq!(found, Ok(vec![(0, 0), (0, 2), (0, 7)]));
        let error = starts(&[3, 5, 2], &[], WHOLE, &[12], None).unwrap_err();
        assert_eq!(error, BufferError::Size { found: 12, params: 3, expected: vec![10] });
    }

    #[test]
    fn lists_of_buckets_are_cut_where_a_bucket_is_full() {
        let args = [
            FOUR_RANKS,
            ("overlap_grad_reduce", PlainValue::Bool(true)),
            ("ddp_bucket_size", PlainValue::Int(6)),
        ];
        let found = starts(&[3, 5, 2, 7], &args, BUCKETS, &[8, 8, 4], None);
        assert_eq!(found, Ok(vec![(0, 0), (1, 0), (1, 2), (2, 0)]));
        // Before core 0.6 no bucket had a single parameter.
        let found = starts(&[3, 5, 2, 7], &args, FIRST_BUCKETS, &[12, 8], None);
        assert_eq!(found, Ok(vec![(0, 0), (0, 7), (1, 0), (1, 5)]));
    }

    #[test]
    fn coalesced_buckets_are_aligned_from_core_0_8_on() {
        let older = starts(&[3, 5, 2], &[], COALESCED, &[10], None);
        assert_eq!(older, Ok(vec![(0, 0), (0, 2), (0, 7)]));
        let newer = starts(&[3, 5, 2], &[], COALESCED, &[131], None);
        assert_eq!(newer, Ok(vec![(0, 0), (0, 64), (0, 128)]));
    }

    #[test]
    fn weights_that_are_views_of_the_buffer_must_agree() {
        let with_views = |views: &[u64]| starts(&[3, 5, 2], &[], COALESCED, &[131], Some(views));
        assert!(with_views(&[0, 64, 128]).is_ok());
        assert_eq!(with_views(&[128, 64, 0]), Err(BufferError::OtherOrder));
    }

    #[test]
    fn a_full_bucket_leaves_out_its_padding() {
        let args = [
            ("overlap_grad_reduce", PlainValue::Bool(true)),
            ("ddp_bucket_size", PlainValue::Int(70)),
        ];
        let found = starts(&[10, 20, 20, 10], &args, COALESCED, &[158], None);
        assert_eq!(found, Ok(vec![(0, 0), (0, 64), (0, 84), (0, 148)]));
        // The stages after the first have one bucket only.
        let found = starts(&[10, 20, 20, 10], &args, COALESCED, &[202], None);
        assert_eq!(found, Ok(vec![(0, 0), (0, 64), (0, 128), (0, 192)]));
    }

    #[test]
    fn pieces_tell_parameters_apart_that_sizes_do_not() {
        let prove = |sizes: &[u64], ranks: i64, pieces: &[u64]| {
            let ranks = ("data_parallel_size".to_owned(), PlainValue::Int(ranks));
            let args = RunArgs::new([ranks].into(), &[]);
            let params = params(sizes);
            let buffer =
                GradBuffer { params, is_expert_parallel: false, rank_numel: 0, args: &args };
            let form = BufferForm::UnpaddedBuckets;
            let proof = [pieces.to_vec()];
            let versions = &[PackingVersion::Core0_8];
            buffer.param_starts(versions, form, &[202], BufferProof::Pieces(&proof)).map(|_| ())
        };
        assert_eq!(prove(&[128, 64, 10], 1, &[0, 128, 192]), Ok(()));
        assert_eq!(prove(&[64, 128, 10], 1, &[0, 64, 192]), Ok(()));
        assert_eq!(prove(&[64, 128, 10], 1, &[0, 128, 192]), Err(BufferError::OtherPieces));
        // A gap is a piece, and so is what each of two ranks has of a parameter.
        assert_eq!(prove(&[120, 64, 10], 2, &[0, 120, 128, 192]), Ok(()));
        assert_eq!(prove(&[192, 10], 2, &[0, 128, 192]), Ok(()));
        assert_eq!(prove(&[192, 10], 2, &[0, 192]), Err(BufferError::OtherPieces));
    }
}
