//! How Megatron packs parameters into one flat buffer of its distributed optimizer. Pure arithmetic.
//!
//! Facts from Megatron-LM: 23.06 (`megatron/model/distributed.py`), core_v0.4 to v0.5 (`core/distributed/grad_buffer.py`),
//! core_v0.6 to v0.17 (`core/distributed/param_and_grad_buffer.py`), core_v0.18 on (`core/optimizer/param_layout.py`).

/// What one version does differently from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packing {
    /// Every parameter starts at a multiple of this.
    pub align: u64,
    /// Every bucket ends at a multiple of this.
    pub bucket_multiple: u64,
    /// The embeddings that several stages share have a bucket of their own.
    pub splits_shared: bool,
    /// A full bucket of a single parameter takes in another one.
    pub pairs: bool,
}

/// A parameter on its way into a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    /// Elements.
    pub numel: u64,
    /// It is the embedding that several stages share.
    pub is_shared: bool,
}

/// Where a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Start {
    /// Its bucket.
    pub bucket: usize,
    /// Its first element in the buffer.
    pub in_buffer: u64,
}

/// A part of a buffer that is communicated at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bucket {
    /// Its first element in the buffer.
    pub start: u64,
    /// The element after its padding.
    pub end: u64,
    /// The element after its last parameter.
    pub unpadded_end: u64,
}

/// A buffer's layout.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// A place for every slot, in their order.
    pub starts: Vec<Start>,
    /// The buckets, one behind the other.
    pub buckets: Vec<Bucket>,
}

impl Plan {
    /// Packs parameters in the order of the buffer, which is the reverse of the model's. `None` where sizes do not fit.
    pub(super) fn new(slots: &[Slot], bucket_size: Option<u64>, packing: Packing) -> Option<Self> {
        let mut plan = Self { starts: Vec::with_capacity(slots.len()), buckets: Vec::new() };
        let mut cursor = 0_u64;
        let mut bucket_start = 0_u64;
        let mut in_bucket = 0_usize;
        for slot in slots {
            let takes_own = slot.is_shared && packing.splits_shared;
            cursor = cursor.checked_next_multiple_of(packing.align)?;
            if takes_own && in_bucket > 0 {
                cursor = plan.close(bucket_start, cursor, packing)?;
                (bucket_start, in_bucket) = (cursor, 0);
            }
            plan.starts.push(Start { bucket: plan.buckets.len(), in_buffer: cursor });
            in_bucket += 1;
            cursor = cursor.checked_add(slot.numel)?;
            let is_full = bucket_size.is_some_and(|size| cursor - bucket_start >= size);
            if (is_full && !(packing.pairs && in_bucket < 2)) || takes_own {
                cursor = plan.close(bucket_start, cursor, packing)?;
                (bucket_start, in_bucket) = (cursor, 0);
            }
        }
        if in_bucket > 0 {
            plan.close(bucket_start, cursor, packing)?;
        }
        Some(plan)
    }

    fn close(&mut self, start: u64, unpadded_end: u64, packing: Packing) -> Option<u64> {
        let end = unpadded_end.checked_next_multiple_of(packing.bucket_multiple)?;
        self.buckets.push(Bucket { start, end, unpadded_end });
        Some(end)
    }

    /// Elements of the buffer with the padding of its buckets.
    pub(super) fn padded(&self) -> u64 {
        self.buckets.last().map_or(0, |bucket| bucket.end)
    }

    /// Elements of the buffer where the padding behind each bucket is left out.
    pub(super) fn unpadded(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.unpadded_end - bucket.start).sum()
    }

    /// First elements where the padding behind each bucket is left out.
    pub(super) fn coalesced(&self) -> Vec<u64> {
        let mut before = Vec::with_capacity(self.buckets.len());
        let mut sum = 0;
        for bucket in &self.buckets {
            before.push(sum);
            sum += bucket.unpadded_end - bucket.start;
        }
        let place = |start: &Start| {
            before[start.bucket] + (start.in_buffer - self.buckets[start.bucket].start)
        };
        self.starts.iter().map(place).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const CORE_0_8: Packing =
        Packing { align: 64, bucket_multiple: 128, splits_shared: true, pairs: false };
    const CORE_0_4: Packing =
        Packing { align: 1, bucket_multiple: 3, splits_shared: false, pairs: true };

    fn slots(sizes: &[u64]) -> Vec<Slot> {
        sizes.iter().map(|&numel| Slot { numel, is_shared: false }).collect()
    }

    fn in_buffer(plan: &Plan) -> Vec<u64> {
        plan.starts.iter().map(|start| start.in_buffer).collect()
    }

    #[test]
    fn parameters_are_aligned_and_the_end_is_padded() {
        let plan = Plan::new(&slots(&[10, 64, 65]), None, CORE_0_8).unwrap();
        assert_eq!(in_buffer(&plan), [0, 64, 128]);
        assert_eq!((plan.padded(), plan.unpadded()), (256, 193));
        assert_eq!(plan.coalesced(), [0, 64, 128]);
    }

    #[test]
    fn a_full_bucket_ends_and_its_padding_is_left_out_when_coalesced() {
        let plan = Plan::new(&slots(&[10, 70, 5, 70, 1]), Some(100), CORE_0_8).unwrap();
        assert_eq!(in_buffer(&plan), [0, 64, 256, 320, 512]);
        assert_eq!(plan.coalesced(), [0, 64, 134, 198, 268]);
        assert_eq!((plan.padded(), plan.unpadded()), (640, 269));
    }

    #[test]
    fn a_shared_embedding_has_a_bucket_of_its_own() {
        let mut slots = slots(&[10, 20, 30]);
        slots[1].is_shared = true;
        let plan = Plan::new(&slots, None, CORE_0_8).unwrap();
        assert_eq!(in_buffer(&plan), [0, 128, 256]);
        // The bucket before it is closed where it would have started, the padding of its start included.
        assert_eq!(plan.coalesced(), [0, 64, 84]);
    }

    #[test]
    fn the_first_versions_put_no_parameter_in_a_bucket_alone() {
        let plan = Plan::new(&slots(&[10, 1, 10]), Some(5), CORE_0_4).unwrap();
        assert_eq!(in_buffer(&plan), [0, 10, 12]);
        assert_eq!(plan.padded(), 24);
    }

    #[test]
    fn sizes_beyond_all_bounds_are_no_plan() {
        assert_eq!(Plan::new(&slots(&[u64::MAX, 2]), None, CORE_0_4), None);
    }
}
