//! Completeness: what a checkpoint announces, held against what its names say is there.
//!
//! ```text
//! names ──► stacks      lists of layers, the names in each layer, the experts of each
//! state ──► announced   numbers of layers and experts, ties, each with the words for who says so
//!              │             └─► kinds   what tells layers apart (frequency: as text)
//!              ├─► layers     0 to n-1; layers of one kind have the same names, and what goes together (partners)
//!              ├─► experts    0 to n-1 in each layer; all with the same names
//!              ├─► frame      embeddings, final norm, output layer around the layers
//!              ├─► heads      parts of other heads, which never go without each other
//!              ├─► listed     tensors that a file names
//!              └─► optimizer  masters and moments of every weight whose kin have them
//! ```
//!
//! It is asked once for every catalog, whatever its format: here nobody knows files. Where nothing is announced, the names
//! speak for themselves: a gap between numbers, a layer that lacks what its kin have. A lost part is one problem, however many
//! tensors went with it. All steps are near-linear in the number of names; announced numbers are compared and never counted up to.

mod announced;
mod experts;
mod frame;
mod frequency;
mod heads;
mod kin;
mod kinds;
mod layers;
mod listed;
mod numbers;
mod optimizer;
mod partners;
mod stacks;

use std::collections::HashSet;

use crate::catalog::{Catalog, Extent, Problem, Section};
use crate::layout::rules::Rules;
use crate::names::{Name, Naming};

use announced::Announced;
use stacks::Stack;

/// The parts that are missing, each named once. Nothing of a catalog that is a part itself.
#[must_use]
pub fn missing(catalog: &Catalog) -> Vec<Problem> {
    if catalog.origin.extent == Extent::Part {
        return Vec::new();
    }
    let present = Present::of(catalog);
    let announced = Announced::of(catalog);
    let mut problems = Vec::new();
    if !present.weights.is_empty() {
        problems.extend(layers::missing(&present, &announced));
        problems.extend(experts::missing(&present, &announced));
        problems.extend(frame::missing(&present, &announced));
        problems.extend(heads::missing(&present, &announced));
    }
    let listed = listed::missing(&present, &problems);
    problems.extend(optimizer::missing(&present, &announced, !listed.is_empty()));
    problems.extend(listed);
    problems.retain(|problem| !present.is_told(problem));
    problems
}

/// Ends of the names of what is stored beside a quantized weight.
const SCALES: [&str; 4] = ["_scale_inv", "_scale", "_scales", "_zero_point"];

/// The names of a catalog, sorted out.
struct Present<'c> {
    naming: Naming,
    /// Names of weights, those of tied ones included.
    weights: Vec<&'c str>,
    /// The lists of layers among them.
    stacks: Vec<Stack<'c>>,
    /// Names that there is a problem with already.
    told: HashSet<&'c str>,
    rules: Rules,
    catalog: &'c Catalog,
}

impl<'c> Present<'c> {
    fn of(catalog: &'c Catalog) -> Self {
        let told = catalog.problems.iter().filter_map(|problem| problem.tensor.as_deref());
        let told: HashSet<&str> = told.collect();
        let is_weight = |name: &&str| Section::of(name) == Section::Model;
        let named = catalog.tensors.keys().filter(|name| !catalog.positions.contains(*name));
        let named = named.chain(catalog.tied.keys()).map(|name| name.as_str());
        let mut weights: Vec<&str> = named.filter(is_weight).collect();
        // What cannot be read is there all the same, where it goes by the names of the others.
        let paths: HashSet<&str> = weights.iter().filter_map(|name| stacks::path(name)).collect();
        let is_known = |name: &&str| stacks::path(name).is_some_and(|path| paths.contains(path));
        weights.extend(told.iter().copied().filter(is_known));
        let stacks = stacks::of(weights.iter().copied());
        let naming = catalog.origin.naming;
        Self { naming, weights, stacks, told, rules: Rules::new(&[]), catalog }
    }

    fn has(&self, name: &str) -> bool {
        let own = Name::new(name);
        self.told.contains(name)
            || self.catalog.tensors.contains_key(&own)
            || self.catalog.tied.contains_key(&own)
    }

    /// Says whether a name within a layer is that of a parameter which there is a sharding rule for, where there is a table of
    /// them. Scales of quantized weights are none: some layers are left as they are (transformers `quantizers`).
    fn is_known(&self, name: &str) -> bool {
        match self.naming {
            Naming::Canonical => self.rules.find(&name.replace('*', "0")).is_some(),
            _ => !SCALES.iter().any(|end| name.ends_with(end)),
        }
    }

    /// Says whether a problem has been told of the same tensor, or of the list of layers that it stands in.
    fn is_told(&self, problem: &Problem) -> bool {
        let Some(name) = &problem.tensor else { return false };
        let ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
        ends.into_iter().any(|end| self.told.contains(&name[..end]))
    }
}
