"""The matrices of a graph in eight bits. Needs the `onnx` package, unlike serving what comes out.

A product x W^T becomes: round(x * 127 / row maximum of |x|) as bytes, times round(W * m / column maximum of |W|), times both
scales, where m is the largest weight: 127, or 63 where sums of two products saturate at 16 bits. Bytes are unsigned with a zero
point of 128, since x86 multiplies unsigned by signed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from hybridtei.backends.graphs import Graph
from hybridtei.outputs import Floats

DOMAIN = "com.microsoft"
AXIS, TINY, STEP, ONE, ZERO = (f"int8.{name}" for name in ("axis", "tiny", "step", "one", "zero"))


def quantised(graph: Graph, tensors: Mapping[str, Floats], max_weight: int = 127) -> Graph:
    """The same graph, holding in eight bits every matrix that a product alone reads. `tensors`: the checkpoint's, by name."""
    model = onnx.load_from_string(graph.body)
    products = _products(model.graph, tensors)
    if not products:
        return graph
    constants: dict[str, NDArray[Any]] = {
        AXIS: np.array([1], np.int64),
        TINY: np.array(1e-30, np.float32),
        STEP: np.array(1 / 127, np.float32),
        ONE: np.array(1, np.float32),
        ZERO: np.array(128, np.uint8),
    }
    nodes, ready = list[onnx.NodeProto](), set[str]()
    for node in model.graph.node:
        name = products.get(node.output[0])
        if name is None:
            nodes.append(node)
            continue
        x, matrix = node.input[0], tensors[name]
        if x not in ready:  # query, key and value read the same rows
            ready.add(x)
            nodes.extend(_rows_in_bytes(x))
            constants[f"{x}.rows"] = np.array([-1, matrix.shape[1]], np.int64)
        constants |= _matrix_in_bytes(name, matrix, max_weight)
        nodes.extend(_product(x, name, node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(_read(nodes, [output.name for output in model.graph.output]))
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    if not any(entry.domain == DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    held = tuple(sorted(set(products.values())))
    wanted = {name: shape for name, shape in graph.weights.items() if name not in held}
    return Graph(model.SerializeToString(), wanted, graph.free, held)


def _products(graph: onnx.GraphProto, tensors: Mapping[str, Floats]) -> dict[str, str]:
    """Output of a product -> the matrix [out, in] whose transpose it multiplies by, where nothing else reads that."""
    maker = {output: node for node in graph.node for output in node.output}
    found = dict[str, str]()
    for node in graph.node:
        turned = maker.get(node.input[1]) if node.op_type == "MatMul" else None
        if turned is not None and turned.op_type == "Transpose" and _is_matrix(tensors, turned.input[0]):
            found[node.output[0]] = turned.input[0]
    read = [name for node in graph.node for name in node.input if node.op_type != "Transpose"]
    return {output: name for output, name in found.items() if name not in read}


def _is_matrix(tensors: Mapping[str, Floats], name: str) -> bool:
    return name in tensors and tensors[name].ndim == 2


def _rows_in_bytes(x: str) -> Iterator[onnx.NodeProto]:
    """`x.int8` uint8[t, k] and `x.scale` float32[t, 1]; `x.outer` is what a product's result has before its last dimension."""
    make = helper.make_node
    yield make("Reshape", [x, f"{x}.rows"], [f"{x}.flat"])
    yield make("Abs", [f"{x}.flat"], [f"{x}.abs"])
    yield make("ReduceMax", [f"{x}.abs", AXIS], [f"{x}.max"], keepdims=1)
    yield make("Mul", [f"{x}.max", STEP], [f"{x}.step"])
    yield make("Max", [f"{x}.step", TINY], [f"{x}.scale"])
    yield make("Div", [f"{x}.flat", f"{x}.scale"], [f"{x}.scaled"])
    yield make("QuantizeLinear", [f"{x}.scaled", ONE, ZERO], [f"{x}.int8"])
    yield make("Shape", [x], [f"{x}.outer"], start=0, end=-1)


def _matrix_in_bytes(name: str, matrix: Floats, max_weight: int) -> dict[str, NDArray[Any]]:
    """int8[in, out] and the scale of each column."""
    scale = np.maximum(np.abs(matrix).max(1), np.float32(1e-30)) / np.float32(max_weight)
    values = np.round(matrix / scale[:, None]).astype(np.int8)
    width = np.array([len(matrix)], np.int64)
    return {f"{name}.int8": np.ascontiguousarray(values.T), f"{name}.scale": scale, f"{name}.width": width}


def _product(x: str, name: str, output: str) -> Iterator[onnx.NodeProto]:
    make = helper.make_node
    inputs = [f"{x}.int8", f"{name}.int8", ONE, f"{name}.scale", ZERO]
    yield make("MatMulIntegerToFloat", inputs, [f"{output}.bytes"], domain=DOMAIN)
    yield make("Mul", [f"{output}.bytes", f"{x}.scale"], [f"{output}.flat"])
    yield make("Concat", [f"{x}.outer", f"{name}.width"], [f"{output}.shape"], axis=0)
    yield make("Reshape", [f"{output}.flat", f"{output}.shape"], [output])


def _read(nodes: list[onnx.NodeProto], outputs: list[str]) -> list[onnx.NodeProto]:
    """Those that something reads: the transposes of matrices that are bytes now would look for them."""
    wanted, kept = set(outputs), list[onnx.NodeProto]()
    for node in reversed(nodes):
        if wanted & set(node.output):
            wanted.update(node.input)
            kept.append(node)
    return kept[::-1]
