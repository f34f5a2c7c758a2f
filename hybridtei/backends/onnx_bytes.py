"""Little ONNX models spelled in bytes, and tensors declared to others, so that serving needs no `onnx` package.

Two protobuf messages laid end to end are one message with the fields of both, and lists are joined. So the
tensors that a graph lacks are declared by appending to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybridtei.system.frames import nested, varint

FLOAT, UINT8, INT8, INT32 = 1, 2, 3, 6  # TensorProto.DataType
EXTERNAL = 1  # TensorProto.DataLocation


def declarations(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """A ModelProto that holds nothing but float32 initialisers without content, to be appended to another."""
    initializers = b"".join(nested(5, _tensor(name, shape)) for name, shape in shapes.items())
    return nested(7, initializers) if shapes else b""


def inputs(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The same for tensors that a runtime is to be given at each pass, or that are put in their place before."""
    values = b"".join(nested(11, nested(1, name.encode()) + nested(2, _type(shape))) for name, shape in shapes.items())
    return nested(7, values) if shapes else b""


def _type(shape: Iterable[int]) -> bytes:
    dims = b"".join(nested(1, _integer(1, dim)) for dim in shape)
    return nested(1, _integer(1, FLOAT) + nested(2, dims))


def _tensor(name: str, shape: Iterable[int]) -> bytes:
    size = 4
    for dim in shape:
        size *= dim
    entries = {"location": "checkpoint", "offset": "0", "length": str(size)}
    external = b"".join(nested(13, nested(1, key.encode()) + nested(2, text.encode())) for key, text in entries.items())
    dims = b"".join(_integer(1, dim) for dim in shape)
    return dims + _integer(2, FLOAT) + nested(8, name.encode()) + external + _integer(14, EXTERNAL)


def _integer(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def product_graph(rows: str, matrix: str, product: str) -> bytes:
    """A model of one product, `rows[t, k] x matrix[v, k]^T -> product[t, v]`, whose matrix is to be declared."""
    transposed = nested(1, b"transB") + _integer(3, 1) + _integer(20, 2)  # AttributeProto: name, i, type INT
    node = nested(1, rows.encode()) + nested(1, matrix.encode()) + nested(2, product.encode()) + nested(4, b"Gemm")
    ends = nested(11, _value(rows, ("t", "k"))) + nested(12, _value(product, ("t", "v")))
    return _model(node + nested(5, transposed), ends)


def integer_product_graph() -> bytes:
    """A model of one product of integers, `rows` uint8[t, k] x `matrix` int8[k, v] -> `product` int32[t, v]."""
    node = nested(1, b"rows") + nested(1, b"matrix") + nested(2, b"product") + nested(4, b"MatMulInteger")
    given = _value("rows", ("t", "k"), UINT8), _value("matrix", ("k", "v"), INT8)
    return _model(node, b"".join(nested(11, one) for one in given) + nested(12, _value("product", ("t", "v"), INT32)))


def _model(node: bytes, ends: bytes) -> bytes:
    """Of one node: IR version 8, operators 17."""
    graph = nested(1, node) + nested(2, b"product") + ends
    return _integer(1, 8) + nested(8, nested(1, b"") + _integer(2, 17)) + nested(7, graph)


def _value(name: str, dims: Iterable[str], kind: int = FLOAT) -> bytes:
    """ValueInfoProto of a tensor whose sizes have names."""
    shape = b"".join(nested(1, nested(2, dim.encode())) for dim in dims)
    return nested(1, name.encode()) + nested(2, nested(1, _integer(1, kind) + nested(2, shape)))
