"""ONNX Runtime sessions: of a graph that lacks the checkpoint's tensors, and of a file with its own weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
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
    `inputs`, `outputs`: their names. `holds`: whether it keeps what a pass took."""

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
        self.holds, self._has_run = False, False
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


def open_sessions(
    graph: Graph,
    tensors: Mapping[str, Floats],
    weights: Weights,
    threads: Sequence[int],
    *,
    cache_gb: float = 0,
    alone: Graph | None = None,
) -> list[Session]:
    """A session for each number of threads. `weights`: the checkpoint of the tensors. `cache_gb`: see `packed`.

    `alone`: a graph of the same tensors for one text. Its session comes last and has the last number of threads; there is none
    if it would need a second copy of the tensors. Raises LoadError, naming the model's folder.
    """
    try:
        with packed(graph, tensors, weights, cache_gb) as path:
            if path is not None:
                return _mapped(path, threads, alone, tensors)
            held, graphs = dict(tensors), [(graph, count) for count in threads]
            if alone is not None and graph.nbytes < LEAST_BYTES:
                graphs.append((alone, threads[-1]))
            return [Session(each.onnx, count, held) for each, count in graphs]
    except LoadError:
        raise
    except Exception as error:  # kinds of the library's own
        raise _refused(weights.folder, error) from error


def _mapped(path: Path, threads: Sequence[int], alone: Graph | None, tensors: Mapping[str, Floats]) -> list[Session]:
    """At once, since each packs the matrices again to find them in the file."""
    with memory.reused_blocks(), ThreadPoolExecutor(len(threads) + 1) as pool:
        found = [pool.submit(Session, path, count, is_packed=True) for count in threads]
        if alone is not None:
            there = _tensors_beside(path)
            changed = {name: shape for name, shape in alone.weights.items() if name not in there}  # as the graph was optimized
            if 4 * sum(map(prod, changed.values())) < LEAST_BYTES:
                content = alone.body + nested(7, b"".join(there[name] for name in alone.weights if name in there))
                held = {name: tensors[name] for name in changed}
                found.append(pool.submit(Session, content + declarations(changed), threads[-1], held, folder=path.parent))
        return [session.result() for session in found]


def _tensors_beside(path: Path) -> dict[str, bytes]:
    """The fields of a graph that hold tensors, or say where these and their packed forms lie beside it, by name."""
    tensors = [tensor for graph in parts(path.read_bytes(), 7) for tensor in parts(graph, 5)]
    return {next(parts(tensor, 8)).decode(): nested(5, tensor) for tensor in tensors}


def open_file(path: Path, folder: Path, threads: Sequence[int]) -> list[Session]:
    """Sessions of an ONNX file with its own weights. Raises LoadError, naming the model's folder."""
    try:
        return [Session(path, count) for count in threads]
    except Exception as error:  # kinds of the library's own
        raise _refused(folder, error) from error


def _refused(folder: Path, error: Exception) -> LoadError:
    return LoadError(f"{folder}: ONNX Runtime does not take the graph: {error}")
