//! The tensors of a module's state dict, under dotted names.

use std::sync::Arc;

use crate::tensor::StoredTensor;
use crate::torch::{TorchFile, Value, ValueId};

use super::torch_file::key_text;
use super::walk::{Bounds, Excess, joined};

/// Collects the tensors of a nest of dicts under dotted names.
pub(super) struct Walk<'a> {
    pub torch: &'a TorchFile,
    pub bounds: &'a mut Bounds,
    /// Entries that are no weights.
    pub left_out: usize,
    pub tensors: Vec<(Arc<str>, StoredTensor)>,
}

impl Walk<'_> {
    pub(super) fn collect(&mut self, name: &str, id: ValueId, depth: usize) -> Result<(), Excess> {
        self.bounds.enter(name, depth)?;
        let values = self.torch.values();
        let is_extra_state =
            name.rsplit('.').next().is_some_and(|last| last.starts_with("_extra_state"));
        if is_extra_state {
            self.left_out += 1;
            return Ok(());
        }
        match self.torch.tensor(id) {
            Ok(Some(tensor)) => {
                self.tensors.push((name.into(), tensor));
                return Ok(());
            }
            Err(error) => {
                self.bounds.problem(name, error);
                return Ok(());
            }
            Ok(None) => {}
        }
        if let Some(members) = values.mapping(id) {
            for (key, member) in members {
                let name = joined(name, &key_text(self.torch, key));
                self.collect(&name, member, depth + 1)?;
            }
            return Ok(());
        }
        match values.get(id) {
            Value::Call(_) => {
                let class = values.class_name(id).unwrap_or_else(|| "an object".to_owned());
                let message = format!("holds {class}, which is no tensor that can be read");
                self.bounds.problem(name, message);
            }
            _ => self.left_out += 1,
        }
        Ok(())
    }
}
