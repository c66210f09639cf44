//! The names that a user gives to tensors: `OLD=NEW`, with parts that stay as they are.
//!
//! ```text
//! # a comment
//! model.embed = embedding.word_embeddings
//! b:layers.{n}.attn = decoder.layers.{n+1}.self_attention
//! *.gamma = *.weight
//! ```
//!
//! The left side is a name or the modules in front of one. `{n}` is a part without dots, `*` any part, as in the globs of
//! `--include`. What is true of a weight is true of the optimizer's tensors of it.

mod guess;

use std::collections::HashMap;

use regex::Regex;
use thiserror::Error;

use crate::base::limits::OverLimit;
use crate::base::side::Side;

pub use guess::rules_between;

/// Most rules with `*` or `{}`, each of which every name is held against.
const MAX_PATTERNS: usize = 4096;

/// The first component of the names of an optimizer's tensors.
const OPTIMIZER: &str = "optimizer.";

/// A rule that is none, with its place from 1.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{}column {column}: {message}", .line.map(|line| format!("line {line}, ")).unwrap_or_default())]
pub struct RenameError {
    /// The line, in a file.
    pub line: Option<usize>,
    /// The column, in characters.
    pub column: usize,
    /// Its cause.
    pub message: String,
}

/// A rule: tensors of the old names get new ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rename {
    /// The side that it is for, or both.
    pub side: Option<Side>,
    /// The names as they are written.
    pub old: String,
    /// The new names as they are written.
    pub new: String,
    /// The file that it is from, and its line.
    pub place: Option<(String, usize)>,
    pattern: Pattern,
}

/// Rules, the first of which that matches a name gives it a new one.
#[derive(Debug, Clone, Default)]
pub struct Renames {
    rules: Vec<Rename>,
    /// The numbers of the rules without parts that vary, by what they match.
    plain: HashMap<String, Vec<usize>>,
    /// The numbers of the others.
    varying: Vec<usize>,
}

/// The left side of a rule, and how the right one is made of it.
#[derive(Debug, Clone)]
struct Pattern {
    /// What varies; none where nothing does.
    regex: Option<Regex>,
    /// The text up to the first part that varies.
    head: String,
    /// The new name.
    parts: Vec<Part>,
    /// It is about the names of optimizer tensors as they are, not about weights.
    is_of_optimizer: bool,
    /// It is about weights alone, as the new name is one of the optimizer's.
    is_of_weights_only: bool,
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        let text = |pattern: &Self| pattern.regex.as_ref().map(|regex| regex.as_str().to_owned());
        (text(self), &self.head, &self.parts) == (text(other), &other.head, &other.parts)
    }
}

impl Eq for Pattern {}

/// A part of a new name.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    /// What this group of the expression took.
    Group(usize),
    /// The number that it took, and what is added to it.
    Number(usize, i64),
}

/// A part of a side of a rule, with its column from 0.
#[derive(Debug, PartialEq, Eq)]
struct Token<'t> {
    column: usize,
    kind: TokenKind<'t>,
}

#[derive(Debug, PartialEq, Eq)]
enum TokenKind<'t> {
    Text(&'t str),
    /// `*`
    Any,
    /// `{name}`, or `{name+1}`; the name may be empty.
    Named(&'t str, Option<i64>),
}

impl Renames {
    /// Adds the rule of a command line.
    ///
    /// # Errors
    /// It is none, or there are too many.
    pub fn add(&mut self, text: &str) -> Result<(), RenameError> {
        self.push(text, 0, None)
    }

    /// Adds the rules of a file: one a line, `#` begins a comment.
    ///
    /// # Errors
    /// The first line that is none.
    pub fn add_file(&mut self, file: &str, text: &str) -> Result<(), RenameError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (number, line) in text.lines().enumerate() {
            let rule = without_comment(line).trim();
            if !rule.is_empty() {
                let indent = line.chars().take_while(|char| char.is_whitespace()).count();
                self.push(rule, indent, Some((file.to_owned(), number + 1)))?;
            }
        }
        Ok(())
    }

    fn push(
        &mut self,
        text: &str,
        indent: usize,
        place: Option<(String, usize)>,
    ) -> Result<(), RenameError> {
        let line = place.as_ref().map(|(_, line)| *line);
        let rule = Rename {
            place,
            ..parse(text).map_err(|(column, message)| RenameError {
                line,
                column: indent + column + 1,
                message,
            })?
        };
        let number = self.rules.len();
        match &rule.pattern.regex {
            None => self.plain.entry(rule.pattern.head.clone()).or_default().push(number),
            Some(_) if self.varying.len() == MAX_PATTERNS => {
                let over = OverLimit::new("rules with * or {}", MAX_PATTERNS as u64);
                return Err(RenameError { line, column: indent + 1, message: over.to_string() });
            }
            Some(_) => self.varying.push(number),
        }
        self.rules.push(rule);
        Ok(())
    }

    /// The rules in their order.
    #[must_use]
    pub fn rules(&self) -> &[Rename] {
        &self.rules
    }

    /// The new name of a tensor of a side, and the number of the rule that gives it; only rules that `takes` says may.
    #[must_use]
    pub fn rename(
        &self,
        side: Side,
        name: &str,
        takes: impl Fn(usize) -> bool,
    ) -> Option<(usize, String)> {
        let weight = name.strip_prefix(OPTIMIZER).and_then(|rest| rest.split_once('.'));
        let weight = weight.map(|(_, weight)| weight);
        let mut best: Option<(usize, String)> = None;
        let mut consider = |number: usize| {
            let rule = &self.rules[number];
            let is_better = best.as_ref().is_none_or(|(best, _)| number < *best);
            if !is_better || rule.side.is_some_and(|only| only != side) || !takes(number) {
                return;
            }
            let pattern = &rule.pattern;
            let renamed = match weight {
                Some(_) if pattern.is_of_weights_only => None,
                Some(weight) if !pattern.is_of_optimizer => pattern
                    .applied(weight)
                    .map(|new| format!("{}{new}", &name[..name.len() - weight.len()])),
                _ => pattern.applied(name),
            };
            if let Some(renamed) = renamed {
                best = Some((number, renamed));
            }
        };
        for text in [Some(name), weight].into_iter().flatten() {
            let ends = text.match_indices('.').map(|(at, _)| at).chain([text.len()]);
            let found = ends.filter_map(|end| self.plain.get(&text[..end]));
            found.flatten().for_each(|number| consider(*number));
        }
        self.varying.iter().for_each(|number| consider(*number));
        best
    }
}

impl Rename {
    /// The rule as it is written.
    #[must_use]
    pub fn text(&self) -> String {
        let side = self.side.map(|side| format!("{side}:")).unwrap_or_default();
        format!("{side}{}={}", self.old, self.new)
    }
}

impl Pattern {
    /// The new name, where this one matches.
    fn applied(&self, name: &str) -> Option<String> {
        let rest = name.strip_prefix(&self.head)?;
        let (new, rest) = match &self.regex {
            None => (self.filled(|_| None)?, rest),
            Some(regex) => {
                let captures = regex.captures(name)?;
                let group = |number| captures.get(number).map(|found| found.as_str());
                (self.filled(group)?, captures.name("rest").map_or("", |rest| rest.as_str()))
            }
        };
        let renamed = match (new.is_empty(), rest.strip_prefix('.')) {
            (true, Some(rest)) => rest.to_owned(),
            (_, None) if !rest.is_empty() => return None,
            _ => new + rest,
        };
        (!renamed.is_empty()).then_some(renamed)
    }

    fn filled<'n>(&self, group: impl Fn(usize) -> Option<&'n str>) -> Option<String> {
        let mut filled = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => filled.push_str(text),
                Part::Group(number) => filled.push_str(group(*number)?),
                Part::Number(number, add) => {
                    let value = group(*number)?.parse::<i64>().ok()?.checked_add(*add)?;
                    filled.push_str(&u64::try_from(value).ok()?.to_string());
                }
            }
        }
        Some(filled)
    }
}

/// A line up to a `#` that begins it or follows a space.
fn without_comment(line: &str) -> &str {
    let mut before = ' ';
    for (at, char) in line.char_indices() {
        if char == '#' && before.is_whitespace() {
            return &line[..at];
        }
        before = char;
    }
    line
}

/// A rule, or the column from 0 and what is wrong there.
fn parse(text: &str) -> Result<Rename, (usize, String)> {
    let (side, names) = match text.split_at_checked(2) {
        Some(("a:", rest)) => (Some(Side::A), rest),
        Some(("b:", rest)) => (Some(Side::B), rest),
        _ => (None, text),
    };
    let column = |part: &str| {
        let at = part.as_ptr() as usize - text.as_ptr() as usize;
        text.get(..at).map_or(0, |before| before.chars().count())
    };
    let Some((old, new)) = names.split_once('=') else {
        return Err((0, "not of the form OLD=NEW".to_owned()));
    };
    let (old, new) = (unquoted(old.trim()), unquoted(new.trim()));
    if old.is_empty() {
        return Err((column(names), "no name on the left of =".to_owned()));
    }
    let pattern = Pattern::new(&tokens(old, column(old))?, &tokens(new, column(new))?)?;
    Ok(Rename { side, old: old.to_owned(), new: new.to_owned(), place: None, pattern })
}

/// Without double quotes around it.
fn unquoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|inner| inner.strip_suffix('"')).unwrap_or(text)
}

fn tokens(text: &str, column: usize) -> Result<Vec<Token<'_>>, (usize, String)> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let column = column + text[..text.len() - rest.len()].chars().count();
        let (kind, len) = match first {
            '*' => (TokenKind::Any, 1),
            '{' => {
                let end = rest.find('}').ok_or_else(|| (column, "no } to this {".to_owned()))?;
                let (name, add) = number(&rest[1..end]).map_err(|message| (column, message))?;
                (TokenKind::Named(name, add), end + 1)
            }
            '}' => return Err((column, "no { to this }".to_owned())),
            _ => {
                let end = rest.find(['*', '{', '}']).unwrap_or(rest.len());
                (TokenKind::Text(&rest[..end]), end)
            }
        };
        tokens.push(Token { column, kind });
        rest = &rest[len..];
    }
    Ok(tokens)
}

/// `n`, or `n+1`: a name, and what is added to its number.
fn number(text: &str) -> Result<(&str, Option<i64>), String> {
    let (name, add) = match text.find(['+', '-']) {
        Some(at) => {
            let add = text[at..].parse::<i32>();
            let add = add.map_err(|_| format!("{:?} is no number to add", &text[at..]))?;
            (&text[..at], Some(i64::from(add)))
        }
        None => (text, None),
    };
    let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
    match name.chars().all(is_name) {
        true => Ok((name, add)),
        false => Err(format!("{{{text}}} has other characters than letters, digits and _")),
    }
}

impl Pattern {
    fn new(old: &[Token<'_>], new: &[Token<'_>]) -> Result<Self, (usize, String)> {
        let numbers: Vec<&str> = new
            .iter()
            .filter_map(|token| match token.kind {
                TokenKind::Named(name, Some(_)) => Some(name),
                _ => None,
            })
            .collect();
        let mut expression = "^(?s:".to_owned();
        // The groups with a name, and those without: of `*`, of `{}`.
        let mut named: HashMap<&str, usize> = HashMap::new();
        let mut unnamed: [Vec<usize>; 2] = Default::default();
        let mut groups = 0;
        for Token { column, kind } in old {
            groups += usize::from(!matches!(kind, TokenKind::Text(_)));
            match kind {
                TokenKind::Text(text) => expression.push_str(&regex::escape(text)),
                TokenKind::Any => {
                    expression.push_str("(.+?)");
                    unnamed[0].push(groups);
                }
                TokenKind::Named(_, Some(_)) => {
                    return Err((*column, "numbers are added to on the right".to_owned()));
                }
                TokenKind::Named(name, None) => {
                    let is_number = numbers.contains(name);
                    expression.push_str(if is_number { "([0-9]+)" } else { "([^.]+?)" });
                    match *name {
                        "" => unnamed[1].push(groups),
                        _ if named.insert(name, groups).is_some() => {
                            return Err((*column, format!("{{{name}}} is there twice")));
                        }
                        _ => {}
                    }
                }
            }
        }
        let ends_open = matches!(old.last(), Some(Token { kind: TokenKind::Any, .. }));
        expression.push_str(if ends_open { ")$" } else { ")(?<rest>(?s:\\..*)?)$" });
        let mut taken = [0, 0];
        let mut parts = Vec::new();
        for Token { column, kind } in new {
            let mut next = |kind: usize, word: &str| {
                taken[kind] += 1;
                let group = unnamed[kind].get(taken[kind] - 1).copied();
                group.ok_or_else(|| (*column, format!("there are fewer {word} on the left")))
            };
            parts.push(match kind {
                TokenKind::Text(text) => Part::Text((*text).to_owned()),
                TokenKind::Any => Part::Group(next(0, "*")?),
                TokenKind::Named("", add) => match add {
                    None => Part::Group(next(1, "{}")?),
                    Some(add) => Part::Number(next(1, "{}")?, *add),
                },
                TokenKind::Named(name, add) => {
                    let group = named.get(name).copied();
                    let group =
                        group.ok_or_else(|| (*column, format!("{{{name}}} is not on the left")))?;
                    add.map_or(Part::Group(group), |add| Part::Number(group, add))
                }
            });
        }
        let column = old.first().map_or(0, |token| token.column);
        let is_short = |word: &str| format!("there are more {word} on the left than on the right");
        for (kind, word) in ["*", "{}"].into_iter().enumerate() {
            if taken[kind] > 0 && taken[kind] < unnamed[kind].len() {
                return Err((column, is_short(word)));
            }
        }
        let bad = |error: regex::Error| (column, error.to_string());
        let head = match old.first().map(|token| &token.kind) {
            Some(TokenKind::Text(text)) => *text,
            _ => "",
        };
        let makes_optimizer =
            matches!(parts.first(), Some(Part::Text(text)) if text.starts_with(OPTIMIZER));
        let is_of_optimizer = format!("{head}.").starts_with(OPTIMIZER);
        Ok(Self {
            regex: (groups > 0).then(|| Regex::new(&expression)).transpose().map_err(bad)?,
            head: head.to_owned(),
            parts,
            is_of_optimizer,
            is_of_weights_only: makes_optimizer && !is_of_optimizer,
        })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn renamed(rules: &[&str], side: Side, name: &str) -> String {
        let mut renames = Renames::default();
        rules.iter().for_each(|rule| renames.add(rule).unwrap());
        renames.rename(side, name, |_| true).map_or_else(|| "-".to_owned(), |(_, new)| new)
    }

    #[test]
    fn names_and_the_modules_in_front_of_them_are_renamed() {
        for (rule, name, new) in [
            ("embed=wte", "embed", "wte"),
            ("embed=wte", "embed.weight", "wte.weight"),
            ("embed=wte", "embedding.weight", "-"),
            ("embed=wte", "x.embed.weight", "-"),
            ("model=", "model.layers.0.w", "layers.0.w"),
            ("model=", "model", "-"),
            ("*=model.*", "layers.0.w", "model.layers.0.w"),
            (
                "layers.{n}.attn=decoder.layers.{n}.self_attention",
                "layers.12.attn.q.weight",
                "decoder.layers.12.self_attention.q.weight",
            ),
            ("layers.{n}.attn=x.{n}", "layers.1.2.attn.q", "-"),
            ("layers.{n+1}.x=y", "layers.1.x", "!"),
            ("layers.{n}=layers.{n+1}", "layers.9.x", "layers.10.x"),
            ("layers.{n}=layers.{n-2}", "layers.1.x", "-"),
            ("layers.{n}=layers.{n-2}", "layers.head.x", "-"),
            ("layers.{}.{}=h.{}.{+1}", "layers.3.7.x", "h.3.8.x"),
            ("*.gamma=*.weight", "a.b.gamma", "a.b.weight"),
            ("*.attn.*=*.attention.*", "x.attn.y.attn.z", "x.attention.y.attn.z"),
            ("l*.{k}_proj=*.{k}", "l7.q_proj.weight", "7.q.weight"),
            (
                "experts.{e}.layer.{n}=layers.{n}.experts.{e}",
                "experts.3.layer.0.w",
                "layers.0.experts.3.w",
            ),
            ("\"a\" = \"b.c\"", "a.x", "b.c.x"),
            ("a.é{x}=ü{x}", "a.éß.w", "üß.w"),
            ("w=v", "optimizer.exp_avg.w", "optimizer.exp_avg.v"),
            ("*=model.*", "optimizer.exp_avg.a.w", "optimizer.exp_avg.model.a.w"),
            ("optimizer.fp32_param.*=*", "optimizer.fp32_param.a.w", "a.w"),
            ("optimizer.fp32_param=", "optimizer.fp32_param.a.w", "a.w"),
            ("optimizer.fp32_param.*=*", "optimizer.exp_avg.a.w", "-"),
            ("*=optimizer.fp32_param.*", "a.w", "optimizer.fp32_param.a.w"),
            ("*=optimizer.fp32_param.*", "optimizer.exp_avg.a.w", "-"),
        ] {
            if new == "!" {
                assert!(Renames::default().add(rule).is_err(), "{rule}");
                continue;
            }
            assert_eq!(renamed(&[rule], Side::A, name), new, "{rule} of {name}");
        }
    }

    #[test]
    fn the_first_rule_decides_and_may_be_for_one_side() {
        let rules = ["a.b.c=first", "*=second.*", "a.b=third", "b:x.*=y.*"];
        assert_eq!(renamed(&rules, Side::A, "a.b.c"), "first");
        assert_eq!(renamed(&rules, Side::A, "a.b.d"), "second.a.b.d");
        assert_eq!(renamed(&["a:w=v", "w=u"], Side::B, "w"), "u");
        assert_eq!(renamed(&["a:w=v", "w=u"], Side::A, "w"), "v");
        assert_eq!(renamed(&["x=y", "y=x"], Side::A, "x"), "y", "not back again");
    }

    #[test]
    fn a_file_has_comments_and_its_errors_a_line_and_a_column() {
        let mut renames = Renames::default();
        let text = "\u{feff}# table\n\n  a.{n} = b.{n}   # layers\r\nb:c#1=d\n";
        renames.add_file("names.map", text).unwrap();
        let [first, second] = renames.rules() else { unreachable!() };
        assert_eq!((&*first.old, &*first.new), ("a.{n}", "b.{n}"));
        assert_eq!(first.place, Some(("names.map".to_owned(), 3)));
        assert_eq!((second.text(), second.side), ("b:c#1=d".to_owned(), Some(Side::B)));
        for (text, column, message) in [
            ("  ab", 3, "not of the form OLD=NEW"),
            (" a: = b", 4, "no name on the left"),
            ("a.{n = b", 3, "no } to this {"),
            ("a.n} = b", 4, "no { to this }"),
            ("a.{n} = b.{m}", 11, "{m} is not on the left"),
            ("é.{n} = b.{n}.{m}", 15, "{m} is not on the left"),
            ("a.{n}.{n} = b", 7, "{n} is there twice"),
            ("a.* = b.*.*", 11, "fewer * on the left"),
            ("b:a.*.* = b.*", 3, "more * on the left"),
            ("a.{n+1} = b", 3, "on the right"),
            ("a.{n} = b.{n+x}", 11, "no number to add"),
            ("a.{n o} = b", 3, "other characters"),
        ] {
            let error = Renames::default().add_file("x", &format!("\n{text}\n")).unwrap_err();
            assert_eq!((error.line, error.column), (Some(2), column), "{text:?}: {error}");
            assert!(error.message.contains(message), "{text:?}: {error}");
        }
        assert_eq!(
            Renames::default().add("ab").unwrap_err().to_string(),
            "column 1: not of the form OLD=NEW"
        );
    }

    #[test]
    fn rules_with_parts_that_vary_are_bounded() {
        let mut renames = Renames::default();
        (0..MAX_PATTERNS).for_each(|number| renames.add(&format!("x{number}.*=y.*")).unwrap());
        renames.add("plain=other").unwrap();
        let error = renames.add("z.*=y.*").unwrap_err();
        assert!(error.message.contains("limit of 4096"), "{error}");
    }
}
