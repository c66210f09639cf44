//! Test cases for CI systems, in the XML of JUnit as Jenkins reads it (jenkinsci/xunit-plugin, `junit-10.xsd`): a suite for each
//! layer, a case for each of its modules; and one suite for what is beside the tensors.

use std::io::{self, Write};

use crate::names::printable;
use crate::report::by_layer::verdict_text;
use crate::report::document::{Document, StateDifference, Tensor};
use crate::report::layers::{Layer, Module};
use crate::report::units::{counted, scientific};

/// The bytes that it begins with.
pub(super) const START: &str =
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"ckptcmp compare\"";

/// Tensors named in a case.
const NAMED: usize = 5;

/// Names and errors in a case.
const LISTED: usize = 100;

/// The outcome of a case that does not pass.
struct Bad {
    /// Something could not be read.
    is_error: bool,
    kind: String,
    message: String,
    details: Vec<String>,
}

struct Case {
    name: String,
    bad: Option<Bad>,
}

struct Suite {
    name: String,
    cases: Vec<Case>,
}

impl Suite {
    fn count(&self, is_error: bool) -> usize {
        let bad = self.cases.iter().filter_map(|case| case.bad.as_ref());
        bad.filter(|bad| bad.is_error == is_error).count()
    }
}

pub(super) fn write(document: &Document, out: &mut dyn Write) -> io::Result<()> {
    let mut suites = vec![whole(document)];
    let tensors = document.tensors.as_deref().unwrap_or_default();
    suites.extend(document.layers.iter().flatten().map(|layer| suite(layer, tensors)));
    // What no case says is said by one of its own.
    let is_told = suites.iter().flat_map(|suite| &suite.cases).any(|case| case.bad.is_some());
    if !document.passes && !is_told {
        let bad = Bad {
            is_error: document.exit_code == 2,
            kind: document.verdict.to_string(),
            message: document.summary.clone().unwrap_or_default(),
            details: Vec::new(),
        };
        suites[0].cases.push(Case { name: "verdict".to_owned(), bad: Some(bad) });
    }
    let sum = |count: &dyn Fn(&Suite) -> usize| suites.iter().map(count).sum::<usize>();
    write!(out, "{START}")?;
    let counts = [
        ("tests", sum(&|suite| suite.cases.len())),
        ("failures", sum(&|suite| suite.count(false))),
        ("errors", sum(&|suite| suite.count(true))),
    ];
    write_counts(counts, out)?;
    suites.iter().try_for_each(|suite| write_suite(suite, out))?;
    writeln!(out, "</testsuites>")
}

fn write_counts(counts: [(&str, usize); 3], out: &mut dyn Write) -> io::Result<()> {
    counts.iter().try_for_each(|(name, count)| write!(out, " {name}=\"{count}\""))?;
    writeln!(out, ">")
}

fn write_suite(suite: &Suite, out: &mut dyn Write) -> io::Result<()> {
    let name = escaped(&suite.name);
    write!(out, "  <testsuite name=\"{name}\"")?;
    let (failures, errors) = (suite.count(false), suite.count(true));
    let counts = [("tests", suite.cases.len()), ("failures", failures), ("errors", errors)];
    write_counts(counts, out)?;
    for case in &suite.cases {
        write!(out, "    <testcase classname=\"{name}\" name=\"{}\"", escaped(&case.name))?;
        let Some(Bad { is_error, kind, message, details }) = &case.bad else {
            writeln!(out, "/>")?;
            continue;
        };
        let element = if *is_error { "error" } else { "failure" };
        let (kind, message) = (escaped(kind), escaped(message));
        write!(out, ">\n      <{element} type=\"{kind}\" message=\"{message}\">")?;
        let details: Vec<String> = details.iter().map(|detail| escaped(detail)).collect();
        writeln!(out, "{}</{element}>\n    </testcase>", details.join("\n"))?;
    }
    writeln!(out, "  </testsuite>")
}

/// The cases beside tensors: errors, names on one side only, copies that disagree.
fn whole(document: &Document) -> Suite {
    let lists = document.only_in.iter().flat_map(|only_in| only_in.both());
    let mut cases = vec![Case {
        name: "read and put together".to_owned(),
        bad: listed("trouble", true, "problem", &document.errors),
    }];
    cases.extend(lists.map(|(side, names)| Case {
        name: format!("only in {side}"),
        bad: listed("unpaired", false, "tensor", names),
    }));
    if let Some(tensors) = &document.tensors {
        let allowed = document.options.as_ref().is_some_and(|options| options.allow_diverged);
        let copies = tensors.iter().flat_map(|tensor| {
            let disagree = tensor.replicas.iter().filter(|copy| copy.disagrees);
            disagree.map(|copy| {
                let (side, name) = (&copy.side, &tensor.name);
                format!("{side}: {name}: {} differs from {}", copy.copy, copy.first)
            })
        });
        let copies: Vec<String> = if allowed { Vec::new() } else { copies.collect() };
        let bad = listed("replicas", false, "copy", &copies);
        cases.push(Case { name: "copies agree".to_owned(), bad });
    }
    if let Some(state) = &document.state {
        let lines: Vec<String> = state.differences.iter().map(StateDifference::line).collect();
        let bad = listed("state", false, "difference", &lines);
        cases.push(Case { name: "state of the run".to_owned(), bad });
    }
    Suite { name: "checkpoints".to_owned(), cases }
}

fn listed(kind: &str, is_error: bool, noun: &str, lines: &[String]) -> Option<Bad> {
    let first = lines.first()?;
    let count = match noun {
        "copy" if lines.len() != 1 => format!("{} copies", lines.len()),
        _ => counted(lines.len(), noun),
    };
    let mut details: Vec<String> = lines.iter().take(LISTED).cloned().collect();
    if lines.len() > LISTED {
        details.push(format!("and {} more", lines.len() - LISTED));
    }
    Some(Bad { is_error, kind: kind.to_owned(), message: format!("{count}: {first}"), details })
}

fn suite(layer: &Layer, tensors: &[Tensor]) -> Suite {
    let name = match &*layer.state {
        "" => layer.title.clone(),
        state => format!("{state} of {}", layer.title),
    };
    let case = |module: &Module| {
        let name = if module.name.is_empty() { "parameters" } else { &module.name };
        Case { name: name.to_owned(), bad: bad(module, tensors) }
    };
    Suite { name, cases: layer.modules.iter().map(case).collect() }
}

/// The outcome of a module, with its worst tensors.
fn bad(module: &Module, tensors: &[Tensor]) -> Option<Bad> {
    if module.passes {
        return None;
    }
    let members = module.tensors.iter().filter_map(|index| tensors.get(*index));
    let mut failing: Vec<&Tensor> = members.filter(|tensor| !tensor.passes).collect();
    let key = |tensor: &Tensor| tensor.metrics.rel_l2.unwrap_or(f64::INFINITY);
    failing.sort_by(|one, other| key(other).total_cmp(&key(one)));
    let worst = match module.without_distance {
        0 => format!("rel_l2 {}", scientific(module.worst_rel_l2)),
        _ => "no distance".to_owned(),
    };
    let more = failing.len().saturating_sub(NAMED);
    let lines = failing.iter().take(NAMED).map(|tensor| verdict_text(tensor));
    let mut details: Vec<String> = lines.collect();
    details.extend((more > 0).then(|| format!("and {more} more")));
    Some(Bad {
        is_error: module.verdict == "unread",
        kind: module.verdict.to_string(),
        message: format!(
            "{} of {} do not pass: {worst}",
            failing.len(),
            counted(module.tensors.len(), "tensor")
        ),
        details,
    })
}

/// Text for an element or an attribute; characters that XML has no place for are written as escapes or replaced.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in printable(text).chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            char => escaped.push(char),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_xml_would_obey_is_text() {
        let text = "</testcase><a b=\"c\">&'\u{0}\n\u{ffff}]]>";
        let expected =
            "&lt;/testcase&gt;&lt;a b=&quot;c&quot;&gt;&amp;&apos;\\u{0}\\u{a}\u{fffd}]]&gt;";
        assert_eq!(escaped(text), expected);
    }
}
