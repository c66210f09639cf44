//! Parse, run, say what went wrong, exit.

use std::process::ExitCode;

use clap::Parser;

use ckptcmp::cli::{Cli, complete};

fn main() -> ExitCode {
    complete();
    match ckptcmp::run::run(&Cli::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            ckptcmp::report::problems::write_error(&format!("{error:#}"));
            ExitCode::from(2)
        }
    }
}
