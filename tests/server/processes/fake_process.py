"""The command `serve` over the fake backend: `python -m tests.server.processes.fake_process FOLDER
PAUSE [SETTING=VALUE]...`.

PAUSE: how many seconds a pass takes, or a file: passes wait while it is there. The word "duti"
makes its pass fail, and "dura" ends the lanes. Settings: of the engine and the server.
"""

import sys
import time
from pathlib import Path

from conformance.small.fake_backend import FakeBackend
from hybridtei import cli
from hybridtei.cli import serve as serving
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.load import find_model, text_reader
from hybridtei.inference.tasks.base import Model
from hybridtei.server.http.connection import ports
from hybridtei.server.run import run_server
from hybridtei.system import logs
from hybridtei.system.metrics import Registry
from tests.server.live import create_app


def wait(pause):
    if pause.startswith("/"):
        while Path(pause).exists():
            time.sleep(0.005)
    else:
        time.sleep(float(pause))


def serve(folder, pause, settings):
    model = ModelConfig(model_id=folder)
    of_engine = {
        name: value for name, value in settings.items() if name in EngineConfig.__struct_fields__
    }
    of_server = {name: value for name, value in settings.items() if name not in of_engine}
    engine = EngineConfig(**of_engine)
    config = ServerConfig(**{"hostname": "127.0.0.1", "port": 0, **of_server})
    logs.configure(json_output=False, level="info")
    spec, registry = find_model(model), Registry()
    reader = text_reader(spec, engine)
    poison, murder = (
        int(reader.read([word], truncate=True)[0].input_ids[1]) for word in ("duti", "dura")
    )

    def gate(batch):
        wait(pause)
        if (batch.input_ids == murder).any():
            # No lane survives what is no Exception
            raise SystemExit("murder")

    backend = FakeBackend(spec, fail_on=poison, gate=gate)
    service = EngineService(
        Model(spec, reader), backend, engine, budget_tokens=32, registry=registry
    )
    with ports(config) as sockets:
        run_server(create_app(service, config, model, registry=registry), config, sockets)


if __name__ == "__main__":
    folder, pause, *settings = sys.argv[1:]
    pairs = (setting.partition("=") for setting in settings)
    values = {name: int(value) if value.isdigit() else value for name, _, value in pairs}
    # So errors end it as they end the command
    serving.run = lambda _: serve(folder, pause, values)
    sys.exit(cli.main(["serve"]))
