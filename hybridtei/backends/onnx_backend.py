"""ONNX Runtime on the CPU: like lengths in a rectangle, one single-threaded session that all lanes call, heads in numpy.

The graph holds no weights; they come from the checkpoint's safetensors. A session with one intra-op thread runs in its caller's
thread, so lanes share it without a copy and never wait for one another.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from hybridtei.backends import numpy_heads
from hybridtei.backends.graphs import Graph
from hybridtei.batch import Head, PackedBatch, kept_tokens, pad
from hybridtei.checkpoint.layers import dense_layer, lexical_layers, multivector_layer
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import Weights, left_over
from hybridtei.cores import available_cores
from hybridtei.errors import BackendError, LoadError, WeightMismatch
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.ragged import Ragged

BUSY_TOKENS = 512  # of a padded micro-batch: one core gains nothing from more


class OnnxBackend:
    """See `backends.base.Backend`."""

    name = "onnxruntime"
    dtype = "float32"
    padded = True
    busy_tokens = BUSY_TOKENS

    def __init__(self, spec: ModelSpec, graph: Graph, weights: Weights, *, threads: int = 1) -> None:
        """`threads` of one pass; more than one is for a single caller, since such passes do not share the processor well."""
        self.spec = spec
        self.forwards = 0
        self.lanes = max(1, available_cores() // threads)
        self._counting = threading.Lock()
        word_table = _word_table(spec, graph) if spec.sparse is not None and "embedding" in spec.sparse.inputs else None
        tensors = _tensors(graph, weights)
        self._words = None if word_table is None else tensors[word_table]
        self._session, self._values = _session(graph, tensors, weights.folder, threads)
        self._inputs = {node.name for node in self._session.get_inputs()}
        self._dense_layers = [dense_layer(module) for module in spec.dense_modules]
        self._lexical = () if spec.sparse is None else lexical_layers(spec.sparse, spec.hidden_size)
        self._projection = None if spec.multivector is None else multivector_layer(spec.multivector, spec.hidden_size)
        self._special_ids = np.array(sorted(spec.removed_ids), dtype=np.int64)

    def forward(self, batch: PackedBatch) -> HeadOutputs:
        """See `Backend.forward`."""
        try:
            outputs = self._forward(batch)
        except Exception as error:  # the library raises kinds of its own, bare RuntimeErrors among them
            raise BackendError(f"the forward pass failed: {error}") from error
        with self._counting:
            self.forwards += 1
        return outputs

    def enter_lane(self) -> None:
        """The session never starts threads; numpy's products are kept from it too, or lanes would wait for one another."""
        threadpool_limits(limits=1, user_api="blas")

    def close(self) -> None:
        """Give the weights back."""
        del self._session, self._values
        self._words = None

    def _forward(self, batch: PackedBatch) -> HeadOutputs:
        hidden = self._hidden(batch)
        return HeadOutputs(
            dense=self._dense(batch, hidden) if Head.DENSE in batch.heads else None,
            token_weights=self._token_weights(batch, hidden) if Head.SPARSE in batch.heads else None,
            multivector=self._multivector(batch, hidden) if Head.MULTIVECTOR in batch.heads else None,
            tokens=Ragged(hidden, batch.cu_seqlens) if Head.TOKENS in batch.heads else None,
        )

    def _hidden(self, batch: PackedBatch) -> Floats:
        input_ids, mask = pad(batch.input_ids, batch.cu_seqlens, self.spec.padding_id)
        feed: dict[str, NDArray[np.int64]] = {"input_ids": input_ids, "attention_mask": mask.astype(np.int64)}
        if "token_type_ids" in self._inputs:
            types = batch.token_type_ids
            feed["token_type_ids"] = np.zeros_like(input_ids) if types is None else pad(types, batch.cu_seqlens, 0)[0]
        hidden: Floats = self._session.run(["hidden"], feed)[0]
        return np.asarray(hidden[mask])

    def _dense(self, batch: PackedBatch, hidden: Floats) -> Floats:
        return numpy_heads.dense(hidden, batch.cu_seqlens, self.spec.pooling, self._dense_layers)

    def _token_weights(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        assert self.spec.sparse is not None
        sources = {"hidden": hidden}
        if self._words is not None:
            sources["embedding"] = numpy_heads.layer_norm(self._words[batch.input_ids])
        inputs = np.concatenate([sources[name] for name in self.spec.sparse.inputs], axis=1)
        return Ragged(numpy_heads.lexical(inputs, self._lexical), batch.cu_seqlens)

    def _multivector(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        assert self.spec.multivector is not None
        assert self._projection is not None
        kept, offsets = kept_tokens(self.spec.multivector.drop, batch.input_ids, batch.cu_seqlens, self._special_ids)
        return Ragged(numpy_heads.through(hidden[kept], self._projection), offsets)


def _word_table(spec: ModelSpec, graph: Graph) -> str:
    """Name of the one tensor with a row for each word. Raises LoadError if there is not just one of that shape."""
    tables = [name for name, shape in graph.weights.items() if shape == (spec.vocab_size, spec.hidden_size)]
    if len(tables) != 1:
        raise LoadError(f"{spec.folder}: {len(tables)} tensors could be the word embeddings: {tables}")
    return tables[0]


def _session(
    graph: Graph, tensors: Mapping[str, Floats], folder: Path, threads: int
) -> tuple[ort.InferenceSession, list[ort.OrtValue]]:
    """(session, the tensors it reads, which must live as long as it does). Raises LoadError."""
    values = [ort.OrtValue.ortvalue_from_numpy(tensor) for tensor in tensors.values()]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_external_initializers(list(tensors), values)
    try:
        return ort.InferenceSession(graph.onnx, options, providers=["CPUExecutionProvider"]), values
    except Exception as error:  # kinds of the library's own
        raise LoadError(f"{folder}: ONNX Runtime does not take the graph: {error}") from error


def _tensors(graph: Graph, weights: Weights) -> dict[str, Floats]:
    """Each tensor that the graph wants, under its name for it. Raises WeightMismatch."""
    key_of = {name: weights.find(name) for name in graph.weights}
    _check_names(key_of, weights)
    return {name: _tensor(weights, name, key_of[name], shape) for name, shape in graph.weights.items()}


def _check_names(key_of: Mapping[str, str | None], weights: Weights) -> None:
    """All the graph wants lies under one prefix, and nothing of a trunk is left over: else it is another model."""
    shifts = {_shift(name, key) for name, key in key_of.items() if key is not None}
    if len(shifts) > 1:
        raise WeightMismatch(f"{weights.folder}: the weights of the trunk lie under several prefixes: {sorted(shifts)}")
    left = left_over(weights.names() - {key for key in key_of.values() if key is not None})
    if left:
        raise WeightMismatch(f"{weights.folder}: the weights hold what config.json does not: {left[:5]}, {len(left)} in all")


def _shift(name: str, key: str) -> str:
    """What the checkpoint puts before a name, or leaves out before it."""
    return key.removesuffix(name) if key.endswith(name) else "-" + name.removesuffix(key)


def _tensor(weights: Weights, name: str, key: str | None, shape: tuple[int, ...]) -> Floats:
    if key is None:
        raise WeightMismatch(f"{weights.folder}: the weights lack `{name}`, which the graph needs")
    if weights.shape(key) != shape:
        found = list(weights.shape(key))
        raise WeightMismatch(f"{weights.folder}: `{key}` has shape {found}, the graph needs {list(shape)}")
    return weights.float32(key)
