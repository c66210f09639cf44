//! Every format is read as it was written: one module a format.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

#[path = "../common/mod.rs"]
mod common;

mod dcp;
mod dcp_hostile;
mod deepspeed;
mod described;
mod fsdp_ranks;
mod hugging_face;
mod infinitrain;
mod layouts;
mod megatron_dist;
mod megatron_hf;
mod optimizer;
