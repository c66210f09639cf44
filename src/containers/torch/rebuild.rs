//! Gives meaning to the calls that make tensors: a value of a pickle and the records it refers to become a
//! [`StoredTensor`], without reading the elements.
//!
//! The functions and their arguments are those of `torch/_utils.py` and `torch/_tensor.py` (torch 1.0 to 2.15),
//! `torch_npu/utils/storage.py`, and their namesakes in msadapter and mindtorch.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use thiserror::Error;

use super::value::{Value, ValueId, Values};
use crate::base::dtype::Dtype;
use crate::base::extent;
use crate::base::limits::{LIMITS, OverLimit};
use crate::storage::Region;
use crate::tensor::{ByteOrder, StorageView, StoredError, StoredTensor};

/// A value that stands for a tensor cannot be read as one.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RebuildError {
    /// A kind of tensor that is not a strided view of a storage.
    #[error("{kind} ({}) is not read; save it as a plain tensor", function.escape_debug())]
    Unreadable {
        /// The kind of tensor.
        kind: &'static str,
        /// The function that would make it.
        function: String,
    },
    /// A function with a familiar name from a library that is not known.
    #[error(
        "{} makes tensors in a way that is not known; save it as a plain tensor",
        function.escape_debug()
    )]
    UnknownFunction {
        /// The function.
        function: String,
    },
    /// The arguments are not those of the function.
    #[error("{function}: {what}")]
    Arguments {
        /// The function.
        function: &'static str,
        /// The fault of its arguments.
        what: &'static str,
    },
    /// A dtype that cannot be compared.
    #[error("dtype {} is not supported", name.escape_debug())]
    Dtype {
        /// Its name.
        name: String,
    },
    /// A storage class that cannot be compared.
    #[error(
        "storage {}: storage class {} is not supported",
        key.escape_debug(),
        class.escape_debug()
    )]
    StorageClass {
        /// The storage.
        key: String,
        /// The class.
        class: String,
    },
    /// A storage of plain bytes, and nobody says what is in it.
    #[error("storage {}: nothing says which dtype its bytes have", key.escape_debug())]
    NoDtype {
        /// The storage.
        key: String,
    },
    /// A storage that the file does not hold.
    #[error("storage {} is not in the file; copy or save the file again", key.escape_debug())]
    StorageMissing {
        /// The storage.
        key: String,
    },
    /// A storage with fewer bytes than its reference says.
    #[error(
        "storage {} has {len} bytes, and {numel} elements need {needed}; \
         copy or save the file again",
        key.escape_debug()
    )]
    StorageShort {
        /// The storage.
        key: String,
        /// Bytes in the file.
        len: u64,
        /// Elements according to the reference.
        numel: u64,
        /// Bytes that they need.
        needed: u128,
    },
    /// A view of a storage that reaches beyond it.
    #[error(
        "storage {}: a view of elements {offset} to {end} does not fit its {len} bytes",
        key.escape_debug()
    )]
    StorageView {
        /// The storage.
        key: String,
        /// First element of the view.
        offset: u64,
        /// The element after its last.
        end: u128,
        /// Bytes of the storage.
        len: u64,
    },
    /// The tensor does not fit its storage.
    #[error("storage {}", key.escape_debug())]
    Stored {
        /// The storage.
        key: String,
        /// The way in which it does not fit.
        #[source]
        source: Box<StoredError>,
    },
    /// Wrappers around wrappers without end, or as many flags.
    #[error(transparent)]
    OverLimit(#[from] OverLimit),
}

/// The thing that a function makes of its arguments.
#[derive(Debug, Clone, Copy)]
enum Function {
    /// A strided view: (storage, offset, size, stride, ...).
    View(Places),
    /// The tensor that is the first argument.
    Wrapper,
    /// The tensor that another function makes: (function, class, arguments, ...).
    FromType,
    /// A tensor of a kind that is no strided view.
    Unreadable(&'static str),
}

/// At which place a view function has the arguments that not all have.
#[derive(Debug, Clone, Copy)]
struct Places {
    dtype: Option<usize>,
    metadata: Option<usize>,
}

const fn view(dtype: Option<usize>, metadata: Option<usize>) -> Function {
    Function::View(Places { dtype, metadata })
}

#[rustfmt::skip]
static FUNCTIONS: [(&str, Function); 18] = [
    ("_rebuild_tensor",                 view(None, None)),
    ("_rebuild_tensor_v2",              view(None, Some(6))),
    ("_rebuild_tensor_v3",              view(Some(6), Some(7))),
    // The seventh argument is the layout that the data had on the device; it was brought back to strides before.
    ("_rebuild_npu_tensor",             view(None, None)),
    ("_rebuild_parameter",              Function::Wrapper),
    ("_rebuild_parameter_with_state",   Function::Wrapper),
    ("_rebuild_from_type",              Function::FromType),
    ("_rebuild_from_type_v2",           Function::FromType),
    ("_rebuild_qtensor",                Function::Unreadable("a quantised tensor")),
    ("_rebuild_sparse_tensor",          Function::Unreadable("a sparse tensor")),
    ("_rebuild_sparse_csr_tensor",      Function::Unreadable("a sparse tensor")),
    ("_rebuild_nested_tensor",          Function::Unreadable("a nested tensor")),
    ("_rebuild_meta_tensor_no_storage", Function::Unreadable("a meta tensor, which has no values,")),
    ("_rebuild_wrapper_subclass",       Function::Unreadable("a tensor that wraps others")),
    ("_rebuild_device_tensor_from_numpy",      Function::Unreadable("a tensor kept as a numpy array")),
    ("_rebuild_device_tensor_from_cpu_tensor", Function::Unreadable("a tensor of a foreign device")),
    ("_rebuild_xla_tensor",             Function::Unreadable("a tensor kept as a numpy array")),
    ("_rebuild_torch_tensor_npu",       Function::Unreadable("a tensor of a foreign device")),
];

/// Libraries that have these functions, by the first part of their module names.
const FAMILIES: [&str; 5] = ["torch", "torch_npu", "msadapter", "mindtorch", "mindspore"];

/// The storages of one file, by the keys that its pickle uses.
#[derive(Debug)]
pub(super) struct Storages {
    pub(super) by_key: HashMap<String, Region>,
    pub(super) byte_order: ByteOrder,
    /// The place of a storage without elements.
    pub(super) empty: Region,
}

/// A reference to a storage, as the pickle spells it:
/// `("storage", class, key, location, numel[, (view key, offset, numel)])`.
pub(super) struct StorageId {
    pub(super) key: String,
    /// The dtype of a typed class; none for a storage of bytes.
    pub(super) dtype: Option<Dtype>,
    numel: u64,
    view: Option<(u64, u64)>,
}

impl StorageId {
    /// Reads the tuple of a persistent id; `None` where it is not that of a storage.
    pub(super) fn read(values: &Values, id: ValueId) -> Result<Option<Self>, RebuildError> {
        let Some(&[kind, class, key, _location, numel, ref view @ ..]) = values.elements(id) else {
            return Ok(None);
        };
        if !is_text(values, kind, "storage") {
            return Ok(None);
        }
        let malformed = |what| RebuildError::Arguments { function: "storage", what };
        let key = key_text(values, key).ok_or(malformed("its key is no name"))?;
        let dtype = match class_of(values, class) {
            Some("UntypedStorage" | "_UntypedStorage") => None,
            Some(class) => Some(Dtype::from_storage_class(class).ok_or_else(|| {
                RebuildError::StorageClass { key: key.clone(), class: class.to_owned() }
            })?),
            None => return Err(malformed("its class is no storage class")),
        };
        let numel = values.as_u64(numel).ok_or(malformed("its element count is no count"))?;
        let view = match view.first() {
            Some(&view) if !values.is_none(view) => match values.elements(view) {
                Some(&[_, offset, numel]) => {
                    let both = values.as_u64(offset).zip(values.as_u64(numel));
                    Some(both.ok_or(malformed("its view is no range"))?)
                }
                _ => return Err(malformed("its view is no range")),
            },
            _ => None,
        };
        Ok(Some(Self { key, dtype, numel, view }))
    }

    /// Bytes of what the reference counts.
    pub(super) fn element_size(&self) -> u64 {
        self.dtype.map_or(1, Dtype::size)
    }

    /// The bytes of the storage, or of the part of it that is meant.
    fn region(&self, storages: &Storages) -> Result<Region, RebuildError> {
        let (numel, element_size) = (self.numel, self.element_size());
        let whole = match storages.by_key.get(&self.key) {
            Some(&region) => region,
            None if numel == 0 => storages.empty,
            None => return Err(RebuildError::StorageMissing { key: self.key.clone() }),
        };
        let needed = u128::from(numel) * u128::from(element_size);
        let part = u64::try_from(needed).ok().and_then(|needed| whole.part(0, needed));
        let Some(region) = part else {
            return Err(RebuildError::StorageShort {
                key: self.key.clone(),
                len: whole.len,
                numel,
                needed,
            });
        };
        let Some((offset, count)) = self.view else { return Ok(region) };
        let bytes = offset.checked_mul(element_size).zip(count.checked_mul(element_size));
        bytes.and_then(|(start, len)| region.part(start, len)).ok_or_else(|| {
            RebuildError::StorageView {
                key: self.key.clone(),
                offset,
                end: u128::from(offset) + u128::from(count),
                len: region.len,
            }
        })
    }
}

/// The tensor that a value stands for; `None` where it is no tensor.
pub(super) fn tensor(
    values: &Values,
    storages: &Storages,
    id: ValueId,
) -> Result<Option<StoredTensor>, RebuildError> {
    let Value::Call(call) = values.get(id) else { return Ok(None) };
    let (mut callable, mut args) = (call.callable, call.args);
    for level in 0..LIMITS.depth {
        let Some((name, function)) = function_of(values, callable)? else {
            return if level == 0 { Ok(None) } else { Err(unknown(values, callable)) };
        };
        let malformed = |what| RebuildError::Arguments { function: name, what };
        let list = values.elements(args).ok_or(malformed("its arguments are no tuple"))?;
        match function {
            Function::View(places) => {
                return strided(values, storages, name, list, places).map(Some);
            }
            Function::Wrapper => {
                let inner = list.first().map(|&inner| values.get(inner));
                let Some(Value::Call(inner)) = inner else {
                    return Err(malformed("its first argument is no tensor"));
                };
                (callable, args) = (inner.callable, inner.args);
            }
            Function::FromType => match *list {
                [inner, _, inner_args, ..] => (callable, args) = (inner, inner_args),
                _ => return Err(malformed("it has too few arguments")),
            },
            Function::Unreadable(kind) => {
                let function = values.class_name(callable).unwrap_or_default();
                return Err(RebuildError::Unreadable { kind, function });
            }
        }
    }
    Err(OverLimit::new("wrappers around one tensor", LIMITS.depth as u64).into())
}

/// The thing that a callable would make, if it makes tensors.
fn function_of(
    values: &Values,
    callable: ValueId,
) -> Result<Option<(&'static str, Function)>, RebuildError> {
    let Some((module, name)) = values.global(callable) else {
        return foreign(values, callable).map_or(Ok(None), Err);
    };
    let Some(&(name, function)) = FUNCTIONS.iter().find(|row| row.0 == name) else {
        return foreign(values, callable).map_or(Ok(None), Err);
    };
    if !FAMILIES.contains(&first_part(module)) {
        return Err(unknown(values, callable));
    }
    Ok(Some((name, function)))
}

/// Tensors of Transformer Engine (`Float8Tensor._make_in_reduce_ex`, `_make_mxfp8_tensor_in_reduce_ex`, ...)
/// hold scaled numbers, and are recognised so that they are not lost.
fn foreign(values: &Values, callable: ValueId) -> Option<RebuildError> {
    let function = values.class_name(callable)?;
    let is_tensor = first_part(&function) == "transformer_engine"
        && (function.contains("Tensor") || function.ends_with("_in_reduce_ex"));
    is_tensor.then_some(RebuildError::Unreadable {
        kind: "a quantised Transformer Engine tensor",
        function,
    })
}

fn unknown(values: &Values, callable: ValueId) -> RebuildError {
    let function = values.class_name(callable).unwrap_or_else(|| "an unnamed function".to_owned());
    RebuildError::UnknownFunction { function }
}

fn strided(
    values: &Values,
    storages: &Storages,
    function: &'static str,
    args: &[ValueId],
    places: Places,
) -> Result<StoredTensor, RebuildError> {
    let malformed = |what| RebuildError::Arguments { function, what };
    let &[storage, offset, size, stride, ..] = args else {
        return Err(malformed("it has too few arguments"));
    };
    let metadata = places.metadata.and_then(|place| args.get(place));
    if let Some(&metadata) = metadata {
        check_metadata(values, function, metadata)?;
    }
    let storage = storage_of(values, function, storage)?;
    let dtype = match places.dtype {
        Some(place) => dtype_of(values, *args.get(place).ok_or(malformed("it names no dtype"))?)?,
        None => storage.dtype.ok_or_else(|| RebuildError::NoDtype { key: storage.key.clone() })?,
    };
    let offset = values.as_u64(offset).ok_or(malformed("its storage offset is no count"))?;
    let shape = counts(values, size).ok_or(malformed("its size is no tuple of counts"))?;
    let strides = if values.is_none(stride) { Some(Vec::new()) } else { counts(values, stride) };
    let mut strides = strides.ok_or(malformed("its strides are no tuple of counts"))?;
    if strides.is_empty() {
        // msadapter leaves them out where the tensor is row-major.
        strides = extent::row_major(&shape).ok_or(malformed("its size is too large"))?;
    }
    let view = StorageView { storage: storage.region(storages)?, storage_offset: offset, strides };
    StoredTensor::new(dtype, shape, view, storages.byte_order)
        .map_err(|source| RebuildError::Stored { key: storage.key, source: source.into() })
}

/// Complex conjugation and negation may be put off until a tensor is used; the stored numbers are then not
/// its values (`get_tensor_metadata` in `torch/_utils.py`, torch 2.15).
fn check_metadata(
    values: &Values,
    function: &'static str,
    metadata: ValueId,
) -> Result<(), RebuildError> {
    let flags = values.mapping(metadata).map(|flags| flags.take(LIMITS.tensor_flags + 1).count());
    if flags.is_some_and(|count| count > LIMITS.tensor_flags) {
        return Err(OverLimit::new("flags on one tensor", LIMITS.tensor_flags as u64).into());
    }
    let is_set = |name| {
        values.dict_get(metadata, name).is_some_and(|flag| values.as_bool(flag) != Some(false))
    };
    let kind = if is_set("conj") {
        "a lazily conjugated tensor"
    } else if is_set("neg") {
        "a lazily negated tensor"
    } else {
        return Ok(());
    };
    Err(RebuildError::Unreadable { kind, function: function.to_owned() })
}

fn storage_of(
    values: &Values,
    function: &'static str,
    id: ValueId,
) -> Result<StorageId, RebuildError> {
    if let Value::Persistent(id) = values.get(id)
        && let Some(storage) = StorageId::read(values, id)?
    {
        return Ok(storage);
    }
    if values.class_name(id).is_some_and(|name| name == "torch.storage._load_from_bytes") {
        return Err(RebuildError::Unreadable {
            kind: "a tensor whose bytes are inside the pickle",
            function: "torch.storage._load_from_bytes".to_owned(),
        });
    }
    Err(RebuildError::Arguments { function, what: "its first argument is no storage" })
}

fn dtype_of(values: &Values, id: ValueId) -> Result<Dtype, RebuildError> {
    let name = match values.global(id) {
        Some((module, name)) if FAMILIES.contains(&first_part(module)) => name,
        Some((_, name)) => return Err(RebuildError::Dtype { name: name.to_owned() }),
        None => return Err(RebuildError::Dtype { name: values.get(id).type_name().to_owned() }),
    };
    Dtype::from_name(name).ok_or_else(|| RebuildError::Dtype { name: name.to_owned() })
}

/// The name of a storage class, given as a class or as text, without its module.
fn class_of(values: &Values, id: ValueId) -> Option<&str> {
    let name = match values.global(id) {
        Some((module, name)) => Some(name).filter(|_| FAMILIES.contains(&first_part(module)))?,
        None => values.as_str(id)?,
    };
    name.rsplit('.').next()
}

/// A storage key, which torch writes as text and others as a number.
pub(super) fn key_text(values: &Values, id: ValueId) -> Option<String> {
    match values.get(id) {
        Value::Str(text) if text.len() <= LIMITS.name => Some(text.to_owned()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

/// A tuple of counts; of one that is longer than any shape, only so much that it is seen to be.
fn counts(values: &Values, id: ValueId) -> Option<Vec<u64>> {
    values.sequence(id)?.take(LIMITS.rank + 1).map(|size| values.as_u64(size)).collect()
}

fn is_text(values: &Values, id: ValueId, text: &str) -> bool {
    values.as_str(id) == Some(text)
}

fn first_part(module: &str) -> &str {
    module.split('.').next().unwrap_or(module)
}
