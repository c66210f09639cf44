//! Element types: one table of what torch can store.

use std::fmt;

/// The element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant is the torch dtype of the same name")]
pub enum Dtype {
    Float64,
    Float32,
    Float16,
    BFloat16,
    Float8E4M3Fn,
    Float8E4M3Fnuz,
    Float8E5M2,
    Float8E5M2Fnuz,
    Float8E8M0Fnu,
    Int64,
    Int32,
    Int16,
    Int8,
    UInt64,
    UInt32,
    UInt16,
    UInt8,
    Bool,
    Complex128,
    Complex64,
}

/// The kind of number that the bits of an element are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DtypeKind {
    /// A binary floating point number.
    Float,
    /// A signed or unsigned integer, or a truth value.
    Integer,
    /// A pair of floating point numbers: real, imaginary.
    Complex,
}

struct DtypeRow {
    dtype: Dtype,
    /// The attribute of the `torch` module that names the dtype.
    name: &'static str,
    /// The class of a typed storage of this dtype, where torch ever had one.
    storage: Option<&'static str>,
    size: u8,
    kind: DtypeKind,
}

const fn row(
    dtype: Dtype,
    name: &'static str,
    storage: Option<&'static str>,
    size: u8,
    kind: DtypeKind,
) -> DtypeRow {
    DtypeRow { dtype, name, storage, size, kind }
}

/// Names and sizes as in torch 2.15 (`torch/__init__.py`, `torch/storage.py`), in the order of the enum.
#[rustfmt::skip]
static TABLE: [DtypeRow; 20] = [
    row(Dtype::Float64,        "float64",         Some("DoubleStorage"),        8, DtypeKind::Float),
    row(Dtype::Float32,        "float32",         Some("FloatStorage"),         4, DtypeKind::Float),
    row(Dtype::Float16,        "float16",         Some("HalfStorage"),          2, DtypeKind::Float),
    row(Dtype::BFloat16,       "bfloat16",        Some("BFloat16Storage"),      2, DtypeKind::Float),
    row(Dtype::Float8E4M3Fn,   "float8_e4m3fn",   None,                         1, DtypeKind::Float),
    row(Dtype::Float8E4M3Fnuz, "float8_e4m3fnuz", None,                         1, DtypeKind::Float),
    row(Dtype::Float8E5M2,     "float8_e5m2",     None,                         1, DtypeKind::Float),
    row(Dtype::Float8E5M2Fnuz, "float8_e5m2fnuz", None,                         1, DtypeKind::Float),
    row(Dtype::Float8E8M0Fnu,  "float8_e8m0fnu",  None,                         1, DtypeKind::Float),
    row(Dtype::Int64,          "int64",           Some("LongStorage"),          8, DtypeKind::Integer),
    row(Dtype::Int32,          "int32",           Some("IntStorage"),           4, DtypeKind::Integer),
    row(Dtype::Int16,          "int16",           Some("ShortStorage"),         2, DtypeKind::Integer),
    row(Dtype::Int8,           "int8",            Some("CharStorage"),          1, DtypeKind::Integer),
    row(Dtype::UInt64,         "uint64",          None,                         8, DtypeKind::Integer),
    row(Dtype::UInt32,         "uint32",          None,                         4, DtypeKind::Integer),
    row(Dtype::UInt16,         "uint16",          None,                         2, DtypeKind::Integer),
    row(Dtype::UInt8,          "uint8",           Some("ByteStorage"),          1, DtypeKind::Integer),
    row(Dtype::Bool,           "bool",            Some("BoolStorage"),          1, DtypeKind::Integer),
    row(Dtype::Complex128,     "complex128",      Some("ComplexDoubleStorage"), 16, DtypeKind::Complex),
    row(Dtype::Complex64,      "complex64",       Some("ComplexFloatStorage"),  8, DtypeKind::Complex),
];

impl Dtype {
    fn row(self) -> &'static DtypeRow {
        &TABLE[self as usize]
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> u64 {
        u64::from(self.row().size)
    }

    /// The name torch gives it, without `torch.`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Float, integer or complex.
    #[must_use]
    pub fn kind(self) -> DtypeKind {
        self.row().kind
    }

    /// Bytes that change places when the byte order of the file is not the usual one:
    /// the whole element, or each half of a complex one.
    #[must_use]
    pub fn swap_unit(self) -> u64 {
        match self.kind() {
            DtypeKind::Complex => self.size() / 2,
            DtypeKind::Float | DtypeKind::Integer => self.size(),
        }
    }

    /// The dtype that torch names so, e.g. `bfloat16`; the aliases `float`, `double`, `half`, `long`, ... are accepted.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = match name {
            "double" => "float64",
            "float" => "float32",
            "half" => "float16",
            "long" => "int64",
            "int" => "int32",
            "short" => "int16",
            "cdouble" => "complex128",
            "cfloat" => "complex64",
            other => other,
        };
        TABLE.iter().find(|row| row.name == name).map(|row| row.dtype)
    }

    /// The dtype of a typed torch storage class, e.g. `HalfStorage`.
    #[must_use]
    pub fn from_storage_class(class: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.storage == Some(class)).map(|row| row.dtype)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.dtype as usize, index, "{}", row.name);
            assert_eq!(Dtype::from_name(row.name), Some(row.dtype));
        }
    }
}
