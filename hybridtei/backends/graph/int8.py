"""int8 for ONNX Runtime: a checkpoint's graph with its matrices in eight bits, made once, judged, and kept on this machine.

Each row of activations has a scale of its own (a row is a token), each column of a matrix too. The runtime's usual dynamic
quantisation takes one scale for a whole batch: a text's vectors would depend on its neighbours, and it is further off. What
is not a product stays float32 and comes from the checkpoint.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import onnxruntime as ort

from hybridtei.backends.fidelity import Fidelity, Guard, check, compare
from hybridtei.backends.graph.graphs import Graph, digest, graphs_folder
from hybridtei.backends.graph.onnx_backend import OnnxBackend
from hybridtei.backends.graph.ops import family_graph
from hybridtei.backends.graph.quantize import int8_family_graph
from hybridtei.backends.graph.weights import graph_tensors
from hybridtei.backends.graph.writer import integer_product_graph
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights

log = logging.getLogger(__name__)


def int8_graph(spec: ModelSpec, weights: Weights, guard: Guard | None = None) -> Graph:
    """The quantised graph of a checkpoint: kept from an earlier start, or made and judged now. Raises LoadError."""
    graph = family_graph(spec)
    path = graphs_folder() / f"int8-{digest(graph, spec.folder, bytes([max_weight()]))}.zip"
    if guard is None and path.is_file():  # it passed the usual guard then
        return Graph.read(path)
    made, fidelity = make_int8(spec, weights, guard or Guard())
    log.info("int8 against float32: %s", fidelity)
    try:
        made.write(path)
    except OSError as error:
        log.warning("the int8 graph cannot be kept, each start will make it again: %s", error)
    return made


def make_int8(spec: ModelSpec, weights: Weights, guard: Guard, *, rectangle: bool = False) -> tuple[Graph, Fidelity]:
    """Quantise and judge. Raises LoadError with the figures if it is too far off."""
    graph = family_graph(spec)
    tensors = graph_tensors(graph, weights)
    made = int8_family_graph(spec, tensors, max_weight())
    fidelity = compare(OnnxBackend(spec, graph, weights), OnnxBackend(spec, made, weights))
    check(fidelity, guard, spec, "int8 is too far from float32")
    return int8_family_graph(spec, tensors, max_weight(), rectangle=True) if rectangle else made, fidelity


@cache
def max_weight() -> int:
    """The largest magnitude that a quantised weight may have here.

    x86 processors without VNNI add pairs of products in 16 bits and saturate: 2 x 255 x 127 does not fit, 2 x 255 x 63 does.
    """
    session = ort.InferenceSession(integer_product_graph(), providers=["CPUExecutionProvider"])
    rows, matrix = np.full((8, 64), 255, np.uint8), np.full((64, 64), 127, np.int8)
    (product,) = session.run(None, {"rows": rows, "matrix": matrix})
    exact = rows.astype(np.int32) @ matrix.astype(np.int32)
    return 127 if np.array_equal(product, exact) else 63
