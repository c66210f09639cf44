//! The promises that hold for every format: one module a promise.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

#[path = "../common/mod.rs"]
mod common;

mod causes;
mod check;
mod check_document;
mod completeness;
mod completions;
mod determinism;
mod document;
mod faults;
mod finding;
mod forms;
mod hostile;
mod identity;
mod judging;
mod msprobe;
mod names;
mod one_element;
mod output;
mod page;
mod readme;
mod refusals;
mod result_file;
mod roots;
mod state;
mod unreadable;
