//! `inspect`: open, report; no value is read.

use std::io::{self, Write};

use anyhow::Result;

use crate::base::side::Side;
use crate::catalog::Section;
use crate::cli::InspectArgs;
use crate::formats;
use crate::report::{Style, catalog, problems};

use super::unless_closed;

pub(super) fn run(args: &InspectArgs, style: Style) -> Result<u8> {
    let opened = formats::open(&args.path, &args.input.options(Side::A, &Section::ALL))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = match args.json {
        true => catalog::write_json(&opened, &mut out),
        false => catalog::write_screen(&opened, style, &mut out),
    };
    unless_closed(written.and_then(|()| out.flush()))?;
    problems::write_all(&opened.problems);
    Ok(if opened.problems.is_empty() { 0 } else { 2 })
}
