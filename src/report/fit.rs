//! Text that fits the columns of a terminal.

/// Columns of a line.
pub(super) const COLUMNS: usize = 80;

const ELLIPSIS: &str = "...";

/// The text, or its beginning and its end with dots between, in so many characters.
pub(super) fn shortened(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(ELLIPSIS.len());
    // The end of a name tells more.
    let head = kept / 2;
    let begin: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(length - (kept - head)).collect();
    format!("{begin}{ELLIPSIS}{end}")
}

/// The text in lines of at most [`COLUMNS`] characters, broken at spaces; all but the first are indented, and words that are too long
/// stay whole.
pub(super) fn wrapped(text: &str, indent: usize) -> String {
    let words = text.trim_start_matches(' ');
    let mut used = text.len() - words.len();
    let mut lines = " ".repeat(used);
    for (number, word) in words.split(' ').enumerate() {
        let length = word.chars().count();
        if number > 0 && used + 1 + length > COLUMNS {
            lines.push('\n');
            lines.push_str(&" ".repeat(indent));
            used = indent;
        } else if number > 0 {
            lines.push(' ');
            used += 1;
        }
        lines.push_str(word);
        used += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_lose_their_middle() {
        assert_eq!(shortened("decoder.final", 13), "decoder.final");
        assert_eq!(shortened("decoder.final", 12), "deco...final");
        assert_eq!(shortened("äöüäöüäöü", 7), "äö...öü");
    }

    #[test]
    fn long_lines_are_broken_at_spaces() {
        let words = ["abcdefghi"; 10].join(" ");
        assert_eq!(
            wrapped(&words, 3),
            format!("{}\n   abcdefghi abcdefghi", ["abcdefghi"; 8].join(" "))
        );
        assert_eq!(wrapped("   short", 3), "   short");
        let long = "x".repeat(90);
        assert_eq!(wrapped(&format!("a {long}"), 3), format!("a\n   {long}"));
    }
}
