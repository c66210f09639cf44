//! A pickle read in pieces: its opcodes one after another, and a memo that only keeps what is asked for again.
//!
//! For pickles whose values need not all be held at once. The pickler remembers every object it wrote in case
//! it meets it again; few of them ever are. A first pass over the opcodes ([`MemoPlan::of`]) finds out which, so that the
//! second one can let go of all others as soon as its stack does.

use std::io;

use super::{DecodeError, Op, PickleError, PickleErrorKind, decode};
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::{FileSet, Region};

/// A pickle cannot be read in pieces.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The file cannot be read.
    #[error("cannot read the pickle")]
    Io(#[from] io::Error),
    /// It is no pickle, or a damaged one.
    #[error(transparent)]
    Pickle(#[from] PickleError),
}

/// The step after an opcode.
#[derive(Debug)]
pub enum Next<T> {
    /// The one behind it.
    Opcode,
    /// The one at this offset, further on.
    At(u64),
    /// Nothing: this is the result.
    End(T),
}

/// Bytes that are read at a time.
const CHUNK: usize = 256 << 10;

/// Calls `apply` with every opcode of the pickle that starts the region and with its offset, until that ends it.
///
/// # Errors
/// [`StreamError`] where the region cannot be read, ends before `apply` does, holds an opcode that is longer than
/// [`LIMITS`] allow, or `apply` fails.
pub fn each_op<T>(
    files: &FileSet,
    region: Region,
    mut apply: impl FnMut(u64, Op<'_>) -> Result<Next<T>, PickleErrorKind>,
) -> Result<T, StreamError> {
    let mut window = OpWindow { files, region, start: 0, bytes: Vec::new(), at: 0 };
    loop {
        let at = window.position();
        let outcome = match decode(window.rest()) {
            Ok((op, len)) => apply(at, op).map(|flow| (flow, len)).map_err(DecodeError::Bad),
            Err(error) => Err(error),
        };
        match outcome {
            Ok((Next::Opcode, len)) => window.at += len,
            Ok((Next::At(next), len)) => window.skip_to(next.max(at + len as u64)),
            Ok((Next::End(result), _)) => return Ok(result),
            Err(DecodeError::Bad(kind)) => return Err(PickleError { at, kind }.into()),
            Err(DecodeError::Short(needed)) => window.refill(needed)?,
        }
    }
}

/// End of the pickle in its region.
///
/// # Errors
/// As for [`each_op`].
pub fn end(files: &FileSet, region: Region) -> Result<u64, StreamError> {
    each_op(files, region, |at, op| match op {
        Op::Stop => Ok(Next::End(at + 1)),
        _ => Ok(Next::Opcode),
    })
}

/// The bytes around the next opcode.
struct OpWindow<'a> {
    files: &'a FileSet,
    region: Region,
    /// Offset of the bytes in the region.
    start: u64,
    bytes: Vec<u8>,
    at: usize,
}

impl OpWindow<'_> {
    fn position(&self) -> u64 {
        self.start + self.at as u64
    }

    fn rest(&self) -> &[u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    fn skip_to(&mut self, next: u64) {
        let inside = next.checked_sub(self.start).and_then(|at| usize::try_from(at).ok());
        match inside.filter(|at| *at <= self.bytes.len()) {
            Some(at) => self.at = at,
            None => {
                self.bytes.clear();
                (self.start, self.at) = (next.min(self.region.len), 0);
            }
        }
    }

    /// Moves on so that the next opcode comes first and at least `needed` bytes are there.
    fn refill(&mut self, needed: u64) -> Result<(), StreamError> {
        let at = self.position();
        let have = self.bytes.len() - self.at;
        let left = self.region.len - at;
        let error = |kind| PickleError { at, kind };
        if needed > left || have as u64 == left {
            return Err(error(PickleErrorKind::UnexpectedEnd).into());
        }
        let limit = LIMITS.pickle_opcode;
        let over = OverLimit::found("bytes in one value", limit as u64, needed);
        let needed = usize::try_from(needed).ok().filter(|&needed| needed <= limit);
        let needed = needed.ok_or_else(|| error(over.into()))?;
        let len = needed.max(CHUNK).max(have * 2).min(usize::try_from(left).unwrap_or(usize::MAX));
        self.bytes.drain(..self.at);
        self.bytes.resize(len, 0);
        (self.start, self.at) = (at, 0);
        let offset = self.region.offset + at + have as u64;
        self.files.read_exact_at(self.region.file, &mut self.bytes[have..], offset)?;
        Ok(())
    }
}

/// The entries of a pickle's memo that are ever asked for.
#[derive(Debug, Default)]
pub struct MemoPlan {
    /// One bit for each entry.
    wanted: Vec<u64>,
    /// Wanted entries before each word of it.
    before: Vec<u32>,
}

impl MemoPlan {
    /// Reads all opcodes of a pickle up to STOP, and shows them to `look` with their offsets.
    ///
    /// # Errors
    /// As [`each_op`].
    pub fn of(
        files: &FileSet,
        region: Region,
        mut look: impl FnMut(u64, Op<'_>),
    ) -> Result<Self, StreamError> {
        let mut plan = Self::default();
        each_op(files, region, |at, op| {
            look(at, op);
            match op {
                Op::Stop => return Ok(Next::End(())),
                Op::Get(index) => plan.want(index, at)?,
                _ => {}
            }
            Ok(Next::Opcode)
        })?;
        let mut sum = 0;
        plan.before = plan
            .wanted
            .iter()
            .map(|word| {
                let before = sum;
                sum += word.count_ones();
                before
            })
            .collect();
        Ok(plan)
    }

    /// A writer that counts its entries has made fewer of them than it wrote bytes.
    fn want(&mut self, index: u32, at: u64) -> Result<(), PickleErrorKind> {
        if u64::from(index) > at {
            return Err(PickleErrorKind::MissingMemo(index));
        }
        let word = index as usize / 64;
        if word >= self.wanted.len() {
            self.wanted.resize((word + 1).max(self.wanted.len() * 2), 0);
        }
        self.wanted[word] |= 1 << (index % 64);
        Ok(())
    }

    /// The number of an entry among those that are wanted, if it is.
    #[must_use]
    pub fn place(&self, index: u32) -> Option<usize> {
        let (word, bit) = (index as usize / 64, 1_u64 << (index % 64));
        let bits = *self.wanted.get(word)?;
        let before = self.before.get(word)? + (bits & (bit - 1)).count_ones();
        (bits & bit != 0).then_some(before as usize)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::super::super::testing::TestFile;
    use super::*;

    fn ops(bytes: &[u8]) -> Result<Vec<u64>, StreamError> {
        let file = TestFile::new(bytes);
        let mut found = Vec::new();
        each_op(&file.files, file.region, |at, op| {
            found.push(at);
            let is_end = op == Op::Stop;
            Ok(if is_end { Next::End(()) } else { Next::Opcode })
        })?;
        Ok(found)
    }

    #[test]
    fn opcodes_on_the_edge_of_a_window_are_whole() {
        let text = [&[b'X', 200, 0, 0, 0][..], &[b'a'; 200], b"0"].concat();
        let mut bytes = text.repeat(3 * CHUNK / 200);
        bytes.push(b'.');
        let found = ops(&bytes).unwrap();
        assert_eq!(found.len(), 2 * (3 * CHUNK / 200) + 1);
        assert_eq!(*found.last().unwrap(), bytes.len() as u64 - 1);
        let long = [&[b'B', 0, 0, 0x10, 0][..], &vec![0; 1 << 20], b"0I1\n0."].concat();
        assert_eq!(ops(&long).unwrap().len(), 5);
    }

    #[test]
    fn what_is_skipped_is_not_read() {
        for far in [10_u64, 3 * CHUNK as u64] {
            let mut bytes = vec![0xff; usize::try_from(far).unwrap()];
            bytes[0] = b'N';
            bytes.extend(b"2.");
            let file = TestFile::new(&bytes);
            let mut seen = Vec::new();
            let end = each_op(&file.files, file.region, |at, op| {
                seen.push(at);
                Ok(match op {
                    Op::None => Next::At(far),
                    Op::Stop => Next::End(at),
                    _ => Next::Opcode,
                })
            });
            assert_eq!((end.unwrap(), seen), (far + 1, vec![0, far, far + 1]));
        }
        let file = TestFile::new(b"NN.");
        let beyond = each_op(&file.files, file.region, |_, _| Ok(Next::<()>::At(u64::MAX)));
        assert!(matches!(beyond, Err(StreamError::Pickle(error)) if error.at == 3));
    }

    #[test]
    fn a_pickle_that_ends_too_early_is_told_from_one_that_asks_for_too_much() {
        let kind = |bytes: &[u8]| match ops(bytes) {
            Err(StreamError::Pickle(error)) => (error.at, error.kind),
            other => unreachable!("{other:?}"),
        };
        assert_eq!(kind(b"NN"), (2, PickleErrorKind::UnexpectedEnd));
        assert_eq!(kind(b"NX\xff\xff\xff\xff"), (1, PickleErrorKind::UnexpectedEnd));
        assert_eq!(kind(b""), (0, PickleErrorKind::UnexpectedEnd));
        assert_eq!(kind(b"NI12"), (1, PickleErrorKind::UnexpectedEnd));
    }

    #[test]
    fn the_plan_numbers_what_is_asked_for() {
        let file = TestFile::new(b"NNNNNNNNNNNNNNNNNNNNh\x03h\x00h\x11h\x03.");
        let plan = MemoPlan::of(&file.files, file.region, |_, _| ()).unwrap();
        let places: Vec<_> = [0, 1, 3, 17, 18, 64].map(|index| plan.place(index)).into();
        assert_eq!(places, [Some(0), None, Some(1), Some(2), None, None]);
        let forged = TestFile::new(b"Nj\xff\xff\xff\x7f.");
        assert!(MemoPlan::of(&forged.files, forged.region, |_, _| ()).is_err());
    }
}
