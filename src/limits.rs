//! What a file may ask of this process, checked before anything is allocated.
//!
//! The numbers are far above what real checkpoints need and far below what would hurt:
//! a model file of a 4,096-rank run has some thousand tensors and a pickle of a few megabytes.

/// Bounds on untrusted input.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of one pickle stream (`data.pkl`).
    pub pickle_bytes: u64,
    /// Values that one pickle may build.
    pub pickle_values: usize,
    /// Entries of one zip directory.
    pub archive_entries: usize,
    /// Levels of nesting that are followed when values are read back.
    pub depth: usize,
    /// Entries of one state dict, nested ones counted.
    pub entries: usize,
    /// Pieces of one logical tensor.
    pub pieces: usize,
    /// Dimensions of one tensor; torch itself stops at 64.
    pub rank: usize,
    /// Size of one dimension: so low that sums over all shards of a run and small multiples cannot overflow.
    pub dim: u64,
    /// Experts that one rank holds of one layer.
    pub experts: u64,
}

/// The limits in force.
pub const LIMITS: Limits = Limits {
    pickle_bytes: 512 << 20,
    pickle_values: 32 << 20,
    archive_entries: 4 << 20,
    depth: 64,
    entries: 4 << 20,
    pieces: 1 << 20,
    rank: 64,
    dim: 1 << 48,
    experts: 1 << 16,
};
