"""An ONNX model spelled in bytes: nodes, constants, inputs and one output, so that serving needs no `onnx` package.

Fields are numbered as in onnx.proto of the ONNX project.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

OPSET = 23  # the first with Attention as one operator, which ONNX Runtime and OpenVINO compute as such
IR_VERSION = 10
FLOAT, INT64, BOOL = 1, 7, 9  # TensorProto.DataType
_TYPES = {np.dtype("float32"): FLOAT, np.dtype("int64"): INT64, np.dtype("bool"): BOOL}
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT, _ATTRIBUTE_STRING, _ATTRIBUTE_INTS = 1, 2, 3, 7  # AttributeProto.AttributeType
Attribute = float | int | str | Sequence[int]


class OnnxWriter:
    """A graph under construction. Names of values are given out by `node` and `constant`."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._ends: list[bytes] = []
        self._count = 0

    def node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Attribute) -> list[str]:
        """An operator; returns the names of its outputs."""
        names = [self._name() for _ in range(outputs)]
        content = b"".join(_bytes(1, name.encode()) for name in inputs)
        content += b"".join(_bytes(2, name.encode()) for name in names) + _bytes(4, kind.encode())
        content += b"".join(_bytes(5, _attribute(name, value)) for name, value in attributes.items())
        self._nodes.append(content)
        return names

    def constant(self, value: NDArray[np.generic]) -> str:
        """The name of a constant; equal ones are kept once."""
        key = str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes()
        if key not in self._constants:
            self._constants[key] = self._name()
        return self._constants[key]

    def input(self, name: str, dims: Sequence[str]) -> str:
        """An input int64[dims] of the model."""
        self._ends.append(_bytes(11, _value(name, INT64, dims)))
        return name

    def model(self, output: str, name: str, dims: Sequence[str | int]) -> bytes:
        """A ModelProto; `output` float32[dims] is what it gives, under `name`."""
        identity = _bytes(1, output.encode()) + _bytes(2, name.encode()) + _bytes(4, b"Identity")
        graph = b"".join(_bytes(1, node) for node in (*self._nodes, identity)) + _bytes(2, b"trunk")
        graph += b"".join(_bytes(5, _tensor(one, *key)) for key, one in self._constants.items())
        graph += b"".join(self._ends) + _bytes(12, _value(name, FLOAT, dims))
        return _integer(1, IR_VERSION) + _bytes(8, _bytes(1, b"") + _integer(2, OPSET)) + _bytes(7, graph)

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"


def _attribute(name: str, value: Attribute) -> bytes:
    content = _bytes(1, name.encode())
    if isinstance(value, float):
        return content + _varint(2 << 3 | 5) + np.float32(value).tobytes() + _integer(20, _ATTRIBUTE_FLOAT)
    if isinstance(value, int):
        return content + _integer(3, value) + _integer(20, _ATTRIBUTE_INT)
    if isinstance(value, str):
        return content + _bytes(4, value.encode()) + _integer(20, _ATTRIBUTE_STRING)
    return content + b"".join(_integer(8, one) for one in value) + _integer(20, _ATTRIBUTE_INTS)


def _tensor(name: str, dtype: str, shape: Sequence[int], data: bytes) -> bytes:
    dims = b"".join(_integer(1, dim) for dim in shape)
    return dims + _integer(2, _TYPES[np.dtype(dtype)]) + _bytes(8, name.encode()) + _bytes(9, data)


def _value(name: str, kind: int, dims: Sequence[str | int]) -> bytes:
    shape = b"".join(_bytes(1, _bytes(2, dim.encode()) if isinstance(dim, str) else _integer(1, dim)) for dim in dims)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _integer(1, kind) + _bytes(2, shape)))


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)  # negative ones take ten bytes


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def constants_of(values: Mapping[str, NDArray[np.generic]]) -> bytes:
    """TensorProtos of named arrays as fields of a GraphProto, to be appended to a model."""
    content = b"".join(
        _bytes(5, _tensor(name, str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes()))
        for name, value in values.items()
    )
    return _bytes(7, content)
