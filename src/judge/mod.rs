//! Statistics -> a judgement. Pure: nothing here reads a file or prints.

pub mod bounds;
pub mod policy;
mod rules_file;
pub mod state;
pub mod verdict;
