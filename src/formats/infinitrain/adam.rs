//! Adam's state: moments by the position of the parameter, which no file gives a name.
//!
//! Facts from InfiniTrain 0.6.0 (`infini_train/src/optimizer.cc`): `adam.m.{k}`, `adam.v.{k}` and the step `adam.t`. The
//! positions are those of hash maps, so that another build of the program may count otherwise; a tied parameter counts once.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::catalog::{Catalog, Entry, Problem};
use crate::names::Name;
use crate::tensor::{LogicalTensor, StoredTensor};

use super::native::NativeFile;

/// Adds the state of every rank, by the names of their folders; each rank has positions of its own.
pub(super) fn add_adam(catalog: &mut Catalog, optimizers: Vec<(String, NativeFile)>) {
    let mut positions = BTreeSet::new();
    for (label, file) in optimizers {
        catalog.problems.extend(file.problems);
        let rank = if label.is_empty() { label } else { format!("{label}.") };
        for (stored_name, tensor) in file.tensors {
            let (name, is_position) = match adam_name(&stored_name, &rank) {
                Some(name) => (name, true),
                None => {
                    (format!("optimizer.{rank}{}", stored_name.trim_start_matches("adam.")), false)
                }
            };
            let name = Name::new(name);
            insert_stored(catalog, &name, &stored_name, &tensor);
            if is_position {
                positions.insert(name);
            }
        }
    }
    if !positions.is_empty() {
        catalog.notes.push(
            "optimizer state is known by position only and compared by it: the files have no names for it, \
             and another build of InfiniTrain may count otherwise"
                .to_owned(),
        );
    }
    catalog.positions.extend(positions);
}

/// `adam.m.7` is `optimizer.m.7`, on several ranks `optimizer.m.rank_000001.7`; `None` where there is no position.
fn adam_name(stored: &str, rank: &str) -> Option<String> {
    let (state, position) = stored.strip_prefix("adam.")?.split_once('.')?;
    let is_number = !position.is_empty() && position.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| format!("optimizer.{state}.{rank}{position}"))
}

fn insert_stored(
    catalog: &mut Catalog,
    name: &Name,
    stored_name: &Arc<str>,
    tensor: &StoredTensor,
) {
    if catalog.tensors.contains_key(name) {
        let message = format!("two tensors are {name}");
        catalog.problems.push(Problem::of_tensor(stored_name.to_string(), message));
        return;
    }
    let tensor = LogicalTensor::from_stored(tensor, Arc::clone(stored_name));
    catalog.insert(name.clone(), Entry { tensor, is_vocab: false });
}
