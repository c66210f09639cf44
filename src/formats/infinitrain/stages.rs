//! Layer numbers: each pipeline rank counts its own from 0.
//!
//! Facts from InfiniTrain 0.6.0 (`infini_train/src/nn/parallel/pp/pipeline_parallel.cc`, `GetStageInfo`): the layers
//! fall into PP x VPP chunks, the first ones one layer longer; rank r owns the chunks r, r + PP, r + 2 PP, ... in order.
//! No file says how many chunks a rank has, and ranks hold as many layers whatever it is.

/// The distribution of the layers of a model over stages and chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stages {
    /// Layers of the model.
    pub layers: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Chunks of each stage.
    pub vpp: u64,
}

impl Stages {
    fn chunk_size(&self, chunk: u64) -> u64 {
        let chunks = self.pp * self.vpp;
        self.layers / chunks + u64::from(chunk < self.layers % chunks)
    }

    fn chunk_start(&self, chunk: u64) -> u64 {
        let chunks = self.pp * self.vpp;
        chunk * (self.layers / chunks) + chunk.min(self.layers % chunks)
    }

    fn chunks_of(&self, stage: u64) -> impl Iterator<Item = u64> + use<> {
        let (pp, vpp) = (self.pp, self.vpp);
        (0..vpp).map(move |index| stage + index * pp)
    }

    /// Number of layers of a stage.
    pub(super) fn size(&self, stage: u64) -> u64 {
        self.chunks_of(stage).map(|chunk| self.chunk_size(chunk)).sum()
    }

    /// The number in the model of a stage's layer; `None` where the stage has no such layer.
    pub(super) fn global(&self, stage: u64, mut local: u64) -> Option<u64> {
        for chunk in self.chunks_of(stage) {
            let size = self.chunk_size(chunk);
            if local < size {
                return Some(self.chunk_start(chunk) + local);
            }
            local -= size;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(stages: Stages, stage: u64) -> Vec<u64> {
        (0..).map_while(|local| stages.global(stage, local)).collect()
    }

    #[test]
    fn the_first_stages_have_a_layer_more() {
        let stages = Stages { layers: 5, pp: 3, vpp: 1 };
        assert_eq!(
            [0, 1, 2].map(|stage| numbers(stages, stage)),
            [vec![0, 1], vec![2, 3], vec![4]]
        );
    }

    #[test]
    fn chunks_of_a_stage_are_a_round_apart() {
        let stages = Stages { layers: 7, pp: 2, vpp: 2 };
        assert_eq!([0, 1].map(|stage| numbers(stages, stage)), [vec![0, 1, 4, 5], vec![2, 3, 6]]);
    }

    #[test]
    fn every_layer_is_on_one_stage() {
        for (layers, pp, vpp) in [(1, 2, 1), (12, 4, 3), (13, 4, 2), (3, 4, 1), (32, 8, 4)] {
            let stages = Stages { layers, pp, vpp };
            let mut all: Vec<u64> = (0..pp).flat_map(|stage| numbers(stages, stage)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..layers).collect::<Vec<_>>(), "{stages:?}");
        }
    }

    /// So the counts never tell it.
    #[test]
    fn stages_hold_as_many_layers_whatever_the_number_of_chunks() {
        for (layers, pp) in [(4, 2), (7, 2), (10, 3), (14, 4), (3, 4)] {
            let sizes = |vpp| -> Vec<u64> {
                let stages = Stages { layers, pp, vpp };
                (0..pp).map(|stage| stages.size(stage)).collect()
            };
            assert!((2..6).all(|vpp| sizes(vpp) == sizes(1)), "{layers} layers, {pp} stages");
        }
    }
}
