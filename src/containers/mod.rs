//! What a file holds, knowing of no ranks, layouts or models: one module a container.

pub mod dcp;
pub mod safetensors;
pub mod torch;
pub mod yaml;
pub mod zarr;
