"""A trunk -> an ONNX graph without weights, refused unless it computes what torch does.

    python -m hybridtei.backends.export FOLDER [--output DIRECTORY]

exports the graph of a model's architecture to where `graphs.find_graph` looks for it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from hybridtei.backends.graphs import Graph, cache_folder, graph_name
from hybridtei.backends.onnx_backend import OnnxBackend
from hybridtei.backends.torch_backend import TorchBackend
from hybridtei.batch import Encoding, Head, pack
from hybridtei.checkpoint.files import resolve
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import HybridTeiError, UnsupportedArchitecture
from hybridtei.trunk.rope import forget_lengths

OPSET = 20
TOLERANCE = 1e-4  # of hidden states, relative to the largest
PROBE_LENGTHS = ((3, 17), (40,), (2, 2, 5), (600, 7))  # shapes other than the traced one; longer than the usual windows


class _Rectangle(nn.Module):
    """The trunk as a padded batch sees it: ids and mask in, hidden states out."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden: Tensor = self.trunk(input_ids=input_ids, attention_mask=attention_mask, **types).last_hidden_state
        return hidden


def export_graph(spec: ModelSpec) -> Graph:
    """Trace, strip and check. Raises UnsupportedArchitecture if torch cannot trace it or ONNX Runtime disagrees with it."""
    from transformers import AutoModel

    weights = Weights.open(spec.folder)
    try:
        trunk = AutoModel.from_pretrained(spec.folder, local_files_only=True, dtype=torch.float32).eval()
        follows_length = forget_lengths(trunk)
        model = None if follows_length else _trace(spec, trunk)
    except Exception as error:  # whatever the loader or the tracer meets
        raise UnsupportedArchitecture(f"{spec.folder}: cannot be exported to ONNX: {error}") from error
    if model is None:
        raise UnsupportedArchitecture(f"{spec.folder}: its rotary embedding follows the length; a graph would freeze it")
    graph = _without_weights(model, weights)
    _check_parameters(spec, model, trunk)
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


def _trace(spec: ModelSpec, trunk: Any) -> onnx.ModelProto:
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
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _Rectangle(trunk),
                kwargs=inputs,
                dynamo=True,
                optimize=False,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=["hidden"],
                dynamic_shapes=dict.fromkeys(inputs, sizes),
                verbose=False,
            )
            assert program is not None
            path = Path(folder, "model.onnx")
            program.save(str(path), external_data=False)
            return onnx.load(path)
    finally:
        quiet.setLevel(level)


def _without_weights(model: onnx.ModelProto, weights: Weights) -> Graph:
    """Initialisers that the checkpoint has become empty, under its names; buffers that it does not carry stay."""
    _strip(model)
    wanted: dict[str, tuple[int, ...]] = {}
    for initializer in model.graph.initializer:
        name = initializer.name.removeprefix("trunk.")
        known, shape = weights.find(name), tuple(initializer.dims)
        is_weight = initializer.data_type == onnx.TensorProto.FLOAT  # old checkpoints carry buffers of positions too
        if is_weight and known is not None and weights.shape(known) == shape:
            initializer.name = name
            wanted[name] = shape
            _empty(initializer)
    renames = {f"trunk.{new}": new for new in wanted}
    for node in model.graph.node:
        node.input[:] = [renames.get(name, name) for name in node.input]
    return Graph(model.SerializeToString(), wanted)


def _check_parameters(spec: ModelSpec, model: onnx.ModelProto, trunk: nn.Module) -> None:
    """A weight left in the graph, since transformers renames it as it loads, would be this checkpoint's in every other."""
    parameters = {f"trunk.{name}" for name, _ in trunk.named_parameters(remove_duplicate=False)}
    left = [initializer.name for initializer in model.graph.initializer if initializer.name in parameters]
    if left:
        raise UnsupportedArchitecture(f"{spec.folder}: {len(left)} weights have other names in the checkpoint: {left[:3]}")


def _strip(model: onnx.ModelProto) -> None:
    """Leave out what only readers of a graph want: most of its bytes."""
    model.doc_string = ""
    for part in (model, model.graph, *model.graph.node, *model.graph.initializer):
        del part.metadata_props[:]
    for node in model.graph.node:
        node.name = node.doc_string = ""
    del model.graph.value_info[:]


def _empty(initializer: onnx.TensorProto) -> None:
    size = int(np.prod(initializer.dims)) * 4
    initializer.ClearField("raw_data")
    initializer.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "checkpoint"), ("offset", "0"), ("length", str(size))):
        entry = initializer.external_data.add()
        entry.key, entry.value = key, value


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
