//! ckptcmp
pub mod catalog;
pub mod cli;
pub mod compare;
pub mod dtype;
pub mod extent;
pub mod formats;
pub mod io;
pub mod kernel;
pub mod layout;
pub mod limits;
pub mod names;
pub mod pairing;
pub mod report;
pub mod run;
pub mod tensor;
pub mod torch;
pub mod verdict;

/// Says on standard error what went wrong, a line for every cause, each with the program's name in front.
pub fn complain(text: &str) {
    use std::io::Write;
    let mut stderr = std::io::stderr().lock();
    for line in text.lines() {
        // Where even standard error is gone there is nobody left to tell.
        let _ = writeln!(stderr, "ckptcmp: {line}");
    }
}
