//! The names that a command line gives to tensors: rules, and files of them.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::cli::NameArgs;
use crate::names::renames::Renames;
use crate::pipeline::NameOptions;
use crate::storage::{Small, read_small};

/// Most bytes of a file of rules for names: one may name every tensor of a large model.
const MAP_FILE: u64 = 64 << 20;

/// The options on names.
pub(super) fn options(args: &NameArgs) -> Result<NameOptions> {
    let mut renames = Renames::default();
    for map in &args.maps {
        if map.contains('=') {
            renames.add(map).with_context(|| format!("--map {map:?}"))?;
        } else {
            let text = read_text(Path::new(map), "rules for names", MAP_FILE)
                .context("--map takes OLD=NEW, or a file")?;
            renames.add_file(map, &text).with_context(|| map.clone())?;
        }
    }
    Ok(NameOptions { renames, takes_masters: args.masters })
}

/// The text of a small file.
pub(super) fn read_text(path: &Path, what: &str, most: u64) -> Result<String> {
    let name = path.display();
    let read = read_small(path, most).with_context(|| format!("{name}: cannot be read"))?;
    let bytes = match read {
        Small::Bytes(bytes, _) => bytes,
        Small::TooLong(len) => bail!("{name}: {len} bytes, where {what} have {most} at most"),
        Small::NotAFile => bail!("{name}: not a file"),
    };
    String::from_utf8(bytes).with_context(|| format!("{name}: not UTF-8"))
}
