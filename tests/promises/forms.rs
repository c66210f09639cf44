//! Promise: every form of a report says what the document says, from a run or from a saved document, whatever names are in it.

#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Copied, Run, ckptcmp, fixture, flip, layout, read_json};
use ckptcmp::{CompareOptions, OpenOptions, Style};
use serde_json::{Value, json};
use tempfile::TempDir;

const SUFFIXES: [&str; 4] = ["json", "md", "csv", "xml"];

/// A safetensors file with tensors of three numbers, of which the second is `second`.
fn named_tensors(path: &Path, names: &[&str], second: f32) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for name in names {
        let start = data.len();
        data.extend([1.0, second, 3.0].iter().flat_map(|value: &f32| value.to_le_bytes()));
        let entry = json!({"dtype": "F32", "shape": [3], "data_offsets": [start, data.len()]});
        header.insert((*name).to_owned(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
}

/// Compares two paths and writes every form; returns the exit code and the forms by suffix.
fn compare(
    folder: &TempDir,
    a: &Path,
    b: &Path,
    flags: &[&str],
) -> (i32, BTreeMap<&'static str, String>) {
    let mut command = ckptcmp();
    command.arg("compare").args([a, b]).args(["--force", "--quiet", "-o", "/dev/null"]).args(flags);
    let path = |suffix: &str| folder.path().join(format!("report.{suffix}"));
    for suffix in SUFFIXES {
        command.arg("--report").arg(path(suffix));
    }
    let run = Run::of(&mut command);
    let read = |suffix| (suffix, fs::read_to_string(path(suffix)).unwrap());
    (run.code, SUFFIXES.map(read).into())
}

/// The fields of a CSV file, by RFC 4180.
fn fields(text: &str) -> Vec<Vec<String>> {
    let mut rows = vec![vec![String::new()]];
    let (mut chars, mut is_quoted) = (text.chars().peekable(), false);
    while let Some(char) = chars.next() {
        let row = rows.last_mut().unwrap();
        match char {
            '"' if is_quoted && chars.next_if_eq(&'"').is_some() => {
                row.last_mut().unwrap().push('"');
            }
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => row.push(String::new()),
            '\r' if !is_quoted && chars.next_if_eq(&'\n').is_some() => {
                rows.push(vec![String::new()]);
            }
            char => row.last_mut().unwrap().push(char),
        }
    }
    assert_eq!(rows.pop(), Some(vec![String::new()]), "the last line ends");
    rows
}

/// Holds every form against the document.
fn assert_same(forms: &BTreeMap<&str, String>, place: &str) {
    let document: Value = serde_json::from_str(&forms["json"]).unwrap();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let rows = fields(&forms["csv"]);
    let width = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == width), "{place}");
    let column = |name: &str| rows[0].iter().position(|one| one == name).unwrap();
    let tensors = list(&document["tensors"]);
    for (tensor, row) in tensors.iter().zip(&rows[1..]) {
        for metric in ["l2", "cos", "rel_l2", "max_abs", "norm_a"] {
            let expected = tensor["metrics"][metric].as_f64();
            assert_eq!(row[column(metric)].parse().ok(), expected, "{place}: {metric}");
        }
        assert_eq!(row[column("passes")], tensor["passes"].to_string(), "{place}");
    }
    let fails = rows[1..].iter().any(|row| row[column("passes")] != "true");
    assert_eq!(fails, document["passes"] == false, "{place}: a line of the CSV fails");

    let xml = roxmltree::Document::parse(&forms["xml"]).unwrap();
    let count = |name: &str| xml.descendants().filter(|node| node.has_tag_name(name)).count();
    let told = |name: &str| xml.root_element().attribute(name).unwrap().parse::<usize>().unwrap();
    let (tests, failures, errors) = (count("testcase"), count("failure"), count("error"));
    assert_eq!((tests, failures, errors), (told("tests"), told("failures"), told("errors")));
    assert_eq!(failures + errors > 0, document["passes"] == false, "{place}: a case fails");
    let modules: usize =
        list(&document["layers"]).iter().map(|layer| list(&layer["modules"]).len()).sum();
    let suites = xml.root_element().children().filter(|node| node.is_element()).skip(1);
    let cases = suites.flat_map(|suite| suite.children()).filter(|node| node.is_element());
    assert_eq!(cases.count(), modules, "{place}: a case for each module");

    let verdict = document["verdict"].as_str().unwrap();
    assert!(forms["md"].starts_with(&format!("# ckptcmp compare: {verdict}\n")), "{place}");
}

#[test]
fn every_form_says_what_the_document_says() {
    let folder = TempDir::new().unwrap();
    let small = layout("gpt-small/tp1");
    let changed = Copied::of(&small);
    flip(&changed.path(), "decoder.final_layernorm.weight", &[3]);
    let faults = |name: &str| layout(&format!("faults/{name}"));
    let llama = |name: &str| fixture(&format!("megatron/llama-bf16/{name}"));
    let pairs: [(PathBuf, PathBuf, &[&str]); 9] = [
        (small.clone(), layout("gpt-small/tp2"), &[]),
        (small.clone(), changed.path(), &[]),
        (small.clone(), changed.path(), &["--rtol", "2"]),
        (llama("A/tp1pp2-first3-torch"), llama("B/tp1pp1-torch"), &[]),
        (faults("nan-tp1"), small.clone(), &[]),
        (faults("diverged-replica-tp2"), small.clone(), &[]),
        (faults("missing-key-tp2"), small.clone(), &[]),
        (small.clone(), layout("gpt-small/tp2/iter_0000005/mp_rank_00"), &[]),
        (PathBuf::from("/no/such/checkpoint"), small, &[]),
    ];
    for (a, b, flags) in pairs {
        let place = format!("{} {} {flags:?}", a.display(), b.display());
        let (code, forms) = compare(&folder, &a, &b, flags);
        assert_same(&forms, &place);
        let document = folder.path().join("report.json");
        assert_eq!(read_json(&document)["exit_code"], code, "{place}");
        for suffix in SUFFIXES {
            let again = folder.path().join(format!("again.{suffix}"));
            let mut command = ckptcmp();
            command.arg("report").arg(&document).arg("--force").arg("--report").arg(&again);
            let run = Run::of(&mut command);
            assert_eq!(run.code, 0, "{place}: {}", run.stderr);
            let again = fs::read_to_string(again).unwrap();
            assert!(again == forms[suffix], "{place}: {suffix} from a saved document");
        }
    }
}

#[test]
fn hostile_names_stay_text_in_every_form() {
    let names = [
        "::error::owned",
        "##[error]x",
        "=cmd|' /C calc'!A0",
        "@SUM(A1)",
        "a`b``c.weight",
        "<script>alert(1)</script>",
        "a|b\\|c",
        "x\ny\r\n::error::z",
        "]]><x a='1'>&amp;",
        "\u{202e}evil\u{0}",
        "quo\"te,comma",
        "layers.0.<b>.weight",
    ];
    let folder = TempDir::new().unwrap();
    let [a, b] = ["a", "b"].map(|side| folder.path().join(format!("{side}.safetensors")));
    named_tensors(&a, &names, 2.0);
    named_tensors(&b, &names, 2.5);
    let (code, forms) = compare(&folder, &a, &b, &[]);
    assert_eq!(code, 1);
    assert_same(&forms, "hostile names");
    for (suffix, text) in &forms {
        let is_obeyed = |char: char| char.is_control() && char != '\n' && char != '\r';
        assert!(!text.contains(is_obeyed) && !text.contains('\u{202e}'), "{suffix}");
    }
    let rows = fields(&forms["csv"]);
    let is_formula = |field: &String| field.starts_with(['=', '@']);
    assert!(!rows.iter().flatten().any(is_formula), "{rows:?}");
    assert!(rows.iter().any(|row| row[0] == "'=cmd|' /C calc'!A0"), "{rows:?}");
    let mut command = ckptcmp();
    let run = Run::of(command.arg("compare").args([&a, &b]).args(["--all", "-o", "/dev/null"]));
    let is_command = |line: &str| line.trim_start().starts_with("::");
    assert!(run.stdout.contains("u{3a}:error::owned"), "{}", run.stdout);
    assert!(!run.stdout.lines().any(is_command), "{}", run.stdout);
    // In code spans only, the bars of a table escaped.
    assert!(forms["md"].contains("| `<script>alert(1)</script>` |"), "{}", forms["md"]);
    assert!(forms["md"].contains("| `a\\|b\\\\|c` |"), "{}", forms["md"]);
    assert!(forms["md"].contains("| ```a`b``c.weight``` |"), "{}", forms["md"]);
}

#[test]
fn the_summary_of_a_step_has_markdown_and_at_most_ten_annotations() {
    let folder = TempDir::new().unwrap();
    let summary = folder.path().join("summary.md");
    let llama = |name: &str| fixture(&format!("megatron/llama-bf16/{name}"));
    let (a, b) = (llama("A/tp1pp2-first3-torch"), llama("B/tp1pp1-torch"));
    let compare = |used: usize| {
        fs::write(&summary, "x".repeat(used)).unwrap();
        let mut command = ckptcmp();
        command.arg("compare").args([&a, &b]).args(["-o", "/dev/null", "--quiet", "--summary"]);
        Run::of(command.arg("github").env("GITHUB_STEP_SUMMARY", &summary))
    };
    let run = compare(0);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let text = fs::read_to_string(&summary).unwrap();
    assert!(text.starts_with("# ckptcmp compare: different\n"), "{text}");
    let lines: Vec<&str> = run.stderr.lines().collect();
    assert_eq!(lines.len(), 10);
    assert!(lines.iter().all(|line| line.starts_with("::error title=ckptcmp%3A ")), "{lines:?}");
    assert!(lines[0].contains("%0Afirst difference: embeddings"), "{}", lines[0]);
    // What is there stays, and all of it together is below the limit.
    for used in [1_000_000, (1 << 20) - 300, 1 << 20] {
        assert_eq!(compare(used).code, 1);
        let text = fs::read_to_string(&summary).unwrap();
        assert!(text.starts_with(&"x".repeat(used)));
        assert!(text.len() < (1 << 20) || used == text.len(), "{used}: {}", text.len());
    }

    let mut command = ckptcmp();
    command.arg("compare").args([&a, &b]).args(["--summary", "github", "-o", "/dev/null"]);
    let run = Run::of(command.env_remove("GITHUB_STEP_SUMMARY"));
    assert!(
        run.code == 2 && run.stderr.contains("GITHUB_STEP_SUMMARY is not set"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_document_that_cannot_be_trusted_is_refused() {
    let folder = TempDir::new().unwrap();
    let small = layout("gpt-small/tp1");
    let (_, forms) = compare(&folder, &small, &small, &[]);
    let text = &forms["json"];
    let document = folder.path().join("changed.json");
    let out = folder.path().join("out.md");
    let cases = [
        (text.replacen("compare-report:1", "compare-report:2", 1), "version 2 of the schema"),
        (text.replacen("\"passes\": true", "\"passes\": false", 1), "contradict each other"),
        (
            text.replacen("\"verdict\": \"identical\"", "\"verdict\": \"different\"", 1),
            "contradict",
        ),
        (text[..text.len() / 2].to_owned(), "no whole document"),
        ("{}".to_owned(), "no document of compare --report"),
        ("[1]".to_owned(), "no document of compare --report"),
        (String::new(), "no whole document"),
    ];
    for (text, message) in cases {
        fs::write(&document, text).unwrap();
        let mut command = ckptcmp();
        let run = Run::of(command.arg("report").arg(&document).arg("--report").arg(&out));
        assert_eq!((run.code, out.exists()), (2, false), "{message}: {}", run.stderr);
        assert!(run.stderr.contains(message), "{message}: {}", run.stderr);
    }
    // Nor is it overwritten by a report on itself.
    let saved = folder.path().join("report.json");
    let mut command = ckptcmp();
    command.arg("report").arg(&saved).arg("--force").arg("--report").arg(&saved);
    assert_eq!(Run::of(&mut command).code, 2);
    assert_eq!(&fs::read_to_string(&saved).unwrap(), text);
}

#[test]
fn a_former_report_of_any_form_never_outlives_a_run_that_fails() {
    let folder = TempDir::new().unwrap();
    let small = layout("gpt-small/tp1");
    let (_, good) = compare(&folder, &small, &small, &[]);
    let (code, bad) = compare(&folder, Path::new("/no/such/checkpoint"), &small, &[]);
    assert_eq!(code, 2);
    for suffix in SUFFIXES {
        assert!(good[suffix] != bad[suffix] && bad[suffix].contains("trouble"), "{suffix}");
    }
}

#[test]
fn every_line_of_the_screen_fits_a_terminal() {
    let folder = TempDir::new().unwrap();
    let [a, b] = ["a", "b"].map(|side| folder.path().join(format!("{side}.safetensors")));
    let names: Vec<String> = (0..40)
        .map(|layer| {
            format!("model.layers.{layer}.self_attention.{}.weight", "very_long_name".repeat(4))
        })
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    named_tensors(&a, &names, 2.0);
    named_tensors(&b, &names[1..], 2.5);
    let open = |path| ckptcmp::open(path, &OpenOptions::default()).unwrap();
    let report = ckptcmp::compare(open(&a), open(&b), &CompareOptions::default()).unwrap();
    let lines = |fits| {
        let mut screen = Vec::new();
        report.write_screen(Style { has_color: false, fits }, &mut screen).unwrap();
        let screen = String::from_utf8(screen).unwrap();
        // Paths are never cut.
        let lines = screen.lines().filter(|line| !line.contains("safetensors"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let long: Vec<String> =
        lines(true).into_iter().filter(|line| line.chars().count() > 80).collect();
    assert_eq!(long, [""; 0]);
    assert!(
        lines(true).iter().any(|line| line.starts_with("model.layers.") && line.contains("..."))
    );
    assert!(lines(false).iter().any(|line| line.starts_with(names[1])), "whole in a pipe");
}
