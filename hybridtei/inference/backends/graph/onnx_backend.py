"""ONNX Runtime on the CPU: one single-threaded session that all lanes call, heads in numpy.

The graph has no weights; they come from the checkpoint, packed once in a file that sessions map. A
session with one intra-op thread runs in its caller's thread, so lanes share it without a copy, do
not wait for each other, and keep their priority. A short text alone runs in a second session over
all cores, in little more than half the time, or in a third session with the same weights, whose
graph is for one text: it gathers nothing, and includes the mean or first row. All sessions give the
same bits.

A model can answer once its first session is open. A thread then opens the others, since each packs
all matrices again to find them in the packed file: 0.2 s at the start of a base-sized model on two
cores, 2 s for one of 0.6B.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Encoding, Head, PackedBatch, Padding, pack
from hybridtei.errors import BackendError, LoadError, UnsupportedArchitecture
from hybridtei.inference.backends.base import HostBackend, busy_tokens, made_up
from hybridtei.inference.backends.graph.host import (
    Feed,
    HostHeads,
    end_to_end,
    in_rectangle,
    padding_of,
)
from hybridtei.inference.backends.graph.onnx_files import check_file, hidden_output, words_beside
from hybridtei.inference.backends.graph.ops import POOLED, family_graph
from hybridtei.inference.backends.graph.packed_file import LEAST_BYTES, SLOWER, packed, parts
from hybridtei.inference.backends.graph.writer import Graph, declarations, product_graph
from hybridtei.inference.backends.heads import Product
from hybridtei.inference.backends.weights import graph_tensors, mlm_layers, word_table
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.system import memory
from hybridtei.system.forks import finish_before_forks, renew_in_children
from hybridtei.system.frames import nested
from hybridtei.system.machine import LaneKind, available_cores, both_lanes, own_processors

log = logging.getLogger(__name__)

# A pass with this option frees the session's memory. Otherwise a session keeps the memory of its
# largest pass. Not used for every pass, because the next pass would spend a tenth of its time on
# new pages. The self-test is a session's first pass.
SHRINKING = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
# The least severe level to log
ERRORS = 3
# Its threads spin only during a pass
ENTRIES = {"session.force_spinning_stop": "1"}


class Places:
    """The processors of a session's threads: one each if their numbers are equal, else any.

    `entries`: the session's configuration for all threads except the caller's.
    """

    def __init__(self, threads: int) -> None:
        own = own_processors()
        self._callers: Sequence[int] = ()
        self.entries: dict[str, str] = {}
        if len(own) == threads > 1:
            self._callers, others = own[:1], own[1:]
            # ONNX Runtime counts processors from 1
            numbers = ";".join(str(number + 1) for number in others)
            self.entries = {"session.intra_op_thread_affinities": numbers}

    def run(self, work: Callable[[], Floats]) -> Floats:
        """Call `work` with the calling thread pinned to its processor, and return the result."""
        if not self._callers:
            return work()
        before = move_to(self._callers)
        try:
            return work()
        finally:
            if before:
                move_to(before)


def move_to(processors: Collection[int]) -> Collection[int]:
    """Pin the calling thread to these processors. Return its earlier ones, or nothing if the system
    refuses."""
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, processors)
    except OSError:
        # A container's processors may change while it runs
        return ()
    return before


class Session:
    """A graph that runs with a fixed number of threads. Several threads may call it at once.
    `inner`: the package's object.
    `inputs`, `outputs`: their names. `holds`: True if it keeps a pass's memory, or has not run
    yet."""

    def __init__(
        self,
        graph: bytes | Path,
        threads: int,
        tensors: Mapping[str, Floats] | None = None,
        *,
        is_packed: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`tensors`: the graph's missing tensors, which are copied. `is_packed`: the graph is
        optimized already. `folder`: of the files named in a graph in bytes. Raises the package's
        exceptions."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = ERRORS
        if is_packed:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._places = Places(threads)
        entries = ENTRIES | self._places.entries
        if folder is not None:
            entries["session.model_external_initializers_file_folder_path"] = str(folder)
        for key, text in entries.items():
            options.add_session_config_entry(key, text)
        if tensors:
            values = [ort.OrtValue.ortvalue_from_numpy(tensor) for tensor in tensors.values()]
            options.add_external_initializers([*tensors], values)
        self._shrinking = ort.RunOptions()
        for key, text in SHRINKING.items():
            self._shrinking.add_run_config_entry(key, text)
        content = str(graph) if isinstance(graph, Path) else graph
        self.inner = ort.InferenceSession(
            content, options, providers=["CPUExecutionProvider"], disabled_optimizers=(SLOWER,)
        )
        self.holds, self._has_run = True, False
        self.inputs = frozenset(node.name for node in self.inner.get_inputs())
        self.outputs = frozenset(node.name for node in self.inner.get_outputs())

    def run(self, output: str, feed: Mapping[str, NDArray[Any]], *, shrink: bool = False) -> Floats:
        """Compute one output, float32. `shrink`: free the passes' memory. Raises the package's
        exceptions."""
        shrink |= not self._has_run
        self.holds, self._has_run = self.holds and not shrink, True
        how = self._shrinking if shrink else None
        result = self._places.run(lambda: self.inner.run([output], dict(feed), how)[0])
        self.holds |= not shrink
        return result


# None: it failed to open, and another session replaces it
Opening = Future[Session | None]


def open_sessions(
    graph: Graph,
    tensors: Mapping[str, Floats],
    weights: Weights,
    threads: Sequence[int],
    *,
    cache_gb: float = 0,
    alone: Graph | None = None,
) -> list[Opening]:
    """A session for each number of threads. Only the first is open on return. `weights`: the
    checkpoint of the tensors.
    `cache_gb`: as for `packed`.

    `alone`: a graph of the same tensors for one text. Its session comes last and has the last
    number of threads. It is left out if it would need a second copy of the tensors. Raises
    LoadError, naming the model's folder.
    """
    try:
        with ExitStack() as stack:
            path = stack.enter_context(packed(graph, tensors, weights, cache_gb))
            if path is not None:
                return _mapped(path, threads, alone, tensors, stack)
            graphs = [(graph, count) for count in threads]
            if alone is not None and graph.nbytes < LEAST_BYTES:
                graphs.append((alone, threads[-1]))
            copied = dict(tensors)
            return [opened(Session(each.onnx, count, copied)) for each, count in graphs]
    except LoadError:
        raise
    except Exception as error:
        # The library's own exceptions
        raise _refused(weights.folder, error) from error


def opened(session: Session) -> Opening:
    """An opening that is done."""
    future = Opening()
    future.set_result(session)
    return future


def session_if_open(opening: Opening) -> Session | None:
    """The session if it is open, else None."""
    return opening.result() if opening.done() else None


def _mapped(
    path: Path,
    threads: Sequence[int],
    alone: Graph | None,
    tensors: Mapping[str, Floats],
    stack: ExitStack,
) -> list[Opening]:
    """Open the sessions of a packed file. `stack` closes the file, which must exist until all
    sessions are open."""
    others: list[Callable[[], Session]] = [
        partial(Session, path, count, is_packed=True) for count in threads[1:]
    ]
    if alone is not None:
        protos = _tensors_beside(path)
        # The optimization has changed these tensors, so the packed file lacks them
        changed = {name: shape for name, shape in alone.weights.items() if name not in protos}
        if 4 * sum(map(prod, changed.values())) < LEAST_BYTES:
            fields = b"".join(protos[name] for name in alone.weights if name in protos)
            content = alone.body + nested(7, fields) + declarations(changed)
            copied = {name: tensors[name] for name in changed}
            others.append(partial(Session, content, threads[-1], copied, folder=path.parent))
    with memory.reused_blocks():
        first = opened(Session(path, threads[0], is_packed=True))
    openings = [Opening() for _ in others]
    for opening in openings:
        finish_before_forks(opening)
    Thread(target=_open, args=(others, openings, stack.pop_all()), name="sessions").start()
    return [first, *openings]


def _open(
    makers: Sequence[Callable[[], Session]], openings: Sequence[Opening], stack: ExitStack
) -> None:
    with stack, memory.reused_blocks():
        for make, opening in zip(makers, openings, strict=True):
            try:
                opening.set_result(make())
            except Exception as error:
                # The library's own exceptions
                log.warning(
                    "a session could not be opened, so the first session does its work: %s", error
                )
                opening.set_result(None)
    memory.trim()


def _tensors_beside(path: Path) -> dict[str, bytes]:
    """By name: the fields of a graph with tensors, or with the places of tensors and packed forms
    in other files."""
    tensors = [tensor for graph in parts(path.read_bytes(), 7) for tensor in parts(graph, 5)]
    return {next(parts(tensor, 8)).decode(): nested(5, tensor) for tensor in tensors}


def open_file(path: Path, folder: Path, threads: Sequence[int]) -> list[Opening]:
    """Open the sessions of an ONNX file with weights. Raises LoadError, naming the model's
    folder."""
    try:
        return [opened(Session(path, count)) for count in threads]
    except Exception as error:
        # The library's own exceptions
        raise _refused(folder, error) from error


def _refused(folder: Path, error: Exception) -> LoadError:
    return LoadError(f"{folder}: ONNX Runtime refuses the graph: {error}")


def thread_counts(threads: int) -> list[int]:
    """The threads of each session: of the lanes' one, and of one over all cores if the lanes' one
    has fewer."""
    cores = available_cores()
    return [threads, cores] if threads < cores else [threads]


class MlmHead:
    """SPLADE's masked-language-model head, and sessions for its product with the word table, nearly
    all of the work.

    For short texts ONNX Runtime computes it two to six times as fast as numpy. It has its own
    session, since a session always computes its whole graph, and other outputs do not need this
    product.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        words: Floats,
        *,
        threads: int = 1,
        cache_gb: float = 0,
    ) -> None:
        self.layers = mlm_layers(spec, weights, words)
        graph = Graph(
            product_graph("rows", "matrix", "logits"), {"matrix": self.layers.table.shape}
        )
        counts = thread_counts(threads)
        self._openings = open_sessions(
            graph, {"matrix": self.layers.table}, weights, counts, cache_gb=cache_gb
        )
        renew_in_children(self)

    def renew(self) -> None:
        """Keep the session that needs no other threads than its caller's: they are the parent's."""
        self._openings = self._openings[:1]

    def product(self, *, use_all_cores: bool) -> Product:
        """A function that multiplies float32[t, h] by the table."""
        session = session_if_open(self._openings[-1 if use_all_cores else 0]) or session_if_open(
            self._openings[0]
        )
        assert session is not None
        return lambda rows: session.run("logits", {"rows": rows})


class OnnxBackend(HostBackend):
    """ONNX Runtime's `Backend`."""

    name = "ort"

    def __init__(
        self,
        spec: ModelSpec,
        graph: Graph,
        weights: Weights,
        *,
        threads: int = 1,
        cache_gb: float = 0,
    ) -> None:
        """`threads`: of one pass; above 1 for a single caller, since several multi-threaded passes
        slow each other down.
        `cache_gb`: as for `packed_file.packed`."""
        self.shares_prefixes = graph.causal
        words = word_table(spec, graph.weights)
        tensors = graph_tensors(graph, weights)
        table = None if words is None else tensors[words]
        self._start(spec, "int8" if graph.held else "float32", threads)
        alone = None if graph.held else family_graph(spec, alone=True)
        self._open(
            open_sessions(graph, tensors, weights, self._counts, cache_gb=cache_gb, alone=alone)
        )
        mlm = None
        if spec.is_splade and table is not None:
            mlm = MlmHead(spec, weights, table, threads=threads, cache_gb=cache_gb)
        weights.release()
        self._heads = HostHeads(spec, table, mlm)

    @classmethod
    def from_file(
        cls, spec: ModelSpec, path: Path, *, dtype: str = "float32", threads: int = 1
    ) -> OnnxBackend:
        """Open a checkpoint's own ONNX file of its trunk, weights included. Raises LoadError and
        its subclasses."""
        if spec.is_splade:
            raise UnsupportedArchitecture(f"{path}: a SPLADE model's head is read from safetensors")
        check_file(path)
        words = words_beside(path, spec)
        backend = cls.__new__(cls)
        backend._start(spec, dtype, threads)
        backend._open(open_file(path, spec.folder, backend._counts))
        backend._output = hidden_output(backend._session.inner, spec, path)
        backend._heads = HostHeads(spec, words)
        backend._probe(path)
        return backend

    def _start(self, spec: ModelSpec, dtype: str, threads: int) -> None:
        super().__init__(spec)
        self.dtype = dtype
        # In mixed traffic MiniLM reaches 1.08 to 1.10 times the rate that it has with 512 (Xeon
        # with AMX, 2 MB of L2 a core).
        self.busy_tokens = busy_tokens(spec.hidden_size, threads, limit=256)
        self.lanes = both_lanes(available_cores()) if threads == 1 else (LaneKind.BULK,)
        # Of the sessions for any batch; a further session takes single texts
        self._counts = thread_counts(threads)
        self._output = "hidden"

    def _open(self, openings: Sequence[Opening]) -> None:
        first = session_if_open(openings[0])
        assert first is not None
        self._session, self._openings, self._inputs = first, openings, first.inputs
        self.padding = padding_of(self._inputs)

    def renew(self) -> None:
        super().renew()
        self._openings, self._counts = self._openings[:1], self._counts[:1]

    @property
    def _all_cores(self) -> Session:
        return session_if_open(self._openings[len(self._counts) - 1]) or self._session

    @property
    def _alone(self) -> Session | None:
        if len(self._openings) > len(self._counts):
            return session_if_open(self._openings[-1])
        return None

    def free_unused(self) -> None:
        batch = made_up(self.spec, [1])
        for use_all_cores, session in ((False, self._session), (True, self._all_cores)):
            if session.holds:
                self._hidden(batch, use_all_cores=use_all_cores, shrink=True)
        alone = self._alone
        if alone is not None and alone.holds:
            alone.run(self._output, batch.feed(alone.inputs), shrink=True)

    def _probe(self, path: Path) -> None:
        """Run the graph to check its output's shape and its vocabulary. Raises LoadError."""
        spec = self.spec
        texts = [
            Encoding(np.arange(size, dtype=np.int64) % spec.vocab_size)
            for size in (1, min(3, spec.max_input_length))
        ]
        texts[0].input_ids[0] = spec.vocab_size - 1
        try:
            tokens = self.forward(pack(texts, frozenset({Head.TOKENS}), spec.positions)).tokens
        except BackendError as error:
            raise UnsupportedArchitecture(f"{path}: {error}") from error
        assert tokens is not None
        if (
            tokens.values.shape != (sum(map(len, texts)), spec.hidden_size)
            or not np.isfinite(tokens.values).all()
        ):
            raise UnsupportedArchitecture(
                f"{path}: gives states of shape {list(tokens.values.shape)} for "
                f"{sum(map(len, texts))} tokens"
            )

    def outputs(self, batch: PackedBatch, *, use_all_cores: bool) -> HeadOutputs:
        alone = None
        if use_all_cores and len(batch) == 1 and batch.unseen is None:
            alone = self._alone
        if alone is None:
            hidden = self._hidden(batch, use_all_cores=use_all_cores)
            return self._heads.outputs(batch, hidden, use_all_cores=use_all_cores)
        feed = batch.feed(alone.inputs)
        if batch.heads == {Head.DENSE} and POOLED in alone.outputs:
            return HeadOutputs(dense=alone.run(POOLED, feed))
        return self._heads.outputs(batch, alone.run(self._output, feed), use_all_cores=True)

    def close(self) -> None:
        """Free the weights."""
        wait(self._openings)
        self._openings = []
        del self._session, self._heads

    def _hidden(self, batch: PackedBatch, *, use_all_cores: bool, shrink: bool = False) -> Floats:
        session = self._all_cores if use_all_cores else self._session

        def run(feed: Feed) -> Floats:
            return session.run(self._output, feed, shrink=shrink)

        if self.padding is Padding.ATTENTION:
            return end_to_end(batch, self._inputs, run)
        return in_rectangle(batch, self._inputs, self.spec.padding_id, run)
