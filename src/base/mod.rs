//! Vocabulary that every other room may use: element types, boxes in index space, plain values, limits, sides, results in order.

pub mod dtype;
pub mod extent;
pub mod in_order;
pub mod limits;
pub mod plain;
pub mod side;
