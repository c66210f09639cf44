//! `--summary`: what a CI system shows of a run.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cli::SummaryOf;
use crate::report::document::Document;
use crate::report::forms::github;
use crate::report::problems;
use crate::storage::{self, Target};

/// The variable in which GitHub Actions names the file for the summary of a step.
const VARIABLE: &str = "GITHUB_STEP_SUMMARY";

/// A place for the summary of a run.
pub(super) struct Summary {
    path: PathBuf,
}

impl Summary {
    /// The place that the environment names, before anything is read.
    pub(super) fn of(SummaryOf::Github: SummaryOf) -> Result<Self> {
        let path = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        let Some(path) = path.map(PathBuf::from) else {
            bail!("--summary github: {VARIABLE} is not set, as it is in a step of GitHub Actions");
        };
        let summary = Self { path };
        summary.used()?;
        Ok(summary)
    }

    /// Bytes that are there.
    fn used(&self) -> Result<usize> {
        let found = storage::present(storage::look(&self.path));
        Ok(match found.with_context(|| unwritten(&self.path))? {
            Some(Target::File(len)) => usize::try_from(len).unwrap_or(usize::MAX),
            Some(Target::Folder) => bail!("{}: a folder", unwritten(&self.path)),
            Some(Target::Other) | None => 0,
        })
    }

    /// Appends to the file, and writes annotations to standard error, which the runner reads as well.
    pub(super) fn write(&self, document: &Document) -> Result<()> {
        let text = github::summary(document, self.used()?)?;
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(&self.path)
            .and_then(|mut file| file.write_all(&text))
            .with_context(|| unwritten(&self.path))?;
        problems::write_lines(&github::annotations(document));
        Ok(())
    }
}

fn unwritten(path: &Path) -> String {
    format!("{VARIABLE}: {}: cannot be written", path.display())
}
