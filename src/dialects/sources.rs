//! Looks up what is said of a model: on the command line, in its own side, in the other side.

use std::collections::BTreeMap;

use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, RunState};

/// Arguments of a model, the nearest first: supplied, its own, those of the other side.
pub(super) struct Sources<'a> {
    given: [&'a [(String, PlainValue)]; 2],
    own: [Option<&'a BTreeMap<String, PlainValue>>; 2],
    state: &'a RunState,
    other: Option<&'a BTreeMap<String, PlainValue>>,
}

impl<'a> Sources<'a> {
    pub(super) fn of(side: &'a Catalog, other: &'a Catalog) -> Self {
        let given = [&*side.given, &*other.given];
        let config = side.state.config();
        // A model of several has that of its language model inside.
        let text = config.and_then(|config| config.get("text_config")?.as_map());
        let own = [config.or(side.state.args()), text];
        Self { given, own, state: &side.state, other: other.state.args() }
    }

    /// The argument that the command line supplies.
    pub(super) fn given(&self, name: &str) -> Option<&'a PlainValue> {
        let named = |run_args: &'a [(String, PlainValue)]| {
            run_args.iter().rev().find(|(known, _)| known == name)
        };
        self.given.into_iter().find_map(named).map(|(_, fact)| fact)
    }

    /// The argument that the side has itself, by the first of these names.
    pub(super) fn own(&self, names: &[&str]) -> Option<&'a PlainValue> {
        let maps = self.own.into_iter().flatten();
        let found = maps.flat_map(|map| names.iter().filter_map(|name| map.get(*name)));
        let at_top = names.iter().filter_map(|name| self.state.get(name));
        found.chain(at_top).find(|fact| **fact != PlainValue::None)
    }

    /// The argument that Megatron's `args` have on the other side.
    pub(super) fn others(&self, name: &str) -> Option<&'a PlainValue> {
        self.other?.get(name).filter(|fact| **fact != PlainValue::None)
    }
}
