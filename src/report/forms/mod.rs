//! The forms of a whole report, each made of the [`Document`] and nothing else: one file a form.

mod csv;
pub mod github;
mod junit;
mod markdown;

use std::io::{self, Write};
use std::path::Path;

use super::document::Document;
use super::html;

/// The form of a whole report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The document itself, by `schema/compare-report.schema.json`.
    Json,
    /// A page for people.
    Html,
    /// Text to be read on a forge.
    Markdown,
    /// A table of all tensors.
    Csv,
    /// Test cases for a CI system: one for each module of each layer.
    Junit,
}

/// A form: the suffix of its files, and the bytes that each of them begins with.
struct Row {
    form: Form,
    suffix: &'static str,
    start: &'static str,
    write: fn(&Document, &mut dyn Write) -> io::Result<()>,
}

/// All forms, in the order of their variants.
static FORMS: [Row; 5] = [
    Row {
        form: Form::Json,
        suffix: "json",
        start: "{\n  \"schema\": \"urn:ckptcmp:schema:compare-report:",
        write: |document, out| document.write_json(out),
    },
    Row {
        form: Form::Html,
        suffix: "html",
        start: html::START,
        write: |document, out| document.write_html(out),
    },
    Row { form: Form::Markdown, suffix: "md", start: markdown::START, write: markdown::write },
    Row { form: Form::Csv, suffix: "csv", start: csv::START, write: csv::write },
    Row { form: Form::Junit, suffix: "xml", start: junit::START, write: junit::write },
];

impl Form {
    /// The form for a path by its suffix; `-` is JSON.
    ///
    /// # Errors
    /// The suffix is no known one.
    pub fn of(path: &Path) -> Result<Self, String> {
        if path == Path::new("-") {
            return Ok(Self::Json);
        }
        let suffix = path.extension().unwrap_or_default();
        let found = FORMS.iter().find(|row| suffix.eq_ignore_ascii_case(row.suffix));
        found.map(|row| row.form).ok_or_else(|| {
            let known: Vec<String> = FORMS.iter().map(|row| format!(".{}", row.suffix)).collect();
            format!("no report has this suffix: there are {}", known.join(", "))
        })
    }

    /// Writes a document in this form.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(self, document: &Document, out: &mut dyn Write) -> io::Result<()> {
        (FORMS[self as usize].write)(document, out)
    }
}

/// Returns whether a file that begins like this is a report of ours, in whatever form and of whatever version.
#[must_use]
pub fn is_report(start: &[u8]) -> bool {
    FORMS.iter().any(|row| start.starts_with(row.start.as_bytes()))
}

/// Bytes of a file that [`is_report`] asks for.
pub const START_LEN: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_known_by_suffix_and_start() {
        for (index, row) in FORMS.iter().enumerate() {
            assert_eq!(row.form as usize, index, "the order of the variants");
            assert_eq!(Form::of(&Path::new("x").with_extension(row.suffix)), Ok(row.form));
            assert!(row.start.len() > 15 && row.start.len() <= START_LEN, "{}", row.start);
            let document = Document::of_failure([Path::new("a"); 2], "no", false);
            let mut bytes = Vec::new();
            assert!(row.form.write(&document, &mut bytes).is_ok());
            assert!(is_report(&bytes), "{:?}", row.form);
        }
        assert!(Form::of(Path::new("x.pdf")).is_err());
        assert!(!is_report(b"{}"));
    }
}
