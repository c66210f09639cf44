//! The files of a folder that hold the model: the names that writers give them, and which come first.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::base::limits::LIMITS;

use super::index::InFile;
use crate::formats::probe::Probe;

/// Stem and ending of the files, those first that transformers takes first. Each may be one file, numbered parts, and
/// parts with an index.
const KINDS: [(&str, &str); 6] = [
    ("model", "safetensors"),
    ("pytorch_model", "bin"),
    ("diffusion_pytorch_model", "safetensors"),
    ("diffusion_pytorch_model", "bin"),
    (ADAPTER, "safetensors"),
    (ADAPTER, "bin"),
];

/// The weights that PEFT trains beside a model.
const ADAPTER: &str = "adapter_model";

/// The parts that torch's distributed checkpoint writes; another format puts their tensors together.
const DISTRIBUTED: &str = "shard-";

/// The files that a model is read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelFiles {
    /// The file that says what is where.
    pub index: Option<String>,
    /// The files without it.
    pub files: Vec<String>,
    /// Parts that the numbers of the others say there should be.
    pub missing: Vec<String>,
    /// Numbered parts beside an index, which knows its own.
    parts: Vec<String>,
    /// Others that would have been a model too.
    ignored: Vec<String>,
}

/// A file's name cut in its parts: `model-00001-of-00002.safetensors`.
struct Numbered<'n> {
    start: &'n str,
    count: u64,
    width: usize,
    ending: &'n str,
}

impl<'n> Numbered<'n> {
    fn parse(name: &'n str) -> Option<Self> {
        let (stem, ending) = name.rsplit_once('.')?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (start, number) = rest.rsplit_once('-')?;
        let is_number = |text: &str| {
            !text.is_empty() && text.len() < 10 && text.bytes().all(|byte| byte.is_ascii_digit())
        };
        if !is_number(number) || !is_number(count) {
            return None;
        }
        let width = number.len();
        Some(Self { start, count: count.parse().ok()?, width, ending })
    }

    /// The name of another part.
    fn other(&self, number: u64) -> String {
        let Self { start, count, width, ending, .. } = self;
        format!("{start}-{number:0width$}-of-{count:0width$}.{ending}", width = *width)
    }
}

/// Tells whether a file has one of the names, or is a part of one that has.
pub(super) fn is_name(name: &str) -> bool {
    let is_kind = |stem: &str, ending: &str| KINDS.contains(&(stem, ending));
    match Numbered::parse(name) {
        Some(part) => is_kind(part.start, part.ending),
        None => name.rsplit_once('.').is_some_and(|(stem, ending)| is_kind(stem, ending)),
    }
}

impl ModelFiles {
    /// The model's files in a folder; `None` where there are none.
    pub(super) fn find(folder: &Probe) -> Option<Self> {
        Self::among(&folder.names().map(str::to_owned).collect())
    }

    fn among(names: &BTreeSet<String>) -> Option<Self> {
        let mut found = Vec::new();
        for (stem, ending) in KINDS {
            let index = format!("{stem}.{ending}.index.json");
            if names.contains(&index) {
                found.push(Self { index: Some(index), ..Self::of(Vec::new()) });
            }
            let single = format!("{stem}.{ending}");
            if names.contains(&single) {
                found.push(Self::of(vec![single]));
            }
            let start = format!("{stem}-");
            let is_part = |name: &&String| {
                name.starts_with(&start)
                    && name.rsplit_once('.').is_some_and(|(_, end)| end == ending)
            };
            let parts: Vec<String> = names.iter().filter(is_part).cloned().collect();
            if !parts.is_empty() {
                found.push(Self { missing: missing(&parts), ..Self::of(parts) });
            }
        }
        let mut found = found.into_iter();
        let Some(mut first) = found.next() else { return Self::lone(names) };
        for other in found {
            match other.index {
                Some(index) => first.ignored.push(index),
                None if first.index.is_some() && other.is_numbered() => {
                    first.parts.extend(other.files);
                }
                None => first.ignored.extend(other.files),
            }
        }
        Some(first)
    }

    /// A folder with a single safetensors file under any name (`consolidated`, `model.fp16`).
    fn lone(names: &BTreeSet<String>) -> Option<Self> {
        let is_own =
            |name: &&String| name.ends_with(".safetensors") && !name.starts_with(DISTRIBUTED);
        let mut own = names.iter().filter(is_own);
        match (own.next(), own.next()) {
            (Some(name), None) if !names.contains(".metadata") => {
                Some(Self::of(vec![name.clone()]))
            }
            _ => None,
        }
    }

    fn of(files: Vec<String>) -> Self {
        Self { index: None, files, missing: Vec::new(), parts: Vec::new(), ignored: Vec::new() }
    }

    /// One file on its own.
    pub(super) fn of_file(path: &Path) -> Self {
        Self::of(vec![path.file_name().unwrap_or_default().to_string_lossy().into_owned()])
    }

    fn is_numbered(&self) -> bool {
        self.files.iter().all(|file| Numbered::parse(file).is_some())
    }

    /// Parts beside an index that it does not name.
    pub(super) fn unnamed(&self, indexed: &BTreeMap<&str, InFile<'_>>) -> Option<String> {
        let mut unnamed = self.parts.iter().filter(|part| !indexed.contains_key(part.as_str()));
        let first = unnamed.next()?;
        Some(match unnamed.count() {
            0 => format!("left out {first}: the index does not name it"),
            more => format!("left out {first} and {more} more: the index does not name them"),
        })
    }

    /// Tells whether they are a part of a model: one of several files, which the user named, or an adapter.
    pub(super) fn is_part(&self, is_file: bool) -> bool {
        let is_numbered = |file: &String| Numbered::parse(file).is_some_and(|part| part.count > 1);
        self.is_adapter() || (is_file && self.files.iter().any(is_numbered))
    }

    fn is_adapter(&self) -> bool {
        let taken = self.files.first().or(self.index.as_ref());
        taken.is_some_and(|file| file.starts_with(ADAPTER))
    }

    /// Notes on the choice; `is_file` where the user named a file and not a folder.
    pub(super) fn notes(&self, is_file: bool) -> Vec<String> {
        let mut notes = Vec::new();
        if let (true, [file]) = (is_file, &self.files[..])
            && let Some(part) = Numbered::parse(file)
            && part.count > 1
        {
            notes.push(format!("one of {} files, compared as the part that it is", part.count));
        }
        if self.is_adapter() {
            notes.push("an adapter, compared as the part of a model that it is".to_owned());
        }
        if let Some(first) = self.ignored.first() {
            let taken = self.index.as_ref().or(self.files.first()).map_or("", String::as_str);
            let others = match self.ignored.len() {
                1 => String::new(),
                count => format!(" and {} more", count - 1),
            };
            notes.push(format!("left out {first}{others}: {taken} comes first"));
        }
        notes
    }
}

/// The parts that are not there, as the numbers of the others tell.
fn missing(present: &[String]) -> Vec<String> {
    let parts: Vec<Numbered<'_>> =
        present.iter().filter_map(|file| Numbered::parse(file)).collect();
    let mut all = BTreeSet::new();
    let mut counts = BTreeSet::new();
    for part in parts {
        if counts.insert((part.start, part.count, part.ending)) {
            let left = LIMITS.model_parts.saturating_sub(all.len() as u64);
            all.extend((1..=part.count.min(left)).map(|number| part.other(number)));
        }
    }
    for file in present {
        all.remove(file);
    }
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among(names: &[&str]) -> Option<ModelFiles> {
        ModelFiles::among(&names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn an_index_comes_before_a_single_file_and_safetensors_before_torch() {
        let all = [
            "model.safetensors.index.json",
            "model-00001-of-00001.safetensors",
            "model.safetensors",
            "pytorch_model.bin.index.json",
            "pytorch_model.bin",
        ];
        let taken = |from: usize| {
            let source = among(&all[from..]);
            source.map(|ModelFiles { index, files, .. }| index.unwrap_or(files.concat()))
        };
        assert_eq!(taken(0).as_deref(), Some(all[0]));
        assert_eq!(taken(2).as_deref(), Some(all[2]));
        assert_eq!(taken(3).as_deref(), Some(all[3]));
        assert_eq!(taken(4).as_deref(), Some(all[4]));
        assert_eq!(among(&[]), None);
    }

    #[test]
    fn parts_that_are_not_there_are_told_by_the_numbers_of_the_others() {
        let source =
            among(&["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]);
        let missing = source.map(|source| source.missing);
        assert_eq!(missing, Some(vec!["model-00002-of-00003.safetensors".to_owned()]));
    }

    #[test]
    fn a_lone_file_under_another_name_is_a_model_and_shards_of_torch_are_not() {
        assert!(among(&["consolidated.safetensors", "params.json"]).is_some());
        assert!(among(&["a.safetensors", "b.safetensors"]).is_none());
        assert!(among(&["shard-00001-model-00001-of-00001.safetensors"]).is_none());
        assert!(among(&["x.safetensors", ".metadata"]).is_none());
    }

    #[test]
    fn files_are_known_by_their_names() {
        assert!(is_name("pytorch_model.bin"));
        assert!(is_name("pytorch_model-00002-of-00002.bin"));
        assert!(is_name("adapter_model.safetensors"));
        assert!(!is_name("model.bin"));
        assert!(!is_name("my_pytorch_model.bin"));
    }
}
