"""A checkpoint's tensors by name, without torch: safetensors, whole or in shards.

Checkpoints of the same trunk spell its tensors with and without a prefix ("bert.encoder…", "encoder…"), so a name is found by
its end.

A float32 tensor is a view of the file, mapped read-only, not a copy. Its pages are shared by all processes that
serve the same file, and may be dropped at any time, since they fault in again. So a checkpoint is replaced by renaming another
file over it, as every downloader does; writing into a file that is being served changes what is served.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors import safe_open

from hybridtei.checkpoint.files import inside, read_object, require
from hybridtei.errors import LoadError

# Weights of the trunk itself: layers, tables. What hangs on it (pooler, heads) may stay unused, as may buffers.
OF_TRUNK = re.compile(r"(^|\.)(layers?\.\d+|embeddings|embed_tokens|distance_embedding)\.")
UNUSED = re.compile(r"pooler|(^|\.)cls\.|lm_head|classifier|vocab_|predictions|position_ids$|inv_freq$")


def left_over(unused: Iterable[str]) -> list[str]:
    """Those of the tensors a model did not use that are of its trunk: it is another model then than config.json says."""
    return sorted(name for name in unused if OF_TRUNK.search(name) and not UNUSED.search(name))


# As safetensors spells them; always little-endian.
DTYPES: Mapping[str, DTypeLike] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies in the mapping of its file."""

    file: Path
    name: str
    mapping: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def array(self, rows: Sequence[int] | None = None) -> NDArray[np.float32]:
        if self.dtype not in DTYPES:
            raise LoadError(f"{self.file}: `{self.name}` is {self.dtype}; read are {', '.join(DTYPES)}")
        stored = np.dtype(DTYPES[self.dtype])
        values = np.frombuffer(self.mapping, stored, (self.stop - self.start) // stored.itemsize, self.start)
        # A header of odd length puts the values at an odd address, where not every kernel may read them: those are copied.
        whole = values.reshape(self.shape)
        return np.require(whole if rows is None else whole[list(rows)], np.float32, ["C", "A"])


class Weights:
    """Tensors of one checkpoint folder; nothing is read before it is asked for."""

    def __init__(self, folder: Path, tensors: Mapping[str, _Tensor]) -> None:
        self.folder = folder
        self._tensors = tensors
        self._finite: set[str] = set()  # those that were looked at

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """Open `model.safetensors` or the shards its index names. Raises MissingArtifact or LoadError, naming the file."""
        tensors: dict[str, _Tensor] = {}
        for path in _files(folder):
            try:
                tensors |= _mapped(path)
            except Exception as error:  # the library raises kinds of its own
                raise LoadError(f"{path}: cannot be read as weights: {error}") from error
        return cls(folder, tensors)

    def names(self) -> frozenset[str]:
        """Names of all tensors, as the checkpoint spells them."""
        return frozenset(self._tensors)

    def find(self, name: str) -> str | None:
        """The checkpoint's spelling of a tensor's name, or None."""
        if name in self._tensors:
            return name
        longer = [key for key in self._tensors if key.endswith("." + name)]
        shorter = [key for key in self._tensors if name.endswith("." + key)]
        found = sorted(longer, key=len) or sorted(shorter, key=len, reverse=True)
        return found[0] if found else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that `find` named."""
        return self._tensors[name].shape

    def float32(self, name: str) -> NDArray[np.float32]:
        """A tensor that `find` named: a read-only view of the file, or a widened copy if it is in half precision.

        Raises LoadError if it holds what is no number.
        """
        tensor = self._tensors[name]
        array = tensor.array()
        if name not in self._finite:
            check_finite(array, tensor.file, name)
            self._finite.add(name)
        return array

    def rows(self, name: str, rows: Sequence[int]) -> NDArray[np.float32]:
        """Some rows of a tensor that `find` named, without reading the others. Raises LoadError as `float32` does."""
        tensor = self._tensors[name]
        array = tensor.array(rows)
        check_finite(array, tensor.file, name)
        return array

    def release(self) -> None:
        """Give back the memory of all pages read so far; arrays stay valid, what is read again faults in again.

        For whoever has made a copy in a form of its own, as ONNX Runtime does of every matrix.
        """
        for mapping in {id(tensor.mapping): tensor.mapping for tensor in self._tensors.values()}.values():
            if hasattr(mapping, "madvise"):  # not on Windows
                mapping.madvise(mmap.MADV_DONTNEED)


def _mapped(path: Path) -> dict[str, _Tensor]:
    """Every tensor of a file. The library checks the header against itself and the file's size, so it need only be believed."""
    with safe_open(path, framework="numpy"), path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(mapping[:8], "little")
        header = json.loads(mapping[8 : 8 + size])
    begin = 8 + size
    return {
        name: _Tensor(path, name, mapping, entry["dtype"], tuple(entry["shape"]), *(begin + at for at in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists() or (folder / "model.safetensors").exists():
        return [require(folder / "model.safetensors")]
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise LoadError(f"{index}: lacks `weight_map`")
    return [require(inside(folder, name)) for name in sorted({str(name) for name in names.values()})]


Arrays = Mapping[str, NDArray[np.float32]]


def read_linear(file: Path) -> Arrays:
    """`weight` and `bias` of a one-layer head. Raises LoadError unless the file holds just these two tensors."""
    arrays = read_arrays(file)
    if set(arrays) != {"weight", "bias"}:
        raise LoadError(f"{file}: holds {sorted(arrays)}, should hold ['bias', 'weight']")
    return arrays


def read_arrays(file: Path) -> Arrays:
    """All tensors of a safetensors file, or of a pickle that holds nothing but tensors. Raises LoadError."""
    require(file)
    try:
        arrays = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    except LoadError:
        raise
    except Exception as error:  # each library raises its own kinds, some of them bare
        raise LoadError(f"{file}: cannot be read as weights: {error}") from error
    for name, array in arrays.items():
        check_finite(array, file, name)
    return arrays


def _safetensors(file: Path) -> Arrays:
    import ml_dtypes  # noqa: F401  (teaches numpy bfloat16)
    from safetensors.numpy import load_file

    return {name: np.asarray(array, dtype=np.float32) for name, array in load_file(file).items()}


def _pickled(file: Path) -> Arrays:
    try:
        import torch
    except ImportError as error:
        raise LoadError(f"{file}: reading it needs PyTorch: pip install 'hybridtei[torch]'") from error
    tensors: Any = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise LoadError(f"{file}: should hold a dictionary of tensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


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
