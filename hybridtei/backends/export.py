"""A trunk -> an ONNX graph without weights, refused unless it computes what torch does.

    hybridtei export MODEL [OUT] --graph-only

exports the graph of a model's architecture to where `graphs.find_graph` looks for it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from torch import nn

from hybridtei.backends.graph_names import FREE_SIZES, graph_name
from hybridtei.backends.graphs import Graph, graphs_folder
from hybridtei.backends.onnx_backend import OnnxBackend
from hybridtei.backends.torch_backend import TorchBackend
from hybridtei.backends.traced import Traced, traced
from hybridtei.batch import Encoding, Head, pack
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import UnsupportedArchitecture
from hybridtei.trunk.rope import forget_lengths

OPSET = 23  # the first with Attention as one operator, which ONNX Runtime and OpenVINO compute as such
TOLERANCE = 1e-4  # of hidden states, relative to the largest
PROBE_LENGTHS = ((3, 17), (40,), (2, 2, 5), (600, 7))  # shapes other than the traced one; longer than the usual windows


def export_graph(spec: ModelSpec, *, rectangle: bool = False) -> Graph:
    """Trace, strip and check. Raises UnsupportedArchitecture if torch cannot trace it or ONNX Runtime disagrees with it.

    `rectangle`: with the inputs that others' ONNX files have, whatever the family allows.
    """
    spec = replace(spec, tanh_gelu=False)  # a graph has the checkpoint's own; who reads it turns it
    weights = Weights.open(spec.folder)
    try:
        module = traced(spec, rectangle=rectangle)
        trunk = module.trunk
        follows_length = forget_lengths(trunk)
        model = None if follows_length else _trace(module)
    except Exception as error:  # whatever the loader or the tracer meets
        raise UnsupportedArchitecture(f"{spec.folder}: cannot be exported to ONNX: {error}") from error
    if model is None:
        raise UnsupportedArchitecture(f"{spec.folder}: its rotary embedding follows the length; a graph would freeze it")
    graph = _without_weights(model, weights, _free_tables(spec, trunk))
    _check_parameters(spec, model, trunk)
    _check_sizes(spec, model)
    check_graph(spec, graph, weights)
    return graph


def check_graph(spec: ModelSpec, graph: Graph, weights: Weights) -> None:
    """Raises UnsupportedArchitecture unless ONNX Runtime gives torch's hidden states on several shapes."""
    ours, theirs = OnnxBackend(spec, graph, weights), TorchBackend(spec)
    random = np.random.default_rng(0)
    for lengths in PROBE_LENGTHS:
        sizes = [min(length, spec.max_input_length) for length in lengths]
        texts = [Encoding(random.integers(spec.positions.offset, spec.vocab_size, size)) for size in sizes]
        batch = pack(texts, frozenset({Head.TOKENS}), spec.positions)
        one, other = (backend.forward(batch).tokens for backend in (ours, theirs))
        assert one is not None
        assert other is not None
        worst = float(np.abs(one.values - other.values).max() / max(1.0, np.abs(other.values).max()))
        if not worst <= TOLERANCE:
            raise UnsupportedArchitecture(f"{spec.folder}: the exported graph differs from torch by {worst:.2g}")


def _trace(module: Traced) -> onnx_ir.Model:
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                kwargs=module.example,
                dynamo=True,
                optimize=False,
                opset_version=OPSET,
                input_names=list(module.example),
                output_names=["hidden"],
                dynamic_shapes=module.sizes,
                verbose=False,
            )
    finally:
        quiet.setLevel(level)
    assert program is not None
    return program.model


def _free_tables(spec: ModelSpec, trunk: Any) -> dict[str, str]:
    """Tensors whose number of rows is a size that the graph is free of -> the size's name in config.json."""
    sizes = FREE_SIZES.get(spec.model_type, frozenset())
    tables = {}
    for name, parameter in trunk.named_parameters(remove_duplicate=False):
        if "vocab_size" in sizes and parameter is trunk.get_input_embeddings().weight:
            tables[name] = "vocab_size"
        if "max_position_embeddings" in sizes and name.endswith("position_embeddings.weight"):
            tables[name] = "max_position_embeddings"
    return tables


def _without_weights(model: onnx_ir.Model, weights: Weights, free: Mapping[str, str]) -> Graph:
    """The graph without what the checkpoint has, which is told under its names; buffers that it does not carry stay."""
    wanted: dict[str, tuple[int, ...]] = {}
    for key, value in list(model.graph.initializers.items()):
        name, tensor = key.removeprefix("trunk."), value.const_value
        assert tensor is not None
        known, shape = weights.find(name), tuple(tensor.shape.numpy())
        is_weight = tensor.dtype == onnx_ir.DataType.FLOAT  # old checkpoints carry buffers of positions too
        if is_weight and known is not None and weights.shape(known) == shape:
            del model.graph.initializers[key]
            value.name = name
            wanted[name] = shape
    proto = onnx_ir.to_proto(model)
    _strip(proto)
    return Graph(proto.SerializeToString(), wanted, {name: size for name, size in free.items() if name in wanted})


def _check_parameters(spec: ModelSpec, model: onnx_ir.Model, trunk: nn.Module) -> None:
    """A weight left in the graph, since transformers renames it as it loads, would be this checkpoint's in every other."""
    parameters = {f"trunk.{name}" for name, _ in trunk.named_parameters(remove_duplicate=False)}
    left = [name for name in model.graph.initializers if name in parameters]
    if left:
        raise UnsupportedArchitecture(f"{spec.folder}: {len(left)} weights have other names in the checkpoint: {left[:3]}")


def _check_sizes(spec: ModelSpec, model: onnx_ir.Model) -> None:
    """A buffer as long as a table would bind the graph to this checkpoint's table."""
    sizes = {spec.config.get(key) for key in FREE_SIZES.get(spec.model_type, ())}
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    bound = [name for name, tensor in tensors.items() if tensor is not None and sizes & set(tensor.shape.numpy())]
    if bound:
        raise UnsupportedArchitecture(f"{spec.folder}: the graph holds tensors as long as a table: {bound[:3]}")


def _strip(model: onnx.ModelProto) -> None:
    """Leave out what only readers of a graph want: most of its bytes. Shapes stay, since without them ONNX Runtime does not
    see that a sum and the normalisation after it may be computed as one."""
    model.doc_string = ""
    for part in (model, model.graph, *model.graph.node, *model.graph.initializer, *model.graph.value_info):
        del part.metadata_props[:]
    for part in (*model.graph.node, *model.graph.value_info):
        part.doc_string = ""
    for node in model.graph.node:
        node.name = ""


def write_graph(spec: ModelSpec, folder: Path | None = None) -> str:
    """Write a model's graph into a folder, by default the cache of this machine; return a line for people. Raises LoadError."""
    graph = export_graph(spec)
    target = (folder or graphs_folder()) / graph_name(spec)
    graph.write(target)
    return f"{target}: {target.stat().st_size} bytes, {len(graph.weights)} tensors from the checkpoint"
