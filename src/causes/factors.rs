//! What a constant factor is likely to be. Pure.

use super::facts::Facts;
use super::role::Role;

/// The relative distance from a number that a factor may have, for the roundings of both.
const CLOSE: f64 = 1.0 / 256.0;

/// Words for a factor of a tensor with this role, whose rows have `width` elements.
pub(super) fn meaning(factor: f64, role: Role, width: u64, facts: &Facts) -> Option<String> {
    let hidden = facts.hidden_size.unwrap_or(width);
    let of_hidden = roots(hidden, "hidden size");
    let of_head = facts.head_size.map(|size| roots(size, "head size")).unwrap_or_default();
    let of_layers =
        facts.layers.map(|layers| roots(2 * layers, "twice the layers")).unwrap_or_default();
    let is_attention =
        matches!(role, Role::Attention | Role::Queries | Role::Keys | Role::Values | Role::Output);
    let ranks = facts.rank_counts.iter().flat_map(|&count| {
        [
            (count as f64, format!("{count} ranks added up")),
            (1.0 / count as f64, format!("divided by {count} ranks")),
        ]
    });
    let simple = [(-1.0, "negated"), (2.0, "twice"), (0.5, "half")];
    let simple = simple.map(|(number, words)| (number, words.to_owned()));
    let mut known: Vec<(f64, String)> = Vec::new();
    match is_attention {
        true => known.extend(of_head.into_iter().chain(of_hidden)),
        false => known.extend(of_hidden.into_iter().chain(of_head)),
    }
    known.extend(ranks.chain(simple).chain(of_layers));
    let fits = |(number, _): &(f64, String)| (factor / number - 1.0).abs() <= CLOSE;
    known.into_iter().find(fits).map(|(_, words)| words)
}

/// The root of a size, and its inverse.
fn roots(size: u64, words: &str) -> Vec<(f64, String)> {
    if size < 2 {
        return Vec::new();
    }
    let root = (size as f64).sqrt();
    let of = |number: f64, text: &str| (number, format!("{text}({size}), {words}"));
    vec![of(root, "sqrt"), of(1.0 / root, "1/sqrt")]
}
