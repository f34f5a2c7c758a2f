"""ONNX Runtime sessions: of a graph that lacks the checkpoint's tensors, and of a file with its own weights.

A model can answer once its first session is open. A thread opens the others after it, as each packs all matrices again to find
them in the packed file: 0.2 s of the start of a base-sized model on two cores, and 2 s of one of 0.6B.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

from numpy.typing import NDArray

from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.packed_file import LEAST_BYTES, SLOWER, packed, parts
from hybridtei.inference.backends.graph.writer import Graph, declarations
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats
from hybridtei.system import memory
from hybridtei.system.frames import nested
from hybridtei.system.machine import move_to, own_processors

log = logging.getLogger(__name__)

# What passes took is freed after a pass with this option. Else each session keeps as much as its largest pass took; and where
# every pass frees it, the next one waits for new pages, a tenth of its time. The first pass of a session is the self-test's.
SHRINKING = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
ERRORS = 3  # the least severity that is logged
ENTRIES = {"session.force_spinning_stop": "1"}  # its threads wait actively within a pass only


class Places:
    """Where the threads of a session run: on a processor each where it has as many as there are, else anywhere.

    `entries`: of the session's configuration, for all threads but its caller's.
    """

    def __init__(self, threads: int) -> None:
        own = own_processors()
        self._callers, others = (own[:1], own[1:]) if len(own) == threads > 1 else ((), ())
        numbers = ";".join(str(number + 1) for number in others)  # counted from 1
        self.entries = {"session.intra_op_thread_affinities": numbers} if others else {}

    def run(self, work: Callable[[], Floats]) -> Floats:
        """What `work` returns, called while the calling thread is on its processor."""
        before = move_to(self._callers) if self._callers else ()
        try:
            return work()
        finally:
            if before:
                move_to(before)


class Session:
    """A graph that runs with a certain number of threads. Threads may call at once. `inner`: the package's own object.
    `inputs`, `outputs`: their names. `holds`: whether it keeps what a pass took, or had none."""

    def __init__(
        self,
        graph: bytes | Path,
        threads: int,
        tensors: Mapping[str, Floats] | None = None,
        *,
        is_packed: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`tensors`: those that the graph lacks, which are copied. `is_packed`: it is optimized. `folder`: of the files that a
        graph in bytes names. Raises the package's kinds."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = ERRORS
        if is_packed:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._places = Places(threads)
        beside = {} if folder is None else {"session.model_external_initializers_file_folder_path": str(folder)}
        for key, text in {**ENTRIES, **self._places.entries, **beside}.items():
            options.add_session_config_entry(key, text)
        if tensors:
            values = [ort.OrtValue.ortvalue_from_numpy(tensor) for tensor in tensors.values()]
            options.add_external_initializers([*tensors], values)
        self._shrinking = ort.RunOptions()
        for key, text in SHRINKING.items():
            self._shrinking.add_run_config_entry(key, text)
        content = str(graph) if isinstance(graph, Path) else graph
        self.inner = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"], disabled_optimizers=(SLOWER,))
        self.holds, self._has_run = True, False
        self.inputs = frozenset(node.name for node in self.inner.get_inputs())
        self.outputs = frozenset(node.name for node in self.inner.get_outputs())

    def run(self, output: str, feed: Mapping[str, NDArray[Any]], *, shrink: bool = False) -> Floats:
        """One output, float32. `shrink`: free what passes took. Raises the package's kinds."""
        shrink |= not self._has_run
        self.holds, self._has_run = self.holds and not shrink, True
        how = self._shrinking if shrink else None
        found = self._places.run(lambda: self.inner.run([output], dict(feed), how)[0])
        self.holds |= not shrink
        return found


Opening = Future[Session | None]  # None: it could not be opened, and another takes its place


def open_sessions(
    graph: Graph,
    tensors: Mapping[str, Floats],
    weights: Weights,
    threads: Sequence[int],
    *,
    cache_gb: float = 0,
    alone: Graph | None = None,
) -> list[Opening]:
    """A session for each number of threads, the first of which is there. `weights`: the checkpoint of the tensors. `cache_gb`:
    see `packed`.

    `alone`: a graph of the same tensors for one text. Its session comes last and has the last number of threads; there is none
    if it would need a second copy of the tensors. Raises LoadError, naming the model's folder.
    """
    try:
        with ExitStack() as stack:
            path = stack.enter_context(packed(graph, tensors, weights, cache_gb))
            if path is not None:
                return _mapped(path, threads, alone, tensors, stack)
            held, graphs = dict(tensors), [(graph, count) for count in threads]
            if alone is not None and graph.nbytes < LEAST_BYTES:
                graphs.append((alone, threads[-1]))
            return [opened(Session(each.onnx, count, held)) for each, count in graphs]
    except LoadError:
        raise
    except Exception as error:  # kinds of the library's own
        raise _refused(weights.folder, error) from error


def opened(session: Session) -> Opening:
    """A session that is there."""
    future = Opening()
    future.set_result(session)
    return future


def there(opening: Opening) -> Session | None:
    """The session if it is open."""
    return opening.result() if opening.done() else None


def _mapped(
    path: Path, threads: Sequence[int], alone: Graph | None, tensors: Mapping[str, Floats], stack: ExitStack
) -> list[Opening]:
    """`stack`: closes the packed file, which has to stay until all sessions are open."""
    others: list[Callable[[], Session]] = [partial(Session, path, count, is_packed=True) for count in threads[1:]]
    if alone is not None:
        beside = _tensors_beside(path)
        changed = {name: shape for name, shape in alone.weights.items() if name not in beside}  # as the graph was optimized
        if 4 * sum(map(prod, changed.values())) < LEAST_BYTES:
            content = alone.body + nested(7, b"".join(beside[name] for name in alone.weights if name in beside))
            held = {name: tensors[name] for name in changed}
            others.append(partial(Session, content + declarations(changed), threads[-1], held, folder=path.parent))
    with memory.reused_blocks():
        first = opened(Session(path, threads[0], is_packed=True))
    openings = [Opening() for _ in others]
    Thread(target=_open, args=(others, openings, stack.pop_all()), name="sessions").start()
    return [first, *openings]


def _open(makers: Sequence[Callable[[], Session]], openings: Sequence[Opening], stack: ExitStack) -> None:
    with stack, memory.reused_blocks():
        for make, opening in zip(makers, openings, strict=True):
            try:
                opening.set_result(make())
            except Exception as error:  # kinds of the library's own
                log.warning("a session could not be opened, so the first one does its work: %s", error)
                opening.set_result(None)
    memory.trim()


def _tensors_beside(path: Path) -> dict[str, bytes]:
    """The fields of a graph that hold tensors, or say where these and their packed forms lie beside it, by name."""
    tensors = [tensor for graph in parts(path.read_bytes(), 7) for tensor in parts(graph, 5)]
    return {next(parts(tensor, 8)).decode(): nested(5, tensor) for tensor in tensors}


def open_file(path: Path, folder: Path, threads: Sequence[int]) -> list[Opening]:
    """Sessions of an ONNX file with its own weights. Raises LoadError, naming the model's folder."""
    try:
        return [opened(Session(path, count)) for count in threads]
    except Exception as error:  # kinds of the library's own
        raise _refused(folder, error) from error


def _refused(folder: Path, error: Exception) -> LoadError:
    return LoadError(f"{folder}: ONNX Runtime does not take the graph: {error}")
