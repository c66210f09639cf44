//! `report`: a document of a former comparison in other forms; no checkpoint is read.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::cli::ReportArgs;
use crate::report::document::Document;
use crate::storage::{Small, read_small};

use super::outputs::written_as;
use super::result::Destination;
use super::summary::Summary;

/// Most bytes of a document: ten times that of a model with 60,000 tensors.
const DOCUMENT: u64 = 1 << 30;

pub(super) fn run(args: &ReportArgs) -> Result<u8> {
    let summary = args.summary.map(Summary::of).transpose()?;
    let place = |path: &Path| Destination::of("--report", path, args.force);
    let places = args.reports.iter().map(|(_, path)| place(path)).collect::<Result<Vec<_>>>()?;
    for (index, place) in places.iter().enumerate() {
        let is_input = match place.file() {
            Some(file) => file.canonicalize().ok() == Some(args.document.canonicalize()?),
            None => false,
        };
        if is_input || places[..index].contains(place) {
            bail!("{}: each report needs a place of its own", args.reports[index].1.display());
        }
    }
    let document = read(&args.document)?;
    for ((form, _), place) in args.reports.iter().zip(&places) {
        place.write(&written_as(*form, &document)?)?;
    }
    summary.iter().try_for_each(|summary| summary.write(&document))?;
    Ok(0)
}

fn read(path: &Path) -> Result<Document> {
    let name = path.display();
    let read = read_small(path, DOCUMENT).with_context(|| format!("{name}: cannot be read"))?;
    match read {
        Small::Bytes(bytes, _) => {
            Document::read(&bytes).with_context(|| format!("{name}: cannot be taken"))
        }
        Small::TooLong(len) => {
            bail!("{name}: {len} bytes, where a document has {DOCUMENT} at most")
        }
        Small::NotAFile => bail!("{name}: not a file"),
    }
}
