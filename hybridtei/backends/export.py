"""A trunk -> an ONNX graph without weights, refused unless it computes what torch does.

    python -m hybridtei.backends.export FOLDER [--output DIRECTORY]

exports the graph of a model's architecture to where `graphs.find_graph` looks for it.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from torch import Tensor, nn

from hybridtei.backends.graph_names import FREE_SIZES, graph_name
from hybridtei.backends.graphs import Graph, cache_folder
from hybridtei.backends.onnx_backend import OnnxBackend
from hybridtei.backends.torch_backend import TorchBackend
from hybridtei.batch import Encoding, Head, Positions, pack
from hybridtei.checkpoint.files import resolve
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import HybridTeiError, UnsupportedArchitecture
from hybridtei.trunk.rope import forget_lengths

OPSET = 23  # the first with Attention as one operator, which ONNX Runtime and OpenVINO compute as such
BIDIRECTIONAL = frozenset({"bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})  # without windows
TOLERANCE = 1e-4  # of hidden states, relative to the largest
PROBE_LENGTHS = ((3, 17), (40,), (2, 2, 5), (600, 7))  # shapes other than the traced one; longer than the usual windows


class _Rectangle(nn.Module):
    """The trunk as a padded batch sees it: ids and mask in, hidden states out.

    What many families would cut from buffers as long as their table of positions is computed instead: a graph without those
    serves every length of table.
    """

    def __init__(self, trunk: Any, positions: Positions) -> None:
        super().__init__()
        self.trunk = trunk
        accepted = inspect.signature(trunk.forward).parameters
        buffers = {name.rsplit(".", 1)[-1] for name, _ in trunk.named_buffers()}
        self._gives_types = "token_type_ids" in accepted and "token_type_ids" in buffers
        self._everything_sees_everything = trunk.config.model_type in BIDIRECTIONAL
        self._gives_positions = "position_ids" in accepted and "position_ids" in buffers and positions.offset == 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        given = {}
        if token_type_ids is not None or self._gives_types:
            given["token_type_ids"] = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        if self._gives_positions:
            given["position_ids"] = torch.arange(input_ids.shape[1])[None]
        if self._everything_sees_everything:  # transformers would compute the same in twenty operators
            attention_mask = (attention_mask != 0)[:, None, None, :].expand(-1, 1, input_ids.shape[1], -1)
        hidden: Tensor = self.trunk(input_ids=input_ids, attention_mask=attention_mask, **given).last_hidden_state
        return hidden


def export_graph(spec: ModelSpec) -> Graph:
    """Trace, strip and check. Raises UnsupportedArchitecture if torch cannot trace it or ONNX Runtime disagrees with it."""
    from transformers import AutoModel

    spec = replace(spec, tanh_gelu=False)  # a graph has the checkpoint's own; who reads it turns it
    weights = Weights.open(spec.folder)
    try:
        trunk = AutoModel.from_pretrained(spec.folder, local_files_only=True, dtype=torch.float32).eval()
        follows_length = forget_lengths(trunk)
        model = None if follows_length else _trace(spec, trunk)
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


def _trace(spec: ModelSpec, trunk: Any) -> onnx_ir.Model:
    ids = torch.arange(10, dtype=torch.long).reshape(2, 5) % (spec.vocab_size - 8) + 4
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if spec.has_token_types:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    sizes = {0: torch.export.Dim("n"), 1: torch.export.Dim("s")}
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _Rectangle(trunk, spec.positions),
                kwargs=inputs,
                dynamo=True,
                optimize=False,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=["hidden"],
                dynamic_shapes=dict.fromkeys(inputs, sizes),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridtei.backends.export", description=__doc__.split("\n\n")[0] if __doc__ else ""
    )
    parser.add_argument("model", help="a local folder, or a hub id")
    parser.add_argument("--output", type=Path, help="directory to write to [default: the cache of this machine]")
    options = parser.parse_args(argv)
    try:
        spec = read_spec(resolve(options.model), pooling="mean")
        graph = export_graph(spec)
        target = (options.output or cache_folder()) / graph_name(spec)
        graph.write(target)
    except (HybridTeiError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {target.stat().st_size} bytes, {len(graph.weights)} tensors from the checkpoint")
    return 0


if __name__ == "__main__":
    sys.exit(main())
