//! ckptcmp
pub mod dtype;
pub mod extent;
pub mod io;
pub mod kernel;
pub mod layout;
pub mod limits;
pub mod names;
pub mod tensor;
pub mod torch;
