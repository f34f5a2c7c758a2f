"""A server in a separate process, from its first answer until the end of the block."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS, STOP_SECONDS = 180.0, 40.0
# Ignores the environment's proxy
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def served(port: int | str, *flags: str) -> list[str]:
    """The command of `hybridtei serve`, on this machine alone."""
    address = ["--hostname", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "hybridtei", "serve", *address, *flags]


@contextmanager
def started(
    command: Sequence[str], port: int, log: Path, seconds: float = START_SECONDS, **settings: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers `/health` on `port`, with no 5xx. `settings`: of Popen.

    Raises RuntimeError, with the end of its log, if it ends or does not answer within `seconds`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **settings)
    try:
        deadline = time.monotonic() + seconds
        while not answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                told = log.read_text(errors="replace").strip()[-3000:]
                raise RuntimeError(
                    f"no server after {seconds:.0f} s, or it ended with {process.poll()}:\n{told}"
                )
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        DIRECT.open(url, timeout=60).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
    return True
