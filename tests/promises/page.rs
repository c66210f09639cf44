//! Promise: the page of `--report FILE.html` is one file that needs nothing else, and runs nothing that is not its own.
//!
//! `tests/browser` looks at it in a browser, where there is one.

use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{Copied, Run, ckptcmp, flip, layout, sha256};

/// The page of a comparison.
fn page(a: &Path, b: &Path, threads: &str) -> String {
    let folder = TempDir::new().unwrap();
    let [page, result] = ["page.html", "result.json"].map(|name| folder.path().join(name));
    let mut command = ckptcmp();
    command.arg("compare").args([a, b]).args(["--quiet", "--threads", threads]);
    Run::of(command.arg("-o").arg(result).arg("--report").arg(&page));
    fs::read_to_string(page).unwrap()
}

/// The text between the tags.
fn inside<'p>(page: &'p str, open: &str, close: &str) -> &'p str {
    page.split_once(open).unwrap().1.split_once(close).unwrap().0
}

/// A sum as a policy has it.
fn sum(text: &str) -> String {
    let hex = sha256::hex(text.as_bytes());
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
    format!("'sha256-{}'", STANDARD.encode(bytes))
}

#[test]
fn a_page_is_the_same_for_any_number_of_threads_and_names_nothing_outside() {
    let a = layout("moe/seq-tp2ep2");
    let b = Copied::of(&a);
    flip(&b.path(), "decoder.layers.2.mlp.router.weight", &[1, 2]);
    let page = page(&a, &b.path(), "1");
    assert_eq!(page, self::page(&a, &b.path(), "4"));

    let policy = inside(&page, "http-equiv=\"Content-Security-Policy\" content=\"", "\">");
    let script = inside(&page, "<script type=\"module\">", "</script>");
    let style = inside(&page, "<style>", "</style>");
    let [script, style] = [("script-src", script), ("style-src", style)]
        .map(|(name, text)| format!("{name} {}", sum(text)));
    let mut rules: Vec<&str> = policy.split("; ").collect();
    rules.sort_unstable();
    assert_eq!(
        rules,
        ["base-uri 'none'", "default-src 'none'", "form-action 'none'", &script, &style]
    );
    // The name space of drawings is a name, no address.
    let rest = page.replace("http://www.w3.org/2000/svg", "");
    for outside in
        ["http:", "https:", " src=", " href=", "@import", "url(", " onload", " onclick", " style="]
    {
        assert_eq!(rest.lines().find(|line| line.contains(outside)), None, "{outside}");
    }

    let data = STANDARD.decode(inside(&page, "id=\"data\">", "</script>")).unwrap();
    let data = miniz_oxide::inflate::decompress_to_vec_zlib(&data).unwrap();
    let data: Value = serde_json::from_slice(&data).unwrap();
    assert_eq!(data["table"]["count"], 43);
    assert_eq!(data["totals"]["failing"], 1);
}

#[test]
fn a_page_of_a_former_run_is_replaced_by_one_that_tells_the_failure() {
    let folder = TempDir::new().unwrap();
    let page = folder.path().join("page.html");
    let small = layout("gpt-small/tp1");
    let run = |b: &Path| {
        let mut command = ckptcmp();
        command.arg("compare").args([small.as_path(), b]).args(["--quiet", "--force", "-o"]);
        Run::of(command.arg(folder.path().join("result.json")).arg("--report").arg(&page))
    };
    assert_eq!(run(&layout("gpt-small/tp2")).code, 0);
    assert!(fs::read_to_string(&page).unwrap().contains("<h1>identical</h1>"));
    assert_eq!(run(&folder.path().join("nothing")).code, 2);
    assert!(fs::read_to_string(&page).unwrap().contains("<h1>trouble</h1>"));

    fs::write(&page, "<!doctype html>\n<p>of somebody else").unwrap();
    assert_eq!(run(&folder.path().join("nothing")).code, 2);
    assert!(fs::read_to_string(&page).unwrap().contains("somebody else"));
}
