//! Parts of another dialect -> the canonical tensor, or those of all experts, as views.

use crate::base::limits::{LIMITS, OverLimit};
use crate::names::families::{Blocks, Conversion, Packed};
use crate::tensor::{LogicalTensor, TensorError};

use super::PartialTensor;
use super::attention::{HeadCounts, Rows, first_dim};

/// The result of one row: a tensor, or one for each expert. An error tells which part is to blame.
pub(super) fn converted(
    partial: &PartialTensor,
    counts: &HeadCounts,
) -> Result<Vec<LogicalTensor>, (usize, String)> {
    let present: Vec<&LogicalTensor> = partial.parts.iter().flatten().collect();
    if present.len() != partial.parts.len() {
        let missing = partial.parts.iter().position(Option::is_none).unwrap_or(0);
        return Err((missing, "missing, though its siblings are there".to_owned()));
    }
    convert(partial.conversion, &present, counts).map_err(|message| (0, message))
}

fn convert(
    conversion: Conversion,
    parts: &[&LogicalTensor],
    counts: &HeadCounts,
) -> Result<Vec<LogicalTensor>, String> {
    let text = |error: TensorError| error.to_string();
    let tensor = match (conversion, parts) {
        (Conversion::Same | Conversion::Replica, [tensor]) => Ok((*tensor).clone()),
        (Conversion::Transposed, [tensor]) => tensor.transpose(0, 1).map_err(text),
        (Conversion::Rows, parts) => concat(0, parts.iter().copied().cloned()),
        (Conversion::UpAndGate, [tensor]) => match counts.is_gated {
            true => swapped(tensor).map_err(text),
            false => Ok((*tensor).clone()),
        },
        (Conversion::Heads, [query, key, value]) => {
            let rows = counts.of_parts([query, key, value])?;
            by_group([(*query).clone(), (*key).clone(), (*value).clone()], rows).map_err(text)
        }
        (Conversion::HeadBlocks(blocks), [tensor]) => head_blocks(tensor, blocks, counts),
        (Conversion::Experts(packed), [tensor]) => return experts(tensor, packed),
        _ => Err("has other parts than its row says".to_owned()),
    };
    Ok(vec![tensor?])
}

fn concat(
    dim: usize,
    parts: impl IntoIterator<Item = LogicalTensor>,
) -> Result<LogicalTensor, String> {
    LogicalTensor::concat(dim, parts).map_err(|error| error.to_string())
}

/// Rows of all queries, all keys, all values as `[groups, queries of a group + 2, head size]`.
fn by_group(parts: [LogicalTensor; 3], rows: Rows) -> Result<LogicalTensor, TensorError> {
    let [query, key, value] = parts;
    let queries = rows.heads / rows.groups * rows.size;
    let parts = [
        query.split_axis(0, queries)?,
        key.split_axis(0, rows.size)?,
        value.split_axis(0, rows.size)?,
    ];
    LogicalTensor::concat(1, parts)?.merge_axes(0)
}

/// The second half of the rows before the first one.
fn swapped(tensor: &LogicalTensor) -> Result<LogicalTensor, TensorError> {
    let half = first_dim(tensor) / 2;
    let parts = [tensor.slice(0, half, first_dim(tensor) - half)?, tensor.slice(0, 0, half)?];
    LogicalTensor::concat(0, parts)
}

fn head_blocks(
    tensor: &LogicalTensor,
    blocks: Blocks,
    counts: &HeadCounts,
) -> Result<LogicalTensor, String> {
    let text = |error: TensorError| error.to_string();
    let tensor = match blocks {
        Blocks::Columns => tensor.transpose(0, 1).map_err(text)?,
        _ => tensor.clone(),
    };
    let rows = counts.of_blocks(first_dim(&tensor))?;
    if blocks == Blocks::RowsIfShared && rows.groups == rows.heads {
        return Ok(tensor);
    }
    let is_rotated = blocks == Blocks::Rotated && !counts.are_pairs_rotated;
    let taken_apart = || {
        let (query, key) = (rows.heads * rows.size, rows.groups * rows.size);
        let parts = [(0, query), (query, key), (query + key, key)];
        let [query, key, value] = parts.map(|(start, len)| tensor.slice(0, start, len));
        let (query, key) = match is_rotated {
            true => (halves(&query?, rows.size)?, halves(&key?, rows.size)?),
            false => (query?, key?),
        };
        by_group([query, key, value?], rows)
    };
    taken_apart().map_err(text)
}

/// Rows of each head in the order of halves instead of pairs: first those that lead a pair.
fn halves(tensor: &LogicalTensor, size: u64) -> Result<LogicalTensor, TensorError> {
    let pairs = tensor.split_axis(0, size)?.split_axis(1, 2)?;
    pairs.transpose(1, 2)?.merge_axes(1)?.merge_axes(0)
}

fn experts(tensor: &LogicalTensor, packed: Packed) -> Result<Vec<LogicalTensor>, String> {
    if first_dim(tensor) > LIMITS.experts {
        let over = OverLimit::found("experts in one layer", LIMITS.experts, first_dim(tensor));
        return Err(over.to_string());
    }
    let each = |tensor: &LogicalTensor| {
        let is_turned = matches!(packed, Packed::Transposed | Packed::TransposedPairs);
        let tensor = if is_turned { tensor.transpose(0, 1)? } else { tensor.clone() };
        match packed {
            Packed::Pairs | Packed::TransposedPairs => {
                tensor.split_axis(0, 2)?.transpose(0, 1)?.merge_axes(0)
            }
            Packed::Plain | Packed::Transposed => Ok(tensor),
        }
    };
    let parts = tensor.unbind(0).map_err(|error| error.to_string())?;
    parts.iter().map(each).collect::<Result<_, _>>().map_err(|error| error.to_string())
}
