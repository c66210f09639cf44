//! Dialects -> canonical names, as tables of rewrites.

pub mod megatron;
mod natural;
pub mod pattern;
mod printable;

pub use natural::Name;
pub use printable::{is_obeyed, printable};
