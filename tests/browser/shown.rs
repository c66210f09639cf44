//! What the page has to show for a tensor of the document, in words of its own.

use std::collections::BTreeMap;

use serde_json::Value;

/// Numbers above the table by their titles, and where the document has them.
pub(crate) const NUMBERS: [(&str, &str); 8] = [
    ("compared", "/totals/compared"),
    ("elements", "/totals/elements"),
    ("pass", "/totals/passing"),
    ("do not pass", "/totals/failing"),
    ("only in a", "/totals/only_in/a"),
    ("only in b", "/totals/only_in/b"),
    ("copies that disagree", "/totals/replicas_that_disagree"),
    ("problems", "/totals/problems"),
];

/// Longest name in a row.
const LONGEST: usize = 76;

/// The texts of a tensor's row by the headings of the table.
pub(crate) fn row_of(tensor: &Value) -> BTreeMap<&'static str, String> {
    let metrics = &tensor["metrics"];
    let number = |key: &str| scientific(metrics[key].as_f64());
    let worst = |key: &str| tensor["worst"][key].as_str().unwrap_or_default().to_owned();
    let differing = metrics["differing"].as_u64();
    let numel = tensor["numel"]["a"].as_u64().unwrap();
    let [nan_a, nan_b, inf_a, inf_b] =
        ["nan_a", "nan_b", "inf_a", "inf_b"].map(|key| metrics[key].as_u64().unwrap_or(0));
    let is_finite = nan_a + nan_b + inf_a + inf_b == 0;
    BTreeMap::from([
        ("tensor", shortened(tensor["name"].as_str().unwrap())),
        ("verdict", tensor["verdict"].as_str().unwrap().to_owned()),
        ("rel_l2", number("rel_l2")),
        ("1 − cos", number("one_minus_cos")),
        ("l2", number("l2")),
        ("max_abs", number("max_abs")),
        ("max_ulp", number("max_ulp")),
        ("differing", differing.map_or("–".to_owned(), grouped)),
        ("share", differing.map_or("–".to_owned(), |count| percent(count, numel))),
        (
            "NaN, Inf",
            if is_finite { String::new() } else { format!("{nan_a}|{nan_b}, {inf_a}|{inf_b}") },
        ),
        (
            "worst at",
            tensor["worst"]["index"].as_array().map_or(String::new(), |index| list(index)),
        ),
        ("in a", worst("a")),
        ("in b", worst("b")),
        ("dtype", both(tensor, "dtype", |value| value.as_str().unwrap().to_owned())),
        ("shape", both(tensor, "shape", |value| list(value.as_array().unwrap()))),
    ])
}

fn both(tensor: &Value, key: &str, text: impl Fn(&Value) -> String) -> String {
    let [a, b] = ["a", "b"].map(|side| text(&tensor[key][side]));
    if a == b { a } else { format!("{a} | {b}") }
}

fn list(values: &[Value]) -> String {
    let texts: Vec<String> = values.iter().map(ToString::to_string).collect();
    format!("[{}]", texts.join(", "))
}

/// Four digits and an exponent; small whole numbers as they are.
pub(crate) fn scientific(value: Option<f64>) -> String {
    let Some(value) = value else { return "–".to_owned() };
    let text = format!("{value:.3e}");
    let rounded: f64 = text.parse().unwrap();
    if rounded.fract() == 0.0 && rounded.abs() < 10_000.0 {
        format!("{}", rounded + 0.0)
    } else {
        text
    }
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).unwrap())
        .collect();
    groups.join(",")
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 || part == 0 {
        return "0 %".to_owned();
    }
    if part == whole {
        return "100 %".to_owned();
    }
    let share = (100.0 * part as f64 / whole as f64).clamp(0.01, 99.99);
    // Halves go up in a browser.
    let share = share + 1e-9;
    let decimals = if !(10.0..=99.0).contains(&share) { 2 } else { 1 };
    format!("{share:.decimals$} %")
}

/// The text as it is shown: with escapes for what is not seen but obeyed.
pub(crate) fn printable(text: &str) -> String {
    ckptcmp::names::printable(text).into_owned()
}

/// The name as it is in a row: without its middle where it is long.
pub(crate) fn shortened(name: &str) -> String {
    let units: Vec<u16> = printable(name).encode_utf16().collect();
    if units.len() <= LONGEST {
        return printable(name);
    }
    let start = LONGEST / 2;
    let end = units.len() - (LONGEST - 1 - start);
    let parts = [&units[..start], &units[end..]].map(String::from_utf16_lossy);
    parts.join("…")
}
