//! Why tensors differ: causes that explain all values of a tensor exactly, and nothing that is merely close.
//!
//! The statistics of the comparison rule most causes out: an order needs equal norms, an offset a mean difference of one, a factor
//! a residual of rounding. Only what is left is read once more: fingerprints of whole tensors, of rows and of columns find
//! what was moved or permuted, the rest is held against its relation element by element. Memory: 8 bytes a row and a column
//! of the tensors that are looked at together, which have a budget.

mod extents;
mod factors;
mod facts;
mod moved;
mod orders;
mod role;
mod search;
mod summary;
#[cfg(test)]
mod tests;

use crate::compare::{ReadError, TensorComparison};
use crate::names::Name;
use crate::pairing::Pair;
use crate::storage::FileSet;

pub use facts::Facts;

/// Why tensors differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Causes {
    /// The causes, in the order of the first tensor of each.
    pub found: Vec<Cause>,
    /// Number of tensors that a cause was looked for.
    pub searched: usize,
    /// Tensors with more rows and columns than there is memory for.
    pub skipped: Vec<Name>,
}

/// A cause of which some tensors differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// Its kind, by the word that documents have.
    pub kind: &'static str,
    /// What the tensors are, without their layers: `mlp.linear_fc1.weight`; empty where it is more than one thing.
    pub subject: String,
    /// Words for it.
    pub text: String,
    /// The tensors that it explains, in natural order.
    pub tensors: Vec<Name>,
    /// Number of tensors of this subject that were compared, where it has one.
    pub of: Option<usize>,
}

impl Causes {
    /// Number of tensors that have a cause.
    #[must_use]
    pub fn explained(&self) -> usize {
        self.found.iter().map(|cause| cause.tensors.len()).sum()
    }
}

/// The pairs of a comparison, and what is known of them.
#[derive(Clone, Copy)]
pub struct Compared<'a> {
    /// All pairs, in natural order of their names.
    pub pairs: &'a [Pair],
    /// The comparison of each.
    pub tensors: &'a [&'a TensorComparison],
    /// The files of each side.
    pub files: [&'a FileSet; 2],
    /// What is said of the model.
    pub facts: &'a Facts,
}

/// Looks for the causes of which some of the pairs differ: those at these places.
///
/// Files that cannot be read come with the place of the pair that they belong to.
#[must_use]
pub fn find(compared: Compared<'_>, places: &[usize]) -> (Causes, Vec<(usize, ReadError)>) {
    let search::Found { causes, skipped, errors } = search::search(compared, places);
    let name = |place: &usize| compared.pairs[*place].name.clone();
    let causes = Causes {
        found: summary::summary(compared, &causes),
        searched: places.len(),
        skipped: skipped.iter().map(name).collect(),
    };
    (causes, errors)
}
