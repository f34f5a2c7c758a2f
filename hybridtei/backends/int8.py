"""int8 for ONNX Runtime: a checkpoint's graph with its matrices in eight bits, made once, judged, and kept on this machine.

Each row of activations has a scale of its own (a row is a token), each column of a matrix too. The runtime's usual dynamic
quantisation takes one scale for a whole batch: a text's vectors would depend on its neighbours, and it is further off. What
is not a product stays float32 and comes from the checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnxruntime as ort

from hybridtei.backends.graph_weights import graph_tensors
from hybridtei.backends.graphs import Graph, graphs_folder
from hybridtei.backends.onnx_backend import OnnxBackend
from hybridtei.backends.onnx_ops import family_graph
from hybridtei.backends.onnx_writer import integer_product_graph
from hybridtei.backends.quantize import int8_family_graph
from hybridtei.backends.sample_texts import SAMPLE
from hybridtei.batch import Encoding, Head, pack
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights, weight_files
from hybridtei.errors import LoadError
from hybridtei.outputs import Floats
from hybridtei.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NEIGHBOURS = 10
SAMPLE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Guard:
    """How close to float32 an approximation must be: cosines of the vectors of sample texts, the worst and on average."""

    worst: float = 0.97
    mean: float = 0.99


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How close it is. `overlap`: share of each text's nearest neighbours among the others that are the same."""

    worst: float
    mean: float
    overlap: float

    def passes(self, guard: Guard) -> bool:
        return self.worst >= guard.worst and self.mean >= guard.mean

    def __str__(self) -> str:
        return f"cosine to float32 {self.worst:.4f} at worst, {self.mean:.4f} on average; {self.overlap:.0%} of neighbours kept"


def int8_graph(spec: ModelSpec, weights: Weights, guard: Guard | None = None) -> Graph:
    """The quantised graph of a checkpoint: kept from an earlier start, or made and judged now. Raises LoadError."""
    graph = family_graph(spec)
    path = graphs_folder() / f"int8-{_digest(spec, graph)}.zip"
    if guard is None and path.is_file():  # it passed the usual guard then
        return Graph.read(path)
    made, fidelity = make_int8(spec, weights, guard or Guard())
    log.info("int8: %s", fidelity)
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
    if not fidelity.passes(guard):
        raise LoadError(
            f"{spec.folder}: int8 is too far from float32 for this model: {fidelity}; "
            f"asked for are {guard.worst} at worst, {guard.mean} on average"
        )
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


def compare(exact: OnnxBackend, approximate: OnnxBackend, texts: Sequence[str] = SAMPLE) -> Fidelity:
    """Vectors of the same texts from two backends of one model."""
    encodings = _encodings(exact.spec, texts)
    ours, theirs = _vectors(approximate, encodings), _vectors(exact, encodings)
    cosines = (ours * theirs).sum(1)
    found, expected = _neighbours(ours), _neighbours(theirs)
    kept = [len(set(one) & set(other)) / len(one) for one, other in zip(found, expected, strict=True)]
    return Fidelity(float(cosines.min()), float(cosines.mean()), float(np.mean(kept)))


def _encodings(spec: ModelSpec, texts: Sequence[str]) -> list[Encoding]:
    tokenizer = Tokenizer.load(spec.folder / "tokenizer.json", has_token_types=spec.has_token_types)
    longest = min(spec.max_input_length, SAMPLE_TOKENS)
    encodings = [tokenizer.cut(raw, longest, "right") for raw in tokenizer.encode(texts)]
    choices = 1 if spec.adapters is None else 1 + len(spec.adapters.names)
    return [replace(encoding, adapter=i % choices) for i, encoding in enumerate(encodings) if len(encoding)]


def _vectors(backend: OnnxBackend, encodings: Sequence[Encoding]) -> Floats:
    """Unit vectors float32[n, d], each text alone."""
    spec = backend.spec
    head = Head.SPARSE if spec.is_splade else Head.DENSE
    outputs = [backend.forward(pack([encoding], frozenset({head}), spec.positions)) for encoding in encodings]
    rows = [one.dense if one.splade is None else one.splade.to_dense() for one in outputs]
    vectors = np.concatenate([row for row in rows if row is not None])
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12)))


def _neighbours(vectors: Floats) -> list[list[int]]:
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    nearest: list[list[int]] = np.argsort(-similarity, axis=1)[:, : min(NEIGHBOURS, len(vectors) - 1)].tolist()
    return nearest


def _digest(spec: ModelSpec, graph: Graph) -> str:
    """Of the computation, of this processor's largest weight, and of the weights by content."""
    digest = hashlib.sha256(graph.onnx + bytes([max_weight()]))
    for path in weight_files(spec.folder):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
