"""A checkpoint's tensors by name, without torch: safetensors, whole or in shards.

Checkpoints of the same trunk spell its tensors with and without a prefix ("bert.encoder…", "encoder…"), so a name is found by
its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy bfloat16)
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from hybridtei.checkpoint.files import inside, read_object, require
from hybridtei.errors import LoadError

# Weights of the trunk itself: layers, tables. What hangs on it (pooler, heads) may stay unused, as may buffers.
OF_TRUNK = re.compile(r"(^|\.)(layers?\.\d+|embeddings|embed_tokens|distance_embedding)\.")
UNUSED = re.compile(r"pooler|(^|\.)cls\.|lm_head|classifier|vocab_|predictions|position_ids$|inv_freq$")


def left_over(unused: Iterable[str]) -> list[str]:
    """Those of the tensors a model did not use that are of its trunk: it is another model then than config.json says."""
    return sorted(name for name in unused if OF_TRUNK.search(name) and not UNUSED.search(name))


class Weights:
    """Tensors of one checkpoint folder; nothing is read before it is asked for."""

    def __init__(self, folder: Path, file_of: dict[str, Any]) -> None:
        self.folder = folder
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
        return cls(folder, file_of)

    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._file_of)

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
        return np.asarray(self._file_of[name].get_tensor(name), dtype=np.float32, order="C")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists() or (folder / "model.safetensors").exists():
        return [require(folder / "model.safetensors")]
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise LoadError(f"{index}: lacks `weight_map`")
    return [require(inside(folder, name)) for name in sorted({str(name) for name in names.values()})]
