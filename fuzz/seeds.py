#!/usr/bin/env python3
"""Writes inputs to start from for every fuzz target: the fixtures, cut into parts as `src/lib.rs` has them.

    python3 fuzz/seeds.py [FOLDER]...     fixtures, or these folders, to fuzz/corpus/<target>/
"""

import hashlib
import pathlib
import sys
import zipfile

HERE = pathlib.Path(__file__).parent
CUT = b"\n%%cut%%\n"
LONGEST = 256 << 10


def write(target, parts):
    while parts and not parts[-1]:
        parts.pop()
    content = CUT.join(parts)
    if 0 < len(content) <= LONGEST:
        folder = HERE / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)


def pickle_of(path):
    """The pickle of a torch file; of anything else, nothing."""
    if not zipfile.is_zipfile(path):
        return b""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == "data.pkl"]
        try:
            return archive.read(names[0]) if names else b""
        except zipfile.BadZipFile:  # a fixture with wrong sums
            return b""


def part(path):
    """A file as a part of a folder: torch files as their pickles, others as they are."""
    if path is None or not path.is_file():
        return b""
    return pickle_of(path) or path.read_bytes()


def raw(path):
    return path.read_bytes() if path is not None and path.is_file() else b""


def first(folder, pattern, index=0):
    found = sorted(folder.glob(pattern))
    return found[index] if index < len(found) else None


def of_file(path):
    name, content = path.name, path.read_bytes()
    if zipfile.is_zipfile(path) and path.suffix != ".distcp":
        write("torch_zip", [content])
        write("rebuild", [pickle_of(path)])
        write("pickle", [pickle_of(path)])
    elif name.startswith("legacy") and path.suffix == ".pt" or content[:2] == b"\x80\x02" and name != ".metadata":
        write("torch_stream", [content])
    elif name == ".metadata":
        write("pickle", [content])
    elif path.suffix == ".safetensors":
        write("safetensors", [content])
    elif path.suffix == ".bin" and content[:4] in (b"\xc6\xd7\x34\x01", b"\xa3\xd9\x34\x01"):
        write("llmc", [content])


def of_folder(folder):
    names = {path.name for path in folder.iterdir()}
    if any(name.endswith(("index.json", ".safetensors")) or name == "config.json" for name in names):
        bins = first(folder, "pytorch_model*.bin")
        write("hugging_face", [
            raw(folder / "model.safetensors.index.json"),
            raw(folder / "config.json"),
            raw(first(folder, "*.safetensors")),
            raw(first(folder, "*.safetensors", 1)),
            raw(folder / "pytorch_model.bin.index.json"),
            part(bins),
            raw(folder / "adapter_config.json"),
        ])
    if ".metadata" in names or any(name.endswith(".metadata") for name in names):
        data = [raw(first(folder, "*.distcp", index)) for index in (0, 1)]
        write("dcp", [raw(folder / ".metadata"), *data, raw(folder / "__0.metadata"), raw(folder / "__1.metadata")])
        write("dcp", [raw(folder / ".metadata")])
        write("torch_dist", [raw(folder / "metadata.json"), part(folder / "common.pt"), raw(folder / ".metadata"), *data])
    if any((path / ".zarray").is_file() for path in folder.iterdir() if path.is_dir()):
        linear, norm = folder / "decoder.layers.mlp.linear_fc1.weight", folder / "decoder.final_layernorm.weight"
        moment = folder / "optimizer.state.exp_avg.decoder.final_layernorm.weight"
        write("zarr", [
            raw(folder / "metadata.json"), part(folder / "common.pt"),
            raw(linear / ".zarray"), raw(linear / "0.0.0"), raw(linear / "1.0.0"),
            raw(norm / ".zarray"), raw(norm / "0"), raw(moment / ".zarray"), raw(moment / "0"),
            part(first(folder, "*_extra_state/shard_0*.pt")),
        ])
    if any(name.endswith("_states.pt") for name in names):
        zero = [part(first(folder, "*zero_pp_rank_*optim_states.pt", index)) for index in (0, 1)]
        write("deepspeed", [
            part(folder / "mp_rank_00_model_states.pt"), *zero,
            part(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"),
            part(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"),
            part(first(folder, "layer_*_states.pt")), part(first(folder, "layer_*_states.pt", 1)),
            part(first(folder, "layer_*_expert_*.pt")),
            part(first(folder, "zero/*/fp32.pt")), part(first(folder, "zero/*/exp_avg.pt")),
        ])
    if any(name.startswith("mp_rank_") and (folder / name).is_dir() for name in names):
        ranks = [part(first(folder, f"mp_rank_*/model*rng.pt", index)) for index in (0, 1)]
        optim = [part(first(folder, f"mp_rank_*/distrib_optim.pt", index)) for index in (0, 1)]
        write("megatron", [b"5", *ranks, *optim])
    if any(name.startswith("model_world_size_") for name in names):
        write("fsdp_ranks", [part(first(folder, f"{kind}_world_size_2_rank_{rank}.pt"))
                             for kind in ("model", "optim") for rank in (0, 1)])
    if any((path / "trainer_state.json").is_file() for path in [folder, *folder.glob("rank_*")]):
        ranks = [raw(folder / f"rank_00000{rank}" / name) for rank in (0, 1)
                 for name in ("model.ckpt", "trainer_state.json")]
        write("infinitrain", [raw(folder / "trainer_state.json"), raw(folder / "model.ckpt"),
                              raw(folder / "optimizer.ckpt"), *ranks])
    for tracker in ("latest_checkpointed_iteration.txt", "latest", "latest_universal"):
        if tracker in names and (folder / tracker).is_file():
            shard = first(folder, "*/mp_rank_00/model*rng.pt")
            tag = first(folder, "*/mp_rank_00_model_states.pt")
            at = ("latest_checkpointed_iteration.txt", "latest", "latest_universal").index(tracker)
            parts = [b"", b"", b"", b"", b"", part(shard), part(tag), b""]
            text = {0: b"5", 1: b"global_step1", 2: b"global_step1"}[at]
            for more in (b"", b"iter_0000001\nrelease\ncheckpoint_step_1\nglobal_step7\n"):
                parts[at], parts[7:] = text, [more]
                write("trackers", list(parts))


def rules():
    for text in (
        "a.{b,c}.weight=column\nx.*=row\nlayers.#.w#=gated\nword_embeddings.weight=vocab\nq=replicated\n"
        "decoder.layers.0.mlp.linear_fc1.weight\na.b.weight\nx.y\nlayers.3.w12\nnum_experts=8\nsizes=[1, 2]",
        "mlps_1.linear_fc1.weight=row\nmodel.language_model.encoder.layers.10.self_attention.query_key_value.weight\n"
        "module.module.decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight\nswiglu=True\nlr=1e-3",
    ):
        write("rules", [text.encode()])


def main():
    folders = [pathlib.Path(name) for name in sys.argv[1:]] or [HERE.parent / "fixtures"]
    rules()
    for root in folders:
        for path in sorted([root, *root.rglob("*")]):
            if path.is_dir():
                of_folder(path)
            elif path.stat().st_size <= LONGEST:
                of_file(path)
    for target in sorted((HERE / "corpus").iterdir()):
        print(f"{target.name}: {sum(1 for _ in target.iterdir())}")


if __name__ == "__main__":
    main()
