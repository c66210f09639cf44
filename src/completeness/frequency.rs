//! Frequencies of layers as text: `2`, or Python's `([0]*1+[1]*27)*1`, which Megatron evaluates and this reads.

use crate::names::index::number;

/// A frequency of layers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frequency {
    /// Every so many layers.
    Every(u64),
    /// An entry for each layer.
    Each(Vec<u64>),
}

/// Parentheses within each other that are read.
const DEPTH: usize = 16;

/// Entries of all lists that an expression makes on its way, a hundred times those of any model.
const ENTRIES: u64 = 1 << 16;

/// Reads an expression of whole numbers, lists of them, `+`, `*` and parentheses (Megatron-LM, `moe_freq_type` and `la_freq_type` in
/// `megatron/training/arguments.py`). `None` where it is anything else, or makes more entries than a model could have.
pub(super) fn frequency(text: &str) -> Option<Frequency> {
    let mut reader = Reader { rest: text.trim_start(), left: ENTRIES };
    let value = reader.sum(0)?;
    reader.rest.is_empty().then_some(value)
}

struct Reader<'t> {
    rest: &'t str,
    /// Entries that lists may still have.
    left: u64,
}

impl Reader<'_> {
    fn takes(&mut self, sign: char) -> bool {
        let rest = self.rest.strip_prefix(sign);
        self.rest = rest.map_or(self.rest, str::trim_start);
        rest.is_some()
    }

    fn sum(&mut self, depth: usize) -> Option<Frequency> {
        let mut sum = self.product(depth)?;
        while self.takes('+') {
            sum = match (sum, self.product(depth)?) {
                (Frequency::Every(one), Frequency::Every(other)) => {
                    Frequency::Every(one.checked_add(other)?)
                }
                (Frequency::Each(mut one), Frequency::Each(other)) => {
                    self.spend((one.len() as u64).checked_add(other.len() as u64)?)?;
                    one.extend(other);
                    Frequency::Each(one)
                }
                _ => return None,
            };
        }
        Some(sum)
    }

    fn product(&mut self, depth: usize) -> Option<Frequency> {
        let mut product = self.factor(depth)?;
        while self.takes('*') {
            product = match (product, self.factor(depth)?) {
                (Frequency::Every(one), Frequency::Every(other)) => {
                    Frequency::Every(one.checked_mul(other)?)
                }
                (Frequency::Each(list), Frequency::Every(times))
                | (Frequency::Every(times), Frequency::Each(list)) => {
                    self.spend((list.len() as u64).checked_mul(times)?)?;
                    // So many times nothing is nothing.
                    let times = if list.is_empty() { 0 } else { usize::try_from(times).ok()? };
                    Frequency::Each(list.repeat(times))
                }
                (Frequency::Each(_), Frequency::Each(_)) => return None,
            };
        }
        Some(product)
    }

    fn factor(&mut self, depth: usize) -> Option<Frequency> {
        if depth > DEPTH {
            return None;
        }
        if self.takes('(') {
            let inner = self.sum(depth + 1)?;
            return self.takes(')').then_some(inner);
        }
        if !self.takes('[') {
            return self.number().map(Frequency::Every);
        }
        let mut list = Vec::new();
        while !self.takes(']') {
            list.push(self.number()?);
            self.spend(1)?;
            if !self.takes(',') {
                return self.takes(']').then_some(Frequency::Each(list));
            }
        }
        Some(Frequency::Each(list))
    }

    fn number(&mut self) -> Option<u64> {
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        number(digits)
    }

    fn spend(&mut self, entries: u64) -> Option<()> {
        self.left = self.left.checked_sub(entries)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_and_nothing_else() {
        let read = frequency;
        let each = |list: &[u64]| Some(Frequency::Each(list.to_vec()));
        assert_eq!(read("2"), Some(Frequency::Every(2)));
        assert_eq!(read("([0]*1+[1]*3)*1"), each(&[0, 1, 1, 1]));
        assert_eq!(read(" 2 * ( [ 0 , 1, ] + [1] ) "), each(&[0, 1, 1, 0, 1, 1]));
        assert_eq!(read("[]*9"), each(&[]));
        for wrong in
            ["", "[0]*", "[0][1]", "[0]*[1]", "1+[0]", "([0]", "[a]", "-1", "len([0])", "[0,,1]"]
        {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn bombs_are_refused() {
        let often = vec!["[0]*60000*0"; 40_000].join("+");
        let deep = "(".repeat(100_000);
        for bomb in
            ["[0]*99999999999999", "[0,1]*999*999", "99999999999*99999999999", &often, &deep]
        {
            assert_eq!(frequency(bomb), None);
        }
    }
}
