//! Text from a file as it may be shown: it cannot move the cursor, change colours, begin a line or command a CI system.

use std::borrow::Cow;

/// The text with every character that is not seen but obeyed written as an escape; the first colon of `::` at its beginning too, as
/// the runner of GitHub Actions obeys a line of output that begins so.
///
/// ```
/// use ckptcmp::names::printable;
/// assert_eq!(printable("layers.0.weight"), "layers.0.weight");
/// assert_eq!(printable("\u{1b}[2J\n"), "\\u{1b}[2J\\u{a}");
/// assert_eq!(printable("::error::x"), "\\u{3a}:error::x");
/// ```
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    let commands = text.trim_start().starts_with("::");
    if !text.contains(is_control) && !commands {
        return Cow::Borrowed(text);
    }
    let colon = if commands { text.find(':') } else { None };
    let mut shown = String::with_capacity(text.len() + 16);
    for (at, char) in text.char_indices() {
        if is_control(char) || Some(at) == colon {
            shown.extend(char.escape_unicode());
        } else {
            shown.push(char);
        }
    }
    Cow::Owned(shown)
}

/// True for a character that is not seen but obeyed: control characters, line and paragraph separators, and those that
/// reverse the direction of writing or have no width. All of them are below U+10000.
#[must_use]
pub fn is_control(char: char) -> bool {
    char.is_control()
        || matches!(char, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}
