//! Statistics -> a judgement. Pure: nothing here reads a file or prints.

pub mod verdict;
