"""Files of random weights, written piece by piece: safetensors, and what torch saves, without torch."""

from __future__ import annotations

import json
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np

Shape = tuple[int, ...]
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
STORAGES = {"F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}
SCALE = 0.02  # of the weights, as most makers draw them
BLOCK = 4_194_301  # numbers that repeat; prime, or rows of a matrix would be equal


def write_safetensors(file: Path, shapes: Mapping[str, Shape], dtype: str) -> None:
    """Write tensors of these names and shapes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        stop = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(described)) + described)
        for name, shape in shapes.items():
            _write(out, name, shape, dtype)


def write_torch_zip(file: Path, shapes: Mapping[str, Shape], dtype: str) -> None:
    """Write tensors as `torch.save` does a state dict since 1.6."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", _description(shapes, STORAGES[dtype]))
        archive.writestr("archive/byteorder", "little")
        for key, (name, shape) in enumerate(shapes.items()):
            with archive.open(f"archive/data/{key}", "w", force_zip64=True) as out:
                _write(out, name, shape, dtype)
        archive.writestr("archive/version", "3\n")


def _write(out: IO[bytes], name: str, shape: Shape, dtype: str) -> None:
    """Norms are near one, all else near zero. Each tensor begins elsewhere: engines keep equal ones once."""
    left, at = math.prod(shape), zlib.crc32(name.encode()) % BLOCK
    values = _block(dtype, 1.0 if name.endswith(".weight") and len(shape) == 1 else 0.0)
    while left:
        piece = values[at : at + left]
        out.write(piece.tobytes())
        left, at = left - len(piece), 0


@cache
def _block(dtype: str, around: float) -> np.ndarray:
    draw = np.random.default_rng(0)
    return (around + SCALE * draw.standard_normal(BLOCK, np.float32)).astype(DTYPES[dtype])


def _description(shapes: Mapping[str, Shape], storage: str) -> bytes:
    """The pickle of a dict of tensors, opcode by opcode: what it names is torch's, and torch may be absent."""
    out = bytearray(pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK)
    for key, (name, shape) in enumerate(shapes.items()):
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        out += _text(name) + _name("torch._utils", "_rebuild_tensor_v2") + pickle.MARK
        out += pickle.MARK + _text("storage") + _name("torch", storage) + _text(str(key)) + _text("cpu")
        out += _number(math.prod(shape)) + pickle.TUPLE + pickle.BINPERSID + _number(0)
        out += b"".join([pickle.MARK, *map(_number, shape), pickle.TUPLE, pickle.MARK, *map(_number, strides), pickle.TUPLE])
        out += pickle.NEWFALSE + _name("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
        out += pickle.TUPLE + pickle.REDUCE
    return bytes(out + pickle.SETITEMS + pickle.STOP)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _number(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def _name(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()
