"""A graph and its weights as ONNX Runtime packed them, once a machine, in files that all sessions and processes map.

The runtime writes both: the graph, optimized, and its tensors beside the packed forms of its matrices, 1.5 to 1.9 times the
weights in float32. It reads the tensors when a session opens, packs each again to find it in the file, and computes from the
file's pages. Checkpoints in half precision are widened tensor by tensor into a file that the runtime packs from.

A file is named by what it was made of: the graph, the checkpoint's files, ONNX Runtime's release, this processor. It is written
aside and renamed with its length and a digest in its last bytes, since a map that is cut short ends the process (SIGBUS).
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.writer import Graph, declaration
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats
from hybridtei.system.frames import message_fields
from hybridtei.system.machine import cache_folder, private_folder

log = logging.getLogger(__name__)

LEAST_BYTES = 16_000_000  # of tensors and graph: less is packed sooner than a file is found
FACTOR = 1.9  # of what is packed to what goes in, at most
DAYS = 30  # that a file stays unused
GB = 1_000_000_000
GRAPH, TENSORS, WIDENED = "packed.onnx", "packed.bin", "widened.bin"
TRAILER = struct.Struct("<16sQ32s")  # of TENSORS: MARK, the bytes before, the digest of GRAPH
MARK = b"hybridtei packed"
PART = ".part"
MEMORY = Path("/dev/shm")
# Its one kernel for a sum and the norm after it walks each row number by number: the two apart take a quarter of the time,
# which is a tenth of a pass (1.31, AVX-512).
SLOWER = "SkipLayerNormFusion"
SAVING = {
    "session.model_external_initializers_file_folder_path": "/",  # of the tensors that go in
    "session.optimized_model_external_initializers_file_name": TENSORS,
    "session.save_external_prepacked_constant_initializers": "1",
}
LEAST_TENSOR = "session.optimized_model_external_initializers_min_size_in_bytes"
LEAST_TENSOR_BYTES = 1024
# Kernels read packed matrices by aligned loads: one at another place of the mapped file ends the process (SIGSEGV). The runtime
# writes a tensor of less than a megabyte right behind the one before.
ALIGNMENT = 64
PLACES = re.compile(rb"\d+(?=;)")  # "NAME|offset;bytes;0": where a packed form of a tensor lies, and its bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """A file in the cache folder. `used`: seconds since 1970, when a session last opened it."""

    path: Path
    size: int
    used: float

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.used))
        return f"{self.path}: {self.size / 1e6:.0f} MB, last used {day}"


@contextmanager
def packed(graph: Graph, tensors: Mapping[str, Floats], weights: Weights, cache_gb: float) -> Iterator[Path | None]:
    """The optimized graph, whose packed tensors lie beside it; it need not stay once sessions are open. None: they are few, or
    there is no room. `cache_gb`: of the cache folder; 0: a file that is gone when this ends.

    Raises LoadError for tensors that are not numbers, or if the checkpoint changes meanwhile.
    """
    needed = int(FACTOR * graph.nbytes)
    if graph.nbytes < LEAST_BYTES or sys.platform == "win32":
        yield None
        return
    kept = _tried(lambda: _kept(graph, tensors, weights, needed, cache_gb), "the cache folder") if cache_gb else None
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="hybridtei-", dir=_roomy(needed)) as folder:
        path = _tried(lambda: _written(graph, tensors, weights, Path(folder)), folder)
        if path is not None:
            log.info("packed weights: %.0f MB in a file of this process in %s", _size(path.parent) / 1e6, Path(folder).parent)
        yield path


def _tried(make: Callable[[], Path], place: str) -> Path | None:
    try:
        return make()
    except LoadError:
        raise
    except Exception as error:  # ONNX Runtime raises kinds of its own where a disk is full
        log.warning("packed weights cannot be kept in %s, so this start packs them for itself: %s", place, error)
        return None


def _roomy(needed: int) -> str | None:
    """A folder in memory with room for a file that is gone soon, else that of temporary files."""
    with suppress(OSError):
        if shutil.disk_usage(MEMORY).free > needed and os.access(MEMORY, os.W_OK):
            return str(MEMORY)
    return None


def packed_folder() -> Path:
    """Where files are kept. Raises LoadError without a home, OSError if it cannot be made or others may write to it."""
    folder = cache_folder("") / "packed"
    try:
        return private_folder(folder)
    except OSError as error:
        raise OSError(f"{error}; or set HYBRIDTEI_CACHE to another folder") from error


def packed_files() -> list[Packed]:
    """What is kept, the last used first. Raises as `packed_folder`."""
    found = []
    for path in packed_folder().iterdir():
        with suppress(OSError):  # removed just now, or no folder
            found.append(Packed(path, _size(path), path.stat().st_mtime))
    return sorted(found, key=lambda each: -each.used)


def prune(bound: float) -> list[Packed]:
    """Remove files that were not used for 30 days, what killed processes left, and the longest unused beyond `bound` bytes;
    return them. Sessions that have a file open keep its pages. Raises as `packed_folder`."""
    with _writing(packed_folder()):
        return _prune(bound)


def _prune(bound: float) -> list[Packed]:
    total, gone = 0, []
    for each in packed_files():
        if each.path.suffix != PART and total + each.size <= bound and each.used > time.time() - DAYS * 86400:
            total += each.size
            continue
        shutil.rmtree(each.path, ignore_errors=True)
        gone.append(each)
    return gone


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """While this thread alone, of all processes, writes to the folder. Raises OSError."""
    import fcntl

    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _kept(graph: Graph, tensors: Mapping[str, Floats], weights: Weights, needed: int, cache_gb: float) -> Path:
    """The file in the cache folder, written if it is missing. Waits for another process that writes to the folder."""
    path = packed_folder() / f"{weights.folder.name[:80]}-{_digest(graph, weights)}"
    if _is_whole(path):
        os.utime(path)
        log.info("packed weights: %s, %.0f MB", path, _size(path) / 1e6)
        return path / GRAPH
    with _writing(path.parent):
        if not _is_whole(path):
            _make_room(path, needed, cache_gb)
            began = time.monotonic()
            with tempfile.TemporaryDirectory(suffix=PART, dir=path.parent, ignore_cleanup_errors=True) as part:
                _written(graph, tensors, weights, Path(part))
                for name in (GRAPH, TENSORS, ""):
                    _sync(Path(part, name))
                shutil.rmtree(path, ignore_errors=True)
                Path(part).rename(path)
            log.info("packed weights: %s, %.0f MB, written in %.1f s", path, _size(path) / 1e6, time.monotonic() - began)
    return path / GRAPH


def _make_room(path: Path, needed: int, cache_gb: float) -> None:
    """Raises OSError if the file would take more than half of what is free, or than the bound."""
    held = sum(each.size for each in packed_files())
    bound = min(cache_gb * GB, (held + shutil.disk_usage(path.parent).free) / 2)
    if needed > bound:
        limits = "--packed-cache-gb, and half of what is free there"
        raise OSError(f"{needed / GB:.1f} GB are needed, allowed are {bound / GB:.1f}: {limits}")
    _prune(bound - needed)


def _written(graph: Graph, tensors: Mapping[str, Floats], weights: Weights, folder: Path) -> Path:
    """Have ONNX Runtime write both files. Raises LoadError, OSError, and what ONNX Runtime does."""
    import onnxruntime as ort

    identity = weights.identity()
    content = graph.body + _declared(graph, tensors, weights, folder / WIDENED)
    least = LEAST_TENSOR_BYTES
    while True:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4  # a full disk is told by us
        options.optimized_model_filepath = str(folder / GRAPH)
        for key, text in {**SAVING, LEAST_TENSOR: str(least)}.items():
            options.add_session_config_entry(key, text)
        ort.InferenceSession(content, options, providers=["CPUExecutionProvider"], disabled_optimizers=(SLOWER,))
        aligned, odd = _alignment((folder / GRAPH).read_bytes())
        if aligned:
            break
        if odd < least:
            raise OSError(f"ONNX Runtime {ort.__version__} wrote tensors at odd places")
        least = odd + 1  # tensors below this size lie in the graph, where each is aligned
        (folder / TENSORS).unlink()
    (folder / WIDENED).unlink(missing_ok=True)
    if weights.identity() != identity:
        raise LoadError(f"{weights.folder}: the weights changed while they were read: start again")
    weights.release()
    with (folder / TENSORS).open("ab") as file:
        file.write(TRAILER.pack(MARK, file.tell(), hashlib.sha256((folder / GRAPH).read_bytes()).digest()))
    return folder / GRAPH


def _alignment(onnx: bytes) -> tuple[bool, int]:
    """Whether all tensors of a graph that lie in a file are aligned there; bytes of the largest that misaligns the next."""
    aligned, odd = True, 0
    for tensor in (part for graph in parts(onnx, 7) for part in parts(graph, 5)):  # ModelProto.graph.initializer
        facts = {next(parts(entry, 1)): next(parts(entry, 2)) for entry in parts(tensor, 13)}  # .external_data
        packed = [int(number) for key, text in facts.items() if key.startswith(b"prepacked") for number in PLACES.findall(text)]
        places = [int(facts.get(b"offset", 0)), *packed[::2]]
        aligned = aligned and not any(place % ALIGNMENT for place in places)
        lengths = [int(facts.get(b"length", 0)), *packed[1::2]]
        odd = max(odd, lengths[0] if any(length % ALIGNMENT for length in lengths) else 0)
    return aligned, odd


def parts(message: bytes, field: int) -> Iterator[bytes]:
    """The values of a field of a protobuf message that holds messages or texts."""
    fields = message_fields(message, 0, len(message))
    return (message[place] for number, place in fields if number == field and isinstance(place, slice))


def _declared(graph: Graph, tensors: Mapping[str, Floats], weights: Weights, widened: Path) -> bytes:
    """The graph's tensors, declared where they lie: in the checkpoint's files as they are, or widened in one of our own."""
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

    facts = f"{ort.__version__} {SLOWER} {SAVING} {LEAST_TENSOR_BYTES} {ALIGNMENT} {_processor()}".encode()
    return hashlib.sha256(b"\0".join((graph.onnx, facts, weights.identity()))).hexdigest()[:32]


def _processor() -> str:
    """What packed forms depend on: its kind, and its flags where Linux tells them."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()}"


def _is_whole(path: Path) -> bool:
    """Whether both files are there and as long as they were written."""
    try:
        with (path / TENSORS).open("rb") as file:
            file.seek(-TRAILER.size, os.SEEK_END)
            length = file.tell()
            expected = MARK, length, hashlib.sha256((path / GRAPH).read_bytes()).digest()
            return TRAILER.unpack(file.read()) == expected
    except OSError:
        return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
