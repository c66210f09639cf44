//! Runs the opcodes of a `.metadata` and keeps only what its own classes are made of.
//!
//! A value is small and immutable, an entry in a table of lists and dicts, or an object of a known class, which becomes a
//! [`Record`] when BUILD gives it its state. All else is opaque: it takes a place on the stack and swallows what
//! is put into it. A list or dict is given back when its only owner is; the memo keeps what [`MemoPlan`] wants. So memory
//! follows what a checkpoint has of tensors and chunks, not what else lies in the file (save plans of all ranks).
//! Nothing is looked up or called: a class is a name to compare with eight others.

use std::cell::OnceCell;
use std::collections::{BTreeSet, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use super::plans::PlansRange;
use super::record::{Class, Record};
use crate::base::limits::{LIMITS, OverLimit};
use crate::containers::torch::globals::GlobalScan;
use crate::containers::torch::pickle::stream::{MemoPlan, Next, StreamError, each_op};
use crate::containers::torch::pickle::{Op, PickleErrorKind, PickleResult};
use crate::storage::{FileSet, Region};

/// A value of the pickle, as much of it as matters.
#[derive(Debug, Clone)]
pub(super) enum MetadataValue {
    /// Anything else.
    Opaque,
    None,
    Int(u64),
    Text(Arc<str>),
    /// A tuple of counts, a `torch.Size`.
    Numbers(Arc<[u64]>),
    /// Any other tuple, with no tuple in it but of counts.
    Tuple(Rc<[Self]>),
    /// A known class.
    Class(Class),
    /// An attribute of the `torch` module, such as a dtype.
    Torch(Arc<str>),
    /// Its index in the machine's table.
    List(usize),
    Dict(usize),
    Object(Rc<Object>),
    /// The dict of `planner_data`: names and their paths in the nested state dict.
    Planned,
}

/// An instance of a known class.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) class: Class,
    /// The record that BUILD made of it.
    pub(super) record: OnceCell<Record>,
}

impl MetadataValue {
    pub(super) fn record(&self) -> Option<&Record> {
        match self {
            Self::Object(object) => object.record.get(),
            _ => None,
        }
    }

    pub(super) fn text(&self) -> Option<&Arc<str>> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn numbers(&self) -> Option<&Arc<[u64]>> {
        match self {
            Self::Numbers(numbers) => Some(numbers),
            _ => None,
        }
    }

    pub(super) fn count(&self) -> Option<u64> {
        match self {
            Self::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// The class of an object.
    pub(super) fn class(&self) -> Option<Class> {
        match self {
            Self::Object(object) => Some(object.class),
            _ => None,
        }
    }
}

/// Keys and values in turn, or the members of a list.
#[derive(Debug, Default)]
struct ListOrDict {
    members: Vec<MetadataValue>,
    /// Something else than its one owner knows it.
    is_shared: bool,
}

pub(super) struct MetadataMachine {
    stack: Vec<MetadataValue>,
    /// Stack heights at which a MARK was set.
    marks: Vec<usize>,
    plan: MemoPlan,
    memo: Vec<Option<MetadataValue>>,
    memoized: u32,
    containers: Vec<ListOrDict>,
    /// Containers that can be used again.
    free: Vec<usize>,
    texts: HashSet<Arc<str>>,
    numbers: HashSet<Arc<[u64]>>,
    /// Bytes of all different texts and numbers.
    interned: usize,
    /// Dotted names of the outer dicts of the state dict.
    parents: Option<BTreeSet<Arc<str>>>,
    /// Keys of `planner_data`.
    planned: Vec<Arc<str>>,
    /// Values in containers.
    members: usize,
    /// Values copied from containers with several owners.
    copied: usize,
}

/// Reads the pickle that starts the region; gives the value that it describes and the containers it refers to.
pub(super) fn run(
    files: &FileSet,
    region: Region,
) -> Result<(MetadataValue, MetadataMachine), StreamError> {
    let mut plans = PlansRange::default();
    let mut globals = GlobalScan::default();
    let plan = MemoPlan::of(files, region, |at, op| {
        plans.look(at, op);
        globals.see(op);
    })?;
    files.note_globals(region, globals.into_foreign());
    let plans = plans.found();
    let mut machine = MetadataMachine {
        stack: Vec::new(),
        marks: Vec::new(),
        plan,
        memo: Vec::new(),
        memoized: 0,
        containers: Vec::new(),
        free: Vec::new(),
        texts: HashSet::new(),
        numbers: HashSet::new(),
        interned: 0,
        parents: None,
        planned: Vec::new(),
        members: 0,
        copied: 0,
    };
    let root = each_op(files, region, |at, op| match plans {
        Some((start, end)) if at == start => {
            machine.push(MetadataValue::Opaque)?;
            Ok(Next::At(end))
        }
        _ => machine.step(op),
    })?;
    machine.memo = Vec::new();
    Ok((root, machine))
}

/// Taking a container's members, and giving it back.
impl MetadataMachine {
    /// Takes the members of a list, or the keys and values of a dict in turn; none of anything else.
    /// The container is given back, so its value must be the only one, and goes with it.
    #[expect(clippy::needless_pass_by_value, reason = "the container goes with its value")]
    pub(super) fn take_members(&mut self, value: MetadataValue) -> Vec<MetadataValue> {
        let (MetadataValue::List(at) | MetadataValue::Dict(at)) = value else { return Vec::new() };
        let container = &mut self.containers[at];
        if container.is_shared {
            // No writer shares one; who does so without end gets nothing.
            self.copied = self.copied.saturating_add(container.members.len());
            let is_little = self.copied <= LIMITS.metadata_values;
            return if is_little { container.members.clone() } else { Vec::new() };
        }
        let members = std::mem::take(&mut container.members);
        self.members -= members.len();
        self.free.push(at);
        members
    }

    /// Takes the items of a dict; none of anything else.
    pub(super) fn take_items(
        &mut self,
        value: MetadataValue,
    ) -> Vec<(MetadataValue, MetadataValue)> {
        let mut members = self.take_members(value).into_iter();
        let mut items = Vec::with_capacity(members.len() / 2);
        while let (Some(key), Some(value)) = (members.next(), members.next()) {
            items.push((key, value));
        }
        items
    }

    /// Gives back all that only this value owns.
    pub(super) fn release(&mut self, value: MetadataValue) {
        let mut doomed = vec![value];
        while let Some(value) = doomed.pop() {
            if let MetadataValue::List(at) | MetadataValue::Dict(at) = value
                && !self.containers[at].is_shared
            {
                doomed.append(&mut self.take_members(value));
            }
        }
    }

    fn release_from(&mut self, start: usize) {
        for value in self.stack.split_off(start) {
            self.release(value);
        }
    }

    fn new_container(&mut self) -> usize {
        if let Some(at) = self.free.pop() {
            return at;
        }
        self.containers.push(ListOrDict::default());
        self.containers.len() - 1
    }
}

/// Stack.
impl MetadataMachine {
    fn push(&mut self, value: MetadataValue) -> PickleResult {
        let limit = LIMITS.metadata_values;
        if self.stack.len() + self.members >= limit {
            return Err(OverLimit::new("values at a time", limit as u64).into());
        }
        self.stack.push(value);
        Ok(())
    }

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> PickleResult<MetadataValue> {
        if self.stack.len() > self.floor()
            && let Some(value) = self.stack.pop()
        {
            return Ok(value);
        }
        Err(PickleErrorKind::StackUnderflow)
    }

    fn top(&self) -> PickleResult<&MetadataValue> {
        let top = self.stack.last().filter(|_| self.stack.len() > self.floor());
        top.ok_or(PickleErrorKind::StackUnderflow)
    }

    fn mark(&mut self) -> PickleResult {
        let limit = LIMITS.metadata_values;
        if self.marks.len() >= limit {
            return Err(OverLimit::new("marks", limit as u64).into());
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn pop_mark(&mut self) -> PickleResult<usize> {
        self.marks.pop().ok_or(PickleErrorKind::NoMark)
    }

    /// Moves what lies above `start` into the container below it. Keys and values come in pairs.
    fn fill(&mut self, start: usize, is_dict: bool) -> PickleResult {
        let target = start.checked_sub(1).filter(|_| start > self.floor());
        let target = target.ok_or(PickleErrorKind::StackUnderflow)?;
        if is_dict && !(self.stack.len() - start).is_multiple_of(2) {
            return Err(PickleErrorKind::OddItems);
        }
        match (&self.stack[target], is_dict) {
            (&MetadataValue::List(at), false) | (&MetadataValue::Dict(at), true) => {
                let members = self.stack.drain(start..);
                self.members += members.len();
                self.containers[at].members.extend(members);
            }
            (MetadataValue::Planned, true) => {
                for member in self.stack.split_off(start) {
                    // Kept once with the names that are described.
                    self.planned.extend(member.text().cloned());
                    self.add_parents(&member)?;
                    self.release(member);
                }
            }
            // An object that is filled is none of those that matter.
            (MetadataValue::Opaque | MetadataValue::Object(_), _) => self.release_from(start),
            _ => {
                let wanted = if is_dict { "a dict" } else { "a list" };
                return Err(PickleErrorKind::TypeMismatch { wanted, found: "something else" });
            }
        }
        Ok(())
    }
}

/// Opcodes.
impl MetadataMachine {
    fn step(&mut self, op: Op<'_>) -> PickleResult<Next<MetadataValue>> {
        match op {
            Op::Stop => return self.pop().map(Next::End),
            Op::Protocol(_) | Op::Frame(_) => {}

            Op::Mark => self.mark()?,
            Op::Pop if self.stack.len() > self.floor() => {
                let value = self.pop()?;
                self.release(value);
            }
            Op::Pop => drop(self.pop_mark()?),
            Op::PopMark => {
                let start = self.pop_mark()?;
                self.release_from(start);
            }
            Op::Dup => {
                let top = self.top()?.clone();
                self.share(&top);
                self.push(top)?;
            }

            Op::None => self.push(MetadataValue::None)?,
            Op::Int(number) => {
                self.push(u64::try_from(number).map_or(MetadataValue::Opaque, MetadataValue::Int))?;
            }
            Op::Long(bytes) => {
                self.push(unsigned(bytes).map_or(MetadataValue::Opaque, MetadataValue::Int))?;
            }
            Op::Str(bytes) => {
                let text = self.text(bytes)?;
                self.push(text)?;
            }
            Op::Bool(_)
            | Op::Float(_)
            | Op::IntText(_)
            | Op::LongText(_)
            | Op::FloatText(_)
            | Op::StringText(_)
            | Op::UnicodeText(_)
            | Op::Bytes(_)
            | Op::EmptySet
            | Op::PersistentText(_) => self.push(MetadataValue::Opaque)?,

            Op::EmptyTuple => {
                let none = self.intern(&[])?;
                self.push(none)?;
            }
            Op::Tuple => {
                let start = self.pop_mark()?;
                self.tuple(start)?;
            }
            Op::TupleOf(len) => {
                let start =
                    self.stack.len().checked_sub(len).filter(|start| *start >= self.floor());
                self.tuple(start.ok_or(PickleErrorKind::StackUnderflow)?)?;
            }
            Op::EmptyList => self.push_container(MetadataValue::List)?,
            Op::EmptyDict => self.push_container(MetadataValue::Dict)?,
            Op::Append => self.fill(self.stack.len().saturating_sub(1), false)?,
            Op::SetItem => self.fill(self.stack.len().saturating_sub(2), true)?,
            Op::Appends | Op::AddItems => {
                let start = self.pop_mark()?;
                self.fill(start, false)?;
            }
            Op::SetItems => {
                let start = self.pop_mark()?;
                self.fill(start, true)?;
            }
            // Spellings of protocol 0, and what no pickler writes for the classes that matter.
            Op::List | Op::Dict | Op::FrozenSet | Op::Inst(..) | Op::Obj => {
                let start = self.pop_mark()?;
                self.release_from(start);
                self.push(MetadataValue::Opaque)?;
            }

            Op::Put(index) => self.put(index)?,
            Op::Memoize => self.put(self.memoized)?,
            Op::Get(index) => {
                let entry = self.plan.place(index).and_then(|place| self.memo.get(place)?.clone());
                self.push(entry.ok_or(PickleErrorKind::MissingMemo(index))?)?;
            }

            Op::Global(module, name) => {
                let (module, name) = (self.text(module)?, self.text(name)?);
                self.push(global(&module, &name))?;
            }
            Op::StackGlobal => {
                let (name, module) = (self.pop()?, self.pop()?);
                self.push(global(&module, &name))?;
            }
            Op::Call => self.call()?,
            Op::CallWithKeywords => {
                let keywords = self.pop()?;
                self.release(keywords);
                self.call()?;
            }
            Op::Build => {
                let state = self.pop()?;
                let object = self.top()?.clone();
                self.build(&object, state)?;
            }
            Op::Persistent => {
                let id = self.pop()?;
                self.release(id);
                self.push(MetadataValue::Opaque)?;
            }
        }
        Ok(Next::Opcode)
    }

    /// A list or a dict; below a key whose value nobody reads, one that swallows its contents.
    fn push_container(&mut self, kind: fn(usize) -> MetadataValue) -> PickleResult {
        let value = match self.stack.last().and_then(MetadataValue::text).map(|key| &**key) {
            Some("all_local_plans" | "storage_meta") => MetadataValue::Opaque,
            Some("planner_data") => {
                self.parents.get_or_insert_default();
                MetadataValue::Planned
            }
            _ => kind(self.new_container()),
        };
        self.push(value)
    }

    fn tuple(&mut self, start: usize) -> PickleResult {
        let counts = self.stack[start..].iter().map(MetadataValue::count);
        let tuple = match counts.collect::<Option<Vec<u64>>>() {
            Some(counts) => {
                self.stack.truncate(start);
                self.intern(&counts)?
            }
            None => {
                // No tuples in tuples, so that giving one back is no long way down.
                let members = self.stack.split_off(start);
                let shallow = |member| match member {
                    MetadataValue::Tuple(_) | MetadataValue::Object(_) => MetadataValue::Opaque,
                    other => other,
                };
                MetadataValue::Tuple(members.into_iter().map(shallow).collect())
            }
        };
        self.push(tuple)
    }

    fn call(&mut self) -> PickleResult {
        let args = self.pop()?;
        let callable = self.pop()?;
        let object = match (&callable, &args) {
            (MetadataValue::Class(Class::Size), MetadataValue::Tuple(args)) => match &**args {
                [MetadataValue::Numbers(sizes)] => MetadataValue::Numbers(Arc::clone(sizes)),
                _ => MetadataValue::Opaque,
            },
            (MetadataValue::Class(Class::Size), _) => MetadataValue::Opaque,
            (MetadataValue::Class(class), _) => {
                MetadataValue::Object(Rc::new(Object { class: *class, record: OnceCell::new() }))
            }
            _ => MetadataValue::Opaque,
        };
        self.release(args);
        self.push(object)
    }

    fn build(&mut self, object: &MetadataValue, state: MetadataValue) -> PickleResult {
        let MetadataValue::Object(object) = object else {
            self.release(state);
            return Ok(());
        };
        let record = Record::of(object.class, self, state);
        object.record.set(record).map_err(|_| PickleErrorKind::BuiltTwice)
    }

    fn put(&mut self, index: u32) -> PickleResult {
        let top = self.top()?.clone();
        self.memoized = self.memoized.saturating_add(1);
        let Some(place) = self.plan.place(index) else { return Ok(()) };
        self.share(&top);
        if place >= self.memo.len() {
            self.memo.resize(place + 1, None);
        }
        self.memo[place] = Some(top);
        Ok(())
    }

    /// Something else than its owner now knows the value.
    fn share(&mut self, value: &MetadataValue) {
        if let MetadataValue::List(at) | MetadataValue::Dict(at) = *value {
            self.containers[at].is_shared = true;
        }
    }

    /// The two outermost dicts on the way to an entry of the state dict.
    fn add_parents(&mut self, path: &MetadataValue) -> PickleResult {
        let MetadataValue::Tuple(path) = path else { return Ok(()) };
        let mut dotted = String::new();
        for (parent, _) in path.iter().zip(path.iter().skip(1)).take(2) {
            let Some(parent) = parent.text() else { break };
            if !dotted.is_empty() {
                dotted.push('.');
            }
            dotted.push_str(parent);
            let is_known = self.parents.as_ref().is_some_and(|known| known.contains(&*dotted));
            if !is_known && let MetadataValue::Text(parent) = self.text(dotted.as_bytes())? {
                self.parents.get_or_insert_default().insert(parent);
            }
        }
        Ok(())
    }

    /// Takes those that were seen; none where there is no `planner_data`.
    pub(super) fn take_parents(&mut self) -> Option<BTreeSet<Arc<str>>> {
        self.parents.take()
    }

    /// Takes the keys of `planner_data`.
    pub(super) fn take_planned(&mut self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.planned)
    }

    /// Text is kept once: names come again with every chunk of every rank.
    fn text(&mut self, bytes: &[u8]) -> PickleResult<MetadataValue> {
        let Ok(text) = str::from_utf8(bytes) else { return Ok(MetadataValue::Opaque) };
        if text.len() > LIMITS.name {
            return Ok(MetadataValue::Opaque);
        }
        if let Some(known) = self.texts.get(text) {
            return Ok(MetadataValue::Text(Arc::clone(known)));
        }
        self.spend(text.len())?;
        let text: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&text));
        Ok(MetadataValue::Text(text))
    }

    /// So are sizes and offsets.
    fn intern(&mut self, counts: &[u64]) -> PickleResult<MetadataValue> {
        if let Some(known) = self.numbers.get(counts) {
            return Ok(MetadataValue::Numbers(Arc::clone(known)));
        }
        self.spend(size_of_val(counts))?;
        let numbers: Arc<[u64]> = counts.into();
        self.numbers.insert(Arc::clone(&numbers));
        Ok(MetadataValue::Numbers(numbers))
    }

    fn spend(&mut self, bytes: usize) -> PickleResult {
        /// Bytes that an entry takes besides.
        const ENTRY: usize = 48;
        self.interned = self.interned.saturating_add(bytes + ENTRY);
        if self.interned > LIMITS.metadata_names {
            let limit = LIMITS.metadata_names as u64;
            return Err(OverLimit::new("bytes of different names and shapes", limit).into());
        }
        Ok(())
    }
}

/// A class or another attribute of a module. Only the last name counts: classes have moved between modules.
fn global(module: &MetadataValue, name: &MetadataValue) -> MetadataValue {
    let (Some(module), Some(name)) = (module.text(), name.text()) else {
        return MetadataValue::Opaque;
    };
    match Class::named(name) {
        Some(Class::Size) if &**module != "torch" => MetadataValue::Opaque,
        Some(class) => MetadataValue::Class(class),
        None if &**module == "torch" => MetadataValue::Torch(Arc::clone(name)),
        None => MetadataValue::Opaque,
    }
}

/// A count from little-endian two's complement.
fn unsigned(bytes: &[u8]) -> Option<u64> {
    let (low, high) = bytes.split_at(bytes.len().min(8));
    let is_positive = bytes.last().is_none_or(|top| *top < 0x80);
    let mut word = [0; 8];
    word[..low.len()].copy_from_slice(low);
    (is_positive && high.iter().all(|byte| *byte == 0)).then(|| u64::from_le_bytes(word))
}
