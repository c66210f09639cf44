//! Parse, run, say what went wrong, exit.

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::Parser;

use ckptcmp::cli::Cli;

fn main() -> ExitCode {
    match ckptcmp::run::run(&Cli::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            ckptcmp::complain(&format!("{error:#}"));
            ExitCode::from(2)
        }
    }
}

/// Whoever read our output has seen enough: no reason to complain.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io_error = error.downcast_ref::<std::io::Error>();
    io_error.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}
