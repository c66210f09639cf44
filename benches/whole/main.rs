//! The whole command against the limits of the machine, as ratios from one run:
//!
//!     cargo bench --bench whole                  1 GB on each side, 5 rounds, in the temporary folder
//!     cargo bench --bench whole -- --gb 4 --rounds 7 --dir /scratch --threads 2
//!     cargo bench --bench whole -- --only Grouped
//!
//! The limit is what `raw` does: positioned reads of all the files of both sides into reused buffers, 1 MiB
//! at a time, with the same number of threads. Where there is GNU dd, the files have been read from the disk front to back
//! before, as those of a checkpoint that was loaded; else the page cache has them as they were written. All cases of a round run one after the other, so that other
//! load on the machine meets them alike; the figure is the median over the rounds. On a machine that others use too,
//! look at the ratio of the processor times of all rounds instead (Linux with GNU time): it is about the same on a quiet one.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::unwrap_used
)]

mod pair;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use pair::{Mlp, Spec, Weights};

struct Options {
    gigabytes: f64,
    rounds: usize,
    threads: usize,
    folder: PathBuf,
    /// Only cases with this text in their name.
    only: String,
}

/// One line of the table: two checkpoints and what they show.
struct Case {
    what: &'static str,
    sides: [&'static str; 2],
}

const CASES: &[Case] = &[
    Case { what: "bf16, same layout", sides: ["bf16-tp1", "bf16-tp1-noisy"] },
    Case { what: "bf16, identical", sides: ["bf16-tp1", "bf16-tp1-again"] },
    Case { what: "bf16, tp1 against tp8", sides: ["bf16-tp1", "bf16-tp8-noisy"] },
    Case { what: "f32, same layout", sides: ["f32-tp1", "f32-tp1-noisy"] },
    Case { what: "f32, identical", sides: ["f32-tp1", "f32-tp1-again"] },
    Case { what: "GroupedMLP against TEGroupedMLP", sides: ["moe-grouped", "moe-te-noisy"] },
];

fn main() {
    let options = options();
    let spec = |name: &str| Spec {
        weights: if name.starts_with("f32") { Weights::Float32 } else { Weights::BFloat16 },
        mlp: match name {
            _ if name.contains("grouped") => Mlp::Grouped,
            _ if name.contains("-te") => Mlp::TeGrouped,
            _ => Mlp::Dense,
        },
        tp: if name.contains("tp8") { 8 } else { 1 },
        bytes: (options.gigabytes * 1e9) as u64,
        is_noisy: name.ends_with("noisy"),
    };
    println!(
        "{:33} {:>9} {:>9} {:>7} {:>7} {:>7} {:>7}",
        "", "GB/s", "raw GB/s", "of raw", "by CPU", "x cmp", "RSS MB"
    );
    for case in CASES.iter().filter(|case| case.what.contains(&options.only)) {
        let roots = case.sides.map(|name| {
            let root = options.folder.join(name);
            pair::write(&root, spec(name)).expect("the pair can be written");
            root
        });
        run_case(case, &roots, &options);
        roots.iter().for_each(|root| fs::remove_dir_all(root).expect("the pair can be removed"));
    }
}

fn run_case(case: &Case, roots: &[PathBuf; 2], options: &Options) {
    let files: Vec<PathBuf> = roots.iter().flat_map(|root| files(root)).collect();
    let bytes: u64 = files.iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    let rate = |seconds: f64| bytes as f64 / 1e9 / seconds;
    let is_identical = case.what.contains("identical");
    let (mut raw, mut ours, mut cmp) = (Vec::new(), Vec::new(), Vec::new());
    let mut peak = None;
    let (mut raw_cpu, mut our_cpu) = (0.0, 0.0);
    files.iter().for_each(|file| read_anew(file));
    for _ in 0..options.rounds {
        let before = own_cpu();
        raw.push(timed(|| read_all(&files, options.threads)));
        raw_cpu += own_cpu() - before;
        ours.push(timed(|| {
            if let Some((kilobytes, seconds)) = compare(roots, options.threads) {
                peak = peak.max(Some(kilobytes));
                our_cpu += seconds;
            }
        }));
        if is_identical {
            cmp.push(timed(|| run_cmp(roots)));
        }
    }
    let [raw, ours, cmp] = [raw, ours, cmp].map(median);
    let optional = |value: Option<f64>, decimals: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
    };
    println!(
        "{:33} {:>9.2} {:>9.2} {:>7.2} {:>7} {:>7} {:>7}",
        case.what,
        rate(ours.unwrap()),
        rate(raw.unwrap()),
        raw.unwrap() / ours.unwrap(),
        optional((raw_cpu > 0.0 && our_cpu > 0.0).then(|| raw_cpu / our_cpu), 2),
        optional(cmp.map(|cmp| cmp / ours.unwrap()), 1),
        optional(peak.map(|kilobytes: u64| kilobytes as f64 / 1000.0), 0),
    );
}

fn options() -> Options {
    let mut options = Options {
        gigabytes: 1.0,
        rounds: 5,
        threads: std::thread::available_parallelism().map_or(2, usize::from),
        folder: std::env::temp_dir().join("ckptcmp-bench"),
        only: String::new(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("the option has a value");
        match word.as_str() {
            "--gb" => options.gigabytes = value().parse().expect("a number"),
            "--only" => options.only = value(),
            "--rounds" => options.rounds = value().parse().expect("a number"),
            "--threads" => options.threads = value().parse().expect("a number"),
            "--dir" => options.folder = PathBuf::from(value()).join("ckptcmp-bench"),
            _ => {} // cargo adds --bench
        }
    }
    options
}

fn files(root: &Path) -> Vec<PathBuf> {
    let ranks = fs::read_dir(root.join("iter_0000001")).unwrap();
    let mut files: Vec<PathBuf> =
        ranks.map(|rank| rank.unwrap().path().join("model_optim_rng.pt")).collect();
    files.sort();
    files
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}

/// Reads a file front to back, from the disk if dd can take it out of the page cache.
fn read_anew(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
    let source = format!("if={}", path.display());
    let mut dd = Command::new("dd");
    dd.arg(source).args(["iflag=nocache", "count=0"]).stdout(Stdio::null()).stderr(Stdio::null());
    let _ = dd.status();
    io::copy(&mut File::open(path).unwrap(), &mut io::sink()).unwrap();
}

/// The raw limit: every byte of every file once, nothing done with it.
fn read_all(files: &[PathBuf], threads: usize) {
    const READ: u64 = 1 << 20;
    let opened: Vec<(File, u64)> = files
        .iter()
        .map(|path| {
            let file = File::open(path).unwrap();
            let len = file.metadata().unwrap().len();
            (file, len)
        })
        .collect();
    let reads: Vec<(&File, u64, usize)> = opened
        .iter()
        .flat_map(|(file, len)| {
            (0..*len).step_by(READ as usize).map(move |at| (file, at, READ.min(len - at) as usize))
        })
        .collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut buffer = vec![1; READ as usize];
                while let Some((file, at, len)) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
                    read_exact_at(file, &mut buffer[..*len], *at);
                }
            });
        }
    });
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], at: u64) {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, at).unwrap();
}

#[cfg(windows)]
fn read_exact_at(file: &File, buffer: &mut [u8], at: u64) {
    std::os::windows::fs::FileExt::seek_read(file, buffer, at).unwrap();
}

/// Seconds of processor time that this process and its threads have had; 0 where that is not known.
fn own_cpu() -> f64 {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>()
        / TICKS_PER_SECOND
}

/// Runs the command; returns its peak memory in kilobytes and its processor time in seconds where GNU time is there to
/// measure them.
fn compare(roots: &[PathBuf; 2], threads: usize) -> Option<(u64, f64)> {
    let binary = env!("CARGO_BIN_EXE_ckptcmp");
    let time = Path::new("/usr/bin/time");
    let mut command = if time.exists() {
        let mut command = Command::new(time);
        command.args(["-f", "%M %U %S", binary]);
        command
    } else {
        Command::new(binary)
    };
    command.arg("compare").args(roots).args(["-o", "-", "-q", "--threads", &threads.to_string()]);
    let output = command.stdout(Stdio::null()).output().unwrap();
    assert!(output.status.code() < Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    let usage = String::from_utf8_lossy(&output.stderr);
    let usage: Vec<&str> = usage.lines().last()?.split_whitespace().collect();
    let [kilobytes, user, system] = usage[..] else { return None };
    let seconds = user.parse::<f64>().ok()? + system.parse::<f64>().ok()?;
    Some((kilobytes.parse().ok()?, seconds))
}

/// GNU cmp on the same bytes, file by file.
fn run_cmp(roots: &[PathBuf; 2]) {
    for (a, b) in files(&roots[0]).iter().zip(files(&roots[1])) {
        let status = Command::new("cmp").arg(a).arg(b).stdout(Stdio::null()).status();
        assert!(status.is_ok_and(|status| status.success()), "the files are identical");
    }
}
