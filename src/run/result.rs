//! The destination of the JSON result: standard output, a file of its own, or a device or pipe that is there.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::base::side::Side;
use crate::catalog::Catalog;
use crate::storage::is_stdout_closed;

use super::whole_file::{self, folder_of};

/// The place that `-o` names.
#[derive(Debug, PartialEq)]
pub(super) enum Destination {
    Stdout,
    /// A device or pipe (`/dev/null`, `>(jq .)`): it is written into, and stays what it is.
    Stream(PathBuf),
    File {
        path: PathBuf,
        force: bool,
    },
}

impl Destination {
    /// Checks the path before anything is read: a file of that name must not be there (unless `force`), its folder must.
    pub(super) fn of(output: &Path, force: bool) -> Result<Self> {
        if output == Path::new("-") {
            check_stdout()?;
            return Ok(Self::Stdout);
        }
        if output.is_dir() {
            bail!("{}: is a folder; name a file for the result", output.display());
        }
        if output.metadata().is_ok_and(|there| !there.is_file()) {
            return Ok(Self::Stream(output.to_path_buf()));
        }
        if output.symlink_metadata().is_ok() && !force {
            bail!(
                "{}: the file exists; overwrite it with --force or name another one with -o",
                output.display()
            );
        }
        // What a link leads to is replaced, not the link.
        let path = output.canonicalize().unwrap_or_else(|_| output.to_path_buf());
        let folder = folder_of(&path);
        if !folder.is_dir() {
            bail!("{}: the folder {} does not exist", output.display(), folder.display());
        }
        Ok(Self::File { path, force })
    }

    /// Refuses a file that is an input, which to overwrite nobody can have meant: one that was read under whatever name, or that
    /// lies inside of a checkpoint and is no former result.
    pub(super) fn spare(&self, inputs: [&Catalog; 2]) -> Result<()> {
        let Self::File { path, force: true } = self else { return Ok(()) };
        for (side, input) in Side::BOTH.into_iter().zip(inputs) {
            let root = input.origin.path.canonicalize()?;
            let is_inside = path.starts_with(root) && path.file_name() != Some(OsStr::new(USUAL));
            if input.files.holds(path)? || (is_inside && path.exists()) {
                bail!("{}: a file of {side}, which is not overwritten", path.display());
            }
        }
        Ok(())
    }

    /// Writes the whole result at once, so that an interruption finds next to nothing to interrupt.
    pub(super) fn write(&self, json: &[u8]) -> Result<()> {
        match self {
            Self::Stdout => to_stdout(|out| out.write_all(json)),
            Self::Stream(path) => OpenOptions::new()
                .write(true)
                .open(path)
                .and_then(|mut stream| stream.write_all(json))
                .with_context(|| format!("{}: cannot be written", path.display())),
            Self::File { path, force } => whole_file::write(path, *force, json)
                .with_context(|| format!("{}: cannot be written", path.display())),
        }
    }
}

/// The name of a result where none is given.
const USUAL: &str = "ckpt_similarity.json";

/// Refuses to go on where standard output is wanted and closed.
pub(super) fn check_stdout() -> Result<()> {
    if is_stdout_closed() {
        bail!("standard output is closed: nothing can be written there");
    }
    Ok(())
}

/// Writes what must not get lost to standard output.
pub(super) fn to_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = write(&mut out).and_then(|()| out.flush());
    written.context("standard output: cannot be written")
}
