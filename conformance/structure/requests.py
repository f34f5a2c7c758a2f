"""What of the package runs for one warm request, recorded inside a real server.

The command line is the package's own. Before it runs, a profile function is set in every thread
that starts; it notes calls while recording is on. A separate thread is the client: it warms each
route, then records one request.
"""

import inspect
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import hybridtei
from conformance.processes import answers
from hybridtei.cli import main

PACKAGE = str(Path(hybridtei.__file__).parent)
DOCUMENTS = (
    "Vectors of short texts are compared by their cosine.",
    "A sparse vector holds one weight for each word piece.",
)
WARM_REQUESTS = 3
START_SECONDS = 120
SETTLE_SECONDS = 0.3  # lanes and writers finish their part after the answer
REQUESTS: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": "what does a hybrid search need"},
    "/rerank": {"query": "cosine", "texts": [*DOCUMENTS]},
    "/embed_hybrid": {"inputs": "what does a hybrid search need"},
    "/search": {"collection": "notes", "query": "cosine of vectors"},
}


@dataclass(frozen=True)
class Way:
    """What ran for one request.

    `calls`: of functions of the package; a coroutine that goes on counts again. `calls_across`: of
    these, calls by a function of another file. `nested`: coroutines of the package that await each
    other at the deepest place.
    """

    files: list[str]
    calls: int
    calls_across: int
    nested: int


class Recorder:
    """A profile function that counts the package's calls while `recording`."""

    def __init__(self) -> None:
        self.recording = False
        self._clear()

    def _clear(self) -> None:
        self.files: set[str] = set()
        self.calls = 0
        self.calls_across = 0
        self.nested = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.recording and event == "call" and _is_counted(frame):
            self.files.add(frame.f_code.co_filename)
            self.calls += 1
            caller = frame.f_back
            if caller is not None and _is_counted(caller):
                self.calls_across += caller.f_code.co_filename != frame.f_code.co_filename
            if frame.f_code.co_flags & inspect.CO_COROUTINE:
                self.nested = max(self.nested, _count_coroutines(frame))

    def record(self, work: Callable[[], object]) -> Way:
        """What ran during `work`."""
        self._clear()
        self.recording = True
        work()
        time.sleep(SETTLE_SECONDS)
        self.recording = False
        files = sorted(str(Path(file).relative_to(PACKAGE)) for file in self.files)
        return Way(files, self.calls, self.calls_across, self.nested)


def _is_counted(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "<module>"


def _count_coroutines(frame: FrameType | None) -> int:
    count = 0
    while frame is not None:
        count += _is_counted(frame) and bool(frame.f_code.co_flags & inspect.CO_COROUTINE)
        frame = frame.f_back
    return count


def play_client(recorder: Recorder, port: int, ways: dict[str, Way]) -> None:
    """Wait for the server, record each request into `ways`, and end the server."""
    address = f"http://127.0.0.1:{port}"
    try:
        # If the server does not start, this process ends, and this thread with it.
        while not answers(f"{address}/health"):
            time.sleep(0.1)
        for path, body in REQUESTS.items():
            for _ in range(WARM_REQUESTS):
                _post(f"{address}{path}", body)
            ways[path] = recorder.record(partial(_post, f"{address}{path}", body))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _post(address: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        answer.read()


def run() -> dict[str, Way]:
    """Request -> what of the package runs for it. An ingested document counts from the start of the command."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    ways: dict[str, Way] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as reserved,
    ):
        documents, store, port = (
            Path(folder, "documents"),
            str(Path(folder, "store")),
            reserved.getsockname()[1],
        )
        documents.mkdir()
        for number, text in enumerate(DOCUMENTS):
            (documents / f"{number}.txt").write_text(text)
        ingest = ["ingest", str(documents), "--collection", "notes", "--qdrant-path", store]
        ways["an ingested document"] = recorder.record(lambda: main(ingest))
        reserved.close()
        threading.Thread(target=play_client, args=(recorder, port, ways), daemon=True).start()
        main(
            [
                "serve",
                "--port",
                str(port),
                "--hostname",
                "127.0.0.1",
                "--qdrant-path",
                store,
                "--log-level",
                "error",
            ]
        )
    return ways


if __name__ == "__main__":
    print(json.dumps({name: asdict(way) for name, way in run().items()}))
