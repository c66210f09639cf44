//! The two sides of a comparison.

use std::fmt;
use std::ops::{Index, IndexMut};

/// A side of a comparison. What there is of each is an array of two, `a` first, which a side indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The first checkpoint, or the only one.
    A,
    /// The second checkpoint, the reference of relative metrics.
    B,
}

impl Side {
    /// Both sides, in order.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];
}

impl fmt::Display for Side {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::A => "a",
            Self::B => "b",
        })
    }
}

impl<T> Index<Side> for [T; 2] {
    type Output = T;

    fn index(&self, side: Side) -> &T {
        let [a, b] = self;
        match side {
            Side::A => a,
            Side::B => b,
        }
    }
}

impl<T> IndexMut<Side> for [T; 2] {
    fn index_mut(&mut self, side: Side) -> &mut T {
        let [a, b] = self;
        match side {
            Side::A => a,
            Side::B => b,
        }
    }
}
