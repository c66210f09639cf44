//! A template: text with places `{{name}}`.

use std::borrow::Cow;
use std::io::{self, Write};

use crate::names::printable;

/// Writes a template with its places filled; what is filled in is not looked at again.
///
/// # Errors
/// Those of `out`, or a place that is not known.
pub(super) fn fill<'v>(
    template: &str,
    out: &mut dyn Write,
    value: impl Fn(&str) -> Option<&'v str>,
) -> io::Result<()> {
    let mut rest = template;
    while let Some((before, behind)) = rest.split_once("{{") {
        let (name, behind) = behind.split_once("}}").unwrap_or((behind, ""));
        let value = value(name).ok_or_else(|| io::Error::other(format!("no value for {name}")))?;
        out.write_all(before.as_bytes())?;
        out.write_all(value.as_bytes())?;
        rest = behind;
    }
    out.write_all(rest.as_bytes())
}

/// Text of a checkpoint as text of a page, be it between tags or in an attribute.
pub(super) fn escaped(text: &str) -> Cow<'_, str> {
    let text = printable(text);
    if !text.contains(['&', '<', '>', '"', '\'']) {
        return text;
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_in_is_not_filled_again() {
        let mut out = Vec::new();
        let value = |name: &str| (name == "a").then_some("{{a}}");
        assert!(fill("<{{a}}|{{a}}>", &mut out, value).is_ok());
        assert_eq!(out, b"<{{a}}|{{a}}>");
        assert!(fill("{{b}}", &mut out, value).is_err());
    }

    #[test]
    fn no_text_ends_a_tag_or_an_attribute() {
        assert_eq!(escaped("</b> \"x\" 'y' &lt;"), "&lt;/b&gt; &quot;x&quot; &#39;y&#39; &amp;lt;");
        assert_eq!(escaped("\u{202e}x"), "\\u{202e}x");
    }
}
