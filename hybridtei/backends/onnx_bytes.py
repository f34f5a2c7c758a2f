"""Little ONNX models spelled in bytes, and tensors declared to others, so that serving needs no `onnx` package.

Two protobuf messages laid end to end are one message with the fields of both, and lists are joined. So the
tensors that a graph lacks are declared by appending to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FLOAT, UINT8, INT8, INT32 = 1, 2, 3, 6  # TensorProto.DataType
EXTERNAL = 1  # TensorProto.DataLocation


def declarations(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """A ModelProto that holds nothing but float32 initialisers without content, to be appended to another."""
    initializers = b"".join(_bytes(5, _tensor(name, shape)) for name, shape in shapes.items())
    return _bytes(7, initializers) if shapes else b""


def inputs(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The same for tensors that a runtime is to be given at each pass, or that are put in their place before."""
    values = b"".join(_bytes(11, _bytes(1, name.encode()) + _bytes(2, _type(shape))) for name, shape in shapes.items())
    return _bytes(7, values) if shapes else b""


def _type(shape: Iterable[int]) -> bytes:
    dims = b"".join(_bytes(1, _integer(1, dim)) for dim in shape)
    return _bytes(1, _integer(1, FLOAT) + _bytes(2, dims))


def _tensor(name: str, shape: Iterable[int]) -> bytes:
    size = 4
    for dim in shape:
        size *= dim
    entries = {"location": "checkpoint", "offset": "0", "length": str(size)}
    external = b"".join(_bytes(13, _bytes(1, key.encode()) + _bytes(2, text.encode())) for key, text in entries.items())
    dims = b"".join(_integer(1, dim) for dim in shape)
    return dims + _integer(2, FLOAT) + _bytes(8, name.encode()) + external + _integer(14, EXTERNAL)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def product_graph(rows: str, matrix: str, product: str) -> bytes:
    """A model of one product, `rows[t, k] x matrix[v, k]^T -> product[t, v]`, whose matrix is to be declared."""
    transposed = _bytes(1, b"transB") + _integer(3, 1) + _integer(20, 2)  # AttributeProto: name, i, type INT
    node = _bytes(1, rows.encode()) + _bytes(1, matrix.encode()) + _bytes(2, product.encode()) + _bytes(4, b"Gemm")
    ends = _bytes(11, _value(rows, ("t", "k"))) + _bytes(12, _value(product, ("t", "v")))
    return _model(node + _bytes(5, transposed), ends)


def integer_product_graph() -> bytes:
    """A model of one product of integers, `rows` uint8[t, k] x `matrix` int8[k, v] -> `product` int32[t, v]."""
    node = _bytes(1, b"rows") + _bytes(1, b"matrix") + _bytes(2, b"product") + _bytes(4, b"MatMulInteger")
    given = _value("rows", ("t", "k"), UINT8), _value("matrix", ("k", "v"), INT8)
    return _model(node, b"".join(_bytes(11, one) for one in given) + _bytes(12, _value("product", ("t", "v"), INT32)))


def _model(node: bytes, ends: bytes) -> bytes:
    """Of one node: IR version 8, operators 17."""
    graph = _bytes(1, node) + _bytes(2, b"product") + ends
    return _integer(1, 8) + _bytes(8, _bytes(1, b"") + _integer(2, 17)) + _bytes(7, graph)


def _value(name: str, dims: Iterable[str], kind: int = FLOAT) -> bytes:
    """ValueInfoProto of a tensor whose sizes have names."""
    shape = b"".join(_bytes(1, _bytes(2, dim.encode())) for dim in dims)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _integer(1, kind) + _bytes(2, shape)))
