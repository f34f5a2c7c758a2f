"""Reads files in a process of their own, so that a file costs at most a bounded time and memory.

Parsers of documents hold Python's lock for whole calls, crash, and for some files take a time that
is the square or the cube of the size. So a process reads one file after another for this one
(`reader_child`). It is ended when a file takes more processor time or memory than allowed, or when
it does not answer; the file then has a rejection, and the next file a new process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Self

import msgspec

from hybridtei.retrieval.ingest.document import Document, Rejection
from hybridtei.retrieval.ingest.options import MEGABYTE, ReadOptions

MODULE = "hybridtei.retrieval.ingest.reader_child"
# Processor time from one document of a file to the next: for any file, and for each megabyte of it
SECONDS, SECONDS_PER_MEGABYTE = 20, 2
# A process that waits, for a disk say, may take this many times as long
WAIT_FACTOR = 10
# Of a file, beyond what the process has before it. A text of 100 MB takes 700 MB
MEMORY_BYTES = 1_000_000_000
# For an ended process to be gone
END_SECONDS = 5
EXCERPT_CHARACTERS = 200


class Request(msgspec.Struct, array_like=True):
    """A file to read. `path`: as the file system has it. `size`: in bytes. `seconds`: of processor
    time from one document to the next. `memory_bytes`: beyond what the process has before."""

    path: bytes
    label: str
    size: int
    options: ReadOptions
    seconds: float
    memory_bytes: int


class Found(msgspec.Struct, array_like=True):
    """A document or a rejection, and the bytes of the file read so far. Neither: the file's end."""

    document: Document | None = None
    rejection: Rejection | None = None
    read_bytes: int = 0


def excerpt(data: object) -> str:
    """The first characters of a record, made printable."""
    if isinstance(data, bytes):
        data = data[: 4 * EXCERPT_CHARACTERS].decode(errors="backslashreplace")
    return str(data)[:EXCERPT_CHARACTERS].encode(errors="backslashreplace").decode()


class Reader:
    """A process that reads files. One thread may read at a time; any thread may call `stop`.

    `seconds`: of processor time for a small file. `memory_bytes`: for any file.
    """

    def __init__(self, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        # To the process that runs
        self._pipe: Connection
        self._lock = Lock()
        self._decoder = msgspec.msgpack.Decoder(Found)
        self.is_stopped = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, unless it runs. It takes a third of a second to be ready."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._pipe, its_end = Pipe()
                with its_end:
                    number = its_end.fileno()
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-m", MODULE, str(number)],
                        pass_fds=[number],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        # Arrow's own allocators reserve address space, which is limited here
                        env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
                    )
                if self.is_stopped:
                    self._process.kill()
            return self._process

    def stop(self) -> None:
        """End the process at once. Whoever reads gets the end of the file."""
        self.is_stopped = True
        self.end()

    def end(self) -> None:
        """End the process. The next file starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def read(
        self, path: Path, label: str, size: int, options: ReadOptions
    ) -> Iterator[tuple[Document | Rejection, int]]:
        """Yield (document or rejection, bytes of the file read so far). The last one is a rejection
        if the process ended."""
        location, read_bytes = "file", 0
        if self.is_stopped:
            return
        process, pipe = self.start(), self._pipe
        # Without the fields of an ingest
        plain = ReadOptions(**options.as_dict())
        seconds = self._seconds + SECONDS_PER_MEGABYTE * size / MEGABYTE
        request = Request(os.fsencode(path), label, size, plain, seconds, self._memory_bytes)
        is_whole = False
        try:
            with suppress(OSError):
                pipe.send_bytes(msgspec.msgpack.encode(request))
            for message in self._answers(process, pipe, WAIT_FACTOR * seconds):
                part = message.document or message.rejection
                if part is None:
                    is_whole = True
                    return
                location, read_bytes = f"after {part.location}", message.read_bytes
                yield part, read_bytes
            # Its status says why it ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        finally:
            # Also if the caller wants no more of this file
            if not is_whole:
                self.end()
        if not self.is_stopped:
            yield Rejection(label, location, _reason(process.returncode, request)), size

    def _answers(
        self, process: subprocess.Popen[bytes], pipe: Connection, wait_s: float
    ) -> Iterator[Found]:
        """Yield what the process finds, until it ends or is silent for too long."""
        with suppress(EOFError, OSError):
            while True:
                readable, _, _ = select.select([pipe], [], [], wait_s)
                if not readable:
                    process.kill()
                yield self._decoder.decode(pipe.recv_bytes())


def _reason(status: int, request: Request) -> str:
    """Why the process ended without an answer. `status`: its exit status."""
    if status == -signal.SIGPROF:
        return f"reading it takes more than {request.seconds:.0f} s of processor time"
    if status == -signal.SIGKILL:
        wait_s = WAIT_FACTOR * request.seconds
        return f"its reader was ended, or gave no answer for {wait_s:.0f} s"
    name = f"exit status {status}"
    if status < 0:
        name = signal.Signals(-status).name
    return (
        f"its reader crashed ({name}): the file is damaged, or takes more than "
        f"{request.memory_bytes / MEGABYTE:.0f} MB of memory to read"
    )
