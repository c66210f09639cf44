//! The architecture as a test: reads the sources and checks what the compiler does not.

#![expect(clippy::panic, reason = "a test that cannot read the sources fails")]

#[path = "tidy/io_errors.rs"]
mod io_errors;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The modules in the order of the flow, and what each may name of this crate: only what stands above it.
const MODULES: &[(&str, &str)] = &[
    ("base", ""),
    ("storage", "base"),
    ("tensor", "base storage"),
    ("containers::torch", "base storage tensor"),
    ("containers::safetensors", "base storage tensor"),
    ("containers::dcp", "base storage tensor containers::torch containers::safetensors"),
    ("containers::zarr", "base storage tensor"),
    ("containers::yaml", "base"),
    ("names", "base tensor"),
    ("layout", "base storage tensor names"),
    ("state", "base tensor"),
    ("catalog", "base storage tensor names layout state"),
    ("completeness", "base names layout catalog"),
    ("formats", "base storage tensor containers names layout state catalog completeness"),
    ("dialects", "base tensor names layout catalog"),
    ("pairing", "base tensor names catalog"),
    ("kernel", "base"),
    ("compare", "base storage tensor names pairing kernel"),
    ("causes", "base storage names catalog pairing kernel compare"),
    ("judge", "base names state pairing kernel compare"),
    ("report", "base tensor names layout state catalog pairing kernel compare causes judge"),
    ("pipeline", "base names state catalog formats dialects pairing compare causes judge report"),
    ("cli", "judge base tensor layout state catalog formats compare report"),
    ("run", "base storage names state catalog formats pairing compare judge report pipeline cli"),
];

/// Rooms whose modules stand in the table one by one, as they may not name each other freely.
const SPLIT_ROOMS: &[&str] = &["containers"];

/// The rooms in which `unsafe` may be.
const UNSAFE_ROOMS: &[&str] = &["src/storage/", "src/kernel/"];

/// The files that may write to the terminal.
const PRINTERS: &[&str] = &["src/report/", "src/main.rs"];
const PRINTS: &[&str] = &["println!", "print!", "eprintln!", "eprint!", "dbg!"];

const PANICS: &[&str] = &[".unwrap()", ".expect(", "panic!", "todo!", "unimplemented!"];

const MAX_LINES: usize = 600;
const TIDY_TEXTS: &[&str] = &["rs", "md", "toml", "yml", "py"];

#[test]
fn a_module_names_only_what_the_table_allows() {
    let mut wrong = Vec::new();
    for (at, (module, allowed)) in MODULES.iter().enumerate() {
        for name in allowed.split_whitespace() {
            if !MODULES[..at].iter().any(|(above, _)| is_inside(above, name)) {
                wrong.push(format!("the table: {name} does not stand above {module}"));
            }
        }
    }
    let mut seen = BTreeSet::new();
    for source in sources() {
        let module = source.module();
        if matches!(module.as_str(), "lib" | "main") || SPLIT_ROOMS.contains(&module.as_str()) {
            continue;
        }
        let row = MODULES.iter().find(|(name, _)| *name == module);
        let Some((_, allowed)) = row else {
            wrong.push(format!("{}: {module} is not in the table", source.path));
            continue;
        };
        let to_root = "super::".repeat(source.depth());
        for (at, line) in source.lines() {
            for name in line.split("crate::").skip(1).map(room) {
                let is_allowed = |allowed: &str| is_inside(&name, allowed);
                if name != module && !allowed.split_whitespace().any(is_allowed) {
                    wrong.push(format!("{at}: {module} may not name `crate::{name}`"));
                }
            }
            if line.contains(&to_root) {
                wrong.push(format!("{at}: say `crate::` instead of `{to_root}`"));
            }
        }
        seen.insert(module);
    }
    let gone = MODULES.iter().filter(|(module, _)| !seen.contains(*module));
    wrong.extend(gone.map(|(module, _)| format!("the table: there is no module {module}")));
    assert_tidy(&wrong);
}

#[test]
fn of_several_threads_errors_the_first_in_order_is_told() {
    let mut wrong = Vec::new();
    for source in sources() {
        let lines: Vec<(String, &str)> = source.lines().collect();
        for (number, (at, line)) in lines.iter().enumerate() {
            let behind = &lines[number..lines.len().min(number + 20)];
            let statement: Vec<&str> = behind.iter().map(|(_, line)| *line).collect();
            let statement = statement.join(" ");
            let statement = statement.split(';').next().unwrap_or_default();
            let is_any = |call: &&str| statement.contains(*call);
            if line.contains("par_iter()") && [".collect::<Result", ".try_"].iter().any(is_any) {
                wrong.push(format!("{at}: collect results of threads by `in_order`"));
            }
        }
    }
    assert_tidy(&wrong);
}

#[test]
fn no_format_names_another_one() {
    let formats: Vec<Source> = sources()
        .into_iter()
        .filter(|source| source.path.starts_with("src/formats/"))
        .filter(|source| source.parts().count() > 1)
        .collect();
    let is_format = |source: &&Source| source.code.contains("const FORMAT: Format");
    let mut rows: BTreeSet<Vec<&str>> =
        formats.iter().filter(is_format).map(|source| source.parts().collect()).collect();
    // A folder with several formats in it is no less theirs.
    rows.extend(rows.clone().into_iter().map(|row| row[..2].to_vec()));
    assert!(rows.len() > 8, "{rows:?}");
    let mut wrong = Vec::new();
    for source in &formats {
        let own: Vec<&str> = source.parts().collect();
        for named in source.named_modules() {
            let is_other = |row: &&Vec<&str>| {
                named.len() >= row.len()
                    && named.iter().zip(row.iter()).all(|(name, part)| name == part)
                    && !own.starts_with(row)
            };
            if let Some(row) = rows.iter().find(is_other) {
                wrong.push(format!("{}: names the format {}", source.path, row.join("::")));
            }
            // All rows are there, so that those who name it name every format.
            let is_of_table = |name: &String| name.starts_with(char::is_uppercase);
            if named[0] == "formats" && named.get(1).is_some_and(is_of_table) {
                wrong.push(format!("{}: names formats::{}, not its module", source.path, named[1]));
            }
        }
    }
    assert_tidy(&wrong);
}

#[test]
fn the_reader_of_paths_knows_trees_and_where_they_begin() {
    let code =
        "use super::super::{a::{b, c as d}, e}; use crate::f::g; fn h(x: self::i) {} notsuper::j";
    let source = Source { path: "src/x/y/z.rs".into(), text: String::new(), code: code.into() };
    let found: Vec<String> = source.named_modules().iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["x::a::b", "x::a::c", "x::e", "f::g", "x::y::z::i"]);
}

#[test]
fn unsafe_stays_in_its_rooms_and_says_why_it_is_sound() {
    let mut wrong = Vec::new();
    for source in sources() {
        let comments: Vec<&str> = source.text.lines().collect();
        let lines: Vec<&str> = source.code.lines().collect();
        let is_room = starts_with_any(&source.path, UNSAFE_ROOMS);
        for at in (0..lines.len()).filter(|at| words(lines[*at]).any(|word| word == "unsafe")) {
            let place = format!("{}:{}", source.path, at + 1);
            if !is_room {
                wrong.push(format!("{place}: unsafe outside of its rooms"));
            }
            // Upwards to the end of the statement before: comments and attributes have no code of their own.
            let above = (0..at).rev().take_while(|at| !lines[*at].trim_end().ends_with(END));
            if !above.into_iter().any(|at| comments[at].contains("SAFETY:")) {
                wrong.push(format!("{place}: no `SAFETY:` comment above"));
            }
        }
    }
    assert_tidy(&wrong);
}

/// The ends of a statement, a block or a match arm.
const END: [char; 4] = [';', '{', '}', ','];

#[test]
fn only_the_report_and_main_print() {
    let quiet = sources().into_iter().filter(|source| !starts_with_any(&source.path, PRINTERS));
    assert_tidy(&lines_with(quiet, PRINTS));
}

#[test]
fn nothing_panics_on_purpose_outside_of_tests() {
    assert_tidy(&lines_with(sources(), PANICS));
}

#[test]
fn an_error_leaves_its_cause_to_whoever_prints_it() {
    let mut wrong = Vec::new();
    for Source { path, text, .. } in files("src", &["rs"]).map(|path| Source::read(&path)) {
        // The attribute, then the variant up to the next one or the end of the type.
        for variant in text.split("#[error(").skip(1) {
            let (attribute, rest) = variant.split_once(")]").unwrap_or((variant, ""));
            let rest = rest.split_once("\n}").map_or(rest, |(own, _)| own);
            let has_cause = rest.contains("#[from]") || rest.contains("#[source]");
            if attribute.contains("{source") || (has_cause && attribute.contains("{0")) {
                wrong.push(format!("{path}: #[error({attribute})] repeats the error's source"));
            }
        }
    }
    assert_tidy(&wrong);
}

#[test]
fn a_file_says_what_it_is_for_and_is_short() {
    let mut wrong = Vec::new();
    for Source { path, text, .. } in files("src", &["rs"]).map(|path| Source::read(&path)) {
        let lines = text.lines().count();
        if lines > MAX_LINES {
            wrong.push(format!("{path}: {lines} lines, more than {MAX_LINES}"));
        }
        if !text.starts_with("//!") {
            wrong.push(format!("{path}: does not start with `//!`"));
        }
    }
    assert_tidy(&wrong);
}

#[test]
fn no_line_holds_a_tab_or_ends_in_white_space() {
    let mut wrong = Vec::new();
    for Source { path, text, .. } in files("", TIDY_TEXTS).map(|path| Source::read(&path)) {
        for (at, line) in (1..).zip(text.lines()) {
            if line.contains('\t') {
                wrong.push(format!("{path}:{at}: a tab"));
            }
            if line.ends_with(char::is_whitespace) {
                wrong.push(format!("{path}:{at}: white space at the end"));
            }
        }
        if !text.is_empty() && !text.ends_with('\n') {
            wrong.push(format!("{path}: no line break at the end"));
        }
    }
    assert_tidy(&wrong);
}

/// It is a workspace of its own, so that nobody who adds a dependency here is told.
#[test]
fn the_lock_file_of_the_fuzz_targets_has_every_dependency() {
    let read = |name: &str| fs::read_to_string(root().join(name)).unwrap_or_default();
    let manifest = read("Cargo.toml");
    let is_wanted = |section: &&str| {
        let head = section.lines().next().unwrap_or_default();
        head == "dependencies]" || head.ends_with(".dependencies]")
    };
    let sections = manifest.split("\n[").filter(is_wanted);
    let wanted = sections
        .flat_map(|section| section.lines().skip(1).filter_map(|line| line.split_once(" = ")));
    let lock = read("fuzz/Cargo.lock");
    let package =
        lock.split("[[package]]").find(|package| package.contains("name = \"ckptcmp\"\n"));
    let missing: Vec<&str> = wanted
        .map(|(name, _)| name)
        .filter(|name| !package.is_some_and(|package| package.contains(&format!(" \"{name}\""))))
        .collect();
    assert!(missing.is_empty(), "run cargo metadata in fuzz/, its Cargo.lock lacks {missing:?}");
}

#[test]
fn the_reader_of_sources_knows_literals_comments_and_tests() {
    let text = r##"
        let a = "unsafe // \" {"; // unsafe
        let b: &'static [char] = &['\'', '"', 'u']; /* unsafe
        */ let c = r#"unsafe " "#; crate::names
        #[cfg(test)]
        mod tests { fn f() { x.unwrap() } }
        last
    "##;
    let code = without_tests(&code_of(text));
    assert_eq!(code.lines().count(), text.lines().count());
    let found: Vec<_> = words(&code).collect();
    let expected = "let a let b static char let c crate names last";
    assert_eq!(found, expected.split(' ').collect::<Vec<_>>());
}

/// A source file.
struct Source {
    /// From the root of the repository, with `/`.
    path: String,
    text: String,
    /// Its text line by line without comments, the contents of literals, and tests.
    code: String,
}

impl Source {
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|error| {
            panic!("{}: {error}", path.display());
        });
        let path = path.strip_prefix(root()).unwrap_or(path).display().to_string();
        let code = without_tests(&code_of(&text));
        Self { path: path.replace('\\', "/"), text, code }
    }

    /// The parts of the path below `src`, without `mod.rs` and `.rs`.
    fn parts(&self) -> impl Iterator<Item = &str> {
        let path = self.path.trim_start_matches("src/").trim_end_matches(".rs");
        path.trim_end_matches("/mod").split('/')
    }

    /// The row of the table that it belongs to.
    fn module(&self) -> String {
        room(&self.parts().collect::<Vec<_>>().join("::"))
    }

    /// Modules between it and the crate's root, itself included.
    fn depth(&self) -> usize {
        self.parts().count()
    }

    /// What it names by a path from the crate's root or from its own place, each from the root.
    fn named_modules(&self) -> Vec<Vec<String>> {
        let mut named = Vec::new();
        let starts = ["crate", "super", "self"];
        let mut at = 0;
        while let Some(next) =
            starts.iter().filter_map(|word| find_path(&self.code, at, word)).min()
        {
            let mut base: Vec<String> = self.parts().map(str::to_owned).collect();
            let mut rest = &self.code[next..];
            while let Some((word, tail)) =
                rest.split_once("::").filter(|(word, _)| starts.contains(word))
            {
                match word {
                    "crate" => base.clear(),
                    "super" => drop(base.pop()),
                    _ => {}
                }
                rest = tail;
            }
            let tree = &self.code[self.code.len() - rest.len()..];
            named.extend(leaves(tree).into_iter().map(|leaf| [base.clone(), leaf].concat()));
            at = self.code.len() - rest.len();
        }
        named
    }

    fn is_test(&self) -> bool {
        self.parts().any(|part| matches!(part, "tests" | "testing"))
    }

    /// The lines of its code, each with its place.
    fn lines(&self) -> impl Iterator<Item = (String, &str)> {
        let numbered = (1..).zip(self.code.lines());
        numbered.map(|(at, line)| (format!("{}:{at}", self.path), line))
    }
}

/// All files of `src` but those that are tests.
fn sources() -> Vec<Source> {
    files("src", &["rs"])
        .map(|path| Source::read(&path))
        .filter(|source| !source.is_test())
        .collect()
}

/// All files below a folder of the repository that end so, sorted; what builds leave behind is not among them.
fn files(folder: &str, extensions: &[&str]) -> impl Iterator<Item = PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|error| {
            panic!("{}: {error}", folder.display());
        });
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_hidden = name.starts_with('.') && name != ".github" && name != ".ci";
            if path.is_dir() && !is_hidden && name != "target" {
                folders.push(path);
            } else if extensions.iter().any(|end| path.extension().is_some_and(|have| have == *end))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found.into_iter()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Source text without comments and the contents of literals; lines stay where they are.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let len = match len_of_comment_or_literal(rest) {
            Some(len) => {
                code.push(' ');
                code.extend(rest[..len].matches('\n'));
                len
            }
            None => {
                code.push(first);
                first.len_utf8()
            }
        };
        rest = &rest[len..];
    }
    code
}

fn len_of_comment_or_literal(text: &str) -> Option<usize> {
    let through = |mark: &str, from: usize| {
        text[from..].find(mark).map_or(text.len(), |at| from + at + mark.len())
    };
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return Some(through("*/", 2));
    }
    if let Some(raw) = text.strip_prefix('r') {
        let quote = raw.trim_start_matches('#');
        let hashes = raw.len() - quote.len();
        return quote
            .starts_with('"')
            .then(|| through(&format!("\"{}", "#".repeat(hashes)), hashes + 2));
    }
    if text.starts_with('"') {
        let mut is_escaped = false;
        let end = text.bytes().skip(1).position(|byte| {
            let is_end = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            is_end
        });
        return Some(end.map_or(text.len(), |at| at + 2));
    }
    if text.starts_with("'\\") {
        return Some(through("'", 3));
    }
    // Otherwise a quote begins a character if another one follows it, and a lifetime if not.
    let inside = text.strip_prefix('\'')?.chars().next()?.len_utf8();
    text[1 + inside..].starts_with('\'').then_some(inside + 2)
}

/// Code without the items under `#[cfg(test)]`; lines stay where they are.
fn without_tests(code: &str) -> String {
    let mut parts = code.split("#[cfg(test)]");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (item, rest) = part.split_at(len_of_item(part));
        kept.extend(item.matches('\n'));
        kept.push_str(rest);
    }
    kept
}

/// Up to the brace that closes the first one, or a semicolon before any.
fn len_of_item(code: &str) -> usize {
    let mut depth = 0_usize;
    let end = code.find(|char| {
        match char {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && matches!(char, ';' | '}')
    });
    end.map_or(code.len(), |at| at + 1)
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|char: char| !is_of_word(char)).filter(|word| !word.is_empty())
}

fn first_word(code: &str) -> &str {
    code.split(|char: char| !is_of_word(char)).next().unwrap_or_default()
}

/// The next place of a word that begins a path.
fn find_path(code: &str, from: usize, word: &str) -> Option<usize> {
    let start = format!("{word}::");
    let is_start = |at: &usize| !code[..*at].ends_with(|char| is_of_word(char) || char == ':');
    code[from..].match_indices(&start).map(|(at, _)| from + at).find(is_start)
}

/// The paths of a tree such as `a::{b, c::d}`.
fn leaves(tree: &str) -> Vec<Vec<String>> {
    let Some(inside) = tree.strip_prefix('{') else {
        let word = first_word(tree).to_owned();
        return match tree[word.len()..].strip_prefix("::") {
            Some(rest) => {
                leaves(rest).into_iter().map(|leaf| [vec![word.clone()], leaf].concat()).collect()
            }
            None => vec![vec![word]],
        };
    };
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, char) in inside.char_indices() {
        if depth == 0 && matches!(char, ',' | '}') {
            let item = inside[start..at].trim();
            found.extend(if item.is_empty() { Vec::new() } else { leaves(item) });
            start = at + 1;
        }
        match char {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    found
}

/// The row of the table for a path below the crate's root: `torch::Value` of `containers` is in `containers::torch`.
fn room(path: &str) -> String {
    let first = first_word(path);
    match path[first.len()..].strip_prefix("::").map(first_word) {
        Some(second) if SPLIT_ROOMS.contains(&first) => format!("{first}::{second}"),
        _ => first.to_owned(),
    }
}

/// True if a row of the table is the named one, or one of the named room's.
fn is_inside(row: &str, name: &str) -> bool {
    row == name || row.split_once("::").is_some_and(|(room, _)| room == name)
}

fn is_of_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

fn starts_with_any(path: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| path.starts_with(prefix))
}

/// Every place where the code holds one of the texts as a word of its own.
fn lines_with(sources: impl IntoIterator<Item = Source>, wanted: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        for (at, line) in source.lines() {
            let is_whole =
                |at: usize, text: &str| text.starts_with('.') || !line[..at].ends_with(is_of_word);
            let holds =
                |text: &&&str| line.match_indices(**text).any(|(at, text)| is_whole(at, text));
            found.extend(wanted.iter().filter(holds).map(|text| format!("{at}: {text}")));
        }
    }
    found
}

fn assert_tidy(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}
