//! A destination of what a command writes: standard output, a file of its own, or a device or pipe that is there.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::base::side::Side;
use crate::catalog::Catalog;
use crate::storage::{self, Target, is_stdout_closed};

use super::whole_file::{self, folder_of};

/// The place that `-o` or `--report` names.
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
    pub(super) fn of(flag: &str, output: &Path, force: bool) -> Result<Self> {
        if output == Path::new("-") {
            check_stdout()?;
            return Ok(Self::Stdout);
        }
        let found = target(output)?;
        match found {
            Some(Target::Folder) => {
                bail!("{}: is a folder; name a file for {flag}", output.display())
            }
            Some(Target::Other) => return Ok(Self::Stream(output.to_path_buf())),
            Some(Target::File(_)) | None => {}
        }
        // A link to nowhere is there, too.
        if storage::is_there(output).with_context(|| unseen(output))? && !force {
            bail!(
                "{}: the file exists; overwrite it with --force or name another one with {flag}",
                output.display()
            );
        }
        // What a link leads to is replaced, not the link.
        let path = match found {
            Some(_) => output.canonicalize().with_context(|| unseen(output))?,
            None => output.to_path_buf(),
        };
        let folder = folder_of(&path);
        if target(folder)? != Some(Target::Folder) {
            bail!("{}: the folder {} does not exist", output.display(), folder.display());
        }
        Ok(Self::File { path, force })
    }

    /// The file, where it is one.
    pub(super) fn file(&self) -> Option<&Path> {
        match self {
            Self::File { path, .. } => Some(path),
            Self::Stdout | Self::Stream(_) => None,
        }
    }

    /// Refuses a file that is an input, which to overwrite nobody can have meant: one that was read under whatever name, or that
    /// lies inside of a checkpoint and is no former result.
    pub(super) fn spare(&self, inputs: [&Catalog; 2]) -> Result<()> {
        let Self::File { path, force: true } = self else { return Ok(()) };
        for (side, input) in Side::BOTH.into_iter().zip(inputs) {
            let root = input.origin.path.canonicalize()?;
            let is_inside = path.starts_with(root) && path.file_name() != Some(OsStr::new(USUAL));
            if input.files.holds(path)? || (is_inside && storage::is_there(path)?) {
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

/// What a path leads to; `None` where there is nothing.
fn target(path: &Path) -> Result<Option<Target>> {
    storage::present(storage::look(path)).with_context(|| unseen(path))
}

fn unseen(path: &Path) -> String {
    format!("{}: cannot be looked at", path.display())
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
