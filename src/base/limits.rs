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
    /// Bytes of one value's text, or of any other opcode, in a pickle that is read in pieces.
    pub pickle_opcode: usize,
    /// Bytes of a `.metadata`: those of large runs hold the save plans of all ranks.
    pub metadata_bytes: u64,
    /// Values of a `.metadata` that are held at a time.
    pub metadata_values: usize,
    /// Bytes of all different names and shapes of a `.metadata`.
    pub metadata_names: usize,
    /// Bytes of the header of a safetensors file; the reference reader has the same limit.
    pub safetensors_header: u64,
    /// Entries of one zip directory.
    pub archive_entries: usize,
    /// Levels of nesting that are followed when values are read back.
    pub depth: usize,
    /// Bytes of a dotted name.
    pub name: usize,
    /// Bytes that names, entries and pieces of one file's tensors come to, each entry and each further piece counted as [`ENTRY`].
    pub metadata: usize,
    /// The same for all tensors of a checkpoint that knows no ranks.
    pub global_metadata: usize,
    /// Bytes of what a run says of itself (`args`).
    pub args: usize,
    /// Problems that are kept of one file; the others are counted.
    pub problems: usize,
    /// Chunks in which one tensor is stored, each with a header of its own.
    pub boxes: usize,
    /// Pieces of one logical tensor.
    pub pieces: usize,
    /// Dimensions of one tensor; torch itself stops at 64.
    pub rank: usize,
    /// Size of one dimension: so low that sums over all shards of a run and small multiples cannot overflow.
    pub dim: u64,
    /// Elements of a tensor that uses the same bytes for several of them.
    pub expanded: u64,
    /// Model chunks of one rank.
    pub chunks: u64,
    /// Layers of one list in a model.
    pub layers: u64,
    /// Lists of layers in a model (`decoder.layers`, `encoder.layers`, ...).
    pub stacks: usize,
    /// Experts that one rank holds of one layer.
    pub experts: u64,
    /// Ranks that hold different parts of a model.
    pub ranks: u64,
}

/// What an entry or a piece counts for, besides its name: about what it takes.
pub const ENTRY: usize = 256;

/// The limits in force.
pub const LIMITS: Limits = Limits {
    pickle_bytes: 512 << 20,
    pickle_values: 32 << 20,
    pickle_opcode: 16 << 20,
    metadata_bytes: 4 << 30,
    metadata_values: 16 << 20,
    metadata_names: 256 << 20,
    safetensors_header: 100_000_000,
    archive_entries: 4 << 20,
    depth: 64,
    name: 4096,
    metadata: 80 << 20,
    global_metadata: 768 << 20,
    args: 16 << 20,
    problems: 1000,
    boxes: 1 << 20,
    pieces: 1 << 17,
    rank: 64,
    dim: 1 << 48,
    expanded: 1 << 32,
    chunks: 256,
    layers: 1 << 20,
    stacks: 1024,
    experts: 1 << 16,
    ranks: 1 << 17,
};
