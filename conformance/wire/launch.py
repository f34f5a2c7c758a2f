"""A server for a profile: a process of a command line with TEI's flags, on a free port, until the block is left."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conformance.wire.asking import ask
from conformance.wire.case import Profile, Question

OURS = f"{shlex.quote(sys.executable)} -m hybridtei serve --model-id {{model}} --port {{port}}"
READY_SECONDS, STOP_SECONDS = 180, 20
OTHERS = ("MODEL_ID", "POOLING", "API_KEY", "TASK", "MAX_CLIENT_BATCH_SIZE", "DEFAULT_PROMPT")  # would speak for every profile


@contextmanager
def launched(template: str, profile: Profile, model: Path) -> Iterator[str]:
    """The URL of a server that answers. `template`: with `{model}` and `{port}`. Raises RuntimeError if it never does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.format(model=model, port=port) for word in shlex.split(template)] + list(profile.args)
    environment = {name: value for name, value in os.environ.items() if name not in OTHERS} | dict(profile.env)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: object) -> None:
    end = time.monotonic() + READY_SECONDS
    while True:
        try:
            if ask(url, Question(request="GET /health")).status == 200:
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > end:
            log.seek(0)  # type: ignore[attr-defined]
            said = log.read().decode(errors="replace")[-2000:]  # type: ignore[attr-defined]
            raise RuntimeError(f"the server did not start: {said}")
        time.sleep(0.1)
