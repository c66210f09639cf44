//! The `.bin` files of llm.c that InfiniTrain starts from: a header of 256 integers, then one array after another.
//!
//! Facts from InfiniTrain 0.6.0 (`example/gpt2/checkpoint_loader.cc`, `example/llama3/checkpoint_loader.cc`), which
//! follow llm.c (`train_gpt2.py`, `train_llama3.py`, `write_model`). Little-endian, every kind of parameter for all
//! layers together, weights as `[out, in]`. The names are InfiniTrain's.

use std::collections::BTreeMap;
use std::path::Path;

use crate::base::dtype::Dtype;
use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;
use crate::catalog::{Catalog, CatalogBuilder, Origin, Section};
use crate::formats::error::OpenError;
use crate::formats::format::OpenOptions;
use crate::formats::walk::Bounds;
use crate::names::{Name, Naming};
use crate::storage::{FileId, FileSet, Region};
use crate::tensor::{ByteOrder, LogicalTensor, StoredTensor};

use super::rules::in_layer;
use super::{LM_HEAD, WTE};

/// The model that a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Model {
    Gpt2,
    Llama3,
}

/// 256 integers of 32 bits.
const HEADER: usize = 1024;
/// The byte at which the first array begins.
const START: u64 = HEADER as u64;

/// The header's first numbers, behind magic and version.
const GPT2_FIELDS: [&str; 6] =
    ["block_size", "vocab_size", "n_layer", "n_head", "n_embd", "padded_vocab_size"];
const LLAMA3_FIELDS: [&str; 6] =
    ["block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd"];

/// Reads a file: its header tells all shapes, and these must come to just its length.
///
/// # Errors
/// The header is of another version or says what no model has, or the file is shorter or longer than it says.
pub(super) fn read(
    files: FileSet,
    file: FileId,
    model: Model,
    options: &OpenOptions,
) -> Result<Catalog, OpenError> {
    let path = files.path(file).to_path_buf();
    let content = |what: String| OpenError::Content { path: path.clone(), what };
    let region = files.whole(file);
    let mut bytes = [0; HEADER];
    if region.len < START {
        let what = format!("cut off at byte {}, inside its header of {HEADER} bytes", region.len);
        return Err(content(what));
    }
    files.read_exact_at(file, &mut bytes, 0).map_err(OpenError::io(&path))?;
    let header = Header::parse(&bytes, model).map_err(content)?;
    let arrays = header.arrays().ok_or_else(|| content(header.is_absurd()))?;
    let mut bounds = Bounds::new(&path);
    let mut found = Vec::new();
    let mut at = START;
    for Array { name, shape, is_per_layer } in arrays {
        for layer in 0..if is_per_layer { header.field("n_layer") } else { 1 } {
            let name = if is_per_layer { in_layer(layer, name) } else { name.to_owned() };
            let bytes = crate::base::extent::numel(&shape)
                .and_then(|numel| numel.checked_mul(header.dtype.size()))
                .ok_or_else(|| content(header.is_absurd()))?;
            let Some(data) = region.part(at, bytes) else {
                let end = at.saturating_add(bytes);
                let len = region.len;
                let what = format!("cut off at byte {len}: {name} ends at byte {end}");
                return Err(content(what));
            };
            bounds.enter(&name, 0).map_err(|excess| content(format!("the file has {excess}")))?;
            found.push((name, shape.clone(), data));
            at = data.offset + data.len;
        }
    }
    if at < region.len {
        let what = format!("{} bytes behind its last tensor, from byte {at} on", region.len - at);
        return Err(content(what));
    }
    header.catalog(&path, files, found, options).map_err(content)
}

struct Header {
    model: Model,
    dtype: Dtype,
    version: u32,
    /// The integers by InfiniTrain's names.
    fields: BTreeMap<&'static str, u64>,
    /// The factor of the size of Llama's MLP.
    ffn_dim_multiplier: f32,
    multiple_of: u64,
}

/// One kind of parameter.
struct Array {
    name: &'static str,
    shape: Vec<u64>,
    is_per_layer: bool,
}

impl Header {
    fn parse(bytes: &[u8; HEADER], model: Model) -> Result<Self, String> {
        let word = |index: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[4 * index..4 * index + 4]);
            word
        };
        let version = u32::from_le_bytes(word(1));
        let dtype = match version {
            3 => Dtype::Float32,
            5 => Dtype::BFloat16,
            _ => {
                return Err(format!(
                    "version {version} of llm.c's format; versions 3 (float32) and 5 (bfloat16) are read"
                ));
            }
        };
        let names = match model {
            Model::Gpt2 => GPT2_FIELDS,
            Model::Llama3 => LLAMA3_FIELDS,
        };
        let mut fields = BTreeMap::new();
        for (index, name) in (2..).zip(names) {
            let number = i32::from_le_bytes(word(index));
            let value = u64::try_from(number).ok().filter(|&value| value > 0);
            fields.insert(name, value.ok_or_else(|| format!("its header says {name}={number}"))?);
        }
        let (ffn_dim_multiplier, multiple_of) = match model {
            Model::Gpt2 => (0.0, 1),
            Model::Llama3 => (f32::from_le_bytes(word(8)), u64::from(u32::from_le_bytes(word(9)))),
        };
        if multiple_of == 0 {
            return Err("its header says multiple_of=0".to_owned());
        }
        Ok(Self { model, dtype, version, fields, ffn_dim_multiplier, multiple_of })
    }

    fn field(&self, name: &str) -> u64 {
        self.fields.get(name).copied().unwrap_or(0)
    }

    fn is_absurd(&self) -> String {
        let fields = self.fields.iter().map(|(name, value)| format!("{name}={value}"));
        format!("its header describes no model: {}", fields.collect::<Vec<_>>().join(" "))
    }

    /// All arrays in their order; `None` where the header's numbers do not go together.
    fn arrays(&self) -> Option<Vec<Array>> {
        let [embd, heads, layers] = ["n_embd", "n_head", "n_layer"].map(|name| self.field(name));
        if !embd.is_multiple_of(heads) || layers > LIMITS.layers {
            return None;
        }
        let one = |name, shape: &[u64]| Array { name, shape: shape.to_vec(), is_per_layer: false };
        let each = |name, shape: &[u64]| Array { name, shape: shape.to_vec(), is_per_layer: true };
        // Numbers of 31 bits: none of these products overflows.
        Some(match self.model {
            Model::Gpt2 => vec![
                one(WTE, &[self.field("padded_vocab_size"), embd]),
                one("transformer.wpe.weight", &[self.field("block_size"), embd]),
                each("ln_1.weight", &[embd]),
                each("ln_1.bias", &[embd]),
                each("attn.c_attn.weight", &[3 * embd, embd]),
                each("attn.c_attn.bias", &[3 * embd]),
                each("attn.c_proj.weight", &[embd, embd]),
                each("attn.c_proj.bias", &[embd]),
                each("ln_2.weight", &[embd]),
                each("ln_2.bias", &[embd]),
                each("mlp.c_fc.weight", &[4 * embd, embd]),
                each("mlp.c_fc.bias", &[4 * embd]),
                each("mlp.c_proj.weight", &[embd, 4 * embd]),
                each("mlp.c_proj.bias", &[embd]),
                one("transformer.ln_f.weight", &[embd]),
                one("transformer.ln_f.bias", &[embd]),
            ],
            Model::Llama3 => {
                let vocab = self.field("vocab_size");
                let rows = embd + 2 * self.field("n_kv_head") * (embd / heads);
                let ffn = self.llama_ffn(embd)?;
                vec![
                    one(WTE, &[vocab, embd]),
                    each("ln_1.weight", &[embd]),
                    each("attn.c_attn.weight", &[rows, embd]),
                    each("attn.c_proj.weight", &[embd, embd]),
                    each("ln_2.weight", &[embd]),
                    each("mlp.c_fc.weight", &[ffn, embd]),
                    each("mlp.c_fc2.weight", &[ffn, embd]),
                    each("mlp.c_proj.weight", &[embd, ffn]),
                    one("transformer.ln_f.weight", &[embd]),
                    one(LM_HEAD, &[vocab, embd]),
                ]
            }
        })
    }

    /// Two thirds of four times the width, times the multiplier where there is one, up to a multiple.
    fn llama_ffn(&self, embd: u64) -> Option<u64> {
        let plain = 2 * (4 * embd) / 3;
        let hidden = if self.ffn_dim_multiplier > 0.0 {
            let plain = u32::try_from(plain).ok()?;
            let scaled = (f64::from(self.ffn_dim_multiplier) * f64::from(plain)).round();
            if scaled > 1e12 {
                return None;
            }
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "0 to 1e12"
            )]
            let rows = scaled as u64;
            rows
        } else {
            plain
        };
        Some(hidden.div_ceil(self.multiple_of) * self.multiple_of)
    }

    fn catalog(
        &self,
        path: &Path,
        files: FileSet,
        found: Vec<(String, Vec<u64>, Region)>,
        options: &OpenOptions,
    ) -> Result<Catalog, String> {
        let origin = Origin {
            format: super::FORMAT.name,
            writer: Some(format!("llm.c version {}", self.version)),
            shards: 1,
            naming: Naming::InfiniTrain,
            ..Origin::default()
        };
        let mut catalog = CatalogBuilder::new(origin, files);
        let state = self.fields.iter().filter_map(|(name, value)| {
            Some(((*name).to_owned(), PlainValue::Int(i64::try_from(*value).ok()?)))
        });
        catalog.add_state(path, state);
        if !options.wants(Section::Model) {
            return Ok(catalog.finish());
        }
        for (name, shape, data) in found {
            let stored = StoredTensor::contiguous(self.dtype, shape, data, ByteOrder::Little)
                .map_err(|error| format!("{name}: {error}"))?;
            let tensor = LogicalTensor::from_stored(&stored, name.as_str());
            catalog.add(Name::new(name), tensor);
        }
        if self.model == Model::Gpt2 {
            catalog.tie(Name::new(LM_HEAD), Name::new(WTE));
        }
        Ok(catalog.finish())
    }
}
