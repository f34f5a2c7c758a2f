"""Reads the tensors of a file that torch saved, without torch and without running its pickle.

The file is a zip: `data.pkl` describes the tensors, `data/KEY` has the uncompressed bytes of each
storage. A small interpreter reads the description. It knows only the opcodes and names with which
torch describes tensors, and refuses all others. It creates only tuples, dicts and places in the
file.

Source: torch's `serialization.py` and `_utils.py`, and `pickletools` for the opcodes.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError

# torch's storages -> safetensors' names of dtypes.
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
SIZES: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
REBUILT, PARAMETER, ORDERED = (
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
)
NAMES = frozenset({REBUILT, PARAMETER, ORDERED, *(f"torch {name}" for name in STORAGES)})
MAX_DESCRIPTION_BYTES, MAX_BYTEORDER_BYTES = 64_000_000, 16
# Enough for 100,000 tensors; each opcode may create an object of 64 bytes
MAX_OPCODES = 4_000_000
# torch's own
MAX_DIMENSIONS = 64
LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in a file. `strides`: in elements; None if the rows are contiguous."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Name:
    text: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor whose storage is not resolved yet."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK = object()
# Opcodes whose argument is their value
PUSHED = frozenset(
    {
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
    }
)
CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "NONE": lambda: None,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def places(path: Path) -> dict[str, Place]:
    """Find every tensor of a state dict. Raises LoadError for any other object."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries = {entry.filename: entry for entry in archive.infolist()}
        described = [name for name in entries if name.endswith("/data.pkl")]
        if len(described) != 1:
            raise LoadError(
                f"{path}: holds {len(described)} descriptions of tensors, should hold one"
            )
        root = described[0].removesuffix("data.pkl")
        order = entries.get(root + "byteorder")
        if order is not None and _content(path, archive, order, MAX_BYTEORDER_BYTES) != b"little":
            raise LoadError(
                f"{path}: its numbers are big-endian; only little-endian numbers are supported"
            )
        description = _content(path, archive, entries[described[0]], MAX_DESCRIPTION_BYTES)
        views = _read(path, description)

        def start_of(storage: _Storage) -> int:
            entry = entries.get(f"{root}data/{storage.key}")
            size = storage.count * SIZES[storage.dtype]
            if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size < size:
                raise LoadError(
                    f"{path}: storage `{storage.key}` is missing, compressed, or shorter than "
                    f"{size} bytes"
                )
            # The file's own header states the lengths of two fields before the content
            file.seek(entry.header_offset + 26)
            name_bytes, extra_bytes = (int.from_bytes(file.read(2), "little") for _ in range(2))
            start = entry.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
            if start + size > path.stat().st_size:
                raise LoadError(
                    f"{path}: storage `{storage.key}` reaches beyond the end of the file"
                )
            return start

        return {name: _place(path, name, view, start_of) for name, view in views.items()}


def _content(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, limit: int) -> bytes:
    """Read a member of at most `limit` bytes; the archive's directory may lie about its size. Other
    compressions than deflate unfold a block of any size at once. Raises LoadError."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise LoadError(f"{path}: `{entry.filename}` is compressed by another method than deflate")
    with archive.open(entry) as member:
        content = member.read(limit + 1)
    if len(content) > limit:
        raise LoadError(f"{path}: `{entry.filename}` takes more than {limit} bytes")
    return content


def _place(path: Path, name: str, view: _View, start_of: Callable[[_Storage], int]) -> Place:
    storage, size = view.storage, SIZES[view.storage.dtype]
    last = view.offset + sum(
        (side - 1) * stride for side, stride in zip(view.shape, view.strides, strict=True)
    )
    numbers = (view.offset, *view.shape, *view.strides)
    count = math.prod(view.shape)
    if min(numbers) < 0 or count > storage.count or (count and last >= storage.count):
        raise LoadError(f"{path}: `{name}` reaches beyond its storage of {storage.count} numbers")
    start = start_of(storage) + view.offset * size
    stop = start + (last + 1 - view.offset if count else 0) * size
    # The strides of contiguous rows, the last axis first
    step, dense_strides = 1, []
    for side in reversed(view.shape):
        dense_strides.append(step)
        step *= side
    # The stride of an axis of size 1 is never used
    is_dense = all(
        stride == dense or side <= 1
        for stride, dense, side in zip(view.strides, dense_strides[::-1], view.shape, strict=True)
    )
    return Place(storage.dtype, view.shape, start, stop, None if is_dense else view.strides)


def _read(path: Path, description: bytes) -> dict[str, _View]:
    """Read the views in a description. Raises LoadError for an opcode, a name or a result that
    torch does not write."""
    try:
        tensors = _run(description)
    except _Refused as error:
        raise LoadError(f"{path}: {error}; files of tensors alone are read without torch") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: its description of tensors is damaged: {error!r}") from error
    if isinstance(tensors, dict) and all(
        isinstance(key, str) and isinstance(value, _View) for key, value in tensors.items()
    ):
        return tensors
    raise LoadError(f"{path}: should hold a dictionary of tensors")


class _Refused(Exception):
    pass


class _Interpreter:
    """Runs the opcodes of a description. The last value on the stack is the result.

    A pickle can refer to a value repeatedly, so nested tuples can stand for 2^n values: never
    compare, hash or print one.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._opcodes = 0

    def step(self, opcode: str, argument: Any) -> None:
        """Raises _Refused for an opcode that torch does not use for tensors."""
        self._opcodes += 1
        if self._opcodes > MAX_OPCODES:
            raise _Refused(f"describes its tensors by more than {MAX_OPCODES} opcodes")
        if opcode in PUSHED:
            self.stack.append(argument)
        elif opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode]())
        elif opcode in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(self._memo) if argument is None else argument
            if place > self._opcodes:
                raise _Refused(f"keeps a value at place {place}, after {self._opcodes} opcodes")
            self._memo[place] = self.stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif opcode in TUPLES:
            count = TUPLES[opcode]
            self.stack[-count:] = [tuple(self.stack[-count:])]
        else:
            self._structure(opcode, argument)

    def _structure(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "GLOBAL":
                stack.append(_name(argument))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_name(f"{_text(module)} {_text(name)}"))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_result_of(stack.pop(), arguments))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][_text(key)] = value
            case "SETITEMS":
                pairs = self._since_mark()
                stack[-1].update(zip(map(_text, pairs[::2]), pairs[1::2], strict=True))
            # Attributes of an OrderedDict, such as module versions
            case "BUILD":
                stack.pop()
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise _Refused(f"uses the opcode {opcode}, which no file of tensors has")

    def _since_mark(self) -> list[Any]:
        """Take the values that were put on the stack since the last mark."""
        values = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]


def _run(description: bytes) -> Any:
    interpreter = _Interpreter()
    for opcode, argument, _ in pickletools.genops(description):
        interpreter.step(opcode.name, argument)
    return interpreter.stack.pop()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Refused(f"names something by a {type(value).__name__}, should by a text")
    return value


def _name(text: str) -> _Name:
    if text not in NAMES:
        raise _Refused(f"names `{text.replace(' ', '.')}`, which is not a tensor")
    return _Name(text)


def _storage(described: Any) -> _Storage:
    """`described`: `("storage", class, key, device, count)`."""
    kind, storage_class, key, _, count = described
    name = storage_class.text.removeprefix("torch ")
    if (
        kind != "storage"
        or name not in STORAGES
        or not isinstance(key, str)
        or not isinstance(count, int)
    ):
        raise _Refused("refers to something that is not a storage")
    return _Storage(STORAGES[name], key, count)


def _result_of(function: Any, arguments: Any) -> Any:
    if function == _Name(ORDERED):
        return {}
    if function == _Name(PARAMETER):
        return arguments[0]
    if function != _Name(REBUILT):
        raise _Refused("calls something that makes no tensor")
    storage, offset, shape, strides = arguments[:4]
    if len(shape) > MAX_DIMENSIONS or len(shape) != len(strides):
        raise _Refused(f"describes a tensor of {len(shape)} dimensions and {len(strides)} strides")
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(number) is int for number in numbers):
        raise _Refused("describes a tensor by something else than numbers")
    return _View(storage, offset, tuple(shape), tuple(strides))
