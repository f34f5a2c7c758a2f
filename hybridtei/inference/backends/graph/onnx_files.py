"""A checkpoint's own ONNX files with weights: written by `onnx_export`, or by others.

A checkpoint's graph is not trusted: its inputs and outputs must be a trunk's, and its references to
files must not leave the folder. If the checkpoint also has weights, the graph's result is compared
with theirs.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.contents import GRAPHS
from hybridtei.models.checkpoint.files import inside, require
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats
from hybridtei.system.frames import message_fields

if TYPE_CHECKING:
    import onnxruntime as ort

# Patterns of the names that exporters give, by the precision that runs them. The first one is what
# we export.
_NAMES = {
    "float32": ("model", "model_optimized", "model_O[123]"),
    "int8": ("model_quantized", "model_int8", "model_uint8", "model_qint8*", "model_quint8*"),
}
FILES = {
    dtype: tuple(f"{home}{name}.onnx" for name in names for home in ("onnx/", ""))
    for dtype, names in _NAMES.items()
}
# Beside a graph that we exported, for a head that reads the table
WORDS = "word_embeddings.safetensors"
INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})
NEEDED = frozenset({"input_ids", "attention_mask"})
HIDDEN = ("last_hidden_state", "token_embeddings", "hidden_states", "hidden")

# Fields of ONNX's messages that lead to tensors: message -> field -> inner message.
_PATHS = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}


def find_own_graph(spec: ModelSpec, dtype: str = "float32") -> Path | None:
    """A checkpoint's own ONNX file of its trunk in this precision, or None."""
    return next(_graphs(spec, FILES.get(dtype, ())), None)


def _graphs(spec: ModelSpec, patterns: Sequence[str]) -> Iterator[Path]:
    roots = [spec.folder]
    if spec.folder.name == "0_Transformer":
        roots.append(spec.folder.parent)
    for root in roots:
        for pattern in patterns:
            yield from sorted(root.glob(pattern))


def check_graphs(spec: ModelSpec, backend: str, dtype: str | None) -> None:
    """Raises LoadError, naming the file and the flag, if a folder has only graphs and none runs as
    asked for."""
    graph = find_own_graph(spec, dtype or "float32")
    if graph is not None and backend not in ("auto", "ort"):
        raise LoadError(f"{graph}: a graph without weights beside it, which runs by --backend ort")
    if graph is not None:
        return
    for other in FILES:
        file = find_own_graph(spec, other)
        if file is not None:
            raise LoadError(f"{file}: the only graph here, in {other}: give --dtype {other}")
    file = next(_graphs(spec, GRAPHS), None)
    if file is not None:
        raise LoadError(
            f"{file}: not a graph in float32 or int8 by its name, and there are no weights; "
            "supported: onnx/model.onnx, onnx/model_quantized.onnx, or model.safetensors"
        )


def check_file(path: Path) -> None:
    """Raises LoadError or MissingArtifact if the file is not ONNX, or needs files that are missing
    or outside its folder."""
    require(path)
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            locations = {name.decode() for name in _locations(content, 0, len(content), "model")}
    except (ValueError, IndexError, RecursionError) as error:
        raise LoadError(f"{path}: not readable as ONNX: {error}") from error
    for location in locations:
        require(inside(path.parent, location))


def words_beside(path: Path, spec: ModelSpec) -> Floats | None:
    """The table of word embeddings, if the sparse head reads it. Raises LoadError if it is missing
    or another model's."""
    if not spec.reads_words:
        return None
    file = path.parent / WORDS
    if not file.is_file():
        raise UnsupportedArchitecture(
            f"{path}: the sparse head reads the word embeddings, which need safetensors"
        )
    return Weights.of_file(file).array("words", (spec.vocab_size, spec.hidden_size))


def hidden_output(session: ort.InferenceSession, spec: ModelSpec, path: Path) -> str:
    """The name of the output with a row for each token. Raises UnsupportedArchitecture if the graph
    is not a trunk."""
    inputs = {node.name: node for node in session.get_inputs()}
    if not NEEDED <= set(inputs) <= INPUTS:
        raise UnsupportedArchitecture(
            f"{path}: takes {sorted(inputs)}; supported: {sorted(INPUTS)}, the last one optional"
        )
    for name, node in inputs.items():
        if (
            node.type != "tensor(int64)"
            or len(node.shape) != 2
            or any(isinstance(size, int) for size in node.shape)
        ):
            raise UnsupportedArchitecture(
                f"{path}: `{name}` is {node.type} {node.shape}; supported: int64 of any two sizes"
            )
    candidates = [node.name for node in session.get_outputs() if _is_hidden(node, spec.hidden_size)]
    usual = [name for name in HIDDEN if name in candidates]
    if spec.labels and not candidates:
        raise UnsupportedArchitecture(
            f"{path}: a graph that ends in scores; supported: graphs of hidden states, or the "
            "weights as model.safetensors"
        )
    if not usual and len(candidates) != 1:
        outputs = {node.name: f"{node.type} {node.shape}" for node in session.get_outputs()}
        raise UnsupportedArchitecture(
            f"{path}: no output is float32[n, s, {spec.hidden_size}], or several are: {outputs}"
        )
    return (usual or candidates)[0]


def _is_hidden(node: ort.NodeArg, width: int) -> bool:
    if node.type != "tensor(float)" or len(node.shape) != 3:
        return False
    *free_sizes, last = node.shape
    return not any(isinstance(size, int) for size in free_sizes) and bool(last == width)


def _locations(content: mmap.mmap, start: int, stop: int, message: str) -> Iterator[bytes]:
    """The files that the tensors of a message name as the place of their content."""
    nested_fields = (
        (field, place)
        for field, place in message_fields(content, start, stop)
        if isinstance(place, slice)
    )
    if message == "entry":
        entry = {field: content[place] for field, place in nested_fields}
        if entry.get(1) == b"location":
            yield entry.get(2, b"")
        return
    for field, place in nested_fields:
        inner = _PATHS[message].get(field)
        if inner is not None:
            yield from _locations(content, place.start, place.stop, inner)
