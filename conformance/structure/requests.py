"""What runs in the package for one warm request: files, calls, calls across files, and nested
coroutines.

The command line is the package's own, in a real server. Before it runs, a profile function is set
in every thread that starts; it notes each call of a function of the package while recording is on.
A separate thread is the client: it warms each route, then records requests one after the other. The
figures of a route are those of the request with the fewest calls, since timers may run beside one.
"""

import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hybridtei
from conformance.processes import answers, free_port
from hybridtei.cli import main

PACKAGE = str(Path(hybridtei.__file__).parent)
DOCUMENTS = (
    "Vectors of short texts are compared by their cosine.",
    "A sparse vector holds one weight for each word piece.",
)
WARM_REQUESTS = 3
RECORDED_REQUESTS = 5
START_SECONDS = 120
# Workers and writers finish their part after the answer
SETTLE_SECONDS = 0.2
REQUESTS: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": "what does a hybrid search need"},
    "/rerank": {"query": "cosine", "texts": [*DOCUMENTS]},
    "/embed_hybrid": {"inputs": "what does a hybrid search need"},
    "/search": {"collection": "notes", "query": "cosine of vectors"},
}


# Numbers that may only fall: files, calls, nested coroutines. Two runs of the same code differ by a
# few calls, since threads meet in another order.
BOUNDS: dict[str, tuple[int, int, int]] = {
    "/embed": (22, 204, 7),
    "/rerank": (26, 343, 7),
    "/embed_hybrid": (27, 280, 8),
    "/search": (37, 475, 11),
}


@dataclass(frozen=True)
class Record:
    """The calls of one request. `functions`: name -> number of calls, the most first."""

    files: list[str]
    calls: int
    calls_across_files: int
    nested_coroutines: int
    functions: dict[str, int]


class Recorder:
    """A profile function for every thread. It notes calls while `recording` is on: those of
    comprehensions, and the next steps of coroutines and generators, too."""

    def __init__(self) -> None:
        self.recording = False
        self._calls: list[tuple[CodeType, str, int]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.recording or event != "call" or not is_ours(frame):
            return
        caller = frame.f_back
        file = caller.f_code.co_filename if caller is not None and is_ours(caller) else ""
        self._calls.append((frame.f_code, file, depth_of(frame)))

    def record(self, work: Callable[[], object]) -> Record:
        """What is called during `work` and shortly after."""
        self._calls = []
        self.recording = True
        work()
        time.sleep(SETTLE_SECONDS)
        self.recording = False
        calls = self._calls
        counts: dict[str, int] = {}
        for code, _, _ in calls:
            name = f"{_short(code.co_filename)}:{code.co_qualname}"
            counts[name] = counts.get(name, 0) + 1
        across = [file for code, file, _ in calls if file and file != code.co_filename]
        return Record(
            files=sorted({_short(code.co_filename) for code, _, _ in calls}),
            calls=len(calls),
            calls_across_files=len(across),
            nested_coroutines=max((depth for _, _, depth in calls), default=0),
            functions=dict(sorted(counts.items(), key=lambda item: -item[1])),
        )


def is_ours(frame: FrameType) -> bool:
    """True for a function of the package; False for the body of a module."""
    code = frame.f_code
    return code.co_filename.startswith(PACKAGE) and code.co_name != "<module>"


def depth_of(frame: FrameType | None) -> int:
    """The number of the package's coroutines that await each other, down to this frame."""
    depth = 0
    while frame is not None:
        depth += bool(frame.f_code.co_flags & inspect.CO_COROUTINE and is_ours(frame))
        frame = frame.f_back
    return depth


def _short(file: str) -> str:
    return str(Path(file).relative_to(PACKAGE))


def play_client(recorder: Recorder, port: int, records: dict[str, Record]) -> None:
    """Wait for the server, record each request into `records`, and end the server."""
    try:
        # If the server does not start, this process ends, and with it this thread
        while not answers(f"http://127.0.0.1:{port}/health"):
            time.sleep(0.1)
        # One connection: its beginning is no part of a warm request
        connection = HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        for path, body in REQUESTS.items():
            ask = partial(_post, connection, path, body)
            for _ in range(WARM_REQUESTS):
                ask()
            attempts = [recorder.record(ask) for _ in range(RECORDED_REQUESTS)]
            records[path] = min(attempts, key=lambda record: record.calls)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _post(connection: HTTPConnection, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = [
        f"POST {path} HTTP/1.1",
        f"host: 127.0.0.1:{connection.port}",
        "content-type: application/json",
        f"content-length: {len(content)}",
    ]
    if connection.sock is None:
        connection.connect()
    # Head and body in one segment: a body that comes later costs further calls
    connection.sock.sendall("\r\n".join([*head, "", ""]).encode() + content)
    answer = HTTPResponse(connection.sock, method="POST")
    answer.begin()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {content[:200]!r}")


def run() -> dict[str, Record]:
    """Request -> what runs for it. An ingested document counts from the start of the command."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    records: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents")
        store = str(Path(folder, "store"))
        documents.mkdir()
        for number, text in enumerate(DOCUMENTS):
            (documents / f"{number}.txt").write_text(text)
        ingest = ["ingest", str(documents), "--collection", "notes", "--qdrant-path", store]
        records["an ingested document"] = recorder.record(lambda: main(ingest))
        port = free_port()
        threading.Thread(target=play_client, args=(recorder, port, records), daemon=True).start()
        address = ["--hostname", "127.0.0.1", "--port", str(port)]
        main(["serve", *address, "--qdrant-path", store, "--log-level", "error"])
    return records


def above(records: Mapping[str, Record]) -> list[str]:
    """A sentence for each figure above its bound."""
    sentences = []
    for path, bounds in BOUNDS.items():
        record = records[path]
        figures = (len(record.files), record.calls, record.nested_coroutines)
        names = ("files", "calls", "nested coroutines")
        for name, figure, bound in zip(names, figures, bounds, strict=True):
            if figure > bound:
                sentences.append(f"{path}: {figure} {name}, and may have {bound} at most")
    return sentences


if __name__ == "__main__":
    print(json.dumps({name: asdict(record) for name, record in run().items()}))
