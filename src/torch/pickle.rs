//! Reads a pickle without running it: bytes in, [`Values`] out.
//!
//! All opcodes of protocols 0 to 5 as CPython 3.14 defines them (`Lib/pickletools.py`), but for the extension
//! registry and out-of-band buffers, which no file can carry. The machine is one loop without recursion; it
//! knows nothing of tensors, imports nothing, and calls nothing: REDUCE and its kin only record that the
//! pickle asks for a call. Marks are kept apart from the values, so that no value can pass for one.

mod literal;
mod machine;
#[cfg(test)]
mod tests;

use thiserror::Error;

use self::machine::Machine;
use super::value::{TooMany, ValueId, Values};
use crate::limits::{LIMITS, Limits};

/// What one pickle holds.
#[derive(Debug)]
pub struct Pickle {
    /// Everything that it describes.
    pub values: Values,
    /// The value that Python's `pickle.load` would return.
    pub root: ValueId,
    /// Bytes up to and with the STOP opcode; another pickle or other data may follow.
    pub consumed: usize,
}

/// Where and why a pickle cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("byte {at}: {kind}")]
pub struct PickleError {
    /// Offset of the opcode in question.
    pub at: u64,
    /// What is wrong there.
    pub kind: PickleErrorKind,
}

/// What can be wrong with a pickle.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PickleErrorKind {
    /// The input ends inside an opcode, or before STOP.
    #[error("the pickle ends too early")]
    UnexpectedEnd,
    /// No pickle protocol has this opcode.
    #[error("unknown pickle opcode 0x{0:02x}")]
    UnknownOpcode(u8),
    /// A protocol that is newer than this reader.
    #[error("pickle protocol {0} is not known (0 to 5 are); save with pickle_protocol=2")]
    UnknownProtocol(u8),
    /// Extension registry and out-of-band buffers: what they stand for is not in the file.
    #[error("pickle opcode {0} refers to something outside the file")]
    OutsideTheFile(&'static str),
    /// An opcode takes more values than there are since the last mark.
    #[error("the pickle takes more values from its stack than it put there")]
    StackUnderflow,
    /// An opcode takes everything since a mark, and there is none.
    #[error("a pickle opcode needs a mark and there is none")]
    NoMark,
    /// GET of an index that was never PUT.
    #[error("the pickle refers to memo entry {0}, which it never made")]
    MissingMemo(u32),
    /// An opcode is applied to a value of the wrong type.
    #[error("a pickle opcode needs {wanted} and found {found}")]
    TypeMismatch {
        /// What the opcode works on.
        wanted: &'static str,
        /// What it found.
        found: &'static str,
    },
    /// A key without a value.
    #[error("the pickle stores an odd number of keys and values")]
    OddItems,
    /// Two BUILD opcodes for one object.
    #[error("the pickle gives one object its state twice")]
    BuiltTwice,
    /// A length below zero.
    #[error("a length in the pickle is negative ({0})")]
    NegativeLength(i32),
    /// A number, name or string of the text protocols is not one.
    #[error("{0} in the pickle cannot be read")]
    BadText(&'static str),
    /// More than this process is willing to hold.
    #[error("the pickle needs {0}")]
    TooMany(TooMany),
}

// Not `#[from]`, which would make it a source and have it said twice.
impl From<TooMany> for PickleErrorKind {
    fn from(too_many: TooMany) -> Self {
        Self::TooMany(too_many)
    }
}

/// Reads the pickle that starts at the first byte.
///
/// # Errors
/// [`PickleError`] where the bytes are no pickle, a damaged one, or ask for more than [`LIMITS`] allow.
pub fn read(input: &[u8]) -> Result<Pickle, PickleError> {
    read_within(input, &LIMITS)
}

fn read_within(input: &[u8], limits: &Limits) -> Result<Pickle, PickleError> {
    let mut machine = Machine::new(input, limits);
    loop {
        let at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(root)) => {
                return Ok(Pickle { values: machine.values, root, consumed: machine.at });
            }
            Err(kind) => return Err(PickleError { at: at as u64, kind }),
        }
    }
}

type Step<T = ()> = Result<T, PickleErrorKind>;

impl Machine<'_> {
    /// Runs one opcode; the value is there when it was STOP.
    fn step(&mut self) -> Step<Option<ValueId>> {
        match self.byte()? {
            b'.' => return self.pop().map(Some),
            0x80 => self.protocol()?,
            0x95 => self.frame()?,

            b'(' => self.mark()?,
            b'0' => self.pop_value_or_mark()?,
            b'1' => {
                let start = self.pop_mark()?;
                self.stack.truncate(start);
            }
            b'2' => {
                let top = self.top()?;
                self.push(top)?;
            }

            b'N' => self.push(self.values.new_none())?,
            0x88 => self.push(self.values.new_bool(true))?,
            0x89 => self.push(self.values.new_bool(false))?,
            b'K' => {
                let value = self.byte()?;
                self.push_int(value.into())?;
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.push_int(value.into())?;
            }
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push_int(value.into())?;
            }
            0x8a => {
                let len = self.byte()?;
                self.long(len.into())?;
            }
            0x8b => {
                let len = self.signed_length()?;
                self.long(len)?;
            }
            b'G' => {
                let value = f64::from_be_bytes(self.array()?);
                let id = self.values.new_float(value)?;
                self.push(id)?;
            }
            b'I' => self.int_text()?,
            b'L' => self.long_text()?,
            b'F' => self.float_text()?,

            // Python 2 strings: text where they are UTF-8. Surrogates make a Python 3 string invalid UTF-8.
            b'U' | 0x8c => {
                let len = self.byte()?;
                self.string(len.into())?;
            }
            b'T' => {
                let len = self.signed_length()?;
                self.string(len)?;
            }
            b'X' => {
                let len = u32::from_le_bytes(self.array()?);
                self.string(len.into())?;
            }
            0x8d => {
                let len = u64::from_le_bytes(self.array()?);
                self.string(len)?;
            }
            b'S' => self.string_text()?,
            b'V' => self.unicode_text()?,
            b'C' => {
                let len = self.byte()?;
                self.bytes(len.into())?;
            }
            b'B' => {
                let len = u32::from_le_bytes(self.array()?);
                self.bytes(len.into())?;
            }
            // BINBYTES8, BYTEARRAY8
            0x8e | 0x96 => {
                let len = u64::from_le_bytes(self.array()?);
                self.bytes(len)?;
            }

            b')' => self.push(self.values.new_empty_tuple())?,
            b't' => {
                let start = self.pop_mark()?;
                self.tuple(start)?;
            }
            0x85 => self.tuple_of(1)?,
            0x86 => self.tuple_of(2)?,
            0x87 => self.tuple_of(3)?,
            b']' => {
                let list = self.values.new_list(&[])?;
                self.push(list)?;
            }
            b'l' => {
                let start = self.pop_mark()?;
                let list = self.values.new_list(&self.stack[start..])?;
                self.replace(start, list)?;
            }
            b'a' => {
                let member = self.pop()?;
                let list = self.top()?;
                match self.values.appends_of(list) {
                    Some(members) => members.push(member),
                    None => return Err(self.mismatch("a list", list)),
                }
            }
            b'e' => {
                let (list, start) = self.target_below_mark()?;
                match self.values.appends_of(list) {
                    Some(members) => members.extend_from_slice(&self.stack[start..]),
                    None => return Err(self.mismatch("a list", list)),
                }
                self.stack.truncate(start);
            }
            b'}' => {
                let dict = self.values.new_dict()?;
                self.push(dict)?;
            }
            b'd' => {
                let start = self.pop_mark()?;
                let dict = self.values.new_dict()?;
                self.set_items(dict, start)?;
                self.push(dict)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                let dict = self.top()?;
                match self.values.items_of(dict) {
                    Some(items) => items.push((key, value)),
                    None => return Err(self.mismatch("a dict", dict)),
                }
            }
            b'u' => {
                let (dict, start) = self.target_below_mark()?;
                self.set_items(dict, start)?;
            }
            0x8f => {
                let set = self.values.new_set()?;
                self.push(set)?;
            }
            0x90 => {
                let (set, start) = self.target_below_mark()?;
                match self.values.additions_of(set) {
                    Some(members) => members.extend_from_slice(&self.stack[start..]),
                    None => return Err(self.mismatch("a set", set)),
                }
                self.stack.truncate(start);
            }
            0x91 => {
                let start = self.pop_mark()?;
                let set = self.values.new_frozen_set(&self.stack[start..])?;
                self.replace(start, set)?;
            }

            b'p' => {
                let index = self.index_text()?;
                self.put(index)?;
            }
            b'q' => {
                let index = self.byte()?;
                self.put(index.into())?;
            }
            b'r' => {
                let index = u32::from_le_bytes(self.array()?);
                self.put(index)?;
            }
            0x94 => self.put(self.memo.next_index())?,
            b'g' => {
                let index = self.index_text()?;
                self.fetch(index)?;
            }
            b'h' => {
                let index = self.byte()?;
                self.fetch(index.into())?;
            }
            b'j' => {
                let index = u32::from_le_bytes(self.array()?);
                self.fetch(index)?;
            }

            b'c' => {
                let global = self.global_text()?;
                self.push(global)?;
            }
            0x93 => {
                let name = self.pop()?;
                let module = self.pop()?;
                let global = self.global(module, name)?;
                self.push(global)?;
            }
            // REDUCE, NEWOBJ
            b'R' | 0x81 => {
                let args = self.pop()?;
                self.call(args, None)?;
            }
            0x92 => {
                let kwargs = self.pop()?;
                let args = self.pop()?;
                self.call(args, Some(kwargs))?;
            }
            b'i' => {
                let callable = self.global_text()?;
                let start = self.pop_mark()?;
                let args = self.values.new_tuple(&self.stack[start..])?;
                let object = self.values.new_call(callable, args, None)?;
                self.replace(start, object)?;
            }
            b'o' => {
                let start = self.pop_mark()?;
                let callable = *self.stack.get(start).ok_or(PickleErrorKind::StackUnderflow)?;
                self.check_callable(callable)?;
                let args = self.values.new_tuple(&self.stack[start + 1..])?;
                let object = self.values.new_call(callable, args, None)?;
                self.replace(start, object)?;
            }
            b'b' => {
                let state = self.pop()?;
                let object = self.top()?;
                match self.values.state_of(object) {
                    Some(empty @ None) => *empty = Some(state),
                    Some(Some(_)) => return Err(PickleErrorKind::BuiltTwice),
                    None => return Err(self.mismatch("an object", object)),
                }
            }
            b'P' => {
                let line = self.line()?;
                let id = self.values.new_str(line)?;
                let persistent = self.values.new_persistent(id)?;
                self.push(persistent)?;
            }
            b'Q' => {
                let id = self.pop()?;
                let persistent = self.values.new_persistent(id)?;
                self.push(persistent)?;
            }

            0x82 => return Err(PickleErrorKind::OutsideTheFile("EXT1")),
            0x83 => return Err(PickleErrorKind::OutsideTheFile("EXT2")),
            0x84 => return Err(PickleErrorKind::OutsideTheFile("EXT4")),
            0x97 => return Err(PickleErrorKind::OutsideTheFile("NEXT_BUFFER")),
            0x98 => return Err(PickleErrorKind::OutsideTheFile("READONLY_BUFFER")),
            other => return Err(PickleErrorKind::UnknownOpcode(other)),
        }
        Ok(None)
    }
}
