//! Any bytes as a torch file: an error or values, never a panic, a hang or memory without bounds.
//!
//! From the root of the repository, with the small files of the fixtures as a start:
//! `cargo +nightly fuzz run torch_file fuzz/corpus/torch_file fixtures/torch-file -- -rss_limit_mb=2048`

#![no_main]

use std::io::Write;

use ckptcmp::storage::FileSet;
use ckptcmp::containers::torch::TorchFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("room for a temporary file");
    let mut files = FileSet::default();
    let id = files.add(file.path()).expect("the temporary file is there");
    let whole = files.whole(id);
    if let Ok(torch) = TorchFile::open(&files, whole) {
        for id in torch.values().ids() {
            let _ = torch.tensor(id);
        }
    }
});
