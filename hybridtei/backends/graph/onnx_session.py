"""ONNX Runtime sessions: a graph in bytes, and the tensors it lacks as arrays that are read where they lie.

Sessions that differ in their threads alone keep one packed copy of the matrices, by the library's C interface. A package that
comes without that library, and a graph that is a file with its own weights, are run by the Python interface: a copy each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from hybridtei.backends.graph.onnx_capi import SHRINKING, Container, NativeSession, find_api
from hybridtei.errors import LoadError
from hybridtei.outputs import Floats

# Its one kernel for a sum and the norm after it walks each row number by number: the two apart take a quarter of the time,
# which is a tenth of a pass (1.31, AVX-512).
SLOWER = "SkipLayerNormFusion"
ENTRIES = {"session.force_spinning_stop": "1"}  # its threads wait actively within a pass only


class Session(Protocol):
    """A graph that runs with a certain number of threads. Threads may call at once. `inputs`: their names."""

    inputs: frozenset[str]

    def run(self, output: str, feed: Mapping[str, NDArray[Any]], *, shrink: bool = False) -> Floats:
        """One output, float32. `shrink`: free what passes took."""
        ...


def open_sessions(
    graph: bytes, tensors: Mapping[str, Floats], folder: Path, threads: Sequence[int], *, tables: Collection[str] = ()
) -> list[Session]:
    """A session for each number of threads. `tables`: names of tensors that are looked up and not computed with.

    Raises LoadError, naming the model's folder.
    """
    api = find_api()
    try:
        if api is None:
            lent = Lent(tensors, tables)
            return [PythonSession(graph, lent, count) for count in threads]
        container = Container(api, tensors)
        entries = {**ENTRIES, "optimization.disable_specified_optimizers": SLOWER}
        return [NativeSession(graph, container, count, entries) for count in threads]
    except Exception as error:  # kinds of the library's own
        raise LoadError(f"{folder}: ONNX Runtime does not take the graph: {error}") from error


def open_file(path: Path, folder: Path, threads: Sequence[int]) -> list[PythonSession]:
    """Sessions of an ONNX file with its own weights. Raises LoadError, naming the model's folder."""
    try:
        return [PythonSession(path, Lent({}), count) for count in threads]
    except Exception as error:  # kinds of the library's own
        raise LoadError(f"{folder}: ONNX Runtime does not take the graph: {error}") from error


class Lent:
    """Arrays that sessions of the Python interface read where they lie; kept by those.

    `tables`: ONNX Runtime copies every tensor it is given for its optimisers to see, which for a table of words would be half
    of a small model, and once more for each session; what it is given besides by that name it uses as it is.
    """

    def __init__(self, tensors: Mapping[str, Floats], tables: Collection[str] = ()) -> None:
        import onnxruntime as ort

        self.values = {name: ort.OrtValue.ortvalue_from_numpy(tensor) for name, tensor in tensors.items()}
        self.tables = {name: self.values[name] for name in tables}
        self._arrays = [tensors[name] for name in tables]  # whose memory the values share


class PythonSession:
    """See `Session`. `inner`: the package's own object."""

    def __init__(self, graph: bytes | Path, lent: Lent, threads: int) -> None:
        import onnxruntime as ort  # a second copy of the library, 20 MB, where sessions are made by the C interface

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        for key, text in ENTRIES.items():
            options.add_session_config_entry(key, text)
        options.add_external_initializers(list(lent.values), list(lent.values.values()))
        for name, value in lent.tables.items():
            options.add_initializer(name, value)
        self._lent = lent
        self._shrinking = ort.RunOptions()
        for key, text in SHRINKING.items():
            self._shrinking.add_run_config_entry(key, text)
        content = str(graph) if isinstance(graph, Path) else graph
        self.inner = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"], disabled_optimizers=(SLOWER,))
        self.inputs = frozenset(node.name for node in self.inner.get_inputs())

    def run(self, output: str, feed: Mapping[str, NDArray[Any]], *, shrink: bool = False) -> Floats:
        """See `Session.run`."""
        found: Floats = self.inner.run([output], dict(feed), self._shrinking if shrink else None)[0]
        return found
