//! `explain-rules`: open both sides, pair, say which rule decides; no value is read.

use anyhow::Result;

use crate::base::side::Side;
use crate::catalog::Section;
use crate::cli::ExplainRulesArgs;
use crate::judge::policy::Policy;
use crate::pairing::Selection;
use crate::pipeline;
use crate::report::{RenameUse, Style, problems, rules};

use super::result::check_stdout;
use super::{names, on_screen, open_side, read_rules};

pub(super) fn run(args: &ExplainRulesArgs, style: Style) -> Result<u8> {
    check_stdout()?;
    let rules = read_rules(&args.rules_file)?.rules;
    let policy = Policy { bounds: args.judging.bounds(), rules, ..Policy::default() };
    let naming = names::options(&args.names)?;
    let open = |side, path| {
        let mut options = args.input.options(side, &[Section::Model]);
        options.sections.retain(|section| *section != Section::State);
        options.no_values = true;
        open_side(side, path, options, args.names.masters)
    };
    let (mut a, mut b) = (open(Side::A, &args.a)?, open(Side::B, &args.b)?);
    let (pairing, renamed) = pipeline::paired(&mut a, &mut b, &naming, &Selection::default());
    let renames = RenameUse::of(&naming.renames, |rule| renamed.by(rule));
    let mut is_used = true;
    on_screen(|out| {
        is_used = rules::write(&policy, &pairing, &renames, args.all, style, out)?;
        Ok(())
    })?;
    for (side, catalog) in Side::BOTH.iter().zip([&a, &b]) {
        let found = catalog.problems.iter().map(|problem| format!("{side}: {problem}"));
        problems::write_all(&found.collect::<Vec<_>>());
    }
    let has_problems = !a.problems.is_empty() || !b.problems.is_empty();
    Ok(if has_problems { 2 } else { u8::from(!is_used) })
}
