"""A server process over a fake backend with slow passes: `python -m
tests.server.processes.fake_server SECONDS [DRAIN [DELAY]]`."""

import os
import sys
import time

from hybridtei.config import ServerConfig
from hybridtei.server.http.connection import ports
from hybridtei.server.run import run_server
from hybridtei.system import logs
from hybridtei.system.metrics import Registry
from tests.inference.engine import small
from tests.server.live import create_app

if __name__ == "__main__":
    seconds, drain = float(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    delay = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    files = {name: os.environ.get(name.upper()) for name in ("api_key_file", "certfile", "keyfile")}
    numbers = {
        "grpc_port": os.environ.get("GRPC_PORT"),
        "prometheus_port": os.environ.get("METRICS_PORT"),
    }
    ports_of = {name: int(number) for name, number in numbers.items() if number is not None}
    config = ServerConfig(
        hostname="127.0.0.1",
        port=0,
        drain_seconds=drain,
        drain_delay=delay,
        **files,
        **ports_of,
    )
    logs.configure(json_output=False, level="info")
    registry = Registry()
    service = small.service(registry=registry, budget_tokens=32, gate=lambda _: time.sleep(seconds))
    with ports(config) as sockets:
        run_server(create_app(service, config, registry=registry), config, sockets)
