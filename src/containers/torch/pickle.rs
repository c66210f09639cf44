//! Reads a pickle without running it: bytes in, [`Values`] out.
//!
//! All opcodes of protocols 0 to 5 as CPython 3.14 defines them (`Lib/pickletools.py`), but for the extension
//! registry and out-of-band buffers, which no file can carry. The machine is one loop without recursion; it
//! knows nothing of tensors, imports nothing, and calls nothing: REDUCE and its kin only record that the
//! pickle asks for a call. Marks are kept apart from the values, so that no value can pass for one.

mod literal;
mod machine;
mod op;
pub mod stream;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use self::op::{DecodeError, Op, decode};

use self::machine::PickleMachine;
use super::value::{ValueId, Values};
use crate::base::limits::{LIMITS, Limits, OverLimit};

/// The content of one pickle.
#[derive(Debug)]
pub struct Pickle {
    /// Everything that it describes.
    pub values: Values,
    /// The value that Python's `pickle.load` would return.
    pub root: ValueId,
    /// Bytes up to and with the STOP opcode; another pickle or other data may follow.
    pub consumed: usize,
}

/// A pickle cannot be read, from some offset on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("byte {at}: {kind}")]
pub struct PickleError {
    /// Offset of the opcode in question.
    pub at: u64,
    /// The fault that is there.
    pub kind: PickleErrorKind,
}

/// A fault of a pickle.
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
        /// The type that the opcode works on.
        wanted: &'static str,
        /// The type that it found.
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
    OverLimit(OverLimit),
}

// Not `#[from]`, which would make it a source and have it said twice.
impl From<OverLimit> for PickleErrorKind {
    fn from(over: OverLimit) -> Self {
        Self::OverLimit(over)
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
    let mut machine = PickleMachine::new(input, limits);
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

/// The result of one step of a machine that runs opcodes.
pub type PickleResult<T = ()> = Result<T, PickleErrorKind>;

impl PickleMachine<'_> {
    /// Runs one opcode; the value is there when it was STOP.
    fn step(&mut self) -> PickleResult<Option<ValueId>> {
        match self.op()? {
            Op::Stop => return self.pop().map(Some),
            Op::Protocol(_) => {}
            Op::Frame(len) => self.check_frame(len)?,

            Op::Mark => self.mark()?,
            Op::Pop => self.pop_value_or_mark()?,
            Op::PopMark => {
                let start = self.pop_mark()?;
                self.stack.truncate(start);
            }
            Op::Dup => {
                let top = self.top()?;
                self.push(top)?;
            }

            Op::None => self.push(self.values.new_none())?,
            Op::Bool(value) => self.push(self.values.new_bool(value))?,
            Op::Int(value) => self.push_int(value)?,
            Op::Long(bytes) => {
                let id = self.values.new_long(bytes)?;
                self.push(id)?;
            }
            Op::Float(value) => {
                let id = self.values.new_float(value)?;
                self.push(id)?;
            }
            Op::IntText(line) => self.int_text(line)?,
            Op::LongText(line) => self.long_text(line)?,
            Op::FloatText(line) => self.float_text(line)?,

            Op::Str(bytes) => {
                let id = self.values.new_str(bytes)?;
                self.push(id)?;
            }
            Op::StringText(line) => self.string_text(line)?,
            Op::UnicodeText(line) => self.unicode_text(line)?,
            Op::Bytes(bytes) => {
                let id = self.values.new_bytes(bytes)?;
                self.push(id)?;
            }

            Op::EmptyTuple => self.push(self.values.new_empty_tuple())?,
            Op::Tuple => {
                let start = self.pop_mark()?;
                self.tuple(start)?;
            }
            Op::TupleOf(len) => self.tuple_of(len)?,
            Op::EmptyList => {
                let list = self.values.new_list(&[])?;
                self.push(list)?;
            }
            Op::List => {
                let start = self.pop_mark()?;
                let list = self.values.new_list(&self.stack[start..])?;
                self.replace(start, list)?;
            }
            Op::Append => {
                let member = self.pop()?;
                let list = self.top()?;
                match self.values.appends_of(list) {
                    Some(members) => members.push(member),
                    None => return Err(self.mismatch("a list", list)),
                }
            }
            Op::Appends => {
                let (list, start) = self.target_below_mark()?;
                match self.values.appends_of(list) {
                    Some(members) => members.extend_from_slice(&self.stack[start..]),
                    None => return Err(self.mismatch("a list", list)),
                }
                self.stack.truncate(start);
            }
            Op::EmptyDict => {
                let dict = self.values.new_dict()?;
                self.push(dict)?;
            }
            Op::Dict => {
                let start = self.pop_mark()?;
                let dict = self.values.new_dict()?;
                self.set_items(dict, start)?;
                self.push(dict)?;
            }
            Op::SetItem => {
                let value = self.pop()?;
                let key = self.pop()?;
                let dict = self.top()?;
                match self.values.items_of(dict) {
                    Some(items) => items.push((key, value)),
                    None => return Err(self.mismatch("a dict", dict)),
                }
            }
            Op::SetItems => {
                let (dict, start) = self.target_below_mark()?;
                self.set_items(dict, start)?;
            }
            Op::EmptySet => {
                let set = self.values.new_set()?;
                self.push(set)?;
            }
            Op::AddItems => {
                let (set, start) = self.target_below_mark()?;
                match self.values.additions_of(set) {
                    Some(members) => members.extend_from_slice(&self.stack[start..]),
                    None => return Err(self.mismatch("a set", set)),
                }
                self.stack.truncate(start);
            }
            Op::FrozenSet => {
                let start = self.pop_mark()?;
                let set = self.values.new_frozen_set(&self.stack[start..])?;
                self.replace(start, set)?;
            }

            Op::Put(index) => self.put(index)?,
            Op::Memoize => self.put(self.memo.next_index())?,
            Op::Get(index) => self.fetch(index)?,

            Op::Global(module, name) => {
                let global = self.global_text(module, name)?;
                self.push(global)?;
            }
            Op::StackGlobal => {
                let name = self.pop()?;
                let module = self.pop()?;
                let global = self.global(module, name)?;
                self.push(global)?;
            }
            Op::Call => {
                let args = self.pop()?;
                self.call(args, None)?;
            }
            Op::CallWithKeywords => {
                let kwargs = self.pop()?;
                let args = self.pop()?;
                self.call(args, Some(kwargs))?;
            }
            Op::Inst(module, name) => {
                let callable = self.global_text(module, name)?;
                let start = self.pop_mark()?;
                let args = self.values.new_tuple(&self.stack[start..])?;
                let object = self.values.new_call(callable, args, None)?;
                self.replace(start, object)?;
            }
            Op::Obj => {
                let start = self.pop_mark()?;
                let callable = *self.stack.get(start).ok_or(PickleErrorKind::StackUnderflow)?;
                self.check_callable(callable)?;
                let args = self.values.new_tuple(&self.stack[start + 1..])?;
                let object = self.values.new_call(callable, args, None)?;
                self.replace(start, object)?;
            }
            Op::Build => {
                let state = self.pop()?;
                let object = self.top()?;
                match self.values.state_of(object) {
                    Some(empty @ None) => *empty = Some(state),
                    Some(Some(_)) => return Err(PickleErrorKind::BuiltTwice),
                    None => return Err(self.mismatch("an object", object)),
                }
            }
            Op::PersistentText(line) => {
                let id = self.values.new_str(line)?;
                let persistent = self.values.new_persistent(id)?;
                self.push(persistent)?;
            }
            Op::Persistent => {
                let id = self.pop()?;
                let persistent = self.values.new_persistent(id)?;
                self.push(persistent)?;
            }
        }
        Ok(None)
    }
}
