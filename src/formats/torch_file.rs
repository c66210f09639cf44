//! One file that `torch.save` wrote: a Megatron shard on its own, or any nest of dicts and lists with tensors in it.

use std::path::Path;

use crate::catalog::{Catalog, Entry, Origin, Problem};
use crate::io::FileSet;
use crate::limits::LIMITS;
use crate::names::Name;
use crate::tensor::LogicalTensor;
use crate::torch::{TorchFile, ValueId};

use super::megatron_torch;
use super::{Format, Located, OpenError, OpenOptions};

/// `torch-file`: a single `.pt`, `.pth`, `.bin` or `.ckpt` file.
pub(super) const FORMAT: Format = Format { name: "torch-file", detect: Path::is_file, read };

fn read(located: &Located, options: &OpenOptions) -> Result<Catalog, OpenError> {
    let path = &located.path;
    let mut files = FileSet::default();
    let file = files.add(path).map_err(|source| OpenError::Io { path: path.clone(), source })?;
    let torch = TorchFile::open(&files, files.whole(file))
        .map_err(|source| OpenError::Torch { path: path.clone(), source })?;
    if megatron_torch::is_megatron(&torch) {
        return megatron_torch::read_single(located, files, file, &torch, options);
    }
    let origin = Origin { format: FORMAT.name, shards: 1, ..Origin::default() };
    let mut catalog = Catalog::new(origin, files);
    let mut walk = Walk { torch: &torch, path, catalog: &mut catalog, steps: 0 };
    walk.collect("", torch.root(), 0);
    Ok(catalog)
}

struct Walk<'a> {
    torch: &'a TorchFile,
    path: &'a Path,
    catalog: &'a mut Catalog,
    steps: usize,
}

impl Walk<'_> {
    fn collect(&mut self, name: &str, id: ValueId, depth: usize) {
        // Values may be shared, so a small file can describe a tree without end.
        self.steps += 1;
        if depth > LIMITS.depth || self.steps > LIMITS.entries {
            if self.steps <= LIMITS.entries + 1 {
                self.problem(name, "nested too deep, or too many entries".to_owned());
            }
            return;
        }
        match self.torch.tensor(id) {
            Ok(Some(stored)) => {
                let tensor = LogicalTensor::from_stored(&stored, name);
                let name = Name::new(name);
                if self.catalog.tensors.contains_key(&name) {
                    self.problem(name.as_str(), "two entries have this name".to_owned());
                } else {
                    self.catalog.insert(name, Entry { tensor, is_vocab: false });
                }
                return;
            }
            Err(error) => return self.problem(name, error.to_string()),
            Ok(None) => {}
        }
        let values = self.torch.values();
        let joined = |key: &str| {
            if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") }
        };
        if let Some(members) = values.mapping(id) {
            for (key, member) in members {
                self.collect(&joined(&key_text(self.torch, key)), member, depth + 1);
            }
        } else if let Some(members) = values.elements(id) {
            for (index, member) in members.iter().enumerate() {
                self.collect(&joined(&index.to_string()), *member, depth + 1);
            }
        }
    }

    fn problem(&mut self, name: &str, message: String) {
        let file = Some(self.path.to_path_buf());
        self.catalog.problems.push(Problem { file, tensor: Some(name.to_owned()), message });
    }
}

/// How a key is written in a dotted name: text as it is, numbers in decimal, anything else by its class.
pub(super) fn key_text(torch: &TorchFile, key: ValueId) -> String {
    let values = torch.values();
    if let Some(text) = values.as_str(key) {
        return text.to_owned();
    }
    match values.as_i64(key) {
        Some(number) => number.to_string(),
        None => values.class_name(key).unwrap_or_else(|| values.get(key).type_name().to_owned()),
    }
}
