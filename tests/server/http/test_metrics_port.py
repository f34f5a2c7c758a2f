"""A port for metrics alone."""

import re
import socket

import httpx
import pytest

from hybridtei.config import ServerConfig
from hybridtei.server.http.connection import ports
from tests.server.live import process


def metrics_url(running):
    found = re.search(r"Serving metrics: ([\d.]+:\d+)", "".join(running.lines))
    return f"http://{found[1]}"


def test_it_tells_what_there_is_to_tell_and_nothing_else():
    with process(
        ["-m", "tests.server.processes.fake_server", "0"], {"METRICS_PORT": "0"}
    ) as running:
        main = running.wait_ready()
        assert httpx.post(f"{main}/embed", json={"inputs": "x"}).status_code == 200
        with httpx.Client(base_url=metrics_url(running), trust_env=False) as client:
            alias = httpx.get(f"{main}/v1/models").json()["data"][0]["id"]
            for path in ("/metrics", f"/m/{alias}/metrics"):
                told = client.get(path)
                assert (told.status_code, told.headers["content-type"]) == (
                    200,
                    "text/plain; charset=utf-8",
                )
                assert "te_embed_success 1\n" in told.text
            for path in ("/", "/embed", "/health", f"/m/{alias}/info", "/m/nosuch/metrics"):
                assert client.get(path).status_code == 404
            head = client.head("/metrics")
            assert (head.status_code, head.text) == (200, "")
            assert client.post("/embed", json={"inputs": "x"}).status_code == 404
        running.terminate()
        assert running.wait() == 0


def test_both_ports_are_taken_and_refuse_connections_until_a_server_listens():
    with ports(ServerConfig(hostname="127.0.0.1", port=0)) as taken:
        assert len(taken) == 1
    with ports(ServerConfig(hostname="127.0.0.1", port=0, prometheus_port=0)) as taken:
        for one in taken:
            with pytest.raises(ConnectionRefusedError), socket.create_connection(one.getsockname()):
                pass


def test_a_taken_port_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with (
            pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{number}: "),
            ports(ServerConfig(hostname="127.0.0.1", port=0, prometheus_port=number)),
        ):
            pass
