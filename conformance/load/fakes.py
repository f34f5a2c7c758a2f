"""Servers whose model or application costs nothing, for scenarios that measure what is around it; each is a process:

    python -m conformance.load.fakes KIND PORT

KIND `ready` is ours over a backend that hands out ready rows; `full` is the same without a free permit.
"""

import sys
from contextlib import nullcontext

import numpy as np

from conformance.load.servers import HOST
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
from tests.fake_backend import FakeBackend

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


class Ready(FakeBackend):
    """Ready rows: the fake's own arithmetic on 384 columns would cost as much as the server."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._rows = np.random.default_rng(0).standard_normal((512, spec.dense_width)).astype(np.float32)

    def forward(self, batch: PackedBatch, **_: object) -> HeadOutputs:
        return HeadOutputs(dense=self._rows[: len(batch)])


def serve(kind: str, port: int) -> None:
    """In this process, until it is ended."""
    model, engine, registry = ModelConfig(), EngineConfig(), Registry()
    server, spec = ServerConfig(hostname=HOST, port=port), find_model(model)
    logs.configure(json_output=False, level="info")  # each request has its line
    service = EngineService(text_model(spec, engine), Ready(spec), engine, budget_tokens=1024, registry=registry)
    full = service.admission.inside(service.admission.permits) if kind == "full" else nullcontext()
    with ports(server) as sockets, full:
        models = Models({default_alias(model.model_id): context_for(service, server, model, registry)})
        run_server(create_models_app(models, server), server, sockets)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
