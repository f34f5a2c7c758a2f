"""A family's graph with a checkpoint's weights, as OpenVINO's model: in float32, or with its matrices in eight bits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridtei.inference.backends.graph.int8 import Int8Matrix, quantized
from hybridtei.inference.backends.graph.weights import graph_keys
from hybridtei.inference.backends.graph.writer import Graph, inputs
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families.ops import is_adapter
from hybridtei.outputs import Floats

# Of oneDNN's own kernels, behind those that OpenVINO keeps for each thread: what the latter gives up would stay in memory.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
# Importing openvino tells its makers so, over the network and into the home folder, unless this package is missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None: cannot be imported

import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402

BY_TOKEN = 0  # as a size of group: all numbers of a token, and of a matrix's row
TINY = 1e-30  # a scale of zeros

Tensors = Mapping[str, Floats | Int8Matrix]


@dataclass(frozen=True, slots=True)
class Int8Form:
    """Which matrices are kept in eight bits, and how. `group`: how many numbers of a row share a scale, and of a token.

    OpenVINO finds the scales of groups of a token in its product, and multiplies in vector registers. Those of whole tokens are
    found in the graph, whose other numbers are bfloat16 then, so that the product runs in matrix tiles (AMX).

    `divisors`: of each such matrix float32[v, k], what the channels of its input are divided by and its columns multiplied by,
    float32[k]: products stay the same, and outliers that would decide a scale shrink (SmoothQuant, arXiv:2211.10438). Without
    them, nothing is divided, and all matrices are kept so.
    """

    group: int
    divisors: Mapping[str, Floats] | None = None


def int8_matrices(graph: Graph) -> list[str]:
    """Those that may be in eight bits. Adapters, which are small, stay float32."""
    return [name for name in graph.matrices if not is_adapter(name.removesuffix(".weight"))]


def tensors_of(graph: Graph, weights: Weights, int8: Int8Form | None) -> Tensors:
    """Of the checkpoint; with a form, matrices in eight bits. One matrix at a time is there in float32."""
    keys = graph_keys(graph, weights)
    if int8 is None:
        return {name: weights.float32(key) for name, key in keys.items()}
    divisors = int8.divisors
    eight = frozenset(int8_matrices(graph) if divisors is None else divisors)
    tensors: dict[str, Floats | Int8Matrix] = {}
    for name, key in keys.items():
        tensor = weights.float32(key)
        if name in eight:
            width = tensor.shape[1]
            group = width if not int8.group or width % int8.group else int8.group
            tensors[name] = quantized(tensor, group, divisor=None if divisors is None else divisors[name])
        else:
            tensors[name] = tensor
    return tensors


def declared(core: ov.Core, graph: Graph) -> ov.Model:
    """The graph, of which weights are inputs."""
    return core.read_model(graph.body + inputs(graph.weights))


def shared_inputs(model: ov.Model, matrices: Collection[str]) -> list[tuple[ov.Output, list[str]]]:
    """What products of the batch read, each with the matrices that multiply it; without matrices of several inputs."""
    found: dict[tuple[str, int], tuple[ov.Output, list[str]]] = {}
    for parameter in model.get_parameters():
        products = [reader.get_node() for reader in parameter.output(0).get_target_inputs()]
        read = [product.input_value(0) for product in products if not _is_constant(product)]
        if parameter.get_friendly_name() in matrices and len(read) == 1:
            found.setdefault(_place(read[0]), (read[0], []))[1].append(parameter.get_friendly_name())
    return list(found.values())


def model_of(core: ov.Core, graph: Graph, tensors: Tensors, *, by_token: bool = False) -> ov.Model:
    """The graph with its weights, which stay where they are. `by_token`: see `BY_TOKEN`."""
    model = declared(core, graph)
    give_weights(model, tensors, by_token=by_token)
    return model


def give_weights(model: ov.Model, tensors: Tensors, *, by_token: bool = False) -> None:
    """Replace inputs by constants."""
    products = _Products(by_token=by_token)
    for parameter in model.get_parameters():
        tensor = tensors.get(parameter.get_friendly_name())
        if isinstance(tensor, Int8Matrix):
            products.replace(parameter.output(0), tensor)
        elif tensor is not None:
            parameter.output(0).replace(ops.constant(np.asarray(_Lent(tensor)), shared_memory=True).output(0))
        if tensor is not None:
            model.remove_parameter(parameter)


class _Products:
    """Puts matrices of eight bits into a graph. What several multiply is divided, and made whole numbers, once."""

    def __init__(self, *, by_token: bool) -> None:
        self._by_token = by_token
        self._made: dict[tuple[str, int], Any] = {}

    def replace(self, weight: ov.Output, matrix: Int8Matrix) -> None:
        """Give a matrix to all that read an input."""
        constant = _compressed(matrix)
        for reader in list(weight.get_target_inputs()):
            product = reader.get_node()
            if _is_constant(product):
                reader.replace_source_output(ops.constant(matrix.float32()).output(0))
                continue
            x, place = product.input_value(0), _place(product.input_value(0))
            if self._by_token:
                rows, scale = self._once(place, partial(_whole_tokens, x, matrix))
                product.output(0).replace(ops.multiply(ops.matmul(rows, constant, False, True), scale).output(0))
            else:
                product.input(0).replace_source_output(self._once(place, partial(_divided, x, matrix)))
                reader.replace_source_output(constant.output(0))

    def _once(self, place: tuple[str, int], make: Callable[[], Any]) -> Any:
        if place not in self._made:
            self._made[place] = make()
        return self._made[place]


def _place(output: ov.Output) -> tuple[str, int]:
    return output.get_node().get_friendly_name(), output.get_index()


def _is_constant(product: ov.Node) -> bool:
    """Whether it is of two matrices, and computed at load."""
    return bool(product.get_output_partial_shape(0).is_static)


def _divided(x: ov.Output, matrix: Int8Matrix) -> ov.Output:
    if matrix.divisor is None:
        return x
    return ops.multiply(x, ops.constant(1 / matrix.divisor[None])).output(0)


def _whole_tokens(x: ov.Output, matrix: Int8Matrix) -> tuple[ov.Node, ov.Node]:
    """Whole numbers float32[t, k] that become bytes in a product, and the scale of each token float32[t, 1]."""
    x = _divided(x, matrix)
    last, one = ops.constant(np.array([-1])), partial(ops.constant, dtype=np.float32)
    largest = ops.maximum(ops.reduce_max(x, last, True), ops.negative(ops.reduce_min(x, last, True)))
    scale = ops.add(ops.multiply(largest, one(1 / 127)), one(TINY))
    bounds = one(-128), one(127)
    return ops.fake_quantize(ops.divide(x, scale), *bounds, *bounds, 256), scale


def _compressed(matrix: Int8Matrix) -> ov.Node:
    """The matrix float32[v, k] in the form that OpenVINO knows, and keeps in eight bits."""
    rows, groups, group = matrix.values.shape
    if groups == 1:
        return ops.multiply(ops.convert(ops.constant(matrix.values[:, 0]), "f32"), ops.constant(matrix.scale[:, 0]))
    grouped = ops.multiply(ops.convert(ops.constant(matrix.values), "f32"), ops.constant(matrix.scale))
    return ops.reshape(grouped, ops.constant(np.array([rows, groups * group])), False)


class _Lent:
    """An array's memory as if it could be written: OpenVINO takes no other by reference, though it writes into no constant."""

    def __init__(self, array: Floats) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
