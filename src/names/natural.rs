//! Names in natural order.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use super::printable;

/// The name of a tensor. Ordered as people count: `layers.2` comes before `layers.10`. Shown as `printable` text.
///
/// ```
/// use ckptcmp::names::Name;
/// assert!(Name::new("layers.2.weight") < Name::new("layers.10.bias"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// A name with this text.
    #[must_use]
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The components that are numbers, in order: `3` and `7` of `layers.3.experts.7.weight`.
    pub fn numbers(&self) -> impl Iterator<Item = &str> {
        self.0.split('.').filter(|part| is_number(part))
    }
}

/// Returns whether a component is a number.
pub(super) fn is_number(component: &str) -> bool {
    !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit())
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&printable(&self.0))
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> Ordering {
        natural(self.0.as_bytes(), other.0.as_bytes()).then_with(|| self.0.cmp(&other.0))
    }
}

/// Compares runs of digits as numbers of any length, all else byte by byte.
fn natural(mut a: &[u8], mut b: &[u8]) -> Ordering {
    loop {
        let (Some(first), Some(second)) = (a.first(), b.first()) else {
            return a.len().cmp(&b.len());
        };
        let order = if first.is_ascii_digit() && second.is_ascii_digit() {
            let (number_a, rest_a) = take_number(a);
            let (number_b, rest_b) = take_number(b);
            (a, b) = (rest_a, rest_b);
            number_a.len().cmp(&number_b.len()).then_with(|| number_a.cmp(number_b))
        } else {
            (a, b) = (&a[1..], &b[1..]);
            first.cmp(second)
        };
        if order.is_ne() {
            return order;
        }
    }
}

/// The digits at the start without leading zeros, and what follows them.
fn take_number(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let start = text[..end].iter().position(|&byte| byte != b'0').unwrap_or(end);
    (&text[start..end], &text[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_compared_as_numbers() {
        let mut names = ["a.10", "a.9", "a.09", "b", "a", "a.9.c", "a.x"].map(Name::new);
        names.sort();
        let sorted: Vec<&str> = names.iter().map(Name::as_str).collect();
        assert_eq!(sorted, ["a", "a.09", "a.9", "a.9.c", "a.10", "a.x", "b"]);
    }
}
