"""A family's graph with a checkpoint's weights, as OpenVINO's model: in float32, or with its matrices in eight bits."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import numpy as np

from hybridtei.backends.graph.int8 import Int8Matrix, quantized
from hybridtei.backends.graph.weights import graph_keys
from hybridtei.backends.graph.writer import Graph, inputs
from hybridtei.checkpoint.weights import Weights
from hybridtei.families.ops import is_adapter
from hybridtei.outputs import Floats

# Of oneDNN's own kernels, behind those that OpenVINO keeps for each thread: what the latter gives up would stay in memory.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
# Importing openvino tells its makers so, over the network and into the home folder, unless this package is missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None: cannot be imported

import openvino as ov  # noqa: E402

Tensors = Mapping[str, Floats | Int8Matrix]


def tensors_of(graph: Graph, weights: Weights, group: int | None) -> Tensors:
    """Of the checkpoint; with a `group`, matrices in eight bits. One matrix at a time is there in float32. Adapters, which are
    small, stay so."""
    keys = graph_keys(graph, weights)
    eight = frozenset[str]() if group is None else frozenset(name for name in graph.matrices if not _of_adapter(name))
    tensors: dict[str, Floats | Int8Matrix] = {}
    for name, key in keys.items():
        tensor = weights.float32(key)
        if name in eight:
            assert group is not None
            width = tensor.shape[1]
            tensors[name] = quantized(tensor, width if width % group else group)
        else:
            tensors[name] = tensor
    return tensors


def _of_adapter(name: str) -> bool:
    return is_adapter(name.removesuffix(".weight"))


def model_of(core: ov.Core, graph: Graph, tensors: Tensors) -> ov.Model:
    """The graph with its weights, which stay where they are: declared as inputs, then replaced by constants."""
    model = core.read_model(graph.body + inputs(graph.weights))
    for parameter in model.get_parameters():
        name = parameter.get_friendly_name()
        if name in tensors:
            _replace(parameter.output(0), tensors[name])
            model.remove_parameter(parameter)
    return model


def _replace(output: ov.Output, tensor: Floats | Int8Matrix) -> None:
    """Give a constant to all that read an input."""
    if not isinstance(tensor, Int8Matrix):
        output.replace(ov.opset13.constant(np.asarray(_Lent(tensor)), shared_memory=True).output(0))
        return
    for reader in list(output.get_target_inputs()):
        if reader.get_node().get_output_partial_shape(0).is_static:  # a product of two matrices, that is computed at load
            reader.replace_source_output(ov.opset13.constant(tensor.float32()).output(0))
    output.replace(_compressed(tensor).output(0))


def _compressed(matrix: Int8Matrix) -> ov.Node:
    """The matrix float32[v, k] in the form that OpenVINO knows, and keeps in eight bits."""
    ops, (rows, groups, group) = ov.opset13, matrix.values.shape
    if groups == 1:
        return ops.multiply(ops.convert(ops.constant(matrix.values[:, 0]), "f32"), ops.constant(matrix.scale[:, 0]))
    grouped = ops.multiply(ops.convert(ops.constant(matrix.values), "f32"), ops.constant(matrix.scale))
    return ops.reshape(grouped, ops.constant(np.array([rows, groups * group])), False)


class _Lent:
    """An array's memory as if it could be written: OpenVINO takes no other by reference, though it writes into no constant."""

    def __init__(self, array: Floats) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
