"""Compares ASGI servers: the same Litestar application under each, alternating, on this machine.

    python conformance/load/asgi_servers.py [--rounds 5] [--clients 32] [--seconds 3]

The application answers POST /embed with a vector of 384 floats and does no other work, so what is compared is the servers'
own cost. Prints requests/s and CPU microseconds a request (server process only), medians over rounds, and the ratio to uvicorn.
Servers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time

import psutil

APP = """
import os, numpy, orjson
from litestar import Litestar, Request, post
from litestar.response.base import ASGIResponse
BODY = orjson.dumps(numpy.random.rand(1, 384).astype("float32"), option=orjson.OPT_SERIALIZE_NUMPY)
@post("/embed", status_code=200)
async def embed(request: Request) -> ASGIResponse:
    await request.body()
    return ASGIResponse(body=BODY, media_type="application/json")
app = Litestar([embed], openapi_config=None)
"""
COMMANDS = {
    "uvicorn": "uvicorn --loop uvloop --http httptools --no-access-log --log-level error --port {port} bench_app:app",
    "granian": "granian --interface asgi --loop uvloop --workers 1 --log-level error --port {port} bench_app:app",
    "hypercorn": "hypercorn --worker-class uvloop --log-level error --bind 127.0.0.1:{port} bench_app:app",
}
REQUEST = (
    b'POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 24\r\n\r\n{"inputs":"hello world"}'
)


async def client(port: int, until: float) -> int:
    """One keep-alive connection, one request at a time; how many were answered with 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = 0
    while time.monotonic() < until:
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        answered += head.startswith(b"HTTP/1.1 200")
    writer.close()
    return answered


async def load(port: int, clients: int, seconds: float) -> int:
    until = time.monotonic() + seconds
    return sum(await asyncio.gather(*(client(port, until) for _ in range(clients))))


def cpu_seconds(process: psutil.Process) -> float:
    everyone = [process, *process.children(recursive=True)]
    return sum(one.cpu_times().user + one.cpu_times().system for one in everyone)


def measure(name: str, clients: int, seconds: float, folder: str) -> tuple[float, float]:
    """(requests/s, CPU microseconds a request) of one server, started for this."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *COMMANDS[name].format(port=port).split()]
    server = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": folder})
    try:
        wait_for(port)
        asyncio.run(load(port, clients, 0.5))
        before = cpu_seconds(psutil.Process(server.pid))
        answered = asyncio.run(load(port, clients, seconds))
        used = cpu_seconds(psutil.Process(server.pid)) - before
        return answered / seconds, used / answered * 1e6
    finally:
        server.terminate()
        server.wait(20)


def wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on {port}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench_app.py").write_text(APP)
        names = [name for name in COMMANDS if importlib.util.find_spec(name)]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                found[name].append(measure(name, options.clients, options.seconds, folder))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    rates = {name: statistics.median(rate for rate, _ in runs) for name, runs in found.items()}
    for name, runs in found.items():
        cost = statistics.median(cost for _, cost in runs)
        ratio = rates[name] / rates["uvicorn"]
        print(f"{name:10} {rates[name]:8.0f} requests/s  {cost:6.0f} us CPU a request  {ratio:5.2f} x uvicorn")
    print(json.dumps({"requests_per_s": rates}))


if __name__ == "__main__":
    main()
