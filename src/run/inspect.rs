//! `inspect`: open, report; no value is read.

use anyhow::Result;

use crate::base::side::Side;
use crate::catalog::Section;
use crate::cli::InspectArgs;
use crate::formats::{self, OpenOptions};
use crate::pipeline;
use crate::report::{Style, catalog, problems};

use super::on_screen;
use super::result::{check_stdout, to_stdout};

pub(super) fn run(args: &InspectArgs, style: Style) -> Result<u8> {
    check_stdout()?;
    let mut options = args.input.options(Side::A, &Section::OF_TENSORS);
    options.sections.retain(|section| *section != Section::State);
    let opened = formats::open(&args.path, &OpenOptions { no_values: true, ..options })?;
    pipeline::check_unchanged(&opened, None, "inspect")?;
    match args.json {
        true => to_stdout(|out| catalog::write_json(&opened, out))?,
        false => on_screen(|out| catalog::write_screen(&opened, style, out))?,
    }
    problems::write_all(&opened.problems);
    Ok(if opened.problems.is_empty() { 0 } else { 2 })
}
