//! Problems as a user is told of them: the one place where an error and its causes become text.

use std::error::Error;
use std::path::{Path, PathBuf};

use crate::names::{Name, printable};
use crate::storage::Summed;

/// Something that could not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file, where one is to blame.
    pub file: Option<PathBuf>,
    /// The tensor, by the name closest to the user's.
    pub tensor: Option<String>,
    /// The reason, and the remedy where there is one.
    pub message: String,
    /// The names of the tensors that are lost, where they are known and `tensor` is not the only one.
    pub lost: Vec<String>,
}

/// Tensors that are named before the others are counted.
const SHOWN: usize = 3;

/// A sentence, or an error with its causes.
type Cause<'a> = Box<dyn Error + 'a>;

impl Problem {
    /// A problem that neither a file nor a tensor alone is to blame for.
    pub fn of_whole<'a>(cause: impl Into<Cause<'a>>) -> Self {
        Self { message: chain_text(&*cause.into()), ..Self::default() }
    }

    /// A problem with one file or folder.
    pub fn of_file<'a>(file: impl Into<PathBuf>, cause: impl Into<Cause<'a>>) -> Self {
        Self { file: Some(file.into()), ..Self::of_whole(cause) }
    }

    /// A problem with one tensor.
    pub fn of_tensor<'a>(tensor: impl Into<String>, cause: impl Into<Cause<'a>>) -> Self {
        Self { tensor: Some(tensor.into()), ..Self::of_whole(cause) }
    }

    /// The same problem, with the names of the tensors that are lost.
    #[must_use]
    pub fn with_lost(self, lost: Vec<String>) -> Self {
        Self { lost, ..self }
    }

    /// The same problem, with the file that is to blame.
    #[must_use]
    pub fn in_file(self, file: impl Into<PathBuf>) -> Self {
        Self { file: Some(file.into()), ..self }
    }

    /// A file that is not there or cannot be read, with the tensors that it takes with it.
    #[must_use]
    pub fn lost_file(file: &Path, error: &str, tensors: &[impl AsRef<str>]) -> Self {
        let first: Vec<&str> = tensors.iter().take(SHOWN).map(AsRef::as_ref).collect();
        let (first, count) = (first.join(", "), tensors.len());
        let rest = if count > SHOWN { ", ..." } else { "" };
        let noun = if count == 1 { "tensor is lost" } else { "tensors are lost" };
        let message = format!("cannot be read: {error}; {count} {noun} with it: {first}{rest}");
        Self::of_file(file, message)
    }

    /// A file that has lost tensors which another one of its place holds: the first of them, and how many they are.
    #[must_use]
    pub fn lost_copies(file: &Path, twin: &Path, first: &str, count: usize) -> Self {
        let last = |path: &Path, count: usize| -> PathBuf {
            let skipped = path.components().count().saturating_sub(count);
            path.components().skip(skipped).collect()
        };
        let twin = last(twin, 2);
        let twin = twin.display();
        let message = match count {
            1 => format!("missing, which {twin} holds for the same place"),
            _ => format!("missing with {} more, which {twin} holds for the same place", count - 1),
        };
        Self::of_tensor(first, message).in_file(file)
    }

    /// Bytes that are not those of anything.
    #[must_use]
    pub fn bytes_behind(file: &Path, bytes: u64) -> Self {
        Self::of_file(file, format!("{bytes} bytes behind the end of what was saved"))
    }

    /// A part of a file that has another sum than its archive says, and the tensors in it.
    #[must_use]
    pub fn wrong_sum(file: &Path, part: &Summed, found: u32, tensors: &[&Name]) -> Self {
        let Summed { region, crc, name } = part;
        let holds = match tensors {
            [] => String::new(),
            [only] => format!(" (it holds {only})"),
            [first, others @ ..] => format!(" (it holds {first} and {} more)", others.len()),
        };
        Self::of_file(
            file,
            format!(
                "zip entry {name:?} at byte {} has the CRC-32 {found:08x}, and its archive says {crc:08x}: \
                 it is damaged; copy or save the file again{holds}",
                region.offset
            ),
        )
    }
}

/// An error and its causes in one line. No error's own text repeats its cause.
fn chain_text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}: ", printable(&file.to_string_lossy()))?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "{}: ", printable(tensor))?;
        }
        f.write_str(&printable(&self.message))
    }
}
