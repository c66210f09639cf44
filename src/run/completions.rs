//! `completions` and `man`: texts that follow from the definitions of the command line.

use anyhow::{Context, Result};

use crate::cli::{CompletionsArgs, ManArgs, man_pages, write_registration};

use super::result::{Destination, check_stdout, to_stdout};

/// Writes what a shell has to run.
pub(super) fn run(args: &CompletionsArgs) -> Result<u8> {
    check_stdout()?;
    to_stdout(|out| write_registration(&args.shell, out))?;
    Ok(0)
}

/// Writes one manual page to standard output, or all into a folder.
pub(super) fn run_man(args: &ManArgs) -> Result<u8> {
    let pages = man_pages()?;
    let Some(folder) = &args.output else {
        check_stdout()?;
        let wanted = args.subcommand.as_ref().map(|name| format!("ckptcmp-{name}.1"));
        let wanted = wanted.as_deref().unwrap_or("ckptcmp.1");
        let page = pages.iter().find(|(name, _)| name == wanted);
        let (_, page) = page.with_context(|| format!("no command has the page {wanted}"))?;
        to_stdout(|out| out.write_all(page))?;
        return Ok(0);
    };
    let place = |(name, page): &(String, Vec<u8>)| {
        Ok((Destination::of("-o", &folder.join(name), args.force)?, page.clone()))
    };
    let places: Vec<(Destination, Vec<u8>)> = pages.iter().map(place).collect::<Result<_>>()?;
    places.iter().try_for_each(|(place, page)| place.write(page))?;
    Ok(0)
}
