"""ONNX Runtime sessions: a graph in bytes, and the tensors it lacks as arrays that are read where they lie.

Sessions that differ in their threads alone keep one packed copy of the matrices. The Python package makes sessions that pack
their matrices each for itself, so these are made by the library's C interface, which lies beside it: functions are members of
one table, whose order is part of the interface (`onnxruntime_c_api.h`, struct OrtApi). A package that comes without that
library, and a graph that is a file with its own weights, are run by the Python interface: a copy each.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import LoadError
from hybridtei.outputs import Floats
from hybridtei.system.machine import move_to, own_processors

VERSION = 14  # of the interface: the oldest that has all of FUNCTIONS
LIBRARIES = ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")
OUT = POINTER(c_void_p)
POINTER_BYTES = ctypes.sizeof(c_void_p)
# Place in the table, and arguments; all return a status.
FUNCTIONS: Mapping[str, tuple[int, tuple[Any, ...]]] = {
    "CreateEnv": (3, (c_int, c_char_p, OUT)),
    "Run": (9, (c_void_p, c_void_p, OUT, OUT, c_size_t, OUT, c_size_t, OUT)),
    "CreateSessionOptions": (10, (OUT,)),
    "SetSessionLogSeverityLevel": (22, (c_void_p, c_int)),
    "SetIntraOpNumThreads": (24, (c_void_p, c_int)),
    "SetInterOpNumThreads": (25, (c_void_p, c_int)),
    "SessionGetInputCount": (30, (c_void_p, POINTER(c_size_t))),
    "SessionGetInputName": (36, (c_void_p, c_size_t, c_void_p, OUT)),
    "CreateRunOptions": (39, (OUT,)),
    # Its last argument is a place in an array too, which OUT would refuse.
    "CreateTensorWithDataAsOrtValue": (49, (c_void_p, c_void_p, c_size_t, POINTER(c_int64), c_size_t, c_int, c_void_p)),
    "GetTensorMutableData": (51, (c_void_p, OUT)),
    "GetDimensionsCount": (61, (c_void_p, POINTER(c_size_t))),
    "GetDimensions": (62, (c_void_p, POINTER(c_int64), c_size_t)),
    "GetTensorTypeAndShape": (65, (c_void_p, OUT)),
    "CreateCpuMemoryInfo": (69, (c_int, c_int, OUT)),
    "AllocatorFree": (76, (c_void_p, c_void_p)),
    "GetAllocatorWithDefaultOptions": (78, (OUT,)),
    "AddSessionConfigEntry": (130, (c_void_p, c_char_p, c_char_p)),
    "AddInitializer": (150, (c_void_p, c_char_p, c_void_p)),
    "AddRunConfigEntry": (165, (c_void_p, c_char_p, c_char_p)),
    "CreatePrepackedWeightsContainer": (166, (OUT,)),
    "CreateSessionFromArrayWithPrepackedWeightsContainer": (169, (c_void_p, c_char_p, c_size_t, c_void_p, c_void_p, OUT)),
    "AddExternalInitializers": (210, (c_void_p, OUT, OUT, c_size_t)),
}
MESSAGE = 2  # of a status
RELEASES = {"status": 93, "session": 95, "value": 96, "shape": 99, "options": 100, "container": 167}
ELEMENTS = {"f4": 1, "i8": 7}  # by numpy's codes: ONNXTensorElementDataType
# What passes took is freed after a pass with this option. Else each session keeps as much as its largest pass took; and where
# every pass frees it, the next one waits for new pages, a tenth of its time.
SHRINKING = {"memory.enable_memory_arena_shrinkage": "cpu:0"}
WARNINGS = 3  # the least severity that is logged: errors


# While these work, other threads of Python run. The others take microseconds, in which to give the interpreter away and wait
# for it again, some twenty times a pass, cost 2 % of the throughput of a busy server.
LONG = frozenset({"Run", "CreateSessionFromArrayWithPrepackedWeightsContainer", "session", "container"})


def _prototype(name: str) -> Any:
    return ctypes.CFUNCTYPE if name in LONG else ctypes.PYFUNCTYPE


class _Base(ctypes.Structure):
    _fields_ = (("GetApi", ctypes.CFUNCTYPE(c_void_p, c_uint32)), ("GetVersionString", ctypes.CFUNCTYPE(c_char_p)))


class Api:
    """The functions of a library, and the environment and options of this process in it."""

    def __init__(self, library: Path) -> None:
        """Raises OSError or AttributeError for a file that is no such library, RuntimeError for one that is too old."""
        loaded = ctypes.CDLL(str(library))
        loaded.OrtGetApiBase.restype = POINTER(_Base)
        table = loaded.OrtGetApiBase().contents.GetApi(VERSION)
        if not table:
            raise RuntimeError(f"{library}: lacks version {VERSION} of the interface")
        entries = ctypes.cast(table, POINTER(c_void_p))
        self._message = ctypes.CFUNCTYPE(c_char_p, c_void_p)(entries[MESSAGE])
        self._functions = {
            name: _prototype(name)(c_void_p, *arguments)(entries[place]) for name, (place, arguments) in FUNCTIONS.items()
        }
        self._releases = {name: _prototype(name)(None, c_void_p)(entries[place]) for name, place in RELEASES.items()}
        self.environment = self.make("CreateEnv", WARNINGS, b"hybridtei")
        self.memory = self.make("CreateCpuMemoryInfo", 0, 0)
        self.shrinking = self.make("CreateRunOptions")
        for key, text in SHRINKING.items():
            self.call("AddRunConfigEntry", self.shrinking, key.encode(), text.encode())

    def call(self, name: str, *arguments: Any) -> None:
        """Raises RuntimeError with the library's words."""
        status = self._functions[name](*arguments)
        if status:
            message = self._message(status).decode(errors="replace")
            self.release("status", status)
            raise RuntimeError(message)

    def make(self, name: str, *arguments: Any) -> c_void_p:
        """What a function makes, whose last argument is the place for it. Raises as `call`."""
        made = c_void_p()
        self.call(name, *arguments, byref(made))
        return made

    def release(self, kind: str, handle: Any) -> None:
        """Free what was made."""
        self._releases[kind](handle)

    def tensor(self, array: NDArray[Any]) -> c_void_p:
        """A value whose numbers are those of the array, which has to be kept, row after row."""
        return self.make("CreateTensorWithDataAsOrtValue", *self.described(array))

    def described(self, array: NDArray[Any]) -> tuple[Any, ...]:
        """What `CreateTensorWithDataAsOrtValue` is told of an array."""
        shape, kind = (c_int64 * array.ndim)(*array.shape), ELEMENTS[array.dtype.str[1:]]  # its `name` takes thirty calls
        # `array.ctypes` makes three objects for the same number, in eight times the time
        return self.memory, array.__array_interface__["data"][0], array.nbytes, shape, array.ndim, kind

    def array(self, value: c_void_p) -> Floats:
        """A copy of the numbers of a value of float32."""
        info = self.make("GetTensorTypeAndShape", value)
        count = c_size_t()
        self.call("GetDimensionsCount", info, byref(count))
        shape = (c_int64 * count.value)()
        self.call("GetDimensions", info, shape, count)
        self.release("shape", info)
        copied = np.empty(tuple(shape), np.float32)
        if copied.nbytes:
            numbers = self.make("GetTensorMutableData", value)
            ctypes.memmove(copied.__array_interface__["data"][0], numbers, copied.nbytes)
        return copied


@cache
def find_api() -> Api | None:
    """The interface of the installed package, or None where it brings no library of it."""
    spec = find_spec("onnxruntime")
    folders = [] if spec is None else [Path(each) / "capi" for each in spec.submodule_search_locations or ()]
    found = [file for folder in folders for pattern in LIBRARIES for file in sorted(folder.glob(pattern))]
    try:
        return Api(found[0]) if found else None
    except (OSError, AttributeError, RuntimeError):
        return None


class Container:
    """What sessions have packed, and the tensors that they read where they lie; kept by those."""

    def __init__(self, api: Api, tensors: Mapping[str, Floats]) -> None:
        self.api = api
        self.arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        self.values = {name: api.tensor(array) for name, array in self.arrays.items()}
        self.handle = api.make("CreatePrepackedWeightsContainer")
        weakref.finalize(self, _release_container, api, self.handle, [*self.values.values()]).atexit = False


def _release_container(api: Api, handle: c_void_p, values: Sequence[c_void_p]) -> None:
    api.release("container", handle)
    for value in values:
        api.release("value", value)


class NativeSession:
    """A session of a graph in bytes. `inputs`: their names."""

    def __init__(self, graph: bytes, container: Container, threads: int, entries: Mapping[str, str]) -> None:
        """`entries`: of its configuration, as ONNX Runtime names them. Raises RuntimeError."""
        api = self._api = container.api
        self._places = Places(threads)
        options = api.make("CreateSessionOptions")
        try:
            api.call("SetSessionLogSeverityLevel", options, WARNINGS)
            api.call("SetIntraOpNumThreads", options, threads)
            api.call("SetInterOpNumThreads", options, 1)
            for key, text in {**entries, **self._places.entries}.items():
                api.call("AddSessionConfigEntry", options, key.encode(), text.encode())
            values = container.values
            api.call("AddExternalInitializers", options, _names(values), _handles(values), len(values))  # for optimisers
            for name, value in values.items():
                api.call("AddInitializer", options, name.encode(), value)  # these it reads, and packs into the container
            self._session = api.make(
                "CreateSessionFromArrayWithPrepackedWeightsContainer",
                api.environment,
                graph,
                len(graph),
                options,
                container.handle,
            )
        finally:
            api.release("options", options)
        weakref.finalize(self, _release_session, api, self._session, container).atexit = False
        count = c_size_t()
        api.call("SessionGetInputCount", self._session, byref(count))
        self.inputs = frozenset(self._input(place) for place in range(count.value))

    def _input(self, place: int) -> str:
        allocator = self._api.make("GetAllocatorWithDefaultOptions")
        name = self._api.make("SessionGetInputName", self._session, place, allocator)
        text = (ctypes.cast(name, c_char_p).value or b"").decode()
        self._api.call("AllocatorFree", allocator, name)
        return text

    def run(self, output: str, feed: Mapping[str, NDArray[Any]], *, shrink: bool = False) -> Floats:
        """One output, float32. `shrink`: free what passes took. Raises RuntimeError. Threads may call at once."""
        return self._places.run(lambda: self._run(output, feed, shrink))

    def _run(self, output: str, feed: Mapping[str, NDArray[Any]], shrink: bool) -> Floats:
        api = self._api
        arrays = [np.ascontiguousarray(array) for array in feed.values()]
        values, outputs = (c_void_p * len(feed))(), (c_void_p * 1)()
        try:
            for place, array in enumerate(arrays):
                api.call("CreateTensorWithDataAsOrtValue", *api.described(array), byref(values, place * POINTER_BYTES))
            how = api.shrinking if shrink else None
            api.call("Run", self._session, how, _cached_names(*feed), values, len(feed), _cached_names(output), 1, outputs)
            return api.array(c_void_p(outputs[0]))
        finally:
            for value in (*values, *outputs):
                if value:
                    api.release("value", value)


def _release_session(api: Api, handle: c_void_p, container: Container) -> None:
    """`container` is kept until here."""
    api.release("session", handle)


def _names(names: Mapping[str, Any] | Sequence[str]) -> Any:
    texts = (c_char_p * len(names))(*(name.encode() for name in names))
    return ctypes.cast(texts, OUT)


@lru_cache(maxsize=64)
def _cached_names(*names: str) -> Any:
    return _names(names)


def _handles(values: Mapping[str, c_void_p]) -> Any:
    return (c_void_p * len(values))(*values.values())


# Its one kernel for a sum and the norm after it walks each row number by number: the two apart take a quarter of the time,
# which is a tenth of a pass (1.31, AVX-512).
SLOWER = "SkipLayerNormFusion"
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
        self._places = Places(threads)
        for key, text in {**ENTRIES, **self._places.entries}.items():
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
        how = self._shrinking if shrink else None
        return self._places.run(lambda: self.inner.run([output], dict(feed), how)[0])
