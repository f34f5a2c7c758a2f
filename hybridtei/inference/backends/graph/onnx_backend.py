"""ONNX Runtime on the CPU: one single-threaded session that all lanes call, heads in numpy.

The graph has no weights; they come from the checkpoint, packed once in a file that sessions map. A session with one intra-op
thread runs in its caller's thread, so lanes share it without a copy, do not wait for each other, and keep their priority. A
short text alone runs in a second session over all cores, in little more than half the time, or in a third session with the same
weights, whose graph is for one text: it gathers nothing, and includes the mean or first row. All sessions give the same bits;
the first replaces the others until they are open.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

import numpy as np

from hybridtei.batch import Encoding, Head, PackedBatch, Padding, pack
from hybridtei.errors import BackendError, UnsupportedArchitecture
from hybridtei.inference.backends.base import busy_tokens, made_up
from hybridtei.inference.backends.graph.host import (
    Feed,
    HostBackend,
    HostHeads,
    MlmHead,
    end_to_end,
    ids_of,
    in_rectangle,
    padding_of,
)
from hybridtei.inference.backends.graph.onnx_files import check_file, hidden_output, words_beside
from hybridtei.inference.backends.graph.onnx_session import Opening, Session, open_file, open_sessions, there
from hybridtei.inference.backends.graph.ops import POOLED, family_graph
from hybridtei.inference.backends.graph.writer import Graph
from hybridtei.inference.backends.weights import graph_tensors, word_table
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.system.machine import LaneKind, available_cores, both_lanes

POOLED_HEADS = frozenset({Head.DENSE})


class OnnxBackend(HostBackend):
    """ONNX Runtime's `Backend`."""

    name = "ort"

    def __init__(self, spec: ModelSpec, graph: Graph, weights: Weights, *, threads: int = 1, cache_gb: float = 0) -> None:
        """`threads`: of one pass; above 1 for a single caller, since several multi-threaded passes slow each other down.
        `cache_gb`: as for `packed_file.packed`."""
        self.shares_prefixes = graph.causal
        words = word_table(spec, graph.weights)
        tensors = graph_tensors(graph, weights)
        table = None if words is None else tensors[words]
        self._start(spec, "int8" if graph.held else "float32", threads)
        alone = None if graph.held else family_graph(spec, alone=True)
        counts = self._counts()
        self._open(open_sessions(graph, tensors, weights, counts, cache_gb=cache_gb, alone=alone), len(counts))
        mlm = None
        if spec.is_splade and table is not None:
            mlm = MlmHead(spec, weights, table, threads=threads, cache_gb=cache_gb)
        weights.release()
        self._heads = HostHeads(spec, table, mlm)

    @classmethod
    def from_file(cls, spec: ModelSpec, path: Path, *, dtype: str = "float32", threads: int = 1) -> OnnxBackend:
        """Open a checkpoint's own ONNX file of its trunk, weights included. Raises LoadError and its subclasses."""
        if spec.is_splade:
            raise UnsupportedArchitecture(f"{path}: a SPLADE model's head is read from safetensors")
        check_file(path)
        words = words_beside(path, spec)
        backend = cls.__new__(cls)
        backend._start(spec, dtype, threads)
        sessions = open_file(path, spec.folder, backend._counts())
        backend._open(sessions, len(sessions))
        backend._output = hidden_output(backend._session.inner, spec, path)
        backend._heads = HostHeads(spec, words)
        backend._probe(path)
        return backend

    def _start(self, spec: ModelSpec, dtype: str, threads: int) -> None:
        super().__init__(spec)
        self.dtype = dtype
        # In mixed traffic MiniLM reaches 1.08 to 1.10 times the rate that it has with 512 (Xeon with AMX, 2 MB of L2 a core).
        self.busy_tokens = busy_tokens(spec.hidden_size, threads, most=256)
        self.lanes = both_lanes(available_cores()) if threads == 1 else (LaneKind.BULK,)
        self._threads = threads
        self._output = "hidden"

    def _counts(self) -> list[int]:
        """The threads of each session: of the lanes' session, and of a session over all cores if that has more threads."""
        return [self._threads, *([available_cores()] if self._threads < available_cores() else [])]

    def _open(self, openings: Sequence[Opening], general: int) -> None:
        """`general`: the number of sessions for any batch. A further session takes single texts."""
        first = there(openings[0])
        assert first is not None
        self._session, self._openings, self._general = first, openings, general
        self._inputs = self._session.inputs
        self.padding = padding_of(self._inputs)

    @property
    def _all_cores(self) -> Session:
        return there(self._openings[self._general - 1]) or self._session

    @property
    def _alone(self) -> Session | None:
        return there(self._openings[self._general]) if len(self._openings) > self._general else None

    def free_unused(self) -> None:
        batch = made_up(self.spec, [1])
        for use_all_cores, session in ((False, self._session), (True, self._all_cores)):
            if session.holds:
                self._hidden(batch, use_all_cores=use_all_cores, shrink=True)
        alone = self._alone
        if alone is not None and alone.holds:
            alone.run(self._output, ids_of(batch, alone.inputs), shrink=True)

    def _probe(self, path: Path) -> None:
        """Run the graph to check its output's shape and its vocabulary. Raises LoadError."""
        spec = self.spec
        texts = [Encoding(np.arange(size, dtype=np.int64) % spec.vocab_size) for size in (1, min(3, spec.max_input_length))]
        texts[0].input_ids[0] = spec.vocab_size - 1
        try:
            tokens = self.forward(pack(texts, frozenset({Head.TOKENS}), spec.positions)).tokens
        except BackendError as error:
            raise UnsupportedArchitecture(f"{path}: {error}") from error
        assert tokens is not None
        if tokens.values.shape != (sum(map(len, texts)), spec.hidden_size) or not np.isfinite(tokens.values).all():
            raise UnsupportedArchitecture(
                f"{path}: gives states of shape {list(tokens.values.shape)} for {sum(map(len, texts))} tokens"
            )

    def outputs(self, batch: PackedBatch, *, use_all_cores: bool) -> HeadOutputs:
        alone = self._alone if use_all_cores and len(batch) == 1 and batch.unseen is None else None
        if alone is not None:
            return self._of_one(batch, alone)
        return self._heads.outputs(batch, self._hidden(batch, use_all_cores=use_all_cores), use_all_cores=use_all_cores)

    def close(self) -> None:
        """Free the weights."""
        wait(self._openings)
        del self._session, self._openings, self._heads

    def _of_one(self, batch: PackedBatch, session: Session) -> HeadOutputs:
        feed = ids_of(batch, session.inputs)
        if batch.heads == POOLED_HEADS and POOLED in session.outputs:
            return HeadOutputs(dense=session.run(POOLED, feed))
        return self._heads.outputs(batch, session.run(self._output, feed), use_all_cores=True)

    def _hidden(self, batch: PackedBatch, *, use_all_cores: bool, shrink: bool = False) -> Floats:
        session = self._all_cores if use_all_cores else self._session

        def run(feed: Feed) -> Floats:
            return session.run(self._output, feed, shrink=shrink)

        if self.padding is Padding.ATTENTION:
            return end_to_end(batch, self._inputs, run)
        return in_rectangle(batch, self._inputs, self.spec.padding_id, run)
