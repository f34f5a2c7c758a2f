"""Writes an ONNX model in bytes (nodes, constants, inputs, one output), so that serving needs no
`onnx` package; and a `Graph`, which lacks the checkpoint's tensors and can be stored in a file.

Field numbers are those of the ONNX project's onnx.proto. Concatenating two protobuf messages merges
their fields and lists, so tensors are declared by appending bytes to a model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hybridtei.models.checkpoint.weights import weight_files
from hybridtei.system.frames import nested, varint
from hybridtei.system.machine import cache_folder, is_own_alone, written_whole

log = logging.getLogger(__name__)

T = TypeVar("T")
# The first version with an Attention operator, which ONNX Runtime and OpenVINO run as one kernel
OPSET = 23
IR_VERSION = 10
# ONNX Runtime's own operators
MICROSOFT = "com.microsoft"
# TensorProto.DataType
FLOAT, UINT8, INT8, INT32, INT64, BOOL = 1, 2, 3, 6, 7, 9
# TensorProto.DataLocation
EXTERNAL = 1
_TYPES = {"float32": FLOAT, "uint8": UINT8, "int8": INT8, "int64": INT64}
# AttributeProto.AttributeType
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT, _ATTRIBUTE_STRING, _ATTRIBUTE_INTS = (1, 2, 3, 7)
Attribute = float | int | str | Sequence[int]
Dims = Sequence[str | int]


class OnnxWriter:
    """A graph under construction. `node` and `constant` return the names of values."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []
        self._opsets = {"": OPSET}
        self._count = 0

    def node(
        self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Attribute
    ) -> list[str]:
        """Add an operator; return the names of its outputs."""
        names = [self._name() for _ in range(outputs)]
        self._opsets.setdefault(domain, 1)
        content = b"".join(nested(1, name.encode()) for name in inputs)
        content += b"".join(nested(2, name.encode()) for name in names) + nested(4, kind.encode())
        content += b"".join(
            nested(5, _attribute(name, value)) for name, value in attributes.items()
        )
        if domain:
            content += nested(7, domain.encode())
        self._nodes.append(content)
        return names

    def constant(self, value: NDArray[np.generic]) -> str:
        """Add a constant and return its name. Equal constants are stored once."""
        key = str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes()
        if key not in self._constants:
            self._constants[key] = self._name()
        return self._constants[key]

    def input(self, name: str, dims: Dims, kind: int = INT64) -> str:
        """Add an input of the model. A string as a size means any size."""
        self._inputs.append(nested(11, _value(name, kind, dims)))
        return name

    def output(self, value: str, name: str, dims: Dims, kind: int = FLOAT) -> None:
        """Add an output: a value under the name `name`."""
        self._nodes.append(
            nested(1, value.encode()) + nested(2, name.encode()) + nested(4, b"Identity")
        )
        self._outputs.append(nested(12, _value(name, kind, dims)))

    def model(self, output: str, name: str, dims: Dims, kind: int = FLOAT) -> bytes:
        """The ModelProto with the value `output` as the output `name`."""
        self.output(output, name, dims, kind)
        graph = b"".join(nested(1, node) for node in self._nodes) + nested(2, b"trunk")
        graph += b"".join(
            nested(5, _tensor(tensor, *key)) for key, tensor in self._constants.items()
        )
        graph += b"".join((*self._inputs, *self._outputs))
        opsets = b"".join(
            nested(8, nested(1, key.encode()) + _integer(2, number))
            for key, number in self._opsets.items()
        )
        return _integer(1, IR_VERSION) + opsets + nested(7, graph)

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"


def declarations(shapes: Mapping[str, Sequence[int]], location: str = "checkpoint") -> bytes:
    """Declarations of float32 tensors, one after the other in the file `location`. Append them to a
    model."""
    content, offset = b"", 0
    for name, shape in shapes.items():
        content += declaration(name, shape, location, offset)
        offset += 4 * prod(shape) if location != "checkpoint" else 0
    return content


def declaration(name: str, shape: Sequence[int], location: str, offset: int) -> bytes:
    """The declaration of a float32 tensor in a file. Append it to a model."""
    entries = {"location": location, "offset": str(offset), "length": str(4 * prod(shape))}
    external = b"".join(
        nested(13, nested(1, key.encode()) + nested(2, text.encode()))
        for key, text in entries.items()
    )
    dims = b"".join(_integer(1, dim) for dim in shape)
    tensor = (
        dims + _integer(2, FLOAT) + nested(8, name.encode()) + external + _integer(14, EXTERNAL)
    )
    return nested(7, nested(5, tensor))


def contents(tensors: Mapping[str, NDArray[np.float32]]) -> bytes:
    """Tensors with their content. Append them to a model."""
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    content = (
        nested(5, _tensor(name, "float32", value.shape, value.tobytes()))
        for name, value in arrays.items()
    )
    return nested(7, b"".join(content)) if tensors else b""


def inputs(shapes: Mapping[str, Sequence[int]]) -> bytes:
    """Declarations of float32 inputs, instead of tensors, for weights that the runtime gets another
    way. Append them to a model."""
    values = b"".join(nested(11, _value(name, FLOAT, shape)) for name, shape in shapes.items())
    return nested(7, values) if shapes else b""


def product_graph(rows: str, matrix: str, product: str) -> bytes:
    """A model of one product, `rows[t, k] x matrix[v, k]^T -> product[t, v]`. Declare its
    matrix."""
    writer = OnnxWriter()
    writer.input(rows, ["t", "k"], FLOAT)
    (output,) = writer.node("Gemm", rows, matrix, transB=1)
    return writer.model(output, product, ["t", "v"])


def integer_product_graph() -> bytes:
    """A model of one product of integers, `rows` uint8[t, k] x `matrix` int8[k, v] -> `product`
    int32[t, v]."""
    writer = OnnxWriter()
    rows, matrix = writer.input("rows", ["t", "k"], UINT8), writer.input("matrix", ["k", "v"], INT8)
    (output,) = writer.node("MatMulInteger", rows, matrix)
    return writer.model(output, "product", ["t", "v"], INT32)


def _attribute(name: str, value: Attribute) -> bytes:
    content = nested(1, name.encode())
    if isinstance(value, float):
        return (
            content
            + varint(2 << 3 | 5)
            + np.float32(value).tobytes()
            + _integer(20, _ATTRIBUTE_FLOAT)
        )
    if isinstance(value, int):
        return content + _integer(3, value) + _integer(20, _ATTRIBUTE_INT)
    if isinstance(value, str):
        return content + nested(4, value.encode()) + _integer(20, _ATTRIBUTE_STRING)
    return content + b"".join(_integer(8, item) for item in value) + _integer(20, _ATTRIBUTE_INTS)


def _tensor(name: str, dtype: str, shape: Iterable[int], data: bytes) -> bytes:
    dims = b"".join(_integer(1, dim) for dim in shape)
    return dims + _integer(2, _TYPES[dtype]) + nested(8, name.encode()) + nested(9, data)


def _value(name: str, kind: int, dims: Dims) -> bytes:
    shape = b""
    for dim in dims:
        size = nested(2, dim.encode()) if isinstance(dim, str) else _integer(1, dim)
        shape += nested(1, size)
    return nested(1, name.encode()) + nested(2, nested(1, _integer(1, kind) + nested(2, shape)))


def _integer(field: int, value: int) -> bytes:
    # A negative one takes ten bytes
    return varint(field << 3) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX graph, and the shapes of its missing tensors by the checkpoint's names.

    `held`: checkpoint tensors that the graph contains in another form. `matrices`: the `weights`
    that it only multiplies by, which runtimes pack. `causal`: no token attends to a later one.
    """

    body: bytes
    weights: Mapping[str, tuple[int, ...]]
    held: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    causal: bool = False

    @property
    def onnx(self) -> bytes:
        """The graph for a runtime, with the missing tensors declared."""
        return self.body + declarations(self.weights)

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors. Missing tensors count as float32."""
        return len(self.body) + 4 * sum(map(prod, self.weights.values()))


def graphs_folder() -> Path:
    """The folder of graphs made on this machine."""
    return cache_folder("graphs")


def digest(graph: Graph, folder: Path, facts: bytes) -> str:
    """The hash of the computation, of the weights in `folder` by content, and of `facts` about this
    machine."""
    hasher = sha256(graph.onnx + facts)
    for path in weight_files(folder):
        with path.open("rb") as file:
            hasher.update(hashlib.file_digest(file, "sha256").digest())
    return hasher.hexdigest()[:32]


def made_once(path: Path, kind: type[T], make: Callable[[], T]) -> T:
    """Return the bytes that an earlier start stored, or call `make` and store its result. Raises
    the errors of `make`.

    Bytes in a folder that others may write to are not read.
    """
    try:
        if is_own_alone(path.parent):
            content = memoryview(path.read_bytes())
            if sha256(content[32:]).digest() == content[:32]:
                return msgspec.msgpack.decode(content[32:], type=kind)
            log.warning("%s: damaged, so it is made again", path)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s: not readable, so it is made again: %s", path, error)
    result = make()
    try:
        with written_whole(path) as file:
            encoded = msgspec.msgpack.encode(result)
            file.write(sha256(encoded).digest() + encoded)
    except OSError as error:
        log.warning("%s cannot be kept, so each start makes it again: %s", path, error)
    return result
