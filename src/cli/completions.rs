//! `ckptcmp completions` and `ckptcmp man`: what a shell and a reader get from the definitions of the command line.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, CommandFactory};
use clap_complete::CompleteEnv;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::Shells;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use crate::catalog::Section;
use crate::compare::metrics::METRICS;

use super::{Cli, help_template};

/// The name of the command.
const NAME: &str = "ckptcmp";

/// The variable by which a shell asks the command for completions.
const VARIABLE: &str = "CKPTCMP_COMPLETE";

const EXAMPLES: &str = "\
Examples:
  source <(ckptcmp completions bash)                     in ~/.bashrc
  source <(ckptcmp completions zsh)                      in ~/.zshrc, below compinit
  ckptcmp completions fish >~/.config/fish/completions/ckptcmp.fish";

const MAN_EXAMPLES: &str = "\
Examples:
  ckptcmp man | man -l -                 read the page of the command
  ckptcmp man compare | man -l -         that of a subcommand
  ckptcmp man -o ~/.local/share/man/man1 write all pages";

const EXIT_CODES: &str = "\
Exit codes:
  0  written
  2  trouble: bad usage, a file that exists or cannot be written";

/// Arguments of `completions`.
#[derive(Debug, Args)]
#[command(help_template = help_template(EXAMPLES, EXIT_CODES))]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_parser = shells())]
    pub shell: String,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(help_template = help_template(MAN_EXAMPLES, EXIT_CODES))]
pub struct ManArgs {
    /// The subcommand; without one the page is that of the command
    #[arg(add = ArgValueCandidates::new(subcommands))]
    pub subcommand: Option<String>,
    /// Write the pages of all commands into this folder, which exists
    #[arg(short, long, value_name = "FOLDER", conflicts_with = "subcommand")]
    pub output: Option<PathBuf>,
    /// Overwrite files that exist
    #[arg(long, requires = "output")]
    pub force: bool,
}

/// Answers a shell that asks for completions, and ends then; returns where nobody asks.
pub fn complete() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).bin(NAME).complete();
}

/// Writes what a shell has to run once to ask for completions.
///
/// # Errors
/// Those of `out`.
pub fn write_registration(shell: &str, out: &mut dyn Write) -> io::Result<()> {
    match Shells::builtins().completer(shell) {
        Some(shell) => shell.write_registration(VARIABLE, NAME, NAME, NAME, out),
        None => Err(io::Error::other(format!("no shell is called {shell}"))),
    }
}

/// The manual pages by the names of their files: that of the command, and one of each subcommand.
///
/// # Errors
/// None that a page in memory has.
pub fn man_pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let inner = command.get_subcommands().cloned();
    let pages = std::iter::once(command.clone()).chain(inner);
    let page = |command: clap::Command| {
        let name = command.get_display_name().unwrap_or(NAME).to_owned();
        let help = command.clone().render_long_help().to_string();
        let mut page = Vec::new();
        Man::new(command).render(&mut page)?;
        let mut rest = Roff::new();
        for (title, heading) in [("EXAMPLES", "Examples:"), ("EXIT STATUS", "Exit codes:")] {
            let lines = help.lines().skip_while(|line| *line != heading).skip(1);
            let lines = lines.take_while(|line| line.is_empty() || line.starts_with(' '));
            rest.control("SH", [title]).control("nf", []);
            lines.for_each(|line| {
                rest.text([roman(line.trim_end())]);
            });
            rest.control("fi", []);
        }
        rest.to_writer(&mut page)?;
        Ok((format!("{name}.1"), page))
    };
    pages.map(page).collect()
}

/// The subcommands for completion.
fn subcommands() -> Vec<CompletionCandidate> {
    let command = Cli::command();
    command.get_subcommands().map(|inner| CompletionCandidate::new(inner.get_name())).collect()
}

/// The sections for completion.
pub(super) fn sections() -> Vec<CompletionCandidate> {
    let names = Section::ALL.into_iter().map(Section::name).chain(["all"]);
    names.map(CompletionCandidate::new).collect()
}

/// The metrics for completion.
pub(super) fn metrics() -> Vec<CompletionCandidate> {
    let names = METRICS.iter().map(|metric| metric.name).chain(["all"]);
    names.map(CompletionCandidate::new).collect()
}

fn shells() -> PossibleValuesParser {
    Shells::builtins().names().collect::<Vec<_>>().into()
}
