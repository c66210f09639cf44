//! Merged parameters into a catalog, with what is to be said of those that no rule knows, and of tied ones.

use std::collections::BTreeMap;

use crate::catalog::{Catalog, Entry};
use crate::layout::rules::UserRule;
use crate::layout::{ArgName, Merged, RunArgs};
use crate::names::Name;
use crate::tensor::LogicalTensor;

/// Adds the parameters of a model and notes names without a rule, and rules without a name.
pub(super) fn insert_merged(
    catalog: &mut Catalog,
    model: BTreeMap<Name, Merged>,
    is_whole: bool,
    rules: &[UserRule],
) {
    let mut unruled = Vec::new();
    for (name, merged) in model {
        if merged.has_no_rule {
            unruled.push(name.to_string());
        }
        // The rows of a shard on its own are not all there are, so fewer of them are no padding.
        let is_vocab = merged.is_vocab && is_whole;
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

/// With tied weights the output layer is the word embeddings; the last of several stages keeps a copy. `prefix` is
/// that of the state of an optimizer which they are.
pub(super) fn tie_output_layer(
    catalog: &mut Catalog,
    prefix: &str,
    mut copy: Option<LogicalTensor>,
    run_args: &RunArgs,
) {
    let output = Name::new(format!("{prefix}output_layer.weight"));
    let embedding = Name::new(format!("{prefix}embedding.word_embeddings.weight"));
    if copy.is_none() && (!run_args.are_weights_tied() || catalog.tensors.contains_key(&output)) {
        return;
    }
    if copy.is_some() && run_args.size(ArgName::MTP_NUM_LAYERS).is_some_and(|layers| layers > 0) {
        // The stage that predicts further tokens has its own copy; this one is not kept up (Megatron-LM
        // `language_module.py`), so it says nothing.
        catalog
            .notes
            .push("left out a copy of the tied output layer that training does not use".into());
        copy = None;
    }
    catalog.tie(output, embedding, copy);
}
