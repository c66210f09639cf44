//! Errors of the file system are never swallowed where checkpoints are read: only what is not found is absent.
//!
//! Two rules, the second one also for the room that runs the commands. Readers look at files through `storage` and `Probe` alone. And what comes from a function that reads, which is
//! told by the error in its signature, is not thrown away: not by `.ok()` and its like, not by `if let Ok`, not by `Err(_)`,
//! neither at once nor by way of a variable.

use std::collections::BTreeSet;

use super::{Source, assert_tidy, is_of_word, sources, starts_with_any, words};

/// The rooms that read checkpoints.
const READERS: &[&str] = &["src/formats/", "src/containers/"];
/// The room that does it for them.
const STORAGE: &str = "src/storage/";

/// The rooms that look at the paths of results.
const RUNNERS: &[&str] = &["src/run/", "src/run.rs"];

/// The ways past that room.
const LOOKS: &[&str] = &[
    ".exists()",
    ".try_exists()",
    ".is_dir()",
    ".is_symlink()",
    ".metadata()",
    ".symlink_metadata()",
];

/// Those that tell their errors, and that the room which writes results may take.
const OPENS: &[&str] = &[".read_dir()", ".read_link()", ".canonicalize()", "use std::fs"];

/// Errors that may be the file system's.
const ERRORS: &[&str] = &[
    "io",
    "OpenError",
    "TorchError",
    "ArchiveError",
    "StreamError",
    "LegacyError",
    "SafetensorsError",
    "DcpError",
    "SliceError",
    "ZarrError",
    "NativeError",
];

/// Names that options and collections have, too.
const STANDARD: &[&str] = &["get", "map"];

/// Methods that make less of a result than it is.
const LOSSES: &[&str] = &[
    ".ok()",
    ".is_ok()",
    ".is_err()",
    ".is_ok_and(",
    ".is_err_and(",
    ".unwrap_or(",
    ".unwrap_or_default()",
    ".unwrap_or_else(|_|",
    ".unwrap_or_else(|_error|",
    ".map_or(",
    ".map_or_else(|_|",
    ".flatten()",
    ".or(",
    ".or_else(|_|",
];

#[test]
fn readers_look_at_files_through_storage_alone() {
    let mut wrong = Vec::new();
    let rooms = [READERS, RUNNERS].concat();
    for source in sources().iter().filter(|source| starts_with_any(&source.path, &rooms)) {
        for (at, line) in source.lines() {
            let looks = LOOKS.iter().filter(|look| line.contains(**look));
            wrong.extend(looks.map(|look| format!("{at}: {look}")));
            // Results are written without `storage`, which only reads.
            if starts_with_any(&source.path, RUNNERS) {
                continue;
            }
            let opens = OPENS.iter().filter(|open| line.contains(**open));
            wrong.extend(opens.map(|open| format!("{at}: {open}")));
            // The type of an open file is no way to open one.
            let mut in_fs = line.split("fs::").skip(1);
            if in_fs.any(|rest| !rest.starts_with("File") || rest.starts_with("File::")) {
                wrong.push(format!("{at}: std::fs"));
            }
            // A probe was looked at already.
            let mut is_file = line.match_indices(".is_file()").map(|(at, _)| at);
            if !is_file.all(|at| line[..at].ends_with("probe")) {
                wrong.push(format!("{at}: .is_file()"));
            }
        }
    }
    assert_tidy(&wrong);
}

#[test]
fn no_error_of_reading_is_thrown_away() {
    let rooms = [READERS, RUNNERS, &[STORAGE]].concat();
    let sources: Vec<Source> =
        sources().into_iter().filter(|source| starts_with_any(&source.path, &rooms)).collect();
    let calls: BTreeSet<String> = sources.iter().flat_map(self::calls).collect();
    let known = [".read_exact_at(", "Probe::new(", ".child(", "TorchFile::open(", "storage::list("];
    assert!(known.iter().all(|call| calls.contains(*call)), "{calls:?}");
    let mut wrong = Vec::new();
    for source in &sources {
        // Of the functions that are called by their name alone, those of the file and those that it imports.
        let uses = source.code.split(';').filter(|text| text.trim_start().starts_with("use "));
        let imported: BTreeSet<&str> = uses.flat_map(words).collect();
        let own: BTreeSet<String> = self::calls(source).into_iter().collect();
        let is_known = |call: &&String| {
            call.starts_with('.')
                || call.contains("::")
                || own.contains(*call)
                || imported.contains(call.trim_end_matches('('))
        };
        let calls: BTreeSet<String> = calls.iter().filter(is_known).cloned().collect();
        for (at, what) in losses(&source.code, &calls) {
            let line = source.code[..at].matches('\n').count() + 1;
            wrong.push(format!("{}:{line}: {what} loses an error", source.path));
        }
    }
    assert_tidy(&wrong);
}

#[test]
fn the_reader_of_losses_knows_the_ways_to_lose_an_error() {
    let code = "impl<'a> Files { fn read(&self, to: impl Fn(u8)) -> io::Result<u8> { x } } \
                fn head(p: &Path) -> Result<Vec<u8>, OpenError> { x } fn size() -> u8 { x }";
    let source = Source { path: "src/x/module.rs".into(), text: String::new(), code: code.into() };
    let calls: BTreeSet<String> = calls(&source).into_iter().collect();
    let found: Vec<&str> = calls.iter().map(String::as_str).collect();
    assert_eq!(found, [".read(", "head(", "module::head(", "x::head("]);
    for lost in [
        "files.read(a).ok()",
        "self.files.read(&x[1..]).map_err(|e| other(e))\n    .unwrap_or_default()",
        "let x = head(p); f(x.is_ok())",
        "if let Ok(x) = files.read(a) { }",
        "let Ok(x) = module::head(p) else { return None };",
        "let _ = head(p);",
        "drop(files.read(a))",
        "names.map(|name| files.read(name)).flatten()",
        "match files.read(a) { Ok(a) => Some(a), Err(_) => None }",
    ] {
        assert_eq!(losses(lost, &calls).len(), 1, "{lost}");
    }
    for kept in [
        "files.read(a)?.checked_sub(1).unwrap_or(0)",
        "text.parse().ok()",
        "overhead(p).ok()",
        "let x = head(p)?; x.first().copied().unwrap_or(0)",
        "match files.read(a) { Err(error) if is_of_system(&error) => b, Err(_) => None }",
        "f(head(p)?, u8::try_from(a).ok())",
    ] {
        assert_eq!(losses(kept, &calls), [], "{kept}");
    }
}

/// How functions that may give an error of the file system are called: `.name(` of methods, `Type::name(` of what else
/// stands in an `impl`, `name(` and `::name(` of free functions.
fn calls(source: &Source) -> Vec<String> {
    let (mut found, code) = (Vec::new(), source.code.as_str());
    for (at, _) in code.match_indices("fn ").filter(|(at, _)| !code[..*at].ends_with(is_of_word)) {
        let rest = &code[at + 3..];
        let name: String = rest.chars().take_while(|char| is_of_word(*char)).collect();
        let Some(open) = rest.find('(').filter(|_| !name.is_empty()) else { continue };
        let inside = balanced(&rest[open..]);
        let behind = &rest[open + inside.len()..];
        let end = behind.find(['{', ';']).unwrap_or(behind.len());
        let result = behind[..end].split("where").next().unwrap_or_default();
        let Some((_, result)) = result.split_once("Result") else { continue };
        let is_io = behind[..end].contains("io::Result");
        if STANDARD.contains(&name.as_str()) {
            continue;
        }
        if !is_io && !words(result).any(|word| ERRORS.contains(&word)) {
            continue;
        }
        let first = inside.trim_start_matches(['(', '&', ' ', '\n']);
        if words(first.split([',', ':']).next().unwrap_or_default()).any(|word| word == "self") {
            found.push(format!(".{name}("));
        } else if let Some(owner) = impl_around(code, at) {
            found.push(format!("{owner}::{name}("));
        } else {
            // By its own name, or by that of its module or of the room that hands it on.
            let parts: Vec<&str> = source.parts().collect();
            let modules = parts.iter().rev().take(2);
            found.extend(modules.map(|module| format!("{module}::{name}(")));
            found.push(format!("{name}("));
        }
    }
    found
}

/// The type whose `impl` the place is in.
fn impl_around(code: &str, at: usize) -> Option<String> {
    let (start, _) = code[..at].rmatch_indices("impl").find(|(start, word)| {
        let is_word = !code[..*start].ends_with(is_of_word)
            && !code[start + word.len()..].starts_with(is_of_word);
        let open = code[*start..].find(['{', ';', ')', ',']);
        let open = open.filter(|open| code[start + open..].starts_with('{'));
        is_word && open.is_some_and(|open| start + open + braced(&code[start + open..]) > at)
    })?;
    let head = code[start + 4..].split('{').next()?;
    let head = head.rsplit(" for ").next()?.split(" where").next()?;
    let plain = head.trim().trim_start_matches(['<', '\'']);
    let plain = if head.trim().starts_with('<') { plain.split_once('>')?.1 } else { plain };
    words(plain).next().map(str::to_owned)
}

/// Places at which a result of one of these calls loses its error, and how.
fn losses(code: &str, calls: &BTreeSet<String>) -> Vec<(usize, String)> {
    let tainted = tainted(code, calls);
    let is_io = |text: &str| {
        let text = &text[last_question_mark(text)..];
        calls.iter().any(|call| has_call(text, call))
            || tainted.iter().any(|(name, from, to)| {
                let at = text.as_ptr() as usize - code.as_ptr() as usize;
                (*from..*to).contains(&at) && words(text).next() == Some(name)
            })
    };
    let mut found = Vec::new();
    for loss in LOSSES {
        for (at, _) in code.match_indices(loss) {
            if is_io(receiver(code, at)) {
                found.push((at, (*loss).to_owned()));
            }
        }
    }
    for (at, start) in code.match_indices("let Ok(") {
        let pattern = at + 6 + balanced(&code[at + 6..]).len();
        let value = code[pattern..].trim_start().trim_start_matches('=');
        if is_io(&value[..end_of_value(value)]) {
            found.push((at, start.to_owned()));
        }
    }
    for (at, start) in code.match_indices("let _ =") {
        let value = &code[at + start.len()..];
        if is_io(&value[..end_of_value(value)]) {
            found.push((at, start.to_owned()));
        }
    }
    for (at, _) in code.match_indices("drop(").filter(|(at, _)| !code[..*at].ends_with(is_of_word))
    {
        if is_io(balanced(&code[at + 4..]).trim_matches(['(', ')'])) {
            found.push((at, "drop".to_owned()));
        }
    }
    for (at, _) in code.match_indices("match ").filter(|(at, _)| !code[..*at].ends_with(is_of_word))
    {
        let value = &code[at + 6..];
        let end = end_of_value(value);
        let arms = &value[end..end + braced(&value[end..])];
        let knows = arms.contains("is_of_system") || arms.contains("Io(") || arms.contains("Io {");
        if arms.contains("Err(_)") && !knows && is_io(&value[..end]) {
            found.push((at, "Err(_)".to_owned()));
        }
    }
    found
}

/// Variables that hold results of these calls, each with the places between which it does.
fn tainted<'c>(code: &'c str, calls: &BTreeSet<String>) -> Vec<(&'c str, usize, usize)> {
    let mut found = Vec::new();
    for (at, start) in
        code.match_indices("let ").filter(|(at, _)| !code[..*at].ends_with(is_of_word))
    {
        let rest = &code[at + start.len()..];
        let name = words(rest.trim_start_matches("mut ")).next().unwrap_or_default();
        let Some((pattern, value)) = rest.split_once('=') else { continue };
        let is_plain = words(pattern).filter(|word| *word != "mut").eq([name]);
        let end = end_of_value(value);
        let value = &value[..end];
        let is_closure = value.trim_start().starts_with(['|', 'm']) && value.contains('|');
        let is_made = !value.trim_end().ends_with('?') && !is_closure;
        let tail = &value[last_question_mark(value)..];
        if is_plain && is_made && calls.iter().any(|call| has_call(tail, call)) {
            let from = code.len() - rest.len();
            // To the end of the function, or the next variable of this name.
            let until = code[from..].find("fn ").map_or(code.len(), |next| from + next);
            let until =
                code[from..until].find(&format!("let {name} ")).map_or(until, |next| from + next);
            found.push((name, from, until));
        }
    }
    found
}

fn has_call(text: &str, call: &str) -> bool {
    let is_whole = |at: usize| {
        let before = &text[..at];
        call.starts_with('.') || !before.ends_with(|char| is_of_word(char) || ".:".contains(char))
    };
    // What a call's own arguments propagate is no result of the whole.
    text.match_indices(call).any(|(at, _)| {
        let behind = &text[at + call.len() - 1..];
        is_whole(at) && !behind[balanced(behind).len()..].trim_start().starts_with('?')
    })
}

/// The chain of calls before a place.
fn receiver(code: &str, at: usize) -> &str {
    let (mut depth, mut start) = (0_usize, at);
    for (place, char) in code[..at].char_indices().rev() {
        match char {
            ')' | ']' => depth += 1,
            '(' | '[' if depth == 0 => break,
            '(' | '[' => depth -= 1,
            _ if depth > 0 => {}
            '.' | ':' | '?' | '&' | '*' | '_' => {}
            // White space is inside of a chain only before a dot.
            ' ' | '\n' if code[place..].trim_start().starts_with(['.', '?']) => {}
            _ if is_of_word(char) => {}
            _ => break,
        }
        start = place;
    }
    &code[start..at]
}

/// The place behind the last `?` that is in no brackets.
fn last_question_mark(text: &str) -> usize {
    let (mut depth, mut found) = (0_i64, 0);
    for (at, char) in text.char_indices() {
        match char {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '?' if depth == 0 => found = at + 1,
            _ => {}
        }
    }
    found
}

/// The end of an expression that a block, `else` or a semicolon follows.
fn end_of_value(text: &str) -> usize {
    let mut depth = 0_i64;
    for (at, char) in text.char_indices() {
        match char {
            '(' | '[' => depth += 1,
            ')' | ']' if depth == 0 => return at,
            ')' | ']' => depth -= 1,
            '{' | ';' if depth == 0 => return at,
            'e' if depth == 0 && text[at..].starts_with("else ") && text[..at].ends_with(' ') => {
                return at;
            }
            _ => {}
        }
    }
    text.len()
}

/// From a bracket to the one that closes it.
fn balanced(text: &str) -> &str {
    let mut depth = 0_i64;
    for (at, char) in text.char_indices() {
        match char {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[..at + char.len_utf8()];
        }
    }
    text
}

/// The length from a brace to the one that closes it.
fn braced(text: &str) -> usize {
    let mut depth = 0_i64;
    for (at, char) in text.char_indices() {
        match char {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + char.len_utf8();
        }
    }
    text.len()
}
