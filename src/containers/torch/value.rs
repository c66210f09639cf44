//! What a pickle describes, as plain data: an arena of values that name each other by id.
//!
//! A value is stored once however often it is referred to, so identity is kept, cycles need no care,
//! nothing can be blown up by references to references, and dropping the arena is flat.
//! Calls and globals are only recorded; nothing is ever looked up or run.

use std::num::NonZeroU32;

use crate::base::limits::{LIMITS, OverLimit};

/// One value of a [`Values`] arena. Two equal ids are one and the same Python object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(NonZeroU32);

impl ValueId {
    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// A value as it is read from the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer that fits 64 bits.
    Int(i64),
    /// Any other integer: little-endian two's complement, as short as it can be.
    BigInt(&'a [u8]),
    /// A floating point number.
    Float(f64),
    /// Text. Python strings with lone surrogates are [`Value::Bytes`] (in UTF-8's manner).
    Str(&'a str),
    /// `bytes`, a protocol 5 `bytearray`, or a Python 2 string that is not UTF-8.
    Bytes(&'a [u8]),
    /// A tuple.
    Tuple(&'a [ValueId]),
    /// A list.
    List(&'a [ValueId]),
    /// A dict: pairs in the order of insertion, with repeated keys where the pickle repeats them.
    Dict(&'a [(ValueId, ValueId)]),
    /// A set.
    Set(&'a [ValueId]),
    /// A frozen set.
    FrozenSet(&'a [ValueId]),
    /// A class, a function or another thing that the pickle only names.
    Global {
        /// Dotted module path, as written.
        module: &'a str,
        /// Name in that module, possibly dotted.
        name: &'a str,
    },
    /// An object that Python would make by a call.
    Call(Call<'a>),
    /// A reference to something outside the pickle, by the id that the writer chose for it.
    Persistent(ValueId),
}

impl Value<'_> {
    /// Python's name of the type, for messages.
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "bool",
            Value::Int(_) | Value::BigInt(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::Bytes(_) => "bytes",
            Value::Tuple(_) => "tuple",
            Value::List(_) => "list",
            Value::Dict(_) => "dict",
            Value::Set(_) => "set",
            Value::FrozenSet(_) => "frozenset",
            Value::Global { .. } => "global",
            Value::Call(_) => "object",
            Value::Persistent(_) => "persistent id",
        }
    }
}

/// An object made by REDUCE, NEWOBJ, NEWOBJ_EX, OBJ or INST, and what was done to it afterwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Call<'a> {
    /// The class or function: a global, a persistent id or another call.
    pub callable: ValueId,
    /// The arguments: a tuple.
    pub args: ValueId,
    /// The keyword arguments of NEWOBJ_EX: a dict.
    pub kwargs: Option<ValueId>,
    /// The argument of BUILD, usually the object's `__dict__`.
    pub state: Option<ValueId>,
    /// The items that SETITEM and SETITEMS stored.
    pub items: &'a [(ValueId, ValueId)],
    /// The members that APPEND, APPENDS and ADDITEMS added.
    pub appends: &'a [ValueId],
}

#[derive(Debug, Clone, Copy)]
struct Span {
    start: u32,
    len: u32,
}

/// 16 bytes, since pickles of large runs hold tens of millions.
#[derive(Debug, Clone, Copy)]
enum ValueSlot {
    None,
    Bool(bool),
    Int(i64),
    BigInt(Span),
    Float(f64),
    Str(Span),
    Bytes(Span),
    Tuple(Span),
    FrozenSet(Span),
    List(u32),
    Set(u32),
    Dict(u32),
    Global { module: ValueId, name: ValueId },
    Call(u32),
    Persistent(ValueId),
}

#[derive(Debug)]
struct CallSlot {
    callable: ValueId,
    args: ValueId,
    kwargs: Option<ValueId>,
    state: Option<ValueId>,
    /// Few calls have contents.
    contents: Option<Box<Contents>>,
}

#[derive(Debug, Default)]
struct Contents {
    items: Vec<(ValueId, ValueId)>,
    appends: Vec<ValueId>,
}

/// The values of one pickle.
#[derive(Debug)]
pub struct Values {
    slots: Vec<ValueSlot>,
    /// All text, then all bytes, then the members of all immutable containers, one behind another.
    text: String,
    raw: Vec<u8>,
    members: Vec<ValueId>,
    /// Containers that can still grow.
    lists: Vec<Vec<ValueId>>,
    dicts: Vec<Vec<(ValueId, ValueId)>>,
    calls: Vec<CallSlot>,
    limit: usize,
}

/// Values that need no slot of their own: `None`, `False`, `True`, `()`, and the integers 0 to 255.
const SHARED: usize = 4 + 256;

impl Values {
    /// An arena for at most `limit` values.
    pub(super) fn with_limit(limit: usize) -> Self {
        let mut slots = Vec::with_capacity(SHARED);
        slots.extend([ValueSlot::None, ValueSlot::Bool(false), ValueSlot::Bool(true)]);
        slots.push(ValueSlot::Tuple(Span { start: 0, len: 0 }));
        slots.extend((0..256).map(ValueSlot::Int));
        Self {
            slots,
            text: String::new(),
            raw: Vec::new(),
            members: Vec::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            calls: Vec::new(),
            limit,
        }
    }

    /// The value behind an id of this arena.
    #[must_use]
    pub fn get(&self, id: ValueId) -> Value<'_> {
        match self.slots[id.index()] {
            ValueSlot::None => Value::None,
            ValueSlot::Bool(value) => Value::Bool(value),
            ValueSlot::Int(value) => Value::Int(value),
            ValueSlot::BigInt(span) => Value::BigInt(slice(&self.raw, span)),
            ValueSlot::Float(value) => Value::Float(value),
            ValueSlot::Str(span) => Value::Str(self.text(span)),
            ValueSlot::Bytes(span) => Value::Bytes(slice(&self.raw, span)),
            ValueSlot::Tuple(span) => Value::Tuple(slice(&self.members, span)),
            ValueSlot::FrozenSet(span) => Value::FrozenSet(slice(&self.members, span)),
            ValueSlot::List(index) => Value::List(&self.lists[index as usize]),
            ValueSlot::Set(index) => Value::Set(&self.lists[index as usize]),
            ValueSlot::Dict(index) => Value::Dict(&self.dicts[index as usize]),
            ValueSlot::Global { module, name } => {
                Value::Global { module: self.str(module), name: self.str(name) }
            }
            ValueSlot::Call(index) => Value::Call(self.call(&self.calls[index as usize])),
            ValueSlot::Persistent(id) => Value::Persistent(id),
        }
    }

    /// Number of references from all values to others: those of a tree without sharing are as many as its values.
    #[must_use]
    pub fn references(&self) -> usize {
        let contents = self.calls.iter().filter_map(|call| call.contents.as_deref());
        let of_calls = contents.map(|contents| contents.items.len() + contents.appends.len());
        let of_lists = self.lists.iter().map(Vec::len);
        let of_dicts = self.dicts.iter().map(Vec::len);
        let grown: usize = of_calls.chain(of_lists).chain(of_dicts).sum();
        // A call refers to its state, too.
        self.members.len() + grown + self.calls.len()
    }

    /// All ids, in the order in which the pickle made the values.
    pub fn ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.slots.len()).filter_map(id_of)
    }

    fn text(&self, span: Span) -> &str {
        &self.text[span.start as usize..span.start as usize + span.len as usize]
    }

    /// The text of a value that was checked to be text when it was stored.
    fn str(&self, id: ValueId) -> &str {
        match self.slots[id.index()] {
            ValueSlot::Str(span) => self.text(span),
            _ => "",
        }
    }

    fn call<'a>(&'a self, slot: &'a CallSlot) -> Call<'a> {
        let CallSlot { callable, args, kwargs, state, .. } = *slot;
        let (items, appends) = slot
            .contents
            .as_deref()
            .map_or((&[][..], &[][..]), |contents| (&contents.items, &contents.appends));
        Call { callable, args, kwargs, state, items, appends }
    }

    fn add(&mut self, slot: ValueSlot) -> Result<ValueId, OverLimit> {
        let used = self.slots.len();
        let full = OverLimit::new("values", self.limit as u64);
        if used - SHARED >= self.limit {
            return Err(full);
        }
        let id = id_of(used).ok_or(full)?;
        self.slots.push(slot);
        Ok(id)
    }
}

/// The side of the arena that the pickle machine fills.
impl Values {
    pub(super) fn new_none(&self) -> ValueId {
        shared(0)
    }

    pub(super) fn new_bool(&self, value: bool) -> ValueId {
        shared(1 + u32::from(value))
    }

    pub(super) fn new_empty_tuple(&self) -> ValueId {
        shared(3)
    }

    pub(super) fn new_int(&mut self, value: i64) -> Result<ValueId, OverLimit> {
        match u8::try_from(value) {
            Ok(small) => Ok(shared(4 + u32::from(small))),
            Err(_) => self.add(ValueSlot::Int(value)),
        }
    }

    /// An integer from little-endian two's complement.
    pub(super) fn new_long(&mut self, bytes: &[u8]) -> Result<ValueId, OverLimit> {
        let bytes = without_sign_padding(bytes);
        let fill = if bytes.last().is_some_and(|&top| top >= 0x80) { 0xff } else { 0 };
        let mut word = [fill; 8];
        if let Some(low) = word.get_mut(..bytes.len()) {
            low.copy_from_slice(bytes);
            return self.new_int(i64::from_le_bytes(word));
        }
        let span = self.raw_span(bytes)?;
        self.add(ValueSlot::BigInt(span))
    }

    pub(super) fn new_float(&mut self, value: f64) -> Result<ValueId, OverLimit> {
        self.add(ValueSlot::Float(value))
    }

    /// Text where the bytes are UTF-8, bytes otherwise.
    pub(super) fn new_str(&mut self, bytes: &[u8]) -> Result<ValueId, OverLimit> {
        let Ok(text) = str::from_utf8(bytes) else { return self.new_bytes(bytes) };
        let span = span_at(self.text.len(), text.len(), "bytes of text")?;
        self.text.push_str(text);
        self.add(ValueSlot::Str(span))
    }

    pub(super) fn new_bytes(&mut self, bytes: &[u8]) -> Result<ValueId, OverLimit> {
        let span = self.raw_span(bytes)?;
        self.add(ValueSlot::Bytes(span))
    }

    fn raw_span(&mut self, bytes: &[u8]) -> Result<Span, OverLimit> {
        let span = span_at(self.raw.len(), bytes.len(), "bytes of bytes objects")?;
        self.raw.extend_from_slice(bytes);
        Ok(span)
    }

    pub(super) fn new_tuple(&mut self, members: &[ValueId]) -> Result<ValueId, OverLimit> {
        if members.is_empty() {
            return Ok(self.new_empty_tuple());
        }
        let span = self.member_span(members)?;
        self.add(ValueSlot::Tuple(span))
    }

    pub(super) fn new_frozen_set(&mut self, members: &[ValueId]) -> Result<ValueId, OverLimit> {
        let span = self.member_span(members)?;
        self.add(ValueSlot::FrozenSet(span))
    }

    fn member_span(&mut self, members: &[ValueId]) -> Result<Span, OverLimit> {
        let span = span_at(self.members.len(), members.len(), "tuple members")?;
        self.members.extend_from_slice(members);
        Ok(span)
    }

    pub(super) fn new_list(&mut self, members: &[ValueId]) -> Result<ValueId, OverLimit> {
        let index = index_of(&self.lists)?;
        self.lists.push(members.to_vec());
        self.add(ValueSlot::List(index))
    }

    pub(super) fn new_set(&mut self) -> Result<ValueId, OverLimit> {
        let index = index_of(&self.lists)?;
        self.lists.push(Vec::new());
        self.add(ValueSlot::Set(index))
    }

    pub(super) fn new_dict(&mut self) -> Result<ValueId, OverLimit> {
        let index = index_of(&self.dicts)?;
        self.dicts.push(Vec::new());
        self.add(ValueSlot::Dict(index))
    }

    /// A name that is not imported; both parts must be text, or the answer is `None`.
    pub(super) fn new_global(
        &mut self,
        module: ValueId,
        name: ValueId,
    ) -> Result<Option<ValueId>, OverLimit> {
        let is_text = |id: ValueId| matches!(self.slots[id.index()], ValueSlot::Str(_));
        if !is_text(module) || !is_text(name) {
            return Ok(None);
        }
        self.add(ValueSlot::Global { module, name }).map(Some)
    }

    pub(super) fn new_call(
        &mut self,
        callable: ValueId,
        args: ValueId,
        kwargs: Option<ValueId>,
    ) -> Result<ValueId, OverLimit> {
        let index = index_of(&self.calls)?;
        self.calls.push(CallSlot { callable, args, kwargs, state: None, contents: None });
        self.add(ValueSlot::Call(index))
    }

    pub(super) fn new_persistent(&mut self, id: ValueId) -> Result<ValueId, OverLimit> {
        self.add(ValueSlot::Persistent(id))
    }

    /// The list that takes appended members of a list or an object.
    pub(super) fn appends_of(&mut self, id: ValueId) -> Option<&mut Vec<ValueId>> {
        match self.slots[id.index()] {
            ValueSlot::List(index) => Some(&mut self.lists[index as usize]),
            ValueSlot::Call(index) => Some(&mut self.contents_of(index).appends),
            _ => None,
        }
    }

    /// The list that takes added members of a set or an object.
    pub(super) fn additions_of(&mut self, id: ValueId) -> Option<&mut Vec<ValueId>> {
        match self.slots[id.index()] {
            ValueSlot::Set(index) => Some(&mut self.lists[index as usize]),
            ValueSlot::Call(index) => Some(&mut self.contents_of(index).appends),
            _ => None,
        }
    }

    /// The list that takes items of a dict or an object.
    pub(super) fn items_of(&mut self, id: ValueId) -> Option<&mut Vec<(ValueId, ValueId)>> {
        match self.slots[id.index()] {
            ValueSlot::Dict(index) => Some(&mut self.dicts[index as usize]),
            ValueSlot::Call(index) => Some(&mut self.contents_of(index).items),
            _ => None,
        }
    }

    /// The place that takes the state of an object.
    pub(super) fn state_of(&mut self, id: ValueId) -> Option<&mut Option<ValueId>> {
        match self.slots[id.index()] {
            ValueSlot::Call(index) => Some(&mut self.calls[index as usize].state),
            _ => None,
        }
    }

    fn contents_of(&mut self, call: u32) -> &mut Contents {
        self.calls[call as usize].contents.get_or_insert_default()
    }
}

fn slice<T>(all: &[T], span: Span) -> &[T] {
    &all[span.start as usize..span.start as usize + span.len as usize]
}

fn id_of(index: usize) -> Option<ValueId> {
    let number = u32::try_from(index).ok()?.checked_add(1)?;
    NonZeroU32::new(number).map(ValueId)
}

/// The id of one of the [`SHARED`] values.
fn shared(index: u32) -> ValueId {
    ValueId(NonZeroU32::MIN.saturating_add(index))
}

fn span_at(start: usize, len: usize, what: &'static str) -> Result<Span, OverLimit> {
    let full = OverLimit::new(what, u32::MAX.into());
    let end = start.checked_add(len).ok_or(full)?;
    match (u32::try_from(start), u32::try_from(len), u32::try_from(end)) {
        (Ok(start), Ok(len), Ok(_)) => Ok(Span { start, len }),
        _ => Err(full),
    }
}

fn index_of<T>(all: &[T]) -> Result<u32, OverLimit> {
    let limit = LIMITS.pickle_containers;
    let index = u32::try_from(all.len()).ok().filter(|_| all.len() < limit);
    index.ok_or(OverLimit::new("lists, dicts or objects", limit as u64))
}

/// Two's complement without the top bytes that only repeat the sign.
fn without_sign_padding(mut bytes: &[u8]) -> &[u8] {
    while let [rest @ .., below, top] = bytes {
        let repeats = (*top == 0 && *below < 0x80) || (*top == 0xff && *below >= 0x80);
        if !repeats {
            break;
        }
        bytes = &bytes[..rest.len() + 1];
    }
    bytes
}
