//! What GitHub Actions shows of a run: Markdown for the summary of the step, and annotations.
//!
//! Limits are those of GitHub's documentation: 1 MiB for the summary of a step, 10 annotations of a kind in a step.

use std::io;

use crate::names::printable;
use crate::report::by_layer::{first_text, verdict_text};
use crate::report::document::{Document, Tensor};
use crate::report::fit::shortened;
use crate::report::layers::Module;

use super::Form;

/// Most bytes of a step's summary.
pub const LIMIT: usize = 1 << 20;

/// Most annotations.
const ANNOTATIONS: usize = 10;

/// Most characters of a line of an annotation.
const LONGEST: usize = 500;

/// Bytes for the line that tells of a cut.
const CUT: &str = "\n\nThe rest is cut off: the summary of a step has 1 MiB at most.\n";

/// The Markdown for the summary of a step that has `used` bytes already, cut off at a line where it would be too long.
///
/// # Errors
/// None but those of memory.
pub fn summary(document: &Document, used: usize) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    Form::Markdown.write(document, &mut text)?;
    let room = LIMIT.saturating_sub(used + 1);
    if text.len() > room {
        let kept = room.saturating_sub(CUT.len());
        let end = text[..kept].iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
        text.truncate(end);
        if kept > 0 {
            text.extend_from_slice(CUT.as_bytes());
        }
    }
    Ok(text)
}

/// The annotations of a run, a line each: the verdict, then errors, then the modules that do not pass in the order of the forward
/// pass.
#[must_use]
pub fn annotations(document: &Document) -> Vec<String> {
    if document.passes {
        let summary = document.summary.as_deref().unwrap_or_default();
        return vec![command("notice", &title(document), summary)];
    }
    let mut lines = Vec::new();
    let first = document.first_difference.as_ref().map(first_text);
    let summary = document.summary.clone().unwrap_or_default();
    let whole = match first {
        Some(first) => format!("{summary}\nfirst difference: {first}"),
        None => summary,
    };
    if !whole.is_empty() {
        lines.push(command("error", &title(document), &whole));
    }
    lines.extend(document.errors.iter().map(|error| command("error", "ckptcmp: trouble", error)));
    let tensors = document.tensors.as_deref().unwrap_or_default();
    for layer in document.layers.iter().flatten() {
        for module in layer.modules.iter().filter(|module| !module.passes) {
            if let Some(worst) = worst(module, tensors) {
                let title = format!("ckptcmp: {}", layer.title);
                lines.push(command("error", &title, &verdict_text(worst)));
            }
            // No more are looked for than can be shown.
            if lines.len() > ANNOTATIONS {
                break;
            }
        }
    }
    lines.truncate(ANNOTATIONS);
    lines
}

fn title(document: &Document) -> String {
    format!("ckptcmp: {}", document.verdict)
}

fn worst<'d>(module: &Module, tensors: &'d [Tensor]) -> Option<&'d Tensor> {
    let failing = module.tensors.iter().filter_map(|index| tensors.get(*index));
    let key = |tensor: &&Tensor| tensor.metrics.rel_l2.unwrap_or(f64::INFINITY);
    failing.filter(|tensor| !tensor.passes).max_by(|one, other| key(one).total_cmp(&key(other)))
}

/// A command to the runner (actions/toolkit, `command.ts`): what would end it or a property is escaped.
fn command(kind: &str, title: &str, message: &str) -> String {
    let data = |text: &str| {
        let lines: Vec<String> =
            text.lines().map(|line| shortened(&printable(line), LONGEST)).collect();
        lines.join("\n").replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
    };
    let property = data(title).replace(':', "%3A").replace(',', "%2C");
    format!("::{kind} title={property}::{}", data(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_cannot_begin_a_command_of_its_own() {
        let line = command("error", "a:b,c", "x\n::set-env name=A::b 100%\r\n\u{1b}[0m");
        assert_eq!(line.lines().count(), 1);
        let expected = "::error title=a%3Ab%2Cc::x%0A\\u{3a}:set-env name=A::b 100%25%0A\\u{1b}[0m";
        assert_eq!(line, expected);
    }
}
