#!/usr/bin/env python3
"""Every call of the system that reads a checkpoint fails in turn, and no failure stays silent.

usage: io_errors.py BINARY [--full] [--jobs N] [--family NAME] [--seconds N]

Runs the binary under `strace -e inject=...` over a checkpoint of each family: the first openat fails, then the second, and
so on, then the first read, the first statx. A run is right if it says just what the run without a failure says, or if it ends
with exit code 2 and names the file or folder that could not be read. Without --full each call fails with one of the errors, one
after the other; with it, with every one of them. Needs strace and nothing but Python's own library.
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"

ERRORS = ["EIO", "EACCES", "EMFILE", "ENOMEM", "EINTR", "ESTALE"]
CALLS = ["openat", "statx", "newfstatat", "fstat", "lstat", "stat", "readlink", "readlinkat", "getdents64", "read", "pread64",
         "preadv2", "lseek", "mmap", "fcntl"]

# A checkpoint of each family, and the commands that read it. The name of its folder is kept: it may be that of a rank.
FAMILIES = [
    ("megatron torch", "layouts/gpt-small/tp2", ["check"]),
    ("megatron torch, optimizer", "optimizer/dense/tp2dp2-distributed", ["check"]),
    ("megatron torch_dist", "torch_dist/gpt-small/tp2pp2", ["check"]),
    ("megatron zarr", None, ["check"]),
    ("dcp", "dcp/sharded", ["check"]),
    ("dcp, a metadata for each rank", "dcp/per-rank", ["check"]),
    ("dcp, zstd", "dcp/zstd", ["check"]),
    ("dcp, safetensors", "dcp/safetensors", ["check"]),
    ("hf, parts with an index", "hf/sharded", ["check"]),
    ("hf, torch parts with an index", "hf/bin-sharded", ["check"]),
    ("hf, seen through maps", None, ["check"]),
    ("deepspeed zero 1", "deepspeed/zero/z1", ["check"]),
    ("deepspeed universal", "deepspeed/zero/universal-from-z1", ["check"]),
    ("neox", "deepspeed/neox/tp2pp2", ["check"]),
    ("infinitrain", "infinitrain/llama3/tp2pp2", ["check"]),
    ("a torch file", "dcp/weights.pt", ["check"]),
    ("a run with a tracker", None, ["compare"]),
]


def zarr(folder):
    """A checkpoint of the zarr backend: two tensors, an object, and what stands beside them."""
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    shutil.copy(FIXTURES / "torch-file/protocol4.pt", folder / "common.pt")
    for name in ["decoder.final_layernorm.weight", "embedding.word_embeddings.weight"]:
        (folder / name).mkdir()
        header = {"zarr_format": 2, "shape": [4, 2], "chunks": [2, 2], "dtype": "<f4", "order": "C", "compressor": None,
                  "filters": None, "fill_value": None}
        (folder / name / ".zarray").write_text(json.dumps(header))
        for chunk in ["0.0", "1.0"]:
            (folder / name / chunk).write_bytes(struct.pack("<4f", 1, 2, 3, 4))


def mapped(folder):
    """A safetensors file long enough to be looked at in the page cache."""
    size = 4 << 20
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    (folder / "config.json").write_text('{"model_type": "llama"}')


def tracked(folder):
    """A save folder with a tracker, links in the place of the iteration's folder and of a rank's file."""
    shutil.copytree(FIXTURES / "layouts/gpt-small/tp2/iter_0000005", folder / "elsewhere")
    (folder / "iter_0000005").symlink_to("elsewhere")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    file = next((folder / "elsewhere").glob("mp_rank_*/*.pt"))
    file.rename(folder / "moved.pt")
    file.symlink_to(folder / "moved.pt")


MADE = {"megatron zarr": zarr, "hf, seen through maps": mapped, "a run with a tracker": tracked}


def checkpoint(family, source, parent):
    """A copy of the family's checkpoint."""
    parent.mkdir()
    if source is None:
        folder = parent / "made"
        folder.mkdir()
        MADE[family](folder)
        return folder
    source = FIXTURES / source
    copy = parent / source.name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    return copy


class Victim:
    """A command over a checkpoint, to be run with and without failures."""

    def __init__(self, binary, command, path):
        output = ["-o", "-", "--section", "model"] if command == "compare" else ["--json"]
        sides = [str(path)] * (2 if command == "compare" else 1)
        self.command = [str(binary), command, *sides, *output, "--threads", "1"]
        inside = [path, *path.rglob("*")] if path.is_dir() else [path]
        self.paths = [str(each) for each in inside]
        # The names of each file: the log has the one that links lead to.
        self.names = collections.defaultdict(set)
        for each in inside:
            self.names[os.path.realpath(each)].update({each.name, Path(os.path.realpath(each)).name})
        self.base = self.run(None)[:3]
        if self.base[0] not in (0, 1):
            sys.exit(f"{path}: {self.base}")

    def run(self, injection):
        """Exit code, standard output and error, and the log of the calls."""
        with tempfile.NamedTemporaryFile() as log:
            strace = ["strace", "-f", "-y", "-qq", "-o", log.name, "-e", "signal=none"]
            for path in self.paths:
                strace += ["-P", path]
            strace += ["-e", "trace=" + ",".join("?" + call for call in CALLS)]
            if injection:
                call, number, error = injection
                strace += ["-e", f"inject={call}:error={error}:when={number}"]
            done = subprocess.run([*strace, *self.command], stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
            # strace tells of links among the paths.
            stderr = b"".join(line for line in done.stderr.splitlines(True) if not line.startswith(b"strace: Requested path"))
            return done.returncode, done.stdout, stderr, log.read().decode(errors="replace")

    def calls(self):
        """The highest number of each call in one thread: `when` counts for each of them."""
        counts = collections.Counter(re.findall(r"^(\d+) +(\w+)\(", self.run(None)[3], re.M))
        highest = collections.Counter()
        for (_, call), count in counts.items():
            highest[call] = max(highest[call], count)
        return highest

    def fault(self, injection):
        """What is wrong with the run with a failure; `same`, `named` or `never` where nothing is."""
        code, stdout, stderr, log = self.run(injection)
        if "(INJECTED)" not in log:
            return "never"
        if (code, stdout, stderr) == self.base:
            return "same"
        hit = next(line for line in log.splitlines() if "(INJECTED)" in line)
        paths = re.findall(r'"((?:/|\w)[^"]*)"|<(/[^>]*)>', hit)
        names = set().union(*({Path(path).name, *self.names[path]} for pair in paths for path in pair if path)) - {""}
        said = stderr.decode(errors="replace")
        if code == 2 and any(name in said for name in names):
            return "named"
        return f"exit code {code}: {said.strip()!r} after {hit.strip()}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", type=Path)
    parser.add_argument("--full", action="store_true", help="every error at every call")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--family", help="only those with this in their name")
    parser.add_argument("--seconds", type=float, default=150, help="time after which no more calls are tried, without --full")
    args = parser.parse_args()
    end = time.monotonic() + (float("inf") if args.full else args.seconds)
    turn = itertools.cycle(ERRORS)
    wrong, total, left = [], collections.Counter(), 0
    print(f"| {'family':<30} | calls | runs | same bytes | named | wrong |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for number, (family, source, commands) in enumerate(FAMILIES):
            if args.family and args.family not in family:
                continue
            path = checkpoint(family, source, Path(scratch) / str(number))
            for command in commands:
                victim = Victim(args.binary.resolve(), command, path)
                places = [(call, n) for call, count in victim.calls().items() for n in range(1, count + 1)]
                runs = [(*place, error) for place in places for error in (ERRORS if args.full else [next(turn)])]
                if not args.full:
                    # The time that is left is shared out evenly.
                    share = max(0.0, end - time.monotonic()) / (len(FAMILIES) - number)
                    stop = time.monotonic() + share
                else:
                    stop = end
                # Spread over the whole, so that what time does not suffice for is spread as well.
                step = 7 if len(runs) % 7 else 11
                runs = [runs[at * step % len(runs)] for at in range(len(runs))] if len(runs) % step else runs

                def one(run):
                    return run, victim.fault(run) if time.monotonic() < stop else None

                results = list(pool.map(one, runs))
                found = collections.Counter()
                for run, result in results:
                    if result is None:
                        left += 1
                        continue
                    kind = result if result in ("same", "named", "never") else "wrong"
                    found[kind] += 1
                    if kind == "wrong":
                        wrong.append(f"{family}: {command}: {' '.join(map(str, run))}: {result}")
                total.update(found)
                tried = sum(found.values())
                print(f"| {family:<30} | {len(places)} | {tried} | {found['same']} | {found['named']} | {found['wrong']} |", flush=True)
    print(f"{sum(total.values())} runs: {total['same']} with the same bytes, {total['named']} that name the file, "
          f"{total['never']} without the call, {total['wrong']} wrong; {left} left out for want of time")
    print("\n".join(wrong[:20]))
    sys.exit(bool(wrong) or not total["named"])


if __name__ == "__main__":
    main()
