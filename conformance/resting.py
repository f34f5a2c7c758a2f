"""What idle processes hold in memory, and how soon they work: `python -m conformance.resting`

Starts a server of the embedded model on each backend that is installed, with `--idle-unload`; asks
it, waits until the engine's process has ended, and asks again. Then starts ten relays, `hybridtei
mcp NAME --url URL`, one after the other, and sends `initialize` to each. Prints a line for each
state: PSS (pages that several processes share count once), RSS and anonymous memory of all
processes in MB, and the seconds until an answer. Exit status 1 if the relays take more than 600 MB
together, or one more than half a second to answer.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformance.families.shapes.serving import descendants
from conformance.processes import DIRECT, free_port, served, started

# Package -> backend
NAMES = {"onnxruntime": "ort", "openvino": "openvino", "torch": "torch"}
KINDS = ("Pss", "Rss", "Anonymous")
RELAYS, MOST_MEGABYTES, MOST_SECONDS = 10, 600, 0.5
IDLE_SECONDS, LOOK_SECONDS, HANG_SECONDS = 3, 0.1, 60
WAKINGS = 5
TEXTS = [f"hybrid search {number}" for number in range(32)]
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "resting", "version": "0"},
    },
}


def megabytes(processes: Sequence[int], kind: str) -> float:
    """The memory of processes and their descendants. `kind`: a key of `smaps_rollup`."""
    kilobytes = 0
    for process in [*processes, *(child for each in processes for child in descendants(each))]:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                kilobytes += int(line.split()[1])
    return kilobytes / 1000


def show(state: str, *processes: int) -> None:
    sizes = ", ".join(f"{kind} {megabytes(processes, kind):.0f} MB" for kind in KINDS)
    print(f"{state}: {sizes}", flush=True)


def post(url: str, body: Any) -> bytes:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with DIRECT.open(request, timeout=HANG_SECONDS) as answer:
        content: bytes = answer.read()
    return content


def is_loaded(url: str) -> bool:
    with DIRECT.open(f"{url}/metrics", timeout=HANG_SECONDS) as answer:
        return b"\nhybridtei_loaded_models 1\n" in answer.read()


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """The URL and the process of a running server."""
    port = free_port()
    with started(served(port, *flags), port, folder / "log") as process:
        yield f"http://127.0.0.1:{port}", process.pid


def rest(folder: Path, name: str, *flags: str) -> None:
    """Print a server's memory in use and at rest, and the seconds of requests that wake it."""
    with server(folder, *flags) as (url, process):
        expected = post(f"{url}/embed", {"inputs": TEXTS})
        show(f"{name}, in use", process)
        warm, waking = [], []
        for _ in range(WAKINGS):
            began = time.perf_counter()
            post(f"{url}/embed", {"inputs": TEXTS[0]})
            warm.append(time.perf_counter() - began)
        for _ in range(WAKINGS):
            while is_loaded(url) or descendants(process):
                time.sleep(LOOK_SECONDS)
            if not waking:
                show(f"{name}, at rest", process)
            began = time.perf_counter()
            post(f"{url}/embed", {"inputs": TEXTS[0]})
            waking.append(time.perf_counter() - began)
        assert post(f"{url}/embed", {"inputs": TEXTS}) == expected
        show(f"{name}, woken", process)
        print(
            f"{name}: a text is answered in {statistics.median(warm):.3f} s; from rest in "
            f"{statistics.median(waking):.2f} s, at most {max(waking):.2f} s",
            flush=True,
        )


def relay(folder: Path) -> bool:
    """Start the relays, and print their memory and the seconds of each. False above a bound."""
    with server(folder, "--qdrant-path", str(folder / "qdrant")) as (url, _), ExitStack() as stack:
        relays: list[subprocess.Popen[bytes]] = []
        seconds: list[float] = []
        for _ in range(RELAYS):
            began = time.perf_counter()
            relays.append(
                subprocess.Popen(
                    [sys.executable, "-m", "hybridtei", "mcp", "notes", "--url", url],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            stack.callback(relays[-1].wait)
            sending, receiving = relays[-1].stdin, relays[-1].stdout
            assert sending is not None
            assert receiving is not None
            stack.callback(sending.close)
            sending.write(json.dumps(INITIALIZE).encode() + b"\n")
            sending.flush()
            answer = json.loads(receiving.readline())
            seconds.append(time.perf_counter() - began)
            assert "result" in answer, answer
        processes = [process.pid for process in relays]
        show(f"{RELAYS} relays", *processes)
        print(
            f"{RELAYS} relays: `initialize` is answered {statistics.median(seconds):.2f} s after "
            f"the start of the process, at most {max(seconds):.2f} s",
            flush=True,
        )
        largest = max(megabytes(processes, kind) for kind in ("Pss", "Rss"))
        return largest <= MOST_MEGABYTES and max(seconds) <= MOST_SECONDS


def main() -> int:
    print(f"load of the machine: {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with server(Path(folder)) as (url, process):
            post(f"{url}/embed", {"inputs": TEXTS})
            show("without the flag, in use", process)
        for package, name in NAMES.items():
            if find_spec(package) is not None:
                rest(Path(folder), name, "--idle-unload", str(IDLE_SECONDS), "--backend", name)
        return 0 if relay(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
