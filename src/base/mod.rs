//! Vocabulary that every other room may use: element types, boxes in index space, plain values, limits, sides.

pub mod dtype;
pub mod extent;
pub mod limits;
pub mod plain;
pub mod side;
