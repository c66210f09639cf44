//! Which dialect a side speaks: what its model says that it is, or else what table knows all its names.

use crate::base::plain::PlainValue;
use crate::layout::rules::Rules;
use crate::names::Naming;
use crate::names::families::{
    CanonicalPart, Conversion, FAMILIES, Family, FamilyReader, model_args,
};
use crate::names::megatron::{Canonical, Dialect};

use super::sources::Sources;

/// A dialect whose names can be made canonical.
pub(super) enum SourceNaming {
    Family(&'static Family, FamilyReader),
    /// Names that Megatron had at some time, in a checkpoint that is none of Megatron's own.
    Megatron(Dialect, Rules),
}

/// The first components of canonical names.
const ROOTS: [&str; 5] = ["embedding.", "decoder.", "encoder.", "output_layer.", "mtp."];

impl SourceNaming {
    /// The dialect of these names.
    ///
    /// # Errors
    /// The message where none is known.
    pub(super) fn of(
        names: &[&str],
        naming: Naming,
        sources: &Sources<'_>,
    ) -> Result<Self, String> {
        let of_family =
            |family: &'static Family| Self::Family(family, family.reader(names.iter().copied()));
        let knows_all = |naming: &Self| {
            !names.is_empty() && names.iter().all(|name| naming.place(name).is_some())
        };
        let families = || FAMILIES.iter().filter(|family| family.naming == naming);
        let said = sources.given("model_type").or_else(|| sources.own(model_args::MODEL_TYPE));
        let what = match said {
            Some(PlainValue::Text(said)) => {
                let mut families = families();
                match families.find(|family| family.model_types.contains(&said.as_str())) {
                    Some(family) => return Ok(of_family(family)),
                    None => format!("no table has Megatron's names for model_type {said:?}"),
                }
            }
            _ => {
                let dialect = Dialect::detect(names.iter().copied());
                let megatron = Self::Megatron(dialect, Rules::new(&[]));
                let mut known = families().map(of_family).chain(std::iter::once(megatron));
                match known.find(knows_all) {
                    Some(naming) => return Ok(naming),
                    None => "nothing says what model it is (model_type), and no table knows all its names"
                        .to_owned(),
                }
            }
        };
        let types: Vec<&str> = families().flat_map(|family| family.model_types).copied().collect();
        let types = types.join(", ");
        Err(format!(
            "{what}; if they are those of one of these, say so with --set model_type=...: {types}"
        ))
    }

    /// The word for it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Family(family, _) => family.name,
            Self::Megatron(..) => "Megatron",
        }
    }

    /// True where its norm weights are stored as w - 1.
    pub(super) fn are_norms_zero_centered(&self) -> bool {
        match self {
            Self::Family(family, _) => family.are_norms_zero_centered,
            Self::Megatron(..) => true,
        }
    }

    /// The canonical tensor that a name is a part of; `None` where there is none.
    pub(super) fn place(&self, name: &str) -> Option<CanonicalPart> {
        match self {
            Self::Family(_, reader) => reader.read(name),
            Self::Megatron(dialect, rules) => {
                let canonical = match dialect.canonical(name) {
                    Canonical::Parameter(canonical) => canonical,
                    Canonical::TiedCopy(_) | Canonical::Buffer => return None,
                };
                let is_megatrons = ROOTS.iter().any(|root| canonical.starts_with(root));
                rules.find(&canonical).filter(|_| is_megatrons)?;
                Some(CanonicalPart {
                    canonical,
                    conversion: Conversion::Same,
                    part: 0,
                    parts: vec![name.to_owned()],
                })
            }
        }
    }
}
