//! One opcode at a time: bytes in, an [`Op`] with its arguments out. What it does to a stack is the caller's affair.

use super::PickleErrorKind;

/// An opcode with what follows it in the stream. Spellings that do the same are one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op<'a> {
    /// The value on top is what was pickled.
    Stop,
    /// PROTO.
    Protocol(u8),
    /// FRAME: only announces how much follows.
    Frame(u64),
    /// MARK.
    Mark,
    /// POP.
    Pop,
    /// POP_MARK.
    PopMark,
    /// DUP.
    Dup,
    /// NONE.
    None,
    /// NEWTRUE, NEWFALSE.
    Bool(bool),
    /// BININT and its short forms.
    Int(i64),
    /// LONG1, LONG4: little-endian two's complement.
    Long(&'a [u8]),
    /// BINFLOAT.
    Float(f64),
    /// INT: also how protocol 1 and older write `True` and `False`.
    IntText(&'a [u8]),
    /// LONG.
    LongText(&'a [u8]),
    /// FLOAT.
    FloatText(&'a [u8]),
    /// Text in UTF-8, and Python 2's strings.
    Str(&'a [u8]),
    /// STRING.
    StringText(&'a [u8]),
    /// UNICODE.
    UnicodeText(&'a [u8]),
    /// Bytes and byte arrays.
    Bytes(&'a [u8]),
    /// EMPTY_TUPLE.
    EmptyTuple,
    /// TUPLE: all since the mark.
    Tuple,
    /// TUPLE1, TUPLE2, TUPLE3.
    TupleOf(usize),
    /// EMPTY_LIST.
    EmptyList,
    /// LIST: all since the mark.
    List,
    /// APPEND.
    Append,
    /// APPENDS.
    Appends,
    /// EMPTY_DICT.
    EmptyDict,
    /// DICT: all since the mark.
    Dict,
    /// SETITEM.
    SetItem,
    /// SETITEMS.
    SetItems,
    /// EMPTY_SET.
    EmptySet,
    /// ADDITEMS.
    AddItems,
    /// FROZENSET: all since the mark.
    FrozenSet,
    /// PUT and its binary forms.
    Put(u32),
    /// MEMOIZE: PUT at the number of entries so far.
    Memoize,
    /// GET and its binary forms.
    Get(u32),
    /// GLOBAL: module and name.
    Global(&'a [u8], &'a [u8]),
    /// STACK_GLOBAL.
    StackGlobal,
    /// REDUCE, NEWOBJ: a callable and its arguments.
    Call,
    /// NEWOBJ_EX: and keyword arguments.
    CallWithKeywords,
    /// INST: module and name; the arguments are all since the mark.
    Inst(&'a [u8], &'a [u8]),
    /// OBJ: the callable and its arguments are all since the mark.
    Obj,
    /// BUILD.
    Build,
    /// PERSID.
    PersistentText(&'a [u8]),
    /// BINPERSID.
    Persistent,
}

/// The bytes hold no whole opcode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DecodeError {
    /// The bytes end inside it: at least so many are needed, its first one included.
    Short(u64),
    /// The bytes are none.
    Bad(PickleErrorKind),
}

impl From<PickleErrorKind> for DecodeError {
    fn from(kind: PickleErrorKind) -> Self {
        Self::Bad(kind)
    }
}

/// Reads the opcode at the first byte; also says how many bytes it takes.
///
/// # Errors
/// [`DecodeError`] where the input ends inside it, or no pickle can hold it.
#[inline]
pub fn decode(input: &[u8]) -> Result<(Op<'_>, usize), DecodeError> {
    let mut cursor = OpReader { input, at: 0 };
    let op = cursor.op()?;
    Ok((op, cursor.at))
}

struct OpReader<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> OpReader<'a> {
    #[inline]
    fn op(&mut self) -> Result<Op<'a>, DecodeError> {
        let [code] = self.array()?;
        Ok(match code {
            b'.' => Op::Stop,
            0x80 => match self.array()? {
                [known @ 0..=5] => Op::Protocol(known),
                [newer] => return Err(PickleErrorKind::UnknownProtocol(newer).into()),
            },
            0x95 => Op::Frame(u64::from_le_bytes(self.array()?)),

            b'(' => Op::Mark,
            b'0' => Op::Pop,
            b'1' => Op::PopMark,
            b'2' => Op::Dup,

            b'N' => Op::None,
            0x88 => Op::Bool(true),
            0x89 => Op::Bool(false),
            b'K' => Op::Int(u8::from_le_bytes(self.array()?).into()),
            b'M' => Op::Int(u16::from_le_bytes(self.array()?).into()),
            b'J' => Op::Int(i32::from_le_bytes(self.array()?).into()),
            0x8a => Op::Long(self.after_u8()?),
            0x8b => Op::Long(self.after_i32()?),
            b'G' => Op::Float(f64::from_be_bytes(self.array()?)),
            b'I' => Op::IntText(self.line()?),
            b'L' => Op::LongText(self.line()?),
            b'F' => Op::FloatText(self.line()?),

            // Python 2 strings: text where they are UTF-8. Surrogates make a Python 3 string invalid UTF-8.
            b'U' | 0x8c => Op::Str(self.after_u8()?),
            b'T' => Op::Str(self.after_i32()?),
            b'X' => Op::Str(self.after_u32()?),
            0x8d => Op::Str(self.after_u64()?),
            b'S' => Op::StringText(self.line()?),
            b'V' => Op::UnicodeText(self.line()?),
            b'C' => Op::Bytes(self.after_u8()?),
            b'B' => Op::Bytes(self.after_u32()?),
            // BINBYTES8, BYTEARRAY8
            0x8e | 0x96 => Op::Bytes(self.after_u64()?),

            b')' => Op::EmptyTuple,
            b't' => Op::Tuple,
            0x85 => Op::TupleOf(1),
            0x86 => Op::TupleOf(2),
            0x87 => Op::TupleOf(3),
            b']' => Op::EmptyList,
            b'l' => Op::List,
            b'a' => Op::Append,
            b'e' => Op::Appends,
            b'}' => Op::EmptyDict,
            b'd' => Op::Dict,
            b's' => Op::SetItem,
            b'u' => Op::SetItems,
            0x8f => Op::EmptySet,
            0x90 => Op::AddItems,
            0x91 => Op::FrozenSet,

            b'p' => Op::Put(self.index_text()?),
            b'q' => Op::Put(u8::from_le_bytes(self.array()?).into()),
            b'r' => Op::Put(u32::from_le_bytes(self.array()?)),
            0x94 => Op::Memoize,
            b'g' => Op::Get(self.index_text()?),
            b'h' => Op::Get(u8::from_le_bytes(self.array()?).into()),
            b'j' => Op::Get(u32::from_le_bytes(self.array()?)),

            b'c' => Op::Global(self.line()?, self.line()?),
            0x93 => Op::StackGlobal,
            b'R' | 0x81 => Op::Call,
            0x92 => Op::CallWithKeywords,
            b'i' => Op::Inst(self.line()?, self.line()?),
            b'o' => Op::Obj,
            b'b' => Op::Build,
            b'P' => Op::PersistentText(self.line()?),
            b'Q' => Op::Persistent,

            0x82 => return Err(PickleErrorKind::OutsideTheFile("EXT1").into()),
            0x83 => return Err(PickleErrorKind::OutsideTheFile("EXT2").into()),
            0x84 => return Err(PickleErrorKind::OutsideTheFile("EXT4").into()),
            0x97 => return Err(PickleErrorKind::OutsideTheFile("NEXT_BUFFER").into()),
            0x98 => return Err(PickleErrorKind::OutsideTheFile("READONLY_BUFFER").into()),
            other => return Err(PickleErrorKind::UnknownOpcode(other).into()),
        })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let rest = self.input.get(self.at..).unwrap_or_default();
        let array = *rest.first_chunk().ok_or(DecodeError::Short((self.at + N) as u64))?;
        self.at += N;
        Ok(array)
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], DecodeError> {
        let short = || DecodeError::Short(len.saturating_add(self.at as u64));
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        let end = end.ok_or_else(short)?;
        let bytes = self.input.get(self.at..end).ok_or_else(short)?;
        self.at = end;
        Ok(bytes)
    }

    fn after_u8(&mut self) -> Result<&'a [u8], DecodeError> {
        let len = u8::from_le_bytes(self.array()?);
        self.take(len.into())
    }

    fn after_u32(&mut self) -> Result<&'a [u8], DecodeError> {
        let len = u32::from_le_bytes(self.array()?);
        self.take(len.into())
    }

    fn after_u64(&mut self) -> Result<&'a [u8], DecodeError> {
        let len = u64::from_le_bytes(self.array()?);
        self.take(len)
    }

    fn after_i32(&mut self) -> Result<&'a [u8], DecodeError> {
        let len = i32::from_le_bytes(self.array()?);
        self.take(u64::try_from(len).map_err(|_| PickleErrorKind::NegativeLength(len))?)
    }

    fn line(&mut self) -> Result<&'a [u8], DecodeError> {
        let rest = self.input.get(self.at..).unwrap_or_default();
        let end = rest.iter().position(|&byte| byte == b'\n');
        let len = end.ok_or(DecodeError::Short(self.input.len() as u64 + 1))?;
        self.at += len + 1;
        Ok(&rest[..len])
    }

    fn index_text(&mut self) -> Result<u32, DecodeError> {
        let text = str::from_utf8(self.line()?).ok();
        let index = text.and_then(|text| text.parse().ok());
        Ok(index.ok_or(PickleErrorKind::BadText("a memo index"))?)
    }
}
