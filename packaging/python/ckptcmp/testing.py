"""Assertions for tests."""

from typing import Any

from ._commands import PathLike, compare
from ._comparison import Comparison

__all__ = ["assert_checkpoints_equal"]


def assert_checkpoints_equal(a: PathLike, b: PathLike, **options: Any) -> Comparison:
    """Compares two checkpoints with the options of ``ckptcmp.compare``.

    Raises:
        Difference: An ``AssertionError`` that tells what differs most, what is missing, and what could not be read.
    """
    __tracebackhide__ = True
    return compare(a, b, **options).raise_on_difference()
