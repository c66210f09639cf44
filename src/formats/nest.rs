//! The tensors of any nest of dicts, lists and objects that `torch.save` wrote, under dotted names.

use std::collections::HashSet;
use std::path::Path;

use crate::base::limits::OverLimit;
use crate::catalog::Problem;
use crate::containers::torch::{Call, TorchFile, Value, ValueId};
use crate::tensor::StoredTensor;

use super::walk::{Bounds, OVER_DEPTH, joined};

/// All tensors of a nest of dicts, lists and objects under dotted names, each name once, and what could not be read.
pub(super) fn tensors_of(
    torch: &TorchFile,
    path: &Path,
) -> (Vec<(String, StoredTensor)>, Vec<Problem>) {
    let mut walk = Walk {
        torch,
        bounds: Bounds::of_torch(path, torch),
        tensors: Vec::new(),
        inside: Vec::new(),
        barren: HashSet::new(),
    };
    if let Err(excess) = walk.collect("", torch.root(), 0) {
        // What was found so far is a part of nobody knows what.
        walk.bounds.problem("", format!("the file has {excess}"));
        walk.tensors.clear();
    }
    let mut names = HashSet::new();
    let Walk { mut bounds, mut tensors, .. } = walk;
    tensors.retain(|(name, _)| {
        let is_new = names.insert(name.clone());
        if !is_new {
            bounds.problem(name, "two entries have this name");
        }
        is_new
    });
    (tensors, bounds.into_problems())
}

struct Walk<'a> {
    torch: &'a TorchFile,
    bounds: Bounds,
    tensors: Vec<(String, StoredTensor)>,
    /// The objects that the walk is in, which may hold one another.
    inside: Vec<ValueId>,
    /// Objects that hold no tensor.
    barren: HashSet<ValueId>,
}

impl Walk<'_> {
    fn collect(&mut self, name: &str, id: ValueId, depth: usize) -> Result<(), OverLimit> {
        self.bounds.enter(name, depth)?;
        match self.torch.tensor(id) {
            Ok(Some(stored)) => {
                self.tensors.push((name.to_owned(), stored));
                return Ok(());
            }
            Err(error) => {
                self.bounds.problem(name, error);
                return Ok(());
            }
            Ok(None) => {}
        }
        let values = self.torch.values();
        if let Some(members) = values.mapping(id) {
            for (key, member) in members {
                self.collect(&joined(name, &key_text(self.torch, key)), member, depth + 1)?;
            }
        } else if let Some(members) = values.sequence(id) {
            for (index, member) in members.enumerate() {
                self.collect(&joined(name, &index.to_string()), member, depth + 1)?;
            }
        } else if let Value::Call(call) = values.get(id)
            && !self.inside.contains(&id)
            && !self.barren.contains(&id)
        {
            let found = self.tensors.len();
            self.inside.push(id);
            let walked = self.collect_object(name, id, &call, depth + 1);
            self.inside.pop();
            match walked {
                // Objects that say something of a run may hold each other in long chains.
                Err(OVER_DEPTH) if self.inside.is_empty() => {
                    self.bounds.problem(name, format!("holds {}", OVER_DEPTH));
                }
                walked => walked?,
            }
            if self.tensors.len() == found {
                self.barren.insert(id);
            }
        }
        Ok(())
    }

    /// Attributes by their names, without those in which a `torch.nn.Module` keeps what it holds, so that a module has the
    /// names of its state dict; what an object was made from by number.
    fn collect_object(
        &mut self,
        name: &str,
        id: ValueId,
        call: &Call<'_>,
        depth: usize,
    ) -> Result<(), OverLimit> {
        const OF_MODULES: [&str; 3] = ["_parameters", "_buffers", "_modules"];
        let values = self.torch.values();
        for (index, member) in values.args(call).iter().enumerate() {
            self.collect(&joined(name, &index.to_string()), *member, depth)?;
        }
        let Some(attributes) = values.attributes(id) else {
            return call.state.map_or(Ok(()), |state| self.collect(name, state, depth));
        };
        for (key, member) in attributes {
            let key = key_text(self.torch, key);
            if OF_MODULES.contains(&&*key) {
                self.collect(name, member, depth)?;
            } else {
                self.collect(&joined(name, &key), member, depth)?;
            }
        }
        Ok(())
    }
}

/// Writes a key as in a dotted name: text as it is, numbers in decimal, anything else by its class.
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
