"""What this process may use of its machine: processors, GPUs, priorities, a cache folder, optional packages; and how it
starts other processes.

A container or `taskset` may leave fewer processors than the machine has.

Python processes of this package are started so that they find no modules in the working folder. `python -m` and `python -c`
search it before the standard library, and an empty or relative entry of `PYTHONPATH` means that folder too. A user who runs
`hybridtei ingest .` may have strangers' files there, `msgspec.py` among them.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from hybridtei.errors import LoadError

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<microseconds> <period>", or "max <period>"
QUOTA_V1 = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))  # -1: no quota
GRANTED = "HYBRIDTEI_CORES"  # set by schedulers of ours that share out a machine's processors without fences, as Ray does


def available_cores(quota_file: Path = QUOTA, v1_files: tuple[Path, Path] = QUOTA_V1) -> int:
    """Return the least of the machine's processors, the affinity mask, the container's quota and HYBRIDTEI_CORES; at least
    1."""
    affinity = len(_affinity())
    granted = os.environ.get(GRANTED, "")
    return max(
        1, min(affinity, _quota([quota_file], [*v1_files]) or affinity, int(granted) if granted.isdecimal() else affinity)
    )


def _quota(*versions: Sequence[Path]) -> int | None:
    """Return the cores of the first version of cgroups that has its files, or None without a quota. A version's files hold the
    microseconds of a period that may be used, and the period's."""
    for files in versions:
        try:
            allowed, period = " ".join(file.read_text() for file in files).split()[:2]
            return None if allowed == "max" or int(allowed) < 0 else ceil(int(allowed) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


def own_processors() -> tuple[int, ...]:
    """Return the numbers of the processors that this process may use, where it may use all of each; else nothing.

    A virtual machine's kernel takes an idle processor for one that its host has taken away, and wakes a thread on the processor
    of the thread that wakes it (Linux, `available_idle_cpu`). Two threads that wait actively for each other then share a
    processor until the next tick: a pass takes 10 ms and not 4. Threads with a processor each do not.
    """
    numbers = sorted(_affinity()) if hasattr(os, "sched_setaffinity") else []
    return tuple(numbers) if len(numbers) == available_cores() else ()


def move_to(processors: Collection[int]) -> Collection[int]:
    """Let the calling thread run on these processors only; return those that it could, or nothing where the system refuses."""
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, processors)
    except OSError:  # a container may be given other processors while it runs
        return ()
    return before


def _affinity() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


ALL = "all"
MAX_REPLICAS = 64


def cuda_devices(setting: str | None, count: int) -> list[str]:
    """torch's names of the devices, one a replica; without a setting the first. `count`: how many there are, at least one.

    Raises LoadError, naming what is wrong.
    """
    if setting is None:
        return ["cuda:0"]
    if setting == ALL:
        return [f"cuda:{number}" for number in range(count)]
    numbers = [part.strip() for part in setting.split(",")]
    for number in numbers:
        if not (number.isascii() and number.isdecimal() and int(number) < count):
            raise LoadError(f"`cuda-devices` is {setting!r}: it should name numbers from 0 to {count - 1}, or be {ALL!r}")
    if len(numbers) > MAX_REPLICAS:
        raise LoadError(f"`cuda-devices` names {len(numbers)} replicas, more than {MAX_REPLICAS}")
    return [f"cuda:{int(number)}" for number in numbers]


class LaneKind(StrEnum):
    """Which requests a lane takes: short ones, or all others."""

    EXPRESS = "express"
    BULK = "bulk"


def both_lanes(cores: int) -> tuple[LaneKind, ...]:
    """Return as many express lanes as cores, and as many bulk lanes."""
    return (LaneKind.EXPRESS,) * cores + (LaneKind.BULK,) * cores


def lower_priority(niceness: int) -> bool:
    """Lower the priority of the calling thread and those it starts. Return False where the operating system refuses."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)  # on Linux a thread has one of its own
    except (OSError, AttributeError):
        return False
    return True


def cache_folder(kind: str) -> Path:
    """HYBRIDTEI_CACHE itself, or the folder of that kind below the user's cache folder. Raises LoadError without a home."""
    own, caches = os.environ.get("HYBRIDTEI_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "hybridtei" / kind
    except RuntimeError as error:  # a container's user without HOME and without an entry in /etc/passwd
        raise LoadError("this user has no home folder to keep a cache in: set HYBRIDTEI_CACHE to a folder") from error


def private_folder(folder: Path) -> Path:
    """Make a folder of mode 0700 unless it exists, and return it. Raises OSError if it is another user's or open to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder of this user's own (`chmod 700 {folder}` where it is yours)")
    return folder


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` at the end, unless there is an error: whole or not at all, whoever else writes the
    same meanwhile.

    Until then it has no name, where the system has such files, so that nothing of it stays when the process is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part, is_named = path.with_name(f"{path.name}.{uuid4().hex}.part"), False
    try:
        file: BinaryIO = os.fdopen(os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except (AttributeError, OSError):  # not on Linux, or a file system without them
        file, is_named = part.open("xb"), True
    try:
        with file:
            yield file
            file.flush()
            if not is_named:
                os.link(f"/proc/self/fd/{file.fileno()}", part, src_dir_fd=file.fileno())  # so that the link is followed
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


PACKAGE_HOME = str(Path(__file__).parents[2])  # where this package lies
NEUTRAL = "/"  # a working folder for processes that are given absolute paths only


def python_command(*words: str) -> list[str]:
    """Python with these words, such as `-m`, a module, its arguments; `child_environment()` belongs to it."""
    return [sys.executable, "-P", *words]


def child_environment() -> dict[str, str]:
    """Return this process's environment with a `PYTHONPATH` of `search_path()`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}


def search_path() -> list[str]:
    """Return this process's `sys.path` for a child: absolute folders, and the working folder only where an absolute entry of
    `PYTHONPATH` names it, or this package lies in it."""
    named = {PACKAGE_HOME, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    folders = [path for path in sys.path if os.path.isabs(path) and (path in named or not _is_working_folder(path))]
    return list(dict.fromkeys(folders if PACKAGE_HOME in folders else [*folders, PACKAGE_HOME]))


FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def leave_process_one() -> None:
    """Return in a child if this is process 1, as in a container. The kernel drops signals that process 1 has no handler for,
    and a Python handler waits for the end of each call into C, such as the packing of a model's weights.

    Process 1 then only forwards signals and reaps what ends, and exits as the child does, or with 128 + its signal. To be
    called before this process has threads.
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
        elif arrived.si_code <= 0:  # the kernel itself sends a terminal's Ctrl-C to the child too
            os.kill(child, arrived.si_signo)


def _reap(child: int) -> None:
    """Collect ended processes; exit if the child is one of them."""
    while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
        if ended[0] == child:
            status = os.waitstatus_to_exitcode(ended[1])
            os._exit(status if status >= 0 else 128 - status)


def _is_working_folder(path: str) -> bool:
    try:
        return os.path.samefile(path, ".")
    except OSError:  # no such folder
        return False


def require_extra(extra: str, *packages: str) -> None:
    """Raise LoadError if a package of an extra is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise LoadError(f"the package `{package}` is missing: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return how to install an extra in a clone of the repository."""
    return f"pip install '.[{extra}]'"


TELEMETRY_OFF = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # hf_xet reads it too
    "RAY_USAGE_STATS_ENABLED": "0",
}


def turn_off_telemetry() -> None:
    """Set each variable that the user has not set; warn where ONNX Runtime was imported before and may report already."""
    if "onnxruntime" in sys.modules and "ORT_DISABLE_TELEMETRY" not in os.environ:
        warnings.warn(
            "onnxruntime was imported before hybridtei, so hybridtei cannot turn off the usage reports that it sends to its "
            "maker: import hybridtei first, or set ORT_DISABLE_TELEMETRY=1 in the environment",
            RuntimeWarning,
            stacklevel=3,
        )
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)
