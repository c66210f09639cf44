//! Rows or columns that alone differ, named by what they are. Pure.

use crate::compare::Places;

use super::facts::{Facts, Heads};
use super::orders::Subject;
use super::role::Role;

/// One dimension of a tensor as a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    /// What its indices are.
    pub subject: Subject,
    /// All of the queries come first, then all of the keys, then all of the values, where it has these.
    pub has_blocks: bool,
    /// The word for one index, and for several.
    pub words: [&'static str; 2],
}

/// Indices that alone differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extent {
    /// What they are.
    pub text: String,
    /// Number of those that go by this name.
    pub len: u64,
}

/// The share of all indices, in quarters, that a range has at most, to be one.
const MOST_QUARTERS: u64 = 3;

/// Returns whether such indices may alone be those that differ, if no more come to them. Never again when once not.
pub(super) fn may_be_one(places: &Places, axis: Axis, facts: &Facts) -> bool {
    let span = places.span();
    let is_narrow = (span.end - span.start).saturating_mul(4) <= places.len() * MOST_QUARTERS;
    is_narrow || parts_of_attention(places, axis, facts).is_some_and(|(kinds, _)| kinds.len() < 3)
}

/// The name of the indices that differ; `differing` elements do.
pub(super) fn extent(places: &Places, axis: Axis, facts: &Facts, differing: u64) -> Option<Extent> {
    let found = named(places, axis, facts)?;
    // So many differences are not all there by chance: 2^-40, for any of the ranges that there are.
    let share = found.len as f64 / places.len() as f64;
    let needed = 40.0 + 2.0 * (places.len() as f64).log2();
    (share < 1.0 && differing as f64 * -share.log2() >= needed).then_some(found)
}

fn named(places: &Places, axis: Axis, facts: &Facts) -> Option<Extent> {
    let span = places.span();
    let len = span.end - span.start;
    let is_range = places.count() == len && len > 0;
    let attention = parts_of_attention(places, axis, facts);
    if let Some((kinds, groups)) = &attention
        && kinds.len() < 3
    {
        let heads = said_heads(places.len(), axis, facts)?;
        let of_kind = |kind: &str| if kind == "query" { heads.of_group } else { 1 };
        let per_group = kinds.iter().map(|kind| of_kind(kind)).sum::<usize>() * heads.size;
        let words = kinds.join(" and ");
        let [_, many] = axis.words;
        let (of, count) = match groups[..] {
            [group] if heads.groups > 1 => (format!(" of group {group}"), 1),
            _ => (String::new(), heads.groups),
        };
        let all = (per_group * count) as u64;
        // Less than all of them are a range, if anything.
        if places.count() == all {
            let text = format!("only the {words} {many}{of} differ");
            return Some(Extent { text, len: all });
        }
    }
    if !is_range || len.saturating_mul(4) > places.len() * MOST_QUARTERS {
        return None;
    }
    let part = part(places, axis, facts, attention);
    let [one, many] = axis.words;
    let text = match len {
        1 => format!("only {one} {} differs{part}", span.start),
        _ => format!("only {many} {}-{} differ{part}", span.start, span.end - 1),
    };
    Some(Extent { text, len })
}

/// Words for what a range is a part of.
fn part(
    places: &Places,
    axis: Axis,
    facts: &Facts,
    attention: Option<(Vec<&'static str>, Vec<usize>)>,
) -> String {
    let span = places.span();
    let Subject { role, is_gated, experts, .. } = axis.subject;
    let whole = places.len();
    if experts > 1 {
        let size = whole / experts as u64;
        let [first, last] = [span.start, span.end - 1].map(|at| at / size.max(1));
        return if first == last {
            format!(": expert {first}")
        } else {
            format!(": experts {first}-{last}")
        };
    }
    if let Some((kinds, groups)) = attention {
        return match (&kinds[..], &groups[..]) {
            ([kind], [group]) => format!(": {kind} heads of group {group}"),
            ([kind], _) => format!(": {kind} heads"),
            (_, [group]) => format!(": group {group}"),
            _ => String::new(),
        };
    }
    let half = whole / 2;
    match role {
        Role::GateAndUp if is_gated && span.end <= half => ": gate".to_owned(),
        Role::GateAndUp if is_gated && span.start >= half => ": up".to_owned(),
        Role::Vocabulary if facts.vocab_size.is_some_and(|size| span.start >= size) => {
            ": padding of the vocabulary".to_owned()
        }
        Role::Queries | Role::Keys | Role::Values | Role::Output => {
            let Some(size) = facts.head_size.filter(|size| whole.is_multiple_of(*size)) else {
                return String::new();
            };
            let [first, last] = [span.start, span.end - 1].map(|at| at / size);
            if first == last {
                format!(": head {first}")
            } else {
                format!(": heads {first}-{last}")
            }
        }
        _ => String::new(),
    }
}

fn said_heads(len: u64, axis: Axis, facts: &Facts) -> Option<Heads> {
    let is_attention = axis.subject.role == Role::Attention;
    facts.said_heads(usize::try_from(len).ok()?).filter(|_| is_attention)
}

/// The kinds of heads and the groups that indices belong to.
fn parts_of_attention(
    places: &Places,
    axis: Axis,
    facts: &Facts,
) -> Option<(Vec<&'static str>, Vec<usize>)> {
    const KINDS: [&str; 3] = ["query", "key", "value"];
    let Heads { of_group, groups, size } = said_heads(places.len(), axis, facts)?;
    let mut has = ([false; 3], vec![false; groups]);
    for at in places.iter() {
        let head = usize::try_from(at).ok()? / size;
        let (kind, group) = match axis.has_blocks {
            true => match head {
                head if head < of_group * groups => (0, head / of_group),
                head => {
                    (1 + (head - of_group * groups) / groups, (head - of_group * groups) % groups)
                }
            },
            false => ((head % (of_group + 2)).saturating_sub(of_group - 1), head / (of_group + 2)),
        };
        has.0[kind.min(2)] = true;
        has.1[group] = true;
    }
    let kinds = KINDS.into_iter().zip(has.0).filter(|(_, has)| *has).map(|(kind, _)| kind);
    let groups = has.1.iter().enumerate().filter(|(_, has)| **has).map(|(group, _)| group);
    Some((kinds.collect(), groups.collect()))
}
