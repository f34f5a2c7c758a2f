"""ONNX Runtime sessions: of a graph without the checkpoint's tensors, and of a file with weights.

A model can answer once its first session is open. A thread then opens the others, since each packs all matrices again to find
them in the packed file: 0.2 s at the start of a base-sized model on two cores, 2 s for one of 0.6B.
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

# A pass with this option frees the session's memory. Otherwise a session keeps the memory of its largest pass. Not used for
# every pass, because the next pass would spend a tenth of its time on new pages. The self-test is a session's first pass.
SHRINKING = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
ERRORS = 3  # the least severe level to log
ENTRIES = {"session.force_spinning_stop": "1"}  # its threads spin only during a pass


class Places:
    """The processors of a session's threads: one each if their numbers are equal, else any.

    `entries`: the session's configuration for all threads except the caller's.
    """

    def __init__(self, threads: int) -> None:
        own = own_processors()
        self._callers, others = (own[:1], own[1:]) if len(own) == threads > 1 else ((), ())
        numbers = ";".join(str(number + 1) for number in others)  # counted from 1
        self.entries = {"session.intra_op_thread_affinities": numbers} if others else {}

    def run(self, work: Callable[[], Floats]) -> Floats:
        """Call `work` with the calling thread pinned to its processor, and return the result."""
        before = move_to(self._callers) if self._callers else ()
        try:
            return work()
        finally:
            if before:
                move_to(before)


class Session:
    """A graph that runs with a fixed number of threads. Several threads may call it at once. `inner`: the package's object.
    `inputs`, `outputs`: their names. `holds`: True if it keeps a pass's memory, or has not run yet."""

    def __init__(
        self,
        graph: bytes | Path,
        threads: int,
        tensors: Mapping[str, Floats] | None = None,
        *,
        is_packed: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`tensors`: the graph's missing tensors, which are copied. `is_packed`: the graph is optimized already. `folder`: of
        the files named in a graph in bytes. Raises the package's exceptions."""
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
        """Compute one output, float32. `shrink`: free the passes' memory. Raises the package's exceptions."""
        shrink |= not self._has_run
        self.holds, self._has_run = self.holds and not shrink, True
        how = self._shrinking if shrink else None
        found = self._places.run(lambda: self.inner.run([output], dict(feed), how)[0])
        self.holds |= not shrink
        return found


Opening = Future[Session | None]  # None: it failed to open, and another session replaces it


def open_sessions(
    graph: Graph,
    tensors: Mapping[str, Floats],
    weights: Weights,
    threads: Sequence[int],
    *,
    cache_gb: float = 0,
    alone: Graph | None = None,
) -> list[Opening]:
    """A session for each number of threads. Only the first is open on return. `weights`: the checkpoint of the tensors.
    `cache_gb`: as for `packed`.

    `alone`: a graph of the same tensors for one text. Its session comes last and has the last number of threads. It is left out
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
    except Exception as error:  # the library's own exceptions
        raise _refused(weights.folder, error) from error


def opened(session: Session) -> Opening:
    """An opening that is done."""
    future = Opening()
    future.set_result(session)
    return future


def there(opening: Opening) -> Session | None:
    """The session if it is open, else None."""
    return opening.result() if opening.done() else None


def _mapped(
    path: Path, threads: Sequence[int], alone: Graph | None, tensors: Mapping[str, Floats], stack: ExitStack
) -> list[Opening]:
    """Open the sessions of a packed file. `stack` closes the file, which must exist until all sessions are open."""
    others: list[Callable[[], Session]] = [partial(Session, path, count, is_packed=True) for count in threads[1:]]
    if alone is not None:
        beside = _tensors_beside(path)
        changed = {name: shape for name, shape in alone.weights.items() if name not in beside}  # by the optimization
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
            except Exception as error:  # the library's own exceptions
                log.warning("a session could not be opened, so the first session does its work: %s", error)
                opening.set_result(None)
    memory.trim()


def _tensors_beside(path: Path) -> dict[str, bytes]:
    """By name: the fields of a graph with tensors, or with the places of tensors and packed forms in other files."""
    tensors = [tensor for graph in parts(path.read_bytes(), 7) for tensor in parts(graph, 5)]
    return {next(parts(tensor, 8)).decode(): nested(5, tensor) for tensor in tensors}


def open_file(path: Path, folder: Path, threads: Sequence[int]) -> list[Opening]:
    """Open the sessions of an ONNX file with weights. Raises LoadError, naming the model's folder."""
    try:
        return [opened(Session(path, count)) for count in threads]
    except Exception as error:  # the library's own exceptions
        raise _refused(folder, error) from error


def _refused(folder: Path, error: Exception) -> LoadError:
    return LoadError(f"{folder}: ONNX Runtime refuses the graph: {error}")
