//! Other dialects -> canonical names, family by family: the models of Hugging Face, of InfiniTrain and of GPT-NeoX.
//!
//! `tables.rs` says what parts make a canonical tensor and how; here its rows are read.

pub mod model_args;
mod tables;

use super::Naming;
use super::index::number;
use super::pattern::{SuffixTable, expand_braces, fill};

pub use tables::FAMILIES;

/// The way the parts that a row names make the canonical tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conversion {
    /// It is the tensor.
    Same,
    /// It is the tensor with rows and columns exchanged: the `[in, out]` of GPT-2's `Conv1D`.
    Transposed,
    /// Rows of one part behind those of the other: `[gate; up]`.
    Rows,
    /// `[up; gate]` where the model is gated: the halves change places.
    UpAndGate,
    /// Query, key and value heads, dealt out by query group: its queries, its key, its value, then the next group.
    Heads,
    /// The same from one tensor with all queries, all keys, all values.
    HeadBlocks(Blocks),
    /// All experts of a layer in one tensor: each becomes one of its own, whose number `*` stands for.
    Experts(Packed),
    /// Another copy of that tensor.
    Replica,
}

/// The order of queries, keys and values in one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// As rows.
    Rows,
    /// As columns, see [`Conversion::Transposed`].
    Columns,
    /// As rows, where a rotation turns neighbouring rows of a head; the canonical one turns its halves.
    Rotated,
    /// As rows where heads share keys, and head by head where none does.
    RowsIfShared,
}

/// The form of experts in one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packed {
    /// Each as the weight or bias that it is.
    Plain,
    /// Each with rows and columns exchanged.
    Transposed,
    /// As [`Packed::Transposed`], gate and up alternating.
    TransposedPairs,
    /// As [`Packed::Plain`], gate and up alternating.
    Pairs,
}

/// End of a name in the dialect, the canonical one, and how the first makes the second. Groups in braces go together in
/// order; what stands in square brackets are the parts of one tensor.
type FamilyRow = (&'static str, &'static str, Conversion);

/// Models whose names follow one table.
#[derive(Debug)]
pub struct Family {
    /// The word for it.
    pub name: &'static str,
    /// Whose names they are.
    pub naming: Naming,
    /// Values of `model_type` in `config.json`; for others, what the command line may say.
    pub model_types: &'static [&'static str],
    /// Norm weights are stored as w - 1.
    pub are_norms_zero_centered: bool,
    /// Prefix of all names but the output layer's.
    body: &'static str,
    /// Prefix of the number of a layer.
    layers: &'static str,
    /// Rows for what is in no layer.
    outside: &'static [&'static [FamilyRow]],
    /// Rows for what is in one; canonical names without `decoder.layers.N.`
    inside: &'static [&'static [FamilyRow]],
}

/// The part of a canonical tensor that a name of a dialect stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CanonicalPart {
    /// The canonical name.
    pub canonical: String,
    /// The way the parts make it.
    pub conversion: Conversion,
    /// Number of this part.
    pub part: usize,
    /// The names of all parts, as they stand in the dialect.
    pub parts: Vec<String>,
}

/// One family's names, ready to be read.
#[derive(Debug)]
pub struct FamilyReader {
    family: &'static Family,
    outside: SuffixTable<Target>,
    inside: SuffixTable<Target>,
    /// The first layer that predicts further tokens instead of being one of the model's.
    first_prediction: Option<u64>,
}

#[derive(Debug, Clone)]
struct Target {
    canonical: String,
    conversion: Conversion,
    part: usize,
    /// Patterns of all parts.
    parts: Vec<String>,
}

impl Family {
    /// A reader of the names of a model; all of them tell which layers predict further tokens.
    pub fn reader<'n>(&'static self, names: impl Iterator<Item = &'n str>) -> FamilyReader {
        let layers = names.filter_map(|name| {
            let (layer, rest) = self.layer_of(name)?;
            (rest == "eh_proj.weight").then_some(layer)
        });
        FamilyReader {
            first_prediction: layers.min(),
            family: self,
            outside: table(self.outside),
            inside: table(self.inside),
        }
    }

    /// A name without what stands before all names of the body.
    fn without_body<'n>(&self, name: &'n str) -> &'n str {
        name.strip_prefix(self.body).unwrap_or(name)
    }

    /// The layer of a name and what follows its number.
    fn layer_of<'n>(&self, name: &'n str) -> Option<(u64, &'n str)> {
        let (digits, rest) = self.without_body(name).strip_prefix(self.layers)?.split_once('.')?;
        Some((number(digits)?, rest))
    }
}

fn table(rows: &[&[FamilyRow]]) -> SuffixTable<Target> {
    let mut table = SuffixTable::new([]);
    for (own, canonical, conversion) in rows.iter().copied().flatten() {
        for (own, canonical) in expand_braces(own).into_iter().zip(expand_braces(canonical)) {
            let parts = expand_braces(&own.replace('[', "{").replace(']', "}"));
            for (part, pattern) in parts.iter().enumerate() {
                let (canonical, parts) = (canonical.clone(), parts.clone());
                table.insert(pattern, Target { canonical, conversion: *conversion, part, parts });
            }
        }
    }
    table
}

impl FamilyReader {
    /// The canonical tensor that a name is a part of; `None` where no row knows it.
    #[must_use]
    pub fn read(&self, name: &str) -> Option<CanonicalPart> {
        let in_layer = self.family.layer_of(name);
        let (rest, table) = match in_layer {
            Some((_, rest)) => (rest, &self.inside),
            None => (self.family.without_body(name), &self.outside),
        };
        let found = table.find(rest).filter(|found| found.prefix.is_empty())?;
        let Target { canonical, conversion, part, parts } = found.value;
        let filled = fill(canonical, &found.numbers);
        let before = &name[..name.len() - rest.len()];
        let own = parts.iter().map(|pattern| {
            let mut numbers = found.numbers.iter();
            let filled = pattern.split('#').enumerate().map(|(at, text)| match at {
                0 => text.to_owned(),
                _ => format!("{}{text}", numbers.next().unwrap_or(&"")),
            });
            format!("{before}{}", filled.collect::<String>())
        });
        Some(CanonicalPart {
            canonical: self.in_layer(in_layer.map(|(layer, _)| layer), &filled, *conversion)?,
            conversion: *conversion,
            part: *part,
            parts: own.collect(),
        })
    }

    /// The whole canonical name of what is in a layer, or in none.
    fn in_layer(&self, layer: Option<u64>, name: &str, conversion: Conversion) -> Option<String> {
        let Some(layer) = layer.filter(|_| conversion != Conversion::Replica) else {
            return Some(name.to_owned());
        };
        match self.first_prediction.and_then(|first| layer.checked_sub(first)) {
            None => (!name.starts_with('^')).then(|| format!("decoder.layers.{layer}.{name}")),
            Some(number) => Some(match name.strip_prefix('^') {
                Some(name) => format!("mtp.layers.{number}.{name}"),
                None => format!("mtp.layers.{number}.transformer_layer.{name}"),
            }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use Conversion::{HeadBlocks, Heads, Rows, Same, UpAndGate};

    fn reader(family: &str, names: &[&str]) -> FamilyReader {
        let family = FAMILIES.iter().find(|known| known.name == family).unwrap();
        family.reader(names.iter().copied())
    }

    #[track_caller]
    fn check(family: &str, expected: &[(&str, &str, Conversion)]) {
        let reader = reader(family, &[]);
        for (name, canonical, conversion) in expected {
            let place = reader.read(name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(
                (place.canonical.as_str(), place.conversion),
                (*canonical, *conversion),
                "{name}"
            );
            assert_eq!(place.parts[place.part], *name);
        }
    }

    #[test]
    fn a_part_knows_the_others() {
        let place = reader("llama", &[]).read("model.layers.7.self_attn.k_proj.bias").unwrap();
        assert_eq!(place.canonical, "decoder.layers.7.self_attention.linear_qkv.bias");
        assert_eq!((place.conversion, place.part), (Heads, 1));
        let parts =
            ["q", "k", "v"].map(|part| format!("model.layers.7.self_attn.{part}_proj.bias"));
        assert_eq!(place.parts, parts);
        let expert = reader("llama", &[]).read("layers.0.mlp.experts.12.up_proj.weight").unwrap();
        let canonical = "decoder.layers.0.mlp.experts.local_experts.12.linear_fc1.weight";
        assert_eq!((expert.canonical.as_str(), expert.part), (canonical, 1));
        assert_eq!(expert.parts[0], "layers.0.mlp.experts.12.gate_proj.weight");
    }

    #[test]
    fn a_body_is_known_with_its_name_in_front_and_without() {
        let reader = reader("gpt2", &[]);
        for name in ["transformer.h.3.ln_2.bias", "h.3.ln_2.bias"] {
            assert_eq!(
                reader.read(name).unwrap().canonical,
                "decoder.layers.3.pre_mlp_layernorm.bias"
            );
        }
        assert_eq!(reader.read("lm_head.weight").unwrap().canonical, "output_layer.weight");
        for name in
            ["other.h.3.ln_2.bias", "h.x.ln_2.bias", "h.3.x.ln_2.bias", "h.3", "ln_2.bias", ""]
        {
            assert_eq!(reader.read(name), None, "{name}");
        }
    }

    #[test]
    fn layers_behind_the_last_one_predict_further_tokens() {
        let names = ["model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"];
        let reader = reader("deepseek", &names);
        let canonical = |name: &str| reader.read(name).map(|place| place.canonical);
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(canonical(names[1]), is("mtp.layers.1.eh_proj.weight"));
        assert_eq!(
            canonical("model.layers.1.input_layernorm.weight"),
            is("decoder.layers.1.input_layernorm.weight")
        );
        assert_eq!(
            canonical("model.layers.2.input_layernorm.weight"),
            is("mtp.layers.0.transformer_layer.input_layernorm.weight")
        );
        assert_eq!(canonical("model.layers.2.shared_head.head.weight"), is("output_layer.weight"));
        assert_eq!(canonical("model.layers.1.enorm.weight"), None);
    }

    #[test]
    fn other_dialects_have_tables_of_their_own() {
        check(
            "GPT-NeoX",
            &[
                ("word_embeddings.weight", "embedding.word_embeddings.weight", Same),
                ("final.norm.scale", "decoder.final_layernorm.weight", Same),
                ("layers.1.mlp.linear1.bias", "decoder.layers.1.mlp.linear_fc1.bias", UpAndGate),
                ("layers.1.mlp.w3.weight", "decoder.layers.1.mlp.linear_fc1.weight", Rows),
                (
                    "layers.0.attention.query_key_value.weight",
                    "decoder.layers.0.self_attention.linear_qkv.weight",
                    HeadBlocks(Blocks::RowsIfShared),
                ),
            ],
        );
        check(
            "InfiniTrain Llama",
            &[
                (
                    "transformer.h.0.attn.c_attn.weight",
                    "decoder.layers.0.self_attention.linear_qkv.weight",
                    HeadBlocks(Blocks::Rotated),
                ),
                (
                    "transformer.h.0.mlp.c_fc2.weight",
                    "decoder.layers.0.mlp.linear_fc1.weight",
                    Rows,
                ),
            ],
        );
    }

    #[test]
    fn no_two_families_of_a_dialect_have_a_model_type_in_common() {
        for (at, family) in FAMILIES.iter().enumerate() {
            for other in FAMILIES[..at].iter().filter(|other| other.naming == family.naming) {
                let shared =
                    family.model_types.iter().find(|kind| other.model_types.contains(kind));
                assert_eq!(shared, None, "{} and {}", family.name, other.name);
            }
        }
    }
}
