//! Numbers of layers and experts as people write them: `2, 5-7`.

use std::collections::BTreeSet;

/// Runs of numbers that are written out; the rest is counted.
const RUNS: usize = 8;

/// Ascending numbers, neighbours drawn together.
pub(super) fn ranges(numbers: impl IntoIterator<Item = u64>) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges
}

/// The numbers below `end` that are not among these; time and space depend on these alone.
pub(super) fn gaps<'n>(present: impl IntoIterator<Item = &'n u64>, end: u64) -> Vec<(u64, u64)> {
    let mut gaps = Vec::new();
    let mut next = 0;
    for &number in present.into_iter().take_while(|number| **number < end) {
        if number > next {
            gaps.push((next, number - 1));
        }
        next = number + 1;
    }
    if next < end {
        gaps.push((next, end - 1));
    }
    gaps
}

/// `2, 5-7 and 12 more`.
pub(super) fn text(ranges: &[(u64, u64)]) -> String {
    let run = |&(first, last): &(u64, u64)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let shown: Vec<String> = ranges.iter().take(RUNS).map(run).collect();
    match count(ranges.get(RUNS..).unwrap_or_default()) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// How many they are.
pub(super) fn count(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().fold(0, |sum: u64, (first, last)| sum.saturating_add(last - first + 1))
}

/// The same of a set.
pub(super) fn text_of(numbers: &BTreeSet<u64>) -> String {
    text(&ranges(numbers.iter().copied()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_drawn_together() {
        assert_eq!(text(&ranges([2, 5, 6, 7, 9, 10])), "2, 5-7, 9, 10");
        assert_eq!(text(&ranges((0..40).step_by(2))), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more");
    }

    #[test]
    fn gaps_end_where_the_list_should() {
        assert_eq!(gaps(&[0, 1, 4], 6), [(2, 3), (5, 5)]);
        assert_eq!(gaps(&[0, 1, 7], 2), []);
        assert_eq!(gaps(&[], u64::MAX), [(0, u64::MAX - 1)]);
        assert_eq!(count(&gaps(&[], u64::MAX)), u64::MAX);
    }
}
