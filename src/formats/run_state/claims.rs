//! The bytes of files that tensors of a catalog come from, and the names of these.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::{Catalog, Section};
use crate::storage::{FileSet, Region};
use crate::tensor::LogicalTensor;

/// The bytes that are tensors of the model or its optimizer.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Of each file the ranges, in order of their first bytes.
    by_file: HashMap<PathBuf, Vec<Range>>,
    /// The tensors by number.
    names: Vec<Arc<str>>,
    /// The names under which files hold them.
    stored: HashSet<Arc<str>>,
    /// Beginnings, up to the first dot, of the names under which files hold weights.
    model_roots: HashSet<Box<str>>,
}

#[derive(Debug)]
struct Range {
    start: u64,
    end: u64,
    /// The largest end of this one and all before it.
    reach: u64,
    name: usize,
}

impl Claims {
    /// Collects those of a catalog.
    pub(super) fn of(catalog: &Catalog) -> Self {
        let mut claims = Self::default();
        for (name, entry) in &catalog.tensors {
            claims.add(name.as_str(), &entry.tensor, &catalog.files);
        }
        for (name, tied) in &catalog.tied {
            if let Some(copy) = &tied.copy {
                claims.add(name.as_str(), copy, &catalog.files);
            }
        }
        for ranges in claims.by_file.values_mut() {
            ranges.sort_by_key(|range| (range.start, range.end, range.name));
            let mut reach = 0;
            for range in ranges {
                reach = range.end.max(reach);
                range.reach = reach;
            }
        }
        claims
    }

    fn add(&mut self, name: &str, tensor: &LogicalTensor, files: &FileSet) {
        let number = self.names.len();
        self.names.push(name.into());
        let sources =
            [tensor.source()].into_iter().chain(tensor.replicas().iter().map(|copy| &copy.source));
        for source in sources {
            if Section::of(name) == Section::Model {
                let root = source.name.split('.').next().unwrap_or_default();
                self.model_roots.insert(root.into());
            }
            self.stored.insert(Arc::clone(&source.name));
        }
        for Region { file, offset, len } in tensor.regions() {
            let path = files.path(file);
            if !self.by_file.contains_key(path) {
                self.by_file.insert(path.to_path_buf(), Vec::new());
            }
            if let Some(ranges) = self.by_file.get_mut(path) {
                let end = offset.saturating_add(len);
                ranges.push(Range { start: offset, end, reach: 0, name: number });
            }
        }
    }

    /// Tells whether a tensor lies in a file.
    pub(super) fn has_file(&self, path: &Path) -> bool {
        self.by_file.contains_key(path)
    }

    /// Tells whether a file holds a tensor under this name, or weights under names that begin like it.
    pub(super) fn has_stored(&self, name: &str) -> bool {
        let root = name.split('.').next().unwrap_or_default();
        self.stored.contains(name) || self.model_roots.contains(root)
    }

    /// The names of the tensors that have bytes of another tensor.
    pub(super) fn names_in(&self, tensor: &LogicalTensor, files: &FileSet) -> BTreeSet<Arc<str>> {
        let mut names = BTreeSet::new();
        for Region { file, offset, len } in tensor.regions() {
            let Some(ranges) = self.by_file.get(files.path(file)) else { continue };
            let end = offset.saturating_add(len);
            let behind = ranges.partition_point(|range| range.start < end);
            let reaching = ranges[..behind].iter().rev().take_while(|range| range.reach > offset);
            let inside = reaching.filter(|range| range.end > offset);
            names.extend(inside.map(|range| Arc::clone(&self.names[range.name])));
        }
        names
    }
}
