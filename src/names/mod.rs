//! Dialects -> canonical names, as tables of rewrites.

pub mod families;
pub mod forward;
pub mod index;
pub mod megatron;
mod natural;
pub mod pattern;
pub mod place;
mod printable;
pub mod renames;

use std::sync::LazyLock;

pub use natural::Name;
pub use printable::{is_control, printable};

/// The origin of a checkpoint's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Naming {
    /// Those that the modules of the model have, whoever wrote them: Hugging Face's and others.
    #[default]
    Modules,
    /// InfiniTrain's, which are those of GPT-2 with other shapes.
    InfiniTrain,
    /// Megatron-Core's, with global indices.
    Canonical,
}

/// Tensors with a row for every token, in the dialects of all families.
static VOCABULARY: LazyLock<pattern::SuffixTable<()>> = LazyLock::new(|| {
    pattern::SuffixTable::new([
        ("{word_embeddings,output_layer,lm_head,embed_tokens,wte,embed_in,embed_out}.weight", ()),
        ("output_layer.bias", ()),
    ])
});

/// True where the rows of a tensor of this name are a vocabulary, which some writers pad.
#[must_use]
pub fn is_vocabulary(name: &str) -> bool {
    VOCABULARY.find(name).is_some()
}

/// A name without these prefixes of modules that only wrap a model, however many of them are in front.
#[must_use]
pub fn without_prefixes<'n>(mut name: &'n str, wrappers: &[&str]) -> &'n str {
    while let Some(inner) = wrappers.iter().find_map(|wrapper| name.strip_prefix(wrapper)) {
        name = inner;
    }
    name
}
