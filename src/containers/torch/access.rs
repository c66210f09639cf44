//! Reads meaning into the values of a pickle: what Python would see as a mapping, a sequence, bytes, an object
//! with attributes, whatever calls the pickler happened to write it with.
//!
//! Nothing here recurses; chains of calls are followed for [`LIMITS`]`.depth` steps.

use std::borrow::Cow;

use super::value::{Call, Value, ValueId, Values};
use crate::base::limits::LIMITS;

/// Numbers, text and bytes.
impl Values {
    /// True for `None`.
    #[must_use]
    pub fn is_none(&self, id: ValueId) -> bool {
        matches!(self.get(id), Value::None)
    }

    /// A truth value.
    #[must_use]
    pub fn as_bool(&self, id: ValueId) -> Option<bool> {
        match self.get(id) {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// An integer that fits.
    #[must_use]
    pub fn as_i64(&self, id: ValueId) -> Option<i64> {
        match self.get(id) {
            Value::Int(value) => Some(value),
            _ => None,
        }
    }

    /// An integer that is not negative and fits.
    #[must_use]
    pub fn as_u64(&self, id: ValueId) -> Option<u64> {
        match self.get(id) {
            Value::Int(value) => u64::try_from(value).ok(),
            Value::BigInt(&[ref low @ .., 0]) => low.try_into().ok().map(u64::from_le_bytes),
            _ => None,
        }
    }

    /// A float, or an integer that fits 32 bits and so is exact as one.
    #[must_use]
    pub fn as_f64(&self, id: ValueId) -> Option<f64> {
        match self.get(id) {
            Value::Float(value) => Some(value),
            Value::Int(value) => i32::try_from(value).ok().map(f64::from),
            _ => None,
        }
    }

    /// Text.
    #[must_use]
    pub fn as_str(&self, id: ValueId) -> Option<&str> {
        match self.get(id) {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Bytes or a byte array, also in the spelling of protocol 2 and older, `_codecs.encode(text, 'latin1')`.
    #[must_use]
    pub fn as_bytes(&self, id: ValueId) -> Option<Cow<'_, [u8]>> {
        let mut at = id;
        for _ in 0..LIMITS.depth {
            let call = match self.get(at) {
                Value::Bytes(bytes) => return Some(Cow::Borrowed(bytes)),
                Value::Call(call) => call,
                _ => return None,
            };
            at = match (self.constructor(&call)?, self.args(&call)) {
                (("builtins", "bytes" | "bytearray"), []) => return Some(Cow::Borrowed(&[])),
                (("builtins", "bytes" | "bytearray"), &[inner]) => inner,
                (("_codecs", "encode") | ("builtins", "bytearray"), &[text, codec]) => {
                    return self.latin1(text, codec).map(Cow::Owned);
                }
                _ => return None,
            };
        }
        None
    }

    fn latin1(&self, text: ValueId, codec: ValueId) -> Option<Vec<u8>> {
        if !matches!(self.as_str(codec)?, "latin1" | "latin-1") {
            return None;
        }
        self.as_str(text)?.chars().map(|char| u8::try_from(u32::from(char)).ok()).collect()
    }
}

/// Containers.
impl Values {
    /// The members of a plain tuple or list.
    #[must_use]
    pub fn elements(&self, id: ValueId) -> Option<&[ValueId]> {
        match self.get(id) {
            Value::Tuple(members) | Value::List(members) => Some(members),
            _ => None,
        }
    }

    /// The members of anything like a list, a tuple or a set: the plain ones, `torch.Size`, `collections.deque`,
    /// and subclasses of list and set that were filled after they were made.
    #[must_use]
    pub fn sequence(&self, id: ValueId) -> Option<impl Iterator<Item = ValueId> + Clone + '_> {
        let (first, then): (&[ValueId], &[ValueId]) = match self.get(id) {
            Value::Call(call) => (self.initial_members(&call)?, call.appends),
            _ => (self.members(id)?, &[]),
        };
        Some(first.iter().chain(then).copied())
    }

    fn members(&self, id: ValueId) -> Option<&[ValueId]> {
        match self.get(id) {
            Value::Tuple(members)
            | Value::List(members)
            | Value::Set(members)
            | Value::FrozenSet(members) => Some(members),
            _ => None,
        }
    }

    fn initial_members(&self, call: &Call<'_>) -> Option<&[ValueId]> {
        let is_known = matches!(
            self.constructor(call),
            Some(
                ("builtins", "list" | "tuple" | "set" | "frozenset")
                    | ("collections", "deque")
                    | ("torch", "Size")
            )
        );
        if is_known {
            self.args(call).first().map_or(Some(&[]), |&first| self.members(first))
        } else {
            (!call.appends.is_empty()).then_some(&[])
        }
    }

    /// The keys and values of anything like a dict: plain ones, `OrderedDict`, `defaultdict`, `Counter`,
    /// and subclasses that were filled after they were made. A key that occurs twice comes twice; Python keeps the last.
    #[must_use]
    pub fn mapping(
        &self,
        id: ValueId,
    ) -> Option<impl Iterator<Item = (ValueId, ValueId)> + Clone + '_> {
        let none = (&[][..], &[][..]);
        let ((first, listed), items) = match self.get(id) {
            Value::Dict(items) => (none, items),
            Value::Call(call) => (self.initial_items(&call)?, call.items),
            _ => return None,
        };
        let listed = listed.iter().filter_map(|&pair| self.pair(pair));
        Some(first.iter().copied().chain(listed).chain(items.iter().copied()))
    }

    /// The items that a mapping was made from: pairs of a dict, or a list of pairs (Python 2's `OrderedDict`).
    #[expect(clippy::type_complexity, reason = "one of the two is empty")]
    fn initial_items(&self, call: &Call<'_>) -> Option<(&[(ValueId, ValueId)], &[ValueId])> {
        let args = self.args(call);
        let initial = match self.constructor(call) {
            Some(("collections", "OrderedDict" | "Counter") | ("builtins", "dict")) => args.first(),
            Some(("collections", "defaultdict")) => args.get(1),
            _ if call.items.is_empty() => return None,
            _ => None,
        };
        match initial.map(|&initial| self.get(initial)) {
            None | Some(Value::None) => Some((&[], &[])),
            Some(Value::Dict(items)) => Some((items, &[])),
            Some(Value::List(pairs) | Value::Tuple(pairs)) => {
                pairs.iter().all(|&pair| self.pair(pair).is_some()).then_some((&[], pairs))
            }
            Some(_) => None,
        }
    }

    fn pair(&self, id: ValueId) -> Option<(ValueId, ValueId)> {
        match self.elements(id)? {
            &[key, value] => Some((key, value)),
            _ => None,
        }
    }

    /// The value under a text key of anything that [`Values::mapping`] sees as a mapping.
    #[must_use]
    pub fn dict_get(&self, id: ValueId, key: &str) -> Option<ValueId> {
        last_under(self, self.mapping(id)?, key)
    }
}

/// Objects.
impl Values {
    /// Module and name of a global, with the names that Python 3 has for Python 2's modules.
    #[must_use]
    pub fn global(&self, id: ValueId) -> Option<(&str, &str)> {
        match self.get(id) {
            Value::Global { module, name } => Some((modern(module), name)),
            _ => None,
        }
    }

    /// The dotted name of a class or function, or of the class or function that an object was made by,
    /// such as `argparse.Namespace`.
    #[must_use]
    pub fn class_name(&self, id: ValueId) -> Option<String> {
        let mut attribute = String::new();
        let mut at = id;
        for _ in 0..LIMITS.depth {
            let call = match self.get(at) {
                Value::Global { module, name } => {
                    let (module, name) = (shortened(modern(module)), shortened(name));
                    return Some(format!("{module}.{name}{attribute}"));
                }
                Value::Call(call) => call,
                _ => return None,
            };
            at = match (self.global(call.callable), self.args(&call)) {
                // The way a method of a class is pickled.
                (Some(("builtins", "getattr")), &[object, name]) => {
                    attribute = format!(".{}{attribute}", shortened(self.as_str(name)?));
                    object
                }
                (Some(maker), &[class, ..]) if makes_first_argument(maker) => class,
                _ => call.callable,
            };
        }
        None
    }

    /// The state that BUILD gave an object.
    #[must_use]
    pub fn state(&self, id: ValueId) -> Option<ValueId> {
        match self.get(id) {
            Value::Call(call) => call.state,
            _ => None,
        }
    }

    /// The attributes of an object whose state is its `__dict__`, or a pair of that and its slots; none where
    /// it has no state. `None` where this is no object, or its state is of a kind of its own.
    #[must_use]
    pub fn attributes(
        &self,
        id: ValueId,
    ) -> Option<impl Iterator<Item = (ValueId, ValueId)> + Clone + '_> {
        let Value::Call(call) = self.get(id) else { return None };
        let (dict, slots) = match call.state.map(|state| (state, self.elements(state))) {
            None => (None, None),
            Some((_, Some(&[dict, slots]))) => (Some(dict), Some(slots)),
            Some((state, _)) => (Some(state), None),
        };
        // Either half of the pair may be None.
        let part = |part: Option<ValueId>| match part {
            Some(part) if !self.is_none(part) => self.mapping(part).map(Some),
            _ => Some(None),
        };
        Some(part(dict)?.into_iter().flatten().chain(part(slots)?.into_iter().flatten()))
    }

    /// One attribute of an object.
    #[must_use]
    pub fn attribute(&self, id: ValueId, name: &str) -> Option<ValueId> {
        last_under(self, self.attributes(id)?, name)
    }

    /// The positional arguments of a call.
    #[must_use]
    pub fn args(&self, call: &Call<'_>) -> &[ValueId] {
        match self.get(call.args) {
            Value::Tuple(args) => args,
            _ => &[],
        }
    }

    /// Module and name of what is called, or of the class that `copyreg` is told to make.
    fn constructor(&self, call: &Call<'_>) -> Option<(&str, &str)> {
        let callable = self.global(call.callable)?;
        if makes_first_argument(callable) {
            return self.global(*self.args(call).first()?);
        }
        Some(callable)
    }
}

/// A part of a class's name: what no class is called is cut, so that naming it costs no more than a line.
fn shortened(name: &str) -> &str {
    let end = name.char_indices().map(|(at, _)| at).nth(LIMITS.class_name).unwrap_or(name.len());
    &name[..end]
}

/// Functions of `copyreg` that make an instance of the class that is their first argument.
fn makes_first_argument(function: (&str, &str)) -> bool {
    matches!(function, ("copyreg", "_reconstructor" | "__newobj__" | "__newobj_ex__"))
}

fn modern(module: &str) -> &str {
    match module {
        "__builtin__" => "builtins",
        "copy_reg" => "copyreg",
        other => other,
    }
}

fn last_under(
    values: &Values,
    pairs: impl Iterator<Item = (ValueId, ValueId)>,
    key: &str,
) -> Option<ValueId> {
    pairs.filter(|&(name, _)| values.as_str(name) == Some(key)).last().map(|(_, value)| value)
}
