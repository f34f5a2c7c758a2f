"""A family's graph with a checkpoint's weights, as OpenVINO's model: in float32, or with its
matrices in eight bits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridtei.inference.backends.graph.int8 import Int8Matrix, quantized
from hybridtei.inference.backends.graph.ops import MASKED
from hybridtei.inference.backends.graph.writer import Graph, inputs
from hybridtei.inference.backends.weights import graph_keys
from hybridtei.models.checkpoint.sizes import looks_positions_up
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families.ops import is_adapter
from hybridtei.outputs import Floats

# oneDNN has its own cache of kernels, which would keep the kernels that OpenVINO's caches drop.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
# `import openvino` reports its use over the network and writes into the home folder, unless this
# package is missing. None: cannot be imported
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402

# As a group size: all numbers of a token and of a matrix's row
BY_TOKEN = 0
# The scale of zeros
TINY = 1e-30
POSITIONS = "position_ids"
# Rows of a table of positions: 64 MB for heads of 128 numbers.
MAX_POSITIONS = 131_072
# Of a graph that makes its positions: the tokenizer's longest text is no limit of such a model
FEWEST_POSITIONS = 2048

Tensors = Mapping[str, Floats | Int8Matrix]


@dataclass(frozen=True, slots=True)
class Int8Form:
    """The form of matrices in eight bits. `group`: the count of numbers in a row, and in a token,
    that share a scale.

    OpenVINO's product computes the scales of a token's groups, in vector registers. The graph
    computes the scales of whole tokens; the other numbers are bfloat16, so that the product runs in
    AMX tiles.

    `divisors` float32[k] of each matrix float32[v, k]: its input's channels are divided, and its
    columns multiplied by them. The products stay the same, and outliers that would determine a
    scale shrink (SmoothQuant, arXiv:2211.10438). Without divisors all matrices have eight bits.
    """

    group: int
    divisors: Mapping[str, Floats] | None = None


def count_positions(spec: ModelSpec) -> int:
    """The number of position ids: of the checkpoint's table, or of those that the graph makes."""
    table = spec.config.get("max_position_embeddings")
    if isinstance(table, int) and looks_positions_up(spec.config):
        return table
    made = max(spec.max_input_length, FEWEST_POSITIONS) + spec.positions.offset
    return min(made, MAX_POSITIONS)


def int8_matrices(graph: Graph) -> list[str]:
    """The matrices that can have eight bits. Adapters are small and stay float32."""
    return [name for name in graph.matrices if not is_adapter(name.removesuffix(".weight"))]


def tensors_of(graph: Graph, weights: Weights, int8: Int8Form | None) -> Tensors:
    """The checkpoint's tensors; with a form, matrices in eight bits. Only one matrix at a time is
    in memory as float32."""
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
            tensors[name] = quantized(
                tensor, group, divisor=None if divisors is None else divisors[name]
            )
        else:
            tensors[name] = tensor
    return tensors


def declared(core: ov.Core, graph: Graph, positions: int) -> ov.Model:
    """The graph with weights as inputs. `positions`: the number of position ids."""
    model = core.read_model(graph.body + inputs(graph.weights))
    _decompose_attention(model)
    _tabulate_positions(core, model, positions)
    return model


def _decompose_attention(model: ov.Model) -> None:
    """Replace each attention operator by two products with a softmax between them.

    OpenVINO's own decomposition also writes a transposed copy of the keys and replaces NaN in the
    results. Without both, a pass of MiniLM takes 0.92 of the time (bfloat16, Xeon with AMX).
    """
    masks: dict[tuple[str, int], ov.Output] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            queries, keys, values, mask, scale = (node.input_value(place) for place in range(5))
            if _place(mask) not in masks:
                masks[_place(mask)] = _additive_mask(mask)
            scores = ops.add(
                ops.matmul(ops.multiply(queries, scale), keys, False, True), masks[_place(mask)]
            )
            attended = ops.matmul(ops.softmax(scores, -1), values, False, False)
            _without_nan(node).replace(_zero_without_keys(attended, mask))


def _without_nan(attention: ov.Node) -> ov.Output:
    """The output of an attention operator, or of the `Select` after it, which replaces NaN."""
    readers = [reader.get_node() for reader in attention.output(0).get_target_inputs()]
    return next(
        (reader.output(0) for reader in readers if reader.get_type_name() == "Select"),
        attention.output(0),
    )


def _is_of_keys(mask: ov.Output) -> bool:
    """True if all queries of a text attend to the same keys. Each text has one."""
    return bool(mask.get_node().get_type_name() == "Broadcast")


def _additive_mask(mask: ov.Output) -> ov.Output:
    """The mask as numbers: of a boolean mask, 0 for keys to attend to and `MASKED` for others."""
    if mask.get_element_type() != ov.Type.boolean:
        return mask
    # The addition broadcasts too
    if _is_of_keys(mask):
        mask = mask.get_node().input_value(0)
    return ops.select(mask, ops.constant(np.float32(0)), ops.constant(np.float32(MASKED))).output(0)


def _zero_without_keys(attended: ov.Node, mask: ov.Output) -> ov.Output:
    """Attention's output, 0 for queries without any key: a softmax over masked keys alone would
    give their mean.

    Tokens that no token attends to (`Encoding.unseen`) have no key if their window has only such
    tokens.
    """
    if mask.get_element_type() != ov.Type.boolean or _is_of_keys(mask):
        return attended.output(0)
    has_keys = ops.reduce_logical_or(mask, ops.constant(np.array([-1])), True)
    return ops.select(has_keys, attended, ops.constant(np.float32(0))).output(0)


def _tabulate_positions(core: ov.Core, model: ov.Model, positions: int) -> None:
    """Replace what depends on a token's position alone, such as the cosine of its angle, by a table
    of all positions.

    With a hint for bfloat16 OpenVINO would round positions and angles: above 256 a position has no
    bfloat16 of its own. A table is a constant, which stays float32.
    """
    sources: dict[str, frozenset[str]] = {}
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        own = [name] if node.get_type_name() == "Parameter" else []
        before = (value.get_node().get_friendly_name() for value in node.input_values())
        sources[name] = frozenset(own).union(*(sources[other] for other in before))
    for node in model.get_ordered_ops():
        if sources[node.get_friendly_name()] != {POSITIONS} or not node.get_output_size():
            continue
        output = node.output(0)
        readers = [
            reader
            for reader in output.get_target_inputs()
            if sources[reader.get_node().get_friendly_name()] != {POSITIONS}
        ]
        if readers and output.get_element_type() == ov.Type.f32:
            ids = next(
                one for one in model.get_parameters() if one.get_friendly_name() == POSITIONS
            )
            table = _of_positions(core, output, ids, positions)
            row = ops.gather(ops.constant(table), ids, ops.constant(0)).output(0)
            for reader in readers:
                reader.replace_source_output(row)


def _of_positions(core: ov.Core, output: ov.Output, ids: ov.Node, positions: int) -> Floats:
    """The value of an output for each position, in float32."""
    part = ov.Model([output], [ids], "positions")
    compiled = core.compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": ov.Type.f32})
    return np.asarray(compiled([np.arange(positions)])[0])


def shared_inputs(model: ov.Model, matrices: Collection[str]) -> list[tuple[ov.Output, list[str]]]:
    """Inputs of the batch's products, each with its matrices. Matrices with several inputs are left
    out."""
    found: dict[tuple[str, int], tuple[ov.Output, list[str]]] = {}
    for parameter in model.get_parameters():
        products = [reader.get_node() for reader in parameter.output(0).get_target_inputs()]
        read = [product.input_value(0) for product in products if not _is_constant(product)]
        if parameter.get_friendly_name() in matrices and len(read) == 1:
            found.setdefault(_place(read[0]), (read[0], []))[1].append(
                parameter.get_friendly_name()
            )
    return list(found.values())


def model_of(
    core: ov.Core, graph: Graph, tensors: Tensors, positions: int, *, by_token: bool = False
) -> ov.Model:
    """The graph with its weights, which are not copied. `positions`: as for `declared`. `by_token`:
    `BY_TOKEN` is the group size."""
    model = declared(core, graph, positions)
    give_weights(model, tensors, by_token=by_token)
    return model


def give_weights(model: ov.Model, tensors: Tensors, *, by_token: bool = False) -> None:
    """Replace the weight inputs by constants."""
    products = _Products(by_token=by_token)
    for parameter in model.get_parameters():
        tensor = tensors.get(parameter.get_friendly_name())
        if isinstance(tensor, Int8Matrix):
            products.replace(parameter.output(0), tensor)
        elif tensor is not None:
            parameter.output(0).replace(
                ops.constant(np.asarray(_Lent(tensor)), shared_memory=True).output(0)
            )
        if tensor is not None:
            model.remove_parameter(parameter)


class _Products:
    """Puts matrices of eight bits into a graph. An input of several matrices is divided and
    quantised once."""

    def __init__(self, *, by_token: bool) -> None:
        self._by_token = by_token
        self._made: dict[tuple[str, int], Any] = {}

    def replace(self, weight: ov.Output, matrix: Int8Matrix) -> None:
        """Connect a matrix to all readers of an input."""
        constant = _compressed(matrix)
        for reader in list(weight.get_target_inputs()):
            product = reader.get_node()
            if _is_constant(product):
                reader.replace_source_output(ops.constant(matrix.float32()).output(0))
                continue
            x, place = product.input_value(0), _place(product.input_value(0))
            if self._by_token:
                rows, scale = self._once(place, partial(_whole_tokens, x, matrix))
                product.output(0).replace(
                    ops.multiply(ops.matmul(rows, constant, False, True), scale).output(0)
                )
            else:
                product.input(0).replace_source_output(
                    self._once(place, partial(_divided, x, matrix))
                )
                reader.replace_source_output(constant.output(0))

    def _once(self, place: tuple[str, int], make: Callable[[], Any]) -> Any:
        if place not in self._made:
            self._made[place] = make()
        return self._made[place]


def _place(output: ov.Output) -> tuple[str, int]:
    return output.get_node().get_friendly_name(), output.get_index()


def _is_constant(product: ov.Node) -> bool:
    """True if a product is of two matrices, and so computed at load."""
    return bool(product.get_output_partial_shape(0).is_static)


def _divided(x: ov.Output, matrix: Int8Matrix) -> ov.Output:
    if matrix.divisor is None:
        return x
    return ops.multiply(x, ops.constant(1 / matrix.divisor[None])).output(0)


def _whole_tokens(x: ov.Output, matrix: Int8Matrix) -> tuple[ov.Node, ov.Node]:
    """Whole numbers float32[t, k], which a product turns into bytes, and each token's scale
    float32[t, 1]."""
    x = _divided(x, matrix)
    last, one = ops.constant(np.array([-1])), partial(ops.constant, dtype=np.float32)
    largest = ops.maximum(
        ops.reduce_max(x, last, True), ops.negative(ops.reduce_min(x, last, True))
    )
    scale = ops.add(ops.multiply(largest, one(1 / 127)), one(TINY))
    bounds = one(-128), one(127)
    return ops.fake_quantize(ops.divide(x, scale), *bounds, *bounds, 256), scale


def _compressed(matrix: Int8Matrix) -> ov.Node:
    """The matrix float32[v, k] as a pattern that OpenVINO recognises and keeps in eight bits."""
    rows, groups, group = matrix.values.shape
    if groups == 1:
        return ops.multiply(
            ops.convert(ops.constant(matrix.values[:, 0]), "f32"), ops.constant(matrix.scale[:, 0])
        )
    grouped = ops.multiply(
        ops.convert(ops.constant(matrix.values), "f32"), ops.constant(matrix.scale)
    )
    return ops.reshape(grouped, ops.constant(np.array([rows, groups * group])), False)


class _Lent:
    """An array's memory, marked as writable: OpenVINO takes only such memory by reference, though
    it never writes constants."""

    def __init__(self, array: Floats) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
