//! Merged parameters into a catalog, with what is to be said of those that no rule knows.

use std::collections::BTreeMap;

use crate::catalog::{Catalog, Entry};
use crate::layout::rules::UserRule;
use crate::layout::{Merged, World};
use crate::names::Name;

/// Adds the parameters of a model and notes names without a rule, and rules without a name.
pub(super) fn insert_merged(
    catalog: &mut Catalog,
    model: BTreeMap<Name, Merged>,
    world: &World,
    rules: &[UserRule],
) {
    let mut unruled = Vec::new();
    for (name, merged) in model {
        if merged.has_no_rule {
            unruled.push(name.to_string());
        }
        // The rows of a shard on its own are not all there are, so fewer of them are no padding.
        let is_vocab = merged.is_vocab && world.tp == world.declared_tp;
        catalog.insert(name, Entry { tensor: merged.tensor, is_vocab });
    }
    if let Some(first) = unruled.first() {
        catalog.notes.push(format!(
            "no sharding rule for {} names, taken whole from their only shard: {first}, ...",
            unruled.len()
        ));
    }
    for rule in rules {
        if !catalog.tensors.keys().any(|name| rule.matches(name.as_str())) {
            catalog.notes.push(format!("--rule {rule}: no name ends so"));
        }
    }
}
