//! Shared by all black-box tests: running the binary, fixtures, copies of them with one place changed.
//!
//! `array`: whole tensors in other forms; `crafted`: files that no `torch.save` writes; `damage`: the suite of cuts and changed
//! bytes; `in_process`: opening and comparing without a process.

#![allow(dead_code, reason = "every test file uses a part of this")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) mod array;
pub(crate) mod crafted;
pub(crate) mod damage;
pub(crate) mod in_process;
pub(crate) mod sha256;

/// The binary, with nothing of the caller's environment that changes what it prints.
pub(crate) fn ckptcmp() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ckptcmp"));
    command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").stdin(Stdio::null());
    command
}

/// The exit code and the output of a finished run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// Runs a command, which must not panic.
    pub(crate) fn of(command: &mut Command) -> Self {
        let output = command.output().expect("the binary runs");
        let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
        let run = Self {
            code: output.status.code().expect("no signal ended it"),
            stdout: text(output.stdout),
            // Messages name paths, which Windows spells in its own way.
            stderr: text(output.stderr).replace('\\', "/"),
        };
        assert!(!run.stderr.contains("panicked"), "a panic: {}", run.stderr);
        run
    }

    /// Standard output as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error} in {:?} ({})", self.stdout, self.stderr))
    }

    /// The closing line of the screen, wherever it was printed.
    pub(crate) fn verdict(&self) -> &str {
        let lines = self.stdout.lines().chain(self.stderr.lines());
        let words = ["identical:", "equal:", "different:", "trouble:"];
        let closes = |line: &&str| words.iter().any(|word| line.starts_with(word));
        lines.rev().find(closes).unwrap_or_default()
    }

    /// It ended with this code and said all of these words on standard error, each line of an error with our name in front.
    #[track_caller]
    pub(crate) fn refuses(&self, words: &[&str]) {
        assert_eq!(self.code, 2, "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not in {}", self.stderr);
        }
        assert!(self.stderr.starts_with("ckptcmp: "), "{}", self.stderr);
    }
}

/// Runs the binary with these arguments.
pub(crate) fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    Run::of(ckptcmp().args(args))
}

/// Compares two checkpoints: JSON on standard output, the screen on standard error.
pub(crate) fn compare(a: &Path, b: &Path) -> Run {
    compare_with(a, b, &[])
}

/// As [`compare`], with further flags.
pub(crate) fn compare_with(a: &Path, b: &Path, flags: &[&str]) -> Run {
    Run::of(ckptcmp().arg("compare").args([a, b]).args(["-o", "-"]).args(flags))
}

/// The screen alone, as it is on standard output.
pub(crate) fn screen(a: &Path, b: &Path, flags: &[&str]) -> Run {
    let folder = TempDir::new().unwrap();
    let mut command = ckptcmp();
    command.current_dir(folder.path()).arg("compare").args([a, b]).args(["-o", "out.json"]);
    Run::of(command.args(flags))
}

/// The report of `inspect --json` on a checkpoint that it can read.
pub(crate) fn inspect(path: &Path) -> Value {
    let run = Run::of(ckptcmp().args(["inspect", "--json"]).arg(path));
    assert_eq!(run.code, 0, "{run:?}");
    run.json()
}

/// A path below `fixtures`.
pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

/// A checkpoint of `fixtures/layouts`, e.g. `gpt/tp2`.
pub(crate) fn layout(path: &str) -> PathBuf {
    fixture("layouts").join(path)
}

/// The checkpoints of `fixtures/layouts`, by model.
pub(crate) fn models() -> BTreeMap<String, Vec<String>> {
    let mut models: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in read_json(&layout("index.json")).as_array().unwrap() {
        let path = entry["path"].as_str().unwrap();
        let (model, _) = path.split_once('/').unwrap();
        models.entry(model.to_owned()).or_default().push(path.to_owned());
    }
    models
}

/// The contents of a JSON file.
pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A copy of a tree, gone with the value.
pub(crate) struct Copied {
    folder: TempDir,
}

impl Copied {
    /// Copies a folder or a file.
    pub(crate) fn of(source: &Path) -> Self {
        let folder = TempDir::new().unwrap();
        copy(source, &folder.path().join("copy"));
        Self { folder }
    }

    /// The copy.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("copy")
    }

    /// The folder of its iteration, as in `fixtures/layouts`.
    pub(crate) fn iteration(&self) -> PathBuf {
        self.path().join("iter_0000005")
    }
}

/// Copies a folder or a file, over what is there.
pub(crate) fn copy(source: &Path, target: &Path) {
    if source.is_file() {
        fs::copy(source, target).unwrap();
        return;
    }
    fs::create_dir_all(target).unwrap();
    for entry in fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        copy(&entry.path(), &target.join(entry.file_name()));
    }
}

/// Every file below a folder.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

/// Replaces bytes by as many others wherever they are in the shards of a tree; says how often.
pub(crate) fn replace(folder: &Path, from: &[u8], to: &[u8]) -> usize {
    assert_eq!(from.len(), to.len(), "offsets must stay as they are");
    let mut count = 0;
    let paths = if folder.is_file() { vec![folder.to_path_buf()] } else { files(folder) };
    for path in paths {
        let mut bytes = fs::read(&path).unwrap();
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(from.len()).position(|part| part == from) {
            bytes[at + found..][..to.len()].copy_from_slice(to);
            at += found + to.len();
            count += 1;
        }
        sum_again(&mut bytes);
        fs::write(&path, bytes).unwrap();
    }
    count
}

/// Makes the sums of the stored entries of zip archives, one after another, those of their bytes; leaves other files as they are.
pub(crate) fn sum_again(mut bytes: &mut [u8]) {
    while bytes.starts_with(b"PK\x03\x04")
        && let Some(end) = bytes.windows(4).position(|part| part == b"PK\x05\x06")
        && end + 22 <= bytes.len()
    {
        let (archive, behind) = bytes.split_at_mut(end + 22);
        sum_archive_again(archive, end);
        bytes = behind;
    }
}

/// The same for one archive, whose directory ends in a record at `end`.
fn sum_archive_again(bytes: &mut [u8], end: usize) {
    let short =
        |bytes: &[u8], at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let long = |bytes: &[u8], at: usize| {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
    };
    let mut at = long(bytes, end + 16);
    for _ in 0..short(bytes, end + 10) {
        let (header, length) = (long(bytes, at + 42), long(bytes, at + 20));
        let start = header + 30 + short(bytes, header + 26) + short(bytes, header + 28);
        if short(bytes, at + 10) == 0 {
            let sum = crc32fast::hash(&bytes[start..start + length]).to_le_bytes();
            bytes[header + 14..header + 18].copy_from_slice(&sum);
            bytes[at + 16..at + 20].copy_from_slice(&sum);
        }
        at += 46 + short(bytes, at + 28) + short(bytes, at + 30) + short(bytes, at + 32);
    }
}

/// Gives a pickled key another name of the same length, e.g. so that a fact is not found.
pub(crate) fn rename_key(folder: &Path, from: &str, to: &str) {
    let pickled = |text: &str, opcode: &[u8], width: usize| {
        let length = u32::try_from(text.len()).unwrap().to_le_bytes();
        [opcode, &length[..width], text.as_bytes()].concat()
    };
    // BINUNICODE up to protocol 3, SHORT_BINUNICODE from 4 on.
    let forms = [(&b"X"[..], 4), (&b"\x8c"[..], 1)];
    let count: usize = forms
        .iter()
        .map(|&(opcode, width)| {
            replace(folder, &pickled(from, opcode, width), &pickled(to, opcode, width))
        })
        .sum();
    assert!(count > 0, "no key {from} below {}", folder.display());
}

/// Takes `args` away from every shard, as some converters do.
pub(crate) fn without_args(source: &Path) -> Copied {
    let copied = Copied::of(source);
    rename_key(&copied.path(), "args", "argz");
    copied
}

/// A JSON list of sizes or of an index.
pub(crate) fn sizes(value: &Value) -> Vec<usize> {
    let size = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    value.as_array().unwrap().iter().map(size).collect()
}

/// Bytes of an element.
pub(crate) fn element_size(dtype: &str) -> usize {
    match dtype {
        "float64" | "int64" | "uint64" | "complex64" => 8,
        "complex128" => 16,
        "float32" | "int32" | "uint32" => 4,
        "float16" | "bfloat16" | "int16" | "uint16" => 2,
        _ => 1,
    }
}

/// One element in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) file: PathBuf,
    pub(crate) offset: usize,
}

impl Place {
    /// Changes one bit of the element's first byte: the last bit of a little-endian number.
    pub(crate) fn flip(&self) {
        self.edit(|bytes| bytes[0] ^= 1);
    }

    /// Changes the bytes from the element on.
    pub(crate) fn edit(&self, change: impl FnOnce(&mut [u8])) {
        let mut bytes = fs::read(&self.file).unwrap();
        change(&mut bytes[self.offset..]);
        fs::write(&self.file, bytes).unwrap();
    }
}

/// The place of the element of this index among some pieces, if it is there.
fn place_in(pieces: &Value, index: &[usize], element: usize) -> Option<Place> {
    pieces.as_array().unwrap().iter().find_map(|piece| {
        let starts = sizes(&piece["offsets"]);
        let lengths = sizes(&piece["sizes"]);
        let strides = sizes(&piece["strides"]);
        let mut steps = 0;
        for (dim, &at) in index.iter().enumerate() {
            let inside = at.checked_sub(starts[dim]).filter(|&inside| inside < lengths[dim])?;
            steps += inside * strides[dim];
        }
        let offset = usize::try_from(piece["offset"].as_u64().unwrap()).unwrap();
        let file = PathBuf::from(piece["file"].as_str().unwrap());
        Some(Place { file, offset: offset + steps * element })
    })
}

/// The places of an element: the copy that is compared first, then every replica of it.
pub(crate) fn places(checkpoint: &Path, tensor: &str, index: &[usize]) -> Vec<Place> {
    let tensor = &inspect(checkpoint)["tensors"][tensor];
    let element = element_size(tensor["dtype"].as_str().unwrap());
    let first = place_in(&tensor["pieces"], index, element).expect("an index inside the tensor");
    let replicas = tensor["replicas"].as_array().unwrap().iter();
    let copies = replicas.filter_map(|replica| place_in(&replica["pieces"], index, element));
    std::iter::once(first).chain(copies).collect()
}

/// Changes the last bit of one element wherever it is stored.
pub(crate) fn flip(checkpoint: &Path, tensor: &str, index: &[usize]) {
    places(checkpoint, tensor, index).iter().for_each(Place::flip);
}

/// The elements of a tensor in row-major order, put together one by one from what `inspect --json` says of its pieces.
pub(crate) fn gather(tensor: &Value) -> Vec<u8> {
    let shape = sizes(&tensor["shape"]);
    let element = element_size(tensor["dtype"].as_str().unwrap());
    let numel: usize = shape.iter().product();
    let mut whole = vec![0; numel * element];
    let mut filled = vec![false; numel];
    lay(&tensor["pieces"], &shape, element, |at, bytes| {
        assert!(!std::mem::replace(&mut filled[at], true), "element {at} is there twice");
        whole[at * element..][..element].copy_from_slice(bytes);
    });
    assert!(filled.iter().all(|filled| *filled), "a tensor with holes: {tensor}");
    for replica in tensor["replicas"].as_array().unwrap() {
        lay(&replica["pieces"], &shape, element, |at, bytes| {
            assert_eq!(&whole[at * element..][..element], bytes, "replica {replica} at {at}");
        });
    }
    whole
}

/// Calls with the row-major number and the bytes of every element of some pieces.
fn lay(pieces: &Value, shape: &[usize], element: usize, mut each: impl FnMut(usize, &[u8])) {
    for piece in pieces.as_array().unwrap() {
        let bytes = fs::read(piece["file"].as_str().unwrap()).unwrap();
        let offset = usize::try_from(piece["offset"].as_u64().unwrap()).unwrap();
        let (starts, lengths) = (sizes(&piece["offsets"]), sizes(&piece["sizes"]));
        let strides = sizes(&piece["strides"]);
        for number in 0..lengths.iter().product() {
            let (mut rest, mut steps, mut at, mut row) = (number, 0, 0, 1);
            for dim in (0..shape.len()).rev() {
                let inside = rest % lengths[dim];
                rest /= lengths[dim];
                steps += inside * strides[dim];
                at += (starts[dim] + inside) * row;
                row *= shape[dim];
            }
            each(at, &bytes[offset + steps * element..][..element]);
        }
    }
}

/// Every tensor of a comparison is there, at distance 0.
#[track_caller]
pub(crate) fn assert_all_equal(run: &Run) {
    assert_eq!(run.code, 0, "{}", run.stderr);
    let result = run.json();
    assert!(!result.as_object().unwrap().is_empty());
    for (name, entry) in result.as_object().unwrap() {
        assert_eq!(entry["l2"].as_f64(), Some(0.0), "{name}: {entry}");
        assert_eq!(entry["cos"].as_f64(), Some(1.0), "{name}: {entry}");
    }
    assert_eq!(run.verdict().split(':').next(), Some("identical"), "{}", run.stderr);
}

/// The names of a JSON object, in its order.
pub(crate) fn names(object: &Value) -> Vec<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

/// The tensors whose distance is not exactly 0.
pub(crate) fn differing(result: &Value) -> Vec<&str> {
    let entries = result.as_object().unwrap().iter();
    entries
        .filter(|(_, entry)| entry["l2"].as_f64() != Some(0.0))
        .map(|(name, _)| name.as_str())
        .collect()
}
