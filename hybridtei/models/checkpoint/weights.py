"""A checkpoint's tensors by name, without torch: safetensors or torch's files, whole or in shards.

Checkpoints of the same trunk name its tensors with or without a prefix ("bert.encoder…",
"encoder…"), so names match by their ends.

A float32 tensor is a read-only view of the mapped file. All processes that serve the file share its
pages, which the system can drop and read again. To replace a checkpoint, rename another file over
it, as downloaders do: writing into a mapped file changes the weights of a running server.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from hybridtei.errors import LoadError, WeightMismatch
from hybridtei.models.checkpoint.files import facts_of, inside, read_object, require
from hybridtei.models.checkpoint.peft import (
    ADAPTER,
    changes,
    largest_rank,
    merged,
    own_folders,
    side_by_side,
    weights_of,
)
from hybridtei.models.checkpoint.tensors import Tensor, find, old_name, stacked
from hybridtei.models.families import FAMILIES

TRUNKS = {family.trunk for family in FAMILIES.values()}
# The largest public models have some 200
SHARD, MAX_SHARDS = (re.compile(r"model-\d+-of-(\d+)\.safetensors"), 1000)
WEIGHTS = ("model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
# Sampled blocks that identify a file
BLOCKS, BLOCK_BYTES = 64, 4096


class Weights:
    """Tensors of one checkpoint folder, or of one file, read at first use."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, Tensor], adapters: Sequence[Path] = ()
    ) -> None:
        """`adapters`: folders of adapters, which change the tensors."""
        self.folder = folder
        self._tensors = tensors
        # Of the files, before adapters
        self._sources = list(tensors.values())
        self._adapters = adapters
        if adapters:
            self._adapt(adapters)
        # The names of checked tensors
        self._finite: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """Open `model.safetensors` or the shards of its index, else `pytorch_model.bin` or its
        shards, else safetensors shards with numbered names.

        Raises MissingArtifact or LoadError, naming the file.
        """
        tensors: dict[str, Tensor] = {}
        for path in _files(folder):
            tensors |= _opened(require(path))
        own = own_folders(folder)
        if (folder / ADAPTER).exists():
            own = [folder]
        return cls(folder, stacked(_unwrapped(tensors)), own)

    def _adapt(self, folders: Sequence[Path]) -> None:
        adapters = []
        for folder in folders:
            factors = _opened(weights_of(folder))
            self._sources.extend(factors.values())
            adapters.append(changes(folder, factors, self._tensors))
        if folders == [self.folder]:
            self._tensors = merged(self._tensors, adapters[0])
            return
        self._tensors = side_by_side(self._tensors, adapters, largest_rank(folders))

    @classmethod
    def of_file(cls, file: Path) -> Weights:
        """Open a safetensors file or a torch file of any name. Raises MissingArtifact or LoadError,
        naming it."""
        return cls(file, _opened(require(file)))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors in the checkpoint's spelling."""
        return frozenset(self._tensors)

    def find(self, name: str) -> str | None:
        """Return the checkpoint's spelling of a tensor's name, with any prefix, or None."""
        return find(self._tensors, name)

    def has(self, name: str) -> bool:
        """True if there is a tensor of exactly this name."""
        return name in self._tensors

    def checked(self, name: str, shape: Sequence[int | None], key: str | None = None) -> str:
        """Return `key`, else the checkpoint's spelling of `name`. Raises WeightMismatch if there is
        no such tensor, or if its shape is not `shape`, where None means any size."""
        key = self.find(name) if key is None else key
        if key is None or key not in self._tensors:
            held = f"they hold {sorted(self._tensors)[:5]}, {len(self._tensors)} in all"
            raise WeightMismatch(
                f"{self.folder}: the weights lack `{name}`, which the model needs; {held}"
            )
        check_shape(self.shape(key), shape, self.folder, key)
        return key

    def array(self, name: str, shape: Sequence[int | None]) -> NDArray[np.float32]:
        """Return the tensor of exactly this name, or of its old name. Raises the errors of
        `checked` and `float32`."""
        return self.float32(self.checked(name, shape, name if self.has(name) else old_name(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. `name`: the checkpoint's spelling."""
        return self._tensors[name].shape

    def widest(self) -> str:
        """Return safetensors' name of the dtype of the largest tensor."""
        return max(self._tensors.values(), key=lambda tensor: tensor.stop - tensor.start).dtype

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return a tensor: a read-only view of the file, or a widened copy of half precision.

        Raises LoadError if it holds NaN or infinity.
        """
        array = self._tensors[name].array()
        if name not in self._finite:
            check_finite(array, self._tensors[name].file, name)
            self._finite.add(name)
        return array

    def stored(self, name: str) -> NDArray[Any]:
        """Return a tensor in the file's dtype (bfloat16 by ml_dtypes), aligned and contiguous. Its
        numbers are not checked."""
        return np.require(self._tensors[name].stored(), requirements=["C", "A"])

    def rows(self, name: str, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return some rows of a tensor without reading the others. Raises the errors of
        `float32`."""
        array = self._tensors[name].array(rows)
        check_finite(array, self._tensors[name].file, name)
        return array

    def place(self, array: NDArray[Any]) -> tuple[Path, int] | None:
        """Return the file and byte offset of an array that is a contiguous view of a tensor; else
        None."""
        first, last = array.__array_interface__["data"][0], array.nbytes
        for file, mapping in self._mappings().items():
            offset = first - np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
            if array.flags.c_contiguous and 0 <= offset <= len(mapping) - last:
                return file.resolve(), offset
        return None

    def identity(self) -> bytes:
        """Return a digest that identifies the files and their state: paths, sizes, times, headers
        and sampled blocks."""
        hasher = hashlib.sha256()
        for folder in self._adapters:
            hasher.update((folder / ADAPTER).read_bytes())
        for file, mapping in self._mappings().items():
            path = file.resolve()
            hasher.update(repr((path, *facts_of(path))).encode())
            sources = self._sources
            begin = min(tensor.start for tensor in sources if tensor.mapping is mapping)
            hasher.update(mapping[:begin])
            for number in range(BLOCKS):
                start = (len(mapping) - BLOCK_BYTES) * number // (BLOCKS - 1)
                hasher.update(mapping[max(start, 0) : max(start, 0) + BLOCK_BYTES])
        return hasher.digest()

    def _mappings(self) -> dict[Path, mmap.mmap]:
        return {tensor.file: tensor.mapping for tensor in self._sources}

    def release(self) -> None:
        """Free the pages read so far. Arrays stay valid and are read again on access.

        For runtimes that copy the weights, as ONNX Runtime copies every matrix.
        """
        for mapping in self._mappings().values():
            # Not on Windows
            if hasattr(mapping, "madvise"):
                mapping.madvise(mmap.MADV_DONTNEED)


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without a trainer's prefix before trunk and head, such as `module.`."""
    names, start = sorted(tensors) or [""], 0
    # All names share what the first and the last one share
    for part, other in zip(names[0].split("."), names[-1].split("."), strict=False):
        if part != other:
            break
        start += len(part) + 1
    if not TRUNKS & {name[start:].partition(".")[0] for name in names}:
        return tensors
    return {name[start:]: tensor for name, tensor in tensors.items()}


def _opened(path: Path) -> dict[str, Tensor]:
    try:
        return _mapped(path) if path.suffix == ".safetensors" else _mapped_zip(path)
    except LoadError:
        raise
    except Exception as error:
        # The libraries' exceptions have no common base class
        raise LoadError(f"{path}: cannot be read as weights: {error}") from error


def _mapped_zip(path: Path) -> dict[str, Tensor]:
    # Most checkpoints start without it
    from hybridtei.models.torch_zip import places

    if not is_torch_zip(path):
        raise LoadError(
            f"{path}: was saved by torch before 1.6, or is cut short; save it as safetensors"
        )
    tensors = places(path)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        name: Tensor(path, name, mapping, at.dtype, at.shape, at.start, at.stop, at.strides)
        for name, at in tensors.items()
    }


def _mapped(path: Path) -> dict[str, Tensor]:
    """Map every tensor of a file. The library checks the header against itself and the file's
    size."""
    with safe_open(path, framework="numpy"), path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(mapping[:8], "little")
        header = json.loads(mapping[8 : 8 + size])
    begin = 8 + size
    return {
        name: Tensor(
            path,
            name,
            mapping,
            entry["dtype"],
            tuple(entry["shape"]),
            *(begin + at for at in entry["data_offsets"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _files(folder: Path) -> list[Path]:
    """Return a folder's weight files, existing or not. An index may name shards of any name."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return [folder / name]
        if index.exists():
            return shards(index)
    return _numbered(folder) or [folder / "model.safetensors"]


def _numbered(folder: Path) -> list[Path]:
    """Return the shards of a folder without an index, existing or not: a shard's name states their
    number."""
    named = (SHARD.fullmatch(file.name) for file in sorted(folder.glob("model-*.safetensors")))
    first = next((match for match in named if match), None)
    if first is None:
        return []
    digits, count = len(first[1]), int(first[1])
    if count > MAX_SHARDS:
        raise LoadError(f"{folder / first[0]}: one of {count} shards, allowed are {MAX_SHARDS}")
    return [
        folder / f"model-{number:0{digits}}-of-{first[1]}.safetensors"
        for number in range(1, count + 1)
    ]


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files, of the first format that exists."""
    files = [file for file in _files(folder) if file.exists()]
    return files or next(
        (files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), []
    )


def is_torch_zip(path: Path) -> bool:
    """True if torch 1.6 or later saved the file. Earlier versions wrote bare pickles."""
    return zipfile.is_zipfile(path)


def has_weights(folder: Path) -> bool:
    """True if a folder has weights that `Weights.open` reads."""
    files = weight_files(folder)
    return bool(files) and all(
        file.suffix == ".safetensors" or is_torch_zip(file) for file in files
    )


def shards(index: Path) -> list[Path]:
    """Return the files that an index of shards names. Raises LoadError, naming the index."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise LoadError(f"{index}: lacks `weight_map`")
    return [inside(index.parent, name) for name in sorted({str(name) for name in names.values()})]


def has_shape(sizes: Sequence[int], shape: Sequence[int | None]) -> bool:
    """True if a tensor has the shape `shape`, where None means any size."""
    return len(sizes) == len(shape) and all(
        size in (None, have) for size, have in zip(shape, sizes, strict=True)
    )


def check_shape(sizes: Sequence[int], shape: Sequence[int | None], where: Path, name: str) -> None:
    """Raises WeightMismatch, naming the tensor, unless its shape is `shape`, where None means any
    size."""
    if not has_shape(sizes, shape):
        raise WeightMismatch(
            f"{where}: `{name}` has shape {list(sizes)}, the model needs {list(shape)}"
        )


def check_finite(values: NDArray[Any], file: Path, name: str) -> None:
    """Raises LoadError, naming the file and the tensor, if the tensor has NaN or infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(values, dtype=np.float32)):
            return
    wrong = values.size - int(np.count_nonzero(np.isfinite(values)))
    if wrong:
        raise not_finite(file, name, wrong, values.size)


def not_finite(file: Path, name: str, wrong: int, size: int) -> LoadError:
    """Return the error of a tensor with NaN or infinity at `wrong` of `size` places."""
    return LoadError(f"{file}: `{name}` holds NaN or infinity, at {wrong} of {size} places")
