//! Checkpoints that nobody's `torch.save` would write: a pickle writer, a zip writer, and a
//! guarded way to run the command on what they make.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::Run;

/// A value to pickle.
#[derive(Clone)]
pub(crate) enum P {
    None,
    Bool(bool),
    Int(i64),
    /// An integer that may be too large for any reader.
    Unsigned(u64),
    Str(String),
    Tuple(Vec<Self>),
    List(Vec<Self>),
    Dict(Vec<(Self, Self)>),
    /// `argparse.Namespace` with these attributes.
    Namespace(Vec<(Self, Self)>),
    /// A call of a global.
    Call(&'static str, &'static str, Vec<Self>),
    /// A value, kept in the memo under this number.
    Put(u32, Box<Self>),
    /// The value in the memo under this number.
    Get(u32),
    /// Opcodes as they are; they must leave one value on the stack.
    Raw(Vec<u8>),
}

/// A text.
pub(crate) fn text(text: &str) -> P {
    P::Str(text.to_owned())
}

/// A dict with these keys.
pub(crate) fn dict<'a>(items: impl IntoIterator<Item = (&'a str, P)>) -> P {
    P::Dict(items.into_iter().map(|(key, value)| (text(key), value)).collect())
}

/// An `argparse.Namespace` with these attributes.
pub(crate) fn namespace<'a>(items: impl IntoIterator<Item = (&'a str, P)>) -> P {
    P::Namespace(items.into_iter().map(|(key, value)| (text(key), value)).collect())
}

/// A tuple of integers.
pub(crate) fn counts(counts: &[u64]) -> P {
    P::Tuple(counts.iter().map(|&count| P::Unsigned(count)).collect())
}

/// `torch._utils._rebuild_tensor_v2` over the float storage `key` of `numel` elements.
pub(crate) fn tensor_of(key: &str, numel: u64, offset: u64, shape: &[u64], strides: &[u64]) -> P {
    let storage = P::Tuple(vec![
        text("storage"),
        P::Raw(b"ctorch\nFloatStorage\n".to_vec()),
        text(key),
        text("cpu"),
        P::Unsigned(numel),
    ]);
    let mut persistent = Vec::new();
    storage.write(&mut persistent);
    persistent.push(b'Q');
    let hooks = P::Call("collections", "OrderedDict", Vec::new());
    let offset = P::Unsigned(offset);
    let args =
        vec![P::Raw(persistent), offset, counts(shape), counts(strides), P::Bool(false), hooks];
    P::Call("torch._utils", "_rebuild_tensor_v2", args)
}

/// A row-major tensor at the start of storage `0`, which has 64 floats.
pub(crate) fn tensor(shape: &[u64]) -> P {
    let strides: Vec<u64> =
        (0..shape.len()).map(|dim| shape[dim + 1..].iter().product::<u64>().max(1)).collect();
    tensor_of("0", 64, 0, shape, &strides)
}

impl P {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => out.push(b'N'),
            Self::Bool(value) => out.push(if *value { 0x88 } else { 0x89 }),
            Self::Int(value) => {
                out.extend([0x8a, 8]);
                out.extend(value.to_le_bytes());
            }
            Self::Unsigned(value) => {
                out.extend([0x8a, 9]);
                out.extend(value.to_le_bytes());
                out.push(0);
            }
            Self::Str(text) => {
                out.push(b'X');
                out.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
                out.extend(text.as_bytes());
            }
            Self::Tuple(items) => {
                out.push(b'(');
                items.iter().for_each(|item| item.write(out));
                out.push(b't');
            }
            Self::List(items) => {
                out.extend(b"](");
                items.iter().for_each(|item| item.write(out));
                out.push(b'e');
            }
            Self::Dict(items) => {
                out.extend(b"}(");
                for (key, value) in items {
                    key.write(out);
                    value.write(out);
                }
                out.push(b'u');
            }
            Self::Namespace(items) => {
                out.extend(b"cargparse\nNamespace\n)\x81");
                Self::Dict(items.clone()).write(out);
                out.push(b'b');
            }
            Self::Call(module, name, args) => {
                out.extend(format!("c{module}\n{name}\n").as_bytes());
                Self::Tuple(args.clone()).write(out);
                out.push(b'R');
            }
            Self::Put(number, value) => {
                value.write(out);
                out.push(b'r');
                out.extend(number.to_le_bytes());
            }
            Self::Get(number) => {
                out.push(b'j');
                out.extend(number.to_le_bytes());
            }
            Self::Raw(bytes) => out.extend(bytes),
        }
    }

    /// The whole pickle, of protocol 2.
    pub(crate) fn pickle(&self) -> Vec<u8> {
        let mut out = b"\x80\x02".to_vec();
        self.write(&mut out);
        out.push(b'.');
        out
    }
}

/// A zip archive of stored entries. Nobody looks at checksums.
pub(crate) fn zip(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let short = |len: usize| u16::try_from(len).unwrap_or(u16::MAX).to_le_bytes();
    let long = |len: usize| u32::try_from(len).unwrap().to_le_bytes();
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in entries {
        let header = long(out.len());
        let mut common = vec![20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        common.extend([long(bytes.len()), long(bytes.len())].concat());
        common.extend([short(name.len()), [0, 0]].concat());
        out.extend([b"PK\x03\x04", &*common, name.as_bytes(), bytes].concat());
        directory.extend([b"PK\x01\x02\x14\0", &*common, &[0; 10], &header].concat());
        directory.extend(name.as_bytes());
    }
    let (count, start, len) = (entries.len() as u64, out.len() as u64, directory.len() as u64);
    out.extend(&directory);
    if count > 0xffff {
        let record = out.len() as u64;
        out.extend(b"PK\x06\x06");
        out.extend([&44_u64.to_le_bytes()[..], &[45, 0, 45, 0], &[0; 8]].concat());
        out.extend([count, count, len, start].map(u64::to_le_bytes).concat());
        out.extend(b"PK\x06\x07\0\0\0\0");
        out.extend([&record.to_le_bytes()[..], &[1, 0, 0, 0]].concat());
    }
    let (count, len, start) =
        (short(entries.len()), long(directory.len()), u32::try_from(start).unwrap());
    out.extend(
        [b"PK\x05\x06\0\0\0\0", &count[..], &count, &len, &start.to_le_bytes(), &[0, 0]].concat(),
    );
    out
}

/// An object of a class with this state.
pub(crate) fn object(class: &str, state: &P) -> P {
    let state = state.pickle();
    // Without the protocol and STOP.
    let state = &state[2..state.len() - 1];
    P::Raw([b"cm\n", class.as_bytes(), b"\n)\x81", state, b"b"].concat())
}

/// A file of `torch.save` with this pickle and storage `0` of 64 floats.
pub(crate) fn file(pickle: Vec<u8>) -> Vec<u8> {
    let storage: Vec<u8> = (0..64).flat_map(|value| (value as f32).to_le_bytes()).collect();
    zip(&[("a/data.pkl".to_owned(), pickle), ("a/data/0".to_owned(), storage)])
}

/// A checkpoint of one rank, deleted in the end.
pub(crate) struct Checkpoint {
    folder: tempfile::TempDir,
}

impl Checkpoint {
    /// One whose `model_optim_rng.pt` has these bytes.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let checkpoint = Self { folder: tempfile::tempdir().unwrap() };
        checkpoint.add("mp_rank_00", bytes);
        checkpoint
    }

    /// One that holds this object.
    pub(crate) fn of(object: &P) -> Self {
        Self::of_bytes(&file(object.pickle()))
    }

    /// One with this model and these arguments.
    pub(crate) fn with(model: P, args: P) -> Self {
        Self::of(&dict([("args", args), ("checkpoint_version", P::Int(3)), ("model", model)]))
    }

    /// Adds a rank, or writes over it.
    pub(crate) fn add(&self, rank: &str, bytes: &[u8]) {
        let folder = self.path().join(rank);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("model_optim_rng.pt"), bytes).unwrap();
    }

    /// The folder of its iteration.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("iter_0000005")
    }

    /// A folder in which results may be written.
    pub(crate) fn scratch(&self) -> &Path {
        self.folder.path()
    }
}

/// Longest time that a run may take, on a machine that does much else; of its own, it has a minute.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs the command in two gigabytes of address space and a minute of processor time, and checks that it ends as a
/// command should: with an exit code of its own, with a reason where that is 2, and with no control characters on the screen.
pub(crate) fn run(context: &str, args: &[&Path]) -> Run {
    run_within(context, args, 2_000_000, 60)
}

/// All commands on one that is small and asks for much: an eighth of that memory and time, so that tests without
/// optimisation pass and what has no bounds does not. Returns the run of `check`.
pub(crate) fn bomb(context: &str, path: &Path) -> Run {
    let within = |words: &[&str], paths: &[&Path]| {
        let args: Vec<&Path> = words.iter().map(Path::new).chain(paths.iter().copied()).collect();
        run_within(&format!("{context}, {}", words[0]), &args, 700_000, 20)
    };
    within(&["inspect"], &[path]);
    within(&["compare", "--threads", "2", "-o", "/dev/null"], &[path, path]);
    within(&["check", "--threads", "2"], &[path])
}

fn run_within(context: &str, args: &[&Path], kilobytes: u32, seconds: u32) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let [out, err] = ["out", "err"].map(|name| folder.path().join(name));
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(format!("ulimit -v {kilobytes}; ulimit -t {seconds}; exec \"$0\" \"$@\""))
        .arg(env!("CARGO_BIN_EXE_ckptcmp"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(File::create(&out).unwrap())
        .stderr(File::create(&err).unwrap())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{context}: still running after {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
    let (stdout, stderr) = (read(out), read(err));
    let shown: String = stderr.chars().take(2000).collect();
    let code = status.code().unwrap_or_else(|| panic!("{context}: {status}: {shown}"));
    assert!((0..=2).contains(&code), "{context}: {status}: {shown}");
    assert!(!stderr.contains("panicked"), "{context}: {shown}");
    assert_eq!(code == 2, !stderr.is_empty(), "{context}: exit {code}: {shown}");
    for line in stderr.lines() {
        assert!(line.starts_with("ckptcmp: "), "{context}: {shown}");
    }
    for text in [&stdout, &stderr] {
        let control = text.chars().find(|char| char.is_control() && *char != '\n');
        assert_eq!(control, None, "{context}: {}", text.chars().take(2000).collect::<String>());
        // An inspection as JSON lists every piece of every tensor.
        let most = if args.contains(&Path::new("--json")) { 512 << 20 } else { 64 << 20 };
        assert!(text.len() < most, "{context}: {} bytes of output", text.len());
    }
    Run { code, stdout, stderr }
}

/// Compares a checkpoint with another one.
pub(crate) fn compare(context: &str, a: &Path, b: &Path) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let result = folder.path().join("result.json");
    let words = ["compare", "--threads", "2", "--metrics", "all", "-o"].map(Path::new);
    run(context, &[&words[..], &[&result, a, b]].concat())
}

/// Compares a checkpoint with itself, looks at what is in it, and compares its first file alone.
pub(crate) fn all_commands(context: &str, checkpoint: &Checkpoint) -> Run {
    let path = checkpoint.path();
    run(&format!("{context}, inspect"), &[Path::new("inspect"), &path]);
    run(&format!("{context}, inspect --json"), &[Path::new("inspect"), Path::new("--json"), &path]);
    let file = path.join("mp_rank_00/model_optim_rng.pt");
    compare(&format!("{context}, file"), &file, &file);
    compare(context, &path, &path)
}
