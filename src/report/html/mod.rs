//! A report as one HTML page, for people: it takes nothing from a network, and nothing that a checkpoint says is ever markup or
//! script.
//!
//! The page is made of the files beside this one. What the document says goes in as text with all that is markup escaped, and
//! as one block of data (JSON, compressed, base64) that the scripts read. The page's own policy (`Content-Security-Policy`) lets
//! the browser run these scripts and this style by their sums, and nothing else.

mod columns;
mod headline;
mod template;

use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use miniz_oxide::deflate::compress_to_vec_zlib;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::document::{
    Causes, Checkpoint, Document, Options, Sections, Sides, State, Suggested, Sums, Tool,
    UnusedRule,
};

use columns::Columns;
use template::{escaped, fill};

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");

/// The scripts, in the order in which they build on each other; one module to the browser.
const SCRIPTS: &str = concat!(
    include_str!("app/dom.js"),
    include_str!("app/data.js"),
    include_str!("app/view.js"),
    include_str!("app/summary.js"),
    include_str!("app/scale.js"),
    include_str!("app/depth.js"),
    include_str!("app/histogram.js"),
    include_str!("app/table.js"),
    include_str!("app/details.js"),
    include_str!("app/lists.js"),
    include_str!("app/main.js"),
);

/// The bytes that it begins with.
pub(super) const START: &str = "<!doctype html>\n<html lang=\"en\" data-report=\"ckptcmp\">\n";

/// Effort of the compression: more takes twice the time for a hundredth.
const COMPRESSION: u8 = 6;

/// The data of a page: the document with its tensors by column.
#[derive(Serialize)]
struct Data<'a> {
    tool: &'a Tool,
    verdict: &'a str,
    passes: bool,
    exit_code: u8,
    exit_zero: bool,
    errors: &'a [String],
    sides: &'a Sides<Checkpoint>,
    sections: Option<&'a Sections>,
    options: Option<&'a Options>,
    totals: Option<&'a Sums>,
    unused_rules: Option<&'a [UnusedRule]>,
    unused_globs: Option<&'a [String]>,
    suggested: Option<&'a Suggested>,
    causes: Option<&'a Causes>,
    state: Option<&'a State>,
    table: Columns<'a>,
}

impl<'a> Data<'a> {
    fn of(document: &'a Document) -> Self {
        Self {
            tool: &document.tool,
            verdict: &document.verdict,
            passes: document.passes,
            exit_code: document.exit_code,
            exit_zero: document.exit_zero,
            errors: &document.errors,
            sides: &document.sides,
            sections: document.sections.as_ref(),
            options: document.options.as_ref(),
            totals: document.totals.as_ref(),
            unused_rules: document.unused_rules.as_deref(),
            unused_globs: document.unused_globs.as_deref(),
            suggested: document.suggested.as_ref(),
            causes: document.causes.as_ref(),
            state: document.state.as_ref(),
            table: Columns::of(document),
        }
    }
}

/// Writes the page of a document.
///
/// # Errors
/// Those of `out`.
pub(super) fn write(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    let data = serde_json::to_vec(&Data::of(document))?;
    let data = STANDARD.encode(compress_to_vec_zlib(&data, COMPRESSION));
    let sides = [&document.sides.a, &document.sides.b].map(|side| escaped(&side.path));
    let headline = headline::of(document);
    let headline = escaped(&headline);
    let lines: Vec<String> =
        headline::lines(document).iter().map(|line| escaped(line).into_owned()).collect();
    let lines = lines.join("\n");
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; base-uri 'none'; form-action 'none'",
        sum(SCRIPTS),
        sum(STYLE)
    );
    fill(PAGE, out, |name| match name {
        "policy" => Some(&policy),
        "style" => Some(STYLE),
        "script" => Some(SCRIPTS),
        "verdict" => Some(&document.verdict),
        "headline" => Some(&headline),
        "lines" => Some(&lines),
        "a" => Some(&sides[0]),
        "b" => Some(&sides[1]),
        "data" => Some(&data),
        _ => None,
    })
}

/// The sum of a script or style by which a policy names it.
fn sum(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text.as_bytes())))
}
