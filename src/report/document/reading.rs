//! A document of a former run, read back.

use serde::Deserialize;
use thiserror::Error;

use super::{Document, SCHEMA};

/// The schema's `$id` without its version.
const FAMILY: &str = "urn:ckptcmp:schema:compare-report:";

/// A document that cannot be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// It is none.
    #[error("no document of compare --report")]
    Foreign,
    /// It has another version.
    #[error(
        "version {version} of the schema, where this ckptcmp reads version {}: take the one that wrote it, {tool}",
        SCHEMA.trim_start_matches(FAMILY)
    )]
    OtherVersion {
        /// The version.
        version: String,
        /// The program that wrote it, with its version.
        tool: String,
    },
    /// It is damaged.
    #[error("no whole document of compare --report")]
    Damaged(#[source] serde_json::Error),
    /// What says the verdict does not agree.
    #[error("verdict, passes and exit_code contradict each other")]
    Contradictory,
}

/// What every version has.
#[derive(Deserialize)]
struct Head {
    schema: String,
    tool: ToolHead,
}

#[derive(Deserialize)]
struct ToolHead {
    name: String,
    version: String,
}

impl Document {
    /// The document with this text.
    ///
    /// # Errors
    /// It is none, is of another version, damaged, or says two things about the verdict.
    pub fn read(json: &[u8]) -> Result<Self, ReadError> {
        let head: Head = serde_json::from_slice(json).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => ReadError::Foreign,
            _ => ReadError::Damaged(error),
        })?;
        let Some(version) = head.schema.strip_prefix(FAMILY) else {
            return Err(ReadError::Foreign);
        };
        if head.schema != SCHEMA {
            let tool = format!("{} {}", head.tool.name, head.tool.version);
            return Err(ReadError::OtherVersion { version: version.to_owned(), tool });
        }
        let document: Self = serde_json::from_slice(json).map_err(ReadError::Damaged)?;
        if document.is_consistent() { Ok(document) } else { Err(ReadError::Contradictory) }
    }

    fn is_consistent(&self) -> bool {
        let exit_code = match &*self.verdict {
            "identical" | "equal" | "cast" | "within" => 0,
            "different" => 1,
            "trouble" => 2,
            _ => return false,
        };
        let fails = self.tensors.iter().flatten().any(|tensor| !tensor.passes);
        self.exit_code == exit_code
            && self.passes == (exit_code == 0)
            && !(self.passes && (fails || self.tensors.is_none() || !self.errors.is_empty()))
    }
}
