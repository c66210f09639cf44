//! The configuration files beside a checkpoint (gpt-neox copies them to `configs/`).

use std::collections::BTreeMap;
use std::path::Path;

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::formats::error::OpenError;
use crate::formats::probe::Probe;
use crate::storage::{self, FileSet};

/// The plain values at the top of the `.yml` files of `configs/`, beside the tag's files or in its save folder.
///
/// # Errors
/// One of them is there and cannot be read.
pub(super) fn run_args(
    tag: &Path,
    files: &mut FileSet,
) -> Result<BTreeMap<String, PlainValue>, OpenError> {
    let mut run_args = BTreeMap::new();
    for root in [tag.parent(), Some(tag)].into_iter().flatten() {
        let folder = root.join("configs");
        if !storage::is_there(&folder).map_err(OpenError::io(&folder))? {
            continue;
        }
        let configs = Probe::new(&folder)?;
        let is_yml = |name: &&str| name.ends_with(".yml") || name.ends_with(".yaml");
        for name in configs.names().filter(is_yml).take(LIMITS.config_files) {
            let path = folder.join(name);
            let read = files.read_small(&path, LIMITS.text_file);
            let text = read.map_err(OpenError::io(&path))?;
            run_args.extend(String::from_utf8_lossy(&text).lines().filter_map(argument));
        }
    }
    Ok(run_args)
}

/// `"gpt-j-residual": true,` and the like; gpt-neox takes `-` and `_` for the same.
fn argument(line: &str) -> Option<(String, PlainValue)> {
    let line = line.split(" #").next()?;
    let (key, value) = line.trim().split_once(':')?;
    let key = key.trim().trim_matches(['"', '\'']).replace('-', "_");
    let value = value.trim().trim_end_matches(',').trim_end();
    let is_name = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if key.is_empty() || !is_name || key.len() > 100 {
        return None;
    }
    let value = match value {
        "true" | "True" => PlainValue::Bool(true),
        "false" | "False" => PlainValue::Bool(false),
        _ => PlainValue::Int(value.parse().ok()?),
    };
    Some((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_are_arguments() {
        let read = |line| argument(line);
        let yes = Some(("gpt_j_residual".to_owned(), PlainValue::Bool(true)));
        assert_eq!(read("  \"gpt-j-residual\": true,"), yes);
        assert_eq!(read("gpt_j_residual: True  # parallel"), yes);
        assert_eq!(
            read("\"num_layers\": 44,"),
            Some(("num_layers".to_owned(), PlainValue::Int(44)))
        );
        for line in ["{", "# comment", "\"optimizer\": {", "  \"lr\": 0.1,", ": 1", ""] {
            assert_eq!(read(line), None, "{line}");
        }
    }
}
