//! Everything that a comparison writes beside the screen: the result of `-o`, and the documents of `--report`.
//!
//! A document is read by those who look at nothing else. So one that is there from a former run is removed before anything is
//! read, a comparison that fails leaves a document that says so, and one that was written stays only if all went well after it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{fs, iter};

use anyhow::{Context, Error, Result, bail};

use crate::catalog::Catalog;
use crate::cli::CompareArgs;
use crate::compare::Outcome;
use crate::report::document::Document;
use crate::report::{Form, Judged, Report, forms};
use crate::storage::{self, Target};

use super::result::Destination;
use super::summary::Summary;
use super::whole_file::{self, folder_of};

/// The places of the result and of all documents.
pub(super) struct Outputs<'a> {
    args: &'a CompareArgs,
    result: Destination,
    reports: Vec<(Form, Destination)>,
    summary: Option<Summary>,
    document: OnceLock<Document>,
}

impl<'a> Outputs<'a> {
    /// Removes the documents of former runs that may be overwritten, and checks all places before anything is read.
    pub(super) fn of(args: &'a CompareArgs) -> Result<Self> {
        for (_, path) in args.reports.iter().filter(|_| args.force) {
            remove_document(path)
                .with_context(|| format!("{}: cannot be removed", path.display()))?;
        }
        let result = Destination::of("-o", &args.output, args.force)?;
        let report = |(form, path): &(Form, PathBuf)| {
            Ok((*form, Destination::of("--report", path, args.force)?))
        };
        let reports = args.reports.iter().map(report).collect::<Result<_>>()?;
        let summary = args.summary.map(Summary::of).transpose()?;
        let outputs = Self { args, result, reports, summary, document: OnceLock::new() };
        outputs.check_distinct()?;
        Ok(outputs)
    }

    fn check_distinct(&self) -> Result<()> {
        let mut seen = BTreeSet::new();
        for place in iter::once(&self.result).chain(self.documents()) {
            let key = match place {
                Destination::Stdout => PathBuf::from("-"),
                Destination::Stream(_) => continue,
                Destination::File { path, .. } => {
                    let folder = folder_of(path).canonicalize()?;
                    folder.join(path.file_name().unwrap_or_default())
                }
            };
            if !seen.insert(key.clone()) {
                bail!("{}: -o and --report each need a place of their own", key.display());
            }
        }
        Ok(())
    }

    fn documents(&self) -> impl Iterator<Item = &Destination> {
        self.reports.iter().map(|(_, place)| place)
    }

    /// Returns whether standard output takes one of them, so that the screen goes to standard error.
    pub(super) fn take_stdout(&self) -> bool {
        iter::once(&self.result).chain(self.documents()).any(|place| *place == Destination::Stdout)
    }

    /// Refuses places that are inputs.
    pub(super) fn spare(&self, inputs: [&Catalog; 2]) -> Result<()> {
        iter::once(&self.result).chain(self.documents()).try_for_each(|place| place.spare(inputs))
    }

    /// Writes the result, and the documents that become files; returns the files by the names that were given.
    pub(super) fn write(&self, report: &Report) -> Result<Vec<&Path>> {
        let mut written = Vec::new();
        let is_read = |judged: &Judged| !matches!(judged.tensor.outcome, Outcome::Unreadable(_));
        if report.tensors.iter().any(is_read) {
            let mut json = Vec::new();
            report.write_json(&mut json)?;
            self.result.write(&json)?;
            written.extend(self.result.file().map(|_| self.args.output.as_path()));
        }
        for ((_, name), (form, place)) in self.args.reports.iter().zip(&self.reports) {
            if place.file().is_some() {
                place.write(&written_as(*form, self.document(report)?)?)?;
                written.push(name);
            }
        }
        Ok(written)
    }

    /// Writes what cannot be taken back: documents to standard output, devices and pipes, and the summary of a CI system.
    pub(super) fn write_streams(&self, report: &Report) -> Result<()> {
        for (form, place) in self.reports.iter().filter(|(_, place)| place.file().is_none()) {
            place.write(&written_as(*form, self.document(report)?)?)?;
        }
        match &self.summary {
            Some(summary) => summary.write(self.document(report)?),
            None => Ok(()),
        }
    }

    /// The document that all forms are made of, made once.
    fn document(&self, report: &Report) -> Result<&Document> {
        if self.document.get().is_none() {
            let document = Document::of(report, self.args.exit_zero)?;
            return Ok(self.document.get_or_init(|| document));
        }
        self.document.get().context("the document is there")
    }

    /// Makes every document one that tells this error; where `has_written`, those that cannot be taken back are left alone.
    ///
    /// So is a file that is no document: without the inputs nobody can say that it is none of theirs.
    pub(super) fn write_failure(&self, error: &Error, has_written: bool) -> Result<()> {
        let paths = [self.args.a.as_path(), self.args.b.as_path()];
        let document = Document::of_failure(paths, &format!("{error:#}"), self.args.exit_zero);
        for (form, place) in &self.reports {
            match place.file() {
                Some(path) => replace(path, &written_as(*form, &document)?)?,
                None if has_written => {}
                None => place.write(&written_as(*form, &document)?)?,
            }
        }
        match &self.summary {
            Some(summary) if !has_written => summary.write(&document),
            Some(_) | None => Ok(()),
        }
    }
}

/// A document in a form.
pub(super) fn written_as(form: Form, document: &Document) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    form.write(document, &mut bytes)?;
    Ok(bytes)
}

/// Writes a file where there is none, or a document.
fn replace(path: &Path, json: &[u8]) -> Result<()> {
    let is_ours = is_document(path)?;
    if !is_ours && storage::is_there(path)? {
        return Ok(());
    }
    whole_file::write(path, is_ours, json)
        .with_context(|| format!("{}: cannot be written", path.display()))
}

/// Removes what a path leads to, where that is a document of ours.
fn remove_document(path: &Path) -> Result<()> {
    let found = storage::present(storage::look(path))?;
    if matches!(found, Some(Target::File(_))) && is_document(path)? {
        fs::remove_file(path.canonicalize()?)?;
    }
    Ok(())
}

/// Returns whether a file is a document of ours; one that is not there is none.
fn is_document(path: &Path) -> Result<bool> {
    let start = storage::present(storage::head(path, forms::START_LEN));
    let start = start.with_context(|| format!("{}: cannot be read", path.display()))?;
    Ok(start.is_some_and(|start| forms::is_report(&start)))
}
