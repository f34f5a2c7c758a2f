"""A checkpoint's tensors by name, without torch: safetensors, whole or in shards.

Checkpoints of the same trunk spell its tensors with and without a prefix ("bert.encoder…", "encoder…"), so a name is found by
its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy bfloat16)
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from hybridtei.checkpoint.files import inside, read_object, require
from hybridtei.errors import LoadError


class Weights:
    """Tensors of one checkpoint folder; nothing is read before it is asked for."""

    def __init__(self, file_of: dict[str, Any]) -> None:
        self._file_of = file_of

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """Open `model.safetensors` or the shards its index names. Raises MissingArtifact or LoadError, naming the file."""
        file_of: dict[str, Any] = {}
        for path in _files(folder):
            try:
                opened = safe_open(path, framework="numpy")
                file_of |= dict.fromkeys(list(opened.keys()), opened)  # type: ignore[no-untyped-call]
            except Exception as error:  # the library raises kinds of its own
                raise LoadError(f"{path}: cannot be read as weights: {error}") from error
        return cls(file_of)

    def find(self, name: str) -> str | None:
        """The checkpoint's spelling of a tensor's name, or None."""
        if name in self._file_of:
            return name
        longer = [key for key in self._file_of if key.endswith("." + name)]
        shorter = [key for key in self._file_of if name.endswith("." + key)]
        found = sorted(longer, key=len) or sorted(shorter, key=len, reverse=True)
        return found[0] if found else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that `find` named."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def float32(self, name: str) -> NDArray[np.float32]:
        """A tensor that `find` named, widened if it is in half precision."""
        return np.ascontiguousarray(self._file_of[name].get_tensor(name), dtype=np.float32)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists() or (folder / "model.safetensors").exists():
        return [require(folder / "model.safetensors")]
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise LoadError(f"{index}: lacks `weight_map`")
    return [require(inside(folder, str(name))) for name in sorted(set(names.values()))]
