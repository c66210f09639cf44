//! Where in a `.metadata` the save plans of all ranks lie, which Megatron-Core puts last and nobody needs to load it.

use crate::containers::torch::pickle::Op;

/// The attribute of the metadata that holds them.
const PLANS: &[u8] = b"all_local_plans";

/// The attributes that are read: behind one of them nothing is skipped.
const READ: [&[u8]; 5] =
    [b"state_dict_metadata", b"storage_data", b"planner_data", b"mcore_data", b"version"];

/// Looks for the plans among the opcodes: the state of the metadata is a dict whose items follow the first mark, so
/// they reach from their key to the SETITEMS that takes that mark. Nothing behind that asks for what is in them.
#[derive(Debug, Default)]
pub(super) struct PlansRange {
    /// Marks that are set.
    depth: u64,
    key_was_last: bool,
    start: Option<u64>,
    end: Option<u64>,
}

impl PlansRange {
    /// Takes the next opcode and its offset.
    #[inline]
    pub(super) fn look(&mut self, at: u64, op: Op<'_>) {
        if std::mem::take(&mut self.key_was_last) {
            match op {
                // Of the key.
                Op::Memoize | Op::Put(_) => self.key_was_last = true,
                _ => self.start = Some(at),
            }
        }
        match op {
            Op::Mark => self.depth += 1,
            Op::Str(text) if self.depth == 1 => {
                if text == PLANS {
                    self.key_was_last = true;
                    (self.start, self.end) = (None, None);
                } else if READ.contains(&text) {
                    (self.start, self.end) = (None, None);
                }
            }
            Op::Appends | Op::AddItems | Op::Tuple | Op::PopMark => self.leave(),
            Op::List | Op::Dict | Op::FrozenSet | Op::Inst(..) | Op::Obj => self.leave(),
            Op::SetItems => {
                self.leave();
                if self.depth == 0 && self.end.is_none() {
                    self.end = Some(at);
                }
            }
            // Can take a mark, too; no pickler writes it here.
            Op::Pop => (self.start, self.end) = (None, None),
            _ => {}
        }
    }

    fn leave(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }

    /// From the first opcode of the plans to the one that puts them into the state.
    pub(super) fn found(&self) -> Option<(u64, u64)> {
        self.start.zip(self.end).filter(|(start, end)| start < end)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::containers::torch::pickle::decode;

    fn found(pickle: &[u8]) -> Option<(u64, u64)> {
        let (mut range, mut at) = (PlansRange::default(), 0);
        while at < pickle.len() {
            let (op, len) = decode(&pickle[at..]).unwrap();
            range.look(at as u64, op);
            at += len;
        }
        range.found()
    }

    #[test]
    fn the_last_attribute_is_found_and_no_other() {
        let key = b"\x8c\x0fall_local_plans\x94";
        let last = [&b"}(\x8c\x01aN"[..], key, b"](\x8c\x07versione", b"ub."].concat();
        let start = 6 + key.len() as u64;
        assert_eq!(found(&last), Some((start, start + 12)));
        let first = [&b"}("[..], key, b"](N\x8c\x01ae", b"\x8c\x07versionN", b"ub."].concat();
        assert_eq!(found(&first), None);
        assert_eq!(found(b"}(\x8c\x01aNub."), None);
    }
}
