//! The page of `--report` in a real browser: what it shows is what the document says, and no name is ever more than text.
//!
//! Skipped with a message where there is no Chromium.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

#[path = "../common/mod.rs"]
mod common;

mod devtools;
mod shown;

use std::fs;
use std::path::{Path, PathBuf};

use common::array::{Array, write_safetensors};
use common::{Copied, Run, ckptcmp, fixture, flip, layout, read_json};
use devtools::Browser;
use serde_json::{Value, json};
use shown::{NUMBERS, printable, row_of, shortened};
use tempfile::TempDir;

/// A page and the document that says the same.
struct Report {
    page: PathBuf,
    document: Value,
    _folder: TempDir,
}

impl Report {
    fn of(a: &Path, b: &Path, flags: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let [page, document, result] =
            ["page.html", "document.json", "result.json"].map(|name| folder.path().join(name));
        let mut command = ckptcmp();
        command.arg("compare").args([a, b]).arg("--quiet").args(flags);
        command.arg("--report").arg(&page).arg("--report").arg(&document);
        Run::of(command.arg("-o").arg(result));
        Self { document: read_json(&document), page, _folder: folder }
    }

    fn tensors(&self) -> &[Value] {
        self.document["tensors"].as_array().map_or(&[], Vec::as_slice)
    }
}

/// Two checkpoints of experts of which some tensors differ.
fn changed_experts() -> (PathBuf, Copied) {
    let a = layout("moe/seq-tp2ep2");
    let b = Copied::of(&a);
    for tensor in [
        "decoder.layers.2.mlp.experts.local_experts.2.linear_fc1.weight",
        "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight",
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.1.mlp.router.weight",
    ] {
        flip(&b.path(), tensor, &[0, 1]);
    }
    (a, b)
}

/// All rows of the table, in their order, as lists of the texts of their cells.
const ALL_ROWS: &str = "(async () => {
    const grid = document.querySelector('[role=grid]');
    const rows = new Map();
    for (let top = 0; ; top += grid.clientHeight - 48) {
        grid.scrollTop = top;
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        for (const line of grid.querySelectorAll('.space .line')) {
            if (line.hidden) continue;
            rows.set(Number(line.ariaRowIndex), [...line.children].map((cell) => cell.textContent));
        }
        if (top >= grid.scrollHeight) break;
    }
    return [...rows].sort(([one], [other]) => one - other).map(([, cells]) => cells);
})()";

const HEADINGS: &str =
    "[...document.querySelectorAll('[role=columnheader]')].map((cell) => cell.textContent)";

#[track_caller]
fn all_rows(browser: &mut Browser) -> Vec<Vec<String>> {
    serde_json::from_value(browser.value(ALL_ROWS)).unwrap()
}

#[track_caller]
fn names(browser: &mut Browser) -> Vec<String> {
    all_rows(browser).into_iter().map(|row| row[0].clone()).collect()
}

/// Every number of every tensor on the page is that of the document.
#[track_caller]
fn assert_shows(browser: &mut Browser, report: &Report) {
    let headings: Vec<String> = serde_json::from_value(browser.value(HEADINGS)).unwrap();
    let rows = all_rows(browser);
    let document = &report.document;
    let alone: Vec<&Value> = [
        &document["only_in"]["a"],
        &document["only_in"]["b"],
        &document["excused"]["ignored"],
        &document["excused"]["only_in"]["a"],
        &document["excused"]["only_in"]["b"],
    ]
    .into_iter()
    .flat_map(|names| names.as_array().into_iter().flatten())
    .collect();
    assert_eq!(rows.len(), report.tensors().len() + alone.len(), "{}", report.page.display());
    for tensor in report.tensors() {
        let expected = row_of(tensor);
        let name = shortened(tensor["name"].as_str().unwrap());
        let row = rows.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("no {name}"));
        for (heading, text) in headings.iter().zip(row) {
            assert_eq!(*text, expected[&**heading], "{name}, {heading}");
        }
    }
    for name in alone {
        let name = shortened(name.as_str().unwrap());
        assert!(rows.iter().any(|row| row[0] == name), "no {name}");
    }
    let facts = browser.value(
        "Object.fromEntries([...document.querySelectorAll('#coverage dt')].map(
            (title) => [title.textContent, title.nextElementSibling.firstChild.textContent]))",
    );
    for (title, pointer) in NUMBERS {
        let number = document.pointer(pointer).and_then(Value::as_u64).unwrap();
        assert_eq!(facts[title].as_str().unwrap().replace(',', ""), number.to_string(), "{title}");
    }
}

#[test]
fn a_page_shows_the_numbers_of_its_document() {
    let Some(mut browser) = Browser::start() else { return };
    let (experts, changed) = changed_experts();
    let judged = |name: &str| fixture(&format!("judging/{name}.safetensors"));
    let optimizer = ["--section", "model,optimizer"];
    let reports = [
        Report::of(&experts, &changed.path(), &[]),
        Report::of(&experts, &changed.path(), &["--rtol", "0.1", "--atol", "1e-30"]),
        Report::of(&judged("wide"), &judged("narrow"), &["--allow-cast"]),
        Report::of(&judged("close-a"), &judged("close-b"), &["--max", "max_ulp=1"]),
        Report::of(&layout("gpt-tied/tp1"), &layout("gpt/tp1"), &[]),
        Report::of(
            &layout("gpt-small/optimizer-tp1"),
            &layout("gpt-small/optimizer-tp2"),
            &optimizer,
        ),
        Report::of(&layout("gpt-small/tp1"), &layout("faults/diverged-replica-tp2"), &[]),
    ];
    for report in &reports {
        browser.open_file(&report.page);
        assert_shows(&mut browser, report);
        assert_eq!(browser.complaints(), [""; 0], "{}", report.page.display());
    }
}

#[test]
fn a_comparison_that_failed_is_a_page_that_says_so() {
    let Some(mut browser) = Browser::start() else { return };
    let report = Report::of(&layout("gpt-small/tp1"), Path::new("/nowhere/<b>at all</b>"), &[]);
    assert_eq!(report.document["verdict"], "trouble");
    browser.open_file(&report.page);
    let head = browser.value("document.querySelector('header').innerText");
    let head = head.as_str().unwrap().to_lowercase();
    assert!(head.contains("trouble") && head.contains("/nowhere/<b>at all</b>"), "{head}");
    let error = report.document["errors"][0].as_str().unwrap().to_lowercase();
    assert!(head.contains(&error), "{error} in {head}");
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn rows_are_filtered_and_sorted_and_the_address_keeps_the_view() {
    let Some(mut browser) = Browser::start() else { return };
    let (a, b) = changed_experts();
    let report = Report::of(&a, &b.path(), &[]);
    browser.open_file(&report.page);
    let all = names(&mut browser);
    let usual = browser.value("location.href");

    browser.click("#filter");
    browser.call("Input.insertText", &json!({ "text": "LINEAR_fc1 !local_experts.2 layer>=1" }));
    let wanted = |name: &&String| {
        name.contains("linear_fc1")
            && !name.contains("local_experts.2")
            && !name.contains("layers.0")
    };
    let filtered = names(&mut browser);
    assert_eq!(filtered.len(), all.iter().filter(wanted).count());
    assert!(filtered.len() > 1 && filtered.iter().all(|name| wanted(&name)), "{filtered:?}");

    browser.click("#clear");
    assert_eq!(names(&mut browser), all);
    let by_distance = |tensor: &Value| tensor["metrics"]["rel_l2"].as_f64().unwrap();
    let worst = report.tensors().iter().max_by(|a, b| by_distance(a).total_cmp(&by_distance(b)));
    assert_eq!(all[0], worst.unwrap()["name"].as_str().unwrap());
    browser.click("[data-key=name] button");
    let mut forward = names(&mut browser);
    assert!(forward[0].starts_with("embedding."), "{forward:?}");
    browser.click("[data-key=name] button");
    forward.reverse();
    assert_eq!(names(&mut browser), forward);
    browser.click("[data-key=differing] button");
    let first = browser.value("document.querySelector('[aria-sort=descending]').textContent");
    assert_eq!(first, "differing");

    browser.value(
        "(() => { const select = document.getElementById('verdict');
            select.value = 'failing'; select.dispatchEvent(new Event('change')); })()",
    );
    let failing = report.tensors().iter().filter(|tensor| tensor["passes"] == false).count();
    assert_eq!(all_rows(&mut browser).len(), failing);
    browser.value("document.querySelector('[role=grid]').focus()");
    browser.press("ArrowDown");
    browser.press("ArrowDown");
    let view = "[document.querySelector('#details h3').textContent,
        document.querySelector('[aria-selected=true]').firstChild.textContent,
        document.getElementById('verdict').value, document.getElementById('shown').textContent,
        document.querySelector('[aria-sort=descending]').textContent]";
    let before = browser.value(view);
    let rows = all_rows(&mut browser);
    assert_eq!(before[0], before[1]);
    assert_eq!(before[0], *rows[1][0]);
    let address = browser.value("location.href");
    assert_ne!(address, usual);
    browser.open(address.as_str().unwrap());
    assert_eq!(browser.value(view), before);
    assert_eq!(all_rows(&mut browser), rows);

    browser.open(&format!(
        "{}#sort=nothing&cell=[1]&row=nobody&constructor=1&q=constructor>3",
        usual.as_str().unwrap()
    ));
    assert_eq!(all_rows(&mut browser).len(), 0);
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn a_cell_of_the_map_leads_to_its_tensors_by_keys_and_by_mouse() {
    let Some(mut browser) = Browser::start() else { return };
    let (a, b) = changed_experts();
    let report = Report::of(&a, &b.path(), &[]);
    browser.open_file(&report.page);
    let experts: Vec<&Value> = report
        .tensors()
        .iter()
        .filter(|tensor| {
            let name = tensor["name"].as_str().unwrap();
            name.contains("layers.2.")
                && name.contains("local_experts")
                && name.contains("linear_fc1")
        })
        .collect();
    let at = browser.value(
        "[...document.querySelectorAll('.map-label')].findIndex(
            (label) => label.textContent.includes('experts.*.linear_fc1, worst'))",
    );
    browser.value("document.querySelector('.map canvas').focus()");
    for _ in 0..at.as_u64().unwrap() {
        browser.press("ArrowDown");
    }
    browser.press("End");
    let said = browser.value("document.querySelector('.readout').textContent");
    let worst = |key: &str| {
        let values = experts.iter().map(|tensor| tensor["metrics"][key].as_f64().unwrap());
        shown::scientific(values.reduce(f64::max))
    };
    assert!(said.as_str().unwrap().contains(&format!("rel_l2 {}", worst("rel_l2"))), "{said}");
    browser.press("Enter");
    let mut listed = names(&mut browser);
    listed.sort();
    let expected: Vec<&str> =
        experts.iter().map(|tensor| tensor["name"].as_str().unwrap()).collect();
    assert_eq!(listed, expected);

    let address = browser.value("location.href");
    browser.open(address.as_str().unwrap());
    assert_eq!(all_rows(&mut browser).len(), expected.len());
    browser.click("#clear");
    assert_eq!(all_rows(&mut browser).len(), report.tensors().len());
    browser.click(".map canvas");
    assert!(all_rows(&mut browser).len() < report.tensors().len());
    assert_eq!(browser.complaints(), [""; 0]);
}

#[test]
fn hostile_names_stay_text() {
    let Some(mut browser) = Browser::start() else { return };
    let long = "x".repeat(4096);
    let names = [
        "</script><script>globalThis.evil = 1</script>",
        "layers.0.<img src=x onerror='globalThis.evil = 1'>.weight",
        "layers.1.</title></style><svg onload=globalThis.evil=1>.weight",
        "\"quoted' & &lt;b&gt; `${globalThis.evil = 1}` {{data}}",
        "<!--<script>",
        "javascript:globalThis.evil=1",
        "__proto__",
        "constructor",
        "layers.2.toString.weight",
        "layers.18446744073709551615.weight",
        "\u{202e}thgiew\u{200f}",
        "line\nbreak\u{0}\u{1b}[2J\u{2028}",
        "\u{1f600}.\u{1f601}",
        &long,
    ];
    let folder = TempDir::new().unwrap();
    let paths = ["<b>a<b>", "'\"b"].map(|name| folder.path().join(format!("{name}.safetensors")));
    let [one, other] = [[1.0, 2.0], [1.0, 2.5]].map(|values| Array::float32(&values));
    for (path, array) in paths.iter().zip([&one, &other]) {
        write_safetensors(path, names.iter().map(|name| (*name, array)), &json!({}));
    }
    let report = Report::of(&paths[0], &paths[1], &[]);
    assert_eq!(report.tensors().len(), names.len());
    let text = fs::read_to_string(&report.page).unwrap();
    assert_eq!(text.matches("<script").count(), 2);
    assert!(!text.contains("<img") && !text.contains("<svg"));
    browser.open_file(&report.page);
    assert_shows(&mut browser, &report);
    browser.value("document.querySelector('[role=grid]').focus()");
    browser.press("Home");
    let mut seen = Vec::new();
    for _ in names {
        let title = browser.value("document.querySelector('#details h3').textContent");
        seen.push(title.as_str().unwrap().to_owned());
        let elements = "document.querySelectorAll('img, iframe, main script, style ~ style, [onload], [onerror]').length";
        assert_eq!(browser.value(elements), 0);
        browser.press("ArrowDown");
    }
    seen.sort();
    let mut expected = names.map(printable);
    expected.sort();
    assert_eq!(seen, expected);
    let path = browser.value("document.querySelector('#sides .path').textContent");
    assert_eq!(path, printable(&paths[0].display().to_string()));
    assert_eq!(browser.value("typeof globalThis.evil"), "undefined");
    assert_eq!(browser.complaints(), [""; 0]);

    // The page's policy blocks what is not of the page, and that is seen here.
    browser.value(
        "(() => { const script = document.createElement('script');
            script.textContent = 'globalThis.evil = 1'; document.body.append(script);
            const image = document.createElement('img');
            image.src = 'https://example.com/x.png'; document.body.append(image);
            document.body.setAttribute('onclick', 'globalThis.evil = 1'); document.body.click(); })()",
    );
    assert_eq!(browser.value("typeof globalThis.evil"), "undefined");
    assert!(browser.complaints().len() >= 3);
}
