//! Compare two training checkpoints of large models, tensor by tensor, whatever the format and the parallel layout of
//! each, without ever executing a byte of them.
//!
//! The command `ckptcmp` is this library and a command line. The library is the few names below: [`open`] a checkpoint,
//! [`compare`](compare()) two of them or [`check`] one, read the [`Report`].
//!
//! ```
//! use ckptcmp::{CompareOptions, OpenOptions, Verdict};
//!
//! let root = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/layouts/gpt-small");
//! let a = ckptcmp::open(format!("{root}/tp1"), &OpenOptions::default())?;
//! let b = ckptcmp::open(format!("{root}/tp2"), &OpenOptions::default())?;
//! let report = ckptcmp::compare(a, b, &CompareOptions::default())?;
//! assert_eq!(report.verdict, Verdict::Identical);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All other modules are the house behind that door: public for the tests, benches and fuzz targets of this repository,
//! and no promise to anyone else. What follows is their architecture.
//!
//! # The idea
//!
//! **A tensor is a set of strided pieces over regions of files.** Everything that a layout, a format or a naming
//! convention does to a tensor (shard, concatenate, regroup gate and up, split q/k/v, transpose, trim padding,
//! rename) is metadata: another set of pieces. No bytes move until the comparison streams them, once, block by block. So
//!
//! - a format only says where bytes are; a layout rule only says where they belong; the kernel only ever sees two
//!   dense blocks;
//! - memory is bounded by blocks, not by models: any layout against any other costs one read of each side;
//! - sums run over *logical* blocks in a fixed order, so the answer has the same bits for every layout, number of
//!   threads and CPU.
//!
//! ```text
//! path ─► formats ─► containers ─► layout ─► Catalog ─► dialects, pairing ─► compare ─► judge ─► report
//!         where?     what lies     which       ▲        the same names?       gather,
//!                    there?        part?   the one type at the centre         kernel
//! ```
//!
//! Left of the [`Catalog`](catalog::Catalog) everything is formats; nothing right of it knows that a format exists.
//!
//! # Code map, in the order of the flow
//!
//! | room | what lives there |
//! |---|---|
//! | [`base`] | vocabulary: element types, boxes in index space, plain values, [`limits`](base::limits) on what a file may ask for |
//! | [`storage`] | files, regions of them, positioned reads, maps of what the page cache has |
//! | [`tensor`] | [`StoredTensor`](tensor::StoredTensor), [`LogicalTensor`](tensor::LogicalTensor) and the view algebra |
//! | [`containers`] | what a file holds, knowing of no ranks: [`torch`](containers::torch) (zip or stream, pickle as inert data), [`safetensors`](containers::safetensors), [`dcp`](containers::dcp), [`zarr`](containers::zarr) |
//! | [`names`] | dialects -> canonical names: suffix patterns, tables of rewrites; [`names::families`] for those that are not Megatron's; [`names::renames`] for a user's own |
//! | [`layout`] | ranks -> logical tensors: which ranks there are, global indices, [`layout::rules`], merging |
//! | [`state`] | what a checkpoint keeps beside tensors, by key path: compared; parameter groups, profiles |
//! | [`catalog`] | what a checkpoint holds: tensors, ties, state of the run, problems; the one builder of it |
//! | [`completeness`] | what a catalog's state announces, held against its names: what is missing |
//! | [`formats`] | a path in, a catalog out; one folder a format |
//! | [`dialects`] | a catalog of another dialect beside one of Megatron's -> the same names and shapes, as views; a user's names, masters as weights |
//! | [`pairing`] | two catalogs -> pairs; vocabulary padding, tied weights |
//! | [`kernel`] | two dense blocks -> [`Stats`](kernel::Stats), the same bits on every machine |
//! | [`compare`](mod@compare) | pieces -> blocks, rayon over blocks, folding in block order; [`compare::metrics`] |
//! | [`causes`] | pairs that differ -> why: exact causes, one more pass over those that may have one |
//! | [`judge`] | statistics -> a verdict by the bounds of flags and rules -> exit code |
//! | [`report`] | a finished comparison or check -> screen, JSON, the [`document`](report::document) and its [`forms`](report::forms); a catalog -> inspection |
//! | [`pipeline`] | all of it on one screen: agree, pair, compare, judge |
//! | [`cli`], [`run`] | typed flags; from them to an exit code |
//!
//! Where to go for a change: a new format is a folder and a row in [`formats`]; a new layout rule is a line in
//! [`layout::rules`] or `formats/deepspeed/rules.rs`; a new grouping of an optimizer is a rule in
//! `formats/megatron_torch/optimizer/param_groups.rs`, a new packing of its buffers one in `layout/grad_buffer.rs`, a module
//! whose parameters have a place in them a row in `layout/buckets/order.rs`; a new
//! spelling of a name is a line in [`names::megatron`]; a model of
//! Hugging Face's is a `model_type` or some rows in [`names::families`]; a tensor that is stored fused is a row in
//! `layout/unfuse.rs`, one that a distributed checkpoint stores in sections a row in `layout/global.rs`; a new metric is
//! a row in [`compare::metrics`] and a field of [`report::document::Metrics`], one that may be bounded one in
//! [`judge::bounds`]; a module of a layer is a word in [`names::forward`]; a new report is a file in
//! [`report::forms`].
//!
//! # Invariants
//!
//! - A module uses only names to its left in the flow; `tests/tidy.rs` holds the table.
//! - Nothing from a file is looked up or run: a pickle becomes an arena of plain values ([`containers::torch::Values`]).
//! - Sizes and offsets from files are `u64`, bounded by [`base::limits`] at the gate ([`tensor::StoredTensor::new`],
//!   [`layout::RunArgs::size`]) and checked before anything is allocated.
//! - Pieces are proven to tile a shape before a tensor enters a catalog.
//! - No rule for a name that has more than one shard is an error that names it, never "replicated".
//! - One bad tensor is a problem in the catalog and the rest is still compared (exit code 2); a checkpoint that
//!   cannot be put together is an error (2); a difference is a result (1).
//! - Partial statistics are folded by block index; nothing floating goes through an unordered reduction.
//! - Only `report` and `main` write to the terminal.
#![doc = include_str!("glossary.md")]

#[doc(hidden)]
pub mod base;
#[doc(hidden)]
pub mod catalog;
#[doc(hidden)]
pub mod causes;
#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod compare;
#[doc(hidden)]
pub mod completeness;
#[doc(hidden)]
pub mod containers;
#[doc(hidden)]
pub mod dialects;
#[doc(hidden)]
pub mod formats;
#[doc(hidden)]
pub mod judge;
#[doc(hidden)]
pub mod kernel;
#[doc(hidden)]
pub mod layout;
#[doc(hidden)]
pub mod names;
#[doc(hidden)]
pub mod pairing;
#[doc(hidden)]
pub mod pipeline;
#[doc(hidden)]
pub mod report;
#[doc(hidden)]
pub mod run;
#[doc(hidden)]
pub mod state;
#[doc(hidden)]
pub mod storage;
#[doc(hidden)]
pub mod tensor;

pub use catalog::{Catalog, Section};
pub use formats::{OpenError, OpenOptions, open};
pub use judge::verdict::{Soundness, Verdict};
pub use pairing::Selection;
pub use pipeline::{ChangedError, CheckOptions, CompareOptions, check, compare};
pub use report::check::CheckReport;
pub use report::{Report, Style};
