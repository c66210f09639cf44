//! Dialects -> canonical names, as tables of rewrites.

pub mod megatron;
mod natural;
pub mod pattern;

pub use natural::Name;
