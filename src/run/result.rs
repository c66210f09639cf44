//! The destination of the JSON result: standard output, a file of its own, or a device or pipe that is there.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::unless_closed;

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

    /// Writes the whole result at once, so that an interruption finds next to nothing to interrupt.
    pub(super) fn write(&self, json: &[u8]) -> Result<()> {
        match self {
            Self::Stdout => Ok(unless_closed(io::stdout().lock().write_all(json))?),
            Self::Stream(path) => OpenOptions::new()
                .write(true)
                .open(path)
                .and_then(|mut stream| unless_closed(stream.write_all(json)))
                .with_context(|| format!("{}: cannot be written", path.display())),
            Self::File { path, force } => replace(path, *force, json)
                .with_context(|| format!("{}: cannot be written", path.display())),
        }
    }
}

fn folder_of(output: &Path) -> &Path {
    output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes beside the result and renames, so that an interrupted run leaves no file.
fn replace(output: &Path, force: bool, json: &[u8]) -> Result<()> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".ckptcmp-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder_of(output))?;
    file.write_all(json)?;
    match force {
        true => file.persist(output)?,
        false => file.persist_noclobber(output)?,
    };
    Ok(())
}
