"""A port for metrics alone."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from hybridtei.config import ServerConfig
from hybridtei.server.run import MetricsPort, reserved


def url_of(port: MetricsPort) -> str:
    host, number = port._listening.getsockname()[:2]
    return f"http://{host}:{number}"


def test_it_tells_what_there_is_to_tell_and_nothing_else():
    told = iter(["one 1\n", "two 2\n", "three 3\n"])

    async def tell() -> str:
        return next(told)

    async def scrape() -> None:
        with reserved(ServerConfig(hostname="127.0.0.1", prometheus_port=0)) as port:
            assert port is not None
            async with httpx.AsyncClient(base_url=url_of(port), trust_env=False) as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get("/metrics")
                await port.start(tell)
                first = await client.get("/metrics")
                assert (first.status_code, first.text) == (200, "one 1\n")
                assert first.headers["content-type"] == "text/plain; charset=utf-8"
                assert (await client.get("/")).text == "two 2\n"
                head = await client.head("/metrics")
                assert (head.status_code, head.headers["content-length"], head.text) == (200, "8", "")
                refused = await client.post("/embed", json={"inputs": "x"})
                assert (refused.status_code, refused.headers["allow"], refused.text) == (405, "GET,HEAD", "")
            await port.stop()

    asyncio.run(scrape())


def test_none_is_taken_without_the_flag():
    with reserved(ServerConfig()) as port:
        assert port is None


def test_a_taken_port_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with (
            pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{number}: "),
            reserved(ServerConfig(hostname="127.0.0.1", prometheus_port=number)),
        ):
            pass
