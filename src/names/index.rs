//! Numbers in names: indices of layers and experts, ranks of folders and files.

/// Says whether a text is digits and nothing else.
#[must_use]
pub fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The number that a text of digits alone stands for.
#[must_use]
pub fn number(text: &str) -> Option<u64> {
    is_number(text).then(|| text.parse().ok()).flatten()
}

/// The index that a text of digits alone stands for; what does not fit is `u64::MAX`, above every limit.
#[must_use]
pub fn index(text: &str) -> Option<u64> {
    is_number(text).then(|| text.parse().unwrap_or(u64::MAX))
}

/// Takes an index and its dot off the front of a name: `12.ln_1.weight` is 12 and `ln_1.weight`.
#[must_use]
pub fn split_index(name: &str) -> Option<(u64, &str)> {
    let (digits, rest) = name.split_once('.')?;
    Some((index(digits)?, rest))
}
