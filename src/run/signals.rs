//! A file that is removed where a signal ends the program.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;

/// Removes one file on SIGINT, SIGTERM and SIGHUP as long as it lives; the signal then ends the program as ever.
#[derive(Debug)]
pub(super) struct Removal {
    path: Arc<Mutex<Option<PathBuf>>>,
    signals: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Removal {
    /// Waits for signals, with nothing to remove yet.
    ///
    /// # Errors
    /// The system does not let us.
    pub(super) fn new() -> io::Result<Self> {
        let ignored = ignored();
        let wanted = [SIGHUP, SIGINT, SIGTERM].into_iter();
        let mut signals = Signals::new(wanted.filter(|signal| ignored >> (signal - 1) & 1 == 0))?;
        let handle = signals.handle();
        let path: Arc<Mutex<Option<PathBuf>>> = Arc::default();
        let shared = Arc::clone(&path);
        let thread = thread::Builder::new().spawn(move || {
            if let Some(signal) = signals.forever().next() {
                let path = shared.lock().unwrap_or_else(PoisonError::into_inner);
                // The program ends; there is nobody left to be told of a failure.
                let _ = path.as_ref().map(std::fs::remove_file);
                let _ = emulate_default_handler(signal);
            }
        })?;
        Ok(Self { path, signals: handle, thread: Some(thread) })
    }

    /// Makes the file; a signal meanwhile waits until its path is known.
    pub(super) fn of<T>(
        &self,
        make: impl FnOnce() -> io::Result<T>,
        path: impl FnOnce(&T) -> &Path,
    ) -> io::Result<T> {
        let mut shared = self.path.lock().unwrap_or_else(PoisonError::into_inner);
        let made = make()?;
        *shared = Some(path(&made).to_path_buf());
        Ok(made)
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        self.signals.close();
        if let Some(thread) = self.thread.take() {
            // It has nothing to give.
            let _ = thread.join();
        }
    }
}

/// The signals that were ignored from the start, as `nohup` does it: a bit each, where the system tells.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
