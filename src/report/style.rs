//! Colours, where they are wanted.

use super::fit;

/// The style of text: plain or coloured, of any width or of a terminal's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Escape sequences are understood and wanted.
    pub has_color: bool,
    /// Lines have to fit the columns of a terminal: names lose their middle, and what is still too long goes on in the next
    /// line. Elsewhere lines stay whole, so that they can be searched.
    pub fits: bool,
}

impl Style {
    /// Plain text.
    pub const PLAIN: Self = Self { has_color: false, fits: false };

    fn paint(self, code: &str, text: &str) -> String {
        if self.has_color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// The text in lines that fit where they have to; all but the first are indented.
    pub(super) fn wrapped(self, text: &str, indent: usize) -> String {
        if self.fits { fit::wrapped(text, indent) } else { text.to_owned() }
    }

    /// The text in so many characters where it has to fit.
    pub(super) fn shortened(self, text: &str, width: usize) -> String {
        if self.fits { fit::shortened(text, width) } else { text.to_owned() }
    }

    pub(super) fn good(self, text: &str) -> String {
        self.paint("1;32", text)
    }

    pub(super) fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub(super) fn heading(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub(super) fn faint(self, text: &str) -> String {
        self.paint("2", text)
    }
}
