//! What a file may ask of this process, checked before anything is allocated.
//!
//! The numbers are far above what real checkpoints need and far below what would hurt:
//! a model file of a 4,096-rank run has some thousand tensors and a pickle of a few megabytes.

use std::fmt;

/// A file asks for more of something than is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverLimit {
    /// The thing that there is too much of, in the plural.
    pub what: &'static str,
    /// Number that is allowed.
    pub limit: u64,
    /// Number that was found, where it is known.
    pub found: Option<u64>,
}

impl std::error::Error for OverLimit {}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, limit, found } = self;
        match found {
            Some(found) => write!(f, "{found} {what}, more than the limit of {limit}"),
            None => write!(f, "more {what} than the limit of {limit}"),
        }
    }
}

impl OverLimit {
    /// More than a limit, where nobody counted how many.
    #[must_use]
    pub const fn new(what: &'static str, limit: u64) -> Self {
        Self { what, limit, found: None }
    }

    /// As many as these, which are over a limit.
    #[must_use]
    pub const fn found(what: &'static str, limit: u64, found: u64) -> Self {
        Self { what, limit, found: Some(found) }
    }
}

/// Bounds on untrusted input.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Entries of one folder.
    pub listing: usize,
    /// Bytes of one pickle stream (`data.pkl`).
    pub pickle_bytes: u64,
    /// Values that one pickle may build.
    pub pickle_values: usize,
    /// Values that it may push onto its stack, for each that it may build: a reference takes a quarter of a value's bytes.
    pub pickle_references: usize,
    /// Digits of an integer that a pickle writes as text; CPython 3.11 and later stop there too
    /// (`sys.int_info.default_max_str_digits`).
    pub pickle_digits: usize,
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
    /// Bytes of a `.zarray`; they have some hundred.
    pub zarr_header: u64,
    /// Bytes that an archive of one tensor may have besides those of the tensor, where it is decompressed.
    pub archive_overhead: u64,
    /// Bytes that a checkpoint is decompressed to, for each byte of its files: weights come to two, moments of zeros to many.
    pub unpacked_ratio: u64,
    /// Bytes that it may be decompressed to besides.
    pub unpacked: u64,
    /// Bytes of a compressed slice that is decompressed even where nobody asks for the values of tensors.
    pub unpacked_always: u64,
    /// Entries of one zip directory.
    pub archive_entries: usize,
    /// Levels of nesting that are followed when values are read back.
    pub depth: usize,
    /// Entries that a walk through a pickle may come by for each reference in it: modules that share others are few.
    pub shared: usize,
    /// Entries that it may come by besides.
    pub shared_entries: usize,
    /// Lists, dicts and objects that one pickle may build, which take more memory than other values: a tensor comes to two or three.
    pub pickle_containers: usize,
    /// Flags that torch hangs on one tensor; it has two.
    pub tensor_flags: usize,
    /// Characters of a class's name that are quoted.
    pub class_name: usize,
    /// Bytes of a dotted name.
    pub name: usize,
    /// Bytes that names, entries and pieces of one file's tensors come to, each entry and each further piece counted as [`ENTRY`].
    pub metadata: usize,
    /// The same for all tensors of a checkpoint that knows no ranks.
    pub global_metadata: usize,
    /// Bytes of what a run says of itself (`args`).
    pub args: usize,
    /// Entries of a run's state that are read of one dict or checkpoint.
    pub state_entries: usize,
    /// Bytes of one entry of a run's state: those of some hundred parameter groups.
    pub state_value: usize,
    /// Levels of lists and dicts in a run's state: optimizers nest groups in lists in dicts.
    pub state_depth: usize,
    /// Bytes of what one file keeps of a run, key paths included, where all of it is compared.
    pub state_bytes: usize,
    /// Objects of a distributed checkpoint that are read.
    pub objects: usize,
    /// Bytes of an index of safetensors files: ten times the longest known one, of a model with 140,000 tensors.
    pub index_bytes: u64,
    /// Files that it may name: some hundred times the longest known one.
    pub index_files: usize,
    /// Bytes of other JSON that lies beside tensors.
    pub json_bytes: u64,
    /// Numbered parts of a model; a larger number is no count.
    pub model_parts: u64,
    /// Levels of folders in which files without tensors are looked for: a rank's folder, a layer's, a parameter's.
    pub folder_depth: usize,
    /// Files and folders among which these are looked for.
    pub folder_entries: usize,
    /// Bytes of a file that holds one word, such as the name of the newest checkpoint.
    pub tracker: usize,
    /// Bytes of a file that holds a few words.
    pub small_file: u64,
    /// Steps from a path to a checkpoint: tracker, iteration, role, kind of file.
    pub way: usize,
    /// Entries of a folder that are looked at to name those that are checkpoints.
    pub listed_below: usize,
    /// Problems that are kept of one file; the others are counted.
    pub problems: usize,
    /// Chunks in which one tensor is stored, each with a header of its own.
    pub boxes: usize,
    /// Pieces of one logical tensor.
    pub pieces: usize,
    /// Levels of groups in groups, in the proof that boxes tile a tensor; straight cuts need one or two for each dimension.
    pub tiling_levels: usize,
    /// Boxes that the same proof sorts or compares for all tensors of a checkpoint, besides [`Limits::tiling_steps`] of each:
    /// far more than any way of sharding needs.
    pub tiling_pairs: u64,
    /// Times that the same proof may sort each box.
    pub tiling_steps: u64,
    /// Dimensions of one tensor; torch itself stops at 64.
    pub rank: usize,
    /// Size of one dimension: so low that sums over all shards of a run and small multiples cannot overflow.
    pub dim: u64,
    /// Elements of a tensor that uses the same bytes for several of them.
    pub expanded: u64,
    /// Elements of all tensors and copies of a checkpoint, for each byte of its files: views of one another, tied weights.
    pub uses: u64,
    /// Elements that it may have besides, whatever its files hold: masks and the like, expanded from a few values.
    pub repeated: u64,
    /// Model chunks of one rank.
    pub chunks: u64,
    /// Layers of one list in a model.
    pub layers: u64,
    /// Lists of layers in a model (`decoder.layers`, `encoder.layers`, ...).
    pub stacks: usize,
    /// Experts that one rank holds of one layer.
    pub experts: u64,
    /// Copies of its values that a gated delta product has; Megatron's default is 3.
    pub householders: u64,
    /// Dimensions of a tensor that was flattened: far more than layers, experts, rows, columns and the width of a convolution.
    pub flattened_rank: usize,
    /// Ranks that hold different parts of a model.
    pub ranks: u64,
    /// Bytes of a tracker, a configuration or a text with the state of a run, which have some hundred.
    pub text_file: u64,
    /// Configuration files of one run that are read.
    pub config_files: usize,
    /// Patterns of `universal_checkpoint_info` that are compiled.
    pub patterns: usize,
    /// Bytes that one of these patterns may compile to.
    pub pattern_bytes: usize,
    /// Steps that it may take to match all names against them: a character of a name and one of a pattern each.
    pub pattern_steps: u64,
    /// Steps besides for each byte of the files: parameters of a model have many.
    pub pattern_steps_a_byte: u64,
    /// Characters of a pattern or a version that are quoted.
    pub quoted: usize,
    /// Param groups of all the optimizers of a rank.
    pub param_groups: usize,
    /// Kinds of state that an optimizer keeps of each parameter; four are known.
    pub param_states: usize,
}

/// Bytes that an entry or a piece counts for, besides its name: about as many as it takes.
pub const ENTRY: usize = 256;

/// The tensors of one file come to more than [`Limits::metadata`].
pub const OVER_METADATA: OverLimit =
    OverLimit::new("bytes of tensor names and pieces", LIMITS.metadata as u64);

/// The tensors of a checkpoint that knows no ranks come to more than [`Limits::global_metadata`].
pub const OVER_GLOBAL_METADATA: OverLimit =
    OverLimit::new("bytes of tensor names and pieces", LIMITS.global_metadata as u64);

/// The limits in force.
pub const LIMITS: Limits = Limits {
    listing: 4 << 20,
    pickle_bytes: 512 << 20,
    pickle_values: 32 << 20,
    pickle_references: 4,
    pickle_digits: 4300,
    pickle_opcode: 16 << 20,
    metadata_bytes: 4 << 30,
    metadata_values: 16 << 20,
    metadata_names: 256 << 20,
    safetensors_header: 100_000_000,
    zarr_header: 64 << 10,
    archive_overhead: 1 << 20,
    unpacked_ratio: 64,
    unpacked: 128 << 20,
    unpacked_always: 64 << 10,
    archive_entries: 4 << 20,
    depth: 64,
    shared: 4,
    shared_entries: 1024,
    pickle_containers: 4 << 20,
    tensor_flags: 64,
    class_name: 200,
    name: 4096,
    metadata: 80 << 20,
    global_metadata: 768 << 20,
    args: 16 << 20,
    state_entries: 256,
    state_value: 1 << 20,
    state_depth: 8,
    state_bytes: 256 << 20,
    objects: 1 << 16,
    index_bytes: 160 << 20,
    index_files: 1 << 16,
    json_bytes: 1 << 20,
    model_parts: 10_000,
    folder_depth: 3,
    folder_entries: 1 << 20,
    tracker: 4096,
    small_file: 64 << 10,
    way: 6,
    listed_below: 64,
    problems: 1000,
    boxes: 1 << 20,
    pieces: 1 << 17,
    tiling_levels: 64,
    tiling_pairs: 1 << 24,
    tiling_steps: 64,
    rank: 64,
    dim: 1 << 48,
    expanded: 1 << 32,
    uses: 4,
    repeated: 64 << 20,
    chunks: 256,
    layers: 1 << 20,
    stacks: 1024,
    experts: 1 << 16,
    householders: 64,
    flattened_rank: 8,
    ranks: 1 << 17,
    text_file: 1 << 20,
    config_files: 64,
    patterns: 4096,
    pattern_bytes: 16 << 10,
    pattern_steps: 1 << 25,
    pattern_steps_a_byte: 16,
    quoted: 200,
    param_groups: 4096,
    param_states: 64,
};
