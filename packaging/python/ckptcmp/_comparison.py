"""The outcome of a comparison, read from the document that ``ckptcmp compare --report`` writes."""

import json
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

#: The first part of the names of the documents' schema; a version follows.
SCHEMA = "urn:ckptcmp:schema:compare-report:"

#: The version of the schema that is read.
VERSION = 1

#: Rows of a list in a message before it is cut short.
ROWS = 10


class Difference(AssertionError):
    """Two checkpoints differ, or could not be compared; ``comparison`` has the details."""

    def __init__(self, comparison: "Comparison") -> None:
        super().__init__(comparison.text())
        self.comparison = comparison


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints."""

    path: str
    resolved: Optional[str]
    format: Optional[str]
    layout: Optional[str]
    iteration: Optional[int]
    problems: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tensor:
    """A tensor of both sides; where two values are given, the first is a's."""

    name: str
    section: str
    verdict: str
    passes: bool
    dtypes: Tuple[str, str]
    shapes: Tuple[Tuple[int, ...], Tuple[int, ...]]
    metrics: Dict[str, Any]
    worst_index: Optional[Tuple[int, ...]] = None
    worst_values: Optional[Tuple[str, str]] = None
    error: Optional[str] = None

    def __getattr__(self, name: str) -> Any:
        """The metrics by name: ``tensor.rel_l2``."""
        metrics = self.__dict__.get("metrics", {})
        if name in metrics:
            return metrics[name]
        raise AttributeError(f"no field and no metric is called {name}")


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison. ``document`` is the whole of it, by the schema that is part of the project."""

    document: Dict[str, Any]

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        """Reads a document that ``ckptcmp compare --report FILE.json`` wrote.

        Raises:
            ValueError: It is none, or one of another version of the schema.
        """
        document = json.loads(text)
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != f"{SCHEMA}{VERSION}":
            raise ValueError(f"no document of the schema {SCHEMA}{VERSION}: it says {schema!r}")
        return cls(document)

    @property
    def verdict(self) -> str:
        """``identical``, ``equal``, ``cast``, ``within``, ``different`` or ``trouble``."""
        return str(self.document["verdict"])

    @property
    def ok(self) -> bool:
        """All tensors that were expected are there and pass."""
        return self.document["passes"] is True

    @property
    def exit_code(self) -> int:
        """0 if all is equal or as far apart as it may be, 1 if something differs, 2 if there was trouble."""
        return int(self.document["exit_code"])

    @property
    def summary(self) -> Optional[str]:
        """One line that says it."""
        summary = self.document["summary"]
        return None if summary is None else str(summary)

    @property
    def errors(self) -> List[str]:
        """Why nothing was compared."""
        return list(self.document["errors"])

    @property
    def a(self) -> Optional[Side]:
        """The first checkpoint."""
        return self._side("a")

    @property
    def b(self) -> Optional[Side]:
        """The second checkpoint."""
        return self._side("b")

    @property
    def tensors(self) -> List[Tensor]:
        """All tensors that both sides have, in natural order of the names."""
        return [_tensor(entry) for entry in self.document["tensors"] or []]

    @property
    def differing(self) -> List[Tensor]:
        """The tensors that do not pass, the one with the largest relative distance first."""
        failing = [tensor for tensor in self.tensors if not tensor.passes]
        distance = {tensor.name: tensor.metrics.get("rel_l2") if tensor.metrics else None for tensor in failing}
        return sorted(failing, key=lambda tensor: (distance[tensor.name] is not None, -(distance[tensor.name] or 0)))

    @property
    def only_in_a(self) -> List[str]:
        """Names that only the first checkpoint has."""
        return self._only_in("a")

    @property
    def only_in_b(self) -> List[str]:
        """Names that only the second checkpoint has."""
        return self._only_in("b")

    def raise_on_difference(self) -> "Comparison":
        """Returns itself where it is ``ok``.

        Raises:
            Difference: It is not.
        """
        if not self.ok:
            raise Difference(self)
        return self

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each tensor and its metrics as columns."""
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]

        rows = []
        for tensor in self.tensors:
            row = {"name": tensor.name, "section": tensor.section, "verdict": tensor.verdict, "passes": tensor.passes}
            row.update(dtype_a=tensor.dtypes[0], dtype_b=tensor.dtypes[1], shape_a=tensor.shapes[0], shape_b=tensor.shapes[1])
            row.update(tensor.metrics or {})
            rows.append(row)
        return pandas.DataFrame(rows)

    def text(self) -> str:
        """Some lines for people: what differs most, what is on one side only, what could not be read."""
        lines = [self.summary or self.verdict]
        lines += self.errors
        for name, side in [("a", self.a), ("b", self.b)]:
            if side is not None:
                lines.append(f"{name}: {side.resolved or side.path}")
                lines += _cut([f"{name}: {problem}" for problem in side.problems])
        lines += _cut([_row(tensor) for tensor in self.differing])
        for name, names in [("a", self.only_in_a), ("b", self.only_in_b)]:
            lines += _cut([f"only in {name}: {tensor}" for tensor in names])
        return "\n".join(lines)

    def _side(self, name: str) -> Optional[Side]:
        found = (self.document["sides"] or {}).get(name)
        if found is None:
            return None
        problems = [_problem(problem) for problem in found["problems"] or []]
        return Side(
            path=found["path"],
            resolved=found["resolved"],
            format=found["format"],
            layout=found["layout"],
            iteration=found["iteration"],
            problems=problems,
            notes=list(found["notes"] or []),
        )

    def _only_in(self, name: str) -> List[str]:
        return list((self.document["only_in"] or {}).get(name) or [])


def _tensor(entry: Dict[str, Any]) -> Tensor:
    worst, error = entry["worst"], entry["error"]
    shapes = (tuple(entry["shape"]["a"]), tuple(entry["shape"]["b"]))
    return Tensor(
        name=entry["name"],
        section=entry["section"],
        verdict=entry["verdict"],
        passes=entry["passes"],
        dtypes=(entry["dtype"]["a"], entry["dtype"]["b"]),
        shapes=shapes,
        metrics=entry["metrics"] or {},
        worst_index=tuple(worst["index"]) if worst else None,
        worst_values=(worst["a"], worst["b"]) if worst else None,
        error=f"{error['side']}: {error['file']}: {error['message']}" if error else None,
    )


def _problem(problem: Dict[str, Any]) -> str:
    parts = [problem.get("file"), problem.get("tensor"), problem["message"]]
    return ": ".join(part for part in parts if part)


def _row(tensor: Tensor) -> str:
    if tensor.error:
        return f"{tensor.name}: {tensor.error}"
    if tensor.shapes[0] != tensor.shapes[1]:
        return f"{tensor.name}: shape {list(tensor.shapes[0])} in a, {list(tensor.shapes[1])} in b"
    rel_l2, max_abs = tensor.metrics.get("rel_l2"), tensor.metrics.get("max_abs")
    numbers = ", ".join(f"{name} {value:.2e}" for name, value in [("rel_l2", rel_l2), ("max_abs", max_abs)] if value is not None)
    worst = ""
    if tensor.worst_index is not None and tensor.worst_values is not None:
        worst = f"; at {list(tensor.worst_index)}: a {tensor.worst_values[0]}, b {tensor.worst_values[1]}"
    return f"{tensor.name}: {numbers or tensor.verdict}{worst}"


def _cut(lines: List[str]) -> List[str]:
    more = len(lines) - ROWS
    return lines[:ROWS] + ([f"and {more} more"] if more > 0 else [])
