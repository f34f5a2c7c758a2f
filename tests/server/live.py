"""Real servers on free ports: uvicorn in a thread over the fake backend, and processes of the
command itself."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from conformance.small.fake_backend import FakeBackend
from hybridtei import cli
from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.load import default_alias
from hybridtei.server import run
from hybridtei.server.app import context_for, create_models_app
from hybridtei.server.models import Models
from hybridtei.server.run import DrainingServer, settings_of
from hybridtei.system import logs
from hybridtei.system import memory as heap
from hybridtei.system.metrics import Registry
from tests.inference.engine import small

ROOT = Path(__file__).parents[2]
# Seconds after which something that should end at once has hung
HANG = 60
JSON = {"content-type": "application/json"}
POSTS = [
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/embed_hybrid",
    "/embed_multivector",
    "/v1/embeddings",
    "/embeddings",
    "/similarity",
    "/tokenize",
    "/decode",
    "/predict",
    "/rerank",
    "/invocations",
    "/vertex",
]
VALID = {"inputs": ["a hybrid search", "one two"], "outputs": ["dense", "sparse", "multivector"]}


@dataclass
class Running:
    """A server, and what is behind it."""

    url: str
    port: int
    service: EngineService
    registry: Registry
    client: httpx.Client
    connections: set[Any]

    @property
    def backend(self):
        assert isinstance(self.service.backend, FakeBackend)
        return self.service.backend

    def post(self, path, body, **settings):
        """`body`: bytes as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, content=content, **{"headers": JSON, **settings})

    def get(self, path, **settings):
        return self.client.get(path, **settings)

    def is_well(self):
        """A fixed valid request is answered as ever, and every permit is there."""
        assert self.post("/embed_hybrid", VALID).json() == valid_answer()
        # A request whose client has left gives its permits back when its pass has ended
        free = self.service.config.max_concurrent_requests
        until(lambda: self.service.admission.free == free)


@contextmanager
def serving(
    spec=None,
    *,
    server=None,
    engine=None,
    model=None,
    model_id="small",
    verify=None,
    schemas=None,
    clock=None,
    **backend,
):
    """uvicorn in a thread, settings as `run_server` has them; `verify`: of a server that speaks
    TLS; `clock`: the time of its connections; `backend`: see `small.service`."""
    registry = Registry()
    service = small.service(spec, engine, registry=registry, **backend)
    settings = ServerConfig(**(server or {}))
    app = create_app(
        service,
        settings,
        ModelConfig(model_id=model_id, **(model or {})),
        registry=registry,
        schemas=schemas,
    )
    of_uvicorn = settings_of(app, settings, app.state.limits, app.state.certificate)
    if clock is not None:
        clock.drive(of_uvicorn)
    uvicorn_server = uvicorn.Server(of_uvicorn)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=uvicorn_server.run, args=([listening],), daemon=True)
        thread.start()
        url = f"{'https' if verify else 'http'}://127.0.0.1:{port}"
        transport = httpx.HTTPTransport(retries=20, verify=verify or True)
        with httpx.Client(
            base_url=url, timeout=HANG, transport=transport, trust_env=False
        ) as client:
            # It waits in the backlog until the server accepts
            assert client.get("/metrics").status_code == 200
            yield Running(
                url, port, service, registry, client, uvicorn_server.server_state.connections
            )
        uvicorn_server.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive()


@contextmanager
def serving_app(app):
    """The URL of an application in a thread of this process."""
    server = uvicorn.Server(settings_of(app, ServerConfig(), app.state.limits, None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive()


class Hold:
    """A gate that holds passes while told to."""

    def __init__(self):
        self.entered = threading.Event()
        self._go = threading.Event()

    def __call__(self, _):
        self.entered.set()
        assert self._go.wait(HANG)

    def let_go(self):
        self._go.set()


def until(condition):
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def create_app(
    service,
    server,
    model=None,
    *,
    registry=None,
    schemas=None,
):
    """An ASGI application over one service, which it starts and stops. `registry`: the one that the
    service counts in."""
    model = model or ModelConfig()
    context = context_for(service, server, model, registry or Registry())
    return create_models_app(
        Models({default_alias(model.model_id): context}), server, schemas=schemas
    )


@contextmanager
def commanded(*flags):
    """The URL of `hybridtei serve` with these flags, in a thread of this process: all of it but its
    signals, its log's form and its heaps. It has to end with status 0; "" is the URL of one that
    did not start, which has to end with 1."""
    statuses = []
    urls = []
    servers = []
    settled = threading.Event()

    class Unsignalled(DrainingServer):
        @contextmanager
        def capture_signals(self):
            servers.append(self)
            yield

        def announce(self):
            super().announce()
            urls.append(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}")
            settled.set()

    def command():
        hostname = () if "--hostname" in flags else ("--hostname", "127.0.0.1")
        statuses.append(cli.main(["serve", *hostname, "--port", "0", *flags]))
        settled.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "DrainingServer", Unsignalled)
        patch.setattr(logs, "configure", lambda **_: None)
        patch.setattr(heap, "limit_heaps", lambda: None)
        # This process lives on
        patch.setattr(gc, "freeze", lambda: None)
        thread = threading.Thread(target=command, daemon=True)
        thread.start()
        assert settled.wait(HANG), "not ready"
    try:
        yield urls[0] if urls else ""
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(HANG)
    assert statuses == [0 if urls else 1]


@cache
def valid_answer():
    """What a fresh server answers."""
    with serving() as server:
        return server.post("/embed_hybrid", VALID).json()


class Process:
    """A server process: its address, once it says Ready, and what it wrote."""

    def __init__(self, command, environment=None):
        known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        settings = {
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "",
            "OMP_NUM_THREADS": "1",
            **known,
            **(environment or {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self.errors = []
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(
                target=self._read, args=(self.process.stdout, self.lines), daemon=True
            ),
            threading.Thread(
                target=self._read, args=(self.process.stderr, self.errors), daemon=True
            ),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, into):
        for line in stream:
            into.append(line)
            if "Ready" in line:
                self._ready.set()
        self._ready.set()

    def wait_ready(self):
        """Its URL."""
        assert self._ready.wait(HANG), "not ready"
        found = re.search(r"Starting HTTP server: [\d.]+:(\d+)", "".join(self.lines))
        assert found is not None, "".join(self.errors)
        return f"http://127.0.0.1:{found[1]}"

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        """Its status."""
        status = self.process.wait(HANG)
        for reader in self._readers:
            reader.join(HANG)
        return status

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def process(command, environment=None):
    running = Process(command, environment)
    try:
        yield running
    finally:
        running.close()
