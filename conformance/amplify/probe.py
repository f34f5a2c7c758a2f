"""The cost of one request to its server: peak memory of all its processes, and how long the event
loop was blocked.

Runs inside the server's process; a socket tells it when a request begins and ends. The memory of
the other processes, such as an embedded store's, is the sum of their peaks. The surprise is how a
stall is counted: a timer on the loop that comes late may have been kept by our own code, or by a
neighbour who had the processor. So of the time it was late and the processor time that this process
took meanwhile the lesser counts; that finds a thread which holds Python's lock as well as a long
callback.
"""

import asyncio
import gc
import json
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import psutil
import uvicorn

from hybridtei.system.memory import trim

BEAT_SECONDS = 0.001
RESIDENT, PEAK = re.compile(r"VmRSS:\s+(\d+)"), re.compile(r"VmHWM:\s+(\d+)")
# See proc_pid_clear_refs(5)
RESET_PEAK = "5"


class Probe:
    """`connection`: from which `begin` and `end` come, a line each; each is answered with a line of
    JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beating = False
        self._wall = self._cpu = self._stall = 0.0
        # Kilobytes by process
        self._rest: dict[int, int] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch this loop, from now on."""
        self._loop = loop
        threading.Thread(target=self._serve, name="probe", daemon=True).start()

    def _serve(self) -> None:
        with self._connection.makefile("rw") as lines:
            for line in lines:
                answer = self._begin() if line == "begin\n" else self._end()
                lines.write(json.dumps(answer) + "\n")
                lines.flush()

    def _begin(self) -> dict[str, Any]:
        gc.collect()
        trim()
        self._rest = {process: _kilobytes(RESIDENT, process) for process in _processes()}
        for process in self._rest:
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        self._on_loop(self._start)
        return {"rest_bytes": sum(self._rest.values()) * 1024}

    def _end(self) -> dict[str, Any]:
        self._on_loop(self._stop)
        growth = sum(
            _kilobytes(PEAK, process) - self._rest.get(process, 0) for process in _processes()
        )
        return {"growth_bytes": growth * 1024, "stall_seconds": self._stall}

    def _on_loop(self, act: Any) -> None:
        done = threading.Event()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: (act(), done.set()))
        done.wait()

    def _start(self) -> None:
        self._stall, self._beating = 0.0, True
        self._wall, self._cpu = perf_counter(), process_time()
        self._next()

    def _next(self) -> None:
        assert self._loop is not None
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        if self._beating:
            self._look(BEAT_SECONDS)
            self._next()

    def _stop(self) -> None:
        self._look(0.0)
        self._beating = False

    def _look(self, planned: float) -> None:
        wall, cpu = perf_counter(), process_time()
        self._stall = max(self._stall, min(wall - self._wall - planned, cpu - self._cpu))
        self._wall, self._cpu = wall, cpu


def watch(descriptor: int) -> None:
    """Put a probe into the server that uvicorn starts in this process. `descriptor`: of the probe's
    socket."""
    probe = Probe(socket.socket(fileno=descriptor))
    startup = uvicorn.Server.startup

    async def watched(server: uvicorn.Server, sockets: Any = None) -> None:
        await startup(server, sockets)
        probe.attach(asyncio.get_running_loop())

    uvicorn.Server.startup = watched  # type: ignore[method-assign]


def _processes() -> list[int]:
    """This process and all that it has started."""
    whole = psutil.Process()
    return [process.pid for process in (whole, *whole.children(recursive=True))]


def _kilobytes(what: re.Pattern[str], process: int) -> int:
    """0 of a process that has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    value = what.search(status)
    return int(value[1]) if value else 0
