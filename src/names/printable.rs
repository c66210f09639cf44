//! Text from a file as it may be shown: it cannot move the cursor, change colours or begin a line.

use std::borrow::Cow;

/// The text with every character that is not seen but obeyed written as an escape.
///
/// ```
/// use ckptcmp::names::printable;
/// assert_eq!(printable("layers.0.weight"), "layers.0.weight");
/// assert_eq!(printable("\u{1b}[2J\n"), "\\u{1b}[2J\\u{a}");
/// ```
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        if is_control(char) {
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
