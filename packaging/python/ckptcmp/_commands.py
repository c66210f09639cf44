"""The commands as functions."""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from ._binary import binary
from ._comparison import Comparison

PathLike = Union[str, "os.PathLike[str]"]


class CkptcmpError(RuntimeError):
    """The program could not do what it was asked for; the text is what it said."""


@dataclass(frozen=True)
class Check:
    """The outcome of holding one checkpoint against itself. ``document`` is what ``ckptcmp check --json`` writes."""

    document: Dict[str, Any]
    exit_code: int

    @property
    def verdict(self) -> str:
        """``sound``, ``unsound`` or ``trouble``."""
        return str(self.document["verdict"])

    @property
    def ok(self) -> bool:
        """Nothing is missing, left over or wrong."""
        return self.exit_code == 0 and self.verdict == "sound"

    @property
    def problems(self) -> List[str]:
        """What is missing or cannot be read."""
        return list(self.document["problems"])


def compare(
    a: PathLike,
    b: PathLike,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    section: Sequence[str] = (),
    allow_cast: bool = False,
    rtol: Optional[float] = None,
    atol: Optional[float] = None,
    tolerance: Optional[str] = None,
    max: Optional[Mapping[str, float]] = None,
    equal_nan: bool = False,
    rules: Optional[PathLike] = None,
    set: Optional[Mapping[str, Any]] = None,
    vocab_size: Optional[int] = None,
    threads: Optional[int] = None,
    arguments: Sequence[str] = (),
) -> Comparison:
    """Compares two checkpoints; ``b`` is the reference where a metric is relative.

    Differences are a result and raise nothing, nor do checkpoints that cannot be read: see ``Comparison.ok`` and
    ``Comparison.raise_on_difference``. The options are those of the command line, ``ckptcmp help compare``; ``arguments``
    are further ones as they are.

    Raises:
        CkptcmpError: The options are wrong, or the program ended without a result.
    """
    options: List[str] = []
    for flag, values in [("--include", include), ("--exclude", exclude)]:
        for value in _listed(flag, values):
            options += [f"{flag}={value}"]
    if section:
        options += ["--section", ",".join(_listed("--section", section))]
    for flag, chosen in [("--allow-cast", allow_cast), ("--equal-nan", equal_nan)]:
        options += [flag] if chosen else []
    numbers = [("--rtol", rtol), ("--atol", atol), ("--vocab-size", vocab_size), ("--threads", threads)]
    for flag, number in numbers:
        options += [] if number is None else [f"{flag}={number!r}"]
    options += [] if tolerance is None else [f"--tolerance={tolerance}"]
    options += [] if rules is None else [f"--rules={os.fspath(rules)}"]
    options += [f"--max={metric}={bound!r}" for metric, bound in (max or {}).items()]
    options += [f"--set={name}={_plain(value)}" for name, value in (set or {}).items()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        places = ["-o", os.devnull, "--report", str(report), "--quiet"]
        done = _run(["compare", os.fspath(a), os.fspath(b), *places, *options, *arguments])
        if not report.is_file():
            raise CkptcmpError(_said(done))
        comparison = Comparison.from_json(report.read_text(encoding="utf-8"))
    expected = 0 if comparison.exit_code == 1 and comparison.document["exit_zero"] else comparison.exit_code
    if done.returncode != expected:
        raise CkptcmpError(f"the exit code is {done.returncode}, not {expected}: {_said(done)}")
    return comparison


def check(path: PathLike, *, arguments: Sequence[str] = ()) -> Check:
    """Holds one checkpoint against itself: copies that disagree, NaN and Inf, missing and left over parts.

    Raises:
        CkptcmpError: The checkpoint cannot be opened, or the options are wrong.
    """
    done = _run(["check", os.fspath(path), "--json", *arguments])
    return Check(_document(done), done.returncode)


def inspect(path: PathLike, *, arguments: Sequence[str] = ()) -> Dict[str, Any]:
    """What is in a checkpoint, as ``ckptcmp inspect --json`` tells it; no value of a tensor is read.

    Raises:
        CkptcmpError: The checkpoint cannot be opened, or the options are wrong.
    """
    return _document(_run(["inspect", os.fspath(path), "--json", *arguments]))


def _run(arguments: List[str]) -> "subprocess.CompletedProcess[str]":
    command = [binary(), *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace")


def _document(done: "subprocess.CompletedProcess[str]") -> Dict[str, Any]:
    if not done.stdout.strip():
        raise CkptcmpError(_said(done))
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    return done.stderr.strip() or f"{binary()} ended with {done.returncode} and no word"


def _listed(flag: str, values: Sequence[str]) -> Sequence[str]:
    if isinstance(values, str):
        raise TypeError(f"{flag} takes a list of texts, not one text")
    return values


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
