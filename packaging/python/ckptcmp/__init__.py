"""Compare two training checkpoints of large models, tensor by tensor.

A thin layer over the program ``ckptcmp``, which reads every format by itself: no torch is needed, and nothing from a
checkpoint is executed.

    >>> import ckptcmp
    >>> result = ckptcmp.compare("run1", "run2", rtol=1e-3)    # doctest: +SKIP
    >>> result.ok                                              # doctest: +SKIP
    True
"""

from ._binary import binary
from ._commands import Check, CkptcmpError, check, compare, inspect
from ._comparison import Comparison, Difference, Side, Tensor

__all__ = [
    "Check",
    "CkptcmpError",
    "Comparison",
    "Difference",
    "Side",
    "Tensor",
    "binary",
    "check",
    "compare",
    "inspect",
]
