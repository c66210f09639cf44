//! Numbers as people read them.

/// `1 tensor`, `51 tensors`.
pub(super) fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(count as u64))
}

/// `1,234,567`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Decimal bytes with three digits: `1.94 GB`.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if count < 1000 {
        return format!("{count} B");
    }
    let mut value = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 999.5 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$} {unit}")
}

/// `[4096, 11008]`; a scalar is `[]`.
pub(super) fn shape(sizes: &[u64]) -> String {
    let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

/// Three digits and an exponent; what is not defined is a dash.
pub(super) fn scientific(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2e}"))
}

/// The share of a whole: `100%` is all of it and `0%` nothing, whatever is in between is neither.
pub(super) fn share(part: u64, whole: u64) -> String {
    if part == 0 || part >= whole {
        return if part == 0 { "0%" } else { "100%" }.to_owned();
    }
    match part as f64 / whole as f64 * 100.0 {
        percent if percent < 0.01 => "<0.01%".to_owned(),
        percent if percent < 0.995 => format!("{percent:.2}%"),
        percent if percent < 9.95 => format!("{percent:.1}%"),
        percent if percent > 99.5 => ">99%".to_owned(),
        percent => format!("{percent:.0}%"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_whole_only_where_they_are() {
        let share = |part| share(part, 100_000);
        let found = [0, 1, 10, 123, 999, 9_960, 50_000, 99_600, 99_999, 100_000].map(share);
        let expected =
            ["0%", "<0.01%", "0.01%", "0.12%", "1.0%", "10%", "50%", ">99%", ">99%", "100%"];
        assert_eq!(found, expected);
        assert_eq!(super::share(0, 0), "0%");
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_940_000_000), "1.94 GB");
        assert_eq!(bytes(999_600), "1.00 MB");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(
            (counted(1, "tensor"), counted(0, "tensor")),
            ("1 tensor".into(), "0 tensors".into())
        );
    }
}
