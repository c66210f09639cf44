//! One suite for the files of every format: cut anywhere, a file is refused; a changed byte is found or refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use super::Copied;
use super::in_process::{Outcome, outcome};

/// Longest time that one step may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The same numbers in every run (SplitMix64).
pub(crate) fn random(number: u64) -> u64 {
    let mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 20
}

/// One of so many, the same for the same number.
pub(crate) fn pick(number: usize, end: usize) -> usize {
    usize::try_from(random(number as u64)).unwrap() % end.max(1)
}

/// Some places of a file of this length: a third anywhere, the others near its ends, where most of the structure is.
pub(crate) fn sampled(len: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |number| match number % 3 {
        0 => pick(number, len),
        1 => pick(number, len.min(1500)),
        _ => len - 1 - pick(number, len.min(700)),
    })
}

/// Does a step for every item, and fails where one panics or takes too long.
#[track_caller]
pub(crate) fn for_all<T: Copy + std::fmt::Debug + Send + 'static>(
    items: impl IntoIterator<Item = T>,
    context: &str,
    step: impl Fn(T) + Send + 'static,
) {
    let items: Vec<T> = items.into_iter().collect();
    let (sender, receiver) = mpsc::channel();
    let all = items.clone();
    // A step that panics drops the sender.
    std::thread::spawn(move || {
        for item in all {
            step(item);
            sender.send(()).unwrap();
        }
    });
    for item in items {
        assert_eq!(receiver.recv_timeout(PATIENCE), Ok(()), "{context}: {item:?}");
    }
}

/// A file of a checkpoint, to be damaged in a copy of it.
pub(crate) struct Victim {
    intact: PathBuf,
    copied: Copied,
    /// The file in the copy.
    file: PathBuf,
    bytes: Vec<u8>,
}

impl Victim {
    /// The file at this path below a checkpoint, which may be empty where the checkpoint is a file.
    pub(crate) fn new(checkpoint: &Path, file: impl AsRef<Path>) -> Self {
        let copied = Copied::of(checkpoint);
        // Without the slash that an empty path leaves at the end.
        let file: PathBuf = copied.path().join(file).components().collect();
        let bytes = fs::read(&file).unwrap();
        Self { intact: checkpoint.to_path_buf(), copied, file, bytes }
    }

    /// The copy of the whole checkpoint.
    pub(crate) fn path(&self) -> PathBuf {
        self.copied.path()
    }

    /// The path of the file in the copy.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// The file as it was.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Compares the checkpoint with these bytes in the place of the file.
    fn outcome_with(&self, bytes: &[u8]) -> Outcome {
        fs::write(&self.file, bytes).unwrap();
        outcome(&self.copied.path(), &self.intact)
    }

    fn name(&self) -> String {
        self.file.file_name().unwrap().to_string_lossy().into_owned()
    }

    /// Cuts the file to this many lengths: each is trouble, and the file is named.
    #[track_caller]
    pub(crate) fn any_cut_is_refused(self, cuts: usize) {
        let name = self.name();
        let context = format!("{} cut to a length of", self.file.display());
        let len = self.bytes.len();
        for_all((0..cuts).map(move |cut| len * cut / cuts), &context, move |len| {
            let Outcome { code, trouble, .. } = self.outcome_with(&self.bytes[..len]);
            assert!(code == 2 && trouble.contains(&name), "{code}: {trouble}");
        });
    }

    /// Changes a byte at each of these places: that is a difference, or trouble, or, where no tensor depends on the
    /// byte, equality with every tensor compared.
    #[track_caller]
    pub(crate) fn any_changed_byte_is_found_or_refused(
        self,
        places: impl IntoIterator<Item = usize>,
        is_idle: impl Fn(usize) -> bool + Send + 'static,
    ) {
        let context = format!("{} changed at (number, byte)", self.file.display());
        let whole = self.outcome_with(&self.bytes);
        assert_eq!(whole.code, 0, "{whole:?}");
        let places: Vec<usize> =
            places.into_iter().take_while(|at| *at < self.bytes.len()).collect();
        for_all(places.into_iter().enumerate(), &context, move |(number, at)| {
            let mut bytes = self.bytes.clone();
            // Every other change is of a single bit.
            bytes[at] ^= match number % 4 {
                0 => 0x01,
                2 => 0x40,
                _ => 1 + random(number as u64).to_le_bytes()[0] % 255,
            };
            let found = self.outcome_with(&bytes);
            let is_harmless = is_idle(at) && found.compared == whole.compared;
            assert!(found.code != 0 || is_harmless, "{number}, byte {at}: {found:?}");
        });
    }
}
