"""What HTTP costs: CPU microseconds of a server's processes for one short `/embed`.

    python -m conformance.load request_cost [--rounds 5] [--clients 32,1] [--seconds 3]
    python -m conformance.load asgi_servers [--rounds 5] [--clients 32,1] [--seconds 3]

`request_cost` has ours over a backend that costs nothing, and the floor, uvicorn under an
application that reads the body and answers as many bytes; then what a request costs that is
refused, since no permit is free, to 640 connections that ask again at once. `asgi_servers` has one
Litestar application under uvicorn, granian and hypercorn, as far as they are installed. `x first`
is the median of the rounds' ratios to the first server.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from conformance.load.crowd import Group, crowd, request
from conformance.load.report import medians, paired, ratio, table
from conformance.load.servers import HOST, started
from conformance.small.fake_backend import FakeBackend
from hybridtei.batch import PackedBatch
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.load import default_alias, find_model, text_model
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.outputs import HeadOutputs
from hybridtei.server.app import context_for, create_models_app
from hybridtei.server.http.connection import ports
from hybridtei.server.models import Models
from hybridtei.server.run import run_server
from hybridtei.system import logs
from hybridtei.system.metrics import Registry

ROOT = Path(__file__).parents[2]
UVICORN = "uvicorn --loop uvloop --http httptools --no-access-log --log-level error --port {port}"
ASGI_SERVERS = {
    "uvicorn": f"{UVICORN} litestar_app:app",
    "granian": (
        "granian --interface asgi --loop uvloop --workers 1 --log-level error --port {port} "
        "litestar_app:app"
    ),
    "hypercorn": (
        "hypercorn --worker-class uvloop --log-level error --bind 127.0.0.1:{port} litestar_app:app"
    ),
}
NUMBERS = {"type": lambda given: [int(number) for number in given.split(",")], "default": [32, 1]}
FLAGS = {
    "asgi_servers": {"--rounds": 5, "--clients": NUMBERS, "--seconds": 3.0},
    "request_cost": {"--rounds": 5, "--clients": NUMBERS, "--seconds": 3.0},
}
REFUSED_CLIENTS = 640
GOAL_US, REFUSED_GOAL_US = 200, 20
ASKED = [
    request("/embed", {"inputs": f"what does a hybrid search need {number:05}"})
    for number in range(20_000)
]
# Answers as long as ours: 384 numbers
FLOOR = """
BODY = b"[" + b"0" * 4700 + b"]"
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})
"""
LITESTAR = """
from litestar import Litestar, Request, post
from litestar.response.base import ASGIResponse
@post("/embed", status_code=200)
async def embed(request: Request) -> ASGIResponse:
    await request.body()
    return ASGIResponse(body=b"[" + b"0" * 4700 + b"]", media_type="application/json")
app = Litestar([embed], openapi_config=None)
"""

Cost = dict[str, float]


def measure(
    module: str, apps: str, clients: list[int], seconds: float, status: int = 200
) -> dict[int, Cost]:
    """By number of clients, of one server, started for this. `apps`: the folder of the
    applications."""
    found = {}
    path = os.pathsep.join([apps, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with started(
        [sys.executable, "-m", *module.split()], {**os.environ, "PYTHONPATH": path}
    ) as server:
        # Each client sends its own text, since equal waiting texts are computed once
        for number in clients:
            group = Group(number, ASKED[:number])
            crowd(server.port, [group], 0.7)
            before = server.cpu_seconds()
            (seen,) = crowd(server.port, [group], seconds)
            used, answered = server.cpu_seconds() - before, seen.statuses[status]
            if answered != seen.statuses.total() or not answered:
                sys.exit(f"{module}: expected status {status}, found {dict(seen.statuses)}")
            found[number] = {
                "us CPU a request": used / answered * 1e6,
                "requests/s": answered / seconds,
            }
    return found


def compared(modules: dict[str, str], refuser: str | None, options: argparse.Namespace) -> int:
    """A table of servers by name, including one that refuses everything."""
    with tempfile.TemporaryDirectory() as apps:
        Path(apps, "floor_app.py").write_text(FLOOR)
        Path(apps, "litestar_app.py").write_text(LITESTAR)
        sides = {
            name: partial(measure, one, apps, options.clients, options.seconds)
            for name, one in modules.items()
        }
        if refuser is not None:
            sides["refused"] = partial(
                measure, refuser, apps, [REFUSED_CLIENTS], options.seconds, 429
            )
        runs, rows = paired(options.rounds, sides), {}
    first = next(iter(runs.values()))
    for number in [*options.clients, REFUSED_CLIENTS]:
        for name, found in runs.items():
            if number in found[0]:
                own, base = (
                    [one.get(number, one[min(one)])["us CPU a request"] for one in side]
                    for side in (found, first)
                )
                rows[f"{number} clients / {name}"] = {
                    **medians([one[number] for one in found]),
                    "x first": ratio(own, base),
                }
    table(rows)
    return 0


def asgi_servers(options: argparse.Namespace) -> int:
    installed = {
        name: module for name, module in ASGI_SERVERS.items() if importlib.util.find_spec(name)
    }
    return compared(installed, None, options)


def request_cost(options: argparse.Namespace) -> int:
    print(f"goals: {GOAL_US} us a request, {REFUSED_GOAL_US} us a refusal")
    ours, full = (f"conformance.load.cost {kind} {{port}}" for kind in ("ready", "full"))
    return compared(
        {"floor": f"{UVICORN} --lifespan off floor_app:app", "ours": ours}, full, options
    )


class Ready(FakeBackend):
    """Ready rows: the fake's own arithmetic on 384 columns would cost as much as the server."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._rows = (
            np.random.default_rng(0).standard_normal((512, spec.dense_width)).astype(np.float32)
        )

    def forward(self, batch: PackedBatch, **_: object) -> HeadOutputs:
        return HeadOutputs(dense=self._rows[: len(batch)])


def serve(kind: str, port: int) -> None:
    """Ours in this process, until it is ended: `ready` hands out ready rows, `full` is that without
    a free permit."""
    model, engine, registry = ModelConfig(), EngineConfig(), Registry()
    server, spec = ServerConfig(hostname=HOST, port=port), find_model(model)
    # Each request has its line
    logs.configure(json_output=False, level="info")
    service = EngineService(
        text_model(spec, engine), Ready(spec), engine, budget_tokens=1024, registry=registry
    )
    full = service.admission.inside(service.admission.limit) if kind == "full" else nullcontext()
    with ports(server) as sockets, full:
        models = Models(
            {default_alias(model.model_id): context_for(service, server, model, registry)}
        )
        run_server(create_models_app(models, server), server, sockets)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
