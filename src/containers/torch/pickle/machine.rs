//! The state of the pickle machine: input, stack, marks and memo, and the steps that several opcodes share.

use std::collections::HashMap;

use super::super::value::{Value, ValueId, Values};
use super::{DecodeError, Op, PickleErrorKind, PickleResult, decode, literal};
use crate::base::limits::{Limits, OverLimit};

pub(super) struct PickleMachine<'a> {
    input: &'a [u8],
    pub(super) at: usize,
    pub(super) values: Values,
    pub(super) stack: Vec<ValueId>,
    /// Stack heights at which a MARK was set.
    marks: Vec<u32>,
    pub(super) memo: Memo,
    limits: Limits,
    pushed: usize,
}

impl<'a> PickleMachine<'a> {
    pub(super) fn new(input: &'a [u8], limits: &Limits) -> Self {
        Self {
            input,
            at: 0,
            values: Values::with_limit(limits.pickle_values),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
            limits: *limits,
            pushed: 0,
        }
    }
}

/// Input.
impl<'a> PickleMachine<'a> {
    pub(super) fn op(&mut self) -> PickleResult<Op<'a>> {
        let rest = self.input.get(self.at..).unwrap_or_default();
        match decode(rest) {
            Ok((op, len)) => {
                self.at += len;
                Ok(op)
            }
            Err(DecodeError::Short(_)) => Err(PickleErrorKind::UnexpectedEnd),
            Err(DecodeError::Bad(kind)) => Err(kind),
        }
    }

    /// Refuses a frame that announces more bytes than there are.
    pub(super) fn check_frame(&self, len: u64) -> PickleResult {
        let rest = self.input.len() - self.at;
        if len > rest as u64 { Err(PickleErrorKind::UnexpectedEnd) } else { Ok(()) }
    }
}

/// Stack and memo.
impl PickleMachine<'_> {
    pub(super) fn push(&mut self, id: ValueId) -> PickleResult {
        self.pushed += 1;
        let limit = self.limits.pickle_values.saturating_mul(self.limits.pickle_references);
        if self.pushed > limit {
            return Err(OverLimit::new("references", limit as u64).into());
        }
        let limit = self.limits.pickle_values;
        if self.stack.len() >= limit {
            return Err(OverLimit::new("values on its stack", limit as u64).into());
        }
        self.stack.push(id);
        Ok(())
    }

    /// The height below which values belong to an outer mark.
    pub(super) fn floor(&self) -> usize {
        self.marks.last().map_or(0, |&height| height as usize)
    }

    pub(super) fn top(&self) -> PickleResult<ValueId> {
        match self.stack.last() {
            Some(&top) if self.stack.len() > self.floor() => Ok(top),
            _ => Err(PickleErrorKind::StackUnderflow),
        }
    }

    pub(super) fn pop(&mut self) -> PickleResult<ValueId> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    pub(super) fn mark(&mut self) -> PickleResult {
        let limit = self.limits.pickle_values;
        let full = OverLimit::new("marks", limit as u64);
        if self.marks.len() >= limit {
            return Err(full.into());
        }
        self.marks.push(u32::try_from(self.stack.len()).map_err(|_| full)?);
        Ok(())
    }

    /// Takes the last mark away and says at which height of the stack it was.
    pub(super) fn pop_mark(&mut self) -> PickleResult<usize> {
        self.marks.pop().map(|height| height as usize).ok_or(PickleErrorKind::NoMark)
    }

    /// POP takes the mark where no value is above it, as CPython does.
    pub(super) fn pop_value_or_mark(&mut self) -> PickleResult {
        if self.stack.len() > self.floor() {
            self.stack.pop();
            Ok(())
        } else {
            self.pop_mark().map(|_| ()).map_err(|_| PickleErrorKind::StackUnderflow)
        }
    }

    /// The container below the last mark, and where its new members begin.
    pub(super) fn target_below_mark(&mut self) -> PickleResult<(ValueId, usize)> {
        let start = self.pop_mark()?;
        match start.checked_sub(1).and_then(|below| self.stack.get(below)) {
            Some(&target) if start > self.floor() => Ok((target, start)),
            _ => Err(PickleErrorKind::StackUnderflow),
        }
    }

    /// Puts one value in the place of all from `start` on.
    pub(super) fn replace(&mut self, start: usize, with: ValueId) -> PickleResult {
        self.stack.truncate(start);
        self.push(with)
    }

    pub(super) fn put(&mut self, index: u32) -> PickleResult {
        let top = self.top()?;
        self.memo.put(index, top, self.at);
        Ok(())
    }

    pub(super) fn fetch(&mut self, index: u32) -> PickleResult {
        let id = self.memo.get(index).ok_or(PickleErrorKind::MissingMemo(index))?;
        self.push(id)
    }

    pub(super) fn mismatch(&self, wanted: &'static str, found: ValueId) -> PickleErrorKind {
        PickleErrorKind::TypeMismatch { wanted, found: self.values.get(found).type_name() }
    }
}

/// Values.
impl PickleMachine<'_> {
    pub(super) fn push_int(&mut self, value: i64) -> PickleResult {
        let id = self.values.new_int(value)?;
        self.push(id)
    }

    /// INT: also how protocol 1 and older write `True` and `False`.
    pub(super) fn int_text(&mut self, line: &[u8]) -> PickleResult {
        match line {
            b"00" => self.push(self.values.new_bool(false)),
            b"01" => self.push(self.values.new_bool(true)),
            digits => self.digits(digits),
        }
    }

    /// LONG: the digits may end in Python 2's `L`.
    pub(super) fn long_text(&mut self, line: &[u8]) -> PickleResult {
        self.digits(line.strip_suffix(b"L").unwrap_or(line))
    }

    pub(super) fn digits(&mut self, digits: &[u8]) -> PickleResult {
        let bytes = literal::integer(digits).ok_or(PickleErrorKind::BadText("an integer"))?;
        let id = self.values.new_long(&bytes)?;
        self.push(id)
    }

    pub(super) fn float_text(&mut self, line: &[u8]) -> PickleResult {
        let value = str::from_utf8(line).ok().and_then(|text| text.parse().ok());
        let id = self.values.new_float(value.ok_or(PickleErrorKind::BadText("a float"))?)?;
        self.push(id)
    }

    pub(super) fn string_text(&mut self, line: &[u8]) -> PickleResult {
        let bytes = literal::quoted(line).ok_or(PickleErrorKind::BadText("a string"))?;
        let id = self.values.new_str(&bytes)?;
        self.push(id)
    }

    pub(super) fn unicode_text(&mut self, line: &[u8]) -> PickleResult {
        let bytes =
            literal::raw_unicode(line).ok_or(PickleErrorKind::BadText("a unicode string"))?;
        let id = self.values.new_str(&bytes)?;
        self.push(id)
    }

    pub(super) fn tuple(&mut self, start: usize) -> PickleResult {
        let tuple = self.values.new_tuple(&self.stack[start..])?;
        self.replace(start, tuple)
    }

    pub(super) fn tuple_of(&mut self, len: usize) -> PickleResult {
        match self.stack.len().checked_sub(len) {
            Some(start) if start >= self.floor() => self.tuple(start),
            _ => Err(PickleErrorKind::StackUnderflow),
        }
    }

    /// Moves the keys and values from `start` on into a dict.
    pub(super) fn set_items(&mut self, dict: ValueId, start: usize) -> PickleResult {
        let (pairs, rest) = self.stack[start..].as_chunks::<2>();
        if !rest.is_empty() {
            return Err(PickleErrorKind::OddItems);
        }
        match self.values.items_of(dict) {
            Some(items) => items.extend(pairs.iter().map(|&[key, value]| (key, value))),
            None => return Err(self.mismatch("a dict", dict)),
        }
        self.stack.truncate(start);
        Ok(())
    }

    pub(super) fn global_text(&mut self, module: &[u8], name: &[u8]) -> PickleResult<ValueId> {
        let module = self.values.new_str(module)?;
        let name = self.values.new_str(name)?;
        self.global(module, name)
    }

    pub(super) fn global(&mut self, module: ValueId, name: ValueId) -> PickleResult<ValueId> {
        self.values.new_global(module, name)?.ok_or(PickleErrorKind::BadText("the name of a class"))
    }

    /// Records a call of what is on top of the stack.
    pub(super) fn call(&mut self, args: ValueId, kwargs: Option<ValueId>) -> PickleResult {
        let callable = self.pop()?;
        self.check_callable(callable)?;
        if !matches!(self.values.get(args), Value::Tuple(_)) {
            return Err(self.mismatch("a tuple of arguments", args));
        }
        if let Some(kwargs) = kwargs
            && !matches!(self.values.get(kwargs), Value::Dict(_))
        {
            return Err(self.mismatch("a dict of keyword arguments", kwargs));
        }
        let object = self.values.new_call(callable, args, kwargs)?;
        self.push(object)
    }

    pub(super) fn check_callable(&self, id: ValueId) -> PickleResult {
        match self.values.get(id) {
            Value::Global { .. } | Value::Call(_) | Value::Persistent(_) => Ok(()),
            _ => Err(self.mismatch("a class or function", id)),
        }
    }
}

/// Python numbers memo entries from 0 or 1 on, so they go in a plain list; an index that is ahead of
/// that can only be a forged or hand-made one and must not make the list long.
#[derive(Default)]
pub(super) struct Memo {
    dense: Vec<Option<ValueId>>,
    sparse: HashMap<u32, ValueId>,
    count: u32,
}

impl Memo {
    pub(super) fn get(&self, index: u32) -> Option<ValueId> {
        match self.dense.get(index as usize) {
            Some(&Some(id)) => Some(id),
            _ => self.sparse.get(&index).copied(),
        }
    }

    /// `at` is the position in the input: a writer that counts entries is never ahead of it.
    pub(super) fn put(&mut self, index: u32, id: ValueId, at: usize) {
        let slot = index as usize;
        if slot >= self.dense.len() && slot <= at {
            self.dense.resize(slot + 1, None);
        }
        let before = match self.dense.get_mut(slot) {
            // An entry that was too far ahead when it was first made stays where it is looked up last.
            Some(entry) => entry.replace(id).or(self.sparse.remove(&index)),
            None => self.sparse.insert(index, id),
        };
        if before.is_none() {
            self.count = self.count.saturating_add(1);
        }
    }

    /// MEMOIZE takes the number of entries so far.
    pub(super) fn next_index(&self) -> u32 {
        self.count
    }
}
