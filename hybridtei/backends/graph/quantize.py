"""Matrices in eight bits, and graphs that hold them so, for ONNX Runtime.

A product x W^T becomes: round(x * 127 / row maximum of |x|) as bytes, times round(W * m / column maximum of |W|), times both
scales, where m is the largest weight: 127, or 63 where sums of two products saturate at 16 bits. Bytes are unsigned with a zero
point of 128, since x86 multiplies unsigned by signed ones. Rows that are quantised once serve query, key and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridtei.backends.graph.graphs import Graph
from hybridtei.backends.graph.ops import OnnxOps, graph_by
from hybridtei.backends.graph.writer import MICROSOFT
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.families.adapters import is_adapter
from hybridtei.families.ops import Rows
from hybridtei.outputs import Floats

TINY = 1e-30  # of a row or a group that is zero


def int8_family_graph(
    spec: ModelSpec, tensors: Mapping[str, Floats], max_weight: int = 127, *, rectangle: bool = False
) -> Graph:
    """As `ops.family_graph`, holding in eight bits every matrix of a linear map. `tensors`: the checkpoint's, by name."""
    ops = _Int8Ops(spec, tensors, max_weight, rectangle=rectangle)
    graph = graph_by(ops, spec)
    return replace(graph, held=tuple(sorted(ops.held)))


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix float32[v, k] as whole numbers int8[v, k / group, group] and a scale float32[v, k / group, 1] of each group."""

    values: NDArray[np.int8]
    scale: Floats

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    def float32(self) -> Floats:
        """What it stands for: float32[v, k]."""
        return np.asarray(self.values * self.scale).reshape(len(self.values), -1)


def quantized(matrix: Floats, group: int, max_weight: int = 127) -> Int8Matrix:
    """The largest magnitude of each group becomes `max_weight`. `group` divides the columns."""
    grouped = matrix.reshape(len(matrix), -1, group)
    scale = np.maximum(np.abs(grouped).max(2, keepdims=True), np.float32(TINY)) / np.float32(max_weight)
    return Int8Matrix(np.round(grouped / scale).astype(np.int8), scale)


class _Int8Ops(OnnxOps):
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Floats], max_weight: int, *, rectangle: bool) -> None:
        super().__init__(spec, rectangle=rectangle)
        self.held: list[str] = []
        self._tensors = tensors
        self._max_weight = max_weight

    def linear(self, x: Rows, name: str, width: int, *, bias: bool = True) -> Rows:
        """See `Ops.linear`. What is a constant is multiplied once, at load: exactly. Adapters are small, and stay float32."""
        if x.is_parameter or is_adapter(name):
            return super().linear(x, name, width, bias=bias)
        rows, size = self._once(("bytes", x.value), lambda: self._rows_in_bytes(x.value))
        matrix = self._tensors[f"{name}.weight"]
        eight = quantized(matrix, matrix.shape[1], self._max_weight)
        self.held.append(f"{name}.weight")
        constant = self.writer.constant
        zero, one = constant(np.array(128, np.uint8)), self._float(1)
        inputs = rows, constant(np.ascontiguousarray(eight.values[:, 0].T)), one, constant(eight.scale[:, 0, 0]), zero
        product = self._node("Mul", self._node("MatMulIntegerToFloat", *inputs, domain=MICROSOFT), size)
        if bias:
            product = self._node("Add", product, self._weight(f"{name}.bias", (width,)))
        return Rows(product, width)

    def _rows_in_bytes(self, x: str) -> tuple[str, str]:
        """uint8[t, k], and the scale of each row float32[t, 1]."""
        largest = self._node("ReduceMax", self._node("Abs", x), self._list(1), keepdims=1)
        size = self._node("Max", self._node("Mul", largest, self._float(1 / 127)), self._float(TINY))
        zero = self.writer.constant(np.array(128, np.uint8))
        return self._node("QuantizeLinear", self._node("Div", x, size), self._float(1), zero), size
