//! One file that `torch.save` wrote: any nest of dicts, lists and objects with tensors in it.

use crate::catalog::{Catalog, CatalogBuilder, Extent, Origin};
use crate::containers::torch;
use crate::names::Name;
use crate::tensor::LogicalTensor;

use super::error::OpenError;
use super::format::{Format, OpenOptions};
use super::nest::tensors_of;
use super::probe::{OpenedTorch, Probe};
use super::roots::{Claim, FILE, Root, Score};

/// `torch-file`: a single `.pt`, `.pth`, `.bin` or `.ckpt` file.
pub(super) const FORMAT: Format = Format {
    name: "torch-file",
    looked_for: &["a torch .pt file"],
    usual_folders: &[],
    rank_folders: &[],
    claim,
    read,
};

/// Endings of the names of such files.
const ENDINGS: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

/// Words in the names of files that are one of several: a rank's, a layer's, a numbered one.
const PARTS: [&str; 4] = ["rank", "layer_", "-of-", "consolidated."];

/// Claims any file: if it is none of torch's, its reader says best what it is.
fn claim(probe: &Probe) -> Result<Option<Claim>, OpenError> {
    if !probe.is_file() {
        return Ok(None);
    }
    let is_named = ENDINGS.iter().any(|ending| probe.name().ends_with(ending));
    let is_torch = is_named && torch::may_start_with(probe.head()?);
    Ok(Some(Claim::here(if is_torch { Score::Kind } else { Score::File }, FILE)))
}

fn read(root: &Root, _: &OpenOptions) -> Result<Catalog, OpenError> {
    let OpenedTorch { files, torch, .. } = root.probe.take_torch()?;
    let is_part = PARTS.iter().any(|word| root.probe.name().contains(word));
    let extent = if is_part { Extent::Part } else { Extent::Whole };
    let origin = Origin { format: FORMAT.name, shards: 1, extent, ..Origin::default() };
    let mut catalog = CatalogBuilder::new(origin, files);
    if is_part {
        catalog.note("one of several files, compared as the part that it is");
    }
    let (tensors, problems) = tensors_of(&torch, &root.path);
    catalog.problems(problems);
    for (name, stored) in tensors {
        let tensor = LogicalTensor::from_stored(&stored, name.as_str());
        catalog.add(Name::new(name), tensor);
    }
    Ok(catalog.finish())
}
