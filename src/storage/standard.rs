//! Standard output, in the place of which Rust's runtime opens `/dev/null` where a program is started without one.

#![cfg_attr(
    target_os = "linux",
    expect(unsafe_code, reason = "a look before the runtime is started")
)]

use std::sync::atomic::{AtomicBool, Ordering};

static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Tells whether standard output was closed when the program was started, so that whatever is written there is lost. Known on
/// Linux alone.
#[must_use]
pub fn is_stdout_closed() -> bool {
    IS_CLOSED.load(Ordering::Relaxed)
}

#[cfg(target_os = "linux")]
extern "C" fn look() {
    const STDOUT: std::ffi::c_int = 1;
    // SAFETY: a question about a descriptor, which may be none.
    if unsafe { libc::fcntl(STDOUT, libc::F_GETFD) } == -1 {
        IS_CLOSED.store(true, Ordering::Relaxed);
    }
}

// SAFETY: the section is an array of functions that the loader calls before `main`, on one thread; `look` needs nothing of Rust's
// runtime. It may be called with arguments, which the calling convention lets it leave aside.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;
