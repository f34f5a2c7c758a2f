"""Which files of the package run for one warm request, recorded inside a real server.

The command line is the package's own. Before it runs, a profile function is set in every thread that starts; it notes a frame's
file while recording is on. A separate thread is the client: it warms each route, then records one request.
"""

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
    "/search": {"collection": "notes", "query": "cosine of vectors"},
}


class Recorder:
    """A profile function; `files`: the package's files in which a function was called while `recording`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.recording = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.recording and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
                self.files.add(code.co_filename)

    def record(self, work: Callable[[], object]) -> list[str]:
        """The files that ran during `work`, sorted."""
        self.files.clear()
        self.recording = True
        work()
        time.sleep(SETTLE_SECONDS)
        self.recording = False
        return sorted(str(Path(file).relative_to(PACKAGE)) for file in self.files)


def play_client(recorder: Recorder, port: int, found: dict[str, list[str]]) -> None:
    """Wait for the server, record each request into `found`, and end the server."""
    address = f"http://127.0.0.1:{port}"
    try:
        while not answers(
            f"{address}/health"
        ):  # where the server does not start, this process ends, and with it this thread
            time.sleep(0.1)
        for path, body in REQUESTS.items():
            for _ in range(WARM_REQUESTS):
                _post(f"{address}{path}", body)
            found[path] = recorder.record(
                lambda path=path, body=body: _post(f"{address}{path}", body)
            )  # type: ignore[misc]
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _post(address: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        answer.read()


def run() -> dict[str, list[str]]:
    """Request -> the files of the package that run for it. An ingested document counts from the start of the command."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    found: dict[str, list[str]] = {}
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
        found["an ingested document"] = recorder.record(lambda: main(ingest))
        reserved.close()
        threading.Thread(target=play_client, args=(recorder, port, found), daemon=True).start()
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
    return found


if __name__ == "__main__":
    print(json.dumps(run()))
