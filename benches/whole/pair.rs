//! Writes synthetic Megatron checkpoints for the benchmark: real names, keys, shapes and sharding; random values.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use rawzip::{CompressionMethod, ZipArchiveWriter};

const HIDDEN: u64 = 2048;
const FFN: u64 = 5504;
const QKV: u64 = 3072;
const VOCAB: u64 = 32_000;
const EXPERTS: u64 = 8;

/// Element type of all weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    BFloat16,
    Float32,
}

impl Weights {
    fn size(self) -> usize {
        match self {
            Self::BFloat16 => 2,
            Self::Float32 => 4,
        }
    }

    fn storage(self) -> &'static str {
        match self {
            Self::BFloat16 => "BFloat16Storage",
            Self::Float32 => "FloatStorage",
        }
    }
}

/// How the experts of a layer are stored, if there are any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    Dense,
    Grouped,
    TeGrouped,
}

/// One checkpoint to write.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub weights: Weights,
    pub mlp: Mlp,
    pub tp: u64,
    pub bytes: u64,
    /// Other values: a low bit of most elements differs.
    pub is_noisy: bool,
}

#[derive(Clone, Copy)]
enum Cut {
    Whole,
    Rows,
    Columns,
    /// Rows of the gate, then rows of the other half.
    Halves,
    /// All experts in one tensor, as `[experts, columns, rows]` in memory.
    Stacked,
}

struct Tensor {
    name: String,
    rows: u64,
    columns: u64,
    cut: Cut,
    /// Place of its first element in the stream of random values.
    seed: u64,
}

/// Writes the checkpoint; one rank at a time, so that little memory is needed.
pub fn write(root: &Path, spec: Spec) -> io::Result<()> {
    let folder = root.join("iter_0000001");
    let tensors = tensors(spec);
    let pool = Pool::new(spec);
    for rank in 0..spec.tp {
        let rank_folder = folder.join(format!("mp_rank_{rank:02}"));
        fs::create_dir_all(&rank_folder)?;
        let file = File::create(rank_folder.join("model_optim_rng.pt"))?;
        write_rank(BufWriter::with_capacity(1 << 20, file), spec, &tensors, &pool, rank)?;
    }
    fs::write(root.join("latest_checkpointed_iteration.txt"), "1")
}

fn tensors(spec: Spec) -> Vec<Tensor> {
    let layer_bytes = match spec.mlp {
        Mlp::Dense => HIDDEN * (QKV + HIDDEN + 3 * FFN),
        Mlp::Grouped | Mlp::TeGrouped => HIDDEN * (QKV + HIDDEN + EXPERTS * (3 * FFN + 1)),
    } * spec.weights.size() as u64;
    let ends = 2 * VOCAB * HIDDEN * spec.weights.size() as u64;
    let layers = (spec.bytes.saturating_sub(ends) / layer_bytes).max(1);
    let mut tensors = Vec::new();
    let mut add = |name: String, rows, columns, cut, seed: &str| {
        let seed = seed.bytes().fold(7_u64, |sum, byte| sum * 31 + u64::from(byte));
        tensors.push(Tensor { name, rows, columns, cut, seed: seed % (1 << 40) });
    };
    let plain = |name: &str| name.to_owned();
    add(plain("embedding.word_embeddings.weight"), VOCAB, HIDDEN, Cut::Rows, "e");
    for layer in 0..layers {
        let at = |name: &str| format!("decoder.layers.{layer}.{name}");
        let mut weight = |name: &str, rows, columns, cut| {
            add(at(name), rows, columns, cut, &at(name));
        };
        weight("input_layernorm.weight", 1, HIDDEN, Cut::Whole);
        weight("self_attention.linear_qkv.weight", QKV, HIDDEN, Cut::Rows);
        weight("self_attention.linear_proj.weight", HIDDEN, HIDDEN, Cut::Columns);
        weight("pre_mlp_layernorm.weight", 1, HIDDEN, Cut::Whole);
        match spec.mlp {
            Mlp::Dense => {
                weight("mlp.linear_fc1.weight", 2 * FFN, HIDDEN, Cut::Halves);
                weight("mlp.linear_fc2.weight", HIDDEN, FFN, Cut::Columns);
            }
            Mlp::TeGrouped => {
                weight("mlp.router.weight", EXPERTS, HIDDEN, Cut::Whole);
                for expert in 0..EXPERTS {
                    let seed = |linear| at(&format!("{linear}.{expert}"));
                    let name = |linear| at(&format!("mlp.experts.{linear}.weight{expert}"));
                    add(name("linear_fc1"), 2 * FFN, HIDDEN, Cut::Halves, &seed("linear_fc1"));
                    add(name("linear_fc2"), HIDDEN, FFN, Cut::Columns, &seed("linear_fc2"));
                }
            }
            Mlp::Grouped => {
                weight("mlp.router.weight", EXPERTS, HIDDEN, Cut::Whole);
                add(at("mlp.experts.weight1"), 2 * FFN, HIDDEN, Cut::Stacked, &at("linear_fc1"));
                add(at("mlp.experts.weight2"), HIDDEN, FFN, Cut::Stacked, &at("linear_fc2"));
            }
        }
    }
    add(plain("decoder.final_layernorm.weight"), 1, HIDDEN, Cut::Whole, "f");
    add(plain("output_layer.weight"), VOCAB, HIDDEN, Cut::Rows, "o");
    tensors
}

/// A stream of random weights, long enough that its repetition does not matter.
struct Pool(Vec<u8>, usize);

impl Pool {
    fn new(spec: Spec) -> Self {
        const ELEMENTS: usize = 1 << 22;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::with_capacity(ELEMENTS * spec.weights.size());
        for _ in 0..ELEMENTS {
            let mut uniform = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1 << 24) as f32 - 0.5
            };
            let normal = 0.02 * (uniform() + uniform() + uniform() + uniform()) * 1.7;
            let noise = u32::from(spec.is_noisy && uniform() > -0.3);
            match spec.weights {
                Weights::Float32 => {
                    bytes.extend_from_slice(&(normal.to_bits() ^ (noise << 12)).to_le_bytes());
                }
                Weights::BFloat16 => {
                    let bits = u16::try_from((normal.to_bits() >> 16) ^ noise).unwrap_or(0);
                    bytes.extend_from_slice(&bits.to_le_bytes());
                }
            }
        }
        Self(bytes, spec.weights.size())
    }

    /// Writes the elements `start..start + count` of the stream.
    fn write(&self, out: &mut impl Write, start: u64, count: u64) -> io::Result<()> {
        let size = self.1;
        let (mut at, mut left) = ((start as usize * size) % self.0.len(), count as usize * size);
        while left > 0 {
            let take = left.min(self.0.len() - at);
            out.write_all(&self.0[at..at + take])?;
            left -= take;
            at = 0;
        }
        Ok(())
    }
}

impl Tensor {
    fn shape(&self, tp: u64) -> Vec<u64> {
        match self.cut {
            Cut::Whole if self.rows == 1 => vec![self.columns],
            Cut::Whole => vec![self.rows, self.columns],
            Cut::Rows | Cut::Halves => vec![self.rows / tp, self.columns],
            Cut::Columns => vec![self.rows, self.columns / tp],
            // weight1 is [h, experts * rows], weight2 is [experts * columns, h].
            Cut::Stacked if self.name.ends_with('1') => vec![self.columns, EXPERTS * self.rows],
            Cut::Stacked => vec![EXPERTS * self.columns, self.rows],
        }
    }

    fn write(&self, out: &mut impl Write, pool: &Pool, tp: u64, rank: u64) -> io::Result<()> {
        let Self { rows, columns, seed, .. } = *self;
        match self.cut {
            Cut::Whole => pool.write(out, seed, rows * columns),
            Cut::Rows => {
                let part = rows / tp * columns;
                pool.write(out, seed + rank * part, part)
            }
            Cut::Halves => {
                let part = rows / 2 / tp * columns;
                pool.write(out, seed + rank * part, part)?;
                pool.write(out, seed + rows / 2 * columns + rank * part, part)
            }
            Cut::Columns => {
                let part = columns / tp;
                (0..rows)
                    .try_for_each(|row| pool.write(out, seed + row * columns + rank * part, part))
            }
            Cut::Stacked => (0..EXPERTS).try_for_each(|expert| {
                let name = self.name.trim_end_matches(['1', '2']);
                let linear = if self.name.ends_with('1') { "linear_fc1" } else { "linear_fc2" };
                let name = name.replace("mlp.experts.weight", linear);
                let seed = format!("{name}.{expert}");
                let seed =
                    seed.bytes().fold(7_u64, |sum, byte| sum * 31 + u64::from(byte)) % (1 << 40);
                let mut block = vec![Vec::new(); 1];
                for column in 0..columns {
                    block[0].clear();
                    for row in 0..rows {
                        pool.write(&mut block[0], seed + row * columns + column, 1)?;
                    }
                    out.write_all(&block[0])?;
                }
                Ok(())
            }),
        }
    }
}

fn write_rank(
    out: impl Write,
    spec: Spec,
    tensors: &[Tensor],
    pool: &Pool,
    rank: u64,
) -> io::Result<()> {
    let mut zip = ZipArchiveWriter::new(out);
    let mut entry = |name: &str, write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>| {
        let start = zip.new_file(name).compression_method(CompressionMethod::STORE).start();
        let (mut entry, config) = start.map_err(io::Error::other)?;
        let mut writer = config.wrap(&mut entry);
        write(&mut writer)?;
        let (_, descriptor) = writer.finish().map_err(io::Error::other)?;
        entry.finish(descriptor).map_err(io::Error::other)?;
        Ok::<(), io::Error>(())
    };
    let pickle = pickle(spec, tensors);
    entry("archive/data.pkl", &mut |out| out.write_all(&pickle))?;
    for (key, tensor) in tensors.iter().enumerate() {
        entry(&format!("archive/data/{key}"), &mut |mut out| {
            tensor.write(&mut out, pool, spec.tp, rank)
        })?;
    }
    zip.finish().map_err(io::Error::other)?.flush()
}

/// The pickle of one rank, protocol 2, as `torch.save` writes it but without memos.
fn pickle(spec: Spec, tensors: &[Tensor]) -> Vec<u8> {
    let mut out = b"\x80\x02}(".to_vec();
    text(&mut out, "args");
    out.extend_from_slice(b"cargparse\nNamespace\n)\x81}(");
    let has_experts = spec.mlp != Mlp::Dense;
    for (fact, value) in [
        ("tensor_model_parallel_size", spec.tp),
        ("pipeline_model_parallel_size", 1),
        ("expert_model_parallel_size", 1),
        ("num_experts", EXPERTS),
    ] {
        text(&mut out, fact);
        if fact == "num_experts" && !has_experts { out.push(b'N') } else { int(&mut out, value) }
    }
    text(&mut out, "swiglu");
    out.push(0x88);
    text(&mut out, "untie_embeddings_and_output_weights");
    out.push(0x88);
    out.extend_from_slice(b"ub");
    text(&mut out, "checkpoint_version");
    out.push(b'G');
    out.extend_from_slice(&3.0_f64.to_be_bytes());
    text(&mut out, "iteration");
    int(&mut out, 1);
    text(&mut out, "model");
    out.extend_from_slice(b"}(");
    for (key, tensor) in tensors.iter().enumerate() {
        let shape = tensor.shape(spec.tp);
        let numel: u64 = shape.iter().product();
        text(&mut out, &tensor.name);
        out.extend_from_slice(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut out, "storage");
        out.extend_from_slice(format!("ctorch\n{}\n", spec.weights.storage()).as_bytes());
        text(&mut out, &key.to_string());
        text(&mut out, "cpu");
        int(&mut out, numel);
        out.extend_from_slice(b"tQ");
        int(&mut out, 0);
        out.push(b'(');
        shape.iter().for_each(|&size| int(&mut out, size));
        out.extend_from_slice(b"t(");
        let strides = if shape.len() == 2 { vec![shape[1], 1] } else { vec![1] };
        strides.iter().for_each(|&stride| int(&mut out, stride));
        out.extend_from_slice(b"t\x89}tR");
    }
    out.extend_from_slice(b"uu.");
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend_from_slice(&u32::try_from(text.len()).unwrap_or(0).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn int(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(b"\x8a\x08");
    out.extend_from_slice(&value.to_le_bytes());
}
