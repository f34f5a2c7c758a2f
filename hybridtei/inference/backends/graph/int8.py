"""Matrices in eight bits, and int8 for ONNX Runtime: a quantised graph of a checkpoint, made and
judged once, and kept on this machine.

A product x W^T becomes: round(x * 127 / row maximum of |x|) as bytes, times round(W * m / column
maximum of |W|), times both scales. The largest weight m is 127, or 63 if sums of two products
saturate at 16 bits. Bytes are unsigned with a zero point of 128, since x86 multiplies unsigned by
signed bytes. Query, key and value share the quantised rows.

So each row of activations (a token) and each column of a matrix has its own scale. The runtime's
usual dynamic quantisation has one scale for a whole batch: it is less exact, and a text's vectors
would depend on its neighbours. All other operations stay float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hybridtei.inference.backends.fidelity import Fidelity, Guard, check, compare
from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend
from hybridtei.inference.backends.graph.ops import OnnxOps, family_graph, graph_by
from hybridtei.inference.backends.graph.writer import (
    MICROSOFT,
    Graph,
    digest,
    graphs_folder,
    integer_product_graph,
    made_once,
)
from hybridtei.inference.backends.weights import graph_tensors
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families.ops import Rows, is_adapter
from hybridtei.outputs import Floats

log = logging.getLogger(__name__)

# The scale of a row or a group of zeros
TINY = 1e-30


def int8_family_graph(
    spec: ModelSpec,
    tensors: Mapping[str, Floats],
    max_weight: int = 127,
    *,
    rectangle: bool = False,
) -> Graph:
    """`ops.family_graph` with the matrices of all linear maps in eight bits. `tensors`: the
    checkpoint's, by name."""
    ops = _Int8Ops(spec, tensors, max_weight, rectangle=rectangle)
    graph = graph_by(ops, spec)
    return replace(graph, held=tuple(sorted(ops.held)))


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix float32[v, k] as whole numbers int8[v, k / group, group] and a scale float32[v, k /
    group, 1] for each group.

    `divisor` float32[k]: the matrix was multiplied by it before, and its input is divided by it.
    """

    values: NDArray[np.int8]
    scale: Floats
    divisor: Floats | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def float32(self) -> Floats:
        """The dequantised matrix float32[v, k]."""
        matrix: Floats = np.asarray(self.values * self.scale).reshape(len(self.values), -1)
        return matrix if self.divisor is None else np.asarray(matrix / self.divisor)


def quantized(
    matrix: Floats, group: int, max_weight: int = 127, divisor: Floats | None = None
) -> Int8Matrix:
    """Quantise: each group's largest magnitude becomes `max_weight`. `group` divides the columns.
    `divisor`: as in `Int8Matrix`."""
    if divisor is not None:
        matrix = matrix * divisor
    grouped = matrix.reshape(len(matrix), -1, group)
    largest = np.maximum(np.abs(grouped).max(2, keepdims=True), np.float32(TINY))
    scale = largest / np.float32(max_weight)
    return Int8Matrix(np.round(grouped / scale).astype(np.int8), scale, divisor)


class _Int8Ops(OnnxOps):
    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Floats], max_weight: int, *, rectangle: bool
    ) -> None:
        super().__init__(spec, rectangle=rectangle)
        self.held: list[str] = []
        self._tensors = tensors
        self._max_weight = max_weight

    def linear(self, x: Rows, name: str, width: int, *, bias: bool = True) -> Rows:
        """Products of constants are exact, and computed once, at load. Adapters are small and stay
        float32."""
        if x.is_parameter or is_adapter(name):
            return super().linear(x, name, width, bias=bias)
        rows, size = self._once(("bytes", x.value), lambda: self._rows_in_bytes(x.value))
        matrix = self._tensors[f"{name}.weight"]
        eight = quantized(matrix, matrix.shape[1], self._max_weight)
        self.held.append(f"{name}.weight")
        constant = self.writer.constant
        zero, unit = constant(np.array(128, np.uint8)), self._float(1)
        inputs = (
            rows,
            constant(np.ascontiguousarray(eight.values[:, 0].T)),
            unit,
            constant(eight.scale[:, 0, 0]),
            zero,
        )
        product = self._node(
            "Mul", self._node("MatMulIntegerToFloat", *inputs, domain=MICROSOFT), size
        )
        if bias:
            product = self._node("Add", product, self._weight(f"{name}.bias", (width,)))
        return Rows(product, width)

    def _rows_in_bytes(self, x: str) -> tuple[str, str]:
        """Quantise rows: uint8[t, k], and each row's scale float32[t, 1]."""
        largest = self._node("ReduceMax", self._node("Abs", x), self._list(1), keepdims=1)
        size = self._node(
            "Max", self._node("Mul", largest, self._float(1 / 127)), self._float(TINY)
        )
        zero = self.writer.constant(np.array(128, np.uint8))
        return self._node("QuantizeLinear", self._node("Div", x, size), self._float(1), zero), size


def int8_graph(spec: ModelSpec, weights: Weights) -> Graph:
    """The quantised graph of a checkpoint: from an earlier start, or made and judged now. Raises
    LoadError."""

    def make() -> Graph:
        graph, fidelity = make_int8(spec, weights, Guard())
        log.info("int8 against float32: %s", fidelity)
        return graph

    facts = digest(family_graph(spec), spec.folder, bytes([max_weight()]))
    return made_once(graphs_folder() / f"int8-{facts}.msgpack", Graph, make)


def make_int8(
    spec: ModelSpec, weights: Weights, guard: Guard, *, rectangle: bool = False
) -> tuple[Graph, Fidelity]:
    """Quantise and judge. Raises LoadError with the figures if the graph is too far from
    float32."""
    graph = family_graph(spec)
    tensors = graph_tensors(graph, weights)
    candidate = int8_family_graph(spec, tensors, max_weight())
    # A graph for other readers computes the same, so it need not be judged again
    fidelity = compare(OnnxBackend(spec, graph, weights), OnnxBackend(spec, candidate, weights))
    check(fidelity, guard, spec, "int8 is too far from float32")
    if rectangle:
        candidate = int8_family_graph(spec, tensors, max_weight(), rectangle=True)
    return candidate, fidelity


@cache
def max_weight() -> int:
    """The largest magnitude of a quantised weight on this processor. x86 processors without VNNI
    add pairs of products in 16 bits, where 2 x 255 x 127 would saturate and 2 x 255 x 63 does not.
    """
    # OpenVINO's backend imports this module without ONNX Runtime
    import onnxruntime as ort

    session = ort.InferenceSession(integer_product_graph(), providers=["CPUExecutionProvider"])
    rows, matrix = np.full((8, 64), 255, np.uint8), np.full((64, 64), 127, np.int8)
    (product,) = session.run(None, {"rows": rows, "matrix": matrix})
    exact = rows.astype(np.int32) @ matrix.astype(np.int32)
    return 127 if np.array_equal(product, exact) else 63
