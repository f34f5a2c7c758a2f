"""A graph and its weights, packed by ONNX Runtime once a machine, in files that all sessions and
processes map.

The runtime writes the optimized graph, and its tensors with the packed forms of its matrices: 1.5
to 1.9 times the float32 weights. A session that opens packs each tensor again to find its packed
form in the file, and then computes from the file's pages. Checkpoints in half precision are first
widened, tensor by tensor, into a file.

The file's name is a hash of its sources: the graph, the checkpoint's files, ONNX Runtime's release,
this processor. A new file is renamed when complete, with its length and digests in its last bytes,
since a truncated map ends the process (SIGBUS) and a damaged tensor gives wrong vectors. The graph
is compared at each start, and the tensors: larger ones in a thread after it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import DAMAGED
from hybridtei.inference.backends.graph.writer import Graph, declaration
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats
from hybridtei.system.frames import message_fields
from hybridtei.system.machine import cache_folder, private_folder

log = logging.getLogger(__name__)

# Bytes of tensors and graph; packing fewer is faster than finding a file
LEAST_BYTES = 16_000_000
# Bound of the packed size, as a multiple of the input's
FACTOR = 1.9
# After this time an unused file is removed
DAYS = 30
GB = 1_000_000_000
GRAPH, TENSORS, WIDENED = "packed.onnx", "packed.bin", "widened.bin"
# The path of the checkpoint's folder
SOURCE = "source.txt"
# The end of TENSORS: MARK, the number of bytes before, the digests of GRAPH and of those bytes
TRAILER = struct.Struct("<16sQ32s32s")
MARK = b"hybridtei packed"
PART = ".part"
MEMORY = Path("/dev/shm")
TEMPORARY = "hybridtei-"
# A younger folder may belong to a process that has not locked it yet
LEFT_SECONDS = 60
# A larger file is compared with its digest once the start is over, so that the start has the
# processor and the disk
CHECKED_AT_ONCE_BYTES, CHECK_DELAY_SECONDS = 256_000_000, 30.0
# ONNX Runtime's fused kernel of a sum and a norm is not vectorised. Two separate kernels take a
# quarter of its time, which saves a tenth of a pass (1.31, AVX-512).
SLOWER = "SkipLayerNormFusion"
SAVING = {
    # Of the input tensors
    "session.model_external_initializers_file_folder_path": "/",
    "session.optimized_model_external_initializers_file_name": TENSORS,
    "session.save_external_prepacked_constant_initializers": "1",
}
LEAST_TENSOR = "session.optimized_model_external_initializers_min_size_in_bytes"
LEAST_TENSOR_BYTES = 1024
# Kernels read packed matrices by aligned loads: a misaligned one in the mapped file ends the
# process (SIGSEGV). The runtime writes tensors below a megabyte without alignment.
ALIGNMENT, SMALL_BYTES = 64, 1 << 20
# "NAME|offset;bytes;0": the place and size of a tensor's packed form
PLACES = re.compile(rb"\d+(?=;)")


@dataclass(frozen=True, slots=True)
class Packed:
    """A file in the cache folder. `used`: the time at which a session last opened it, in seconds
    since 1970."""

    path: Path
    size: int
    used: float

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.used))
        return f"{self.path}: {self.size / 1e6:.0f} MB, last used {day}"


@contextmanager
def packed(
    graph: Graph, tensors: Mapping[str, Floats], weights: Weights, cache_gb: float
) -> Iterator[Path | None]:
    """Yield the optimized graph, with packed tensors beside it, which open sessions no longer need.
    None: the tensors are small, or there is no room. `cache_gb`: the bound of the cache folder; 0:
    use a temporary file.

    Raises LoadError for tensors with NaN or infinity, or if the checkpoint changes meanwhile.
    """
    needed = int(FACTOR * graph.nbytes)
    if graph.nbytes < LEAST_BYTES or sys.platform == "win32":
        yield None
        return
    if cache_gb:
        cache_file = _tried(
            lambda: _file_in_cache(graph, tensors, weights, needed, cache_gb), "the cache folder"
        )
        if cache_file is not None:
            yield cache_file
            return
    with _temporary(_roomy(needed)) as folder:
        path = _tried(lambda: _written(graph, tensors, weights, folder), str(folder))
        if path is not None:
            log.info(
                "packed weights: %.0f MB in a file of this process in %s",
                _size(path.parent) / 1e6,
                folder.parent,
            )
        yield path


@contextmanager
def _temporary(place: str | None) -> Iterator[Path]:
    """A folder that this process locks, after those of killed processes are removed. `place`: None
    for the default."""
    import fcntl

    _remove_left(Path(place or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=place) as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(descriptor)


def _remove_left(place: Path) -> None:
    """Remove this user's folders that no process locks: a killed start leaves its file in
    memory."""
    import fcntl

    # `flock` raises OSError for a folder that a process locks, which is left

    for folder in place.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not is_own or status.st_mtime > time.time() - LEFT_SECONDS:
                continue
            names = {file.name for file in folder.iterdir()}
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if names <= {GRAPH, TENSORS, WIDENED}:
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _tried(make: Callable[[], Path], place: str) -> Path | None:
    try:
        return make()
    except LoadError:
        raise
    except Exception as error:
        # ONNX Runtime raises its own exceptions on a full disk
        log.warning(
            "packed weights cannot be stored in %s, so this start packs them in memory: %s",
            place,
            error,
        )
        return None


def _roomy(needed: int) -> str | None:
    """A folder in memory with room for a temporary file, else the folder of temporary files."""
    with suppress(OSError):
        if shutil.disk_usage(MEMORY).free > needed and os.access(MEMORY, os.W_OK):
            return str(MEMORY)
    return None


def packed_folder() -> Path:
    """The folder of kept files. Raises LoadError if the user has no home, OSError if it is unusable
    or others may write to it."""
    folder = cache_folder("") / "packed"
    try:
        return private_folder(folder)
    except OSError as error:
        raise OSError(f"{error}; or set HYBRIDTEI_CACHE to another folder") from error


def packed_files() -> list[Packed]:
    """The kept files, the last used first. Raises the errors of `packed_folder`."""
    files = []
    for path in packed_folder().iterdir():
        # `stat` raises OSError for a file that another process removed
        with suppress(OSError):
            files.append(Packed(path, _size(path), path.stat().st_mtime))
    return sorted(files, key=lambda each: -each.used)


def prune(bound: float) -> list[Packed]:
    """Remove files unused for 30 days, files of killed processes, files of checkpoints whose folder
    is gone, and the longest unused ones above `bound` bytes; return them. Sessions keep the pages
    of an open file. Raises the errors of `packed_folder`."""
    with _writing(packed_folder()):
        return _prune(bound)


def _prune(bound: float) -> list[Packed]:
    total, removed = 0, []
    # The last used first
    for file in packed_files():
        if (
            file.path.suffix != PART
            and total + file.size <= bound
            and file.used > time.time() - DAYS * 86400
            and _has_source(file.path)
        ):
            total += file.size
            continue
        shutil.rmtree(file.path, ignore_errors=True)
        removed.append(file)
    return removed


def _has_source(path: Path) -> bool:
    try:
        return Path((path / SOURCE).read_text(encoding="utf-8")).exists()
    except OSError:
        # An earlier version wrote none
        return True


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A lock: only one thread of all processes writes to the folder. Raises OSError."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _file_in_cache(
    graph: Graph, tensors: Mapping[str, Floats], weights: Weights, needed: int, cache_gb: float
) -> Path:
    """The file in the cache folder, written if missing. Waits while another process writes to the
    folder."""
    path = packed_folder() / f"{weights.folder.name[:80]}-{_digest(graph, weights)}"
    if _is_whole(path):
        is_small = _size(path) <= CHECKED_AT_ONCE_BYTES
        if not (is_small and discard_damaged(path)):
            # The cache may be read-only
            with suppress(OSError):
                os.utime(path)
            log.info("packed weights: %s, %.0f MB", path, _size(path) / 1e6)
            if not is_small:
                _check_later(path)
            return path / GRAPH
        if _is_whole(path):
            raise OSError(f"{path} is damaged, and cannot be removed")
    with _writing(path.parent):
        if not _is_whole(path):
            _make_room(path, needed, cache_gb)
            began = time.monotonic()
            with tempfile.TemporaryDirectory(
                suffix=PART, dir=path.parent, ignore_cleanup_errors=True
            ) as part:
                _written(graph, tensors, weights, Path(part))
                source = str(weights.folder.absolute())
                Path(part, SOURCE).write_text(source, encoding="utf-8")
                for name in (GRAPH, TENSORS, ""):
                    _sync(Path(part, name))
                shutil.rmtree(path, ignore_errors=True)
                Path(part).rename(path)
            log.info(
                "packed weights: %s, %.0f MB, written in %.1f s",
                path,
                _size(path) / 1e6,
                time.monotonic() - began,
            )
    return path / GRAPH


def _check_later(path: Path) -> None:
    """Compare the tensors with their digest in a thread, since 1 GB takes a second."""
    timer = threading.Timer(CHECK_DELAY_SECONDS, _check_mapped, [path])
    timer.daemon = True
    timer.start()


def _check_mapped(path: Path) -> None:
    """Make every later pass of this process fail if the file that it maps is damaged."""
    if discard_damaged(path):
        DAMAGED.append(
            f"the packed weights in {path} were damaged, and vectors since the start may be wrong: "
            "start again, and embed again what was embedded since"
        )
        log.critical("%s", DAMAGED[-1])


def discard_damaged(path: Path) -> bool:
    """Remove a file whose tensors changed since they were written, and log it. Return True if it
    was removed."""
    try:
        with (path / TENSORS).open("rb") as file:
            file.seek(-TRAILER.size, os.SEEK_END)
            _, length, _, expected = TRAILER.unpack(file.read())
            file.seek(0)
            if _digest_of(file, length) == expected:
                return False
    except (OSError, struct.error):
        # Another process removed it
        return False
    log.error("packed weights: %s is damaged, and was removed", path)
    shutil.rmtree(path, ignore_errors=True)
    return True


def _digest_of(file: BinaryIO, length: int) -> bytes:
    digest = hashlib.sha256()
    while length:
        block = file.read(min(length, 1 << 20))
        if not block:
            break
        digest.update(block)
        length -= len(block)
    return digest.digest()


def _make_room(path: Path, needed: int, cache_gb: float) -> None:
    """Raises OSError if the file would exceed half of the free space, or the bound."""
    used = sum(file.size for file in packed_files())
    bound = min(cache_gb * GB, (used + shutil.disk_usage(path.parent).free) / 2)
    if needed > bound:
        limits = "--packed-cache-gb, and half of what is free there"
        raise OSError(f"{needed / GB:.1f} GB are needed, allowed are {bound / GB:.1f}: {limits}")
    _prune(bound - needed)


def _written(graph: Graph, tensors: Mapping[str, Floats], weights: Weights, folder: Path) -> Path:
    """Let ONNX Runtime write both files. Raises LoadError, OSError, and ONNX Runtime's
    exceptions."""
    import onnxruntime as ort

    identity = weights.identity()
    content = graph.body + _declared(graph, tensors, weights, folder / WIDENED)
    options = ort.SessionOptions()
    # This module reports a full disk
    options.intra_op_num_threads, options.log_severity_level = (1, 4)
    options.optimized_model_filepath = str(folder / GRAPH)
    for key, text in {**SAVING, LEAST_TENSOR: str(_least_bytes(graph))}.items():
        options.add_session_config_entry(key, text)
    ort.InferenceSession(
        content, options, providers=["CPUExecutionProvider"], disabled_optimizers=(SLOWER,)
    )
    if not _is_aligned((folder / GRAPH).read_bytes()):
        raise OSError(f"ONNX Runtime {ort.__version__} wrote tensors at odd places")
    (folder / WIDENED).unlink(missing_ok=True)
    if weights.identity() != identity:
        raise LoadError(f"{weights.folder}: the weights changed while they were read: start again")
    weights.release()
    with (folder / TENSORS).open("r+b") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = _digest_of(file, length)
        file.seek(length)
        file.write(TRAILER.pack(MARK, length, _graph_digest(folder), digest))
    return folder / GRAPH


def _least_bytes(graph: Graph) -> int:
    """The least bytes of a tensor in the file. Smaller tensors are in the graph, where each is
    aligned; these include all that would misalign the next tensor in the file."""
    sizes = [4 * prod(shape) for shape in graph.weights.values()]
    # TensorProto.raw_data
    sizes += [len(content) for tensor in _initializers(graph.body) for content in parts(tensor, 9)]
    misaligning = [size + 1 for size in sizes if size % ALIGNMENT and size < SMALL_BYTES]
    return max([LEAST_TENSOR_BYTES, *misaligning])


def _is_aligned(onnx: bytes) -> bool:
    """True if all tensors in the graph's file, and their packed forms, are aligned there."""
    for tensor in _initializers(onnx):
        # TensorProto.external_data: keys and values
        facts = {next(parts(entry, 1)): next(parts(entry, 2)) for entry in parts(tensor, 13)}
        packed = [
            int(number)
            for key, text in facts.items()
            if key.startswith(b"prepacked")
            for number in PLACES.findall(text)
        ]
        if any(place % ALIGNMENT for place in (int(facts.get(b"offset", 0)), *packed[::2])):
            return False
    return True


def _initializers(onnx: bytes) -> Iterator[bytes]:
    # ModelProto.graph.initializer
    return (tensor for graph in parts(onnx, 7) for tensor in parts(graph, 5))


def parts(message: bytes, field: int) -> Iterator[bytes]:
    """The values of a protobuf message's field of messages or texts."""
    fields = message_fields(message, 0, len(message))
    return (
        message[place] for number, place in fields if number == field and isinstance(place, slice)
    )


def _declared(
    graph: Graph, tensors: Mapping[str, Floats], weights: Weights, widened: Path
) -> bytes:
    """Declare the places of the graph's tensors: in the checkpoint's files, or widened in our own
    file."""
    content = []
    with widened.open("wb") as file:
        for name in graph.weights:
            array = tensors[name]
            place = weights.place(array)
            if place is None:
                file.write(b"\0" * (-file.tell() % 64))
                place = widened.resolve(), file.tell()
                file.write(array.data)
            location, offset = place
            content.append(declaration(name, array.shape, str(location)[1:], offset))
    return b"".join(content)


def _digest(graph: Graph, weights: Weights) -> str:
    import onnxruntime as ort

    facts = f"{ort.__version__} {SLOWER} {SAVING} {LEAST_TENSOR_BYTES} {ALIGNMENT} {_processor()}"
    hashed = b"\0".join((graph.onnx, facts.encode(), weights.identity()))
    return hashlib.sha256(hashed).hexdigest()[:32]


def _processor() -> str:
    """The processor's facts that packed forms depend on: its kind and, on Linux, its flags."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return platform.machine() + next(
            (line for line in lines if line.startswith(("flags", "Features"))), ""
        )
    return f"{platform.machine()} {platform.processor()}"


def _is_whole(path: Path) -> bool:
    """True if both files exist with their full lengths."""
    try:
        with (path / TENSORS).open("rb") as file:
            file.seek(-TRAILER.size, os.SEEK_END)
            length = file.tell()
            *facts, _ = TRAILER.unpack(file.read())
            return facts == [MARK, length, _graph_digest(path)]
    except OSError:
        return False


def _graph_digest(folder: Path) -> bytes:
    return hashlib.sha256((folder / GRAPH).read_bytes()).digest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
