//! The progress bar: bytes, rate, time left; on standard error, and only where that is a terminal.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time from one drawing of the bar to the next. The work itself only adds to a counter.
const TICK: Duration = Duration::from_millis(100);

/// Runs `work`, which counts bytes up to `total`, under a bar.
pub fn with_progress<T>(total: u64, is_shown: bool, work: impl FnOnce(&AtomicU64) -> T) -> T {
    let done = AtomicU64::new(0);
    if !is_shown || !std::io::stderr().is_terminal() {
        return work(&done);
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let template = "{wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    let finished = AtomicBool::new(false);
    thread::scope(|scope| {
        let ticker = scope.spawn(|| {
            while !finished.load(Ordering::Relaxed) {
                bar.set_position(done.load(Ordering::Relaxed));
                thread::park_timeout(TICK);
            }
        });
        let result = work(&done);
        finished.store(true, Ordering::Relaxed);
        ticker.thread().unpark();
        bar.finish_and_clear();
        result
    })
}
