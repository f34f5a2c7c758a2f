"""The resources of this process: processors, GPUs, priorities, cache folder, optional packages; and
its child processes.

A container or `taskset` may allow fewer processors than the machine has.

Python child processes must not import modules from the working folder. `python -m`, `python -c` and
an empty or relative entry of `PYTHONPATH` search it first. A user who runs `hybridtei ingest .` may
have strangers' files there, such as `msgspec.py`.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from hybridtei.errors import LoadError, UnsafeFile

# Cgroup v2: "<microseconds> <period>", or "max <period>"
QUOTA = Path("/sys/fs/cgroup/cpu.max")
# -1: no quota
QUOTA_V1 = (
    Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
    Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
# Set by a scheduler, such as Ray, that assigns processors without enforcing it
GRANTED = "HYBRIDTEI_CORES"
# Windows has no such flags, and all its files have the user 0, which is what `int()` returns
NO_WAITING: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
effective_user: Callable[[], int] = getattr(os, "geteuid", int)


def available_cores(quota_file: Path = QUOTA, v1_files: tuple[Path, Path] = QUOTA_V1) -> int:
    """Return the least of the machine's processors, the affinity mask, the container's quota,
    HYBRIDTEI_CORES; at least 1."""
    counts = [len(_affinity())]
    if quota := _quota([quota_file], [*v1_files]):
        counts.append(quota)
    granted = os.environ.get(GRANTED, "")
    if granted.isdecimal():
        counts.append(int(granted))
    return max(1, min(counts))


def _quota(*versions: Sequence[Path]) -> int | None:
    """Return the container's cores, or None without a quota, from the first cgroup version with
    files. They hold the allowed microseconds in a period, and the period's microseconds."""
    for files in versions:
        try:
            allowed, period = " ".join(file.read_text() for file in files).split()[:2]
            if allowed == "max" or int(allowed) < 0:
                return None
            return ceil(int(allowed) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


def own_processors() -> tuple[int, ...]:
    """Return the numbers of this process's processors, or nothing if it may only use a share of
    each.

    In a virtual machine the kernel treats an idle processor as one that the host took away, and
    wakes a thread on the processor of its waker (Linux, `available_idle_cpu`). Two threads that
    spin for each other then share a processor until the next tick: a pass takes 10 ms, not 4.
    Pinned threads do not.
    """
    numbers = sorted(_affinity()) if hasattr(os, "sched_setaffinity") else []
    return tuple(numbers) if len(numbers) == available_cores() else ()


def _affinity() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


class LaneKind(StrEnum):
    """The requests that a lane takes: short ones, or all others."""

    EXPRESS = "express"
    BULK = "bulk"


def both_lanes(cores: int) -> tuple[LaneKind, ...]:
    """Return one express lane and one bulk lane a core."""
    return (LaneKind.EXPRESS,) * cores + (LaneKind.BULK,) * cores


def lower_priority(niceness: int) -> bool:
    """Lower the priority of the calling thread and of threads that it starts. Return False if the
    system refuses."""
    try:
        # On Linux each thread has its own priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except (OSError, AttributeError):
        return False
    return True


def cache_folder(kind: str) -> Path:
    """Return HYBRIDTEI_CACHE, or `hybridtei/KIND` in the user's cache folder. Raises LoadError if
    the user has no home."""
    own = os.environ.get("HYBRIDTEI_CACHE")
    if own:
        return Path(own)
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(caches, "hybridtei", kind)
    except RuntimeError as error:
        # A container's user without HOME and without an entry in /etc/passwd
        raise LoadError(
            "this user has no home folder to keep a cache in: set HYBRIDTEI_CACHE to a folder"
        ) from error


def private_folder(folder: Path) -> Path:
    """Make a folder of mode 0700, or check an existing one. Raises OSError if it is another user's
    or open to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != effective_user()
        or status.st_mode & 0o077
    ):
        raise OSError(
            f"{folder} is not a private folder of this user (`chmod 700 {folder}` where it is "
            "yours)"
        )
    return folder


def read_bounded(path: Path, most: int) -> bytes:
    """Read a file that a flag or a checkpoint names, perhaps a device or a pipe, whose size is
    unknown. Raises LoadError above `most` bytes, OSError."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise LoadError(f"{path}: larger than {most} bytes")
    return content


def open_own(folder: Path, name: str, flags: int) -> int:
    """Open a file below a folder that a stranger may have filled, such as an unpacked archive.
    Return its descriptor.

    `flags`: those of `os.open` without O_TRUNC, which would come before the checks. The folder
    itself may be a link. Raises UnsafeFile if the file or a folder on the way to it fails
    `check_own`, OSError.
    """
    check_own(folder, follow_links=True)
    path = folder
    for part in Path(name).parts[:-1]:
        path /= part
        check_own(path)
    path = folder / name
    try:
        # O_NONBLOCK: opening a named pipe does not wait for its other end.
        descriptor = os.open(path, flags | NO_WAITING, 0o666)
    except OSError:
        # The check's error says more than that of `open`
        with suppress(FileNotFoundError):
            check_own(path)
        raise
    try:
        _check_status(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_own(path: Path, *, follow_links: bool = False) -> None:
    """Raises UnsafeFile unless this is a folder or a file of one name that belongs to this user or
    root; OSError."""
    _check_status(path, path.stat(follow_symlinks=follow_links))


def check_own_tree(folder: Path) -> None:
    """Raises UnsafeFile if anything in the folder, or itself, fails `check_own`; OSError."""
    check_own(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            # Another process may remove a file meanwhile
            with suppress(FileNotFoundError):
                check_own(Path(parent, name))


def is_own_alone(folder: Path) -> bool:
    """True if only this user and root may write to an existing folder, so that its files prove
    something."""
    try:
        check_own(folder, follow_links=True)
        return not folder.stat().st_mode & 0o022
    except OSError:
        return False


def is_same_file(path: Path, descriptor: int) -> bool:
    """True if the path leads to the open file or folder of this descriptor."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def _check_status(path: Path, status: os.stat_result) -> None:
    is_file = stat.S_ISREG(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        fault = "is a link"
    elif not is_file and not stat.S_ISDIR(status.st_mode):
        fault = "is neither a file nor a folder"
    elif is_file and status.st_nlink > 1:
        fault = "has several names (hard links)"
    elif status.st_uid not in (effective_user(), 0):
        fault = f"belongs to another user ({status.st_uid})"
    else:
        return
    raise UnsafeFile(
        f"{path} {fault}, so it was not opened: it may have come with another user's files; "
        "remove it, or choose another folder"
    )


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` at the end, unless an error is raised: `path` is never half
    written, even by two writers.

    On Linux the file has no name until then, so that a killed process leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    is_named = False
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
        file: BinaryIO = os.fdopen(descriptor, "wb")
    except (AttributeError, OSError):
        # Another system than Linux, or a file system without nameless files
        file = part.open("xb")
        is_named = True
    try:
        with file:
            yield file
            file.flush()
            if not is_named:
                # /proc's entry is a symbolic link, and only `linkat` follows it. Python calls
                # `linkat` if `src_dir_fd` is given; an absolute path ignores its value
                os.link(f"/proc/self/fd/{file.fileno()}", part, src_dir_fd=file.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


# This package's parent folder
PACKAGE_HOME = str(Path(__file__).parents[2])
# The working folder of processes that use only absolute paths
NEUTRAL = "/"


def python_command(*words: str) -> list[str]:
    """Return the command of Python with these arguments, such as `-m MODULE`. Use it with
    `child_environment()`."""
    return [sys.executable, "-P", *words]


def child_environment() -> dict[str, str]:
    """Return this process's environment with a `PYTHONPATH` of `search_path()`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}


def search_path() -> list[str]:
    """Return this process's `sys.path` for a child: absolute folders. The working folder is
    included only if an absolute entry of `PYTHONPATH` names it or this package lies in it."""
    trusted = {PACKAGE_HOME, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    folders = [
        path
        for path in sys.path
        if os.path.isabs(path) and (path in trusted or not _is_working_folder(path))
    ]
    return list(dict.fromkeys([*folders, PACKAGE_HOME]))


FORWARDED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def leave_process_one() -> None:
    """If this is process 1, as in a container, fork, and return only in the child. The kernel drops
    signals that process 1 does not handle, and a Python handler waits for the end of a call into C,
    such as the packing of a model's weights.

    Process 1 forwards signals, reaps ended processes, and exits with the child's status, or 128 +
    its signal. Call this before the process has threads.
    """
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
        return
    while True:
        arrived = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if arrived.si_signo == signal.SIGCHLD:
            _reap(child)
        elif arrived.si_code <= 0:
            # A program sent the signal. The kernel's own, such as a terminal's Ctrl-C, has a code
            # above 0 and also reaches the child
            os.kill(child, arrived.si_signo)


def _reap(child: int) -> None:
    """Reap ended processes. Exit if the child is one of them."""
    while True:
        process, wait_status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        if process == child:
            status = os.waitstatus_to_exitcode(wait_status)
            # -N: ended by signal N
            os._exit(status if status >= 0 else 128 - status)


def _is_working_folder(path: str) -> bool:
    try:
        return os.path.samefile(path, ".")
    except OSError:
        # The folder does not exist
        return False


def require_extra(extra: str, *packages: str) -> None:
    """Raises LoadError if a package of an extra is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise LoadError(f"the package `{package}` is missing: {install_command(extra)}")


def require_unix(what: str) -> None:
    """Raises LoadError on Windows."""
    if find_spec("fcntl") is None:
        raise LoadError(
            f"{what} needs Linux or macOS: on Windows use WSL or a container; `Encoder`, `Client` "
            "and `Index` in memory run there"
        )


def install_command(extra: str) -> str:
    """Return the command that adds an extra to the installed package, or to the image."""
    if "HYBRIDTEI_EMBEDDED_MODEL" in os.environ:
        return f"build the image with --build-arg EXTRAS=grpc,otlp,qdrant,{extra}"
    return f"pip install 'hybridtei[{extra}]'"


TELEMETRY_OFF = {
    "ORT_DISABLE_TELEMETRY": "1",
    # hf_xet reads it too
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def turn_off_telemetry() -> None:
    """Set the variables that the user has not set. Warn if ONNX Runtime is already imported: it may
    send reports already."""
    if "onnxruntime" in sys.modules and "ORT_DISABLE_TELEMETRY" not in os.environ:
        warnings.warn(
            "onnxruntime was imported before hybridtei, so hybridtei cannot turn off "
            "onnxruntime's usage reports: import hybridtei first, or set ORT_DISABLE_TELEMETRY=1 "
            "in the environment",
            RuntimeWarning,
            stacklevel=3,
        )
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)
