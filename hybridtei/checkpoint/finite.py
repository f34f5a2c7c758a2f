"""Weights that are numbers: a checkpoint that was broken in training, or overflowed when it was converted, gives vectors of
nothing but NaN, and only for some texts.

A sum is looked at first: it is no number if any of its terms is none, and takes no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import LoadError


def check_finite(values: NDArray[Any], file: Path, name: str) -> None:
    """Raises LoadError, naming the file and the tensor, if it holds NaN or infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(values, dtype=np.float32)):
            return
    wrong = values.size - int(np.count_nonzero(np.isfinite(values)))
    if wrong:
        raise not_finite(file, name, wrong, values.size)


def not_finite(file: Path, name: str, wrong: int, size: int) -> LoadError:
    """What is said of such a tensor."""
    return LoadError(f"{file}: `{name}` holds NaN or infinity, at {wrong} of {size} places")
