//! Adam's state: moments by the position of the parameter, which no file gives a name.
//!
//! Facts from InfiniTrain 0.6.0 (`infini_train/src/optimizer.cc`): `adam.m.{k}`, `adam.v.{k}` and the step `adam.t`. The
//! positions are those of hash maps, so that another build of the program may count otherwise; a tied parameter counts once.

use std::sync::Arc;

use crate::catalog::CatalogBuilder;
use crate::names::Name;
use crate::names::index::is_number;
use crate::tensor::LogicalTensor;

use super::native::NativeFile;

/// Adds the state of every rank, by the names of their folders; each rank has positions of its own.
pub(super) fn add_adam(catalog: &mut CatalogBuilder<'_>, optimizers: Vec<(String, NativeFile)>) {
    let mut has_positions = false;
    for (label, file) in optimizers {
        catalog.problems(file.problems);
        let rank = if label.is_empty() { label } else { format!("{label}.") };
        for (stored_name, tensor) in file.tensors {
            let tensor = LogicalTensor::from_stored(&tensor, Arc::clone(&stored_name));
            match adam_name(&stored_name, &rank) {
                Some(name) => {
                    catalog.add_position(Name::new(name), tensor);
                    has_positions = true;
                }
                None => {
                    let name = stored_name.trim_start_matches("adam.");
                    catalog.add(Name::new(format!("optimizer.{rank}{name}")), tensor);
                }
            }
        }
    }
    if has_positions {
        catalog.note(
            "optimizer state is known by position only and compared by it: the files have no names for it, \
             and another build of InfiniTrain may count otherwise",
        );
    }
}

/// `adam.m.7` is `optimizer.m.7`, on several ranks `optimizer.m.rank_000001.7`; `None` where there is no position.
fn adam_name(stored: &str, rank: &str) -> Option<String> {
    let (state, position) = stored.strip_prefix("adam.")?.split_once('.')?;
    is_number(position).then(|| format!("optimizer.{state}.{rank}{position}"))
}
