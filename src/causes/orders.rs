//! Orders of rows, or of columns, that wrong conversions make: a permutation is held against a list of them. Pure.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use super::facts::{Facts, Heads};
use super::role::Role;

/// The order that the rows of a have, seen from those of b.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Order {
    /// The second half comes first.
    Halves {
        /// The halves are gate and up.
        are_gated: bool,
    },
    /// The parts of two halves take turns on one side.
    Alternating {
        /// The halves are gate and up.
        are_gated: bool,
        /// Parts of each half.
        parts: usize,
        /// They do so in a.
        in_a: bool,
    },
    /// Heads of keys and of values change places.
    KeysAndValues,
    /// All queries, all keys, all values on one side, group by group on the other one.
    Blocks {
        /// The side with all queries first is a.
        in_a: bool,
    },
    /// All queries, all keys, all values of each of some parts, one part behind the other.
    Shards {
        /// The number of parts.
        parts: usize,
        /// They are so in a.
        in_a: bool,
    },
    /// The rows of a head that are turned together are neighbours on one side, and half a head apart on the other one.
    Rotary {
        /// The neighbours are in a.
        in_a: bool,
    },
    /// Heads of queries are dealt out to the groups in turn on one side, and one group after the other on the other one.
    RoundRobin {
        /// They are dealt out in a.
        in_a: bool,
    },
    /// Every row is so many rows further on in b, those at the end at the beginning.
    Rotated {
        /// The number of rows.
        by: usize,
    },
    /// The experts of one tensor are so many further on in b.
    ExpertsRotated {
        /// The number of experts.
        by: usize,
    },
    /// The experts of one tensor are in another order.
    Experts {
        /// The first of a that is another one of b, and its number there.
        first: [usize; 2],
    },
    /// This order within each expert.
    InEachExpert(Box<Self>),
    /// None of these.
    Other {
        /// Number of rows that are elsewhere.
        moved: usize,
        /// Number of all.
        of: usize,
        /// The first of them in a, and its place in b.
        first: [usize; 2],
    },
}

/// A permutation: the row of b that each row of a is.
pub(super) type Permutation = Vec<usize>;

/// The tensor whose rows are permuted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    /// What its rows are.
    pub role: Role,
    /// They are gate and up, as the other sizes of the model say.
    pub is_gated: bool,
    /// Experts that lie one behind the other in it, or 1.
    pub experts: usize,
    /// The size of the embeddings: its other dimension.
    pub hidden: usize,
}

/// The permutation between fingerprints that are all different on each side, if there is one and it changes anything.
pub(super) fn permutation(a: &[u64], b: &[u64]) -> Option<Permutation> {
    if a.len() != b.len() || a.len() < 2 || a == b {
        return None;
    }
    let places: HashMap<u64, usize> = b.iter().copied().zip(0..).collect();
    if places.len() != b.len() {
        return None;
    }
    let found: Permutation = a.iter().map(|row| places.get(row).copied()).collect::<Option<_>>()?;
    let different: BTreeSet<usize> = found.iter().copied().collect();
    (different.len() == found.len()).then_some(found)
}

/// The order that a permutation is.
pub(super) fn order(found: &Permutation, subject: Subject, facts: &Facts) -> Order {
    let experts = subject.experts;
    if experts > 1 && found.len().is_multiple_of(experts) {
        let size = found.len() / experts;
        let inner: Permutation = found[..size].to_vec();
        let is_same_in_each = || {
            let mut rows = found.iter().enumerate();
            rows.all(|(at, row)| *row == at / size * size + inner[at % size])
        };
        if inner.iter().all(|row| *row < size) && is_same_in_each() {
            return Order::InEachExpert(Box::new(order(
                &inner,
                Subject { experts: 1, ..subject },
                facts,
            )));
        }
        let moved: Permutation = found.iter().step_by(size).map(|row| row / size).collect();
        let is_whole =
            found.iter().enumerate().all(|(at, row)| *row == moved[at / size] * size + at % size);
        if is_whole {
            return match rotation(&moved) {
                Some(by) => Order::ExpertsRotated { by },
                None => Order::Experts { first: first_moved(&moved) },
            };
        }
    }
    let known = candidates(found.len(), subject, facts).find(|(_, candidate)| candidate == found);
    match (known, rotation(found)) {
        (Some((order, _)), _) => order,
        (None, Some(by)) => Order::Rotated { by },
        (None, None) => Order::Other {
            moved: found.iter().enumerate().filter(|(at, row)| at != *row).count(),
            of: found.len(),
            first: first_moved(found),
        },
    }
}

/// The permutations of so many rows that an order may be, where it is one of the list.
pub(super) fn rows_of(
    wanted: &Order,
    rows: usize,
    subject: Subject,
    facts: &Facts,
) -> impl Iterator<Item = Permutation> {
    let is_it = |(order, rows)| (order == *wanted).then_some(rows);
    candidates(rows, subject, facts).filter_map(is_it)
}

fn first_moved(found: &Permutation) -> [usize; 2] {
    let moved = found.iter().enumerate().find(|(at, row)| at != *row);
    moved.map_or([0, 0], |(at, row)| [at, *row])
}

/// The number of rows that all are further on.
fn rotation(found: &Permutation) -> Option<usize> {
    let by = *found.first()?;
    let is_it = found.iter().enumerate().all(|(at, row)| *row == (at + by) % found.len());
    (is_it && by != 0).then_some(by)
}

/// The orders that are tried, those that are no order of so many rows left out. The first one that fits is told.
fn candidates<'f>(
    rows: usize,
    subject: Subject,
    facts: &'f Facts,
) -> impl Iterator<Item = (Order, Permutation)> + 'f {
    let Subject { role, is_gated, hidden, .. } = subject;
    let is_gated = is_gated && role == Role::GateAndUp;
    let heads =
        if role == Role::Attention { facts.possible_heads(rows, hidden) } else { Vec::new() };
    let attention = heads.into_iter().flat_map(of_attention);
    let parts_of_heads = move || {
        let is_so = matches!(role, Role::Queries | Role::Keys | Role::Output);
        facts.head_sizes(rows).filter(move |_| is_so)
    };
    let rotary = parts_of_heads()
        .filter(move |_| role != Role::Output)
        .flat_map(move |size| of_rotary(rows, size));
    let dealt = parts_of_heads()
        .filter(move |_| role != Role::Keys)
        .flat_map(move |size| of_dealt(rows, size, facts.groups));
    let halves = of_halves(rows, is_gated);
    attention.chain(rotary).chain(dealt).chain(halves).filter(|(_, rows)| !is_in_order(rows))
}

fn is_in_order(rows: &Permutation) -> bool {
    rows.iter().enumerate().all(|(at, row)| at == *row)
}

/// Parts of two halves that may be those of ranks.
const MOST_PARTS: usize = 64;

fn of_halves(rows: usize, are_gated: bool) -> impl Iterator<Item = (Order, Permutation)> {
    let half = rows / 2;
    let swapped =
        move || (Order::Halves { are_gated }, (0..rows).map(|row| (row + half) % rows).collect());
    let parts = (2..=MOST_PARTS.min(half)).filter(move |parts| half.is_multiple_of(*parts));
    let single = (half > MOST_PARTS).then_some(half);
    let alternating = parts.chain(single).flat_map(move |parts| {
        let size = half / parts;
        [
            (Order::Alternating { are_gated, parts, in_a: true }, turned([2, parts, size])),
            (Order::Alternating { are_gated, parts, in_a: false }, turned([parts, 2, size])),
        ]
    });
    let is_even = rows.is_multiple_of(2) && rows > 0;
    is_even.then(swapped).into_iter().chain(alternating.filter(move |_| is_even))
}

/// The rows of `[outer, inner, size]` with the first two dimensions exchanged.
fn turned([outer, inner, size]: [usize; 3]) -> Permutation {
    let place = |at: usize| {
        let (block, within) = (at / size, at % size);
        (block % outer * inner + block / outer) * size + within
    };
    (0..outer * inner * size).map(place).collect()
}

/// Rows of heads with neighbours for halves, the part that is turned being all of a head, or a half or a quarter at its beginning.
fn of_rotary(rows: usize, size: usize) -> impl Iterator<Item = (Order, Permutation)> {
    let turned = [1, 2, 4].into_iter().map(move |part| size / part);
    let turned = turned.filter(|turned| turned.is_multiple_of(2) && *turned > 2);
    turned.flat_map(move |turned| {
        [true, false].map(|in_a| {
            let place = |at: usize| at - at % size + turned_place(at % size, turned, in_a);
            (Order::Rotary { in_a }, (0..rows).map(place).collect())
        })
    })
}

/// The place of a row of a head on the other side.
fn turned_place(row: usize, turned: usize, are_neighbours: bool) -> usize {
    let half = turned / 2;
    match (row < turned, are_neighbours) {
        (false, _) => row,
        (true, true) => row % 2 * half + row / 2,
        (true, false) => row % half * 2 + row / half,
    }
}

/// Heads of queries that are dealt out in turn.
fn of_dealt(
    rows: usize,
    size: usize,
    groups: Option<u64>,
) -> impl Iterator<Item = (Order, Permutation)> {
    let heads = rows / size;
    let said = groups.and_then(|groups| usize::try_from(groups).ok());
    let groups = match said {
        Some(groups) => groups..groups + 1,
        None => 2..heads,
    };
    let groups = groups.filter(move |groups| *groups > 1 && heads.is_multiple_of(*groups));
    groups.flat_map(move |groups| {
        let of_group = heads / groups;
        [
            (Order::RoundRobin { in_a: true }, turned([groups, of_group, size])),
            (Order::RoundRobin { in_a: false }, turned([of_group, groups, size])),
        ]
    })
}

/// A row of queries, keys and values: its number in the order of all queries, all keys, all values.
type Row = usize;

/// Orders of queries, keys and values in one tensor.
fn of_attention(heads: Heads) -> Vec<(Order, Permutation)> {
    let Heads { of_group, groups, size } = heads;
    let keys = of_group * groups * size;
    let values = keys + groups * size;
    let all = values + groups * size;
    let blocks: Vec<Row> = (0..all).collect();
    let by_group: Vec<Row> = shards(heads, groups);
    let swapped = |row: Row| match row {
        row if row < keys => row,
        row if row < values => row + groups * size,
        row => row - groups * size,
    };
    let dealt = |row: Row| {
        let (head, within) = (row / size, row % size);
        if row < keys { (head % groups * of_group + head / groups) * size + within } else { row }
    };
    let mut found = Vec::new();
    let mut add = |order, a: &[Row], b: &[Row]| {
        let mut places = vec![0; b.len()];
        for (at, row) in b.iter().enumerate() {
            places[*row] = at;
        }
        found.push((order, a.iter().map(|row| places[*row]).collect()));
    };
    for base in [&by_group, &blocks] {
        let with =
            |change: &dyn Fn(Row) -> Row| base.iter().map(|row| change(*row)).collect::<Vec<_>>();
        add(Order::KeysAndValues, &with(&swapped), base);
        for turned in [size, size / 2, size / 4] {
            if turned < 4 || !turned.is_multiple_of(2) {
                continue;
            }
            let rotated = with(&|row| match row {
                row if row < values => row - row % size + turned_place(row % size, turned, true),
                row => row,
            });
            add(Order::Rotary { in_a: true }, &rotated, base);
            add(Order::Rotary { in_a: false }, base, &rotated);
        }
        let dealt = with(&dealt);
        add(Order::RoundRobin { in_a: true }, &dealt, base);
        add(Order::RoundRobin { in_a: false }, base, &dealt);
    }
    add(Order::Blocks { in_a: true }, &blocks, &by_group);
    add(Order::Blocks { in_a: false }, &by_group, &blocks);
    for parts in (2..groups).filter(|parts| groups.is_multiple_of(*parts)) {
        let of_shards = shards(heads, parts);
        for base in [&by_group, &blocks] {
            add(Order::Shards { parts, in_a: true }, &of_shards, base);
            add(Order::Shards { parts, in_a: false }, base, &of_shards);
        }
    }
    found
}

/// The rows of some parts, each with its queries, its keys and its values.
fn shards(Heads { of_group, groups, size }: Heads, parts: usize) -> Vec<Row> {
    let queries = of_group * groups * size;
    let keys = groups * size;
    let part = |part: usize| {
        let of_block = move |start: usize, len: usize| {
            let len = len / parts;
            start + part * len..start + (part + 1) * len
        };
        let blocks =
            [of_block(0, queries), of_block(queries, keys), of_block(queries + keys, keys)];
        blocks.into_iter().flatten()
    };
    (0..parts).flat_map(part).collect()
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |in_a: bool| if in_a { "a" } else { "b" };
        let halves = |are_gated: bool| if are_gated { "gate and up" } else { "the two halves" };
        match self {
            Self::Halves { are_gated } => write!(f, "{} are swapped", halves(*are_gated)),
            Self::Alternating { are_gated, parts, in_a } => {
                write!(f, "{} alternate in {} in {parts} parts", halves(*are_gated), side(*in_a))?;
                if *parts <= MOST_PARTS { write!(f, " (TP shards end to end)") } else { Ok(()) }
            }
            Self::KeysAndValues => f.write_str("key and value are swapped"),
            Self::Blocks { in_a } => write!(
                f,
                "query, key, value are blocks in {}, by group in {}",
                side(*in_a),
                side(!*in_a)
            ),
            Self::Shards { parts, in_a } => write!(
                f,
                "query, key, value are blocks in {parts} parts in {} (TP shards end to end)",
                side(*in_a)
            ),
            Self::Rotary { in_a } => write!(
                f,
                "rotary pairs are neighbours in {}, halves in {}",
                side(*in_a),
                side(!*in_a)
            ),
            Self::RoundRobin { in_a } => {
                write!(f, "query heads are dealt round robin to the groups in {}", side(*in_a))
            }
            Self::Rotated { by } => write!(f, "rotated by {by}: 0 of a is {by} of b"),
            Self::ExpertsRotated { by } => {
                write!(f, "experts are rotated by {by}: expert 0 of a is expert {by} of b")
            }
            Self::Experts { first: [a, b] } => {
                write!(f, "experts are in another order: expert {a} of a is expert {b} of b")
            }
            Self::InEachExpert(order) => write!(f, "in each expert, {order}"),
            Self::Other { moved, of, first: [a, b] } => {
                write!(f, "{moved} of {of} moved, {a} of a is {b} of b")
            }
        }
    }
}
