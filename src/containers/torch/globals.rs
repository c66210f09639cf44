//! The classes and functions that a pickle names, held against those that training frameworks write.
//!
//! Nothing is imported or called by reading them; whoever loads the file with Python does both. So every opcode that
//! names one counts, whether or not its result is used: a payload is often thrown away by the next opcode. Names that are
//! not plainly there (put together on the stack, or from the extension registry) count as foreign.

use std::collections::{BTreeMap, HashMap};
use std::io;

use super::pickle::stream::{Next, StreamError, each_op};
use super::pickle::{DecodeError, Op, PickleErrorKind, decode};
use crate::base::limits::LIMITS;
use crate::storage::{FileSet, Region};

/// Dotted names of globals, and how often a pickle names each.
pub type Globals = BTreeMap<String, u64>;

/// Globals that training frameworks write into checkpoints, by module, in order. Each is known by its whole name: no
/// module is harmless as such (`numpy.testing` and `torch.hub` run what they are given). None of them runs, imports or
/// loads anything that its arguments name by text; what takes a callable gets it from another global.
///
/// torch 1.0 to 2.15, numpy 1 and 2, Megatron-LM up to core 0.20 (`megatron/core/safe_globals.py` and the arguments of
/// a run), MindSpeed-LLM, MSAdapter, DeepSpeed 0.10 to 0.19, transformers 4, omegaconf 2.3.
#[rustfmt::skip]
static KNOWN: &[(&str, &[&str])] = &[
    ("__builtin__", BUILTINS),
    ("_codecs", &["encode"]),
    ("_io", &["BytesIO"]),
    ("accelerate.state", &["PartialState"]),
    ("accelerate.utils.dataclasses", &["DeepSpeedPlugin", "DistributedType"]),
    ("argparse", &["Namespace"]),
    ("builtins", BUILTINS),
    ("collections", &["Counter", "OrderedDict", "defaultdict", "deque"]),
    ("copy_reg", &["_reconstructor"]),
    ("copyreg", &["_reconstructor"]),
    ("datetime", &["date", "datetime", "time", "timedelta", "timezone"]),
    ("deepspeed.runtime.fp16.loss_scaler", LOSS_SCALERS),
    ("deepspeed.runtime.zero.config", &["ZeroStageEnum"]),
    ("deepspeed.utils.tensor_fragment", &["fragment_address", "tensor_fragment"]),
    ("fp16.loss_scaler", LOSS_SCALERS),
    ("megatron.core.dist_checkpointing.strategies.torch", &["MCoreMetadata", "MCoreSavePlan"]),
    ("megatron.core.enums", ENUMS),
    ("megatron.core.optimizer.optimizer_config", &["AdamOptimizerConfig", "OptimizerConfig", "SGDOptimizerConfig"]),
    ("megatron.core.rerun_state_machine", &["RerunDiagnostic", "RerunMode", "RerunState"]),
    ("megatron.core.transformer.enums", ENUMS),
    ("megatron.enums", ENUMS),
    ("megatron.fp16.loss_scaler", LOSS_SCALERS),
    ("megatron.legacy.enums", ENUMS),
    ("megatron.legacy.model.enums", ENUMS),
    ("megatron.model.enums", ENUMS),
    ("megatron.model.fused_softmax", ENUMS),
    ("msadapter", TORCH),
    ("msadapter._tensor", &["Parameter", "StubTensor", "Tensor", "_rebuild_from_type", "_rebuild_from_type_v2"]),
    ("msadapter._utils", REBUILD),
    ("numpy", &["bool_", "dtype", "float16", "float32", "float64", "int32", "int64", "ndarray", "uint32", "uint64", "uint8"]),
    ("numpy._core.multiarray", &["_reconstruct", "scalar"]),
    ("numpy._core.numeric", &["_frombuffer"]),
    ("numpy.core.multiarray", &["_reconstruct", "scalar"]),
    ("numpy.core.numeric", &["_frombuffer"]),
    ("numpy.dtypes", &["BoolDType", "Float16DType", "Float32DType", "Float64DType", "Int32DType", "Int64DType", "UInt32DType", "UInt64DType", "UInt8DType"]),
    ("numpy.random._mt19937", &["MT19937"]),
    ("numpy.random._pcg64", &["PCG64"]),
    ("numpy.random._pickle", &["__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"]),
    ("numpy.random.bit_generator", &["SeedSequence", "__pyx_unpickle_SeedSequence"]),
    ("omegaconf.base", &["ContainerMetadata", "Metadata"]),
    ("omegaconf.dictconfig", &["DictConfig"]),
    ("omegaconf.listconfig", &["ListConfig"]),
    ("omegaconf.nodes", &["AnyNode", "BooleanNode", "FloatNode", "IntegerNode", "StringNode"]),
    ("pathlib", PATHS),
    ("pathlib._local", PATHS),
    ("signal", &["Signals"]),
    ("torch", TORCH),
    ("torch._C", &["Generator"]),
    ("torch._tensor", &["_rebuild_from_type", "_rebuild_from_type_v2"]),
    ("torch._utils", REBUILD),
    ("torch.cuda", TORCH),
    ("torch.distributed._mesh_layout", &["_FlatLayout", "_MeshLayout"]),
    ("torch.distributed._shard.metadata", &["ShardMetadata"]),
    ("torch.distributed._shard.sharded_tensor.api", &["ShardedTensor"]),
    ("torch.distributed._shard.sharded_tensor.metadata", &["MEM_FORMAT_ENCODING", "ShardedTensorMetadata", "TensorProperties"]),
    ("torch.distributed._shard.sharded_tensor.shard", &["Shard"]),
    ("torch.distributed._shard.sharding_spec.api", &["EnumerableShardingSpec"]),
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", &["ChunkShardingSpec"]),
    ("torch.distributed._tensor.api", &["DTensor"]),
    ("torch.distributed._tensor.device_mesh", &["DeviceMesh"]),
    ("torch.distributed._tensor.placement_types", PLACEMENTS),
    ("torch.distributed.checkpoint.filesystem", &["_StorageInfo", "_StoragePrefix"]),
    ("torch.distributed.checkpoint.metadata", &["BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"]),
    ("torch.distributed.checkpoint.planner", &["BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"]),
    ("torch.distributed.device_mesh", &["DeviceMesh"]),
    ("torch.distributed.remote_device", &["_remote_device"]),
    ("torch.distributed.tensor", &["DTensor"]),
    ("torch.distributed.tensor._api", &["DTensor"]),
    ("torch.distributed.tensor._dtensor_spec", &["DTensorSpec", "ShardOrderEntry", "TensorMeta"]),
    ("torch.distributed.tensor.placement_types", PLACEMENTS),
    ("torch.nn.parameter", &["Buffer", "Parameter"]),
    ("torch.serialization", &["_get_layout"]),
    ("torch.storage", &["TypedStorage", "UntypedStorage", "_UntypedStorage"]),
    ("torch.tensor", &["_rebuild_from_type"]),
    ("torch.torch_version", &["TorchVersion"]),
    ("torch_npu.npu._format", &["Format"]),
    ("torch_npu.utils.storage", &["_rebuild_npu_tensor"]),
    ("transformer_engine.common.recipe", &["DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling"]),
    ("transformer_engine.pytorch.float8_tensor", &["Float8Tensor"]),
    ("transformer_engine.pytorch.tensor.float8_tensor", &["Float8Tensor"]),
    ("transformers.integrations.deepspeed", &["HfDeepSpeedConfig", "HfTrainerDeepSpeedConfig"]),
    ("transformers.trainer_pt_utils", &["AcceleratorConfig"]),
    ("transformers.trainer_utils", &["EvaluationStrategy", "FSDPOption", "HubStrategy", "IntervalStrategy", "SaveStrategy", "SchedulerType"]),
    ("transformers.training_args", &["OptimizerNames", "ParallelMode", "TrainingArguments"]),
    ("transformers.training_args_seq2seq", &["Seq2SeqTrainingArguments"]),
    ("types", &["SimpleNamespace"]),
];

const BUILTINS: &[&str] = &[
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "long",
    "object",
    "range",
    "set",
    "slice",
    "str",
    "tuple",
    "unicode",
];
const LOSS_SCALERS: &[&str] = &["DynamicLossScaler", "LossScaler"];
const ENUMS: &[&str] = &[
    "AttnBackend",
    "AttnMaskType",
    "AttnType",
    "CudaGraphModule",
    "CudaGraphScope",
    "Fp4Recipe",
    "Fp8Recipe",
    "InferenceCudaGraphScope",
    "LayerType",
    "ModelType",
    "PositionEmbeddingType",
];
const PATHS: &[&str] =
    &["Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"];
const PLACEMENTS: &[&str] = &[
    "DTensorSpec",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "TensorMeta",
    "_Partial",
    "_StridedShard",
];
const REBUILD: &[&str] = &[
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_nested_tensor",
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
    "_rebuild_qtensor",
    "_rebuild_sparse_csr_tensor",
    "_rebuild_sparse_tensor",
    "_rebuild_tensor",
    "_rebuild_tensor_v2",
    "_rebuild_tensor_v3",
    "_rebuild_wrapper_subclass",
    "_rebuild_xla_tensor",
];
/// Types of elements and storages.
const TORCH: &[&str] = &[
    "BFloat16Storage",
    "BoolStorage",
    "ByteStorage",
    "CharStorage",
    "ComplexDoubleStorage",
    "ComplexFloatStorage",
    "DoubleStorage",
    "FloatStorage",
    "HalfStorage",
    "IntStorage",
    "LongStorage",
    "QInt32Storage",
    "QInt8Storage",
    "QUInt8Storage",
    "ShortStorage",
    "Size",
    "Tensor",
    "bfloat16",
    "bool",
    "channels_last",
    "complex128",
    "complex32",
    "complex64",
    "contiguous_format",
    "device",
    "float16",
    "float32",
    "float4_e2m1fn_x2",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int16",
    "int32",
    "int64",
    "int8",
    "per_channel_affine",
    "per_tensor_affine",
    "preserve_format",
    "qint32",
    "qint8",
    "quint8",
    "strided",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
];

fn names_of(module: &str) -> Option<&'static [&'static str]> {
    let at = KNOWN.binary_search_by(|(known, _)| (*known).cmp(module)).ok()?;
    Some(KNOWN[at].1)
}

/// Most different names that are kept of one file; more are counted together.
const NAMES: usize = 1000;

/// Levels of pickles in pickles: the bytes of an object may be a pickle of its own.
const LEVELS: usize = 4;

/// Strings of one pickle that are remembered, as the name of a module may be asked for again; of those behind them only
/// the names of known modules.
const STRINGS: usize = 1 << 14;

/// A value that was pushed; its buffer is used again for the next one.
#[derive(Debug, Default)]
struct Pushed {
    text: String,
    is_text: bool,
}

impl Pushed {
    fn name(&self) -> Option<&str> {
        self.is_text.then_some(self.text.as_str())
    }
}

/// A reader of the opcodes of one pickle after another.
#[derive(Debug, Default)]
pub struct GlobalScan {
    /// The two values pushed last, as far as they are plain text.
    recent: [Pushed; 2],
    memo: HashMap<u32, String>,
    /// Entries that MEMOIZE made.
    memoized: u32,
    /// PUT was used: where MEMOIZE is too, its index is not known without all values.
    has_put: bool,
    level: usize,
    foreign: Globals,
}

impl GlobalScan {
    /// The globals that no framework writes.
    #[must_use]
    pub fn into_foreign(self) -> Globals {
        self.foreign
    }

    /// Takes note of an opcode; they come in the order of the pickle.
    pub fn see(&mut self, op: Op<'_>) {
        match op {
            Op::Global(module, name) | Op::Inst(module, name) => {
                // No other text names anything in Python.
                if let (Ok(module), Ok(name)) = (str::from_utf8(module), str::from_utf8(name)) {
                    self.count(module, name);
                }
                self.forget();
            }
            Op::StackGlobal => {
                let [module, name] = std::mem::take(&mut self.recent);
                self.count(module.name().unwrap_or("?"), name.name().unwrap_or("?"));
            }
            Op::Str(text) => self.push(Some(text)),
            Op::StringText(_) | Op::UnicodeText(_) => self.push(None),
            Op::Bytes(bytes) => {
                self.push(None);
                self.nested(bytes);
            }
            Op::Get(index) => {
                let is_clear = !self.has_put || self.memoized == 0;
                let text = self.memo.get(&index).filter(|_| is_clear).cloned();
                self.shift(text.as_deref());
            }
            Op::Put(index) => {
                self.has_put = true;
                self.remember(index);
            }
            Op::Memoize => {
                self.remember(self.memoized);
                self.memoized = self.memoized.saturating_add(1);
            }
            Op::Protocol(_) | Op::Frame(_) => {}
            // The next pickle of a stream has a memo of its own.
            Op::Stop => {
                self.memo.clear();
                (self.memoized, self.has_put) = (0, false);
                self.forget();
            }
            _ => self.forget(),
        }
    }

    /// Takes note of the fault that ends a pickle: what an opcode of the extension registry stands for is not in the file.
    fn see_fault(&mut self, kind: &PickleErrorKind) {
        if let PickleErrorKind::OutsideTheFile(opcode) = kind {
            self.count("?", opcode);
        }
    }

    fn push(&mut self, text: Option<&[u8]>) {
        let short = text.filter(|text| text.len() <= LIMITS.class_name);
        self.shift(short.and_then(|text| str::from_utf8(text).ok()));
        // Protocol 2 and older write bytes as text of Latin-1.
        if let Some([0xc2, 0x80, 2..=5, ..]) = text {
            let text = String::from_utf8_lossy(text.unwrap_or_default());
            let bytes = text.chars().map(|char| u8::try_from(u32::from(char)).ok());
            if let Some(bytes) = bytes.collect::<Option<Vec<u8>>>() {
                self.nested(&bytes);
            }
        }
    }

    fn shift(&mut self, text: Option<&str>) {
        self.recent.rotate_left(1);
        let [_, last] = &mut self.recent;
        last.text.clear();
        last.text.push_str(text.unwrap_or_default());
        last.is_text = text.is_some();
    }

    fn forget(&mut self) {
        self.recent.iter_mut().for_each(|pushed| pushed.is_text = false);
    }

    fn remember(&mut self, index: u32) {
        let [_, last] = &self.recent;
        let has_room = self.memo.len() < STRINGS;
        match last.name().filter(|text| has_room || names_of(text).is_some()) {
            Some(text) => self.memo.insert(index, text.to_owned()),
            None => self.memo.remove(&index),
        };
    }

    fn count(&mut self, module: &str, name: &str) {
        if names_of(module).is_some_and(|names| names.contains(&name)) {
            return;
        }
        let short = |text: &str| text.chars().take(LIMITS.class_name).collect::<String>();
        let mut dotted = format!("{}.{}", short(module), short(name));
        if self.foreign.len() >= NAMES && !self.foreign.contains_key(&dotted) {
            dotted = "others".to_owned();
        }
        *self.foreign.entry(dotted).or_default() += 1;
    }

    /// Looks into bytes that may be a pickle themselves.
    fn nested(&mut self, bytes: &[u8]) {
        let is_nested = matches!(bytes, [0x80, 2..=5, .., b'.']);
        if self.level + 1 >= LEVELS || !is_nested {
            return;
        }
        let mut scan = Self { level: self.level + 1, ..Self::default() };
        scan.read(bytes);
        for (name, count) in scan.foreign {
            *self.foreign.entry(name).or_default() += count;
        }
    }

    /// Reads the pickles in these bytes one after another, up to something that is none.
    fn read(&mut self, mut bytes: &[u8]) {
        loop {
            match decode(bytes) {
                Ok((op, len)) => {
                    self.see(op);
                    bytes = &bytes[len..];
                    if op == Op::Stop && !is_pickle(bytes) {
                        return;
                    }
                }
                Err(DecodeError::Bad(kind)) => return self.see_fault(&kind),
                Err(DecodeError::Short(_)) => return,
            }
        }
    }
}

/// Tells whether bytes begin as a pickle of protocol 2 or newer does, or as an older one that names a global first.
#[must_use]
pub fn is_pickle(bytes: &[u8]) -> bool {
    matches!(bytes, [0x80, 2..=5, ..] | [b'c', b'_' | b'a'..=b'z', ..])
}

/// The globals of all pickles in these bytes that no framework writes.
#[must_use]
pub fn foreign(bytes: &[u8]) -> Globals {
    let mut scan = GlobalScan::default();
    scan.read(bytes);
    scan.into_foreign()
}

/// The same of a part of a file that need be no pickle, up to the first byte that is none of one.
///
/// # Errors
/// The file cannot be read.
pub fn foreign_in(files: &FileSet, region: Region) -> io::Result<Globals> {
    let mut scan = GlobalScan::default();
    let read = each_op(files, region, |_, op| {
        scan.see(op);
        Ok(Next::<()>::Opcode)
    });
    match read {
        Err(StreamError::Io(error)) => return Err(error),
        Err(StreamError::Pickle(error)) => scan.see_fault(&error.kind),
        Ok(()) => {}
    }
    Ok(scan.into_foreign())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(bytes: &[u8]) -> Vec<String> {
        foreign(bytes).into_keys().collect()
    }

    #[test]
    fn the_table_is_in_order() {
        assert!(KNOWN.is_sorted_by(|one, other| one.0 < other.0));
        for list in KNOWN.iter().map(|row| row.1) {
            assert!(list.is_sorted_by(|one, other| one < other), "{list:?}");
        }
    }

    #[test]
    fn every_opcode_that_names_a_global_counts_used_or_not() {
        assert_eq!(names(b"cposix\nsystem\n0N."), ["posix.system"]);
        assert_eq!(names(b"(iposix\nsystem\n."), ["posix.system"]);
        assert_eq!(names(b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93."), ["os.system"]);
        assert_eq!(foreign(b"cos\nsystem\ncos\nsystem\n.")["os.system"], 2);
        assert_eq!(names(b"ccollections\nOrderedDict\n)R."), [""; 0]);
        // No module is known as a whole, and no attribute of a known name.
        assert_eq!(names(b"ctorch.hub\nload\n."), ["torch.hub.load"]);
        let attribute = b"\x80\x04\x8c\x0bcollections\x8c\x15OrderedDict.__class__\x93.";
        assert_eq!(names(attribute).len(), 1);
    }

    #[test]
    fn names_that_are_not_plainly_there_are_foreign() {
        // Taken from below other values, from a memo entry that holds something else, from the extension registry.
        let below =
            b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x0bcollections\x8c\x0bOrderedDict00\x93.";
        assert_eq!(names(below), ["?.?"]);
        let known = b"\x80\x04\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94h\x00h\x01\x93.";
        assert_eq!(names(known), [""; 0]);
        let mixed = b"\x80\x04\x8c\x0bcollectionsq\x00\x8c\x02os\x94h\x00\x8c\x06system\x93.";
        assert_eq!(names(mixed), ["?.system"]);
        assert_eq!(names(b"\x80\x02\x82\x01."), ["?.EXT1"]);
    }

    #[test]
    fn pickles_behind_and_inside_of_pickles_count() {
        assert_eq!(names(b"\x80\x02N.\x80\x02cos\nsystem\n."), ["os.system"]);
        let inner = b"\x80\x02cos\nsystem\n.";
        let length = [u8::try_from(inner.len()).unwrap_or(0)];
        assert_eq!(names(&[b"\x80\x04C", &length[..], inner, b"."].concat()), ["os.system"]);
        let latin1 = "\u{80}\u{2}cos\nsystem\n.";
        let length = [u8::try_from(latin1.len()).unwrap_or(0), 0, 0, 0];
        let text = [b"\x80\x02X", &length[..], latin1.as_bytes(), b"."].concat();
        assert_eq!(names(&text), ["os.system"]);
    }
}
