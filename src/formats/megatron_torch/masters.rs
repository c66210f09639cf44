//! Masters against weights: the proof that a `distrib_optim.pt` is another rank's.
//!
//! The file says nothing of its rank. But the optimizer copies its masters into the weights after every step (Megatron-LM
//! 23.06 to core 0.19, `distrib_optimizer.py`: `_copy_main_params_to_model_params`), so masters that round to the weights of
//! another rank, and not to those of the rank that they stand beside, are that other rank's. Masters that round to
//! no weights prove nothing: weights may be quantized, averaged or made by a converter.

use crate::base::dtype::Dtype;
use crate::base::extent::numel;
use crate::formats::error::OpenError;
use crate::names::megatron::is_expert_parameter;
use crate::storage::FileSet;
use crate::tensor::{ByteOrder, StoredTensor};

use super::optimizer::ParamState;
use super::rank_file::RankFile;

/// The kind of state that holds masters.
const MASTER: &str = "fp32_param";

/// Elements that are looked at, in runs that lie evenly in a tensor.
const RUNS: u64 = 8;
const RUN: u64 = 32;

/// Fewer elements with a weight other than zero tell nothing.
const FEWEST: usize = 32;

/// The largest difference by which a master rounds to a weight, as a part of the weight: twice the last digit of `bfloat16`,
/// so that rounding up, down and at random are all the same.
const ROUNDING: f32 = 1.0 / 64.0;

/// Masters whose owner is sought among all other ranks.
const SOUGHT: usize = 64;

/// For each rank, another one of them whose weights its masters are.
///
/// # Errors
/// A file cannot be read.
pub(super) fn owners(
    files: &FileSet,
    ranks: &[&RankFile],
) -> Result<Vec<Option<usize>>, OpenError> {
    let mut owners = vec![None; ranks.len()];
    let mut sought = 0;
    for (at, rank) in ranks.iter().enumerate() {
        for master in largest_masters(rank) {
            let Some(masters) = sample(files, &master.tensor)? else { continue };
            let fitting = |rank: &RankFile| {
                let weights = weight(rank, master).map(|weight| sample(files, weight));
                let weights = weights.transpose()?.flatten();
                Ok::<_, OpenError>(weights.and_then(|weights| fitting(&masters, &weights)))
            };
            if owners[at].is_some() || fitting(rank)?.is_none_or(|part| part > 0.5) {
                continue;
            }
            sought += 1;
            if sought > SOUGHT {
                return Ok(owners);
            }
            for (other, rank) in ranks.iter().enumerate().filter(|(other, _)| *other != at) {
                if fitting(rank)? == Some(1.0) {
                    owners[at] = Some(other);
                    break;
                }
            }
        }
    }
    Ok(owners)
}

/// The largest masters of a rank: that of an expert, which no other expert parallel rank has, and that of another parameter.
fn largest_masters(rank: &RankFile) -> impl Iterator<Item = &ParamState> {
    let states = rank.optimizer.as_ref().and_then(|optimizer| optimizer.states.get(MASTER));
    [true, false].into_iter().filter_map(move |of_experts| {
        let masters = states?.iter();
        let masters = masters.filter(|master| is_expert_parameter(&master.name) == of_experts);
        masters.max_by_key(|master| numel(master.tensor.shape()))
    })
}

/// The weight of the same parameter on a rank.
fn weight<'a>(rank: &'a RankFile, master: &ParamState) -> Option<&'a StoredTensor> {
    let params = &rank.optimizer.as_ref()?.params;
    let is_same = |chunk: u64, name: &str| chunk == master.chunk && name == &*master.name;
    let param = params.iter().find(|param| is_same(param.chunk, &param.name))?;
    (param.weight.shape() == master.tensor.shape()).then_some(&param.weight)
}

/// The part of the masters that round to their weights, of those whose weight is not zero.
fn fitting(masters: &[f32], weights: &[f32]) -> Option<f64> {
    let pairs = masters.iter().zip(weights).filter(|(_, weight)| **weight != 0.0);
    let fits = |(master, weight): (&f32, &f32)| (master - weight).abs() <= weight.abs() * ROUNDING;
    let (mut count, mut fitting) = (0_u32, 0_u32);
    for pair in pairs {
        count += 1;
        fitting += u32::from(fits(pair));
    }
    (count as usize >= FEWEST).then(|| f64::from(fitting) / f64::from(count))
}

/// Some elements of a tensor; `None` where they are of no type that has masters, or lie scattered.
#[expect(clippy::cast_possible_truncation, reason = "32 elements of four bytes at most")]
fn sample(files: &FileSet, tensor: &StoredTensor) -> Result<Option<Vec<f32>>, OpenError> {
    let decode: fn(&[u8]) -> Option<f32> = match tensor.dtype() {
        Dtype::Float32 => |bytes| Some(f32::from_le_bytes(*bytes.first_chunk()?)),
        Dtype::BFloat16 => |bytes| Some(bfloat16(u16::from_le_bytes(*bytes.first_chunk()?))),
        Dtype::Float16 => |bytes| Some(float16(u16::from_le_bytes(*bytes.first_chunk()?))),
        _ => return Ok(None),
    };
    let count = numel(tensor.shape()).unwrap_or(0);
    if !tensor.is_contiguous() || tensor.byte_order() == ByteOrder::Big || count == 0 {
        return Ok(None);
    }
    let len = RUN.min(count);
    let runs = RUNS.min(count.div_ceil(RUN));
    let size = tensor.dtype().size();
    let file = tensor.storage().file;
    let mut bytes = vec![0; (len * size) as usize];
    let mut sample = Vec::new();
    for run in 0..runs {
        let start = (count - len) / runs.saturating_sub(1).max(1) * run;
        // Within the storage, as every tensor is.
        let offset = tensor.storage().offset + (tensor.storage_offset() + start) * size;
        let read = files.read_exact_at(file, &mut bytes, offset);
        read.map_err(OpenError::io(files.path(file)))?;
        sample.extend(bytes.chunks_exact(size as usize).filter_map(decode));
    }
    Ok(Some(sample))
}

/// The upper half of an `f32`.
fn bfloat16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The exponent of an `f32` is biased by 112 more. Infinity comes out finite and large, which fits no weight.
fn float16(bits: u16) -> f32 {
    const BIAS: f32 = f32::from_bits((127 + 112) << 23);
    let size = f32::from_bits(u32::from(bits & 0x7fff) << 13) * BIAS;
    if bits >> 15 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_are_what_they_are() {
        for bits in [0_u16, 1, 0x03ff, 0x0400, 0x3c00, 0x7bff, 0x8001, 0xc248] {
            assert_eq!(float16(bits), half::f16::from_bits(bits).to_f32());
            assert_eq!(bfloat16(bits), half::bf16::from_bits(bits).to_f32());
        }
    }

    #[test]
    fn only_what_has_weights_tells_whose_it_is() {
        let masters: Vec<f32> = (1..=64).map(|index| 0.01 * index as f32).collect();
        let rounded: Vec<f32> =
            masters.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect();
        let others: Vec<f32> = masters.iter().map(|value| value * 1.1).collect();
        assert_eq!(fitting(&masters, &rounded), Some(1.0));
        assert_eq!(fitting(&masters, &others), Some(0.0));
        assert_eq!(fitting(&masters, &[0.0; 64]), None);
        assert_eq!(fitting(&masters[..8], &rounded[..8]), None);
        assert_eq!(fitting(&[f32::NAN; 64], &rounded), Some(0.0));
    }
}
